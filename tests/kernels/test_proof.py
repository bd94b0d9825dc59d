"""Is a kernel the default only where a record, a verdict of this device or the user says so, and who gives verdicts?

Programs are lowered for TPUs and GPUs that this machine does not have; devices are faked.
"""

import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import re
import types
import warnings

import jax
import jaxlib
import numpy as np
import pytest
from jax import export
from jax.interpreters import mlir

import batches
import family
import jax_rnnt
import platforms
from jax_rnnt import JointLogits, LinearJoint, __main__, _checks, _selftest, _selftest_joint
from jax_rnnt._xla import loading, primitive, proof
from jax_rnnt.emissions import _softmax as softmax
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.tiles import joint
from project import ROOT

pytestmark = [
    pytest.mark.no_kernel,
    pytest.mark.skipif(platforms.platform() != "cpu", reason="fakes the devices of others"),
]
NO_PALLAS = pytest.mark.skipif(jax.__version_info__ < primitive.PALLAS, reason="before the Pallas of the TPU kernels")
PLATFORMS = pytest.mark.parametrize("platform", [pytest.param("tpu", marks=NO_PALLAS), "cuda"])
OF_LOSS = softmax.forward_kernel, softmax.backward_kernel, lattice._loss_kernel, lattice._grad_kernel


def test_list():
    """Every kernel is in it by name, no other name is, and each that is vouched for has the record of a device."""
    source = (ROOT / "xla_kernels/cuda/ffi.cu").read_text()
    assert set(proof.KERNELS["cuda"]) == set(re.findall(r'stages\("(\w+)"', source))
    in_pallas = {kernel.target for kernel in OF_LOSS if kernel.tpu}
    joint = {"jax_rnnt_joint_fwd", "jax_rnnt_joint_bwd"}
    assert set(proof.KERNELS["tpu"]) == in_pallas | joint
    assert set(proof.KERNELS) == {"cuda", "tpu"}
    assert not any(proof.KERNELS["tpu"].values())
    vouched = {name for name, record in proof.KERNELS["cuda"].items() if record}
    assert vouched == {kernel.target for kernel in OF_LOSS}
    for record in {proof.KERNELS["cuda"][name] for name in vouched}:
        text = (ROOT / record).read_text()
        assert "NVIDIA" in text and "718 passed, 0 failed" in text and "selftest: exit code 0" in text


# ------------------------------------------------------------------------------------------------ who gets which kernel
KINDS = {"tpu": "TPU v5 lite", "cuda": "NVIDIA L4"}
MARKS = {"tpu": 'kernel_name = "(jax_rnnt_\\w+)"', "cuda": "@(jax_rnnt_\\w+)\\("}
# Of the value of RNNTLoss on a linear joint network; without proof, tiles take the loss's kernels on a GPU.
PROVEN = {
    "tpu": {"jax_rnnt_joint_forward", "jax_rnnt_lattice_alpha"},
    "cuda": {"jax_rnnt_joint_fwd", "jax_rnnt_lattice_loss"},
}
UNPROVEN = {"tpu": set(), "cuda": {"jax_rnnt_softmax_emission_fwd", "jax_rnnt_lattice_loss"}}


def device(kind, driver="libtpu 0.0.1"):
    return types.SimpleNamespace(
        device_kind=kind, platform="other", client=types.SimpleNamespace(platform_version=driver)
    )


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_RNNT_KERNELS", raising=False)
    primitive._warn.cache_clear()
    return tmp_path / "jax_rnnt"


def compiled_for_cuda(monkeypatch):
    """What a build with CUDA kernels answers."""
    monkeypatch.setitem(loading.KERNELS, "cuda", "cuda")
    monkeypatch.setitem(loading.LIMITS, "cuda", {})
    monkeypatch.setitem(loading.WORKSPACES, "cuda", lambda *_: [])
    monkeypatch.delitem(loading.MISSING, "cuda", raising=False)
    fake = types.SimpleNamespace(
        devices=list, driver_version=lambda: 0, runtime_version=13000, architectures="80",
        limits_of_shared_memory=lambda _: {}, joint_shared_bytes=lambda rows, row_bytes: 0,
        joint={
            "shared_bytes": 1, "columns": 8, "classes": 128, "unit_bytes": 128, "rows": {2: [32], 4: [32]}, "blocks": 9,
            "activations": ["tanh"],
        },
    )  # fmt: skip
    own = loading.module
    monkeypatch.setattr(loading, "module", lambda platform: fake if platform == "cuda" else own(platform))
    for kernel in OF_LOSS:
        mlir.register_lowering(kernel.primitive, functools.partial(kernel.lower, platform="cuda"), platform="cuda")


