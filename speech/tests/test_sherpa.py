"""sherpa-onnx runs what `export --format sherpa-onnx` writes, and finds the texts of our own search."""

import contextlib
import importlib.util
import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_rnnt_speech.data import features
from jax_rnnt_speech.data.tokens import Characters
from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.system import UserError
from support import CONVOLUTIONAL, configuration, random_model, run, saved, subwords

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python")
sherpa_onnx = pytest.importorskip("sherpa_onnx", reason="sherpa-onnx has no wheel for this Python")

from jax_rnnt_speech.export import graph, jaxprs, sherpa  # noqa: E402  (which need onnx)

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "subsampling_conv_channels": 2}
SMALL |= {"num_hidden_layers": 1, "num_mel_bins": 6, "conv_kernel_size": 3}
FAST = {"encoder": "fastconformer", "source": {"config.json": {"encoder_config": SMALL}}, "chunk": 0}
CONFORMER, WHOLE = {"chunk": 0, "channels": 3}, CONVOLUTIONAL | {"chunk": 0}
# Every encoder, predictor, head and activation that sherpa-onnx can have, in some model; seeds that write many texts.
MODELS = {
    "icefall": CONFORMER | {"seed": 7},
    "icefall, contexts": {"chunk": (1, 2), "past": 3, "ahead": (0, 1), "whole": 0.5, "channels": 3, "seed": 7},
    "icefall, rows of 60 ms": CONFORMER | {"strides": ((3, 2), (2, 3)), "loss": "monotonic", "history": 1, "seed": 5},
    "icefall, FastConformer": FAST | {"loss": "constrained", "activation": "relu", "seed": 2},
    "icefall, convolutions": WHOLE | {"loss": "robust", "history": 3, "activation": "silu", "blocks": 2, "seed": 4},
    "icefall, pruned": WHOLE | {"loss": "pruned"},
    "icefall, wildcard": WHOLE | {"loss": "wildcard", "activation": "gelu", "seed": 2},
    "NeMo": FAST | {"predictor": "lstm", "loss": "tdt", "durations": (0, 1, 2), "activation": "relu", "seed": 1},
    "NeMo, blocks on blocks": FAST | {"stack": 2, "loss": "tdt", "history": 3, "seed": 1},
    "NeMo, two layers": CONFORMER | {"predictor": "lstm", "predictor_layers": 2, "scan": True, "blocks": 2, "seed": 2},
    "NeMo, no history": WHOLE | {"loss": "tdt", "history": 1, "seed": 8},
    "NeMo, pruned": WHOLE | {"predictor": "lstm", "loss": "pruned", "seed": 2},
    "online": {"chunk": 4, "past": 6, "blocks": 2, "seed": 5},
    "online, convolutions": CONVOLUTIONAL | {"chunk": 3, "history": 1, "loss": "monotonic", "seed": 1},
}
QUICK = "icefall", "NeMo", "online, convolutions"
QUICK_OR_SLOW = [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in MODELS]


def recordings(rate=8000):
    """Noise that comes and goes, of one frame and more; some last as long as whole steps of streams."""
    rng = np.random.default_rng(0)
    sizes = 60, 700, 2400, 5120, 6001, 8000
    return [np.float32(rng.normal(0, 0.3, n) * np.sin(np.arange(n) / rng.uniform(100, 900))) for n in sizes]


def model_of(name):
    """One of random weights, whose labels depend on the audio and on the labels before."""
    options = {"features": "sherpa-onnx", "max_symbols": 1} | MODELS[name]
    if name.startswith("NeMo"):
        options |= {"max_symbols": 10} | ({"duration_choice": "token_first"} if options.get("loss") == "tdt" else {})
    model = random_model(**options)
    frames = np.concatenate([model.extractor(x) for x in recordings()])
    model.mean, model.deviation = frames.mean(0), frames.std(0)
    embedding = model.params["predictor"]["embed"]["embedding"]
    embedding[...] = 4 * embedding[...]
    if options.get("loss") == "tdt":  # sherpa-onnx writes 5 labels of duration 0 in a frame, and ours any number
        bias = model.params["joint"]["output"]["bias"]
        bias[...] = bias[...].at[model.blank + 1].add(-3)
    return model


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """(model, folder that was exported) of a name in MODELS; by the command line in one case, and with options."""
    done = {}

    def export(name, *more):
        if (name, *more) not in done:
            folder, model = tmp_path_factory.mktemp("sherpa"), model_of(name)
            for part, file in (("start", "LICENSE"), ("run" if name == "icefall" or more else "start", "card.md")):
                (folder / part).mkdir(exist_ok=True)
                (folder / part / file).write_text(f"that of {part}")
            model.config = model.config.replace(init=f"{folder / 'start'}")
            if name == "icefall" or more:
                saved(model, folder / "run")
                run(["export", "--format", "sherpa-onnx", folder / "x", "--model", folder / "run", *more])
            else:
                (folder / "x").mkdir()
                sherpa.write(model, folder / "x", folder / "start")
            done[name, *more] = model, folder / "x"
        return done[name, *more]

    return export


