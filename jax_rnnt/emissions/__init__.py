"""Emissions: logits -> log-probability of the arcs that leave each node."""
