"""Softmax emission: logits -> log-probabilities of the arcs that leave each node. Row-wise over the classes.

B sequences (`...`, any number of batch dimensions), T frames, U1 columns, V classes, K blank classes, D durations.

    lse       = log sum over v of exp(x[v])
    log_blank = x[blank] - lse                 log_label = x[label] - lse             (-inf where there is no label arc)
    dx[v]     = c_blank [v = blank] + c_label [v = label] - exp(x[v] - lse) (c_blank + c_label)

for cotangents c of the log-probabilities. With ``normalize=False`` the input already is log-probabilities: lse is 0 and
the softmax term of the gradient is dropped.

The backward pass makes the softmax again from the plane `norm` of `_norm.py`.

With `durations` the last D of V + D logits are a second softmax, all of whose log-probabilities are planes (TDT). With
`bernoulli` the softmax leaves out the blank, whose logit z is one of its own (HAT):

    log_blank = log sigmoid(z)                 log_label = log sigmoid(-z) + x[label] - lse, or log_blank for the blank
    dz        = c_blank sigmoid(-z) - c_label sigmoid(z)      dx[v] = c_label ([v = label] - exp(x[v] - lse))
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import in_name_of
from jax_rnnt.emissions._emission import NO_LABEL, Nodes, Rows, clip_and_scale, inside_rows
from jax_rnnt.emissions._norm import RowSum, encoded_norm, row_sum, row_sum_at_once, row_sum_of, softmax_of_norm


def accumulation_dtype(dtype) -> np.dtype:
    """Returns float64 for float64, float32 for every narrower type."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def one_hot(index, x):
    """Returns where the class is `index`, bool, the shape of x [..., T, U1, V] up to broadcasting; maybe nowhere.

    It is used instead of a gather: it shards over any axis and its gradient is element-wise.
    """
    classes = jax.lax.broadcasted_iota(jnp.int32, (1,) * (x.ndim - 1) + x.shape[-1:], x.ndim - 1)
    return classes == (index if isinstance(index, int) else index[..., None])


def _anchor(blanks, bernoulli) -> int:
    return blanks[0] if not bernoulli else int(blanks[0] == 0)


def _of_row(row, x):
    """Works as `RowSum.log_probability`; NaN where a row holds a NaN or +inf."""
    bad = row.bad if x.ndim == row.bad.ndim else row.bad[..., None]
    return jnp.where(bad, jnp.nan, row.log_probability(x))


def pick(index, x):
    """Returns the logit of a class, [..., T, U1]."""
    return jnp.sum(jnp.where(one_hot(index, x), x, 0), -1)


def _heads(logits, label, num_frames, blanks, durations, bernoulli):
    """Returns (rows inside, logits of the classes, plane of each duration, plane of a Bernoulli blank), 0 outside.

    These are selected before any arithmetic: whatever stands outside reaches neither value nor gradient. The rows stay
    whole, with -inf where a logit is of another head: XLA for TPUs copies slices of the classes, and changes their
    layout.
    """
    inside = inside_rows(Nodes(label, num_frames), logits.shape[-3])
    x = jnp.where(inside[..., None], logits, 0).astype(accumulation_dtype(logits.dtype))
    tokens = x.shape[-1] - durations
    of_durations = [pick(tokens + i, x) for i in range(durations)]
    if durations:
        classes = jax.lax.broadcasted_iota(jnp.int32, (1,) * (x.ndim - 1) + x.shape[-1:], x.ndim - 1)
        x = jnp.where(classes < tokens, x, -jnp.inf)
    if not bernoulli:
        return inside, x, of_durations, None
    return inside, jnp.where(one_hot(blanks[0], x), -jnp.inf, x), of_durations, pick(blanks[0], x)


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
    """Computes the emission in plain JAX, differentiable any number of times in both modes.

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
        D: the last D logits are a second softmax.
    bernoulli : bool
        The only blank is no part of the softmax; its logit belongs to a Bernoulli variable.

    Returns
    -------
    tuple of Array, float32 (float64 for float64) [..., T, U1]
        log_blank for each blank class, log_label, log-probability of each duration, norm. Outside the sequence -inf,
        and 0 for norm. NaN where the row holds a NaN or +inf. norm has no derivative: it is a cache of the logits.
    """
    inside, x, of_durations, z = _heads(logits, label, num_frames, blanks, durations, bernoulli)
    row = row_sum(x) if normalize else None
    of_label = pick(label, x)
    of_blanks = [] if bernoulli else [pick(blank, x) for blank in blanks]
    anchor = pick(_anchor(blanks, bernoulli), x)
    return planes_of(Heads(inside, row, of_label, of_blanks, of_durations, z, anchor), label, blanks)


