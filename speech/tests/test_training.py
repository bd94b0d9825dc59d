"""The encoder with padding and in chunks; steps, runs that resume exactly, and checked options."""

import itertools
import json
import re
import shutil
import types

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from jax_rnnt_speech import runs
from jax_rnnt_speech.data import batches
from jax_rnnt_speech.data.source import Source
from jax_rnnt_speech.model import WEIGHTS, Model
from jax_rnnt_speech.runs import checkpoints
from jax_rnnt_speech.system import hosts, outputs
from jax_rnnt_speech.training import evaluation, objective, record, steps, train
from support import CONVOLUTIONAL, arguments, configuration, losses, prepared, run, steps_of, weights, write_audio


def test_steps_that_are_not_finite(corpus):
    """A NaN changes neither weights nor optimiser, and is counted; of an update, it is left out alone."""
    model, batch = prepared(corpus, accumulate=2, warmup=0.0, average=0.9, **CONVOLUTIONAL)
    _, state, frozen, step = steps_of(model)
    bad = batch | {"features": np.where(np.arange(batch["features"].shape[1])[:, None] == 3, np.nan, batch["features"])}
    results, weights, averages = [], [], []
    for one in (batch, batch, batch, bad, batch, batch, batch):  # warm-up: the first update has the rate 0
        state, numbers = step(state, one, frozen, 1)
        results.append(int(numbers["skipped"]))
        for name, found in ("weights", weights), ("average", averages):
            found.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(state[name]))]))
    assert results == [0, 0, 0, 1, 1, 1, 1] and np.isfinite(weights).all()
    moved = [bool((a != b).any()) for a, b in itertools.pairwise(weights)]
    assert moved == [False, False, False, True, False, True]
    assert (averages[4] == averages[5]).all() and (averages[5] != averages[6]).any()  # it follows updates alone


def test_statistics_of_a_step_that_is_not_finite(monkeypatch):
    """Those of norms come in the place of a gradient, and stay as they were before."""
    loss = lambda model, params, batch, *_: batch["features"] * (params["weight"] + params["x/norm/mean"])
    monkeypatch.setattr(objective, "mean_loss", loss)
    model, parts = types.SimpleNamespace(config=configuration()), types.SimpleNamespace(whole=lambda free, _: free)
    optimizer = steps.make_optimizer(model.config.optimiser, 9)
    weights = {name: jax.numpy.zeros(()) for name in ("weight", "x/norm/mean")}
    state = steps.first_state(model.config.optimiser, optimizer, weights)
    step = steps.make_train_step(model, parts, optimizer)
    for x in (3.0, np.nan):
        state, _ = step(state, {"features": x, "valid": np.ones(1, bool)}, {}, 1)
        assert state["weights"]["x/norm/mean"] == 3


def test_dropout_follows_the_step(corpus):
    model, batch = prepared(corpus, dropout=0.5)
    loss = jax.jit(lambda step, valid: objective.mean_loss(model, model.params, batch | {"valid": valid}, step))
    every = batch["valid"]
    assert loss(1, every) == loss(1, every) != loss(2, every)
    first = every & (np.arange(len(every)) == 0)  # means are of the rows that count
    total = sum(float(loss(1, some)) * some.sum() for some in (first, every & ~first))
    assert every.sum() > 1 and float(loss(1, every)) == pytest.approx(total / every.sum(), rel=1e-5)


def test_shapes_are_those_of_the_network(corpus):
    """A network that is only asked for its shapes, whose keys are not counted, is the one that is trained."""
    model, _ = prepared(corpus, dropout=0.5)
    graph, shapes, noise = nnx.split(nnx.eval_shape(model.made), WEIGHTS, ...)
    assert (graph, shapes) == (model.graphdef, model.shapes)
    assert jax.tree.structure(noise) == jax.tree.structure(model.noise)


