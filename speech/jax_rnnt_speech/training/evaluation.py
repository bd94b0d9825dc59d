"""Held-out error rates while a model is trained."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.data import batches
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.recognition import errors
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.system import hosts, refuse_if
from jax_rnnt_speech.training import objective


class Rates(NamedTuple):
    loss: float  # nats per utterance
    cer: float  # per cent, as is `wer`
    wer: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The held-out utterances, and the search for their labels."""

    model: Model
    data: batches.Labelled
    buckets: list
    split: Callable  # puts a batch on the devices
    decoding: Decoding

    def rates(self, params, examples=0):
        """Returns the Rates of all utterances, and (reference, hypothesis) of the first ones."""
        model, data, loss, scored, characters, words, pairs = self.model, self.data, 0.0, 0, [], [], []
        for batch in batches.testing(data, model.config, self.buckets, hosts.part()):
            batch["valid"] &= ~np.isin(batch["index"], [*data.without])
            results = objective.evaluated(model, params, self.split(batch), self.decoding)
            value, labels, counts, index = hosts.gathered((*results, batch["index"]))
            loss += float(value)
            for i, row, count in zip(index, labels, counts):
                if i >= 0:  # its audio is readable
                    scored += i not in data.without
                    pair = data.corpus.utterances[i].text, model.text(row, count)
                    characters.append(errors.counted(*pair))
                    words.append(errors.counted(*(x.split() for x in pair)))
                    pairs += [pair] * (len(pairs) < examples)
        refuse_if(not words, "no held-out utterance has readable audio")
        return Rates(loss / max(scored, 1), *(errors.summed(x).rate for x in (characters, words))), pairs

    def measured(self, params, step):
        """Returns the Rates, and prints them with two examples."""
        rates, pairs = self.rates(params, examples=2)
        hosts.say(f"step {step}: held-out loss {rates.loss:.2f}, CER {rates.cer:.1f}%, WER {rates.wer:.1f}%")
        for reference, hypothesis in pairs:
            hosts.say(f"  {reference}\n  {hypothesis}")
        return rates
