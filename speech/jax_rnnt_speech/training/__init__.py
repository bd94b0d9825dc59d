"""From a corpus to a model: the objective, the parameters to train, steps and epochs."""