def recogniser(folder, **more):
    """By the lines of README.md."""
    options = json.loads((folder / "sherpa.json").read_text())
    files = {x: str(folder / options[x]) for x in ("encoder", "decoder", "joiner", "tokens")}
    return getattr(sherpa_onnx, options.pop("class")).from_transducer(**options | files | more)


def heard(recogniser, recordings, rate=8000):
    """The texts that sherpa-onnx finds: of files in a batch, or of streams that run at once, in pieces."""
    streams, online = [], isinstance(recogniser, sherpa_onnx.OnlineRecognizer)
    for i, samples in enumerate(recordings):
        streams.append(recogniser.create_stream())
        for start in range(0, len(samples), size := 500 + 77 * i if online else len(samples)):
            streams[-1].accept_waveform(rate, samples[start : start + size])
        if online:
            streams[-1].input_finished()
    if not online:
        recogniser.decode_streams(streams)
        return [x.result.text.strip() for x in streams]
    while ready := [x for x in streams if recogniser.is_ready(x)]:
        recogniser.decode_streams(ready[:4])
    return [recogniser.get_result(x).strip() for x in streams]


def ours(model, recordings):
    """(texts, rows) of our own search and encoder, in one padded batch."""
    frames = [model.features(x) for x in recordings]
    x, lengths = np.zeros((len(frames), max(map(len, frames)) + 3, 6), np.float32), np.array([*map(len, frames)])
    for row, some in zip(x, frames):
        row[: len(some)] = some

    @jax.jit
    def compute(params, x, lengths):
        network = model.network(params)
        rows, lengths = network.encode(x, lengths)
        return rows, lengths, search(model, network, rows, lengths)

    rows, lengths, found = jax.device_get(compute(model.params, x, lengths))
    return [model.text(*y) for y in zip(found.labels, found.counts)], [y[:n] for y, n in zip(rows, lengths)]


def theirs(model, folder, recordings):
    """The rows that the encoder's file computes: of a batch with 9 behind each recording, or of a stream's steps."""
    session = onnxruntime.InferenceSession(folder / "encoder.onnx")
    frames, names = [model.extractor(x) for x in recordings], [x.name for x in session.get_inputs()]
    if model.chunk:
        step, state = model.chunk * model.subsampling, session.get_inputs()[1].shape[2]
        rows = []
        for x in frames:
            states, parts = [np.zeros((1, 1, size), np.float32) for size in (state, 1)], []
            for start in range(0, len(x), step):
                part, *states = session.run(None, dict(zip(names, [x[None, start : start + step], *states])))
                parts.append(part[0])
            rows.append(np.concatenate(parts))
        return rows
    x, lengths = np.full((len(frames), max(map(len, frames)) + 7, 6), 9, np.float32), np.array([*map(len, frames)])
    for row, some in zip(x, frames):
        row[: len(some)] = some
    nemo = json.loads((folder / "sherpa.json").read_text())["model_type"] == "nemo_transducer"
    turned = (lambda x: x.swapaxes(1, 2)) if nemo else lambda x: x
    rows, counts = session.run(None, dict(zip(names, [turned(x), lengths])))
    return [y[:n] for y, n in zip(turned(rows), counts)]


def printed(folder, samples, monkeypatch):
    """What the lines of README.md print."""
    monkeypatch.chdir(folder)
    lines = (folder / "README.md").read_text().partition("In Python")[2].splitlines()
    code = "\n".join(x[4:] for x in lines if x.startswith("    "))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"rate": 8000, "samples": samples})
    return out.getvalue().strip()


