"""TransducerLoss: a loss as a value. It joins emission, adjustments and topology; every method works for every loss."""

from __future__ import annotations

import abc
import dataclasses
import typing

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import keywords
from jax_rnnt._pytree import option, static
from jax_rnnt.lattices._topology import Topology, expanded
from jax_rnnt.layouts import _layout
from jax_rnnt.losses import _call, _methods, _validation
from jax_rnnt.losses._composition import Alignment, Composition, DecodingRules
from jax_rnnt.sharding._device import devices_of

Logits: typing.TypeAlias = "ArrayLike | _layout.Layout"


def _equal(x, y) -> bool:
    """Whether two fields are equal. Arrays compare by content, or by identity if this process cannot read them."""
    if x is y:
        return True
    arrays = [v for v in (x, y) if isinstance(v, (jax.Array, np.ndarray))]
    if any(isinstance(v, jax.core.Tracer) or not getattr(v, "is_fully_addressable", True) for v in arrays):
        return False
    return bool(np.array_equal(x, y) if arrays else x == y)


class _Once(abc.ABCMeta):
    """A subclass of a loss is a dataclass already. Python's own errors for a second decorator name neither."""

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
    loss. `decoding` tells `jax_rnnt.decode` what the classes mean.

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
        first = getattr(self, dataclasses.fields(self)[0].name)
        if len(getattr(first, "shape", ())) > 1:  # an array of logits, or a layout
            raise TypeError(f"{name}: options make the loss, and the loss takes the batch: {name}(...)(logits, ...).")
        self._check(name)

    def _check(self, function: str) -> None:
        """Checks the fields before there are logits. Subclasses extend it; `_set` stores a normalised field."""
        for field in dataclasses.fields(self):
            if "off" in field.metadata:
                value = _checks.number(function, field.name, getattr(self, field.name))
                self._set(field.name, value)  # a float: a leaf of another dtype would trace anew
        _checks.integer(function, "blank", self.blank)
        for name in ("fused_log_softmax", "inplace"):
            self._set(name, _checks.boolean(function, name, getattr(self, name)))
        _checks.reduction(function, self.reduction)
        _checks.choice(function, "implementation", self.implementation, _checks.IMPLEMENTATIONS)
        for name in ("vocab_axis", "frame_axis"):
            if not isinstance(axis := getattr(self, name), str | None):
                raise TypeError(f"{function}: {name} must be the name of a mesh axis or None, got {axis!r}.")
        if self.vocab_axis is not None and self.vocab_axis == self.frame_axis:
            raise ValueError(f"{function}: vocab_axis and frame_axis must be two axes, got {self.vocab_axis!r} twice.")

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    def __eq__(self, other):
        if other.__class__ is not self.__class__:
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    def __hash__(self):
        return hash((type(self), *(getattr(self, f.name) for f in dataclasses.fields(self))))

    def __repr__(self):
        """Fields without a default, then those that differ from it."""

        def shown(field):
            value, default = getattr(self, field.name), field.default
            return default is dataclasses.MISSING or not (type(value) is type(default) and _equal(value, default))

        shown_fields = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if shown(f))
        return f"{type(self).__name__}({', '.join(shown_fields)})"

    # ---- for subclasses

    def compose(self) -> Composition:
        """The parts of the loss. An option that a Python number switches off (0, clamp <= 0) is None here."""
        raise NotImplementedError(f"{type(self).__name__} must define compose().")

    def decoding(self) -> DecodingRules:
        """What `jax_rnnt.decode` knows about the loss: `compose` without the options, which act in training alone.

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
        """The loss with every option off."""
        return _pytree.replace(self, **{f.name: None for f in dataclasses.fields(self) if "off" in f.metadata})

    def _draw(self, function: str, key) -> TransducerLoss:
        """The loss for one call; `key` is a JAX random key or None."""
        return self

    # ---- methods on a batch

    @property
    def topology(self) -> Topology:
        """The table of arcs that leave a node. Their slots name the planes of `arc_log_probs`."""
        return expanded(_call.switched_off(self).compose().topology)

    @keywords
    def __call__(
        self,
        logits: Logits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The loss of a batch, differentiable.

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
        batch = logits, targets, logit_lengths, target_lengths, label_windows, key
        return _call.run(_methods.LOSS, type(self).__name__, self, *batch)

    @keywords
    def posteriors(
        self,
        logits: Logits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
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
        return self._run(_methods.POSTERIORS, logits, targets, logit_lengths, target_lengths, label_windows, key)

    @keywords
    def align(
        self,
        logits: Logits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> Alignment:
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
        if self.implementation == "kernel":
            message = (
                f"{type(self).__name__}.align: implementation='kernel': jax_rnnt has no kernel for the best path; "
            )
            raise NotImplementedError(message + "use implementation=None or 'reference'.")
        return self._run(_methods.ALIGN, logits, targets, logit_lengths, target_lengths, label_windows, key)

    @keywords
    def label_frames(
        self,
        logits: Logits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
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
        return self._run(_methods.LABEL_FRAMES, logits, targets, logit_lengths, target_lengths, label_windows, key)

    @keywords
    def latency(
        self,
        logits: Logits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
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
        return self._run(_methods.LATENCY, logits, targets, logit_lengths, target_lengths, label_windows, key)

    @keywords
    def label_log_probs(
        self,
        logits: Logits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
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
        return self._run(_methods.LABEL_LOG_PROBS, logits, targets, logit_lengths, target_lengths, label_windows, key)

    @keywords
    def arc_log_probs(
        self,
        logits: Logits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
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
        return self._run(_methods.ARC_LOG_PROBS, logits, targets, logit_lengths, target_lengths, label_windows, key)

    def _run(self, method, *batch):
        return _call.run(method, f"{type(self).__name__}.{method.name}", self, *batch)

    @keywords
    def validate(self, logits: Logits, targets: ArrayLike, logit_lengths: ArrayLike, target_lengths: ArrayLike) -> None:
        """Checks the data of a batch: raises where lengths or labels would make the loss NaN or +inf.

        The loss itself never raises on data. It accepts a label that equals a blank, which is an error here. The checks
        read no logits, so they find neither NaN nor masks there, and they leave options and windows out.

        Outside of `jax.jit` they wait for lengths and targets. Under `jax.jit` they need arrays that are known while
        tracing, or `jax.experimental.checkify.checkify` around the function, whose error value then has the checks.

        Parameters
        ----------
        logits, targets, logit_lengths, target_lengths
            As for the call.

        Raises
        ------
        TypeError, ValueError
            For static mistakes, as the call raises them. ValueError for the first length out of range, label outside
            the token classes, label that is a blank, sequence without rows (`PackedLogits`), or number of labels that
            no path of the lattice reaches: it names argument, position, expected range and value. TypeError for traced
            lengths or targets outside of checkify.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from jax_rnnt import RNNTLoss
        >>> RNNTLoss().validate(jnp.zeros((1, 4, 3, 5)), jnp.array([[1, 9]]), jnp.array([4]), jnp.array([2]))
        Traceback (most recent call last):
        ...
        ValueError: RNNTLoss.validate: targets[0, 1] must lie in [0, 5), got 9.
        """
        name = f"{type(self).__name__}.validate"
        layout = _layout.of(name, logits)
        loss = _pytree.replace(self._without_options(), clamp=_call.switched_off(self).clamp, implementation=None)
        softmax = _call.softmax_of(name, loss).resolved(name, layout.classes * devices_of(loss)[1])
        _validation.validate(name, loss, layout, softmax, targets, logit_lengths, target_lengths)


keywords(TransducerLoss)
_pytree.register(TransducerLoss)