class Heads(typing.NamedTuple):
    """The numbers of rows [..., T, U1] that planes are computed from: logits, except the first two."""

    inside: jax.Array  # bool: whether the row lies inside the sequence
    row: RowSum | None  # sum of the softmax; None if the logits already are log-probabilities
    label: jax.Array
    blanks: list[jax.Array]  # blanks in the softmax
    durations: list[jax.Array]
    bernoulli: jax.Array | None  # a blank that is no part of the softmax
    anchor: jax.Array  # the anchor of `norm`


def planes_of(heads: Heads, label, blanks):
    """Returns the result of `softmax_emission`."""
    inside, row, z = heads.inside, heads.row, heads.bernoulli
    duration_row = row_sum(jnp.stack(heads.durations), 0) if row is not None and heads.durations else None
    bad_row = functools.reduce(
        jnp.logical_or, (r.bad for r in (row, duration_row) if r is not None), jnp.asarray(False)
    )
    if z is not None:
        bad_row |= jnp.isnan(z) | jnp.isposinf(z)

    def plane(value):
        return jnp.where(inside, jnp.where(bad_row | jnp.isposinf(value), jnp.nan, value), -jnp.inf)

    def log_probability(logit):
        return logit if row is None else row.log_probability(logit)

    log_label = log_probability(heads.label)
    if z is not None:
        impossible = jnp.isneginf(z)  # since -inf must not meet the derivative of log_sigmoid
        z = jnp.where(impossible, 0, z)
        log_blanks = [jnp.where(impossible, -jnp.inf, jax.nn.log_sigmoid(z))]
        log_label = log_label + jnp.where(impossible, 0, jax.nn.log_sigmoid(-z))
        log_label = jnp.where(label == blanks[0], log_blanks[0], log_label)
    else:
        log_blanks = [log_probability(x) for x in heads.blanks]
    log_label = jnp.where(label == NO_LABEL, -jnp.inf, plane(log_label))
    durations = heads.durations
    if duration_row is not None:
        durations = [duration_row.log_probability(x) for x in durations]
    norm = jnp.zeros_like(log_label) if row is None else encoded_norm(row, heads.anchor)
    norm = jax.lax.stop_gradient(jnp.where(inside, norm, 0))
    return (*map(plane, log_blanks), log_label, *map(plane, durations), norm)


def backward_reference(
    logits, label, num_frames, norm, scale, clamp, *cotangents, blanks, normalize, durations=0, bernoulli=False
):
    """Returns the logits' gradient, as in the module's docstring; `clamp` clips it before `scale` multiplies it."""
    arcs, total = len(blanks) + 1, cotangents[len(blanks) + 1 + durations :]
    (*ct_blanks, ct_label), grad_durations = cotangents[:arcs], list(cotangents[arcs : arcs + durations])
    inside, x, of_durations, z = _heads(logits, label, num_frames, blanks, durations, bernoulli)
    used = inside & functools.reduce(jnp.logical_or, (ct != 0 for ct in cotangents))
    # It picks as in the forward pass, so that XLA does it once: picking from used rows would read the logits again.
    anchor = pick(_anchor(blanks, bernoulli), x) if normalize else norm
    x = jnp.where(used[..., None], x, 0)  # exp of the others may be infinite
    if bernoulli:  # a label that is the blank counts as a blank
        same = label == blanks[0]
        ct_blank, ct_label = ct_blanks[0] + jnp.where(same, ct_label, 0), jnp.where(same, ct_label - ct_label, ct_label)
        grad_blank = ct_blank * jax.nn.sigmoid(-z) - ct_label * jax.nn.sigmoid(z)
        ct_blanks = []
    gradient = jnp.where(one_hot(label, x), ct_label[..., None], 0)
    for blank, ct in zip(blanks, ct_blanks):
        gradient = gradient + jnp.where(one_hot(blank, x), ct[..., None], 0)
    if normalize:
        softmax = softmax_of_norm(x, *(jnp.where(used, plane, 0) for plane in (anchor, norm)))
        gradient = gradient - softmax * (total[0] if total else sum(ct_blanks, ct_label))[..., None]
    if bernoulli:
        gradient = jnp.where(one_hot(blanks[0], x), grad_blank[..., None], gradient)
    if durations and normalize and not total:
        of_durations = jnp.where(used[None], jnp.stack(of_durations), 0)
        row, of_all = row_sum(of_durations, 0), sum(grad_durations)
        softmax = jnp.exp(of_durations - row.peak[None]) / jnp.where(row.dead, 1, row.total)[None]
        grad_durations = [ct - probability * of_all for ct, probability in zip(grad_durations, softmax)]
    for i, grad_duration in enumerate(grad_durations):
        gradient = jnp.where(one_hot(x.shape[-1] - durations + i, x), grad_duration[..., None], gradient)
    gradient = clip_and_scale(gradient, scale, clamp)
    return [jnp.where(used[..., None], gradient, 0).astype(logits.dtype)]


