"""Does a layout of wrong arrays raise one clear error, which names the loss or the method that was called?"""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import batches
import jax_rnnt
import layout_table
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, LinearJoint, PackedLogits

pytestmark = pytest.mark.no_kernel
P = batches.problem()
X = P.logits
AM, LM = X[:, :, 0], X[:, 0]
WEIGHT, BIAS = np.ones((9, 5)), np.ones(5)
ARRAY = jnp.asarray(WEIGHT)
FIRST = np.zeros((4, 7), np.int32)


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


def joint(made, encoder=AM, predictor=LM, **options):
    return JointLogits(made, encoder, predictor, **options)


def by_activation(activation):
    return joint(LinearJoint(WEIGHT, BIAS, activation))


CASES = (
    (lambda: X[0, 0], "logits must have shape"),
    (lambda: None, "logits must be an array"),
    (lambda: PackedLogits(X[0], 7), "logits must have shape [N, V]"),
    (lambda: PackedLogits(X[0, 0], -1), "max_frames must be 0 or more"),
    (lambda: PackedLogits(X[0, 0], 2.0), "max_frames must be an integer"),
    (lambda: BandLogits(X, FIRST[:, 1:]), "first must have shape"),
    (lambda: BandLogits(X, FIRST.astype(float)), "first must have an integer"),
    (lambda: BandLogits(joint(lambda e, p: e + p), FIRST), "logits must be an array"),
    (lambda: AdditiveLogits(AM[0, 0], LM), "am must"),
    (lambda: AdditiveLogits(AM, LM[..., 1:]), "lm must have shape"),
    (lambda: AdditiveLogits(AM, LM, unigram=np.ones(3)), "unigram must have shape"),
    (lambda: AdditiveLogits(AM, LM, lm_only_scale="1"), "lm_only_scale must be a real number"),
    (lambda: joint(None), "joint must be callable"),
    (lambda: joint(LinearJoint(WEIGHT), parameters=WEIGHT), "joint must be a hashable function beside parameters"),
    (lambda: joint(lambda p, *x: LinearJoint(ARRAY)(*x), parameters={}), "joint must take all its arrays from parame"),
    (lambda: joint(lambda p, e, q: e + q, parameters=[object()]), "parameters must be an array"),
    (lambda: joint(LinearJoint(WEIGHT), AM[0, 0]), "encoder_out must"),
    (lambda: joint(LinearJoint(WEIGHT), AM[:3]), "predictor_out must have shape"),
    (lambda: joint(LinearJoint(WEIGHT), AM, LM[:, :0]), "predictor_out must"),
    (lambda: joint(LinearJoint(WEIGHT), chunk=0), "chunk must"),
    (lambda: joint(LinearJoint(WEIGHT), chunk=2.0), "chunk must"),
    (lambda: joint(LinearJoint(WEIGHT[:2])), "joint.weight must"),
    (lambda: joint(LinearJoint(None)), "joint.weight must"),
    (lambda: joint(LinearJoint(WEIGHT, BIAS[:2])), "joint.bias must"),
    (lambda: joint(LinearJoint(WEIGHT, BIAS.astype(int))), "joint.bias must"),
    (lambda: by_activation(lambda x: x[..., :2]), "joint.activation must"),
    (lambda: by_activation(lambda x: (x, x)), "joint.activation must"),
    (lambda: by_activation(lambda x: jnp.sum(x, -1, keepdims=True)), "joint.activation must"),
    (lambda: by_activation(None), "joint.activation must"),
    (lambda: by_activation(Unhashable()), "joint.activation must"),
    (lambda: joint(lambda e, p: e[0]), "joint must make logits"),
    (lambda: joint(lambda e, p: (e, p)), "joint must"),
    (lambda: joint(lambda e, p: jnp.concatenate([e, p])), "joint must"),
    (lambda: joint(lambda e, p: jnp.zeros((2, 9))), "joint must"),
    (lambda: joint(lambda e, p: (e + p).astype(jnp.int32)), "joint must make logits of a floating dtype"),
)


def test_errors():
    for make, message in CASES:
        for loss in (jax_rnnt.RNNTLoss(), jax_rnnt.RNNTLoss(implementation="reference")):
            for name, call in (
                ("RNNTLoss", loss),
                ("RNNTLoss.align", loss.align),
                ("RNNTLoss.arc_log_probs", loss.arc_log_probs),
            ):
                with pytest.raises((TypeError, ValueError), match=re.escape(f"{name}: {message}")):
                    call(make(), *P[1:])


