"""Inputs of all losses. Uses NumPy only, since the PyTorch worker imports it.

A problem is (arrays to differentiate by, other inputs of the loss); its arguments fit into a line of JSON.

librispeech_lengths.npz has pairs (T, U), int16, of train-clean-100 with speed perturbation: encoder frames after
subsampling by 4, and tokens of 500 BPE units. They come from shape_info.pt of csukuangfj/transducer-loss-benchmarking
(Apache-2.0, copyright 2022 Xiaomi Corp.), which has 85,617; LibriSpeech itself is CC BY 4.0. `file_order`: the first
2,400 of that file, in its order. `sorted`: the 1,760 with the most frames, by falling T.
"""

import itertools
from pathlib import Path

import numpy as np

import cases

V, H, BLANK = 500, 512, 0  # of a LibriSpeech batch
FIRST, LAST = 20, 40  # batches that the published table averages, in its first round
MAX_FRAMES = 10_000
ORDERS = ("file order", "sorted")


def logits(case, seed):
    """Normal ones [B, T, U1, V], and uniform labels."""
    case = cases.CASES[case] if isinstance(case, str) else case
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, case.V - 1, (case.B, case.U), np.int32)
    return (rng.standard_normal(case.shape, np.float32),), (targets, *case.lengths)


def joint(case, seed, durations=0):
    """Weight [H, V], bias, encoder and predictor rows. As newly initialised: logits have unit variance.

    `case`: or the fields of one. `durations`: so many of the last classes are no labels.
    """
    case = cases.Case(**case) if isinstance(case, dict) else case
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    weight = draw(case.H, case.V) * np.float32(case.H**-0.5)
    rows = draw(case.B, case.T, case.H), draw(case.B, case.U + 1, case.H)
    targets = rng.integers(0, case.V - durations - 1, (case.B, case.U), np.int32)
    return (weight, np.zeros(case.V, np.float32), *rows), (targets, *case.lengths)


def batches(order, share=1.0, shrink=1):
    """[(T [B], U [B]), ...] of 30 utterances, or of up to 10,000 frames before padding; a share of each batch.

    `shrink` divides all lengths, for trials of the program.
    """
    with np.load(Path(__file__).parent / "librispeech_lengths.npz") as file:
        rows = file[order.replace(" ", "_")].astype(np.int32)
    cuts = list(range(0, len(rows) + 1, 30))
    if order == "sorted":
        cuts, total = [0], 0
        for i, frames in enumerate(rows[:, 0]):
            if total + frames > MAX_FRAMES:
                cuts.append(i)
                total = 0
            total += frames
    cuts = itertools.islice(itertools.pairwise(cuts), FIRST, LAST)
    return [np.maximum(rows[begin : end : round(1 / share)].T // shrink, 1) for begin, end in cuts]


def librispeech(order, index, share, shrink, frames=1, columns=1):
    """A batch, padded to multiples of frames and columns. What lies inside the lengths does not depend on that.

    Uniform as in the published benchmark: rows in [0, 1), parameters as a new linear layer.
    """
    T, U = lengths = batches(order, share, shrink)[index]
    most_frames, most_columns = -(-T.max() // frames) * frames, -(-(U.max() + 1) // columns) * columns
    rng = np.random.default_rng(index)
    bound = H**-0.5
    weight, bias = (rng.uniform(-bound, bound, shape).astype(np.float32) for shape in ((H, V), (V,)))
    encoder, predictor = (np.zeros((len(T), n, H), np.float32) for n in (most_frames, most_columns))
    targets = np.ones((len(T), most_columns - 1), np.int32)
    for b, (n, m) in enumerate(zip(T, U)):
        encoder[b, :n] = rng.random((n, H), np.float32)
        predictor[b, : m + 1] = rng.random((m + 1, H), np.float32)
        targets[b, :m] = rng.integers(1, V, m)
    # contiguous, for torchaudio
    return (weight, bias, encoder, predictor), (targets, *(np.array(x, np.int32) for x in lengths))