def shapes(dtype=np.float32):
    like = lambda *shape, kind=np.int32: jax.ShapeDtypeStruct(shape, kind)
    return like(8, 9, kind=dtype), like(2, 7, 8, kind=dtype), like(2, 5, 8, kind=dtype), like(2, 4), like(2), like(2)


def lowered(platform, implementation=None, exported=False):
    """(kernels in the program, warnings of this library)"""

    def mean(weight, encoder, predictor, *rest):
        logits = JointLogits(LinearJoint(weight), encoder, predictor)
        return jax_rnnt.RNNTLoss(implementation=implementation)(logits, *rest)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if exported:
            made = export.export(jax.jit(mean), platforms=[platform], disabled_checks=jax_rnnt.export_checks())
            text = made(*shapes()).mlir_module()
            found = {"tpu_custom_call"} if "@tpu_custom_call" in text else set(re.findall(MARKS["cuda"], text))
        else:
            traced = jax.jit(mean).trace(*shapes())
            text = traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)
            found = set(re.findall(MARKS[platform], text))
    return found, [str(w.message) for w in seen if "jax_rnnt" in str(w.message)]


def verdict(platform, cache, change):
    """A verdict for the device, of a selftest with this change: a monkeypatch context of its own."""
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        assert str(cache) in proof.keep(platform, device(KINDS[platform]))


OF_OTHERS = {  # a verdict of another selftest does not count
    "build": lambda patch: patch.setattr(proof, "build", lambda platform: "another"),
    "jaxlib": lambda patch: patch.setattr(jaxlib, "__version__", "0.4.0"),
    "driver": lambda patch: patch.setattr(proof, "_driver", lambda device: "libtpu 0.0.0"),
    "device": lambda patch: patch.setitem(KINDS, "tpu", "TPU v4") or patch.setitem(KINDS, "cuda", "NVIDIA A10"),
}


