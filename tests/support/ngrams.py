"""Random n-gram models as ARPA files, their scores by definition, and models of `decode` in one program."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _pytree, decode

NATS = math.log(10)
TOKENS = ["a", "b", "c", "d", "e"]
ROWS, LONGEST = 64, 8  # of a program


def random_arpa(seed, order, kind="closed", unk=True, sentences=40, tokens=TOKENS):
    """{n-gram: (log10 of its probability, of its backoff weight)}: all parts of random sentences, as lmplz makes.

    "pruned": some are gone that are no context, so suffixes of others are missing, as SRILM makes.
    """
    rng = np.random.default_rng((seed, order))
    words = [*tokens, *["<unk>"] * unk]
    known = {(w,) for w in [*words, "<s>", "</s>"]}
    for _ in range(sentences):
        sentence = ["<s>", *rng.choice(words, rng.integers(0, 8)), "</s>"]
        known |= {
            tuple(sentence[i:j]) for i, j in itertools.combinations(range(len(sentence) + 1), 2) if j - i <= order
        }
    if kind == "pruned":
        for gram in sorted(known, key=len, reverse=True):
            if len(gram) > 1 and rng.random() < 0.4 and not any(x[:-1] == gram for x in known):
                known.remove(gram)
    draw = lambda: round(float(rng.uniform(-3, 0)), 5)
    backoff = lambda gram: 0.0 if gram[-1] == "</s>" or rng.random() < 0.2 else round(float(rng.normal(-0.3, 0.3)), 5)
    return {x: (-99.0 if x == ("<s>",) else draw(), backoff(x) if len(x) < order else 0.0) for x in sorted(known)}


def arpa(grams):
    sections = [[x for x in grams if len(x) == n] for n in range(1, 1 + max(map(len, grams)))]
    lines = ["\\data\\", *(f"ngram {n}={len(x)}" for n, x in enumerate(sections, 1))]
    for n, section in enumerate(sections, 1):
        lines += ["", f"\\{n}-grams:"]
        for gram in section:
            p, backoff = grams[gram]
            lines.append("\t".join([str(p), " ".join(gram), *([str(backoff)] if backoff else [])]))
    return "\n".join([*lines, "", "\\end\\", ""])


def written(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def log_prob(grams, context, word):
    """In nats, by the definition of backoff."""
    if (*context, word) in grams:
        return NATS * grams[*context, word][0]
    return NATS * grams.get(context, (0, 0))[1] + log_prob(grams, context[1:], word)


def last(history, order):
    """The words that a model of this order sees."""
    return history[max(len(history) + 1 - order, 0) :]


def padded(arcs, states=1024, number=1024):
    """These arcs and as many without a state as make the number, so that models share a program."""
    room = dict(labels=number, scores=number, targets=number, backoffs=states, suffixes=states, first=states + 1)
    fill = dict(labels=arcs.root_scores.shape[1] + 1, first=arcs.first[-1])
    fields = {
        x: np.pad(getattr(arcs, x), (0, n - len(getattr(arcs, x))), constant_values=fill.get(x, 0))
        for x, n in room.items()
    }
    return jax.tree.map(jnp.asarray, arcs._replace(**fields))


def shareable(model):
    """(the model with tables of a common size and without what is static, what is not there any more)"""
    nothing = dict(begin=0, end=0, vocabulary=0, spelled=0, unspelled=())
    ends = model.begin, -1 if model.end is None else model.end
    columns = jnp.arange(model.start, dtype=jnp.int32) if model.columns is None else model.columns
    return _pytree.replace(model, arcs=padded(model.arcs), columns=columns, **nothing), ends


def scan(model, ends, labels):
    """Score rows, final scores, states after each label."""
    ends = dict(zip(("begin", "end"), ends))
    words = isinstance(model, decode.WordNGram)
    model = _pytree.replace(model, **dict(ngram=_pytree.replace(model.ngram, **ends)) if words else ends)

    def step(state, labels):
        scores, state = model.step(state, labels)
        return state, (scores, model.final(state), state)

    return jax.lax.scan(step, model.initial(labels.shape[0]), labels.T)[1]


program = jax.jit(scan)


def run(model, rows, size=ROWS, longest=LONGEST, program=program):
    """(score rows [N, L + 1, V], final scores [N, L + 1], states [N, L + 1]) after each label of padded rows."""
    start, known = model.start, []
    if isinstance(model, decode.WordNGram):
        ngram, ends = shareable(model.ngram)
        tables = {x: np.pad(getattr(model, x), (0, 64 - len(getattr(model, x)))) for x in ("words", "ahead")}
        arcs = padded(model.arcs, 64, 64)
        model = _pytree.replace(model, ngram=_pytree.replace(ngram, columns=None), arcs=arcs, **tables)
    else:
        model, ends = shareable(model)
    for first in range(0, len(rows), size):
        labels = np.zeros((size, longest + 1), np.int32)
        labels[:, 0] = start
        for i, row in enumerate(rows[first : first + size]):
            labels[i, 1 : len(row) + 1] = row
        known.append(jax.tree.map(np.asarray, program(model, ends, labels)))
    return jax.tree.map(lambda *x: np.swapaxes(np.concatenate(x, 1), 0, 1)[: len(rows)], *known)
