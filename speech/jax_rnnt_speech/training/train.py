"""Trains a model, saves checkpoints, and measures held-out error rates."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import shlex
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jax_rnnt_speech import models, runs
from jax_rnnt_speech.config.files import to_json
from jax_rnnt_speech.data import batches, cache, corpora
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.recognition import errors, search_options
from jax_rnnt_speech.system import UserError, hosts, outputs, programs
from jax_rnnt_speech.training import epochs, frozen_rows, objective, steps
from jax_rnnt_speech.training.parts import Parts, placed, shapes_in_place

HOPELESS = 100  # steps in a row that are not finite end the run


class Rates(NamedTuple):
    loss: float  # nats an utterance
    cer: float  # per cent
    wer: float


def held_out(model, params, data, buckets, split, search, examples=0):
    """Rates of all utterances, and (reference, hypothesis) of the first ones."""
    loss, scored, characters, words, shown = 0.0, 0, [], [], []
    for batch in batches.testing(data, model.config.data, buckets, hosts.part()):
        batch["valid"] &= ~np.isin(batch["index"], [*data.without])
        results = objective.evaluated(model, params, split(batch), search)
        value, labels, counts, index = hosts.gathered((*results, batch["index"]))
        loss += float(value)
        for i, row, count in zip(index, labels, counts):
            if i >= 0:  # its audio is readable
                scored += i not in data.without
                pair = data.corpus.utterances[i].text, model.text(row, count)
                characters.append(errors.counted(*pair))
                words.append(errors.counted(*(x.split() for x in pair)))
                shown += [pair] * (len(shown) < examples)
    if not words:
        raise UserError("no held-out utterance has readable audio")
    return Rates(loss / max(scored, 1), *(errors.summed(x).rate for x in (characters, words))), shown


@dataclasses.dataclass
class Progress:
    """The best test so far, and how many came after it. It is stored with each checkpoint."""

    step: int = 0
    rates: Rates | list | None = None  # None: there was no test
    since: int = 0

    def better(self, step, rates):
        """Whether these are the best rates, by WER and then by CER; takes note of them."""
        self.since += 1
        if self.rates is None or (rates.wer, rates.cer) < (self.rates.wer, self.rates.cer):
            self.step, self.rates, self.since = step, rates, 0
        return self.since == 0

    @classmethod
    def of(cls, stored):
        return cls(**stored | {"rates": stored["rates"] and Rates(*stored["rates"])})


def digest(corpus):
    """What tells that a corpus has other utterances."""
    return hashlib.sha256(json.dumps([(x.name, x.text) for x in corpus.utterances]).encode()).hexdigest()


class Training:
    """All that a training needs, opened and checked; `main` does it."""

    def __init__(self, config, options, searching):
        self.config, self.options = config, options
        self.run = runs.Run(options.workdir, resume=options.resume, overwrite=options.overwrite)
        self.mesh = Mesh(np.array(hosts.devices(options.platform, options.devices)), ("data",))
        programs.keep(self.run.workdir / "programs")
        folder = options.cache
        self.folder = None if folder and folder.name == "none" else folder or self.run.workdir / "cache"
        train = corpora.open_corpus(config.data.train, config, "train", self.folder)
        valid = corpora.open_corpus(config.data.valid, config, "valid", self.folder)
        more = {"implementation": options.implementation}
        self.stored, self.progress = {"utterances": digest(train), "held_out": digest(valid)}, Progress()
        if self.run.last is None:
            self.model = models.fresh(config, train, **more)
        else:
            self.run.open()
            setup = self.run.setup("params", "training")
            changed = [name for name, x in self.stored.items() if setup.get(name) not in (None, x)]
            if changed and not options.change:
                kind = "training" if "utterances" in changed else "held-out"
                raise UserError(f"{options.workdir} holds a run with other {kind} utterances: --change allows that")
            self.model = Model.from_setup(setup | {"config": to_json(config)}, **more)
            (params,) = self.run.restore(params=shapes_in_place(self.mesh, self.model.shapes))
            self.model.params = jax.tree.map(lambda x: x.addressable_data(0), params)
            if "held_out" not in changed:  # rates of other utterances say nothing about those to come
                self.progress = Progress.of(setup["progress"])
        self.parts = Parts(config, self.model.shapes)
        self.train = batches.labelled(train, self.model.tokens, self.model.subsampling)
        if self.run.last is None and not config.run.init:
            objective.standardise(self.model, self.train)
        self.valid = batches.labelled(valid, self.model.tokens, self.model.subsampling, held_out=True)
        self.buckets = batches.make_buckets(self.train, config, self.mesh.size)
        self.test_buckets = batches.make_buckets(self.valid, config, self.mesh.size)
        for name, data in (("train", self.train), ("valid", self.valid)):
            for line in data.corpus.report.lines():
                hosts.say(f"{name}: {line}")
        self.report_sizes()
        self.layers = None
        if self.parts.layers is not None and isinstance(train, cache.Stored):
            self.layers = self.parts.layers
            self.train, self.buckets = frozen_rows.cached(self.model, self.parts, self.train, self.buckets, self.folder)
        elif config.compute.bfloat16_rows:
            raise UserError("--bfloat16-rows needs a cache, which --cache none and images do without")
        texts = batches.sentences(config, self.model.tokens)
        self.epoch = epochs.training(self.train, config, self.buckets, hosts.part(), texts)
        if not len(self.epoch):
            need = self.buckets[0].batch
            raise UserError(f"{len(self.train.labels)} training utterances: a batch over all devices needs {need}")
        if count := config.run.epochs:
            self.config = config = config.replace(steps=count * len(self.epoch), epochs=0).consistent()
            hosts.say(f"{count} epochs of {len(self.epoch)} batches")
        seen = [self.run.last, sorted(self.train.labels), sorted(self.valid.labels), self.model.setup()]
        hosts.agree("options, corpora or checkpoints", seen)
        if self.run.last is None:
            self.run.open()
        if folder is None and not jax.process_index():
            cache.tidy(self.folder, (self.train.corpus, self.valid.corpus))
        self.search = self.shared(search_options.decoding_of(searching, self.model))

    def split(self, batch):
        """Arrays over all devices, of the rows that this process has."""
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        return {name: jax.make_array_from_process_local_data(rows, x) for name, x in batch.items()}

    def shared(self, tree, shard=False):
        """Arrays that every device has, or with `shard` a part of."""
        if jax.process_count() > 1:  # JAX takes no array that is bound to a local device, as restored ones are
            tree = jax.device_get(tree)
        return jax.device_put(tree, placed(self.mesh, tree, shard))

    def report_sizes(self):
        """Prints the shapes of batches, and how much padding is in them."""
        left, one = batches.padding(self.train, self.buckets)
        shapes = ", ".join(f"{b.batch} x {b.frames} frames x {b.labels} labels" for b in self.buckets)
        trained = jax.eval_shape(self.parts.free, self.model.shapes)
        hosts.say(f"{len(self.train.labels)} training and {len(self.valid.labels)} held-out utterances, "
                  f"{len(self.model.tokens.pieces)} labels, "
                  f"{sum(x.size for x in jax.tree.leaves(self.model.shapes)):,} parameters, of which "
                  f"{sum(x.size for x in trained.values()):,} are trained")  # fmt: skip
        hosts.say(f"batches: {shapes}; {left:.0%} padding, {one:.0%} with one shape")

    def used(self, state):
        """The parameters to test and to use: the moving average, if there is one. Every device has them."""
        params = self.parts.whole(state.get("average", state["weights"]), self.frozen)
        if not self.config.compute.shard:
            return params
        everywhere = jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec()), params)
        return jax.jit(lambda x: x, out_shardings=everywhere)(params)

    def measure(self, params, step, metrics=None):
        """Error rates. Without `metrics` nothing is written."""
        rates, shown = held_out(self.model, params, self.valid, self.test_buckets, self.split, self.search, examples=2)
        hosts.say(f"step {step}: held-out loss {rates.loss:.2f}, CER {rates.cer:.1f}%, WER {rates.wer:.1f}%")
        for reference, hypothesis in shown:
            hosts.say(f"  {reference}\n  {hypothesis}")
        if metrics:
            metrics.write(step, valid_loss=rates.loss, valid_cer=rates.cer, valid_wer=rates.wer)
        return rates

    def start(self, first):
        """The state of step `first`, and the jitted step."""
        config = self.config
        params = self.shared(self.model.params, config.compute.shard)
        del self.model.params  # from now on they are in the state
        weights, self.frozen = self.parts.free(params), self.parts.frozen(params)
        optimizer = steps.make_optimizer(config.optimiser, config.run.steps, self.parts.factors)
        make = functools.partial(steps.first_state, config.optimiser, optimizer)
        state = shapes_in_place(self.mesh, jax.eval_shape(make, weights), config.compute.shard)
        places = jax.tree.map(lambda x: x.sharding, state)
        if first:
            (training,) = self.run.restore(training=self.training_only(state))
            state = training | {"average" if config.optimiser.average else "weights": weights}
        else:
            state = jax.jit(make, out_shardings=places)(weights)
        step = steps.make_train_step(self.model, self.parts, optimizer, self.layers, places)
        return state, programs.announced("a step of training", place=1)(step)

    def training_only(self, state):
        """What a checkpoint stores of the state beside the parameters that are used."""
        return {
            name: x for name, x in state.items() if name != ("average" if self.config.optimiser.average else "weights")
        }

    def test(self, params, step, metrics):
        """Tests the weights, and saves them if they are the best so far."""
        if self.progress.better(step, self.measure(params, step, metrics)):
            self.run.save(step, self.setup(), best=True, params=params)

    def setup(self):
        return self.model.setup() | self.stored | {"progress": dataclasses.asdict(self.progress)}

    def save(self, state, step, params):
        """Saves all that the steps after this one need."""
        self.run.save(step, self.setup(), params=params, training=self.training_only(state))

    def impatient(self):
        """Whether the run ends because no test of late was better."""
        return self.config.run.patience and self.progress.since >= self.config.run.patience

    def main(self):
        """Trains; returns the best rates. A run that has ended is tested, and nothing is written."""
        config, first = self.config, self.run.last or 0
        with contextlib.closing(self.run):
            if config.run.steps <= first or self.impatient():
                shapes = shapes_in_place(self.mesh, self.model.shapes)
                folder = self.run.whole(["params"], runs.BEST_FIRST)
                (params,) = self.run.restore(folder, params=shapes)
                return self.measure(params, int(folder.name))
            state, step_of = self.start(first)
            self.write_left_out()
            try:
                with (
                    contextlib.closing(runs.Metrics(self.run.workdir, first, self.options.hook)) as metrics,
                    runs.interruptions() as interrupted,
                ):
                    self.steps(state, first, step_of, metrics, interrupted)
            finally:
                self.write_left_out()  # with files that broke on the way
        hosts.say(f"{len(step_of.shapes)} programs for {len(self.buckets)} shapes of batches; best test: step "
                  f"{self.progress.step}")  # fmt: skip
        return self.progress.rates

    def write_left_out(self):
        """Names of what is left out, which are no part of the state either."""
        for name, data in (("train", self.train), ("valid", self.valid)):
            path = self.run.workdir / runs.LEFT_OUT.format(f"{name}{jax.process_index() or ''}")
            try:
                with outputs.whole(path) as part:
                    data.corpus.report.write(part)
            except UserError as error:
                tqdm.write(f"{error}", file=sys.stderr)

    def steps(self, state, first, step_of, metrics, interrupted):
        config, options, losses = self.config, self.options, []
        wait = self.mesh.devices.flat[0].platform == "cpu"
        started, quick = time.perf_counter(), 0.2 if sys.stderr.isatty() else 20
        alone = {"disable": bool(jax.process_index())}
        with tqdm(total=config.run.steps, initial=first, unit="step", mininterval=quick, **alone) as bar:
            for step, batch in enumerate(epochs.read(self.epoch, first, config.run.steps), first + 1):
                batch.pop("index")
                state, numbers = step_of(state, self.split(batch), self.frozen, step)
                losses.append(numbers["loss"])
                if wait:  # with several steps in flight, XLA's all-reduce between CPU devices can deadlock
                    jax.block_until_ready(numbers)
                bar.update()
                last, stopped = step == config.run.steps, bool(interrupted)
                if step % config.run.log_every == 0 or last or stopped:
                    numbers = jax.device_get(numbers)
                    mean = float(np.mean(jax.device_get(losses)))
                    skipped, row = (int(numbers[name]) for name in ("skipped", "row"))
                    seconds = (time.perf_counter() - started) / len(losses)
                    metrics.write(step, loss=mean, norm=numbers["norm"], skipped=skipped, seconds=seconds)
                    bar.set_postfix(loss=f"{mean:.3f}", skipped=skipped, refresh=False)
                    losses, started = [], time.perf_counter()
                    self.run.check()
                    if row >= HOPELESS:
                        raise UserError(f"step {step}: the last {row} were not finite; try a lower --learning-rate")
                tested = step % (config.run.valid_every or config.run.save_every) == 0 or last
                saved = step % config.run.save_every == 0 or last or stopped
                params = self.used(state) if tested or saved else None
                if tested:
                    self.test(params, step, metrics)
                if saved or (tested and self.impatient()):
                    self.save(state, step, params)
                del params  # of no use to the next step, which takes the memory of the state
                if tested:
                    started = time.perf_counter()
                    if self.impatient():
                        hosts.say(f"step {step}: the last {config.run.patience} tests were not better: the run ends")
                        return
                if stopped and not last:
                    command = f"rnnt-speech train --workdir {shlex.quote(str(options.workdir))} --resume"
                    raise KeyboardInterrupt(f"interrupted; step {step} is saved: {command} goes on")
