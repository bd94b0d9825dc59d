"""A training by parts: CTC, averages, frozen weights, versions of recordings, the cache."""

import itertools
import json
import math
import shutil
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_rnnt
from jax_rnnt_speech.data import audio, augmentation, batches, cache, features
from jax_rnnt_speech.data.source import Source
from jax_rnnt_speech.data.utterances import Report
from jax_rnnt_speech.model import Model, ctc, losses
from jax_rnnt_speech.training import frozen_rows, objective, steps
from jax_rnnt_speech.training.devices import Devices
from support import (
    CONVOLUTIONAL,
    DAMAGES,
    asr,
    configuration,
    prepared,
    steps_of,
    write_audio,
)


def enumerated(logits, labels, blank):
    """-log of the summed probability of all paths [T] that become the labels, and its gradient, in float64."""
    logits = np.float64(logits)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    total, visits = 0.0, np.zeros_like(probs)
    for path in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        if [x for x, _ in itertools.groupby(path) if x != blank] == list(labels):
            weight = np.prod(probs[range(len(path)), path])
            total += weight
            visits[range(len(path)), path] += weight
    return (-math.log(total), probs - visits / total) if total else (0, np.zeros_like(probs))


def test_ctc_is_that_of_all_paths():
    rng, blank = np.random.default_rng(0), 2
    rows = rng.normal(size=(5, 5, 3)).astype(np.float32)
    cases = [([0, 1, 0], 5), ([0, 0, 1], 4), ([1, 0, 0], 3), ([], 1), ([0, 0, 0], 4)]  # the last two or so need blanks
    targets, lengths = np.full((5, 3), 1, np.int32), np.array([n for _, n in cases])
    for row, (labels, _) in zip(targets, cases):
        row[: len(labels)] = labels
    counts = np.array([len(labels) for labels, _ in cases])
    rows[np.arange(5) >= lengths[:, None]] = np.nan  # nobody reads them
    total = lambda rows: (jnp.sum(x := ctc.loss(rows, targets, lengths, counts)), x)
    gradient, values = jax.jit(jax.grad(total, has_aux=True))(rows)
    for b, (labels, n) in enumerate(cases):
        value, exact = enumerated(rows[b, :n], labels, blank)
        assert (value == 0) == (b in (2, 4))  # these do not fit
        np.testing.assert_allclose(values[b], value, rtol=1e-5)
        np.testing.assert_allclose(gradient[b], np.pad(exact, ((0, 5 - n), (0, 0))), atol=1e-6)


def divergences(logits, lengths, targets):
    """How far posteriors of each row of logits are from those of `targets` of the other copy, by a loop in float64."""
    logits, targets, values = np.float64(logits), np.float64(targets), []
    for row, length in enumerate(lengths):
        total = 0.0
        for own, other in zip(logits[row, :length], targets[row ^ 1, :length]):
            p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (own, other))
            total += sum(b * (math.log(b) - math.log(a)) for a, b in zip(p, q))
        values.append(total)
    return np.array(values)


def test_consistency_of_copies():
    """Values and gradients of CR-CTC; each row learns from its copy, which has no gradient. Truth: float64 loops."""
    rng, lengths, step = np.random.default_rng(0), np.array([5, 5, 3, 3, 1, 1]), 1e-5
    rows, weights = rng.normal(size=(6, 5, 4)).astype(np.float32), np.array([1, 2, 3, 5, 7, 11], np.float32)
    rows[np.arange(5) >= lengths[:, None]] = np.nan  # nobody reads them
    total = lambda rows: ((weights * (x := ctc.consistency(rows, lengths))).sum(), x)
    gradient, values = jax.jit(jax.grad(total, has_aux=True))(rows)
    np.testing.assert_allclose(values, divergences(rows, lengths, rows), rtol=1e-5)
    for b, t, v in itertools.product(*map(range, rows.shape)):
        two = np.float64(rows), np.float64(rows)
        two[0][b, t, v] -= step
        two[1][b, t, v] += step
        low, high = ((weights * divergences(x, lengths, rows)).sum() for x in two)
        expected = (high - low) / (2 * step) if t < lengths[b] else 0
        np.testing.assert_allclose(gradient[b, t, v], expected, atol=1e-5, err_msg=str((b, t, v)))


