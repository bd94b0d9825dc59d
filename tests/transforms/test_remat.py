"""Does rematerialisation keep the numbers, and do policies see the names?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import family
import hlo
import jax_rnnt

pytestmark = pytest.mark.no_kernel
POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.checkpoint_dots,
    "names": jax.checkpoint_policies.save_only_these_names("rnnt_residuals"),
}


def weight_of(p):
    classes = p.logits.shape[-1]
    return np.random.default_rng(2).normal(size=(classes, classes)).astype(p.logits.dtype)


def check(got, p, loss, **options):
    """(loss, gradient of the weight)"""
    values, of_logits = loss.expected(p._replace(logits=p.logits @ weight_of(p)), **options)
    np.testing.assert_allclose(got[0], values.sum(), rtol=1e-12)
    np.testing.assert_allclose(got[1], np.einsum("btuh,btuv->hv", p.logits, of_logits), rtol=1e-10, atol=1e-10)


def test_checkpoint(kernel):
    p, loss = batches.problem(), jax_rnnt.RNNTLoss(clamp=0.5, reduction="sum", implementation=kernel)
    for policy in POLICIES.values():
        call = jax.checkpoint(lambda w: loss(p.logits @ w, *p[1:]), policy=policy)
        check(jax.jit(jax.value_and_grad(call))(weight_of(p)), p, family.RNNT, clamp=0.5)


@pytest.mark.parametrize("loss", [family.RNNT, family.slow(family.TILES)], ids=str)
def test_checkpoint_in_a_scan_over_microbatches(loss, kernel):
    """Gradient accumulation: each step recomputes its own logits, of sequences under vmap."""
    p = batches.problem(loss=loss)
    micro = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), p)

    def total(w):
        one = lambda *p: loss(p[0] @ w, *p[1:], reduction="none", implementation=kernel)
        several = jax.checkpoint(lambda p: jax.vmap(one)(*p).sum())
        return jax.lax.scan(lambda c, p: (c + several(p), None), jnp.zeros(()), micro)[0]

    check(jax.jit(jax.value_and_grad(total))(weight_of(p)), p, loss)


@pytest.mark.parametrize(("policy", "runs"), [("names", 1), ("nothing", 2)])
def test_saved_residuals_spare_the_second_run(native_kernel, policy, runs):
    """A policy saves the planes by name, not the logits: the joint runs again, but emission and lattice do not."""
    p, loss = batches.problem(dtype=np.float32), jax_rnnt.RNNTLoss(implementation=native_kernel)
    weight = weight_of(p)

    @functools.partial(jax.checkpoint, policy=POLICIES[policy])
    def call(w):
        return loss(p.logits @ w, *p[1:])

    _, text = hlo.compiled(jax.value_and_grad(call), weight)
    forward, backward, lattice = family.RNNT.gradient_calls
    assert hlo.custom_calls(text) == {forward: runs, lattice: runs, backward: 1}
    residuals = jax.tree.leaves(jax.eval_shape(lambda w: jax.vjp(call, w)[1], weight))
    planes = [x for x in residuals if x.size == p.logits.size // len(weight)]
    assert len(planes) == (3 if policy == "names" else 0)
    logits = [x for x in residuals if x.size == p.logits.size]
    assert len(logits) == 1, "the problem's own logits, the joint's input, and not its output"
