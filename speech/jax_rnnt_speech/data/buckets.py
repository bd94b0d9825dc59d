"""Chooses the lengths and sizes of batches: few shapes, so that XLA compiles few programs, and little padding.

Utterances up to a length, and longer than the bucket before allows, form a bucket. Its batches are as long as its
longest utterance, and batches of all buckets have about as many seconds.
"""

import numpy as np

PADDING = 0.1  # share of the seconds of batches, at which more buckets are not worth their programs
SECONDS = 24  # seconds of audio whose activations one device of a CPU has in memory at a time
AROUND = 0.25  # share by which batches of a bucket may be smaller or larger, so that the last one of an epoch is full


def cuts(seconds, counts, most):
    """Yields the ends of one bucket, two, ... and up to `most`, with the least padding.

    Parameters
    ----------
    seconds
        Lengths [N] that rise.
    counts
        Utterances [N] of each length.

    Yields
    ------
    places
        Places in `seconds` of the longest utterance of each bucket.
    """
    before, size = np.concatenate([[0], np.cumsum(counts)]), len(seconds)
    total, begins = np.where(np.arange(size + 1), np.inf, 0), []
    for _ in range(min(most, size)):
        cost = total[:, None] + (before[1:] - before[:, None]) * seconds  # cost of buckets [begin, end]
        cost[np.tri(size + 1, size, -1, dtype=bool)] = np.inf  # they end before they begin
        total = np.concatenate([[np.inf], cost.min(0)])
        begins.append(cost.argmin(0))
        places, end = [], size - 1
        for begin in reversed(begins):
            places.append(end)
            end = begin[end] - 1
        yield np.array(places[::-1])


def fewest(seconds, counts, most):
    """Returns the longest utterances of each bucket, of the fewest buckets that leave PADDING, or of the `most`."""
    for places in cuts(seconds, counts, most):
        ends = seconds[places]
        if (seconds * counts).sum() >= (1 - PADDING) * (ends * np.diff(np.cumsum(counts)[places], prepend=0)).sum():
            break
    return ends


def turns_of(rows, seconds, limit=SECONDS):
    """Returns the number of equal parts in which rows of so many seconds have at most `limit`, or one row each."""
    return next(n for n in range(1, rows + 1) if rows % n == 0 and (rows // n * seconds <= limit or n == rows))


def rows_of(seconds, count, wanted, common, devices, most):
    """Returns the rows of a bucket's batches: about as many as wanted, and a multiple of `common`.

    Batches of an epoch should have few rows without one of the `count` utterances, and devices of a CPU should be able
    to take their rows in large equal parts. The rows are at most `most` times the wanted ones.
    """

    def cost(rows):
        own = rows // devices
        turns = turns_of(own, seconds) / -(-own // max(1, SECONDS // seconds))
        return -(-count // rows) * rows / max(count, 1) + abs(rows / wanted - 1) / 5 + (turns - 1) / 10

    least, last = round(wanted * (1 - AROUND) / common), int(wanted * most / common + 1e-6)
    return min((x * common for x in range(max(1, least), max(1, last) + 1)), key=cost)


def planned(seconds, counts, amount, options, common, devices, window, varies):
    """Returns (seconds, rows) of each bucket: the fewest buckets that leave PADDING, or those that leave the least.

    Parameters
    ----------
    seconds, counts
        Lengths [N] that rise, and the utterances of each in an epoch or the first window, of all processes.
    amount
        Seconds of all these utterances.
    options
        A `config.Data`.
    common
        Rows are a multiple of this.
    devices
        So many devices share a batch.
    window
        Whether there are other windows, which may have more utterances of a length.
    varies
        Whether other epochs or windows have other counts.
    """
    total, best = counts.sum(), (np.inf,)
    batches = -(-amount // options.batch_seconds) if options.batch_seconds else -(-total // options.batch)
    for places in cuts(seconds, counts, min(options.buckets, max(1, int(batches)))):
        ends, sizes = seconds[places], np.diff(np.cumsum(counts)[places], prepend=0)
        batch_seconds = options.batch_seconds or options.batch * (ends * sizes).sum() / total
        most = 1 if options.batch_seconds or len(ends) == 1 else 1 + AROUND
        rows = []
        for end, size in zip(ends.tolist(), sizes.tolist()):
            wanted = max(1, int(batch_seconds / end + 1e-6)) if options.batch_seconds else batch_seconds / end
            if not window and size <= wanted:
                rows.append(-(-max(size, 1) // common) * common)
            else:
                rows.append(rows_of(end, 0 if varies else size, wanted, common, devices, most))
        padded = (-(-sizes // rows) * rows * ends).sum()
        best = min(best, (padded, ends, rows), key=lambda x: x[0])
        if amount >= (1 - PADDING) * padded:
            break
    return best[1:]
