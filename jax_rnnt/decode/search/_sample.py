"""Ancestral sampling: greedy search whose choice is a draw.

B utterances, N samples of each, K frames of a window, V tokens. A search looks at frames that it may never reach. So
the random numbers of a node are a function of its sample, its frame and the labels on that frame: each node has its
own, and those of a node that is not reached decide nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._gather import pick
from jax_rnnt.decode._hypotheses import Hypotheses, shared
from jax_rnnt.decode.lm._fusion import NO_FUSION
from jax_rnnt.decode.search import _greedy, _options
from jax_rnnt.decode.search._largest import peak
from jax_rnnt.decode.search._search import checked, on_devices, prepare
from jax_rnnt.decode.search._symbols import checked_scoring
from jax_rnnt.losses import TransducerLoss


@keywords
def sample(
    loss: TransducerLoss,
    joint: Callable[..., jax.Array],
    predictor: Any,
    encoder_out: jax.Array,
    lengths: jax.Array,
    max_labels: int,
    key: jax.Array,
    *,
    samples: int,
    max_symbols: int = 10,
    window: int = 4,
    temperature: float | jax.Array = 1.0,
    start: int | None = None,
    exact_end: bool | jax.Array = False,
) -> Hypotheses:
    """Alignments drawn from the model, move by move, with the exact log-probability of each draw.

    B utterances, N samples. Out of each node an alignment takes an allowed move at random: a blank, or a label with its
    duration. A move has the probability that it has in the loss, divided by that of all allowed moves. As in `greedy`,
    all arcs of the loss are allowed, but no labels at `max_symbols` and `max_labels`, and with `exact_end` no move out
    of the lattice. So without these limits an alignment of `RNNTLoss` or `HATLoss` is drawn with its probability in the
    model, and labels with the sum over their alignments. For `TDTLoss`, blanks of duration 0 share their probability
    among the other moves.

    Parameters
    ----------
    loss, joint, predictor, encoder_out, lengths, max_labels, max_symbols, window, temperature, start, exact_end
        As for `greedy`. The predictor runs on B N sequences.
    key : Array, a JAX random key, or one of each utterance [B]
        An utterance draws by the key's `jax.random.fold_in` with its number, or by its own key; then its draws do not
        depend on the batch. Inside `jax.shard_map`, where numbers start anew on each device, give one of each.
    samples : int
        N. Samples are independent, so labels may repeat.

    Returns
    -------
    Hypotheses
        [B, N], in the order of the draws. `scores` are log-probabilities, in nats, of drawing these alignments, not of
        their labels. -inf: the draws met a dead end of the lattice (`exact_end`). `state` is None.

    Raises
    ------
    TypeError, ValueError
        As for `greedy`; `key` is no random key.

    See Also
    --------
    mwer_loss : The expected number of errors of a list.

    Examples
    --------
    One frame that emits a label with probability 0.2, and then another one:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2)), 1, start=0)
    >>> model = RNNTLoss(blank=0), jnp.add, predictor, jnp.log(jnp.array([[[0.8, 0.2]]])), jnp.array([1])
    >>> drawn = decode.sample(*model, 5, jax.random.key(0), samples=4000)
    >>> bool(abs((drawn.counts == 0).mean() - 0.8) < 0.03)
    True
    >>> [round(float(jnp.exp(drawn.scores[drawn.counts == n][0])), 3) for n in (0, 1, 2)]
    [0.8, 0.16, 0.032]
    """
    function = "sample"
    max_labels, samples, window = _options.sizes(function, max_labels=max_labels, samples=samples, window=window)
    scoring = checked_scoring(function, max_symbols, temperature=temperature)
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    window = _greedy.frames_at_once(window, encoder_out)
    seeds = seeds_of(function, key, encoder_out.shape[0])

    def run(encoder_out, lengths, exact_end, seeds):
        batch = (loss, joint, predictor), encoder_out, lengths, exact_end
        search, label, first = prepare(function, *batch, scoring, start, samples)
        lengths, bad, ends_here = (
            x if isinstance(x, bool) else jnp.repeat(x, samples, 0)
            for x in (search.lengths, search.bad, search.ends_here)
        )
        search = search._replace(copies=samples, lengths=lengths, bad=bad, ends_here=ends_here)
        stream = _greedy.first_stream(search, NO_FUSION, label, first)
        keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
        keys = jax.vmap(lambda key: jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(samples)))(keys)
        choose = functools.partial(draw, keys.reshape(-1))
        rules = _greedy.Rules(search, NO_FUSION, stream.first, window, max_labels, choose)
        drawn = _greedy.result(rules, _greedy.run_steps(rules, stream), False)._replace(state=None)
        drawn = jax.tree.map(lambda x: x.reshape(x.shape[0] // samples, samples, *x.shape[1:]), drawn)
        return drawn._replace(stable=shared(drawn.labels, drawn.counts, ~(drawn.scores > -jnp.inf)))

    return on_devices(run, encoder_out, lengths, exact_end, seeds)


def seeds_of(function: str, key, batch: int):
    """uint32 [B, 2]: of a Threefry key of each utterance, since draws of other kinds depend on the batch under vmap."""
    typed = jnp.issubdtype(getattr(key, "dtype", np.float32), jax.dtypes.prng_key)
    rank = np.ndim(key) - (not typed)
    if key is None:
        raise TypeError(f"{function}: key must be a JAX random key, got None.")
    if rank != 1 or not typed:
        _checks.key(function, key if rank != 1 else key[0])
    if rank == 1 and np.shape(key)[0] != batch:
        raise ValueError(f"{function}: key must be one key, or one of each of {batch} utterances, got {np.shape(key)}.")
    words = functools.partial(jax.random.bits, shape=(2,), dtype=np.uint32)
    if rank == 1:
        return jax.vmap(words)(key)
    one = jax.random.wrap_key_data(words(key), impl="threefry2x32")
    return jax.random.key_data(jax.vmap(functools.partial(jax.random.fold_in, one))(jnp.arange(batch)))


def draw(keys, symbols, scores, labels, allowed, frame, count_here):
    """As `most_probable`, but drawn; the score is the log-probability of the draw. `keys` [B N]."""
    moves, labels = scores.shape[-1], labels.rows()

    def noise(key, frame, count):
        node = jax.random.fold_in(jax.random.fold_in(key, frame), count)
        return jax.random.gumbel(node, (moves + labels.shape[-1],), scores.dtype)

    each = jax.vmap(jax.vmap(noise, (None, 0, 0)))(keys, frame, count_here)
    total = jax.nn.logsumexp(labels, -1, keepdims=True)
    scores = jnp.where(symbols.writes[None, None], scores + total, scores)
    scores = jnp.where(allowed, scores, -jnp.inf)
    move = jnp.argmax(scores + each[..., :moves], -1)
    _, label = peak(labels + each[..., moves:])
    writes = symbols.writes[move]
    log_prob = pick(labels, label)
    gain = jnp.where(writes, log_prob - total[..., 0], 0)
    everything = jax.nn.logsumexp(scores, -1)
    score = pick(scores, move) - jnp.where(jnp.isneginf(everything), 0, everything) + gain
    return score, move, jnp.where(writes, label, -1), log_prob