@pytest.mark.parametrize("more", [{"ctc": 0.3}, {"loss": "ctc"}], ids=str)
def test_loss_of_copies(corpus, more, tmp_path, monkeypatch):
    """Each copy has masks of its own. Truth: the losses of batches with either masks, and divergences by a loop."""
    plain, batch = prepared(
        corpus, dropout=0.0, time_masks=5, mel_masks=1, mel_mask=3, time_mask=0.2, **more, **CONVOLUTIONAL
    )
    config = plain.config.replace(time_masks=2, cr_ctc=0.5)
    model = Model(config, plain.tokens, plain.mean, plain.deviation, plain.params)
    each = [features.draw_spans(config, np.random.default_rng(i), n, 6) for i, n in enumerate(batch["lengths"])]
    batch |= {"spans": np.stack(each), "valid": np.arange(len(each)) != 1}
    assert batch["spans"].shape[1:] == (2 * (5 + 1), 2) and (batch["spans"][:, :6] != batch["spans"][:, 6:]).any()

    @jax.jit
    def alone(spans):
        x = features.hide(plain.inputs(batch), batch["lengths"], spans, 5)
        network = plain.network(plain.params)
        rows, lengths = network.encode(x, batch["lengths"])
        return objective.mean_loss(plain, plain.params, batch | {"spans": spans}, 1), network.ctc(rows), lengths

    (first, one, lengths), (second, other, _) = map(alone, np.split(batch["spans"], 2, 1))
    pairs = np.stack([one, other], 1).reshape(-1, *one.shape[1:])
    apart = divergences(pairs, np.repeat(lengths, 2), pairs)[np.repeat(batch["valid"], 2)].mean()
    expected = (float(first) + float(second)) / 2 + more.get("ctc", 1) * 0.5 * 0.25 * apart
    ours = jax.jit(lambda batch: objective.mean_loss(model, model.params, batch, 1, ramp=0.25))(batch)
    assert apart > 0.01 and float(ours) == pytest.approx(expected, rel=1e-5)
    loss = lambda model, params, batch, step, layers, valid, ramp, *_: params["w"] * ramp
    monkeypatch.setattr(objective, "mean_loss", loss)
    whole = types.SimpleNamespace(whole=lambda free, _: free)
    optimizer = steps.make_optimizer(model.config.optimiser.__class__(learning_rate=0.0), 9)
    state, step = steps.first_state(model.config.optimiser, optimizer, {"w": jnp.ones(())}), None
    step = steps.make_train_step(model, whole, optimizer, warmup=4)
    for i, ramp in ((1, 0.25), (4, 1.0), (9, 1.0)):
        state, numbers = step(state, batch, {}, i)
        assert numbers["loss"] == ramp


def test_options_of_losses():
    """Durations, sigma, the blank and the number of logits of five labels; what may be named is there."""
    assert losses.LOSSES.keys() == {*asr.config.LOSSES}
    for name, loss, sizes in (
        ("tdt", jax_rnnt.TDTLoss((0, 1, 3), sigma=0.2), (5, 9)),
        ("multiblank", jax_rnnt.MultiblankRNNTLoss((2, 3, 4), sigma=0.2), (8, 9)),
        ("hat", jax_rnnt.HATLoss(), (5, 6)),
        ("ctc", None, (5, 6)),
    ):
        found = losses.variant_of(configuration(loss=name, sigma=0.2, durations=(0, 1, 3)).head)
        assert (found.loss, found.outputs(5)) == (loss, sizes)


