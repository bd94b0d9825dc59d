"""TransducerLoss: a loss as a value. It joins emission, adjustments and topology; every method works for every loss."""

from __future__ import annotations

import abc
import dataclasses
import typing

import jax
import numpy as np

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import in_name_of, keywords
from jax_rnnt._pytree import option, static
from jax_rnnt.lattices._topology import Topology, expanded
from jax_rnnt.losses import _call, _methods, _validation
from jax_rnnt.losses._composition import Composition, DecodingRules


def _equal(x, y) -> bool:
    """Returns True if two fields are equal. Arrays compare by content, by identity if this process cannot read them."""
    if x is y:
        return True
    arrays = [v for v in (x, y) if isinstance(v, (jax.Array, np.ndarray))]
    if any(isinstance(v, jax.core.Tracer) or not getattr(v, "is_fully_addressable", True) for v in arrays):
        return False
    return bool(np.array_equal(x, y) if arrays else x == y)


class _Once(abc.ABCMeta):
    """A subclass of a loss is a dataclass already. Python's own errors for a second decorator do not name the class."""

    def __setattr__(cls, name, value):
        if name == "__dataclass_params__" and name in vars(cls):
            way = 'leave out the decorator; a field by dataclasses.field(metadata={"static": True}) is static'
            raise TypeError(f"{cls.__name__} is a dataclass already, as every subclass of TransducerLoss: {way}.")
        super().__setattr__(name, value)


