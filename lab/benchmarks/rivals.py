"""Times the decoders beside those of torchaudio, NeMo and sherpa-onnx on the same model, and counts their errors.

    python lab/benchmarks/rivals.py --data FOLDER --workdir runs/spoken-digits    # a model of jax_rnnt_speech
    python lab/benchmarks/rivals.py --only "stateless 16" "lstm 16" --quick

Cases: decode.py's planted model with predictors of standard architecture; spoken digits. Rivals that can be imported
take part. All take turns in one process on the same cores, and decode the same encoder rows, with 8 hypotheses, ranked
by score over length. Logits of the models in PyTorch and JAX are compared before anything is timed. sherpa-onnx takes
one label a frame at most: ours too in the row beside it, by the arcs of the monotonic loss. torchaudio takes utterances
one after another, at most 16 of a planted batch; its time is scaled. "With the encoder" adds the time of the one
encoder, in JAX, to that of every decoder. A rival that needs more than 20 s is run once.
"""

import functools
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
import numpy as np

import decode as planted_model
import measure
from jax_rnnt import MonotonicRNNTLoss, decode
from jax_rnnt.metrics import label_errors

SERIAL, LONG = 16, 20.0
CASES = [f"{kind} {batch}" for kind in ("stateless", "lstm", "digits") for batch in planted_model.BATCHES]
ONE = ", one label a frame"


def stateless(forbid, seed):
    """(predictor, its arrays): relu(sum of two embeddings) @ weight + bias, nearly `forbid` of the last label."""
    count, width = forbid.shape
    last = np.concatenate([forbid, -forbid], 1)
    embedding = np.concatenate([0.01 * np.random.default_rng(seed).standard_normal(last.shape, np.float32), last])
    weight, bias = np.concatenate([np.eye(width), -np.eye(width)]).astype(np.float32), np.zeros(width, np.float32)

    def function(labels):
        hidden = jax.nn.relu(jnp.asarray(embedding)[labels + jnp.array([0, count], labels.dtype)].sum(1))
        return hidden @ weight + bias

    return decode.stateless_predictor(function, 2, start=count - 1), ("Stateless", embedding, 2, weight, bias)