def test_loss_of_texts(corpus, tmp_path, capsys):
    """By hand: of labels alone, without a row of the encoder, and not of what follows a sentence."""
    model, _ = prepared(corpus, **CONVOLUTIONAL)
    (tmp_path / "x.txt").write_text("AB\nnone\nCAB A\n")
    config = model.config.replace(text=str(tmp_path / "x.txt"))
    labels, lengths = batches.sentences(config, model.tokens)
    assert "text: left out, characters outside the vocabulary: 1 (none)" in capsys.readouterr().out
    assert lengths.tolist() == [2, 5] and labels[0, :3].tolist() == [0, 1, 0]
    network = model.network(model.params)
    joint, states, total = network.joint, np.float64(network.predictor(labels)), 0.0
    weights = {name: np.float64(getattr(joint, name).kernel[...]) for name in ("predictor", "output")}
    hidden = np.tanh(states @ weights["predictor"] + np.float64(joint.encoder.bias[...]))
    logits = hidden @ weights["output"] + np.float64(joint.output.bias[...])
    for i, length in enumerate(lengths):
        for u in range(length):
            x = logits[i, u, : len(model.tokens.pieces)]
            total -= x[labels[i, u]] - math.log(np.exp(x).sum())
    value = losses.loss_of_texts(network, labels, lengths, len(model.tokens.pieces))
    assert float(value) == pytest.approx(total / 2, rel=1e-5)


def stepped(model, batch, steps, mesh=None):
    """(parts, the states before and after some steps) on one batch."""
    parts, state, frozen, step = steps_of(model, mesh=mesh)
    if mesh:
        batch = jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    states = [jax.device_get(state)]
    for i in range(steps):
        state, _ = step(state, batch, frozen, i)
        states.append(jax.device_get(state))
    return parts, states, state


def test_frozen_parts_rates_and_average(corpus):
    """Frozen parts are no part of the state; a rate of 0 moves nothing; the average is that of the weights so far."""
    options = {"freeze": "encoder:1,predictor", "rates": [["joint", 0.0]], "average": 0.9, "warmup": 0.0}
    model, batch = prepared(corpus, blocks=2, ctc=0.5, steps=100, **options, **CONVOLUTIONAL)
    parts, states, _ = stepped(model, batch, 5)
    names = states[0]["weights"]
    assert not [x for x in names if x.startswith(("predictor", "encoder/subsample", "encoder/blocks/layers/0"))]
    assert {x.split("/")[0] for x in names} == {"encoder", "joint", "ctc"} and parts.layers == 1
    moved = {name: bool((x != states[-1]["weights"][name]).any()) for name, x in names.items()}
    assert all(moved[name] != name.startswith("joint") for name in names), moved
    name = "ctc/kernel"
    average, weights = np.float64(states[0]["weights"][name]), [x["weights"][name] for x in states[1:]]
    for i, x in enumerate(weights, 1):
        decay = min(0.9, (1 + i) / (10 + i))
        average = decay * average + (1 - decay) * x
    np.testing.assert_allclose(states[-1]["average"][name], average, atol=1e-6)
    with pytest.raises(asr.system.UserError, match="no parameter is called decoder; they begin with ctc, encoder"):
        asr.training.parts.Parts(model.config.replace(freeze="decoder"), model.params)


