"""The losses that the example can train with: their values, and the logits that they need."""

from collections.abc import Callable
from typing import NamedTuple

import jax
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
    named = dict(zip(("logit_lengths", "target_lengths"), lengths))
    rest = batch["targets"], *lengths
    scores = jax_rnnt.AdditiveLogits(model.frame_scores(frames), model.state_scores(states), lm_only_scale=0.25)
    blank, label = jax.lax.stop_gradient(loss.posteriors(scores, *rest))
    first = jax_rnnt.prune_ranges(blank_posteriors=blank, label_posteriors=label, **named, width=COLUMNS)
    logits = model.joint(*jax_rnnt.prune_inputs(frames, states, first, COLUMNS))
    return 0.5 * loss(scores, *rest) + loss(jax_rnnt.BandLogits(logits, first), *rest)


# ------------------------------------------------------------------------------------------------------------ the table


class Variant(NamedTuple):
    loss: jax_rnnt.TransducerLoss
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
    "rnnt": Variant(jax_rnnt.RNNTLoss()),
    "monotonic": Variant(jax_rnnt.MonotonicRNNTLoss()),
    "tdt": Variant(tdt, durations=len(DURATIONS)),
    "multiblank": Variant(multiblank, extra_blanks=len(BIG_BLANKS)),
    "hat": Variant(jax_rnnt.HATLoss()),
    "pruned": Variant(jax_rnnt.RNNTLoss(), pruned, model=PrunedTransducer),
}
