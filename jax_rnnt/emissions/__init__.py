"""Emissions turn logits into log-probabilities of the arcs."""

from jax_rnnt.emissions._softmax import Softmax as Softmax
