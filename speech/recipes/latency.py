"""Three ways to emit labels earlier, of a model that sees no future: FastEmit, delay penalty and minimum latency.

    python speech/recipes/latency.py

One model is trained, then fine-tuned in each way at each strength. The table has delay and error rate: delay is that of
the expected frame of a label behind the last column of its digit.
"""

import dataclasses

import jax
import numpy as np
from _shared import Digits, check, error_rate, fit, greedy, parse

STRENGTHS = {"FastEmit": (0.1, 0.5), "delay penalty": (0.1, 0.4), "minimum latency": (0.3, 1.0)}


def objective(model, name, strength):
    """A mean loss that pulls labels to earlier frames."""
    options = {"FastEmit": "fastemit_lambda", "delay penalty": "delay_penalty"}
    loss = dataclasses.replace(model.loss, **({options[name]: strength} if name in options else {}))

    def mean_loss(params, batch, step):
        network = model.network(params, step)
        x = model.encoded(network, model.inputs(batch), batch)
        problem = network.joint(x.frames[:, :, None], x.states[:, None]), *x[2:]
        losses = loss(*problem)
        if name == "minimum latency":
            losses = losses + strength * loss.latency(*problem)
        return losses.mean()

    return mean_loss


def delay(model, params, digits):
    """Mean of (expected frame of a label - last frame of its digit) over held-out lines, in encoder frames."""

    @jax.jit
    def expected(batch):
        network = model.network(params)
        x = model.encoded(network, model.inputs(batch), batch)
        return model.loss.label_frames(network.joint.logits(x.frames, x.states), *x[2:])

    delays = []
    for batch in digits.tests():
        index, valid = batch.pop("index"), batch["valid"]
        for i, frames in zip(index[valid], np.asarray(expected(batch))[valid]):
            ends = digits.test.corpus.draw(i, np.random.default_rng(i))[1][:, 1]
            delays += list(frames[: len(ends)] - ends / model.subsampling)
    return float(np.mean(delays))


def main():
    args = parse(__doc__, steps=600, tuning_steps=120)
    digits = Digits(steps=args.steps, seed=args.seed, chunk=1)
    model = digits.model()
    params = fit(model.params, objective(model, None, 0), digits)
    few = Digits(steps=args.tuning_steps, seed=args.seed + 1, chunk=1, learning_rate=1e-3)
    print("| | strength | delay, frames | CER, % |\n|---|--:|--:|--:|")

    def delay_of(name, strength):
        tuned = fit(params, objective(model, name, strength), few)
        later, rate = delay(model, tuned, digits), error_rate(greedy(model, tuned), digits)
        print(f"| {name or 'no penalty'} | {strength or ''} | {later:.2f} | {rate:.2f} |", flush=True)
        return later

    start = delay_of(None, 0)
    delays = {name: [delay_of(name, strength) for strength in strengths] for name, strengths in STRENGTHS.items()}
    for name, (_, later) in delays.items():
        check(f"delay with {name}, frames more than without", later - start, -0.1)


if __name__ == "__main__":
    main()
