"""Batches of recordings with labels, and a step of a training on them."""

import functools

import numpy as np
from flax import nnx


def batched(extractor, recordings, labels, frames=128, columns=8):
    """Arrays of a batch: features, their lengths, targets, their lengths.

    Padded to multiples of `frames` and `columns`: each shape is compiled once.
    """
    features, feature_lengths = extractor(recordings)
    target_lengths = np.array([len(x) for x in labels], np.int32)
    targets = np.zeros((len(labels), -(-max(target_lengths.max(), 1) // columns) * columns), np.int32)
    for row, x in zip(targets, labels):
        row[: len(x)] = x
    more = -features.shape[1] % frames
    return np.pad(features, [(0, 0), (0, more), (0, 0)]), feature_lengths, targets, target_lengths


@functools.partial(nnx.jit, static_argnames="tiles")
def train_step(model, optimizer, features, feature_lengths, targets, target_lengths, tiles=True):
    """The mean loss of the batch, after which model and optimizer have made a step."""

    def compute(model):
        logits, lengths = model.logits(features, feature_lengths, targets, tiles=tiles)
        return model.criterion()(logits, targets, lengths, target_lengths)

    loss, gradient = nnx.value_and_grad(compute)(model)
    optimizer.update(model, gradient)
    return loss
