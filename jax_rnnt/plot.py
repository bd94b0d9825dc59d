"""Pictures of lattices and emissions, with matplotlib.

Every `draw_...` draws on Axes, returns them and shows nothing. The pictures work in grey: dark is probable, and marks
and line styles, not colours alone, tell things apart. Long utterances have thinner lines, and names only where there is
room; a space appears as ␣.

T frames of the encoder, U labels, F features of an input frame; `hop` and `subsampling` turn frames into seconds
(`jax_rnnt.timing`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from jax_rnnt import PackedLogits, _checks, lattices, timing
from jax_rnnt._extras import needed_by
from jax_rnnt._keywords import keywords
from jax_rnnt.lattices._topology import Topology
from jax_rnnt.layouts import _layout
from jax_rnnt.losses import TransducerLoss
from jax_rnnt.losses._call import Logits

with needed_by("jax_rnnt.plot", "plot"):
    import matplotlib.pyplot as plt
    from matplotlib import patheffects
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator

__all__ = ["arc_posteriors", "draw_emissions", "draw_lattice"]

FAINT = 0.01  # arcs with a posterior below this are invisible, and left out
LETTER = 0.09  # width of a letter in inches, with room around it
LINE = 1.2  # distance of two names below each other, in multiples of their font's size


@keywords
def arc_posteriors(
    loss: TransducerLoss,
    logits: Logits,
    targets: ArrayLike,
    logit_lengths: ArrayLike,
    target_lengths: ArrayLike,
    *,
    key: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Computes the posterior probability of every arc of a loss's lattice, given the targets.

    T frames, U labels; `...` is any number of batch dimensions. `loss.posteriors` adds up the arcs of blanks, and those
    of labels; here each arc of `loss.topology` has its own plane: each duration, each big blank.

    Parameters
    ----------
    loss : TransducerLoss
    logits, targets, logit_lengths, target_lengths, key
        As in a call of the loss.

    Returns
    -------
    dict of str to Array, floating [..., T, U + 1]
        By the slot of the arc, in the order of `loss.topology`. Arcs that share a slot are named by their frames:
        "blank" over 1 and over 2 frames are "blank+1" and "blank+2". Every path writes every label, so all arcs that
        write label u add up to 1; on the standard lattice the blanks of a frame do too.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> from jax_rnnt.plot import arc_posteriors
    >>> arcs = arc_posteriors(RNNTLoss(), jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> [f"{x:.3f}" for x in arcs["label"][:, 0]]  # three paths
    ['0.333', '0.333', '0.333']
    """
    lengths = jax.numpy.asarray(logit_lengths), jax.numpy.asarray(target_lengths)
    planes, topology = loss.arc_log_probs(logits, targets, *lengths, key=key), _apart(loss.topology)
    planes = {apart.slot: planes[arc.slot] for apart, arc in zip(topology, loss.topology, strict=True)}
    return jax.grad(lambda planes: lattices.log_likelihood(topology, planes, *lengths).sum())(planes)


def _apart(topology: Topology) -> Topology:
    """Returns the same arcs, each with a slot of its own."""
    slots = [arc.slot for arc in topology]
    taken, apart = set(slots), []
    for i, arc in enumerate(topology):
        if slots.count(arc.slot) > 1:
            names = f"{arc.slot}+{arc.dt}", f"{arc.slot}+{arc.dt}+{arc.du}", f"{arc.slot}+{arc.dt}+{arc.du}+{i}"
            arc = dataclasses.replace(arc, slot=next(name for name in names if name not in taken))
        taken.add(arc.slot)
        apart.append(arc)
    return tuple(apart)


