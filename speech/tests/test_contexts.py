"""Models that are heard whole or live: what frames see, what batches draw, and streams in a context."""

import asyncio
import dataclasses
import functools
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jax_rnnt_speech import models
from jax_rnnt_speech.config import Config
from jax_rnnt_speech.config.files import from_json, to_json
from jax_rnnt_speech.model.encoders import contexts
from jax_rnnt_speech.recognition import live, recognise, search, search_options
from jax_rnnt_speech.recognition.live import Windowed
from jax_rnnt_speech.system import UserError
from jax_rnnt_speech.training import objective, steps
from jax_rnnt_speech.training.devices import Devices
from support import (
    arguments,
    asr,
    configuration,
    losses,
    prepared,
    random_model,
    run,
    saved,
    steps_of,
    weights,
)
from test_encoders import FEATURES, kinds

LAYERS, KERNEL = 2, 5
# (left, chunk, right), and frames of the first chunk that come before.
CONTEXTS = (2, 1, 0, 0), (3, 2, 1, 0), (4, 3, 2, 0), (0, 4, 0, 3), (0, 1 << 29, 0, 0)


def seen_by(layers, count, left, chunk, right, before):
    """Which of `count` frames decide each row after some layers, by loops over what a layer lets a frame see."""
    attention, convolution = np.zeros((2, count, count))
    for t in range(count):
        start = (t + before) // chunk * chunk - before
        attention[t, max(0, start - left) : start + chunk + right] = 1
        convolution[t, max(0, t - KERNEL // 2) : min(t + KERNEL // 2 + 1, start + chunk + right)] = 1
    rows = np.eye(count)
    for _ in range(layers):
        rows = convolution @ (attention @ rows)
    return rows > 0


@pytest.mark.parametrize("kind", ["conformer", "fastconformer"])
def test_contexts(kind):
    """Rows see what a context lets them see, to the bit; windows have the rows of the whole; one program serves all."""
    make, *sizes = kinds(LAYERS)[kind]
    small = {"conv_kernel_size": KERNEL, "subsampling_conv_channels": 8}  # of few channels, all may end in a ReLU
    own = {"convolution": KERNEL, "channels": 8}
    first = sizes[0].replace(**own) if kind == "conformer" else dataclasses.replace(sizes[0], **small)
    encoder = make(first, *sizes[1:], dtype=np.float32, rngs=nnx.Rngs(0))
    encoder.eval()
    graph, parameters, rest = nnx.split(encoder, nnx.Param, ...)
    rng, rate, count, traced = np.random.default_rng(1), encoder.subsampling, 23, []
    parameters = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) / max(x.shape[0], 1) ** 0.5), parameters)
    x = np.float32(rng.normal(size=(1, count * rate, FEATURES)))

    @jax.jit
    def run(x, length, context):
        traced.append(1)
        return nnx.merge(graph, parameters, rest)(x, length, context)[0]

    def rows_of(x, context):
        padded = np.pad(x, ((0, 0), (0, count * rate - x.shape[1]), (0, 0)), constant_values=1e3)
        return np.asarray(run(padded, np.array([x.shape[1]]), contexts.Context(*map(np.int32, context))))[0]

    whole = jax.jit(lambda x: nnx.merge(graph, parameters, rest)(x, np.array([count * rate]))[0])(x)[0]
    np.testing.assert_allclose(rows_of(x, contexts.WHOLE), whole, atol=2e-5)
    for context in CONTEXTS:
        rows, seen = rows_of(x, context), seen_by(LAYERS, count, *context)
        for frame in (3 * rate, 11 * rate + rate - 1, count * rate - 1):
            other = x.copy()
            other[0, frame] += 100 * rng.normal(size=FEATURES)
            inputs = [t for t in range(count) if abs(frame - t * rate) < rate]  # strided convolutions see these
            changed = (rows_of(other, context) != rows).any(-1)
            assert not (changed & ~seen[:, inputs].any(1)).any(), (context, frame)
            near = seen_by(1, count, *context)[:, inputs].any(1)  # of two layers, the last bits may stay
            assert changed[near].all(), (context, frame)
        left, chunk, right, before = context
        for start in range(-before % chunk, count, chunk):
            stop = min(start + chunk, count)
            frames = np.flatnonzero(seen[start:stop].any(0))
            begin, end = max(0, frames[0] - 1), frames[-1] + 1  # a row of features more, for strided convolutions
            part = rows_of(x[:, begin * rate : end * rate], (left, chunk, right, -(start - begin) % chunk))
            np.testing.assert_allclose(part[start - begin : stop - begin], rows[start:stop], atol=2e-5)
    assert len(traced) == 1


