"""Do the pictures show the lattice's own numbers, on the Axes that they are given?"""

import numpy as np
import pytest

import batches
import jax_rnnt
import reference_numpy as truth
from decoding import TwoStepLoss

plt, plot = pytest.importorskip("matplotlib.pyplot"), pytest.importorskip("jax_rnnt.plot")
plt.switch_backend("Agg")

TIMES = {"hop": 0.01, "subsampling": 4}
RNNT, TDT = jax_rnnt.RNNTLoss(), jax_rnnt.TDTLoss((0, 1, 3))


@pytest.fixture(autouse=True)
def unshown(monkeypatch):
    """Nothing shows a figure, and every figure is closed."""

    def show(*args, **kwargs):
        raise AssertionError("a picture was shown")

    monkeypatch.setattr(plt, "show", show)
    yield
    plt.close("all")


@pytest.fixture
def ax():
    """Axes that are not the current ones."""
    _, (given, _) = plt.subplots(1, 2)
    return given


@pytest.mark.quick("RNNTLoss()")
@pytest.mark.parametrize("of", [RNNT, TDT], ids=repr)
def test_lattice(ax, of):
    """Segments are the probable arcs, thick as they are probable; dots are the best path's labels."""
    p = batches.problem(1, 6, 3, 9 if of is RNNT else 8).take(0)
    assert plot.draw_lattice(of, *p[:2], 5, 2, texts=["x", "y"], **TIMES, ax=ax) is ax
    posteriors = plot.arc_posteriors(of, *p[:2], 5, 2)
    collections = dict(zip(of.topology, ax.collections, strict=True))
    for arc, drawn in collections.items():
        plane = np.asarray(posteriors[arc.slot])
        assert len(drawn.get_segments()) == np.sum(plane > plot.FAINT)
        for (start, end), width in zip(drawn.get_segments(), drawn.get_linewidths(), strict=True):
            t, u = round(start[0] / 0.04), round(start[1])
            np.testing.assert_allclose(width, 0.5 + 3.5 * plane[t, u], rtol=1e-6)
            np.testing.assert_allclose(end, [(t + arc.dt) * 0.04, u + arc.du], rtol=1e-9)
    (dots,) = ax.lines
    best = of.align(*p[:2], 5, 2).frames
    np.testing.assert_allclose(dots.get_xdata(), np.asarray(best[:2]) * 0.04)
    assert [x.get_text() for x in ax.get_yticklabels()] == ["start", "x", "y"]
    assert ax.get_xlabel() == "seconds"
    ax.figure.canvas.draw()


def test_emissions(ax):
    """A line at the mean of each label, and a bar of its deviation."""
    p = batches.problem(1, 6, 3, 9).take(0)
    p = p._replace(logit_lengths=np.int32(6), target_lengths=np.int32(3))
    _, label = RNNT.posteriors(*p)
    features = np.random.default_rng(0).normal(size=(22, 8))
    assert plot.draw_emissions(features, label, p.targets, **TIMES, ax=ax) is ax
    mean = 0.04 * (np.asarray(RNNT.label_frames(*p)) + 0.5)
    lines = [x.get_xdata()[0] for x in ax.lines if len(x.get_xdata()) == 2 and len(set(x.get_xdata())) == 1]
    np.testing.assert_allclose(lines, mean, rtol=1e-6)
    times = 0.04 * (np.arange(6) + 0.5)
    deviation = np.sqrt(np.sum(np.asarray(label)[:, :3] * times[:, None] ** 2, 0) - mean**2)
    bars = [c.get_segments()[0][:, 0] for c in ax.collections]
    np.testing.assert_allclose(bars, np.stack([mean - deviation, mean + deviation], 1), rtol=1e-5)
    np.testing.assert_allclose((*ax.get_xlim(), *ax.get_ylim()), (0, 0.22, 0, 8))
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), features.T)
    ax.figure.canvas.draw()


@pytest.mark.slow
def test_arcs_that_share_a_slot(ax):
    """Each has its own posterior: the share of the paths through it."""
    p = batches.problem(1, 4, 2, 5).take(0)
    p = p._replace(logit_lengths=np.int32(4), target_lengths=np.int32(2))
    names = {"blank+1": (1, 0), "label": (0, 1), "blank+2": (2, 0)}
    arcs, _ = truth.softmax_emission(p.logits, np.append(p.targets, -1), blank=4)
    arcs = {name: arcs[name.partition("+")[0]] for name in names}
    _, expected = truth.posteriors(tuple(truth.Arc(name, *step) for name, step in names.items()), arcs, 4, 2)
    found = plot.arc_posteriors(TwoStepLoss(), *p)
    assert found.keys() == names.keys()
    for name, plane in found.items():
        np.testing.assert_allclose(plane, expected[name], atol=1e-12)
    plot.draw_lattice(TwoStepLoss(), *p, ax=ax)
    drawn = [len(x.get_segments()) for x in ax.collections]
    assert drawn == [np.sum(np.asarray(found[name]) > plot.FAINT) for name in names]