@keywords
def draw_lattice(
    loss: TransducerLoss,
    logits: Logits,
    targets: ArrayLike,
    logit_length: int | None = None,
    target_length: int | None = None,
    *,
    key: jax.Array | None = None,
    texts: Sequence[str] | None = None,
    hop: float = 1.0,
    subsampling: int = 1,
    ax: Axes | None = None,
) -> Axes:
    """Draws the lattice of one utterance: its arcs, as dark and thick as they are probable, and the best path.

    A dot is a node from which the best path writes a label. The title has the labels, if `texts` names them, and the
    score of the best path. T frames, U labels, V classes.

    Parameters
    ----------
    loss : TransducerLoss
        Determines which arcs there are, and how probable.
    logits : Array, floating [T, U + 1, V], or a layout of one utterance other than `PackedLogits`
    targets : Array, integer [U]
    logit_length, target_length : int, optional
        Default: T and U.
    key : Array, optional
        As in a call of the loss.
    texts : sequence of str, optional
        The names of the labels of `targets`; default: their numbers.
    hop, subsampling
        As in `timing.frames_to_seconds`. Default: the axis counts frames.
    ax : matplotlib.axes.Axes, optional
        Default: the current ones of pyplot.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    TypeError, ValueError
        `logits` are packed, `logits` or `targets` are those of a batch, or `texts` are not one for each label.

    Examples
    --------
    ::

        figure, ax = plt.subplots()
        plot.draw_lattice(loss, logits[0], targets[0], logit_lengths[0], target_lengths[0], ax=ax)
        figure.savefig("lattice.png")
    """
    if isinstance(logits, PackedLogits):
        expected = "an array or another layout (the rows of one utterance, reshaped to [T, U + 1, V])"
        raise _checks.bad_type(f"logits must be {expected}, got PackedLogits, which have a batch dimension.")
    layout = _layout.as_layout(logits)
    if layout.ndim != 3:
        raise _checks.bad_value(f"logits must be those of one utterance, [T, U + 1, V], got {layout.shape}.")
    targets = _checks.array("targets", targets)
    names = _names(targets[:target_length], texts)
    labels = len(names) if target_length is None else int(target_length)
    frames = layout.frames if logit_length is None else int(logit_length)
    arguments = logits, targets, np.int32(frames), np.int32(labels)
    posteriors = arc_posteriors(loss, *arguments, key=key)
    score, path = loss.align(*arguments, key=key)
    best = np.asarray(path)[:labels]
    ax = plt.gca() if ax is None else ax
    second = timing.frames_to_seconds(1, hop=hop, subsampling=subsampling)
    thin = _thin(frames / 60, labels / 20)

    def style(weight):
        return {"linewidth": thin * (0.5 + 3.5 * weight), "color": plt.get_cmap("Greys")(0.25 + 0.75 * weight)}

    for arc in _apart(loss.topology):
        plane = np.asarray(posteriors[arc.slot], np.float64)
        t, u = np.nonzero(plane > FAINT)
        weight = np.minimum(plane[t, u], 1)
        ends = np.stack([t + arc.dt, u + arc.du], -1)
        lines = np.stack([np.stack([t, u], -1), ends], 1) * [second, 1]
        order = np.argsort(weight)  # the probable ones on top
        lines, weight = lines[order], weight[order]
        ax.add_collection(LineCollection(lines.tolist(), **style(weight), zorder=2))

    key_of_arcs = [Line2D([], [], **style(x), label=f"probability {x}") for x in (0.1, 0.5, 1)]
    if labels and best.min() >= 0:
        (dots,) = ax.plot(best * second, np.arange(labels), "o", label="best path", zorder=3)
        dots.set(color="white", markeredgecolor="tab:red", markeredgewidth=1.5 * thin, markersize=6 * thin**0.5)
        key_of_arcs.append(dots)
    ax.legend(handles=key_of_arcs, loc="lower right", fontsize="small")
    ax.set(xlim=(-0.5 * second, (frames + 0.5) * second), ylim=(-0.5, labels + 0.5))
    _label_rows(ax, ["start", *names])
    ax.set(xlabel=_time_label(hop), ylabel="labels written", title=_title(texts, float(score), "best path"))
    return ax


@keywords
def draw_emissions(
    features: npt.ArrayLike,
    posteriors: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    texts: Sequence[str] | None = None,
    hop: float = 1.0,
    subsampling: int = 1,
    ax: Axes | None = None,
) -> Axes:
    """Draws the labels of an utterance over its features, each with its spread in time.

    T frames of the encoder, U labels, F features. A curve at the bottom is the label's probability in each frame; the
    line marks its mean frame, and the bar one standard deviation to both sides.

    Parameters
    ----------
    features : Array, floating [subsampling T, F]
        A spectrogram or an image, without padding; the last encoder frame may reach beyond its end.
    posteriors : Array, floating [T, U + 1]
        Posteriors of labels: the second result of ``loss.posteriors``, of one utterance. Further columns are padding.
    targets : Array, integer [U]
    texts, hop, subsampling, ax
        As in `draw_lattice`; by default the axis counts input frames.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    ValueError
        An argument has another shape, `posteriors` are not those of labels, or `texts` are not one for each label.

    Examples
    --------
    ::

        blank, label = loss.posteriors(logits, *batch)
        plot.draw_emissions(features[0], label[0], targets[0], hop=0.01, subsampling=4, ax=ax)
    """
    names = _names(targets, texts)
    features, posteriors = np.asarray(features, np.float64), np.asarray(posteriors, np.float64)
    _check_emissions(features, posteriors, len(names))
    ax = plt.gca() if ax is None else ax
    times = timing.frames_to_seconds(np.arange(len(posteriors)) + 0.5, hop=hop, subsampling=subsampling)
    size = features.shape[1]
    extent = (0, len(features) * hop, 0, size)
    ax.imshow(features.T, origin="lower", aspect="auto", cmap="Greys", extent=extent, interpolation="nearest")
    thin = _thin(len(posteriors) / 200, len(names) / 40)
    shown: list[tuple[float, str]] = []
    ends = [-np.inf, -np.inf]  # where the names on either line end
    letter = extent[1] * LETTER / _width(ax)
    for u, name in enumerate(names):
        mass = posteriors[:, u]
        if not mass.sum() > 0:
            continue
        mean = float(np.average(times, weights=mass))
        spread = np.sqrt(np.average((times - mean) ** 2, weights=mass))
        (curve,) = ax.plot(times, 0.3 * size * mass, color="tab:red", lw=1.5 * thin, ls=("-", "--")[u % 2])
        line = ax.axvline(mean, color="black", lw=0.8 * thin)
        bar = ax.errorbar(mean, size, xerr=spread, color="black", lw=2 * thin, capsize=3 * thin, clip_on=False)
        for artist in (curve, line, *bar.get_children()):  # they may lie on dark ground
            artist.set_path_effects([patheffects.withStroke(linewidth=2.5 * thin, foreground="white")])
        left, right = mean - len(name) * letter / 2, mean + (len(name) + 1) * letter / 2
        rows = [row for row in (0, 1) if left >= ends[row]]  # names of neighbours go on two lines
        if rows:
            ends[rows[0]] = right
            shown.append((mean, name + "\n" * rows[0]))
    ax.secondary_xaxis("top").set_ticks([mean for mean, _ in shown], [name for _, name in shown])
    if names:
        _add_key_of_emissions(ax)
    ax.set(xlim=extent[:2], ylim=extent[2:], xlabel=_time_label(hop), ylabel="feature")
    return ax