@pytest.mark.parametrize("name", QUICK_OR_SLOW)
def test_texts_and_rows(exported, name, monkeypatch):
    """Those of every recording, alone and in a batch; a beam's texts; and those of the lines in README.md."""
    model, folder = exported(name)
    samples = whole = recordings()
    if model.chunk:  # a step is heard once a frame follows it
        step = 80 * model.chunk * model.subsampling
        whole = [np.pad(x, (0, step + -len(x) % step)) for x in samples]
        samples = [np.pad(x, (0, 80)) for x in whole]
    texts, rows = ours(model, whole)
    found = heard(recogniser(folder), samples)
    assert found == texts
    assert len({*found}) >= 5
    assert found == [y for x in samples for y in heard(recogniser(folder), [x])]
    assert sum(map(bool, heard(recogniser(folder, decoding_method="modified_beam_search"), samples))) >= 4
    assert printed(folder, samples[-1], monkeypatch) == texts[-1]
    for mine, other in zip(rows, theirs(model, folder, whole), strict=True):
        np.testing.assert_allclose(other, mine, atol=1e-4)
    readme, texts = (folder / "README.md").read_text(), [(folder / x).read_text() for x in ("LICENSE", "card.md")]
    assert texts[0] == "that of start" and texts[1].startswith("that of ")
    assert all(x in readme for x in ("LICENSE", "card.md", "8,000 samples", "6 features"))
    assert ("It hears whole recordings" in readme) == (name == "icefall, contexts")


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_large_and_small_files(exported, name, monkeypatch):
    """Arrays in a second file, as if the first were too large, have the same texts; int8 has products of its own."""
    _, folder = exported(name)
    found = heard(recogniser(folder), recordings())
    monkeypatch.setattr(graph, "LIMIT", 1000)
    _, large = exported(name, "--checkpoint", "last")
    assert (large / "encoder.onnx.data").is_file() and heard(recogniser(large), recordings()) == found
    _, small = exported(name, "--quantize", "int8")
    operators = {x.op_type for part in sherpa.PARTS for x in onnx.load(small / f"{part}.onnx").graph.node}
    assert "MatMulInteger" in operators and any(heard(recogniser(small), recordings()))


NUMBERS = "add", "sub", "mul", "div", "max", "min", "pow", "lt", "gt", "le", "ge", "eq", "ne", "rem"
OTHERS = {"and": "bitwise_and", "or": "bitwise_or", "not": "bitwise_not"}


