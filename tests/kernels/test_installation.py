"""Does an import without kernels say why and what to do, and point to the importing line?"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import runpy
import shutil
import subprocess
import sys
import types
from unittest.mock import Mock

import jax
import pytest

import jax_rnnt
import platforms
import project
from jax_rnnt import __main__, _bench, _installation, _selftest
from jax_rnnt._xla import loading, proof
from programs import run

pytestmark = pytest.mark.no_kernel
PACKAGE = pathlib.Path(jax_rnnt.__file__).parent
# Prints the one warning of the import, and uses the reference without another. The loss of one frame without labels is
# minus the blank's log-probability.
SCRIPT = """
import os, sys, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import jax_rnnt
(warning,) = (w for w in seen if "jax_rnnt" in str(w.message))
assert warning.category is RuntimeWarning
assert (warning.filename, warning.lineno) == (os.path.abspath(__file__), 5), warning
print(warning.message)

import jax, numpy as np, pytest
arguments = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 0), np.int32), np.ones(1, np.int32), np.zeros(1, np.int32)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    np.testing.assert_allclose(jax.jit(jax_rnnt.rnnt_loss)(*arguments), np.log(4), rtol=1e-6)
    assert "without" not in str(jax_rnnt.export_checks())
    assert "the reference runs" in jax_rnnt.selftest(require=())[0]
assert "cpu" not in jax_rnnt._xla.loading.KERNELS
with pytest.raises(RuntimeError, match="jax_rnnt(?s:.*)pip install"):  # those of the CPU are always required
    jax_rnnt.selftest()
with pytest.raises(NotImplementedError, match="cpu(?s:.*)reference"):
    jax_rnnt.RNNTLoss(implementation="kernel")(*arguments)
"""


def copy_without_kernels(folder):
    """The package's Python files, and a script that imports it."""
    ignored = shutil.ignore_patterns("_cpu*", "_cuda*", "_build*", "__pycache__")
    shutil.copytree(PACKAGE, folder / "jax_rnnt", ignore=ignored)
    (folder / "script.py").write_text(SCRIPT)


def install(folder, origin, **missing):
    """Metadata and the build's note, as pip and CMake leave them."""
    metadata = folder / "jax_rnnt-0.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jax_rnnt\nVersion: 0.0.0\n")
    names = "__init__.py", "_build.py", *(path.name for path in (folder / "jax_rnnt").glob("_cpu*"))
    (metadata / "RECORD").write_text("".join(f"jax_rnnt/{name},,\n" for name in names))
    if origin:
        (metadata / "direct_url.json").write_text(json.dumps(origin))
    reasons = {"cpu": "", "cuda": "", **missing}
    (folder / "jax_rnnt/_build.py").write_text(f"MISSING = {reasons!r}\n")


UNFIT = """
def api_version(): return (0, 99)
def registrations(): raise AssertionError("a handler that does not fit must not reach XLA")
"""

# Imports of jax_rnnt, each in a fork of one process that has imported JAX and started nothing. Arguments: folders, each
# with the program script.py, whose output goes to output.txt there.
FORKS = """
import os, runpy, sys, traceback, warnings
import jax, numpy, pytest
for folder in sys.argv[1:]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, since its threads do not survive them
        child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT), 1)
        sys.path[:0] = [folder, os.path.join(folder, "site")]
        try:
            runpy.run_path(os.path.join(folder, "script.py"), run_name="__main__")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, folder
"""

