"""Opens and checks all that a training needs, before anything of an earlier run is set aside."""

import functools
import sys

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jax_rnnt_speech import models, runs
from jax_rnnt_speech.data import batches, cache, corpora, memory, sources
from jax_rnnt_speech.data.source import EARLIER, Source
from jax_rnnt_speech.recognition import search_options
from jax_rnnt_speech.system import UserError, hosts, programs, refuse_if
from jax_rnnt_speech.training import frozen_rows, objective
from jax_rnnt_speech.training.devices import Devices
from jax_rnnt_speech.training.evaluation import Evaluation
from jax_rnnt_speech.training.parts import Parts
from jax_rnnt_speech.training.record import Record
from jax_rnnt_speech.training.train import Training


def report(model, parts, train, valid):
    """Prints which utterances are left out, and the sizes of the corpora and of the model."""
    for name, data in (("train", train), ("valid", valid)):
        for line in data.corpus.report.lines():
            hosts.say(f"{name}: {line}")
    trained = jax.eval_shape(parts.free, model.shapes)
    hosts.say(f"{len(valid.labels)} held-out utterances, "
              f"{len(model.tokens.pieces)} labels, "
              f"{sum(x.size for x in jax.tree.leaves(model.shapes)):,} parameters, of which "
              f"{sum(x.size for x in trained.values()):,} are trained")  # fmt: skip


def warn(*lines):
    """Prints lines that are not empty on the standard error, in the first process."""
    for line in filter(None, lines):
        if not jax.process_index():
            tqdm.write(line, file=sys.stderr)


def opened_source(config, start, run, index, folder):
    """Returns the Source of --train. `index` and `folder` are for the index and for features, or None."""
    corpus = corpora.made_by(config.data.train, config, "train")
    refuse_if(start.workers and corpus is not None, "--workers: a corpus that a function makes is read by one process")
    state = None if run.last is None else run.setup("params", "training", quiet=True).get("order", EARLIER)
    kept = None if config.data.on_the_fly or corpus is not None else folder
    return Source(config, index, start.workers, state, run.last or 0, kept, corpus)


def standardise(model, train):
    """Gives a new model the statistics of utterances of the first reader, in whichever process it is."""
    some = {i: x for i, x in train.labels.items() if not train.corpus.places[i][0]}
    objective.standardise(model, train._replace(labels=some))
    first = hosts.each([model.mean.tolist(), model.deviation.tolist()])[0]
    model.mean, model.deviation = np.array(first, np.float32)


def counted(config, source):
    """Returns (the configuration with the steps of --epochs, the epoch at which the run ends, or None)."""
    if not (count := config.run.epochs):
        return config, None
    about = "about " * bool(source.order.window)  # the learning rate follows an estimate then
    now = source.first[1]
    hosts.say(f"{count} epochs of {about}{source.order.steps(now, now + 1):,} batches")
    return config.replace(steps=source.steps(count), epochs=0).consistent(), count


def prepared(config, start, searching, lines=()):
    """Returns a Training by its configuration, a `Start` and a `Searching`; prints these lines before it reads data."""
    run = runs.Run(start.workdir, resume=start.resume, overwrite=start.overwrite)
    devices = Devices(Mesh(np.array(hosts.devices(start.platform, start.devices)), ("data",)))
    programs.keep(run.workdir / "programs")
    folder = None if start.cache and start.cache.name == "none" else start.cache or run.workdir / "cache"
    warn(*lines)
    index = start.cache if start.cache and folder else run.workdir / "index"
    source = opened_source(config, start, run, index, folder)
    held_out = memory.held_out(config, index, folder, start.workers)
    if both := sources.in_both(source, held_out):
        warn(f"train is tested on {both} utterances that are also in --train: their rates are those of the training")
    record = Record(run, source, held_out)
    model = record.open(config, devices, start)
    parts = Parts(config, model.shapes)
    train = batches.labelled(source, model.tokens, model.subsampling)
    if run.last is None and models.hears_anew(config):
        standardise(model, train)
    valid = batches.labelled(held_out, model.tokens, model.subsampling, held_out=True)
    report(model, parts, train, valid)
    source.opened(model, devices.mesh.size).say()
    layers = parts.layers if source.remembers else None
    if layers is not None:
        frozen_rows.remember(model, parts, source, folder)
    elif config.compute.bfloat16_rows:
        raise UserError("--bfloat16-rows needs a cache, which --cache none, --on-the-fly and images do without")
    texts = batches.sentences(config, model.tokens)
    then = functools.partial(batches.with_texts, part=hosts.part(), texts=texts) if texts else None
    config, until = counted(config, source)
    ended = source.place[1] >= until if until else config.run.steps <= (run.last or 0)
    if source.anew and not ended:
        hosts.say(source.anew)
    seen = [run.last, source.digest, sorted(valid.labels), model.setup()]
    hosts.agree("options, corpora or checkpoints", seen)
    if run.last is None:
        run.open()
    folders = {*source.folders, *(held_out.remembered.folders if isinstance(held_out, memory.HeldOut) else ())}
    if start.cache is None and not jax.process_index():
        cache.tidy(folder, folders)
    decoding = devices.put(search_options.decoding_of(searching, model))
    buckets = batches.make_buckets(valid, model.config, devices.mesh.size)
    return Training(
        config, model, parts, layers, devices, functools.partial(source.read, then=then, until=until), ended,
        len(source.order.shapes), source.usual, record,
        Evaluation(model, valid, buckets, devices.split, decoding),
        {"train": source.report, "valid": held_out.report}, start.hook,
    )  # fmt: skip
