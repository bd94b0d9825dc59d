"""Softmax emission: logits -> log-probability of the arcs that leave each node. Row-wise over the classes.

B sequences (`...`, any number of batch dimensions), T frames, U1 columns, V classes, K blank classes.

    lse        = log sum over v of exp(x[v])
    log_blank  = x[blank] - lse                log_label = x[label] - lse            (-inf where there is no label arc)
    dx[v]      = c_blank [v = blank] + c_label [v = label] - exp(x[v] - lse) (c_blank + c_label)

for cotangents c of the log-probabilities. With ``normalize=False`` the input already is log-probabilities: lse is 0 and
the softmax term of the gradient is dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _ffi
from jax_rnnt.emissions.emission import NO_LABEL, OUTSIDE, Emission
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


def softmax_emission(logits, label, num_frames, *, blanks: tuple[int, ...], normalize: bool = True):
    """The emission in plain JAX, differentiable any number of times in both modes.

    Parameters
    ----------
    logits : Array, floating [..., T, U1, V]
    label : Array, int32 [..., 1 or T, U1]
        Class of the label arc, or `NO_LABEL`, or `OUTSIDE`.
    num_frames : Array, int32 [...]
    blanks : tuple of int
        The blank classes, each in [0, V).
    normalize : bool
        False: the input already is log-probabilities.

    Returns
    -------
    tuple of Array, float32 (float64 for float64) [..., T, U1]
        log_blank for each blank class, log_label, lse. Outside the sequence -inf, -inf and 0. NaN where the row holds
        a NaN or +inf.
    """
    inside = inside_rows(logits, label, num_frames)
    # Selected before any arithmetic: whatever stands outside reaches neither value nor gradient.
    x = jnp.where(inside[..., None], logits, 0).astype(accumulation_dtype(logits.dtype))
    if normalize:
        lse, dead, bad = log_sum_exp(x)
    else:
        lse = jnp.zeros(x.shape[:-1], x.dtype)
        dead = bad = jnp.zeros_like(lse, bool)

    def log_probability(index):
        value = jnp.sum(jnp.where(one_hot(index, x), x, 0), -1) - jnp.where(dead, 0, lse)
        value = jnp.where(bad | jnp.isposinf(value), jnp.nan, value)
        return jnp.where(inside, value, -jnp.inf)

    log_label = jnp.where(label == NO_LABEL, -jnp.inf, log_probability(label))
    return (*(log_probability(b) for b in blanks), log_label, jnp.where(inside, lse, 0))


def backward_reference(logits, label, num_frames, lse, scale, clamp, *cotangents, blanks, normalize):
    """Gradient of the logits, as in the head of this file; `clamp` clips it before `scale` multiplies it."""
    *ct_blanks, ct_label = cotangents
    inside = inside_rows(logits, label, num_frames)
    x = jnp.where(inside[..., None], logits, 0).astype(lse.dtype)
    used = inside & functools.reduce(jnp.logical_or, (ct != 0 for ct in cotangents))
    gradient = jnp.where(one_hot(label, x), ct_label[..., None], 0)
    for blank, ct in zip(blanks, ct_blanks):
        gradient = gradient + jnp.where(one_hot(blank, x), ct[..., None], 0)
    if normalize:
        safe = jnp.where(used & ~jnp.isneginf(lse), lse, 0)
        gradient = gradient - jnp.exp(x - safe[..., None]) * sum(cotangents)[..., None]
    bound, scale = (x[..., None, None, None] for x in (clamp, scale))
    gradient = jnp.where(bound > 0, jnp.clip(gradient, -bound, bound), gradient) * scale
    return [jnp.where(used[..., None], gradient, 0).astype(logits.dtype)]


def _planes(logits, label, num_frames, *, blanks, normalize):
    plane = (logits.shape[-3:-1], accumulation_dtype(logits.dtype))
    return [plane] * (len(blanks) + 2)


_forward_kernel = _ffi.define("jax_rnnt_softmax_emission_fwd", reference=softmax_emission, results=_planes)
_backward_kernel = _ffi.define(
    "jax_rnnt_softmax_emission_bwd",
    reference=backward_reference,
    results=lambda logits, *_, **__: [(logits.shape[-3:], logits.dtype)],
    aliases={0: 0},
)


def forward(logits, label, num_frames, *, blanks, normalize, strict=False):
    """`softmax_emission` by the kernel: reads the logits inside the lengths once."""
    params = dict(num_batch_dims=logits.ndim - 3, strict=strict, blanks=blanks, normalize=normalize)
    return _forward_kernel(logits, label, num_frames, **params)


def backward(logits, label, num_frames, lse, cotangents, scale, clamp, *, blanks, normalize, strict=False, alias=True):
    """scale * clip(vjp of the emission at `cotangents`, clamp): reads the logits once and writes the gradient once.

    `cotangents` are those of (*log_blank, log_label). `scale` and `clamp` are per sequence, [...]; clamp <= 0 clips
    nothing. With `alias` the result takes the memory of the logits where XLA can prove that they are not used again.
    """
    params = dict(num_batch_dims=logits.ndim - 3, strict=strict, alias=alias, blanks=blanks, normalize=normalize)
    return _backward_kernel(logits, label, num_frames, lse, scale, clamp, *cotangents, **params)[0]


@dataclasses.dataclass(frozen=True)
class Softmax(Emission):
    """One softmax over all classes. `slots` names the arcs of the blank classes, in their order."""

    slots: tuple[str, ...] = ("blank",)

    def _params(self):
        return dict(blanks=self.blanks, normalize=self.normalize)

    def reference(self, logits, nodes):
        *planes, _ = softmax_emission(logits, *nodes, **self._params())
        return dict(zip((*self.slots, "label"), planes))

    def forward(self, logits, nodes, *, strict=False):
        *planes, lse = forward(logits, *nodes, strict=strict, **self._params())
        return dict(zip((*self.slots, "label"), planes)), lse

    def backward(self, logits, nodes, lse, cotangents, scale, clamp, *, strict=False, alias=True):
        cotangents = tuple(cotangents[slot] for slot in (*self.slots, "label"))
        params = dict(strict=strict, alias=alias, **self._params())
        label, num_frames = nodes
        return backward(logits, label, num_frames, lse, cotangents, scale, clamp, **params)


def checked(function: str, logits, blank, fused_log_softmax) -> Softmax:
    """The emission of a public loss from its arguments, of which the blank may count from the end."""
    blank = _checks.class_index(function, "blank", blank, logits.shape[-1])
    return Softmax((blank,), _checks.boolean(function, "fused_log_softmax", fused_log_softmax))