def test_a_run(trained):
    """Three epochs compile no more than their shapes; error rates and logs are there."""
    workdir, out = trained
    assert "2 programs for 2 shapes of batches" in out and "padding" in out and "held-out CER" in out
    assert list((workdir / "tensorboard").glob("events*")) and [x[0] for x in losses(workdir)] == [1, 2, 3, 4, 5, 6]


def test_reads_that_fail(corpus, trained, tmp_path, monkeypatch, said):
    """The step before them is saved; a run that goes on logs means over whole intervals, and has the same weights.

    Once a batch cannot be read, and once a test's. Truth: the uninterrupted run, which logs each step.
    """
    command, read, testing = arguments(corpus, tmp_path / "run", log_every=4), Source.read, batches.testing

    def fails(*_):
        raise OSError(5, "Input/output error", "a.tar")

    def two(self, first, end, **options):
        yield from itertools.islice(read(self, first, end, **options), 2)
        if first < end:  # a checkpoint reads none
            fails()

    for fault, step in ((Source, "read", two), 2), ((batches, "testing", fails), 3), ((batches, "testing", testing), 6):
        monkeypatch.setattr(*fault)
        out = said([*command, *["--resume"] * (step > 2)], 0 if step == 6 else 2)
        saved = f"a.tar'; step {step} is saved: rnnt-speech train --workdir {tmp_path}/run --resume goes on"
        assert step == 6 or (saved in out.err and len(out.err.splitlines()[-1:]) == 1), out.err
        assert f"{step}" in {x.name for x in (tmp_path / "run/checkpoints").iterdir()}
        monkeypatch.setattr(Source, "read", read)
    found, every = losses(tmp_path / "run"), [x for _, x, _ in losses(trained[0])]
    assert [x[:2] for x in found] == [(4, pytest.approx(np.mean(every[:4]))), (6, pytest.approx(np.mean(every[4:])))]
    chex.assert_trees_all_equal(weights(tmp_path / "run"), weights(trained[0]))


def test_resume_is_exact(corpus, trained, tmp_path, said, signals):
    """A run that Ctrl-C ends in step 2, before any test, goes on with the same losses and weights, bit for bit."""
    workdir = tmp_path / "run"
    (tmp_path / "hook.py").write_text(
        "import os\nend = lambda i, x: i == 1 and 'loss' in x and os.kill(os.getpid(), 2)\n"
    )
    for name in ("left-out-train7.tsv", "best/1", "cache/of-another/arrays"):
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_bytes(bytes(10**6))
    out, error = said([*arguments(corpus, workdir), "--overwrite", "--hook", f"{tmp_path}/hook.py:end"], 130)
    assert error.endswith(f"interrupted; step 2 is saved: rnnt-speech train --workdir {workdir} --resume goes on\n")
    assert f"cache: 1.0 MB of other settings are removed from {workdir}/cache" in out
    assert {x.name for x in workdir.glob("*.*")} == {"metrics.jsonl", "left-out-train.tsv", "left-out-valid.tsv"}
    assert len(list((workdir / "cache").glob("*/"))) == 2
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # what a process that dies leaves
    run([*arguments(corpus, workdir), "--resume"])
    assert losses(workdir) == losses(trained[0]) and {x.name for x in (workdir / "checkpoints").iterdir()} == {"3", "6"}
    chex.assert_trees_all_equal(weights(workdir), weights(trained[0]))


@pytest.fixture
def ended(trained, tmp_path):
    """The folder of a run that has ended, which a test may change."""
    return shutil.copytree(trained[0], tmp_path / "run")


