"""Decoding: the label sequences that a trained transducer finds in its input.

All of it runs under `jax.jit`, in batches and with static shapes, for every loss that says what its classes mean
(`TransducerLoss.decoding`). `_search` is the way in; `lm` has the models that add scores to labels.
"""

from jax_rnnt.decode._ctc_phrases import FoundPhrase, find_phrases, phrase_scores
from jax_rnnt.decode._entropy import Entropy
from jax_rnnt.decode._guard import Guard
from jax_rnnt.decode._hypotheses import Hypotheses
from jax_rnnt.decode._modules import linen_predictor, nnx_predictor
from jax_rnnt.decode._predictor import Predictor, predict, stateless_predictor
from jax_rnnt.decode._search import Search
from jax_rnnt.decode._streams import commit_labels, concatenate_streams, reset_streams, select_streams
from jax_rnnt.decode.lm._labels import Labels
from jax_rnnt.decode.lm._ngram import NGram
from jax_rnnt.decode.lm._phrases import Phrases
from jax_rnnt.decode.lm._words import WordNGram

__all__ = [
    "Entropy",
    "FoundPhrase",
    "Guard",
    "Hypotheses",
    "Labels",
    "NGram",
    "Phrases",
    "Predictor",
    "Search",
    "WordNGram",
    "commit_labels",
    "concatenate_streams",
    "find_phrases",
    "linen_predictor",
    "nnx_predictor",
    "phrase_scores",
    "predict",
    "reset_streams",
    "select_streams",
    "stateless_predictor",
]