def test_draws():
    """Every entry of each list comes about equally often, and everything at its share; seed and step decide."""
    options = configuration(chunk=[1, 2, 7], past=[70], ahead=[0, 4], whole=0.4, encoder="conformer").encoder
    draw = jax.jit(jax.vmap(functools.partial(contexts.drawn, options), (None, 0)))
    found = np.stack(draw(3, np.arange(2000)), 1)
    np.testing.assert_array_equal(found, np.stack(draw(3, np.arange(2000)), 1))
    assert (found != np.stack(draw(4, np.arange(2000)), 1)).any()
    whole = (found == contexts.WHOLE).all(1)
    assert abs(whole.mean() - 0.4) < 4 * (0.24 / 2000) ** 0.5
    rest = found[~whole]
    assert {tuple(x) for x in rest} == {(70, a, b, 0) for a in (1, 2, 7) for b in (0, 4)}
    for column, entry, chance in ((1, 1, 1 / 3), (1, 2, 1 / 3), (2, 4, 1 / 2)):
        assert abs((rest[:, column] == entry).mean() - chance) < 4 * (chance * (1 - chance) / len(rest)) ** 0.5


def test_options(refused, tmp_path):
    """One entry is today's option, and old configurations are read; what does not fit is said."""
    old = {"encoder": {"kind": "conformer", "chunk": 8, "past": 24}}
    config = Config.from_options(**from_json(old, "old"))
    assert (config.encoder.step, config.encoder.draws) == (8, False) and contexts.drawn(config.encoder, 0, 1) is None
    assert to_json(config)["encoder"].items() >= old["encoder"].items()
    for more in ({"chunk": [8]}, {"chunk": (8,), "ahead": [0]}):
        assert Config.from_options(past=24, **more).encoder == config.encoder
    several = Config.from_options(chunk=[1, 2], past=70, ahead=[0, 4], whole=0.5)
    again = Config.from_options(**from_json(json.loads(json.dumps(to_json(several))), "new"))
    assert again == several and several.encoder.draws and several.encoder.step == 0
    assert contexts.listed(several.encoder) == ((70,), (1, 2), (0, 4))
    assert contexts.nearest(several.encoder, 1.2, 3) == (70, 1, 4, 0) and contexts.usual(several.encoder) is None
    assert contexts.usual(several.replace(whole=0).encoder) == (70, 2, 4, 0)
    for more, message in (
        ({"chunk": "1,1"}, "different ones of 1 or more such as 1,2,7, got 1,1"),
        ({"chunk": "0,2"}, "got 0,2"),
        ({"chunk": "1,x"}, "got 1,x"),
        ({"chunk": "0", "whole": "0.5"}, "needs --chunk"),
        ({"chunk": "1,2", "encoder": "convolutional"}, "need --encoder conformer or fastconformer, got convolutional"),
        ({"chunk": "4", "ahead": "2", "freeze": "encoder:1"}, "--freeze encoder:1 would keep"),
        ({"chunk": "4", "ahead": "2", "strides": "2x1,1x2"}, "need --strides of 2 or more over time"),
        ({"chunk": "4", "whole": "1.5"}, "a number of 0 or more and 1 or less, got 1.5"),
        ({"chunk": "4", "whole": "-0.1"}, "a number of 0 or more and 1 or less, got -0.1"),
        ({"chunk": "1,2", "whole": "1"}, "--whole 1 leaves no batch for --chunk: --chunk 0 is"),
        ({"ahead": "0,99", "max_seconds": "3"}, "--ahead 99 is 3.96 s, longer than all utterances (--max-seconds 3)"),
        ({"chunk": 2**40}, f"--chunk expects 1,048,576 frames at most, got {2**40}"),
        ({"chunk": 8, "past": 2**40}, f"--past expects 1,048,576 frames at most, got {2**40}"),
        ({"chunk": f"1,{2**40}", "past": 2**40}, f"--chunk {2**40} is"),
    ):
        refused(arguments(tmp_path, tmp_path / "run", **{"encoder": "conformer"} | more), message)


