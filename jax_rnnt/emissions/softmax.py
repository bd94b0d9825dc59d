"""Softmax emission: logits -> log-probabilities of the arcs that leave each node. Row-wise over the classes.

B sequences (`...`, any number of batch dimensions), T frames, U1 columns, V classes, K blank classes, D durations.

    lse       = log sum over v of exp(x[v])
    log_blank = x[blank] - lse                 log_label = x[label] - lse             (-inf where there is no label arc)
    dx[v]     = c_blank [v = blank] + c_label [v = label] - exp(x[v] - lse) (c_blank + c_label)

for cotangents c of the log-probabilities. With ``normalize=False`` the input already is log-probabilities: lse is 0 and
the softmax term of the gradient is dropped.

With `durations` the last D of V + D logits are a second softmax, all of whose log-probabilities are planes (TDT). With
`bernoulli` the softmax leaves out the blank, whose logit z is one of its own (HAT):

    log_blank = log sigmoid(z)                 log_label = log sigmoid(-z) + x[label] - lse, or log_blank for the blank
    dz        = c_blank sigmoid(-z) - c_label sigmoid(z)      dx[v] = c_label ([v = label] - exp(x[v] - lse))
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _ffi
from jax_rnnt.emissions.emission import NO_LABEL, OUTSIDE, Emission, clip_and_scale
from jax_rnnt.emissions.emission import label_map as label_map


def accumulation_dtype(dtype) -> np.dtype:
    """float64 for float64, float32 for every narrower type."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def inside_rows(logits, label, num_frames):
    """bool [..., T, U1]: rows inside the sequence."""
    shape = (1,) * num_frames.ndim + (logits.shape[-3], 1)
    frame = jax.lax.broadcasted_iota(jnp.int32, shape, num_frames.ndim)
    return (frame < num_frames[..., None, None]) & (label != OUTSIDE)


def one_hot(index, x):
    """bool, the shape of x [..., T, U1, V] up to broadcasting: where the class is `index`; nowhere if it is none.

    Used instead of a gather: it shards over any axis and its gradient is element-wise.
    """
    classes = jax.lax.broadcasted_iota(jnp.int32, (1,) * (x.ndim - 1) + x.shape[-1:], x.ndim - 1)
    return classes == (index if isinstance(index, int) else index[..., None])


def log_sum_exp(x):
    """(log of the summed exponentials over the last axis, whether all are zero, whether one is NaN or infinite)."""
    peak = jax.lax.stop_gradient(jnp.max(x, -1, initial=-jnp.inf))
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    total = jnp.sum(jnp.exp(x - peak[..., None]), -1)
    dead = total == 0
    lse = jnp.where(dead, -jnp.inf, peak + jnp.log(jnp.where(dead, 1, total)))
    return lse, dead, jnp.isnan(lse) | jnp.isposinf(lse)


def _heads(logits, label, num_frames, blanks, durations, bernoulli):
    """(rows inside, logits of the classes, of the durations, of a Bernoulli blank), 0 outside.

    Selected before any arithmetic: whatever stands outside reaches neither value nor gradient.
    """
    inside = inside_rows(logits, label, num_frames)
    x = jnp.where(inside[..., None], logits, 0).astype(accumulation_dtype(logits.dtype))
    classes, lengths = x[..., : x.shape[-1] - durations], x[..., x.shape[-1] - durations :]
    if not bernoulli:
        return inside, classes, lengths, None
    is_blank = one_hot(blanks[0], classes)
    return inside, jnp.where(is_blank, -jnp.inf, classes), lengths, jnp.sum(jnp.where(is_blank, classes, 0), -1)


