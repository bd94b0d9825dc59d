"""Are the Pallas kernels right in the interpreter, and what TPUs get, under every transformation?

Mosaic lowers for TPUs on any machine. `lab/run.sh interpret` runs the other tests on these kernels;
`lab/run.sh tpu` compiles them.
"""

import functools

import jax
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt
import platforms
import reference_numpy as truth
import topologies
from family import slow
from jax_rnnt import lattices
from jax_rnnt._xla import over_devices, primitive
from jax_rnnt.lattices import _pallas as pallas
from meshes import mean_over_devices, mesh_of
from topologies import TOPOLOGIES, arcs_of

pytestmark = [
    pytest.mark.no_kernel,
    pytest.mark.skipif(jax.__version_info__ < primitive.PALLAS, reason="before the Pallas that runs the TPU kernels"),
]
STANDARD = TOPOLOGIES["standard"]


def check(topology, arcs, lengths, limit, **options):
    run = jax.jit(functools.partial(pallas.value_and_grad, topology[0], **options))

    def answer(*problem):
        loss, gradients = run(*problem)
        return -loss, -loss, {slot: -x for slot, x in gradients.items()}

    dtype = next(iter(arcs.values())).dtype
    topologies.check(topology, arcs, *lengths, [answer], {dtype: limit})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", slow("durations")])
def test_several_groups_and_unrolled_steps(name):
    """Ten sequences are two groups with padding: without frames, labels, a path, and with forbidden arcs."""
    topology = TOPOLOGIES[name]
    arcs = arcs_of(topology[0], (10, 9, 5))
    label = arcs[topology[0][-1].slot]
    label[np.random.default_rng(1).random(label.shape) < 0.2] = -np.inf
    lengths = (9, 0, 5, 1, 9, 3, 7, 2, 8, 4), (4, 0, 0, 4, 1, 4, 2, 2, 3, 4)
    check(topology, arcs, lengths, 1e-13, interpret=True, unroll=2)


@pytest.mark.slow
def test_without_blanks():
    """Labels alone read the frames, so one column of a diagonal is reached."""
    topology = [(arc("label", 1, 1), arc("longer", 2, 1)) for arc in (lattices.Arc, truth.Arc)]
    arcs = arcs_of(topology[0], (3, 5, 4), dtype=np.float32)
    check(topology, arcs, ((5, 4, 3), (3, 2, 0)), 1e-5, interpret=True)


@pytest.mark.parametrize("interpret", [slow(True), "tpu"])
def test_columns_beyond_a_block(interpret):
    """515 columns are two blocks of 384 lanes, and a sequence ends in each."""
    if interpret == "tpu" and not platforms.interpreted():
        pytest.skip("25 s: `lab/run.sh interpret` asks for it")
    arcs = arcs_of(STANDARD[0], (2, 2, 515), dtype=np.float32)
    mode = pltpu.InterpretParams() if interpret == "tpu" else True
    check(STANDARD, arcs, ((2, 1), (514, 383)), 1e-5, interpret=mode)


@pytest.mark.slow
def test_long_lattices():
    """The promise at T + U = 4000, of the arithmetic."""
    arcs = arcs_of(STANDARD[0], (1, 3900, 101), dtype=np.float32)
    check(STANDARD, arcs, ((3900,), (100,)), 1e-5, interpret=True)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 3, 3)], ids=str)
def test_lowers_without_nodes(shape):
    """A dimension of size 0: XLA's program, which needs no size of it either."""
    plane, length = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct(shape[:1], np.int32)

    def step(blank, label, *lengths):
        arcs = {"blank": blank, "label": label}
        return lattices.log_likelihood(lattices.STANDARD, arcs, *lengths, implementation="kernel").sum()

    exported = export.export(jax.jit(jax.grad(step)), platforms=["tpu"])(plane, plane, length, length)
    assert "tpu_custom_call" not in exported.mlir_module()


def test_interpreter_of_tpus():
    """With its memory spaces, semaphores and uninitialised memory."""
    mode = pltpu.InterpretParams(uninitialized_memory="nan")
    check(STANDARD, arcs_of(STANDARD[0], (2, 4, 3), dtype=np.float32), ((4, 3), (2, 1)), 1e-6, interpret=mode)


@pytest.mark.slow
def test_large_arcs_take_the_second_exponent():
    """All paths hold three labels, so a mask of the labels moves only the loss; the other sequence has none."""
    topology, rng = lattices.products((0, 1, 3)), np.random.default_rng(0)
    arcs = {slot: rng.normal(-1, 1, (2, 6, 4)).astype(np.float32) for slot in pallas.slots(topology)}
    arcs["label"][0] = 0
    lengths = np.array([6, 6], np.int32), np.array([3, 3], np.int32)
    run = jax.jit(functools.partial(pallas.value_and_grad, topology, interpret=True, unroll=1))
    loss, gradients = run(arcs, *lengths)
    for size in np.array([-3000, -1e9, -1e38, 1e7], np.float32):
        masked = arcs | {"label": arcs["label"].copy()}
        masked["label"][0] = size
        got, posteriors = run(masked, *lengths)
        np.testing.assert_allclose(got, np.asarray(loss, np.float64) - [3 * np.float64(size), 0], rtol=1e-6)
        for slot, x in posteriors.items():
            np.testing.assert_allclose(x, gradients[slot], atol=1e-5)