def _planes(logits, label, num_frames, *, blanks, durations, **_):
    plane = (logits.shape[-3:-1], accumulation_dtype(logits.dtype))
    return [plane] * (len(blanks) + durations + 2)


def _unsupported(limits, logits, label, num_frames, *_, blanks, durations, **__):
    frames, columns, row = logits.shape[-3:]
    return _xla.beyond(
        limits,
        ("blanks", "blank classes", len(blanks)),
        ("durations", "durations", durations),
        ("row", "logits of a node", row),
        ("emission_nodes", "nodes [T, U + 1]", frames * columns),
        ("sequences", "sequences", math.prod(num_frames.shape)),
    )


forward_kernel = _xla.Kernel(
    "jax_rnnt_softmax_emission_fwd", reference=softmax_emission, results=_planes, unsupported=_unsupported
)
backward_kernel = _xla.Kernel(
    "jax_rnnt_softmax_emission_bwd",
    reference=backward_reference,
    results=lambda logits, *_, **__: [(logits.shape[-3:], logits.dtype)],
    aliases=lambda operands: {0: 0},
    unsupported=_unsupported,
    differentiable=False,  # `emission.gradient` is differentiable
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Softmax(Rows[jax.Array, jax.Array]):
    """One softmax over the classes of a row, or two (TDT), or a softmax and a Bernoulli variable (HAT).

    Its planes are `slots`, "label", and "duration+i" for i < `num_durations`.

    Parameters
    ----------
    blanks : tuple of int
        Classes with a slot of their own; negative ones count from the end (of the tokens, if there are durations).
    normalize : bool, default True
        False: the logits already are log-probabilities.
    slots : tuple of str, default ("blank",)
        The slot of each of `blanks`.
    num_durations : int, default 0
        D: the last D logits of a row are a second softmax.
    bernoulli : bool, default False
        The only blank is no part of the softmax; its logit belongs to a Bernoulli variable. Not with
        ``normalize=False``: log-probabilities of one row have no second head.
    """

    blanks: tuple[int, ...]
    normalize: bool = True
    slots: tuple[str, ...] = ("blank",)
    num_durations: int = 0
    bernoulli: bool = False

    @in_name_of("Softmax")
    def __post_init__(self):
        if not isinstance(self.blanks, tuple) or not isinstance(self.slots, tuple):
            raise _checks.bad_type(f"blanks and slots must be tuples, got {self.blanks!r} and {self.slots!r}.")
        for blank in self.blanks:
            _checks.integer("blanks", blank)
        for name in ("normalize", "bernoulli"):
            _checks.boolean(name, getattr(self, name))
        durations = range(_checks.integer("num_durations", self.num_durations))
        reserved = {"label", *(f"duration+{i}" for i in durations)}
        if (
            len(self.blanks) != len(self.slots)
            or not self.blanks
            or len({*self.slots, *reserved}) < len(self.slots) + len(reserved)
        ):
            expected = "one slot for each blank, at least one, none of them twice or 'label'"
            raise _checks.bad_value(f"slots must hold {expected}, got {self.slots} for blanks {self.blanks}.")
        if self.num_durations < 0 or (self.bernoulli and (len(self.blanks) > 1 or self.num_durations)):
            expected = "one blank and no durations with bernoulli, and num_durations of 0 or more"
            raise _checks.bad_value(f"there must be {expected}, got {self}.")
        if self.bernoulli and not self.normalize:
            raise _checks.bad_value("normalize must be True with bernoulli, which reads a logit, got False.")

    def resolved(self, classes: int) -> "Softmax":
        """Returns the same emission for rows of `classes` logits, with blanks in [0, V)."""
        tokens = classes - self.num_durations
        if _checks.smaller(tokens, 1):
            expected = f"shape [..., T, U + 1, V + D] with V >= 1 and D = {self.num_durations}"
            raise _checks.bad_value(f"logits must have {expected}, got V + D = {classes}.")
        blanks = [int(blank) for blank in self.blanks]
        name, got = ("blank", blanks[0]) if len(blanks) == 1 else ("blank and further blanks", blanks)
        if not isinstance(tokens, int) and min(blanks) < 0:
            raise _checks.bad_value(f"{name} must be 0 or more for a symbolic number of classes, got {got}.")
        if any(_checks.smaller(tokens, max(blank + 1, -blank)) for blank in blanks):
            raise _checks.bad_value(f"{name} must lie in [{-tokens}, {tokens}) for {tokens} classes, got {got}.")
        return dataclasses.replace(self, blanks=tuple(blank + tokens * (blank < 0) for blank in blanks))

    def tokens(self, classes: int) -> int:
        """Returns the number of classes that a label may be, in rows of `classes` logits."""
        return classes - self.num_durations

    @property
    def normalized(self):
        return self.normalize

    def log_probabilities(self, rows):
        """Returns log-probabilities of all tokens [..., V] in rows [..., V + D], as computed by `heads`."""
        log_probability, blanks, _ = self.heads(rows)
        logits = rows[..., : rows.shape[-1] - self.num_durations]
        tokens = log_probability(logits.astype(accumulation_dtype(rows.dtype)))
        if self.bernoulli:
            tokens = jnp.where(one_hot(self.blanks[0], tokens), blanks[0][..., None], tokens)
        return tokens

    def heads(self, rows):
        """Returns, for rows [..., V + D] of a resolved emission, in plain JAX: (function, log-probabilities of each of
        `blanks` [...], of each duration [...]).

        The function makes log-probabilities of logits of labels, one of each row [...] or all [..., V]. They are NaN in
        a head that holds a NaN or +inf. Those of blanks come from their logits alone: XLA for GPUs would write an array
        of all tokens to slice it.
        """
        x = rows.astype(accumulation_dtype(rows.dtype))
        tokens = x[..., : x.shape[-1] - self.num_durations]
        durations = [x[..., i] for i in range(tokens.shape[-1], x.shape[-1])]
        blanks = [tokens[..., blank] for blank in self.blanks]
        if not self.normalize:
            return lambda logits: logits.astype(x.dtype), blanks, durations
        if self.bernoulli:
            tokens = jnp.where(one_hot(self.blanks[0], tokens), -jnp.inf, tokens)
        of_token = functools.partial(_of_row, row_sum_at_once(tokens))
        if not self.bernoulli:
            if durations:
                row = row_sum_of(durations)
                durations = [_of_row(row, x) for x in durations]
            return of_token, [of_token(x) for x in blanks], durations
        written = jax.nn.log_sigmoid(-blanks[0])

        def of_label(logits):
            return of_token(logits) + (written if logits.ndim == written.ndim else written[..., None])

        return of_label, [jax.nn.log_sigmoid(blanks[0])], durations

    def _attributes(self):
        """Returns the attributes of the kernels, by their names."""
        heads = {"durations": self.num_durations, "bernoulli": self.bernoulli}
        return {"blanks": self.blanks, "normalize": self.normalize, **heads}

    def _names(self):
        return (*self.slots, "label", *(f"duration+{i}" for i in range(self.num_durations)))

    def _cotangents(self):
        """Returns the names of the cotangents that `backward` takes.

        Besides those of the planes there is, except with `bernoulli`, the total that the softmax of the classes
        multiplies, in place of the sum of their cotangents; the durations then have no softmax.
        """
        return self._names()

    def reference(self, logits, nodes):
        *planes, _ = softmax_emission(logits, nodes.label, nodes.num_frames, **self._attributes())
        return dict(zip(self._names(), planes))

    def forward(self, logits, nodes, *, strict=False):
        operands, params = (logits, nodes.label, nodes.num_frames), dict(num_batch_dims=logits.ndim - 3, strict=strict)
        *planes, norm = forward_kernel(*operands, **params, **self._attributes())
        return dict(zip(self._names(), planes)), norm

    def backward(self, logits, nodes, norm, cotangents, scale, clamp, *, strict=False, alias=True):
        num_frames = nodes.num_frames * (scale != 0).astype(nodes.num_frames.dtype)
        operands = logits, nodes.label, num_frames, norm, scale, clamp, *(cotangents[x] for x in self._cotangents())
        params = dict(num_batch_dims=logits.ndim - 3, strict=strict, alias=alias)
        return backward_kernel(*operands, **params, **self._attributes())[0]
