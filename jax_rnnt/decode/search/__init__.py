"""Searches: greedy, beam, without a predictor, and ancestral sampling, with what they share."""
