"""Long recordings: what they cost in errors, times of words, memory and seconds.

    PYTHONPATH=speech python lab/benchmarks/long.py --model FOLDER DATA --minutes 5

Utterances of DATA (a corpus, or one by FILE.py:FUNCTION), in their order, one behind the other: each alone, and
joined in a fixed grid, in windows that end in pauses, in one window. A word is late by the difference to itself in its
utterance. Seconds include compilation. The memory of utterances alone is also that of so many files.
"""

import argparse
import difflib
import pathlib
import sys
import time

import numpy as np
from rapidfuzz.distance import Levenshtein

from jax_rnnt_speech import models
from jax_rnnt_speech.data import corpora
from jax_rnnt_speech.recognition import recognise, transcripts, windows
from jax_rnnt_speech.recognition.search import Decoding


def peak(reset=False):
    """MB of this process that were in memory at most, since the last reset."""
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def heard(model, pieces, decoding, begins=None):
    """[(word, second)] of pieces of samples: in windows of all of them; or of each alone, which begins there."""
    found, recordings = [], [("", iter(pieces))] if begins is None else enumerate(pieces)
    for x, begin in zip(recognise.transcribe(model, recordings, decoding), begins or [0]):
        words = transcripts.words(model, x.labels, x.frames, x.confidences, x.durations, float(begin))
        found += [(word.text, word.start) for word in words]
    return found


def blocks(pieces, size):
    """The samples of pieces in blocks of a size."""
    held = np.zeros(0, np.float32)
    for piece in pieces:
        held = np.concatenate([held, piece])
        while len(held) > size:
            yield held[:size]
            held = held[size:]
    yield held


def errors_of(references, words):
    """Errors in each utterance [U] of the words of all of them."""
    owner = np.repeat(np.arange(len(references)), [*map(len, references)])
    edits = Levenshtein.editops([word for x in references for word in x], words)
    return np.bincount(owner[[min(x.src_pos, len(owner) - 1) for x in edits]], minlength=len(references))


def interval(differences, lengths):
    """Where 95% of the differences of the error rate are, in points, if utterances are drawn anew."""
    drawn = np.random.default_rng(0).integers(len(lengths), size=(2000, len(lengths)))
    low, high = np.percentile(100 * differences[drawn].sum(1) / lengths[drawn].sum(1), [2.5, 97.5])
    return f"{low:+.1f} to {high:+.1f}"


def compared(args):
    model, decoding = models.open_model(args.model, "cpu"), Decoding(beam=args.beam)
    made = corpora.by_function(args.data)
    corpus = corpora.open_corpus(args.data, model.config, "valid") if made else \
        corpora.Recordings(args.data, model.config, testing=True)  # fmt: skip
    rate, begins = model.config.features.rate, [0]

    def samples(i):
        return corpus.samples(i, np.random.default_rng(i)).astype(np.float32)

    def pieces():  # none is held
        return map(samples, range(count))

    while begins[-1] < args.minutes * 60 * rate and len(begins) <= len(corpus.utterances):
        begins.append(begins[-1] + len(samples(len(begins) - 1)))
    count, total, begins = len(begins) - 1, begins[-1], [x / rate for x in begins[:-1]]
    spelled = str.split if transcripts.mark_of(model.tokens) else lambda x: list("".join(x.split()))
    references = [spelled(x.text) for x in corpus.utterances[:count]]
    lengths = np.array([*map(len, references)])
    grid = int(min(30, model.longest))
    ways = {
        "utterances alone": (pieces, begins),
        f"grid of {grid} s": (lambda: blocks(pieces(), grid * rate), range(0, -(-total // rate), grid)),
        "cuts at pauses": (pieces, None),
    }
    if model.longest == float("inf") and not model.chunk:
        ways["one window"] = pieces, None
    print(f"{count} utterances, {total / rate / 60:.1f} minutes, {lengths.sum()} words")
    print("| | WER, % | more than alone, points | late by > 80 ms, % | median, ms | peak, MB | CPU s |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    first = before = None
    for name, (some, begins) in ways.items():
        windows.WINDOW = 1e9 if name == "one window" else windows.WINDOW
        peak(reset=True)
        started = time.process_time()
        found = heard(model, some(), decoding, begins)
        seconds, first = time.process_time() - started, first or found
        pair = [[x for x, _ in y] for y in (first, found)]
        matches = difflib.SequenceMatcher(None, *pair, False).get_matching_blocks()
        apart = [abs(first[m.a + i][1] - found[m.b + i][1]) for m in matches for i in range(m.size)] or [0.0]
        wrong = errors_of(references, spelled(" ".join(pair[1])))
        before = wrong if before is None else before
        more = "-" if first is found else interval(wrong - before, lengths)
        late, middle = 100 * np.mean(np.array(apart) > 0.08), 1000 * np.median(apart)
        rates = f"{100 * wrong.sum() / lengths.sum():.2f} | {more} | {late:.2f} | {middle:.0f}"
        print(f"| {name} | {rates} | {peak():.0f} | {seconds:.1f} |", flush=True)
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--beam", type=int, default=0)
    return compared(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
