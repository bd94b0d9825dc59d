"""Emissions: logits -> log-probabilities of the arcs."""

from jax_rnnt.emissions.softmax import Softmax as Softmax
