"""A model with all that it takes to use it: configuration, vocabulary, statistics of the features. All of it is stored.

B utterances, N encoder frames, U labels. Parameters are arguments, so that a step can change them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_rnnt import decode
from jax_rnnt_speech import features, tokens
from jax_rnnt_speech.config import Config, UserError, from_json
from jax_rnnt_speech.losses import LOSSES, Encoded
from jax_rnnt_speech.model import Transducer
from jax_rnnt_speech.ngrams import Search

MAX_SYMBOLS = 4  # labels of a frame that a decoder writes at most
GREEDY = Search()
SAMPLE = 200  # utterances of which statistics are taken


def statistics(data, config):
    """Mean and deviation of each feature, over some training utterances."""
    some = list(data.labels)[:: max(1, len(data.labels) // SAMPLE)]
    loaded = [data.corpus.load(i, np.random.default_rng(i)) for i in some]
    loaded = [features.log_mel(config, x) if data.corpus.device else x for x in loaded if x is not None]
    if not loaded:
        raise UserError(f"none of the {len(some)} training utterances that were tried has readable audio")
    frames = np.concatenate(loaded)
    return frames.mean(0).tolist(), (frames.std(0) + 1e-3).tolist()


class Recogniser:
    def __init__(self, config, vocabulary, mean, deviation, implementation=None):
        self.config, self.tokens, self.variant = config, vocabulary, LOSSES[config.loss]
        self.mean, self.deviation = np.float32(mean), np.float32(deviation)
        options = {"reduction": "none", "fastemit_lambda": config.fastemit, "implementation": implementation}
        self.loss = dataclasses.replace(self.variant.loss, **options)
        rngs = nnx.Rngs(config.seed, dropout=config.seed)
        blank, self.classes = self.variant.outputs(len(vocabulary.pieces))
        model = Transducer(config, len(mean), blank, self.classes, rngs=rngs)
        self.subsampling = model.subsampling
        self.graphdef, self.params, self.noise = nnx.split(model, nnx.Param, ...)

    @classmethod
    def from_setup(cls, setup, **options):
        config = Config(**from_json(setup["config"], "the checkpoint"))
        return cls(config, tokens.from_json(setup["tokens"]), setup["mean"], setup["deviation"], **options)

    def setup(self):
        """What a checkpoint stores beside the parameters."""
        config = dataclasses.asdict(self.config) | {"strides": [list(pair) for pair in self.config.strides]}
        stored = {"config": config, "tokens": self.tokens.to_json()}
        return stored | {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    def model(self, params, step=None):
        """The model; at a step of training with dropout."""
        if step is None:
            model = nnx.merge(self.graphdef, params, self.noise)
            model.eval()
            return model

        def fold(x):
            return jax.random.fold_in(x, step) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

        return nnx.merge(self.graphdef, params, jax.tree.map(fold, self.noise))

    def inputs(self, batch, device):
        """Features [B, T, F] of a batch, with mean 0 and deviation 1."""
        x = batch["audio"]
        x = features.log_mel(self.config, x, jnp) if device else x
        return (x - self.mean) / self.deviation

    def encoded(self, model, x, batch):
        rows, lengths = model.encode(x, batch["lengths"])
        return Encoded(rows, model.predictor(batch["targets"]), batch["targets"], lengths, batch["target_lengths"])

    def mean_loss(self, params, batch, step, device):
        """Mean loss of the utterances of a batch, in nats."""
        x = features.hide(self.inputs(batch, device), batch["spans"], self.config.time_masks)
        model = self.model(params, step)
        losses = self.variant.compute(self.loss, model, self.encoded(model, x, batch), self.config.joint == "tiles")
        return jnp.where(batch["valid"], losses, 0).sum() / jnp.maximum(batch["valid"].sum(), 1)

    def search(self, model, rows, lengths, how=GREEDY, state=None):
        """Labels [B, N] and their numbers [B], and the state of a stream; of a beam, of the best hypothesis."""
        inputs = *model.joint.decoder_inputs(model.predictor, rows), lengths, rows.shape[1] * MAX_SYMBOLS
        loss, options = self.variant.loss, {"max_symbols": MAX_SYMBOLS, "state": state}
        if not how.beam:
            return decode.greedy(loss, *inputs, **options)
        options |= {"fusion": how.fusion, "ilm_weight": how.ilm_weight}
        hypotheses = decode.beam(loss, *inputs, how.beam, **options)
        return hypotheses._replace(labels=hypotheses.labels[:, 0], counts=hypotheses.counts[:, 0])

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def evaluated(self, params, batch, device, how):
        """Sum of losses, and labels [B, L] with their numbers [B]."""
        model = self.model(params)
        x = self.encoded(model, self.inputs(batch, device), batch)
        losses = self.variant.compute(self.loss, model, x, self.config.joint == "tiles")
        hypotheses = self.search(model, x.frames, x.frame_lengths, how)
        return jnp.where(batch["valid"], losses, 0).sum(), hypotheses.labels, hypotheses.counts

    def text(self, labels, count):
        return self.tokens.decode(np.asarray(labels)[: int(count)])
