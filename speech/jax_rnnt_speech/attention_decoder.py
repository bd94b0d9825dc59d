"""The decoder of Whisper as the predictor of a transducer: it sees the encoder's rows, and the labels so far.

A predictor that attends to the audio makes a transducer of an attention model (Tang et al. 2023). Ours takes the words
from the decoder, and the time from its attention. C(t, u) is the share of the attention for the label behind the first
u that lies on rows up to t, in the heads that follow the audio. With the decoder's softmax q(. | u) over the labels,
the last of which ends the text:

    g(t, u) = s(C(t, u)) (1 - s(C(t - SPAN, u))),  s(x) = sigmoid(SHARPNESS (x - 1/2))
    P(label k | t, u) = g(t, u) q(k | u)
    P(blank | t, u) = 1 - g(t, u), and 1 after the end

So a label leaves once half of its attention lies behind, and no sooner, whatever the training: if the labels alone
decided, all of them might leave in the first row. Nor does it leave much later: attention to what was read long ago is
how a decoder begins to repeat itself, and then the text ends. The end is a label and not a blank: a blank would have to
be chosen again in every row that is left, and its q(end | u) would be learnt to the power of their number, until texts
end after any sentence.

B utterances, N rows of the encoder, E their width, U labels of V, the last of which is the end; S labels at once of M
rows: those of all utterances in training, some of their hypotheses, in any order, in a search.

Tang, Sun, Inaguma et al., "Hybrid Transducer and Attention based Encoder-Decoder Modeling for Speech-to-Text Tasks",
ACL 2023.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_rnnt.decode import Predictor
from jax_rnnt_speech.encoders.base import ACTIVATIONS, apart, cut, inside, layer_norm
from jax_rnnt_speech.encoders.conformer import FeedForward

SHARPNESS = 20.0  # a row with 5% of the attention moves the odds of a label by e
SPAN = 50  # rows of 20 ms in which a label may leave
ROWS_OF_LABEL = 4  # rows of 20 ms: nobody says 12 labels a second
# A beam copies keys and values of all labels in each frame: so its frames are of several rows, and they are float16.
ROWS_OF_BEAM = 4
NOTHING = -1e30  # a score of what is not seen; an utterance may have no rows at all
LEAST = 1e-6  # the probability of all other labels, at least


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Fields have the names of config.json; sizes are those of Whisper tiny."""

    decoder_layers: int = 4
    decoder_attention_heads: int = 6
    decoder_ffn_dim: int = 1536
    max_target_positions: int = 448


