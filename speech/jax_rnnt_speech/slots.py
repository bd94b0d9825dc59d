"""Streams that come and go in one batch of fixed size."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import decode
from jax_rnnt_speech.recogniser import GREEDY
from jax_rnnt_speech.results import Labels


class Step(NamedTuple):
    """The next features [T, F] of the stream in a slot, of which `count` count; `fresh`: its first ones."""

    slot: int
    x: np.ndarray
    count: int
    deadline: int  # of `Recogniser.part`
    fresh: bool


class Slots:
    """A batch of streams. Those without a next step, and slots without a stream, stay as they are.

    One program takes all steps, or two where an encoder's first step and the state before it have other sizes.
    """

    def __init__(self, recogniser, count, how=GREEDY):
        self.recogniser, self.count, self.how = recogniser, count, how
        self.free = list(range(count))
        encoder = recogniser.model(recogniser.params).encoder
        self.start, self.sizes = encoder.initial(1), [encoder.frames_of_step(first) for first in (False, True)]
        first = jnp.zeros((1, self.sizes[True], len(recogniser.mean))), jnp.zeros(1, jnp.int32), self.start
        after = jax.eval_shape(lambda *x: recogniser.model(recogniser.params).encoder.step(*x)[2], *first)
        self.apart = [x.shape for x in jax.tree.leaves(after)] != [x.shape for x in jax.tree.leaves(self.start)]
        self.encoder = jax.tree.map(lambda new: jnp.zeros((count, *new.shape), new.dtype), after)
        shapes = jax.eval_shape(functools.partial(self.step, False), *self.arguments(False, []), self.encoder, None)
        self.decoder = decode.reset_streams(shapes[2][2], np.ones(count, bool))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def step(self, first, params, x, lengths, deadlines, fresh, how, encoder, decoder):
        """(state of the encoder, rows [B], `Recogniser.part`) after the next features [B, T, F], or `first` ones."""
        model = self.recogniser.model(params)

        def advanced(x, length, fresh, old):
            before = self.start if first else old
            if not self.apart:
                before = jax.tree.map(lambda start, x: jnp.where(fresh, start, x), self.start, old)
            rows, counts, new = model.encoder.step(x[None], length[None], before)
            new = jax.tree.map(lambda new, old: jnp.where(length > 0, new.astype(old.dtype), old), new, old)
            return rows[0], jnp.where(length > 0, counts[0], 0), new

        rows, counts, encoder = jax.vmap(advanced)(x, lengths, fresh, encoder)  # each stream has its own clock
        decoder = None if decoder is None else decode.reset_streams(decoder, fresh)
        return encoder, counts, self.recogniser.part(model, rows, counts, decoder, deadlines, how)

    def arguments(self, first, steps):
        x = np.zeros((self.count, self.sizes[first], len(self.recogniser.mean)), np.float32)
        (lengths, deadlines), fresh = np.zeros((2, self.count), np.int32), np.zeros(self.count, bool)
        for slot, features, *rest in steps:
            x[slot], (lengths[slot], deadlines[slot], fresh[slot]) = features, rest
        return self.recogniser.params, x, lengths, deadlines, fresh, self.how

    def run(self, steps):
        """(Labels that are final, others, rows) of some steps, at most one of each stream; of none: it compiles."""
        results = {}
        for first in (True, False) if self.apart else (False,):
            chosen = [step for step in steps if not self.apart or step.fresh == first]
            if not chosen and steps:
                continue
            found = self.step(first, *self.arguments(first, chosen), self.encoder, self.decoder)
            self.encoder, rows, (found, final, self.decoder, _) = found
            found, final, rows = jax.device_get((found, final, rows))
            for slot, *_ in chosen:
                labels = Labels.of(found, slot, found.counts[slot], self.how)
                results[slot] = labels.part(final[slot]), labels.part(final[slot], None), int(rows[slot])
        return [results[step.slot] for step in steps]
