"""Has each loss of the family its own arguments, the numbers of other libraries, and its identities with others?"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from jax_rnnt import lattices
from topologies import FAMILY, IN_TRUTH, fused
from vectors import BLANK_AMONG_LABELS, LABELS, LENGTHS, WEIGHTS, X, t, u

EXACT = 1e-12
DURATION_LOGITS = np.cos(2 + 3 * t + 2 * u + 5 * np.arange(3))
BOTH_HEADS = np.concatenate([X, DURATION_LOGITS], -1)
# ------------------------------------------------------------------------------------------------------- vectors

VECTORS = {
    # name: (function, logits, labels, options, loss, check of the gradient of the tokens, of the durations)
    "monotonic": (jax_rnnt.monotonic_rnnt_loss, X, LABELS, {"blank": 0}, 5.069890840, 1.187062517),  # fast_rnnt
    "final_blank": (  # optimized_transducer
        jax_rnnt.monotonic_rnnt_loss, X, LABELS, {"blank": 0, "final_blank": True}, 5.178358055, 1.087357062,
    ),
    "constrained": (jax_rnnt.constrained_rnnt_loss, X, LABELS, {"blank": 0}, 15.341724887, 1.512987188),  # fast_rnnt
    "multiblank": (  # NeMo, as the four below
        jax_rnnt.multiblank_rnnt_loss, X, BLANK_AMONG_LABELS, {"big_blank_durations": [2, 3]}, 6.081578563, 0.158461885,
    ),
    "multiblank_sigma": (
        jax_rnnt.multiblank_rnnt_loss, X, BLANK_AMONG_LABELS, {"big_blank_durations": [2, 3], "sigma": 0.05},
        6.342662180, 0.159294526,
    ),
    "tdt": (
        jax_rnnt.tdt_loss, BOTH_HEADS, BLANK_AMONG_LABELS, {"durations": [0, 1, 2]},
        8.052819877, 0.168474524, 1.140951660,
    ),
    "tdt_sigma": (
        jax_rnnt.tdt_loss, BOTH_HEADS, BLANK_AMONG_LABELS, {"durations": [0, 1, 2], "sigma": 0.05},
        8.274350104, 0.172450515, 1.141180559,
    ),
    "tdt_fastemit": (  # tokens as NeMo; durations scaled with them
        jax_rnnt.tdt_loss, BOTH_HEADS, BLANK_AMONG_LABELS,
        {"durations": [0, 1, 2], "sigma": 0.05, "fastemit_lambda": 0.1}, 8.274350104, 0.246719295, 1.234320538,
    ),
    "hat": (jax_rnnt.hat_loss, X, LABELS, {"blank": 0}, 8.630254897, 0.682359906),  # k2
}  # fmt: skip


@pytest.mark.rare(
    "reference-tdt_fastemit",
    "reference-multiblank",
    "reference-hat",
    "reference-tdt_sigma",
    "reference-multiblank_sigma",
    "reference-constrained",
    "reference-final_blank",
)
@pytest.mark.parametrize("name", VECTORS)
def test_vectors(implementation, name):
    function, logits, labels, options, value, *checks = VECTORS[name]
    call = lambda x: function(x, labels, *LENGTHS, implementation=fused(implementation), **options)
    got, gradient = jax.value_and_grad(call)(logits)
    np.testing.assert_allclose(got, value, rtol=1e-9)
    np.testing.assert_allclose((gradient[..., :6] * WEIGHTS).sum(), checks[0], atol=1e-8)
    if len(checks) > 1:
        np.testing.assert_allclose((gradient[..., 6:] * WEIGHTS[..., :3]).sum(), checks[1], atol=1e-8)


# --------------------------------------------------------------------------------------------- own options and rules


@pytest.mark.rare(
    "multiblank-reference",
    "monotonic-reference",
    "monotonic_final_blank-reference",
    "constrained-reference",
    "hat-reference",
)
@pytest.mark.family("reference", "quick")
def test_all_options_at_once(loss, implementation):
    """FastEmit, delay penalty, clamp and windows act on every label arc; NaN in the padding."""
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
    p = losses.poisoned(losses.problem(loss=loss))
    options = {"fastemit_lambda": 0.5, "clamp": 0.25, "delay_penalty": 0.125, "label_windows": windows}
    got = losses.evaluate(loss, p, implementation, **options)
    losses.assert_matches(got, loss.expected(p, **options), np.float64, 11, scale=1.5)


@pytest.mark.rare("reference-multiblank")
@pytest.mark.parametrize("name", ["multiblank", "tdt"])
def test_sigma(implementation, name):
    loss = next(x for x in losses.LOSSES if x.name == name)
    p = losses.problem(loss=loss)
    got = losses.evaluate(loss, p, implementation, sigma=0.3)
    losses.assert_matches(got, loss.expected(p, sigma=0.3), np.float64, 11)
    call = jax.jit(lambda s: loss(*p, reduction="none", sigma=s, implementation=implementation))
    np.testing.assert_allclose(call(np.float64(0.3)), got[0], rtol=EXACT)  # a schedule may pass a NumPy number


@pytest.mark.parametrize("durations", [(3, 1), (2, 3), (1,), (0, 4, 2, 1, 3), (5,), (0, 9)], ids=str)
def test_any_durations(durations):
    """In any order, without 0, without 1, beyond T."""
    p = losses.problem()
    logits = np.random.default_rng(0).normal(0, 2, (*p.logits.shape[:-1], 9 + len(durations)))
    p = losses.poisoned(p._replace(logits=logits))
    expected = truth.loss_and_gradient(
        *p, topology=truth.token_durations(durations), emission=truth.duration_emission, durations=durations,
        extra_classes=len(durations), clamp=0.5,
    )  # fmt: skip
    call = lambda x: (lambda v: (v.sum(), v))(jax_rnnt.tdt_loss(x, *p[1:], durations, clamp=0.5, reduction="none"))
    gradient, values = jax.jit(jax.grad(call, has_aux=True))(p.logits)
    losses.assert_matches((values, gradient), expected, np.float64, 11)


def test_sampled_tdt():
    """omega=1 is the RNN-T loss of the tokens, without sigma; omega=0 is TDT; between them, the key tosses a coin."""
    p = losses.problem(loss=next(x for x in losses.LOSSES if x.name == "tdt"))
    tokens = p._replace(logits=p.logits[..., :9])
    for durations in ((2, 0, 1), (4, 2, 3)):
        call = jax.jit(
            lambda x, omega, key, d=durations: jax_rnnt.tdt_loss(x, *p[1:], d, sigma=0.2, omega=omega, key=key)
        )
        both = {
            1.0: losses.RNNT.expected(tokens)[0].mean(),
            0.0: jax_rnnt.tdt_loss(*p, durations, sigma=0.2),
        }
        for omega, value in both.items():
            np.testing.assert_allclose(call(p.logits, omega, jax.random.key(0)), value, rtol=EXACT)
        drawn = [float(call(p.logits, 0.5, jax.random.key(k))) for k in range(20)]
        assert len(set(drawn)) == 2
        gradient = jax.grad(call)(p.logits, 1.0, jax.random.key(0))
        np.testing.assert_allclose(gradient[..., :9] * 4, losses.RNNT.expected(tokens)[1], atol=1e-13)
        assert not np.asarray(gradient[..., 9:]).any()
    with pytest.raises(ValueError, match=r"tdt_loss: key .* got None"):
        jax_rnnt.tdt_loss(*p, (0, 1, 2), omega=0.1)
    with pytest.raises(TypeError, match="tdt_loss: key must be a JAX random key, got 3"):
        jax_rnnt.tdt_loss(*p, (0, 1, 2), omega=0.1, key=3)
    for omega in (1.5, -1):
        for number in (omega, np.float32(omega), np.array(omega), jnp.array(omega)):
            with pytest.raises(ValueError, match="tdt_loss: omega must be a probability"):
                jax_rnnt.tdt_loss(*p, (0, 1, 2), omega=number, key=jax.random.key(0))


@pytest.mark.parametrize("omega", [0, np.float32(0), np.array(0), jnp.array(0.0)], ids=lambda x: type(x).__name__)
def test_lattice_and_arcs_agree(omega):
    """Both have the same slots, whatever type the 0 has, with a key and without."""
    p = losses.problem(loss=losses.TDT)
    loss = jax_rnnt.TDTLoss((3, 1, 2), omega=omega, reduction="none")
    expected = -jax_rnnt.TDTLoss((3, 1, 2), reduction="none")(*p)
    leaf = jax.tree.map(lambda x: omega if x is loss.omega else x, loss)
    for each, key in itertools.product((loss, leaf), (None, jax.random.key(0))):
        found = lattices.log_likelihood(each.lattice, each.arcs(*p, key=key), *p[2:])
        np.testing.assert_allclose(found, expected, rtol=EXACT)


def test_keys_are_keys():
    """A loss that never draws takes a key, and no less than one."""
    p = losses.problem()
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        assert jax_rnnt.RNNTLoss()(*p, key=key) == jax_rnnt.RNNTLoss()(*p)
    for key in (3, "key", jnp.float32(1), np.uint32(3), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match=r"RNNTLoss.posteriors: key must be .*JAX random key, got"):
            jax_rnnt.RNNTLoss().posteriors(*p, key=key)


def test_coin_does_not_depend_on_64_bit_types():
    """The same keys sample the same calls, for any dtype of omega."""
    p = losses.problem(loss=losses.TDT, dtype=np.float32)

    def drawn(omega):
        call = jax.jit(lambda key: jax_rnnt.tdt_loss(*p, (2, 0, 1), omega=omega, key=key))
        return [float(call(jax.random.key(k))) for k in range(20)]

    wide = drawn(0.5)
    assert len(set(wide)) == 2
    assert drawn(jnp.float64(0.5)) == drawn(jnp.float32(0.5)) == wide
    jax.config.update("jax_enable_x64", False)
    try:
        narrow = drawn(0.5)
    finally:
        jax.config.update("jax_enable_x64", True)
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)


def test_no_path_with_more_labels_than_frames():
    p = losses.problem(3, 3, 4, 5, lengths=([3, 3, 2], [4, 3, 2]))
    for options, finite in (({}, [False, True, True]), ({"final_blank": True}, [False, False, False])):
        call = lambda x, o=options: jax_rnnt.monotonic_rnnt_loss(x, *p[1:], reduction="none", **o)
        values, pull = jax.vjp(call, jnp.asarray(p.logits))
        np.testing.assert_array_equal(np.isfinite(values), finite)
        assert (np.asarray(values)[~np.array(finite)] == np.inf).all()
        gradient = np.asarray(pull(jnp.ones(3))[0])
        np.testing.assert_array_equal(gradient.any((1, 2, 3)), finite)


@pytest.mark.parametrize("topology", FAMILY)
def test_hat_topologies(topology):
    p = losses.poisoned(losses.problem())
    options = dict(IN_TRUTH[topology])
    log_probs = p.logits.copy()
    for b in range(4):
        n, m = p.logit_lengths[b], p.target_lengths[b] + 1
        arcs = [truth.hat_emission(p.logits[b, :n, :m], np.full(m, k), blank=3)[0]["label"] for k in range(9)]
        log_probs[b, :n, :m] = np.stack(arcs, -1)
    expected = truth.loss_and_gradient(log_probs, *p[1:], blank=3, fused_log_softmax=False, **options)[0]
    got = jax_rnnt.hat_loss(*p, 3, reduction="none", topology=topology)
    np.testing.assert_allclose(got, expected, rtol=EXACT)
    as_they_are = jax_rnnt.hat_loss(
        log_probs, *p[1:], 3, reduction="none", topology=topology, fused_log_softmax=False, implementation="reference"
    )
    np.testing.assert_allclose(as_they_are, expected, rtol=EXACT)


def test_label_equal_to_a_big_blank_counts_twice(implementation):
    """One certain class is both a label and a blank of two frames: two paths through four frames sum to 2."""
    logits = np.tile(np.array([0.0, -np.inf]), (1, 4, 2, 1))
    rest = np.array([[0]], np.int32), np.array([4], np.int32), np.array([1], np.int32)
    value = jax_rnnt.multiblank_rnnt_loss(logits, *rest, [2], implementation=implementation)
    np.testing.assert_allclose(value, -np.log(2), rtol=EXACT)


def test_hat_of_certain_blanks():
    """Bernoulli logits beyond the range of exp: no overflow, no floor."""
    p = losses.problem(1, 4, 1, 5, lengths=([4], [1]), dtype=np.float32)
    for size in (30.0, 200.0, 1e4):
        logits = p.logits.copy()
        logits[..., -1] = np.where(np.arange(4)[:, None] % 2, size, -size)
        q = p._replace(logits=logits)
        losses.assert_matches(losses.evaluate(losses.HAT, q, None), losses.HAT.expected(q), np.float32, 5)


# ------------------------------------------------------------------------------------------------------- identities


def value_and_gradient(function, logits, *rest, **options):
    call = lambda x: (lambda v: (jnp.where(jnp.isfinite(v), v, 0).sum(), v))(
        function(x, *rest, reduction="none", **options)
    )
    gradient, values = jax.jit(jax.grad(call, has_aux=True))(logits)
    return np.asarray(values), np.asarray(gradient)


def assert_same(a, b):
    np.testing.assert_allclose(a[0], b[0], rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(a[1], b[1], atol=EXACT)


def test_tdt_of_one_duration_is_monotonic_with_final_blank():
    p = losses.problem()
    logits = np.concatenate([p.logits, np.full((*p.logits.shape[:-1], 1), 7.0)], -1)
    values, gradient = value_and_gradient(jax_rnnt.tdt_loss, logits, *p[1:], durations=[1])
    expected = value_and_gradient(jax_rnnt.monotonic_rnnt_loss, *p, final_blank=True)
    assert_same((values, gradient[..., :-1]), expected)
    assert not gradient[..., -1].any()


def test_multiblank_without_its_big_blanks_is_rnnt():
    p = losses.problem()
    logits = p.logits.copy()
    logits[..., 6:8] = -np.inf
    p = p._replace(logits=logits, targets=p.targets % 6)
    got = value_and_gradient(jax_rnnt.multiblank_rnnt_loss, *p, big_blank_durations=[2, 3])
    assert_same(got, value_and_gradient(jax_rnnt.rnnt_loss, *p))


def test_constrained_with_free_blanks_is_monotonic():
    p = losses.problem()
    logits = p.logits.copy()
    logits[..., -1] = 0.0
    p = p._replace(logits=logits)
    got, expected = (
        value_and_gradient(f, *p, fused_log_softmax=False)
        for f in (jax_rnnt.constrained_rnnt_loss, jax_rnnt.monotonic_rnnt_loss)
    )
    np.testing.assert_allclose(got[0], expected[0], rtol=EXACT)


def test_constrained_is_rnnt_where_no_frame_can_hold_two_labels():
    """Windows of disjoint frames leave the same paths to both."""
    p = losses.problem(1, lengths=([7], [4]))
    windows = np.array([[[0, 0], [1, 3], [4, 4], [5, 6]]], np.int32)
    got, expected = (
        value_and_gradient(f, *p, label_windows=windows) for f in (jax_rnnt.constrained_rnnt_loss, jax_rnnt.rnnt_loss)
    )
    assert_same(got, expected)


def test_hat_is_rnnt_of_its_log_probs():
    p = losses.problem()

    def log_probs(x):
        labels = jax.nn.log_softmax(x[..., :-1]) + jax.nn.log_sigmoid(-x[..., -1:])
        return jnp.concatenate([labels, jax.nn.log_sigmoid(x[..., -1:])], -1)

    composed = lambda x, *rest, **o: jax_rnnt.rnnt_loss(log_probs(x), *rest, **o)
    assert_same(value_and_gradient(jax_rnnt.hat_loss, *p), value_and_gradient(composed, *p))


def test_a_forbidden_duration_is_none():
    """A duration of probability 0 changes nothing, nor does the order of durations."""
    p = losses.problem(loss=next(x for x in losses.LOSSES if x.name == "tdt"))
    whole = value_and_gradient(jax_rnnt.tdt_loss, *p, durations=[2, 0, 1])
    order = [*range(9), 10, 11, 9]
    values, gradient = value_and_gradient(jax_rnnt.tdt_loss, p.logits[..., order], *p[1:], durations=[0, 1, 2])
    assert_same((values, gradient), (whole[0], whole[1][..., order]))
    logits = p.logits.copy()
    logits[..., 10] = -np.inf
    values, gradient = value_and_gradient(jax_rnnt.tdt_loss, logits, *p[1:], durations=[2, 0, 1])
    kept = [*range(10), 11]
    expected = value_and_gradient(jax_rnnt.tdt_loss, p.logits[..., kept], *p[1:], durations=[2, 1])
    assert_same((values, gradient[..., kept]), expected)
    assert not gradient[..., 10].any()


def test_big_blanks_in_another_order():
    p = losses.problem()
    p = p._replace(targets=p.targets % 6)
    values, gradient = value_and_gradient(jax_rnnt.multiblank_rnnt_loss, *p, big_blank_durations=[3, 2])
    order = [0, 1, 2, 3, 4, 5, 7, 6, 8]  # big blank i is class 7 - i
    got = value_and_gradient(jax_rnnt.multiblank_rnnt_loss, p.logits[..., order], *p[1:], big_blank_durations=[2, 3])
    assert_same(got, (values, gradient[..., order]))


@pytest.mark.parametrize(
    "one_way", [x for x in losses.LOSSES if x.name not in ("multiblank", "tdt")], ids=lambda x: x.name
)
def test_windows_of_the_best_path_leave_it_alone(one_way):
    """With one path, the loss is minus its score, the expected frames are its frames, and the latency is their mean."""
    p = losses.problem()
    score, frames = map(np.asarray, jax_rnnt.rnnt_align(*p, loss=one_way.value()))
    options = {"label_windows": np.stack([frames, frames], -1)}
    values, gradient = value_and_gradient(one_way, *p, **options)
    np.testing.assert_allclose(values, -score, rtol=EXACT)
    _, of_score = value_and_gradient(lambda x, *r, reduction: -one_way.value().align(x, *r).score, *p)
    np.testing.assert_allclose(gradient, of_score, atol=EXACT)
    expected = np.where(frames < 0, 0, frames)
    got = jax_rnnt.expected_emission_frames(*p, loss=one_way.value(), **options)
    np.testing.assert_allclose(got, expected, atol=EXACT)
    got = jax_rnnt.minimum_latency(*p, loss=one_way.value(reduction="none"), **options)
    np.testing.assert_allclose(got, (frames + 1).sum(-1) / np.maximum(p.target_lengths, 1), atol=EXACT)


# ------------------------------------------------------------------------------------------------ errors and kernels

DURATIONS_NEEDED = {"multiblank": "big_blank_durations", "tdt": "durations"}


@pytest.mark.family
def test_messages(loss):
    """Common mistakes are named, as for `rnnt_loss` (test_errors.py has all of them)."""
    p = losses.problem(loss=loss, dtype=np.float32)
    wrong = {
        "targets": np.zeros((4, 5), np.int32),
        "logit_lengths": np.zeros(3, np.int32),
        "logits": np.zeros((4, 7, 5, 9), np.int32),
    }
    for name, value in wrong.items():
        with pytest.raises((ValueError, TypeError), match=rf"{loss.function.__name__}: {name} "):
            loss(*p._replace(**{name: value}))
    for name, value in {"blank": 99, "reduction": "avg", "clamp": "1", "implementation": "xla"}.items():
        with pytest.raises((ValueError, TypeError), match=name):
            loss(*p, **{name: value})


@pytest.mark.parametrize("name", DURATIONS_NEEDED)
def test_durations_are_checked(name):
    function = getattr(jax_rnnt, f"{name}_rnnt_loss" if name == "multiblank" else "tdt_loss")
    argument = DURATIONS_NEEDED[name]
    p = losses.problem(dtype=np.float32)
    for value in ([], [2, 2], [-1, 2], 3, None, [1.5], ["2"], [True], {2, 3}, frozenset((2, 3)), {2: 0, 3: 1}):
        with pytest.raises((ValueError, TypeError), match=rf"{function.__name__}: {argument} "):
            function(*p, value)
    assert list(inspect.signature(function).parameters)[4] == argument


def test_big_blanks_must_be_classes():
    p = losses.problem(dtype=np.float32)
    with pytest.raises(ValueError, match=r"multiblank_rnnt_loss: blank .* got 1"):
        jax_rnnt.multiblank_rnnt_loss(*p, [2, 3], 1)
    with pytest.raises(ValueError, match="big_blank_durations"):
        jax_rnnt.multiblank_rnnt_loss(*p, [1])
    with pytest.raises(ValueError, match="tdt_loss: durations"):
        jax_rnnt.tdt_loss(*p, [0])
    with pytest.raises(ValueError, match="topology"):
        jax_rnnt.hat_loss(*p, topology="ctc")


@pytest.mark.rare("reference-8", "reference-4294967297", "reference-multiblank")
@pytest.mark.parametrize("long", [8, 2**64, 2**32 + 1])
@pytest.mark.parametrize("table", [losses.multiblank, lambda d: losses.tdt((0, 1, *d))], ids=["multiblank", "tdt"])
def test_durations_beyond_any_length(table, long, implementation):
    """With 7 frames such arcs are never taken, nor are the durations modulo 2^32. Some exceed int64."""
    loss = table((long,))
    p = losses.problem(loss=loss)
    expected = table((8,)).expected(p)
    assert np.isfinite(expected[0]).all()
    losses.assert_matches(losses.evaluate(loss, p, implementation), expected, np.float64, 11)


@pytest.mark.family
def test_every_stage_by_kernel(loss, kernel):
    p = losses.problem(loss=loss, dtype=np.float32)
    for implementation in (kernel, None):
        call = jax.value_and_grad(functools.partial(loss, implementation=implementation))
        text = jax.jit(call).lower(*p).compile().as_text()
        assert losses.custom_calls(text) == losses.once(loss.gradient_calls)
