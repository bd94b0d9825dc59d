"""Do kernels run where they exist and fit, does the reference run elsewhere, and are missing kernels an error?

Extension modules of GPUs are faked; no GPU is needed.
"""

import itertools
import json
import re
import types
import warnings

import jax
import numpy as np
import pytest

import batches
import compare
import family
import hlo
import jax_rnnt
import platforms
from jax_rnnt import __main__, _checks, _selftest
from jax_rnnt._xla import devices, loading, primitive


def gradient_of(implementation, loss=family.RNNT, **options):
    return jax.jit(jax.value_and_grad(loss.value(implementation=implementation, **options).__call__))


def calls(function, p):
    return hlo.custom_calls(jax.jit(function).lower(*p).compile().as_text())


def shapes(p):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in p]


def test_kernel_is_one_custom_call_each(kernel):
    """None means the same on a platform with kernels. Posteriors call no backward kernel."""
    p, targets = batches.problem(dtype=np.float32), family.RNNT
    forward, backward, lattice = targets.gradient_calls
    for implementation in (kernel, None):
        loss = jax_rnnt.RNNTLoss(implementation=implementation)
        assert calls(loss, p) == hlo.once(targets.value_calls)
        assert calls(loss.label_log_probs, p) == hlo.once([forward])
        of_labels = jax.grad(lambda *p, ask=loss.label_log_probs: ask(*p).sum())
        assert calls(of_labels, p) == hlo.once([forward, backward])
        assert calls(loss.posteriors, p) == hlo.once([forward, lattice])
    options = {"fastemit_lambda": 0.1, "clamp": 1.0, "delay_penalty": 0.1, "fused_log_softmax": False}
    every_option = jax_rnnt.RNNTLoss(implementation=kernel, **options)
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        of_dtype, windows = p.astype(dtype), np.zeros((4, 4, 2), np.int32)
        assert calls(jax.value_and_grad(jax_rnnt.RNNTLoss()), of_dtype) == hlo.once(targets.gradient_calls)
        gradient = jax.value_and_grad(lambda *p: every_option(*p, label_windows=windows))
        assert calls(gradient, of_dtype) == hlo.once(targets.gradient_calls)


def lower_for(platform, implementation, p):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "no kernels for platform", once a process
        traced = gradient_of(implementation).trace(*shapes(p))
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_platform_of_the_lowering_decides(kernel):
    """Not that of the process. Without kernels, implementation="kernel" is an error; None runs the reference."""
    p = batches.problem(dtype=np.float32)
    here = lower_for(platforms.platform(), None, p)
    assert all(f"custom_call @{target}" in here for target in family.RNNT.gradient_calls)
    assert "custom_call @jax_rnnt" not in lower_for(platforms.platform(), "reference", p)
    assert "custom_call @jax_rnnt" not in lower_for("tpu", None, p)
    for platform in ("metal", "rocm"):
        with pytest.raises(NotImplementedError, match=platform):
            lower_for(platform, "kernel", p)
        assert "custom_call @jax_rnnt" not in lower_for(platform, None, p) + lower_for(platform, "reference", p)


def test_lowering_warns_in_the_callers_line(monkeypatch):
    monkeypatch.setattr(loading, "MISSING", {})
    primitive._warn.cache_clear()
    loss = jax_rnnt.RNNTLoss()
    with pytest.warns(RuntimeWarning, match="platform rocm") as seen:
        jax.jit(lambda *p: loss(*p)).trace(*shapes(batches.problem())).lower(lowering_platforms=("rocm",))
    assert {w.filename for w in seen if "platform rocm" in str(w.message)} == {__file__}


# ------------------------------------------------------------------------------------------------ limits of kernels
def beyond(loss, T, U, V):
    """(loss, arguments without data)"""
    given = (1, T, U + 1, V + loss.extra_classes), (1, U), (1,), (1,)
    return loss, [jax.ShapeDtypeStruct(s, t) for s, t in zip(given, (np.float32, *[np.int32] * 3))]


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
EMISSION, LATTICE = family.RNNT.gradient_calls[:2], family.RNNT.gradient_calls[2:]
BOTH = EMISSION + LATTICE
DURATIONS, BIG_BLANKS = family.tdt(range(33)), family.multiblank(range(2, 65))
BEYOND = {
    # name: (problem, the only platform with this limit or None, stages without a kernel, the reason)
    "durations": (beyond(DURATIONS, 3, 2, 4), None, LATTICE, "at most 64 arcs, got 65"),
    "big_blanks": (beyond(BIG_BLANKS, 3, 2, 65), None, BOTH, "at most (63 blank|64 arcs)"),
    "classes": (beyond(family.RNNT, 1, 0, (1 << 26) + 1), None, EMISSION, "at most 67108864 logits of a node"),
    "nodes": (beyond(family.RNNT, 1 << 16, (1 << 14) - 1, 2), "cuda", LATTICE, "at most 1073741823 nodes"),
    "nodes_of_emission": (beyond(family.RNNT, 1 << 17, (1 << 14) - 1, 2), "cuda", BOTH, "at most .* nodes"),
    "diagonals": (beyond(family.RNNT, 1 << 29, 0, 2), "cuda", LATTICE, "at most 536870911 diagonals"),
    "labels": (beyond(family.RNNT, 1, 22240, 2), "cuda", LATTICE, "at most 22240 columns"),
}


