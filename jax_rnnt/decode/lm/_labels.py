"""A mask of labels as a model of fusion that forbids the others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._keywords import keywords


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class Labels:
    """The labels that a search may write: those of a language or a script, digits, the words of a menu.

    As a model of fusion it gives 0 to labels that are allowed and -inf to the others, whatever its weight is, except 0.
    So no score changes except by the labels that are missing: scores are still log-probabilities of the unmasked model,
    and results with different masks can be compared. Nothing is normalised again, except in `sample`, whose draws are
    among what is allowed.

    It is a pytree whose leaf is the mask: as an argument of a jitted function, new masks compile nothing.

    Parameters
    ----------
    allowed : Array, bool [V] or [B, V]
        Which classes a search may write, for all utterances or for each one of the batch. V are the classes of the
        joint network without durations. Entries of blanks are not read: a blank is always allowed.

    Raises
    ------
    TypeError, ValueError
        `allowed` has another dtype or rank. In a search: another number of classes or of utterances.

    Examples
    --------
    Class 1 is the most probable one, and forbidden; the score of class 2 is that of the model:

    >>> import jax.numpy as jnp
    >>> from jax_rnnt import MonotonicRNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 3)), 1, start=0)
    >>> frames = jnp.log(jnp.array([[[0.1, 0.6, 0.3]]]))
    >>> masked = decode.Labels(jnp.array([False, False, True]))
    >>> search = decode.Search(MonotonicRNNTLoss(blank=0), jnp.add, predictor, 1, fusion=[(masked, 1.0)])
    >>> found = search.greedy(frames, jnp.array([1]))
    >>> found.labels.tolist(), round(float(jnp.exp(found.scores[0])), 3)
    ([[2]], 0.3)
    """

    allowed: jax.Array

    @keywords
    def __init__(self, allowed: Any):
        allowed = _checks.array("allowed", allowed)
        if allowed.dtype != np.bool_:
            raise _checks.bad_type(f"allowed must have the dtype bool, got {allowed.dtype}.")
        if allowed.ndim not in (1, 2) or allowed.shape[-1] == 0:
            raise _checks.bad_value(f"allowed must have shape [V] or [B, V] with V > 0, got {tuple(allowed.shape)}.")
        object.__setattr__(self, "allowed", jnp.asarray(allowed))

    def __repr__(self) -> str:
        return f"Labels({'one mask' if self.utterances is None else f'{self.utterances} masks'} of {self.classes})"

    @property
    def classes(self) -> int:
        """V, the number of classes."""
        return self.allowed.shape[-1]

    @property
    def utterances(self) -> int | None:
        """The number of utterances B, where each one of the batch has its own mask."""
        return self.allowed.shape[0] if self.allowed.ndim == 2 else None

    def initial(self, batch: int) -> Any:
        """Returns the state: int32 [batch], the utterance of each row, if each has its own mask."""
        if self.utterances is None:
            return ()
        utterances = max(self.utterances, 1)
        if batch % utterances:
            expected = "masks for the utterances of the batch, whose N rows are a multiple of theirs"
            raise ValueError(f"Labels: allowed must be {expected}, got {self.utterances} masks and N = {batch}.")
        return jnp.arange(batch, dtype=jnp.int32) // (batch // utterances)

    def place(self, state: Any) -> Any:
        """Returns the state of rows in the order of the batch, whatever utterances they had before."""
        return state if self.utterances is None else self.initial(state.shape[0])

    def step(self, state: Any, labels: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (scores float32 [N, V] of the next labels, state), whatever the label was."""
        one = self.utterances is None
        rows = jnp.broadcast_to(self.allowed, (labels.shape[0], self.classes)) if one else self.allowed[state]
        scores, _ = _xla.vary_together(jnp.where(rows, 0, -jnp.inf).astype(jnp.float32), labels)
        return scores, state
