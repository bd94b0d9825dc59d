"""HAT emission: one Bernoulli logit for the blank, a softmax over the other classes for the label.

    log_blank = log sigmoid(z)            lse = log sum over v != blank of exp(x[v])
    log_label = log sigmoid(-z) + x[label] - lse, or log_blank where the label is the blank class
    dz        = c_blank sigmoid(-z) - c_label sigmoid(z)
    dx[v]     = c_label ([v = label] - exp(x[v] - lse))

for z = x[blank] and cotangents c. In plain JAX.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_rnnt.emissions.emission import NO_LABEL, Emission
from jax_rnnt.emissions.softmax import accumulation_dtype, inside_rows, log_sum_exp, one_hot


@dataclasses.dataclass(frozen=True)
class HAT(Emission):
    def _parts(self, logits, nodes):
        """(rows inside, logits in the accumulation dtype, blank logit, where the blank class is)."""
        inside = inside_rows(logits, *nodes)
        x = jnp.where(inside[..., None], logits, 0).astype(accumulation_dtype(logits.dtype))
        is_blank = one_hot(self.blanks[0], x)
        return inside, x, jnp.sum(jnp.where(is_blank, x, 0), -1), is_blank

    def _planes(self, logits, nodes):
        label, _ = nodes
        inside, x, z, is_blank = self._parts(logits, nodes)
        lse, dead, bad = log_sum_exp(jnp.where(is_blank, -jnp.inf, x))
        bad |= jnp.isnan(z) | jnp.isposinf(z)
        certain = jnp.isneginf(z)  # the blank is impossible
        z = jnp.where(certain, 0, z)
        blank = jnp.where(certain, -jnp.inf, jax.nn.log_sigmoid(z))
        other = jnp.where(certain, 0, jax.nn.log_sigmoid(-z))
        picked = jnp.sum(jnp.where(one_hot(label, x), x, 0), -1) - jnp.where(dead, 0, lse)
        picked = jnp.where(label == self.blanks[0], blank, picked + other)
        planes = {"blank": blank, "label": jnp.where(label == NO_LABEL, -jnp.inf, picked)}
        planes = {slot: jnp.where(inside, jnp.where(bad, jnp.nan, p), -jnp.inf) for slot, p in planes.items()}
        planes["label"] = jnp.where(label == NO_LABEL, -jnp.inf, planes["label"])
        return planes, jnp.where(inside, lse, 0)

    def reference(self, logits, nodes):
        return self._planes(logits, nodes)[0]

    def forward(self, logits, nodes, *, strict=False):
        self.refuse(strict)
        return self._planes(logits, nodes)

    def backward(self, logits, nodes, lse, cotangents, scale, clamp, *, strict=False, alias=True):
        label, _ = nodes
        inside, x, z, is_blank = self._parts(logits, nodes)
        same = label == self.blanks[0]
        blank = cotangents["blank"] + jnp.where(same, cotangents["label"], 0)
        other = jnp.where(same, 0, cotangents["label"])
        used = inside & ((blank != 0) | (other != 0))
        safe = jnp.where(used & ~jnp.isneginf(lse), lse, 0)
        to_blank = blank * jax.nn.sigmoid(-z) - other * jax.nn.sigmoid(z)
        to_label = jnp.where(one_hot(label, x), other[..., None], 0) - jnp.exp(x - safe[..., None]) * other[..., None]
        gradient = jnp.where(is_blank, to_blank[..., None], to_label)
        gradient = self.finish(jnp.where(used[..., None], gradient, 0), nodes, scale, clamp)
        return gradient.astype(logits.dtype)