# 32 threads at once. Other modules that need the lock of the interpreter would turn it on before.
IMPORTS = """
import sys, threading, warnings
import jax, numpy
enabled = getattr(sys, "_is_gil_enabled", lambda: True)
before, barrier, found, modules = enabled(), threading.Barrier(32), [], set(sys.modules)

def work():
    barrier.wait()
    import jax_rnnt
    found.append((jax_rnnt, dict(jax_rnnt._xla.loading.KERNELS)))

with warnings.catch_warnings():
    warnings.simplefilter("error")
    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert len(found) == 32 and all(one == found[0] for one in found), found
assert enabled() == before
heavy = "torch", "chex", "flax", "matplotlib", "scipy", "numba", "pandas", "tensorflow", "rapidfuzz"
print(sorted({name.split(".")[0] for name in set(sys.modules) - modules}.intersection(heavy)))
jax.config.update("jax_num_cpu_devices", 3)
print(len(jax.devices("cpu")), sorted(found[0][1]))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What programs print that import the package in several states, by state."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("clone", "uncompiled", "unfit", "ready")}
    clone, uncompiled, unfit, ready = folders.values()
    for folder in (clone, clone / "site", uncompiled, unfit):
        copy_without_kernels(folder)
    for path in PACKAGE.glob("*_cpu*"):
        shutil.copy(path, clone / "site/jax_rnnt")
    install(clone / "site", None)
    (clone / "script.py").write_text("import jax_rnnt; print(jax_rnnt.__file__, jax_rnnt._xla.loading.KERNELS)")
    install(uncompiled, None, cpu="no working C++ compiler was found when jax_rnnt was built")
    install(unfit, None)
    (unfit / "jax_rnnt/_cpu.py").write_text(UNFIT)
    (ready / "script.py").write_text(IMPORTS)
    (ready / "jax_rnnt").symlink_to(PACKAGE)
    run(FORKS, *folders.values())
    return {name: (folder / "output.txt").read_text().strip() for name, folder in folders.items()} | {"folder": clone}


def test_import(kernel, outputs):
    """Threads may import at once, and each sees the whole package. It loads nothing but JAX and NumPy, does not warn,
    leaves the lock of the interpreter as it was, and starts no backend: users still set devices and flags."""
    assert outputs["ready"] == f"[]\n3 {sorted(loading.KERNELS)}"


def test_source_folder_takes_the_installed_kernels(kernel, outputs):
    """Python started in a clone: its Python files, and the kernels of the copy that pip installed."""
    kernels = {"cpu": loading.KERNELS["cpu"]}
    assert outputs["clone"] == f"{outputs['folder'] / 'jax_rnnt/__init__.py'} {kernels}"


def test_built_without_a_compiler(outputs):
    message = outputs["uncompiled"]
    assert "no working C++ compiler was found when jax_rnnt was built: install one" in message
    assert "apt install g++" in message
    assert "run `pip install --force-reinstall --no-deps --no-cache-dir --no-binary jax_rnnt jax_rnnt`" in message


def test_build_that_does_not_fit(outputs):
    """One warning names cause and cure, and neither JAX nor the reference is harmed."""
    reason = (
        r"jax_rnnt runs on its pure-JAX reference: .*built for XLA FFI \(0, 99\), newer than this jaxlib's \(0, \d\)"
    )
    assert re.match(rf"{reason}: update jax, or run `pip", outputs["unfit"])


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ({"url": "file:///home/me/jax_rnnt", "dir_info": {}}, "/home/me/jax_rnnt"),
        ({"url": "file:///home/me/jax_rnnt", "dir_info": {"editable": True}}, "-e /home/me/jax_rnnt"),
        ({"url": "https://host/jax_rnnt", "vcs_info": {"vcs": "git"}}, "git+https://host/jax_rnnt"),
        ({"url": "file:///tmp/jax_rnnt-1-py3-none-any.whl", "archive_info": {}}, "--no-binary jax_rnnt jax_rnnt"),
        (None, "--no-binary jax_rnnt jax_rnnt"),
    ],
)
def test_command_that_installs_again(tmp_path, monkeypatch, origin, source):
    """It takes the sources from where this copy came."""
    (tmp_path / "jax_rnnt").mkdir()
    install(tmp_path, origin)
    found = importlib.metadata.Distribution.at(tmp_path / "jax_rnnt-0.0.0.dist-info")
    monkeypatch.setattr(_installation, "_distribution", lambda: found)
    assert _installation.reinstall() == f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def test_other_reasons(monkeypatch, tmp_path):
    """The module does not load, is gone, lacks CUDA, or was never built in this folder."""
    monkeypatch.setattr(_installation, "_PACKAGE", tmp_path / "jax_rnnt")
    monkeypatch.setattr(_installation, "_installed_file", lambda module: None)
    gone = ModuleNotFoundError("No module named 'jax_rnnt._cuda'", name="jax_rnnt._cuda")
    explain = lambda error: _installation.explain("cuda", "_cuda", error)
    monkeypatch.setitem(sys.modules, "jax_rnnt._build", None)
    assert f"source folder {tmp_path} was not built; run `pip install -e {tmp_path}`" in explain(gone)
    for error in (ImportError("undefined symbol: x"), ModuleNotFoundError("No module named 'y'", name="y")):
        assert str(error) in explain(error) and "--force-reinstall" in explain(error)
    for reason, cure in (
        ("", "was built and is gone"),
        ("jax_rnnt was built without CUDA kernels, which", "put nvcc on the PATH and run `pip install"),
        ("jax_rnnt was built without CUDA kernels, which", "-Ccmake.define.JAX_RNNT_CUDA=on"),
        ("no working C++ compiler was found when jax_rnnt was built", "apt install g++"),
        ("this is the wheel without kernels, and none with kernels fits", "install a C++ compiler"),
    ):
        note = types.SimpleNamespace(MISSING={"cuda": reason})
        monkeypatch.setitem(sys.modules, "jax_rnnt._build", note)
        assert reason in explain(gone) and cure in explain(gone)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_note_of_the_build(tmp_path, monkeypatch):
    """CMake installs a note if there is no compiler, and looks again in the same build folder. Of the wheel without
    kernels, the note names the interpreter."""
    source = project.ROOT
    if not (source / "CMakeLists.txt").exists():
        pytest.skip("no sources beside the tests")
    run = lambda *command, **variables: subprocess.run(
        ["cmake", *command], cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )

    def note_of(build):
        assert run("--install", build, "--prefix", "installed").returncode == 0
        return types.SimpleNamespace(**runpy.run_path(str(tmp_path / "installed/jax_rnnt/_build.py")))

    done = run("-S", str(source), "-B", "build", CXX="/nonexistent")
    assert done.returncode == 0 and "without kernels" in done.stderr, done.stderr
    assert all("no working C++ compiler" in reason for reason in note_of("build").MISSING.values())
    assert "Looking for a CXX compiler\n" in run("-S", str(source), "-B", "build").stdout
    assert run("-S", str(source), "-B", "pure", "-DJAX_RNNT_KERNELS=off").returncode == 0
    monkeypatch.setitem(sys.modules, "jax_rnnt._build", note_of("pure"))
    text = _installation.explain("cpu", "_cpu", ModuleNotFoundError("no module", name="jax_rnnt._cpu"))
    python = r"CPython {}\.{}t? \([\w.-]+\)".format(*platform.python_version_tuple())
    assert re.match(f"this is the wheel without kernels, and none with kernels fits {python}: to build them", text)
    assert "apt install g++" in text and "--no-binary jax_rnnt jax_rnnt`" in text


# ---------------------------------------------------------------------------------------------------------- selftest
@pytest.fixture
def pretend(monkeypatch):
    """Another platform with other kernels, which are right."""

    def change(kernels, platform, missing=None):
        monkeypatch.setattr(loading, "KERNELS", {kernel: kernel for kernel in sorted(kernels)})
        monkeypatch.setattr(loading, "MISSING", {missing: "a reason: a cure"} if missing else {})
        monkeypatch.setattr(loading, "default_platform", lambda: platform)
        monkeypatch.setattr(proof, "devices_of", lambda platform: {platform: platform})
        monkeypatch.setattr(_selftest, "_of_device", lambda platform, device: ([f"{platform} ran"], []))
        monkeypatch.setattr(_selftest, "too_old_for_pallas", lambda: None)

    return change


@pytest.mark.parametrize("require", ["cpu", ("tpu",), 1, ("cpu", None)])
def test_required_platforms_are_checked(require):
    with pytest.raises(ValueError, match=r"selftest: require must be None or a sequence of 'cpu', 'cuda', got"):
        jax_rnnt.selftest(require=require)


@pytest.mark.parametrize(
    ("platform", "missing", "require", "lacks"),
    [
        ("cpu", "cuda", None, None),
        ("cpu", "cpu", None, "cpu"),
        ("cpu", "cpu", (), None),
        ("cpu", "cuda", ["cpu", "cuda"], "cuda"),
        ("cuda", "cuda", None, "cuda"),
        ("cuda", "cuda", ("cpu",), None),
        ("tpu", "cuda", None, None),
        ("rocm", "cuda", None, None),
    ],
)
def test_selftest_requires_kernels(pretend, platform, missing, require, lacks):
    """Where kernels should exist but do not, it gives reason and cure; elsewhere it says that the reference runs."""
    kernels = {"cpu", "cuda"} - {missing}
    pretend(kernels, platform, missing)
    if lacks:
        with pytest.raises(RuntimeError, match=rf"required kernels are missing:\n{lacks} .*a reason: a cure"):
            jax_rnnt.selftest(require=require)
        return
    lines = jax_rnnt.selftest(require=require)
    if platform not in (*kernels, "tpu"):
        assert any(line.startswith(platform) and "the reference runs" in line for line in lines)
    ran = {platform, *(["cpu"] if require is None else require)} & {*kernels, "tpu"}
    assert {line.split()[0] for line in lines if line.endswith(" ran")} == ran


def test_selftest_without_the_required_device(pretend, monkeypatch, capsys):
    """Kernels that are installed and cannot run are no success; unless required, a line says that they did not."""
    pretend({"cpu", "cuda"}, "cpu")
    monkeypatch.setattr(proof, "devices_of", lambda platform: {"cpu": "cpu"} if platform == "cpu" else {})
    assert __main__.main(["selftest", "--require", "cpu,cuda"]) == 1
    assert "required kernels did not run:\ncuda  not run: JAX sees no such device" in capsys.readouterr().out
    for require in (None, ("cpu",), ()):
        assert jax_rnnt.selftest(require=require) == [
            "cpu ran",
            "cuda  not run: not required, and not the default backend",
        ]


def test_platform_of_the_selftest(monkeypatch):
    """JAX names CUDA and ROCm devices "gpu" alike."""
    assert loading.default_platform() == platforms.platform()
    for version, expected in (("PJRT C API\nrocm 60300", "rocm"), ("PJRT C API\ncuda 12090", "cuda")):
        backend = types.SimpleNamespace(platform="gpu", platform_version=version)
        monkeypatch.setattr(loading.jax.extend.backend, "get_backend", lambda b=backend: b)
        assert loading.default_platform() == expected


# ------------------------------------------------------------------------------------------------- python -m jax_rnnt
def test_info(kernel, capsys, monkeypatch):
    """Versions, device, instruction set, and why other kernels are missing."""
    monkeypatch.setattr(sys, "argv", ["jax_rnnt", "info"])
    monkeypatch.delitem(sys.modules, "jax_rnnt.__main__")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("jax_rnnt", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert not caught.value.code
    assert lines[0].startswith(f"jax_rnnt {jax_rnnt.__version__}, jax {jax.__version__}")
    assert lines[1].startswith("device: ") and lines[2].startswith("kernels for cpu: ")
    note = importlib.import_module("jax_rnnt._build")
    assert all(not note.MISSING[platform] and note.COMPILERS[platform].strip() for platform in loading.KERNELS)
    monkeypatch.setattr(loading, "MISSING", {"cuda": "a reason: a cure"})
    assert __main__.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax_rnnt"] == jax_rnnt.__version__ and found["missing"] == {"cuda": "a reason: a cure"}
    assert set(found["kernels"]) == set(loading.KERNELS) == set(found["ffi"]) - {"runtime"}
    with pytest.raises(SystemExit) as caught:
        __main__.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"jax_rnnt {jax_rnnt.__version__}\n"


REQUIRED = dict.fromkeys(("--json", "--json selftest", "selftest --json", "selftest", ""))  # None
REQUIRED |= {"selftest --require cpu,cuda": ["cpu", "cuda"], "selftest --require=": []}


@pytest.mark.parametrize("arguments", REQUIRED)
def test_status_of_the_selftest(capsys, monkeypatch, arguments):
    """The status is 1 where kernels are wrong or missing; the answer holds the reason."""
    required, in_json = REQUIRED[arguments], "--json" in arguments
    monkeypatch.setattr(jax_rnnt, "selftest", lambda require: [f"a line, {require}"])
    assert __main__.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert (json.loads(out)["lines"] if in_json else out.splitlines())[-1] == f"a line, {required}"
    monkeypatch.setattr(jax_rnnt, "selftest", Mock(side_effect=RuntimeError("a reason")))
    assert __main__.main(arguments.split()) == 1
    out = capsys.readouterr().out
    assert json.loads(out)["error"] == "a reason" if in_json else out.endswith("a reason\n")


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "dtype", "classes"), [("rnnt", "bfloat16", 9), ("tdt", "float32", 9 + 5)])
def test_bench(capsys, monkeypatch, loss, dtype, classes):
    """A row for each implementation, with figures that fit the shape."""

    copies = iter(([1.0, 0.5], [0.75, 0.25, 0.5], [0.75]))  # of three sizes; the second has the fastest turn

    sizes = []

    def turns(function, *arguments, budget):
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(function(*arguments))))
        return next(copies, [0.75, 0.5, 0.25])

    monkeypatch.setattr(_bench, "_turns", turns)
    assert __main__.main(["bench", "2", "6", "3", "9", "--loss", loss, "--dtype", dtype, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    size = 2 * 6 * 4 * classes * (2 if dtype == "bfloat16" else 4)
    assert found["logits_bytes"] == size
    assert sizes[:3] == [size, size * 3 // 2, size * 2]
    copied = sizes[1] * (2**28 // sizes[1])  # in one turn
    assert found["copy_bytes_per_second"] == 2 * copied / 0.25
    rows = found["rows"]
    assert set(rows) == {"jax_rnnt", "its reference"} | ({"plain JAX"} if loss == "rnnt" else set())
    for row in rows.values():
        assert row["milliseconds"] == 500
        assert row["share_of_copy_bandwidth"] == pytest.approx(3 * size / 0.5 / (2 * copied / 0.25))
        assert row["memory_bytes"] >= size  # the gradient
    assert [line.split()[0] for line in _bench.text(found)[4:]] == [name.split()[0] for name in rows]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "2", "6", "3", "0"], "expected a positive integer, got 0"),
        (["bench", "2", "6", "3", "4", "--loss", "multiblank"], "V must be at least 5 for --loss multiblank, got 4"),
        (["bench", "2", "6", "3", "9", "--loss", "ctc"], "invalid choice: 'ctc'"),
        (["selftest", "--require", "tpu"], "require must be None or a sequence of 'cpu', 'cuda', got ['tpu']"),
    ],
)
def test_wrong_arguments_of_the_program(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        __main__.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err
