"""The emission of a loss on one of the devices over which it is split."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt.emissions._emission import Exchange
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.layouts._layout import Layout
from jax_rnnt.sharding import _axes
from jax_rnnt.sharding._frames import FrameExchange, own_frames
from jax_rnnt.sharding._vocabulary import SplitVocabulary, VocabularyExchange


def devices_of(loss) -> tuple[int, int]:
    """Returns over how many devices frames and classes are split where this function runs; 1 if they are whole."""
    frames, vocabulary = (
        1 if axis is None else _axes.axis_size(axis) or 1 for axis in (loss.frame_axis, loss.vocab_axis)
    )
    return frames, vocabulary


def emission_of_device(loss, layout: Layout, softmax: Softmax, batch, windows):
    """Returns (emission, its logits) on one of the devices, from its checked arrays; `softmax` is the loss's.

    `batch` has the targets and both lengths.
    """
    _check(loss, layout, (batch, windows, loss))
    targets, logit_lengths, target_lengths = batch
    frames, vocabulary = devices_of(loss)
    full = softmax.resolved(layout.classes * vocabulary)
    own: Any = full
    own_lengths, exchange = logit_lengths, Exchange()
    if loss.frame_axis is not None:
        own_lengths = own_frames(logit_lengths, layout.frames, loss.frame_axis)
    if loss.vocab_axis is not None:
        own = SplitVocabulary.own_softmax(full, vocabulary, layout.classes * vocabulary)
    emission, logits = layout.emission(loss, own, targets, own_lengths, target_lengths)
    rows = emission.rows
    if loss.vocab_axis is not None:
        rows = SplitVocabulary(rows, own, full, loss.vocab_axis, vocabulary, layout.classes)
        exchange = VocabularyExchange(loss.vocab_axis)
    if loss.frame_axis is not None:
        exchange = FrameExchange(loss.frame_axis, jnp.shape(logit_lengths), emission.frames, exchange)
    return dataclasses.replace(emission, rows=rows, frames=emission.frames * frames, exchange=exchange), logits


def _check(loss, layout, others):
    """Raises an error where types say that the arrays are not split as the loss says, or that others are split."""
    for name, axis, letter in (("vocab_axis", loss.vocab_axis, "V"), ("frame_axis", loss.frame_axis, "T")):
        if axis is None:
            continue
        split = layout.split_arrays(name)
        if not _axes.is_typed(axis):
            continue
        for array, x in split.items():
            if not _axes.varies(x, axis):
                expected = f"{array} must be split over {letter} inside of shard_map over {name}={axis!r}"
                raise _checks.bad_value(f"{expected}, got the same {array} on all its devices.")
        if any(_axes.varies(x, axis) for x in jax.tree.leaves(others)):
            expected = f"targets, lengths, windows and options must be alike on all devices of {name}={axis!r}"
            raise _checks.bad_value(f"{expected}, got one that varies over them.")