def attend(query, key, value, visible):
    """(sums of values [B, S, E], weights [B, H, S, K]) of queries [B, H, S, D] and keys [B, H, K, D]."""
    scores = jnp.einsum("bhsd,bhkd->bhsk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, NOTHING))
    found = jnp.einsum("bhsk,bhkd->bhsd", weights.astype(value.dtype), value).swapaxes(1, 2)
    return found.reshape(*found.shape[:2], -1), weights


class Seats(NamedTuple):
    """Of M hypotheses, `width` or fewer of each utterance: memories of rows are not copied for each of them."""

    utterances: int
    width: int
    index: jax.Array  # [M]: of each among all seats, utterance by utterance

    @classmethod
    def of(cls, utterances, width, owner):
        """`owner` [M]: the utterance of each."""
        number = jnp.arange(owner.shape[0])
        earlier = (owner[:, None] == owner) & (number < number[:, None])
        return cls(utterances, width, owner * width + earlier.sum(1))

    def put(self, x):
        """[B, width, ...] of x [M, 1, ...]."""
        empty = jnp.zeros((self.utterances * self.width, *x.shape[2:]), x.dtype)
        return empty.at[self.index].set(x[:, 0]).reshape(self.utterances, self.width, *x.shape[2:])

    def taken(self, x):
        """[M, 1, ...] of x [B, width, ...]."""
        return x.reshape(self.utterances * self.width, 1, *x.shape[2:])[self.index]


class Layer(nnx.Module):
    """Attention to the labels so far, attention to the rows of the encoder, and a feed-forward layer."""

    def __init__(self, width, sizes, dropout, **more):
        self.heads = sizes.decoder_attention_heads
        self.norm, self.rows_norm = layer_norm(width, **more), layer_norm(width, **more)
        self.inputs = nnx.Linear(width, 3 * width, **more)  # query, key and value, one after the other
        self.output = nnx.Linear(width, width, **more)
        self.query = nnx.Linear(width, width, **more)
        self.memory = nnx.Linear(width, 2 * width, **more)  # key and value
        self.rows_output = nnx.Linear(width, width, **more)
        self.feed_forward = FeedForward(width, sizes.decoder_ffn_dim, dropout, ACTIVATIONS["gelu"], **more)
        self.dropout = nnx.Dropout(dropout, rngs=more["rngs"])

    def split(self, x, parts=1):
        """Arrays [B, H, S, D] of x [B, S, parts E]; XLA would turn others around for each product, on CPUs."""
        return jnp.split(x.reshape(*x.shape[:2], parts * self.heads, -1).swapaxes(1, 2), parts, 1)

    def __call__(self, x, memory, heard, past=None, place=None, seats=None):
        """(x [M, S, E], past, attention to the rows [M, H, S, N]); with a `past`, S = 1, and the others are there."""
        query, key, value = self.split(self.inputs(self.norm(x)), 3)
        visible = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        if past is not None:
            past = [
                old.at[jnp.arange(old.shape[0]), :, place].set(new[:, :, 0].astype(old.dtype), mode="drop")
                for old, new in zip(past, (key, value))
            ]
            key, value = (x.astype(query.dtype) for x in past)
            visible = inside(place + 1, key.shape[2])[:, None, None]
        x = x + self.dropout(self.output(attend(query, key, value, visible)[0]))
        query = self.query(self.rows_norm(x))
        query = self.split(query if past is None else seats.put(query))
        found, weights = attend(*query, *memory, heard[:, None, None])
        if past is not None:
            found, weights = seats.taken(found), seats.taken(weights.swapaxes(1, 2)).swapaxes(1, 2)
        x = x + self.dropout(self.rows_output(found))
        return x + self.feed_forward(x), past, weights


class AttentionDecoder(nnx.Module):
    """Its embeddings are those of the labels, and of the tokens before the first label."""

    def __init__(self, labels, width, fields, dropout, *, dtype, rngs):
        sizes = DecoderConfig(**{x.name: fields[x.name] for x in dataclasses.fields(DecoderConfig)})
        more, self.labels, self.dtype = {"dtype": dtype, "rngs": rngs}, labels, dtype
        self.start = tuple(range(labels, labels + fields["start_tokens"]))
        self.following = tuple(map(tuple, fields["alignment_heads"]))  # (layer, head)
        draw = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(draw(rngs.params(), (self.start[-1] + 1, width), jnp.float32))
        self.positions = nnx.Param(draw(rngs.params(), (sizes.max_target_positions, width), jnp.float32))
        self.layers = nnx.Sequential(*(Layer(width, sizes, dropout, **more) for _ in range(sizes.decoder_layers)))
        self.norm = layer_norm(width, **more)

    def memories(self, rows, lengths):
        """Keys and values of the rows [B, N, E] in each layer, and which of them count."""
        rows = cut(rows, lengths)
        return [layer.split(layer.memory(rows), 2) for layer in self.layers.layers], inside(lengths, rows.shape[1])

    def run(self, tokens, first, memories, heard, pasts=None, seats=None):
        """(states [M, S, E], C [M, S, N], pasts) of tokens [M, S], the first one at place `first` [M]."""
        places = jnp.minimum(jnp.reshape(first, (-1, 1)) + jnp.arange(tokens.shape[1]), len(self.positions[...]) - 1)
        x = (self.embedding[...][tokens] + self.positions[...][places]).astype(self.dtype)
        weights, after = [], []
        for layer, memory, past in zip(self.layers.layers, memories, pasts or [None] * len(memories)):
            x, past, found = layer(apart(x), memory, heard, past, first, seats)
            weights.append(found)
            after.append(past)
        share = sum(weights[layer][:, head] for layer, head in self.following) / len(self.following)
        return self.norm(x), jnp.cumsum(share, -1), after

    def log_probs(self, states):
        """log q [..., V]."""
        kernel = self.embedding[...][: self.labels].T
        return jax.nn.log_softmax((states @ kernel.astype(states.dtype)).astype(jnp.float32))

    def __call__(self, targets, rows, lengths):
        """What the lattice needs of the columns of targets [B, U]: states and C, [B, U + 1, E + N]."""
        start = jnp.broadcast_to(jnp.array(self.start), (targets.shape[0], len(self.start)))
        tokens = jnp.concatenate([start, jnp.clip(targets, 0, self.labels - 1)], 1)
        states, seen, _ = self.run(tokens, 0, *self.memories(rows, lengths))
        return jnp.concatenate([states.astype(jnp.float32), seen], -1)[:, len(self.start) - 1 :]

    def logits(self, columns, targets, counts):
        """Log-probabilities [B, N, U + 2, 3] of the next target (the last one is the end), of others, of the blank."""
        width = self.embedding[...].shape[1]
        log_probs, seen = self.log_probs(columns[..., :width]), columns[..., width:].mT
        leave, stay = leaving(seen, jnp.pad(seen, ((0, 0), (SPAN, 0), (0, 0)))[:, : seen.shape[1]])
        place = jnp.arange(targets.shape[1] + 1)
        label = jnp.where(place < counts[:, None], jnp.pad(targets, ((0, 0), (0, 1))), self.labels - 1)
        label = jnp.take_along_axis(log_probs, jnp.clip(label, 0, self.labels - 1)[..., None], -1)[:, None, :, 0]
        others = jnp.log(jnp.maximum(1 - jnp.exp(label), LEAST))
        logits = jnp.stack([leave + label, leave + others, stay], -1)
        ended = jnp.arange(targets.shape[1] + 2) > counts[:, None]
        logits = jnp.pad(logits, ((0, 0), (0, 0), (0, 1), (0, 0)))
        return jnp.where(ended[:, None, :, None], jnp.array([NOTHING, NOTHING, 0.0]), logits)

    def decoder_inputs(self, rows, lengths, width):
        """What searches of `decode` take, of so many hypotheses: joint, predictor, rows that are frames [B, T, 1], and
        how many of them there are [B].
        """
        (memories, heard), (batch, count, _) = self.memories(rows, lengths), rows.shape
        room = min(len(self.positions[...]), len(self.start) + 16 + count // ROWS_OF_LABEL)
        _, heads, _, depth = memories[0][0].shape

        def advanced(state, tokens):
            owner, place, *pasts = state
            seats = Seats.of(batch, width, owner)
            states, seen, pasts = self.run(tokens[:, None], place, memories, heard, pasts, seats)
            return states[:, 0], seen[:, 0], (owner, place + 1, *map(tuple, pasts))

        def initial(hypotheses):
            past = jnp.zeros((hypotheses, heads, room, depth), memories[0][0].dtype if width == 1 else jnp.float16)
            number = jnp.arange(hypotheses, dtype=jnp.int32)  # utterance by utterance
            state = number // (hypotheses // batch), jnp.zeros_like(number), *((past, past) for _ in memories)
            for token in self.start[:-1]:
                *_, state = advanced(state, jnp.full(hypotheses, token))
            return state

        def step(state, labels):
            states, seen, state = advanced(state, jnp.where(labels < self.labels, labels, self.start[-1]))
            ended = (labels == self.labels - 1) | (state[1] >= room)  # or there is no place for one more
            return jnp.concatenate([self.log_probs(states), jnp.where(ended[:, None], -1.0, seen)], 1), state

        def joint(frame, row):
            log_probs, seen = row[:, : self.labels], row[:, self.labels :]
            place = frame.astype(jnp.int32)
            here, before = (jnp.take_along_axis(seen, jnp.maximum(x, 0), 1) for x in (place, place - SPAN))
            leave, stay = leaving(here, jnp.where(place < SPAN, 0, before))
            ended = here < 0
            return jnp.concatenate([jnp.where(ended, NOTHING, leave) + log_probs, jnp.where(ended, 0, stay)], 1)

        step_of_frames = 1 if width == 1 else ROWS_OF_BEAM
        places = jnp.arange(step_of_frames - 1, count + step_of_frames - 1, step_of_frames)  # the last rows of frames
        places = jnp.clip(jnp.minimum(places, lengths[:, None] - 1), 0).astype(jnp.float32)[..., None]
        return joint, Predictor(initial, step, self.labels, self.labels + 1), places, -(-lengths // step_of_frames)


def leaving(seen, before):
    """log g and log(1 - g), of C here and C before SPAN."""
    due, late = ((x - 0.5) * SHARPNESS for x in (seen, before))
    missed = jax.nn.log_sigmoid(due) + jax.nn.log_sigmoid(late)
    return jax.nn.log_sigmoid(due) + jax.nn.log_sigmoid(-late), jnp.logaddexp(jax.nn.log_sigmoid(-due), missed)
