"""Opens all that a training needs, and checks it, before anything of an earlier run is set aside."""

import functools
import sys
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jax_rnnt_speech import runs
from jax_rnnt_speech.data import batches, cache, corpora, sources
from jax_rnnt_speech.data.on_the_fly import OnTheFly
from jax_rnnt_speech.recognition import search_options
from jax_rnnt_speech.system import UserError, hosts, programs, refuse_if
from jax_rnnt_speech.training import epochs, frozen_rows, objective
from jax_rnnt_speech.training.devices import Devices
from jax_rnnt_speech.training.evaluation import Evaluation
from jax_rnnt_speech.training.parts import Parts
from jax_rnnt_speech.training.record import Record
from jax_rnnt_speech.training.train import Training


class Side(NamedTuple):
    """The labelled utterances of --train or --valid, in buckets."""

    data: batches.Labelled
    buckets: list

    @classmethod
    def of(cls, corpus, model, devices, held_out=False):
        data = batches.labelled(corpus, model.tokens, model.subsampling, held_out=held_out)
        return cls(data, batches.make_buckets(data, model.config, devices.mesh.size))


def report(model, parts, train, valid):
    """Prints what is left out, the shapes of batches, and how much padding is in them."""
    for name, side in (("train", train), ("valid", valid)):
        for line in side.data.corpus.report.lines():
            hosts.say(f"{name}: {line}")
    trained = jax.eval_shape(parts.free, model.shapes)
    several = f"{len(train.data.labels)} training and " if train.buckets else ""
    hosts.say(f"{several}{len(valid.data.labels)} held-out utterances, "
              f"{len(model.tokens.pieces)} labels, "
              f"{sum(x.size for x in jax.tree.leaves(model.shapes)):,} parameters, of which "
              f"{sum(x.size for x in trained.values()):,} are trained")  # fmt: skip
    if train.buckets:
        left, one = batches.padding(*train)
        shapes = ", ".join(f"{b.batch} x {b.frames} frames x {b.labels} labels" for b in train.buckets)
        hosts.say(f"batches: {shapes}; {left:.0%} padding, {one:.0%} with one shape")


def warn(*lines):
    """Prints lines that are not empty on the standard error, in the first process."""
    for line in filter(None, lines):
        if not jax.process_index():
            tqdm.write(line, file=sys.stderr)


def training_corpus(config, start, run, folder):
    """What --train names, in memory or on the fly."""
    if not config.data.on_the_fly:
        return corpora.open_corpus(config.data.train, config, "train", folder)
    folder = folder if start.cache and folder else run.workdir / "index"
    order = None if run.last is None else run.setup("params", "training", quiet=True).get("order")
    return OnTheFly(config, folder, start.workers, order, run.last or 0)


def prepared(config, start, searching, lines=()):
    """A Training by its configuration, a `Start` and a `Searching`; before data are read, these lines are printed."""
    run = runs.Run(start.workdir, resume=start.resume, overwrite=start.overwrite)
    devices = Devices(Mesh(np.array(hosts.devices(start.platform, start.devices)), ("data",)))
    programs.keep(run.workdir / "programs")
    folder = None if start.cache and start.cache.name == "none" else start.cache or run.workdir / "cache"
    refuse_if(start.workers and not config.data.on_the_fly, "--workers needs --on-the-fly")
    warn(*lines)
    known = [training_corpus(config, start, run, folder)]
    known += [corpora.open_corpus(config.data.valid, config, "valid", folder)]
    if both := sources.in_both(*known):
        warn(f"train is tested on {both} utterances that are also in --train: their rates are those of the training")
    record = Record(run, *known)
    model = record.open(config, devices, start)
    fly, parts = config.data.on_the_fly, Parts(config, model.shapes)
    if fly:
        train = Side(batches.labelled(known[0], model.tokens, model.subsampling), [])
    else:
        train = Side.of(known[0], model, devices)
    if run.last is None and not config.run.init:
        some = train.data
        if fly:  # of the first reader, whichever process has it
            some = some._replace(labels={i: x for i, x in some.labels.items() if not known[0].places[i][0]})
        objective.standardise(model, some)
        if fly:
            first = hosts.each([model.mean.tolist(), model.deviation.tolist()])[0]
            model.mean, model.deviation = np.array(first, np.float32)
    valid = Side.of(known[1], model, devices, held_out=True)
    report(model, parts, train, valid)
    layers = parts.layers if isinstance(known[0], cache.Stored) else None
    if layers is not None:
        train = Side(*frozen_rows.cached(model, parts, *train, folder))
    elif config.compute.bfloat16_rows:
        raise UserError("--bfloat16-rows needs a cache, which --cache none and images do without")
    texts = batches.sentences(config, model.tokens)
    if fly:
        shapes = known[0].opened(model, devices.mesh.size).order.shapes
        then = functools.partial(epochs.with_texts, part=hosts.part(), texts=texts) if texts else None
        read, steps = functools.partial(known[0].read, then=then), known[0].steps
    else:
        epoch, shapes = epochs.training(train.data, config, train.buckets, hosts.part(), texts), train.buckets
        if not len(epoch):
            need = train.buckets[0].batch
            raise UserError(f"{len(train.data.labels)} training utterances: a batch over all devices needs {need}")
        read, steps = functools.partial(epochs.read, epoch), lambda count: count * len(epoch)
    until = None
    if count := config.run.epochs:
        config, about = config.replace(steps=steps(count), epochs=0).consistent(), ""
        if fly:  # the number of steps may be an estimate, which the learning rate follows
            read, until = functools.partial(read, until=count), count
            about = "about " * bool(known[0].order.window)
        hosts.say(f"{count} epochs of {about}{steps(1):,} batches")
    ended = known[0].place[1] >= until if until else config.run.steps <= (run.last or 0)
    seen = [
        run.last,
        sorted(train.data.labels) if not fly else known[0].digest,
        sorted(valid.data.labels),
        model.setup(),
    ]
    hosts.agree("options, corpora or checkpoints", seen)
    if run.last is None:
        run.open()
    if start.cache is None and not jax.process_index():
        cache.tidy(folder, (train.data.corpus, valid.data.corpus))
    decoding = devices.put(search_options.decoding_of(searching, model))
    return Training(
        config, model, parts, layers, devices, read, ended, len(shapes), record,
        Evaluation(model, *valid, devices.split, decoding),
        {"train": train.data.corpus.report, "valid": valid.data.corpus.report}, start.hook,
    )  # fmt: skip