def test_another_way_to_hear(monkeypatch):
    """A training that begins with a model may choose what frames see, unless the model streams, or would then."""
    both, ways = {"chunk": (1, 2), "past": 4, "whole": 0.5}, {}
    for name, start in {"whole": {"chunk": 0}, "both": both, "streams": {"chunk": 8}}.items():
        config = configuration(encoder="conformer", **start)
        monkeypatch.setattr(models, "config_of", lambda folder, config=config: (config, None))
        monkeypatch.setattr(models, "kind_of", lambda folder: "run")
        for wanted in ({"chunk": 0}, {"chunk": [2, 4], "whole": 0.25}, {"chunk": 8, "whole": 0.0}):
            options = {"init": name, "train": "t", "valid": "v"} | wanted
            try:
                encoder = Config.from_options(**models.completed(options)).checked().encoder
                ways[name, str(wanted["chunk"])] = encoder.draws, encoder.step
            except UserError as error:
                ways[name, str(wanted["chunk"])] = str(error)
    refusals = {key: ways.pop(key) for key in [*ways] if isinstance(ways[key], str)}
    whole, drawn = (False, 0), (True, 0)
    assert ways == {("whole", "0"): whole, ("whole", "[2, 4]"): drawn, ("both", "0"): whole, ("both", "[2, 4]"): drawn,
                    ("streams", "8"): (False, 8)}  # fmt: skip
    assert refusals == {
        ("whole", "8"): "--chunk 8: whole has 0", ("both", "8"): "--chunk 8: both has 1,2",
        ("streams", "0"): "--chunk 0: streams has 8", ("streams", "[2, 4]"): "--chunk 2,4: streams has 8",
    }  # fmt: skip


@pytest.mark.parametrize("sizes", [{"chunk": 0, "right": 0}, {"chunk": 0.01}, {"chunk": 99, "right": 3, "left": 9}, {}])
def test_nearest(sizes):
    """Sizes of no context are those of the nearest one, which is said; less than a row is no chunk."""
    model = random_model(encoder="conformer", chunk=[1, 7], past=[3, 6], ahead=[0, 2], whole=0.5)
    assert model.seconds == 0.04
    if sizes.get("chunk", 2) < 0.02:
        with pytest.raises(UserError, match="the least chunk"):
            Windowed(model, **sizes)
    else:
        said = f"left {sizes.get('left', 0.24):g} s, chunk 0.28 s, right 0.08 s, the nearest context in which"
        assert said in Windowed(model, **sizes).said_sizes


def test_all_that_came_before():
    """A past that no utterance of the training filled makes windows no longer than the longest utterance."""
    model = random_model(encoder="conformer", chunk=[1, 7], past=10**6, whole=0.5, max_seconds=9)
    assert Windowed(model, listens=False).sizes["left"] == 9


MORE = {"encoder": "conformer", "chunk": "1,2", "past": "4", "ahead": "0,1", "whole": 0.5, "buckets": 1}


