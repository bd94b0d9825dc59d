"""prune_ranges and prune_inputs: the columns of each frame that a pruned loss keeps (Kuang et al. 2022)."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.losses._hat import UNIT_STEP_LOSSES


@keywords
def prune_ranges(
    *,
    blank_posteriors: jax.Array,
    label_posteriors: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    width: int,
    variant: Literal["standard", "monotonic", "constrained"] = "standard",
) -> jax.Array:
    """Returns the first of the `width` columns that every frame keeps, by k2's rule.

    T frames, U labels, U1 = U + 1; `...` is any number of batch dimensions. Each frame takes the `width` columns that
    hold the most blank posterior, less the label posterior that enters them from outside. A second pass makes the first
    column monotonic: it starts at 0, ends at max(U_b - width + 1, 0), and grows by less than `width` a frame (by at
    most 1 where a frame emits at most one label). All arguments are keywords, since k2 takes the posteriors of labels
    (px) before those of blanks (py), and this library returns those of blanks first.

    Parameters
    ----------
    blank_posteriors, label_posteriors : Array, floating [..., T, U1]
        From `posteriors` of the loss, usually that of `AdditiveLogits`.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    width : int
        S, the number of columns to keep: 2 or more on the standard lattice, else 1 or more. The band holds a path if
        U_b <= (width - 1) * T_b on the standard lattice, or if U_b <= T_b on the other two; the constrained one also
        needs width >= 2 unless U_b = 0. k2 widens the band for the batch, which a static shape forbids.
    variant : {"standard", "monotonic", "constrained"}
        The recursion that gave the posteriors, named as for `HATLoss`.

    Returns
    -------
    Array, int32 [..., T]
        For `prune_inputs` and `BandLogits`. It has no gradient.

    Raises
    ------
    TypeError, ValueError
        For a static mistake in an argument, named in the message. ValueError also where the lengths are known and some
        sequence has a path only in a wider band. With traced lengths (under jit) its loss is +inf with a zero gradient.

    References
    ----------
    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, arXiv:2206.13236, and k2's
    get_rnnt_prune_ranges.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import AdditiveLogits, RNNTLoss, prune_ranges
    >>> lengths = {"logit_lengths": jnp.array(4), "target_lengths": jnp.array(3)}
    >>> simple = AdditiveLogits(jnp.zeros((4, 5)), jnp.zeros((4, 5)))
    >>> blank, label = RNNTLoss().posteriors(simple, jnp.array([1, 2, 3]), **lengths)
    >>> prune_ranges(blank_posteriors=blank, label_posteriors=label, **lengths, width=2).tolist()
    [0, 1, 2, 2]
    """
    blank = _checks.floating("blank_posteriors", blank_posteriors, 2, "[..., T, U + 1]")
    label = _checks.floating("label_posteriors", label_posteriors, 2, "[..., T, U + 1]")
    if blank.shape != label.shape or blank.shape[-1] < 1:
        expected = f"the shape of blank_posteriors, {tuple(blank.shape)}, with U + 1 >= 1"
        raise _checks.bad_value(f"label_posteriors must have {expected}, got {tuple(label.shape)}.")
    batch = blank.shape[:-2]
    num_frames = _checks.integers("logit_lengths", logit_lengths, batch, "[...]")
    num_labels = _checks.integers("target_lengths", target_lengths, batch, "[...]")
    _checks.choice("variant", variant, tuple(UNIT_STEP_LOSSES))
    smallest = 2 if variant == "standard" else 1
    width = _checks.integer("width", width)
    if width < smallest:
        raise _checks.bad_value(f"width must be {smallest} or more with variant {variant!r}, got {width}.")
    frames, labels = _checks.known(logit_lengths), _checks.known(target_lengths)
    if frames is not None and labels is not None:
        _check_width(blank.shape, frames.astype(np.int64), labels.astype(np.int64), width, variant)
    blank, label, num_frames, num_labels = _xla.split_alike(len(batch), blank, label, num_frames, num_labels)
    return _prune_ranges(blank, label, num_frames, num_labels, width, variant == "standard")


def _check_width(shape, num_frames, num_labels, width, variant):
    """Raises an error if a sequence has a path in its lattice but none in any band of this width."""
    frames, columns = shape[-2:]
    used = (num_frames >= 1) & (num_frames <= frames) & (num_labels >= 0) & (num_labels < columns)
    if variant == "standard":
        needed = 1 - -num_labels // np.maximum(num_frames, 1)  # a frame writes at most width - 1 labels
    else:
        used &= num_labels <= num_frames
        # A constrained label also pays the blank of the next column, which must lie in the band.
        needed = 1 + (num_labels > 0) * (variant == "constrained")
    needed = np.where(used, needed, 0)
    if needed.size and np.max(needed) > width:
        worst = np.unravel_index(np.argmax(needed), needed.shape)
        sequence = f"sequence {list(map(int, worst))}" if worst else "the sequence"
        lengths = f"T_b = {num_frames[worst]} frames and U_b = {num_labels[worst]} labels"
        expected = f"{needed[worst]} or more with variant {variant!r} for {sequence} with {lengths}"
        raise _checks.bad_value(f"width must be {expected}: no narrower band holds a path, got {width}.")


def _prune_ranges(blank, label, num_frames, num_labels, width, standard):
    frames, columns = blank.shape[-2:]
    blank, label = jax.lax.stop_gradient((blank, label))
    kept = min(width, columns)
    places = columns - kept + 1
    within = sum(blank[..., j : j + places] for j in range(kept))
    enters = jnp.pad(label, [(0, 0)] * (label.ndim - 1) + [(1, 0)])[..., :places]
    first = jnp.argmax(within - enters, -1).astype(jnp.int32)
    frame = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + (frames,), num_frames.ndim)
    last = jnp.clip(num_labels - kept + 1, 0, places - 1)[..., None]
    first = jnp.where(frame >= num_frames[..., None] - 1, last, first)
    first = jax.lax.cummin(first, first.ndim - 1, reverse=True)
    steepest = frame * (max(kept, 2) - 1 if standard else 1)
    slack = jax.lax.cummin(steepest - first, first.ndim - 1, reverse=True)
    return steepest - jnp.maximum(slack, 0)


@keywords
def prune_inputs(
    encoder_out: ArrayLike, predictor_out: ArrayLike, first: ArrayLike, width: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of encoder and predictor for every node of the band, for a joint network of any kind.

    T frames, U labels, S = width columns in the band; `...` is any number of batch dimensions. Place (t, s) of the
    results is node (t, first[t] + s).

    Parameters
    ----------
    encoder_out : Array, float16 | bfloat16 | float32 | float64 [..., T, E]
        Output of the encoder.
    predictor_out : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, P]
        Output of the predictor.
    first : Array, integer [..., T]
        From `prune_ranges`.
    width : int
        S; the same as for `prune_ranges`.

    Returns
    -------
    encoder : Array, dtype of `encoder_out` [..., T, S, E]
        The encoder's rows, repeated.
    predictor : Array, dtype of `predictor_out` [..., T, S, P]
        The predictor's rows; the nearest row where the band reaches beyond them.

    Raises
    ------
    TypeError, ValueError
        For a static mistake in an argument, named in the message.

    See Also
    --------
    BandLogits : The logits that the joint makes from these rows.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import prune_inputs
    >>> first = jnp.array([0, 1])
    >>> encoder, predictor = prune_inputs(jnp.zeros((2, 8)), jnp.arange(3.0)[:, None], first, 2)
    >>> encoder.shape, predictor[..., 0].tolist()
    ((2, 2, 8), [[0.0, 1.0], [1.0, 2.0]])
    """
    encoder_out = _checks.floating("encoder_out", encoder_out, 2, "[..., T, E]")
    batch, frames = encoder_out.shape[:-2], encoder_out.shape[-2]
    predictor_out = _checks.floating("predictor_out", predictor_out, 2, "[..., U + 1, P]")
    if predictor_out.shape[:-2] != batch or predictor_out.shape[-2] < 1:
        expected = f"shape [..., U + 1, P] with the batch dimensions of encoder_out, {batch}"
        raise _checks.bad_value(f"predictor_out must have {expected}, got {tuple(predictor_out.shape)}.")
    _checks.unsplit("predictor_out", predictor_out, {-2: "U + 1"})
    first = _checks.integers("first", first, (*batch, frames), "[..., T]")
    width = _checks.positive("width", width)
    encoder_out, predictor_out, first = _xla.split_alike(len(batch), encoder_out, predictor_out, first)
    column = first[..., None] + jax.lax.broadcasted_iota(jnp.int32, (*first.shape, width), first.ndim)
    column = jnp.clip(column, 0, predictor_out.shape[-2] - 1)
    predictor = jnp.take_along_axis(predictor_out[..., None, :, :], column[..., None], -2)
    return jnp.broadcast_to(encoder_out[..., None, :], (*column.shape, encoder_out.shape[-1])), predictor
