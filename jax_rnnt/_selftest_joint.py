"""selftest of the kernels of a joint network, by value and gradients of whole losses against the reference."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import losses
from jax_rnnt._xla import loading
from jax_rnnt.layouts import JointLogits, LinearJoint


class Case(typing.NamedTuple):
    """A batch whose logits come from a joint network."""

    loss: Callable[..., Any]
    activation: Callable[[jax.Array], jax.Array]
    batch: int
    frames: int
    labels: int
    classes: int  # including durations
    units: int
    copies: int = 1  # sequences that share the rows of an encoder


_TDT = functools.partial(losses.TDTLoss, (0, 1, 2))
_BIG_BLANKS = functools.partial(losses.MultiblankRNNTLoss, (2, 4))
_EXACT_GELU = functools.partial(jax.nn.gelu, approximate=False)
# These cases need several blocks and chunks of classes, and have each activation.
CASES = {
    "rnnt, tanh": Case(losses.RNNTLoss, jnp.tanh, 4, 37, 9, 9, 12),
    "tdt, relu": Case(_TDT, jax.nn.relu, 4, 70, 19, 300, 72, copies=2),
    "hat, silu": Case(losses.HATLoss, jax.nn.silu, 4, 37, 9, 140, 130),
    "big blanks, gelu": Case(_BIG_BLANKS, jax.nn.gelu, 4, 37, 9, 33, 24),
    "rnnt, exact gelu": Case(losses.RNNTLoss, _EXACT_GELU, 4, 37, 9, 257, 24),
}
# Cases where kernels run on a device. They have more units, for which CUDA kernels take fewer rows at once, and the
# last runs in several slabs. All fit into the 99 KB of a thread block that every device with tensor cores has.
LARGE = {
    "tdt, 300 units": Case(_TDT, jnp.tanh, 4, 50, 9, 1025, 300),
    "rnnt, several slabs": Case(losses.RNNTLoss, jnp.tanh, 8, 256, 71, 257, 256),
}
# (name, dtype of arrays, precision of products)
VARIANTS = (
    ("float16", jnp.float16, None), ("bfloat16", jnp.bfloat16, None), ("float32", jnp.float32, None),
    ("float32 highest", jnp.float32, "highest"),
)  # fmt: skip
# How far gradients may be off, relative to the largest, by the bits of a factor's mantissa.
LIMITS = {7: 2**-6, 10: 2**-9, 23: 2**-15}
LOSS_LIMIT = 2e-5
_MARKS = {"cuda": "@jax_rnnt_joint_{}(", "tpu": 'kernel_name = "jax_rnnt_joint_{}"'}
_NAMES = {"cuda": ("fwd", "bwd", "sums"), "tpu": ("forward", "backward")}


@dataclasses.dataclass(frozen=True)
class _Rounded:
    """An activation whose result is rounded as a factor of a product, with the derivative of the activation."""

    activation: Callable[[jax.Array], jax.Array]
    bits: tuple[int, int]

    def __call__(self, x):
        y = self.activation(x)
        return y + jax.lax.stop_gradient(jax.lax.reduce_precision(y, *self.bits) - y)


def _bits(kind, dtype, precision):
    """Returns (bits of the exponent, of the mantissa) of the factors of the kernels' products."""
    if precision == "highest":
        return 8, 23
    if kind == "tpu" or dtype == jnp.bfloat16:
        return 8, 7
    return (5, 10) if dtype == jnp.float16 else (8, 10)


