"""The one folder that knows JAX's machinery: custom calls, primitives, lowering, jaxprs and their types.

`loading` registers the compiled kernels, `devices` checks that the GPUs can run them, `proof` whether a device has
shown that they are right, `primitive` binds one as a primitive, `grouped` and `local` make one of plain JAX that the
partitioner splits by the batch, `retracing` evaluates a function where it was not traced, and `avals` has the mesh axes
and shardings of types.
"""

from jax_rnnt._xla.avals import explicit_axes as explicit_axes
from jax_rnnt._xla.avals import is_split as is_split
from jax_rnnt._xla.avals import named as named
from jax_rnnt._xla.avals import reshard as reshard
from jax_rnnt._xla.avals import result_aval as result_aval
from jax_rnnt._xla.avals import rows_of_batch as rows_of_batch
from jax_rnnt._xla.avals import rows_of_table as rows_of_table
from jax_rnnt._xla.avals import shard_like as shard_like
from jax_rnnt._xla.avals import shards as shards
from jax_rnnt._xla.avals import spec_of as spec_of
from jax_rnnt._xla.avals import split_alike as split_alike
from jax_rnnt._xla.avals import state_like as state_like
from jax_rnnt._xla.avals import struct_like as struct_like
from jax_rnnt._xla.avals import vary_together as vary_together
from jax_rnnt._xla.avals import varying_axes as varying_axes
from jax_rnnt._xla.avals import whole as whole
from jax_rnnt._xla.grouped import Grouped as Grouped
from jax_rnnt._xla.grouped import custom_call as custom_call
from jax_rnnt._xla.grouped import most_over_groups as most_over_groups
from jax_rnnt._xla.loading import export_checks as export_checks
from jax_rnnt._xla.local import Local as Local
from jax_rnnt._xla.over_devices import by_shards as by_shards
from jax_rnnt._xla.primitive import Kernel as Kernel
from jax_rnnt._xla.primitive import beyond as beyond
from jax_rnnt._xla.primitive import warn_once as warn_once
from jax_rnnt._xla.retracing import is_trained as is_trained
from jax_rnnt._xla.retracing import pure as pure
from jax_rnnt._xla.retracing import shape_of as shape_of
from jax_rnnt._xla.retracing import trace as trace