def softmax_emission(
    logits,
    label,
    num_frames,
    *,
    blanks: tuple[int, ...],
    normalize: bool = True,
    durations: int = 0,
    bernoulli: bool = False,
):
    """The emission in plain JAX, differentiable any number of times in both modes.

    Parameters
    ----------
    logits : Array, floating [..., T, U1, V + D]
    label : Array, int32 [..., 1 or T, U1]
        Class of the label arc, or `NO_LABEL`, or `OUTSIDE`.
    num_frames : Array, int32 [...]
    blanks : tuple of int
        The blank classes, each in [0, V).
    normalize : bool
        False: the input already is log-probabilities.
    durations : int
        D: so many logits at the end are a softmax of their own.
    bernoulli : bool
        The only blank is no part of the softmax; its logit is that of a Bernoulli variable.

    Returns
    -------
    tuple of Array, float32 (float64 for float64) [..., T, U1]
        log_blank for each blank class, log_label, log-probability of each duration, lse. Outside the sequence -inf, and
        0 for lse. NaN where the row holds a NaN or +inf.
    """
    inside, x, lengths, z = _heads(logits, label, num_frames, blanks, durations, bernoulli)
    nothing = jnp.zeros(x.shape[:-1], x.dtype), jnp.zeros(x.shape[:-1], bool), jnp.zeros(x.shape[:-1], bool)
    lse, dead, bad = log_sum_exp(x) if normalize else nothing
    bad_row = bad
    if durations:
        lengths_lse, lengths_dead, lengths_bad = log_sum_exp(lengths) if normalize else nothing
        bad_row |= lengths_bad
    if bernoulli:
        bad_row |= jnp.isnan(z) | jnp.isposinf(z)

    def plane(value):
        return jnp.where(inside, jnp.where(bad_row | jnp.isposinf(value), jnp.nan, value), -jnp.inf)

    def log_probability(index):
        return jnp.sum(jnp.where(one_hot(index, x), x, 0), -1) - jnp.where(dead, 0, lse)

    log_label = log_probability(label)
    if bernoulli:
        impossible = jnp.isneginf(z)  # where it must not meet the derivative of log_sigmoid
        z = jnp.where(impossible, 0, z)
        log_blanks = [jnp.where(impossible, -jnp.inf, jax.nn.log_sigmoid(z))]
        log_label = log_label + jnp.where(impossible, 0, jax.nn.log_sigmoid(-z))
        log_label = jnp.where(label == blanks[0], log_blanks[0], log_label)
    else:
        log_blanks = [log_probability(blank) for blank in blanks]
    log_label = jnp.where(label == NO_LABEL, -jnp.inf, plane(log_label))
    log_durations = [lengths[..., i] - jnp.where(lengths_dead, 0, lengths_lse) for i in range(durations)]
    return (*map(plane, log_blanks), log_label, *map(plane, log_durations), jnp.where(inside, lse, 0))


def backward_reference(
    logits, label, num_frames, lse, scale, clamp, *cotangents, blanks, normalize, durations=0, bernoulli=False
):
    """Gradient of the logits, as in the head of this file; `clamp` clips it before `scale` multiplies it."""
    ct_blanks, ct_label = cotangents[: len(blanks)], cotangents[len(blanks)]
    inside, x, lengths, z = _heads(logits, label, num_frames, blanks, durations, bernoulli)
    used = inside & functools.reduce(jnp.logical_or, (ct != 0 for ct in cotangents))
    x, lengths = (jnp.where(used[..., None], head, 0) for head in (x, lengths))  # exp of the others may be infinite
    if bernoulli:  # a label that is the blank counts as one
        same = label == blanks[0]
        ct_blank, ct_label = ct_blanks[0] + jnp.where(same, ct_label, 0), jnp.where(same, ct_label - ct_label, ct_label)
        of_blank = ct_blank * jax.nn.sigmoid(-z) - ct_label * jax.nn.sigmoid(z)
        ct_blanks = ()
    gradient = jnp.where(one_hot(label, x), ct_label[..., None], 0)
    for blank, ct in zip(blanks, ct_blanks):
        gradient = gradient + jnp.where(one_hot(blank, x), ct[..., None], 0)
    if normalize:
        safe = jnp.where(used & ~jnp.isneginf(lse), lse, 0)
        gradient = gradient - jnp.exp(x - safe[..., None]) * sum(ct_blanks, ct_label)[..., None]
    if bernoulli:
        gradient = jnp.where(one_hot(blanks[0], x), of_blank[..., None], gradient)
    if durations:
        of_lengths = jnp.stack(cotangents[len(blanks) + 1 :], -1)
        if normalize:
            lengths_lse, dead, _ = log_sum_exp(lengths)
            softmax = jnp.exp(lengths - jnp.where(used & ~dead, lengths_lse, 0)[..., None])
            of_lengths = of_lengths - softmax * jnp.sum(of_lengths, -1, keepdims=True)
        gradient = jnp.concatenate([gradient, of_lengths], -1)
    gradient = clip_and_scale(gradient, scale, clamp)
    return [jnp.where(used[..., None], gradient, 0).astype(logits.dtype)]


