"""A model with all that its use needs: configuration, vocabulary, statistics of the features. All of it is stored.

B utterances, T feature frames, N encoder frames, U labels. Parameters are arguments, so that a step can change them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_rnnt_speech.config import Config
from jax_rnnt_speech.config.files import from_json, to_json
from jax_rnnt_speech.data import features, tokens
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.model.encoders.base import Uncounted
from jax_rnnt_speech.model.losses import Encoded, variant_of
from jax_rnnt_speech.model.transducer import Transducer
from jax_rnnt_speech.system import UserError, programs, refuse_if

WEIGHTS = nnx.Param, nnx.BatchStat  # what a model stores; the rest of its arrays are keys of dropout


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class Model:
    """A model. `source` has the JSON files of a pretrained model, by name; config.json decides its encoder."""

    def __init__(self, config, vocabulary, mean, deviation, source=None):
        self.config, self.tokens, self.variant, self.source = config, vocabulary, variant_of(config.head), source
        self.mean, self.deviation = np.float32(mean), np.float32(deviation)
        self.extractor = features.extractor(config)
        options = {"reduction": "none", "fastemit_lambda": config.objective.fastemit}
        self.loss = self.variant.loss and dataclasses.replace(self.variant.loss, **options)
        self.blank, self.classes = self.variant.outputs(len(vocabulary.pieces))
        network = nnx.eval_shape(lambda: self.made(Uncounted))
        self.prompt = self.language(config.search.prompt) if network.prompt or config.search.prompt else None
        self.subsampling, self.width = encoders.subsampling(config, source), network.encoder.width
        self.seconds = self.subsampling * self.extractor.hop / self.extractor.rate  # seconds of an encoder frame
        self.chunk = 0 if network.head else network.encoder.chunk
        self.graphdef, self.shapes, noise = nnx.split(network, WEIGHTS, ...)
        leaves, tree = jax.tree.flatten(noise)

        @jax.jit  # one program in place of many, which take as long as all the keys of the network
        def drawn():
            keys = jax.random.split(jax.random.key(config.run.seed), len(leaves))
            return tree.unflatten(k if is_key(x) else jnp.zeros(x.shape, x.dtype) for k, x in zip(keys, leaves))

        self.noise = drawn()

    def made(self, stream=nnx.RngStream):
        """Returns the network with random weights from such streams of keys."""
        rngs = nnx.Rngs(self.config.run.seed, dropout=self.config.run.seed)
        for name, usual in [*rngs.items()]:
            setattr(rngs, name, stream(usual.key[...], tag=name))
        return Transducer(self.config, len(self.mean), self.blank, self.classes, self.source, rngs=rngs)

    @functools.cached_property
    def params(self):
        """Random weights. A file that is read takes their place before any is drawn: `shapes` are what it must have."""
        return nnx.state(self.made(), WEIGHTS)

    def take(self, parts):
        """Takes weights by part, such as `encoder`. Those of missing parts are drawn, and no others."""
        missing = [name for name in self.shapes if name not in parts]
        if missing:
            parts = parts | jax.jit(lambda: {name: nnx.state(self.made(), WEIGHTS)[name] for name in missing})()
        self.params = jax.tree.map(lambda x: x, self.shapes)  # a copy of the tree
        for name in self.shapes:
            self.params[name] = parts[name]

    @classmethod
    def from_setup(cls, setup, **options):
        config = Config.from_options(**from_json(setup["config"], "the checkpoint"))
        stored = tokens.from_json(setup["tokens"]), setup["mean"], setup["deviation"], setup.get("source")
        return cls(config, *stored, **options)

    def setup(self):
        """Returns what a checkpoint stores besides the parameters."""
        stored = {"config": to_json(self.config), "tokens": self.tokens.to_json()}
        return stored | {"mean": self.mean.tolist(), "deviation": self.deviation.tolist(), "source": self.source}

    @property
    def longest(self):
        """Seconds of the longest recording that the model takes."""
        return encoders.longest(self.config, self.source)

    def network(self, params, step=None):
        """Returns the network; at a step of training with dropout."""
        if step is None:
            network = nnx.merge(self.graphdef, params, self.noise)
            network.eval()
            return network

        noise = jax.tree.map(lambda x: jax.random.fold_in(x, step) if is_key(x) else x, self.noise)
        return nnx.merge(self.graphdef, params, noise)

    def inputs(self, batch):
        """Returns features [B, T, F] of a batch, with mean 0 and deviation 1."""
        return self.standardised(batch["features"])

    def standardised(self, x):
        return (x - self.mean) / self.deviation

    def features(self, samples):
        """Returns the features that the model takes, float32 [T, F], of samples [S]: floats in [-1, 1], or integers."""
        return self.standardised(self.extractor(samples))

    def encoded(self, network, x, batch, layers=None, language=None, context=None):
        """Returns the Encoded of a batch, for every loss. With `layers`, x has rows after that many encoder layers."""
        if layers is None:
            rows, lengths = network.encode(x, batch["lengths"], context)
        else:
            rows, lengths = network.on_rows(*network.encoder.upper(x, batch["lengths"], layers, context))
        states = None if self.loss is None else network.predictor(batch["targets"])
        return Encoded(
            self.prompted(network, rows, language), states, batch["targets"], lengths, batch["target_lengths"]
        )

    def language(self, name):
        """Returns the prompt of a language; its name is one that the model has, or a number."""
        fields, processor = ((self.source or {}).get(f"{x}config.json", {}) for x in ("", "processor_"))
        count, names = fields.get("num_prompts", 0), processor.get("prompt_dictionary", {})
        refuse_if(not count, f"--prompt {name}: the model knows no prompts")
        number = int(name) if name.isdecimal() else -1
        prompt = names.get(name, number) if name else fields.get("default_prompt_id", 0)
        if not 0 <= prompt < count:
            raise UserError(f"--prompt {name}: expected one of {', '.join(names)}, or a number below {count}")
        return prompt

    def prompt_of(self, language):
        """Returns the prompt of a language by its code, such as de or de-DE; None if the model knows no prompts."""
        if self.prompt is None:
            return None
        names = (self.source or {}).get("processor_config.json", {}).get("prompt_dictionary", {})
        wanted = language.strip().replace("_", "-").lower()
        prompts = {name.replace("_", "-").lower(): i for name, i in reversed(names.items())}
        bases = {name.partition("-")[0]: i for name, i in reversed(prompts.items())}
        prompt = next((x[y] for x, y in ((prompts, wanted), (bases, wanted.partition("-")[0])) if y in x), None)
        refuse_if(prompt is None, f"the model has no prompt for {language}: it knows {', '.join(names)}")
        return prompt

    def prompted(self, network, rows, language=None):
        """Returns rows with the prompt of a language, by default the usual one, for a network that has prompts."""
        return network.prompt(rows, self.prompt if language is None else language) if network.prompt else rows

    @programs.announced("rows of frozen blocks")
    @functools.partial(jax.jit, static_argnums=(0, 3))
    def lower(self, params, batch, layers):
        """Returns rows [B, N, E] of a batch's features after `layers` layers of the encoder, and their lengths [B]."""
        encoder = self.network(params).encoder
        return encoder.lower(self.inputs(batch), batch["lengths"], layers), encoder.lengths(batch["lengths"])

    def text(self, labels, count):
        return self.tokens.decode(np.asarray(labels)[: int(count)]).strip()
