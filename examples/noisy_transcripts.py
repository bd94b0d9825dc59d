"""Held-out error rates after training on transcripts with errors: of the usual loss, and of losses for such errors.

    python examples/noisy_transcripts.py --data FOLDER    # spoken digits; default: handwritten digits

A share of the labels is deleted, inserted, replaced, or cut off at the ends of a transcript, anew in every step. Each
loss has a number to choose: seed 0 chooses it, by held-out utterances other than those of the table.
"""

import argparse
import functools

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from data import CLASSES, DataError, HandwrittenDigits, SpokenDigits, pad
    from flax import nnx
    from model import Transducer
    from train import error_rate, positive
    from variants import of_all_logits
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/noisy_transcripts.py needs {error.name}: run pip install '.[examples]'.") from None

from jax_rnnt import RNNTLoss, TargetRobustRNNTLoss, WildcardRNNTLoss, decode

PLAIN, KINDS = lambda x: RNNTLoss(), ("deleted", "inserted", "replaced", "cut")
# Kind of error, name, loss of a number, the part of the training before it counts, and what to choose the number from;
# that of token weights is the power of a teacher's confidence.
ROBUST = [
    ("deleted", "star", lambda x: TargetRobustRNNTLoss(skip_frame=x, skip_label=None), 0.0, (-2.0, -1.0, 0.0)),
    ("inserted", "bypass", lambda x: TargetRobustRNNTLoss(skip_frame=None, skip_label=x), 0.5, (-4.0, -2.0)),
    ("inserted", "token-weighted", PLAIN, 0.0, (1.0, 2.0)),
    ("replaced", "target-robust", lambda x: TargetRobustRNNTLoss(skip_frame=x, skip_label=x), 0.5, (-4.0, -2.0)),
    ("replaced", "token-weighted", PLAIN, 0.0, (1.0, 2.0)),
    ("cut", "wildcard", lambda x: WildcardRNNTLoss(skip_start=x, skip_end=x), 0.5, (-2.0, 0.0)),
]


def corrupt(kind, rng, digits, share):
    """The transcript with each label deleted, preceded by another one or replaced with probability `share`.

    "cut" takes as many labels as "deleted" would, but from both ends.
    """
    hit = rng.random(len(digits)) < share
    other = (digits + rng.integers(1, 10, len(digits))) % 10
    if kind == "clean":
        return digits
    if kind == "deleted":
        return digits[~hit]
    if kind == "inserted":
        return np.insert(digits, np.flatnonzero(hit), other[hit])
    if kind == "replaced":
        return np.where(hit, other, digits)
    first = rng.integers(hit.sum() + 1)
    return digits[first : len(digits) - hit.sum() + first]


def corrupted(kind, rng, batch, share, max_labels):
    digits = (x[:n] for x, n in zip(batch["targets"], batch["target_lengths"]))
    targets, lengths = pad([corrupt(kind, rng, x, share)[:max_labels] for x in digits], max_labels, np.int32)
    return batch | {"targets": targets, "target_lengths": lengths}


class Trainer:  # its programs are compiled once for all numbers of a loss
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

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, state, loss, batch, teacher, power):
        def ask(question, params):
            return of_all_logits(question, nnx.merge(self.graphdef, params), batch, False)

        def loss_fn(params):
            value = ask(loss, params)
            if teacher is None:
                return value
            inside = jnp.arange(batch["targets"].shape[1]) < batch["target_lengths"][:, None]
            sure = jnp.exp(power * ask(loss.label_log_probs, teacher))
            more = sure / jnp.mean(sure, where=inside) - 1  # weights of Keren et al. (2024), less 1
            return value - jnp.sum(jnp.where(inside, more * ask(loss.label_log_probs, params), 0)) / len(inside)

        params, opt_state = state
        updates, opt_state = self.optimizer.update(jax.grad(loss_fn)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def train(self, seed, steps, teacher, power):
        _, params = self.create(seed)
        state = params, self.optimizer.init(params)
        for loss, batch in steps:
            state = self.step(state, loss, batch, teacher, power)
        return state[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="spoken digits; default: handwritten digits")
    parser.add_argument("--errors", nargs="+", choices=KINDS, default=KINDS, help="kinds of errors; default: all")
    parser.add_argument("--share", type=float, default=0.2, help="of the labels (%(default)s)")
    parser.add_argument("--steps", type=positive, default=400, help="of 16 utterances (%(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, help="of the table (%(default)s)")
    parser.add_argument("--utterances", type=positive, default=500, help="of each held-out set (%(default)s)")
    args = parser.parse_args()
    try:
        data = SpokenDigits(args.data) if args.data else HandwrittenDigits()
    except DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    trainer, max_labels, rows = Trainer(data, args.steps), data.max_labels + 4, {("clean", "RNNTLoss", 0.0): []}
    tuning, test = ([data.batch(np.random.default_rng(i), args.utterances, "test")] for i in range(2))
    for seed in range(args.seeds + 1):
        clean = [data.batch(np.random.default_rng((seed, i)), data.batch_size, "train") for i in range(args.steps)]

        def run(kind, name, number, make, begin=0.0, teacher=None, seed=seed, clean=clean):
            rng, loss, early = np.random.default_rng(seed), make(jnp.float32(number)), make(jnp.float32(-jnp.inf))
            noisy = (corrupted(kind, rng, batch, args.share, max_labels) for batch in clean)
            steps = ((loss if i >= begin * args.steps else early, batch) for i, batch in enumerate(noisy))
            params = trainer.train(seed, steps, teacher, jnp.float32(number))
            rate = trainer.error_rate(params, test if seed else tuning)
            rows.setdefault((kind, name, number), []).append(rate)
            print(f"seed {seed}, {kind}, {name} {number}: {rate:.1f}%", flush=True)
            return params

        run("clean", "RNNTLoss", 0.0, PLAIN)
        for kind in args.errors:
            plain = run(kind, "RNNTLoss", 0.0, PLAIN)
            for _, name, make, begin, numbers in (x for x in ROBUST if x[0] == kind):
                teacher = plain if name == "token-weighted" else None
                for x in [min(numbers, key=lambda x: rows[kind, name, x][0])] if seed else numbers:
                    run(kind, name, x, make, begin, teacher)

    print("| transcripts | loss | number |", *(f"seed {i} |" for i in range(1, args.seeds + 1)), "mean |")
    print("|---|---|--:|" + "--:|" * (args.seeds + 1))
    for (kind, name, number), (_, *rates) in rows.items():
        if rates:
            print(
                f"| {kind} | {name} | {number if name != 'RNNTLoss' else ''} |",
                *(f"{x:.1f} |" for x in rates),
                f"{np.mean(rates):.1f} |",
            )


if __name__ == "__main__":
    main()
