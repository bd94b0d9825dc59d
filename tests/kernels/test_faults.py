"""Does the library hold under load and faults: forks, exits, two processes, no memory, and JAX's strict settings?"""

import contextlib
import gc
import socket
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import platforms
from programs import environment, run, start

pytestmark = pytest.mark.no_kernel

# -------------------------------------------------------------------------------------------------- JAX's settings
# The whole suite runs with strict promotion of ranks and dtypes (conftest.py).
SETTINGS = {
    "checks": (lambda: jax.debug_nans(True), jax.checking_leaks, lambda: jax.transfer_guard("disallow")),
    "debug_infs": (lambda: jax.debug_infs(True),),
    "disable_jit": (jax.disable_jit,),
}


# Losses that have steps of their own between the kernels may go wrong there.
STRICT = [(loss, "kernel", "checks") for loss in (family.RNNT, family.TDT, family.CONSTRAINED, *family.SKIPPING)]
STRICT += [(family.RNNT, "reference", "checks"), (family.RNNT, "kernel", "debug_infs")]
STRICT += [(family.ROBUST, "kernel", "debug_infs"), (family.RNNT, "kernel", "disable_jit")]
STRICT += [family.slow(family.WILDCARD, "kernel", "disable_jit")]


@pytest.mark.quick("rnnt-kernel-checks", "tdt-kernel-checks", "constrained-kernel-checks")
@pytest.mark.parametrize(("loss", "implementation", "setting"), STRICT, ids=str, indirect=["implementation"])
def test_strict_settings(loss, implementation, setting):
    """Value and gradient are right under JAX's settings that look for mistakes, beside padding of NaN.

    A sequence has no path where no setting forbids infinite losses.
    """
    if setting == "disable_jit" and platforms.interpreted():
        pytest.skip("takes minutes")
    lengths = [3, 2, 2 * (setting == "debug_infs"), 2], [2, 0, 1, 1]
    p = batches.poisoned(batches.problem(4, 3, 2, loss=loss, lengths=lengths))
    expected = loss.expected(p)
    assert (expected[0][2] == np.inf) == (setting != "debug_infs")
    gc.freeze()  # the check for leaks collects garbage time and again
    on_device = batches.Problem(*map(jnp.asarray, p))
    with contextlib.ExitStack() as stack:
        for enter in SETTINGS[setting]:
            stack.enter_context(enter())
        together = lambda x: loss(x, *on_device[1:], reduction="none", implementation=implementation)
        values, pullback = jax.vjp(jax.jit(together), on_device.logits)
        with jax.transfer_guard("allow"):
            ones = jnp.ones_like(values)
        (gradient,) = pullback(ones)
    compare.assert_matches((values, gradient), expected, np.float64, 11)


@pytest.mark.quick("kernel")
def test_debug_nans_finds_a_nan(implementation):
    """The setting still sees a NaN that the loss returns."""
    p = batches.problem()
    p.logits[0, 0, 0, 0] = np.nan
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(family.RNNT(*p, implementation=implementation))


# ------------------------------------------------------------------------------------------------------- processes
# A file of its own: spawned workers import the program. They cannot import a module of pytest's mode "importlib", which
# names this one `tests.test_faults`: a worker that does not find its function ends, and its pool waits for ever.
#
# A thread in Python's hands, a daemon that calls, is no test: Python before 3.14 ends it inside JAX's bindings, which
# aborts the process, whatever it computes.
PROCESS = """
import multiprocessing, os, warnings
import jax, numpy as np, jax_rnnt
arguments = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 0), np.int32), np.ones(1, np.int32), np.zeros(1, np.int32)

def value(scale):  # of a frame without labels: minus the blank's log-probability, log 4
    return float(jax.jit(jax_rnnt.rnnt_loss)(scale * arguments[0], *arguments[1:]))

if __name__ == "__main__":
    values = [value(0)]
    warnings.simplefilter("ignore")  # JAX warns of forks, since its threads do not survive them
    child = os.fork()
    if child == 0:  # a worker that loads data needs no JAX, and must be able to end
        os._exit(int(np.ones(3).sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("values", *values, value(1), *pool.map(value, [0, 1]), flush=True)
    logits = np.zeros((8, 300, 60, 64), np.float32)
    large = logits, np.zeros((8, 59), np.int32), np.full(8, 300, np.int32), np.full(8, 59, np.int32)
    step = jax.jit(jax.value_and_grad(jax_rnnt.rnnt_loss)).lower(*large).compile()
    large = jax.device_put(large)
    running = [step(*large) for _ in range(4)]  # asynchronous: nobody waits
    assert not running[-1][0].is_ready()
"""


@pytest.mark.slow
def test_a_process(tmp_path):
    """It works where JAX chooses the platform; after a fork that does not call JAX; in workers that do, spawned while
    their parent holds a backend; and ends while the kernels run, without a crash and without hanging."""
    (tmp_path / "program.py").write_text(PROCESS)
    out = run(tmp_path / "program.py", env=environment(JAX_PLATFORMS=""), timeout=120)
    assert [float(x) for x in out.split("values")[1].split()] == pytest.approx([np.log(4)] * 4, rel=1e-6)


