"""A picture of confidences: how often is a model right when it is so sure?"""

from typing import TYPE_CHECKING

import numpy as np

from jax_rnnt._extras import needed_by
from jax_rnnt._keywords import keywords

with needed_by("jax_rnnt.plot", "plot"):
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes

if TYPE_CHECKING:
    from jax_rnnt.metrics import Calibration


@keywords
def draw_reliability(calibration: "Calibration", *, ax: Axes | None = None) -> Axes:
    """Draws how often words are right, by the confidence in them: a reliability diagram.

    The height of a bar is the share of its bin's words that is right; the more words, the darker it is. A dot marks
    their mean confidence. On the dashed line confidences are probabilities; below it the model is too sure. The title
    has the expected calibration error.

    Parameters
    ----------
    calibration : metrics.Calibration
        From `metrics.calibration`.
    ax : matplotlib.axes.Axes, optional
        Default: the current ones of pyplot.

    Returns
    -------
    matplotlib.axes.Axes

    Raises
    ------
    TypeError
        `calibration` lacks a field of `metrics.Calibration`.

    Examples
    --------
    ::

        plot.draw_reliability(metrics.calibration(confidences, correct), ax=ax)
    """
    fields = "edges", "counts", "confidences", "accuracies"
    if not all(hasattr(calibration, name) for name in fields):
        raise TypeError(f"draw_reliability: calibration must be that of metrics.calibration, got {calibration!r}.")
    edges, counts, confidences, accuracies = (np.asarray(getattr(calibration, name)) for name in fields)
    ax = plt.gca() if ax is None else ax
    ax.plot([0, 1], [0, 1], "--", color="0.4", lw=1, zorder=3, label="confidences that are probabilities")
    filled = counts > 0
    shades = plt.get_cmap("Greys")(0.15 + 0.6 * counts[filled] / max(counts.max(initial=0), 1))
    left, width = edges[:-1][filled], np.diff(edges)[filled]
    ax.bar(left, accuracies[filled], width, align="edge", color=shades, edgecolor="black", lw=0.5)
    (dots,) = ax.plot(confidences[filled], accuracies[filled], "o", color="tab:red", label="words of a bin")
    dots.set(markersize=4, zorder=4)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="share that is right")
    ax.set_title(f"{counts.sum()} words, expected calibration error {100 * calibration.expected_error:.1f}%")
    ax.legend(loc="upper left")
    return ax
