"""Do kernels run where they exist, does the reference run elsewhere, and is it an error to ask for missing kernels?"""

import functools
import itertools
import os
import re
import subprocess
import sys
import textwrap
import warnings

import jax
import numpy as np
import pytest

import jax_rnnt
import losses
from jax_rnnt import _checks
from jax_rnnt._xla import devices, loading, primitive
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.lattices._topology import STANDARD, durations


def gradient_of(loss, implementation):
    return jax.jit(jax.value_and_grad(lambda *p: loss(*p, implementation=implementation)))


def value_of(loss, implementation):
    return jax.jit(lambda *p: loss(*p, implementation=implementation))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_kernel_is_one_custom_call_each(loss, kernel, dtype):
    """None means the same on a platform with kernels, with every option on."""
    p = losses.problem(loss=loss, dtype=dtype)
    for implementation in (kernel, None):
        text = value_of(loss, implementation).lower(*p).compile().as_text()
        assert losses.custom_calls(text) == losses.once(loss.value_calls)
        text = gradient_of(loss, implementation).lower(*p).compile().as_text()
        assert losses.custom_calls(text) == losses.once(loss.gradient_calls)
    options = {"fastemit_lambda": 0.1, "clamp": 1.0, "delay_penalty": 0.1, "fused_log_softmax": False}
    options["label_windows"] = np.zeros((4, 4, 2), np.int32)
    call = jax.jit(jax.value_and_grad(lambda *p: loss(*p, implementation=kernel, **options)))
    assert losses.custom_calls(call.lower(*p).compile().as_text()) == losses.once(loss.gradient_calls)


def test_reference_has_no_custom_call(loss):
    p = losses.problem(loss=loss, dtype=np.float32)
    for call in (value_of(loss, "reference"), gradient_of(loss, "reference")):
        assert not losses.custom_calls(call.lower(*p).compile().as_text())


def test_posteriors_call_no_backward(kernel):
    p = losses.problem(dtype=np.float32)
    text = jax.jit(lambda *p: jax_rnnt.rnnt_posteriors(*p, implementation=kernel)).lower(*p).compile().as_text()
    assert losses.custom_calls(text) == losses.once(["jax_rnnt_softmax_emission_fwd", "jax_rnnt_lattice_grad"])


def lower_for(platform, call, p):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in p]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "no kernels for platform", once a process
        return call.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["metal", "rocm"])
def test_platform_without_kernels(loss, platform):
    """implementation="kernel" is an error that says so; None runs the reference."""
    p = losses.problem(loss=loss, dtype=np.float32)
    with pytest.raises(NotImplementedError, match=platform):
        lower_for(platform, gradient_of(loss, "kernel"), p)
    for implementation in (None, "reference"):
        assert "custom_call @jax_rnnt" not in lower_for(platform, gradient_of(loss, implementation), p)


def test_platform_of_the_lowering_decides(loss, kernel):
    """Not the platform of the process: a program for this platform has the kernels, one for tpu does not."""
    p = losses.problem(loss=loss, dtype=np.float32)
    here = lower_for(losses.platform(), gradient_of(loss, None), p)
    assert all(f"custom_call @{target}" in here for target in loss.gradient_calls)
    assert "custom_call @jax_rnnt" not in lower_for("tpu", gradient_of(loss, None), p)


def beyond(loss, T, U, V):
    """(loss, arguments without data)"""
    shapes = (1, T, U + 1, V + loss.extra_classes), (1, U), (1,), (1,)
    return loss, [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, (np.float32, *[np.int32] * 3))]


# Most columns U + 1 for unit steps, by KiB of shared memory; 99 without devices. check.cc asks the C++ for all three.
UNIT_COLUMNS = {64: 13280, 99: 22240, 227: 55008}
# Limits of the CUDA kernels, to replace missing ones on other platforms.
CUDA = {
    "emission_nodes": (1 << 31) - 1,
    "lattice_nodes": (1 << 30) - 1,
    "diagonals": (1 << 29) - 1,
    "sequences": (1 << 31) - 1,
    "unit_columns": UNIT_COLUMNS[99],
}
EMISSION, LATTICE = losses.RNNT.gradient_calls[:2], losses.RNNT.gradient_calls[2:]
BOTH = EMISSION + LATTICE
BEYOND = {
    # name: (problem, the only platform with this limit or None, stages without a kernel, the reason)
    "durations": (beyond(losses.tdt(range(33)), 3, 2, 4), None, LATTICE, "at most 64 arcs, got 65"),
    "big_blanks": (beyond(losses.multiblank(range(2, 65)), 3, 2, 65), None, BOTH, "at most (63 blank|64 arcs)"),
    "classes": (beyond(losses.RNNT, 1, 0, (1 << 26) + 1), None, EMISSION, "at most 67108864 logits of a node"),
    "nodes": (beyond(losses.RNNT, 1 << 16, (1 << 14) - 1, 2), "cuda", LATTICE, "at most 1073741823 nodes"),
    "nodes_of_emission": (beyond(losses.RNNT, 1 << 17, (1 << 14) - 1, 2), "cuda", BOTH, "at most .* nodes"),
    "diagonals": (beyond(losses.RNNT, 1 << 29, 0, 2), "cuda", LATTICE, "at most 536870911 diagonals"),
    "labels": (beyond(losses.RNNT, 1, 22240, 2), "cuda", LATTICE, "at most 22240 columns"),
}


