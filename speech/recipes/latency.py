"""Three ways to emit labels earlier, of a model that sees no future: FastEmit, delay penalty and minimum latency.

    python speech/recipes/latency.py

One model is trained, then fine-tuned in each way at each strength. `runs/recipes/latency.png` has delay against error
rate; delay is that of the expected frame of a label behind the last column of its digit.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from _shared import Digits, check, error_rate, fit, greedy, parse

PICTURE = Path("runs/recipes/latency.png")
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


def draw(points):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(layout="constrained")
    start = points.pop("no penalty")
    ax.plot(*start[0], "ko", label="no penalty")
    for (name, point), marker in zip(points.items(), "s^v"):
        ax.plot(*zip(*start, *point), f"{marker}--", label=name)
    ax.set(xlabel="delay, encoder frames", ylabel="character error rate, %")
    ax.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=120)
    print(f"{PICTURE} is written")


def main():
    args = parse(__doc__, steps=600, tuning_steps=120)
    digits = Digits(steps=args.steps, seed=args.seed, chunk=1)
    model = digits.model()
    params = fit(model.params, objective(model, None, 0), digits)
    few = Digits(steps=args.tuning_steps, seed=args.seed + 1, chunk=1, learning_rate=1e-3)

    def measured(name, strength):
        tuned = fit(params, objective(model, name, strength), few)
        point = delay(model, tuned, digits), error_rate(greedy(model, tuned), digits)
        print(f"{name or 'no penalty'} {strength or ''}: delay {point[0]:.2f} frames, CER {point[1]:.2f}")
        return point

    points = {"no penalty": [measured(None, 0)]}
    for name, strengths in STRENGTHS.items():
        points[name] = [measured(name, strength) for strength in strengths]
    start, *others = (point[-1] for point in points.values())
    draw(points)
    for name, (later, _) in zip(STRENGTHS, others):
        check(f"delay with {name}, frames more than without", later - start[0], -0.1)


if __name__ == "__main__":
    main()
