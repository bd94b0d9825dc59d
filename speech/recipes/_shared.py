"""Recipes share this: lines of handwritten digits, a loop over steps, error rates, and figures that are checked.

The model, its batches and its losses are those of jax_rnnt_speech. A recipe is one idea on top of them:

    digits = Digits(steps=1000)
    model = digits.model()
    params = fit(model.params, mean_loss(model), digits)
    check("CER", error_rate(greedy(model, params), digits), 3)
"""

import argparse
import copy
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from corpora.digits import Handwritten
from tqdm import tqdm

from jax_rnnt.metrics import label_errors
from jax_rnnt_speech import models
from jax_rnnt_speech.config import Config, files
from jax_rnnt_speech.config.options import amount, positive, seed
from jax_rnnt_speech.data import batches
from jax_rnnt_speech.data.source import Source
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.recognition.search import GREEDY
from jax_rnnt_speech.training import objective
from jax_rnnt_speech.training.steps import make_optimizer

FILE = Path(__file__).parent / "corpora" / "handwritten_digits.json"


class Digits:
    """Lines of 3 to 7 handwritten digits: batches of one shape, and the options of the model that reads them."""

    def __init__(self, **options):
        self.config = Config.from_options(**files.read_file(FILE) | options)
        train, test = (Handwritten(x) for x in ("train", "valid"))
        start = models.fresh(self.config, train)
        self.tokens, self.blank, self.subsampling = start.tokens, start.blank, start.subsampling
        self.train, self.test = (batches.labelled(x, self.tokens, self.subsampling) for x in (train, test))
        objective.standardise(start, self.train)
        self.mean, self.deviation = start.mean, start.deviation

    def model(self, **options):
        """A new model; options differ from those of `config`."""
        return Model(self.config.replace(**options), self.tokens, self.mean, self.deviation)

    def batches(self):
        """Those of all steps: `audio` [B, T, F], `lengths` [B], `targets` [B, U], `target_lengths` [B], NumPy."""
        return Source(self.config, None, corpus=self.train.corpus).opened(self, 1).read(0, self.config.run.steps)

    def with_texts(self, texts):
        """The same with held-out lines of other texts, of the same scans."""
        other = copy.copy(self)
        corpus = copy.copy(self.test.corpus)
        corpus.utterances = [utterance._replace(text=text) for utterance, text in zip(corpus.utterances, texts)]
        other.test = batches.labelled(corpus, self.tokens, self.subsampling)
        return other

    def tests(self):
        """500 held-out lines."""
        return batches.testing(self.test, self.config, batches.make_buckets(self.test, self.config, 1), (0, 1))


def fit(params, loss, digits, batch_of=lambda params, batch, step: batch):
    """Parameters after all steps of AdamW. `loss` is (params, batch, step) -> a mean; `batch_of` may change a batch."""
    optimizer = make_optimizer(digits.config.optimiser, digits.config.run.steps)

    @jax.jit
    def train_step(params, state, batch, step):
        value, gradient = jax.value_and_grad(loss)(params, batch, step)
        updates, state = optimizer.update(gradient, state, params)
        return jax.tree.map(lambda x, y: x + y, params, updates), state, value

    state, bar = optimizer.init(params), tqdm(digits.batches(), total=digits.config.run.steps, mininterval=5)
    for step, batch in enumerate(bar):
        batch = batch_of(params, batch, step)
        batch.pop("index", None)
        params, state, value = train_step(params, state, batch, step)
        if step % 100 == 0:
            bar.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    return params


def mean_loss(model):
    """A function of (params, batch, step): the loss that a training makes small."""
    return functools.partial(objective.mean_loss, model)


def greedy(model, params):
    """A function of batches: labels [B, N] and their numbers [B] by greedy search."""
    params = jax.device_put(params)
    return lambda batch: objective.evaluated(model, params, batch, GREEDY)[1:]


def error_rate(search, digits):
    """Label errors of a search over the held-out lines, in per cent of their labels."""
    errors = total = 0
    for batch in digits.tests():
        batch.pop("index")
        valid = batch["valid"]
        labels, counts = jax.device_get(search(batch))
        edits = label_errors(labels, counts, batch["targets"], batch["target_lengths"]).total
        errors += int(jnp.where(valid, edits, 0).sum())
        total += int(batch["target_lengths"][valid].sum())
    return 100 * errors / total


def parse(doc, **options):
    """Options of a recipe: those given here, with defaults of their types, and --seed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=seed, default=0, help="(%(default)s)")
    for name, default in options.items():
        kind = {int: positive, float: amount}.get(type(default), str)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help="(%(default)s)")
    return parser.parse_args()


def check(name, value, limit):
    """Prints a figure; ends the program with status 1 where it is above its limit."""
    print(f"{name}: {value:.2f} (at most {limit:g})")
    if not value <= limit:
        sys.exit(f"{name} {value:.2f} is above {limit:g}")
