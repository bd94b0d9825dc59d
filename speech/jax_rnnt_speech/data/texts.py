"""Texts as a training sees them: composed characters, in the form that --normalize gives them."""

import importlib.util
import re
import unicodedata
from pathlib import Path

from jax_rnnt_speech.data import spelling
from jax_rnnt_speech.data.spelling import SPACE
from jax_rnnt_speech.data.tokens import CONTROLS
from jax_rnnt_speech.system import UserError, refuse_if

SAID = "%‰‱٪؉؊&@#/\\*§"  # punctuation that is read aloud, besides digits and symbols
# Letters of scripts that are written without spaces, for a class of characters.
UNSPACED = "\u0e01-\u0e3e\u0e40-\u0e4e\u0e80-\u0ecf\u0edc-\u0edf\u0f00\u0f40-\u0fbc\u1000-\u103f\u1050-\u108f"
UNSPACED += "\u109a-\u109d\u1780-\u17d3\u17dc\u17dd\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff"
UNSPACED += "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
JOINERS = "\u200c\u200d"  # spelling in Persian and in scripts of India
INSIDE = "'·‧״׳"  # within words of Catalan, Hebrew, ...
CURRENCY = "$¢-¥֏؋৲৳৻૱௹฿៛₠-⃏﷼"
APOSTROPHE = re.compile(r"(?<=[^\s(\[])[’‘ʼ´`](?=[^\W_])")
WIDE = re.compile(r"(?<=[０-９])[，．](?=[０-９])")  # within a number
GERSHAYIM = re.compile(r"(?<=[א-ת])\"(?=[א-ת])")
QUOTED = re.compile(r"(?<![^\s(\[])\"([^\"]*)\"(?!\w)|(?<![^\s(\[])'([^']*)'(?!\w)")
EDGES = re.compile(rf"[{INSIDE}]+")
JOINER_EDGES = re.compile(rf"(?<!\S)[{JOINERS}]+|\u200c+(?!\S)")
BETWEEN = re.compile(rf"(?<=[{UNSPACED}])\n+(?=[{UNSPACED}])")
APART = re.compile(
    rf"(?<=\d){SPACE}(?=\d)|(?<=\d)[ {SPACE}](?=[%٪‰؉{CURRENCY}]|°[cf]\b)|(?<=[{CURRENCY}])[ {SPACE}](?=\d)"
)
# Between numbers, this is a minus, a range or a pause.
BOTH = re.compile(rf"(?:(?<=[\d%٪‰؉{CURRENCY}])|(?<=°[cf])) ([-–]) (?=[{CURRENCY}]?\d)")
# Beginnings of parts of a number, or of what may be one.
SIGNED = re.compile(rf"(?<![.,–-])(?:[.,]\d|[-–][.,]?[{CURRENCY}]?\d)")
TOKENS = re.compile(r"([ \n]+)")


def usual(match):
    return unicodedata.normalize("NFKC", match[0])


class Table(dict):
    """Applies a function to each character, for `str.translate`; each is looked at once."""

    def __init__(self, function):
        self.function = function

    def __missing__(self, code):
        self[code] = self.function(chr(code))
        return self[code]


def is_said(x):
    kind = unicodedata.category(x)
    return x in SAID or kind in ("Sc", "Sm", "So") or (kind[0] == "N" and x != "〇") or "🏻" <= x <= "🏿"


def prepared(x):
    """Replaces wide and narrow forms, drops invisible characters but joiners, ends a line at what no number has."""
    kind = unicodedata.category(x)
    if x in "\xa0\u2007\u2009\u202f":
        return SPACE
    if unicodedata.decomposition(x)[:5] in ("<wide", "<narr") and x not in "\uff0c\uff0e\uff1a":
        return prepared(unicodedata.normalize("NFKC", x)) if x != "\u3000" else " "
    if x in "‐‑‒":
        return "-"
    if kind == "Cf" or x == "ـ":  # ـ makes words of Arabic wider
        return x if x in JOINERS or x == "\u180e" else ""
    if kind in ("Ps", "Pe", "Pi", "Pf") or x in "!?;¿¡…—―":
        return "\n"
    return " " if kind[0] in "ZC" else x


def cleaned(x):
    """Ends a line at punctuation. Armenian has three marks on the vowels of its words."""
    if x in "\u055b\u055c\u055e":
        return ""
    return x if x in INSIDE + JOINERS or is_said(x) or unicodedata.category(x)[0] in "LMN " or x == " " else "\n"


PREPARED, CLEANED, MARKS = Table(prepared), Table(cleaned), Table(lambda x: x if is_said(x) else " ")


def has_said(text):
    return bool(text.translate(MARKS).strip())


def lowered(language=""):
    """Returns a function that puts a text in the lower case of a language. İ leaves no dot above an i."""

    def lower(text):
        text = text.replace("İ", "i")
        return (text.replace("I", "ı") if language in ("tr", "az") else text).lower()

    return lower


