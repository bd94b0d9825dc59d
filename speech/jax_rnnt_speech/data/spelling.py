"""Spells numbers in the words of a language. Babel knows how it writes them, unicode-rbnf the words, both from CLDR.

A text that may be read aloud in several ways is not read: leading zeros, times, dates, ranges, money, fractions, units.
"""

import functools
import itertools
import re
import string
from decimal import Decimal

from unicode_rbnf import RbnfEngine
from unicode_rbnf.engine import NoRuleForNumberError, RbnfError

from jax_rnnt_speech.system import UserError, refuse_if

SPACE = "\u202f"  # between the digits of one number, and before its unit; it replaces all no-break spaces
# Above them, unicode-rbnf has the same words for different numbers.
LIMITS = {"ak": 10**8, "ff": 10_001, "ga": 20_000, "lt": 100_000, "sl": 3000, "zu": 10_001}
DIGITS = "\ufdd0"  # in place of the digits of an ordinal
UNITS = {"%": "concentr-percent", "٪": "concentr-percent", "‰": "concentr-permille", "؉": "concentr-permille",
         "°c": "temperature-celsius", "°f": "temperature-fahrenheit"}  # fmt: skip
WITHOUT_SPACES = {"ja", "km", "lo", "my", "th", "yue", "zh"}
ATTACHED = WITHOUT_SPACES | {"ko"}  # where letters touch the digits of a number
ENDINGS = {"fr": {"ère": "re", "ème": "e"}}  # endings of ordinals, besides those of CLDR
OTHER_FORMS = re.compile("year|verbose|financial|alternate|days|ordinal")  # of numbers, which have other uses


def locale_of(name, option):
    """Returns Babel's locale of de, de_CH, pt-BR, zh-Hant, ..."""
    from babel import Locale, UnknownLocaleError

    try:
        return Locale.parse(name.replace("-", "_"))
    except (ValueError, UnknownLocaleError):
        raise UserError(f"{option} has no language that CLDR knows") from None


def language_of(name, option):
    """Returns the Language of a name, or raises an error that lists all names."""
    supported = RbnfEngine.get_supported_languages()
    try:
        x = locale_of(name, option)
    except UserError:
        x = None
    parts = [x and x.language.replace("nb", "no"), x and x.script, x and x.territory]
    forms = ["_".join(filter(None, some)) for some in (parts, parts[:2], parts[::2], parts[:1])]
    chosen = next((form for form in forms if form in supported), None)
    refuse_if(not chosen, f"{option} has no numbers in words; languages: {', '.join(supported)}")
    return Language(chosen, x)


