"""Does each static mistake raise at trace time, naming argument, expected and actual value?"""

import abc
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import family
import jax_rnnt
import reference_numpy as truth
from jax_rnnt import decode, metrics, timing

pytestmark = pytest.mark.no_kernel

# Mistakes in a call of shape B=4, T=7, U=4, V=9: argument, value, text in the message beside the name.
f32, i32 = functools.partial(np.zeros, dtype=np.float32), functools.partial(np.zeros, dtype=np.int32)
WRONG = {
    "logits_rank": ("logits", f32((5, 9)), ["(5, 9)"]),
    "logits_none": ("logits", None, ["None"]),
    "logits_string": ("logits", "logits", ["float32", "<U6"]),
    "logits_ragged": ("logits", [[1.0], [1.0, 2.0]], ["[[1.0], [1.0, 2.0]]"]),
    "logits_int": ("logits", i32((4, 7, 5, 9)), ["int32", "float"]),
    "logits_no_classes": ("logits", f32((4, 7, 5, 0)), ["(4, 7, 5, 0)"]),
    "logits_no_nodes": ("logits", f32((4, 7, 0, 9)), ["(4, 7, 0, 9)"]),
    "targets_as_long_as_nodes": ("targets", i32((4, 5)), ["(4, 5)", "(4, 4)", "logits needs 6 columns"]),
    "targets_rank": ("targets", i32((4,)), ["(4,)", "(4, 4)"]),
    "targets_broadcast": ("targets", i32((1, 4)), ["(1, 4)", "(4, 4)"]),
    "targets_float": ("targets", f32((4, 4)), ["float32", "int"]),
    "targets_bool": ("targets", np.zeros((4, 4), bool), ["bool", "int"]),
    "logit_lengths_shape": ("logit_lengths", i32((3,)), ["(3,)", "(4,)"]),
    "logit_lengths_scalar": ("logit_lengths", np.int32(7), ["()", "(4,)"]),
    "target_lengths_shape": ("target_lengths", i32((5,)), ["(5,)", "(4,)"]),
    "target_lengths_float": ("target_lengths", np.zeros(4, np.float64), ["float64", "int"]),
    "blank_too_large": ("blank", 9, ["9"]),
    "blank_too_small": ("blank", -10, ["-10", "9"]),
    "reduction": ("reduction", "avg", ["avg", "mean", "none", "sum", "mean_target", "mean_volume"]),
    "reduction_none": ("reduction", None, ["None", "mean", "the same here is 'none'"]),
    "reduction_of_nemo": ("reduction", "mean_batch", ["mean_target", "the same here is 'mean'"]),
    "clamp_vector": ("clamp", f32((4,)), ["(4,)"]),
    "clamp_complex": ("clamp", 1j, []),
    "delay_penalty_list": ("delay_penalty", [0.1], []),
    "label_windows_pairs": ("label_windows", i32((4, 4, 3)), ["(4, 4, 3)", "(4, 4, 2)"]),
    "label_windows_labels": ("label_windows", i32((4, 5, 2)), ["(4, 5, 2)", "(4, 4, 2)"]),
    "label_windows_float": ("label_windows", f32((4, 4, 2)), ["float32", "int"]),
    "implementation": ("implementation", "xla", ["xla", "kernel", "reference"]),
}
# Shapes of logits that tell what is exchanged or missing, B = 4, T = 7, U = 3, V = 9, and what the message advises.
DIMENSIONS = {
    (4, 7, 9): "without the dimension U + 1",
    (4, 4, 7, 9): "jnp.moveaxis(logits, -3, -2)",
    (4, 9, 7, 4): "jnp.moveaxis(logits, -1, -2)",
    (7, 4, 4, 9): "jnp.swapaxes(logits, 0, 1)",
    (4, 7, 5, 9): "targets must have shape [..., U] = (4, 4), got (4, 3)",  # nothing is certain
}
QUESTIONS = "posteriors", "align", "label_frames", "latency", "label_log_probs", "arc_log_probs", "validate"
MISTAKE = ValueError, TypeError


