"""Compares time and memory of `joint_rnnt_loss`, of logits in memory, of axlearn's way, and of pruned RNN-T.

    python benchmarks/joint.py            # value and gradient of a loss with its joint network, by shape
    python benchmarks/joint.py --long     # a training step of 1,024 utterances of 40 seconds
    python benchmarks/joint.py --skip     # blocks that the backward pass skips in a training run of the example

All contestants take turns in one run and compute the gradient of encoder and predictor output and of the parameters.
"""

import functools
import math
import os
import sys
import time

import bench
import jax
import jax.numpy as jnp
import numpy as np
import skipping
from axlearn import axlearn
from bench import cases

from jax_rnnt import (
    LinearJoint,
    joint_rnnt_loss,
    prune_inputs,
    prune_ranges,
    pruned_rnnt_loss,
    rnnt_loss,
    simple_rnnt_loss,
)

WIDTH = 5  # of the pruned band


def logit_bytes(case):
    return 4 * math.prod(case.shape)


def make(case, seed):
    """(parameters, rows, rest). The weights are as newly initialised: logits have unit variance."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    weight = draw(case.H, case.V) * np.float32(case.H**-0.5)
    targets = rng.integers(0, case.V - 1, (case.B, case.U), np.int32)
    rows = draw(case.B, case.T, case.H), draw(case.B, case.U + 1, case.H)
    return jax.tree.map(jnp.asarray, ((weight, np.zeros(case.V, np.float32)), rows, (targets, *case.lengths)))


def materialized(parameters, rows, rest):
    weight, bias = parameters
    hidden = jnp.tanh(rows[0][:, :, None] + rows[1][:, None])
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weight + bias
    return rnnt_loss(logits.reshape(*hidden.shape[:-1], -1), *rest)


def linear(parameters, rows, rest, chunk=None):
    return joint_rnnt_loss(LinearJoint(*parameters), *rows, *rest, chunk=chunk)


def function(parameters, rows, rest):
    weight, bias = parameters
    return joint_rnnt_loss(lambda frames, states: jnp.tanh(frames + states) @ weight + bias, *rows, *rest)


def pruned(parameters, rows, rest):
    """Pruned RNN-T: the simple loss with the same output layer, then the joint on the band. Another loss."""
    weight, bias = parameters
    am, lm = rows[0] @ weight, rows[1] @ weight + bias
    simple, (blank, label) = simple_rnnt_loss(am, lm, *rest, return_posteriors=True)
    lengths = dict(zip(("logit_lengths", "target_lengths"), rest[1:]))
    first = prune_ranges(blank_posteriors=blank, label_posteriors=label, **lengths, width=WIDTH)
    frames, states = prune_inputs(*rows, first, width=WIDTH)
    hidden = jnp.tanh(frames + states)
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weight + bias
    return 0.5 * simple + pruned_rnnt_loss(logits.reshape(*hidden.shape[:-1], -1), first, *rest)


def contestant(name, loss, arguments):
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    compiled = step.lower(*arguments).compile()

    def run(keep=False):
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        return result if keep else time.perf_counter() - start

    value, gradient = run(keep=True)
    check = float(value), np.concatenate([np.ravel(g)[:: max(1, g.size // 500)] for g in jax.tree.leaves(gradient)])
    return bench.Contestant(name, run, check, compiled.memory_analysis().temp_size_in_bytes)


def start(case, seed):
    arguments = make(case, seed)
    found = [contestant(f.__name__, f, arguments) for f in (materialized, linear, function)]
    with skipping.nothing_skipped():
        found.append(contestant("linear, nothing skipped", linear, arguments))
    if case.name.startswith("axlearn"):
        found.append(contestant("axlearn's way", axlearn, arguments))
    value, gradient = found[0].check
    for other in found[1:]:
        np.testing.assert_allclose(other.check[0], value, rtol=1e-5, err_msg=f"{case.name}: {other.name}")
        scale = np.abs(gradient).max()
        limit = 1e-3 if other.name == "axlearn's way" else 1e-4  # its path weights are float32 logs
        np.testing.assert_allclose(other.check[1], gradient, atol=limit * scale, err_msg=f"{case.name}: {other.name}")
    return [*found, contestant("pruned", pruned, arguments)]


def report(case, contestants):
    size = f"B={case.B} T={case.T} U={case.U} V={case.V} H={case.H}, logits {logit_bytes(case) / 1e6:.0f} MB"
    print(f"### {case.name}: {size}, {case.valid:.0%} of the nodes valid\n")
    first = contestants[0]
    bench.table(
        ("", "ms", "min", "x materialized", "workspace, MB", "runs"),
        [
            (
                c.name,
                f"{c.median * 1e3:.3g}",
                f"{c.best * 1e3:.3g}",
                f"{c.median / first.median:.2f}",
                f"{c.temporaries / 1e6:.0f}",
                str(len(c.seconds)),
            )
            for c in contestants
        ],
    )


def targets(results):
    """Tiles may take 1.15 times as long, but must not be slower if more than 25% is padding."""
    rows = []
    for case in cases.JOINT:
        by_name = {c.name: c for c in results.get(case.name, ())}
        for name in ("linear", "function") if by_name else ():
            above, below = by_name[name], by_name["materialized"]
            ratio, best = above.median / below.median, above.best / below.best
            limit = "<= 1" if case.valid < 0.75 else "<= 1.15"
            rows.append(bench.judge(f"{case.name}: {name} / materialized", ratio, limit, best))
    return rows


def by_shape(args):
    budget, load, results = bench.settle(args), os.getloadavg(), {}
    for case in cases.JOINT:
        if case.name in args.only:
            results[case.name] = start(case, args.seed)
            bench.take_turns(results[case.name], budget, args.repeat)
            report(case, results[case.name])
    checks = targets(results)
    bench.report_targets(checks)
    bench.save(args, load, checks, {"value_and_gradient": results}, name="-joint")


def long(args):
    """A training step of 1,024 utterances of 40 seconds."""
    case, logits = cases.JOINT_LONG, logit_bytes(cases.JOINT_LONG)
    parameters, rows, rest = make(case, args.seed)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(parameters, rows, rest):
        value, gradient = jax.value_and_grad(linear)(parameters, rows, rest)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value

    compiled = step.lower(parameters, rows, rest).compile()
    workspace, plane = compiled.memory_analysis().temp_size_in_bytes, logits / case.V
    print(f"B={case.B} T={case.T} U={case.U} V={case.V} H={case.H}, {case.valid:.0%} of the nodes valid")
    memory = bench.machine()["memory_gib"]
    print(f"logits, hidden units and their gradients: {4 * logits / 2**30:.0f} GiB; the machine has {memory} GiB")
    print(f"workspace {workspace / 2**30:.2f} GiB, in which a plane [B, T, U + 1] has {plane / 2**30:.2f} GiB")
    for _ in range(args.steps or 2):
        tick = time.perf_counter()
        parameters, value = compiled(parameters, rows, rest)
        print(f"loss {float(value):.3f}, {time.perf_counter() - tick:.1f} s", flush=True)


def skip(args):
    """The example's transducer on lines of handwritten digits: skipped blocks, and the time that skipping saves."""
    sys.path.insert(0, str(bench.ROOT / "examples"))
    import optax
    from data import HandwrittenDigits
    from flax import nnx
    from variants import VARIANTS

    data, variant = HandwrittenDigits(), VARIANTS["rnnt"]
    if args.labels:
        data.min_labels, data.max_labels = args.labels // 2, args.labels
        data.max_frames = data.max_labels * (data.max_width + data.max_gap) + data.max_gap
    steps = args.steps or data.steps
    sizes = data.features, variant.outputs, variant.blank, data.width, data.strides, data.channels
    model = variant.model(*sizes, rngs=nnx.Rngs(args.seed))
    graphdef, params = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0, data.learning_rate, 1 + steps // 10, steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))
    state = params, optimizer.init(params)

    def loss(params, batch):
        return variant.loss(nnx.merge(graphdef, params), batch, fused=True)

    def compile_gradient():
        return jax.jit(jax.value_and_grad(loss)).lower(params, batch_of(0)).compile()

    def batch_of(step):
        return data.batch(np.random.default_rng((args.seed, step)), data.batch_size, "train")

    with skipping.counted_blocks() as counts:
        count = compile_gradient()
    with skipping.nothing_skipped():
        every = compile_gradient()
    some = compile_gradient()

    @jax.jit
    def train(state, batch):
        value, gradient = jax.value_and_grad(loss)(state[0], batch)
        updates, opt_state = optimizer.update(gradient, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), value

    rows = []
    for step in range(steps + 1):
        if step in (0, 10, 30, 100, 300, 1000, 3000) or step == steps:
            batch, times = batch_of(step), ([], [])
            counts.clear()
            jax.block_until_ready(count(state[0], batch))
            jax.effects_barrier()
            for _ in range(15):
                for seconds, gradient in zip(times, (every, some)):
                    tick = time.perf_counter()
                    value, _ = jax.block_until_ready(gradient(state[0], batch))
                    seconds.append(time.perf_counter() - tick)
            (total, kept), (without, less) = counts, (float(np.median(x)) * 1e3 for x in times)
            share = f"{1 - kept / total:.0%}"
            rows.append((str(step), f"{float(value):.3f}", share, f"{without:.1f}", f"{less:.1f}"))
        state, _ = train(state, batch_of(step))
    bench.table(("step", "loss", "blocks left out", "gradient without, ms", "with, ms"), rows)


def main():
    parser = bench.options(__doc__, [case.name for case in cases.JOINT])
    parser.add_argument("--long", action="store_true", help="a training step of 1,024 utterances of 40 seconds")
    parser.add_argument("--skip", action="store_true", help="what a training run of the example leaves out")
    parser.add_argument("--steps", type=int, help="of --long and --skip")
    parser.add_argument("--labels", type=int, help="of --skip: lines of half as many digits to as many (3 to 7)")
    args = parser.parse_args()
    if args.long or args.skip:
        bench.settle(args)
        (long if args.long else skip)(args)
    else:
        by_shape(args)


if __name__ == "__main__":
    main()