@pytest.mark.slow
def test_sharded(corpus):
    """Parameters in parts over two devices give the weights of a plain step."""
    model, batch = prepared(corpus, warmup=0.0, steps=100, **CONVOLUTIONAL)
    _, plain, _ = stepped(model, batch, 2)
    _, other, last = stepped(model, batch, 2, mesh=Mesh(np.array(jax.devices()[:2]), ("data",)))
    chex.assert_trees_all_close(other[-1]["weights"], plain[-1]["weights"], atol=2e-4, rtol=1e-7)
    kernel = last["weights"]["encoder/blocks/layers/0/conv/kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 2


@pytest.mark.slow
def test_computed_again(corpus):
    """Blocks that are computed again, or also one program on one array of parameters, have the loss and gradient of
    plain ones; bfloat16's loss is near, as one program too. All with dropout, and beside a predictor that is a scan.
    """
    options = {"blocks": 3, "dropout": 0.2, "predictor": "lstm", "freeze": "encoder:1"}
    model, batch = prepared(corpus, **options, rates=[["encoder/blocks", 0.5]])
    rates, results = [["encoder/blocks", 0.5], ["encoder/blocks/layers/2", 2.0]], []
    again = {"scan": True, "remat": True, "rates": rates}
    for way in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", **again}, {}, {"remat": True}, again):
        config = model.config.replace(**way)
        other = Model(config, model.tokens, model.mean, model.deviation)
        parts = asr.training.parts.Parts(config, model.params)
        free, frozen = parts.free(model.params), parts.frozen(model.params)
        loss = lambda free, other=other, parts=parts: objective.mean_loss(other, parts.whole(free, frozen), batch, 1)
        if "dtype" in way:
            results.append(jax.jit(loss)(free))
            continue
        value, gradient = jax.jit(jax.value_and_grad(loss))(free)
        results.append((value, parts.whole(gradient, frozen)))
    rounded, scanned, plain, *others = results
    assert float(scanned) == pytest.approx(float(rounded), rel=1e-3)
    assert float(rounded) == pytest.approx(float(plain[0]), rel=0.1) and rounded != plain[0]
    for other in others:
        chex.assert_trees_all_close(other, plain, rtol=1e-4, atol=1e-5)
    name = "encoder/blocks/layers/1-2/first/norm/scale"
    assert free[name].shape == (2, 8) and parts.factors[name].tolist() == [[0.5], [2.0]]
    assert parts.factors["joint/output/bias"] == 1.0 and "encoder/blocks/layers/0/first/norm/scale" in frozen


def test_versions_of_recordings(tmp_path):
    """Speeds move tones and lengths; noise has the ratio that was asked for; the same version is always the same."""
    rate, seconds = 8000, 2.0
    for i in range(2):
        write_audio(tmp_path / f"noise/{i}.wav", 0.3, rate, seed=i)
    tone = np.sin(2 * np.pi * 500 * np.arange(int(rate * seconds)) / rate).astype(np.float32)
    more = {"speeds": (0.8, 1.25), "noise": str(tmp_path / "noise"), "snr": (10.0, 10.0)}
    versions = augmentation.Versions(configuration(**more))
    assert versions.count == 6
    for version, speed in enumerate((1, 0.8, 1.25)):
        x = versions.applied(tone, version, 0)
        assert len(x) == versions.size(len(tone), version) == pytest.approx(len(tone) / speed, abs=1)
        assert np.abs(np.fft.rfft(x)).argmax() * rate / len(x) == pytest.approx(500 * speed, abs=1)
    noisy = [versions.applied(tone, 3, i) for i in (0, 1, 0)]
    np.testing.assert_array_equal(noisy[0], noisy[2])
    assert (noisy[0] != noisy[1]).any()
    ratio = np.square(tone).mean() / np.square(noisy[0] - tone).mean()
    assert 10 * np.log10(ratio) == pytest.approx(10, abs=0.01)
    changes = {}, {"seed": 1}, {"snr": (0.0, 10.0)}, {"gain": 1.0}, {"speeds": (0.8,)}
    others = [augmentation.Versions(configuration(**(more | x))) for x in changes]
    assert len({json.dumps(x.key()) for x in others}) == len(changes)  # of the cache
    assert (others[1].applied(tone, 3, 0) != noisy[0]).any()
    for i in range(2):  # every file of noise is used, from any place on
        (tmp_path / "ramps").mkdir(exist_ok=True)
        audio.write(tmp_path / f"ramps/{i}.wav", (1 - 2 * i) * np.linspace(0.1, 0.2, 90 * rate), rate)
    ramps = augmentation.Versions(configuration(noise=str(tmp_path / "ramps")))
    heard = [ramps.noise(np.random.default_rng(i), tone)[0] for i in range(20)]
    assert len({float(x) for x in heard}) == 20 and {x > 0 for x in heard} == {True, False}
    assert len(augmentation.noise_samples(ramps.noises[0], rate)) == 60 * rate
    audio.write(tmp_path / "ramps/0.wav", np.zeros(99), rate)
    augmentation.noise_samples.cache_clear()
    with pytest.raises(asr.system.UserError, match=r"ramps/0\.wav is silent"):
        augmentation.noise_samples(ramps.noises[0], rate)
    gain, quiet = (augmentation.Versions(configuration(gain=x)) for x in (6.0, 0.0))
    louder = np.array([gain.applied(np.ones(9, np.float32), 1, i) for i in range(50)])
    assert (louder == louder[:, :1]).all() and 5 < np.abs(20 * np.log10(louder)).max() <= 6 and quiet.count == 1


def test_a_source_that_remembers(corpus, tmp_path, monkeypatch):
    """Features are those of the recordings up to float16; a second start decodes nothing, and a changed file is heard.

    What a first start has left out is left out again.
    """
    shutil.copytree(corpus, tmp_path / "c")
    (tmp_path / "c/bad.flac").write_bytes(b"no audio")
    lines = (corpus / "all.jsonl").read_text() + '\n{"audio": "bad.flac", "text": "A"}'
    (tmp_path / "c/all.jsonl").write_text(lines)
    config = configuration(train=str(tmp_path / "c/all.jsonl"), speeds=(1, 0.8), max_seconds=0.7)
    extractor, versions = features.extractor(config), augmentation.Versions(config)
    start = lambda: Source(config, tmp_path / "index", kept=tmp_path / "kept")
    left_out = {"no audio that FFmpeg knows": ["bad.flac"], "longer than 0.7 s": ["7/1/7-1-0009.flac"]}
    first = start()
    with monkeypatch.context() as patch:
        patch.setattr(audio, "blocks", None)  # nothing can be decoded
        second = start()
    for found in (first, second):
        assert dict(found.report.names) == left_out
        ((index,), ((items,),)) = found.indices, found.items
        assert items.tolist() == [*range(9)]
        assert [x.name for x in index.utterances] == [f"7/{i % 2}/7-{i % 2}-{i:04}.flac" for i in range(9)]
        for i, x in enumerate(index.utterances):
            samples = audio.read(tmp_path / "c" / x.name, 8000)
            for k, longer in enumerate((False, len(samples) > 0.8 * 5600)):  # a version that is too long is not drawn
                expected = extractor(versions.applied(samples, 0 if longer else k, i))
                version, seconds = index.lengths_of_versions(np.array([i]), np.array([k]), np.array([1, 0.8]), 0.7)
                assert version == (0 if longer else k) and seconds == len(expected) * 0.01
                np.testing.assert_allclose(index.load(i, int(version[0]), None), expected, rtol=1e-3, atol=4e-3)
    write_audio(tmp_path / "c" / index.utterances[0].name, 0.6, seed=99)
    assert start().indices[0].frames[0, 0] == extractor.count(4800)
    free = cache.shutil.disk_usage("/")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: free._replace(free=10))
    with pytest.raises(asr.system.UserError, match=r"--cache needs .* GB in .*/full, which has 0\.0"):
        Source(config, tmp_path / "index", kept=tmp_path / "full")
    assert not list((tmp_path / "full").iterdir())