def call(loss, name, value, **changes):
    arguments = {**batches.problem(dtype=np.float32)._asdict(), **changes, name: value}
    arrays = [arguments.pop(k) for k in batches.Problem._fields]
    return loss(*arrays, **arguments)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_message(wrong):
    """The class or the function is named, the argument, what it must be and what it is."""
    name, value, parts = wrong
    for function, loss in {"RNNTLoss": family.RNNT, "rnnt_loss": jax_rnnt.rnnt_loss}.items():
        with pytest.raises(MISTAKE) as caught:
            call(loss, name, value)
        for part in (f"{function}: ", name, *parts):
            assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


@family.every
def test_messages_of_every_loss(loss):
    """A question is named beside the class."""
    p = batches.problem(loss=loss, dtype=np.float32)
    cases = [("blank", loss.value(blank=99), p)]
    for name, value in (("targets", i32((4, 5))), ("logit_lengths", i32(3)), ("logits", i32((4, 7, 5, 9)))):
        cases.append((name, loss.value(), p._replace(**{name: value})))
    for name, made, arguments in cases:
        for question in ("__call__", *QUESTIONS):
            where = "" if question == "__call__" else rf"\.{question}"
            with pytest.raises(MISTAKE, match=f"{loss.kind.__name__}{where}: {name} "):
                getattr(made, question)(*arguments)


FIELDS = {
    "blank": ("x", None, 1.0),
    "fused_log_softmax": (1,),
    "inplace": ("no", 1),
    "clamp": (None, "1"),
    "fastemit_lambda": ("0.1",),
    "delay_penalty": ([0.1], f32(3)),
    "reduction": ("avg",),
    "implementation": ("xla",),
}


@family.every_quick
def test_message_of_a_new_loss(loss):
    """Errors that do not depend on a batch are raised when the loss is made, not when it is called."""
    for make in (loss.value, functools.partial(dataclasses.replace, loss.value())):
        for name, values in FIELDS.items():
            for value in values:
                got = "shape (3,)" if isinstance(value, np.ndarray) else repr(value)
                message = rf"{loss.kind.__name__}: {name} must .*got {re.escape(got)}"
                with pytest.raises(MISTAKE, match=message):
                    make(**{name: value})


HUGE = 10**400  # no float holds it
EXTREME = {
    "RNNTLoss: clamp": lambda x: jax_rnnt.RNNTLoss(clamp=x),
    "RNNTLoss: fastemit_lambda": lambda x: jax_rnnt.RNNTLoss(fastemit_lambda=x),
    "RNNTLoss: delay_penalty": lambda x: jax_rnnt.RNNTLoss(delay_penalty=x),
    "TDTLoss: sigma": lambda x: jax_rnnt.TDTLoss((0, 1), sigma=x),
    "TargetRobustRNNTLoss: skip_frame": lambda x: jax_rnnt.TargetRobustRNNTLoss(skip_frame=x),
    "WildcardRNNTLoss: skip_end": lambda x: jax_rnnt.WildcardRNNTLoss(skip_end=x),
    "RNNTLoss: am_only_scale": lambda x: call(
        jax_rnnt.RNNTLoss(), "logits", jax_rnnt.AdditiveLogits(f32((4, 7, 9)), f32((4, 5, 9)), am_only_scale=x)
    ),
}
SIZES = {
    "RNNTLoss: max_frames": lambda n: call(jax_rnnt.RNNTLoss(), "logits", jax_rnnt.PackedLogits(f32((200, 9)), n)),
    "prune_inputs: width": lambda n: jax_rnnt.prune_inputs(f32((4, 2)), f32((3, 2)), i32(4), n),
    "stateless_predictor: history": lambda n: decode.stateless_predictor(jnp.sin, n, start=0),
    "stateless_predictor: start": lambda n: decode.stateless_predictor(jnp.sin, 1, start=n),
    "Phrases: size": lambda n: decode.Phrases([[1]], classes=4, size=n),
}


def test_extreme_numbers():
    """A Python int beyond all floats and NaN are errors where they are known; so are sizes that int32 does not hold."""
    for name, make in EXTREME.items():
        for value, expected in ((HUGE, "a number that a float holds"), (math.nan, "a number, got nan")):
            with pytest.raises(ValueError, match=f"^{name} must be {expected}"):
                make(value)
    for name, make in SIZES.items():
        for value in (2**31, HUGE):
            with pytest.raises(ValueError, match=rf"^{name} must lie in \[-2\^31, 2\^31\), got {value}"):
                make(value)


