"""Does each static mistake raise at trace time, naming argument, expected and actual value?"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

# Mistakes in a call of shape B=4, T=7, U=4, V=9: argument, value, text in the message beside the name.
f32, i32 = functools.partial(np.zeros, dtype=np.float32), functools.partial(np.zeros, dtype=np.int32)
WRONG = {
    "logits_rank_2": ("logits", f32((5, 9)), ["(5, 9)"]),
    "logits_rank_0": ("logits", np.float32(1), ["()"]),
    "logits_int": ("logits", i32((4, 7, 5, 9)), ["int32", "float"]),
    "logits_bool": ("logits", np.zeros((4, 7, 5, 9), bool), ["bool", "float"]),
    "logits_complex": ("logits", np.zeros((4, 7, 5, 9), np.complex64), ["complex64", "float"]),
    "logits_no_classes": ("logits", f32((4, 7, 5, 0)), ["(4, 7, 5, 0)"]),
    "logits_no_nodes": ("logits", f32((4, 7, 0, 9)), ["(4, 7, 0, 9)"]),
    "targets_as_long_as_nodes": ("targets", i32((4, 5)), ["(4, 5)", "(4, 4)", "logits needs 6 columns"]),
    "targets_rank": ("targets", i32((4,)), ["(4,)", "(4, 4)"]),
    "targets_batch": ("targets", i32((3, 4)), ["(3, 4)", "(4, 4)"]),
    "targets_broadcast": ("targets", i32((1, 4)), ["(1, 4)", "(4, 4)"]),
    "targets_float": ("targets", f32((4, 4)), ["float32", "int"]),
    "targets_bool": ("targets", np.zeros((4, 4), bool), ["bool", "int"]),
    "logit_lengths_shape": ("logit_lengths", i32((3,)), ["(3,)", "(4,)"]),
    "logit_lengths_rank": ("logit_lengths", i32((4, 1)), ["(4, 1)", "(4,)"]),
    "logit_lengths_scalar": ("logit_lengths", np.int32(7), ["()", "(4,)"]),
    "logit_lengths_float": ("logit_lengths", f32((4,)), ["float32", "int"]),
    "target_lengths_shape": ("target_lengths", i32((5,)), ["(5,)", "(4,)"]),
    "target_lengths_rank": ("target_lengths", i32((2, 2)), ["(2, 2)", "(4,)"]),
    "target_lengths_float": ("target_lengths", np.zeros(4, np.float64), ["float64", "int"]),
    "blank_too_large": ("blank", 9, ["9"]),
    "blank_too_small": ("blank", -10, ["-10", "9"]),
    "blank_float": ("blank", 1.5, ["1.5", "int"]),
    "blank_string": ("blank", "0", ["int"]),
    "blank_none": ("blank", None, ["None", "int"]),
    "reduction": ("reduction", "avg", ["avg", "mean", "none", "sum", "mean_target", "mean_volume"]),
    "reduction_none": ("reduction", None, ["None", "mean", "the same here is 'none'"]),
    "reduction_of_nemo": ("reduction", "mean_batch", ["mean_target", "the same here is 'mean'"]),
    "clamp_vector": ("clamp", f32((4,)), ["(4,)"]),
    "clamp_string": ("clamp", "1", []),
    "clamp_none": ("clamp", None, ["None"]),
    "clamp_complex": ("clamp", 1j, []),
    "fastemit_lambda_vector": ("fastemit_lambda", f32((2,)), ["(2,)"]),
    "fastemit_lambda_string": ("fastemit_lambda", "0.1", []),
    "delay_penalty_vector": ("delay_penalty", f32((1,)), ["(1,)"]),
    "delay_penalty_list": ("delay_penalty", [0.1], []),
    "label_windows_pairs": ("label_windows", i32((4, 4, 3)), ["(4, 4, 3)", "(4, 4, 2)"]),
    "label_windows_labels": ("label_windows", i32((4, 5, 2)), ["(4, 5, 2)", "(4, 4, 2)"]),
    "label_windows_rank": ("label_windows", i32((4, 2)), ["(4, 2)", "(4, 4, 2)"]),
    "label_windows_float": ("label_windows", f32((4, 4, 2)), ["float32", "int"]),
    "implementation": ("implementation", "xla", ["xla", "kernel", "reference"]),
}


def call(loss, name, value, **options):
    arguments = {**losses.problem(loss=loss, dtype=np.float32)._asdict(), **options, name: value}
    arrays = [arguments.pop(k) for k in losses.Problem._fields]
    return loss(*arrays, **arguments)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_message(loss, wrong):
    name, value, parts = wrong
    with pytest.raises((ValueError, TypeError)) as caught:
        call(loss, name, value)
    for part in (name, loss.function.__name__, *parts):
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


@pytest.mark.parametrize("name", ["targets", "logits", "blank", "reduction"])
def test_raised_while_tracing(loss, name):
    """The error is raised under jit, vmap and grad alike, before anything runs."""
    value = {"targets": i32((4, 5)), "logits": i32((4, 7, 5, 9)), "blank": 9, "reduction": "avg"}[name]
    with pytest.raises((ValueError, TypeError), match=name):
        jax.eval_shape(lambda: call(loss, name, value))
    if name != "logits":
        run = lambda x: call(loss, name, value, logits=x)
        with pytest.raises((ValueError, TypeError), match=name):
            jax.jit(jax.vmap(jax.grad(run)))(f32((2, 4, 7, 5, 9)))


def test_traced_blank(loss):
    """A tracer in place of a Python number is reported by name, too."""
    p = losses.problem(loss=loss, dtype=np.float32)
    with pytest.raises(TypeError, match="blank"):
        jax.jit(lambda b: loss(*p, blank=b))(0)


def test_numpy_integers_are_integers(loss):
    p = losses.problem(loss=loss)
    np.testing.assert_allclose(loss(*p, blank=np.int64(3)), loss(*p, blank=3))


def test_options_after_fused_log_softmax_are_keywords(loss):
    """Positional arguments follow torchaudio's order up to there; the others need names."""
    p = losses.problem(loss=loss)
    values, _ = loss.expected(p, blank=2, clamp=1.0)
    np.testing.assert_allclose(loss(*p, 2, 1.0, "sum", True), values.sum(), rtol=1e-13)
    with pytest.raises(TypeError):
        loss(*p, 2, 1.0, "sum", True, 0.1)
    with pytest.raises(TypeError, match="fast_emit"):
        loss(*p, fast_emit=0.1)