@pytest.mark.slow
def test_no_labels_and_no_path(ax):
    plot.draw_lattice(RNNT, np.zeros((3, 1, 4)), np.zeros(0, int), ax=ax)
    plot.draw_emissions(np.zeros((3, 2)), np.zeros((3, 1)), np.zeros(0, int), ax=ax)
    impossible = np.full((6, 4, 9), -np.inf)
    impossible[..., 8] = 0
    plot.draw_lattice(RNNT, impossible, np.arange(3, dtype=np.int32), ax=ax)
    plot.draw_emissions(np.zeros((3, 2)), np.zeros((3, 2)), np.array([1]), ax=ax)
    ax.figure.canvas.draw()


def test_titles_and_legends(ax):
    """The utterance and the score of its best path; what darkness, curves and bars mean. A space can be seen."""
    p = batches.problem(1, 6, 3, 9).take(0)
    p = p._replace(logit_lengths=np.int32(6), target_lengths=np.int32(3))
    plot.draw_lattice(RNNT, *p, texts=["a", " ", "b"], ax=ax)
    score = float(RNNT.align(*p).score)  # test_questions.py has its truth
    assert ax.get_title() == f"a b\nbest path: {score:.1f} nats"
    assert [x.get_text() for x in ax.get_yticklabels()] == ["start", "a", "␣", "b"]
    handles = ax.get_legend().legend_handles
    texts = [x.get_text() for x in ax.get_legend().get_texts()]
    assert texts == ["probability 0.1", "probability 0.5", "probability 1", "best path"]
    assert [x.get_linewidth() for x in handles[:3]] == [0.5 + 3.5 * x for x in (0.1, 0.5, 1)]  # as in test_lattice
    plot.draw_lattice(RNNT, *p, ax=ax)
    assert ax.get_title() == f"best path: {score:.1f} nats"
    plot.draw_lattice(RNNT, *p, texts=["▁so", "me", "▁more"], ax=ax)
    assert ax.get_title().startswith("some more\n")
    ax.clear()
    plot.draw_emissions(np.zeros((6, 8)), RNNT.posteriors(*p)[1], p.targets, texts=["a", " ", "b"], ax=ax)
    assert len(ax.get_legend().get_texts()) == 3
    assert "␣" in {x.get_text().strip() for x in ax.child_axes[0].get_xticklabels()}


X, ROWS = np.zeros((3, 2, 4)), np.zeros((3, 2))
JOINT = jax_rnnt.JointLogits(jax_rnnt.LinearJoint(np.zeros((5, 4))), np.zeros((2, 3, 5)), np.zeros((2, 2, 5)))
BAD = [
    ("lattice", (RNNT, X, np.ones((1, 1), int)), {}, r"draw_lattice: targets .*got \(1, 1\)"),
    ("lattice", (RNNT, X[None], [1]), {}, r"draw_lattice: logits must be those of one .*got \(1, 3, 2, 4\)"),
    ("lattice", (RNNT, JOINT, [1]), {}, r"draw_lattice: logits must be those of one .*got \(2, 3, 2, 4\)"),
    ("lattice", (RNNT, X, np.array([1])), {"texts": "ab"}, "draw_lattice: texts .* one for each of 1 .*got 2"),
    ("lattice", (RNNT, jax_rnnt.PackedLogits(X.reshape(6, 4), 3), [1]), {}, "draw_lattice: logits .* got PackedLogits"),
    ("emissions", (np.zeros(3), ROWS, [1]), {}, r"draw_emissions: features .*got \(3,\)"),
    ("emissions", (ROWS, ROWS[:, :1], [1, 2]), {}, r"draw_emissions: posteriors .*U = 2.*got \(3, 1\)"),
    # Exchanged with the features, whose sums are no probabilities.
    ("emissions", (ROWS.T, np.ones((8, 3)), [1, 2]), {}, "draw_emissions: posteriors must be those of labels .*to 8"),
    ("emissions", (ROWS, ROWS, [1, 2]), {"hop": -1}, "hop must be a positive"),
]


@pytest.mark.parametrize(("name", "arguments", "options", "message"), BAD)
def test_bad_input(name, arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(plot, f"draw_{name}")(*arguments, **options)