def test_dimensions_of_logits():
    """Told by the targets; where these are padded further, by the longest of them."""
    lengths = np.full(4, 7), np.array([3, 2, 1, 0])
    for shape, advice in DIMENSIONS.items():
        with pytest.raises(ValueError, match=re.escape(advice)):
            jax_rnnt.RNNTLoss()(f32(shape), i32((4, 3)), *lengths)
    with pytest.raises(ValueError, match=re.escape("jnp.moveaxis(logits, -3, -2)")):
        jax_rnnt.RNNTLoss().align(f32((4, 4, 7, 9)), i32((4, 5)), *lengths)
    with pytest.raises(TypeError, match=r"^TDTLoss: options make the loss.*TDTLoss\(\.\.\.\)\(logits, \.\.\.\)"):
        jax_rnnt.TDTLoss(f32((4, 7, 4, 9)), i32((4, 3)), *lengths)


UNKNOWN = {  # of torch, NeMo, k2, warp-rnnt, optax, icefall, ESPnet, transformers: what is meant
    "input_lengths": (lambda **x: jax_rnnt.RNNTLoss()(**x), "RNNTLoss: .* did you mean logit_lengths"),
    "acts": (lambda **x: jax_rnnt.TDTLoss([1]).align(**x), "TDTLoss.align: .* did you mean logits"),
    "symbols": (lambda **x: jax_rnnt.rnnt_loss(**x), "rnnt_loss: .* did you mean targets"),
    "boundary": (lambda **x: jax_rnnt.rnnt_loss(**x), "did you mean logit_lengths or target_lengths"),
    "labels_lengths": (lambda **x: jax_rnnt.rnnt_loss(**x), "did you mean target_lengths"),
    "blank_id": (lambda **x: jax_rnnt.HATLoss(**x), "HATLoss: .* did you mean blank"),
    "beam_size": (lambda **x: decode.Search.beam(**x), "beam: .* did you mean width"),
    "beam_width": (lambda **x: decode.Search.beam(**x), "Search.beam: .* did you mean width"),
    "encoder_out_lens": (lambda **x: decode.Search.greedy(**x), "greedy: .* did you mean lengths"),
    "max_new_tokens": (lambda **x: decode.Search(**x), "Search: .* did you mean max_labels"),
    "s_range": (lambda **x: jax_rnnt.prune_ranges(**x), "prune_ranges: .* did you mean width"),
    "decoder_out": (lambda **x: jax_rnnt.JointLogits(**x), "JointLogits: .* did you mean predictor_out"),
    "reductions": (lambda **x: jax_rnnt.mwer_loss(**x), "mwer_loss: .* did you mean reduction"),  # a slip
    "sigma": (lambda **x: jax_rnnt.TDTLoss([1])(**x), "TDTLoss: .* an option of the class: TDTLoss\\(sigma=...\\)"),
    "log_probs": (lambda **x: jax_rnnt.RNNTLoss(**x), "RNNTLoss: .* of the call: RNNTLoss\\(...\\)\\(logits=...\\)"),
    "nothing": (lambda **x: jax_rnnt.lengths_from_paddings(**x), "it takes paddings"),
}


def test_unknown_arguments():
    for name, (call, message) in UNKNOWN.items():
        with pytest.raises(TypeError, match=message) as caught:
            call(**{name: None})
        assert f": unknown argument {name}; " in str(caught.value)


def test_arguments_of_a_subclass():
    """One's own `__init__` may hand them on; the loss names those that it does not know."""

    class OwnLoss(jax_rnnt.RNNTLoss):
        def __init__(self, label_smoothing=0.0, **options):
            super().__init__(**options)

    assert OwnLoss(0.1, blank=3).blank == 3
    with pytest.raises(TypeError, match="OwnLoss: unknown argument blank_id; did you"):
        OwnLoss(blank_id=3)


