"""Does the soak run? Everything but time."""

import os

import project
from programs import environment, run


def test_soak():
    """In JAX's default configuration."""
    quick = environment(JAX_DISABLE_MOST_OPTIMIZATIONS="1", XLA_FLAGS=os.environ["XLA_FLAGS"])
    run(project.ROOT / "lab/benchmarks/soak.py", "--steps", "20", "--kinds", "jit", "eager", env=quick, timeout=900)
