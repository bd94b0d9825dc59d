"""Times a loss with its joint network, value and all gradients: logits in memory, in tiles, packed, and pruned.

    python benchmarks/joint.py                # by shape
    python benchmarks/joint.py --librispeech  # batches of LibriSpeech's lengths; a GPU takes them whole
    python benchmarks/joint.py --products     # on a GPU: kernels, tiles, and the bare matrix products

All contestants take turns in one run and compute the gradients of encoder and predictor output, weight and bias.
"""

import dataclasses
import functools
import math
import os
import sys
import time
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # on a GPU torchaudio needs memory, too

import jax
import jax.numpy as jnp
import numpy as np

import jax_rnnt as rnnt
import measure
import problems
from jax_rnnt._xla import loading
from jax_rnnt.layouts import _tiles
from problems import cases

WIDTH = 5  # of the pruned band
ALL = (0, 1, 2, 3)  # arguments with a gradient
LOSS = rnnt.RNNTLoss()


def materialized(weight, bias, encoder, predictor, *batch, loss=LOSS):
    hidden = jnp.tanh(encoder[:, :, None] + predictor[:, None])
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weight + bias
    return loss(logits.reshape(*hidden.shape[:-1], -1), *batch)


def linear(weight, bias, encoder, predictor, *batch, loss=LOSS):
    return loss(rnnt.JointLogits(rnnt.LinearJoint(weight, bias), encoder, predictor), *batch)


def function(weight, bias, encoder, predictor, *batch, loss=LOSS):
    return loss(rnnt.JointLogits(lambda e, p: jnp.tanh(e + p) @ weight + bias, encoder, predictor), *batch)


def pruned(weight, bias, encoder, predictor, *batch):
    """Pruned RNN-T: the simple loss with the same output layer, then the joint on the band. Another loss."""
    heads = rnnt.AdditiveLogits(encoder @ weight, predictor @ weight + bias)
    blank, label = LOSS.posteriors(heads, *batch)
    lengths = dict(zip(("logit_lengths", "target_lengths"), batch[1:]))
    first = rnnt.prune_ranges(blank_posteriors=blank, label_posteriors=label, **lengths, width=WIDTH)
    frames, states = rnnt.prune_inputs(encoder, predictor, first, width=WIDTH)
    hidden = jnp.tanh(frames + states)
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weight + bias
    return 0.5 * LOSS(heads, *batch) + LOSS(rnnt.BandLogits(logits.reshape(*hidden.shape[:-1], -1), first), *batch)


# ---------------------------------------------------------------------------------------------------------- by shape


def contestants(case, seed):
    sources, sequences = problems.joint(case, seed)
    start = functools.partial(measure.program, arguments=(*sources, *sequences), gradient=ALL)
    timed = [start(f.__name__, f) for f in (materialized, linear, function)]
    # No option does so: the backward pass over tiles computes all blocks inside the lengths.
    with mock.patch.object(_tiles, "not_skipped", return_value=jnp.bool_(True)):
        timed.append(start("linear, nothing skipped", linear))
    scale = np.abs(timed[0].check[1]).max()
    measure.agree(timed[0], timed[1:], gradient=1e-4 * scale)
    return [*timed, start("pruned", pruned)]


def title(case):
    megabytes = 4 * math.prod(case.shape) / 1e6
    size = f"B={case.B} T={case.T} U={case.U} V={case.V} H={case.H}, logits {megabytes:.0f} MB"
    return f"{case.name}: {size}, {case.valid:.0%} of the nodes valid"


def aims(case, timed):
    """Tiles may take 1.15 times as long, but must not be slower if more than 25% is padding."""
    limit, by_name = "<= 1" if case.valid < 0.75 else "<= 1.15", {c.name: c for c in timed}
    base = by_name["materialized"]
    return [measure.aim(f"{case.name}: {n} / materialized", by_name[n], base, limit) for n in ("linear", "function")]


