"""A model for others: over HTTP, or as one file that JAX runs without this package."""
