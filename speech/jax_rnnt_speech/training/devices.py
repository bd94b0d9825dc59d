"""Places the arrays of a training: rows of a batch on one device each, parameters on all of them, or in parts."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def placed(mesh, tree, shard):
    """Returns each array's place: all devices, or with `shard` parts along its largest dimension that allows it."""

    def place(x):
        axes = [i for i, size in enumerate(np.shape(x)) if size and size % mesh.size == 0]
        if not shard or not axes:
            return NamedSharding(mesh, PartitionSpec())
        axis = max(axes, key=lambda i: np.shape(x)[i])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))

    return jax.tree.map(place, tree)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of all processes."""

    mesh: Mesh

    def split(self, batch):
        """Returns arrays over all devices, of the rows that this process has."""
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        return {name: jax.make_array_from_process_local_data(rows, x) for name, x in batch.items()}

    def put(self, tree, shard=False):
        """Puts arrays on every device, or with `shard` a part on each."""
        if jax.process_count() > 1:  # JAX takes no array that is bound to a local device, as restored ones are
            tree = jax.device_get(tree)
        return jax.device_put(tree, placed(self.mesh, tree, shard))

    def shapes(self, tree, shard=False):
        """Returns the shapes of these arrays, which may be shapes themselves, with the places of `placed`."""
        places = placed(self.mesh, tree, shard)
        return jax.tree.map(lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y), tree, places)

    def whole(self, tree):
        """Returns arrays of which devices have parts, as a whole on every device."""
        everywhere = jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec()), tree)
        return jax.jit(lambda x: x, out_shardings=everywhere)(tree)