def by_shape(args):
    budget, results, checks = measure.settle(args), {}, []
    for case in cases.JOINT:
        if case.name in args.only:
            timed = results[case.name] = contestants(case, args.seed)
            measure.take_turns(timed, budget, args.repeat)
            measure.report(title(case), timed, ["materialized"])
            checks += aims(case, timed)
    measure.report_aims(checks)
    measure.save(args, "-joint", checks, results)


# ------------------------------------------------------------------------------------------------------- LibriSpeech

# XLA compiles for shapes: ours are padded to these multiples of T and U + 1, and of rows, as training code does.
FRAMES, COLUMNS, ROWS = 32, 8, 1 << 14
SUM = rnnt.RNNTLoss(blank=problems.BLANK, reduction="sum")


def packed(nodes, frames):
    """`nodes`: [3, N] sequence, frame and column of each row; rows past the last node repeat it."""
    b, t, u = nodes

    def loss(weight, bias, encoder, predictor, *batch):
        logits = jnp.tanh(encoder[b, t] + predictor[b, u]) @ weight + bias
        return SUM(rnnt.PackedLogits(logits, frames), *batch)

    return loss


def nodes_of(logit_lengths, target_lengths):
    grids = [np.indices((T, U + 1)).reshape(2, -1) for T, U in zip(logit_lengths, target_lengths)]
    sequence = np.repeat(np.arange(len(grids)), [x.shape[1] for x in grids])
    nodes = np.concatenate([sequence[None], np.concatenate(grids, 1)]).astype(np.int32)
    return np.pad(nodes, ((0, 0), (0, -nodes.shape[1] % ROWS)), "edge")


def batch_contestants(batch, worker, limit):
    """Those that fit into the memory. Losses and gradients must agree; `limit` is relative to the largest."""
    sources, sequences = problems.librispeech(*batch, FRAMES, COLUMNS)
    program = functools.partial(measure.program, arguments=(*sources, *sequences), gradient=ALL, whole=True)
    makers = {
        "in memory": lambda name: program(name, functools.partial(materialized, loss=SUM)),
        "packed": lambda name: program(name, packed(nodes_of(*sequences[1:]), sources[2].shape[1])),
        "LinearJoint": lambda name: program(name, functools.partial(linear, loss=SUM)),
    }
    if worker and "torchaudio, joint" in worker.names:
        options = {"blank": SUM.blank, "reduction": SUM.reduction}
        makers["torchaudio, joint"] = lambda name: worker.contestant(name, "librispeech", *batch, **options)
    timed = made(makers)
    for contestant in timed:  # torchaudio's rows are not padded: the gradient of the weight is compared
        contestant.check = contestant.check[0], contestant.check[1][: measure.samples(sources[:1]).size]
    measure.agree(timed[0], timed[1:], loss=limit, gradient=limit * np.abs(timed[0].check[1]).max())
    return timed


