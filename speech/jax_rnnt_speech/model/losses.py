"""The losses of the family: their values, and the logits that they need.

Labels come first, then further blanks, then the blank, then durations.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import jax_rnnt
from jax_rnnt_speech.model import ctc

BIG_BLANKS = 2, 3, 4  # frames that the big blanks of the multi-blank transducer read
COLUMNS = 4  # columns of the lattice that pruning keeps in every frame


class Encoded(NamedTuple):
    """Rows of encoder and predictor, and targets: the inputs of every loss."""

    frames: jax.Array  # [B, N, E]
    states: jax.Array  # [B, U + 1, P]
    targets: jax.Array  # [B, U]
    frame_lengths: jax.Array  # [B]
    target_lengths: jax.Array  # [B]


def losses_of_nodes(loss, model, x, tiles):
    """Returns losses [B] of the logits of all nodes; if `tiles`, these are never all in memory."""
    if tiles:
        logits = model.joint.logits(x.frames, x.states)
    else:
        logits = model.joint(x.frames[:, :, None], x.states[:, None])
    return loss(logits, *x[2:])


def pruned(loss, model, x, tiles):
    """Pruned RNN-T (Kuang et al. 2022): posteriors of a simple loss choose the columns for which the joint runs."""
    scores = model.frame_scores(x.frames), model.state_scores(x.states)
    scores = jax_rnnt.AdditiveLogits(*scores, lm_only_scale=0.25)
    blank, label = jax.lax.stop_gradient(loss.posteriors(scores, *x[2:]))
    lengths = {"logit_lengths": x.frame_lengths, "target_lengths": x.target_lengths}
    first = jax_rnnt.prune_ranges(blank_posteriors=blank, label_posteriors=label, **lengths, width=COLUMNS)
    logits = model.joint(*jax_rnnt.prune_inputs(x.frames, x.states, first, COLUMNS))
    return 0.5 * loss(scores, *x[2:]) + loss(jax_rnnt.BandLogits(logits, first), *x[2:])


def losses_by_ctc(loss, model, x, tiles):
    """Returns losses [B] of a model that has a head for CTC alone."""
    return ctc.loss(model.ctc(x.frames), *x[2:])


def loss_of_texts(model, targets, lengths, labels):
    """Returns the mean cross-entropy of sentences [B, U] in nats, without blanks, and with zeros as encoder rows."""
    rows = jnp.zeros((len(targets), 1, model.joint.encoder.in_features))
    logits = model.joint(rows, model.predictor(targets))[:, :-1, :labels].astype(jnp.float32)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.where(jnp.arange(targets.shape[1]) < lengths[:, None], values, 0).sum(1).mean()


class Variant(NamedTuple):
    loss: jax_rnnt.TransducerLoss | None
    compute: Callable = losses_of_nodes
    extra_blanks: int = 0  # classes between the labels and the blank
    durations: int = 0  # logits after the blank

    def outputs(self, labels):
        """Returns (the blank, number of logits) for a number of labels."""
        return labels + self.extra_blanks, labels + self.extra_blanks + 1 + self.durations


# The blank of every loss is its default, the last class.
LOSSES = {
    "rnnt": Variant(jax_rnnt.RNNTLoss()),
    "monotonic": Variant(jax_rnnt.MonotonicRNNTLoss()),
    "constrained": Variant(jax_rnnt.ConstrainedRNNTLoss()),
    "tdt": Variant(jax_rnnt.TDTLoss((0, 1)), durations=2),
    "multiblank": Variant(jax_rnnt.MultiblankRNNTLoss(BIG_BLANKS), extra_blanks=len(BIG_BLANKS)),
    "hat": Variant(jax_rnnt.HATLoss()),
    "robust": Variant(jax_rnnt.TargetRobustRNNTLoss(skip_frame=-5.0, skip_label=-5.0)),
    "wildcard": Variant(jax_rnnt.WildcardRNNTLoss(skip_start=-5.0, skip_end=-5.0)),
    "pruned": Variant(jax_rnnt.RNNTLoss(), pruned),
    "ctc": Variant(None, losses_by_ctc),
}


def variant_of(options):
    """Returns the variant that a `config.Head` chooses."""
    chosen = LOSSES[options.loss]
    if options.loss == "tdt":
        loss = jax_rnnt.TDTLoss(tuple(options.durations), sigma=options.sigma)
        return chosen._replace(loss=loss, durations=len(options.durations))
    if options.loss == "multiblank":
        return chosen._replace(loss=dataclasses.replace(chosen.loss, sigma=options.sigma))
    return chosen
