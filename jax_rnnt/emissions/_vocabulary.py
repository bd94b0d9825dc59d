"""Emission of rows whose classes lie on several devices: each holds V / n of them, in the order of the axis.

The kernel makes the softmax of a device's own classes. The devices exchange planes: a reference near the largest logit
of a node, then sums and picks. With own sums S_d = sum over own v of exp(x[v]) and a reference R that all share:

    m_d = log S_d - R        log S = R + log sum over d of exp(m_d)        l[label] = l_d[label] + m_d - log(S / exp R)

Differences of logits stay small where all logits share an offset, so float32 keeps them.

The backward pass is local. The softmax over all classes is w_d = S_d / S times that of the own ones. So the kernel runs
on its own sums, with cotangents whose total is w_d times the total of all arcs; one class, the first own column, pays
for the difference and is written anew.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _xla
from jax_rnnt.emissions._emission import NO_LABEL, Wrapper, clip_and_scale
from jax_rnnt.emissions._norm import is_anchored
from jax_rnnt.emissions._softmax import Softmax, accumulation_dtype, backward, inside_rows, one_hot

_TOTAL = "total"  # of the cotangents of all arcs of a node, times w_d


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OwnClasses(Softmax):
    """A softmax over the classes of one device. `slots` are columns of its rows; `classes` is V of all devices."""

    classes: int = 0

    def dimensions(self, logits):
        return logits.shape[-3], self.classes

    def forward(self, logits, nodes, *, strict=False):
        """(planes, (norm, logit of the first column))"""
        planes, norm = super().forward(logits, nodes, strict=strict)
        anchor = logits[..., self.blanks[0]].astype(norm.dtype)
        return planes, (norm, jnp.where(inside_rows(logits, *nodes), anchor, 0))

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        """As of a `Softmax` whose cotangents have the total `cotangents[_TOTAL]`; residuals: (norm, first plane)."""
        norm, log_first = residuals
        label, num_frames = nodes
        first, *others = (cotangents[name] for name in self._names())
        in_kernel = first
        if self.normalize:
            total = cotangents[_TOTAL]
            in_kernel = total - sum(others)
        params = dict(strict=strict, alias=alias, **self._attributes())
        operands = norm, (in_kernel, *others), scale, clamp
        gradient = backward(logits, label, num_frames, *operands, **params)
        if not self.normalize:
            return gradient
        used = functools.reduce(jnp.logical_or, (ct != 0 for ct in (first, in_kernel, *others)))
        exact = first + jnp.where(label == self.blanks[0], others[-1], 0) - jnp.exp(log_first) * total
        exact = jnp.where(used, clip_and_scale(exact, scale, clamp), 0)
        return gradient.at[..., self.blanks[0]].set(exact.astype(gradient.dtype))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SplitVocabulary(Wrapper):
    """A `Softmax` over all classes, from the rows of this device. Runs where `axis` is a manual mesh axis.

    `inner` reads the rows as `head`, or is another layout of it; `full` reads rows of all classes.
    """

    head: OwnClasses
    full: Softmax
    axis: str
    size: int

    @classmethod
    def own_head(cls, full: Softmax, size: int, classes: int) -> OwnClasses:
        """The emission of the rows of one device of `size`."""
        own = classes // size
        columns = tuple(dict.fromkeys(blank % own for blank in full.blanks))
        return OwnClasses(columns, full.normalize, tuple(f"column+{i}" for i in columns), classes=classes)

    @property
    def split_axes(self):
        return (self.axis, *self.inner.split_axes)

    @property
    def blanks(self):
        return self.full.blanks

    def normalized(self, logits):
        return self.full.normalize

    def dimensions(self, logits):
        return self.inner.dimensions(logits)

    def _own(self, logits):
        """(classes of a device, the first class of this one)"""
        own = self.head.classes // self.size
        return own, jax.lax.axis_index(self.axis) * own

    def nodes(self, logits, targets, num_frames, num_labels):
        """(nodes of `inner` with own labels, label map of all)"""
        label, *rest = self.inner.nodes(logits, targets, num_frames, num_labels)
        own, first = self._own(logits)
        first = first.astype(label.dtype)
        mine = (label >= first) & (label < first + own)
        return (jnp.where(mine, label - first, jnp.minimum(label, NO_LABEL)), *rest), label

    def without(self, nodes, masked):
        inner, label = nodes
        return self.inner.without(inner, masked), label

    def _own_picks(self, logits, nodes, blanks, label):
        """Planes to sum over devices, in the order of `_slots`: -inf where there is no arc, 0 where another has it."""
        (own_label, *_), all_labels = nodes
        inside = self._inside(logits, nodes)
        picks = [jnp.where(mine, x, 0) for mine, x in zip(self._mine(logits), blanks)]
        picks.append(jnp.where(own_label >= 0, label, jnp.where(all_labels >= 0, 0, -jnp.inf)))
        return [jnp.where(inside, x, -jnp.inf) for x in picks]

    @property
    def _slots(self):
        return *self.full.slots, "label"

    def _inside(self, logits, nodes):
        (_, num_frames, *_), label = nodes
        frames, _ = self.inner.dimensions(logits)
        frame = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + (frames, 1), num_frames.ndim)
        return (frame < num_frames[..., None, None]) & (label >= NO_LABEL)

    def _mine(self, logits):
        """Whether each of `full.blanks` is a class of this device."""
        own, first = self._own(logits)
        return [(blank >= first) & (blank < first + own) for blank in self.full.blanks]

    def _column(self, blank, own):
        return f"column+{blank % own}"

    def forward(self, logits, nodes, *, strict=False):
        return _forward(self, strict, logits, nodes)

    def _forward(self, logits, nodes, strict):
        planes, (norm, anchor) = self.inner.forward(logits, nodes[0], strict=strict)
        own, _ = self._own(logits)
        first = planes[self.head.slots[0]]
        blanks, label = [planes[self._column(blank, own)] for blank in self.full.blanks], planes["label"]
        if not self.full.normalize:
            made = _xla.sum_over(self.axis, jnp.stack(self._own_picks(logits, nodes, blanks, label)))
            return dict(zip(self._slots, made)), (norm, first, jnp.ones_like(norm))
        anchored, dead = is_anchored(norm), norm == 0
        reference = jnp.where(dead, -jnp.inf, jnp.where(anchored, anchor, norm))
        shared = jax.lax.pmax(reference, self.axis)
        shared = jnp.where(jnp.isneginf(shared), 0, shared)
        mass = reference - shared - jnp.where(anchored, first, 0)  # log(S_d / exp R)
        picks = self._own_picks(logits, nodes, [x + mass for x in blanks], label + mass)
        total, *picks = _xla.sum_over(self.axis, jnp.stack([jnp.exp(mass), *picks]))
        none = total == 0
        log_total = jnp.log(jnp.where(none, 1, total))
        poison = total - total  # NaN in a class makes all arcs of the node NaN
        picks = [jnp.where(none, -jnp.inf, jnp.minimum(x - log_total, 0)) + poison for x in picks]
        share = jnp.where(dead, 0, jnp.exp(mass - log_total))
        return dict(zip(self._slots, picks)), (norm, first, share)

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        (own_label, *_), _ = nodes
        norm, first, share = residuals
        own, _ = self._own(logits)
        local: dict[str, Any] = dict.fromkeys(self.head.slots, 0)
        for blank, slot, mine in zip(self.full.blanks, self.full.slots, self._mine(logits)):
            local[self._column(blank, own)] += jnp.where(mine, cotangents[slot], 0)
        local["label"] = jnp.where(own_label >= 0, cotangents["label"], 0)
        local[_TOTAL] = sum(cotangents.values()) * share
        operands = logits, nodes[0], (norm, first), local, scale, clamp
        return self.inner.backward(*operands, strict=strict, alias=alias)

    def reference(self, logits, nodes):
        (own_label, _), _ = nodes
        _, first = self._own(logits)
        inside = self._inside(logits, nodes)
        x = jnp.where(inside[..., None], logits, 0).astype(accumulation_dtype(logits.dtype))
        own_blanks = [jnp.reshape(blank - first, (1,) * (x.ndim - 1)) for blank in self.full.blanks]
        picks = [jnp.sum(jnp.where(one_hot(blank, x), x, 0), -1) for blank in own_blanks]
        picks = self._own_picks(logits, nodes, picks, jnp.sum(jnp.where(one_hot(own_label, x), x, 0), -1))
        if not self.full.normalize:
            picks = _xla.sum_over(self.axis, jnp.stack(picks))
            return dict(zip(self._slots, jnp.where(jnp.isposinf(picks), jnp.nan, picks)))
        peak = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x, -1)), self.axis)
        peak = jnp.where(jnp.isneginf(peak), 0, peak)
        total, *picks = _xla.sum_over(self.axis, jnp.stack([jnp.sum(jnp.exp(x - peak[..., None]), -1), *picks]))
        none, bad = total == 0, jnp.isnan(total) | jnp.isposinf(peak)
        log_total = jnp.log(jnp.where(none, 1, total))
        picks = [jnp.where(none, -jnp.inf, pick - peak - log_total) for pick in picks]
        return {slot: jnp.where(bad, jnp.nan, pick) for slot, pick in zip(self._slots, picks)}

    def pullback(self, logits, nodes, cotangents, scale, clamp):
        if not isinstance(self.inner, OwnClasses):  # an error
            return self.inner.pullback(logits, nodes[0], cotangents, scale, clamp)
        return super().pullback(logits, nodes, cotangents, scale, clamp)

    def joined(self, x):
        return _xla.shared(self.axis, self.inner.joined(x))

    def joined_planes(self, plane):
        return _xla.shared(self.axis, self.inner.joined_planes(plane))


# Its derivative belongs to `reference`: that of the exchange has none with respect to norm and the largest reference.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward(emission, strict, logits, nodes):
    return emission._forward(logits, nodes, strict)


@_forward.defjvp
def _(emission, strict, primals, tangents):
    logits, nodes = primals
    planes, saved = _forward(emission, strict, *primals)
    _, of_planes = jax.jvp(lambda x: emission.reference(x, nodes), (logits,), tangents[:1])
    return (planes, saved), (of_planes, jax.tree.map(jnp.zeros_like, saved))
