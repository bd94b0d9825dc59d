"""The decoder of Whisper as the predictor of a transducer: it sees the encoder's rows, and the labels so far.

A predictor that attends to the audio makes a transducer of an attention model (Tang et al. 2023). Ours takes the words
from the decoder, and the time from its attention. C(t, u) is the share of the attention for the label behind the first
u that lies on rows up to t, in the heads that follow the audio. With q(. | u), the decoder's softmax over the labels
and the end of the text:

    g(t, u) = sigmoid(SHARPNESS (C(t, u) - 1/2))
    P(label k | t, u) = g(t, u) q(k | u)
    P(blank | t, u) = 1 - g(t, u) (1 - q(end | u))

So a label leaves once half of its attention lies behind, and no sooner, whatever the training: if the labels alone
decided, all of them might leave in the first row. At the last row C is 1, and nothing is held back.

B utterances, N rows of the encoder, E their width, U labels of V; M = B n hypotheses, utterance by utterance.

Tang, Sun, Inaguma et al., "Hybrid Transducer and Attention based Encoder-Decoder Modeling for Speech-to-Text Tasks",
ACL 2023.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jax_rnnt.decode import Predictor
from jax_rnnt_speech.encoders.base import ACTIVATIONS, apart, cut, inside, layer_norm
from jax_rnnt_speech.encoders.conformer import FeedForward

SHARPNESS = 20.0  # a row with 5% of the attention moves the odds of a label by e
ROWS_OF_LABEL = 4  # rows of 20 ms: nobody says 12 labels a second
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
    """(sums of values [B, S, H, D], weights [B, H, S, K]) of queries [B, S, H, D] and keys [B, K, H, D]."""
    scores = jnp.einsum("bshd,bkhd->bhsk", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, NOTHING))
    return jnp.einsum("bhsk,bkhd->bshd", weights.astype(value.dtype), value), weights


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

    def split(self, x, parts):
        return jnp.split(x.reshape(*x.shape[:2], parts * self.heads, -1), parts, 2)

    def __call__(self, x, memory, heard, past=None, place=None):
        """(x [M, S, E], past, attention to the rows [B, H, n S, N]); with a `past`, S = 1 and `place` [M] is there."""
        query, key, value = self.split(self.inputs(self.norm(x)), 3)
        visible = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        if past is not None:
            past = key, value = [
                old.at[jnp.arange(len(old)), place].set(new[:, 0].astype(old.dtype), mode="drop")
                for old, new in zip(past, (key, value))
            ]
            visible = inside(place + 1, key.shape[1])[:, None, None]
        x = x + self.dropout(self.output(attend(query, key, value, visible)[0].reshape(x.shape)))
        query = self.query(self.rows_norm(x)).reshape(len(heard), -1, self.heads, key.shape[-1])
        found, weights = attend(query, *memory, heard[:, None, None])
        x = x + self.dropout(self.rows_output(found.reshape(x.shape)))
        return x + self.feed_forward(x), past, weights


class AttentionDecoder(nnx.Module):
    """Its embeddings are those of V labels, of the end, and of the tokens before the first label."""

    def __init__(self, labels, width, fields, dropout, *, dtype, rngs):
        sizes = DecoderConfig(**{x.name: fields[x.name] for x in dataclasses.fields(DecoderConfig)})
        more, self.labels, self.dtype = {"dtype": dtype, "rngs": rngs}, labels, dtype
        self.start = tuple(range(labels + 1, labels + 1 + fields["start_tokens"]))
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

    def run(self, tokens, first, memories, heard, pasts=None):
        """(states [M, S, E], C [B, n S, N], pasts) of tokens [M, S], the first one at place `first` [M]."""
        places = jnp.minimum(jnp.reshape(first, (-1, 1)) + jnp.arange(tokens.shape[1]), len(self.positions[...]) - 1)
        x = (self.embedding[...][tokens] + self.positions[...][places]).astype(self.dtype)
        weights, after = [], []
        for layer, memory, past in zip(self.layers.layers, memories, pasts or [None] * len(memories)):
            x, past, found = layer(apart(x), memory, heard, past, first)
            weights.append(found)
            after.append(past)
        share = sum(weights[layer][:, head] for layer, head in self.following) / len(self.following)
        return self.norm(x), jnp.cumsum(share, -1), after

    def log_probs(self, states):
        """log q [..., V + 1] of the labels and the end."""
        kernel = self.embedding[...][: self.labels + 1].T
        return jax.nn.log_softmax((states @ kernel.astype(states.dtype)).astype(jnp.float32))

    def __call__(self, targets, rows, lengths):
        """What the lattice needs of the columns of targets [B, U]: states and C, [B, U + 1, E + N]."""
        start = jnp.broadcast_to(jnp.array(self.start), (len(targets), len(self.start)))
        tokens = jnp.concatenate([start, jnp.clip(targets, 0, self.labels - 1)], 1)
        states, seen, _ = self.run(tokens, 0, *self.memories(rows, lengths))
        return jnp.concatenate([states.astype(jnp.float32), seen], -1)[:, len(self.start) - 1 :]

    def logits(self, frames, columns, targets):
        """[B, N, U + 1, 3]: log-probabilities of the next one of the targets, of all other labels, and of the blank."""
        width = columns.shape[-1] - frames.shape[1]
        log_probs, leave = self.log_probs(columns[..., :width]), (columns[..., width:].mT - 0.5) * SHARPNESS
        end, index = log_probs[..., -1], jnp.clip(targets, 0, self.labels - 1)
        label = jnp.take_along_axis(log_probs, jnp.pad(index, ((0, 0), (0, 1)))[..., None], -1)[..., 0]
        others = jnp.log(jnp.maximum(1 - jnp.exp(label) - jnp.exp(end), LEAST))
        return jnp.stack([*held(leave, (label[:, None], others[:, None])), blank(leave, end[:, None])], -1)

    def decoder_inputs(self, rows, lengths):
        """Joint, predictor and numbers of the rows [B, N, 1]: what searches of `decode` take."""
        (memories, heard), batch = self.memories(rows, lengths), len(rows)
        room = min(len(self.positions[...]), len(self.start) + 16 + rows.shape[1] // ROWS_OF_LABEL)
        heads, depth = memories[0][0].shape[2:]

        def advanced(state, tokens):
            place, *pasts = state
            states, seen, pasts = self.run(tokens[:, None], place, memories, heard, pasts)
            return states[:, 0], seen.reshape(len(tokens), -1), (place + 1, *map(tuple, pasts))

        def initial(count):
            past = jnp.zeros((count, room, heads, depth), memories[0][0].dtype)
            state = jnp.zeros(count, jnp.int32), *((past, past) for _ in memories)
            for token in self.start[:-1]:
                *_, state = advanced(state, jnp.full(count, token))
            return state

        def step(state, labels):
            states, seen, state = advanced(state, jnp.where(labels < self.labels, labels, self.start[-1]))
            log_probs = self.log_probs(states)
            more = jnp.where(state[0] < room, 0, -jnp.inf)[:, None]  # without a place for one more label, it ends
            log_probs = jnp.concatenate([log_probs[:, :-1] + more, jnp.where(more < 0, 0, log_probs[:, -1:])], 1)
            return jnp.concatenate([log_probs, seen], 1), state

        def joint(frame, row):
            log_probs, seen = row[:, : self.labels + 1], row[:, self.labels + 1 :]
            leave = (jnp.take_along_axis(seen, frame.astype(jnp.int32), 1) - 0.5) * SHARPNESS
            return jnp.concatenate([*held(leave, [log_probs[:, :-1]]), blank(leave, log_probs[:, -1:])], 1)

        numbers = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.float32)[:, None], (batch, rows.shape[1], 1))
        return joint, Predictor(initial, step, self.labels, self.labels + 1), numbers


def held(leave, log_probs):
    """Log-probabilities of labels that leave with the log-odds `leave`."""
    return [jax.nn.log_sigmoid(leave) + x for x in log_probs]


def blank(leave, end):
    """log(1 - g (1 - q(end)))."""
    return jnp.logaddexp(jax.nn.log_sigmoid(-leave), jax.nn.log_sigmoid(leave) + end)
