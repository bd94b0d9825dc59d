"""Finds labels that write a script, or some characters: masks for the search. Scripts are Unicode's, by fontTools.

Characters without a script of their own, such as digits and punctuation, belong to all. CLDR has languages' scripts.
"""

import itertools
import unicodedata

import babel
import numpy as np
from babel.core import get_global
from fontTools import unicodedata as unicode

from jax_rnnt_speech.data.tokens import BYTE, SILENT
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.system import UserError

SHARED = "Zyyy", "Zinh"  # Common and Inherited
SEVERAL = {"Jpan": ("Hani", "Hira", "Kana"), "Kore": ("Hang", "Hani"), "Hans": ("Hani",), "Hant": ("Hani",),
           "Hrkt": ("Hira", "Kana"), "Hanb": ("Hani", "Bopo")}  # fmt: skip
BYTES = range(0xDC80, 0xDD00)  # surrogate escapes: a byte of a character that a label does not write alone


def codes(names):
    """Returns ISO 15924's codes of scripts by their names or codes, as in `latin,Cyrl`."""
    chosen = []
    for name in names.split(","):
        wanted = name.strip().replace(" ", "_").lower()
        codes = {x.lower(): code for code, x in unicode.Scripts.NAMES.items()}
        codes |= {code.lower(): code for code in (*unicode.Scripts.NAMES, *SEVERAL)}
        if wanted not in codes:
            raise UserError(f"--script {shown(name)}: expected names of scripts such as latin,cyrillic, or their codes")
        chosen += SEVERAL.get(codes[wanted], (codes[wanted],))
    return chosen


def subtags(language):
    """Returns a language's code, and what follows it, from a tag such as ru, sr-Latn or rus, or an English name."""
    text = language.strip().replace("_", "-").lower()
    named = {x.lower(): code for code, x in babel.Locale("en").languages.items()}
    code, *rest = named.get(text, text).replace("_", "-").split("-")
    return get_global("language_aliases").get(code, code), rest


def scripts_of_language(language):
    """Returns the scripts of a language, by a code such as ru, sr-Latn or rus, or its English name; None for none."""
    code, rest = subtags(language)
    script = next((x.capitalize() for x in rest if len(x) == 4), None)
    if script is None:
        likely = get_global("likely_subtags")
        places = [x.upper() for x in rest if len(x) == 2]
        tag = next((likely[x] for x in ("_".join([code, *places]), code) if x in likely), None)
        if tag is None or code in ("und", "mul", "mis", "zxx"):
            return None
        script = tag.split("_")[1]
    elif code not in get_global("likely_subtags"):
        return None
    chosen = SEVERAL.get(script, (script,))
    return chosen if all(x in unicode.Scripts.NAMES for x in chosen) else None


def mask_of_scripts(tokens, classes, scripts):
    """Returns bool [classes]: labels with characters of these scripts alone."""
    wanted = {*scripts, *SHARED}
    written = {unicode.script(x) for text in tokens.texts for x in text}
    # Bytes are needed for a script of which no label writes a character.
    bare = [x for x in scripts if x not in written]
    missing = set(characters_of(bare)) if has_bytes(tokens) else set()
    if lost := [x for x in bare if not any(unicode.script(y) == x for y in missing)]:
        names = ", ".join(unicode.Scripts.NAMES[x].replace("_", " ") for x in lost)
        raise UserError(f"the model's vocabulary has no label of the script {names}")
    return mask(tokens, classes, lambda x: unicode.script(x) in wanted, missing)


def characters_of(scripts):
    """Yields all characters of some scripts."""
    ends = [*unicode.Scripts.RANGES[1:], 0x110000]
    for begin, end, script in zip(unicode.Scripts.RANGES, ends, unicode.Scripts.VALUES):
        if script in scripts:
            yield from map(chr, range(begin, end))


def mask_of_characters(tokens, classes, characters):
    """Returns bool [classes]: labels with these characters alone, and what separates words."""
    wanted = {*unicodedata.normalize("NFC", characters)} - {" "}
    missing = wanted - {text.replace(tokens.separator, "") for text in tokens.texts}
    if missing and not has_bytes(tokens):
        raise UserError(f"--only-characters: no label of the model's vocabulary is {shown(' '.join(sorted(missing)))}")
    return mask(tokens, classes, wanted.__contains__, missing)


def has_bytes(tokens):
    return any(map(BYTE.fullmatch, tokens.pieces)) or any(ord(x) in BYTES for text in tokens.texts for x in text)


def mask(tokens, classes, good, missing):
    """Allows labels with only good characters. Those with bytes stay where missing characters need them."""
    parts = set()
    for x in missing:
        data = x.encode().decode("ascii", "surrogateescape")
        parts |= {data[i:j] for i in range(len(data)) for j in range(i + 1, len(data) + 1)}
    allowed = np.ones(classes, bool)
    for i, text in enumerate(tokens.texts):
        if number := BYTE.fullmatch(tokens.pieces[i]):
            allowed[i] = bytes.fromhex(number[1]).decode("ascii", "surrogateescape") in parts
            continue
        text = "" if text in SILENT else text.replace(tokens.separator, "")
        runs = ("".join(x) for of_bytes, x in itertools.groupby(text, lambda x: ord(x) in BYTES) if of_bytes)
        others = (x for x in text if ord(x) not in BYTES)
        allowed[i] = i != tokens.unknown and all(map(good, others)) and all(run in parts for run in runs)
    return allowed
