"""Held-out error rates after training on transcripts with errors: the usual loss, and losses made for such errors.

    python examples/noisy_transcripts.py --data FOLDER    # spoken digits; default: handwritten digits

Of each transcript a share of the labels is deleted, inserted, replaced, or cut off at its ends, anew in every step.
Each loss has one number to choose: seed 0 chooses it, by held-out utterances other than those of the table.
"""

import argparse
import functools
import time

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from data import CLASSES, DataError, HandwrittenDigits, SpokenDigits, pad
    from flax import nnx
    from model import Transducer
    from train import error_rate, positive
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/noisy_transcripts.py needs {error.name}: run pip install '.[examples]'.") from None

from jax_rnnt import RNNTLoss, TargetRobustRNNTLoss, decode

PLAIN = "RNNTLoss"
# Loss for each kind of error: a function of the number to choose, and what to choose from.
ROBUST = {
    "deleted": {"star": (lambda x: TargetRobustRNNTLoss(skip_frame=x, skip_label=None), (-2.0, -1.0, 0.0))},
    "inserted": {"bypass": (lambda x: TargetRobustRNNTLoss(skip_frame=None, skip_label=x), (-4.0, -2.0))},
    "replaced": {"target-robust": (lambda x: TargetRobustRNNTLoss(skip_frame=x, skip_label=x), (-4.0, -2.0, -1.0))},
}


def corrupt(kind, rng, digits, share):
    """A transcript of which each label is deleted, preceded by another one or replaced with probability `share`.

    "cut": as many labels go as "deleted" would delete, but from both ends.
    """
    hit = rng.random(len(digits)) < share
    other = (digits + rng.integers(1, 10, len(digits))) % 10
    if kind == "deleted":
        return digits[~hit]
    if kind == "inserted":
        return np.insert(digits, np.flatnonzero(hit), other[hit])
    if kind == "replaced":
        return np.where(hit, other, digits)
    first = rng.integers(hit.sum() + 1)
    return digits[first : len(digits) - (hit.sum() - first)]


def corrupted(kind, rng, batch, share, max_labels):
    """The batch with such transcripts; at most `max_labels` long."""
    digits = [x[:n] for x, n in zip(batch["targets"], batch["target_lengths"])]
    if kind != "clean":
        digits = [corrupt(kind, rng, x, share)[:max_labels] for x in digits]
    targets, lengths = pad(digits, max_labels, np.int32)
    return batch | {"targets": targets, "target_lengths": lengths}


class Trainer:
    """Programs that are compiled once for all losses of a kind, whatever their weights."""

    def __init__(self, data, steps):
        sizes = data.features, CLASSES, CLASSES - 1, data.width, data.strides, data.channels
        self.create = lambda seed: nnx.split(Transducer(*sizes, rngs=nnx.Rngs(seed)))
        schedule = optax.warmup_cosine_decay_schedule(0, data.learning_rate, 1 + steps // 10, steps + 1)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))
        self.graphdef, _ = self.create(0)

        def transcribe(params, features, feature_lengths):
            inputs = nnx.merge(self.graphdef, params).decoder_inputs(features, feature_lengths)
            found = decode.greedy(RNNTLoss(), *inputs, 2 * data.max_labels, max_symbols=3)
            return found.labels, found.counts

        self.error_rate = functools.partial(error_rate, jax.jit(transcribe))

    def logits(self, params, batch):
        """(logits, targets, logit_lengths, target_lengths)"""
        model = nnx.merge(self.graphdef, params)
        lengths = model.lengths(batch["feature_lengths"]), batch["target_lengths"]
        return model(batch["features"], batch["targets"]), batch["targets"], *lengths

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, loss, batch, teacher=None, power=0.0):
        def loss_fn(params):
            inputs = self.logits(params, batch)
            value = loss(*inputs)
            if teacher is None:
                return value
            sure = jnp.exp(power * loss.label_log_probs(*self.logits(teacher, batch)))
            inside = jnp.arange(sure.shape[-1]) < batch["target_lengths"][:, None]
            weights = sure / jnp.mean(sure, where=inside)  # Keren et al. (2024)
            more = (weights - 1) * loss.label_log_probs(*inputs)
            return value - jnp.sum(jnp.where(inside, more, 0)) / len(sure)

        params, opt_state = state
        value, gradient = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = self.optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def train(self, seed, batches, loss, **weights):
        _, params = self.create(seed)
        state = params, self.optimizer.init(params)
        for batch in batches:
            state, _ = self.step(state, loss, batch, **weights)
        return state[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="spoken digits; default: handwritten digits")
    parser.add_argument("--errors", nargs="+", choices=ROBUST, default=ROBUST, help="kinds of errors; default: all")
    parser.add_argument("--share", type=float, default=0.2, help="of the labels (%(default)s)")
    parser.add_argument("--steps", type=positive, default=400, help="of 16 utterances (%(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, help="for the table (%(default)s)")
    parser.add_argument("--utterances", type=positive, default=500, help="for each of both held-out sets (%(default)s)")
    args = parser.parse_args()
    try:
        data = SpokenDigits(args.data) if args.data else HandwrittenDigits()
    except DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    trainer, max_labels = Trainer(data, args.steps), data.max_labels + 4
    tuning, test = ([data.batch(np.random.default_rng(i), args.utterances, "test")] for i in range(2))
    rows = {}  # (kind of error, loss, its number): error rates

    for seed in range(args.seeds + 1):
        clean = [data.batch(np.random.default_rng((seed, i)), data.batch_size, "train") for i in range(args.steps)]

        def run(kind, name, number, loss, **weights):
            started, rng = time.perf_counter(), np.random.default_rng(seed)
            batches = (corrupted(kind, rng, batch, args.share, max_labels) for batch in clean)
            params = trainer.train(seed, batches, loss, **weights)
            rate = trainer.error_rate(params, test if seed else tuning)
            rows.setdefault((kind, name, number), []).append(rate)
            print(f"seed {seed}, {kind}, {name} {number}: {rate:.1f}%, {time.perf_counter() - started:.0f} s", flush=True)
            return params

        if seed:
            run("clean", PLAIN, "", RNNTLoss())
        for kind in args.errors:
            plain = run(kind, PLAIN, "", RNNTLoss())
            choose = lambda name, numbers: numbers if not seed else [min(numbers, key=lambda x: rows[kind, name, x][0])]
            for name, (loss, numbers) in ROBUST[kind].items():
                for x in choose(name, numbers):
                    run(kind, name, x, loss(jnp.float32(x)))
            if kind in ("inserted", "replaced"):
                for x in choose("weighted", (1.0, 2.0)):
                    run(kind, "weighted", x, RNNTLoss(), teacher=plain, power=jnp.float32(x))

    print("| transcripts | loss | number |", *(f"seed {i} |" for i in range(1, args.seeds + 1)), "mean |")
    print("|---|---|--:|" + "--:|" * (args.seeds + 1))
    for (kind, name, number), (first, *rates) in rows.items():
        rates = [first] * (kind == "clean") + rates
        if rates:
            print(f"| {kind} | {name} | {number} |", *(f"{x:.1f} |" for x in rates), f"{np.mean(rates):.1f} |")


if __name__ == "__main__":
    main()
