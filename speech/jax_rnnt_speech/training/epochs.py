"""Epochs of batches, shuffled by Grain.

Grain shuffles within the buckets and then the batches of all. Batch n depends on the seed and n alone, so a resumed run
sees what an uninterrupted one does.
"""

import grain

from jax_rnnt_speech.data import batches, features

TEXTS = 6  # sentences of --text for each row of a batch


def mixed(members, corpus, config):
    """Grain's dataset of utterances, shuffled; those of --synthetic are drawn for their share of all."""
    parts = [[i for i in members if (i in corpus.further) == further] for further in (False, True)]
    parts = [grain.MapDataset.source(x).seed(config.seed).shuffle() for x in parts if x]
    if len(parts) == 1:
        return parts[0]
    share = config.synthetic_share
    return grain.MapDataset.mix([parts[0], parts[1].repeat()], [1 - share, share]).seed(config.seed)


def training(data, config, buckets, part, texts=None):
    """Grain's dataset of one epoch, with `repeat` one of many. What does not fill a batch waits for another epoch.

    `part`: (i, n) for every n-th row of each batch, from the i-th on. `texts`: labels and lengths, drawn anew always.
    """

    def with_texts(batch, rng):
        drawn = rng.integers(len(texts[0]), size=TEXTS * step * len(batch["valid"]))[first::step]
        return batch | {"texts": texts[0][drawn], "text_lengths": texts[1][drawn]}

    parts, (first, step) = [], part
    for bucket in buckets:

        def load(i, rng):
            x = data.corpus.load(i, rng)
            frames = data.corpus.utterances[i].frames
            return i, x, features.draw_spans(config, rng, frames, data.corpus.features)

        def batch(items, bucket=bucket):
            return batches.collate(data, config, bucket, items, bucket.batch // step)

        whole = mixed(bucket.members, data.corpus, config).random_map(load)
        whole = whole[: len(whole) // bucket.batch * bucket.batch]
        parts.append(whole[first::step].batch(bucket.batch // step, drop_remainder=True, batch_fn=batch))
    whole = grain.MapDataset.concatenate(parts).shuffle(seed=config.seed)
    return whole.seed(config.seed).random_map(with_texts) if texts else whole


def read(epoch, first, end):
    """Batches from number `first` to `end` of as many epochs as that takes, read by threads while devices work."""
    left = epoch.repeat(-(-end // len(epoch)))[first:end]
    return iter(left.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