def test_the_cache(tmp_path, monkeypatch, capsys):
    """It is whole or made anew, whoever makes it, and what does not fit into its numbers is said."""

    def stored(key, made, report=None):
        return cache.stored(tmp_path, key, 2, 6, report or Report(), lambda: 3, lambda: made, lambda i: f"u{i}")

    with pytest.raises(asr.system.UserError, match="u1: numbers too large for float16: --cache none"):
        stored("key", [(1, np.full((3, 6), 1e6))])
    assert not list(tmp_path.iterdir())
    report = Report()
    report.add("a reason", "a name")
    stored("key", [(0, np.ones((3, 6)))], report)

    def meanwhile():
        stored("two", [(0, np.ones((3, 6)))])  # by another run
        yield 0, np.ones((3, 6))

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "getpid", iter([1, 2]).__next__)
        stored("two", meanwhile())
    assert len([*tmp_path.iterdir()]) == 2
    again = Report()
    assert stored("key", None, again).load(1) is None
    assert dict(again.names) == {"a reason": ["a name"]}  # what the first start has left out
    for damage, name in itertools.product(DAMAGES.values(), ("arrays", "left-out.json", "index.npy", "sums.json")):
        for path in tmp_path.glob(f"*/{name}"):
            damage(path)
        stored("key", [(0, np.full((3, 6), 2))])  # of the one that is read
        assert (stored("key", None).load(0) == 2).all()
        assert "is damaged, and made anew: " in capsys.readouterr().err
    write_audio(tmp_path / "a.wav", 0.2)
    stamp = cache.stamp(tmp_path / "a.wav")
    write_audio(tmp_path / "a.wav", 0.2, seed=1)
    assert cache.stamp(tmp_path / "a.wav") != stamp


