"""Rows of the frozen lower part of an encoder, which a source may keep in place of features."""

import collections
import dataclasses
import hashlib

import jax
import numpy as np

from jax_rnnt_speech.data import batches, cache


def lower_of(model, parts):
    """Returns (the model that computes rows, everything of it that determines them)."""
    config, standard, weights = model.config, (model.mean.tolist(), model.deviation.tolist()), hashlib.sha256()
    for path, x in sorted(parts.frozen(model.params).items()):
        weights.update(path.encode() + np.ascontiguousarray(jax.device_get(x)).tobytes())
    if config.compute.bfloat16_rows:
        config = config.replace(dtype="bfloat16")
        model = type(model)(config, model.tokens, *standard, model.source)
    extractor = dataclasses.asdict(model.extractor)
    return model, [weights.hexdigest(), parts.layers, config.compute.dtype, extractor, standard]


def remember(model, parts, source, folder):
    """Makes an opened source give rows after the frozen layers. They are computed once and kept in a folder.

    The head stacks rows after all layers, so these are more than the model has in the end.
    """
    lower, decided = lower_of(model, parts)
    encoder = model.network(model.params).encoder
    shapes = source.loads.shapes
    for index in source.indices:
        arrays, count = index.arrays, len(index.arrays.index)
        key = [arrays.folder.name, decided, [[x.frames, x.rows] for x in shapes]]

        def expected(arrays=arrays):
            return arrays.index[:, 1].sum() / encoder.subsampling

        def made(index=index):
            yield from rows_of(lower, model.params, parts.layers, index, source)

        def name_of(number, index=index):
            return index.utterances[int(np.searchsorted(index.places, number // index.frames.shape[1]))].name

        index.arrays = cache.stored(folder, key, count, model.width, source.report, expected, made, name_of)
        index.folders.append(index.arrays.folder.name)
    shapes = [x._replace(frames=int(encoder.lengths(x.frames))) for x in shapes]
    source.loads = source.loader(model, shapes)
    source.loads.features, source.loads.subsampling = model.width, model.subsampling // encoder.subsampling


def rows_of(model, params, layers, index, source):
    """Yields (number, rows) of all versions of the utterances of an index, computed in batches of a shape."""
    data = batches.Labelled(source, collections.defaultdict(lambda: np.zeros(0, np.int32)))
    items, versions = np.nonzero(index.frames)
    buckets = source.order.bucket(index.frames[items, versions] * index.hop)
    for k, shape in enumerate(source.order.shapes):
        some = np.flatnonzero(buckets == k)
        for part in (some[i : i + shape.rows] for i in range(0, len(some), shape.rows)):
            numbers = index.places[items[part]] * index.frames.shape[1] + versions[part]
            batch = batches.collate(
                data, model.config, shape, [(i, index.arrays.load(i), 0) for i in numbers], shape.rows
            )
            for i, x, count in zip(numbers, *jax.device_get(model.lower(params, batch, layers))):
                yield i, x[:count]
