"""The methods of a loss: functions of arrays with the docstrings that users read. `method` makes methods of them.

`loss` is a `TransducerLoss`, a pytree: its leaves are operands, so changing one retraces nothing. `emission` is static.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_rnnt import _pytree
from jax_rnnt._xla import vary_together
from jax_rnnt.emissions._emission import inside_targets
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.lattices import _order as order
from jax_rnnt.lattices import _reference as reference
from jax_rnnt.lattices._topology import expanded
from jax_rnnt.lattices._viterbi import best_path
from jax_rnnt.losses._adjustments import adjust, frame
from jax_rnnt.losses._call import Logits, Method, in_class, reduce, run
from jax_rnnt.losses._composition import Alignment
from jax_rnnt.losses._fused import adjust_isolated, losses_of, planes_of, strict

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

METHODS: dict[str, Method] = {}  # by the names that they have in `TransducerLoss`


# The parameters of every method. It has no docstring, as editors would show that in place of the method's own.
def of_batch(
    self,
    logits: Logits,
    targets: ArrayLike,
    logit_lengths: ArrayLike,
    target_lengths: ArrayLike,
    *,
    label_windows: ArrayLike | None = None,
    key: jax.Array | None = None,
) -> Any: ...


def method(
    parameters: Callable[Arguments, Any], name: str | None = None, **properties: Any
) -> Callable[[Callable[..., Result]], Callable[Arguments, Result]]:
    """Decorates ``compute(loss, emission, logits, targets, both lengths, windows)`` to make a method of a loss.

    `TransducerLoss` has it under `name`, by default that of the function. It has the docstring of the function and its
    type of result, and the parameters of `of_batch`, which is an argument so that type checkers see them. `properties`
    are fields of `Method`.
    """

    def decorate(compute: Callable[..., Result]) -> Callable[Arguments, Result]:
        title = name or compute.__name__
        made = METHODS[title] = Method(jax.jit(compute, static_argnums=1), **properties)

        def call(self, logits, targets, logit_lengths, target_lengths, *, label_windows=None, key=None):
            return run(made, self, logits, targets, logit_lengths, target_lengths, label_windows, key)

        call.__name__, call.__doc__ = title, compute.__doc__
        call.__annotations__ = parameters.__annotations__ | {"return": compute.__annotations__["return"]}
        return in_class(call)  # type: ignore[return-value]

    return decorate


def _prepare(loss, emission, logits, targets, logit_lengths, target_lengths, windows) -> tuple[Any, ...]:
    """Returns ((loss, logits, placed, num_frames, num_labels, windows), bad [...]) for the computation.

    A sequence with lengths or labels out of range is marked bad and gets T_b = U_b = 0: none of its rows is read, and
    its gradient is zero.
    """
    logits, placed, *lengths, bad = emission.prepare(logits, targets, logit_lengths, target_lengths)
    windows = None if windows is None else emission.exchange.of_own(windows)
    # Logits come first: their sharding and varying axes are those of the result.
    (rows, rows_structure), (others, structure) = map(jax.tree.flatten, ((logits, placed), (*lengths, windows, loss)))
    logits, placed = jax.tree.unflatten(rows_structure, vary_together(*rows, like=others))
    varied = vary_together(*others, like=rows, without=emission.exchange.axes)
    num_frames, num_labels, windows, loss = jax.tree.unflatten(structure, varied)
    return (loss, logits, placed, num_frames, num_labels, windows), bad


def _nonnegative(loss, emission, losses, targets, target_lengths):
    """Raises losses [...] or [..., U] below 0 to 0, with an unchanged gradient, where no weight exceeds 1.

    Rounding may lift a likelihood of 1 above 1. Sequences with a label that equals a blank stay as they are: both arcs
    count, so the likelihood may exceed 1.
    """
    bounded = loss.compose().bounded
    if bounded is False or not emission.rows.normalized:
        return losses
    bounded = bounded if loss.delay_penalty is None else bounded & (loss.delay_penalty == 0)
    is_blank = functools.reduce(jnp.logical_or, (targets == blank for blank in emission.rows.blanks))
    twice = jnp.any(inside_targets(targets, target_lengths) & is_blank, -1)
    twice = twice.reshape(twice.shape + (1,) * (losses.ndim - twice.ndim))
    below = jax.lax.stop_gradient(jnp.where(twice | ~(losses < 0), 0, losses))
    return losses - below if bounded is True else jnp.where(bounded, losses - below, losses)


@method(of_batch, "__call__", reduces=True)
def loss_of_batch(loss, emission, logits, targets, logit_lengths, target_lengths, windows) -> jax.Array:
    """Computes the loss of a batch, which is differentiable.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network; or `JointLogits`, `PackedLogits`, `BandLogits`, `AdditiveLogits`.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    label_windows : Array, integer [..., U, 2], optional
        First and last frame (inclusive) in which label u may be emitted.
    key : Array, optional
        JAX random key, for a loss that draws; no effect on others.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats; as for `rnnt_loss`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`; TypeError also for a layout that does not suit the loss.
    """
    prepared, bad = _prepare(loss, emission, logits, targets, logit_lengths, target_lengths, windows)
    losses = emission.exchange.joined(jnp.where(bad, jnp.nan, losses_of(emission, *prepared)))
    losses = _nonnegative(loss, emission, losses, targets, target_lengths)
    return reduce(losses, target_lengths, loss.reduction)


def _lattice(loss, emission, *problem):
    """Returns (topology, arcs by slot, num_frames, num_labels, NaN sequences, ends) for methods other than the loss.

    `ends` are the arcs without what must follow a label, if they differ.
    """
    # FastEmit acts on the loss's gradient alone.
    loss = _pytree.replace(loss, fastemit_lambda=None)
    (loss, logits, placed, num_frames, num_labels, windows), bad = _prepare(loss, emission, *problem)
    planes, composition = planes_of(emission, loss, logits, placed), loss.compose()
    lengths_and_windows = num_frames, num_labels, windows
    arcs, nan = adjust_isolated(loss, planes, *lengths_and_windows)
    ends = adjust_isolated(loss, planes, *lengths_and_windows, closed=False)[0] if composition.closing else None
    return composition.topology, arcs, num_frames, num_labels, bad | nan, ends


def _posteriors(loss, emission, *problem):
    topology, arcs, num_frames, num_labels, bad, _ = _lattice(loss, emission, *problem)
    if loss.implementation == "reference":
        _, gradients = lattice.reference_grad(topology, arcs, num_frames, num_labels)
    else:
        _, gradients = lattice.value_and_grad(topology, arcs, num_frames, num_labels, strict=strict(loss))

    def kind(name):
        zero = jnp.zeros_like(next(iter(gradients.values())))
        total = sum((g for slot, g in gradients.items() if slot.startswith(name)), zero)
        return jnp.where(bad[..., None, None], jnp.nan, 0 - total)  # 0 and not -0

    return kind("blank"), kind("label")


@method(of_batch, per_node=True)
def posteriors(loss, emission, *problem) -> tuple[jax.Array, jax.Array]:
    """Posterior probability of every blank and every label, given the targets.

    The posterior of an arc is the probability that an alignment drawn from the model uses it: alpha(source) * arc *
    beta(destination) / alpha(T_b, U_b). Arcs of one kind that leave the same node (big blanks, durations) add up.
    Arguments and errors are those of the call.

    Returns
    -------
    blank : Array, float32 (float64 for float64 logits) [..., T, U + 1]
        Posterior of a blank, of any duration, that leaves node (t, u).
    label : Array, float32 (float64 for float64 logits) [..., T, U + 1]
        Posterior of the label, of any duration, that leaves node (t, u). Every label u < U_b sums to 1 over t; on
        the standard lattice the blanks of every frame t < T_b sum to 1 over u. 0 outside the lengths and where no
        path exists; NaN where a length or a label is out of range or logits inside the lengths are NaN or +inf.

    References
    ----------
    Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, arXiv:1211.3711.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> blank, label = RNNTLoss().posteriors(jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> [round(float(p), 3) for p in label[:, 0]]
    [0.333, 0.333, 0.333]
    """
    blank, label = map(emission.exchange.joined_planes, _posteriors(loss, emission, *problem))
    return blank, label


@method(of_batch)
def label_frames(loss, emission, *problem) -> jax.Array:
    """Expected frame of every label, over all alignments of the targets.

    With the label posteriors of `posteriors`, frames counted from 0::

        frame(u) = sum over t of t * label(t, u)

    Arguments and errors are those of the call.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [..., U]
        0 past U_b and where no path exists; NaN as for `posteriors`. The gradient runs on the reference lattice.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> frames = RNNTLoss().label_frames(jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> [round(float(t), 3) for t in frames]
    [1.0]
    """
    label = _posteriors(loss, emission, *problem)[1][..., :-1]
    return emission.exchange.joined(order.total(frame(label).astype(label.dtype) * label, -2))


@method(of_batch, reduces=True)
def latency(loss, emission, logits, targets, logit_lengths, target_lengths, windows) -> jax.Array:
    """Expected latency of the labels (Shinohara and Watanabe 2022), a regulariser to add to the loss.

    With the label posteriors of `posteriors`::

        latency = sum over u < U_b, t < T_b of (t + 1) * label(t, u) / max(U_b, 1)

    Unlike FastEmit, which only scales a gradient, latency is a function. Its gradient differentiates all posteriors
    on the reference lattice and takes several times as long as the loss. Arguments and errors are those of the
    call.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In frames, counted from 1, reduced like the loss. 0 without labels, and with a zero gradient where no path
        exists; NaN as for `posteriors`.

    References
    ----------
    Shinohara and Watanabe, "Minimum latency training of sequence transducers for streaming end-to-end speech
    recognition", Interspeech 2022.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> loss, batch = RNNTLoss(), (jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> total = loss(*batch) + 0.1 * loss.latency(*batch)
    >>> round(float(loss.latency(*batch)), 3)
    2.0
    """
    _, label = _posteriors(loss, emission, logits, targets, logit_lengths, target_lengths, windows)
    total = emission.exchange.joined(order.total(order.total((frame(label) + 1).astype(label.dtype) * label, -2)))
    losses = total / jnp.maximum(target_lengths, 1).astype(total.dtype)
    return reduce(losses, target_lengths, loss.reduction)


@method(of_batch, without_kernel="the best path")
def align(loss, emission, *problem) -> Alignment:
    """Forced alignment: the best path of the lattice, and the frame in which it emits each label.

    With log-probabilities l, on the lattice of `rnnt_loss`::

        best(0, 0) = 0
        best(t, u) = max(best(t - 1, u) + l[t - 1, u, blank], best(t, u - 1) + l[t, u - 1, targets[u - 1]])
        score      = best(T_b, U_b)

    Arguments and errors are those of the call. No kernel searches: implementation="kernel" is an error.

    Returns
    -------
    score : Array, float32 (float64 for float64 logits) [...]
        Log-probability of the path, delay penalty and `sigma` included; 0 for T_b = U_b = 0, -inf where no path
        exists, NaN where a length or a label is out of range or logits inside the lengths are NaN or +inf. Its
        gradient with respect to an arc is 1 on the path, else 0.
    frames : Array, int32 [..., U]
        The frame of label u, counted from 0 and never decreasing; -1 past U_b, and where there is no path or the
        score is NaN. Ties do not depend on the batch: of equally good arcs into a node the blank wins, so labels
        come early; of equally good durations the first one of the loss wins.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> logits = jax.nn.one_hot(jnp.array([[4, 4], [1, 4], [4, 4]]), 5) * 9.0  # label 1 in frame 1, else blank
    >>> score, frames = RNNTLoss().align(logits, jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> frames.tolist()
    [1]
    """
    *arguments, bad, _ = _lattice(loss, emission, *problem)
    score, frames = best_path(*arguments)
    found = jnp.where(bad, jnp.nan, score), jnp.where(bad[..., None], -1, frames)
    return Alignment(*map(emission.exchange.joined, found))


@method(of_batch)
def label_log_probs(loss, emission, logits, targets, logit_lengths, target_lengths, windows) -> jax.Array:
    """Log-probability of every target, given the targets before it: log P(y_u | y_<u, x), over all alignments.

    With the alpha of the loss's recursion, labels y_1 ... y_U counted from 1, and an arc of a label that reads d
    frames (0 on the lattice of `rnnt_loss`)::

        A_0 = 1
        A_u = sum over t and arcs of y_u of alpha(t, u - 1) * arc(t, u - 1)
        label_log_probs(u) = log A_u - log A_(u - 1)

    A_u is the probability that the labels start with y_1 ... y_u. What must follow a label on its frame, the blank
    of `ConstrainedRNNTLoss`, belongs to the next entry. An arc counts if the lattice has it when y_u is the last
    label: it leads to a frame t + d < T_b, or ends the path at t + d = T_b. So an entry depends on no later label,
    and the entries add up to log A_U >= -loss, since A_U leaves open what the frames after the last label emit.
    Delay penalty, windows and `sigma` act on arcs as in `posteriors`: for confidences take a loss without them.

    `Hypotheses.label_log_probs` of a decoder is the same for one alignment: the sum over the arcs of y_u out of the
    node where the alignment has it. Where one alignment has all of the probability, both are equal.

    Arguments and errors are those of the call. The recursion is plain JAX, also for implementation="kernel"; the
    kernels read the logits and write their gradient.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [..., U]
        In nats. 0 past U_b; -inf, with a zero gradient, for a label that no path reaches and those after it; NaN
        as for `posteriors`.

    References
    ----------
    Keren, Zhou and Kalinli, "Token-Weighted RNN-T for Learning from Flawed Data", 2024, arXiv:2406.18108.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> scores = RNNTLoss().label_log_probs(jnp.zeros((2, 2, 4)), jnp.array([1]), jnp.array(2), jnp.array(1))
    >>> round(float(jnp.exp(scores[0])), 4)  # 1/4 in the first frame, 1/4 * 1/4 in the second one
    0.3125
    """
    problem = logits, targets, logit_lengths, target_lengths, windows
    *arguments, bad, ends = _lattice(loss, emission, *problem)
    losses = jnp.where(bad[..., None], jnp.nan, 0 - reference.label_log_probs(*arguments, ends))
    losses = emission.exchange.joined(losses)
    return 0 - _nonnegative(loss, emission, losses, targets, target_lengths)


@method(of_batch, per_node=True)
def arc_log_probs(loss, emission, *problem) -> dict[str, jax.Array]:
    """Log-probabilities of the arcs, for a dynamic program of your own.

    Every option but `clamp` and `reduction` acts on them. Arguments and errors are those of the call.

    Returns
    -------
    dict of str to Array, float32 (float64 for float64 logits) [..., T, U + 1]
        A plane for each slot of `topology`, in nats: entry (t, u) is the arc that leaves node (t, u). -inf outside
        the lengths; NaN for a sequence whose lengths or labels are out of range.
        `lattices.log_likelihood(loss.topology, planes, logit_lengths, target_lengths)` is minus the loss of each
        sequence. The gradient reads the logits once.
    """
    (loss, logits, placed, num_frames, num_labels, windows), bad = _prepare(loss, emission, *problem)
    planes = adjust(loss, planes_of(emission, loss, logits, placed), num_frames, num_labels, windows)

    def masked(arc):
        x = arc.score(planes)
        inside = reference.inside(num_frames, num_labels - arc.du, *x.shape[-2:])  # a step may fill the rest
        return emission.exchange.joined_planes(jnp.where(bad[..., None, None], jnp.nan, jnp.where(inside, x, -jnp.inf)))

    topology = loss.compose().topology
    return {wide.slot: masked(arc) for arc, wide in zip(topology, expanded(topology), strict=True)}
