"""A model for others, over HTTP."""
