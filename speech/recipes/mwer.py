"""Minimum word error rate training (Prabhavalkar et al. 2018): a trained model lowers the errors of its N-best lists.

python speech/recipes/mwer.py
"""

import jax
import jax.numpy as jnp
from _shared import Digits, check, error_rate, fit, greedy, mean_loss, parse

from jax_rnnt import decode, mwer_loss
from jax_rnnt.metrics import edit_distance


def main():
    args = parse(__doc__, steps=500, mwer_steps=200, width=4, nll=0.1, learning_rate=1e-3)
    digits = Digits(steps=args.steps, seed=args.seed)
    model = digits.model()
    params = fit(model.params, mean_loss(model), digits)
    before = error_rate(greedy(model, params), digits)

    def lists(params, batch):
        """The N best hypotheses of each utterance: labels [B, N, L], counts and scores [B, N]."""
        network = model.network(params)
        rows, lengths = network.encode(model.inputs(batch), batch["lengths"])
        joint, predictor, rows = network.joint.decoder_inputs(network.predictor, rows)
        return decode.Search(model.loss, joint, predictor, 12, max_symbols=3).beam(rows, lengths, args.width)

    def of_lists(params, batch, step):
        """Search, edit distances and loss are one program on the device."""
        found = lists(jax.lax.stop_gradient(params), batch)
        errors = edit_distance(found.labels, found.counts, batch["targets"][:, None], batch["target_lengths"][:, None])
        network = model.network(params, step)
        x = model.encoded(network, model.inputs(batch), batch)
        reference = model.loss(network.joint.logits(x.frames, x.states), *x[2:])
        targets = jnp.maximum(found.labels, 0)
        logits = network.joint.logits(x.frames[:, None], network.predictor(targets))  # hypotheses share the frames
        lengths = jnp.broadcast_to(x.frame_lengths[:, None], found.counts.shape)
        each = model.loss(logits, targets, lengths, found.counts)
        each = jnp.where(jnp.isneginf(found.scores), jnp.inf, each)  # fewer than N hypotheses
        return mwer_loss(each, errors) + args.nll * reference.mean()

    more = Digits(steps=args.mwer_steps, seed=args.seed + 1, learning_rate=args.learning_rate)
    params = fit(params, of_lists, more)
    after = error_rate(greedy(model, params), digits)
    print(f"CER before: {before:.2f}, after: {after:.2f}")
    check("CER after, of 100 before", 100 * after / before, 100)


if __name__ == "__main__":
    main()
