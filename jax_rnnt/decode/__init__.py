"""Decoding: the label sequences that a trained transducer finds in its input.

All of it runs under `jax.jit`, in batches and with static shapes, for every loss that says what its classes mean
(`TransducerLoss.decoding`). `search` has the searches, `lm` the models that add scores to labels.
"""

from jax_rnnt.decode._ctc_phrases import FoundPhrase as FoundPhrase
from jax_rnnt.decode._ctc_phrases import find_phrases as find_phrases
from jax_rnnt.decode._ctc_phrases import phrase_scores as phrase_scores
from jax_rnnt.decode._hypotheses import Hypotheses as Hypotheses
from jax_rnnt.decode._modules import linen_predictor as linen_predictor
from jax_rnnt.decode._modules import nnx_predictor as nnx_predictor
from jax_rnnt.decode._predictor import Predictor as Predictor
from jax_rnnt.decode._predictor import predict as predict
from jax_rnnt.decode._predictor import stateless_predictor as stateless_predictor
from jax_rnnt.decode._streams import commit_labels as commit_labels
from jax_rnnt.decode._streams import concatenate_streams as concatenate_streams
from jax_rnnt.decode._streams import reset_streams as reset_streams
from jax_rnnt.decode._streams import select_streams as select_streams
from jax_rnnt.decode.lm._labels import Labels as Labels
from jax_rnnt.decode.lm._ngram import NGram as NGram
from jax_rnnt.decode.lm._phrases import Phrases as Phrases
from jax_rnnt.decode.lm._words import WordNGram as WordNGram
from jax_rnnt.decode.search._entropy import Entropy as Entropy
from jax_rnnt.decode.search._search import Search as Search
from jax_rnnt.decode.search._search import beam as beam
from jax_rnnt.decode.search._search import greedy as greedy
from jax_rnnt.decode.search._search import parallel as parallel
from jax_rnnt.decode.search._search import sample as sample

__all__ = [
    "Entropy",
    "FoundPhrase",
    "Hypotheses",
    "Labels",
    "NGram",
    "Phrases",
    "Predictor",
    "Search",
    "WordNGram",
    "beam",
    "commit_labels",
    "concatenate_streams",
    "find_phrases",
    "greedy",
    "linen_predictor",
    "nnx_predictor",
    "parallel",
    "phrase_scores",
    "predict",
    "reset_streams",
    "sample",
    "select_streams",
    "stateless_predictor",
]
