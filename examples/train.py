"""Trains a transducer with jax_rnnt, Flax NNX and Optax, and measures its held-out character error rate.

    python examples/train.py                  # lines of handwritten digits, from scikit-learn's scans
    python examples/train.py --data FOLDER    # connected spoken digits, from {digit}_{speaker}_{index}.wav recordings
    python examples/train.py --loss tdt       # another loss of the family: variants.py

The workdir receives checkpoints, from which --resume continues exactly, run.json, the arguments that decide the result,
and lattice.png: posteriors and best alignment of three held-out samples. Only --overwrite deletes an earlier run.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import sys
import time
from pathlib import Path

try:
    import jax
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from data import DataError, HandwrittenDigits, SpokenDigits
    from flax import nnx
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from matplotlib import pyplot as plt
    from tqdm import tqdm
    from variants import VARIANTS

    from jax_rnnt import decode, plot
    from jax_rnnt.metrics import label_errors

except ModuleNotFoundError as error:
    raise SystemExit(f"examples/train.py needs {error.name}: run pip install '.[examples]' in the clone.") from None


def positive(text):
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def natural(text):
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return number


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="spoken digits; default: handwritten digits")
    parser.add_argument("--loss", choices=VARIANTS, default="rnnt", help="one of variants.py (%(default)s)")
    parser.add_argument("--joint", choices=("logits", "fused"), default="logits", help="fused: in tiles (%(default)s)")
    parser.add_argument("--steps", type=natural, help="0: evaluate alone; default: as many as the data needs")
    parser.add_argument(
        "--batch", type=positive, help="utterances per step, over all devices; default: what the data needs"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of weights and training data (%(default)s)")
    parser.add_argument("--workdir", type=Path, help="default: runs/DATA-LOSS")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="continue from the workdir's last checkpoint, if any")
    earlier.add_argument("--overwrite", action="store_true", help="delete the workdir's checkpoints first")
    parser.add_argument("--save-every", type=positive, default=1000, metavar="STEPS", help="also tests (%(default)s)")
    parser.add_argument("--devices", type=positive, help="default: all; a CPU poses as this many, by default 2")
    parser.add_argument("--pmap", action="store_true", help="jax.pmap instead of jit over a sharded batch")
    parser.add_argument("--implementation", choices=("kernel", "reference"), help="of the loss; default: automatic")
    parser.add_argument("--fastemit", type=float, default=0.0, metavar="LAMBDA", help="earlier labels (%(default)s)")
    parser.add_argument("--log-json", type=Path, metavar="FILE", help="write the loss of every step and the result")
    parser.add_argument("--expect-cer", type=float, metavar="PERCENT", help="exit 1 if the error rate is higher")
    args = parser.parse_args()
    if args.joint == "fused" and args.loss == "pruned":
        parser.error("--joint fused: the pruned loss has its own way to do without all logits")
    if args.log_json and not args.log_json.absolute().parent.is_dir():
        parser.error(f"--log-json: {args.log_json.parent} is not a folder")
    return parser, args


def begin(workdir, run, *, resume, overwrite):
    """Claims the workdir for a run. `run` names the arguments that decide its result, and is kept in run.json.

    An earlier run is resumed with the same arguments alone. With steps 0 it is only evaluated, so theirs may differ.
    """
    file, checkpoints = workdir / "run.json", workdir / "checkpoints"
    if overwrite:
        shutil.rmtree(checkpoints, ignore_errors=True)
    elif checkpoints.is_dir() and any(checkpoints.iterdir()):
        if not resume:
            raise DataError(f"{workdir} holds an earlier run: continue it with --resume, or delete it with --overwrite")
        check_run(workdir, {name: x for name, x in run.items() if name != "steps" or x})
        return
    workdir.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(run))


def check_run(workdir, run):
    """Raises unless the run in this workdir had these arguments."""
    try:
        earlier = json.loads((workdir / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{workdir}/run.json does not say how its checkpoints were made ({error})") from None
    for name, x in run.items():
        if earlier.get(name) != x:
            raise DataError(f"{workdir} holds a run with {name} {earlier.get(name)}, got {x}")


def select_devices(count):
    """The devices that share each batch. A CPU is split into `count` or 2 devices, unless XLA_FLAGS splits it."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count or 2)
    return jax.devices()[:count]


def make_train_step(graphdef, optimizer, loss, mesh, pmap):
    """Returns (state, host batch) -> (state, loss). The state is replicated, and the batch is split over the mesh."""

    def loss_fn(params, batch):
        return loss(nnx.merge(graphdef, params), batch)

    def step(state, batch, average=lambda x: x):
        params, opt_state = state
        value, gradient = average(jax.value_and_grad(loss_fn)(params, batch))
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    if pmap:  # every device runs the program on its part of the batch, with an explicit average
        step = functools.partial(step, average=functools.partial(jax.lax.pmean, axis_name="data"))
        step = jax.pmap(step, "data", in_axes=(None, 0), out_axes=None, devices=mesh.devices.tolist())
        split = functools.partial(jax.tree.map, lambda x: x.reshape(mesh.size, -1, *x.shape[1:]))
    else:  # XLA splits one program for the whole batch and adds the all-reduce
        step = jax.jit(step, donate_argnums=0)
        split = functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("data")))
    return lambda state, batch: step(state, split(batch))


