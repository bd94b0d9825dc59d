"""Decoding: the label sequences that a trained transducer finds in its input.

All of it runs under `jax.jit`, in batches and with static shapes, for every loss that says what its classes mean
(`TransducerLoss.decoding`).
"""

from jax_rnnt.decode._beam import beam as beam
from jax_rnnt.decode._greedy import greedy as greedy
from jax_rnnt.decode._hypotheses import Hypotheses as Hypotheses
from jax_rnnt.decode._modules import linen_predictor as linen_predictor
from jax_rnnt.decode._modules import nnx_predictor as nnx_predictor
from jax_rnnt.decode._ngram import NGram as NGram
from jax_rnnt.decode._parallel import parallel as parallel
from jax_rnnt.decode._phrases import Phrases as Phrases
from jax_rnnt.decode._predictor import Predictor as Predictor
from jax_rnnt.decode._predictor import predict as predict
from jax_rnnt.decode._predictor import stateless_predictor as stateless_predictor
from jax_rnnt.decode._sample import sample as sample
from jax_rnnt.decode._streams import concatenate as concatenate
from jax_rnnt.decode._streams import reset as reset
from jax_rnnt.decode._streams import select as select
from jax_rnnt.decode._words import WordNGram as WordNGram

__all__ = [
    "Hypotheses",
    "NGram",
    "Phrases",
    "Predictor",
    "WordNGram",
    "beam",
    "concatenate",
    "greedy",
    "linen_predictor",
    "nnx_predictor",
    "parallel",
    "predict",
    "reset",
    "sample",
    "select",
    "stateless_predictor",
]