def test_loss_object_says_the_same():
    p = losses.problem()
    with pytest.raises((ValueError, TypeError), match="reduction"):
        jax_rnnt.RNNTLoss(reduction="avg")(*p)
    with pytest.raises((ValueError, TypeError), match="targets"):
        jax_rnnt.RNNTLoss()(p.logits, p.targets[:, 1:], *p[2:])
    with pytest.raises((ValueError, TypeError), match="blank"):
        jax_rnnt.RNNTLoss(blank=9)(*p)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blank", "x"), ("blank", None), ("blank", 1.0), ("fused_log_softmax", 1), ("inplace", "no"), ("clamp", None),
        ("fastemit_lambda", "0.1"), ("delay_penalty", [0.1]), ("reduction", "avg"), ("implementation", "xla"),
    ],
)  # fmt: skip
def test_loss_object_says_so_when_built(name, value):
    """Errors that do not depend on a batch are raised when the loss is made."""
    with pytest.raises((ValueError, TypeError), match=rf"RNNTLoss: {name} must .*got {re.escape(repr(value))}"):
        jax_rnnt.RNNTLoss(**{name: value})


def test_posteriors_say_the_same():
    p = losses.problem()
    for name, value in (("targets", i32((4, 5))), ("logit_lengths", i32(3)), ("logits", i32((4, 7, 5, 9)))):
        with pytest.raises((ValueError, TypeError), match=rf"rnnt_posteriors.*{name}"):
            jax_rnnt.rnnt_posteriors(*p._replace(**{name: value}))
    with pytest.raises((ValueError, TypeError), match="blank"):
        jax_rnnt.rnnt_posteriors(*p, blank=9)


BAD_DATA = {
    "logit_lengths": ((2,), 8),
    "target_lengths": ((1,), 5),
    "targets": ((0, 1), 9),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_validate_inputs(name):
    """Accepts good data with any padding; otherwise names the first offender with index and value."""
    index, limit = BAD_DATA[name]
    p = losses.poisoned(losses.problem())
    assert jax_rnnt.validate_inputs(*p) is None
    for end in (p._replace(logit_lengths=0 * p.logit_lengths), p._replace(target_lengths=0 * p.target_lengths)):
        assert jax_rnnt.validate_inputs(*end) is None
    for value in (limit, -1):
        bad = p._replace(**{name: getattr(p, name).copy()})
        getattr(bad, name)[index] = value
        with pytest.raises(ValueError, match=name) as caught:
            jax_rnnt.validate_inputs(*bad)
        assert str(value) in str(caught.value) and ", ".join(map(str, index)) in str(caught.value)


def test_validate_inputs_finds_static_mistakes():
    p = losses.problem()
    with pytest.raises((ValueError, TypeError), match="targets"):
        jax_rnnt.validate_inputs(*p._replace(targets=i32((4, 5))))


def test_validate_inputs_under_checkify():
    from jax.experimental import checkify

    p = losses.problem()

    @jax.jit
    @checkify.checkify
    def step(p):
        jax_rnnt.validate_inputs(*p)
        return jax.value_and_grad(lambda x: jax_rnnt.rnnt_loss(x, *p[1:]))(p.logits)

    error, (value, _) = step(p)
    error.throw()
    np.testing.assert_allclose(value, losses.RNNT.expected(p)[0].mean(), rtol=1e-13)
    error, _ = step(p._replace(logit_lengths=p.logit_lengths + 1))
    with pytest.raises(checkify.JaxRuntimeError, match="logit_lengths"):
        error.throw()
    error, _ = step(p._replace(targets=p.targets + jnp.int32(9)))
    with pytest.raises(checkify.JaxRuntimeError, match="targets"):
        error.throw()
