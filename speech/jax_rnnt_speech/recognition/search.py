"""Searches for the labels of an encoder's rows, of whole recordings or of one part after the other.

B utterances, N rows of the encoder.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_rnnt import decode
from jax_rnnt_speech.model import ctc
from jax_rnnt_speech.recognition.spellings import Written

BEST = "labels", "frames", "durations", "counts", "scores", "label_log_probs", "full", "label_confidences"
OPEN = 100  # labels of a recording in parts, by beam, that later parts may still change
NEVER = 2**30  # more rows than any recording has


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """The search that a `search_options.Searching` asks of a model, with its files read.

    It is an argument of jitted functions: the n-gram is arrays, the rest decides the program.
    """

    beam: int = dataclasses.field(default=0, metadata={"static": True})  # number of hypotheses; 0 for greedy search
    ilm_weight: float = dataclasses.field(default=0.0, metadata={"static": True})
    fusion: tuple = ()  # pairs (n-gram or phrases, weight)
    confidence: decode.Entropy | None = dataclasses.field(default=None, metadata={"static": True})
    ctc: bool = dataclasses.field(default=False, metadata={"static": True})  # whether to search by that head
    language: int | None = dataclasses.field(default=None, metadata={"static": True})  # prompt; None for the usual one
    allowed: jax.Array | None = None  # bool [V]: labels that may be written; None for all
    spotter: object = dataclasses.field(default=None, metadata={"static": True})  # a `spotter.Spotter` of whole windows
    room: object = dataclasses.field(default=None, metadata={"static": True})  # a `search_options.Room`
    guarded: bool = dataclasses.field(default=True, metadata={"static": True})  # phrases, by a `decode.Guard`
    drop_invented: bool = dataclasses.field(default=False, metadata={"static": True})  # leave out `unheard.invented`
    written: Written = dataclasses.field(default=Written(), metadata={"static": True})  # for the spellings of a text

    def of(self, lists):
        """Returns the Decoding of a batch whose recordings have these `search_options.Own` phrases, or None."""
        if self.room is None:
            return self
        return dataclasses.replace(self, room=None, fusion=(*self.fusion, (self.room.model_of(tuple(lists)), 1.0)))


GREEDY = Decoding()


def best(hypotheses):
    """Returns the best hypotheses of a beam, [B] of [B, N]."""
    first = {name: getattr(hypotheses, name) for name in BEST}
    return hypotheses._replace(**{name: x[:, 0] for name, x in first.items() if x is not None})


def in_float32(joint):
    """Returns a LinearJoint with float32 logits, also where its products have fewer bits: rounded logits have ties."""
    if joint.weight.dtype == jnp.float32:
        return joint

    def logits(encoder, predictor):
        hidden = joint.activation(encoder.astype(jnp.float32) + predictor.astype(jnp.float32))
        return summed(hidden, joint.weight, joint.bias)

    return logits


def summed(x, kernel, bias):
    """Returns x kernel + bias, by products in the type of the kernel and sums in float32."""
    return jnp.dot(x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)


def ctc_logits(network, rows):
    """Returns logits [B, N, V] of the head for CTC."""
    return summed(rows, network.ctc.kernel[...].astype(rows.dtype), network.ctc.bias[...])


def search(model, network, rows, lengths, decoding=GREEDY, state=None, every=False, more=0):
    """Returns Hypotheses [B], and the state of a stream; of a beam, the best ones, or [B, N] if `every`.

    `more` is room for labels of rows before these.
    """
    options = model.config.search
    room = rows.shape[1] * options.max_symbols + more
    if decoding.ctc or model.loss is None:
        return ctc.search(ctc_logits(network, rows), lengths, room, state, decoding.allowed)
    joint, predictor, rows = network.joint.decoder_inputs(network.predictor, rows)
    # The rules of `transformers`, which chooses tokens first, have no limit for labels that stay in their frame.
    limit = room if options.duration_choice == "token_first" else options.max_symbols
    masks = () if decoding.allowed is None else ((decode.Labels(decoding.allowed), 1.0),)
    chosen = {"max_symbols": limit, "fusion": decoding.fusion + masks}
    chosen |= {"ilm_weight": decoding.ilm_weight, "confidence": decoding.confidence}
    chosen |= {} if decoding.guarded else {"guard": None}
    networks = model.variant.loss, in_float32(joint), predictor, room
    if decoding.beam:
        hypotheses = decode.Search(*networks, **chosen).beam(rows, lengths, decoding.beam, state=state)
        return hypotheses if every else best(hypotheses)
    chosen["duration_choice"] = options.duration_choice
    return decode.Search(*networks, **chosen).greedy(rows, lengths, state=state)


def next_part(model, network, rows, lengths, state, deadline, decoding):
    """(hypotheses [B], how many of their labels [B] are final, state, other hypotheses) of the next rows.

    Labels that were not final come again with the next part. All are final where the last one ends `deadline` [B] rows,
    counted from the start of the recording, before the end of these rows, or earlier.
    """
    rows = model.prompted(network, rows, decoding.language)
    beam = search(model, network, rows, lengths, decoding, state, every=True, more=OPEN)
    if not decoding.beam:
        return beam._replace(state=None), beam.counts, beam.state, None
    first, others = best(beam), (beam.labels, beam.counts, beam.scores)
    last = jnp.maximum(first.counts - 1, 0)[:, None]
    end = first.frames + jnp.maximum(first.durations, 1)
    closed = jnp.take_along_axis(end, last, 1)[:, 0] <= deadline + lengths
    final = jnp.where(closed, first.counts, jnp.maximum(beam.stable, first.counts - OPEN))
    return first._replace(state=None), final, decode.commit_labels(beam, final), others
