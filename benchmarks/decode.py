"""Times the decoders beside a frame-by-frame loop in one program and beside the loop on the host that people write.

    python benchmarks/decode.py                          # synthetic model: B = 1, 16, 128; T = 400; V = 1024

The synthetic model is planted: a fifth of the frames asks for a label, beside which a second one is almost as probable,
and the predictor forbids both afterwards. So 5 of 6 moves of greedy search are blanks, as in speech with subwords. A
frame stands for 40 ms. All contestants take turns in one run; all greedy ones find the same labels.
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


def keep(condition, new, old):
    """Rows of `new` where the condition holds, else of `old`."""

    def pick(x, y):
        return jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)


def frame_by_frame(joint, predictor, encoder, lengths, max_labels):
    """Greedy search as in most code: all utterances on the same frame, symbol after symbol, in one program."""
    batch, frames = encoder.shape[:2]
    state = predictor.initial(batch)
    rows, state = predictor.step(state, jnp.zeros(batch, jnp.int32))

    def step(carry):
        t, emitted, rows, state, labels, counts, scores = carry
        logits = joint(encoder[:, t], rows)
        log_probs = jax.nn.log_softmax(logits)
        symbol = jnp.argmax(logits, -1).astype(jnp.int32)
        emits = (symbol > 0) & (emitted == jnp.max(emitted)) & (t < lengths) & (counts < max_labels)
        emits &= emitted < MAX_SYMBOLS
        # Those that wait for others have their blank already.
        waits = emitted < jnp.max(emitted)
        score = jnp.where(emits, jnp.max(log_probs, -1), log_probs[:, 0])
        scores = scores + jnp.where(waits | (t >= lengths), 0, score)
        labels = jnp.where((jnp.arange(max_labels) == counts[:, None]) & emits[:, None], symbol[:, None], labels)

        def advance(rows, state):
            return keep(emits, predictor.step(state, jnp.where(emits, symbol, 0)), (rows, state))

        rows, state = jax.lax.cond(jnp.any(emits), advance, lambda *x: x, rows, state)
        emitted = emitted + emits
        more = jnp.any(emits)
        return t + ~more, jnp.where(more, emitted, 0), rows, state, labels, counts + emits, scores

    zeros = jnp.zeros(batch, jnp.int32)
    labels = jnp.full((batch, max_labels), -1, jnp.int32)
    carry = 0, zeros, rows, state, labels, zeros, jnp.zeros(batch)
    *_, labels, counts, scores = jax.lax.while_loop(lambda carry: carry[0] < frames, step, carry)
    return labels, counts, scores


def host_loop(joint, predictor, encoder, lengths, max_labels):
    """Greedy search in Python: two compiled functions, and a look at the symbols after each."""
    best = jax.jit(lambda encoder, t, rows: jnp.argmax(joint(encoder[:, t], rows), -1))

    @jax.jit
    def advance(rows, state, symbol, emits):
        return keep(emits, predictor.step(state, symbol), (rows, state))

    def run(encoder, lengths):
        batch, frames = encoder.shape[:2]
        rows, state = predictor.step(predictor.initial(batch), jnp.zeros(batch, jnp.int32))
        labels, lengths = [[] for _ in range(batch)], np.asarray(lengths)
        for t in range(frames):
            running = t < lengths
            for _ in range(MAX_SYMBOLS):
                symbol = np.asarray(best(encoder, t, rows))
                emits = running & (symbol > 0) & (np.array([len(x) for x in labels]) < max_labels)
                if not emits.any():
                    break
                for b in np.flatnonzero(emits):
                    labels[b].append(int(symbol[b]))
                rows, state = advance(rows, state, symbol * emits, emits)
                running = emits
        return labels

    return run


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
    """Our decoders and the others; all greedy ones must find the same labels."""
    programs = decoders(joint, predictor, loss, max_labels)
    programs["frame by frame"] = lambda *x: frame_by_frame(joint, predictor, *x, max_labels)
    measured, results = [], {}
    for name, program in programs.items():
        compiled = jax.jit(program).lower(encoder, lengths).compile()
        labels, counts = map(np.asarray, compiled(encoder, lengths)[:2])
        results[name] = [row[:n].tolist() for row, n in zip(labels, counts)]
        measured.append(measure.calls(name, compiled, encoder, lengths))
    loop = host_loop(joint, predictor, encoder, lengths, max_labels)
    results["host loop"] = loop(encoder, lengths)
    measured.append(measure.calls("host loop", loop, encoder, lengths))
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


def aims(name, batch, measured):
    by_name = {c.name: c for c in measured}
    ours, slow, beam = (by_name[n] for n in ("label-looping", "frame by frame", f"beam {WIDTH}"))
    rows = [measure.aim(f"{name}: frame by frame / label-looping", slow, ours, ">= 2")] if batch == 16 else []
    return [*rows, measure.aim(f"{name}: beam {WIDTH} / label-looping", beam, ours, "<= 6")]


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
        checks += aims(name, int(batch), measured)
    measure.report_aims(checks)
    measure.save(args, "-decode", checks, results)


if __name__ == "__main__":
    main()