@pytest.mark.parametrize("case", BEYOND.values(), ids=BEYOND)
def test_problems_beyond_the_kernels(case, kernel, monkeypatch):
    """Such stages run on the reference, and a warning says why; with implementation="kernel" this is the error."""
    (loss, p), device, stages, reason = case
    monkeypatch.setattr(devices, "limits", lambda module: {})  # those of the device here: test_devices.py
    if device:
        monkeypatch.setitem(loading.LIMITS, losses.platform(), CUDA | loading.LIMITS[losses.platform()])
    primitive._warn_reference.cache_clear()
    with pytest.raises(NotImplementedError, match=reason):
        gradient_of(loss, kernel).lower(*p)
    with pytest.warns(RuntimeWarning, match=f"pure-JAX reference.*{reason}"):
        text = gradient_of(loss, None).lower(*p).as_text()
    assert all((f"custom_call @{target}" in text) == (target not in stages) for target in loss.gradient_calls)


def test_limits_of_each_device(kernel):
    """The modules use the same names as these tests, so that every lookup finds its limit."""
    common = {"blanks": 63, "durations": 63, "row": 1 << 26, "arcs": 64, "arc_labels": 1}
    for platform, device in loading.KERNELS.items():
        assert loading.LIMITS[platform] == common | (CUDA if device == "cuda" else {})


def test_limits_in_the_text():
    """Docstrings and documentation name the limits that the modules export."""
    pages = [losses.ROOT / "README.md", *(losses.ROOT / "docs").glob("*.md")]
    texts = {page.name: page.read_text() for page in pages}
    for name in jax_rnnt.__all__:
        texts[name] = getattr(jax_rnnt, name).__doc__ or ""
    limits = CUDA | loading.LIMITS[losses.platform()]
    least, usual, most = UNIT_COLUMNS.values()
    for name, text in texts.items():
        text = " ".join(text.split())
        for written in re.findall(r"U < (\d{4,})", text):
            assert int(written) in UNIT_COLUMNS.values(), name
        for written in re.findall(r"U < \d{4,} \(([^)]*shared memory[^)]*)\)", text):
            assert re.findall(r"\d+", written) == [str(least), str(most)], name
        for pattern, limit in ((r"T \(U \+ 1\) < 2\^(\d+)", "lattice_nodes"), (r"T \+ U < 2\^(\d+)", "diagonals")):
            for written in re.findall(pattern, text):
                assert 2 ** int(written) == limits[limit] + 1, name
        for written in re.findall(r"(?:V <=|at most) 2\^(\d+)(?:;| logits)", text):
            assert 2 ** int(written) == limits["row"], name
    for name in ("rnnt_loss", "losses.md"):
        assert f"U < {usual} (" in texts[name] and "T (U + 1) < 2^" in texts[name]
    for number in UNIT_COLUMNS.values():
        assert f"U < {number}" in texts["cuda.md"]