def _arrays(case, dtype):
    """Returns (encoder, predictor, weight, bias), the batch's rest, the losses' weights; some sequences are short."""
    rng = np.random.default_rng(0)
    encoder = case.batch // case.copies, case.frames, case.units
    predictor = case.batch, case.labels + 1, case.units
    shapes = encoder, predictor, (case.units, case.classes), (case.classes,)
    scales = 1, 1, 1 / math.sqrt(case.units), 1
    arrays = [jnp.asarray(rng.normal(0, s, shape), dtype) for s, shape in zip(scales, shapes)]
    num_frames = case.frames - np.arange(case.batch) * (case.frames // 3) // max(case.batch - 1, 1)
    num_labels = np.minimum(case.labels, np.array([case.labels, 0, 3] + [case.labels] * (case.batch - 3)))
    targets = rng.integers(1, case.classes - 4, (case.batch, case.labels))  # neither blanks nor durations
    rest = [jnp.asarray(x, jnp.int32) for x in (targets, num_frames, num_labels)]
    return arrays, rest, jnp.asarray(rng.uniform(0.5, 2, case.batch), jnp.float32)


def _program(case, implementation, activation):
    """Returns a function of (arrays, rest, weights) with the results (losses, gradients of the arrays)."""
    loss = case.loss(reduction="none", implementation=implementation)

    def total(arrays, rest, weights):
        encoder, predictor, weight, bias = arrays
        if case.copies > 1:
            fold = lambda x: x.reshape(len(encoder), case.copies, *x.shape[1:])  # noqa: E731
            encoder, predictor, *rest = encoder[:, None], *map(fold, (predictor, *rest))
        losses = loss(JointLogits(LinearJoint(weight, bias, activation), encoder, predictor), *rest).reshape(-1)
        return jnp.sum(losses * weights), losses

    def run(*operands):
        (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(*operands)
        return losses, gradients

    return jax.jit(run)


def _expected(case, kind, dtype, precision, home):
    """Computes from logits in memory, in float32, whose factors are rounded as those of the kernels are."""
    arrays, *others = _arrays(case, dtype)
    bits = _bits(kind, dtype, precision)
    arrays = [x.astype(jnp.float32) for x in arrays]
    arrays[2] = jax.lax.reduce_precision(arrays[2], *bits)
    program = _program(case, "reference", _Rounded(case.activation, bits))
    with jax.default_matmul_precision("highest"):
        return program(*jax.device_put((arrays, *others), home))


def _got(case, platform, kind, dtype, precision, device):
    with jax.default_matmul_precision(precision):
        operands = jax.device_put(_arrays(case, dtype), device)
        lowered = _program(case, "kernel", case.activation).lower(*operands)
        text = lowered.as_text(debug_info=True)
        if platform not in loading.INTERPRETED:
            for name in _NAMES[kind]:
                if _MARKS[kind].format(name) not in text:
                    raise NotImplementedError(f"the program has no kernel jax_rnnt_joint_{name}")
        return jax.block_until_ready(lowered.compile()(*operands))


def _errors(got, expected):
    """Returns the errors (of losses, of gradients), relative to the largest."""

    def error(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.max(np.abs(a - b)) / np.max(np.abs(b))

    losses, gradients = (list(map(error, *map(jax.tree.leaves, pair))) for pair in zip(got, expected))
    return np.max(losses), np.max(gradients)  # NaN wins, unlike in max()


def compare(platform: str, device, home) -> tuple[list[str], list[str]]:
    """Returns (lines of the right kernels, lines of the wrong ones); the reference runs on `home`."""
    kind = loading.joint_kernels(platform)
    if kind is None:
        return [], []
    if kind == "cuda" and isinstance(shared := loading.shared_memory(platform, device.device_kind), str):
        return [f"{platform:5} not run: the kernels of a joint network: {shared}"], []
    good: list[str] = []
    bad: list[str] = []
    for name, case in (CASES if platform == "cpu" else CASES | LARGE).items():
        texts: tuple[list[str], list[str]] = ([], [])
        wrong = [False, False]
        for variant, dtype, precision in VARIANTS:
            limits = LOSS_LIMIT, LIMITS[_bits(kind, dtype, precision)[1]]
            expected = _expected(case, kind, dtype, precision, home)
            try:
                errors = _errors(_got(case, platform, kind, dtype, precision, device), expected)
                found = [f"{variant} {x:.1e}" for x in errors]
            except Exception as error:  # from XLA, Mosaic or the driver
                errors, found = (math.inf, math.inf), [f"{variant} {described(error)}"] * 2
            for text, more in zip(texts, found):
                text.append(more)
            wrong = [w or not x <= limit for w, x, limit in zip(wrong, errors, limits)]
        for target, text, is_bad in zip(loading.JOINT, texts, wrong):
            line = f"{platform:5} {target:29} {name:24} {', '.join(text)}  {'WRONG' if is_bad else 'ok'}"
            (bad if is_bad else good).append(line)
    return good, bad


def described(error: BaseException) -> str:
    """Describes an exception in one line."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"raises {type(error).__name__}: {first[:200]}"
