"""Do two processes under jax.distributed compute the same step as one?"""

import socket

import pytest

import losses
from programs import start

PROGRAM = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
process, port = int(sys.argv[1]), sys.argv[2]
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_rnnt import RNNTLoss

rng = np.random.default_rng(0)
B, T, U, V = 8, 5, 3, 16
hidden = rng.normal(size=(B, T, U + 1, V)).astype(np.float32)
weight = rng.normal(size=(V, V)).astype(np.float32)
rest = rng.integers(0, V - 1, (B, U)), rng.integers(1, T + 1, B), rng.integers(0, U + 1, B)
mesh = Mesh(np.array(jax.devices()), ("data",))
assert jax.process_count() == 2 and len(jax.devices()) == 4

def mean(weight, hidden, *rest, implementation="kernel"):
    return RNNTLoss(implementation=implementation)(hidden @ weight, *rest)

half = slice(process * B // 2, (process + 1) * B // 2)
sharding = NamedSharding(mesh, P("data"))
data = [jax.make_array_from_process_local_data(sharding, x[half]) for x in (hidden, *(x.astype("int32") for x in rest))]
placed = jax.device_put(weight, NamedSharding(mesh, P()))
specs = P(), *(P("data"),) * 4
mapped = jax.shard_map(lambda *args: jax.lax.pmean(mean(*args), "data"), mesh=mesh, in_specs=specs, out_specs=P())
compiled = jax.jit(jax.value_and_grad(mean)).lower(placed, *data).compile()
assert "all-gather" not in compiled.as_text(), "all-gather"
expected = jax.value_and_grad(lambda w: mean(w, hidden, *rest, implementation="reference"))(weight)
for results in (compiled(placed, *data), jax.jit(jax.value_and_grad(mapped))(placed, *data)):
    for got, wanted in zip(results, expected):
        np.testing.assert_allclose(got.addressable_data(0), wanted, rtol=1e-4, atol=1e-4)
print("process", process, "ok", flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes(kernel):
    if losses.platform() != "cpu":
        pytest.skip("two processes share no GPU")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [start(PROGRAM, i, port) for i in range(2)]
    try:
        outputs = ["".join(process.communicate(timeout=240)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for i, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and f"process {i} ok" in output, output