@pytest.mark.quick("nodes", "labels", "classes", "diagonals")
@pytest.mark.parametrize("case", BEYOND.values(), ids=BEYOND)
def test_problems_beyond_the_kernels(case, kernel, monkeypatch):
    """Such stages run on the reference, and a warning says why; with implementation="kernel" this is the error."""
    (loss, p), device, stages, reason = case
    monkeypatch.setattr(devices, "limits", lambda module: {})  # not those of the device here
    if device:
        monkeypatch.setitem(loading.LIMITS, platforms.platform(), CUDA | loading.LIMITS[platforms.platform()])
    primitive._warn.cache_clear()
    with pytest.raises(NotImplementedError, match=reason):
        gradient_of(kernel, loss).lower(*p)
    many_arcs = loss in (DURATIONS, BIG_BLANKS)  # the reference of their gradient takes long to trace
    program = jax.jit(loss.value().__call__) if many_arcs else gradient_of(None, loss)
    with pytest.warns(RuntimeWarning, match=f"pure-JAX reference.*{reason}"):
        text = program.lower(*p).as_text()
    calls = loss.value_calls if many_arcs else loss.gradient_calls
    left_out = {target.replace("lattice_grad", "lattice_loss") if many_arcs else target for target in stages}
    assert all((f"custom_call @{target}" in text) == (target not in left_out) for target in calls)


def test_limits_of_each_device(kernel):
    """The modules use the same names as these tests, so that every lookup finds its limit."""
    common = {"blanks": 63, "durations": 63, "row": 1 << 26, "arcs": 64, "arc_labels": 1}
    for platform, device in loading.KERNELS.items():
        assert loading.LIMITS[platform] == common | (CUDA if device == "cuda" else {})
        if platforms.platform() != "cuda":  # no device changes them
            assert loading.missing(platform) is None
            assert loading.limits(platform) == loading.LIMITS[platform]


@pytest.mark.parametrize(("kernels", "lacks"), [("cuda", "joint"), ("cpu", "limits")])
def test_module_of_an_older_source(kernels, lacks, monkeypatch):
    """A module without limits that Python asks for is not used, and the reason says how to build it anew."""
    fields = {"api_version": lambda: (0, 1), "kernels": kernels, "registrations": dict, "workspace": None}
    old = types.SimpleNamespace(**fields, **({} if lacks == "limits" else {"limits": dict}))
    monkeypatch.setattr(loading._installation, "extension", lambda name: old)
    monkeypatch.setattr(loading, "PLATFORMS", (("other", "OTHER", "_other"),))
    monkeypatch.setattr(loading, "TARGETS", ())
    loading._load()
    assert "other" not in loading.KERNELS
    assert re.search("jax_rnnt._other was built from an older source: run `.*`", loading.MISSING.pop("other"))


# ------------------------------------------------------------------------------------------------ devices of a GPU
# (major, minor, bytes of shared memory of a block), from the CUDA C++ programming guide's table of compute capabilities
V100, T4, A100 = (7, 0, 96 << 10), (7, 5, 64 << 10), (8, 0, 163 << 10)
A10, H100, B200 = (8, 6, 99 << 10), (9, 0, 227 << 10), (10, 0, 227 << 10)
WHEEL = "75-real 80-real 90-real 100"


def module(*found, driver=13000, runtime=13000, architectures=WHEEL):
    """What the extension module says on a machine with these devices; 32 columns take 128 bytes, a warp 8256."""
    return types.SimpleNamespace(
        devices=lambda: list(found),
        driver_version=lambda: driver,
        runtime_version=runtime,
        architectures=architectures,
        limits_of_shared_memory=lambda shared: {"unit_columns": (shared - 12352) // 128 * 32},
    )


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (module(driver=0), None),  # no driver: a program compiled ahead of time
        (module(T4, A100, A10, H100, B200), None),
        (module((12, 0, 99 << 10)), None),  # by PTX
        (module(H100, driver=13020, runtime=13000), None),
        (module(H100, driver=12080, runtime=12000), None),
        (module(H100, architectures="native"), None),
        (module(A10, architectures="80-real"), None),  # code of a minor version runs on later ones
        (module(A100, architectures="75"), None),  # by PTX
        (
            module(H100, driver=11080, runtime=12090),
            "CUDA 12.9, and .* CUDA 11.8 at most: update it, or .* of CUDA 11 on",
        ),
        (module(H100, V100), "none for device 1, of compute capability 7.0: hide it by CUDA_VISIBLE_DEVICES$"),
        (module(H100, architectures="80-real"), "have code for 80-real, and none for device 0.*ARCHITECTURES=90`"),
        (module(A100, architectures="86-real"), "none for device 0"),  # no code for an earlier minor version
        (module(A100, architectures="90"), "none for device 0"),  # nor PTX for an earlier device
        (module(H100, architectures="75-virtual", driver=12060, runtime=12090), "none for device 0"),
    ],
)
def test_reason_and_cure(fake, reason):
    """A driver of an older CUDA cannot run the kernels; one of an older minor version cannot compile their PTX."""
    found = devices.unfit(fake)
    assert (found is None) == (reason is None), found
    if reason:
        assert re.search(reason, found), found