@pytest.mark.slow
def test_steps(corpus, monkeypatch):
    """The loss of each step is that in the context which the seed and the step draw, by one program for all.

    Two devices draw as one does, and so do all parts of a batch that is taken in turns.
    """
    lists = {"chunk": [1, 2], "past": 4, "ahead": [0, 1]}
    model, batch = prepared(corpus, **MORE | lists, dropout=0.0, learning_rate=0.0, steps=9)
    _, state, frozen, step_of = steps_of(model)

    @jax.jit
    def loss(params, edges, step):
        return objective.mean_loss(model, params, batch, step, context=contexts.Context(*edges))

    drawn = [tuple(map(int, contexts.drawn(model.config.encoder, 0, step))) for step in range(1, 7)]
    values = []
    for step, context in enumerate(drawn, 1):
        state, numbers = step_of(state, batch, frozen, step)
        values.append(float(numbers["loss"]))
        np.testing.assert_allclose(values[-1], loss(model.params, context, step), rtol=1e-6)
    assert len({*values}) == len({*drawn}) > 2 and step_of._cache_size() == 1
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    for seconds in (99, 1e-3):  # as a whole, or row by row
        monkeypatch.setattr(steps, "SECONDS", seconds)
        optimizer = steps.make_optimizer(model.config.optimiser, 9)
        parts, state, frozen, _ = steps_of(model, optimizer, mesh)
        places = jax.tree.map(lambda x: x.sharding, state)
        step_of = steps.make_train_step(model, parts, optimizer, places=places, cpus=2)
        for step, value in enumerate(values, 1):
            state, numbers = step_of(state, Devices(mesh).split(batch), frozen, step)
            np.testing.assert_allclose(numbers["loss"], value, rtol=1e-5)


@pytest.mark.slow
def test_a_run(corpus, tmp_path, said, refused):
    """A run that goes on draws what it would have drawn, bit for bit; another begins with a model that hears all."""
    more = MORE | {"steps": 4, "save_every": 2}
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert "1 program for 1 shape" in said(arguments(corpus, whole, **more)).out
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints/4")
    run([*arguments(corpus, part, **more), "--resume"])
    assert losses(part) == losses(whole) and len(losses(whole)) == 4
    chex.assert_trees_all_equal(weights(part), weights(whole))
    refused([*arguments(corpus, part, **more | {"chunk": "1,4"}), "--resume"], "a model with --chunk 1,2, got 1,4")
    offline = {"encoder": "conformer", "chunk": 0, "steps": 1}
    command = arguments(corpus, tmp_path / "offline", **offline)
    place = command.index("--past")
    run(command[:place] + command[place + 2 :])
    begun = ["train", "--train", corpus / "all.jsonl", "--valid", corpus / "held-out.jsonl", "--steps", 1, "--init"]
    run([*begun, tmp_path / "offline", "--chunk", "1,2", "--whole", 0.5, "--workdir", tmp_path / "tuned"])
    assert asr.models.open_model(tmp_path / "tuned").config.encoder.chunk == (1, 2)
    sound = next(corpus.rglob("*.flac"))
    said(["transcribe", "--model", tmp_path / "tuned", sound])
    error = said(["stream", "--model", tmp_path / "tuned", "--chunk", 0.05, "--right", 0, sound]).err
    assert "windows: left 2.56 s, chunk 0.04 s, right 0 s, the nearest context in which" in error


