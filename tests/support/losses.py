"""The table of losses under test, problems to run them on, and the tolerances of comparisons.

A new loss of the family is one more entry in LOSSES: its class, and its difference from the RNN-T loss in the float64
truth.
"""

import collections
import dataclasses
import functools
import os
import pathlib
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import jax_rnnt
import reference_numpy as truth
from jax_rnnt._xla import loading

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


class Problem(cases.Inputs):
    """The four arrays of a call, in order."""

    def astype(self, dtype):
        return self._replace(logits=np.asarray(self.logits).astype(jnp.dtype(dtype)))

    def take(self, index):
        return Problem(*(x[index] for x in self))


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    name: str
    kind: type  # its class
    truth: dict = dataclasses.field(default_factory=dict)  # keywords of reference_numpy.loss_and_gradient
    options: dict = dataclasses.field(default_factory=dict)  # keywords of the class
    extra_classes: int = 0  # logits beyond the V classes
    first_blank: int = 0  # the smallest possible class of the blank
    layout: typing.Callable = lambda logits: logits

    def __str__(self):
        return self.name

    def value(self, **options):
        """An instance of the loss."""
        return self.kind(**self.options, **options)

    def __call__(self, logits, *rest, label_windows=None, key=None, **options):
        return self.value(**options)(self.layout(logits), *rest, label_windows=label_windows, key=key)

    def expected(self, problem, **options):
        """(loss [B], per-sequence gradient) in float64."""
        return truth.loss_and_gradient(*problem, **self.truth, **options)

    def sequences(self, problem, label_windows=None, **options):
        """(b, T_b, U_b, topology, {slot: arc scores [T, U1]}) of every sequence, in float64."""
        for b, (n, m) in enumerate(zip(problem.logit_lengths, problem.target_lengths, strict=True)):
            windows = None if label_windows is None else label_windows[b, :m]
            x, labels = problem.logits[b, :n, : m + 1], problem.targets[b, :m]
            yield b, n, m, *truth.lattice(x, labels, windows=windows, **self.truth, **options)[:2]

    def blank(self, index):
        """This blank, or the smallest possible one if that is larger."""
        return max(index, self.first_blank) if index >= 0 else index

    value_calls = ("jax_rnnt_softmax_emission_fwd", "jax_rnnt_lattice_loss")
    gradient_calls = ("jax_rnnt_softmax_emission_fwd", "jax_rnnt_softmax_emission_bwd", "jax_rnnt_lattice_grad")


def multiblank(durations):
    """The multi-blank loss with these durations of big blanks."""
    tables = {"topology": truth.multi_blank(durations), "emission": truth.multi_blank_emission, "durations": durations}
    options = {"big_blank_durations": durations}
    return Loss("multiblank", jax_rnnt.MultiblankRNNTLoss, tables, options, first_blank=len(durations))


def tdt(durations):
    """The TDT loss with these durations."""
    tables = {"topology": truth.token_durations(durations), "emission": truth.duration_emission, "durations": durations}
    extra = {"extra_classes": len(durations)}
    return Loss("tdt", jax_rnnt.TDTLoss, {**tables, **extra}, {"durations": durations}, **extra)


@functools.cache
def lookup(columns):
    """A joint that looks up: an encoder row holds the logits of all columns, a predictor row its column's number."""

    def joint(encoder, predictor):
        rows = encoder.reshape(len(encoder), columns, -1)
        hit = predictor == jnp.arange(columns, dtype=predictor.dtype)[None]
        return jnp.sum(jnp.where(hit[..., None], rows, 0), -2)

    return joint


def in_tiles(logits, chunk=8):
    """These logits, made by a joint `chunk` rows at a time."""
    *batch, frames, columns, classes = logits.shape
    column = jnp.broadcast_to(jnp.arange(columns, dtype=logits.dtype).reshape(columns, 1), (*batch, columns, 1))
    return jax_rnnt.JointLogits(lookup(columns), logits.reshape(*batch, frames, columns * classes), column, chunk=chunk)


