"""Does rematerialisation keep the numbers, and do policies see the names?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

pytestmark = pytest.mark.rare("reference")  # JAX itself transforms plain JAX

POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.checkpoint_dots,
    "names": jax.checkpoint_policies.save_only_these_names("rnnt_residuals"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_checkpoint(loss, implementation, policy):
    p = losses.problem(loss=loss)
    weight = np.random.default_rng(2).normal(size=(p.logits.shape[-1],) * 2)

    @functools.partial(jax.checkpoint, policy=policy)
    def call(w):
        return loss(p.logits @ w, *p[1:], clamp=0.5, reduction="sum", implementation=implementation)

    value, gradient = jax.jit(jax.value_and_grad(call))(weight)
    values, per_logit = loss.expected(p._replace(logits=p.logits @ weight), clamp=0.5)
    np.testing.assert_allclose(value, values.sum(), rtol=1e-12)
    np.testing.assert_allclose(gradient, np.einsum("btuh,btuv->hv", p.logits, per_logit), rtol=1e-10, atol=1e-10)


@pytest.mark.family("layouts")
def test_checkpoint_in_a_scan_over_microbatches(loss, implementation):
    """Gradient accumulation: each step recomputes its own logits."""
    p = losses.problem(loss=loss)
    weight = np.random.default_rng(2).normal(size=(p.logits.shape[-1],) * 2)
    micro = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), p)

    def total(w):
        @jax.checkpoint
        def one(p):
            return loss(p.logits @ w, *p[1:], reduction="sum", implementation=implementation)

        return jax.lax.scan(lambda c, p: (c + one(p), None), jnp.zeros(()), micro)[0]

    gradient = jax.jit(jax.grad(total))(weight)
    _, per_logit = loss.expected(p._replace(logits=p.logits @ weight))
    np.testing.assert_allclose(gradient, np.einsum("btuh,btuv->hv", p.logits, per_logit), rtol=1e-10, atol=1e-10)


def test_checkpoint_under_vmap(loss, implementation):
    p = losses.problem(loss=loss)
    one = lambda *p: loss(*p, reduction="none", implementation=implementation)
    gradient = jax.jit(jax.vmap(jax.grad(jax.checkpoint(one))))(*p)
    np.testing.assert_allclose(gradient, loss.expected(p)[1], atol=1e-13)


@pytest.mark.parametrize(("policy", "runs"), [("names", 1), ("nothing", 2)])
def test_saved_residuals_spare_the_second_run(native_kernel, policy, runs):
    """A policy saves the planes by name, not the logits: the joint runs again, but emission and lattice do not."""
    p = losses.problem(dtype=np.float32)
    size, classes = p.logits.size, p.logits.shape[-1]
    weight = np.random.default_rng(2).normal(size=(classes, classes)).astype(np.float32)

    @functools.partial(jax.checkpoint, policy=POLICIES[policy])
    def call(w):
        return jax_rnnt.rnnt_loss(p.logits @ w, *p[1:], implementation=native_kernel)

    found = losses.custom_calls(jax.jit(jax.value_and_grad(call)).lower(weight).compile().as_text())
    assert found == {
        "jax_rnnt_softmax_emission_fwd": runs,
        "jax_rnnt_lattice_grad": runs,
        "jax_rnnt_softmax_emission_bwd": 1,
    }
    residuals = jax.tree.leaves(jax.eval_shape(lambda w: jax.vjp(call, w)[1], weight))
    assert sum(x.size == size // classes for x in residuals) == (3 if policy == "names" else 0)
    logits = [x for x in residuals if x.size == size]
    assert len(logits) == 1, "the problem's own logits, the joint's input, and not its output"