@PLATFORMS
def test_choice(platform, cache, monkeypatch):
    """Each way to a kernel, on a device of this process; one warning a process names kernels, device and cure."""
    if platform == "cuda":
        compiled_for_cuda(monkeypatch)
    found = {KINDS[platform]: device(KINDS[platform])}
    monkeypatch.setattr(proof, "devices_of", lambda name: found if name == platform else {})

    def check(proven, warning, **options):
        primitive._warn.cache_clear()
        kernels, texts = lowered(platform, **options)
        assert kernels == (PROVEN if proven else UNPROVEN)[platform]
        assert len(texts) == (0 if warning is None else 1), texts
        if warning is not None:
            assert re.search(warning, texts[0]), texts[0]
            assert all(name in texts[0] for name, record in proof.KERNELS[platform].items() if record is None)
            assert "`python -m jax_rnnt selftest`" in texts[0]

    check(False, f"on {KINDS[platform]}, .* the default from then on")
    assert lowered(platform) == (UNPROVEN[platform], [])  # the second program warns no more
    check(True, None, implementation="kernel")
    for change in OF_OTHERS.values():
        verdict(platform, cache, change)
        check(False, f"on {KINDS[platform]}, ")
    for path in cache.iterdir():
        path.unlink()
    verdict(platform, cache, lambda patch: None)
    (path,) = cache.iterdir()
    kept = json.loads(path.read_text())
    assert (kept["device"], kept["jaxlib"], kept["driver"]) == (KINDS[platform], jaxlib.__version__, "libtpu 0.0.1")
    check(True, None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check(False, "of several processes|for several processes")
    monkeypatch.setenv("JAX_RNNT_KERNELS", "all")
    check(True, None)
    monkeypatch.setenv("JAX_RNNT_KERNELS", "al")
    with pytest.raises(ValueError, match="JAX_RNNT_KERNELS must be 'all' or not be set, got 'al'"):
        lowered(platform)
    monkeypatch.delenv("JAX_RNNT_KERNELS")
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    found["another kind"] = device("another kind")
    check(False, f"on {KINDS[platform]} and another kind, ")
    del found["another kind"]
    good = path.read_bytes()
    for text in (b"", b"\xff", b"{}", good[:-9], good.replace(b'"right"', b'"wrong"')):
        path.write_bytes(text)
        check(False, f"on {KINDS[platform]}, ")


@PLATFORMS
def test_ahead_of_time(platform, cache, monkeypatch):
    """No device is asked: neither where this process has none, nor in an export, whatever verdict there is."""
    if platform == "cuda":
        compiled_for_cuda(monkeypatch)
    kernels, (text,) = lowered(platform)
    assert (
        kernels == UNPROVEN[platform] and f"on platform {platform}" in text and "ahead of time asks no device" in text
    )
    verdict(platform, cache, lambda patch: None)
    found = {KINDS[platform]: device(KINDS[platform])}
    monkeypatch.setattr(proof, "devices_of", lambda name: found if name == platform else {})
    assert lowered(platform) == (PROVEN[platform], [])
    in_export = {"tpu": {"tpu_custom_call"}, "cuda": PROVEN["cuda"]}
    primitive._warn.cache_clear()
    kernels, (text,) = lowered(platform, exported=True)
    assert kernels == UNPROVEN[platform] and "ahead of time" in text
    monkeypatch.setenv("JAX_RNNT_KERNELS", "all")
    assert lowered(platform, exported=True) == (in_export[platform], [])


def test_cpu_needs_no_proof(cache, monkeypatch):
    assert proof.unvouched("cpu") == []
    monkeypatch.setenv("JAX_RNNT_KERNELS", "none")
    with pytest.raises(ValueError, match="JAX_RNNT_KERNELS must be"):
        jax.jit(jax_rnnt.RNNTLoss().__call__).lower(*batches.problem())
    with pytest.raises(SystemExit):
        __main__.main(["info"])


# ------------------------------------------------------------------------------------------------------ who gives it
def spoilt(function, place):
    def wrong(*operands, **options):
        results = function(*operands, **options)
        return tuple(
            jax.tree.map(lambda x: x * np.float32(1.01), x) if i == place else x for i, x in enumerate(results)
        )

    return wrong


def raising(*_, **__):
    raise RuntimeError("Mosaic failed to compile the kernel:\nmany lines")


@NO_PALLAS
@pytest.mark.parametrize(
    ("kernel", "broken", "wrong"),
    [
        (None, None, set()),
        family.slow(
            "forward", lambda f: spoilt(f, 1), {"jax_rnnt_joint_bwd"}
        ),  # the norm is for the backward pass alone
        ("backward", lambda f: spoilt(f, 1), {"jax_rnnt_joint_bwd"}),
        ("forward", lambda f: raising, {"jax_rnnt_joint_fwd", "jax_rnnt_joint_bwd"}),
    ],
    ids=["tpu-right", "tpu-residuals", "tpu-gradient", "tpu-raises"],
)
def test_comparison_of_joint_networks(kernel, broken, wrong, monkeypatch):
    """The TPU's kernels, interpreted; one that is off by 1% or raises is found, named, and its error told."""
    monkeypatch.setitem(loading.INTERPRETED, "cpu", True)
    case = _selftest_joint.Case(jax_rnnt.RNNTLoss, jax.numpy.tanh, 4, 5, 4, 9, 7)
    monkeypatch.setattr(_selftest_joint, "CASES", {"tiny": case})
    monkeypatch.setattr(_selftest_joint, "VARIANTS", _selftest_joint.VARIANTS[-1:])
    if kernel:
        right = joint.KERNELS["tpu"]
        wrong_one = dataclasses.replace(right, **{kernel: broken(getattr(right, kernel))})
        monkeypatch.setitem(joint.KERNELS, "tpu", wrong_one)
    good, bad = _selftest_joint.compare("cpu", jax.devices("cpu")[0], jax.devices("cpu")[0])
    assert {line.split()[1] for line in bad} == wrong
    assert {line.split()[1] for line in good + bad} == {"jax_rnnt_joint_fwd", "jax_rnnt_joint_bwd"}
    if broken is None:
        return
    for line in bad:
        told = re.search(
            r"float32 highest (raises RuntimeError: Mosaic failed to compile the kernel:|\S+)  WRONG", line
        )
        assert told, line
        assert told[1].startswith("raises") or 1e-3 < float(told[1]) < 1


def test_verdicts_at_once(cache):
    """Threads that keep one verdict together all keep it; one that cannot be kept leaves nothing behind."""
    here = device(KINDS["tpu"])
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        told = set(pool.map(lambda _: proof.keep("tpu", here), range(64)))
    (path,) = cache.iterdir()
    assert len(told) == 1 and f"verdict in {path}" in told.pop() and proof.proven("tpu", here)
    path.unlink()
    path.mkdir()
    assert "cannot be kept" in proof.keep("tpu", here) and not proof.proven("tpu", here)
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("outcome", ["right", "wrong", "unwritable", "no home", "old"])
def test_verdict_of_the_command(outcome, cache, monkeypatch, capsys):
    """Kept where all lines are right, and only there; a cache that cannot be written is said."""
    here = device(KINDS["cuda"])
    monkeypatch.setattr(proof, "devices_of", lambda name: {here.device_kind: here} if name == "cuda" else {})
    monkeypatch.setattr(loading, "default_platform", lambda: "cuda")
    monkeypatch.setattr(loading, "missing", lambda name: None)
    monkeypatch.setitem(loading.KERNELS, "cuda", "cuda")
    line = "cuda  jax_rnnt_joint_bwd            rnnt, tanh               float32 1.0e+00  "
    ok, bad = ([], [line + "WRONG"]) if outcome == "wrong" else ([line + "ok"], [])
    monkeypatch.setattr(_selftest, "_compare", lambda *_: (["cuda  jax_rnnt_lattice_loss  standard  ok"], []))
    monkeypatch.setattr(_selftest_joint, "compare", lambda *_: ([], []) if outcome == "old" else (ok, bad))
    if outcome == "unwritable":
        (cache.parent / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent / "file"))
    if outcome == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(pathlib.Path, "home", raising)
    assert __main__.main(["selftest", "--require", "cuda"]) == (1 if outcome == "wrong" else 0)
    text = capsys.readouterr().out
    assert proof.proven("cuda", here) == (outcome == "right")
    assert cache.exists() == (outcome == "right")
    if outcome == "old":  # a device without tensor cores has no kernel that needs a verdict
        return
    assert f"device NVIDIA L4, driver libtpu 0.0.1, jaxlib {jaxlib.__version__}" in text
    told = {"right": f"verdict in {cache}", "wrong": "float32 1.0e+00  WRONG"}
    assert told.get(outcome, "the verdict cannot be kept (") in text


