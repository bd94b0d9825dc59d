"""Do the programs that measure on a GPU measure what they say? Everything but time, on tiny problems, without one."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import losses

HERE = losses.ROOT / "benchmarks"
if not HERE.exists():
    pytest.skip("no benchmarks beside the tests", allow_module_level=True)


def load(name):
    """A program of benchmarks/ as a module."""
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look it up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module


# ------------------------------------------------------------------------------------------------ LibriSpeech's lengths


@pytest.fixture(scope="module")
def librispeech():
    return load("librispeech")


def test_batches_of_lengths(librispeech):
    """30 utterances in file order; sorted ones up to 10,000 frames, as many as fit."""
    problems = sys.modules["librispeech_problems"]
    with np.load(HERE / "librispeech_lengths.npz") as file:
        rows = {name: file[name] for name in file.files}
    assert all(x.dtype == np.int16 and x.shape[1] == 2 for x in rows.values())
    assert rows["file_order"][0].tolist() == [433, 101]  # the first utterance of the published file
    found = problems.batches("file order")
    assert len(found) == 20 and all(T.shape == U.shape == (30,) for T, U in found)
    np.testing.assert_array_equal(found[0][0], rows["file_order"][600:630, 0])
    found = problems.batches("sorted")
    frames = np.concatenate([T for T, _ in found])
    assert len(found) == 20 and (np.diff(frames) <= 0).all()
    for (T, _), (after, _) in itertools.pairwise(found):
        assert T.sum() <= problems.MAX_FRAMES < T.sum() + after[0]
    pairs = {tuple(x) for x in rows["sorted"].tolist()}
    assert all((T, U) in pairs for T, U in np.concatenate(found, 1).T.tolist())
    assert problems.batches("sorted", 0.1)[0].tolist() == found[0][:, ::10].tolist()
    assert problems.batches("sorted", 0.1, 20)[0].tolist() == (found[0][:, ::10] // 20).tolist()


def test_inputs_do_not_depend_on_the_padding(librispeech):
    problems = sys.modules["librispeech_problems"]
    lengths = np.array([[3, 5], [2, 1]])
    assert problems.padded(lengths) == (5, 3) and problems.padded(lengths, 4, 8) == (8, 8)
    small, large = (problems.make(lengths, *problems.padded(lengths, *m), seed=3) for m in ((1, 1), (4, 8)))
    for a, b in zip(small[0], large[0]):
        np.testing.assert_array_equal(a, b)
    for b, (T, U) in enumerate(lengths.T):
        np.testing.assert_array_equal(small[1][0][b, :T], large[1][0][b, :T])
        np.testing.assert_array_equal(small[1][1][b, : U + 1], large[1][1][b, : U + 1])
        np.testing.assert_array_equal(small[2][0][b, :U], large[2][0][b, :U])
        assert not (large[2][0][b, :U] == problems.BLANK).any()


def test_contestants_compute_one_loss(librispeech, monkeypatch, capsys):
    """A whole run on two short utterances; a contestant that computes something else is found and left out."""
    problems = sys.modules["librispeech_problems"]
    monkeypatch.setattr(librispeech, "ROWS", 4)
    monkeypatch.setattr(librispeech, "batches", lambda order, share, shrink: [np.array([[3, 4], [2, 1]])])
    wrong = {"wrong": lambda *p: 1.01 * librispeech.logits_in_memory(*p)}
    monkeypatch.setattr(librispeech, "OURS", librispeech.OURS | wrong)
    monkeypatch.setattr(librispeech, "ORDERS", ("file order",))
    for module in (librispeech, problems):
        monkeypatch.setattr(module, "H", 4)
    records = []
    monkeypatch.setattr(librispeech, "report", lambda record: records.append(record) or "")
    with jax.numpy_rank_promotion("allow"):
        assert librispeech.main(["--batches", "1", "--repeat", "1", "--torch-python", sys.executable]) == 1
    (record,) = records
    right = {"ours, logits in memory", "ours, packed", "ours, in tiles"}
    for row in record["batches"]:
        assert set(row["times"]) - {"torchaudio"} == right and "wrong" in row["failed"]
    assert sum(why.startswith("Disagreement") for _, why in record["left_out"]) == len(record["batches"]) == 1
    text = load("librispeech").report(record)
    assert "### file order: 1 batches, on average B=2.0 T=4 U=2, 71% of the nodes valid" in text  # 9 + 8 of 24


def test_time_that_runs_out(librispeech):
    """What is left out is named, and no contestant counts without a time."""
    row, left_out = {"order": "sorted", "index": 0, "times": {}, "failed": []}, []
    answer = {"seconds": 1.0, "loss": 2.0, "gradient": np.ones(3), "megabytes": 1}
    clock = iter([1, 1, 1, 0])
    contestants = {"a": lambda: lambda: answer, "b": lambda: lambda: answer}
    librispeech.take_turns(row, contestants, 1, 1e-3, lambda: next(clock), left_out)
    assert list(row["times"]) == ["a"] and left_out == [("sorted, batch 0: b", "no time left for turn 1")]


# --------------------------------------------------------------------------------------------------------------- tuning


@pytest.fixture(scope="module")
def tune():
    return load("tune")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_program_that_is_timed_compiles(tune):
    """It uses parts of the kernels' headers, and is built on a GPU's machine first."""
    options = ["-std=c++17", "-fsyntax-only", "-w", f"-I{HERE.parent}", "-x", "c++"]
    subprocess.run(["g++", *options, HERE.parent / tune.PROGRAM], check=True)


def test_every_constant_is_tried(tune):
    """Switches are read from the sources: each `#ifndef JAX_RNNT_` of the kernels, with half and twice its value."""
    names = set()
    for file in (HERE.parent / "xla_kernels/cuda").glob("*.cu*"):
        names |= set(re.findall(r"#ifndef (JAX_RNNT_\w+)", file.read_text()))
    found = tune.switches()
    assert set(found) == names and "JAX_RNNT_EMISSION_THREADS" in names
    rows = tune.builds(found)
    assert rows[0] == tune.Build() and len(rows) == len(set(rows))
    assert len(rows) == 1 + sum(1 + (default > 1) for default, _ in found.values())
    (row,) = (row for row in rows if row.changes == (("JAX_RNNT_EMISSION_THREADS", 512),))
    assert row.part == "emission" and row.flags == ["-DJAX_RNNT_EMISSION_THREADS=512"]
    rows = tune.builds(found, ["JAX_RNNT_LATTICE_WARPS=2,8,16"])
    assert [row.name for row in rows] == ["as it is", "LATTICE_WARPS=2", "LATTICE_WARPS=8"]  # 16 is the default
    with pytest.raises(ValueError, match=r"--set: there is no switch JAX_RNNT_X; there are JAX_RNNT_"):
        tune.builds(found, ["JAX_RNNT_X=1"])


def test_objects_are_compiled_once(tune, tmp_path):
    """Only the file of a switch is compiled again; a build that fails is left out with the compiler's words."""
    args = tune.parse(["--dry-run", "--folder", str(tmp_path)])
    compiler, commands = tune.Compiler(args), []

    def run(*command):
        commands.append(" ".join(map(str, command)))
        if "THREADS=7" in commands[-1]:
            raise subprocess.CalledProcessError(1, command, stderr="static assertion failed")

    compiler.run = run
    rows = tune.builds(tune.switches(), ["JAX_RNNT_EMISSION_THREADS=7,512", "JAX_RNNT_LATTICE_WARPS=4"])
    done = dict(compiler.all(rows))
    assert [why for why in done.values() if why] == ["static assertion failed"]
    compiled = [command for command in commands if " -c " in command]
    assert len(compiled) == len(set(compiled)) == len(compiler.sources) + 3
    assert sum("LATTICE_WARPS=4" in command for command in compiled) == 1
    link = next(command for command in commands if command.endswith("EMISSION_THREADS_512 -pthread"))
    assert "EMISSION_THREADS_512.o" in link and "LATTICE_WARPS" not in link


