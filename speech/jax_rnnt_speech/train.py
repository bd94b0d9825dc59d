"""Trains a model, saves checkpoints, and measures held-out error rates."""

import contextlib
import functools
import hashlib
import json
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jax_rnnt_speech import batches, devices, evaluate, hosts, ngrams, pretrained, runs
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.corpora import open_corpus
from jax_rnnt_speech.recogniser import Recogniser

HOPELESS = 100  # steps in a row that are not finite end the run


def make_optimizer(config):
    """AdamW after warm-up, clipping and accumulation. A step that is not finite changes nothing and is counted."""
    updates = max(1, config.steps // config.accumulate)
    warmup = 1 + int(config.warmup * updates)
    schedule = optax.warmup_cosine_decay_schedule(0, config.learning_rate, warmup, max(updates, warmup) + 1)
    adam = optax.adamw(schedule, b2=0.98, weight_decay=config.decay)
    optimizer = optax.chain(optax.clip_by_global_norm(config.clip), adam) if config.clip else adam
    if config.accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, config.accumulate).gradient_transformation()
    return optax.apply_if_finite(optimizer, max_consecutive_errors=2**30)


def make_train_step(recogniser, optimizer, device):
    """Returns a jitted (state, batch, step) -> (state, numbers)."""

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch, step):
        params, opt_state = state
        loss = functools.partial(recogniser.mean_loss, batch=batch, step=step, device=device)
        value, gradient = jax.value_and_grad(loss)(params)
        norm = optax.tree_utils.tree_norm(gradient)
        gradient = jax.tree.map(lambda x: jnp.where(jnp.isfinite(value), x, jnp.nan), gradient)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        numbers = {"loss": value, "norm": norm, "skipped": opt_state.total_notfinite}
        return (optax.apply_updates(params, updates), opt_state), numbers | {"row": opt_state.notfinite_count}

    return train_step


