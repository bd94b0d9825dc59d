"""The parts of a loss, and the results that have a type of their own."""

import dataclasses
import typing
from collections.abc import Sequence

import jax

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import in_name_of
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.lattices._topology import STANDARD, Arc, Topology
from jax_rnnt.losses._adjustments import Step


@dataclasses.dataclass(frozen=True)
class Composition:
    """The parts of a loss, as returned by `TransducerLoss.compose`.

    Parameters
    ----------
    emission : emissions.Softmax
        How a row of logits becomes log-probabilities, a plane for each slot.
    topology : tuple of lattices.Arc, default lattices.STANDARD
        The arcs that leave a node. Each names the slot of its plane.
    steps : tuple of callable, default ()
        ``step(planes, num_frames, num_labels) -> planes``, called in this order, in plain JAX. `planes` is a dict of
        slot to Array [..., T, U + 1]; `num_frames` is T_b and `num_labels` U_b, int32 [...]. A step may change planes
        and add slots. It may use fields of the loss, which get the step's gradient. Arcs may be unnormalised. The
        options of the loss follow: delay penalty, windows and FastEmit act on slots that start with "label".
    bounded : bool, default False
        True: the likelihood is at most 1, so a loss below 0 is rounding and becomes 0.
    closing : tuple of callable, default ()
        Further steps, after `steps`: they add to arcs of labels what must follow on the same frame, such as the blank
        of `ConstrainedRNNTLoss`. `label_log_probs` alone leaves them out, of the label's own entry.

    Examples
    --------
    >>> from jax_rnnt import Composition, emissions, lattices
    >>> Composition(emissions.Softmax((0,)), lattices.MONOTONIC).topology[1]
    Arc(slot='label', dt=1, du=1, may_end=True, other=None)
    """

    emission: Softmax
    topology: Topology = STANDARD
    steps: tuple[Step, ...] = ()
    bounded: bool | jax.Array = False
    closing: tuple[Step, ...] = ()

    def __post_init__(self):
        _checked_sequence(self, "topology", lambda x: isinstance(x, Arc), "lattices.Arc, at least one", 1)
        _checked_sequence(self, "steps", callable, "functions", 0)
        _checked_sequence(self, "closing", callable, "functions", 0)
        if not isinstance(self.emission, Softmax):
            raise TypeError(f"Composition: emission must be an emissions.Softmax, got {self.emission!r}.")


@dataclasses.dataclass(frozen=True)
class DecodingRules:
    """The meaning of a row's classes to a decoder, as returned by `TransducerLoss.decoding`.

    A decoder scores an arc by its log-probability and weight, without the steps and options that act in training alone,
    such as sigma.

    Parameters
    ----------
    emission : emissions.Softmax
        How a row of logits becomes log-probabilities: which classes are blanks, and which heads a row has.
    topology : tuple of lattices.Arc, default lattices.STANDARD
        The arcs that leave a node. An arc without a label (du = 0) has the slot of a blank; the arcs of labels (du = 1)
        have the slot "label" and stand for every class that is no blank.
    labels_per_frame : int, optional
        Labels that a frame may emit; a blank must follow them. Default: as many as the decoder allows.
    arc_weights : sequence of float or scalar Array, default ()
        Added to the log-probability of each arc of `topology`, in nats: what steps of `compose` add, such as the log of
        an arc's share in a label. Fields of the loss may be among them, traced or not. -inf forbids an arc; (): 0 for
        all.

    Examples
    --------
    >>> from jax_rnnt import DecodingRules, MultiblankRNNTLoss, emissions
    >>> [(arc.slot, arc.dt) for arc in MultiblankRNNTLoss([2], sigma=0.05).decoding().topology]
    [('blank', 1), ('label', 0), ('blank+2', 2)]
    >>> rules = DecodingRules(emissions.Softmax((0,)), labels_per_frame=1)
    """

    emission: Softmax
    topology: Topology = STANDARD
    labels_per_frame: int | None = None
    arc_weights: tuple[float | jax.Array, ...] = ()

    @in_name_of("DecodingRules")
    def __post_init__(self):
        _checked_sequence(self, "topology", lambda x: isinstance(x, Arc), "lattices.Arc, at least one", 1)
        _checked_sequence(self, "arc_weights", lambda x: True, "numbers", 0)
        if self.arc_weights and len(self.arc_weights) != len(self.topology):
            expected = f"one number for each of the {len(self.topology)} arcs of topology, or none"
            raise _checks.bad_value(f"arc_weights must hold {expected}, got {self.arc_weights!r}.")
        weights = (_checks.scalar(f"arc_weights[{i}]", x) for i, x in enumerate(self.arc_weights))
        object.__setattr__(self, "arc_weights", tuple(weights))
        if not isinstance(self.emission, Softmax):
            raise _checks.bad_type(f"emission must be an emissions.Softmax, got {self.emission!r}.")
        if self.labels_per_frame is not None:
            limit = _checks.positive("labels_per_frame", self.labels_per_frame)
            object.__setattr__(self, "labels_per_frame", limit)


def _checked_sequence(parts, name, suitable, expected, least):
    """Converts the field to a tuple."""
    value = getattr(parts, name)
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_sequence or not all(map(suitable, value)) or len(value) < least:
        raise TypeError(f"{type(parts).__name__}: {name} must be a sequence of {expected}, got {value!r}.")
    object.__setattr__(parts, name, tuple(value))


@_pytree.exportable("Alignment")
class Alignment(typing.NamedTuple):
    """The best path of a lattice, as returned by `TransducerLoss.align`.

    T frames, U labels; `...` is any number of batch dimensions.

    Parameters
    ----------
    score : Array, float32 (float64 for float64 logits) [...]
        Log-probability of the path, in nats.
    frames : Array, int32 [..., U]
        The frame of each label; -1 past U_b, and where there is no path or the score is NaN.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> RNNTLoss().align(jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1)).frames.tolist()
    [0]
    """

    score: jax.Array
    frames: jax.Array