def test_unknown_arguments_of_every_name():
    """Of functions, classes and methods alike."""
    results = jax_rnnt.Alignment, decode.FoundPhrase, decode.Hypotheses, decode.Predictor
    made = [getattr(module, name) for module in (jax_rnnt, decode, metrics, timing) for name in module.__all__]
    made += [getattr(jax_rnnt.RNNTLoss(), name) for name in QUESTIONS]
    made += [getattr(decode.Search, name) for name in ("greedy", "beam", "sample")]
    skipped = jax_rnnt.Composition, jax_rnnt.DecodingRules, decode.NGram, decode.WordNGram, decode.linen_predictor
    skipped += *results, timing.Interval, metrics.LabelErrors
    skipped += jax_rnnt.export_checks, jax_rnnt.selftest
    assert len(made) > 50
    for function in made:
        if function not in skipped:
            with pytest.raises(TypeError, match=": unknown argument without_meaning; "):
                function(without_meaning=0)


def test_own_loss_with_a_decorator():
    for decorator in (dataclasses.dataclass, dataclasses.dataclass(frozen=True)):
        with pytest.raises(TypeError, match=r"Own is a dataclass already.*leave out the decorator"):

            @decorator
            class Own(jax_rnnt.TransducerLoss):
                price: float = 0.0

    class Abstract(jax_rnnt.TransducerLoss, abc.ABC):
        """Other bases stay possible."""

    assert Abstract(blank=0).blank == 0


def test_notes_on_errors_of_jax():
    p = batches.problem(1, 2, 1, 3)
    with pytest.raises(TypeError, match="custom_vjp") as caught:
        jax.jvp(lambda x: jax_rnnt.RNNTLoss().latency(x, *p[1:]), (p.logits,), (p.logits,))
    (note,) = [note for note in caught.value.__notes__ if "reference" in note]
    assert note.startswith("RNNTLoss.latency: ") and 'implementation="reference"' in note
    jax.jvp(lambda x: jax_rnnt.RNNTLoss(implementation="reference")(x, *p[1:]), (p.logits,), (p.logits,))


@pytest.mark.parametrize("name", ["targets", "logits", "blank", "reduction"])
def test_raised_while_tracing(name):
    """The error is raised under jit, vmap and grad alike, before anything runs."""
    value = {"targets": i32((4, 5)), "logits": i32((4, 7, 5, 9)), "blank": 9, "reduction": "avg"}[name]
    with pytest.raises(MISTAKE, match=name):
        jax.eval_shape(lambda: call(family.RNNT, name, value))
    if name != "logits":
        run = lambda x: call(family.RNNT, name, value, logits=x)
        with pytest.raises(MISTAKE, match=name):
            jax.jit(jax.vmap(jax.grad(run)))(f32((2, 4, 7, 5, 9)))


def test_type_of_blank():
    """NumPy's integers are integers. A tracer in place of a Python number is reported by name."""
    p = batches.problem()
    np.testing.assert_allclose(family.RNNT(*p, blank=np.int64(3)), family.RNNT(*p, blank=3))
    with pytest.raises(TypeError, match="blank"):
        jax.jit(lambda b: family.RNNT(*p, blank=b))(0)


BAD_DATA = {"logit_lengths": ((2,), 8), "target_lengths": ((1,), 5), "targets": ((0, 1), 9)}


@pytest.mark.parametrize("name", BAD_DATA)
def test_validation(name):
    """Accepts good data with any padding; otherwise names the first offender with index, range and value."""
    index, limit = BAD_DATA[name]
    p, validate = batches.poisoned(batches.problem()), jax_rnnt.RNNTLoss().validate
    assert validate(*p) is None
    assert validate(*p._replace(target_lengths=0 * p.target_lengths)) is None
    for value in (limit, -1):
        bad = p._replace(**{name: getattr(p, name).copy()})
        getattr(bad, name)[index] = value
        end = f"{limit})" if name == "targets" else f"{limit - 1}]"
        at = ", ".join(map(str, index))
        with pytest.raises(ValueError, match=re.escape(f"{name}[{at}] must lie in [0, {end}")) as caught:
            validate(*bad)
        assert str(caught.value).startswith("RNNTLoss.validate: ") and str(caught.value).endswith(f"got {value}.")


OF_TOPOLOGIES = family.RNNT, family.FINAL_BLANK, family.CONSTRAINED, family.TDT, family.WILDCARD