def test_report_of_tuning(tune, tmp_path):
    program = tmp_path / "program"
    program.write_text(
        "#!/bin/sh\nprintf 'copy\\t1 GiB\\tfloat32\\t0.5\\t2000000\\t1\\nforward\\ta\\tfloat32\\t2\\t9\\t0.8\\n'\n"
    )
    program.chmod(0o755)
    times, bandwidth = tune.measure(program, "all", tune.parse(["--dry-run"]), 10)
    assert times == {("forward", "a", "float32"): (2.0, 0.8)} and bandwidth == pytest.approx(4.0)  # 2 MB in 0.5 ms
    runs = [
        {"build": name, "copy_gb_per_s": 4000.0, "times": {"forward, a": (ms, 0.8)}}
        for name, ms in (("as it is", 2.0), ("X=1", 1.0))
    ]
    text = tune.report({"runs": runs, "counters": "ncu is not installed", "left_out": [("X=2", "no time left")]})
    assert "| X=1 | 0.500 | 0.500 forward, a | 0.500 forward, a |" in text
    assert "No counters: ncu is not installed" in text and "X=2: no time left" in text


def test_counters(tune, tmp_path, monkeypatch):
    """Rows of ncu's table by kernel; where it may not read counters, its words."""
    ncu, args = tmp_path / "ncu", tune.parse(["--dry-run"])
    monkeypatch.setattr(tune.shutil, "which", lambda name: str(ncu))
    issue, _, dram, _ = tune.COUNTERS
    rows = [
        ("ID", "Kernel Name", "Metric Name", "Metric Value"),
        (0, "Skew", issue, "12.5"),
        (0, "Skew", dram, "1,000.0"),
    ]
    text = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    ncu.write_text(f"#!/bin/sh\ncat <<'EOF'\n==PROF== connected\n{text}\nEOF\n")
    ncu.chmod(0o755)
    assert tune.counters("program", args, 10) == [("Skew", {issue: 12.5, dram: 1000.0})]
    # A device without one of the counters of L1: the others are read.
    refuse = 'case "$*" in *l1tex*) echo Failed to find metric; exit 1;; esac'
    ncu.write_text(f"#!/bin/sh\n{refuse}\ncat <<'EOF'\n{text}\nEOF\n")
    found = tune.counters("program", args, 10)
    assert found == [("Skew", {issue: 12.5, dram: 1000.0})]
    report = tune.report({"runs": [], "counters": found, "left_out": []})
    assert "| Skew | 12.5 | nan | 1000.0 | nan |" in report and "lines looked up" in report
    ncu.write_text("#!/bin/sh\necho ERR_NVGPUCTRPERM\nexit 1\n")
    assert tune.counters("program", args, 10) == "ERR_NVGPUCTRPERM"
    monkeypatch.setattr(tune.shutil, "which", lambda name: None)
    assert tune.counters("program", args, 10) == "ncu is not installed"


