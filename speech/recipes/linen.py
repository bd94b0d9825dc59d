"""A transducer in Flax Linen: modules of `jax_rnnt.flax.linen`, an encoder of your own, optax.

python speech/recipes/linen.py
"""

import jax
import jax.numpy as jnp
from _shared import Digits, check, error_rate, fit, parse
from flax import linen as nn

from jax_rnnt import RNNTLoss, decode
from jax_rnnt.flax.linen import Joint, StatelessPredictor

LOSS = RNNTLoss(reduction="none")


class Encoder(nn.Module):
    """[B, T, F] -> [B, T / 2, E], each frame from its neighbourhood."""

    width: int

    @nn.compact
    def __call__(self, x, lengths):
        inside = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
        x = nn.relu(nn.Conv(self.width, (5,), strides=2)(x * inside))
        inside = inside[:, ::2]
        for dilation in (1, 2, 4):
            y = nn.LayerNorm()(x) * inside
            x = x + nn.relu(nn.Conv(self.width, (5,), kernel_dilation=dilation)(y))
        return nn.LayerNorm()(x)


class Transducer(nn.Module):
    blank: int
    width: int = 96

    def setup(self):
        self.encoder = Encoder(self.width)
        self.predictor = StatelessPredictor(self.blank + 1, self.width, history=2)
        self.joint = Joint(self.width, self.blank + 1)

    def __call__(self, x, batch):
        """Mean loss of a batch."""
        rows, lengths = self.encoder(x, batch["lengths"]), -(-batch["lengths"] // 2)
        logits = self.joint.logits(rows, self.predictor(batch["targets"]))
        losses = LOSS(logits, batch["targets"], lengths, batch["target_lengths"])
        return jnp.mean(losses, where=batch["valid"])

    def search(self, x, batch):
        rows, lengths = self.encoder(x, batch["lengths"]), -(-batch["lengths"] // 2)
        joint, predictor, rows = self.joint.decoder_inputs(self.predictor, rows)
        return decode.Search(LOSS, joint, predictor, max_labels=20, max_symbols=4).greedy(rows, lengths)


def main():
    args = parse(__doc__, steps=2000)
    digits = Digits(steps=args.steps, seed=args.seed)
    model = Transducer(digits.blank)

    def inputs(batch):
        return (batch["features"] - jnp.asarray(digits.mean)) / jnp.asarray(digits.deviation)

    batch = next(digits.batches())
    batch.pop("index")
    params = jax.jit(model.init)(jax.random.key(args.seed), inputs(batch), batch)
    params = fit(params, lambda params, batch, step: model.apply(params, inputs(batch), batch), digits)

    @jax.jit
    def search(batch):
        hypotheses = model.apply(params, inputs(batch), batch, method="search")
        return hypotheses.labels, hypotheses.counts

    check("CER", error_rate(search, digits), 5)


if __name__ == "__main__":
    main()
