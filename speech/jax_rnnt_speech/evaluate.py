"""Error rates of held-out utterances, and pictures of some."""

import functools
from typing import NamedTuple

import jax
from matplotlib import pyplot as plt
from tqdm import tqdm

from jax_rnnt import plot
from jax_rnnt_speech import batches, errors, hosts, programs, runs
from jax_rnnt_speech.config import UserError

PICTURES = 3  # utterances


class Rates(NamedTuple):
    loss: float  # nats an utterance
    cer: float  # per cent
    wer: float


def rates(recogniser, params, data, buckets, split, search, examples=0):
    """Rates of all utterances, and (reference, hypothesis) of the first ones."""
    loss, characters, words, shown = 0.0, [], [], []
    evaluated = programs.Announced("a test", recogniser.evaluated)
    for batch in batches.testing(data, recogniser.config, buckets, hosts.part()):
        results = evaluated(params, split(batch), data.corpus.device, search)
        value, labels, counts, index = hosts.gathered((*results, batch["index"]))
        loss += float(value)
        for i, row, count in zip(index, labels, counts):
            if i >= 0:  # its audio is readable
                pair = data.corpus.utterances[i].text, recogniser.text(row, count)
                characters.append(errors.counted(*pair))
                words.append(errors.counted(*(x.split() for x in pair)))
                shown += [pair] * (len(shown) < examples)
    if not words:
        raise UserError("no held-out utterance has readable audio")
    return Rates(loss / len(words), *(errors.summed(x).rate for x in (characters, words))), shown


class Pictures:
    """Draws some held-out utterances: lattices, alignments, and how the times of their labels have moved."""

    def __init__(self, recogniser, data, buckets, folder):
        self.recogniser, self.folder, self.first = recogniser, folder, None
        self.device, self.hop = data.corpus.device, data.corpus.hop
        few = buckets[0]._replace(members=buckets[0].members[:PICTURES], batch=PICTURES)
        self.batch = next(iter(batches.testing(data, recogniser.config, [few], (0, 1))))
        self.count = int(self.batch["valid"].sum())

    @functools.partial(jax.jit, static_argnums=0)
    def compute(self, params, batch):
        model = self.recogniser.model(params)
        features = self.recogniser.inputs(batch, self.device)
        x = self.recogniser.encoded(model, features, batch)
        logits = model.joint(x.frames[:, :, None], x.states[:, None])
        _, emitted = self.recogniser.loss.posteriors(logits, *x[2:])
        return features, x, logits, emitted, self.recogniser.loss.label_frames(logits, *x[2:])

    def draw(self, params, step):
        """Writes lattice.png, and latency.png where an earlier step was drawn."""
        loss, clock = self.recogniser.variant.loss, {"subsampling": self.recogniser.subsampling, "hop": self.hop}
        if self.first is None:
            tqdm.write("compiling: pictures of held-out utterances")
        features, x, logits, emitted, expected = jax.device_get(self.compute(params, self.batch))
        self.first = self.first or (step, expected)
        figure, axes = plt.subplots(2, self.count, figsize=(5 * self.count, 8), layout="constrained", squeeze=False)
        late, moved = plt.subplots(1, self.count, figsize=(5 * self.count, 5), layout="constrained", squeeze=False)
        for i in range(self.count):
            frames, labels = int(x.frame_lengths[i]), int(x.target_lengths[i])
            targets = x.targets[i, :labels]
            names = {"texts": [self.recogniser.tokens.pieces[k] for k in targets], **clock}
            cut = logits[i, :frames, : labels + 1], targets, frames, labels
            plot.draw_lattice(loss, *cut, **names, ax=axes[0, i])
            heard = features[i, : self.batch["lengths"][i]], emitted[i, :frames], targets
            plot.draw_emissions(*heard, **names, ax=axes[1, i])
            times = (self.first[1][i, :labels], expected[i, :labels])
            steps = f"step {self.first[0]}", f"step {step}"
            plot.draw_latencies(*times, targets, names=steps, **names, ax=moved[0, i])
        figure.savefig(self.folder / runs.LATTICE, dpi=100)
        late.savefig(self.folder / runs.LATENCY, dpi=100)
        plt.close(figure)
        plt.close(late)