def _check_emissions(features, posteriors, labels: int) -> None:
    for name, x, shape in (("features", features, "[subsampling T, F]"), ("posteriors", posteriors, "[T, U + 1]")):
        if x.ndim != 2:
            raise _checks.bad_value(f"{name} must have shape {shape}, got {x.shape}.")
    if posteriors.shape[1] < labels:
        expected = f"[T, U + 1] with U = {labels} or more"
        raise _checks.bad_value(f"posteriors must have shape {expected}, got {posteriors.shape}.")
    mass = posteriors[:, :labels]
    if np.any(mass < 0) or np.any(mass.sum(0) > 1.001):  # features, or the posteriors of blanks
        expected = "those of labels (the second result of loss.posteriors), which add up to 1 over the frames"
        got = f"values from {mass.min():.3g} and sums up to {mass.sum(0).max():.3g}"
        raise _checks.bad_value(f"posteriors must be {expected}, got {got}.")


def _add_key_of_emissions(ax: Axes) -> None:
    lines = [
        Line2D([], [], color="tab:red", lw=1.5, label="probability of a label, - and - - alternately"),
        Line2D([], [], color="black", lw=0.8, label="its mean"),
        Line2D([], [], color="black", lw=2, label="one standard deviation to both sides"),
    ]
    columns = 3 if _width(ax) > 8 else 1  # three columns need 8 inches
    below = ax.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4, ncols=columns)
    below.set(frame_on=False)


def _names(targets: Any, texts) -> list[str]:
    if np.ndim(targets) != 1:
        raise _checks.bad_value(f"targets must have shape [U], those of one utterance, got {np.shape(targets)}.")
    if texts is None:
        return [str(label) for label in np.asarray(targets)]
    if len(texts) != len(targets):
        raise _checks.bad_value(f"texts must be one for each of {len(targets)} labels, got {len(texts)}.")
    return [_shown(text) for text in texts]


def _shown(text) -> str:
    return str(text).replace(" ", "␣")


def _title(texts, score: float, what: str) -> str:
    """Returns the text of the utterance, if its labels have names, and a score."""
    pieces = [] if texts is None else [str(text) for text in texts]
    text = ("" if all(len(piece) == 1 or "▁" in "".join(pieces) for piece in pieces) else " ").join(pieces)
    text = " ".join(text.replace("▁", " ").split())
    text = text if len(text) <= 60 else text[:59] + "…"
    return f"{text}\n{what}: {score:.1f} nats" if text else f"{what}: {score:.1f} nats"


def _thin(*crowds: float) -> float:
    """Returns a factor of line widths: 1 where there is room, and less the more lines share it."""
    return max(0.3, min(1.0, *(1 / max(crowd, 1e-9) for crowd in crowds)))


def _width(ax: Axes) -> float:
    """Returns the width of the Axes in inches."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return ax.get_position().width * figure.get_figwidth()


def _label_rows(ax: Axes, names: Sequence[str]) -> None:
    """Names the rows 0, 1, ...; only every n-th where all would overlap, which is known when the Axes are drawn."""
    ax.yaxis.set_major_locator(_Rows(range(len(names))))
    ax.yaxis.set_major_formatter(lambda row, _: names[int(row)] if 0 <= row < len(names) else "")


class _Rows(FixedLocator):
    """Every n-th of the ticks, with the smallest n whose names do not touch."""

    def __call__(self):
        assert isinstance(self.axis, Axis)
        figure = self.axis.axes.get_figure(root=True)
        assert figure is not None
        rows = abs(np.subtract(*self.axis.get_view_interval()))
        row = 72 * self.axis.axes.get_position().height * figure.get_figheight() / rows  # in points
        name = LINE * float(self.axis.get_major_ticks(1)[0].label1.get_fontsize())
        return self.tick_values(0, 0)[:: max(1, int(np.ceil(name / row)))]  # a FixedLocator returns all


def _time_label(hop: float) -> str:
    return "frame" if hop == 1 else "seconds"