def test_an_earlier_run(corpus, ended, tmp_path, refused):
    """It is neither deleted nor continued otherwise without being asked; one that has ended writes nothing."""
    command, alone, relu = arguments(corpus, ended), tmp_path / "alone", tmp_path / "relu.json"
    relu.write_text('{"head": {"activation": "relu"}}')
    earlier, before = losses(ended), {path: path.read_bytes() for path in ended.glob("*.*")}
    shutil.copytree(ended, alone)
    shutil.rmtree(alone / "checkpoints")  # as of a run that ended before its first checkpoint
    for changed, message in (
        ([], "holds an earlier run: continue it with --resume, or delete it with --overwrite"),
        (["--resume", "--learning-rate", 0.02], "--learning-rate 0.01, got 0.02: --change allows that"),
        (["--resume", "--change", "--width", 16], "holds a model with --width 8, got 16"),
        (["--resume", "--change", "--strides", "2x2"], "holds a model with --strides 2x2,2x2, got 2x2"),
        (["--resume", "--change", "--accumulate", 2], "with --accumulate 1, which 2 does not fit"),
        (["--resume", "--change", "--batch-norm", "batch"], "with --batch-norm frozen, which batch does not"),
        (["--resume", "--config", relu], "run holds a model with head.activation tanh, got relu"),
        (["--resume", "--steps", 0], "--steps 0 trains nothing: `rnnt-speech test` evaluates a run"),
        (["--workdir", alone], "alone holds an earlier run"),
    ):
        refused([*command, *changed], message)
    refused(["train", "--workdir", tmp_path / "typo", "--resume"], "typo has no checkpoint: train first")
    run([*command, "--overwrite", "--train", corpus / "nowhere"], 2)  # deletes nothing either
    assert (ended / "checkpoints" / "6").is_dir()
    run([*command, "--resume"])  # has ended: it is tested
    assert before == {x: x.read_bytes() for x in ended.glob("*.*")} and losses(alone) == losses(ended) == earlier


