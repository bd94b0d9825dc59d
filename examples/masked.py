"""Masked predictor rows (HAINAN): one model decodes with its predictor, without it, and by rounds over all labels.

    python examples/masked.py --data FOLDER               # spoken digits; without: handwritten ones
    python examples/masked.py --data FOLDER --loss tdt

Trains the model of train.py without masks, and with half of the predictor rows masked, and prints a table: held-out
character error rates, and milliseconds of the searches, the best of some turns, for 100 utterances at once, without the
encoder.
"""

import argparse
import functools
import time

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from data import DataError, HandwrittenDigits, SpokenDigits
    from flax import nnx
    from tqdm import tqdm
    from train import error_rate, natural, positive
    from variants import VARIANTS
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/masked.py needs {error.name}: run pip install '.[examples]' in the clone.") from None

from jax_rnnt import decode

SEARCHES = {
    "greedy": functools.partial(decode.greedy, max_symbols=3),
    "parallel": decode.parallel,
    "parallel, 1 round": functools.partial(decode.parallel, rounds=1),
    "parallel, 3 rounds": functools.partial(decode.parallel, rounds=3),
}


def train(data, variant, masking, steps, seed=0):
    """The trained model. Batches and options are those of train.py."""
    sizes = data.features, variant.outputs, variant.blank, data.width, data.strides, data.channels
    model = variant.model(*sizes, masking=masking, rngs=nnx.Rngs(seed))
    graphdef, params, random = nnx.split(model, nnx.Param, ...)
    schedule = optax.warmup_cosine_decay_schedule(0, data.learning_rate, 1 + steps // 10, max(steps, 1) + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch, key):
        def loss_fn(params):
            model = nnx.clone(nnx.merge(graphdef, params, random))  # it draws, so its state changes
            nnx.reseed(model, dropout=key)  # other masks in every step
            return variant.compute(variant.loss, model, batch, fused=False)

        params, opt_state = state
        value, gradient = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = jax.tree.map(jnp.copy, params)  # the first step takes their memory
    state, bar = (params, optimizer.init(params)), tqdm(range(steps), unit="step", mininterval=5)
    for step in bar:
        batch = data.batch(np.random.default_rng((seed, step)), data.batch_size, "train")
        state, value = train_step(state, batch, jax.random.fold_in(jax.random.key(seed), step))
        if step % 100 == 0:
            bar.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    return nnx.merge(graphdef, state[0], random)


def evaluate(model, variant, data, turns):
    """{search: (error rate, milliseconds for a batch)} on held-out utterances."""
    graphdef, state = nnx.split(model)
    test = [data.batch(np.random.default_rng(i), 100, "test") for i in range(5)]

    @jax.jit
    def encode(features, lengths):
        model = nnx.merge(graphdef, state)
        return model.encoder(features), model.lengths(lengths)

    def program(search):
        def run(rows, lengths):
            model = nnx.merge(graphdef, state)
            inputs = model.joint.decoder_inputs(model.predictor, rows)
            found = search(variant.loss, *inputs, lengths, 2 * data.max_labels)
            return found.labels, found.counts

        return jax.jit(run)

    programs = {name: program(search) for name, search in SEARCHES.items()}
    seconds = {name: [] for name in programs}
    rows = jax.block_until_ready(encode(test[0]["features"], test[0]["feature_lengths"]))
    for turn in range(turns + 1):
        for name, run in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*rows))
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - begin)
    rates = {name: error_rate(lambda _, *x, run=run: run(*encode(*x)), None, test) for name, run in programs.items()}
    return {name: (rates[name], 1e3 * min(seconds[name])) for name in programs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="spoken digits; default: handwritten digits")
    parser.add_argument("--loss", choices=[x for x in VARIANTS if x != "pruned"], default="rnnt", help="(%(default)s)")
    parser.add_argument("--masking", type=float, nargs="+", default=[0.0, 0.5], help="shares of rows (%(default)s)")
    parser.add_argument("--steps", type=natural, help="default: as many as the data needs")
    parser.add_argument("--turns", type=positive, default=20, help="of the searches, for their times (%(default)s)")
    args = parser.parse_args()
    try:
        data = SpokenDigits(args.data) if args.data else HandwrittenDigits()
    except DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    steps, variant = data.steps if args.steps is None else args.steps, VARIANTS[args.loss]
    print(f"| {args.loss}, masked rows |", *(f"{name}, % | ms |" for name in SEARCHES))
    print("|---|" + "--:|--:|" * len(SEARCHES))
    for masking in args.masking:
        found = evaluate(train(data, variant, masking, steps), variant, data, args.turns)
        print(f"| {masking:.0%} |", *(f"{rate:.1f} | {ms:.2f} |" for rate, ms in found.values()), flush=True)


if __name__ == "__main__":
    main()
