"""Lattices: topologies as data, and the dynamic program over them."""

from jax_rnnt.lattices.lattice import log_likelihood as log_likelihood
from jax_rnnt.lattices.topology import MONOTONIC as MONOTONIC
from jax_rnnt.lattices.topology import STANDARD as STANDARD
from jax_rnnt.lattices.topology import Arc as Arc
from jax_rnnt.lattices.topology import durations as durations
from jax_rnnt.lattices.topology import multi_blank as multi_blank
from jax_rnnt.lattices.topology import products as products
