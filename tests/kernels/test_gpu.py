"""Do problems for a large device work: long lattices, large vocabularies, many runs, captured launches?

Every test also runs on a small problem wherever there are kernels, to test the test. The large problems
are skipped without a CUDA device, but for JAX_RNNT_LARGE=1; with JAX_RNNT_REQUIRE=cuda they fail.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import door
import family
import platforms
from programs import environment, run

BOUND = 1e-5  # of gradients: the contract


def sizes(small, large):
    """Parameters of one small problem and the large ones."""
    return [small, *(pytest.param(size, marks=pytest.mark.slow) for size in large)]


@pytest.fixture
def size(request, kernel):
    """The small size is the first of the list."""
    if request.param_index > 0 and platforms.platform() != "cuda" and not os.environ.get("JAX_RNNT_LARGE"):
        missing = pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") == "cuda" else pytest.skip
        missing(f"needs a CUDA device, and the default platform is {platforms.platform()}")
    return request.param


# 4000 labels are 126 tiles of columns, more than any block has warps; 20000 frames are minutes of audio.
LONG = (600, 4000, 4), (4000, 600, 4), (20000, 100, 4), (1, 4000, 4), (20000, 0, 4), (20, 10, 131072), (3, 2, 1 << 20)


@pytest.mark.parametrize("size", sizes((9, 4, 3), LONG), indirect=True, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_axes(size, dtype):
    """(T, U, V), a full sequence and a shorter one, against float64."""
    T, U, V = size
    lengths = (T, max(1, 3 * T // 4)), (U, U // 2)
    p = batches.problem(2, T, U, V, dtype=dtype, scale=1.0, lengths=lengths)
    values, gradient = compare.evaluate(family.RNNT, p, "kernel")
    expected, exact = family.RNNT.expected(p)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    # One at a time: the errors are as large as the gradients.
    compare.assert_close([*gradient], [*exact], rtol=compare.rounding(dtype)[0], atol=BOUND)


@pytest.mark.parametrize("size", sizes((3, 9, 4, 7), [(30, 400, 80, 500), (8, 250, 50, 4096)]), indirect=True, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_runs_give_the_same_bits(size, dtype):
    """(B, T, U, V). Every run gets new memory; results are compared on the device."""
    B, T, U, V = size
    _, *rest = batches.problem(B, T, U, 2)
    logits = jax.random.normal(jax.random.key(0), (B, T, U + 1, V), dtype)

    @jax.jit
    def differences(a, b):
        bits = lambda x: jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return sum(jnp.sum(bits(x) != bits(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    loss = family.RNNT.value(implementation="kernel", reduction="none", clamp=0.25, fastemit_lambda=0.5)
    step = jax.jit(compare.with_gradient(loss))
    first = step(logits, *rest)
    assert np.isfinite(first[0]).all()
    assert differences(first, (first[0], first[1] + 1)) > 0  # the comparison finds a difference
    counts = []
    for i in range(100):
        again = step(logits, *rest)
        counts.append(differences(first, again))
        if i % 3:
            del again  # else its memory is freed only after the next run
    assert not np.any(jax.device_get(counts))


@pytest.mark.parametrize("size", sizes((3, 16, 4, 40), [(33, 256, 64, 4096)]), indirect=True, ids=str)
def test_more_than_2_to_the_31_logits(size):
    """(B, T, U, V). Offsets are 64-bit: value and gradient, in place, have the bits that each sequence has alone.

    It takes 10 GB and a minute.
    """
    B, T, U, V = size
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V - 1, (B, U), np.int32)
    logit_lengths, target_lengths = rng.integers(T // 2, T + 1, B, np.int32), rng.integers(U // 2, U + 1, B, np.int32)
    logit_lengths[-1], target_lengths[-1] = T, U  # the last sequence lies beyond 2^31, to its end

    # Every sequence is another slice of the same numbers.
    rows = T * (U + 1)
    numbers = rng.standard_normal((rows + B, V), np.float32).astype(jnp.bfloat16)
    one = lambda b: numbers[b : b + rows].reshape(T, U + 1, V)
    logits = np.empty((B, T, U + 1, V), jnp.bfloat16)
    for b in range(B):
        logits[b] = one(b)

    loss = family.RNNT.value(implementation="kernel", reduction="none")
    step = jax.jit(compare.with_gradient(loss), donate_argnums=0)
    on_device = jax.device_put(logits)
    del logits
    found = jax.tree.map(np.asarray, step(on_device, targets, logit_lengths, target_lengths))
    for b in range(B):
        expected = step(jnp.array(one(b)), targets[b], logit_lengths[b], target_lengths[b])
        compare.assert_same_bits([x[b] for x in found], expected)


PROGRAM = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
import batches
import compare
import family
import platforms
digest = hashlib.sha256()
B, T, U, V, count = map(int, sys.argv[1:])
for loss in family.LOSSES[:count]:
    p = batches.problem(B, T, U, V, loss=loss, dtype="float32")
    expected = loss.expected(p)
    kept = []
    for _ in range(6):  # results stay, so every run has new addresses
        kept.append(compare.evaluate(loss, p, "kernel"))
        compare.assert_matches(kept[-1], expected, np.float32, T + U)
        digest.update(b"".join(x.tobytes() for x in kept[-1]))

    def body(logits, scale):
        return logits, jax.grad(lambda x: loss(x * scale, *p[1:], implementation="kernel"))(logits)

    scales = jnp.arange(1, 4, dtype=jnp.float32)
    _, gradients = jax.jit(lambda x: jax.lax.scan(body, x, scales))(p.logits)
    assert np.isfinite(gradients).all()
    digest.update(np.asarray(gradients).tobytes())
print(jax.default_backend(), digest.hexdigest())
"""
COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION"


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", sizes((4, 7, 4, 9, 1), [(8, 200, 70, 300, len(family.LOSSES))]), indirect=True, ids=str
)
def test_captured_launches(size):
    """XLA replays calls as a CUDA graph or launches each: the same bits, and right up to rounding.

    (B, T, U, V, losses of the table).
    """
    settings = ("", COMMANDS) if platforms.platform() == "cuda" else ("",)  # of GPUs
    buffers = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="
    outputs = {run(PROGRAM, *size, env=os.environ | {"XLA_FLAGS": buffers + commands}) for commands in settings}
    assert len(outputs) == 1, outputs