@pytest.mark.slow
def test_rows_of_a_frozen_encoder(corpus, tmp_path):
    """A step on rows of the cache has the loss of one on features: frozen blocks have no dropout. Rows in bfloat16 are
    within its rounding of them."""
    options = {"train": str(corpus / "all.jsonl"), "freeze": "encoder:1", "dropout": 0.5, "time_masks": 0}
    options |= {"mel_masks": 0, "speeds": (1, 1.25), "batch": 10}
    config = configuration(**options, blocks=2, buckets=1, **CONVOLUTIONAL)
    tokens, zeros, values, arrays = asr.data.tokens.Characters("ABC "), np.zeros(6), [], []
    for change in ({}, {"seed": 1}, {"bfloat16_rows": True}):
        model = Model(config.replace(**change), tokens, zeros, zeros + 1)
        parts = asr.training.parts.Parts(config, model.params)
        found = Source(config, tmp_path / "index", kept=tmp_path / "kept").opened(model, 1)
        for layers in (None, 1):
            if layers:
                frozen_rows.remember(model, parts, found, tmp_path / "kept")
            batch = next(found.read(0, 1))
            found.place = 0, 0, 0, 0
            assert batch["features"].shape[1:] == ((19, 8) if layers else (73, 6)) and batch["valid"].all()
            batch.pop("index")
            if not change:
                values.append(float(objective.mean_loss(model, model.params, batch, 1, layers)))
        arrays.append(found.indices[0].arrays)
    assert values[0] == pytest.approx(values[1], rel=1e-3) and values[0] != values[1]
    assert len({x.folder for x in arrays}) == 3 and len(found.folders) == 2
    near, exact = (np.concatenate([x.load(i) for i in range(20)]) for x in (arrays[2], arrays[0]))
    assert 1e-4 < np.linalg.norm(near - exact) / np.linalg.norm(exact) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"ctc": 0.3, "cr_ctc": 0.2}], ids=str)
