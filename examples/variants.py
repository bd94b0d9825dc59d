"""The losses that the example can train with: their function, the logits that they need, and how these are decoded."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from data import CLASSES
from model import PrunedTransducer, Transducer

import jax_rnnt

DURATIONS = 0, 1, 2, 3, 4  # frames that a symbol of the token-and-duration transducer may read
BIG_BLANKS = 2, 3, 4  # frames of the multi-blank transducer's further blanks
COLUMNS = 4  # of the lattice that pruning keeps in every frame


# ------------------------------------------------------------------------- training: (model, batch, options) -> loss


def of_logits(function):
    """Of a loss of the logits of all nodes, which are made in tiles where `fused`."""

    def loss(model, batch, fused=False, **options):
        lengths = model.lengths(batch["feature_lengths"]), batch["target_lengths"]
        options |= {"blank": model.blank}
        if fused:
            rows = model.joint.project(model.encoder(batch["features"]), model.states(batch["targets"]))
            joint = model.joint.linear
            return jax_rnnt.joint_rnnt_loss(joint, *rows, batch["targets"], *lengths, loss=function, **options)
        return function(model(batch["features"], batch["targets"]), batch["targets"], *lengths, **options)

    return loss


def pruned(model, batch, **options):
    """Pruned RNN-T (Kuang et al. 2022): a loss without a joint network tells which columns the joint is needed for."""
    frames, states = model.encoder(batch["features"]), model.states(batch["targets"])
    lengths = model.lengths(batch["feature_lengths"]), batch["target_lengths"]
    simple, posteriors = jax_rnnt.simple_rnnt_loss(
        model.frame_scores(frames), model.state_scores(states), batch["targets"], *lengths,
        blank=model.blank, lm_only_scale=0.25, return_posteriors=True,
    )  # fmt: skip
    first = jax_rnnt.prune_ranges(*posteriors, *lengths, COLUMNS)
    logits = model.joint(*jax_rnnt.prune_inputs(frames, states, first, COLUMNS))
    loss = jax_rnnt.pruned_rnnt_loss(logits, first, batch["targets"], *lengths, blank=model.blank, **options)
    return 0.5 * simple + loss


# ------------------------------------------- decoding: (logits [B, V], blank) -> (symbol [B], frames to move on by [B])
# A blank moves on by one frame at least, whatever is said here: greedy_decode sees to it.


def label_stays(logits, blank):
    """Most likely symbol; labels read no frame."""
    symbol = jnp.argmax(logits, -1)
    return symbol, jnp.zeros_like(symbol)


def label_moves(logits, blank):
    """Most likely symbol; labels read their frame."""
    symbol = jnp.argmax(logits, -1)
    return symbol, jnp.ones_like(symbol)


def token_and_duration(logits, blank):
    """Most likely symbol and, apart from it, frames."""
    moves = jnp.array(DURATIONS)[jnp.argmax(logits[:, blank + 1 :], -1)]
    return jnp.argmax(logits[:, : blank + 1], -1), moves


def big_blank(logits, blank):
    """Most likely symbol; big blanks, classes blank - 1 - i, say how many frames they read."""
    best = jnp.argmax(logits, -1)
    moves = jnp.array((*reversed(BIG_BLANKS), 1))
    first = blank + 1 - len(moves)
    is_blank = best >= first
    return jnp.where(is_blank, blank, best), jnp.where(is_blank, moves[jnp.maximum(best - first, 0)], 0)


def bernoulli_blank(logits, blank):
    """Blank or not by the sign of its logit, and only then the most likely label; labels read no frame."""
    label = jnp.argmax(logits[:, :blank], -1)
    return jnp.where(logits[:, blank] > 0, blank, label), jnp.zeros_like(label)


# ------------------------------------------------------------------------------------------------------------ the table


class Variant(NamedTuple):
    loss: Callable
    decide: Callable
    of_logits: Callable  # the loss of all logits, whose lattice the picture shows
    extra_blanks: int = 0  # classes between the labels and the blank
    durations: int = 0  # logits after the blank
    model: type = Transducer

    @property
    def blank(self):
        return CLASSES - 1 + self.extra_blanks

    @property
    def outputs(self):
        return self.blank + 1 + self.durations


tdt_loss = functools.partial(jax_rnnt.tdt_loss, durations=DURATIONS, sigma=0.05)
multiblank_loss = functools.partial(jax_rnnt.multiblank_rnnt_loss, big_blank_durations=BIG_BLANKS, sigma=0.05)

VARIANTS = {
    "rnnt": Variant(of_logits(jax_rnnt.rnnt_loss), label_stays, jax_rnnt.rnnt_loss),
    "monotonic": Variant(of_logits(jax_rnnt.monotonic_rnnt_loss), label_moves, jax_rnnt.monotonic_rnnt_loss),
    "tdt": Variant(of_logits(tdt_loss), token_and_duration, tdt_loss, durations=len(DURATIONS)),
    "multiblank": Variant(of_logits(multiblank_loss), big_blank, multiblank_loss, extra_blanks=len(BIG_BLANKS)),
    "hat": Variant(of_logits(jax_rnnt.hat_loss), bernoulli_blank, jax_rnnt.hat_loss),
    "pruned": Variant(pruned, label_stays, jax_rnnt.rnnt_loss, model=PrunedTransducer),
}
