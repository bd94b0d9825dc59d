"""Streams at once against `rnnt-speech serve`, in real time: the latency of words; then bad requests without a leak.

    rnnt-speech serve --model runs/mine --connections 32 &
    python lab/benchmarks/serve.py a.flac --rate 16000 --streams 32 --pid PID [--bad 10000]

A stream sends 0.1 s of its recording every 0.1 s. An event has the `time` up to which the audio was decoded: it is late
by what has passed since that was sent, as the client sees it. Exits with 1 where the server's resident
memory grows by more than --allowed MB over the last half of the bad requests.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time

import aiohttp
import numpy as np
from soak import resident

from jax_rnnt_speech.data import audio

BLOCK = 0.1  # seconds of a message


async def stream(session, options, samples, delay):
    """Seconds from each event's audio, as it was sent, to the event."""
    late, sent, size = [], [], int(BLOCK * options.rate)
    await asyncio.sleep(delay)
    async with session.ws_connect(f"{options.url}/v1/stream?rate={options.rate}") as socket:

        async def send():
            begin = time.perf_counter()
            for i, start in enumerate(range(0, len(samples), size)):
                await asyncio.sleep(max(0, begin + i * BLOCK - time.perf_counter()))
                sent.append(time.perf_counter())
                await socket.send_bytes(samples[start : start + size].tobytes())
            await socket.send_str("end")

        task = asyncio.create_task(send())
        async for message in socket:
            event = json.loads(message.data)
            if event["type"] in ("partial", "words"):
                late.append(time.perf_counter() - sent[min(int(event["time"] / BLOCK), len(sent) - 1)])
            elif event["type"] == "error":
                raise SystemExit(message.data)
        await task
    return late


async def bad(session, options):
    """Bad requests, twenty at once; MB of the server after each tenth."""
    rng, held, together = np.random.default_rng(0), [], 20

    async def one(i):
        form = aiohttp.FormData({"model": ["x", options.model][i % 2]})
        form.add_field("file", rng.bytes(int(rng.integers(0, 20_000))), filename="a.wav")
        async with session.post(f"{options.url}/v1/audio/transcriptions", data=form) as answer:
            assert 400 <= answer.status < 500, await answer.text()

    for _ in range(10):
        for first in range(0, options.bad // 10, together):
            await asyncio.gather(*(one(first + i) for i in range(together)))
        held.append(resident(options.pid))
    print(f"{options.bad} bad requests; MB after each tenth: {' '.join(f'{x:.1f}' for x in held)}")
    return held[-1] - held[4] > options.allowed


async def run(options):
    samples = (32767 * np.clip(audio.read(options.file, options.rate), -1, 1)).astype(np.int16)
    samples = np.tile(samples, -(-int(options.seconds * options.rate) // len(samples)))
    samples = samples[: int(options.seconds * options.rate)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{options.url}/health") as answer:
            options.model = (await answer.json())["model"]
        delays = np.linspace(0, 1, options.streams, endpoint=False)
        streams = await asyncio.gather(*(stream(session, options, samples, x) for x in delays))
        late = list(itertools.chain(*streams))
        if late:
            median, most = 1000 * np.percentile(late, (50, 99))
            print(f"{options.streams} streams of {options.seconds:g} s: {len(late)} events, {median:.0f} ms late "
                  f"(median), {most:.0f} ms (99th percentile)", flush=True)  # fmt: skip
        return int(await bad(session, options)) if options.bad else 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="of speech; repeated to --seconds")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--rate", type=int, default=16000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--bad", type=int, default=10_000)
    parser.add_argument("--allowed", type=float, default=8, help="MB of growth, the noise of an allocator")
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
