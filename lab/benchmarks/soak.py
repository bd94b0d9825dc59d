"""Does memory stay where it is? Thousands of training steps, hours of one stream, and thousands of bad requests.

    python lab/benchmarks/soak.py [--steps 10000] [--kinds jit eager ...]
    PYTHONPATH=speech python lab/benchmarks/soak.py --kinds stream beam requests    # needs the packages of speech/

Prints the resident set after each tenth of the steps. The exit code is 1 where the last six tenths of a run need more
than the first four by more than --allowed MB. (A joint network that is a new function in each step, outside jit, is
compiled in each step, and JAX keeps all programs: that is none of the kinds.)
"""

import argparse
import asyncio
import functools
import gc
import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import JointLogits, RNNTLoss

B, T, U, V, H = 4, 30, 8, 64, 16


def dense(weight, encoder, predictor, *rest, implementation=None):
    logits = jnp.tanh(encoder[:, :, None] + predictor[:, None]) @ weight
    return RNNTLoss(implementation=implementation)(logits, *rest)


def tiles(weight, encoder, predictor, *rest):
    return RNNTLoss()(JointLogits(lambda e, p: jnp.tanh(e + p) @ weight, encoder, predictor, chunk=32), *rest)


def step(loss, weight, *batch):
    value, gradient = jax.value_and_grad(loss)(weight, *batch)
    return weight - 0.01 * gradient, value


def batch(rng, frames, labels):
    rows = (rng.normal(size=(B, n, H)).astype(np.float32) for n in (frames, labels + 1))
    lengths = rng.integers(1, frames + 1, B), rng.integers(0, labels + 1, B)
    return *rows, *(x.astype(np.int32) for x in (rng.integers(0, V - 1, (B, labels)), *lengths))


def training(loss, jitted=True, sizes=((T, U),)):
    """A step after the other, on batches of these sizes in turn."""
    rng, weight, train = np.random.default_rng(0), jnp.zeros((H, V)), functools.partial(step, loss)
    train = jax.jit(train, donate_argnums=0) if jitted else train
    for frames, labels in itertools.cycle(sizes):
        weight, value = train(weight, *batch(rng, frames, labels))
        yield value


def writer():
    """A model of random weights that writes many words."""
    from jax_rnnt_speech import config
    from jax_rnnt_speech.data import tokens
    from jax_rnnt_speech.model import Model

    sizes = dict(rate=8000, mels=8, width=16, blocks=1, convolution=3, channels=2, chunk=8, seed=6)
    settings = config.Config.from_options(train="t", valid="v", encoder="convolutional", **sizes)
    model = Model(settings, tokens.Characters("ABC "), [0.0] * 8, [10.0] * 8)
    model.params["joint"] = jax.tree.map(lambda x: 8 * x, model.params["joint"])
    return model


def stream(beam=0):
    """A minute of noise after the other, in pieces of many sizes."""
    from jax_rnnt_speech.recognition import streams
    from jax_rnnt_speech.recognition.search import Decoding

    model, rng = writer(), np.random.default_rng(0)
    live = streams.Stream(model, Decoding(beam=beam), 0.8)
    while True:
        loud = np.repeat(rng.uniform(0, 1, 30) > 0.3, 2 * model.config.features.rate).astype(np.float32)
        pieces = np.array_split(loud * rng.normal(size=len(loud)).astype(np.float32), rng.integers(20, 200))
        yield sum(len(live.feed(piece)) for piece in pieces)


def requests():
    """Bad uploads, twenty at once, to the server of `rnnt-speech serve`."""
    import aiohttp.web

    from jax_rnnt_speech.cli.serve import Serving
    from jax_rnnt_speech.recognition.search import Decoding
    from jax_rnnt_speech.serving import server

    rng, loop = np.random.default_rng(0), asyncio.new_event_loop()
    runner = server.runner(server.Server(writer(), Decoding(), Serving(name="x")))
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start())
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/audio/transcriptions"

    async def one(session, i):
        form = aiohttp.FormData({"model": "xy"[i % 2]})
        form.add_field("file", rng.bytes(int(rng.integers(0, 20_000))), filename="a.wav")
        async with session.post(url, data=form) as answer:
            assert 400 <= answer.status < 500, await answer.text()
            return answer.status

    async def together():
        async with aiohttp.ClientSession() as session:
            return sum(await asyncio.gather(*(one(session, i) for i in range(20))))

    while True:
        yield loop.run_until_complete(together())


# Name -> (steps one after the other, share of the steps)
KINDS = {
    "jit": (functools.partial(training, dense), 1),
    "buckets": (functools.partial(training, dense, sizes=[(T + 8 * i, U + i) for i in range(6)]), 1),
    "reference": (functools.partial(training, functools.partial(dense, implementation="reference")), 0.1),
    "tiles": (functools.partial(training, tiles), 0.1),
    "eager": (functools.partial(training, dense, jitted=False), 0.1),
    "stream": (stream, 0.05),  # 8 hours
    "beam": (functools.partial(stream, 4), 0.05),
    "requests": (requests, 0.05),  # 10,000
}
OF_SPEECH = "stream", "beam", "requests"


def resident():
    """MB of this process that are in memory."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", default=[x for x in KINDS if x not in OF_SPEECH], choices=list(KINDS))
    parser.add_argument("--allowed", type=float, default=4, help="MB of growth, the noise of an allocator")
    options = parser.parse_args(argv)
    grown = []
    for name in options.kinds:
        start_steps, share = KINDS[name]
        steps, tenth, held, start = start_steps(), max(1, int(options.steps * share) // 10), [], time.monotonic()
        for _ in range(10):
            *_, value = itertools.islice(steps, tenth)
            assert np.isfinite(float(value)), value
            gc.collect()
            held.append(resident())
        grown += [name] * (max(held[4:]) - max(held[:4]) > options.allowed)
        seconds, figures = time.monotonic() - start, " ".join(f"{x:.1f}" for x in held)
        print(f"{name}: {10 * tenth} steps in {seconds:.0f} s; MB after each tenth: {figures}", flush=True)
    if grown:
        print(f"memory grows: {', '.join(grown)}")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