@pytest.mark.parametrize("loss", OF_TOPOLOGIES, ids=str)
def test_validation_finds_what_has_no_path(loss):
    """It raises for exactly the lengths with which the true loss is infinite."""
    frames, labels = np.array(truth.every_length(2, 3)).T
    p = batches.problem(len(frames), 3, 3, 6, loss=loss, lengths=(frames, labels))
    p = p._replace(targets=p.targets % 3)  # below the big blanks
    expected, _ = loss.expected(p)
    assert np.isinf(expected).any() and np.isfinite(expected).any()
    for b, value in enumerate(expected):
        one = p.take(slice(b, b + 1))
        if np.isfinite(value):
            loss.value().validate(*one)
            continue
        message = rf"target_lengths\[0\] must .*{loss.kind.__name__} can emit in {frames[b]} .*\+inf.*got {labels[b]}"
        with pytest.raises(ValueError, match=message):
            loss.value().validate(*one)


def test_validation_of_classes():
    """A duration or a big blank is no label, nor is the blank: the loss would take it for one."""
    tdt, multiblank = jax_rnnt.TDTLoss((0, 1, 2), omega=0.5, sigma=0.1), jax_rnnt.MultiblankRNNTLoss((2, 3))
    for loss, classes, targets, message in (
        (tdt, 8, [0, 6], r"targets\[1\] must lie in \[0, 5\), before the 3 durations, got 6"),
        (tdt, 8, [0, 4], r"targets\[1\] must not be a blank class \(4\), got 4"),
        (multiblank, 6, [3, 1], r"targets\[0\] must not be a blank class \(5, 4, 3\), got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            loss.validate(f32((4, 3, classes)), np.array(targets), np.int32(4), np.int32(2))
    additive = jax_rnnt.AdditiveLogits(f32((4, 9)), f32((3, 9)))  # no logits to clip
    with pytest.raises(TypeError, match=r"^RNNTLoss.validate: clamp of "):
        jax_rnnt.RNNTLoss(clamp=0.5).validate(additive, np.array([0, 1]), np.int32(4), np.int32(2))


def test_validation_under_checkify():
    from jax.experimental import checkify

    p = batches.problem()
    loss = jax_rnnt.MonotonicRNNTLoss()

    @jax.jit
    @checkify.checkify
    def step(p):
        loss.validate(*p)
        return jax.value_and_grad(lambda x: loss(x, *p[1:]))(p.logits)

    error, (value, _) = step(p)
    error.throw()
    np.testing.assert_allclose(value, family.MONOTONIC.expected(p)[0].mean(), rtol=1e-13)
    for bad, message in (
        (p._replace(logit_lengths=p.logit_lengths + 1), r"logit_lengths\[0\] must lie in \[0, 7\], got 8"),
        (p._replace(targets=p.targets + jnp.int32(9)), r"targets\[0, 0\] must lie in \[0, 9\), got"),
        (p._replace(logit_lengths=np.int32([7, 5, 6, 2])), r"target_lengths\[3\] must .* in 2 frames .*got 3"),
    ):
        with pytest.raises(checkify.JaxRuntimeError, match=f"MonotonicRNNTLoss.validate: {message}"):
            step(bad)[0].throw()


def test_validation_of_traced_data():
    """Outside of checkify no error can be raised; what is known while tracing is checked then."""
    p = batches.problem()
    with pytest.raises(TypeError, match=r"RNNTLoss.validate: .*known \(outside of jax.jit\).* wrapped by checkify"):
        jax.jit(jax_rnnt.RNNTLoss().validate)(*p)
    for i, name in enumerate(p._fields[1:], 1):  # the error names the argument that is traced
        with pytest.raises(TypeError, match=f"got a traced {name}"):
            jax.jit(lambda x, i=i: jax_rnnt.RNNTLoss().validate(*p[:i], x, *p[i + 1 :]))(p[i])
    for kind in (np.asarray, jnp.asarray):
        rest = [kind(x) for x in p[1:]]
        jax.jit(lambda logits, rest=rest: jax_rnnt.RNNTLoss().validate(logits, *rest))(p.logits)
        with pytest.raises(ValueError, match=r"logit_lengths\[0\] must lie in \[0, 6\], got 7"):
            jax.jit(lambda logits, rest=rest: jax_rnnt.RNNTLoss().validate(logits, *rest))(p.logits[:, 1:])