def in_a_band(logits):
    """A band that holds every column."""
    return jax_rnnt.BandLogits(logits, jnp.zeros(logits.shape[:-2], jnp.int32))


BIG, DURATIONS = (3, 2), (2, 0, 1)
RNNT = Loss("rnnt", jax_rnnt.RNNTLoss)
MONOTONIC = Loss("monotonic", jax_rnnt.MonotonicRNNTLoss, {"topology": truth.MONOTONIC})
_FINAL, _CONSTRAINED = {"topology": truth.MONOTONIC_FINAL_BLANK}, {"emission": truth.constrained_emission}
FINAL_BLANK = Loss("monotonic_final_blank", jax_rnnt.MonotonicRNNTLoss, _FINAL, {"final_blank": True})
CONSTRAINED = Loss("constrained", jax_rnnt.ConstrainedRNNTLoss, MONOTONIC.truth | _CONSTRAINED)
MULTIBLANK, TDT = multiblank(BIG), tdt(DURATIONS)
HAT = Loss("hat", jax_rnnt.HATLoss, {"emission": truth.hat_emission})
SKIPS = {"skip_frame": -3.0, "skip_label": -0.3}
ROBUST = Loss(
    "target_robust", jax_rnnt.TargetRobustRNNTLoss, {"emission": truth.target_robust_emission, **SKIPS}, SKIPS
)
ENDS = {"skip_start": -2.0, "skip_end": -1.0}
WILDCARD = Loss("wildcard", jax_rnnt.WildcardRNNTLoss, {"emission": truth.wildcard_emission, **ENDS}, ENDS)
LOSSES = RNNT, MONOTONIC, FINAL_BLANK, CONSTRAINED, MULTIBLANK, TDT, HAT, ROBUST, WILDCARD
SKIPPING = ROBUST, WILDCARD  # of known targets: no decoder skips, and a likelihood may exceed 1
# Layouts of logits as rows of the table, so that they answer the same tests. test_layouts.py has what differs.
TILES = Loss("tiles", jax_rnnt.RNNTLoss, layout=in_tiles)
BAND = Loss("band", jax_rnnt.RNNTLoss, layout=in_a_band)


