"""Batches of LibriSpeech's lengths, and inputs for them. Uses NumPy only, since the PyTorch worker imports it.

librispeech_lengths.npz has pairs (T, U), int16, of train-clean-100 with speed perturbation: encoder frames after
subsampling by 4, and tokens of 500 BPE units. They come from shape_info.pt of csukuangfj/transducer-loss-benchmarking
(Apache-2.0, copyright 2022 Xiaomi Corp.), which has 85,617; LibriSpeech itself is CC BY 4.0. `file_order`: the first
2,400 of that file, in its order. `sorted`: the 1,760 with the most frames, by falling T.
"""

import itertools
from pathlib import Path

import numpy as np

V, H, BLANK = 500, 512, 0
FIRST, LAST = 20, 40  # batches that the published table averages, in its first round
MAX_FRAMES = 10_000
ORDERS = ("file order", "sorted")


def batches(order, share=1.0, shrink=1):
    """[(T [B], U [B]), ...] of 30 utterances, or of up to 10,000 frames before padding; a share of each batch.

    `shrink` divides all lengths, for trials of the program.
    """
    with np.load(Path(__file__).parent / "librispeech_lengths.npz") as file:
        rows = file[order.replace(" ", "_")].astype(np.int32)
    if order == "sorted":
        cuts, total = [0], 0
        for i, frames in enumerate(rows[:, 0]):
            if total + frames > MAX_FRAMES:
                cuts.append(i)
                total = 0
            total += frames
    else:
        cuts = range(0, len(rows) + 1, 30)
    step = round(1 / share)
    cuts = itertools.islice(itertools.pairwise(cuts), FIRST, LAST)
    return [np.maximum(rows[begin:end:step].T // shrink, 1) for begin, end in cuts]


def padded(lengths, frames=1, columns=1):
    """(T, U + 1) of a batch, in multiples."""
    T, U = (int(x.max()) for x in lengths)
    return -(-T // frames) * frames, -(-(U + 1) // columns) * columns


def make(lengths, T, columns, seed=0):
    """(weight [H, V], bias [V]), (encoder output [B, T, H], predictor output [B, U + 1, H]), (targets, lengths).

    Uniform as in that benchmark: rows in [0, 1), parameters as a new linear layer. What lies inside the lengths does
    not depend on the padding.
    """
    rng = np.random.default_rng(seed)
    bound = H**-0.5
    parameters = [rng.uniform(-bound, bound, shape).astype(np.float32) for shape in ((H, V), (V,))]
    rows = [np.zeros((len(lengths[0]), n, H), np.float32) for n in (T, columns)]
    targets = np.ones((len(lengths[0]), columns - 1), np.int32)
    for b, (frames, labels) in enumerate(zip(*lengths)):
        rows[0][b, :frames] = rng.random((frames, H), np.float32)
        rows[1][b, : labels + 1] = rng.random((labels + 1, H), np.float32)
        targets[b, :labels] = rng.integers(1, V, labels)
    return parameters, rows, (targets, *(np.array(x, np.int32) for x in lengths))  # contiguous, for torchaudio
