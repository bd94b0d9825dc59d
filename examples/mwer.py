"""Fine-tunes a model of train.py to make fewer errors: minimum word error rate training on its own N-best lists.

    python examples/train.py --steps 500          # first, with the same --data and --loss
    python examples/mwer.py
    python examples/mwer.py --mwer 0 --nll 1     # the same steps of the usual loss alone, to compare

A step decodes the batch by beam search, counts the errors of each hypothesis, and lowers their expected number. The N
hypotheses of an utterance are scored by one `JointLogits`, in which they share the encoder's rows. It prints the
held-out error rate before and after.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from data import DataError, HandwrittenDigits, SpokenDigits
    from flax import nnx
    from tqdm import tqdm
    from train import check_run, error_rate, natural, positive
    from variants import VARIANTS, of_all_logits
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/mwer.py needs {error.name}: run pip install '.[examples]' in the clone.") from None

from jax_rnnt import decode, mwer_loss
from jax_rnnt.metrics import label_errors


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="spoken digits; default: handwritten digits")
    parser.add_argument("--loss", choices=[x for x in VARIANTS if x != "pruned"], default="rnnt", help="(%(default)s)")
    parser.add_argument("--workdir", type=Path, help="of train.py; default: runs/DATA-LOSS")
    parser.add_argument("--steps", type=natural, default=100, help="(%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="utterances per step (%(default)s)")
    parser.add_argument("--width", type=positive, default=4, help="N of the N-best lists (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="(%(default)s)")
    parser.add_argument("--mwer", type=float, default=1.0, help="weight of the expected errors (%(default)s)")
    parser.add_argument("--nll", type=float, default=0.1, help="weight of the reference's own loss (%(default)s)")
    parser.add_argument("--seed", type=natural, default=1, help="of the data (%(default)s)")
    parser.add_argument("--log-json", type=Path, metavar="FILE", help="write losses and error rates")
    return parser, parser.parse_args()


def restore(data, workdir, loss="rnnt"):
    """(model, variant) of the last checkpoint of train.py."""
    variant = VARIANTS[loss]
    sizes = data.features, variant.outputs, variant.blank, data.width, data.strides, data.channels
    graphdef, params = nnx.split(variant.model(*sizes, rngs=nnx.Rngs(0)))
    workdir = (workdir or Path("runs") / f"{data.name}-{loss}").resolve()
    if (workdir / "checkpoints").is_dir():
        check_run(workdir, {"data": data.name, "loss": loss})
    with ocp.CheckpointManager(workdir / "checkpoints") as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise DataError(f"{workdir} has no checkpoint: run train.py first")
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda step: 0.0))
        state = checkpoints.restore(step, args=ocp.args.StandardRestore((params, optimizer.init(params))))
    return nnx.merge(graphdef, state[0]), variant


def search(model, variant, features, feature_lengths, max_labels, width):
    """The N best hypotheses, by the loss that the model was trained with."""
    inputs = model.decoder_inputs(features, feature_lengths)
    return decode.beam(variant.loss, *inputs, max_labels, width, max_symbols=3)


def combined_loss(model, variant, batch, labels, counts, scores, errors, mwer, nll):
    """`mwer` times the expected errors of N-best lists [B, N], and `nll` times the references' own loss."""
    rows, lengths = model.encoder(batch["features"]), model.lengths(batch["feature_lengths"])
    targets = jnp.maximum(labels, 0)
    logits = model.joint.logits(rows[:, None], model.predictor(targets))  # of [B, 1, T, E] and [B, N, U + 1, P]
    loss = dataclasses.replace(variant.loss, reduction="none")
    lengths = jnp.broadcast_to(lengths[:, None], counts.shape)
    each = loss(logits, targets, lengths, counts)
    each = jnp.where(jnp.isneginf(scores), jnp.inf, each)  # no hypothesis
    return mwer * mwer_loss(each, errors) + nll * of_all_logits(variant.loss, model, batch, fused=True)


def main():
    parser, args = parse_arguments()
    try:
        data = SpokenDigits(args.data) if args.data else HandwrittenDigits()
        model, variant = restore(data, args.workdir, args.loss)
    except DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    graphdef, params = nnx.split(model)
    max_labels = 2 * data.max_labels

    @functools.partial(jax.jit, static_argnums=3)
    def nbest(params, features, lengths, width):
        found = search(nnx.merge(graphdef, params), variant, features, lengths, max_labels, width)
        return found.labels, found.counts, found.scores

    def best(params, features, lengths):
        labels, counts, _ = nbest(params, features, lengths, args.width)
        return labels[:, 0], counts[:, 0]

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.learning_rate))
    state = params, optimizer.init(params)

    @jax.jit
    def train_step(state, *lists):
        def loss_fn(params):
            return combined_loss(nnx.merge(graphdef, params), variant, *lists, args.mwer, args.nll)

        params, opt_state = state
        value, gradient = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    test = [data.batch(np.random.default_rng(i), 100, "test") for i in range(5)]
    before, losses, started = error_rate(best, params, test), [], time.perf_counter()
    print(f"held-out CER before: {before:.2f}%")
    for step in tqdm(range(args.steps), unit="step"):
        batch = data.batch(np.random.default_rng((args.seed, step)), args.batch, "train")
        labels, counts, scores = jax.device_get(
            nbest(state[0], batch["features"], batch["feature_lengths"], args.width)
        )
        references = batch["targets"][:, None], batch["target_lengths"][:, None]
        errors = label_errors(labels, counts, *references).total.astype(np.float32)
        state, value = train_step(state, batch, labels, counts, scores, errors)
        losses.append(float(value))
    after = error_rate(best, state[0], test)
    print(f"held-out CER after: {after:.2f}% ({args.steps} steps, {time.perf_counter() - started:.0f} seconds)")
    if args.log_json:
        args.log_json.write_text(json.dumps(dict(before=before, after=after, losses=losses)))


if __name__ == "__main__":
    main()