# ---------------------------------------------------------------------------------------------- parametrisation
def slow(*values, id=None):
    """A case that `make test` leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def _parametrized(rows, reference=slow, others=()):
    """(loss, implementation): kernels for all, quick for the two lattice kernels; RNN-T and `others` also without."""
    kernels = [(x, "kernel") if x in (RNNT, TDT) else slow(x, "kernel") for x in rows]
    cases = [*kernels, reference(RNNT, "reference"), *(slow(x, "reference") for x in others)]
    return pytest.mark.parametrize(("loss", "implementation"), cases, indirect=["implementation"], ids=str)


# Decorators of a test that takes `loss`. A test of the RNN-T loss alone uses RNNT.
every = pytest.mark.parametrize("loss", [x if x in (RNNT, TDT) else slow(x) for x in LOSSES], ids=str)
every_quick = pytest.mark.parametrize("loss", LOSSES, ids=str)

# Decorators of a test that takes `loss` and `implementation`, and gains nothing by a reference of every loss.
every_kernel = _parametrized(LOSSES)
every_layout = _parametrized((*LOSSES, TILES, BAND))
# With a reference of every loss.
every_implementation = _parametrized((*LOSSES, TILES, BAND), reference=pytest.param, others=LOSSES[1:])
# But for tiles: all layouts that store the logits. The reference is quick, for tests of what its gradient adds by hand.
every_array = _parametrized((*LOSSES, BAND), reference=pytest.param)

# Decorator of a test that takes `implementation`; without it, both are quick.
reference_slow = pytest.mark.parametrize("implementation", ["kernel", slow("reference")], indirect=True)


# ------------------------------------------------------------------------------------------------------ problems
# Ragged: a full row, a shorter one, an empty target, and one label a frame. Every lattice of the family has a path.
FRAMES, LABELS = (7, 5, 6, 4), (4, 2, 0, 3)


def problem(B=4, T=7, U=4, V=9, *, loss=RNNT, dtype=np.float64, seed=0, scale=2.0, lengths=None):
    """Normal logits, rounded to `dtype`; every label but the last class; ragged lengths unless given."""
    rng = np.random.default_rng((seed, B, T, U, V))
    if lengths is None:
        frames = np.resize([max(T - 7 + n, 1) for n in FRAMES], B)
        labels = np.resize([max(U - 4 + m, 0) if m else 0 for m in LABELS], B)
    else:
        frames, labels = lengths
    classes = V + loss.extra_classes
    case = cases.Case("problem", B, T, U, classes, logit_lengths=frames, target_lengths=labels)
    logits = rng.normal(0, scale, case.shape)
    targets = rng.integers(0, V - 1, (B, U))
    return Problem(logits, targets.astype(np.int32), *case.lengths).astype(dtype)


def inside(p):
    """Mask of the nodes [B, T, U1] inside the lengths."""
    _, T, U1, _ = p.logits.shape
    rows = np.arange(T)[:, None] < p.logit_lengths[:, None, None]
    return rows & (np.arange(U1) <= p.target_lengths[:, None, None])


def poisoned(p, value=np.nan, label=-77):
    """The same problem with `value` in every logit and `label` in every target outside the lengths."""
    logits = np.where(inside(p)[..., None], p.logits, np.asarray(value, p.logits.dtype))
    used = np.arange(p.targets.shape[1]) < p.target_lengths[:, None]
    return p._replace(logits=logits, targets=np.where(used, p.targets, label).astype(p.targets.dtype))


def heads(loss, rows):
    """Views of the heads, each with its own softmax, of rows [..., V]. The last class before durations is the blank."""
    if loss.name == "hat":
        return [rows[..., :-1]]
    return np.split(rows, [rows.shape[-1] - loss.extra_classes], axis=-1) if loss.extra_classes else [rows]


# ---------------------------------------------------------------------------------------------------- evaluation
SCHEDULED = {"clamp": -1.0, "fastemit_lambda": 0.0, "delay_penalty": 0.0}  # traced: new values compile nothing


@functools.cache
def _compiled(loss, implementation, static):
    static = dict(static)

    @jax.jit
    def run(p, scheduled, label_windows):
        def total(logits):
            options = {**static, **scheduled, "label_windows": label_windows, "implementation": implementation}
            values = loss(logits, *p[1:], reduction="none", **options)
            return values.sum(), values

        gradient, values = jax.grad(total, has_aux=True)(p.logits)
        return values, gradient

    return run


def evaluate(loss, p, implementation, *, label_windows=None, **options):
    """(loss [B], gradient of their sum) from the library, as NumPy arrays in the library's dtypes."""
    scheduled = {k: np.float32(options.pop(k, default)) for k, default in SCHEDULED.items()}
    values, gradient = _compiled(loss, implementation, tuple(sorted(options.items())))(p, scheduled, label_windows)
    return np.asarray(values), np.asarray(gradient)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def tolerance(dtype, path_length):
    """Absolute error of a posterior: at most the contract's 1e-5 (float64: 1e-10), less if that follows from rounding.

    Arc scores of these problems are below 16 in size (log V plus a logit) and each is rounded in float32 or better; a
    path adds `path_length` of them.
    """
    wide = np.dtype(dtype) == np.float64
    return min(16 * path_length * eps(np.float64 if wide else np.float32), 1e-10 if wide else 1e-5)