def lstm(forbid, seed):
    """(predictor, its arrays): a standard LSTM whose state is nearly `forbid` of the last label."""
    width = forbid.shape[1]
    draw = np.random.default_rng(seed).standard_normal((2 * width, 4 * width), np.float32)
    weights = 0.1 * draw / np.float32(width**0.5)
    weights[:width, 2 * width : 3 * width] = np.eye(width)  # new cells are the embedding
    bias = np.repeat(np.float32([6, -6, 0, 6]), width)  # input and output gates open, forget gates shut

    def step(state, labels):
        hidden, cell = state
        gates = jnp.concatenate([jnp.asarray(forbid)[labels], hidden], 1) @ weights + bias
        read, forget, new, write = jnp.split(gates, 4, 1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(read) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(write) * jnp.tanh(cell)
        return hidden, (hidden, cell)

    predictor = decode.Predictor(
        lambda batch: (jnp.zeros((batch, width), jnp.float32),) * 2, step, start=len(forbid) - 1
    )
    return predictor, ("LSTM", forbid, weights, bias)


def planted(kind, batch, args):
    """As `digits`. The blank is the last class."""
    joint, encoder, directions = planted_model.plant(batch, args.frames, args.seed)
    labels = np.asarray(directions[1:])
    forbid = -1.5 * sum(np.roll(labels, n * planted_model.RIVAL, 0) for n in (-1, 0, 1))
    predictor, network = {"stateless": stateless, "lstm": lstm}[kind](np.pad(forbid, ((0, 1), (0, 0))), args.seed)
    joint = type(joint)(*(jnp.roll(x, -1, -1) for x in joint.parameters))
    match = np.asarray(encoder) @ labels.T
    references = [best[top > 0.5] for best, top in zip(match.argmax(-1), match.max(-1))]
    return (joint, predictor, encoder, jnp.full(batch, args.frames)), network, references, None


def digits(batch, args):
    """(inputs of a decoder, name and arrays of the predictor, references, the encoder's contestant)."""
    from jax_rnnt_speech import batches, corpora, recognise

    recogniser, params = recognise.load(args.workdir, None)
    corpus = corpora.open_corpus(f"spoken-digits:{args.data}", recogniser.config, "valid")
    data = batches.labelled(corpus, recogniser.tokens, recogniser.reduction)
    (bucket,) = batches.make_buckets(data, recogniser.config, 1)
    bucket = bucket._replace(members=bucket.members[args.seed :][:batch], batch=batch)
    found = next(batches.testing(data, recogniser.config, [bucket], (0, 1)))
    features = recogniser.inputs(found, corpus.device), found["lengths"]

    def inputs(params, features, lengths):
        model = recogniser.model(params)
        rows, lengths = model.encode(features, lengths)
        return *model.joint.decoder_inputs(model.predictor, rows), lengths

    encoder = jax.jit(lambda *x: inputs(*x)[2])
    jax.block_until_ready(encoder(params, *features))
    model = recogniser.model(params)
    arrays = model.predictor.embed.embedding, model.joint.predictor.kernel, model.joint.encoder.bias
    embedding, *rest = (np.asarray(x[...]) for x in arrays)
    references = [row[:n] for row, n in zip(found["targets"], found["target_lengths"])]
    network = "Stateless", embedding, model.predictor.history, *rest
    return inputs(params, *features), network, references, measure.calls("encoder", encoder, params, *features)


def ours(joint, predictor, labels):
    """{name: program of (encoder_out, lengths)}."""
    made = {}
    for kind, loss in ("", planted_model.RNNTLoss()), (ONE, MonotonicRNNTLoss()):
        shared = dict(max_labels=labels, max_symbols=planted_model.MAX_SYMBOLS)
        made[f"jax_rnnt greedy{kind}"] = functools.partial(decode.greedy, loss, joint, predictor, **shared)
        shared |= dict(width=planted_model.WIDTH, length_norm=1.0)
        made[f"jax_rnnt beam{kind}"] = functools.partial(decode.beam, loss, joint, predictor, **shared)
    return made


def rivals(joint, predictor, encoder, lengths, network, threads):
    """{name: (decode, labels)} of the rivals that can be imported."""
    import rival_models
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    name, *arrays = network
    model = getattr(rival_models, name)(*arrays)
    output = rival_models.Joint(*map(np.asarray, joint.parameters))
    state, theirs = predictor.initial(1), None
    for t, label in enumerate([predictor.start, 3, 5, 5, 1]):
        rows, state = predictor.step(state, jnp.array([label]))
        other, theirs = model(torch.tensor([[label]]), theirs)
        expected, frame = joint(encoder[:1, t], rows), torch.tensor(np.asarray(encoder[:1, t]))
        np.testing.assert_allclose(output(frame, other[:, 0]), expected, atol=1e-3 * abs(expected).max())
    found = {}
    batch = np.asarray(encoder), np.asarray(lengths), threads
    for make, *rest in (rival_models.nemo,), (rival_models.torchaudio,), (rival_models.sherpa_onnx, *batch):
        try:
            found |= make(model, output, *rest)
        except (ImportError, OSError) as error:
            print(f"left out: {make.__name__}: {error}", flush=True)
    return found


def error_rate(found, references):
    """Percent of the labels of the references of those utterances that were decoded."""

    def padded(rows):
        counts = np.array([len(row) for row in rows], np.int32)
        return np.array([np.pad(row, (0, 1 + counts.max() - len(row))) for row in rows]).astype(np.int32), counts

    references = references[: len(found)]
    return float(100 * label_errors(*padded(found), *padded(references)).total.sum() / sum(map(len, references)))


def contestants(inputs, network, references, encoder, threads):
    """([contestant], {name: labels})."""
    import torch

    joint, predictor, *batch = inputs
    made, transcripts = [], {}
    for name, program in ours(joint, predictor, 2 * max(map(len, references))).items():
        compiled = jax.jit(program).lower(*batch).compile()
        found = compiled(*batch)
        first = np.s_[:] if "greedy" in name else np.s_[:, 0]
        transcripts[name] = planted_model.found(found.labels[first], found.counts[first])
        made.append(measure.calls(name, compiled, *batch))
    for name, (search, labels) in rivals(*inputs, network, threads).items():
        count = min(len(references), SERIAL) if "torchaudio" in name and not encoder else len(references)
        part = [torch.tensor(np.asarray(x)[:count]) for x in batch]
        start = time.perf_counter()
        transcripts[name] = labels(search(*part))
        seconds, scale = time.perf_counter() - start, len(references) / count
        contestant = measure.calls(name, search, *part)
        contestant.run = functools.partial(lambda run, scale: run() * scale, contestant.run, scale)
        contestant.seconds += [seconds * scale] if seconds > LONG else []
        made.append(contestant)
    return made + [encoder] * bool(encoder), transcripts


def beside(name):
    """Our search of the same kind."""
    return f"jax_rnnt {'greedy' if 'greedy' in name else 'beam'}{ONE * name.startswith('sherpa')}"


def report(case, made, transcripts, references):
    """Prints the table; (aims, {name: error rate})."""
    named, batch = {c.name: c for c in made}, int(case.split()[1])
    rates = {name: error_rate(found, references) for name, found in transcripts.items()}
    rows, checks = [], []
    for name, rate in rates.items():
        own, base = named[name], named[beside(name)]
        times = [own.median, own.best, *(own.median + named[x].median for x in ("encoder",) if x in named)]
        cells = [f"{1e3 * x / batch:.3g}" for x in times] + ["-"] * (3 - len(times))
        rows.append((name, *cells, f"{own.median / base.median:.2f}", f"{rate:.2f}", len(own.seconds)))
        if not name.startswith("jax_rnnt"):
            checks.append(measure.aim(f"{case}: {name} / {base.name}", own, base, ">= 1"))
            if (fewer := error_rate(transcripts[base.name][: len(transcripts[name])], references)) > rate:
                print(f"{case}: {name} makes fewer errors: {rate:.2f}%, ours {fewer:.2f}%\n")
    print(f"### {case}\n")
    measure.table(("ms an utterance", "median", "min", "with the encoder", "x ours", "errors, %", "runs"), rows)
    return checks, {name: round(rate, 3) for name, rate in rates.items()}


def main(argv=None):
    parser = measure.options(__doc__, CASES)
    parser.add_argument("--frames", type=int, default=planted_model.T, help="of a planted utterance (%(default)s)")
    parser.add_argument("--data", help="folder of spoken digits; without it these are left out")
    parser.add_argument("--workdir", type=Path, help="of jax_rnnt_speech with --config spoken-digits")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    budget = measure.settle(args)
    results, checks, errors = {}, [], {}
    for case in args.only:
        kind, batch = case.split()
        if kind == "digits" and not args.data:
            continue
        problem = digits(int(batch), args) if kind == "digits" else planted(kind, int(batch), args)
        made, transcripts = contestants(*problem, args.threads)
        measure.take_turns([c for c in made if not c.seconds], budget, args.repeat)
        found, errors[case] = report(case, made, transcripts, problem[2])
        results[case], checks = made, checks + found
    measure.report_aims(checks)
    versions = measure.versions("torch", "torchaudio", "nemo_toolkit", "sherpa-onnx")
    measure.save(args, "-rivals", checks, results, errors_percent=errors, versions=versions)


if __name__ == "__main__":
    main()
