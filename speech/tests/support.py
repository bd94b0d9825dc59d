"""Small models, corpora and runs of the tests."""

import contextlib
import io
import itertools
import os
import pathlib
import resource
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import sentencepiece

import jax_rnnt_speech as asr
from jax_rnnt_speech import cli, pretrained, runs  # noqa: F401
from jax_rnnt_speech.data import audio, batches, corpora
from jax_rnnt_speech.data.source import Source
from jax_rnnt_speech.model import Model, transducer  # noqa: F401
from jax_rnnt_speech.runs import checkpoints  # noqa: F401
from jax_rnnt_speech.training import devices, steps, train  # noqa: F401

TINY = {
    "rate": 8000, "mels": 6, "width": 8, "blocks": 1, "heads": 2, "expansion": 1, "convolution": 3, "channels": 2,
    "batch": 4, "buckets": 2, "time_mask": 0.2, "mel_mask": 2, "dropout": 0.1, "joint": "logits", "chunk": 4, "past": 4,
}  # fmt: skip
DAMAGES = {  # of a file
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}
GOLDEN = pathlib.Path(__file__).parent / "golden"
# Programs of this encoder compile in half of the time. For tests of anything but the encoder.
CONVOLUTIONAL = {"encoder": "convolutional"}
ABC = types.SimpleNamespace(tokens=asr.data.tokens.Characters("ABC "), subsampling=4)  # a model, for data


def configuration(**options):
    return asr.config.Config.from_options(**({"train": "t", "valid": "v"} | TINY | options))


def random_model(source=None, **options):
    """One of random weights, which writes many words: as many labels of a row as it may."""
    config = configuration(**{"seed": 3, "max_symbols": 4, **options})
    model = Model(config, asr.data.tokens.Characters("ABC "), [0.0] * 6, [1.0] * 6, source)
    larger = lambda path, x: 8 * x if "joint" in jax.tree_util.keystr(path) else x
    model.params = jax.tree_util.tree_map_with_path(larger, model.params)
    return model


def saved(model, folder):
    """The folder of a run with a checkpoint of the model."""
    run_of = runs.Run(folder)
    run_of.open()
    run_of.save(1, model.setup(), params=model.params)
    run_of.close()
    return folder


def subwords(lines, **options):
    """A vocabulary of sentencepiece, trained on a few lines."""
    file, options = io.BytesIO(), {"model_type": "bpe", "character_coverage": 1.0, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines * 20), model_writer=file, **options)
    return asr.data.tokens.Subwords(file.getvalue())


def labels_of(numbers, frames, sure=0.9, duration=1):
    """Labels in some frames, all as probable, each of so many frames."""
    rest = ([x] * len(numbers) for x in (float(np.log(sure)), sure, duration))
    return asr.recognition.results.Labels([*numbers], [*frames], *rest)


def write_audio(path, seconds, rate=8000, channels=1, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    audio.write(path, 0.1 * np.random.default_rng(seed).normal(size=(channels, int(seconds * rate))), rate)


def prepared(corpus, **options):
    """(model, a batch) of the corpus."""
    config = configuration(**options)
    tokens = asr.data.tokens.Characters("ABC ")
    data = batches.labelled(corpora.Recordings(corpus, config), tokens, 4)
    bucket = batches.make_buckets(data, config, 1)[-1]
    batch = next(batches.testing(data, config, [bucket], (0, 1)))
    batch.pop("index")
    zeros = [0.0] * config.features.mels
    return Model(config, tokens, zeros, [1.0] * config.features.mels), batch


def opened_source(config, folder, known=None, step=0):
    """A Source whose batches are for a model of `ABC`; its index and its features are in the folder."""
    kept = None if config.data.on_the_fly else folder / "kept"
    return Source(config, folder, 0, known, step, kept).opened(ABC, 1)


def steps_of(model, optimizer=None, mesh=None):
    """(parts, the first state, frozen weights, the jitted step) of a training."""
    parts = asr.training.parts.Parts(model.config, model.params)
    optimizer = optimizer or steps.make_optimizer(model.config.optimiser, model.config.run.steps, parts.factors)
    copy = lambda x: jax.tree.map(jax.numpy.array, x)  # a step takes its state's memory
    state = steps.first_state(model.config.optimiser, optimizer, copy(parts.free(model.params)))
    frozen, places = copy(parts.frozen(model.params)), None
    if mesh:
        places = asr.training.devices.placed(mesh, state, True)
        state, frozen = jax.device_put((state, frozen), (places, asr.training.devices.placed(mesh, frozen, True)))
    return parts, state, frozen, steps.make_train_step(model, parts, optimizer, places=places)


def arrays(path):
    """Of a file in NumPy's form, by name; the file is closed."""
    with np.load(path) as file:
        return dict(file)


def weights(workdir):
    """Those of the last checkpoint, one array after the other."""
    return [np.asarray(x) for x in jax.tree.leaves(asr.models.read(workdir, best=False).params)]


def losses(workdir):
    """(step, loss, norm) of the lines of metrics."""
    return [(x["step"], x["loss"], x["norm"]) for x in asr.runs.metrics_of(workdir) if "loss" in x]


def run(arguments, status=0):
    """Runs the command line in this process."""
    with pytest.raises(SystemExit) as caught:
        asr.cli.main(list(map(str, arguments)))
    assert caught.value.code == status


def arguments(corpus, workdir, **options):
    usual = {"save_every": 3, "log_every": 1, "devices": 1, "steps": 6, "learning_rate": 0.01}
    options = TINY | CONVOLUTIONAL | usual | options
    if options["encoder"] == "convolutional":  # which has none of these
        options = {name: x for name, x in options.items() if name not in ("heads", "expansion")}
    extra = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
    files = ("--train", corpus / "all.jsonl"), ("--valid", corpus / "held-out.jsonl"), ("--workdir", workdir)
    return ["train", *itertools.chain(*files), *extra]


@contextlib.contextmanager
def small_disk(size):
    """Files have no room behind so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def start(*arguments, first="pass"):
    """A process of the command line, which runs some code before; its output is in `stdout` and `stderr`."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")  # --devices decides
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        "XLA_FLAGS": flags,
        "PYTHONUNBUFFERED": "",
    }
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    program = f"import gc; from jax_rnnt_speech import cli; gc.disable(); {first}; cli.main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | settings, stdout=pipe, stderr=pipe, text=True)