# ------------------------------------------------------------------------------------------------------ parts of gpu.sh


def test_parts_fit_into_one_call():
    """In the order of what they teach first, with time limits that add up to less than the limit of the whole."""
    text = (HERE / "gpu.sh").read_text()
    parts = re.search(r"^PARTS=\((.*)\)$", text, re.M)[1].split()
    seconds = dict(re.findall(r"\[(\w+)\]=(\d+)", re.search(r"declare -A SECONDS_OF=\((.*?)\)\n", text, re.S)[1]))
    limit = int(re.search(r"DRY_RUN \? \d+ : (\d+)\)\)\}", text)[1])
    assert set(parts) == set(seconds) and sum(map(int, seconds.values())) <= limit < 600
    order = ["build", "check", "benchmark", "tune", "suite", "large", "memcheck", "racecheck", "example"]
    assert [part for part in parts if part in order] == order
    document = (HERE.parent / "docs/cuda.md").read_text()
    rows = dict(
        re.findall(r"^\| (\w+) \| (\d+) \|", document.replace("memcheck, racecheck | 20 each", "memcheck | 20"), re.M)
    )
    assert rows == {part: n for part, n in seconds.items() if part != "racecheck"}


def test_log_has_the_last_lines(tmp_path):
    """Whatever `tee` has not written when the parts are done would be lost."""
    copy = tmp_path / "benchmarks"
    copy.mkdir()
    script = (HERE / "gpu.sh").read_text()
    (copy / "gpu.sh").write_text(script.replace("  case $1 in\n", "  seq 20000\n  return 3\n  case $1 in\n", 1))
    done = subprocess.run(
        ["bash", copy / "gpu.sh", "--dry-run", "selftest", "example"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHON": sys.executable}, check=False,
    )  # fmt: skip
    log = (tmp_path / "build/gpu/dry-run/gpu.log").read_text()
    assert done.returncode == 1 and log == done.stdout
    assert log.count("20000\n") == 2 and re.search(r"selftest\t[\d.]+\t3\nexample\t[\d.]+\t3\n$", log)
    done = subprocess.run(
        ["bash", copy / "gpu.sh", "--dry-run", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "no such part: nothing" in done.stdout


@pytest.mark.slow
def test_clock_and_profiler_need_no_variant(monkeypatch):
    """Where variants fail, the clock, the profiler and the cycles of a diagonal are measured all the same."""
    gpu = load("gpu")
    asked = []
    for name, value in (("sm_clock", 1.0), ("kernel_times", {}), ("seconds_per_diagonal", 1.0)):
        monkeypatch.setattr(gpu, name, lambda *args, name=name, value=value: asked.append(name) or value)
    monkeypatch.setattr(gpu, "first_call", lambda case: [0, 0])
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda *args: {"copy": 1.0})
    monkeypatch.setattr(gpu, "make_inputs", lambda case, dtype: ([jnp.zeros(case.shape, dtype)], ()))
    torch = types.SimpleNamespace(losses={}, missing={}, versions={}, torch=None, release=lambda: None)
    monkeypatch.setattr(gpu.gpu_peers, "Torch", lambda: torch)

    def measure(variant):
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu.Variant, "measure", measure)
    monkeypatch.setattr(gpu.Variant, "measure_rivals", measure)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--only", "tiny"])
    gpu.main()
    assert asked == ["sm_clock", "kernel_times", *["seconds_per_diagonal"] * len(cases.DIAGONALS)]
