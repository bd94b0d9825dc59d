"""The table of docs/speech/phrases.md: words new to the model, by lists of phrases, in greedy search and beams.

    rnnt-speech train --config read-speech --train TRAIN --valid VALID --init WHISPER --workdir RUN
    python lab/benchmarks/rare_words.py --model RUN --train TRAIN VALID

The phrases are `--words` words of VALID that TRAIN lacks, drawn from those of eight letters or more. A place where one
is said counts as found if the transcript of its utterance has the word; false alarms are further ones in transcripts.
"""

import argparse
import collections
import hashlib
import tempfile
from pathlib import Path

import numpy as np

from jax_rnnt_speech import models
from jax_rnnt_speech.data import corpora
from jax_rnnt_speech.recognition import errors, recognise, windows
from jax_rnnt_speech.recognition.search_options import Searching, decoding_of

LETTERS = 8
# (what prefers them, beam, weight, depth); the weight None: no phrases.
ROWS = [("search", 0, None, 0.0)]
ROWS += [("search", 0, weight, 0.0) for weight in (0.25, 0.5, 1.0)]
ROWS += [("search", 0, weight, depth) for weight in (0.05, 0.25) for depth in (1.0, 3.0)]
ROWS += [("ctc", 0, weight, 0.0) for weight in (1.0, 1.5, 2.0, 3.0)]
ROWS += [("search", 8, None, 0.0), ("search", 8, 1.0, 0.0), ("search", 8, 0.25, 1.0), ("search", 8, 0.25, 3.0)]
ROWS += [("ctc", 8, weight, 0.0) for weight in (1.0, 2.0)]


def cached(encode):
    """`windows.window`, which finds the rows of a batch once: all searches have the same."""
    known = {}

    def window(model, params, *batch):
        key = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in batch)).digest()
        if key not in known:
            known[key] = encode(model, params, *batch)
        return known[key]

    return window


def drawn(texts, heard, count, places):
    """The first draw of so many words that texts have in so many places, or else the first one."""
    counts = collections.Counter(word for text in texts for word in text.split())
    rare = sorted(word for word in counts if len(word) >= LETTERS and word not in heard)
    draws = [[*np.random.default_rng(seed).permutation(rare)[:count]] for seed in range(1000)]
    return next((x for x in draws if sum(counts[word] for word in x) == places), draws[0])


def of_phrases(words, text):
    return collections.Counter(word for word in text.split() if word in words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("valid", help="recordings to transcribe, with texts")
    parser.add_argument("--train", required=True, help="those that the model has heard")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--words", type=int, default=50)
    parser.add_argument("--places", type=int, default=56, help="where they are said, if a draw has so many")
    options = parser.parse_args()
    model, rng = models.open_model(options.model), np.random.default_rng(0)
    train = corpora.open_corpus(options.train, model.config, "train")
    heard = {word for x in train.utterances for word in x.text.split()}
    valid = corpora.open_corpus(options.valid, model.config, "valid")
    texts = [x.text for x in valid.utterances]
    recordings = [(str(i), valid.samples(i, rng)) for i in range(len(texts))]
    words = drawn(texts, heard, options.words, options.places)
    said = [of_phrases(words, text) for text in texts]
    total = sum(x.total() for x in said)
    windows.window = cached(windows.window)
    print(f"{len(texts)} utterances; {len(words)} words in {total} places: {' '.join(sorted(words))}\n")
    print(f"| phrases by | beam | weight | depth | found, of {total} | false alarms | WER, % |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for way, beam, weight, depth in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "phrases.txt"
            file.write_text("".join(f"{word}\t{weight}\n" for word in words))
            more = {} if weight is None else {"phrases": file, "phrases_by": way, "phrase_depth": depth}
            decoding = decoding_of(Searching(beam=beam, **more), model)
        results = [x.text for x in recognise.transcribe(model, recordings, decoding)]
        written = [of_phrases(words, x) for x in results]
        found = sum((a & b).total() for a, b in zip(said, written))
        false = sum((b - a).total() for a, b in zip(said, written))
        rate = errors.summed([errors.counted(a.split(), b.split()) for a, b in zip(texts, results)]).rate
        shown = [way, beam or "greedy", weight, depth] if weight is not None else ["none", beam or "greedy", "", ""]
        print(f"| {' | '.join(map(str, shown))} | {found} | {false} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