def _planes(logits, label, num_frames, *, blanks, durations, **_):
    plane = (logits.shape[-3:-1], accumulation_dtype(logits.dtype))
    return [plane] * (len(blanks) + durations + 2)


def _unsupported(kernels, logits, label, num_frames, *_, blanks, durations, **__):
    """Limits of xla_kernels/common/shape.h; those of CUDA are what its int32 can count."""
    frames, columns, row = logits.shape[-3:]
    limits = [("blank classes", len(blanks), 63), ("durations", durations, 63), ("logits of a node", row, 1 << 26)]
    if kernels == "cuda":
        most = (1 << 31) - 1
        limits += [("nodes [T, U + 1]", frames * columns, most), ("sequences", math.prod(num_frames.shape), most)]
    return _ffi.beyond(*limits)


_forward_kernel = _ffi.define(
    "jax_rnnt_softmax_emission_fwd", reference=softmax_emission, results=_planes, unsupported=_unsupported
)
_backward_kernel = _ffi.define(
    "jax_rnnt_softmax_emission_bwd",
    reference=backward_reference,
    results=lambda logits, *_, **__: [(logits.shape[-3:], logits.dtype)],
    aliases={0: 0},
    unsupported=_unsupported,
)


def forward(
    logits, label, num_frames, *, blanks, normalize=True, durations=0, bernoulli=False, strict=False
) -> Sequence[jax.Array]:
    """`softmax_emission` by the kernel: reads the logits inside the lengths once."""
    params = dict(blanks=blanks, normalize=normalize, durations=durations, bernoulli=bernoulli)
    return _forward_kernel(logits, label, num_frames, num_batch_dims=logits.ndim - 3, strict=strict, **params)


def backward(
    logits,
    label,
    num_frames,
    lse,
    cotangents,
    scale,
    clamp,
    *,
    blanks,
    normalize=True,
    durations=0,
    bernoulli=False,
    strict=False,
    alias=True,
) -> jax.Array:
    """scale * clip(vjp of the emission at `cotangents`, clamp): reads the logits once and writes the gradient once.

    `cotangents` are those of (*log_blank, log_label, *log_duration). `scale` and `clamp` are per sequence, [...]; clamp
    <= 0 clips nothing. With `alias` the result takes the memory of the logits where XLA can prove that they are not
    used again.
    """
    params = dict(blanks=blanks, normalize=normalize, durations=durations, bernoulli=bernoulli)
    params |= dict(num_batch_dims=logits.ndim - 3, strict=strict, alias=alias)
    return _backward_kernel(logits, label, num_frames, lse, scale, clamp, *cotangents, **params)[0]


@dataclasses.dataclass(frozen=True)
class Softmax(Emission):
    """One softmax over all classes, and what else the head of this file has.

    Planes are `slots`, one for each blank class in their order, "label", and "duration+i" for i < `durations`.
    """

    slots: tuple[str, ...] = ("blank",)
    durations: int = 0
    bernoulli: bool = False

    def dimensions(self, logits):
        return logits.shape[-3], logits.shape[-1] - self.durations

    def _attributes(self):
        return {name: getattr(self, name) for name in ("blanks", "normalize", "durations", "bernoulli")}

    def _names(self):
        return (*self.slots, "label", *(f"duration+{i}" for i in range(self.durations)))

    def reference(self, logits, nodes):
        *planes, _ = softmax_emission(logits, *nodes, **self._attributes())
        return dict(zip(self._names(), planes))

    def forward(self, logits, nodes, *, strict=False):
        *planes, lse = forward(logits, *nodes, strict=strict, **self._attributes())
        return dict(zip(self._names(), planes)), lse

    def backward(self, logits, nodes, lse, cotangents, scale, clamp, *, strict=False, alias=True):
        label, num_frames = nodes
        cotangents = tuple(cotangents[name] for name in self._names())
        params = dict(strict=strict, alias=alias, **self._attributes())
        return backward(logits, label, num_frames, lse, cotangents, scale, clamp, **params)


def checked(function: str, logits, blank, fused_log_softmax) -> Softmax:
    """The emission of a public loss from its arguments, of which the blank may count from the end."""
    blank = _checks.class_index(function, "blank", blank, logits.shape[-1])
    return Softmax((blank,), _checks.boolean(function, "fused_log_softmax", fused_log_softmax))
