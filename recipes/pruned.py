"""Pruned RNN-T (Kuang et al. 2022) in two passes: a simple loss finds the band of the lattice where the joint runs.

    python recipes/pruned.py

The simple loss adds scores of frames and of label contexts, without a joint. While it learns, the pruned loss counts
little, as its bands are still wrong: here it rises from 0.1 to 1 over the first steps, and the simple one falls to 0.5.
"""

import jax
import jax.numpy as jnp
from _shared import Digits, check, error_rate, fit, greedy, parse

from jax_rnnt import AdditiveLogits, BandLogits, RNNTLoss, prune_inputs, prune_ranges

LOSS = RNNTLoss(reduction="none")
WIDTH = 4  # columns of the lattice in the band of a frame


def losses(model, x):
    """(simple losses [B], pruned losses [B])."""
    problem = x.targets, x.frame_lengths, x.target_lengths
    scores = AdditiveLogits(model.frame_scores(x.frames), model.state_scores(x.states), lm_only_scale=0.25)
    blank, label = jax.lax.stop_gradient(LOSS.posteriors(scores, *problem))
    first = prune_ranges(
        blank_posteriors=blank,
        label_posteriors=label,
        logit_lengths=x.frame_lengths,
        target_lengths=x.target_lengths,
        width=WIDTH,
    )
    band = model.joint(*prune_inputs(x.frames, x.states, first, WIDTH))  # [B, N, WIDTH, V] instead of [B, N, U + 1, V]
    return LOSS(scores, *problem), LOSS(BandLogits(band, first), *problem)


def main():
    args = parse(__doc__, steps=2000, warm_up=200)
    digits = Digits(steps=args.steps, seed=args.seed)
    recogniser = digits.recogniser(loss="pruned")

    def mean_loss(params, batch, step):
        model = recogniser.model(params, step)
        simple, pruned = losses(model, recogniser.encoded(model, recogniser.inputs(batch), batch))
        ready = jnp.minimum(step / args.warm_up, 1)
        return jnp.mean((1 - 0.5 * ready) * simple + (0.1 + 0.9 * ready) * pruned)

    params = fit(recogniser.params, mean_loss, digits)
    check("CER", error_rate(greedy(recogniser, params), digits), 5)


if __name__ == "__main__":
    main()