@pytest.mark.parametrize("beam", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_live(beam, monkeypatch):
    """A stream hears in the nearest context: with nothing ahead, rows and labels of the masked whole; cut anywhere.

    So it does with keywords of its own, with which the search begins anew; a beam has them from the start.
    """
    model = random_model(encoder="conformer", chunk=[2, 5], past=[3, 6], ahead=[0, 2], whole=0.5)
    room = search_options.Room(model, [], 9, 30.0, 0.5)
    own, _ = room.own(["CAB", "BC"])
    decoding = search.Decoding(beam, room=room, guarded=False)
    samples = 0.1 * np.random.default_rng(1).normal(size=12000).astype(np.float32)
    x, heard = model.features(samples), []

    @jax.jit
    def whole(params):
        network = model.network(params)
        rows, lengths = network.encode(x[None], np.array([len(x)]), contexts.Context(6, 5, 0))
        later = jnp.roll(rows, -turn, 1), lengths - turn
        pairs = ((rows, lengths), None), (later, own)
        return rows[0], [search.search(model, network, *x, decoding.of([y])) for x, y in pairs]

    turn = 0 if beam else 25  # the first row that is heard with keywords
    rows, found = whole(model.params)
    plain, preferred = (x.labels[0, : x.counts[0]].tolist() for x in found)
    preferred = plain[: (found[0].frames[0, : len(plain)] < turn).sum()] + preferred
    assert len(plain) > 10 and plain != preferred
    encoded = live.encoded
    monkeypatch.setattr(live, "encoded", lambda *inputs: heard.append(encoded(*inputs)) or heard[-1])
    sizes = {"left": 17 * model.seconds, "chunk": 4 * model.seconds, "listens": False}  # no multiple of the chunk
    for right, frames in ((0.0, 0), (3 * model.seconds, 2)):
        texts = []
        for cuts, wanted in (([], None), ([1, 700, 701, 9000], own), (range(333, 12000, 333), None)):
            stream, labels = Windowed(model, decoding, right=right, **sizes), []
            pieces = np.split(samples, cuts)
            assert stream.slots.context == (6, 5, frames, 0)
            assert f"right {frames * model.seconds:.3g} s" in stream.said_sizes
            for i, piece in enumerate(pieces):
                if wanted and stream.row == turn:
                    stream.wanted = wanted
                for step in stream.steps(piece, end=i == len(pieces) - 1):
                    ((part, unsure, count),) = stream.slots.run([step])
                    labels += part.labels
                    if not frames:
                        seen = rows[stream.row : stream.row + count]
                        np.testing.assert_allclose(heard[-1][0][0, :count], seen, atol=2e-5)
            texts.append(labels + unsure.labels)
        assert texts[0] == texts[2] != texts[1]
        assert frames or texts[:2] == [plain, preferred]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_exported(share, tmp_path, said):
    """An exported model has the labels of `transcribe`; without whole batches, both hear in the largest context."""
    pytest.importorskip("flatbuffers")
    model = random_model(encoder="conformer", chunk=[2, 3], past=3, ahead=[0, 1], whole=share)
    folder = saved(model, tmp_path / "run")
    command = ["export", tmp_path / "x.zip", "--model", folder, "--platforms", "cpu", "--seconds", 1]
    assert "it hears whole recordings: the contexts for live text" in said(command).out
    program = jax.export.deserialize(bytearray((tmp_path / "x.zip").read_bytes()))
    samples = np.float32(0.1 * np.random.default_rng(0).normal(size=(1, 8000)))
    labels, _, _, counts = program.call(samples, np.array([7000], np.int32))
    (found,) = recognise.transcribe(model, [("x", samples[0, :7000])])
    assert labels[0, : counts[0]].tolist() == found.labels and counts[0] > 10
    changed = samples.copy()
    changed[0, 6500:] = 0
    rows = [network_rows(model, x) for x in (samples, changed)]
    assert (rows[0] != rows[1]).any(-1)[0] == (share > 0)  # the first row sees the end of the whole alone


def network_rows(model, samples):
    x = model.features(samples[0])[None]
    return np.asarray(model.network(model.params).encode(x, np.array([x.shape[1]]))[0][0])


@pytest.mark.slow
async def test_served_live(capsys):
    """Streams of a server, several at once, have the words of a stream by itself, in the nearest context."""
    pytest.importorskip("aiohttp")
    from jax_rnnt_speech.cli import serve
    from jax_rnnt_speech.serving import server
    from served import talk

    model = random_model(encoder="conformer", chunk=[2, 5], past=6, ahead=[0, 2], whole=0.5)
    options = serve.Serving(name="tiny", chunk=5 * model.seconds, right=2 * model.seconds, connections=2)
    site = server.Server(model, search.GREEDY, options)
    said = f"right {2 * model.seconds:.3g} s, the nearest"
    assert said in capsys.readouterr().err
    recordings = [0.1 * np.random.default_rng(i).normal(size=9000 + i).astype(np.float32) for i in range(2)]

    async def words(client, samples):
        async with client.ws_connect("/v1/stream?rate=8000&format=float32") as stream:
            for piece in np.array_split(samples, 7):
                await stream.send_bytes(piece.tobytes())
            await stream.send_str("end")
            events = [json.loads(message.data) async for message in stream]
        assert events[-1]["type"] == "end"
        return [x["word"] for event in events if event["type"] == "words" for x in event["words"]]

    async with talk(site) as client:
        found = await asyncio.gather(*(words(client, x) for x in recordings))
    assert len(site.slots.free) == 2
    for samples, texts in zip(recordings, found):
        alone = Windowed(model, search.GREEDY, 1.0, chunk=options.chunk, right=options.right)
        assert texts == [x.text for x in alone.feed(samples) + alone.finish()] and len("".join(texts)) > 20
