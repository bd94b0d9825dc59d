"""Labels of one search in the text of another: whole words, and only between words."""

import itertools

from jax_rnnt_speech.recognition.results import Labels


def words_of(tokens, labels):
    """[first, last) of the labels of each word."""
    if not tokens.separates:
        return [(i, i + 1) for i in range(len(labels))]
    starts = [i for i, x in enumerate(labels) if tokens.texts[x].startswith(tokens.separator)]
    return [*itertools.pairwise(sorted({0, *starts, len(labels)}))]


def spliced(tokens, known, first, last, more):
    """Labels with `more` in the place of [first, last); None: that is within a word.

    Where a space is a label of its own, it is added on both sides.
    """
    before = tokens.texts[known.labels[first - 1]] if first else None
    after = tokens.texts[known.labels[last]] if last < len(known.labels) else None
    mark, left, right = tokens.separator, [], []
    ends, begins = before is None or before.endswith(mark), after is None or after.startswith(mark)
    if tokens.separates and mark in tokens.texts:
        if first == last and not (ends or begins):
            return None
        label, texts = tokens.texts.index(mark), [tokens.texts[x] for x in more.labels]
        left = [label] * (not ends and not texts[0].startswith(mark))
        right = [label] * (not begins and not texts[-1].endswith(mark))
    elif tokens.separates and not begins:
        return None
    left, right = silent(left, more.frames[0]), silent(right, more.frames[-1])
    return known.part(first).joined(left, more, right, known.part(last, None))


def silent(labels, frame):
    """Labels that nobody said, in a frame."""
    return Labels(labels, *([x] * len(labels) for x in (frame, 0.0, 1.0, 0)))
