"""Lattices: topologies as data, and the dynamic program over them."""

from jax_rnnt.lattices._lattice import log_likelihood as log_likelihood
from jax_rnnt.lattices._topology import MONOTONIC as MONOTONIC
from jax_rnnt.lattices._topology import STANDARD as STANDARD
from jax_rnnt.lattices._topology import Arc as Arc
from jax_rnnt.lattices._topology import multi_blank as multi_blank
from jax_rnnt.lattices._topology import products as products
from jax_rnnt.lattices._topology import token_and_duration as token_and_duration