@typing.dataclass_transform(
    frozen_default=True, eq_default=False, kw_only_default=True, field_specifiers=(dataclasses.field, static, option)
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TransducerLoss(metaclass=_Once):
    """A loss of the transducer family, as a value: frozen, callable, a pytree.

    Every subclass is a frozen dataclass and a pytree, without a decorator. Its fields are leaves: numbers and arrays to
    schedule or learn. A field made by ``dataclasses.field(metadata={"static": True})`` is static instead: a new value
    compiles the program again. `jax.jit` takes a loss as an argument or closes over it, `jax.tree.map` maps it,
    `dataclasses.replace` changes it, and a module can store it. It is hashable if its fields are.

    A subclass defines `compose` and inherits every method: the loss itself, `posteriors`, `align`, `label_frames`,
    `latency`, `label_log_probs`, `arc_log_probs` and `validate`. Each takes logits in any layout that suits the
    loss. `decoding` defines for `jax_rnnt.decode` what the classes mean.

    Parameters
    ----------
    blank : int, default -1
        The blank class; a negative one counts from the end.
    clamp : float or scalar Array, default -1.0
        Clips the gradient of each sequence's loss with respect to each logit, before the incoming cotangent and the
        reduction multiply it; <= 0: off. Its own gradient is 0.
    reduction : {"mean", "none", "sum", "mean_target", "mean_volume"}
        "mean": sum / number of sequences; "mean_target": mean of loss_b / max(U_b, 1); "mean_volume": sum of the losses
        / max(sum of U_b, 1).
    fused_log_softmax : bool, default True
        False: `logits` are log-probabilities already.
    fastemit_lambda : float or scalar Array, default 0.0
        FastEmit (Yu et al. 2021): scales the gradient of label arcs by 1 + lambda. The returned loss stays the nll. Its
        own gradient is 0.
    delay_penalty : float or scalar Array, default 0.0
        Adds delay_penalty * ((T_b - 1) / 2 - t) to the label arcs of frame t (k2), which rewards early labels. The
        returned loss includes it; it has a gradient.
    implementation : {None, "kernel", "reference"}
        None: kernels that are known to be right on the device (docs/accelerators.md), else tiles or the reference, with
        a warning that says why; "kernel": all kernels, and an error where there are none; "reference": plain JAX,
        differentiable any number of times, and in forward mode if `clamp` is off.
    inplace : bool, default True
        Lets the gradient overwrite the logits, which saves their size at the peak of memory. XLA first copies logits
        that are still needed: choose False where they are an argument of the differentiated program and not donated.
    vocab_axis : str, optional
        Mesh axis whose n devices hold V / n classes each, in order. Targets and blanks stay indices into all V.
    frame_axis : str, optional
        Mesh axis whose n devices hold T / n frames each, in order. Lengths count all frames.

    See Also
    --------
    RNNTLoss : The standard loss.
    rnnt_loss : The same as a function, with the recursion and the rules for odd sequences.

    Examples
    --------
    RNN-T with a blank over two frames:

    >>> import jax.numpy as jnp
    >>> from jax_rnnt import Composition, TransducerLoss, emissions, lattices
    >>> class TwoStepLoss(TransducerLoss):
    ...     def compose(self):
    ...         arcs = (*lattices.STANDARD, lattices.Arc("blank", 2, 0))
    ...         return Composition(emissions.Softmax((self.blank,), self.fused_log_softmax), arcs)
    >>> loss = TwoStepLoss(blank=0)(jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> round(float(loss), 3)
    2.601
    """

    blank: int = static(-1)
    clamp: float | jax.Array = option(-1.0, negative=True)
    reduction: _checks.Reduction = static("mean")
    fused_log_softmax: bool = static(True)
    _: dataclasses.KW_ONLY
    fastemit_lambda: float | jax.Array = option(0.0)
    delay_penalty: float | jax.Array = option(0.0)
    implementation: _checks.Implementation | None = static(None)
    inplace: bool = static(True)
    vocab_axis: str | None = static(None)
    frame_axis: str | None = static(None)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # Registering needs the fields, so the dataclass is made here and not by a decorator of the user.
        dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)(cls)
        keywords(cls)
        _pytree.register(cls)

    def __post_init__(self):
        name = type(self).__name__
        with in_name_of(name):
            first = getattr(self, dataclasses.fields(self)[0].name)
            if len(getattr(first, "shape", ())) > 1:  # an array of logits, or a layout
                way = f"the loss takes the batch: {name}(...)(logits, ...)"
                raise _checks.bad_type(f"options make the loss, and {way}.")
            self._check()

    def _check(self) -> None:
        """Checks the fields before there are logits. Subclasses extend it; `_set` stores a normalised field."""
        for field in dataclasses.fields(self):
            if "off" in field.metadata:
                value = _checks.number(field.name, getattr(self, field.name))
                self._set(field.name, value)  # a float, as a leaf of another dtype would trace anew
        _checks.integer("blank", self.blank)
        for name in ("fused_log_softmax", "inplace"):
            self._set(name, _checks.boolean(name, getattr(self, name)))
        _checks.reduction(self.reduction)
        _checks.choice("implementation", self.implementation, _checks.IMPLEMENTATIONS)
        for name in ("vocab_axis", "frame_axis"):
            if not isinstance(axis := getattr(self, name), str | None):
                raise _checks.bad_type(f"{name} must be the name of a mesh axis or None, got {axis!r}.")
        if self.vocab_axis is not None and self.vocab_axis == self.frame_axis:
            raise _checks.bad_value(f"vocab_axis and frame_axis must be two axes, got {self.vocab_axis!r} twice.")

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    def __eq__(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    def __hash__(self):
        return hash((type(self), *(getattr(self, f.name) for f in dataclasses.fields(self))))

    def __repr__(self):
        """Shows the fields without a default, then those that differ from it."""

        def shown(field):
            value, default = getattr(self, field.name), field.default
            return default is dataclasses.MISSING or not (type(value) is type(default) and _equal(value, default))

        shown_fields = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if shown(f))
        return f"{type(self).__name__}({', '.join(shown_fields)})"

    # ---- for subclasses

    def compose(self) -> Composition:
        """Returns the parts of the loss. An option that a Python number switches off (0, clamp <= 0) is None here."""
        raise NotImplementedError(f"{type(self).__name__} must define compose().")

    def decoding(self) -> DecodingRules:
        """Returns the rules for `jax_rnnt.decode`: `compose` without the options, which act in training alone.

        A loss whose `compose` has steps defines this method itself.

        Returns
        -------
        DecodingRules

        Raises
        ------
        TypeError
            `compose` has steps, and the loss does not say what they mean to a decoder.
        """
        composition = self._without_options().compose()
        if not isinstance(composition, Composition):
            raise TypeError(f"{type(self).__name__}.compose() must return a Composition, got {composition!r}.")
        if composition.steps or composition.closing:
            lacks = "decoding(), which returns its DecodingRules: compose() has steps, which act on known targets"
            raise TypeError(f"{type(self).__name__} lacks {lacks}.")
        return DecodingRules(composition.emission, composition.topology)

    def _without_options(self) -> TransducerLoss:
        """Returns the loss with every option off."""
        return _pytree.replace(self, **{f.name: None for f in dataclasses.fields(self) if "off" in f.metadata})

    def _draw(self, key) -> TransducerLoss:
        """Returns the loss for one call; `key` is a JAX random key or None."""
        return self

    # ---- methods on a batch

    @property
    def topology(self) -> Topology:
        """The table of arcs that leave a node. Their slots name the planes of `arc_log_probs`."""
        return expanded(_call.switched_off(self).compose().topology)

    __call__ = _methods.loss_of_batch
    posteriors = _methods.posteriors
    align = _methods.align
    label_frames = _methods.label_frames
    latency = _methods.latency
    label_log_probs = _methods.label_log_probs
    arc_log_probs = _methods.arc_log_probs
    validate = _validation.validate


keywords(TransducerLoss)
_pytree.register(TransducerLoss)
