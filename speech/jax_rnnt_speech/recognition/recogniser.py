"""A model with all that it takes to use it: configuration, vocabulary, statistics of the features. All of it is stored.

B utterances, N encoder frames, U labels. Parameters are arguments, so that a step can change them.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_rnnt import decode
from jax_rnnt_speech.config import Config, from_json
from jax_rnnt_speech.data import features, tokens
from jax_rnnt_speech.model import ctc, encoders, losses
from jax_rnnt_speech.model.losses import Encoded, variant_of
from jax_rnnt_speech.model.parts import lower_layers
from jax_rnnt_speech.model.transducer import Transducer
from jax_rnnt_speech.recognition.ngrams import Search
from jax_rnnt_speech.system import UserError, programs

GREEDY = Search()
BEST = "labels", "frames", "durations", "counts", "scores", "label_log_probs", "full", "label_confidences"
OPEN = 100  # labels of a recording in parts, by beam, that later parts may still change
NEVER = 2**30  # rows before which no deadline is
WEIGHTS = nnx.Param, nnx.BatchStat  # what a model stores; the rest of its arrays are keys of dropout
SAMPLE = 200  # utterances of which statistics are taken


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def best(hypotheses):
    """The best ones of a beam, [B] of [B, N]."""
    found = {name: getattr(hypotheses, name) for name in BEST}
    return hypotheses._replace(**{name: x[:, 0] for name, x in found.items() if x is not None})


class Recogniser:
    """`source`: the JSON files of a pretrained model, by name; config.json decides its encoder."""

    def __init__(self, config, vocabulary, mean, deviation, source=None, implementation=None):
        self.config, self.tokens, self.variant, self.source = config, vocabulary, variant_of(config), source
        self.mean, self.deviation = np.float32(mean), np.float32(deviation)
        self.extractor = features.extractor(config)
        options = {"reduction": "none", "fastemit_lambda": config.fastemit, "implementation": implementation}
        self.loss = self.variant.loss and dataclasses.replace(self.variant.loss, **options)
        self.blank, self.classes = self.variant.outputs(len(vocabulary.pieces))
        model = nnx.eval_shape(self.made)
        self.prompt = self.language(config.prompt) if model.prompt or config.prompt else None
        self.subsampling, self.width = encoders.subsampling(config, source), model.encoder.width
        self.chunk = 0 if model.head else model.encoder.chunk
        self.graphdef, self.shapes, noise = nnx.split(model, WEIGHTS, ...)
        leaves, tree = jax.tree.flatten(noise)
        keys = jax.random.split(jax.random.key(config.seed), len(leaves))
        self.noise = tree.unflatten(k if is_key(x) else jnp.zeros(x.shape, x.dtype) for k, x in zip(keys, leaves))

    def made(self):
        """The model, of random weights."""
        rngs = nnx.Rngs(self.config.seed, dropout=self.config.seed)
        return Transducer(self.config, len(self.mean), self.blank, self.classes, self.source, rngs=rngs)

    @functools.cached_property
    def params(self):
        """Random weights. A file that is read takes their place before any is drawn: `shapes` say what it must have."""
        return nnx.state(self.made(), WEIGHTS)

    def take(self, parts):
        """Weights by part, as `encoder`. Those of parts that are not there are drawn, and no others."""
        missing = [name for name in self.shapes if name not in parts]
        if missing:
            parts = parts | jax.jit(lambda: {name: nnx.state(self.made(), WEIGHTS)[name] for name in missing})()
        self.params = jax.tree.map(lambda x: x, self.shapes)  # a copy of the tree
        for name in self.shapes:
            self.params[name] = parts[name]

    @classmethod
    def from_setup(cls, setup, **options):
        config = Config(**from_json(setup["config"], "the checkpoint"))
        stored = tokens.from_json(setup["tokens"]), setup["mean"], setup["deviation"], setup.get("source")
        return cls(config, *stored, **options)

    def setup(self):
        """What a checkpoint stores beside the parameters."""
        config = json.loads(json.dumps(dataclasses.asdict(self.config)))  # lists, no tuples
        stored = {"config": config, "tokens": self.tokens.to_json()}
        return stored | {"mean": self.mean.tolist(), "deviation": self.deviation.tolist(), "source": self.source}

    @property
    def longest(self):
        """Seconds of a recording that the model hears at most."""
        return encoders.longest(self.config, self.source)

    def measure(self, data):
        """Takes mean and deviation of each feature from some training utterances."""
        if self.extractor.normalize != "corpus":
            return
        some = list(data.labels)[:: max(1, len(data.labels) // SAMPLE)]
        loaded = [data.corpus.load(i, np.random.default_rng(i)) for i in some]
        loaded = [x for x in loaded if x is not None]
        if not loaded:
            raise UserError(f"none of the {len(some)} training utterances that were tried has readable audio")
        frames = np.concatenate(loaded)
        self.mean, self.deviation = frames.mean(0), frames.std(0) + np.float32(1e-3)

    def model(self, params, step=None):
        """The model; at a step of training with dropout."""
        if step is None:
            model = nnx.merge(self.graphdef, params, self.noise)
            model.eval()
            return model

        noise = jax.tree.map(lambda x: jax.random.fold_in(x, step) if is_key(x) else x, self.noise)
        return nnx.merge(self.graphdef, params, noise)

    def inputs(self, batch):
        """Features [B, T, F] of a batch, with mean 0 and deviation 1."""
        return self.standardised(batch["audio"])

    def standardised(self, x):
        return (x - self.mean) / self.deviation

    def features(self, samples):
        """What the model hears, float32 [T, F], of samples [S]: floats in [-1, 1], or integers."""
        return self.standardised(self.extractor(samples))

    def encoded(self, model, x, batch, layers=None, how=GREEDY):
        """`layers`: x holds rows after so many layers of the encoder."""
        if layers is None:
            rows, lengths = model.encode(x, batch["lengths"])
        else:
            rows, lengths = model.on_rows(*model.encoder.upper(x, batch["lengths"], layers))
        states = None if self.loss is None else model.predictor(batch["targets"])
        return Encoded(self.prompted(model, rows, how), states, batch["targets"], lengths, batch["target_lengths"])

    def language(self, name):
        """The prompt of a language; its name is one of the model, or a number."""
        fields, known = ((self.source or {}).get(f"{x}config.json", {}) for x in ("", "processor_"))
        count, names = fields.get("num_prompts", 0), known.get("prompt_dictionary", {})
        if not count:
            raise UserError(f"--prompt {name}: the model knows no prompts")
        number = int(name) if name.isdecimal() else -1
        found = names.get(name, number) if name else fields.get("default_prompt_id", 0)
        if not 0 <= found < count:
            raise UserError(f"--prompt {name}: expected one of {', '.join(names)}, or a number below {count}")
        return found

    def prompted(self, model, rows, how):
        """Rows with the language of a search, for a model that has prompts."""
        return model.prompt(rows, self.prompt if how.language is None else how.language) if model.prompt else rows

    def mean_loss(self, params, batch, step, layers=None):
        """Mean loss of the utterances of a batch, in nats; `layers`: of their rows after so many layers."""
        x = self.inputs(batch) if layers is None else batch["audio"]
        x = features.hide(x, batch["lengths"], batch["spans"], self.config.time_masks)
        batch = batch | {"lengths": jnp.where(batch["valid"], batch["lengths"], 0)}  # of no other row are frames
        frozen = lower_layers(self.config.freeze) if layers is None else None
        if frozen is not None:  # they have no dropout, as rows of the cache have none
            lower = self.model(params).encoder
            x, batch = lower.lower(x, batch["lengths"], frozen), batch | {"lengths": lower.lengths(batch["lengths"])}
            layers = frozen
        model = self.model(params, step)
        x = self.encoded(model, x, batch, layers)
        x = x._replace(frame_lengths=jnp.maximum(x.frame_lengths, 1))
        values = self.variant.compute(self.loss, model, x, self.config.joint == "tiles")
        if self.config.ctc:
            values += self.config.ctc * losses.of_ctc(None, model, x, None)
        value = jnp.where(batch["valid"], values, 0).sum() / jnp.maximum(batch["valid"].sum(), 1)
        if "texts" not in batch:
            return value
        texts = batch["texts"], batch["text_lengths"], len(self.tokens.pieces)
        return value + self.config.text_weight * losses.of_texts(model, *texts)

    @programs.announced("rows of frozen blocks")
    @functools.partial(jax.jit, static_argnums=(0, 3))
    def lower(self, params, batch, layers):
        """Rows [B, N, E] of the features of a batch after so many layers of the encoder, and their lengths [B]."""
        encoder = self.model(params).encoder
        return encoder.lower(self.inputs(batch), batch["lengths"], layers), encoder.lengths(batch["lengths"])

    def search(self, model, rows, lengths, how=GREEDY, state=None, every=False, more=0):
        """Hypotheses [B], and the state of a stream; of a beam, the best ones, or [B, N] if `every`.

        `more`: room for so many labels of rows before these.
        """
        config, room = self.config, rows.shape[1] * self.config.max_symbols + more
        if how.ctc or self.loss is None:
            return ctc.search(model.ctc(rows), lengths, room, state)
        inputs = *model.joint.decoder_inputs(model.predictor, rows), lengths, room
        # The rules of `transformers`, which chooses tokens first, have no limit for labels that stay in their frame.
        limit = room if config.duration_choice == "token_first" else config.max_symbols
        loss, options = self.variant.loss, {"max_symbols": limit, "state": state, "confidence": how.confidence}
        options |= {"fusion": how.fusion, "ilm_weight": how.ilm_weight}
        if not how.beam:
            return decode.greedy(loss, *inputs, duration_choice=config.duration_choice, **options)
        hypotheses = decode.beam(loss, *inputs, how.beam, **options)
        return hypotheses if every else best(hypotheses)

    @programs.announced("a test")
    @functools.partial(jax.jit, static_argnums=0)
    def evaluated(self, params, batch, how):
        """Sum of losses, and labels [B, L] with their numbers [B]."""
        model = self.model(params)
        x = self.encoded(model, self.inputs(batch), batch, how=how)
        values = self.variant.compute(self.loss, model, x, self.config.joint == "tiles")
        hypotheses = self.search(model, x.frames, x.frame_lengths, how)
        return jnp.where(batch["valid"], values, 0).sum(), hypotheses.labels, hypotheses.counts

    def part(self, model, rows, lengths, state, deadline, how):
        """(hypotheses [B], how many of their labels [B] are final, state, other hypotheses) of the next rows.

        Labels that were not final come again with the next part. All are where the last one ends `deadline` [B] rows,
        counted from the start of the recording, before the end of these, or earlier.
        """
        found = self.search(model, self.prompted(model, rows, how), lengths, how, state, every=True, more=OPEN)
        if not how.beam:
            return found._replace(state=None), found.counts, found.state, None
        first, others = best(found), (found.labels, found.counts, found.scores)
        last = jnp.maximum(first.counts - 1, 0)[:, None]
        end = first.frames + jnp.maximum(first.durations, 1)
        closed = jnp.take_along_axis(end, last, 1)[:, 0] <= deadline + lengths
        final = jnp.where(closed, first.counts, jnp.maximum(found.stable, first.counts - OPEN))
        return first._replace(state=None), final, decode.commit_labels(found, final), others

    @programs.announced("a step of streams")
    @functools.partial(jax.jit, static_argnums=(0, 9))
    def continued(self, params, x, lengths, deadlines, fresh, encoder, decoder, how, first=None):
        """(state of the encoder, rows [B], `part`) after the next features [B, T, F] of streams.

        `fresh` [B]: those that begin. `first`: all or none do, where states before and after a first step differ.
        """
        model = self.model(params)
        start = model.encoder.initial(1)

        def advanced(x, length, fresh, old):
            before = start if first else old
            if first is None:
                before = jax.tree.map(lambda start, x: jnp.where(fresh, start, x), start, old)
            rows, counts, new = model.encoder.step(x[None], length[None], before)
            new = jax.tree.map(lambda new, old: jnp.where(length > 0, new.astype(old.dtype), old), new, old)
            return rows[0], jnp.where(length > 0, counts[0], 0), new

        rows, counts, encoder = jax.vmap(advanced)(x, lengths, fresh, encoder)  # each stream has its own clock
        decoder = None if decoder is None else decode.reset_streams(decoder, fresh)
        return encoder, counts, self.part(model, rows, counts, decoder, deadlines, how)

    @programs.announced("an encoder")
    @functools.partial(jax.jit, static_argnums=0)
    def window(self, params, x, lengths, first):
        """Rows [B, N, E] from the `first` [B] on, of features [B, T, F], and their lengths [B]."""
        rows, lengths = self.model(params).encode(x, lengths)
        place = jnp.minimum(jnp.arange(rows.shape[1]) + first[:, None], rows.shape[1] - 1)
        return jnp.take_along_axis(rows, place[..., None], 1), lengths - first

    @programs.announced("a search")
    @functools.partial(jax.jit, static_argnums=0)
    def taken(self, params, rows, lengths, decoder=None, how=GREEDY):
        """`part` of rows of windows."""
        return self.part(self.model(params), rows, lengths, decoder, -NEVER, how)

    @property
    def seconds(self):
        """Of an encoder frame."""
        return self.subsampling * self.extractor.hop / self.extractor.rate

    def text(self, labels, count):
        return self.tokens.decode(np.asarray(labels)[: int(count)])