def test_limits_are_of_the_smallest_device():
    assert devices.limits(module()) == {}  # nothing is known: those of the module stay
    assert devices.limits(module(H100, T4, A100)) == {"unit_columns": 13280}
    assert devices.limits(module(H100)) == {"unit_columns": 55008}
    assert devices.limits(types.SimpleNamespace()) == {}  # the kernels of the CPU


@pytest.fixture
def fake(monkeypatch, kernel):
    """Puts another answer of the module in place of that of this platform's kernels."""
    primitive._warn.cache_clear()
    return lambda answer: monkeypatch.setattr(loading, "module", lambda platform: answer)


@pytest.mark.slow
def test_unfit_devices_run_the_reference(fake):
    """One warning for all kernels; the result is right, and no custom call is left in the program."""
    fake(module(V100))  # what else is unfit: `test_reason_and_cure`
    p = batches.problem(dtype=np.float32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.clear_caches()
        got = compare.evaluate(family.RNNT, p, None)
        text = gradient_of(None).lower(*p).as_text()
    compare.assert_matches(got, family.RNNT.expected(p), np.float32, 11)
    assert "custom_call @jax_rnnt" not in text
    (warning,) = (w for w in seen if "jax_rnnt" in str(w.message))
    assert str(warning.message).startswith("jax_rnnt runs on its pure-JAX reference: the CUDA kernels ")
    with pytest.raises(NotImplementedError, match=r"implementation='kernel': .* for this: the CUDA kernels"):
        gradient_of("kernel").lower(*p)
    with pytest.raises(RuntimeError, match=r"required kernels are missing:\n.*the CUDA kernels"):
        jax_rnnt.selftest(require=(platforms.platform(),))
    assert "the reference runs: the CUDA kernels" in jax_rnnt.selftest(require=())[0]
    jax.clear_caches()
    compare._compiled.cache_clear()


def test_module_without_a_gpu(kernel):
    """What the extension module of CUDA answers on a machine without a driver."""
    found = loading.module("cuda")
    if found is None or not hasattr(found, "devices") or platforms.platform() == "cuda":
        pytest.skip("needs the kernels of CUDA and no GPU")
    assert devices.unfit(found) is None
    assert found.limits()["unit_columns"] == UNIT_COLUMNS[99]
    for size, columns in UNIT_COLUMNS.items():
        assert found.limits_of_shared_memory(size << 10)["unit_columns"] == columns


# ---------------------------------------------------------------------------------------------------------- selftest
def some_kinds(monkeypatch, step):
    for name in ("EMISSIONS", "LATTICES"):
        monkeypatch.setattr(_selftest, name, dict([*getattr(_selftest, name).items()][::step]))


@pytest.mark.slow
def test_selftest(kernel, capsys, monkeypatch):
    """One line a kernel and kind, with every dtype, returned and not printed, all within rounding.

    Of some kinds: all of them run when CI installs the package.
    """
    some_kinds(monkeypatch, 5)
    lines = jax_rnnt.selftest()
    assert not capsys.readouterr().out
    emissions, lattices = ("_fwd", "_bwd"), ("_loss", "_grad")
    table = [(_selftest.EMISSIONS, emissions, _checks.FLOATS), (_selftest.LATTICES, lattices, _checks.FLOATS[2:])]
    for kinds, names, dtypes in table:
        for kind, name in itertools.product(kinds, names):
            (line,) = (
                line for line in lines if re.match(rf"{platforms.platform()} +jax_rnnt_\w+{name} +{kind}  ", line)
            )
            assert all(f"{dtype} " in line for dtype in dtypes) and line.endswith("  ok")
    if platforms.platform() == "cpu":
        assert [line for line in lines if not line.endswith("  ok")] == [lines[-1]] and "not run: " in lines[-1]


@pytest.mark.parametrize(("place", "factor"), [(-1, np.nan), (0, 1.01)])
def test_selftest_notices_a_wrong_kernel(kernel, monkeypatch, capsys, place, factor):
    """One result that is NaN or off by 1% decides; every wrong kernel is named, and the status is 1."""

    def spoiled(function):
        def wrong(*problem):
            results = function(*problem)
            for arrays in results.values():
                for kind in arrays:
                    arrays[kind] = jax.tree.leaves(arrays[kind])
                    arrays[kind][place] *= np.float32(factor)
            return results

        return wrong

    for name in ("_emission_kernels", "_lattice_kernels"):
        monkeypatch.setattr(_selftest, name, spoiled(getattr(_selftest, name)))
    some_kinds(monkeypatch, 99)
    monkeypatch.setattr(_checks, "FLOATS", ("float32",))
    assert __main__.main(["selftest", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and "disagree" in found["error"]
    assert all(f"{target} " in found["error"] for target in family.RNNT.value_calls + family.RNNT.gradient_calls)
