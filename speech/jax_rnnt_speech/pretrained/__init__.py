"""Models from elsewhere, which a training may start from, and our own form in which models are handed on."""
