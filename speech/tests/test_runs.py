"""Folders of runs: damaged checkpoints, disks without room, one training at a time, the best checkpoint."""

import contextlib
import json
import shutil
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from jax_rnnt_speech import runs
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.system import outputs
from jax_rnnt_speech.training import evaluation
from support import CONVOLUTIONAL, DAMAGES, arguments, asr, random_model, run, small_disk, weights

# Orbax leaves futures behind that have failed.
UNRAISED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@UNRAISED
def test_damaged_checkpoints(corpus, trained, tmp_path, capsys, refused, said):
    """Whatever file of the last one is damaged: the one before is used, or weights are right. It is said in a line."""
    workdir, parts = tmp_path / "run", ("params", "training")
    shutil.copytree(trained[0] / "checkpoints", workdir / "checkpoints")
    shutil.copytree(trained[0] / "best", workdir / "best")
    (workdir / "checkpoints/9.orbax-checkpoint-tmp").mkdir()  # of a save that was killed
    run_of, chosen = runs.open_run(workdir), {}
    six, three = (workdir / "checkpoints" / x for x in "63")
    trees = {"params": Model.from_setup(run_of.setup()).shapes}
    new, old = (jax.tree.leaves(run_of.restore(folder, **trees)) for folder in (six, three))
    assert any((x != y).any() for x, y in zip(new, old))
    for path in [x for x in six.rglob("*") if x.is_file() and x.stat().st_size]:
        content, name = path.read_bytes(), path.relative_to(six)
        for damage in DAMAGES.values():
            damage(path)
            chosen.setdefault(name, set()).add(run_of.whole(parts, quiet=True).name)
            path.write_bytes(content)
    unread = [name for name, steps in chosen.items() if steps == {"6"}]
    assert len(chosen) > 20 and {frozenset(x) for x in chosen.values()} == {frozenset("3"), frozenset("6")}
    assert all(len(name.parts) == 1 for name in unread) and not capsys.readouterr().err
    for name in unread:
        DAMAGES["zeros"](six / name)
    chex.assert_trees_all_equal(jax.tree.leaves(run_of.restore(run_of.whole(parts), **trees)), new)
    DAMAGES["half"](six / "setup/metadata")
    line = f"{workdir}: checkpoints/6 is damaged (setup/metadata has "
    chex.assert_trees_all_equal(weights(workdir), jax.tree.leaves(old))
    error = capsys.readouterr().err
    assert error.startswith(line) and error.endswith("): checkpoints/3 is used\n") and error.count("\n") == 1
    assert not said(["convert", tmp_path / "model", "--model", workdir]).err  # the best one is whole
    (best,) = (workdir / "best").iterdir()
    DAMAGES["gone"](best / "sums.json")
    error = said(["convert", tmp_path / "model", "--model", workdir, "--overwrite"]).err
    assert f"best/{best.name} is damaged (it has no sums.json); checkpoints/6 is" in error
    assert "checkpoints/3 is used" in error
    (three / "params/manifest.ocdbt").unlink()
    found = f"no whole checkpoint: best/{best.name} is damaged (it has no sums.json); checkpoints/6 is damaged (setup"
    refused(["test", "--model", workdir, corpus / "all.jsonl"], found)
    found = "checkpoints/3 is damaged (params/manifest.ocdbt: No such file"
    refused(["train", "--workdir", workdir, "--resume"], found)
    next((best / "params/d").iterdir()).unlink()
    outputs.seal(best)
    refused(["convert", tmp_path / "other", "--model", workdir], f"best/{best.name} lacks arrays of this model (")


