"""Writes sentences of Debian's dict-gcide and bible-kjv to a file, a line each, in lower case without punctuation."""

import gzip
import re
import subprocess
import sys
import unicodedata


def quotations(text):
    """Indented lines that end with --Author, without unreadable characters."""
    for block in re.findall(r"(?:^ {9,}(?!\[)\S.*\n)+", text, re.M):
        found = re.match(r"(.*?)\s+--\s*[A-Z(]", " ".join(block.split()))
        if found and not re.search(r"[?{}\[\]=<>0-9]", found[1].rstrip("?")) and 3 <= len(found[1].split()) <= 60:
            yield found[1]


def plain(text):
    text = "".join(x for x in unicodedata.normalize("NFKD", text) if not unicodedata.combining(x)).lower()
    text = re.sub(r"[^a-z' ]+", " ", text.replace("’", "'").replace("‘", "'"))
    return " ".join(re.sub(r"(?<![a-z])'|'(?![a-z])", " ", text).split())


with gzip.open("/usr/share/dictd/gcide.dict.dz", "rt", errors="replace") as file:
    sentences = list(quotations(file.read()))
bible = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
sentences += [x.partition(" ")[2] for x in bible.stdout.splitlines()]
with open(sys.argv[1], "w") as file:
    file.writelines(f"{x}\n" for x in map(plain, sentences) if len(x.split()) > 2)