def test_a_run_after_a_power_cut(corpus, trained, ended, said):
    """A byte of the last checkpoint has changed, and there are marks in the metrics, which are no part of the state."""
    file = max((ended / "checkpoints/6/training").rglob("*"), key=lambda x: x.stat().st_size * x.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    lines = (ended / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    marks = b'{"step": 3, "lo{"step": 3}\n\xe4[]\n7\n'
    damaged = [*lines[:2], bytes(30), *lines[2:3], marks, *lines[3:-1], lines[-1][:-9]]
    (ended / "metrics.jsonl").write_bytes(b"".join(damaged))
    error = said([*arguments(corpus, ended), "--resume"]).err
    assert f"{ended}: checkpoints/6 is damaged (training/" in error
    assert "has changed): checkpoints/3 is used\n" in error
    assert f"{ended}/metrics.jsonl: damaged lines are left out: 4, 5, 6, 11\n" in error
    assert losses(ended) == losses(trained[0])
    chex.assert_trees_all_equal(weights(ended), weights(trained[0]))


@pytest.mark.slow
def test_resume_is_exact_with_everything(corpus, tmp_path, monkeypatch, said):
    """CR-CTC, averaged weights, speeds, noise, masks, dropout, accumulation, cached rows, bfloat16, rates, subwords.

    No weights are drawn for what a checkpoint has, rows of the cache among it.
    """
    (tmp_path / "text.txt").write_text("A BC\nCAB\nX\n")
    write_audio(tmp_path / "noise/a.wav", 1.0, seed=99)
    more = {"encoder": "conformer", "blocks": 2, "ctc": 0.3, "average": 0.9, "speeds": "0.9,1.1", "gain": 3.0,
            "noise": tmp_path / "noise", "snr": "0,10", "accumulate": 2, "freeze": "encoder:1", "dtype": "bfloat16",
            "rates": "joint=0.5,predictor=0", "text": tmp_path / "text.txt", "buckets": 1, "steps": 4,
            "save_every": 3, "tokens": "subwords", "vocabulary": 8, "cr_ctc": 0.2}  # fmt: skip
    whole, part = tmp_path / "whole", tmp_path / "part"
    error = said(arguments(corpus, whole, **more)).err
    assert "compiling: a step of training, 4 x 21 frames" in error  # rows: a fourth of the features, at speed 0.9
    assert len([x for x in (whole / "cache").iterdir() if x.is_dir()]) == 3  # features of both corpora, and rows
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints/4")
    shutil.rmtree(part / "cache")  # what is made anew has the same bits
    monkeypatch.delattr(Model, "params")  # that draws them
    run([*arguments(corpus, part, **more), "--resume"])
    assert losses(part) == losses(whole) and len(losses(part)) == 4

    def arrays(workdir, name):
        store = checkpoints.ocp.StandardCheckpointer()
        return jax.tree.leaves(store.restore((workdir / "checkpoints/4" / name).resolve()))

    for name in ("params", "training"):
        chex.assert_trees_all_equal(arrays(part, name), arrays(whole, name))


# What a version that gave all batches as many utterances wrote of the options of `support.arguments`.
EARLIER_OPTIONS = "fc1d77d16353181f0a1cc6527a20c9038e770bb7439cd5ce8fa2a2c5bb5b696c"


def test_other_utterances(corpus, trained, tmp_path, capsys, monkeypatch):
    """A run whose corpora have changed goes on only if that is asked for. Names of corpora hold in any folder.

    The best error rate of other held-out utterances is none. Processes with others of either kind do not agree.
    """
    shutil.copytree(trained[0], tmp_path / "run")
    started, seen, changed = [], [], [*arguments(corpus, tmp_path / "run"), "--resume", "--steps", 7, "--change"]
    monkeypatch.setattr(hosts, "agree", lambda name, x: seen.append(x))
    monkeypatch.setattr(train.Training, "main", lambda x: started.append(x) or evaluation.Rates(0, 0, 0))
    monkeypatch.chdir(corpus)
    run(["train", "--resume", "--workdir", tmp_path / "run", "--train", "all.jsonl", "--log-every", 7])
    best, config = started[0].record.progress, started[0].config
    assert best.rates and best.step and config.blocks.convolution == 3
    assert (config.run.steps, config.run.log_every) == (6, 7)
    for name, kind in (("all.jsonl", "training"), ("held-out.jsonl", "held-out")):
        rows = (corpus / name).read_text()
        try:
            (corpus / name).write_text(rows.partition("\n")[2])
            capsys.readouterr()
            run(["train", "--resume", "--workdir", tmp_path / "run"], 2)
            assert f"holds a run with other {kind} utterances: --change allows that" in capsys.readouterr().err
            run(changed)
        finally:
            (corpus / name).write_text(rows)
    run(changed)
    before, with_others, others, again = (x.record.progress for x in started)
    assert before == with_others == again and others == record.Progress()
    assert seen[3] not in seen[1:3]
    files = {x: json.loads(x.read_text()) for x in (tmp_path / "run").glob("checkpoints/*/setup/metadata")}
    for what, without in (
        ("batches of an earlier version, all with the same number of utterances", False),
        ("the order of an earlier version", True),
    ):
        for file, setup in files.items():
            order = {"order": setup["order"] | {"options": EARLIER_OPTIONS}}
            earlier = setup | {"utterances": "of an earlier version"} if without else setup | order
            file.write_text(json.dumps({name: x for name, x in earlier.items() if not (without and name == "order")}))
            outputs.seal(file.parents[1])
        capsys.readouterr()
        for more, anew in (([], False), (["--steps", 7, "--change"], True)):  # one that has ended does not go on
            run(["train", "--resume", "--workdir", tmp_path / "run", "--devices", 1, *more])
            line = f"begins anew, in another order: the run had {what}\n"
            assert (line in capsys.readouterr().out) == anew and started[-1].record.progress == before


def test_epochs(corpus, tmp_path, said):
    """Two passes over all data, a test after each step, and a checkpoint at the end alone."""
    command = arguments(corpus, tmp_path / "run", epochs=2, valid_every=1, save_every=100)
    i = command.index("--steps")
    (batches,) = re.findall(r"^2 epochs of (\d+) batches$", said(command[:i] + command[i + 2 :]).out, re.M)
    tested = [x["step"] for x in runs.metrics_of(tmp_path / "run") if "valid_loss" in x]
    assert tested == [*range(1, 2 * int(batches) + 1)] and 2 <= int(batches) <= 3
    assert runs.steps_of(tmp_path / "run/checkpoints") == [2 * int(batches)]


CORPORA = {"data": {"train": "x", "valid": "x"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([1], "expected an object of options, got list"),
        ({"steps": 1.5}, "steps: expected a whole number of 0 or more, got 1.5"),
        ({"steps": True}, "steps: expected a whole number of 0 or more, got True"),
        ({"steps": float("inf")}, "steps: expected a whole number of 0 or more, got inf"),
        ({"learning_rate": 10**400}, "learning_rate: expected a number of 0 or more, got 1000"),
        ({"strides": [[2.5, 1]]}, "strides: expected strides over time and features"),
        ({"strides": [2, 1]}, "strides: expected strides over time and features"),
        ({"train": None}, "train: expected a name or a list of names, got None"),
        ({"lower": 1}, "lower: expected true or false, got 1"),
        ({"speed": 1}, "there is no option speed"),
        (CORPORA | {"compute": {"bfloat16_rows": True}}, "c.json has bfloat16_rows True, by default off)"),
        (
            CORPORA | {"encoder": "convolutional", "heads": 4},
            "--heads needs --encoder conformer, or --stack, whose blocks have attention (--config",
        ),
        (
            CORPORA | {"run": {"epochs": 2, "steps": 10000}},
            "c.json has epochs 2, by default off; steps 10000)",
        ),
        ({"features": {"rat": 1}}, "the section features has no field rat"),
        ({"compute": 3}, "compute: expected an object of fields, got 3"),
        ({"width": 8, "blocks": {"width": 16}}, "blocks.width says again what the option width is"),
        ('{"width": 8, "width": 16}', "c.json is not readable as JSON: width is there twice"),
        (
            CORPORA | {"features": {"window": 0.01, "hop": 0.01}},
            "a window of 0.01 ms has fewer than two samples at --rate 16000",
        ),
    ],
)
def test_configurations_are_checked(tmp_path, refused, options, message):
    (tmp_path / "c.json").write_text(options if isinstance(options, str) else json.dumps(options))
    refused(["train", "--config", tmp_path / "c.json"], message)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["--save-every", 0], "--save-every: expected a whole number of 1 or more, got 0"),
        (["--dropout", 1], "--dropout: expected a number of 0 or more and less than 1, got 1"),
        (["--strides", "2"], "--strides: expected strides over time and features such as 2x2,2x2, got 2"),
        (["--loss", "nothing"], "--loss: invalid choice: 'nothing'"),
        (["--resume", "--overwrite"], "not allowed with argument --resume"),
        (["--change"], "--change needs --resume"),
        (["--encoder", "conformer", "--width", 9], "--width 9 must be a multiple of 2 x --heads 4"),
        (["--devices", 99], "--devices 99: there are"),
        (["--ngram", "words.arpa"], "--ngram needs --beam"),
        (["--ngram", "words.arpa", "--beam", 2], "--ngram words.arpa is no file"),
        (["--beam", 2, "--unknown-word", 20], "--unknown-word needs --ngram"),
        (["--expect-cer", "nan"], "--expect-cer: expected a number of 0 or more, got nan"),
        (["--seed", 2**32], "--seed: expected a whole number of 0 or more and less than 4294967296, got 4294967296"),
        (["--heads", 4], "--heads needs --encoder conformer, or --stack, whose blocks have attention"),
        (["--epochs", 2, "--steps", 10000], "--steps needs --epochs 0, as epochs count batches"),
        (["--window", 30], "unrecognized arguments: --window 30"),
        (["--accumulate", 7], "--accumulate 7 must be at most --steps 6"),
        (["--batch-seconds", 3], "--batch needs --batch-seconds 0"),
        (["--config", "base", "--tokens", "characters"], "(--config base has vocabulary 512, by default 256)"),
        (
            ["--config", "nothing"],
            "--config nothing is neither a file nor one of base, read-speech, small",
        ),
        (["--train", "nowhere"], "nowhere does not exist"),
        (["--train", "digits/m.jsonl", "--valid", ""], "--valid is missing: held-out utterances"),
        (["--workdir", __file__], f"--workdir {__file__} must be a folder, and is a file"),
        (["--cache", __file__], f"--cache {__file__} must be a folder, and is a file"),
        (["--speeds", "3"], "--speeds: expected speeds from 0.5 to 2 such as 0.9,1,1.1, got 3"),
        (["--noise", "nowhere"], "nowhere is no folder of audio files"),
        (["--snr", "5,2", "--noise", "x"], "--snr: expected the lowest and highest ratio in dB such as 5,20, got 5,2"),
        (["--snr", "5,9"], "--snr needs --noise"),
        (["--gain", 101], "--gain: expected a number of 0 or more and 100 or less, got 101"),
        (["--rates", "joint"], "--rates: expected prefixes of parameters and factors such as encoder=0.1, got joint"),
        (["--batch-norm", "batch"], "--batch-norm batch: the encoder has no batch norm"),
        (["--rates", "decoder=1"], "--rates: no parameter is called decoder; they begin with encoder, joint"),
        (["--freeze", "encoder:2"], "--freeze: no parameter is called encoder/blocks/layers/1"),
        (["--freeze", "encoder,joint,predictor"], "--freeze encoder,joint,predictor leaves nothing to train"),
        (["--freeze", "encoder:1", "--bfloat16-rows", "--cache", "none"], "--bfloat16-rows needs a cache"),
        (["--durations", "0,1,2,3,4"], "--durations needs --loss tdt"),
        (["--cr-ctc", 0.2], "--cr-ctc needs --ctc or --loss ctc"),
        (["--loss", "ctc", "--cr-ctc", 0.2, "--time-masks", 0, "--mel-masks", 0], "both copies are the same"),
        (["--loss", "ctc", "--cr-ctc", 0.2, "--time-mask", 0, "--mel-mask", 0], "both copies are the same"),
        (["--average", 1], "--average: expected a number of 0 or more and less than 1, got 1"),
        (["--scan"], "--scan needs blocks that are alike"),
        (["--hook", "nothing.py:f"], "--hook must be FILE:FUNCTION of a Python file, got nothing.py:f"),
        (["--alphabet", "xyz"], "no usable utterance is left; left out, characters outside the vocabulary: 10 ("),
        (["--tokens", "subwords", "--vocabulary", 5000], "--vocabulary 5000 does not suit the training texts: they"),
        (["--processes", 2], "--processes and --process need --coordinator HOST:PORT"),
        (["--coordinator", "localhost:1", "--processes", 2], "needs --processes N and --process I"),
        (["--coordinator", "localhost:1", "--processes", 2, "--process", 2], "with I from 0 to N - 1"),
    ],
)
def test_options_are_checked(corpus, tmp_path, refused, command, message):
    refused([*arguments(corpus, tmp_path / "run"), *command], message)
    assert not (tmp_path / "run" / "checkpoints").exists()


PLAIN = {"dropout": 0.0, "time_masks": 0, "mel_masks": 0, "steps": 1000}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnnt", "tdt", "multiblank", "hat", "pruned"])
def test_every_loss(corpus, name):
    """Steps lower the loss of a batch, in tiles; logits of all nodes at once give the same first loss."""
    model, batch = prepared(corpus, loss=name, joint="logits", **PLAIN, **CONVOLUTIONAL)
    first = float(jax.jit(lambda params: objective.mean_loss(model, params, batch, 0))(model.params))
    model.config = model.config.replace(joint="tiles")
    optimizer = steps.optax.apply_if_finite(steps.optax.adam(1e-2), 3)
    (_, state, frozen, step), results = steps_of(model, optimizer), []
    for i in range(30):
        state, numbers = step(state, batch, frozen, i)
        results.append(float(numbers["loss"]))
    assert results[0] == pytest.approx(first, rel=1e-4) and results[-1] < 0.6 * results[0]
