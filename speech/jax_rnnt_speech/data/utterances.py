"""The utterances that a corpus lists, and a report of those it leaves out."""

import collections
import re
import threading
from typing import NamedTuple

NAMED = 5  # utterances that are named on the screen for a reason
JOINERS = "\u200c\u200d\u200e\u200f\u061c"  # parts of words, as in Persian, that Python takes for not printable


class Utterance(NamedTuple):
    name: str  # name of the audio file
    frames: int  # frames of its features, at most
    text: str
    speaker: str = ""  # "": unknown
    seconds: float = 0.0  # 0: unknown


def shown(name):
    """Returns the name in one line that every encoding of Unicode can write."""
    return "".join(x if x.isprintable() or x in JOINERS else repr(x)[1:-1] for x in str(name))


def column(name):
    """Returns a name as one column of CTM, which is no comment."""
    return re.sub("^;;", "_;", "_".join(shown(name).split()) or "_")


def listed(what, names, named=NAMED):
    """Yields a line for each reason, with some of its names."""
    for reason, some in names.items():
        more = f", and {len(some) - named} more" if len(some) > named else ""
        yield f"{what}, {reason}: {len(some)} ({', '.join(some[:named])}{more})"


class Report:
    """Names of left-out utterances by reason; `notes` are about those that are not. Threads may add to it."""

    def __init__(self):
        self.names, self.lock, self.seen = collections.defaultdict(list), threading.Lock(), set()
        self.notes = collections.defaultdict(list)  # names of utterances that are used, by the part of them that is not
        self.passing = False  # whether some that are left out may be usable later

    def add(self, reason, name, again=True, passing=False):
        """Adds a name, each time or only once if not `again`."""
        self.put(self.names, reason, name, again)
        self.passing |= passing

    def note(self, text, name, again=True):
        self.put(self.notes, text, name, again)

    def put(self, names, reason, name, again):
        name = shown(name)
        with self.lock:
            if again or (reason, name) not in self.seen:
                names[reason].append(name)
            self.seen.add((reason, name))

    def lines(self, named=NAMED):
        yield from listed("left out", self.names, named)
        yield from listed("used all the same", self.notes, NAMED)

    def summary(self):
        """Returns the end of an error message about the corpus."""
        return "".join(f"; {x}" for x in listed("left out", self.names))

    def write(self, path):
        """Writes all names, one a line after its reason."""
        lines = (f"{reason}\t{name}\n" for reason, names in self.names.items() for name in names)
        path.write_text("".join(lines), "utf-8")
