"""Texts as a training sees them: composed characters, and what --normalize makes of them."""

import importlib.util
import re
import unicodedata
from pathlib import Path

from unicode_rbnf import RbnfEngine
from unicode_rbnf.engine import NoRuleForNumberError

from jax_rnnt_speech.config import UserError

# Languages that write 1,234.5, where others write 1.234,5.
POINT = {"am", "cy", "en", "fil", "ga", "he", "hi", "ja", "ko", "lo", "ms", "mt", "my", "ne", "sw", "ta", "th"}
POINT |= {"yue", "zh"}


def basic(language):
    """Lower case, numbers in words of a language, no punctuation but the apostrophe within a word."""
    if language not in RbnfEngine.get_supported_languages():
        known = ", ".join(RbnfEngine.get_supported_languages())
        raise UserError(f"--normalize basic:{language} has no numbers in words; languages: {known}")
    engine = RbnfEngine.for_language(language)
    group, mark = ",." if language.split("_")[0] in POINT else ".,"
    number = re.compile(rf"(?:\d{{1,3}}(?:[{group}]\d{{3}})+(?![{group}]?\d)|\d+)(?:[{mark}]\d+)?")

    def spelled(match):
        try:
            words = engine.format_number(match[0].replace(group, "").replace(mark, ".")).text
            # Soft hyphens mark where a long word may be broken. A Japanese point is read aloud.
            return f" {words} ".replace("\xad", "").replace("・", "点")
        except NoRuleForNumberError:  # it is too large
            return " ".join(spelled(x) for x in re.finditer(r"\d", match[0]))

    def normalize(text):
        text = number.sub(spelled, text).lower().replace("\u2019", "'")
        text = re.sub(r"(?<!\w)'|'(?!\w)", " ", text)
        return "".join(x if x == "'" or unicodedata.category(x)[0] in "LMNZ" else " " for x in text)

    return normalize


def loaded(name, option="--normalize", others="none, basic, basic:LANGUAGE or "):
    """The function that FILE:FUNCTION names, the value of an option that may have others."""
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise UserError(f"{option} must be {others}FILE:FUNCTION of a Python file, got {name}")
    spec = importlib.util.spec_from_file_location(f"jax_rnnt_speech_{option.strip('-')}", file)
    if spec is None:
        raise UserError(f"{option} {name}: {file} must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{option} {name}: {file} cannot be imported: {error!r}") from None
    if not callable(getattr(module, function, None)):
        raise UserError(f"{option} {name}: {file} has no function {function}")
    return getattr(module, function)


def is_built_in(name):
    return name in ("none", "basic") or name.startswith("basic:")


def normalizer(name, lower=False):
    """Function of a text: in NFC, without spaces at its ends and several in a row, and as `name` says."""
    if name == "none":
        change = str
    elif is_built_in(name):
        change = basic(name.partition(":")[2] or "en")
    else:
        change = loaded(name)

    def normalize(text):
        text = " ".join(unicodedata.normalize("NFC", text).split())
        try:
            changed = change(text)
        except Exception as error:
            raise UserError(f"--normalize {name} fails on {text[:100]!r}: {error!r}") from None
        if not isinstance(changed, str):
            raise UserError(f"--normalize {name} must return a string, got {changed!r} of {text[:100]!r}"[:300])
        changed = changed.lower() if lower else changed
        return unicodedata.normalize("NFC", " ".join(changed.split()))

    return normalize


def absolute(name):
    """The same --normalize from any folder."""
    file, colon, function = name.rpartition(":")
    known = is_built_in(name) or not colon or not Path(file).is_file()
    return name if known else f"{Path(file).resolve()}:{function}"
