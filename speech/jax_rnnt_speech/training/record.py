"""Writes a training's checkpoints into its run, with all that it needs to go on from them, and the best one."""

import dataclasses
import hashlib
import json

import jax

from jax_rnnt_speech import models, runs
from jax_rnnt_speech.config.files import to_json
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.system import UserError
from jax_rnnt_speech.training.evaluation import Rates


@dataclasses.dataclass
class Progress:
    """The best test so far, and the number of tests after it. It is stored with each checkpoint."""

    step: int = 0
    rates: Rates | list | None = None  # None if there was no test
    since: int = 0

    def better(self, step, rates):
        """Returns True if these are the best rates, by WER and then by CER; records them."""
        self.since += 1
        if self.rates is None or (rates.wer, rates.cer) < (self.rates.wer, self.rates.cer):
            self.step, self.rates, self.since = step, rates, 0
        return self.since == 0

    @classmethod
    def from_stored(cls, stored):
        return cls(**stored | {"rates": stored["rates"] and Rates(*stored["rates"])})


def digest(corpus):
    """Returns a hash that changes with the utterances of a corpus."""
    return (
        getattr(corpus, "digest", None)
        or hashlib.sha256(json.dumps([(x.name, x.text) for x in corpus.utterances]).encode()).hexdigest()
    )


class Record:
    """The checkpoints of a run with these corpora, and its `model`."""

    def __init__(self, run, train, valid):
        self.run, self.progress, self.corpus, self.model = run, Progress(), train, None
        self.losses = []  # losses of steps since the last line of metrics
        self.at = None  # the step that has been saved
        self.stored = {"utterances": digest(train), "held_out": digest(valid)}

    def open(self, config, devices, start):
        """Returns the model, new or restored. An earlier run is opened now, and a new one once all is checked."""
        if self.run.last is None:
            self.model = models.fresh(config, self.corpus)
            return self.model
        self.run.open()
        setup = self.run.setup("params", "training")
        changed = [name for name, x in self.stored.items() if setup.get(name) not in (None, x)]
        if "order" not in setup and self.corpus.corpus is None:  # a version that distinguished utterances otherwise
            changed = [name for name in changed if name != "utterances"]
        if changed and not start.change:
            kind = "training" if "utterances" in changed else "held-out"
            raise UserError(f"{start.workdir} holds a run with other {kind} utterances: --change allows that")
        self.model = Model.from_setup(setup | {"config": to_json(config)})
        (params,) = self.run.restore(params=devices.shapes(self.model.shapes))
        self.model.params = jax.tree.map(lambda x: x.addressable_data(0), params)
        self.at = self.run.last
        self.losses = setup.get("losses", [])  # a run of an earlier version has none
        if "held_out" not in changed:  # rates of other utterances say nothing about those to come
            self.progress = Progress.from_stored(setup["progress"])
        return self.model

    def setup(self, step):
        order = {"order": self.corpus.at(step)}
        return self.model.setup() | self.stored | order | {"progress": dataclasses.asdict(self.progress)}

    def best(self, devices):
        """Returns (step, parameters) of the best checkpoint."""
        folder = self.run.whole(["params"], runs.BEST_FIRST)
        (params,) = self.run.restore(folder, params=devices.shapes(self.model.shapes))
        return int(folder.name), params

    def tested(self, step, rates, params):
        """Saves parameters if they are the best so far."""
        if self.progress.better(step, rates):
            self.run.save(step, self.setup(step), best=True, params=params)

    def save(self, step, params, training, losses):
        """Saves all that the steps after this one need."""
        setup = self.setup(step) | {"losses": [float(x) for x in jax.device_get(losses)]}
        self.run.save(step, setup, params=params, training=training)
        self.at = step

    def impatient(self):
        """Returns True if the run ends because no recent test was better."""
        patience = self.model.config.run.patience
        return patience and self.progress.since >= patience
