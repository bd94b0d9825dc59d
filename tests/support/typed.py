"""What type checkers must see, checked by mypy (`make lint`); nothing runs this file.

`warn_unused_ignores` makes an error of each comment below whose line is accepted: of an argument without a type.
"""

from typing import Any, Protocol, TypeVar, assert_type

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_rnnt import *  # noqa: F403
from jax_rnnt import Alignment, HATLoss, JointLogits, LinearJoint, RNNTLoss, TDTLoss, decode, mwer_loss, rnnt_loss

Result = TypeVar("Result", covariant=True)


class OfBatch(Protocol[Result]):
    """A method of a loss: names, types and defaults of its arguments."""

    def __call__(
        self,
        logits: ArrayLike | JointLogits,
        targets: ArrayLike,
        logit_lengths: ArrayLike,
        target_lengths: ArrayLike,
        *,
        label_windows: ArrayLike | None = None,
        key: jax.Array | None = None,
    ) -> Result: ...


def methods(loss: RNNTLoss) -> tuple[OfBatch[jax.Array], ...]:
    posteriors: OfBatch[tuple[jax.Array, jax.Array]] = loss.posteriors
    align: OfBatch[Alignment] = loss.align
    arcs: OfBatch[dict[str, jax.Array]] = loss.arc_log_probs
    print(posteriors, align, arcs)
    return loss, loss.__call__, loss.label_frames, loss.latency, loss.label_log_probs


class Own(RNNTLoss):
    def latency(self, *batch: Any, **more: Any) -> jax.Array:
        super().latency(*batch, label_windows="all")  # type: ignore[arg-type]
        return assert_type(super().latency(*batch, **more), jax.Array)


def losses(loss: RNNTLoss, z: jax.Array, y: np.ndarray, n: np.ndarray, joint: LinearJoint) -> None:
    assert_type(loss(z, y, n, n), jax.Array)
    assert_type(loss(JointLogits(joint, z, z), y, n, n, key=z), jax.Array)
    assert_type(rnnt_loss(z, y, n, n, reduction="mean_volume"), jax.Array)
    assert_type(loss.posteriors(z, y, n, n), tuple[jax.Array, jax.Array])
    assert_type(loss.align(z, y, n, n), Alignment)
    assert_type(loss.label_frames(z, y, n, n, label_windows=y), jax.Array)
    assert_type(loss.latency(z, y, n, n), jax.Array)
    assert_type(loss.label_log_probs(z, y, n, n), jax.Array)
    assert_type(loss.arc_log_probs(z, y, n, n), dict[str, jax.Array])
    loss.validate(z, y, n, n)
    assert_type(loss(PackedLogits(z), y, n, n), jax.Array)  # noqa: F405 (a name of `*`)


def decoders(loss: TDTLoss, joint: LinearJoint, predictor: decode.Predictor, z: jax.Array, n: jax.Array) -> None:
    search = decode.Search(loss, joint, predictor, 10, duration_choice="token_first")
    assert_type(search.greedy(z, n), decode.Hypotheses)
    assert_type(search.beam(z, n, 4), decode.Hypotheses)
    assert_type(mwer_loss(z, n, "sum"), jax.Array)


def mistakes(loss: RNNTLoss, z: jax.Array, n: jax.Array, joint: LinearJoint) -> None:
    RNNTLoss(reduction="average")  # type: ignore[arg-type]
    RNNTLoss(implementation="cuda")  # type: ignore[arg-type]
    HATLoss(variant="modified")  # type: ignore[arg-type]
    rnnt_loss(z, n, n, n, reduction="mean_batch")  # type: ignore[arg-type]
    loss(z, "targets", n, n)  # type: ignore[arg-type]
    loss.posteriors("logits", n, n, n)  # type: ignore[arg-type]
    loss.align(z, n, n, "lengths")  # type: ignore[arg-type]
    loss.label_frames(z, n, None, n)  # type: ignore[arg-type]
    loss.latency(z, n, n, n, key="seed")  # type: ignore[arg-type]
    loss.label_log_probs(z, n, n, n, label_windows="all")  # type: ignore[arg-type]
    loss.arc_log_probs(joint, n, n, n)  # type: ignore[arg-type]
    loss.validate(z, n, n, "lengths")  # type: ignore[arg-type]
    loss(z, n, n)  # type: ignore[call-arg]
    loss.posteriors(z, n, n)  # type: ignore[call-arg]
    loss.align(z, n, n, n, None)  # type: ignore[call-arg]
    loss.label_log_probs(z, n, n, n, windows=n)  # type: ignore[call-arg]
    decode.Search(RNNTLoss, joint, joint, 10)  # type: ignore[arg-type]
    decode.Search(loss, "joint", joint, 10).greedy(z, n)  # type: ignore[arg-type]