def every_primitive(x, y, k):
    """Results of all primitives that have an operator, and of others in several ways; x, y [B, 4], k [B]."""
    cube, mask = jnp.stack([x, y, x * y], 1), jnp.arange(x.shape[0]) < k
    z = jnp.abs(x) + 0.5
    yield from (getattr(lax, name)(z, y) for name in NUMBERS)
    singles = {*jaxprs.OPERATORS} - {*NUMBERS, *OTHERS}
    yield from (getattr(lax, name)(z if name in ("log", "sqrt") else x) for name in sorted(singles))
    yield from (lax.bitwise_and(x > 0, y > 0), lax.bitwise_or(x > 0, y > 0), lax.bitwise_not(x > 0))
    yield from (x**3, lax.rsqrt(z), lax.erfc(x), jnp.clip(x, -0.5, 0.5), jnp.where(mask[:, None], x, -1), (k - 9) >> 2)
    yield from (jax.nn.gelu(x, approximate=False), jax.nn.softmax(x), x.sum(0), cube.max(1), jnp.square(x).sum((0, 1)))
    yield from (
        x.reshape(-1, 2),
        x.T,
        jnp.concatenate([x, y], 0),
        *jnp.split(x, [1, 3], 1),
        x[:, ::3],
        x[:, 1],
        x[..., :2],
    )
    yield lax.pad(x, 2.0, ((1, 0, 0), (-1, 2, 0)))
    yield from (y @ x.T, jnp.einsum("bij,bkj->bik", cube, cube), jnp.einsum("bij,bkj->ik", cube, cube))
    yield from (jnp.einsum("bij,jk->bik", cube, jnp.ones((4, 2))), jnp.einsum("bij,bj->bi", cube, y))
    yield jnp.arange(20.0).reshape(10, 2)[k] + jnp.broadcast_to(jnp.arange(2), (x.shape[0], 2))
    sizes = {"window_strides": (2,), "padding": [(1, 2)], "rhs_dilation": (2,), "feature_group_count": 2}
    kernel = jnp.arange(12.0).reshape(3, 1, 4)
    yield lax.conv_general_dilated(cube[..., :2], kernel, **sizes, dimension_numbers=("NHC", "HIO", "NHC"))
    yield jnp.concatenate([x, jnp.broadcast_to(y[:1], x.shape)])
    batch = x.shape[0]
    yield jnp.array([batch * (batch - 1) // 2, jnp.maximum(3 - batch, -(batch**2)) % 4, (4 - batch**2) // 2])


def test_primitives_are_those_of_jax(tmp_path):
    """Also for sizes that no file knows; a primitive that has no operator is named."""
    rng = np.random.default_rng(0)
    x, y = np.float32(rng.normal(size=(2, 5, 4)))
    k = np.arange(5)[::-1].copy()
    expected = [*map(np.asarray, every_primitive(x, y, k))]
    outputs = {f"out{i}": (x.dtype.name, ["?"] * x.ndim) for i, x in enumerate(expected)}
    inputs = {"x": ("float32", ("B", 4)), "y": ("float32", ("B", 4)), "k": ("int64", ("B",))}
    part = sherpa.Part(lambda *x: [*every_primitive(*x)], inputs, outputs, {})
    part.write(tmp_path / "x.onnx")
    found = onnxruntime.InferenceSession(tmp_path / "x.onnx").run(None, {"x": x, "y": y, "k": k})
    for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{i}")
    with pytest.raises(UserError, match="computes sort, which"):
        part._replace(function=lambda x, y, k: [jnp.sort(x)]).write(tmp_path / "y.onnx")


REFUSED = {
    "Whisper's encoder": {"encoder": "whisper"},
    "Nemotron's encoder": {"encoder": "fastconformer", "chunk": 14},
    "--loss multiblank": {"loss": "multiblank"},
    "--loss hat": {"loss": "hat"},
    "--loss ctc": {"loss": "ctc"},
    "--predictor lstm and --loss monotonic": {"predictor": "lstm", "loss": "monotonic"},
    "--chunk and": {"chunk": 4, "loss": "tdt"},
    "--chunk and --predictor lstm": {"chunk": 4, "predictor": "lstm"},
    "--durations 0,2, which must be 0, 1, 2": {"loss": "tdt", "durations": (0, 2)},
    "--features nemo, .* train --init runs/a --features sherpa-onnx": {"features": "nemo"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_models_without_a_form(words):
    options = {"features": "sherpa-onnx", "chunk": 0} | REFUSED[words]
    model = types.SimpleNamespace(config=configuration(**options), chunk=options["chunk"])
    with pytest.raises(UserError, match=words):
        sherpa.check(model, "runs/a")


def test_blocks_on_an_encoder_that_streams():
    """They see all of a recording, so the form and the features are those of models that do."""
    config = configuration(features="sherpa-onnx", encoder="fastconformer", chunk=14, stack=2, predictor="lstm")
    model = types.SimpleNamespace(config=config, chunk=0)
    assert sherpa.check(model, "runs/a").model_type == "nemo_transducer" and features.extractor(config).nemo


def test_tokens():
    assert sherpa.tokens_of(Characters("AÉ "), True) == "<blk> 0\nA 1\nÉ 2\n▁ 3\n"
    words = subwords(["ab ac", "bc ab"], vocab_size=8)
    lines = sherpa.tokens_of(words, False).splitlines()
    assert lines[:3] == ["<unk> 0", "<s> 1", "</s> 2"] and lines[-1] == "<blk> 8"
    assert [x.split()[0] for x in lines[3:-1]] == words.pieces[3:]
    for alphabet in ("A\t", "▁ "):
        with pytest.raises(UserError, match="cannot write label 1"):
            sherpa.tokens_of(Characters(alphabet), True)


def test_options(talkative, tmp_path, refused, monkeypatch):
    """What one format has, the other has not; the folder that is written holds nothing else; a package is missing."""
    command = ["export", tmp_path / "x", "--model", talkative]
    refused([*command, "--quantize", "int8"], "--quantize needs --format sherpa-onnx")
    refused([*command, "--format", "sherpa-onnx", "--seconds", 3], "--seconds needs --format stablehlo")
    refused([*command, "--format", "sherpa-onnx", "--dtype", "bfloat16"], "float32")
    (tmp_path / "x").mkdir()
    (tmp_path / "x/y").write_text("")
    refused([*command, "--format", "sherpa-onnx"], "--overwrite")
    refused([*command, "--format", "sherpa-onnx", "--overwrite"], "--features log-mel")
    refused(["export", tmp_path / "new/parents/x", *command[2:], "--format", "sherpa-onnx"], "--features log-mel")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["x"]  # a folder that is not written has no parents either
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused([*command, "--format", "sherpa-onnx"], "needs onnx: pip install 'jax_rnnt_speech[export]'")