def error_rate(transcribe, params, batches):
    """Edit distance between hypotheses and targets, as a percentage of the target labels."""
    errors = total = 0
    for batch in batches:
        labels, counts = transcribe(params, batch["features"], batch["feature_lengths"])
        errors += label_errors(labels, counts, batch["targets"], batch["target_lengths"]).total.sum()
        total += batch["target_lengths"].sum()
    return float(100 * errors / total)


def draw_samples(model, loss, batch, file):
    """Draws lattices and labels of the first three utterances of the batch."""
    batch = {name: x[:3] for name, x in batch.items()}
    logits, lengths = model(batch["features"], batch["targets"]), model.lengths(batch["feature_lengths"])
    _, emitted = loss.posteriors(logits, batch["targets"], lengths, batch["target_lengths"])
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), sharex="col", layout="constrained")
    for i, (top, bottom) in enumerate(axes.T):
        frames, labels = lengths[i], batch["target_lengths"][i]
        features, targets = batch["features"][i, : batch["feature_lengths"][i]], batch["targets"][i]
        plot.lattice(loss, logits[i], targets, frames, labels, reduction=model.reduction, ax=top)
        plot.emissions(features, emitted[i, :frames], targets[:labels], reduction=model.reduction, ax=bottom)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main():
    started = time.perf_counter()
    parser, args = parse_arguments()
    try:
        data = SpokenDigits(args.data) if args.data else HandwrittenDigits()
    except DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    mesh = Mesh(np.array(select_devices(args.devices)), ("data",))
    steps, batch_size = data.steps if args.steps is None else args.steps, args.batch or data.batch_size
    if args.devices and mesh.size < args.devices:
        parser.exit(2, f"{parser.prog}: --devices {args.devices}: there are {mesh.size}\n")
    if batch_size % mesh.size:
        parser.exit(2, f"{parser.prog}: a batch of {batch_size} does not split over {mesh.size} devices\n")
    workdir = (args.workdir or Path("runs") / f"{data.name}-{args.loss}").resolve()
    run = {"data": data.name, "loss": args.loss, "steps": steps, "batch": batch_size}
    run |= {"seed": args.seed, "fastemit": args.fastemit}
    try:
        begin(workdir, run, resume=args.resume, overwrite=args.overwrite)
    except (DataError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")

    variant = VARIANTS[args.loss]
    sizes = data.features, variant.outputs, variant.blank, data.width, data.strides, data.channels
    model = variant.model(*sizes, rngs=nnx.Rngs(args.seed))
    graphdef, params = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0, data.learning_rate, 1 + steps // 10, max(steps, 1) + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))
    state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, PartitionSpec()))
    options = {"fastemit_lambda": args.fastemit, "implementation": args.implementation}
    loss = functools.partial(variant.compute, dataclasses.replace(variant.loss, **options), fused=args.joint == "fused")
    train_step = make_train_step(graphdef, optimizer, loss, mesh, args.pmap)

    @jax.jit
    def transcribe(params, features, feature_lengths):
        inputs = nnx.merge(graphdef, params).decoder_inputs(features, feature_lengths)
        found = decode.greedy(variant.loss, *inputs, 2 * data.max_labels, max_symbols=3)
        return found.labels, found.counts

    def train_batch(step):
        """Depends on seed and step alone, so a resumed run sees the same batches as an uninterrupted one."""
        return data.batch(np.random.default_rng((args.seed, step)), batch_size, "train")

    test = [data.batch(np.random.default_rng(i), 100, "test") for i in range(5)]
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    losses, durations = [], []
    with (
        ocp.CheckpointManager(workdir / "checkpoints", options=keep) as checkpoints,
        tqdm(total=steps * batch_size, unit="utt", mininterval=0.2 if sys.stderr.isatty() else 20) as bar,
    ):
        first = checkpoints.latest_step() or 0
        if first:
            state = checkpoints.restore(first, args=ocp.args.StandardRestore(state))
        bar.update(first * batch_size)
        batch = train_batch(first)
        for step in range(first, steps):
            tick = time.perf_counter()
            state, value = train_step(state, batch)
            batch = train_batch(step + 1)  # while the devices work
            # Wait for every step: with several in flight, XLA's all-reduce between CPU devices can deadlock.
            losses.append(float(value))
            durations.append(time.perf_counter() - tick)
            bar.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}", refresh=False)
            bar.update(batch_size)
            if (step + 1) % args.save_every == 0 or step + 1 == steps:
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
                tqdm.write(f"step {step + 1}: held-out CER {error_rate(transcribe, state[0], test):.1f}%")

    cer = error_rate(transcribe, state[0], test)
    draw_samples(nnx.merge(graphdef, state[0]), variant.loss, test[0], workdir / "lattice.png")
    seconds = time.perf_counter() - started
    speed = batch_size / np.median(durations) if durations else 0  # the median leaves compilation out
    if args.log_json:
        args.log_json.write_text(json.dumps(dict(first_step=first, losses=losses, cer=cer, seconds=seconds)))
    print(f"held-out CER {cer:.1f}% ({max(first, steps)} steps, {seconds:.0f} seconds, {speed:.0f} utterances/s)")
    if args.expect_cer is not None and not cer <= args.expect_cer:
        parser.exit(1, f"{parser.prog}: expected at most {args.expect_cer}%\n")


if __name__ == "__main__":
    main()
