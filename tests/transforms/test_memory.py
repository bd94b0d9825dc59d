"""How much memory does a compiled step need beyond its arguments and results?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
import platforms
from jax_rnnt import AdditiveLogits, BandLogits, PackedLogits

pytestmark = [pytest.mark.no_kernel, pytest.mark.usefixtures("optimized")]
B, T, U, V, H = 4, 50, 15, 512, 16
LOGITS = B * T * (U + 1) * V * 4
PLANE = B * T * (U + 1) * 4


def shape(*sizes, dtype=np.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


REST = [shape(*sizes, dtype=np.int32) for sizes in ((B, U), (B,), (B,))]
ARRAY = shape(B, T, U + 1, V)
WEIGHT, HIDDEN = shape(H, V), shape(B * T * (U + 1), H)


def temporaries(f, *args):
    found = jax.jit(f).lower(*args).compile().memory_analysis()
    if found is None:
        pytest.skip("this backend does not tell")
    return found.temp_size_in_bytes


@pytest.fixture
def matmul(kernel):
    """Skips on a GPU: XLA's matmuls need temporaries as large as the logits. test_gpu_compile separates them."""
    if platforms.platform() == "cuda":
        pytest.skip("XLA's matmuls have temporaries of their own")


@pytest.mark.parametrize("loss", [family.RNNT, family.slow(family.TDT), family.slow(family.WILDCARD)], ids=str)
def test_training_step(loss, kernel, matmul):
    """Logits from a 2-D joint matmul share one buffer with their gradient, under vmap and packed too."""
    value = loss.value(implementation=kernel)

    def step(weight, hidden, *rest):
        return value((hidden @ weight).reshape(B, T, U + 1, V), *rest)

    def by_sequence(weight, hidden, *rest):
        one = lambda hidden, *rest: value((hidden @ weight).reshape(T, U + 1, V), *rest)
        return jax.vmap(one)(hidden.reshape(B, -1, H), *rest).mean()

    sizes = [temporaries(jax.value_and_grad(step, (0, 1)), WEIGHT, HIDDEN, *REST)]
    if loss is family.RNNT:
        sizes += [temporaries(jax.value_and_grad(step, i), WEIGHT, HIDDEN, *REST) for i in (0, 1)]
        # The gradient of the weight would add XLA's transpose of the batched logits.
        sizes.append(temporaries(jax.grad(by_sequence, 1), WEIGHT, HIDDEN, *REST))
        packed = lambda weight, hidden, *rest: value(PackedLogits(hidden @ weight, T), *rest)
        sizes.append(temporaries(jax.value_and_grad(packed, (0, 1)), WEIGHT, HIDDEN, *REST))
    assert max(sizes) <= 1.15 * LOGITS, [f"{size / LOGITS:.2f} logits" for size in sizes]


@pytest.mark.slow
def test_joints_as_people_write_them(kernel, matmul):
    """The table of docs/memory.md: a bias costs one more copy of the logits, hidden units H / V, tiles a third."""
    batch, frames, columns, classes, units = 4, 100, 25, 1024, 640
    loss, logits = jax_rnnt.RNNTLoss(implementation=kernel), batch * frames * columns * classes * 4
    rest = [shape(*sizes, dtype=np.int32) for sizes in ((batch, columns - 1), (batch,), (batch,))]
    inputs = shape(units, classes), shape(classes), shape(batch, frames, units), shape(batch, columns, units)

    def linear(weight, bias, hidden, *rest):
        return loss((hidden @ weight + bias[None]).reshape(batch, frames, columns, classes), *rest)

    def of_rows(weight, bias, encoder, predictor, *rest):
        return linear(weight, bias, jnp.tanh(encoder[:, :, None] + predictor[:, None]).reshape(-1, units), *rest)

    def in_tiles(weight, bias, encoder, predictor, *rest):
        return loss(jax_rnnt.JointLogits(jax_rnnt.LinearJoint(weight, bias), encoder, predictor), *rest)

    rows = of_rows, jax.checkpoint(of_rows), in_tiles
    sizes = [temporaries(jax.value_and_grad(f, (0, 1, 2, 3)), *inputs, *rest) / logits for f in rows]
    hidden = shape(batch * frames * columns, units)
    sizes.append(temporaries(jax.value_and_grad(linear, (0, 1, 2)), *inputs[:2], hidden, *rest) / logits)
    assert np.all(np.array(sizes) <= [2.65, 3.65, 0.4, 2.05]), sizes


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "units"), [(128, 256), (512, 512), (1024, 640)])
def test_the_promise(classes, units, kernel, matmul):
    """The formula of docs/promises.md: of a product of two dimensions, and one more copy for one of four."""
    batch, frames, columns = 2, 100, 21
    loss, logits = jax_rnnt.RNNTLoss(implementation=kernel), batch * frames * columns * classes * 4
    rest = [shape(*sizes, dtype=np.int32) for sizes in ((batch, columns - 1), (batch,), (batch,))]
    inputs = shape(units, classes), shape(classes), shape(batch, frames, units), shape(batch, columns, units)

    def step(rows, weight, bias, encoder, predictor, *rest):
        hidden = jnp.tanh(encoder[:, :, None] + predictor[:, None])
        logits = (hidden.reshape(rows, units) if rows else hidden) @ weight
        logits = logits + bias.reshape((1,) * (logits.ndim - 1) + (classes,))
        return loss(logits.reshape(batch, frames, columns, classes), *rest)

    promised = 1.15 + units / classes + max(1, units / classes)
    for rows, more in ((batch * frames * columns, 0), (0, 1)):
        f = functools.partial(step, rows)
        used = temporaries(jax.value_and_grad(f, (0, 1, 2, 3)), *inputs, *rest) / logits
        assert used <= promised + more, (used, promised + more)


