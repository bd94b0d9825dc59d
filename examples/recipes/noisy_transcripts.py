"""Training on transcripts with errors: losses that let a path leave wrong labels out, or labels that nobody wrote down.

    python examples/recipes/noisy_transcripts.py

A share of the labels is deleted (or inserted, `--error inserted`), anew in every batch; RNN-T and a robust loss learn
from the same batches, and read held-out lines.
"""

import numpy as np
from _shared import Digits, check, error_rate, fit, greedy, parse

from jax_rnnt import RNNTLoss, TargetRobustRNNTLoss

# Log-probability of a frame that no label explains, or of a label that is not there; None: never.
ROBUST = {
    "deleted": TargetRobustRNNTLoss(skip_frame=-1.0, skip_label=None, reduction="none"),
    "inserted": TargetRobustRNNTLoss(skip_frame=None, skip_label=-3.0, reduction="none"),
}
ERRORS = {"deleted": lambda rng, line, hit: line[~hit], "inserted": lambda rng, line, hit: inserted(rng, line, hit)}


def inserted(rng, line, hit):
    return np.insert(line, np.flatnonzero(hit), rng.integers(10, size=hit.sum()))


def corrupted(error, share):
    """A function of (parameters, batch, step): the batch with wrong transcripts."""

    def batch_of(params, batch, step):
        rng, size = np.random.default_rng(step), batch["targets"].shape[1]
        targets, counts = np.zeros_like(batch["targets"]), np.zeros_like(batch["target_lengths"])
        for i, line in enumerate(batch["targets"]):
            line = line[: batch["target_lengths"][i]]
            line = ERRORS[error](rng, line, rng.random(len(line)) < share)[:size]
            targets[i, : len(line)], counts[i] = line, len(line)
        return batch | {"targets": targets, "target_lengths": counts}

    return batch_of


def main():
    args = parse(__doc__, steps=1000, error="deleted", share=0.3)
    digits, rates = Digits(steps=args.steps, seed=args.seed), {}
    for name, loss in (("RNN-T", RNNTLoss(reduction="none")), ("robust", ROBUST[args.error])):
        recogniser = digits.recogniser()

        def mean_loss(params, batch, step, recogniser=recogniser, loss=loss):
            model = recogniser.model(params, step)
            x = recogniser.encoded(model, recogniser.inputs(batch, False), batch)
            return loss(model.joint.logits(x.frames, x.states), *x[2:]).mean()

        params = fit(recogniser.params, mean_loss, digits, corrupted(args.error, args.share))
        rates[name] = error_rate(greedy(recogniser, params), digits)
    print(f"CER after {100 * args.share:.0f}% {args.error}: " + ", ".join(f"{k} {v:.2f}" for k, v in rates.items()))
    check("CER of the robust loss, of 100 of RNN-T", 100 * rates["robust"] / rates["RNN-T"], 70)


if __name__ == "__main__":
    main()