@pytest.mark.parametrize("name", layout_table.NAMES)
def test_errors_of_the_other_arguments(name):
    with pytest.raises(TypeError, match="fused_log_softmax"):
        jax_rnnt.RNNTLoss(fused_log_softmax=False)(AdditiveLogits(AM, LM), *P[1:])
    many = jax_rnnt.MultiblankRNNTLoss([2, 3, 4])
    with pytest.raises(ValueError, match=r"MultiblankRNNTLoss: .*blanks must lie in \[-3, 3\) for 3 classes, got"):
        many(np.zeros((2, 2, 3)), np.zeros(1, int), 2, 1)
    p, arrays = layout_table.problem(name=name)
    made = layout_table.layout(p, name)(*arrays)
    for loss, rest, argument in (
        (jax_rnnt.RNNTLoss(blank=9), p[1:], "blank"),
        (jax_rnnt.RNNTLoss(), (p.targets[0], *p[2:]), "targets"),
        (jax_rnnt.RNNTLoss(), (p.targets, p.logit_lengths[:3], p.target_lengths), "logit_lengths"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"RNNTLoss: {argument} must"):
            loss(made, *rest)


def test_operations_on_layouts():
    """Logits that are made later are no array: each operation says what to do, and shape, dtype, ndim still work."""
    layouts = {
        "let joint compute it": joint(LinearJoint(WEIGHT)),
        "its array rows": PackedLogits(X[0, 0], 7),
        "its array logits": BandLogits(X, FIRST),
        "its arrays am and lm": AdditiveLogits(AM, LM),
    }
    x = jnp.ones(5)
    operations = (
        *(lambda y: y / 2, lambda y: 2 * y, lambda y: -y, lambda y: y @ x, lambda y: x + y, lambda y: y < 0),
        *(
            lambda y: y[0],
            lambda y: y[..., :2],
            list,
            float,
            round,
            lambda y: np.float32(2) - y,
            lambda y: np.ones(5) * y,
        ),
        *(np.asarray, np.exp, jnp.asarray, jnp.exp, jnp.sum, lambda y: jnp.where(True, y, 0)),
    )
    for advice, made in layouts.items():
        assert len(made.shape) == made.ndim and made.dtype == X.dtype and bool(made)
        for operation in operations:
            with pytest.raises(TypeError, match=f"^{type(made).__name__}: .*{advice}"):
                operation(made)
        for name in ("astype", "T", "sum", "at", "reshape"):
            with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{advice}"):
                getattr(made, name)
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
            _ = made.nothing
    nested = joint(LinearJoint(WEIGHT), AM, layouts["let joint compute it"])
    with pytest.raises(TypeError, match=r"predictor_out must be an array, got an object of the class JointLogits\.$"):
        jax_rnnt.RNNTLoss()(nested, *P[1:])


def test_networks_that_broadcast_by_accident():
    """NumPy's rule would give utterance n of the encoder to hypothesis n where B = N, or B = 1."""
    made, loss = LinearJoint(np.ones((5, 6))), jax_rnnt.RNNTLoss()
    for batch in (3, 1):
        rest = np.zeros((batch, 3, 2), int), np.full((batch, 3), 4), np.full((batch, 3), 2)
        predictor = np.ones((batch, 3, 3, 5))
        with pytest.raises(ValueError, match=r"predictor_out must have as many batch dim.*encoder_out\[:, None\]"):
            loss(JointLogits(made, np.ones((batch, 4, 5)), predictor), *rest)
        loss(JointLogits(made, np.ones((4, 5)), predictor), *rest)


def test_networks_that_are_exchanged():
    """Told by their numbers of rows, frames and labels; k2's simple loss takes the predictor's scores first."""
    rest = np.zeros((3, 2), int), np.full(3, 4), np.full(3, 2)
    frames, columns = np.ones((3, 4, 5)), np.ones((3, 3, 5))
    for layout, names in (
        (AdditiveLogits, "exchange am and lm"),
        (lambda *rows: joint(lambda a, b: a + b, *rows), "exchange encoder_out and predictor_out"),
    ):
        jax_rnnt.RNNTLoss()(layout(frames, columns), *rest)
        with pytest.raises(ValueError, match=f"targets must have .* got .*{names}"):
            jax_rnnt.RNNTLoss()(layout(columns, frames), *rest)


def test_ranges_and_their_inputs():
    """Posteriors have names: k2 takes the plane of labels before that of blanks, so neither order is accepted."""
    plane, lengths = np.full((4, 7, 5), 0.5), P[2:]
    for call, error in (
        (lambda: layout_table.ranges(lengths, 2, (plane, plane[:, 1:])), "prune_ranges: label_posteriors must"),
        (lambda: layout_table.ranges(lengths, 1, (plane, plane)), "prune_ranges: width must"),
        (lambda: layout_table.ranges(lengths, 2.0, (plane, plane)), "prune_ranges: width must"),
        (lambda: layout_table.ranges(lengths, 2, (plane, plane), variant="ctc"), "prune_ranges: variant must"),
        (lambda: jax_rnnt.prune_inputs(AM, LM[1:], FIRST, 2), "prune_inputs: predictor_out must"),
        (lambda: jax_rnnt.prune_inputs(AM, LM, FIRST, 0), "prune_inputs: width must"),
        (lambda: jax_rnnt.prune_ranges(plane, plane, *lengths, width=2), "0 positional arguments"),
        (lambda: layout_table.ranges(lengths, 2, ()), "'blank_posteriors' and 'label_posteriors'"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call()
