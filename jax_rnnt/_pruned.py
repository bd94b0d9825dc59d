"""simple_rnnt_loss, prune_ranges, prune_inputs, pruned_rnnt_loss: pruned RNN-T in four steps (Kuang et al. 2022)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks
from jax_rnnt._hat import HATLoss
from jax_rnnt._layouts import AdditiveLogits, BandLogits
from jax_rnnt._loss import build
from jax_rnnt._monotonic import ConstrainedRNNTLoss, MonotonicRNNTLoss
from jax_rnnt._rnnt import RNNTLoss

_LOSSES = {"standard": RNNTLoss, "monotonic": MonotonicRNNTLoss, "constrained": ConstrainedRNNTLoss}


def _by_topology(function: str, topology):
    """The loss of a unit-step lattice by its name."""
    return _LOSSES[_checks.choice(function, "topology", topology, tuple(_LOSSES))]


def simple_rnnt_loss(
    am: jax.Array,
    lm: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    reduction: str = "mean",
    *,
    lm_only_scale: float | jax.Array = 0.0,
    am_only_scale: float | jax.Array = 0.0,
    unigram: jax.Array | None = None,
    topology: str = "standard",
    delay_penalty: float | jax.Array = 0.0,
    return_posteriors: bool = False,
    implementation: str | None = None,
):
    """RNN-T loss of the additive joint am + lm, which is never formed: time and memory of a matrix product.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions. The logits are
    am[t, v] + lm[u, v], and the recursion is that of `rnnt_loss`. With smoothing, log-probabilities of either network
    alone are mixed in, p[v] being the mean over u of softmax(lm)[u, v] of the same sequence::

        log_x(t, u) = (1 - l - a) log_softmax(am[t] + lm[u])[x] + l log_softmax(lm[u])[x]
                      + a (am[t, x] + log p[x] - log sum over v of exp(am[t, v]) p[v])

    Parameters
    ----------
    am : Array, float16 | bfloat16 | float32 | float64 [..., T, V]
        Scores of the encoder ("acoustic model").
    lm : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, V]
        Scores of the predictor ("language model").
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    reduction : {"mean", "none", "sum", "mean_target", "mean_volume"}
        As for `rnnt_loss`.
    lm_only_scale, am_only_scale : float or scalar Array, default 0.0
        l and a above. k2's recipes use 0.25 and 0.0.
    unigram : Array, floating [V] or [..., V], optional
        p above, in place of the sequence's own. k2 takes the mean over the whole batch, padding included. It and the
        two scales have a gradient.
    topology : {"standard", "monotonic", "constrained"}
        The lattice: that of `rnnt_loss`, `monotonic_rnnt_loss` or `constrained_rnnt_loss`.
    delay_penalty : float or scalar Array, default 0.0
        As for `rnnt_loss`.
    return_posteriors : bool, default False
        True: also returns the posteriors that `prune_ranges` takes.
    implementation : {None, "kernel", "reference"}
        As for `rnnt_loss`; "kernel" is an error, since the matrix products are plain JAX.

    Returns
    -------
    loss : Array, float32 (float64 for float64 scores) [...] for reduction "none", else []
        In nats, with the rules of `rnnt_loss` for odd sequences.
    posteriors : tuple of Array [..., T, U + 1]
        (blank, label) as `rnnt_posteriors` gives them, without a gradient; only with `return_posteriors`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    Notes
    -----
    The matrix product multiplies exponentials, each relative to the largest of its row. If no class has exp(-87) or
    more in both the frame and the column (float32), the log-probabilities of that node are only bounds.

    References
    ----------
    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, arXiv:2206.13236.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import simple_rnnt_loss
    >>> loss = simple_rnnt_loss(jnp.zeros((4, 5)), jnp.zeros((3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    7.354
    """
    name = "simple_rnnt_loss"
    loss = build(
        name, _by_topology(name, topology), blank=blank, reduction=reduction, delay_penalty=delay_penalty,
        implementation=implementation,
    )  # fmt: skip
    logits = AdditiveLogits(am, lm, lm_only_scale, am_only_scale, unigram)
    arguments = name, logits, targets, logit_lengths, target_lengths
    if not _checks.boolean(name, "return_posteriors", return_posteriors):
        return loss._value(*arguments)
    return loss._value(*arguments), jax.lax.stop_gradient(loss._posteriors(*arguments))


def prune_ranges(
    *,
    blank_posteriors: jax.Array,
    label_posteriors: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    width: int,
    topology: str = "standard",
) -> jax.Array:
    """First of the `width` columns that every frame keeps, by k2's rule.

    T frames, U labels, U1 = U + 1; `...` is any number of batch dimensions. Each frame takes the `width` columns that
    hold the most blank posterior, less the label posterior that enters them from outside. The first column is then made
    monotonic: it starts at 0, ends at max(U_b - width + 1, 0), and grows by less than `width` a frame (by at most 1
    where a frame emits at most one label). All arguments are keywords: k2 takes the posteriors of labels (px) before
    those of blanks (py), this library returns those of blanks first.

    Parameters
    ----------
    blank_posteriors, label_posteriors : Array, floating [..., T, U1]
        From `simple_rnnt_loss` with `return_posteriors`, or `rnnt_posteriors`.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    width : int
        S, the number of columns to keep: 2 or more on the standard lattice, else 1 or more. The band holds a path where
        U_b <= (width - 1) * T_b on the standard lattice, where U_b <= T_b on the monotonic one, and where also width >=
        2 or U_b = 0 on the constrained one. k2 widens the band for the batch, which a static shape forbids.
    topology : {"standard", "monotonic", "constrained"}
        The topology of the loss that gave the posteriors.

    Returns
    -------
    Array, int32 [..., T]
        For `prune_inputs` and `pruned_rnnt_loss`. It has no gradient.

    Raises
    ------
    TypeError, ValueError
        For a static mistake in an argument, named in the message. ValueError also where the lengths are known and only
        a wider band holds a path of some sequence. Traced lengths (under jit) cannot be checked: `pruned_rnnt_loss` of
        such a sequence is +inf with a zero gradient.

    References
    ----------
    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, arXiv:2206.13236, and k2's
    get_rnnt_prune_ranges.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import prune_ranges, rnnt_posteriors
    >>> lengths = {"logit_lengths": jnp.array(4), "target_lengths": jnp.array(3)}
    >>> blank, label = rnnt_posteriors(jnp.zeros((4, 4, 5)), jnp.array([1, 2, 3]), **lengths)
    >>> prune_ranges(blank_posteriors=blank, label_posteriors=label, **lengths, width=2).tolist()
    [0, 1, 2, 2]
    """
    name = "prune_ranges"
    blank = _checks.floating(name, "blank_posteriors", blank_posteriors, 2, "[..., T, U + 1]")
    label = _checks.floating(name, "label_posteriors", label_posteriors, 2, "[..., T, U + 1]")
    if blank.shape != label.shape or blank.shape[-1] < 1:
        expected = f"the shape of blank_posteriors, {tuple(blank.shape)}, with U + 1 >= 1"
        raise ValueError(f"{name}: label_posteriors must have {expected}, got {tuple(label.shape)}.")
    batch = blank.shape[:-2]
    num_frames = _checks.integers(name, "logit_lengths", logit_lengths, batch, "[...]")
    num_labels = _checks.integers(name, "target_lengths", target_lengths, batch, "[...]")
    _by_topology(name, topology)
    smallest = 2 if topology == "standard" else 1
    width = _checks.integer(name, "width", width)
    if width < smallest:
        raise ValueError(f"{name}: width must be {smallest} or more with topology {topology!r}, got {width}.")
    frames, labels = _checks.known(logit_lengths), _checks.known(target_lengths)
    if frames is not None and labels is not None:
        _check_width(name, blank.shape, frames.astype(np.int64), labels.astype(np.int64), width, topology)
    return _prune_ranges(blank, label, num_frames, num_labels, width, topology == "standard")


def _check_width(name, shape, num_frames, num_labels, width, topology):
    """Raises if a sequence has a path in its lattice but none in any band of this width."""
    frames, columns = shape[-2:]
    used = (num_frames >= 1) & (num_frames <= frames) & (num_labels >= 0) & (num_labels < columns)
    if topology == "standard":
        needed = 1 - -num_labels // np.maximum(num_frames, 1)  # a frame writes width - 1 labels at most
    else:
        used &= num_labels <= num_frames
        # A constrained label also pays the blank of the next column, which must lie in the band.
        needed = 1 + (num_labels > 0) * (topology == "constrained")
    needed = np.where(used, needed, 0)
    if needed.size and np.max(needed) > width:
        worst = np.unravel_index(np.argmax(needed), needed.shape)
        sequence = f"sequence {list(map(int, worst))}" if worst else "the sequence"
        lengths = f"T_b = {num_frames[worst]} frames and U_b = {num_labels[worst]} labels"
        expected = f"{needed[worst]} or more with topology {topology!r} for {sequence} with {lengths}"
        raise ValueError(f"{name}: width must be {expected}: no narrower band holds a path, got {width}.")


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


def prune_inputs(encoder_out: jax.Array, predictor_out: jax.Array, first: jax.Array, width: int):
    """Rows of encoder and predictor for every node of the band, for a joint network of any kind.

    T frames, U labels, S = width columns in the band; `...` is any number of batch dimensions. Place (t, s) of the
    results is node (t, first[t] + s).

    Parameters
    ----------
    encoder_out : Array [..., T, E]
        Output of the encoder.
    predictor_out : Array [..., U + 1, P]
        Output of the predictor.
    first : Array, integer [..., T]
        From `prune_ranges`.
    width : int
        S; the same as for `prune_ranges`.

    Returns
    -------
    encoder : Array [..., T, S, E]
        The encoder's rows, repeated.
    predictor : Array [..., T, S, P]
        The predictor's rows; where the band leaves the columns, the nearest one.

    Raises
    ------
    TypeError, ValueError
        For a static mistake in an argument, named in the message.

    See Also
    --------
    pruned_rnnt_loss : The loss of the logits that the joint makes from these rows.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import prune_inputs
    >>> first = jnp.array([0, 1])
    >>> encoder, predictor = prune_inputs(jnp.zeros((2, 8)), jnp.arange(3.0)[:, None], first, 2)
    >>> encoder.shape, predictor[..., 0].tolist()
    ((2, 2, 8), [[0.0, 1.0], [1.0, 2.0]])
    """
    name = "prune_inputs"
    encoder_out = _checks.floating(name, "encoder_out", encoder_out, 2, "[..., T, E]")
    batch, frames = encoder_out.shape[:-2], encoder_out.shape[-2]
    predictor_out = _checks.floating(name, "predictor_out", predictor_out, 2, "[..., U + 1, P]")
    if predictor_out.shape[:-2] != batch or predictor_out.shape[-2] < 1:
        expected = f"shape [..., U + 1, P] with the batch dimensions of encoder_out, {batch}"
        raise ValueError(f"{name}: predictor_out must have {expected}, got {tuple(predictor_out.shape)}.")
    first = _checks.integers(name, "first", first, (*batch, frames), "[..., T]")
    width = _checks.positive(name, "width", width)
    column = first[..., None] + jax.lax.broadcasted_iota(jnp.int32, (*first.shape, width), first.ndim)
    column = jnp.clip(column, 0, predictor_out.shape[-2] - 1)
    predictor = jnp.take_along_axis(predictor_out[..., None, :, :], column[..., None], -2)
    return jnp.broadcast_to(encoder_out[..., None, :], (*column.shape, encoder_out.shape[-1])), predictor


def pruned_rnnt_loss(
    logits: jax.Array,
    first: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    topology: str = "standard",
    hat: bool = False,
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
    inplace: bool = True,
) -> jax.Array:
    """RNN-T loss over a band of the lattice (Kuang et al. 2022): S columns of every frame, and no others.

    T frames, U labels, V classes (blank included), S columns; `...` is any number of batch dimensions. Place (t, s) of
    the logits is node (t, first[t] + s); the recursion is that of `rnnt_loss` over these nodes. With S = U + 1 and
    first = 0 it is the whole lattice.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, S, V]
        Output of the joint network at the nodes of the band.
    first : Array, integer [..., T]
        First column of each frame's band, from `prune_ranges` or your own. Columns outside [0, U_b] are ignored.
        Offsets may go back or start above 0: only paths inside the band count.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    topology : {"standard", "monotonic", "constrained"}
        The lattice: that of `rnnt_loss`, `monotonic_rnnt_loss` or `constrained_rnnt_loss`.
    hat : bool, default False
        True: the logits are those of `hat_loss`.
    clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, label_windows, implementation, inplace
        As for `rnnt_loss`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats; +inf with a zero gradient where no path stays in the band, for instance because node (0, 0) or the
        last node of a path lies outside.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    See Also
    --------
    rnnt_loss : Meaning of the common options, and the rules for odd sequences.

    References
    ----------
    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, arXiv:2206.13236.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import pruned_rnnt_loss
    >>> first = jnp.array([0, 0, 1, 1])
    >>> loss = pruned_rnnt_loss(jnp.zeros((4, 2, 5)), first, jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)  # 6 log 5 - log 4
    8.27
    """
    name = "pruned_rnnt_loss"
    kind = _by_topology(name, topology)
    own = {"topology": topology} if (is_hat := _checks.boolean(name, "hat", hat)) else {}
    loss = build(
        name, HATLoss if is_hat else kind, **own,
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation, inplace=inplace,
    )  # fmt: skip
    return loss._value(name, BandLogits(logits, first), targets, logit_lengths, target_lengths, label_windows)
