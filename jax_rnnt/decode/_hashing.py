"""Hashes of 64 bits, held as two numbers of 32 bits, for label sequences and for any rows of numbers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ODD = 0x9E3779B1, 0x27D4EB2F  # a factor for each of the two numbers


def scramble(x):
    """Permutes uint32 numbers [...] so that each bit affects all bits (the last step of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def append_label(key, label):
    """Returns the hash, two int32 arrays [...], of the labels whose hash is `key` and one more label [...]."""
    labels = (label + 1).astype(jnp.uint32)
    scrambled = (scramble(x.astype(jnp.uint32) ^ labels * np.uint32(y)) for x, y in zip(key, ODD))
    return [x.astype(jnp.int32) for x in scrambled]


def fingerprints(tree):
    """Returns hashes int32 [N, 2] of the bits of each row of a pytree of numbers.

    They are sums of a hash of each word, so that XLA vectorises them. On a CPU, sums of multiplied bytes took as long
    as the LSTM step before them.
    """
    total: Any = 0
    for seed, x in enumerate(jax.tree.leaves(tree)):
        word = np.dtype(f"uint{min(32, 8 * x.dtype.itemsize)}")
        x = jax.lax.bitcast_convert_type(x, word)
        x = x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(np.uint32)
        places = np.random.default_rng(seed).integers(0, 2**32, (2, x.shape[1]), np.uint32)
        total = total + jnp.stack([jnp.sum(scramble(x + y[None]), 1, dtype=np.uint32) for y in places], 1)
    return jax.lax.bitcast_convert_type(total, np.int32)
