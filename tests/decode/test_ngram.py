"""Does an n-gram model score labels as a loop over its definition does, and as KenLM does?"""

import gzip

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import family
from jax_rnnt import decode
from jax_rnnt.decode.lm import _arpa, _automaton
from ngrams import NATS, TOKENS, arpa, last, log_prob, random_arpa, run, scan, written

pytestmark = pytest.mark.filterwarnings("ignore:.*are left out, as no labels spell them:UserWarning")

LABELS_OF_MODELS = ["rare", *TOKENS, None, "other"]
CASES = [(1, "closed"), (2, "closed"), (3, "pruned"), (4, "closed"), (5, "pruned")]


def sentences(seed, number, labels):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, labels, rng.integers(0, 9)).tolist() for _ in range(number)]


def token_of(grams, label):
    return label if (label,) in grams else "<unk>"


@pytest.mark.quick("2-closed", "3-pruned")
@pytest.mark.parametrize(("order", "kind"), CASES)
def test_scores_are_the_definition(order, kind, tmp_path):
    """All labels after all prefixes of random sentences; several classes are <unk>, one is no label."""
    grams = random_arpa(0, order, kind)
    labels = LABELS_OF_MODELS
    model = decode.NGram.from_arpa(written(tmp_path / "m.arpa", arpa(grams)), labels)
    assert (model.start, model.symbols) == (8, 9)
    rows = [[x for x in row if x != 6] for row in sentences(1, 60, 8)]
    scores, final, states = run(model, rows)
    assert np.isneginf(scores[..., 6]).all()
    used = {}
    for n, row in enumerate(rows):
        history = ("<s>", *(token_of(grams, labels[x]) for x in row))
        for i in range(len(row) + 1):
            context = last(history[: i + 1], order)
            expected = [log_prob(grams, context, token_of(grams, x)) for x in labels if x is not None]
            np.testing.assert_allclose(np.delete(scores[n, i], 6), expected, rtol=2e-6, atol=1e-6)
            np.testing.assert_allclose(final[n, i], log_prob(grams, context, "</s>"), rtol=2e-6, atol=1e-6)
            # States are the contexts that matter: with a backoff weight, or before some word.
            while context and not (grams.get(context, (0, 0))[1] or any(x[:-1] == context for x in grams)):
                context = context[1:]
            used.setdefault(context, set()).add(int(states[n, i]))
    assert all(len(x) == 1 for x in used.values())
    assert len(set.union(*used.values())) == len(used) >= min(order, 2)


@pytest.mark.parametrize(("order", "kind"), [family.slow(*x) if x[0] in (2, 4) else x for x in CASES[1:]])
def test_scores_are_those_of_kenlm(order, kind, tmp_path):
    """Of 1,000 sentences, with words that the model lacks, and their ends."""
    kenlm = pytest.importorskip("kenlm")
    path = written(tmp_path / "m.arpa", arpa(random_arpa(2, order, kind)))
    labels = ["rare", *TOKENS, "another", "other"]
    peer, model = kenlm.Model(str(path)), decode.NGram.from_arpa(path, labels)
    rows = sentences(3, 1000, len(labels))
    scores, final, _ = run(model, rows)
    for n, row in enumerate(rows):
        expected = [NATS * x for x, *_ in peer.full_scores(" ".join(labels[x] for x in row))]
        got = [*(scores[n, i, x] for i, x in enumerate(row)), final[n, len(row)]]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_the_file(tmp_path):
    """Compressed, with labels for <s>, </s> and <unk> and without these, and with tokens that are no labels."""
    grams = random_arpa(4, 3)
    path = tmp_path / "m.arpa.gz"
    path.write_bytes(gzip.compress(arpa(grams).encode()))
    labels = ["<s>", "a", "b", "</s>", "<unk>", "c"]  # neither d nor e
    model = decode.NGram.from_arpa(path, [*labels, None, None])
    rows = sentences(5, 40, len(labels))
    scores, final, _ = run(model, rows)
    for n, row in enumerate(rows):
        context = last(("<s>", *(labels[x] for x in row)), 3)
        expected = [log_prob(grams, context, x) for x in labels]
        np.testing.assert_allclose(scores[n, len(row), :6], expected, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(final[n, len(row)], expected[3], rtol=2e-6, atol=1e-6)
    few = {x: y for x, y in grams.items() if not {"<s>", "</s>", "<unk>"} & {*x}}
    model = decode.NGram.from_arpa(written(tmp_path / "few.arpa", arpa(few)), [*TOKENS, None, None, None])
    scores, _, _ = run(model, [[]])
    np.testing.assert_allclose(scores[0, 0, :5], [NATS * few[x,][0] for x in TOKENS], rtol=1e-6)
    assert model.final(jnp.zeros(3, jnp.int32)).tolist() == [0, 0, 0]


@pytest.mark.slow
def test_chunks(monkeypatch, tmp_path):
    """Rows of more arcs than are put there at once, files of more lines than are read at once, and a GPU's way."""
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 4)))
    rows = sentences(6, 30, 5)
    model = lambda: decode.NGram.from_arpa(path, [*TOKENS, None, None, None])
    whole = run(model(), rows)
    monkeypatch.setattr(_automaton, "CHUNK", 7)
    monkeypatch.setattr(_arpa, "LINES", 5)
    in_parts = run(model(), rows, program=jax.jit(lambda *x: scan(*x)))
    for x, y in zip(whole, in_parts):
        np.testing.assert_array_equal(x, y)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cuda, **_: cuda(*x))
    for x, y in zip(whole, run(model(), rows, program=jax.jit(lambda *inputs: scan(*inputs)))):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_tables_are_arguments(tmp_path):
    """Of a program; they take 12 to 24 bytes of an n-gram, and a row."""
    grams = random_arpa(0, 4)
    labels = [*TOKENS, "<unk>", None, None]
    model = decode.NGram.from_arpa(written(tmp_path / "m.arpa", arpa(grams)), labels)
    doubled = jax.tree.map(lambda x: 2 * x if x.dtype == jnp.float32 else x, model)
    np.testing.assert_allclose(run(doubled, [[0, 1]])[0], 2 * run(model, [[0, 1]])[0], rtol=1e-6)
    assert jax.tree.structure(doubled) == jax.tree.structure(model)
    assert repr(model) == "NGram(8 labels, 5 of 5 words)"
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    assert 12 * sum(len(x) > 1 for x in grams) < size < 24 * len(grams) + 8 * 9 + 40


DIFFERENT = "labels must be different texts, at least one, got "
WRONG_LABELS = [
    (["a", "x", "y"], ValueError, "labels must be tokens of .*m.arpa, as it has no <unk>, got 2 .*: 'x', 'y'; None"),
    (["a", *map(str, range(9))], ValueError, "labels .* got 9 that are none: '0', '1', '2', '3', '4', ...;"),
    (["a", "b", "a"], ValueError, DIFFERENT + r"\['a', 'a'\], which are equal"),
    (["e\u0301", "\u00e9"], ValueError, "labels must be different .* are equal in Unicode's form NFC"),
    ([None, None], ValueError, DIFFERENT + "2 that are none"),
    (["a", 3], TypeError, "labels must be str or None, got 3"),
]


@pytest.mark.parametrize(("labels", "error", "message"), WRONG_LABELS)
def test_labels(labels, error, message, tmp_path):
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 2, unk=False)))
    with pytest.raises(error, match=f"NGram.from_arpa: {message}"):
        decode.NGram.from_arpa(path, labels)