def made(makers):
    """The contestants that can be made."""
    timed = []
    for name, make in makers.items():
        try:
            timed.append(make(name))
        except Exception as error:  # of memory; which one depends on the library
            print(f"left out: {name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return timed


def librispeech(args, peers):
    """As csukuangfj/transducer-loss-benchmarking does on a GPU."""
    deadline, gpu = time.monotonic() + args.limit, jax.default_backend() == "gpu"
    budget = args.budget if gpu else measure.settle(args)
    share = args.share or (1.0 if gpu else 0.1)
    args.threads = 0 if gpu else args.threads
    worker, results = peers and peers(args.threads), {}
    # The same number of batches of either order, spread over those of the published table.
    for i in range(args.batches):
        for order in problems.ORDERS:
            count = problems.LAST - problems.FIRST
            batch = order, i * count // args.batches, share, args.shrink
            if results and time.monotonic() > deadline:
                print(f"left out: {batch}: no time left", file=sys.stderr)
                continue
            T, U = problems.batches(order, share, args.shrink)[batch[1]]
            timed = batch_contestants(batch, worker, 2e-2 if gpu else 1e-3)  # a GPU multiplies float32 as TF32
            measure.take_turns(timed, budget, args.repeat, deadline)
            name = f"{order}, batch {batch[1]}"
            valid = np.dot(T, U + 1.0) / (len(T) * T.max() * (U.max() + 1))
            size = f"B={len(T)} T={T.max()} U={U.max()}, {valid:.0%} of the nodes valid"
            measure.report(f"{name}: {size}", timed, [timed[0].name])
            results[name] = timed
    for order in problems.ORDERS:
        names = list(dict.fromkeys(c.name for k, timed in results.items() if k.startswith(order) for c in timed))
        for name in names:
            times = [c.median for k, timed in results.items() if k.startswith(order) for c in timed if c.name == name]
            print(f"{order}, {name}: {1e3 * np.mean(times):.1f} ms, the mean of {len(times)} batches")
    more = {"share": share, "shrink": args.shrink, "versions": worker.versions if worker else {}}
    measure.save(args, "-librispeech", [], results, **more)


# --------------------------------------------------------------------------------------------------- beside products

NODES = 1 << 15  # of the products at once
DURATIONS = rnnt.TDTLoss(durations=(0, 1, 2, 3, 4), blank=-1)
LARGE = {  # a case, its loss, its dtype
    "subwords, bfloat16": (cases.Case("", B=32, T=400, U=128, V=1024, H=640), LOSS, jnp.bfloat16),
    "subwords, float32": (cases.Case("", B=32, T=400, U=128, V=1024, H=640), LOSS, jnp.float32),
    "8193 classes and 5 durations": (cases.Case("", B=16, T=250, U=80, V=8198, H=640), DURATIONS, jnp.bfloat16),
}


def products(weight, hidden, turns):
    """As many products as value and gradient have: logits twice, the gradients of hidden units and of the weight.

    Each needs the one before, so XLA leaves none out.
    """

    def turn(i, state):
        hidden, total = state
        hidden = jnp.einsum("nv,hv->nh", hidden @ weight, weight)
        gradient = jnp.einsum("nh,nv->hv", hidden, hidden @ weight, preferred_element_type=jnp.float32)
        return hidden, total + gradient

    return jax.lax.fori_loop(0, turns, turn, (hidden, jnp.zeros(weight.shape, jnp.float32)))[1]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Of `problems`: its function there, and the arguments of a peer, whose rows need not be padded."""

    function: str
    arguments: tuple
    loss: object
    dtype: object
    padding: tuple = ()  # further arguments of ours

    @property
    def options(self):
        """Of a peer, in JSON."""
        options = {"dtype": jnp.dtype(self.dtype).name, "blank": self.loss.blank, "reduction": self.loss.reduction}
        return options | ({"durations": durations} if (durations := durations_of(self.loss)) else {})


def durations_of(loss):
    return list(getattr(loss, "durations", ()))


def with_products(problem, worker):
    """Kernels, tiles, peers, and the bare products of all nodes inside the lengths; and what disagrees."""
    sources, sequences = getattr(problems, problem.function)(*problem.arguments, *problem.padding)
    weight, bias, *rows = (jnp.asarray(x, problem.dtype) for x in sources)
    program = functools.partial(measure.program, gradient=ALL, arguments=(weight, bias, *rows, *sequences), whole=True)
    loss = functools.partial(linear, loss=problem.loss)

    def nothing_skipped(name):
        with mock.patch.object(_tiles, "not_skipped", return_value=jnp.bool_(True)):
            return program(name, lambda *arguments: loss(*arguments))

    def tiles(name):
        with mock.patch.dict(loading.JOINTS, clear=True):
            return program(name, lambda *arguments: loss(*arguments))

    makers = {"kernels": lambda name: program(name, loss), "kernels, nothing skipped": nothing_skipped, "tiles": tiles}
    for name in worker.joints(durations_of(problem.loss)) if worker else ():
        makers[name] = lambda name: worker.contestant(name, problem.function, *problem.arguments, **problem.options)
    timed, wrong = made(makers), []
    if not np.isfinite(timed[0].check[0]):
        wrong.append(f"the loss of {timed[0].name} is {timed[0].check[0]}")
    if problem.padding:  # rows of peers are not padded: the gradient of the weight is compared
        for contestant in timed:
            contestant.check = contestant.check[0], contestant.check[1][: measure.samples(sources[:1]).size]
    for contestant in timed[1:]:
        try:
            measure.agree(timed[0], [contestant], loss=2e-2, gradient=2e-2 * np.abs(timed[0].check[1]).max())
        except AssertionError as error:  # says so at the end, with the times of all
            wrong.append(f"{contestant.name} and {timed[0].name}: {' '.join(str(error).split())[:300]}")
    nodes, (units, classes) = int(np.dot(sequences[1], sequences[2] + 1.0)), weight.shape
    hidden = jnp.ones((min(nodes, NODES), units), problem.dtype)
    run = jax.jit(functools.partial(products, turns=-(-nodes // len(hidden))))
    weight = weight * jnp.asarray((units / classes) ** 0.5, problem.dtype)  # so that nothing grows from turn to turn
    jax.block_until_ready(run(weight, hidden))
    return [*timed, measure.calls("products", run, weight, hidden)], wrong


def beside_products(args, peers):
    deadline, budget, wrong, results, checks = time.monotonic() + args.limit, measure.settle(args), [], {}, []
    worker = peers and peers(0 if jax.default_backend() == "gpu" else args.threads)
    chosen = {name: of_case(args, *rest) for name, rest in LARGE.items()}
    chosen |= {f"LibriSpeech, {dtype}": of_librispeech(args, dtype) for dtype in ("float32", "bfloat16")}
    for name, problem in chosen.items():
        if results and time.monotonic() > deadline:
            print(f"left out: {name}: no time left", file=sys.stderr)
            continue
        timed, different = with_products(problem, worker)
        wrong += [f"{name}: {x}" for x in different]
        measure.take_turns(timed, budget, args.repeat, deadline)
        results[name] = timed
        by_name = {c.name: c for c in timed}
        measure.report(name, timed, [x for x in ("products", "kernels") if x in by_name])
        ours = [c for c in timed if c.name.startswith("kernels")]
        checks += [measure.aim(f"{name}: {c.name} / products", c, by_name["products"], "<= 2") for c in ours]
        # After each case: what ends the program loses none of those before.
        measure.save(args, "-joint-products", checks, results, versions=worker.versions if worker else {})
    measure.report_aims(checks)
    if wrong:
        sys.exit("\n".join(["Not all is right:", *wrong]))


def of_case(args, case, loss, dtype):
    if args.shrink > 1:
        case = cases.Case("", 2, case.T // args.shrink, case.U // args.shrink, 40, 32)
    return Problem("joint", (dataclasses.asdict(case), args.seed, len(durations_of(loss))), loss, dtype)


def of_librispeech(args, dtype):
    arguments = "file order", 0, args.share or 1.0, args.shrink
    return Problem("librispeech", arguments, SUM, dtype, (FRAMES, COLUMNS))


def main(argv=None, peers=None):
    """`peers` starts a worker with so many threads, whose contestants join in --librispeech and --products."""
    parser = measure.options(__doc__, [case.name for case in cases.JOINT])
    parser.add_argument("--librispeech", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--batches", type=int, default=3, help="of --librispeech, of each order (%(default)s)")
    parser.add_argument("--share", type=float, help="of the utterances of each batch (GPU: 1, CPU: 0.1)")
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths, for trials (%(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="seconds of either (%(default)s)")
    args = parser.parse_args(argv)
    if args.products:
        beside_products(args, peers)
    elif args.librispeech:
        librispeech(args, peers)
    else:
        by_shape(args)


if __name__ == "__main__":
    main()
