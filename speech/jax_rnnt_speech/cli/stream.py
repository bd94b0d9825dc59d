"""Text of a file or a microphone, as it arrives."""

import contextlib
import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np

from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import amount, option
from jax_rnnt_speech.data.audio import AudioError
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition import streams, unheard
from jax_rnnt_speech.recognition.live import Windowed
from jax_rnnt_speech.recognition.search_options import Searching, decoding_of
from jax_rnnt_speech.system import refuse_if, say_once


@dataclasses.dataclass(frozen=True)
class Live:
    """Options of a stream's windows and its output."""

    endpoint: float = option(
        0.0, amount, "seconds of silence that end an utterance and its line; with 0, none does (0)", metavar="S"
    )
    left: float | None = option(
        None,
        amount,
        "for a model that sees whole utterances: seconds that it hears before each chunk (10, or as trained)",
        metavar="S",
    )
    chunk: float | None = option(
        None, amount, "seconds that become final at once, likewise; of a model for several contexts, the nearest is "
        "taken (2)", metavar="S",
    )  # fmt: skip
    right: float | None = option(
        None, amount, "seconds that it hears after each chunk, likewise, for which final words wait (2)", metavar="S"
    )
    json: bool = option(
        False, bool, "print a JSON object on each line: words, text that may change, endpoints", action="store_true"
    )

    def stream(self, model, decoding):
        """Returns a Stream of the model."""
        refuse_if(decoding.spotter, "--phrases-by ctc: a stream has phrases by its search alone")
        sizes = {name: x for name in ("left", "chunk", "right") if (x := getattr(self, name)) is not None}
        if sizes or model.config.encoder.draws:
            made = Windowed(model, decoding, self.endpoint, **sizes)
            if made.slots.context:
                say_once(f"windows: {made.said_sizes}")
            return made
        refuse_if(not model.chunk, f"{streams.WHOLE}, or any with --left, --chunk and --right, such as 10, 2 and 2")
        return streams.Stream(model, decoding, self.endpoint)


def stream(args):
    searching, options = command_line.taken(args, Searching).checked(), command_line.taken(args, Live)
    model = command_line.taken(args, Computing).opened()
    decoding, bad = decoding_of(searching, model), 0
    for file in args.files or [None]:
        live = options.stream(model, decoding)
        try:
            show = show_events if options.json else show_words
            show(live, events_of(live, file), file, len(args.files) > 1)
        except AudioError as error:
            print(error, file=sys.stderr)
            bad += 1
    refuse_if(bad and bad == len(args.files), "no recording could be used")
    return 1 if bad else 0


def events_of(live, file):
    """Yields the events of a file, or of the microphone until Ctrl-C; the last event is the end."""
    rate = live.extractor.rate
    with contextlib.suppress(*[KeyboardInterrupt] * (file is None)):
        for samples in streams.blocks_of_file(file, rate) if file else streams.blocks_of_microphone(rate):
            for words in live.heard(samples):
                yield from live.events(*words)
    for words in live.heard(np.zeros(0, np.float32), end=True):
        yield from live.events(*words)
    yield {"type": "end", "duration": round(live.total / rate, 3)}


def show_words(live, events, file, named):
    """Prints a line for each utterance, as its words come; an empty one without words. `named` adds the file."""
    begin, said, inside = f"{shown(file)}\t" if named else "", False, False
    for x in events:
        missed = [(x["start"], x["end"])] if x["type"] == "unheard" else []
        invented = [(y["start"], y["end"]) for y in x["words"]] if x["type"] == "invented" else []
        for line in unheard.lines(file or "microphone", missed, invented, live.words.drop):
            print(line, file=sys.stderr)
        if x["type"] == "words":
            print((" " * live.text[:1].isspace() if inside else begin) + x["text"], end="", flush=True)
            said = inside = True
        elif x["type"] == "endpoint" and inside:
            print(flush=True)
            inside = False
    if inside or not said:
        print("" if said else begin, flush=True)


def show_events(live, events, file, named):
    """Prints an object for each event."""
    for x in events:
        print(json.dumps(({"file": str(file)} if named else {}) | x, ensure_ascii=False), flush=True)


def source(parser):
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("files", type=Path, nargs="*", default=[], metavar="FILE", help="files of audio in any format")
    group.add_argument("--microphone", action="store_true", help="listen to the default microphone until Ctrl-C")


COMMAND = (
    "stream", "write the text of a file or a microphone as it arrives", stream, source, Live,
    functools.partial(command_line.add_fields, kind=Searching, but=["confidence"]), Computing,
)  # fmt: skip
