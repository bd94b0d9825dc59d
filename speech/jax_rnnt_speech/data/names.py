"""Names of recordings, compared in one way wherever two of them meet, and names of files that are no data.

Macs write accents as characters of their own, most tools do not: names are compared in NFC. Folders are a part of a
name, as far as both of two names have them.
"""

import collections
import functools
import os
import re
import unicodedata
from pathlib import Path

# The suffixes of the forms that `audio` reads, without those of pictures or subtitles.
SUFFIXES = {".3g2", ".3gp", ".aac", ".ac3", ".aif", ".aifc", ".aiff", ".amr", ".ape", ".asf", ".au", ".avi", ".caf",
            ".eac3", ".ec3", ".f4v", ".flac", ".flv", ".ism", ".isma", ".ismv", ".m2a", ".m2ts", ".m4a", ".m4b",
            ".m4v", ".mk3d", ".mka", ".mkv", ".mov", ".mp2", ".mp3", ".mp4", ".mpa", ".mpeg", ".mpg", ".mts",
            ".nist", ".oga", ".ogg", ".opus", ".psp", ".snd", ".sph", ".ts", ".tta", ".voc", ".w64", ".wav",
            ".webm", ".wma", ".wmv", ".wv"}  # fmt: skip
# Names that Macs, network drives and archivers put next to the files of a person.
FOLDERS = r"PaxHeaders?(?:\.\d+)?|__MACOSX|\.AppleDouble|\.Trashes|\.Spotlight-V100|\.fseventsd|@eaDir"
HIDDEN = re.compile(rf"(?:^|/)(?:\._[^/]*$|\.DS_Store$|(?:{FOLDERS})/)")


def composed(name):
    """Returns the one form in which names are compared."""
    return unicodedata.normalize("NFC", name)


def is_hidden(name):
    """Returns True if a file, by its name within a folder or archive, was put there by a system and not by a person."""
    return HIDDEN.search(str(name)) is not None


def listing(folder):
    """({names of a folder's files as they are compared: as they are}, {those without suffixes and capitals: some})."""
    try:
        return listed(folder, os.stat(folder).st_mtime_ns)
    except (OSError, ValueError):
        return {}, {}


@functools.lru_cache(16)
def listed(folder, _changed):
    files, stems = {composed(x): x for x in os.listdir(folder)}, collections.defaultdict(list)
    for x in files:
        stems[os.path.splitext(x)[0].lower()].append(x)
    return files, stems


def actual(path):
    """Returns the path with its accents in the form that they have on disk, if something is there; else unchanged."""
    path = Path(path)
    if str(path).isascii() or exists(path):
        return path
    place = Path()
    for part in path.parts:
        exact = place / part
        place = exact if part == ".." or exists(exact) else place / listing(place)[0].get(composed(part), part)
    return place


def exists(path):
    try:
        return os.path.lexists(path)
    except ValueError:  # for characters that no name can have
        return False


def parts(name):
    """Returns (folders, last part) of a name."""
    *folders, base = [x for x in composed(str(name)).split("/") if x not in ("", ".")] or [""]
    return tuple(folders), base


def stem(name):
    """Returns the name without its suffix."""
    folders, base = parts(name)
    return "/".join((*folders, base.rpartition(".")[0] if "." in base else base))


class Names:
    """Recordings by their names. a/b.wav is found as b.wav, as a/b and as x/a/b.wav, but never as c/b.wav."""

    def __init__(self):
        self.by_last = collections.defaultdict(list)  # by the last part, and by that without its suffix

    def add(self, name, recording):
        named = *parts(name), recording
        for key in {named[1], named[1].rpartition(".")[0] if "." in named[1] else named[1]}:
            self.by_last[key].append(named)

    def find(self, name, whole=False):
        """Returns the recordings that the name fits best: none, one, or several if it does not say which.

        With `whole`, the name has all its folders and no suffix, as an identifier has.
        """
        folders, base = parts(name)
        stem, dot, suffix = base.rpartition(".")
        if whole:
            fits = [(0, x) for x in self.by_last.get(base, ()) if x[0] == folders and x[1] != base]
        else:
            candidates = (
                self.by_last.get(base) or (dot and f".{suffix.lower()}" in SUFFIXES and self.by_last.get(stem)) or ()
            )
            fits = [(rank, x) for x in candidates if (rank := agreement((folders, base), x)) is not None]
        best = max((rank for rank, _ in fits), default=None)
        return list(dict.fromkeys(x[2] for rank, x in fits if rank == best))

    def namesakes(self, name):
        """Returns True if a recording has the last part of the name, in whatever folder."""
        base = parts(name)[1]
        return base in self.by_last or base.rpartition(".")[0] in self.by_last


def agreement(wanted, other):
    """Returns how well two names agree, as something that is greater for better ones; None if their folders differ."""
    few = min(len(wanted[0]), len(other[0]))
    if few and wanted[0][-few:] != other[0][-few:]:
        return None
    return few, len(wanted[0]) == len(other[0]), wanted[1] == other[1]