class Language:
    """Reads texts with digits in a language. Its functions return None where they are not sure."""

    def __init__(self, name, locale):
        self.name, self.locale, self.base = name, locale, name.partition("_")[0]
        self.engine = RbnfEngine.for_language(name)
        self.attached, self.without_spaces = self.base in ATTACHED, self.base in WITHOUT_SPACES
        symbols, native = locale.number_symbols, locale.other_numbering_systems.get("native")
        usual, native = ((symbols.get(x) or {}) for x in ("latn", native))
        pair = usual["group"], usual["decimal"]
        self.spaced = not pair[0].strip()  # groups of digits are written apart
        own, arabic = (native.get("group", pair[0]), native.get("decimal", pair[1])), ("٬", "٫")
        pairs = (pair, "[0-9]"), (arabic, "[0-9]"), (own, r"\d"), (arabic, r"\d")
        every = [(digit, y) for x, digit in pairs for y in patterns(*x, digit, locale)]
        self.patterns = [[x for digit, x in every if (digit == "[0-9]") == latin] for latin in (False, True)]
        self.percent_first = locale.percent_formats[None].pattern.startswith("%")
        marks = symbols["latn"]["decimal"], locale_of(name, name).number_symbols["latn"]["decimal"]
        self.point = self.find_point() if marks[0] == marks[1] else None  # es-MX writes a point, and es says a comma
        self.minus = self.find_minus()
        self.digits = self.engine if name == self.base else RbnfEngine.for_language(self.base)
        shown = [x for x in self.digits.rulesets if x.startswith("digits-ordinal")]
        self.dotted = not shown  # 3. is CLDR's ordinal of a language without rules
        kinds = {x: x.replace("digits", "spellout") for x in shown}
        usual = {x: kind for x, kind in kinds.items() if kind in self.engine.rulesets}
        self.ordinals = {x: kind for x, kind in usual.items() if len(usual) == 1 or x != "digits-ordinal"}
        for form in ("0", "#,##0", "#,##,##0"):  # numbers as digits, which unicode-rbnf lacks
            self.digits.add_rule("0", DIGITS, form)
        self.cardinal, self.read = (functools.lru_cache(10_000)(x) for x in (self.cardinal, self.read))

    def said(self, ruleset, number):
        """Returns the words of a rule; some numbers have none."""
        words = "".join(self.engine.iter_format_number(number, ruleset)).replace("\xad", "")
        if not words.strip() or DIGITS in words:
            raise NoRuleForNumberError(words)
        return words.replace("・", "点")  # a Japanese point is read aloud

    def cardinal(self, number):
        """Returns the words of a number from 0 on."""
        try:
            ruleset = self.engine.format_number(number).text_ruleset
            return self.said(ruleset, number) if number < LIMITS.get(self.name, 10**18) else None
        except NoRuleForNumberError:  # the number is too large
            return None

    def forms(self, number):
        """Returns the words of a number for all genders and cases."""
        texts = self.engine.format_number(number).text_by_ruleset.items()
        return {words for ruleset, words in texts if not OTHER_FORMS.search(ruleset)}

    def find_point(self):
        """Returns the words between number and decimals, which are read one by one. Some rules spell all as zero."""
        for ruleset in sorted(self.engine.rulesets, key=len):
            usual = ruleset.startswith("spellout") and not OTHER_FORMS.search(ruleset)
            if usual and not self.engine.rulesets[ruleset].is_private:
                framings = set()
                for whole, part in ((2, 3), (4, 5), (6, 7)):
                    try:
                        words = self.said(ruleset, Decimal(f"{whole}.{part}"))
                        before, after = self.said(ruleset, whole), self.said(ruleset, part)
                    except (RbnfError, ValueError):
                        break
                    framed = words.startswith(before) and words.endswith(after)
                    framings.add(words[len(before) : -len(after)] if framed else "")
                if len(framings) == 1 and framings != {""}:
                    return framings.pop()
        return None

    def find_minus(self):
        try:
            words, plain = (self.engine.format_number(x).text for x in (-5, 5))
        except NoRuleForNumberError:
            return None
        return words.removesuffix(plain) if words.endswith(plain) else None

    def value(self, text):
        """Returns (whole number, its decimals or None) of what is written without a sign."""
        for pattern in self.patterns[bool(re.search("[0-9]", text))]:
            if match := pattern.fullmatch(text):
                whole = re.sub(r"\D", "", match["whole"])
                if len(whole) == 1 or int(whole[0]):
                    return int(whole), match["part"]
        return None

    def number(self, text):
        """Returns the words of a number, perhaps with a minus, and per cent, per mille or a temperature."""
        sign = text[:1] in ("-", "\u2212")
        text, unit = text[sign:], ""
        if self.percent_first and text[:1] == "%":
            text, unit = text[1:], "%"
        for mark in () if unit else UNITS:
            if text.endswith(mark):
                text, unit = text.removesuffix(mark).removesuffix(SPACE), mark
        value = self.value(text)
        words = value and self.cardinal(value[0])
        if words is None or (sign and not self.minus):
            return None
        whole, part = value
        if part:
            digits = [self.cardinal(int(x)) for x in part]
            if not self.point or None in digits:
                return None
            words += self.point + ("" if self.without_spaces else " ").join(digits)
        words = self.minus + words if sign else words
        if unit and len(self.forms(whole)) != 1:
            return None
        number = Decimal(f"{whole}.{part}") if part else Decimal(whole)
        return self.measured(-number if sign else number, words, UNITS[unit]) if unit else words

    def measured(self, number, words, unit):
        """Returns the words with a unit behind or before them, where CLDR has a word for it."""
        from babel import numbers, units

        text = units.format_unit(number, unit, "long", locale=self.locale)
        before, written, after = text.partition(numbers.format_decimal(number, locale=self.locale))
        named = any(x.isalpha() for x in before + after) and not set(before + after) & {*string.punctuation} - {"-"}
        return before + words + after if written and named else None

    def ordinal(self, text):
        """Returns 1st, 2e, 3º, as CLDR writes a language's ordinals, in words, if all such forms have the same."""
        match = re.fullmatch(r"([^\W\d]*)([1-9]\d*)(\D*)", text)
        if not match or not (match[1] or match[3]):
            return None
        ending = ENDINGS.get(self.base, {}).get(match[3], match[3])
        written, number = f"{match[1]}{DIGITS}{ending}".replace(".", ""), int(match[2])
        words = set()
        for ruleset, kind in self.ordinals.items():
            try:
                if "".join(self.digits.iter_format_number(number, ruleset)).replace(".", "") == written:
                    words.add(self.said(kind, number))
            except RbnfError:
                return None
        return words.pop() if len(words) == 1 else None

    def compound(self, text):
        """Returns the words of words and numbers with hyphens: COVID-19. 10-летний is one word, 10-year three."""
        first, *rest = text.split("-")
        if not rest or not (is_word(first) or self.base == "en"):
            return None
        words = [x if is_word(x) else self.number(x) for x in (first, *rest)]
        numbers = [not is_word(x) for x in (first, *rest)]
        return None if None in words or any(map(all, itertools.pairwise(numbers))) else " ".join(words)

    def read(self, text):
        """Returns the words of a text with a digit or a sign that is read aloud."""
        words = self.number(text) or self.ordinal(text) or self.compound(text)
        return words and words.replace("\u200b", "").replace(" " if self.without_spaces else "\u200b", "")

    def grouped(self, text):
        """Joins digits that are written with plain spaces to one number, where the language does so for sure.

        601 123 456 may be a telephone number, and 12 000 in English one number or two. Such groups are joined by a sign
        that no number has.
        """

        def join(match):
            groups = match[0].split(" ")
            threes = [len(x) == 3 for x in groups]
            if self.spaced and all(threes[1:]) and len(groups[0]) <= 3 and not (len(groups) > 2 and threes[0]):
                return SPACE.join(groups)
            return "\u2007".join(groups) if any(threes[1:]) else match[0]

        return re.sub(rf"(?<![\d.,'/:])(?<!\d{SPACE})(?<![^\W\d]-)\d+(?: \d+)+(?!{SPACE}?\d)", join, text)


def patterns(group, mark, digit, locale):
    """Yields patterns of numbers with a sign between groups of digits, and one before decimals."""
    group = re.escape(SPACE if not group.strip() else "'" if group == "\u2019" else group)
    ends = rf"(?:{re.escape(mark)}(?P<part>{digit}+))?"
    groups = rf"{digit}{{1,3}}(?P<group>[{SPACE}{group}]){digit}{{3}}(?:(?P=group){digit}{{3}})*"
    yield re.compile(f"(?P<whole>{groups}|{digit}+){ends}")
    if locale.decimal_formats[None].grouping == (3, 2):  # lakhs and crores
        yield re.compile(rf"(?P<whole>{digit}{{1,2}}(?:{group}{digit}{{2}})*{group}{digit}{{3}}){ends}")


def is_word(text):
    return bool(text) and all(x.isalpha() or x == "'" for x in text)
