"""Words with times as the text of a CTM file (NIST) or a TextGrid (Praat), and as objects of JSON."""

import math
import tempfile
import unicodedata
from pathlib import Path

SECOND = 1_000_000  # microseconds, in which files have their times
# Requirements for a text, by its form.
FORMS = {
    "line": "be without line breaks, control characters, byte order marks and lone surrogates",
    "word": "be without line breaks, control characters, byte order marks and lone surrogates, and not empty",
    "lines": "be lines that are not empty, without control characters, byte order marks and lone surrogates",
    "column": "be without white space and not empty",
}


def ctm(name, words, channel="1"):
    """Returns a line ``name channel start duration text confidence`` for each word of a recording, in seconds.

    The last column is missing where the confidence is None. Numbers have six decimals. Start and end are rounded, so a
    word that begins where another one ends does so in the file too: its start is the other's start plus duration, digit
    by digit.
    """
    for what, x in (("names of recordings", name), ("channels", channel)):
        check_text(x, what, "column")
    if name.startswith(";;"):
        raise ValueError(f"names of recordings must not begin with ';;', as comments of CTM do, got {name!r}")
    lines = []
    for start, end, text, sure in in_units(words, SECOND, f"words of {name!r}", "column"):
        columns = [name, channel, f"{start / SECOND:.6f}", f"{(end - start) / SECOND:.6f}", text]
        lines.append(" ".join(columns if sure is None else [*columns, f"{sure:.6f}"]) + "\n")
    return "".join(lines)


def objects(words):
    """Returns words as `json.dump` takes them, with times in seconds to the microsecond."""
    return [
        {"word": text, "start": start / SECOND, "end": end / SECOND, "confidence": sure}
        for start, end, text, sure in in_units(words, SECOND, "words", "line")
    ]


def stretches(times):
    """Returns [begin, end) in seconds as `json.dump` takes them."""
    return [{"start": round(a, 3), "end": round(b, 3)} for a, b in times]


def textgrid(tiers, seconds):
    """Returns the text of a TextGrid of one recording that lasts so long, with the words of each tier by its name.

    Times are rounded to microseconds, and gaps become empty intervals. White space at the ends of a text is left out,
    and so are confidences, for which the format has no place. The end of the recording ends the last word.
    """
    from praatio import textgrid as praat

    grid = praat.Textgrid()
    for name, words in tiers.items():
        check_text(name, "names of tiers", "word")
        found = in_units(words, SECOND, f"words of {name!r}", "line", seconds)
        entries = [(start / SECOND, min(end / SECOND, seconds), text) for start, end, text, _ in found]
        grid.addTier(praat.IntervalTier(name, entries, 0, seconds))
    with tempfile.TemporaryDirectory() as folder:  # praatio writes into paths alone
        path = Path(folder) / "grid"
        grid.save(str(path), format="long_textgrid", includeBlankSpaces=True, reportingMode="error")
        return path.read_text("utf-8")


def in_units(words, unit, what, form, limit=math.inf):
    """Returns [(start, end, text, confidence)] of Intervals, with times in whole units, of which a second has `unit`.

    Raises a ValueError where a file cannot hold them; `what` they are called in it. Times are rounded first and
    compared then, so times that are valid here are valid in the file. `form` is a key of `FORMS`. `limit` is the second
    before which each one must begin.
    """
    found, before = [], 0
    for x in words:
        check_text(x.text, f"texts of {what}", form)
        edges = unit * float(x.start), unit * float(x.end)
        start, end = map(round, edges) if all(map(math.isfinite, edges)) else (-1, -1)
        if not (before <= start < unit * limit - 0.5 and start < end):
            rule = f"be finite, in order without overlap, 1/{unit:,} s long or more and begin in [0, {limit})"
            raise ValueError(f"{what} must {rule}, got {x!r}")
        sure = None if x.confidence is None else float(x.confidence)
        if sure is not None and not 0 <= sure <= 1:
            raise ValueError(f"confidences of {what} must be in [0, 1] or None, got {x!r}")
        found.append((start, end, x.text, sure))
        before = end
    return found


def check_text(text, what, form):
    """Raises an error if a line of a file, lines or a column of it cannot hold this text."""
    lines = text.split("\n") if form == "lines" else [text]
    if any(unicodedata.category(x) in ("Cc", "Cs", "Zl", "Zp") or x == "\ufeff" for line in lines for x in line):
        raise ValueError(f"{what} must {FORMS['line' if form == 'column' else form]}, got {text!r}")
    empty = form in ("word", "lines") and not all(map(str.strip, lines))
    if empty or (form == "column" and text.split() != [text]):
        raise ValueError(f"{what} must {FORMS[form]}, got {text!r}")
