"""Long recordings: what they cost in errors, times of words, memory and seconds; and a stream that does not end.

    PYTHONPATH=speech python lab/benchmarks/long.py joined --model FOLDER DATA --minutes 5
    PYTHONPATH=speech python lab/benchmarks/long.py soak [--hours 8] [--model FOLDER] [--beam 4]

`joined`: utterances of DATA (a corpus, or spoken-digits:FOLDER), in their order, one behind the other: each alone, and
joined in windows that end in pauses, in a fixed grid, in one window. A word is late by the difference to itself in its
utterance. `soak` feeds noise, and prints the resident set after each hour of audio. The exit code is 1 where it grows
by more than --allowed MB after the first tenth.
"""

import argparse
import difflib
import pathlib
import sys
import time

import jax
import numpy as np
from soak import resident

from jax_rnnt_speech import (
    config,
    corpora,
    errors,
    pretrained,
    recognise,
    recogniser,
    streams,
    tokens,
    transcripts,
    windows,
)


def peak(reset=False):
    """MB of this process that were in memory at most, since the last reset."""
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def timed(model, result, offset):
    found = transcripts.words(model, result.labels, result.frames, result.confidences, result.durations, offset)
    return [(x.text, x.start) for x in found]


def heard(model, pieces, how, joined):
    """[(word, second)] of pieces of samples: of each alone, or in windows of all of them."""
    if joined:
        (result,) = recognise.transcribe(model, [("", iter(pieces))], how)
        return timed(model, result, 0.0)
    results = recognise.transcribe(model, enumerate(pieces), how)
    begins = np.cumsum([0, *map(len, pieces)]) / model.extractor.rate
    return [x for result, begin in zip(results, begins) for x in timed(model, result, float(begin))]


def joined(args):
    model, how = pretrained.open_model(args.model, "cpu"), recogniser.Search(beam=args.beam)
    kind, _, folder = args.data.partition(":")
    digits = kind == "spoken-digits" and folder
    corpus = corpora.open_corpus(args.data, model.config, "valid") if digits else \
        corpora.Recordings(args.data, model.config, testing=True)  # fmt: skip
    pieces, texts, rate = [], [], model.config.rate
    for i, x in enumerate(corpus.utterances):
        if sum(map(len, pieces)) < args.minutes * 60 * rate:
            pieces.append(corpus.samples(i, np.random.default_rng(i)).astype(np.float32))
            texts.append(x.text)
    spelled = str.split if transcripts.mark_of(model.tokens) else lambda x: list("".join(x.split()))
    reference, total = spelled(" ".join(texts)), sum(map(len, pieces))
    grid = np.split(np.concatenate(pieces), range(30 * rate, total, 30 * rate))
    ways = {"utterances alone": (pieces, False), "cuts at pauses": (pieces, True), "grid of 30 s": (grid, False)}
    if not model.limit and not model.chunk:
        ways["one window"] = pieces, True
    print(f"{len(pieces)} utterances, {total / rate / 60:.1f} minutes, {len(reference)} words")
    print("| | WER, % | words late by > 80 ms, % | median, ms | peak, MB | s |\n|---|--:|--:|--:|--:|--:|")
    first = None
    for name, (some, whole) in ways.items():
        windows.WINDOW = 1e9 if name == "one window" else 30.0
        heard(model, some, how, whole)  # compiles
        peak(reset=True)
        started = time.perf_counter()
        found = heard(model, some, how, whole)
        seconds = time.perf_counter() - started
        first = first or found
        matches = difflib.SequenceMatcher(
            None, [x for x, _ in first], [x for x, _ in found], False
        ).get_matching_blocks()
        apart = [abs(first[m.a + i][1] - found[m.b + i][1]) for m in matches for i in range(m.size)] or [0.0]
        rate_of_errors = errors.counted(reference, spelled(" ".join(x for x, _ in found))).rate
        late, middle = 100 * np.mean(np.array(apart) > 0.08), 1000 * np.median(apart)
        print(
            f"| {name} | {rate_of_errors:.2f} | {late:.2f} | {middle:.0f} | {peak():.0f} | {seconds:.1f} |", flush=True
        )
    return 0


def soak(args):
    if args.model:
        model = pretrained.open_model(args.model, "cpu")
    else:
        options = dict(
            train="t", valid="v", rate=8000, mels=8, width=16, blocks=1, kernel=3, channels=2, chunk=8, seed=3
        )
        settings = config.Config(encoder="convolutional", **options)
        model = recogniser.Recogniser(settings, tokens.Characters("ABC "), [0.0] * 8, [1.0] * 8)
        model.params["joint"] = jax.tree.map(lambda x: 8 * x, model.params["joint"])  # so that it writes words
    rng, rate, held = np.random.default_rng(0), model.config.rate, []
    live, words, ends, started = streams.Stream(model, recogniser.Search(beam=args.beam), 0.8), 0, 0, time.monotonic()
    for i in range(1, round(args.hours * 60) + 1):
        loud = np.repeat(rng.uniform(0, 1, 30) > 0.3, 2 * rate).astype(np.float32)
        for piece in np.array_split(loud * rng.normal(size=len(loud)).astype(np.float32), rng.integers(20, 200)):
            words, ends = words + len(live.feed(piece)), ends + len(live.ends)
        held.append(resident())
        if i % args.every == 0:
            seconds = time.monotonic() - started
            print(f"{i} minutes in {seconds:.0f} s: {words} words, {ends} ends, {held[-1]:.1f} MB", flush=True)
    grown = held[-1] - max(held[: max(1, len(held) // 10)])
    print(f"memory grows by {grown:.1f} MB after the first tenth")
    return int(grown > args.allowed)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("joined")
    one.add_argument("data")
    one.add_argument("--model", required=True)
    one.add_argument("--minutes", type=float, default=5)
    one.set_defaults(run=joined)
    other = commands.add_parser("soak")
    other.add_argument("--model")
    other.add_argument("--hours", type=float, default=8)
    other.add_argument("--every", type=int, default=60, metavar="MINUTES", help="between two lines")
    other.add_argument("--allowed", type=float, default=8, help="MB of growth, the noise of an allocator")
    other.set_defaults(run=soak)
    for x in (one, other):
        x.add_argument("--beam", type=int, default=0)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
