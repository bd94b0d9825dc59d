"""Pictures of a run and its test, for a page."""

import jax
import numpy as np
from matplotlib import pyplot as plt

from jax_rnnt import plot
from jax_rnnt_speech import runs
from jax_rnnt_speech.system import outputs

WIDTH = 3.9  # inches, as a narrow screen has: letters of 9 points can be read there
DARK = 20, 24, 30  # the background of a dark page
LABELS = 3  # at least, in the lattice


def save(figure, folder, name):
    """NAME.png, and NAME-dark.png with the same hues and light in the place of dark."""
    figure.canvas.draw()
    light = np.asarray(figure.canvas.buffer_rgba())[..., :3] / 255
    dark = light + 1 - light.max(-1, keepdims=True) - light.min(-1, keepdims=True)
    background = np.array(DARK) / 255
    for file, x in ((f"{name}.png", light), (f"{name}-dark.png", background + dark * (1 - background))):
        with outputs.whole(folder / file) as part:
            plt.imsave(part, np.clip(x, 0, 1), format="png")
    plt.close(figure)


def learning_curve(workdir, folder):
    """Losses and held-out error rates of metrics.jsonl over the steps."""
    lines = runs.metrics_of(workdir)
    series = {name: [(x["step"], x[name]) for x in lines if name in x] for name in
              ("loss", "valid_loss", "valid_wer", "valid_cer")}  # fmt: skip
    if not series["loss"]:
        return
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 4.4), dpi=200, sharex=True, layout="constrained")
    for ax, names in (
        (above, {"loss": "training", "valid_loss": "held out"}),
        (below, {"valid_wer": "WER", "valid_cer": "CER"}),
    ):
        for (name, label), style, color in zip(names.items(), ("-", "o--"), ("tab:blue", "tab:orange")):
            if series[name]:
                ax.plot(*zip(*series[name]), style, color=color, label=label, markersize=3)
        ax.set_ylim(bottom=0)
        ax.legend()
    above.set_ylabel("nats an utterance")
    below.set(xlabel="step", ylabel="held-out errors, %")
    save(figure, folder, "learning-curve")


def lattice(model, result, folder):
    """The lattice of the shortest utterance without errors, or of the shortest one."""
    tokens, choices = model.tokens, []
    if model.loss is None:
        return
    for i, x in zip(result.tested, result.results):
        labels = tokens.encode(x.reference)
        if labels and len(labels) >= LABELS and result.corpus.utterances[i].frames:
            choices.append((x.words.errors > 0, x.seconds or len(labels), x.name, i, labels))
    if not choices:
        return
    *_, i, labels = min(choices)
    features = model.features(result.corpus.samples(i, np.random.default_rng(i)))
    batch = {"lengths": np.array([len(features)], np.int32), "targets": np.array([labels], np.int32),
             "target_lengths": np.array([len(labels)], np.int32)}  # fmt: skip

    @jax.jit
    def logits(params, features):
        network = model.network(params)
        x = model.encoded(network, features, batch)
        return network.joint(x.frames[:, :, None], x.states[:, None])[0]

    logits_of_it = jax.device_get(logits(model.params, features[None]))
    figure, ax = plt.subplots(figsize=(WIDTH, 3.4), dpi=200, layout="constrained")
    clock = {"subsampling": model.subsampling, "hop": model.seconds / model.subsampling}
    names = [tokens.pieces[k] for k in labels]
    targets = np.array(labels, np.int32)
    plot.draw_lattice(model.variant.loss, logits_of_it, targets, texts=names, **clock, ax=ax)
    save(figure, folder, "lattice")


def draw(folder, workdir, model, result):
    """Writes learning-curve.png and lattice.png, also for dark pages."""
    folder.mkdir(exist_ok=True)
    learning_curve(workdir, folder)
    lattice(model, result, folder)
