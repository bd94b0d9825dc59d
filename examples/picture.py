"""Draws what the loss sums over: the posterior of every alignment, as a picture."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def best_path(blank, label):
    """Viterbi over log posteriors [N, U1] of one sequence: the nodes (n, u) of its best path, the terminal one last."""
    frames, columns = blank.shape
    with np.errstate(divide="ignore"):
        blank, label = np.log(blank), np.log(label)
    score = np.full((frames + 1, columns), -np.inf)
    score[0, 0] = 0
    by_label = np.zeros(score.shape, bool)
    by_label[0] = True  # nothing comes before the first frame
    for n in range(frames + 1):
        for u in range(columns):
            if n:
                score[n, u] = score[n - 1, u] + blank[n - 1, u]
            if u and n < frames and score[n, u - 1] + label[n, u - 1] > score[n, u]:
                score[n, u], by_label[n, u] = score[n, u - 1] + label[n, u - 1], True
    n, u = frames, columns - 1
    path = [(n, u)]
    while n or u:
        n, u = (n, u - 1) if by_label[n, u] else (n - 1, u)
        path.append((n, u))
    return np.array(path[::-1])


def draw_lattices(file, samples, reduction):
    """One column a sample: its lattice, brightest where alignments pass, over its input with the labels where the best
    path writes them.

    `samples` holds tuples (features [T, F], targets [U], blank posteriors [N, U1], label posteriors [N, U1]) without
    padding; an encoder frame spans `reduction` input frames.
    """
    figure, axes = plt.subplots(
        2, len(samples), figsize=(5 * len(samples), 5), height_ratios=(3, 1), sharex="col", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (lattice, image), (features, targets, blank, label) in zip(axes.T, samples):
        frames, columns = blank.shape
        occupancy = blank + label  # a path leaves every node it visits by one arc
        mesh = lattice.imshow(
            occupancy.T, origin="lower", aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest",
            extent=(0, frames * reduction, -0.5, columns - 0.5),
        )  # fmt: skip
        path = best_path(blank, label)
        lattice.plot(np.minimum(path[:, 0] + 0.5, frames) * reduction, path[:, 1], color="white", lw=1, alpha=0.8)
        written = path[:-1][np.diff(path[:, 1]) == 1, 0]
        lattice.set_yticks(range(columns), ["start", *map(str, targets)])
        lattice.set_title(" ".join(map(str, targets)))
        lattice.spines[:].set_visible(False)

        image.imshow(features.T, origin="lower", aspect="auto", cmap="gray_r", extent=(0, len(features), 0, 1))
        for frame, digit in zip(written, targets):
            x = (frame + 0.5) * reduction
            for ax in (lattice, image):
                ax.axvline(x, color="tab:blue", lw=1, ls=":")
            image.annotate(
                str(digit), (x, 1), (0, 2), textcoords="offset points", ha="center", color="tab:blue", weight="bold"
            )
        image.set(yticks=[], xlabel="input frame", xlim=(0, frames * reduction))
    axes[0, 0].set_ylabel("labels written")
    figure.colorbar(mesh, ax=axes[0].tolist(), label="posterior", pad=0.01)
    figure.savefig(file, dpi=120)
    plt.close(figure)
