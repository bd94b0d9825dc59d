"""Training on transcripts with errors: losses whose paths may leave wrong labels out, or frames without a label.

    python speech/recipes/noisy_transcripts.py
    python speech/recipes/noisy_transcripts.py --error replaced    # or inserted, cut

A share of the labels is wrong, anew in every batch. RNN-T and a robust loss learn from the same batches and read
held-out lines. A model that cannot tell digits yet learns to skip them: most skips are not allowed in the first half.
"""

import jax.numpy as jnp
import numpy as np
from _shared import Digits, check, error_rate, fit, greedy, parse

from jax_rnnt import RNNTLoss, TargetRobustRNNTLoss, WildcardRNNTLoss

# Of an error: the loss of a skip's log-probability, this number, and the share of the steps without skips.
ROBUST = {
    "deleted": (lambda x: TargetRobustRNNTLoss(skip_frame=x, skip_label=None, reduction="none"), 0.0, 0.0),
    "inserted": (lambda x: TargetRobustRNNTLoss(skip_frame=None, skip_label=x, reduction="none"), -2.0, 0.5),
    "replaced": (lambda x: TargetRobustRNNTLoss(skip_frame=x, skip_label=x, reduction="none"), -2.0, 0.5),
    "cut": (lambda x: WildcardRNNTLoss(skip_start=x, skip_end=x, reduction="none"), -2.0, 0.5),
}


def wrong(error, rng, line, share):
    """The labels of a line with errors; "cut" takes as many as "deleted" would, but at the ends."""
    hit = rng.random(len(line)) < share
    other = (line + rng.integers(1, 10, len(line))) % 10
    if error == "deleted":
        return line[~hit]
    if error == "inserted":
        return np.insert(line, np.flatnonzero(hit), other[hit])
    if error == "replaced":
        return np.where(hit, other, line)
    first = rng.integers(hit.sum() + 1)
    return line[first : len(line) - hit.sum() + first]


def corrupted(error, share):
    """A function of (parameters, batch, step): the batch with wrong transcripts."""

    def batch_of(params, batch, step):
        rng, size = np.random.default_rng(step), batch["targets"].shape[1]
        targets, counts = np.zeros_like(batch["targets"]), np.zeros_like(batch["target_lengths"])
        for i, (line, count) in enumerate(zip(batch["targets"], batch["target_lengths"])):
            line = wrong(error, rng, line[:count], share)[:size]
            targets[i, : len(line)], counts[i] = line, len(line)
        return batch | {"targets": targets, "target_lengths": counts}

    return batch_of


def main():
    args = parse(__doc__, steps=1000, error="deleted", share=0.2)
    if args.error not in ROBUST:
        raise SystemExit(f"--error must be one of {', '.join(ROBUST)}, got {args.error}")
    digits, rates = Digits(steps=args.steps, seed=args.seed), {}
    robust, number, late = ROBUST[args.error]
    for name, loss_of in (("RNN-T", lambda x: RNNTLoss(reduction="none")), ("robust", robust)):
        model = digits.model()

        def mean_loss(params, batch, step, model=model, loss_of=loss_of):
            network = model.network(params, step)
            x = model.encoded(network, model.inputs(batch), batch)
            loss = loss_of(jnp.where(step < late * args.steps, -jnp.inf, number))
            return loss(network.joint.logits(x.frames, x.states), *x[2:]).mean()

        params = fit(model.params, mean_loss, digits, corrupted(args.error, args.share))
        rates[name] = error_rate(greedy(model, params), digits)
    print(f"CER, {100 * args.share:.0f}% {args.error}: " + ", ".join(f"{k} {v:.2f}" for k, v in rates.items()))
    check("CER of the robust loss, of 100 of RNN-T", 100 * rates["robust"] / rates["RNN-T"], 90)


if __name__ == "__main__":
    main()