@pytest.mark.slow
def test_token_weighted_step(kernel, matmul):
    """One buffer for logits and gradient; the recursion keeps about 26 planes."""
    loss = jax_rnnt.RNNTLoss(implementation=kernel)

    def step(weight, hidden, *rest):
        return -loss.label_log_probs((hidden @ weight).reshape(B, T, U + 1, V), *rest).sum()

    size = temporaries(jax.value_and_grad(step, (0, 1)), WEIGHT, HIDDEN, *REST)
    assert size <= 1.15 * LOGITS, f"{size / LOGITS:.2f} logits"


def test_pruned_training_step(kernel, matmul):
    """Temporaries are the logits of the band and planes of the whole lattice."""
    width, loss = 4, jax_rnnt.RNNTLoss(implementation=kernel)

    def step(weight, hidden, first, *rest):
        return loss(BandLogits((hidden @ weight).reshape(B, T, width, V), first), *rest)

    arguments = WEIGHT, shape(B * T * width, H), shape(B, T, dtype=np.int32), *REST
    size, band = temporaries(jax.value_and_grad(step, (0, 1)), *arguments), B * T * width * V * 4
    assert size <= 1.05 * band + 10 * PLANE, f"{size / band:.2f} bands"


@pytest.mark.slow
def test_simple_loss_forms_no_logits(kernel):
    """Its gradient needs the memory of the two scores and the planes, and nothing of the logits' size."""
    gradient = jax.value_and_grad(lambda am, lm, *rest: jax_rnnt.RNNTLoss()(AdditiveLogits(am, lm), *rest), (0, 1))
    size, scores = temporaries(gradient, shape(B, T, V), shape(B, U + 1, V), *REST), B * (T + U + 1) * V * 4
    assert size <= 4 * scores < LOGITS / 3, f"{size / scores:.2f} times the scores"


def test_extra_memory_is_a_few_planes(kernel):
    """The loss alone, and the gradient with a buffer of its own: no float32 copy of half-precision logits either."""
    for inplace in (True, False):
        apart = jax.value_and_grad(jax_rnnt.RNNTLoss(implementation=kernel, inplace=inplace).__call__)
        text = jax.jit(apart).lower(ARRAY, *REST).compile().as_text()
        (call,) = (line for line in text.splitlines() if 'custom_call_target="jax_rnnt_softmax_emission_bwd"' in line)
        assert inplace == ("output_to_operand_aliasing" in call)
    limit = 4 * PLANE + 65536
    assert temporaries(jax_rnnt.RNNTLoss(implementation=kernel), ARRAY, *REST) <= limit
    assert temporaries(apart, ARRAY, *REST) <= limit
    assert temporaries(apart, shape(*ARRAY.shape, dtype=jnp.bfloat16), *REST) <= limit < LOGITS / 4


def test_donated_logits(kernel):
    """The gradient takes the memory of the logits: no temporary, no copy, no new result. Its bits are the same."""
    step = jax.value_and_grad(jax_rnnt.RNNTLoss(implementation=kernel).__call__)
    donated = jax.jit(step, donate_argnums=0)
    found = donated.lower(ARRAY, *REST).compile().memory_analysis()
    assert found.temp_size_in_bytes <= 4 * PLANE + 65536
    assert found.alias_size_in_bytes >= LOGITS
    p = batches.problem(dtype=np.float32)
    compare.assert_same_bits(jax.jit(step)(*p), donated(jnp.array(p.logits), *p[1:]))


@pytest.mark.slow
def test_reference_uses_a_few_copies(kernel):
    """The reference needs a few copies of the logits, but not [T, U1, V] for each step of a scan."""
    step = jax.value_and_grad(jax_rnnt.RNNTLoss(implementation="reference").__call__)
    assert temporaries(step, ARRAY, *REST) <= 4 * LOGITS
