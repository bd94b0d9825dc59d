"""Times greedy and beam search.

    python benchmarks/decode.py                          # synthetic model: B = 1, 16, 128; T = 400; V = 1024

The synthetic model is planted: a fifth of the frames asks for a label, beside which a second one is almost as probable,
and the predictor forbids both afterwards. So 5 of 6 moves of greedy search are blanks, as in speech with subwords. A
frame stands for 40 ms. All contestants take turns in one run; greedy search finds the same labels in any window.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import measure
from jax_rnnt import LinearJoint, RNNTLoss, decode

T, V, H = 400, 1024, 640
SHARE, SECONDS, RIVAL = 0.2, 0.04, 4  # label frames; of a frame; from a planted class to its rival
MAX_LABELS, MAX_SYMBOLS, WIDTH, THRESHOLD = 120, 3, 8, 8.0
BATCHES = 1, 16, 128
PREDICTORS = "stateless", "lstm"
LOSS = RNNTLoss(blank=0)


# --------------------------------------------------------------------------------------------------- the model


def plant(batch, frames, seed):
    """(joint, encoder_out [B, T, H], directions of the classes [V, H])."""
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((V, H), np.float32) / np.float32(H**0.5)
    encoder = 0.01 * rng.standard_normal((batch, frames, H), np.float32)
    for b in range(batch):
        at = np.flatnonzero(rng.random(frames) < SHARE)
        # Neighbours differ by more than rivals, since a label forbids itself and these.
        planted = 1 + np.cumsum(rng.integers(RIVAL * 2 + 1, V - 1 - RIVAL * 2, len(at))) % (V - 1)
        rival = 1 + (planted - 1 + RIVAL) % (V - 1)
        second = 0.6 + 0.2 * rng.random((len(at), 1), np.float32)
        encoder[b, at] += directions[planted] + second * directions[rival]
    bias = np.zeros(V, np.float32)
    bias[0] = 14
    joint = LinearJoint(jnp.asarray(20 * directions.T), jnp.asarray(bias))
    return joint, jnp.asarray(encoder), jnp.asarray(directions)


def make_predictor(kind, directions, seed):
    """A predictor of H units that forbids its last label and the rivals of that."""
    rng = np.random.default_rng(seed)
    labels = directions[1:]
    forbid = -1.5 * (labels + jnp.roll(labels, RIVAL, 0) + jnp.roll(labels, -RIVAL, 0))
    forbid = jnp.concatenate([jnp.zeros((1, H)), forbid])

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5))

    if kind == "stateless":
        mix = draw(2 * H, H)

        def function(labels):
            return 0.01 * jnp.tanh(directions[labels].reshape(len(labels), -1) @ mix) + forbid[labels[:, -1]]

        return decode.stateless_predictor(function, 2, start=0)
    weights = draw(2 * H, 4 * H)

    def step(state, labels):
        hidden, cell = state
        gates = jnp.concatenate([directions[labels], hidden], 1) @ weights
        read, forget, write, new = jnp.split(gates, 4, 1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(read) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(write) * jnp.tanh(cell)
        return 0.01 * hidden + forbid[labels], (hidden, cell)

    return decode.Predictor(lambda batch: (jnp.zeros((batch, H)),) * 2, step)


def planted(kind, batch, args):
    """(joint, predictor, encoder_out, lengths, loss, max_labels, seconds of audio)."""
    joint, encoder, directions = plant(batch, args.frames, args.seed)
    lengths = jnp.full(batch, args.frames, jnp.int32)
    predictor = make_predictor(kind, directions, args.seed)
    return joint, predictor, encoder, lengths, LOSS, MAX_LABELS, batch * args.frames * SECONDS


# ------------------------------------------------------------------------------------------------------ contestants


def decoders(joint, predictor, loss, max_labels):
    """{name: program of (encoder_out, lengths)} of ours: labels, counts and scores."""
    options = dict(max_labels=max_labels, max_symbols=MAX_SYMBOLS)
    greedy = functools.partial(decode.greedy, loss, joint, predictor, **options)
    beam = functools.partial(decode.beam, loss, joint, predictor, width=WIDTH, **options)

    def first(hypotheses):  # of the N best
        return hypotheses.labels[:, 0], hypotheses.counts[:, 0], hypotheses.scores[:, 0]

    def only(hypotheses):
        return hypotheses.labels, hypotheses.counts, hypotheses.scores

    return {
        "label-looping": lambda *x: only(greedy(*x)),
        "label-looping, one frame": lambda *x: only(greedy(*x, window=1)),
        f"beam {WIDTH}": lambda *x: first(beam(*x)),
        f"beam {WIDTH}, threshold": lambda *x: first(beam(*x, threshold=THRESHOLD)),
    }


def contestants(joint, predictor, encoder, lengths, loss, max_labels):
    """Greedy search must find the same labels in any window."""
    measured, results = [], {}
    for name, program in decoders(joint, predictor, loss, max_labels).items():
        compiled = jax.jit(program).lower(encoder, lengths).compile()
        labels, counts = map(np.asarray, compiled(encoder, lengths)[:2])
        results[name] = [row[:n].tolist() for row, n in zip(labels, counts)]
        measured.append(measure.calls(name, compiled, encoder, lengths))
    expected = results["label-looping"]
    for name, labels in results.items():
        assert name.startswith("beam") or labels == expected, f"{name} found other labels"
    agreement = np.mean([x == y for x, y in zip(results[f"beam {WIDTH}"], expected)])
    labels = sum(map(len, expected))
    blanks = 1 - labels / (labels + int(np.sum(np.asarray(lengths))))
    print(f"{blanks:.0%} of the moves are blanks; beam {WIDTH} agrees with greedy search on {agreement:.0%}.\n")
    return measured


def report(name, measured, batch, seconds):
    speed = {
        "utterances/s": lambda c: f"{batch / c.median:.3g}",
        "real-time factor": lambda c: f"{c.median / seconds:.2g}",
    }
    measure.report(name, measured, ["label-looping"], **speed)


def aims(name, measured):
    by_name = {c.name: c for c in measured}
    ours, beam = by_name["label-looping"], by_name[f"beam {WIDTH}"]
    return [measure.aim(f"{name}: beam {WIDTH} / label-looping", beam, ours, "<= 6")]


def main(argv=None):
    parser = measure.options(__doc__, [f"{kind} {batch}" for kind in PREDICTORS for batch in BATCHES])
    parser.add_argument("--frames", type=int, default=T, help="of a synthetic utterance (%(default)s)")
    args = parser.parse_args(argv)
    budget = measure.settle(args)
    results, checks = {}, []
    for name in args.only:
        kind, batch = name.split()
        *problem, seconds = planted(kind, int(batch), args)
        measured = results[name] = contestants(*problem)
        measure.take_turns(measured, budget, args.repeat)
        report(f"{name} utterances", measured, int(batch), seconds)
        checks += aims(name, measured)
    measure.report_aims(checks)
    measure.save(args, "-decode", checks, results)


if __name__ == "__main__":
    main()
