"""Makes the texts of an n-gram for read English.

    apt-get install dict-gcide bible-kjv
    python docs/read_speech.py sentences.txt definitions.txt

Sentences are the quotations of GCIDE, Webster's dictionary of 1913, and the King James Bible; definitions are its other
text. Both in lower case without punctuation, a line each.
"""

import gzip
import re
import subprocess
import sys
import unicodedata
from pathlib import Path


def gcide():
    with gzip.open("/usr/share/dictd/gcide.dict.dz", "rt", errors="replace") as file:
        return file.read()


def quotations():
    """Indented lines that end with --Author, without unreadable characters."""
    for block in re.findall(r"(?:^ {9,}(?!\[)\S.*\n)+", gcide(), re.M):
        found = re.match(r"(.*?)\s+--\s*[A-Z(]", " ".join(block.split()))
        if found and not re.search(r"[?{}\[\]=<>0-9]", found[1].rstrip("?")) and 3 <= len(found[1].split()) <= 60:
            yield found[1]


def definitions():
    """Sentences of entries, without their heads, notes in brackets and numbers."""
    for block in re.split(r"\n\s*\n", gcide()):
        text = re.sub(r"^\S.*?\\[^\\]*\\[^\[]*?(\[[^\]]*\])?\s\s", "", " ".join(block.split("\n")))
        text = re.sub(r"\[[^\]]*\]|\([^)]*\)|--\s*[A-Z][\w. ]*|[{}]|Syn:|\d+\.|\\[^\\]*\\", " ", text)
        if not re.search(r"[?<>=*`]", text):
            yield from re.split(r"[.?!]+[\"')\]]*\s|;\s|--", text + " ")


def verses():
    bible = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return [x.partition(" ")[2] for x in bible.stdout.splitlines()]


def unaccented(text):
    return "".join(x for x in unicodedata.normalize("NFKD", text) if not unicodedata.combining(x))


def plain(text):
    text = re.sub(r"[^a-z' ]+", " ", unaccented(text).lower().replace("’", "'").replace("‘", "'"))
    return " ".join(re.sub(r"(?<![a-z])'|'(?![a-z])", " ", text).split())


def write(path, lines):
    Path(path).write_text("".join(f"{x}\n" for x in lines if len(x.split()) > 2))


if len(sys.argv) != 3:
    sys.exit(__doc__)
write(sys.argv[1], map(plain, [*quotations(), *verses()]))
write(sys.argv[2], map(plain, definitions()))
