"""Token-and-duration emission: two softmaxes in one row of V + D logits, durations last.

    log_blank, log_label: of the softmax over the first V classes        duration+i: of the one over the last D
    dx[v] = c[v] - exp(x[v] - lse of the head of v) (sum of the cotangents of that head)

where c[v] sums the cotangents of what picks class v. In plain JAX: slices are views inside XLA's loops, so there is no
copy of either head.
"""

import dataclasses

import jax.numpy as jnp

from jax_rnnt.emissions.emission import NO_LABEL, Emission
from jax_rnnt.emissions.softmax import accumulation_dtype, inside_rows, log_sum_exp, one_hot


@dataclasses.dataclass(frozen=True)
class TokenAndDuration(Emission):
    """Planes "blank", "label" and "duration+i" for i < `durations`."""

    durations: int = 1

    def dimensions(self, logits):
        return logits.shape[-3], logits.shape[-1] - self.durations

    def _heads(self, logits, nodes):
        """(rows inside, token logits, duration logits) in the accumulation dtype."""
        inside = inside_rows(logits, *nodes)
        x = jnp.where(inside[..., None], logits, 0).astype(accumulation_dtype(logits.dtype))
        return inside, x[..., : -self.durations], x[..., -self.durations :]

    def _planes(self, logits, nodes):
        label, _ = nodes
        inside, tokens, durations = self._heads(logits, nodes)
        picked = {
            "blank": tokens[..., self.blanks[0]],
            "label": jnp.sum(jnp.where(one_hot(label, tokens), tokens, 0), -1),
        }
        picked |= {f"duration+{i}": durations[..., i] for i in range(self.durations)}
        if self.normalize:
            of_tokens, of_durations = log_sum_exp(tokens), log_sum_exp(durations)
        else:
            zero = jnp.zeros_like(picked["blank"])
            of_tokens = of_durations = zero, zero != 0, zero != 0
        planes = {}
        for slot, value in picked.items():
            lse, dead, _ = of_durations if slot.startswith("duration") else of_tokens
            value = value - jnp.where(dead, 0, lse)
            # A row with a NaN in one head has one in all planes.
            bad = of_tokens[2] | of_durations[2] | jnp.isposinf(value)
            planes[slot] = jnp.where(inside, jnp.where(bad, jnp.nan, value), -jnp.inf)
        planes["label"] = jnp.where(label == NO_LABEL, -jnp.inf, planes["label"])
        return planes, tuple(jnp.where(inside, lse, 0) for lse in (of_tokens[0], of_durations[0]))

    def reference(self, logits, nodes):
        return self._planes(logits, nodes)[0]

    def forward(self, logits, nodes, *, strict=False):
        self.refuse(strict)
        return self._planes(logits, nodes)

    def backward(self, logits, nodes, lses, cotangents, scale, clamp, *, strict=False, alias=True):
        label, _ = nodes
        inside, tokens, durations = self._heads(logits, nodes)
        used = inside & (sum(jnp.where(ct != 0, 1, 0) for ct in cotangents.values()) > 0)
        blank, picked = cotangents["blank"][..., None], cotangents["label"][..., None]
        lengths = jnp.stack([cotangents[f"duration+{i}"] for i in range(self.durations)], -1)
        of_tokens = jnp.where(one_hot(self.blanks[0], tokens), blank, 0) + jnp.where(one_hot(label, tokens), picked, 0)
        heads = []
        totals = blank + picked, jnp.sum(lengths, -1, keepdims=True)
        for x, ct, total, lse in zip((tokens, durations), (of_tokens, lengths), totals, lses):
            if self.normalize:
                safe = jnp.where(used & ~jnp.isneginf(lse), lse, 0)
                ct = ct - jnp.exp(x - safe[..., None]) * total
            heads.append(jnp.where(used[..., None], ct, 0))
        return self.finish(jnp.concatenate(heads, -1), nodes, scale, clamp).astype(logits.dtype)
