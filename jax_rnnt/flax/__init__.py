"""Joint networks and predictors for Flax: `jax_rnnt.flax.nnx` and `jax_rnnt.flax.linen` hold the same modules.

A predictor serves training and decoding: ``predictor(targets [..., U]) -> rows [..., U + 1, P]`` takes all labels at
once, ``predictor.initial(batch) -> state`` and ``predictor.step(state, labels [B]) -> (rows [B, P], state)`` take one
at a time. Both give the same rows. A joint makes `JointLogits` for the losses, and the arguments of a decoder.
"""
