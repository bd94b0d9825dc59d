"""Draws the alignments that the loss sums over, as posteriors of the nodes."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def draw_lattices(file, samples, reduction):
    """Draws a column per sample. The upper picture is the lattice: bright nodes lie on likely alignments. The lower one
    is the input, with labels at the frames where the best path writes them.

    `samples` holds tuples (features [T, F], targets [U], frames of the best path's labels [U], blank posteriors
    [N, U1], label posteriors [N, U1]) without padding; an encoder frame spans `reduction` input frames.
    """
    figure, axes = plt.subplots(
        2, len(samples), figsize=(5 * len(samples), 5), height_ratios=(3, 1), sharex="col", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (lattice, image), (features, targets, emitted, blank, label) in zip(axes.T, samples):
        frames, columns = blank.shape
        occupancy = blank + label  # a path leaves each of its nodes by one arc
        mesh = lattice.imshow(
            occupancy.T, origin="lower", aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest",
            extent=(0, frames * reduction, -0.5, columns - 0.5),
        )  # fmt: skip
        corners = [(0, 0)]
        for u, frame in enumerate(emitted):
            corners += [(frame, u), (frame, u + 1)]
        n, u = np.array([*corners, (frames, columns - 1)]).T
        lattice.plot(np.minimum(n + 0.5, frames) * reduction, u, color="white", lw=1, alpha=0.8)
        lattice.set_yticks(range(columns), ["start", *map(str, targets)])
        lattice.set_title(" ".join(map(str, targets)))
        lattice.spines[:].set_visible(False)

        image.imshow(features.T, origin="lower", aspect="auto", cmap="gray_r", extent=(0, len(features), 0, 1))
        for frame, digit in zip(emitted, targets):
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
