"""Rows of the frozen lower part of an encoder, which a cache holds in the place of features."""

import dataclasses
import hashlib

import jax
import numpy as np

from jax_rnnt_speech.data import batches
from jax_rnnt_speech.data.cache import Stored


def cached(model, parts, data, buckets, folder):
    """(data, buckets) with rows of the frozen lower part of the encoder in the place of features."""
    corpus, layers = data.corpus, parts.layers
    weights = hashlib.sha256()
    for path, x in sorted(parts.frozen(model.params).items()):
        weights.update(path.encode() + np.ascontiguousarray(jax.device_get(x)).tobytes())
    extractor = dataclasses.asdict(model.extractor)
    standard = model.mean.tolist(), model.deviation.tolist()
    config, lower = model.config, model
    if config.compute.bfloat16_rows:
        config = config.replace(dtype="bfloat16")
        lower = type(model)(config, model.tokens, *standard, model.source)
    key = [corpus.key, weights.hexdigest(), layers, config.compute.dtype, extractor, standard]
    key += [[x.frames, x.members] for x in buckets]

    def made():
        for batch in batches.testing(data, config.data, buckets, (0, 1)):
            rows = lower.lower(model.params, batch, layers)
            for i, x, count in zip(batch["index"], *jax.device_get(rows)):
                if i >= 0:
                    yield i, x[:count]

    stored = Stored(corpus, folder, key, model.width, made())
    counts = stored.index[:, 1]
    stored.utterances = [x._replace(frames=int(n)) for x, n in zip(corpus.utterances, counts)]
    buckets = [x._replace(frames=max(1, int(counts[x.members].max()))) for x in buckets]
    return data._replace(corpus=stored), buckets