@UNRAISED
def test_disks_without_room(tmp_path, capsys):
    """A save that fails is a line, and leaves what was there; numbers get lost, and the run goes on."""
    model, folder = random_model(**CONVOLUTIONAL), tmp_path / "run"
    first, more = [np.asarray(x) for x in jax.tree.leaves(model.params)], {"training": {"x": np.zeros(2)}}
    for step, size in ((1, None), (4, 60)):
        run_of = runs.Run(folder, resume=True)
        run_of.open()
        metrics = runs.Metrics(folder, 1)
        metrics.write(step, loss=step)
        params = jax.tree.map(lambda x, step=step: x + (step - 1), model.params)
        if not size:
            run_of.save(step, model.setup(), params=params, **more)
            run_of.close()
            metrics.close()
            continue
        with small_disk(size):
            metrics.write(5, loss=5)
            metrics.write(6, loss=6)
            found = r"checkpoints/4 cannot be written: File too large; --resume goes on from step 1$"
            with pytest.raises(asr.system.UserError, match=found), contextlib.closing(run_of):
                run_of.save(step, model.setup(), params=params, **more)
    metrics.write(7, loss=7)
    metrics.close()
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "metrics.jsonl" in x]
    assert line == f"step 5: {folder}/metrics.jsonl cannot be written, and lacks numbers: File too large"
    assert [x["step"] for x in runs.metrics_of(folder)] == [1, 4, 7]
    assert runs.open_run(folder).whole(["params", "training"]).name == "1"
    chex.assert_trees_all_equal(weights(folder), first)


def test_one_training_at_a_time(corpus, trained, tmp_path, refused):
    """Another process that trains in a folder keeps it; a run that is replaced is there until its successor is."""
    workdir = tmp_path / "run"
    shutil.copytree(trained[0] / "checkpoints", workdir / "checkpoints")
    program = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    command, pipe = [sys.executable, "-c", program, str(workdir)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        refused([*arguments(corpus, workdir), "--resume"], f"another process trains in {workdir}: ")
        other.communicate(b"\n")
    before = {x.relative_to(workdir): x.read_bytes() for x in workdir.glob("checkpoints/**/*") if x.is_file()}
    for _ in range(2):  # the first one ends before it has a checkpoint
        run_of = runs.Run(workdir, overwrite=True)
        run_of.open()
        kept = {x.relative_to(workdir / "earlier"): x.read_bytes() for x in workdir.glob("earlier/**/*") if x.is_file()}
        assert kept == before
        message = f"train first, with all options; {workdir}/earlier holds the run"
        refused(["convert", tmp_path / "model", "--model", workdir], message)
    run_of.save(1, {"config": {}}, params={"x": np.zeros(2)})
    run_of.close()
    assert {x.name for x in workdir.iterdir()} - {"cache", "index"} == {"checkpoints", "best"}


def test_the_best_checkpoint_and_patience(corpus, tmp_path, capsys, monkeypatch):
    """The best test decides what is used; after `--patience` tests that are no better, the run ends. A hook hears."""
    rates, steps = iter([50.0, 40.0, 45.0, 40.0, 30.0, 0.0]), []

    def measured(self, params, step):
        steps.append(step)
        return evaluation.Rates(1.0, 1.0, next(rates))

    monkeypatch.setattr(evaluation.Evaluation, "measured", measured)
    (tmp_path / "hook.py").write_text("def hear(step, numbers):\n    print('heard', step)\n")
    workdir = tmp_path / "run"
    command = arguments(corpus, workdir, patience=2, save_every=1, steps=6)
    run([*command, "--hook", f"{tmp_path / 'hook.py'}:hear"])
    assert "step 4: the last 2 tests were not better: the run ends" in (out := capsys.readouterr().out)
    assert "best test: step 2" in out and "WER 40.0%" in out
    assert [x.name for x in (workdir / "best").iterdir()] == ["2"]
    assert [x for x in out.splitlines() if x.startswith("heard")] == [f"heard {i}" for i in (1, 1, 2, 2, 3, 3, 4, 4)]
    setup = runs.open_run(workdir).setup()
    assert setup["progress"] == {"step": 2, "rates": [1.0, 1.0, 40.0], "since": 2}
    run([*command, "--resume"])  # has ended already: its best weights are evaluated
    assert "held-out CER 1.0%, WER 30.0%" in capsys.readouterr().out and steps == [1, 2, 3, 4, 2]
    run([*command, "--resume", "--change", "--steps", 4, "--valid", corpus / "all.jsonl"])  # of other utterances
    assert "held-out CER 1.0%, WER 0.0%" in capsys.readouterr().out and steps[5:] == [2]
    for step in (5, 3):  # an interrupted run was at step 5 already
        other = runs.Run(tmp_path / "other")
        other.open()
        other.save(step, {}, best=True, params={"x": np.zeros(2)})
        other.close()
    assert [x.name for x in (tmp_path / "other/best").iterdir()] == ["3"]
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [1, 1, 2, 2, 3, 3, 4, 4] and lines[1]["valid_wer"] == 50.0
