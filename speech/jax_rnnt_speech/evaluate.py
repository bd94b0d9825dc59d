"""Error rates of held-out utterances."""

from typing import NamedTuple

import numpy as np

from jax_rnnt_speech import batches, errors, hosts
from jax_rnnt_speech.config import UserError


class Rates(NamedTuple):
    loss: float  # nats an utterance
    cer: float  # per cent
    wer: float


def rates(recogniser, params, data, buckets, split, search, examples=0):
    """Rates of all utterances, and (reference, hypothesis) of the first ones."""
    loss, scored, characters, words, shown = 0.0, 0, [], [], []
    for batch in batches.testing(data, recogniser.config, buckets, hosts.part()):
        batch["valid"] &= ~np.isin(batch["index"], [*data.without])
        results = recogniser.evaluated(params, split(batch), search)
        value, labels, counts, index = hosts.gathered((*results, batch["index"]))
        loss += float(value)
        for i, row, count in zip(index, labels, counts):
            if i >= 0:  # its audio is readable
                scored += i not in data.without
                pair = data.corpus.utterances[i].text, recogniser.text(row, count)
                characters.append(errors.counted(*pair))
                words.append(errors.counted(*(x.split() for x in pair)))
                shown += [pair] * (len(shown) < examples)
    if not words:
        raise UserError("no held-out utterance has readable audio")
    return Rates(loss / max(scored, 1), *(errors.summed(x).rate for x in (characters, words))), shown
