"""The losses that the example can train with: their values, the logits that they need, and the decoding of these."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from data import CLASSES
from model import PrunedTransducer, Transducer

import jax_rnnt

DURATIONS = 0, 1, 2, 3, 4  # frames that a symbol of the token-and-duration transducer may read
BIG_BLANKS = 2, 3, 4  # frames that the big blanks of the multi-blank transducer read
COLUMNS = 4  # columns of the lattice that pruning keeps in every frame


# ----------------------------------------------------------- training: (loss, model, batch, fused) -> value of the loss


def of_all_logits(loss, model, batch, fused):
    """The loss of the logits of all nodes; if `fused`, they are computed in tiles."""
    lengths = model.lengths(batch["feature_lengths"]), batch["target_lengths"]
    if fused:
        logits = model.joint.logits(model.encoder(batch["features"]), model.predictor(batch["targets"]))
    else:
        logits = model(batch["features"], batch["targets"])
    return loss(logits, batch["targets"], *lengths)


def pruned(loss, model, batch, fused):
    """Pruned RNN-T (Kuang et al. 2022): posteriors of a simple loss choose the columns for which the joint runs."""
    frames, states = model.encoder(batch["features"]), model.predictor(batch["targets"])
    lengths = model.lengths(batch["feature_lengths"]), batch["target_lengths"]
    simple, posteriors = jax_rnnt.simple_rnnt_loss(
        model.frame_scores(frames), model.state_scores(states), batch["targets"], *lengths,
        blank=model.blank, lm_only_scale=0.25, return_posteriors=True,
    )  # fmt: skip
    first = jax_rnnt.prune_ranges(*posteriors, *lengths, COLUMNS)
    logits = model.joint(*jax_rnnt.prune_inputs(frames, states, first, COLUMNS))
    return 0.5 * simple + loss(jax_rnnt.BandLogits(logits, first), batch["targets"], *lengths)


# --------------------------------------- decoding: (logits [B, V], blank) -> (symbol [B], number of frames to read [B])
# greedy_decode makes every blank read at least one frame.


def label_stays(logits, blank):
    """The most likely symbol; labels read no frame."""
    symbol = jnp.argmax(logits, -1)
    return symbol, jnp.zeros_like(symbol)


def label_moves(logits, blank):
    """The most likely symbol; labels read their frame."""
    symbol = jnp.argmax(logits, -1)
    return symbol, jnp.ones_like(symbol)


def token_and_duration(logits, blank):
    """The most likely symbol and, independently, the most likely duration."""
    moves = jnp.array(DURATIONS)[jnp.argmax(logits[:, blank + 1 :], -1)]
    return jnp.argmax(logits[:, : blank + 1], -1), moves


def big_blank(logits, blank):
    """The most likely symbol; big blank i, class blank - 1 - i, reads BIG_BLANKS[i] frames, a label none."""
    best = jnp.argmax(logits, -1)
    moves = jnp.array((*reversed(BIG_BLANKS), 1))
    first = blank + 1 - len(moves)
    is_blank = best >= first
    return jnp.where(is_blank, blank, best), jnp.where(is_blank, moves[jnp.maximum(best - first, 0)], 0)


def bernoulli_blank(logits, blank):
    """The sign of the blank's logit decides about the blank, then the most likely label wins. Labels read no frame."""
    label = jnp.argmax(logits[:, :blank], -1)
    return jnp.where(logits[:, blank] > 0, blank, label), jnp.zeros_like(label)


# ------------------------------------------------------------------------------------------------------------ the table


class Variant(NamedTuple):
    loss: jax_rnnt.TransducerLoss
    decide: Callable
    compute: Callable = of_all_logits
    extra_blanks: int = 0  # classes between the labels and the blank
    durations: int = 0  # logits after the blank
    model: type = Transducer

    @property
    def blank(self):
        return CLASSES - 1 + self.extra_blanks

    @property
    def outputs(self):
        return self.blank + 1 + self.durations


tdt = jax_rnnt.TDTLoss(DURATIONS, sigma=0.05)
multiblank = jax_rnnt.MultiblankRNNTLoss(BIG_BLANKS, sigma=0.05)

# The blank of every loss is its default, the last class.
VARIANTS = {
    "rnnt": Variant(jax_rnnt.RNNTLoss(), label_stays),
    "monotonic": Variant(jax_rnnt.MonotonicRNNTLoss(), label_moves),
    "tdt": Variant(tdt, token_and_duration, durations=len(DURATIONS)),
    "multiblank": Variant(multiblank, big_blank, extra_blanks=len(BIG_BLANKS)),
    "hat": Variant(jax_rnnt.HATLoss(), bernoulli_blank),
    "pruned": Variant(jax_rnnt.RNNTLoss(), label_stays, pruned, model=PrunedTransducer),
}
