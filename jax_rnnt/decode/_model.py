"""Imports everything that decoding takes from the private parts of losses, layouts and emissions, in one place.

Everything else that decoding uses from them is public: `TransducerLoss` and `DecodingRules`, `JointLogits` and
`LinearJoint`, `Softmax`.
"""

import jax

from jax_rnnt import _checks, _xla
from jax_rnnt.emissions._softmax import accumulation_dtype as scores_dtype  # in which losses sum rows of logits
from jax_rnnt.emissions._softmax import one_hot as is_class
from jax_rnnt.emissions._softmax import row_sum
from jax_rnnt.layouts import JointLogits, LinearJoint
from jax_rnnt.layouts._joint_networks import row_avals
from jax_rnnt.losses import TransducerLoss
from jax_rnnt.losses._call import switched_off

__all__ = ["checked_joint", "constant", "is_class", "log_softmax", "scores_dtype", "switched_off"]


def constant(tree):
    """Returns the pytree without derivatives: no search has a derivative, and its loops allow none in reverse mode.

    A search applies it to its arguments, and to what networks return, as these may close over parameters in training.
    """
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x, tree)


def log_softmax(logits):
    """Returns log-softmax over the classes of logits [..., V] as losses compute it; a row must hold no NaN or +inf."""
    return row_sum(logits).log_probability(logits)


def checked_joint(joint, encoder_out, rows) -> JointLogits:
    """Returns the joint network as a checked layout of logits: it draws nothing, and its classes are not split."""
    if isinstance(joint, JointLogits):
        raise _checks.bad_type("joint must be the network of the JointLogits, their attribute joint, got them.")
    if isinstance(joint, TransducerLoss):
        raise _checks.bad_type("joint must be a joint network, got a loss, which comes first: loss, joint, ...")
    if callable(joint) and not isinstance(joint, LinearJoint):
        _, draws = _xla.shape_of("joint", joint, *row_avals(2, encoder_out, rows))
        _checks.no_draws("joint", draws)
    layout = JointLogits(joint, encoder_out, rows).checked()
    _checks.unsplit("logits of joint", layout._result, {-1: "V"})
    return layout
