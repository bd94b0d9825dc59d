"""From a corpus to a model: steps, epochs, checkpoints, runs."""
