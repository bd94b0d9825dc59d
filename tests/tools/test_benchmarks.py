"""Do the benchmarks measure what they say? Everything but time, on tiny problems and without a GPU."""

import functools
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

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


# ------------------------------------------------------------------------------------------------------------ problems


def test_batches_of_lengths():
    """30 utterances in file order; sorted ones up to 10,000 frames, as many as fit."""
    problems = load("problems")
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
    assert problems.batches("sorted", 0.1, 20)[0].tolist() == (found[0][:, ::10] // 20).tolist()


def test_inputs_do_not_depend_on_the_padding():
    problems = load("problems")
    batch = "file order", 0, 0.1, 20
    (small, rest), (large, more) = (problems.librispeech(*batch, *padding) for padding in ((1, 1), (32, 8)))
    np.testing.assert_array_equal(small[0], large[0])
    for b, (T, U) in enumerate(zip(*rest[1:])):
        np.testing.assert_array_equal(small[2][b, :T], large[2][b, :T])
        np.testing.assert_array_equal(small[3][b, : U + 1], large[3][b, : U + 1])
        np.testing.assert_array_equal(rest[0][b, :U], more[0][b, :U])
        assert not (rest[0][b, :U] == problems.BLANK).any()


# ----------------------------------------------------------------------------------------------------------- measuring


def test_turns_and_aims():
    """The share decides whose turn it is; all end at the deadline; ratios are those of medians."""
    measure = load("measure")
    fast, slow = (measure.Contestant(name, lambda s=s: s) for name, s in (("fast", 1.0), ("slow", 2.0)))
    measure.take_turns([fast, slow], 4.0, 200)
    assert (len(fast.seconds), len(slow.seconds)) == (4, 3)
    assert measure.aim("slow / fast", slow, fast, "<= 1.5") == ("slow / fast", 2.0, 2.0, "<= 1.5", False)
    late = measure.Contestant("late", lambda: 1.0)
    measure.take_turns([late], 1e9, 200, deadline=0)
    assert len(late.seconds) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "bench.py --only tiny",
        "bench.py --family --only characters",
        "joint.py --librispeech --batches 1 --share 0.1 --shrink 40",
        "joint.py --skip --steps 1",
        "decode.py --only 'stateless 1' --frames 8",
        "decode.py --only 'stateless 1' --frames 8 --rows",
        "soak.py --steps 20 --kinds jit eager",
        "gpu.py --dry-run --only tiny --budget 1000",
    ],
)
def test_a_run(tmp_path, command):
    """Contestants agree, and what is said to be written is there."""
    script, *arguments = shlex.split(command)
    if script in ("bench.py", "joint.py", "decode.py"):
        arguments += ["--quick", "--repeat", "1", "--output", str(tmp_path / "found.json")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=600, check=False)
    done = run([sys.executable, HERE / script, *arguments], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    if "Results" in done.stdout:
        times = json.loads((tmp_path / "found.json").read_text())["times"]
        assert all(row["median_ms"] >= row["minimum_ms"] > 0 for rows in times.values() for row in rows.values())


def test_disagreement_is_found():
    measure = load("measure")
    first, second = (measure.Contestant(name, None, (1.0, np.ones(3) * x)) for name, x in (("a", 1), ("b", 1.1)))
    with pytest.raises(AssertionError, match="gradient of b"):
        measure.agree(first, [second], gradient=0.05)


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


def test_paths_in_the_script():
    """What gpu.sh compiles and runs is there."""
    script = re.sub(r"\n\s*#.*", "", (HERE / "gpu.sh").read_text())
    names = re.findall(r"\b((?:xla_kernels|tools|tests|benchmarks|examples)/[\w./]*(?:\{[\w,]+\})?[\w.]*\w\b)", script)
    for name in names:
        head, group, tail = (re.fullmatch(r"(.*?)(?:\{(.*)\})?([\w.]*)", name)).groups()
        for choice in group.split(",") if group else [""]:
            path = HERE.parent / f"{head}{choice}{tail if group else ''}"
            assert path.exists() or list(path.parent.glob(f"{path.name}*")), path
    assert len(names) > 8


def test_commands_in_the_text():
    """Pages and docstrings name programs of benchmarks/ and tools/ and targets of make that are there."""
    makefile = (HERE.parent / "Makefile").read_text()
    pages = [*HERE.parent.glob("*.md"), *HERE.parent.glob("docs/*.md"), HERE / "README.md"]
    for page in pages:
        text = page.read_text() if page.name != "CHANGELOG.md" else ""
        for name in re.findall(r"\b(?:benchmarks|tools/\w+)/\w+\.(?:py|sh|cu|c)\b", text):
            assert (HERE.parent / name).exists(), f"{page.name}: {name}"
        for target in re.findall(r"(?:^    |`)make ([a-z][\w-]*)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"
