"""An encoder of dilated convolutions over time: quick to learn, to compile and to run."""

import jax.numpy as jnp
from flax import nnx

from jax_rnnt_speech.model.encoders.base import cut, extended, layer_norm
from jax_rnnt_speech.model.encoders.conformer import Conformer


class Residual(nnx.Module):
    """A dilated convolution over time: [B, N, E] -> [B, N, E]."""

    whole = None

    def __init__(self, config, dilation, *, dtype, rngs):
        width, self.reach = config.blocks.width, (config.blocks.convolution - 1) * dilation + 1
        self.norm = layer_norm(width, dtype=dtype, rngs=rngs)
        shape = {"kernel_size": (config.blocks.convolution,), "kernel_dilation": dilation, "padding": "VALID"}
        self.conv = nnx.Conv(width, width, **shape, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.network.dropout, rngs=rngs)

    def initial(self, batch):
        return jnp.zeros((batch, self.reach - 1, self.conv.in_features))

    before_all = initial

    def __call__(self, x, shared, before):
        lengths, _ = shared
        y, before = extended(cut(self.norm(x), lengths), before, self.reach)
        return x + self.dropout(nnx.relu(self.conv(y))), before


class Convolutional(Conformer):
    """The conformer's subsampling, and blocks with a convolution alone, each of twice the reach."""

    @staticmethod
    def layers(config, **more):
        return nnx.Sequential(*(Residual(config, 2**i, **more) for i in range(config.blocks.count)))
