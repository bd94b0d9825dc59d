"""The table of docs/speech/live.md, from a run on spoken digits.

    rnnt-speech train --config speech/recipes/corpora/spoken_digits.json --workdir RUN --ctc 0.3 \
        --train speech/recipes/corpora/digits.py:spoken:FOLDER --valid speech/recipes/corpora/digits.py:spoken:FOLDER
    python lab/benchmarks/digits.py --model RUN speech/recipes/corpora/digits.py:spoken:FOLDER

It has the error rate of digits, and seconds from the frame of a digit until it is final, by seconds behind a chunk.
"""

import argparse
from pathlib import Path

import numpy as np

from jax_rnnt_speech import models
from jax_rnnt_speech.data import corpora
from jax_rnnt_speech.recognition import errors, live, recognise

JOINED = 5  # strings of a recording
LEFT, CHUNK = 3.0, 0.5
RIGHT = 0.0, 0.1, 0.2, 0.4, 0.8, 1.6


def held_out(model, name, count):
    """(samples, text) of the first strings."""
    corpus = corpora.open_corpus(name, model.config, "valid")
    rng = np.random.default_rng(0)
    return [(corpus.samples(i, rng), corpus.utterances[i].text) for i in range(min(count, len(corpus.utterances)))]


def heard(model, samples, right):
    """(labels, seconds until each is final)."""
    stream, found, waits = live.Windowed(model, left=LEFT, chunk=CHUNK, right=right), [], []
    run = stream.slots.run

    def kept(steps):
        ((part, unsure, rows),) = run(steps)
        ended = steps[0].count is None
        known = part.labels + unsure.labels * ended
        found.extend(known)
        now = min(stream.total / model.extractor.rate, (stream.row + rows) * model.seconds + right)
        waits.extend(now - x * model.seconds for x in part.frames + unsure.frames * ended)
        return [(part, unsure, rows)]

    stream.slots.run = kept
    stream.feed(samples)
    stream.finish()
    return found, waits


def show_live(model, data):
    groups = [data[i : i + JOINED] for i in range(0, len(data), JOINED)]
    recordings = [(np.concatenate([x for x, _ in some]), "".join(text for _, text in some)) for some in groups]
    print("| right, s | errors, % | final after, s |\n|--:|--:|--:|")
    for right in RIGHT:
        counts, waits = [], []
        for samples, text in recordings:
            labels, more = heard(model, samples, right)
            counts.append(errors.counted(text, model.tokens.decode(labels)))
            waits += more
        print(f"| {right:g} | {errors.summed(counts).rate:.1f} | {np.mean(waits):.2f} |", flush=True)
    whole = recognise.transcribe(model, [(str(i), x) for i, (x, _) in enumerate(recordings)])
    counts = [errors.counted(text, x.text) for x, (_, text) in zip(whole, recordings)]
    print(f"| transcribe | {errors.summed(counts).rate:.1f} | |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="speech/recipes/corpora/digits.py:spoken:FOLDER")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500, help="held-out strings (%(default)s)")
    options = parser.parse_args()
    model = models.open_model(options.model)
    show_live(model, held_out(model, options.data, options.count))


if __name__ == "__main__":
    main()