def rounding(dtype):
    """(relative, absolute) error of a 16-bit result, which is rounded to nearest once, subnormals included; else 0."""
    return (eps(dtype) / 2, 2.0**-24) if np.dtype(dtype).itemsize == 2 else (0, 0)


def assert_matches(got, expected, dtype, path_length, *, scale=1.0):
    """(loss, gradient) of `evaluate` against float64 truth, inf and NaN in place.

    A loss is a sum of scores of one sign, so its relative error is theirs.
    """
    limit, (relative, smallest) = tolerance(dtype, path_length), rounding(dtype)
    of_values = 16 * eps(jnp.float64 if np.dtype(dtype) == np.float64 else jnp.float32)
    np.testing.assert_allclose(got[0], expected[0], rtol=of_values, atol=limit)
    gradient = np.asarray(got[1], np.float64)
    np.testing.assert_allclose(gradient, expected[1], rtol=relative, atol=scale * limit + smallest)


def assert_close(got, expected, limit=None, **limits):
    """Of trees of arrays, within `limit` or the limits of `np.testing.assert_allclose`."""
    limits = limits or {"rtol": limit, "atol": limit}
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        a = np.asarray(a, np.float64) if a.dtype.itemsize == 2 else a
        np.testing.assert_allclose(a, b, **limits)


def assert_same_bits(got, expected):
    """Of trees of arrays, NaN included."""
    for a, b in zip(*(map(np.asarray, jax.tree.leaves(x)) for x in (got, expected)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(np.uint8) for x in (a, b)))


# ----------------------------------------------------------------------------------------------- compiled programs
def compiled(function, *arguments):
    """(results, text of the compiled program)"""
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), program.as_text()


def custom_calls(text):
    """The number of calls of each target of the library in an HLO text."""
    return dict(collections.Counter(re.findall(r'custom_call_target="(jax_rnnt_\w+)"', text)))


def collectives(text):
    """The number of collectives of each kind in an HLO text."""
    names = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    return dict(collections.Counter(re.findall(rf" {names}(?:-start)?\(", text)))


def exchanged(text, collective):
    """Shapes of the results of one kind of collective in an HLO text."""
    results = re.findall(rf" = (.*?) {collective}(?:-start)?\(", text)
    shapes = re.findall(r"\w+\[([\d,]*)\]", " ".join(results))
    return [tuple(map(int, filter(None, shape.split(",")))) for shape in shapes]


def once(targets):
    return {} if interpreted() else dict.fromkeys(targets, 1)


def emulated():
    """Whether the CPU platform runs the CUDA kernels in the emulation (`lab/run.sh emulation`)."""
    return loading.KERNELS.get("cpu") == "cuda"


def cuda_kernels():
    """Whether kernels are those for CUDA, on a GPU or emulated."""
    return emulated() or platform() == "cuda"


def interpreted():
    """Whether the CPU platform interprets the TPU's kernels (lab/run.sh interpret). They are no custom calls then."""
    return bool(os.environ.get("JAX_RNNT_INTERPRET"))


def platform():
    """The default platform by the name that lowering uses: cpu, cuda, tpu."""
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


@functools.cache
def missing_kernel():
    """The reason why implementation="kernel" cannot run on the default platform, or None if it can."""
    required = os.environ.get("JAX_RNNT_REQUIRE")
    if required and platform() != required:
        return f"JAX_RNNT_REQUIRE={required}, but the default platform is {platform()}"
    tiny = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 0), np.int32), np.ones(1, np.int32), np.zeros(1, np.int32)
    try:
        jax.block_until_ready(jax_rnnt.rnnt_loss(*tiny, implementation="kernel"))
    except NotImplementedError as error:
        return str(error)
    return None


def packed(p, x, extra=5, fill=np.nan):
    """The rows of [B, T, U1, ...] inside the lengths, then `extra` rows of `fill`."""
    return np.concatenate([x[inside(p)], np.full((extra, *x.shape[3:]), fill, x.dtype)])