# Equal logits: all paths have the same probability, and there are binomial(T - 1 + U, U). 409 labels take more shared
# memory than a kernel of CUDA may have before it is loaded.
ALIKE = """
import math, sys
import jax, numpy as np
import batches, door, family
T, U, V = 5, 409, 3
p = batches.problem(1, T, U, V, dtype="float32", lengths=([T], [U]))
p = p._replace(logits=np.zeros_like(p.logits))
if sys.argv[1] == "door":
    value, gradient = door.evaluate(family.RNNT, p)
else:
    step = jax.value_and_grad(lambda *p: family.RNNT(*p, implementation="kernel").sum())
    value, gradient = jax.jit(step)(*p)
assert np.isfinite(gradient).all()
print(float(np.sum(value)) / ((T + U) * math.log(V) - math.log(math.comb(T - 1 + U, U))))
"""


@pytest.mark.slow
def test_kernels_are_loaded_at_the_first_execution(tmp_path, kernel):
    """XLA instantiates no handler of a program that it reads from a cache, nor does the door."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    more = environment(JAX_PLATFORMS=os.environ.get("JAX_PLATFORMS", ""), **cache)
    kept = []
    for how in ["door"] * door.native() + ["compiled", "cached"]:
        assert float(run(ALIKE, how, env=more)) == pytest.approx(1, abs=1e-5), how
        kept.append({x.name for x in tmp_path.glob("*-cache")})
    assert kept[-2] == kept[-1] != set()
