"""Opens all that a training needs, and checks it, before anything of an earlier run is set aside."""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_rnnt_speech import runs
from jax_rnnt_speech.data import batches, cache, corpora
from jax_rnnt_speech.recognition import search_options
from jax_rnnt_speech.system import UserError, hosts, programs
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
    left, one = batches.padding(*train)
    shapes = ", ".join(f"{b.batch} x {b.frames} frames x {b.labels} labels" for b in train.buckets)
    trained = jax.eval_shape(parts.free, model.shapes)
    hosts.say(f"{len(train.data.labels)} training and {len(valid.data.labels)} held-out utterances, "
              f"{len(model.tokens.pieces)} labels, "
              f"{sum(x.size for x in jax.tree.leaves(model.shapes)):,} parameters, of which "
              f"{sum(x.size for x in trained.values()):,} are trained")  # fmt: skip
    hosts.say(f"batches: {shapes}; {left:.0%} padding, {one:.0%} with one shape")


def prepared(config, start, searching):
    """A Training by its configuration, a `Start` and a `Searching`."""
    run = runs.Run(start.workdir, resume=start.resume, overwrite=start.overwrite)
    devices = Devices(Mesh(np.array(hosts.devices(start.platform, start.devices)), ("data",)))
    programs.keep(run.workdir / "programs")
    folder = None if start.cache and start.cache.name == "none" else start.cache or run.workdir / "cache"
    known = [corpora.open_corpus(config.data.train, config, "train", folder)]
    known += [corpora.open_corpus(config.data.valid, config, "valid", folder)]
    record = Record(run, *known)
    model = record.open(config, devices, start)
    parts, train = Parts(config, model.shapes), Side.of(known[0], model, devices)
    if run.last is None and not config.run.init:
        objective.standardise(model, train.data)
    valid = Side.of(known[1], model, devices, held_out=True)
    report(model, parts, train, valid)
    layers = parts.layers if isinstance(known[0], cache.Stored) else None
    if layers is not None:
        train = Side(*frozen_rows.cached(model, parts, *train, folder))
    elif config.compute.bfloat16_rows:
        raise UserError("--bfloat16-rows needs a cache, which --cache none and images do without")
    texts = batches.sentences(config, model.tokens)
    epoch = epochs.training(train.data, config, train.buckets, hosts.part(), texts)
    if not len(epoch):
        need = train.buckets[0].batch
        raise UserError(f"{len(train.data.labels)} training utterances: a batch over all devices needs {need}")
    if count := config.run.epochs:
        config = config.replace(steps=count * len(epoch), epochs=0).consistent()
        hosts.say(f"{count} epochs of {len(epoch)} batches")
    seen = [run.last, sorted(train.data.labels), sorted(valid.data.labels), model.setup()]
    hosts.agree("options, corpora or checkpoints", seen)
    if run.last is None:
        run.open()
    if start.cache is None and not jax.process_index():
        cache.tidy(folder, (train.data.corpus, valid.data.corpus))
    decoding = devices.put(search_options.decoding_of(searching, model))
    return Training(
        config, model, parts, layers, devices, epoch, len(train.buckets), record,
        Evaluation(model, *valid, devices.split, decoding),
        {"train": train.data.corpus.report, "valid": valid.data.corpus.report}, start.hook,
    )  # fmt: skip
