"""The table of losses under test, and decorators of tests that run over it.

A new loss of the family is one more entry in LOSSES: its class, and its difference from the RNN-T loss in the float64
truth. lab/extending.md lists what else it needs.
"""

import dataclasses
import functools
import typing

import jax.numpy as jnp
import pytest

import jax_rnnt
import reference_emissions as emissions
import reference_numpy as truth


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    name: str
    kind: type  # its class
    truth: dict = dataclasses.field(default_factory=dict)  # keywords of reference_numpy.loss_and_gradient
    options: dict = dataclasses.field(default_factory=dict)  # keywords of the class
    extra_classes: int = 0  # logits beyond the V classes
    first_blank: int = 0  # the smallest possible class of the blank
    layout: typing.Callable = lambda logits: logits

    def __str__(self):
        return self.name

    def value(self, **options):
        """An instance of the loss."""
        return self.kind(**self.options, **options)

    def __call__(self, logits, *batch, label_windows=None, key=None, **options):
        return self.value(**options)(self.layout(logits), *batch, label_windows=label_windows, key=key)

    def expected(self, problem, **options):
        """(loss [B], per-sequence gradient) in float64."""
        return truth.loss_and_gradient(*problem, **self.truth, **options)

    def sequences(self, problem, label_windows=None, **options):
        """(b, T_b, U_b, topology, {slot: arc scores [T, U1]}) of every sequence, in float64."""
        for b, (n, m) in enumerate(zip(problem.logit_lengths, problem.target_lengths, strict=True)):
            windows = None if label_windows is None else label_windows[b, :m]
            x, labels = problem.logits[b, :n, : m + 1], problem.targets[b, :m]
            yield b, n, m, *truth.lattice(x, labels, windows=windows, **self.truth, **options)[:2]

    def blank(self, index):
        """This blank, or the smallest possible one if that is larger."""
        return max(index, self.first_blank) if index >= 0 else index

    value_calls = ("jax_rnnt_softmax_emission_fwd", "jax_rnnt_lattice_loss")
    gradient_calls = ("jax_rnnt_softmax_emission_fwd", "jax_rnnt_softmax_emission_bwd", "jax_rnnt_lattice_grad")


def multiblank(durations):
    """The multi-blank loss with these durations of big blanks."""
    tables = dict(topology=truth.multi_blank(durations), emission=emissions.multi_blank_emission, durations=durations)
    options = {"big_blank_durations": durations}
    return Loss("multiblank", jax_rnnt.MultiblankRNNTLoss, tables, options, first_blank=len(durations))


def tdt(durations):
    """The TDT loss with these durations."""
    tables = dict(topology=truth.token_durations(durations), emission=emissions.duration_emission, durations=durations)
    extra = {"extra_classes": len(durations)}
    return Loss("tdt", jax_rnnt.TDTLoss, {**tables, **extra}, {"durations": durations}, **extra)


@functools.cache
def lookup(columns):
    """A joint that looks up: an encoder row holds the logits of all columns, a predictor row its column's number."""

    def joint(encoder, predictor):
        rows = encoder.reshape(len(encoder), columns, -1)
        hit = predictor == jnp.arange(columns, dtype=predictor.dtype)[None]
        return jnp.sum(jnp.where(hit[..., None], rows, 0), -2)

    return joint


def in_tiles(logits, chunk=8):
    """These logits, made by a joint `chunk` rows at a time."""
    *batch, frames, columns, classes = logits.shape
    column = jnp.broadcast_to(jnp.arange(columns, dtype=logits.dtype).reshape(columns, 1), (*batch, columns, 1))
    return jax_rnnt.JointLogits(lookup(columns), logits.reshape(*batch, frames, columns * classes), column, chunk=chunk)


def in_a_band(logits):
    """A band that holds every column."""
    return jax_rnnt.BandLogits(logits, jnp.zeros(logits.shape[:-2], jnp.int32))


BIG, DURATIONS = (3, 2), (2, 0, 1)
RNNT = Loss("rnnt", jax_rnnt.RNNTLoss)
MONOTONIC = Loss("monotonic", jax_rnnt.MonotonicRNNTLoss, {"topology": truth.MONOTONIC})
_FINAL, _CONSTRAINED = {"topology": truth.MONOTONIC_FINAL_BLANK}, {"emission": emissions.constrained_emission}
FINAL_BLANK = Loss("monotonic_final_blank", jax_rnnt.MonotonicRNNTLoss, _FINAL, {"final_blank": True})
CONSTRAINED = Loss("constrained", jax_rnnt.ConstrainedRNNTLoss, MONOTONIC.truth | _CONSTRAINED)
MULTIBLANK, TDT = multiblank(BIG), tdt(DURATIONS)
HAT = Loss("hat", jax_rnnt.HATLoss, {"emission": emissions.hat_emission})
SKIPS = {"skip_frame": -3.0, "skip_label": -0.3}
ROBUST = Loss(
    "target_robust", jax_rnnt.TargetRobustRNNTLoss, {"emission": emissions.target_robust_emission, **SKIPS}, SKIPS
)
ENDS = {"skip_start": -2.0, "skip_end": -1.0}
WILDCARD = Loss("wildcard", jax_rnnt.WildcardRNNTLoss, {"emission": emissions.wildcard_emission, **ENDS}, ENDS)
LOSSES = RNNT, MONOTONIC, FINAL_BLANK, CONSTRAINED, MULTIBLANK, TDT, HAT, ROBUST, WILDCARD
SKIPPING = ROBUST, WILDCARD  # their steps need the targets, so no decoder has them; a likelihood may exceed 1

# Layouts of logits as rows of the table, so that they answer the same tests. test_layouts.py has what differs.
TILES = Loss("tiles", jax_rnnt.RNNTLoss, layout=in_tiles)
BAND = Loss("band", jax_rnnt.RNNTLoss, layout=in_a_band)


def slow(*values, id=None):
    """A case that `make test` leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def implementations(*quick, slowly=(), reference=(RNNT,), reference_slowly=()):
    """Decorator of a test that takes `loss` and `implementation`: these losses on kernels, those on the reference."""
    cases = [*((x, "kernel") for x in quick), *(slow(x, "kernel") for x in slowly)]
    cases += [*((x, "reference") for x in reference), *(slow(x, "reference") for x in reference_slowly)]
    return pytest.mark.parametrize(("loss", "implementation"), cases, indirect=["implementation"], ids=str)


# Of the two lattice kernels one loss each; the others differ in what surrounds these.
OTHERS = tuple(x for x in LOSSES if x not in (RNNT, TDT))

# Decorators of a test that takes `loss`. A test of the RNN-T loss alone uses RNNT.
every = pytest.mark.parametrize("loss", [RNNT, TDT, *map(slow, OTHERS)], ids=str)
every_quick = pytest.mark.parametrize("loss", LOSSES, ids=str)

# Decorator of a test that takes `implementation`; without it, both are quick.
reference_slow = pytest.mark.parametrize("implementation", ["kernel", slow("reference")], indirect=True)
