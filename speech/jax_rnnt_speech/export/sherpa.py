"""Writes models as folders for sherpa-onnx, in the forms that it knows.

icefall's form is for stateless predictors, with one label a frame at most; NeMo's for LSTM predictors and TDT; the
online one for encoders that stream. B sequences, T feature frames of F features, N rows of E numbers, P numbers of a
predictor's row, C classes and durations. What goes in and out is known by its place, and not by its name.
"""

import contextlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.flatten_util import ravel_pytree

import jax_rnnt
from jax_rnnt_speech import models
from jax_rnnt_speech.export.graph import Graph
from jax_rnnt_speech.export.jaxprs import Emitter, Tensor
from jax_rnnt_speech.system import UserError, as_user_error, refuse_if

PARTS = "encoder", "decoder", "joiner"
LICENCES = "LICENSE*", "LICENCE*", "NOTICE*", "card.md", "README.md"  # the last one is a card on Hugging Face
F, I, L = "float32", "int32", "int64"
UNWRITTEN = re.compile(r"[\s\ud800-\udfff]", re.ASCII)  # parts of characters are surrogates


class Part(NamedTuple):
    """A graph: its function, and {name: (type, shape)} of inputs and outputs, with letters for sizes.

    With a `unit`, T frames are padded to a multiple of it, and to two at least, before the function sees them.
    """

    function: Callable
    inputs: dict
    outputs: dict
    metadata: dict
    unit: int = 0

    def write(self, path):
        graph, values, avals, scope = Graph(), [], [], export.SymbolicScope()
        for name, (_, shape) in self.inputs.items():
            for axis, size in enumerate(shape):
                if isinstance(size, str):
                    graph.symbols.setdefault(size, graph.size_of(name, axis))
        if unit := self.unit:
            frames = graph.symbols["T"]
            graph.symbols["N"] = ((frames + (unit - 1)) // unit - 1).by("Max", 1)
            padding = (graph.symbols["N"] + 1) * unit - frames
        for name, (dtype, shape) in self.inputs.items():
            if unit and "T" in shape:
                name = graph.node("Pad", name, graph.sizes([0] * len(shape) + [padding * (x == "T") for x in shape]))
            text = ", ".join(f"{unit} * N + {unit}" if unit and x == "T" else f"{x}" for x in shape)
            avals.append(jax.ShapeDtypeStruct(export.symbolic_shape(text, scope=scope), dtype.replace("64", "32")))
            values.append(Tensor(graph.cast(name, avals[-1].dtype), avals[-1].shape))
        closed, emitter = jax.make_jaxpr(self.function)(*avals), Emitter(graph)
        results = emitter.run(closed.jaxpr, closed.consts, values)
        for x, var, (name, (dtype, _)) in zip(results, closed.jaxpr.outvars, self.outputs.items(), strict=True):
            graph.result(emitter.whole(x, var.aval.shape), name, dtype)
        graph.save(path, self.inputs, self.outputs, self.metadata)


def icefall(model, network):
    """Returns the parts of icefall's form, where the blank is the first class."""
    blank, history, encoder, state = model.blank, network.predictor.history, *sizes_of(network)

    def encode(x, lengths):
        return network.encode(model.standardised(x), lengths)

    def predict(labels):  # 0 and, in a beam, -1 are the start, which is the blank
        return network.predictor.rows(jnp.where(labels <= 0, blank, labels - 1))

    def join(rows, states):
        return jnp.roll(network.joint(rows, states), 1, -1)

    rows, states = {"encoder_out": (F, ("B", encoder))}, {"decoder_out": (F, ("B", state))}
    return {
        "encoder": Part(
            encode, {"x": (F, ("B", "T", len(model.mean))), "x_lens": (L, ("B",))},
            {"encoder_out": (F, ("B", "N", encoder)), "encoder_out_lens": (L, ("B",))},
            {"model_type": "conformer"}, model.subsampling,
        ),
        "decoder": Part(
            predict, {"y": (L, ("B", history))}, states, {"context_size": history, "vocab_size": model.classes}
        ),
        "joiner": Part(join, rows | states, {"logit": (F, ("B", model.classes))}, {"joiner_dim": state}),
    }  # fmt: skip


def online(model, network):
    """Returns the parts of the online form, whose encoder keeps its past in the first of two states of zeros.

    The streams of a batch began at different times, so each is a batch of its own.
    """
    frames, features, start = network.encoder.frames_of_step(None), len(model.mean), network.encoder.initial(1)
    flat, unflatten = ravel_pytree(jax.tree.map(lambda x: x.astype(F), start))
    assert not flat.any()

    def step(x, state):
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), unflatten(state), start)
        rows, _, after = network.encoder.step(model.standardised(x)[None], jnp.full(1, frames), state)
        return rows[0], jnp.concatenate([x.astype(F).reshape(-1) for x in jax.tree.leaves(after)])

    def encode(x, states, others):
        rows, states = jax.vmap(step)(x, states[0])
        return rows, states[None], others

    shapes, encoder = {"states": (F, (1, "B", flat.size)), "others": (F, (1, "B", 1))}, sizes_of(network)[0]
    metadata = {"model_type": "lstm", "num_encoder_layers": 1, "d_model": flat.size, "rnn_hidden_size": 1}
    outputs = {"encoder_out": (F, ("B", frames // model.subsampling, encoder))}
    outputs |= {f"next_{name}": x for name, x in shapes.items()}
    return icefall(model, network) | {"encoder": Part(
        encode, {"x": (F, ("B", frames, features))} | shapes, outputs,
        metadata | {"T": frames, "decode_chunk_len": frames},
    )}  # fmt: skip


def nemo(model, network):
    """Returns the parts of NeMo's form, where the blank is the last label, and durations follow."""
    predictor, blank, features, (encoder, state) = network.predictor, model.blank, len(model.mean), sizes_of(network)
    lstm = model.config.head.predictor == "lstm"
    layers, width = (predictor.layers, state) if lstm else (max(predictor.history - 1, 1), 1)

    def encode(x, lengths):
        rows, lengths = network.encode(model.standardised(x.swapaxes(1, 2)), lengths)
        return rows.swapaxes(1, 2), lengths

    def lstm_step(labels, count, hidden, cell):
        row, state = predictor.step([(cell[i], hidden[i]) for i in range(layers)], labels[:, 0])
        cell, hidden = map(jnp.stack, zip(*state))
        return row[..., None], count, hidden, cell

    def stateless_step(labels, count, past, unused):
        """Keeps past labels minus the blank, which is the start, so that a state of zeros begins."""
        last = [*(past[i, :, 0].astype(I) + blank for i in range(predictor.history - 1)), labels[:, 0]]
        after = jnp.stack(last[1:] or last)[..., None] - blank
        return predictor.rows(jnp.stack(last, -1))[..., None], count, after.astype(F), unused

    def join(rows, states):
        return network.joint(rows[..., 0], states[..., 0])[:, None, None]

    length = {"length": (I, ("B",))}
    inputs, outputs = ({f"{x}_{i}": (F, (layers, "B", width)) for i in range(2)} for x in ("state", "next_state"))
    rows, states = {"encoder_output": (F, ("B", encoder, 1))}, {"decoder_output": (F, ("B", state, 1))}
    metadata = {
        "model_type": "EncDecRNNTBPEModel", "vocab_size": blank, "normalize_type": "", "pred_rnn_layers": layers,
        "pred_hidden": width, "subsampling_factor": model.subsampling, "feat_dim": features,
        "url": "tdt" if model.config.head.loss == "tdt" else "",
    }  # fmt: skip
    return {
        "encoder": Part(
            encode, {"audio_signal": (F, ("B", features, "T")), "length": (L, ("B",))},
            {"outputs": (F, ("B", encoder, "N")), "encoded_lengths": (L, ("B",))}, metadata, model.subsampling,
        ),
        "decoder": Part(
            lstm_step if lstm else stateless_step, {"targets": (I, ("B", 1))} | length | inputs,
            states | {"next_length": (I, ("B",))} | outputs, {},
        ),
        "joiner": Part(join, rows | states, {"logits": (F, ("B", 1, 1, model.classes))}, {}),
    }  # fmt: skip


OFFLINE = """\
    stream.accept_waveform(rate, samples)
    recogniser.decode_stream(stream)
    print(stream.result.text)"""
ONLINE = """\
    stream.accept_waveform(rate, samples)  # once, or as they come
    stream.input_finished()  # after the silence behind the last ones
    while recogniser.is_ready(stream):
        recogniser.decode_stream(stream)
    print(recogniser.get_result(stream))"""


class Form(NamedTuple):
    """A form: its parts, whether its blank comes first, and the parts of sherpa-onnx that run it."""

    parts: Callable
    name: str
    blank_first: bool
    model_type: str
    program: str
    recogniser: str
    lines: str  # lines of Python


FORMS = {
    "icefall": Form(icefall, "icefall's", True, "transducer", "sherpa-onnx-offline", "OfflineRecognizer", OFFLINE),
    "NeMo": Form(nemo, "NeMo's", False, "nemo_transducer", "sherpa-onnx-offline", "OfflineRecognizer", OFFLINE),
    "online": Form(online, "the online", True, "lstm", "sherpa-onnx", "OnlineRecognizer", ONLINE),
}


def sizes_of(network):
    """Returns (E, P)."""
    return network.joint.encoder.in_features, network.joint.predictor.in_features


def check(model, folder):
    """The Form of a model; raises where there is none, or where the model, of a folder, has other features."""
    config = model.config
    refuse_if(config.formless, config.formless)
    if config.features.kind != "sherpa-onnx":
        had = f"{folder} was trained with --features {config.features.kind}"
        raise UserError(f"{had}, and sherpa-onnx computes others, which no option changes: train with --features "
                        "sherpa-onnx, or let this model go on with them by "
                        f"rnnt-speech train --init {folder} --features sherpa-onnx")  # fmt: skip
    return FORMS["online" if config.streams else "NeMo" if config.nemo_form else "icefall"]


def tokens_of(vocabulary, blank_first):
    """Returns the text of tokens.txt. Labels that write nothing, as </s>, have their names."""
    symbols = {"<blk>": None}
    for label, (text, piece) in enumerate(zip(vocabulary.texts, vocabulary.pieces)):
        symbol = "<unk>" if label == vocabulary.unknown else (text or piece or f"<{label}>").replace(" ", "▁")
        if UNWRITTEN.search(symbol) or symbol in symbols:
            raise UserError(f"sherpa-onnx cannot write label {label}, {piece!r}: it needs whole characters, no white "
                            "space, that are those of no other label")  # fmt: skip
        symbols[symbol] = None
    blank, *others = symbols
    symbols = [blank, *others] if blank_first else [*others, blank]
    return "".join(f"{symbol} {i}\n" for i, symbol in enumerate(symbols))


def origins(folder):
    """Yields the folder of a model, and those that its training started from, as far as they are here."""
    with contextlib.suppress(UserError):
        while folder.is_dir():
            yield folder
            init = models.config_of(folder)[0].run.init
            if not init:
                return
            folder = Path(init)


def copy_licences(folder, new):
    """Copies licences and cards of the weights, the nearest ones of each name; returns their names."""
    copied = []
    for place in origins(folder):
        for file in (x for pattern in LICENCES for x in sorted(place.glob(pattern)) if x.is_file()):
            name = file.name.replace("README.md", "card.md")
            if name not in copied:
                shutil.copyfile(file, new / name)
                copied.append(name)
    return copied


def quantize(exact, folder):
    """Writes the graphs of a folder into another one, with matrices of int8."""
    with as_user_error("--quantize needs onnxruntime", ModuleNotFoundError):
        from onnxruntime.quantization import quantize_dynamic
    logging.getLogger().addFilter(lambda x: "pre-processing before quantization" not in x.msg)  # it changes nothing
    for part in PARTS:
        quantize_dynamic(exact / f"{part}.onnx", folder / f"{part}.onnx", op_types_to_quantize=["MatMul"])


def readme(model, form, settings, copied):
    """Returns the text of the folder's readme."""
    row = 1000 * model.seconds
    most = "one label" if form.blank_first else "5 labels" if model.config.head.loss == "tdt" else "10 labels"
    notes = [f"Recordings have {model.extractor.rate:,} samples a second; others are resampled. A row of the encoder "
             f"is {row:g} ms, in which the greedy search writes {most} at most."]  # fmt: skip
    if model.chunk:
        step = model.chunk * model.seconds + 0.01
        notes += [f"A step of a stream takes {step:g} s: give it as much silence behind the last samples."]
    if model.config.encoder.draws:
        notes += ["It hears whole recordings, and not the contexts for live text in which the model was trained too."]
    if form.blank_first and model.subsampling != 4:
        notes += [f"sherpa-onnx counts rows of 40 ms: multiply its times of labels by {row / 40:g}."]
    if copied:
        notes += [f"For the weights, see {', '.join(copied)}."]
    flags = [f"--{part}={part}.onnx" for part in PARTS] + ["--tokens=tokens.txt", f"--model-type={form.model_type}"]
    flags += [f"--sample-rate={settings['sample_rate']}", f"--feat-dim={settings['feature_dim']}"]
    return (Path(__file__).parent / "readme.txt").read_text("utf-8").format(
        version=jax_rnnt.__version__, name=form.name, mels=len(model.mean), labels=len(model.tokens.pieces),
        notes="\n".join(f"* {x}" for x in notes), program=form.program, flags=" \\\n      ".join(flags),
        lines=form.lines,
    )  # fmt: skip


def write(model, folder, source, int8=False):
    """Writes the files of a model, which came from the folder `source`, into another one."""
    form, network = check(model, source), model.network(model.params)
    network.set_attributes(grouped=True, scan=False, remat=False, raise_if_not_found=False)
    tokens = tokens_of(model.tokens, form.blank_first)
    settings = {part: f"{part}.onnx" for part in PARTS} | {"tokens": "tokens.txt", "model_type": form.model_type}
    settings |= {"sample_rate": model.extractor.rate, "feature_dim": len(model.mean)}
    comment = f"{form.name} form, sherpa-onnx's {len(model.mean)} features of {model.extractor.rate} samples a second"
    about = {"version": 1, "model_author": f"rnnt-speech {jax_rnnt.__version__}", "comment": comment}
    with tempfile.TemporaryDirectory(dir=folder) as exact:
        for part, graph in form.parts(model, network).items():
            graph._replace(metadata=about | graph.metadata).write((Path(exact) if int8 else folder) / f"{part}.onnx")
        if int8:
            quantize(Path(exact), folder)
    (folder / "tokens.txt").write_text(tokens, "utf-8")
    (folder / "sherpa.json").write_text(json.dumps({"class": form.recogniser} | settings, indent=2) + "\n", "utf-8")
    copied = copy_licences(source, folder)
    (folder / "README.md").write_text(readme(model, form, settings, copied), "utf-8")