def clean(text):
    """Returns a text, without digits and signs that are read aloud, without its punctuation."""

    def kept(match):
        inner = text[: match.start()][-1:].strip() and text[match.end() :][:1].strip()
        return match[0] if inner else "\n"

    text = text.translate(CLEANED)
    return EDGES.sub(kept, text)


def core_of(token, ordinals):
    """Returns a token without the punctuation around it. `ordinals`: a point behind a number may make it one."""
    start, end = 0, len(token)
    while start < end and CLEANED[ord(token[start])] in ("\n", *INSIDE) and not SIGNED.match(token, start):
        start += 1
    while start < end and CLEANED[ord(token[end - 1])] in ("\n", *INSIDE):
        last, digit = token[end - 1], token[end - 2 : end - 1].isdigit()
        if digit and (last in "-–'\"′″" or (last == "." and ordinals)):
            break
        end -= 1
    return token[start:end]


def basic(language):
    """Returns a function to lower case, with words for what is sure to be read aloud, and punctuation only in words."""
    language = spelling.language_of(language, f"--normalize basic:{language}")
    lower, tokens = lowered(language.base), TOKENS
    if language.attached:
        script = UNSPACED + "\u1100-\u11ff\uac00-\ud7af" * (language.base == "ko")
        tokens = re.compile(rf"([ \n]+|(?<=[{script}])(?=[^ \n{script}])|(?<=[^ \n{script}])(?=[{script}]))")

    def spoken(token, more):
        core = core_of(token, language.dotted and more)
        words = language.read(core)
        return lower(core) if words is None else clean(lower(APOSTROPHE.sub("'", words)))

    def read(text):
        text = QUOTED.sub(r"\n\1\2\n", text)
        text = APART.sub("\ufffe", text).replace(SPACE, " ").replace("\ufffe", SPACE)
        parts = tokens.split(language.grouped(BOTH.sub(r"\1", text)))
        last = max((i for i, x in enumerate(parts) if any(y.isalnum() for y in x)), default=-1)
        parts = [spoken(x, i < last) if has_said(x) else clean(x) for i, x in enumerate(parts)]
        return "".join(parts).replace(SPACE, " ").replace("\u2007", " ")

    def normalize(text):
        if not text.isascii() or "`" in text:
            text = GERSHAYIM.sub("״", APOSTROPHE.sub("'", WIDE.sub(usual, text)))
        text = lower(text.translate(PREPARED))
        text = text if text.isascii() else JOINER_EDGES.sub("", text)
        text = read(text) if has_said(text) else clean(text.replace(SPACE, " "))
        return text if text.isascii() else JOINER_EDGES.sub("", BETWEEN.sub("", text))

    def settled(text):
        """Reads a text until nothing changes: once a part is gone, its neighbours may have a reading."""
        for _ in range(4):
            before, text = text, " ".join(normalize(text).split())
            if text == before or not has_said(text):
                break
        return text

    return settled


def unread(text):
    """Returns parts of a normalised text that are not read aloud, though they have a digit or a sign that is."""
    return [x for x in re.split(rf"[\s{UNSPACED}]+", text) if has_said(x)] if has_said(text) else []


def loaded(name, option="--normalize", others="none, basic, basic:LANGUAGE or "):
    """Returns the function that FILE:FUNCTION names, the value of an option that may have others."""
    file, _, function = name.rpartition(":")
    refuse_if(not Path(file).is_file(), f"{option} must be {others}FILE:FUNCTION of a Python file, got {name}")
    spec = importlib.util.spec_from_file_location(f"jax_rnnt_speech_{option.strip('-')}", file)
    refuse_if(spec is None, f"{option} {name}: {file} must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{option} {name}: {file} cannot be imported: {error!r}") from None
    refuse_if(not callable(getattr(module, function, None)), f"{option} {name}: {file} has no function {function}")
    return getattr(module, function)


def is_built_in(name):
    return name.partition(":")[0] in ("none", "basic")


def normalizer(name, lower=False):
    """Returns a function that puts a text in NFC, trims and joins its spaces, and changes it as `name` says."""
    kind, _, language = name.partition(":")
    if not is_built_in(name):
        change, language = loaded(name), ""
    elif kind == "basic":
        change = basic(language or "en")
    else:
        change = str
    if kind == "none" and language:
        language = spelling.locale_of(language, f"--normalize {name}").language
    lowercase = lowered(language[:2] if lower else "")

    def normalize(text):
        text = unicodedata.normalize("NFC", text.translate(CONTROLS))
        text = text if is_built_in(name) else " ".join(text.split())
        try:
            changed = change(text)
        except Exception as error:
            raise UserError(f"--normalize {name} fails on {text[:100]!r}: {error!r}") from None
        if not isinstance(changed, str):
            raise UserError(f"--normalize {name} must return a string, got {changed!r} of {text[:100]!r}"[:300])
        changed = lowercase(changed) if lower else changed
        return unicodedata.normalize("NFC", " ".join(changed.split()))

    return normalize


def absolute(name):
    """Returns the same --normalize for any folder."""
    file, colon, function = name.rpartition(":")
    built_in = is_built_in(name) or not colon or not Path(file).is_file()
    return name if built_in else f"{Path(file).resolve()}:{function}"