# ----------------------------------------------------------------------------------------------------------- memory
@pytest.mark.slow
def test_too_large_a_problem_is_an_exception(kernel):
    """And the process goes on."""
    shapes = ((1 << 12, 1 << 12, 1 << 8, 1 << 8), (1 << 12, 255), (1 << 12,), (1 << 12,))  # 4 TiB of logits

    @jax.jit
    def step():
        logits = jnp.zeros(shapes[0], np.float32)
        rest = [jnp.ones(shape, np.int32) for shape in shapes[1:]]
        gradient = jax.grad(family.RNNT)(jax.lax.optimization_barrier(logits), *rest)
        return jax.lax.optimization_barrier(gradient).sum()

    with pytest.raises((RuntimeError, ValueError), match=r"(?i)memory|exhausted|alloc"):
        jax.block_until_ready(step())
    p = batches.problem()
    compare.assert_matches(compare.evaluate(family.RNNT, p, kernel), family.RNNT.expected(p), np.float64, 11)


# Labels of -1e9, which every path must take: the lattice keeps 16 bytes for each node on each thread of the pool, more
# than XLA's buffers of the loss.
SCRATCH = """
import resource
import jax, numpy as np, jax_rnnt
B, T, U = 2, 3000, 1499
logits = np.zeros((B, T, U + 1, 2), np.float32)
logits[..., 0] = -1e9
arguments = logits, np.zeros((B, U), np.int32), np.full(B, T, np.int32), np.full(B, U, np.int32)
loss = jax_rnnt.RNNTLoss(implementation="kernel", reduction="none")
step = jax.jit(lambda *arguments: loss(*arguments)).lower(*arguments).compile()
held = [x for x in open("/proc/self/status").read().splitlines() if x.startswith("VmSize")][0].split()[1]
outcomes = []
for more in range(16, 513, 16):
    resource.setrlimit(resource.RLIMIT_AS, (int(held) * 1024 + (more << 20), resource.RLIM_INFINITY))
    try:
        outcomes.append("right" if np.allclose(step(*arguments), U * 1e9, rtol=1e-6) else "wrong")
    except Exception as error:
        outcomes.append("jax_rnnt" if "jax_rnnt: out of memory" in str(error) else "xla")
    if outcomes[-1] == "right":
        break
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
np.testing.assert_allclose(step(*arguments), U * 1e9, rtol=1e-6)
print(*outcomes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS")
def test_no_memory_for_the_scratch_of_a_kernel(kernel):
    """An exception, not the end of the process; and a right result once there is memory."""
    outcomes = run(SCRATCH).split()
    assert "jax_rnnt" in outcomes and set(outcomes) <= {"jax_rnnt", "xla", "right"}, outcomes


# ------------------------------------------------------------------------------------------------ two processes
STEP = """
import sys
process, port = map(int, sys.argv[1:])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_rnnt import RNNTLoss

assert jax.process_count() == 2 and len(jax.devices()) == 4
B, T, U, V = 8, 8, 3, 16
mesh = Mesh(np.array(jax.devices()), ("data",))
sharded, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
rng = np.random.default_rng(1)
logits, weight = rng.normal(size=(B, T, U + 1, V)).astype(np.float32), rng.normal(size=(V, V)).astype(np.float32)
sizes = (0, V - 1, (B, U)), (1, T + 1, B), (0, U + 1, B)
rest = [rng.integers(*x).astype(np.int32) for x in sizes]

def mean(weight, hidden, *rest, implementation="kernel"):
    return RNNTLoss(implementation=implementation)(hidden @ weight, *rest)

half = slice(process * B // 2, (process + 1) * B // 2)
arrays = [jax.make_array_from_process_local_data(sharded, x[half]) for x in (logits, *rest)]
arrays = jax.device_put(weight, whole), *arrays
specs = P(), *(P("data"),) * 4
mapped = jax.shard_map(lambda *args: jax.lax.pmean(mean(*args), "data"), mesh=mesh, in_specs=specs, out_specs=P())
compiled = jax.jit(jax.value_and_grad(mean)).lower(*arrays).compile()
assert "all-gather" not in compiled.as_text(), "all-gather"
step = jax.jit(jax.value_and_grad(lambda w, x: mean(w, x, *rest, implementation="reference"), (0, 1)))
value, (expected, _) = step(weight, logits)
for results in (compiled(*arrays), jax.jit(jax.value_and_grad(mapped))(*arrays)):
    for got, wanted in zip(results, (value, expected)):
        np.testing.assert_allclose(got.addressable_data(0), wanted, rtol=1e-4, atol=1e-4)

# Classes and frames over the devices of both processes.
value, (_, expected) = step(np.eye(V, dtype=np.float32), logits)
for options, spec in (({"vocab_axis": "data"}, P(None, None, None, "data")), ({"frame_axis": "data"}, P(None, "data"))):
    loss = jax.shard_map(RNNTLoss(**options), mesh=mesh, in_specs=(spec, P(), P(), P()), out_specs=P())
    arrays = jax.device_put(logits, jax.NamedSharding(mesh, spec)), *jax.device_put(rest, whole)
    got, gradient = jax.jit(jax.value_and_grad(loss))(*arrays)
    np.testing.assert_allclose(got.addressable_data(0), value, rtol=1e-5)
    for shard in gradient.addressable_shards:
        np.testing.assert_allclose(shard.data, expected[shard.index], atol=1e-5)
"""


@pytest.mark.slow
def test_two_processes(kernel):
    """They hold half a batch each, or half of the classes or frames. speech/tests/test_hosts.py kills one of two."""
    if platforms.platform() != "cpu":
        pytest.skip("two processes share no GPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment(XLA_FLAGS="--xla_force_host_platform_device_count=2")
    processes = [start(STEP, i, port, env=variables) for i in range(2)]
    try:
        for process in processes:
            _, error = process.communicate(timeout=240)
            assert process.returncode == 0, error
    finally:
        for process in processes:
            process.kill()
            process.wait()
