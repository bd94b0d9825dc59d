"""Transcribes many recordings of any length, in batches.

Batches of recordings of equal length waste no padding, so recordings are sorted first. Sorting all of
them would hold all their samples in memory, and texts would come in another order. So as many are read as have `HELD`
frames together, and their texts come before the next ones are read. `windows` transcribes them; a fault of one
recording becomes its Result, and the others go on.
"""

import contextlib
import functools
import sys
from pathlib import Path

from tqdm import tqdm

from jax_rnnt_speech.data import audio, index, rows, sources
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.recognition import windows
from jax_rnnt_speech.recognition.search import GREEDY
from jax_rnnt_speech.system import UserError

ROOM = 1.1  # a file that is so many times as long as a segment, by its header, is not decoded to measure it
HELD = 60_000  # frames of the recordings that are sorted by length at once: 10 minutes of usual features


def listed(arguments, audio_column=""):
    """Yields Entries and Faults of audio files, manifests and folders, which need no texts.

    An argument that cannot be read is an error if it is the only one. Of several, it is a Fault; the others are used.
    """
    several = len(arguments) > 1
    if audio_column and isinstance(audio_column, str) and not any(map(sources.is_list, map(Path, arguments))):
        raise UserError(f"--audio-column {audio_column} names a column, and no FILE is a manifest")
    for path in map(Path, arguments):
        if sources.is_list(path):
            yield from sources.read_all([path], audio_column, lenient=several, texts=False, alone=not several)
        else:
            yield rows.Entry(str(path), path, "")


def recordings(arguments, audio_column=""):
    """Returns the entries of `listed` that can be read before a model has determined the column of the audio.

    With them, a command that has no place for its texts ends before it opens a model. Errors of lists come later.
    """
    entries = []
    with contextlib.suppress(UserError):
        entries.extend(listed(arguments, audio_column))
    return entries


def settled(entries):
    """Yields the entries, each with the part of its file that its times mean; a note tells a person of a change.

    `audio.within` decides what times mean that reach beyond their file. Headers of many formats have a wrong length, so
    a file is decoded to measure it, unless its header says that it is far longer than its segment.
    """
    lengths = {}
    for x in entries:
        if isinstance(x, rows.Entry) and x.end is not None:
            with contextlib.suppress(UserError, OSError):  # reading it later raises the error
                if x.audio not in lengths:
                    lengths[x.audio] = abs(index.seconds_by_header(x.audio)), False
                if not lengths[x.audio][1] and lengths[x.audio][0] < ROOM * x.end + 1:
                    lengths[x.audio] = audio.seconds(audio.stretches(x.audio)), True
                start, end, note = audio.within(x.audio, lengths[x.audio][0], x.start, x.end, least=0)
                if note:
                    tqdm.write(f"{shown(x.name)}: {note}", file=sys.stderr)
                    x = x._replace(start=start, end=end)
        yield x


def loaded(entries, rate):
    """Yields (name, pieces of its samples) of each entry, or (name, the UserError that there are none)."""
    for x in entries:
        if isinstance(x, rows.Fault):
            yield x.name, UserError(f"{x.name}: {x.reason}")
        else:
            yield x.name, audio.pieces(x.audio, rate, x.start, x.end, x.channel)


def transcribe(model, recordings, decoding=GREEDY, watch=None, progress=None, owns=None):
    """Yields the Result of each (name, recording), in their order.

    A recording is samples [S], floats in [-1, 1] or integers, at `model.extractor.rate`; or pieces of them, one
    after the other; or a UserError. Some recordings at a time are sorted by length and go through the model in batches,
    and of one that is longer than a window no more than that is held: memory depends neither on how many there are nor
    on how long they are.

    `watch` is called with a recording's place and its Labels so far, after each of its windows and before it waits for
    one; a recording for which it returns false is not transcribed further, and its Result is an error. `progress` is
    called with the seconds that were transcribed since it was last called. `owns` are the phrases of each recording, or
    None, as `search_options.Room` has them.
    """
    waiting, held = [], 0
    for i, (name, samples) in enumerate(recordings):
        listener, own = watch and functools.partial(watch, i), owns and owns[i]
        options = {"progress": progress, "drop": decoding.drop_invented, "own": own}
        x = windows.Recording(name, samples, model, listener, **options)
        waiting.append(x)
        held += x.frames
        if held >= HELD:
            windows.hear(model, waiting, decoding)
            yield from (x.result() for x in waiting)
            waiting, held = [], 0
    windows.hear(model, waiting, decoding)
    yield from (x.result() for x in waiting)