@pytest.mark.parametrize("unit_steps", [False, True])
def test_workspace(unit_steps, kernel):
    """Elements per sequence, by the formulas in the heads of the kernels."""
    topology = STANDARD if unit_steps else durations((2, 0, 1))
    attributes = lattice._attributes(topology)
    arcs = len(attributes["dt"])
    sizes, cuda = loading.WORKSPACES[losses.platform()], loading.KERNELS[losses.platform()] == "cuda"
    for frames, columns in ((0, 1), (1, 1), (8, 5), (9, 33), (65, 64)):
        nodes, tiles = frames * columns, -(-frames // 32) * -(-columns // 32)
        first = jax.ShapeDtypeStruct((3, frames, columns), np.float32)
        for gradient in (False, True):
            if cuda:
                # Groups of 8 frames: one more of arcs and four of values; 12 running values, 4 for alignment.
                groups = -(-frames // 8) + 1 + 4
                expected = (16 * groups + 16) * columns + tiles if unit_steps else (4 + arcs) * nodes + arcs * tiles
            else:
                expected = 2 * -(-frames // 8) * columns * gradient if unit_steps else 2 * frames * (columns + 32)
            assert lattice._workspace(sizes, first, gradient=gradient, **attributes) == expected + expected % 2


def test_as_many_durations_as_the_kernels_take(kernel):
    loss = losses.tdt(range(32))
    p = losses.problem(loss=loss)
    losses.assert_matches(losses.evaluate(loss, p, kernel), loss.expected(p), np.float64, 11)


def test_one_stage_without_kernel(kernel, monkeypatch):
    """With too many arcs, the lattice runs on the reference, the emission on the kernel."""
    monkeypatch.setitem(loading.LIMITS, losses.platform(), loading.LIMITS[losses.platform()] | {"arcs": 16})
    loss = losses.tdt(range(9))
    p = losses.problem(loss=loss)
    with pytest.warns(RuntimeWarning, match="at most 16 arcs, got 17"):
        got = losses.evaluate(loss, p, None)
    losses.assert_matches(got, loss.expected(p), np.float64, 11)


def test_selftest(kernel, capsys):
    """One line a kernel and kind, with every dtype, returned and not printed, all within rounding."""
    from jax_rnnt import _selftest

    lines = jax_rnnt.selftest()
    assert not capsys.readouterr().out
    emissions, lattices = ("_fwd", "_bwd"), ("_loss", "_grad")
    table = [(_selftest.EMISSIONS, emissions, _checks.FLOATS), (_selftest.LATTICES, lattices, _checks.FLOATS[2:])]
    for kinds, names, dtypes in table:
        for kind, name in itertools.product(kinds, names):
            (line,) = (line for line in lines if re.match(rf"{losses.platform()} +jax_rnnt_\w+{name} +{kind}  ", line))
            assert all(f"{dtype} " in line for dtype in dtypes) and line.endswith("  ok")
    if losses.platform() == "cpu":
        assert [line for line in lines if not line.endswith("  ok")] == [lines[-1]] and "not run: " in lines[-1]


def test_selftest_notices_a_wrong_kernel(kernel, monkeypatch):
    """The self-test fails if any kernel is off by 1%."""
    from jax_rnnt import _selftest

    def wrong(right, *problem):
        return jax.tree.map(lambda x: x * x.dtype.type(1.01), right(*problem))

    for name in ("_emission_kernels", "_lattice_kernels"):
        monkeypatch.setattr(_selftest, name, functools.partial(wrong, getattr(_selftest, name)))
    for name in ("EMISSIONS", "LATTICES"):
        monkeypatch.setattr(_selftest, name, dict([*getattr(_selftest, name).items()][:1]))
    monkeypatch.setattr(_checks, "FLOATS", ("float32",))
    with pytest.raises(RuntimeError) as caught:
        jax_rnnt.selftest()
    for target in losses.RNNT.value_calls + losses.RNNT.gradient_calls:
        assert target in str(caught.value)


WITHOUT_EXTENSION = """
import sys, warnings
sys.modules["jax_rnnt._cpu"] = None
import jax
jax.config.update("jax_enable_x64", True)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import jax_rnnt
    ours = [w for w in seen if "jax_rnnt" in str(w.message)]
assert len(ours) == 1, [str(w.message) for w in seen]
import numpy as np
import losses
p = losses.problem()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    losses.assert_matches(losses.evaluate(losses.RNNT, p, None), losses.RNNT.expected(p), np.float64, 11)
    assert "without" not in str(jax_rnnt.export_checks())
    assert "the reference runs" in jax_rnnt.selftest(require=())[0]
try:
    jax_rnnt.selftest()
except RuntimeError as error:
    assert "jax_rnnt._cpu" in str(error) and "pip install" in str(error), error
else:
    raise AssertionError("the kernels of the CPU are always required")
try:
    jax_rnnt.rnnt_loss(*p, implementation="kernel")
except NotImplementedError as error:
    assert "cpu" in str(error) and "reference" in str(error), error
else:
    raise AssertionError("a kernel without an extension module")
print("ok")
"""


def test_without_extension_module():
    """A pure-Python install imports with one warning and runs the reference; asking for kernels is an error."""
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_EXTENSION)]
    options = dict(cwd=losses.HERE, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=300)
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr


def test_import_starts_no_backend():
    """Importing must not initialise JAX: users still want to set devices and flags."""
    program = "import jax_rnnt, jax; jax.config.update('jax_num_cpu_devices', 3); " + (
        "assert len(jax.devices('cpu')) == 3"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=losses.HERE, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
