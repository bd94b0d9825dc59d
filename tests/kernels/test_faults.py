"""Does the library hold under load and faults: threads, forks, exits, kills, no memory, and JAX's strict settings?"""

import contextlib
import gc
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import platforms
from programs import environment, pair, run

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
STRICT += [family.slow(family.WILDCARD, "kernel", "disable_jit"), family.slow(family.RNNT, "reference", "disable_jit")]


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
assert jax.process_count() == 2 and len(jax.devices()) == 4
hidden, *rest = batch(0, 5, 3)
weight = np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)

def mean(weight, hidden, *rest, implementation="kernel"):
    return RNNTLoss(implementation=implementation)(hidden @ weight, *rest)

arrays = jax.device_put(weight, whole), *placed((hidden, *rest))
specs = P(), *(P("data"),) * 4
mapped = jax.shard_map(lambda *args: jax.lax.pmean(mean(*args), "data"), mesh=mesh, in_specs=specs, out_specs=P())
compiled = jax.jit(jax.value_and_grad(mean)).lower(*arrays).compile()
assert "all-gather" not in compiled.as_text(), "all-gather"
expected = jax.value_and_grad(lambda w: mean(w, hidden, *rest, implementation="reference"))(weight)
for results in (compiled(*arrays), jax.jit(jax.value_and_grad(mapped))(*arrays)):
    for got, wanted in zip(results, expected):
        np.testing.assert_allclose(got.addressable_data(0), wanted, rtol=1e-4, atol=1e-4)

# Classes and frames over the devices of both processes.
logits, *rest = batch(1, 8, 3)
expected = jax.value_and_grad(RNNTLoss(implementation="reference"))(logits, *rest)
for options, spec in (({"vocab_axis": "data"}, P(None, None, None, "data")), ({"frame_axis": "data"}, P(None, "data"))):
    loss = jax.shard_map(RNNTLoss(**options), mesh=mesh, in_specs=(spec, P(), P(), P()), out_specs=P())
    arrays = jax.device_put(logits, jax.NamedSharding(mesh, spec)), *jax.device_put(rest, whole)
    value, gradient = jax.jit(jax.value_and_grad(loss))(*arrays)
    np.testing.assert_allclose(value.addressable_data(0), expected[0], rtol=1e-5)
    for shard in gradient.addressable_shards:
        np.testing.assert_allclose(shard.data, expected[1][shard.index], atol=1e-5)
"""

TRAIN = """
folder = pathlib.Path(*arguments)

@jax.jit
def update(state, data):
    weight, momentum = state
    value, gradient = jax.value_and_grad(lambda w: RNNTLoss()(data[0] @ w, *data[1:]))(weight)
    momentum = 0.9 * momentum + gradient
    return (weight - 0.1 * momentum, momentum), value

def train(name, kill_at=-1):
    checkpoint, first = folder / "checkpoint.npz", 0
    state = np.eye(V, dtype=np.float32), np.zeros((V, V), np.float32)
    if name == "resumed":
        with np.load(checkpoint) as saved:
            first, state = int(saved["step"]), (saved["weight"], saved["momentum"])
    state = jax.device_put(state, whole)
    for step in range(first, 6):
        data = placed(batch(step, 12, 4))
        if process == 1 and step == kill_at:
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGKILL)).start()
            update(state, data)
            time.sleep(60)
        state, value = update(state, data)
        value = float(value)
        if process == 0:
            print(name, step, value.hex(), flush=True)
            kept = folder / "new.npz"
            np.savez(kept, step=step + 1, weight=np.asarray(state[0]), momentum=np.asarray(state[1]))
            os.replace(kept, checkpoint)  # never half a checkpoint
"""
FIRST = f"{STEP}{TRAIN}train('whole')\ntrain('killed', kill_at=3)"
SECOND = f"{TRAIN}train('resumed')\nos._exit(0)  # without waiting for a peer"


def output(program, folder, killed):
    """What the first of two processes prints; the second one is killed, or ends well."""
    with pair(program, folder, XLA_FLAGS="--xla_force_host_platform_device_count=2") as processes:
        _, error = processes[1].communicate(timeout=240)
        assert processes[1].returncode == (-9 if killed else 0), error
        if killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[0].wait(timeout=3)
            processes[0].kill()  # it waits for its peer, or has given up
        out, error = processes[0].communicate(timeout=240)
        assert killed or processes[0].returncode == 0, error
    return out


@pytest.mark.slow
def test_two_processes(kernel, tmp_path):
    """They hold half a batch each, or half of the classes or frames. One dies in training, during its fourth step; what
    is resumed has the losses, to the bits of float32, of training without a break.
    """
    if platforms.platform() != "cpu":
        pytest.skip("two processes share no GPU")
    out = output(FIRST, tmp_path, killed=True) + output(SECOND, tmp_path, killed=False)
    losses = [(name, int(step), float.fromhex(loss)) for name, step, loss in re.findall(r"(\w+) (\d) (0x\S+)", out)]
    whole, before, after = ([x[1:] for x in losses if x[0] == name] for name in ("whole", "killed", "resumed"))
    assert len(before) in (3, 4)  # the first process may end the step, if its sums have arrived
    assert before + after == whole and len(whole) == 6
    assert whole[5][1] < whole[0][1]
