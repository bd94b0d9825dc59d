"""Ancestral sampling: a greedy search whose choices are draws.

There are B utterances, N samples of each, K frames at once and V tokens. A search looks at frames that it may never
reach. So the random numbers of a node are a function of its sample, its frame and the labels on that frame: each node
has its own numbers, and those of a node that is not reached decide nothing.
"""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import in_name_of
from jax_rnnt.decode import _given, _greedy, _model, _options, _scores
from jax_rnnt.decode._gather import pick
from jax_rnnt.decode._hypotheses import Hypotheses, shared
from jax_rnnt.decode._largest import peak


@in_name_of("sample")
def run(search, encoder_out, lengths, key, samples, top_k, top_p, exact_end, frames_at_once) -> Hypotheses:
    """Implements `Search.sample`."""
    numbers = truncation(top_k, top_p)
    samples = _options.size("samples", samples)
    search, encoder_out, lengths, exact_end = _given.checked(search, encoder_out, lengths, exact_end)
    window, search = _given.window(frames_at_once, encoder_out), _pytree.replace(search, guard=None)
    seeds = seeds_of(key, encoder_out.shape[0])

    def of_device(encoder_out, lengths, exact_end, seeds):
        static, given = _given.prepare(search, encoder_out, lengths, exact_end, window, numbers)
        static = dataclasses.replace(static, copies=samples)
        arrays = given.lengths, given.bad, given.ends_here
        lengths, bad, ends_here = jax.tree.map(lambda x: jnp.repeat(x, samples, 0), arrays)
        given = given._replace(lengths=lengths, bad=bad, ends_here=ends_here)
        stream = _greedy.start_stream(static, given)
        keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
        keys = jax.vmap(lambda key: jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(samples)))(keys)
        given = given._replace(first=stream.first, draws=Draws(keys.reshape(-1), **numbers))
        carry = _greedy.run_steps(static, given, stream)
        drawn = _greedy.result(static, given, carry, False)._replace(state=None)
        drawn = jax.tree.map(lambda x: x.reshape(x.shape[0] // samples, samples, *x.shape[1:]), drawn)
        return drawn._replace(stable=shared(drawn.labels, drawn.counts, ~(drawn.scores > -jnp.inf)))

    return _given.on_devices(of_device, encoder_out, lengths, exact_end, seeds)


def seeds_of(key, batch: int):
    """Returns uint32 [B, 2], a Threefry key for each utterance: draws of other kinds depend on the batch under vmap."""
    typed = jnp.issubdtype(getattr(key, "dtype", np.float32), jax.dtypes.prng_key)
    rank = np.ndim(key) - (not typed)
    if key is None:
        raise _checks.bad_type("key must be a JAX random key, got None.")
    if rank != 1 or not typed:
        _checks.key(key if rank != 1 else key[0])
    if rank == 1 and np.shape(key)[0] != batch:
        raise _checks.bad_value(f"key must be one key, or one of each of {batch} utterances, got {np.shape(key)}.")
    words = functools.partial(jax.random.bits, shape=(2,), dtype=np.uint32)
    if rank == 1:
        return jax.vmap(words)(key)
    one = jax.random.wrap_key_data(words(key), impl="threefry2x32")
    return jax.random.key_data(jax.vmap(functools.partial(jax.random.fold_in, one))(jnp.arange(batch)))


def truncation(top_k, top_p) -> dict[str, Any]:
    """Returns `top_k` and `top_p`, except those that leave all classes of a node."""
    few, top_p = {}, _model.constant(_checks.scalar("top_p", top_p))
    if top_k is not None:
        if isinstance(top_k, bool) or not jnp.issubdtype(getattr(top_k, "dtype", type(top_k)), np.integer):
            raise _checks.bad_type(f"top_k must be an integer, a scalar integer Array or None, got {top_k!r}.")
        top_k = _checks.scalar("top_k", top_k)
        few["top_k"] = int(top_k) if isinstance(top_k, float) else top_k  # an error shows what was given
    return few if _checks.is_number(top_p) and top_p == 1 else few | {"top_p": top_p}


class Draws(typing.NamedTuple):
    """The keys and limits of draws; limits that leave all classes of a node are None."""

    keys: jax.Array  # [B N]
    top_k: Any = None
    top_p: Any = None

    def choose(self, moves, scores, labels, allowed, frame, count_here):
        """Chooses as `_greedy.most_probable` does, but by a draw; the score is the log-probability of the draw."""
        count, model, labels = scores.shape[-1], labels, labels.rows()
        if self.top_k is not None or self.top_p is not None:
            scores, labels = truncated(self, moves, jnp.where(allowed, scores, -jnp.inf), labels)

        def noise(key, frame, count_here):
            node = jax.random.fold_in(jax.random.fold_in(key, frame), count_here)
            return jax.random.gumbel(node, (count + labels.shape[-1],), scores.dtype)

        each = jax.vmap(jax.vmap(noise, (None, 0, 0)))(self.keys, frame, count_here)
        total = jax.nn.logsumexp(labels, -1, keepdims=True)
        scores = jnp.where(_scores.writes(moves)[None, None], scores + total, scores)
        scores = jnp.where(allowed, scores, -jnp.inf)
        move = jnp.argmax(scores + each[..., :count], -1)
        _, label = peak(labels + each[..., count:])
        writes = _scores.writes(moves)[move]
        drawn = pick(labels, label)
        log_prob = drawn if model.bonus is None else model.at(label)
        gain = jnp.where(writes, drawn - total[..., 0], 0)
        everything = jax.nn.logsumexp(scores, -1)
        score = pick(scores, move) - jnp.where(jnp.isneginf(everything), 0, everything) + gain
        return score, move, jnp.where(writes, label, -1), log_prob


def truncated(draws: Draws, moves, scores, labels):
    """Returns scores of moves [..., moves] and of labels [..., V], with -inf for all but the most probable classes.

    The probability of a class is the sum over the allowed moves that write or read it.
    """
    blanks = len(moves.blanks)
    mass = labels + jax.nn.logsumexp(scores[..., blanks:], -1, keepdims=True)
    tokens = np.array([move.token for move in moves.blanks])[None, None]
    for token in moves.emission.blanks:
        of_blank = jax.nn.logsumexp(jnp.where(tokens == token, scores[..., :blanks], -jnp.inf), -1, keepdims=True)
        mass = jnp.where(_model.is_class(token, mass), of_blank, mass)
    classes = jax.lax.broadcasted_iota(jnp.int32, mass.shape, mass.ndim - 1)
    is_label = jnp.broadcast_to(~_scores.is_blank(moves, mass), mass.shape)
    keys = -mass, is_label.astype(jnp.int32), classes  # among equal ones, blanks are first
    ordered = jax.lax.sort(keys, num_keys=3)
    weights, kept = jnp.exp(ordered[0][..., :1] - ordered[0]), jnp.ones_like(is_label)
    if draws.top_k is not None:
        kept = classes.astype(mass.dtype) < jnp.asarray(draws.top_k, mass.dtype)
    if draws.top_p is not None:
        top_p = jnp.asarray(draws.top_p, mass.dtype)
        rounding = 16 * jnp.finfo(mass.dtype).eps  # sums that miss `top_p` by rounding alone reach it
        weights = jnp.where(kept, weights, 0)
        before = jnp.cumsum(weights, -1) - weights
        enough = before >= (top_p - rounding) * jnp.sum(weights, -1, keepdims=True)
        kept &= (classes == 0) | (top_p >= 1) | ~enough
    last = jnp.maximum(jnp.sum(kept, -1, keepdims=True, dtype=jnp.int32) - 1, 0)
    one, two, three = (jnp.take_along_axis(x, last, -1, mode="promise_in_bounds") for x in ordered)
    behind = (keys[1] > two) | ((keys[1] == two) & (keys[2] > three))
    dropped = (keys[0] > one) | ((keys[0] == one) & behind)
    lost = [dropped[..., move.token] for move in moves.blanks]
    lost += [jnp.zeros_like(lost[0])] * len(moves.labels)
    return jnp.where(jnp.stack(lost, -1), -jnp.inf, scores), jnp.where(dropped, -jnp.inf, labels)
