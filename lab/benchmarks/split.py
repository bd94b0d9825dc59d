"""Times a loss over classes or frames that lie on several devices, beside the same logits without the option.

    python lab/benchmarks/split.py

The devices are eight parts of this CPU, so times tell the work of all of them together; memory is that of one device.
Value and gradient; the gradient takes the memory of dense logits. "gathered": the arrays lie split, as a model makes
them, and the loss does not know. "one device": the arrays lie on one of the eight.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt as rnnt
import measure

AXIS = "devices"
# B, T, U + 1, V, width of the rows of a joint network (None: logits in memory), the option
CASES = {
    "vocabulary": (2, 32, 8, 131072, None, "vocab_axis"),
    "vocabulary, joint": (2, 16, 8, 131072, 64, "vocab_axis"),
    "frames": (2, 2048, 32, 512, None, "frame_axis"),
    "frames, joint": (2, 4096, 64, 512, 64, "frame_axis"),
}


def arrays(B, T, U1, V, width, rng):
    """(arrays with a gradient, the others)"""

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    rest = jnp.asarray(rng.integers(0, V - 1, (B, U1 - 1)), jnp.int32), jnp.full(B, T), jnp.full(B, U1 - 1)
    if width is None:
        return (draw(B, T, U1, V),), rest
    return (draw(width, V) / width**0.5, draw(B, T, width), draw(B, U1, width)), rest


def specs(option, dense):
    if dense:
        return (P(None, None, None, AXIS) if option == "vocab_axis" else P(None, AXIS),)
    return (P(None, AXIS), P(), P()) if option == "vocab_axis" else (P(), P(None, AXIS), P())


def contestant(name, mesh, case, options, rng):
    *shape, width, option = case
    own, rest = arrays(*shape, width, rng)
    loss = rnnt.RNNTLoss(**options)

    def value(own, rest):
        if width is None:
            return loss(*own, *rest)
        weight, *rows = own
        return loss(rnnt.JointLogits(rnnt.LinearJoint(weight), *rows), *rest)

    places = [NamedSharding(mesh, spec) for spec in specs(option, width is None)]
    donated = 0 if width is None else ()
    step = jax.jit(jax.value_and_grad(value), donate_argnums=donated, out_shardings=(None, tuple(places)))
    own, rest = jax.device_put(own, tuple(places)), jax.device_put(rest, NamedSharding(mesh, P()))
    program = step.lower(own, rest).compile()
    memory = program.memory_analysis()
    more = memory.output_size_in_bytes - memory.alias_size_in_bytes
    megabytes = (memory.argument_size_in_bytes + memory.temp_size_in_bytes + more) / 1e6

    def run(keep=False):
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, own))
        start = time.perf_counter()
        result = jax.block_until_ready(program(fresh, rest))
        return result if keep else time.perf_counter() - start

    value, gradient = run(keep=True)
    return measure.Contestant(name, run, (float(value), measure.samples(jax.tree.leaves(gradient))), megabytes)


def main(argv=None):
    args = measure.options(__doc__, CASES).parse_args(argv)
    budget = measure.settle(args)
    results = {}
    for name in args.only:
        found = []
        options = {CASES[name][-1]: AXIS}
        for way, devices, chosen in (("split", 8, options), ("gathered", 8, {}), ("one device", 1, {})):
            mesh = jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices])
            with jax.set_mesh(mesh):
                found.append(contestant(way, mesh, CASES[name], chosen, np.random.default_rng(args.seed)))
        measure.agree(found[2], found[:2], gradient=1e-6 * np.abs(found[2].check[1]).max())
        measure.take_turns(found, budget, args.repeat)
        results[name] = found
        measure.report(f"{name}: {CASES[name][:4]}", found, ["gathered", "one device"])
    measure.save(args, "-split", [], results)


if __name__ == "__main__":
    main()
