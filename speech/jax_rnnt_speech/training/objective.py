"""The objective of training, and the measures of its tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt_speech.data import features
from jax_rnnt_speech.model import ctc, losses
from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.system import programs, refuse_if
from jax_rnnt_speech.training.parts import lower_layers

SAMPLE = 200  # number of utterances from which statistics are computed


def copied(batch, copies):
    """Returns the batch with a copy of each utterance for each of its masks; copies are neighbours, on one device."""
    rows = {name: x if name.startswith("text") else jnp.repeat(x, copies, 0) for name, x in batch.items()}
    return rows | {"spans": batch["spans"].reshape(len(rows["valid"]), -1, 2)}


def mean_loss(model, params, batch, step, layers=None, valid=None, ramp=1.0, context=None):
    """Returns the mean loss of a batch's utterances, in nats; `layers`: it has rows after so many layers, not features.

    `context` is a `contexts.Context`; by default, it is what a row of a whole recording sees.

    `valid` says which rows are utterances in a whole batch, of which this one is a part. The sum over all parts is the
    mean loss of the whole. `ramp` is a factor of the weight of CR-CTC.
    """
    config, valid = model.config, batch["valid"] if valid is None else valid
    copies, time_masks = config.masks
    if copies > 1:
        batch, valid = copied(batch, copies), jnp.repeat(valid, copies)
    x = model.inputs(batch) if layers is None else batch["features"]
    x = features.hide(x, batch["lengths"], batch["spans"], time_masks)
    batch = batch | {"lengths": jnp.where(batch["valid"], batch["lengths"], 0)}  # other rows have no frames
    frozen = lower_layers(config.optimiser.freeze) if layers is None else None
    if frozen is not None:  # they have no dropout, as rows of the cache have none
        lower = model.network(params).encoder
        x, batch = lower.lower(x, batch["lengths"], frozen), batch | {"lengths": lower.lengths(batch["lengths"])}
        layers = frozen
    network = model.network(params, step)
    x = model.encoded(network, x, batch, layers, context=context)
    x = x._replace(frame_lengths=jnp.maximum(x.frame_lengths, 1))
    values = model.variant.compute(model.loss, network, x, config.network.joint == "tiles")
    if config.objective.ctc:
        values += config.objective.ctc * losses.losses_by_ctc(None, network, x, None)
    if config.objective.cr_ctc:
        weight = (config.objective.ctc or 1) * config.objective.cr_ctc * ramp
        values += weight * ctc.consistency(network.ctc(x.frames), x.frame_lengths)
    value = jnp.where(batch["valid"], values, 0).sum() / jnp.maximum(valid.sum(), 1)
    if "texts" not in batch:
        return value
    texts = batch["texts"], batch["text_lengths"], len(model.tokens.pieces)
    share = len(batch["valid"]) / len(valid)
    return value + config.objective.text_weight * share * losses.loss_of_texts(network, *texts)


@programs.announced("a test")
@functools.partial(jax.jit, static_argnums=0)
def evaluated(model, params, batch, decoding):
    """Returns the sum of losses, and labels [B, L] with their numbers [B]."""
    network = model.network(params)
    x = model.encoded(network, model.inputs(batch), batch, language=decoding.language)
    values = model.variant.compute(model.loss, network, x, model.config.network.joint == "tiles")
    hypotheses = search(model, network, x.frames, x.frame_lengths, decoding)
    return jnp.where(batch["valid"], values, 0).sum(), hypotheses.labels, hypotheses.counts


def standardise(model, data):
    """Gives a model the mean and deviation of each feature in some training utterances."""
    if model.extractor.normalize != "corpus":
        return
    some = list(data.labels)[:: max(1, len(data.labels) // SAMPLE)]
    loaded = [data.corpus.load(i, np.random.default_rng(i)) for i in some]
    loaded = [x for x in loaded if x is not None]
    refuse_if(not loaded, f"none of the {len(some)} training utterances that were tried has readable audio")
    frames = np.concatenate(loaded)
    model.mean, model.deviation = frames.mean(0), frames.std(0) + np.float32(1e-3)
