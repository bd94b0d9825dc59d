"""From a corpus to a model: what is made small, which parameters learn, steps, epochs."""
