"""XLA's figures of a training step of a Parakeet of 0.6 billion parameters, for GPUs and TPUs and without them.

    python lab/benchmarks/training.py                  # for one H100 and for eight v5e: a table
    python lab/benchmarks/training.py h100 --json FILE
    python lab/benchmarks/training.py --layers 2       # a shorter encoder: compiles sooner

`lab/run.sh training` installs what it compiles with. The step is that of `rnnt-speech train --dtype bfloat16 --remat
--scan`, for 16 utterances of 20 seconds with 80 labels: TDT loss in tiles, AdamW. It is compiled ahead of time; nothing
runs, and nothing is timed but the compiler. Memory is a device's: arguments, results and temporaries. Kernels are
those of `searches.py`, with a loop's body counted as often as it runs; the host launches them one by one or as a graph.
"""

import argparse
import json
import os
import re
import sys
import time

import ahead  # before JAX
import jax
import numpy as np
import searches
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(ahead.ROOT / "speech"))

from jax_rnnt_speech.config import Config
from jax_rnnt_speech.data import tokens
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.training import devices, parts, steps

DEVICES = {"h100": 1, "v5e": 8}
AIMS = {"h100": {"GB": 14, "launches": 3000}, "v5e": {"GB": 4}}
LABELS, UTTERANCES, FRAMES, TARGETS = 8192, 16, 2000, 80
SIZES = dict(features="nemo", mels=128, width=640, predictor="lstm", predictor_layers=2, loss="tdt", activation="relu")
CHEAP = dict(dtype="bfloat16", remat=True, scan=True, dropout=0.0)


def model_of(layers):
    """A Model, whose parameters nobody draws."""
    config = Config.from_options(init="none", encoder="fastconformer", **SIZES, **CHEAP)
    fields = {"num_mel_bins": config.features.mels, "num_hidden_layers": layers}
    zeros, ones = np.zeros(config.features.mels), np.ones(config.features.mels)
    return Model(config, tokens.Numbers(LABELS), zeros, ones, {"config.json": fields})


def lowered(device, layers):
    mesh, model = ahead.mesh(device, DEVICES[device]), model_of(layers)
    shard = mesh.size > 1
    chosen = parts.Parts(model.config, model.shapes)
    optimizer = steps.make_optimizer(model.config.optimiser, model.config.run.steps, chosen.factors)
    state = jax.eval_shape(lambda x: steps.first_state(model.config.optimiser, optimizer, chosen.free(x)), model.shapes)
    place = devices.Devices(mesh)
    state = place.shapes(state, shard)
    frozen = place.shapes(jax.eval_shape(chosen.frozen, model.shapes), shard)
    places = jax.tree.map(lambda x: x.sharding, state)
    shapes = {"features": (FRAMES, model.config.features.mels), "targets": (TARGETS,), "spans": (4, 2)}
    kinds = {"features": np.float32, "valid": bool}
    split = NamedSharding(mesh, P("data"))
    batch = {
        name: jax.ShapeDtypeStruct((UTTERANCES, *shapes.get(name, ())), kinds.get(name, np.int32), sharding=split)
        for name in ("features", "lengths", "targets", "target_lengths", "valid", "spans")
    }
    step = steps.make_train_step(model, chosen, optimizer, places=places)
    one = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))
    return step.lower(state, batch, frozen, one)


def by_the_host(thunk):
    """Launches of the host in one turn, without loops: a graph of kernels, which XLA makes by default, is one."""
    if thunk.kind == "CommandBuffer":
        return 1
    return (not thunk.inside and thunk.kind != "While") + sum(
        by_the_host(x) for x in thunk.all_inside() if x.kind != "While"
    )


def step_launches(program, text):
    """Kernels and launches of the host, outside of the lattice: a loop's body as often as `text` says it runs."""
    entry = [line for line in text[text.index("\nENTRY") :].splitlines() if " while(" in line]
    loops = [thunk for thunk in program.all_inside() if thunk.kind == "While"]
    kernels, total, found = searches.launches(program) - sum(map(searches.launches, loops)), by_the_host(program), []
    for loop, line in zip(loops, entry, strict=True):  # both are in the order in which they run
        if "loss_of_batch" not in line:
            turns = int(re.search(r'known_trip_count":\{"n":"(\d+)"', line)[1])
            of_turn = searches.launches(loop), sum(map(by_the_host, loop.all_inside()))
            kernels, total = kernels + turns * of_turn[0], total + turns * of_turn[1]
            found.append("{} x {} ({})".format(turns, *of_turn))
    return {"kernels": kernels, "launches": total, "of which": ", ".join(found)}


def counted(dump, device, layers):
    times, cuda = [time.process_time()], device in ahead.GPUS
    program = lowered(device, layers)
    times.append(time.process_time())
    # Triton's products may have no sizes of tiles where none is tried.
    program = program.compile(ahead.GPU_OPTIONS | {"xla_gpu_enable_triton_gemm": False} if cuda else {})
    times.append(time.process_time())
    memory = program.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = {"tracing, CPU s": round(times[1] - times[0]), "compiling, CPU s": round(times[2] - times[1])}
    found["GB"] = round((total + memory.temp_size_in_bytes) / 1e9, 2)
    if cuda:
        found |= step_launches(searches.parse(searches.thunks(dump, "train_step")), program.as_text())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24, help="of the encoder (%(default)s)")
    options, counts = searches.device_options(parser, DEVICES), {}
    with searches.dumped() as dump:
        for device in options.devices:
            counts[device] = counted(dump, device, options.layers)
            print(device, json.dumps(counts[device]), flush=True)
    missed = [
        f"{device}: {name} is {counts[device][name]}, more than {most}"
        for device in counts
        for name, most in AIMS[device].items()
        if counts[device][name] > most
    ]
    if options.json:
        found = {"jax": jax.__version__, "load": os.getloadavg(), "layers": options.layers, **counts}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
