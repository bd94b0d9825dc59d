"""Batches to run a loss on."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from family import RNNT


class Problem(NamedTuple):
    """The four arrays of a call, in order."""

    logits: np.ndarray  # [B, T, U + 1, V]
    targets: np.ndarray  # int32 [B, U]
    logit_lengths: np.ndarray  # int32 [B]
    target_lengths: np.ndarray  # int32 [B]

    def astype(self, dtype):
        return self._replace(logits=np.asarray(self.logits).astype(jnp.dtype(dtype)))

    def take(self, index):
        return Problem(*(x[index] for x in self))


# Ragged: a full row, a shorter one, an empty target, and one label a frame. Every lattice of the family has a path.
FRAMES, LABELS = (7, 5, 6, 4), (4, 2, 0, 3)


def problem(B=4, T=7, U=4, V=9, *, loss=RNNT, dtype=np.float64, seed=0, scale=2.0, lengths=None):
    """Normal logits, rounded to `dtype`; every label but the last class; ragged lengths unless given."""
    rng = np.random.default_rng((seed, B, T, U, V))
    if lengths is None:
        frames = np.resize([max(T - 7 + n, 1) for n in FRAMES], B)
        labels = np.resize([max(U - 4 + m, 0) if m else 0 for m in LABELS], B)
    else:
        frames, labels = lengths
    logits = rng.normal(0, scale, (B, T, U + 1, V + loss.extra_classes))
    rest = rng.integers(0, V - 1, (B, U)), frames, labels
    return Problem(logits, *(np.array(x, np.int32) for x in rest)).astype(dtype)


def inside(p):
    """Mask of the nodes [B, T, U1] inside the lengths."""
    _, T, U1, _ = p.logits.shape
    rows = np.arange(T)[:, None] < p.logit_lengths[:, None, None]
    return rows & (np.arange(U1) <= p.target_lengths[:, None, None])


def poisoned(p, value=np.nan, label=-77):
    """The same problem with `value` in every logit and `label` in every target outside the lengths."""
    logits = np.where(inside(p)[..., None], p.logits, np.asarray(value, p.logits.dtype))
    used = np.arange(p.targets.shape[1]) < p.target_lengths[:, None]
    return p._replace(logits=logits, targets=np.where(used, p.targets, label).astype(p.targets.dtype))


def heads(loss, rows):
    """Views of the heads, each with its own softmax, of rows [..., V]. The last class before durations is the blank."""
    if loss.name == "hat":
        return [rows[..., :-1]]
    return np.split(rows, [rows.shape[-1] - loss.extra_classes], axis=-1) if loss.extra_classes else [rows]


def packed(p, x, extra=5, fill=np.nan):
    """The rows of [B, T, U1, ...] inside the lengths, then `extra` rows of `fill`."""
    return np.concatenate([x[inside(p)], np.full((extra, *x.shape[3:]), fill, x.dtype)])
