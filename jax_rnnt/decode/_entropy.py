"""Confidence in a label from its whole row of probabilities, not from the label's probability alone."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords

NEAR = 0.1  # exponents this near to 1 lose the digits of their sums of powers, which are near to 1 too
LEAST = -100.0  # log-probabilities below this count as this one, whose terms are below 1e-38


@keywords
@dataclasses.dataclass(frozen=True)
class Entropy:
    """Measures how sure a model is of a label, by the entropy of the row where the label was chosen.

    It is the option `confidence` of `greedy` and `beam`. V tokens (labels and blanks) have probabilities p. A certain
    row has the confidence 1, a uniform one 0.

    Parameters
    ----------
    kind : {"tsallis", "renyi", "gibbs"}
        The entropy H, with the exponent a: (sum p^a - 1) / (1 - a), log(sum p^a) / (1 - a), or -sum p^a log p^a. For
        a = 1 all are Shannon's.
    exponent : float, default 1 / 3
        a, above 0; for "gibbs" at most 1, as above that uniform rows have next to no entropy. Below 1 it gives more
        weight to improbable tokens, so overconfident models get lower confidences.
    normalization : {"exponential", "linear"}
        With M, the entropy of the uniform distribution: (e^-H - e^-M) / (1 - e^-M), or 1 - H / M. A few distributions
        have a Gibbs entropy above M; their confidence is 0.

    References
    ----------
    Laptev and Ginsburg, "Fast Entropy-Based Methods of Word-Level Confidence Estimation for End-to-End Automatic
    Speech Recognition", SLT 2022, arXiv:2212.08703. The default is NeMo's, which rounds 1 / 3 to 0.33.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import decode
    >>> log_probs = jnp.log(jnp.array([[0.98, 0.01, 0.01], [0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]))
    >>> [round(float(x), 2) for x in decode.Entropy("gibbs", 1.0, "linear").confidence(log_probs)]
    [0.9, 0.05, 0.0]
    >>> [round(float(x), 2) for x in decode.Entropy().confidence(log_probs)]
    [0.41, 0.01, 0.0]
    """

    kind: Literal["tsallis", "renyi", "gibbs"] = "tsallis"
    exponent: float = 1 / 3
    normalization: Literal["exponential", "linear"] = "exponential"

    def __post_init__(self):
        _checks.choice("kind", self.kind, ("tsallis", "renyi", "gibbs"))
        _checks.choice("normalization", self.normalization, ("exponential", "linear"))
        exponent = _checks.known(_checks.scalar("exponent", self.exponent))
        if exponent is None or not 0 < exponent < math.inf:
            raise _checks.bad_value(f"exponent must be a known number, finite and above 0, got {self.exponent!r}.")
        if self.kind == "gibbs" and exponent > 1:
            raise _checks.bad_value(f"exponent must be 1 or less for Gibbs's entropy, got {self.exponent!r}.")
        object.__setattr__(self, "exponent", float(exponent))

    def confidence(self, log_probs: jax.Array) -> jax.Array:
        """Returns the confidence [...] from 0 to 1 of rows [..., V] of log-probabilities; NaN where a row holds NaN."""
        tokens = log_probs.shape[-1]
        if tokens < 2:
            return jnp.ones(log_probs.shape[:-1], log_probs.dtype)
        entropy, most = self._entropy(log_probs), self._of_uniform(tokens)
        if self.normalization == "linear":
            return jnp.clip(1 - entropy / most, 0, 1)
        return jnp.clip(1 - jnp.expm1(-entropy) / math.expm1(-most), 0, 1)

    def _entropy(self, x):
        a, d = self.exponent, self.exponent - 1
        if self.kind == "gibbs" or d == 0:
            return jnp.sum(jax.scipy.special.entr(jnp.exp(a * x)), -1)
        near = abs(d) < NEAR
        if near:  # this is sum p^a - 1, for p that add up to 1
            more = jnp.sum(jnp.exp(x) * jnp.expm1(d * jnp.maximum(x, LEAST)), -1)
        if self.kind == "renyi":
            return (jnp.log1p(more) if near else jax.nn.logsumexp(a * x, -1)) / -d
        return (more if near else jnp.sum(jnp.exp(a * x), -1) - 1) / -d

    def _of_uniform(self, tokens: int) -> float:
        a, d, log = self.exponent, self.exponent - 1, math.log(tokens)
        if self.kind == "renyi" or d == 0:
            return log
        return a * log * math.exp(-d * log) if self.kind == "gibbs" else math.expm1(-d * log) / -d
