"""Do learned numbers and arrays get the slope of the loss as gradient, in every layout, on kernels and in plain JAX?"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import batches
import family
import jax_rnnt
import layout_table
import meshes
import reference_numpy as truth
from pages import code
from slopes import CLOSE, WEIGHTS, B, T, U, V, slope, small


def weighted(call):
    """Compiled gradient of the weighted sum of losses, for all arguments."""

    def total(*arguments):
        return jnp.sum(call(*arguments) * WEIGHTS)

    return jax.jit(lambda *arguments: jax.grad(total, tuple(range(len(arguments))))(*arguments))


# Kinds of losses as arrays: test_layouts.py compares the slopes of layouts with theirs.
KINDS = family.RNNT, family.TDT, family.MULTIBLANK, family.CONSTRAINED, *family.SKIPPING
CASES = [*((loss, "array", "kernel") for loss in KINDS), (family.RNNT, "AdditiveLogits", "kernel")]
CASES += [(family.TDT, "JointLogits", "kernel"), (family.RNNT, "array", "reference")]
LEARNED = {"delay_penalty": 0.3, "sigma": 0.07}
OFF = {"clamp": -1.0, "fastemit_lambda": 0.0}  # traced: nothing knows that they are
DRAWN = {"omega": 0.0}  # TDT's coin


@pytest.mark.quick("rnnt-array-kernel", "tdt-array-kernel", "tdt-JointLogits-kernel")
@pytest.mark.parametrize(("loss", "name", "implementation"), CASES, ids=str, indirect=["implementation"])
def test_leaves(loss, name, implementation):
    """Numbers that act on arcs have their slope, at exactly 0 and beside a clamp too; settings have exactly 0.

    Clamp, FastEmit and TDT's coin act on gradients. The clamp limits those of logits, and no other one.
    """
    implementation = None if name == "AdditiveLogits" else implementation
    p = small(loss) if name != "JointLogits" else batches.problem(B, T, U, V, loss=loss, scale=1.0)
    arrays, make, dense = layout_table.arrays(p, name), layout_table.layout(p, name), layout_table.dense(p, name)
    learned = {k: x for k, x in LEARNED.items() if hasattr(loss.kind, k)}
    drawn, key = (DRAWN, jax.random.key(0)) if loss is family.TDT else ({}, None)

    def call(leaves, arrays):
        value = loss.value(**leaves, reduction="none", implementation=implementation)
        return value(make(*arrays), *p[1:], key=key)

    def wanted(arrays, **options):
        return loss.expected(p._replace(logits=np.asarray(dense(*arrays))), **options)

    gradient = weighted(call)
    zeros, nothing = dict.fromkeys(learned, 0.0), tuple(0 * x for x in arrays)
    points = [(learned, {}, arrays), (zeros, {}, arrays), (zeros, {}, nothing)]
    if name != "AdditiveLogits":  # which has no logits to clip
        points.append((learned, {"clamp": 0.05}, arrays))
    for options, settings, at in points:
        of_leaves, of_arrays = gradient(options | OFF | drawn | settings, at)
        for leaf, value in options.items():
            along = lambda x, leaf=leaf, o=options, at=at: wanted(at, **o | {leaf: x})[0] @ WEIGHTS
            np.testing.assert_allclose(of_leaves[leaf], slope(along, value), **CLOSE, err_msg=leaf)
        if name == "array":
            to_logits = wanted(at, **options, **settings)[1] * WEIGHTS[:, None, None, None]
            np.testing.assert_allclose(of_arrays[0], to_logits, atol=1e-12)
    clamp = -1.0 if name == "AdditiveLogits" else 0.1
    on = learned | {"clamp": clamp, "fastemit_lambda": 0.5} | dict.fromkeys(drawn, 0.5)
    assert all(x == 0 for k, x in gradient(on, arrays)[0].items() if k not in learned)


def test_the_gradient_is_a_loss():
    """It has the same type and static fields. Integers are numbers too, and the next float traces nothing."""
    p = batches.problem()
    run = jax.jit(chex.assert_max_traces(lambda loss: loss(*p), n=2))  # and once with tangents
    gradient = jax.grad(run)(jax_rnnt.RNNTLoss(delay_penalty=1, fastemit_lambda=2, reduction="sum"))
    assert type(gradient) is jax_rnnt.RNNTLoss and gradient.reduction == "sum"
    assert gradient == jax.grad(run)(jax_rnnt.RNNTLoss(delay_penalty=1.0, fastemit_lambda=2.0, reduction="sum"))
    run(jax_rnnt.RNNTLoss(delay_penalty=1)), run(jax_rnnt.RNNTLoss(delay_penalty=2.0))
    assert repr(jax_rnnt.RNNTLoss(clamp=-1)) == "RNNTLoss()"


def test_operands_of_a_step(kernel):
    """The gradient of the docs' risk is the posterior of the label, zero outside the lengths, also under vmap."""
    names, _ = code("docs/own_loss.md", "class BypassLoss")
    risk_loss = code("docs/own_loss.md", "class RiskLoss", **names)[0]["RiskLoss"]
    p = small()
    risk = np.random.default_rng(0).normal(size=(2, B, T, U + 1))  # two risks for vmap
    risk[1] = 0

    def posterior(risk):
        out = np.zeros(risk.shape)
        for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths, strict=True)):
            arcs, _ = truth.softmax_emission(p.logits[b, :n, : m + 1], np.append(p.targets[b, :m], -1), blank=V - 1)
            arcs["label"] = arcs["label"] - risk[b, :n, : m + 1]
            out[b, :n, : m + 1] = truth.posteriors(truth.STANDARD, arcs, n, m)[1]["label"]
        return out

    wanted = np.stack([posterior(x) for x in risk]) * WEIGHTS[:, None, None]
    call = lambda x: risk_loss(risk=x, reduction="none", implementation=kernel)(*p)
    total = lambda x: jnp.sum(call(x) * WEIGHTS)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(total)))(risk), wanted, atol=1e-12)


@pytest.mark.slow
def test_on_a_mesh(devices, kernel):
    """A loss is replicated, its batch is split: the gradient of its leaves is the sum over devices."""
    p = batches.problem(16, loss=family.TDT)
    loss = family.TDT.value(sigma=0.1, delay_penalty=0.3, implementation=kernel)
    total = lambda loss, p: loss(*p)
    wanted = jax.jit(jax.grad(total))(loss, p)
    with meshes.mesh_of(devices, "shard_map") as mesh:
        total = meshes.mean_over_devices(total, mesh, (P(), P("data")))
        got = jax.jit(jax.grad(total))(loss, meshes.at(mesh, p, "data"))
    for leaf in ("sigma", "delay_penalty"):
        np.testing.assert_allclose(getattr(got, leaf), getattr(wanted, leaf), rtol=1e-12)
