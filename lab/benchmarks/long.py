"""Long recordings: what they cost in errors, times of words, memory and seconds.

    PYTHONPATH=speech python lab/benchmarks/long.py --model FOLDER DATA --minutes 5

Utterances of DATA (a corpus, or spoken-digits:FOLDER), in their order, one behind the other: each alone, and
joined in windows that end in pauses, in a fixed grid, in one window. A word is late by the difference to itself in its
utterance.
"""

import argparse
import difflib
import pathlib
import sys
import time

import numpy as np

from jax_rnnt_speech import corpora, errors, pretrained, recognise, recogniser, transcripts, windows


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
    if model.longest == float("inf") and not model.chunk:
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--beam", type=int, default=0)
    return joined(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