class Training:
    """All that a training needs, opened and checked; `run` does it."""

    def __init__(self, config, options):
        self.config, self.options = config, options
        self.run = runs.Run(options.workdir, resume=options.resume, overwrite=options.overwrite)
        self.mesh = Mesh(np.array(devices.select(options.platform, options.devices)), ("data",))
        train = open_corpus(config.train, config, "train")
        valid = open_corpus(config.valid or config.train, config, "valid")
        more = {"implementation": options.implementation}
        texts = json.dumps([(x.name, x.text) for x in train.utterances]).encode()
        self.stored = {"utterances": hashlib.sha256(texts).hexdigest()}
        if self.run.last is None:
            self.recogniser = pretrained.fresh(config, train, **more)
        else:
            self.run.open()
            setup = self.run.setup()
            if config.steps and not options.change and setup.get("utterances") not in (None, *self.stored.values()):
                raise UserError(f"{options.workdir} holds a run with other training utterances: --change allows that")
            self.recogniser = Recogniser.from_setup(setup | {"config": vars(config)}, **more)
        self.train = batches.labelled(train, self.recogniser.tokens, self.recogniser.subsampling)
        if self.run.last is None and not config.init:
            self.recogniser.measure(self.train)
        self.valid = batches.labelled(valid, self.recogniser.tokens, self.recogniser.subsampling)
        self.buckets = batches.make_buckets(self.train, config, self.mesh.size)
        self.test_buckets = batches.make_buckets(self.valid, config, self.mesh.size)
        for name, data in (("train", self.train), ("valid", self.valid)):
            for line in data.corpus.report.lines():
                print(f"{name}: {line}")
        self.report_sizes()
        self.epoch = batches.training(self.train, config, self.buckets, hosts.part())
        if config.steps and not len(self.epoch):
            need = self.buckets[0].batch
            raise UserError(f"{len(self.train.labels)} training utterances: a batch over all devices needs {need}")
        seen = [self.run.last, sorted(self.train.labels), self.recogniser.setup()]
        hosts.agree("options, corpora or checkpoints", seen)
        if self.run.last is None:
            self.run.open()
        self.search = self.shared(ngrams.search_of(options, self.recogniser))
        self.pictures = evaluate.Pictures(self.recogniser, self.valid, self.test_buckets, self.run.workdir)

    def split(self, batch):
        """Arrays over all devices, of the rows that this process has."""
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        return {name: jax.make_array_from_process_local_data(rows, x) for name, x in batch.items()}

    def shared(self, tree):
        """Arrays that every device has."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def report_sizes(self):
        """Prints the shapes of batches, and how much padding is in them."""
        left, one = batches.padding(self.train, self.buckets)
        shapes = ", ".join(f"{b.batch} x {b.frames} frames x {b.labels} labels" for b in self.buckets)
        print(f"{len(self.train.labels)} training and {len(self.valid.labels)} held-out utterances, "
              f"{len(self.recogniser.tokens.pieces)} labels, "
              f"{sum(x.size for x in jax.tree.leaves(self.recogniser.params)):,} parameters")  # fmt: skip
        print(f"batches: {shapes}; {left:.0%} padding, {one:.0%} with one shape")

    def measure(self, state, step, metrics=None):
        """Error rates. Without `metrics` nothing is written."""
        rates, shown = evaluate.rates(
            self.recogniser, state[0], self.valid, self.test_buckets, self.split, self.search, examples=2
        )
        tqdm.write(f"step {step}: held-out loss {rates.loss:.2f}, CER {rates.cer:.1f}%, WER {rates.wer:.1f}%")
        for reference, hypothesis in shown:
            tqdm.write(f"  {reference}\n  {hypothesis}")
        if metrics:
            metrics.write(step, valid_loss=rates.loss, valid_cer=rates.cer, valid_wer=rates.wer)
        if metrics and not jax.process_index():
            self.pictures.draw(jax.device_get(state[0]), step)
        return rates

    def stream(self, first):
        """Batches from step `first` on, read by threads while devices work."""
        batches_left = self.epoch.repeat(-(-self.config.steps // len(self.epoch)))[first : self.config.steps]
        return iter(batches_left.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))

    def main(self):
        """Trains; returns the rates of the end. A run that has all its steps is evaluated, and nothing is written."""
        config, params, first = self.config, self.shared(self.recogniser.params), self.run.last or 0
        with contextlib.closing(self.run):
            if config.steps <= first:
                return self.measure(self.run.restore(params=params), first)
            optimizer = make_optimizer(config)
            state = params, self.shared(optimizer.init(params))
            if first:
                state = tuple(self.run.restore(params=state[0], optimizer=state[1]))
            step_of = make_train_step(self.recogniser, optimizer, self.train.corpus.device)
            with contextlib.closing(runs.Metrics(self.run.workdir, first)) as metrics:
                rates = self.steps(state, first, step_of, metrics)
        print(f"{step_of._cache_size()} programs for {len(self.buckets)} shapes of batches")
        for name, data in (("train", self.train), ("valid", self.valid)):
            data.corpus.report.write(self.run.workdir / f"left-out-{name}{jax.process_index() or ''}.tsv")
        return rates

    def steps(self, state, first, step_of, metrics):
        config, options, losses, rates = self.config, self.options, [], None
        wait = self.mesh.devices.flat[0].platform == "cpu"
        started, quick = time.perf_counter(), 0.2 if sys.stderr.isatty() else 20
        alone = {"disable": bool(jax.process_index())}
        with tqdm(total=config.steps, initial=first, unit="step", mininterval=quick, **alone) as bar:
            for step, batch in enumerate(self.stream(first), first + 1):
                batch.pop("index")
                state, numbers = step_of(state, self.split(batch), step)
                losses.append(numbers["loss"])
                if wait:  # with several steps in flight, XLA's all-reduce between CPU devices can deadlock
                    jax.block_until_ready(numbers)
                bar.update()
                if step % options.log_every == 0 or step == config.steps:
                    numbers = jax.device_get(numbers)
                    mean = float(np.mean(jax.device_get(losses)))
                    skipped, row = (int(numbers[name]) for name in ("skipped", "row"))
                    seconds = (time.perf_counter() - started) / len(losses)
                    metrics.write(step, loss=mean, norm=numbers["norm"], skipped=skipped, seconds=seconds)
                    bar.set_postfix(loss=f"{mean:.3f}", skipped=skipped, refresh=False)
                    losses, started = [], time.perf_counter()
                    if row >= HOPELESS:
                        raise UserError(f"step {step}: the last {row} were not finite; try a lower --learning-rate")
                if step % options.save_every == 0 or step == config.steps:
                    self.run.save(step, self.recogniser.setup() | self.stored, params=state[0], optimizer=state[1])
                    rates = self.measure(state, step, metrics)
                    started = time.perf_counter()
        return rates
