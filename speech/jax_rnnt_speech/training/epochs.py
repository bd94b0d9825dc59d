"""Epochs of batches, shuffled by Grain.

Grain shuffles within the buckets and then the batches of all. Batch n depends on the seed and n alone, so a resumed run
sees what an uninterrupted one does.
"""

import functools

import grain

from jax_rnnt_speech.data import batches, features

TEXTS = 6  # sentences of --text for each row of a batch


def training(data, config, buckets, part, texts=None):
    """Grain's dataset of one epoch, with `repeat` one of many. What does not fill a batch waits for another epoch.

    `part`: (i, n) for every n-th row of each batch, from the i-th on. `texts`: labels and lengths, drawn anew always.
    """
    parts, (first, step) = [], part
    for bucket in buckets:

        def load(i, rng):
            x = data.corpus.load(i, rng)
            frames = data.corpus.utterances[i].frames
            return i, x, features.draw_spans(config.data, rng, frames, data.corpus.features)

        def batch(items, bucket=bucket):
            return batches.collate(data, config.data, bucket, items, bucket.batch // step)

        whole = grain.MapDataset.source(bucket.members).seed(config.run.seed).shuffle().random_map(load)
        whole = whole[: len(whole) // bucket.batch * bucket.batch]
        parts.append(whole[first::step].batch(bucket.batch // step, drop_remainder=True, batch_fn=batch))
    whole = grain.MapDataset.concatenate(parts).shuffle(seed=config.run.seed)
    more = functools.partial(with_texts, part=part, texts=texts)
    return whole.seed(config.run.seed).random_map(more) if texts else whole


def with_texts(batch, rng, part, texts):
    """The batch with sentences."""
    (first, step), size = part, len(batch["valid"])
    some = rng.integers(len(texts[0]), size=TEXTS * step * size)[first::step]
    return batch | {"texts": texts[0][some], "text_lengths": texts[1][some]}


def read(epoch, first, end):
    """Batches from number `first` to `end` of as many epochs as that takes, read by threads while devices work."""
    left = epoch.repeat(-(-end // len(epoch)))[first:end]
    return iter(left.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
