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
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # on a GPU torchaudio needs memory, too

import jax
import jax.numpy as jnp
import numpy as np

import cases
import jax_rnnt as rnnt
import measure
import problems
from jax_rnnt._xla import loading
from jax_rnnt.tiles import _tiles

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


def by_shape(case, args):
    """Tiles may take 1.15 times as long, but must not be slower if more than 25% is padding."""
    size = f"B={case.B} T={case.T} U={case.U} V={case.V} H={case.H}, logits {4 * math.prod(case.shape) / 1e6:.0f} MB"
    title = f"{case.name}: {size}, {case.valid:.0%} of the nodes valid"
    base, limit = "materialized", "<= 1" if case.valid < 0.75 else "<= 1.15"
    aims = [(name, base, limit) for name in ("linear", "function")]
    return measure.Case(title, contestants(case, args.seed), (base,), aims)


# ------------------------------------------------------------------------------------------------------ beside peers


@dataclasses.dataclass(frozen=True)
class Problem:
    """Of `problems`: its function there, and the arguments of a peer, whose rows need not be padded."""

    function: str
    arguments: tuple
    loss: object
    dtype: object = np.float32
    padding: tuple = ()  # further arguments of ours

    @functools.cached_property
    def arrays(self):
        """Those to differentiate by, and the others."""
        sources, sequences = getattr(problems, self.function)(*self.arguments, *self.padding)
        return tuple(jnp.asarray(x, self.dtype) for x in sources), sequences

    @property
    def durations(self):
        return list(getattr(self.loss, "durations", ()))

    def program(self, name, loss):
        sources, sequences = self.arrays
        return measure.program(name, loss, (*sources, *sequences), gradient=ALL, whole=True)

    def peer(self, worker, name):
        options = {"dtype": jnp.dtype(self.dtype).name, "blank": self.loss.blank, "reduction": self.loss.reduction}
        options |= {"durations": self.durations} if self.durations else {}
        return worker.contestant(name, self.function, *self.arguments, **options)

    def contestants(self, makers, limit):
        """Those that can be made, and which ones disagree; `limit` is relative to the largest."""
        timed, wrong = [], []
        for name, make in makers.items():
            try:
                timed.append(make(name))
            except Exception as error:  # of memory; which one depends on the library
                print(f"left out: {name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        if not np.isfinite(timed[0].check[0]):
            wrong.append(f"the loss of {timed[0].name} is {timed[0].check[0]}")
        if self.padding:  # rows of peers are not padded: the gradient of the weight is compared
            for contestant in timed:
                contestant.check = contestant.check[0], contestant.check[1][: measure.samples(self.arrays[0][:1]).size]
        for contestant in timed[1:]:
            try:
                measure.agree(timed[0], [contestant], loss=limit, gradient=limit * np.abs(timed[0].check[1]).max())
            except AssertionError as error:  # says so at the end, with the times of all
                wrong.append(f"{contestant.name} and {timed[0].name}: {' '.join(str(error).split())[:300]}")
        return timed, wrong


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


def librispeech(batch, gpu, worker):
    """As csukuangfj/transducer-loss-benchmarking does on a GPU."""
    problem = Problem("librispeech", batch, SUM, padding=(FRAMES, COLUMNS))
    sources, sequences = problem.arrays
    makers = {
        "in memory": lambda name: problem.program(name, functools.partial(materialized, loss=SUM)),
        "packed": lambda name: problem.program(name, packed(nodes_of(*sequences[1:]), sources[2].shape[1])),
        "LinearJoint": lambda name: problem.program(name, functools.partial(linear, loss=SUM)),
    }
    if worker and "torchaudio, joint" in worker.names:
        makers["torchaudio, joint"] = functools.partial(problem.peer, worker)
    timed, wrong = problem.contestants(makers, 2e-2 if gpu else 1e-3)  # a GPU multiplies float32 as TF32
    order, index, *of_batches = batch
    T, U = problems.batches(order, *of_batches)[index]
    valid = np.dot(T, U + 1.0) / (len(T) * T.max() * (U.max() + 1))
    size = f"B={len(T)} T={T.max()} U={U.max()}, {valid:.0%} of the nodes valid"
    return measure.Case(f"{order}, batch {index}: {size}", timed, (timed[0].name,), wrong=wrong)


def print_means(found):
    for order in problems.ORDERS:
        timed = [c for name, case in found.items() if name.startswith(order) for c in case.contestants]
        for name in dict.fromkeys(c.name for c in timed):
            times = [c.median for c in timed if c.name == name]
            print(f"{order}, {name}: {1e3 * np.mean(times):.1f} ms, the mean of {len(times)} batches")


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


def beside_products(name, problem, worker):
    """Kernels, tiles, peers, and the bare products of all nodes inside the lengths."""
    loss = functools.partial(linear, loss=problem.loss)

    def nothing_skipped(name):
        with mock.patch.object(_tiles, "not_skipped", return_value=jnp.bool_(True)):
            return problem.program(name, lambda *arguments: loss(*arguments))

    def tiles(name):
        with mock.patch.object(loading, "joint_kernels", return_value=None):
            return problem.program(name, lambda *arguments: loss(*arguments))

    makers = {"kernels": lambda name: problem.program(name, loss), "kernels, nothing skipped": nothing_skipped}
    makers |= {"tiles": tiles}
    makers |= dict.fromkeys(worker.joints(problem.durations), functools.partial(problem.peer, worker)) if worker else {}
    timed, wrong = problem.contestants(makers, 2e-2)
    (weight, *_), sequences = problem.arrays
    nodes, (units, classes) = int(np.dot(sequences[1], sequences[2] + 1.0)), weight.shape
    hidden = jnp.ones((min(nodes, NODES), units), problem.dtype)
    run = jax.jit(functools.partial(products, turns=-(-nodes // len(hidden))))
    weight = weight * jnp.asarray((units / classes) ** 0.5, problem.dtype)  # so that nothing grows from turn to turn
    jax.block_until_ready(run(weight, hidden))
    aims = [(c.name, "products", "<= 2") for c in timed if c.name.startswith("kernels")]
    timed.append(measure.calls("products", run, weight, hidden))
    return measure.Case(name, timed, ("products", "kernels"), aims, wrong=wrong)


def of_case(args, case, loss, dtype):
    if args.shrink > 1:
        case = cases.Case("", 2, case.T // args.shrink, case.U // args.shrink, 40, 32)
    return Problem("joint", (dataclasses.asdict(case), args.seed, len(getattr(loss, "durations", ()))), loss, dtype)


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
    measure.settle(args)
    if not (args.products or args.librispeech):
        shapes = {case.name: functools.partial(by_shape, case, args) for case in cases.JOINT if case.name in args.only}
        measure.run(args, "-joint", shapes)
        return
    gpu = jax.default_backend() == "gpu"
    args.threads = 0 if gpu else args.threads
    worker = peers and peers(args.threads)
    more = {"versions": worker.versions if worker else {}}
    if args.products:
        chosen = {name: of_case(args, *rest) for name, rest in LARGE.items()}
        lengths = "file order", 0, args.share or 1.0, args.shrink
        for dtype in ("float32", "bfloat16"):
            chosen[f"LibriSpeech, {dtype}"] = Problem("librispeech", lengths, SUM, dtype, (FRAMES, COLUMNS))
        makers = {name: functools.partial(beside_products, name, problem, worker) for name, problem in chosen.items()}
        found = measure.run(args, "-joint-products", makers, args.limit, **more)
    else:
        # The same number of batches of either order, spread over those of the published table.
        share, count = args.share or (1.0 if gpu else 0.1), problems.LAST - problems.FIRST
        places = [(order, i * count // args.batches) for i in range(args.batches) for order in problems.ORDERS]
        makers = {
            f"{order}, batch {index}": functools.partial(librispeech, (order, index, share, args.shrink), gpu, worker)
            for order, index in places
        }
        found = measure.run(args, "-librispeech", makers, args.limit, share=share, shrink=args.shrink, **more)
        print_means(found)
    if wrong := [f"{name}: {x}" for name, case in found.items() for x in case.wrong]:
        sys.exit("\n".join(["Not all is right:", *wrong]))


if __name__ == "__main__":
    main()
