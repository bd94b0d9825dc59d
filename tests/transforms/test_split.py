"""Is a loss over classes or frames of several devices that of whole logits, and do only planes travel?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_rnnt
import losses
from jax_rnnt import JointLogits, LinearJoint
from meshes import KINDS, mesh_of, place

VOCAB, FRAMES = {"vocab_axis": "model"}, {"frame_axis": "seq"}
AXES = {"vocabulary": VOCAB, "frames": FRAMES, "both": VOCAB | FRAMES}
WAYS = pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
ONE_SOFTMAX = [loss for loss in losses.LOSSES if loss not in (losses.TDT, losses.HAT)]
LENGTHS = (8, 5, 8, 3), (4, 2, 0, 3)


def problem(loss=losses.RNNT, dtype=np.float64, **options):
    return losses.problem(4, 8, 4, 24 - loss.extra_classes, loss=loss, dtype=dtype, lengths=LENGTHS, **options)


def split_mesh(devices, kind, axes):
    """A mesh of "data" and the axes of the loss, over eight devices."""
    sizes = (2, 4) if len(axes) == 1 else (2, 2, 2)
    return mesh_of(devices, kind, sizes, ("data", *axes.values()), is_set=kind in ("auto", "explicit"))


def spec(axes):
    return P("data", axes.get("frame_axis"), None, axes.get("vocab_axis"))


WEIGHTS = np.array([1.0, -2.0, 0.5, 3.0])


def inside_shard_map(loss, mesh, axes, check_vma=True):
    """Losses [B] of a function whose every device sees its own part."""
    specs = spec(axes), *[P("data")] * 3
    return jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)


def cases():
    for loss in losses.LOSSES:
        for name, axes in AXES.items():
            if loss in ONE_SOFTMAX or name == "frames":
                quick = loss is losses.RNNT or (loss is losses.TDT and name == "frames")
                yield (loss, axes) if quick else losses.slow(loss, axes)


@pytest.mark.parametrize(("loss", "axes"), [*cases()])
@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map", losses.slow("unchecked")])
def test_value_and_gradient(loss, axes, kind, implementation, devices):
    """Under jit and inside `shard_map`, with every option; no array with all classes or frames of logits exists."""
    p = problem(loss)
    options = {"clamp": 0.5, "fastemit_lambda": 0.5, "delay_penalty": 0.125}
    value = loss.value(reduction="none", implementation=implementation, **options, **axes)
    values, gradient = loss.expected(p, **options)
    with split_mesh(devices, kind, axes) as mesh:
        f = value
        if kind in ("shard_map", "unchecked"):
            f = inside_shard_map(value, mesh, axes, kind == "shard_map")
        placed = place(p, mesh, spec(axes), *[P("data")] * 3)

        def weighted(*p):
            made = f(*p)
            return jnp.sum(made * WEIGHTS), made

        step = jax.value_and_grad(weighted, has_aux=True)
        ((_, got), grad), text = losses.compiled(step, *placed)
    np.testing.assert_allclose(got, values, rtol=1e-12)
    np.testing.assert_allclose(grad, gradient * WEIGHTS[:, None, None, None], atol=1e-12)
    # Two sequences of each part of "data", with 8 frames and 5 columns. Planes: a sum, two picks, all batches of them.
    planes = 2 * 8 * 5 * 5
    for kind_of_exchange in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        sizes = [int(np.prod(shape)) for shape in losses.exchanged(text, kind_of_exchange)]
        assert max(sizes, default=0) <= planes, (kind_of_exchange, sizes)
