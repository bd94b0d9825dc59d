"""How much memory does a compiled step need beyond its arguments and results?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

pytestmark = pytest.mark.usefixtures("optimized")

B, T, U, V, H = 4, 50, 15, 512, 16
LOGITS = B * T * (U + 1) * V * 4
PLANE = B * T * (U + 1) * 4


def shapes(V=V, dtype=np.float32):
    """Shapes of the logits, with V classes including all extra ones, and of the other arguments."""
    sizes = ((B, T, U + 1, V), dtype), ((B, U), np.int32), ((B,), np.int32), ((B,), np.int32)
    return [jax.ShapeDtypeStruct(shape, d) for shape, d in sizes]


def compiled(f, *args, **jit):
    return jax.jit(f, **jit).lower(*args).compile()


def temporaries(f, *args, **jit):
    found = compiled(f, *args, **jit).memory_analysis()
    if found is None:
        pytest.skip("this backend does not tell")
    return found.temp_size_in_bytes


@pytest.fixture
def matmul(kernel):
    """Skips on a GPU: XLA's matmuls need temporaries as large as the logits. test_gpu_compile separates them."""
    if losses.platform() == "cuda":
        pytest.skip("XLA's matmuls have temporaries of their own")


@pytest.mark.family
def test_training_step(loss, kernel, matmul):
    """Logits from a 2-D joint matmul share one buffer with their gradient."""
    hidden = jax.ShapeDtypeStruct((B * T * (U + 1), H), np.float32)
    weight = jax.ShapeDtypeStruct((H, V), np.float32)

    def step(weight, hidden, *rest):
        logits = (hidden @ weight).reshape(B, T, U + 1, V)
        return loss(logits, *rest, implementation=kernel)

    for argnums in (0, 1, (0, 1)) if loss is losses.RNNT else (0,):
        size = temporaries(jax.value_and_grad(step, argnums), weight, hidden, *shapes()[1:])
        assert size <= 1.15 * LOGITS, f"{size / LOGITS:.2f} logits"


def test_extra_memory_is_a_few_planes(kernel):
    """If the gradient has its own buffer, at most four float32 planes [B, T, U1] come on top."""
    gradient = jax.value_and_grad(lambda *p: jax_rnnt.rnnt_loss(*p, implementation=kernel, inplace=False))
    assert temporaries(gradient, *shapes()) <= 4 * PLANE + 64 * V + 65536


def test_packed_training_step(kernel):
    """The same promise for logits [N, V]."""
    rows = B * T * (U + 1)

    def step(weight, hidden, *rest):
        return jax_rnnt.rnnt_loss_packed(hidden @ weight, *rest, max_frames=T, implementation=kernel)

    matrices = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((H, V), (rows, H)))
    assert temporaries(jax.value_and_grad(step, (0, 1)), *matrices, *shapes()[1:]) <= 1.15 * LOGITS


@pytest.mark.rare("2", "8")
@pytest.mark.parametrize("width", [2, 4, 8])
def test_pruned_training_step(kernel, matmul, width):
    """Temporaries are the logits of the band and planes of the whole lattice."""
    hidden = jax.ShapeDtypeStruct((B * T * width, H), np.float32)
    weight = jax.ShapeDtypeStruct((H, V), np.float32)
    first = jax.ShapeDtypeStruct((B, T), np.int32)

    def step(weight, hidden, *rest):
        logits = (hidden @ weight).reshape(B, T, width, V)
        return jax_rnnt.pruned_rnnt_loss(logits, *rest, implementation=kernel)

    band = B * T * width * V * 4
    size = temporaries(jax.value_and_grad(step, (0, 1)), weight, hidden, first, *shapes()[1:])
    assert size <= 1.05 * band + 10 * PLANE, f"{size / band:.2f} bands"


def test_simple_loss_forms_no_logits(kernel):
    """Its gradient needs the memory of the two scores and the planes, and nothing of the logits' size."""
    am, lm = (jax.ShapeDtypeStruct((B, n, V), np.float32) for n in (T, U + 1))
    gradient = jax.value_and_grad(lambda am, lm, *rest: jax_rnnt.simple_rnnt_loss(am, lm, *rest), (0, 1))
    size = temporaries(gradient, am, lm, *shapes()[1:])
    scores = B * (T + U + 1) * V * 4
    assert size <= 4 * scores < LOGITS / 3, f"{size / scores:.2f} times the scores"


def test_value_alone(kernel):
    """The loss alone needs no buffer of the size of the logits, nor a fraction of it."""
    assert temporaries(lambda *p: jax_rnnt.rnnt_loss(*p, implementation=kernel), *shapes()) <= 4 * PLANE + 65536


def test_donated_logits(kernel):
    """The gradient takes the memory of the logits: no temporary, no copy, no new result."""
    step = compiled(
        jax.value_and_grad(lambda *p: jax_rnnt.rnnt_loss(*p, implementation=kernel)), *shapes(), donate_argnums=0
    )
    found = step.memory_analysis()
    assert found.temp_size_in_bytes <= 4 * PLANE + 65536
    assert found.alias_size_in_bytes >= LOGITS


def test_donated_logits_give_the_same_gradient(kernel):
    p = losses.problem(dtype=np.float32)
    f = jax.value_and_grad(lambda *p: jax_rnnt.rnnt_loss(*p, implementation=kernel))
    kept = jax.jit(f)(*p)
    given = jax.jit(f, donate_argnums=0)(jnp.array(p.logits), *p[1:])
    for a, b in zip(kept, given, strict=True):
        losses.assert_same_bits(a, b)


def test_vmap_keeps_the_buffer(kernel, matmul):
    def step(weight, hidden, *rest):
        one = lambda h, *rest: jax_rnnt.rnnt_loss((h @ weight).reshape(T, U + 1, V), *rest, implementation=kernel)
        return jax.vmap(one)(hidden, *rest).mean()

    hidden = jax.ShapeDtypeStruct((B, T * (U + 1), H), np.float32)
    weight = jax.ShapeDtypeStruct((H, V), np.float32)
    # The gradient of the weight would add XLA's transpose of the batched logits.
    assert temporaries(jax.grad(step, 1), weight, hidden, *shapes()[1:]) <= 1.15 * LOGITS


def test_no_float32_copy_of_half_precision_logits(kernel):
    """bfloat16 logits, gradient out of place: less than half a float32 copy in temporaries."""
    gradient = jax.value_and_grad(lambda *p: jax_rnnt.rnnt_loss(*p, implementation=kernel, inplace=False))
    assert temporaries(gradient, *shapes(dtype=jnp.bfloat16)) <= 4 * PLANE + 65536 < LOGITS / 4


@pytest.mark.slow
def test_reference_uses_a_few_copies(kernel):
    """The reference needs a few copies of the logits, but not [T, U1, V] for each step of a scan."""
    gradient = jax.value_and_grad(lambda *p: jax_rnnt.rnnt_loss(*p, implementation="reference"))
    assert temporaries(gradient, *shapes()) <= 4 * LOGITS
