"""Emission of rows whose logits are split over several devices: each holds 1 / n of a row, in the order of the axis.

The kernel makes the softmax of a device's own classes. The devices exchange planes: a reference near the largest logit
of a node, then sums and picks. With own sums S_d = sum over own v of exp(x[v]) and a reference R that all share:

    m_d = log S_d - R        log S = R + log sum over d of exp(m_d)        l[label] = l_d[label] + m_d - log(S / exp R)

Differences of logits stay small where all logits share an offset, so float32 keeps them.

The backward pass is local. With cotangents c of the arcs, C their sum, and w_d = S_d / S, which is exp(m_d - log(S /
exp R)), the softmax over all classes is w_d times that of the own ones:

    dx[v] = sum of c over arcs of class v - C exp(x[v]) / S = ... - (w_d C) exp(x[v]) / S_d

So the kernel gets w_d C as the total that its softmax multiplies.

The last D logits of a row may be another head: the durations of TDT, the blank of HAT. They are on the last device, and
every device runs the same kernel. So the kernel leaves the last D columns out on all of them. These columns are planes
here: classes that join the sums on all devices but the last, the other head there. The kernel gets their gradients as
the cotangents of its durations, which have no softmax where there is a total.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _xla
from jax_rnnt.emissions._emission import NO_LABEL, Exchange, Rows, inside_rows
from jax_rnnt.emissions._norm import is_anchored, row_sum
from jax_rnnt.emissions._softmax import Softmax, accumulation_dtype, pick
from jax_rnnt.sharding import _axes

TOTAL = "total"  # the plane of w_d C


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OwnClasses(Softmax):
    """A softmax over the first columns of one device; the last ones, `num_durations` of them, are planes.

    `slots` are columns of its rows; `classes` is V of all devices.
    """

    classes: int = 0

    def tokens(self, classes):
        return self.classes

    def forward(self, logits, nodes, *, strict=False):
        """Returns (planes, (norm, logits of the first column and of the last ones))."""
        planes, norm = super().forward(logits, nodes, strict=strict)
        columns = self.blanks[0], *range(logits.shape[-1] - self.num_durations, logits.shape[-1])
        inside = inside_rows(nodes, logits.shape[-3])
        return planes, (norm, *(jnp.where(inside, logits[..., i].astype(norm.dtype), 0) for i in columns))

    def _cotangents(self):
        return *super()._cotangents(), *[TOTAL] * self.normalize


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SplitVocabulary(Rows[Any, Any]):
    """A `Softmax` over all logits of a row, from those of this device. It runs where `axis` is a manual mesh axis.

    `inner` reads the rows as `softmax`, or makes them for it. `full` reads rows of all logits, of which a device has
    `columns`.
    """

    inner: Rows
    softmax: OwnClasses
    full: Softmax
    axis: str
    size: int
    columns: int

    @classmethod
    def own_softmax(cls, full: Softmax, size: int, logits: int) -> OwnClasses:
        """Returns the emission of the rows of one device of `size`; `full` is for rows of `logits`."""
        further, width = full.num_durations + full.bernoulli, logits // size
        if width <= further:
            others = f"the {further} durations" if full.num_durations else "the blank of HATLoss"
            expected = f"each device must hold more logits of a row than {others}"
            raise _checks.bad_value(f"vocab_axis: {expected}, got {logits} logits on {size} devices.")
        if full.bernoulli and full.blanks[0] != logits - 1:
            expected = f"the blank of HATLoss must be the last class, -1 or {logits - 1}"
            raise _checks.bad_value(f"vocab_axis: {expected}, got {full.blanks[0]}.")
        columns = tuple({blank % width: None for blank in full.blanks if blank % width < width - further}) or (0,)
        slots = tuple(f"column+{i}" for i in columns)
        return OwnClasses(columns, full.normalize, slots, further, classes=logits - full.num_durations)

    @property
    def blanks(self):
        return self.full.blanks

    @property
    def normalized(self):
        return self.full.normalize

    @property
    def _further(self):
        """The columns that the kernel leaves out."""
        return range(self.columns - self.softmax.num_durations, self.columns)

    def _is_last(self):
        return jax.lax.axis_index(self.axis) == self.size - 1

    def _column(self, label):
        """Returns the column of each label, or of a blank, in its softmax; -1 where this device has none."""
        column = label - (jax.lax.axis_index(self.axis) * self.columns).astype(jnp.int32)
        mine = (label >= 0) & (column >= 0) & (column < self.columns)
        if self.full.bernoulli:  # the blank is no class
            mine &= label != self.full.blanks[0]
        return jnp.where(mine, column, -1)

    def _own(self, nodes):
        """Returns the nodes with the labels of the kernel's columns alone."""
        column = self._column(nodes.label)
        in_kernel = (column >= 0) & (column < self._further.start)
        return nodes._replace(label=jnp.where(in_kernel, column, jnp.minimum(nodes.label, NO_LABEL)))

    @property
    def _blanks(self):
        """The blanks in the softmax, {slot: class}."""
        return {} if self.full.bernoulli else dict(zip(self.full.slots, self.full.blanks))

    def _own_picks(self, inside, all_labels, blanks, label, others):
        """Planes to sum over devices: blanks, label, other head; -inf where there is no arc, 0 where another has it.

        For HAT, the last plane tells which labels are the blank: types say that labels vary over devices, as logits do.
        """
        picks = [jnp.where(self._column(blank) >= 0, x, 0) for blank, x in zip(self._blanks.values(), blanks)]
        picks.append(jnp.where(self._column(all_labels) >= 0, label, jnp.where(all_labels >= 0, 0, -jnp.inf)))
        if self.full.bernoulli:
            others = *others, jnp.where(all_labels == self.full.blanks[0], 1, jnp.zeros_like(label))
        picks += [jnp.where(self._is_last(), x, 0) for x in others]
        return [jnp.where(inside, x, -jnp.inf) for x in picks]

    def _planes(self, tokens, others, poison):
        """Returns planes by slot, from log-probabilities of the softmax and sums of `_own_picks` for the other head."""
        *blanks, label = tokens
        planes = dict(zip(self._blanks, blanks))
        if self.full.bernoulli:
            impossible = jnp.isneginf(others[0])  # since -inf must not meet the derivative of log_sigmoid
            z, is_blank = jnp.where(impossible, 0, others[0]), others[1] > 0
            (slot,), blank = self.full.slots, jnp.where(impossible, -jnp.inf, jax.nn.log_sigmoid(z))
            label = label + jnp.where(impossible, 0, jax.nn.log_sigmoid(-z))
            planes[slot], label = blank, jnp.where(is_blank, blank, label)
        elif others:
            if self.full.normalize:
                row = row_sum(jnp.stack(others), 0)
                others = [row.log_probability(x) for x in others]
            planes |= {f"duration+{i}": x for i, x in enumerate(others)}
        return {slot: x + poison for slot, x in (planes | {"label": label}).items()}

    def forward(self, logits, nodes, *, strict=False):
        return _forward(self, strict, logits, nodes)

    def _forward(self, logits, nodes, strict):
        planes, (norm, anchor, *others) = self.inner.forward(logits, self._own(nodes), strict=strict)
        all_labels = nodes.label
        inside, column = inside_rows(nodes, norm.shape[-2]), self._column(all_labels)
        others = {i: jnp.where(inside, x, -jnp.inf) for i, x in zip(self._further, others)}
        others = {i: jnp.where(jnp.isposinf(x), jnp.nan, x) for i, x in others.items()}
        first = planes[self.softmax.slots[0]]
        if self.full.normalize:
            anchored, dead = is_anchored(norm), norm == 0
            reference = jnp.where(dead, -jnp.inf, jnp.where(anchored, anchor, norm))
            classes = {i: jnp.where(self._is_last(), -jnp.inf, x) for i, x in others.items()}
            largest = functools.reduce(jnp.fmax, classes.values(), reference)
            shared = jax.lax.pmax(largest, self.axis)
            shared = jnp.where(jnp.isneginf(shared), 0, shared)
            mass = reference - shared - jnp.where(anchored, first, 0)  # log(S_d / exp R)
        else:
            mass = shared = jnp.zeros_like(norm)

        def log_mass(i):
            """Returns the log of a class, relative to exp R."""
            return others[i] - shared if i in others else planes[f"column+{i}"] + mass

        label = planes["label"] + mass
        for i in others:
            label = jnp.where(column == i, log_mass(i), label)
        blanks = [log_mass(blank % self.columns) for blank in self._blanks.values()]
        picks = self._own_picks(inside, all_labels, blanks, label, others.values())
        count = len(blanks) + 1
        if not self.full.normalize:
            picks = [*_axes.sum_over(self.axis, jnp.stack(picks))]
            return self._planes(picks[:count], picks[count:], 0), (norm,)
        own_total = sum((jnp.exp(x - shared) for x in classes.values()), jnp.exp(mass))
        total, *picks = _axes.sum_over(self.axis, jnp.stack([own_total, *picks]))
        tokens, others = picks[:count], picks[count:]
        none = total == 0
        log_total = jnp.log(jnp.where(none, 1, total))
        # NaN in a logit makes all arcs of the node NaN.
        poison = sum((jnp.where(jnp.isnan(x), jnp.nan, 0) for x in others), total - total)
        tokens = [jnp.where(none, -jnp.inf, jnp.minimum(x - log_total, 0)) for x in tokens]
        results = self._planes(tokens, others, poison)
        # For the columns left out: probabilities as classes or as durations, or the logit of a Bernoulli variable.
        of_head = others if self.full.bernoulli else [jnp.exp(results[f"duration+{i}"]) for i in range(len(others))]
        shares = [jnp.where(dead, 0, jnp.exp(mass - log_total))]
        for x, y in zip(classes.values(), of_head):
            shares.append(jnp.where(self._is_last(), y, jnp.where(none, 0, jnp.exp(x - shared - log_total))))
        return results, (norm, *shares)

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        own_nodes, column = self._own(nodes), self._column(nodes.label)
        norm, *shares = residuals
        label, blanks = cotangents["label"], {blank: cotangents[slot] for slot, blank in self._blanks.items()}
        of_head = [cotangents[f"duration+{i}"] for i in range(self.full.num_durations)]
        if self.full.bernoulli:  # a label that is the blank counts as one
            (slot,), same, z = self.full.slots, nodes.label == self.full.blanks[0], shares[1]
            blank, label = cotangents[slot] + jnp.where(same, label, 0), jnp.where(same, label - label, label)
            of_head = [blank * jax.nn.sigmoid(-z) - label * jax.nn.sigmoid(z)]
        elif self.full.normalize:
            of_head = [x - share * sum(of_head) for x, share in zip(of_head, shares[1:])]
        total = sum(blanks.values(), label)

        def of_blanks(place):
            """Returns the cotangents of the blanks in this column."""
            here = ((blank, ct) for blank, ct in blanks.items() if blank % self.columns == place)
            return sum((jnp.where(self._column(blank) >= 0, ct, 0) for blank, ct in here), jnp.zeros_like(total))

        local = {slot: of_blanks(place) for slot, place in zip(self.softmax.slots, self.softmax.blanks)}
        local["label"] = jnp.where(own_nodes.label >= 0, label, 0)
        for i, place in enumerate(self._further):
            of_class = of_blanks(place) + jnp.where(column == place, label, 0)
            if self.full.normalize:
                of_class = of_class - shares[1 + i] * total
            local[f"duration+{i}"] = jnp.where(self._is_last(), of_head[i], of_class)
        if self.full.normalize:
            local[TOTAL] = total * shares[0]
        local = dict(zip(local, _xla.vary_together(*local.values())))
        return self.inner.backward(logits, own_nodes, norm, local, scale, clamp, strict=strict, alias=alias)

    def reference(self, logits, nodes):
        if not isinstance(self.inner, OwnClasses):
            return self.inner.reference(logits, nodes)  # this raises an error: tiles have no reference
        all_labels, inside = nodes.label, inside_rows(nodes, logits.shape[-3])
        x = jnp.where(inside[..., None], logits, 0).astype(accumulation_dtype(logits.dtype))
        blanks = [pick(jnp.reshape(self._column(blank), (1,) * (x.ndim - 1)), x) for blank in self._blanks.values()]
        others = [pick(i, x) for i in self._further]
        picks = self._own_picks(inside, all_labels, blanks, pick(self._column(all_labels), x), others)
        count = len(blanks) + 1
        if not self.full.normalize:
            picks = _axes.sum_over(self.axis, jnp.stack(picks))
            picks = [*jnp.where(jnp.isposinf(picks), jnp.nan, picks)]
            return self._planes(picks[:count], picks[count:], 0)
        if others:
            classes = jax.lax.broadcasted_iota(jnp.int32, (1,) * (x.ndim - 1) + x.shape[-1:], x.ndim - 1)
            x = jnp.where(self._is_last() & (classes >= self._further.start), -jnp.inf, x)
        peak = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(x, -1)), self.axis)
        peak = jnp.where(jnp.isneginf(peak), 0, peak)
        total, *picks = _axes.sum_over(self.axis, jnp.stack([jnp.sum(jnp.exp(x - peak[..., None]), -1), *picks]))
        tokens, others = picks[:count], picks[count:]
        bad = jnp.isnan(total) | jnp.isposinf(peak)
        for pick_of_head in others:
            bad |= jnp.isnan(pick_of_head) | jnp.isposinf(pick_of_head)
        none = total == 0
        log_total = jnp.log(jnp.where(none, 1, total))
        tokens = [jnp.where(none, -jnp.inf, pick - peak - log_total) for pick in tokens]
        planes = self._planes(tokens, [jnp.where(bad, 0, x) for x in others], 0)
        return {slot: jnp.where(bad, jnp.nan, x) for slot, x in planes.items()}


# Its derivative belongs to `reference`: the exchange has none with respect to norm and the largest reference.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward(rows, strict, logits, nodes):
    return rows._forward(logits, nodes, strict)


@_forward.defjvp
def _(rows, strict, primals, tangents):
    logits, nodes = primals
    planes, saved = _forward(rows, strict, *primals)
    _, of_planes = jax.jvp(lambda x: rows.reference(x, nodes), (logits,), tangents[:1])
    return (planes, saved), (of_planes, jax.tree.map(jnp.zeros_like, saved))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VocabularyExchange(Exchange):
    """Every device has all sequences, from its classes: results are shared. The planes' sums are those of the rows."""

    axis: str

    @property
    def axes(self):
        return (self.axis,)

    def joined(self, x):
        return _axes.shared(self.axis, x)
