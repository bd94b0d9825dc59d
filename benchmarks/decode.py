"""Times greedy and beam search.

    python benchmarks/decode.py                              # synthetic models: B = 1, 16, 128; T = 400; V = 1024
    python benchmarks/decode.py --only 'parakeet 16' --frames 100    # V = 8193, 5 durations, two LSTMs: Parakeet 0.6B

A synthetic model is planted: a fifth of the frames asks for a label, beside which a second one is almost as probable,
and the predictor forbids both afterwards. So 5 of 6 moves of greedy search are blanks, as in speech with subwords. A
frame stands for 40 ms. All contestants take turns in one run; greedy search finds the same labels however many frames a
step reads.

Labels of "parakeet" have no rivals, so that all searches must find them; they are on 0.3 of the frames, of 80 ms. On a
GPU each search has its loops stepped by the host, and on the device.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import measure
from jax_rnnt import LinearJoint, RNNTLoss, TDTLoss, TransducerLoss, decode

T = 400
RIVAL = 4  # from a planted class to its rival
MAX_SYMBOLS, THRESHOLD = 3, 8.0
ON_DEVICE = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
}


class Kind(NamedTuple):
    """Of a synthetic model."""

    layers: int  # LSTMs; none: a stateless predictor
    batches: tuple = (1, 16, 128)
    classes: int = 1024
    units: int = 640
    share: float = 0.2  # of frames that ask for a label
    rivals: bool = True
    loss: TransducerLoss = RNNTLoss(blank=0)
    width: int = 8
    seconds: float = 0.04  # of a frame
    most: str = "<= 6"  # a beam may take so many times as long as greedy search


TDT = TDTLoss((0, 1, 2, 3, 4), blank=0)
PARAKEET = Kind(2, (1, 8, 16, 128), 8193, 640, 0.3, rivals=False, loss=TDT, width=6, seconds=0.08, most="<= 2")
KINDS = {"stateless": Kind(0), "lstm": Kind(1), "parakeet": PARAKEET}


# --------------------------------------------------------------------------------------------------- the model


def lstm(table, *layers):
    """LSTMs one after the other, each with weights [2 H, 4 H], after the embeddings [V, H] of labels."""

    def step(state, labels):
        x, after = table[labels], []
        for (hidden, cell), layer in zip(state, layers):
            read, forget, write, new = jnp.split(jnp.concatenate([x, hidden], 1) @ layer, 4, 1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(read) * jnp.tanh(new)
            x = jax.nn.sigmoid(write) * jnp.tanh(cell)
            after.append((x, cell))
        return x, after

    units = table.shape[1]
    return decode.Predictor(lambda batch: [(jnp.zeros((batch, units)),) * 2 for _ in layers], step, start=0)


def stateless(table, mix):
    """Of two labels, with weights [2 H, H]."""
    return decode.stateless_predictor(lambda x: jnp.tanh(table[x].reshape(len(x), -1) @ mix), 2, start=0)


def plant(kind, batch, frames, seed):
    """(arrays of the networks, encoder_out [B, T, H], labels of each utterance)"""
    rng, (V, H) = np.random.default_rng(seed), (kind.classes, kind.units)
    directions = rng.standard_normal((V, H), np.float32) / np.float32(H**0.5)
    encoder, planted = 0.01 * rng.standard_normal((batch, frames, H), np.float32), []
    for b in range(batch):
        at = np.flatnonzero(rng.random(frames) < kind.share)
        # Neighbours differ by more than rivals, since a label forbids itself and these.
        labels = 1 + np.cumsum(rng.integers(RIVAL * 2 + 1, V - 1 - RIVAL * 2, len(at))) % (V - 1)
        second = 0.6 + 0.2 * rng.random((len(at), 1), np.float32)
        rival = 1 + (labels - 1 + RIVAL * kind.rivals) % (V - 1)  # without rivals the label itself
        encoder[b, at] += directions[labels] + second * directions[rival]
        planted.append(labels.tolist())
    durations = np.arange(len(getattr(kind.loss, "durations", ())))
    weight = np.concatenate([20 * directions.T, np.zeros((H, len(durations)), np.float32)], 1)
    bias = np.concatenate([14 * (np.arange(V) == 0), 8 * (durations == 1)]).astype(np.float32)
    rng = np.random.default_rng(seed)
    shapes = [(2 * H, 4 * H)] * kind.layers or [(2 * H, H)]
    layers = [rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5) for shape in shapes]
    return jax.tree.map(jnp.asarray, (LinearJoint(weight, bias), directions, layers)), jnp.asarray(encoder), planted


def search_of(kind, networks, max_labels):
    """With a predictor that forbids its last label and the rivals of that, where there are any."""
    joint, directions, layers = networks
    predictor, labels = (lstm if kind.layers else stateless)(directions, *layers), directions[1:]
    forbid = -1.5 * kind.rivals * (labels + jnp.roll(labels, RIVAL, 0) + jnp.roll(labels, -RIVAL, 0))
    forbid = jnp.concatenate([jnp.zeros_like(directions[:1]), forbid])

    def step(state, labels):
        rows, state = predictor.step(state, labels)
        return 0.01 * rows + forbid[labels], state

    return decode.Search(kind.loss, joint, predictor._replace(step=step), max_labels, max_symbols=MAX_SYMBOLS)


# ------------------------------------------------------------------------------------------------------ contestants


def searches(kind):
    """{name: a verb of a search}"""
    name, beam = f"beam {kind.width}", functools.partial(decode.Search.beam, width=kind.width)
    found = {"label-looping": decode.Search.greedy, name: beam}
    found[f"{name}, 4 frames at once"] = functools.partial(beam, frames_at_once=4)
    if kind.rivals:
        found["label-looping, one frame"] = functools.partial(decode.Search.greedy, frames_at_once=1)
        found[f"{name}, threshold"] = functools.partial(beam, threshold=THRESHOLD)
    return found


def contestants(kind, batch, args):
    """Greedy searches must find the same labels, and all searches must find labels without rivals."""
    networks, encoder, planted = plant(kind, batch, args.frames, args.seed)
    lengths, max_labels = jnp.full(batch, args.frames, jnp.int32), round(1.5 * kind.share * args.frames)
    loops = {"": None} | ({", loop on the device": ON_DEVICE} if jax.default_backend() == "gpu" else {})
    measured, results = [], {}
    for (name, verb), (where, compiler) in itertools.product(searches(kind).items(), loops.items()):

        def program(networks, *batch, verb=verb):
            found = verb(search_of(kind, networks, max_labels), *batch)
            several = found.labels.ndim == 3  # the N best
            return tuple(x[:, 0] if several else x for x in (found.labels, found.counts, found.scores))

        compiled = jax.jit(program, compiler_options=compiler).lower(networks, encoder, lengths).compile()
        labels, counts = map(np.asarray, compiled(networks, encoder, lengths)[:2])
        results[name + where] = [row[:n].tolist() for row, n in zip(labels, counts)]
        measured.append(measure.calls(name + where, compiled, networks, encoder, lengths))
    expected = results["label-looping"] if kind.rivals else planted
    for name, labels in results.items():
        assert (kind.rivals and name.startswith("beam")) or labels == expected, f"{name} found other labels"
    agreement = np.mean([x == y for x, y in zip(results[f"beam {kind.width}"], expected)])
    labels = sum(map(len, expected))
    blanks = 1 - labels / (labels + batch * args.frames)
    print(f"{blanks:.0%} of the moves are blanks; beam {kind.width} agrees with greedy search on {agreement:.0%}.\n")
    return measured


def case_of(name, kind, args):
    batch = int(name.split()[1])
    seconds, greedy, beam = batch * args.frames * kind.seconds, "label-looping", f"beam {kind.width}"
    speed = {
        "utterances/s": lambda c: f"{batch / c.median:.3g}",
        "real-time factor": lambda c: f"{c.median / seconds:.2g}",
    }
    measured, aims = contestants(kind, batch, args), [(beam, greedy, kind.most)]
    return measure.Case(f"{name} utterances", measured, (greedy,), aims, speed)


def main(argv=None):
    kinds = {f"{name} {batch}": kind for name, kind in KINDS.items() for batch in kind.batches}
    parser = measure.options(__doc__, list(kinds))
    parser.add_argument("--frames", type=int, default=T, help="of a synthetic utterance (%(default)s)")
    parser.set_defaults(only=[name for name, kind in kinds.items() if kind is not PARAKEET])
    args = parser.parse_args(argv)
    measure.settle(args)
    measure.run(args, "-decode", {name: functools.partial(case_of, name, kinds[name], args) for name in args.only})


if __name__ == "__main__":
    main()
