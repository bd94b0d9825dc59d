"""The pictures of the pages: the build draws each function of `PICTURES` into docs/pictures, as an SVG.

`python docs/pictures.py` draws docs/lattice.png, the picture of the README. Needs the extra "plot".
"""

import json
import pathlib

import matplotlib.pyplot as plt
import numpy as np

from jax_rnnt import (
    ConstrainedRNNTLoss,
    MonotonicRNNTLoss,
    MultiblankRNNTLoss,
    RNNTLoss,
    TargetRobustRNNTLoss,
    TDTLoss,
    WildcardRNNTLoss,
    plot,
)

HERE = pathlib.Path(__file__).parent
WIDTH = 5  # inches: letters of 9 points can be read on a screen of 390 pixels
STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "svg.hashsalt": "jax_rnnt", "svg.fonttype": "path"}
WORD, SPOKEN, FRAMES = "hello", (2, 5, 8, 11, 15), 20  # when each letter is spoken
CLOCK = {"hop": 0.01, "subsampling": 4}  # input frames of 10 ms, 4 of them an encoder frame
TARGETS = np.array([ord(letter) - ord("a") + 1 for letter in WORD], np.int32)  # the blank is 0
LOSS = RNNTLoss(blank=0)


def model(sure):
    """Logits of a model that has heard each letter where it is spoken, and is more or less sure."""
    logits = np.random.default_rng(3).normal(0, 0.3, (FRAMES, len(WORD) + 1, 27)).astype(np.float32)
    logits[..., 0] += 4 * sure
    for u, (label, middle) in enumerate(zip(TARGETS, SPOKEN)):
        logits[:, u, label] += sure * (7 - 1.6 * np.abs(np.arange(FRAMES) - middle))
    return logits


def axes(height, rows=1, columns=1, **options):
    return plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **options)[1]


def untrained():
    plot.draw_lattice(LOSS, model(0.0), TARGETS, texts=list(WORD), ax=axes(2.6))


def lattice():
    plot.draw_lattice(LOSS, model(1.0), TARGETS, texts=list(WORD), ax=axes(2.6))


LOSSES = {
    "RNNTLoss, HATLoss": RNNTLoss(),
    "MonotonicRNNTLoss": MonotonicRNNTLoss(),
    "ConstrainedRNNTLoss": ConstrainedRNNTLoss(),
    "MultiblankRNNTLoss((2, 3))": MultiblankRNNTLoss((2, 3)),
    "TDTLoss((0, 1, 2))": TDTLoss((0, 1, 2)),
    "TargetRobustRNNTLoss": TargetRobustRNNTLoss(skip_frame=0.0, skip_label=0.0),
    "WildcardRNNTLoss": WildcardRNNTLoss(skip_start=0.0, skip_end=0.0),
}
# Where a loss has more than its table of arcs says: from, to.
SKIPS = {
    "TargetRobustRNNTLoss": [((1, 0), (2, 0)), ((1, 0), (1, 1))],
    "WildcardRNNTLoss": [((0, 0), (t, 0)) for t in (1, 2, 3)] + [((t, 2), (4, 2)) for t in (2, 3)],
}


def draw_arc(ax, start, end, *, dashed=False, faint=False):
    """Blue where it writes nothing, orange where it writes a label, dashed where it skips."""
    (t, u), (right, above) = start, end
    bend = {"connectionstyle": f"arc3,rad={0.45 if dashed else 0.2 * (right - t - 1) * (above == u)}"}
    look = {
        "color": "tab:blue" if above == u else "tab:orange",
        "alpha": 0.2 if faint else 1,
        "shrinkA": 2,
        "shrinkB": 3,
    }
    line = {"linestyle": "--" if dashed else "-", "lw": 1 if faint or dashed else 1.5}
    ax.annotate("", end, start, arrowprops={"arrowstyle": "->", **bend, **look, **line})


def topologies():
    """The arcs of each loss: those that leave one node, among those of all."""
    frames, labels, center = 4, 2, (1, 0)
    places = [*axes(6.4, 4, 2).flat]
    for ax, (name, loss) in zip(places, LOSSES.items()):
        for t, u in np.ndindex(frames + 1, labels + 1):
            ax.plot(t, u, "o", color="0.4", markersize=3)
            for arc in loss.topology:
                end = t + arc.dt, u + arc.du
                if end[0] <= frames and end[1] <= labels and (t, arc.du) != (frames, 1):
                    draw_arc(ax, (t, u), end, faint=(t, u) != center)
        for start, end in SKIPS.get(name, ()):
            draw_arc(ax, start, end, dashed=True)
        ax.set(title=name, xlim=(-0.3, frames + 0.3), ylim=(-0.9, labels + 0.4), yticks=range(labels + 1))
        ax.set_yticklabels(["start", "a", "b"])
    for ax in (places[-3], places[-2]):
        ax.set_xlabel("frames read")
    places[-1].set_axis_off()


def planes():
    """What the two stages compute."""
    logits = model(1.0)
    both = LOSS.arc_log_probs(logits, TARGETS, FRAMES, len(WORD))
    posteriors = dict(zip(("blank", "label"), LOSS.posteriors(logits, TARGETS, FRAMES, len(WORD))))
    places = axes(3.6, 2, 2, sharex=True, sharey=True)
    for row, name, stage in ((0, "emission", both), (1, "posterior", posteriors)):
        for ax, slot in zip(places[row], ("blank", "label")):
            shown = np.asarray(stage[slot]).T
            ax.imshow(np.exp(shown) if row == 0 else shown, cmap="Greys", vmin=0, vmax=1, origin="lower", aspect="auto")
            ax.set_title(f"{name}: {'blank' if slot == 'blank' else 'next letter'}")
            ax.set_yticks(range(len(WORD) + 1), ["start", *WORD])
    for ax in places[1]:
        ax.set_xlabel("frame")


def emissions():
    rng = np.random.default_rng(0)
    features = rng.normal(0, 0.2, (4 * FRAMES, 24))
    for middle in SPOKEN:
        features[max(4 * middle - 8, 0) : 4 * middle, rng.integers(4, 20) :][:, :4] += 2
    _, label = LOSS.posteriors(model(1.0), TARGETS, FRAMES, len(WORD))
    plot.draw_emissions(features, label, TARGETS, texts=list(WORD), **CLOCK, ax=axes(3.4))


def tuning():
    """Of `rnnt-speech train`, as docs/speech/parakeet.md says: the lines of its metrics.jsonl."""
    file = HERE.parent / "lab/benchmarks/results/2026-11-26-epyc-2-cores-tuning.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    ax = axes(2)
    for name, look, label in (("loss", "-", "training"), ("valid_loss", "o", "held out")):
        ax.plot(*zip(*((x["step"], x[name]) for x in lines if name in x)), look, label=label)
    ax.set(xlabel="step", ylabel="nats an utterance")
    ax.legend()


PICTURES = untrained, lattice, topologies, planes, emissions, tuning


def draw(folder):
    folder.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        for function in PICTURES:
            function()
            plt.savefig(folder / f"{function.__name__}.svg", metadata={"Date": None})
            plt.close()


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        lattice()
        plt.savefig(HERE / "lattice.png", dpi=200)
