"""Draws docs/lattice.png, the picture of the README: `python docs/lattice.py`. Needs the extra "plot"."""

import pathlib

import matplotlib.pyplot as plt
import numpy as np

from jax_rnnt import RNNTLoss, plot

WORD, FRAMES = "hello", (2, 5, 8, 11, 15)  # when each letter is spoken
CLASSES = 27  # blank 0, a to z

targets = np.array([ord(letter) - ord("a") + 1 for letter in WORD], np.int32)
rng = np.random.default_rng(3)
logits = rng.normal(0, 0.3, (20, len(WORD) + 1, CLASSES)).astype(np.float32)
logits[..., 0] += 4
for u, (label, spoken) in enumerate(zip(targets, FRAMES)):
    logits[:, u, label] += 7 - 1.6 * np.abs(np.arange(20) - spoken)

figure, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
plot.draw_lattice(RNNTLoss(blank=0), logits, targets, texts=list(WORD), ax=ax)
figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=110)
