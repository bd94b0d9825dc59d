"""Checkpoints by step in a folder, as Orbax stores them: JSON that says how a model was made, and trees of arrays."""

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding


class Checkpoints:
    """The last `count` of them."""

    def __init__(self, folder, count):
        self.manager = ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=count))

    @property
    def latest(self):
        """The last step, or None."""
        return self.manager.latest_step()

    def setup(self, step):
        """The JSON of a step."""
        return self.manager.restore(step, args=ocp.args.Composite(setup=ocp.args.JsonRestore()))["setup"]

    def restore(self, step, trees):
        """A list of trees of arrays, of {name: tree of shapes}; where a shape has no place, on the first device."""
        here = SingleDeviceSharding(jax.local_devices()[0])

        def placed(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)

        args = {name: ocp.args.StandardRestore(jax.tree.map(placed, x)) for name, x in trees.items()}
        saved = self.manager.restore(step, args=ocp.args.Composite(**args))
        return [saved[name] for name in trees]

    def save(self, step, setup, trees, replace=False):
        """`replace`: in the place of this step and of later ones."""
        for later in (x for x in self.manager.all_steps() if replace and x >= step):
            self.manager.delete(later)
        args = {name: ocp.args.StandardSave(x) for name, x in trees.items()}
        self.manager.save(step, args=ocp.args.Composite(setup=ocp.args.JsonSave(setup), **args), force=replace)

    def close(self):
        self.manager.wait_until_finished()
        self.manager.close()
