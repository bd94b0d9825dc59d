"""Times greedy search and a beam at the sizes of Parakeet TDT 0.6B v3: V = 8193, 5 durations, two LSTMs, 640 wide.

    python lab/benchmarks/parakeet_search.py                  # B = 1, 8, 16, 128; 100 frames, on 30 of which is a label
    python lab/benchmarks/parakeet_search.py --batch 1 --frames 10 --json FILE

Every label is planted, so all searches must find the same ones. The search alone is timed, from projected rows to
labels; each number is the median of turns that the contestants take one after the other.
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import searches

from jax_rnnt import LinearJoint, TDTLoss, decode

V, SHARE, WIDTH = 8193, 0.3, 6
CONTESTANTS = {"greedy": (0, 1), "beam 6": (WIDTH, 1), "beam 6, 4 frames at once": (WIDTH, 4)}


def planted(batch, frames):
    """(weights of the networks, encoder_out, labels of each utterance)"""
    rng, h = np.random.default_rng(0), searches.H
    directions = rng.standard_normal((V, h), np.float32) / np.float32(h**0.5)
    durations = len(searches.DURATIONS)
    bias = np.concatenate([14 * (np.arange(V) == 0), 8 * (np.arange(durations) == 1)]).astype(np.float32)
    output = np.concatenate([20 * directions.T, np.zeros((h, durations), np.float32)], 1)
    encoder = 0.01 * rng.standard_normal((batch, frames, h), np.float32)
    labels = []
    for b in range(batch):
        at = np.sort(rng.choice(frames, max(1, round(SHARE * frames)), replace=False))
        labels.append(rng.integers(1, V, len(at)).tolist())
        encoder[b, at] += 1.5 * directions[labels[-1]]
    layers = [0.02 * rng.standard_normal(searches.LAYER, np.float32) for _ in range(2)]
    weights = [0.01 * directions, *layers]
    return jax.tree.map(jnp.asarray, (weights, output, bias)), jnp.asarray(encoder), labels


def program(width, frames_at_once, room, options):
    def run(networks, encoder, lengths):
        weights, output, bias = networks
        loss = TDTLoss(blank=0, durations=searches.DURATIONS)
        search = decode.Search(loss, LinearJoint(output, bias), searches.lstm(weights), room)
        if not width:
            found = search.greedy(encoder, lengths)
            return found.labels, found.counts
        found = search.beam(encoder, lengths, width, frames_at_once=frames_at_once)
        return found.labels[:, 0], found.counts[:, 0]

    return jax.jit(run, compiler_options=options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 16, 128])
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options, results = parser.parse_args(), {}
    loops = {"": None} | ({", loop on the device": searches.GRAPHS} if jax.default_backend() == "gpu" else {})
    for batch in options.batch:
        networks, encoder, labels = planted(batch, options.frames)
        lengths, runs = jnp.full(batch, options.frames, jnp.int32), {}
        for name, sizes in CONTESTANTS.items():
            for more, graphs in loops.items():
                runs[name + more] = (
                    program(*sizes, len(labels[0]) + 8, graphs).lower(networks, encoder, lengths).compile()
                )
        for name, run in runs.items():
            rows, counts = map(np.asarray, run(networks, encoder, lengths))
            assert [row[:n].tolist() for row, n in zip(rows, counts)] == labels, f"{name} found other labels"
        times = {name: [] for name in runs}
        for _ in range(options.repeat):
            for name, run in runs.items():
                began = time.perf_counter()
                jax.block_until_ready(run(networks, encoder, lengths))
                times[name].append(1000 * (time.perf_counter() - began))
        results[batch] = {name: statistics.median(x) for name, x in times.items()}
        print(f"B = {batch}: " + ", ".join(f"{name} {x:.2f} ms" for name, x in results[batch].items()), flush=True)
    if options.json:
        found = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "frames": options.frames}
        options.json.write_text(json.dumps(found | {"ms": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