def test_a_kernel_of_the_loss_that_raises(kernel, monkeypatch):
    """Its kinds are run one by one: the others are right, and the report says what it raised."""
    own = _selftest._lattice_kernels

    def kernels(lattices):
        return own(lattices) if "monotonic" not in lattices else raising()

    monkeypatch.setattr(_selftest, "_lattice_kernels", kernels)
    monkeypatch.setattr(_selftest, "LATTICES", {k: _selftest.LATTICES[k] for k in ("standard", "monotonic")})
    monkeypatch.setattr(_selftest, "EMISSIONS", {})
    monkeypatch.setattr(_checks, "FLOATS", ("float32",))
    with pytest.raises(RuntimeError, match="that disagree") as caught:
        jax_rnnt.selftest(require=("cpu",))
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 2 and all(
        "monotonic" in line and "raises RuntimeError: Mosaic failed" in line for line in lines
    )


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/cache"}, "/cache/jax_rnnt"),
        ("linux", {}, "/home/me/.cache/jax_rnnt"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/jax_rnnt"),
        ("darwin", {}, "/home/me/Library/Caches/jax_rnnt"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/jax_rnnt"),
    ],
)
def test_folder(platform, variables, folder, monkeypatch):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(proof.pathlib.Path, "home", lambda: pathlib.Path("/home/me"))
    with monkeypatch.context() as patch:
        patch.setattr(proof.sys, "platform", platform)
        assert proof.folder() == pathlib.Path(folder)