def calls(function, arguments):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert "@jax_rnnt" not in text  # no custom call of another platform
    return text.count("@tpu_custom_call")


def shapes(mesh=None, *axes, outer=()):
    sharding = None if mesh is None else NamedSharding(mesh, P(*axes))
    like = lambda *shape, dtype=np.int32: jax.ShapeDtypeStruct((*outer, 16, *shape), dtype, sharding=sharding)
    return like(7, 5, 9, dtype=np.float32), like(4), like(), like()


mean = jax_rnnt.RNNTLoss(implementation="kernel").__call__
step = jax.value_and_grad(mean)


def test_one_kernel_a_sweep():
    """alpha alone for the value; alpha and beta with the gradient, also where the forward pass is computed again."""
    assert calls(mean, shapes()) == 1
    assert calls(step, shapes()) == 2
    assert calls(jax.vmap(step), shapes(outer=(3,))) == 2
    policy = jax.checkpoint_policies.save_only_these_names("rnnt_residuals")
    assert calls(jax.value_and_grad(jax.checkpoint(mean, policy=policy)), shapes()) == 2


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("names", [("data",), ("data", "model")], ids=str)
def test_on_a_mesh(devices, kind, names):
    with mesh_of(devices, kind, (8,) if len(names) == 1 else (4, 2), names) as mesh:
        assert calls(step, shapes(mesh, "data")) == 2


@pytest.mark.parametrize("options", [{"check_vma": True}, {"check_vma": False}, {"axis_names": {"data"}}], ids=str)
def test_in_shard_map(devices, options):
    """Over all axes, and over one of two."""
    if "axis_names" in options and jax.__version_info__ < (0, 10):
        pytest.skip("Pallas takes manual axes beside automatic ones since 0.10")
    shape, names = ((4, 2), ("data", "model")) if "axis_names" in options else ((8,), ("data",))
    with mesh_of(devices, "auto", shape, names) as mesh:
        mapped = mean_over_devices(mean, mesh, P("data"), **options)
        assert calls(jax.value_and_grad(mapped), shapes(mesh, "data")) == 2


def test_export():
    """Programs for TPUs need no disabled check: JAX keeps Mosaic's calls stable."""
    made = export.export(jax.jit(step), platforms=("tpu",))(*shapes())
    assert made.mlir_module().count("@tpu_custom_call") == 2
    both = export.export(jax.jit(step), platforms=("tpu", "cpu"), disabled_checks=jax_rnnt.export_checks())(*shapes())
    assert "@tpu_custom_call" in both.mlir_module()


@pytest.mark.parametrize(
    ("topology", "shape", "dtype", "reason"),
    [
        (lattices.STANDARD, (2, 3, 4), np.float64, "at most 4 bytes a number"),
        (lattices.STANDARD, (2, 1 << 15, 4), np.float32, "diagonals"),
        (lattices.STANDARD, (2, 3, (1 << 14) + 1), np.float32, "columns U . 1, times planes"),
        (lattices.multi_blank((2000,)), (2, 3000, 64), np.float32, "times diagonals of an arc"),
        ((*lattices.STANDARD, lattices.Arc("two", 0, 2)), (2, 3, 4), np.float32, "labels written by an arc"),
    ],
    ids=["float64", "diagonals", "columns", "far_arcs", "two_labels"],
)
def test_beyond_the_kernels(topology, shape, dtype, reason):
    if dtype == np.float64 and platforms.interpreted():
        pytest.skip("the interpreter takes float64")
    arcs = {slot: jax.ShapeDtypeStruct(shape, dtype) for slot in pallas.slots(topology)}
    lengths = jax.ShapeDtypeStruct(shape[:1], np.int32)
    call = functools.partial(lattices.log_likelihood, topology, implementation="kernel")
    with pytest.raises(NotImplementedError, match=reason):
        calls(call, (arcs, lengths, lengths))


def test_the_batch_is_split_over_all_devices_that_divide_it():
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    assert over_devices._batch_spec((16,), mesh, set()) == [("data", "model")]
    assert over_devices._batch_spec((12,), mesh, set()) == [("data",)]
    assert over_devices._batch_spec((16,), mesh, {"data"}) == [("model",)]
    assert over_devices._batch_spec((2, 12), mesh, set()) == [("model",), ("data",)]
    assert over_devices._batch_spec((7,), mesh, set()) == [()]