def test_a_batch_in_turns(corpus, more, monkeypatch):
    """On a CPU a batch is split, to save memory; copies stay together. Truth: loss and gradient of each row alone."""
    model, batch = prepared(corpus, dropout=0.0, **more, text_weight=0.5, learning_rate=0.0)
    each = [features.draw_spans(model.config, np.random.default_rng(i), n, 6) for i, n in enumerate(batch["lengths"])]
    batch["spans"] = np.stack(each)
    batch = {name: np.concatenate([x, x, x])[:12] for name, x in batch.items()}
    batch["valid"] = np.arange(12) % 5 > 0
    batch |= {"texts": np.arange(216).reshape(72, 3) % 4, "text_lengths": np.arange(72) % 3 + 1}
    mesh, own = Mesh(jax.devices()[:2], ("data",)), {}
    optimizer = steps.make_optimizer(model.config.optimiser, 9)
    parts, state, frozen, _ = steps_of(model, optimizer, mesh)
    weights, seconds = jax.device_get(state["weights"]), batch["features"].shape[1] * model.config.features.hop / 1000
    texts = lambda free: losses.loss_of_texts(
        model.network(parts.whole(free)), batch["texts"], batch["text_lengths"], len(model.tokens.pieces)
    )
    row = lambda free, x: objective.mean_loss(model, parts.whole(free), x, 1)
    row, alone = (jax.jit(jax.value_and_grad(x)) for x in (row, lambda free: 0.5 * texts(free)))
    audio_alone = {name: x for name, x in batch.items() if not name.startswith("text")}
    found = [
        row(weights, {name: x[i : i + 1] for name, x in audio_alone.items()}) for i in np.flatnonzero(batch["valid"])
    ]
    value, gradient = jax.tree.map(lambda total, *x: np.float64(total) + np.mean(x, 0), alone(weights), *found)
    norm = math.sqrt(sum((x**2).sum() for x in gradient.values()))
    for limit, turns in (
        (99, 1),
        (3 * seconds * model.config.masks[0], 2),
        (1e-3, 6),
    ):  # as a whole, in two parts, in six
        monkeypatch.setattr(steps, "SECONDS", limit)
        step = steps.make_train_step(model, parts, optimizer, places=jax.tree.map(lambda x: x.sharding, state), cpus=2)
        split = Devices(mesh).split(batch)
        own[limit] = (
            step.add.lower((jnp.zeros(()), state["weights"]), state["weights"], split, frozen, 1, 0, turns=turns)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )
        state, numbers = step(state, split, frozen, 1)
        assert step.add._cache_size() == (turns > 1)  # one program for all parts
        np.testing.assert_allclose([numbers["loss"], numbers["norm"]], [value, norm], rtol=1e-4)
    whole, two, six = own.values()
    assert two < 0.7 * whole and six < 0.4 * whole, own


@pytest.mark.parametrize(
    ("rows", "frames", "turns"), [(8, 100, 1), (8, 2000, 4), (8, 900, 2), (12, 700, 2), (2, 9999, 1)]
)
def test_turns_draw_different_dropout(rows, frames, turns, monkeypatch):
    """Each row comes once, in parts of 24 s for each of two devices, with seeds of their own. Truth: arithmetic."""
    loss = lambda model, params, batch, step, *_: batch["features"][:, 0].sum() * 2.0**step * params["w"]
    monkeypatch.setattr(objective, "mean_loss", loss)
    model, whole = types.SimpleNamespace(config=configuration()), types.SimpleNamespace(whole=lambda free, _: free)
    optimizer = steps.make_optimizer(model.config.optimiser, 9)
    state = steps.first_state(model.config.optimiser, optimizer, {"w": jnp.ones(())})
    features = np.zeros((rows, frames), np.float32)
    features[:, 0] = np.arange(rows) + 1
    batch = {"features": features, "valid": np.ones(rows, bool)}
    copies = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    _, numbers = steps.make_train_step(model, whole, optimizer, cpus=2)(copies[0], batch, {}, 1)
    _, weighed = steps.make_train_step(model, whole, optimizer, cpus=2, usual=2.5 * rows)(copies[1], batch, {}, 1)
    assert weighed["loss"] == numbers["loss"] and float(weighed["norm"]) == pytest.approx(0.4 * numbers["norm"])
    parts = np.arange(1, rows + 1).reshape(2, turns, -1).sum((0, 2))
    assert numbers["loss"] == sum(int(x) * 2 ** (turns + i) for i, x in enumerate(parts))
