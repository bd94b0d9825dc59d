"""Times a step on batches of LibriSpeech's lengths, from encoder and predictor output to all gradients.

    python benchmarks/librispeech.py                    # a GPU: whole batches; a CPU: every tenth utterance of each
    python benchmarks/librispeech.py --torch-python build/peers/bin/python

As csukuangfj/transducer-loss-benchmarking does on a GPU: hidden = tanh(encoder + predictor), logits = hidden @ W + b,
sum of the losses, gradients of all four, float32; V = 500, H = 512. Batches of 30 utterances in file order, and batches
of up to 10,000 frames of utterances sorted by T. README.md has its published table.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torchaudio needs memory, too

import bench
import jax
import jax.numpy as jnp
import numpy as np
from librispeech_problems import BLANK, ORDERS, H, V, batches, make, padded

from jax_rnnt import LinearJoint, joint_rnnt_loss, rnnt_loss, rnnt_loss_packed

HERE = Path(__file__).parent
# XLA compiles for shapes: ours are padded to these multiples of T and U + 1, and of rows, as training code does.
FRAMES, COLUMNS, ROWS = 32, 8, 1 << 14


def logits_in_memory(parameters, rows, rest, nodes):
    weight, bias = parameters
    hidden = jnp.tanh(rows[0][:, :, None] + rows[1][:, None])
    logits = hidden.reshape(-1, H) @ weight + bias
    return rnnt_loss(logits.reshape(*hidden.shape[:-1], V), *rest, BLANK, reduction="sum")


def packed(parameters, rows, rest, nodes):
    """`nodes`: [3, N] sequence, frame and column of each row; rows past the last node repeat it."""
    weight, bias = parameters
    b, t, u = nodes
    logits = jnp.tanh(rows[0][b, t] + rows[1][b, u]) @ weight + bias
    return rnnt_loss_packed(logits, *rest, BLANK, reduction="sum", max_frames=rows[0].shape[1])


def in_tiles(parameters, rows, rest, nodes):
    return joint_rnnt_loss(LinearJoint(*parameters), *rows, *rest, BLANK, reduction="sum")


OURS = {"ours, logits in memory": logits_in_memory, "ours, packed": packed, "ours, in tiles": in_tiles}


def nodes_of(lengths):
    found = [np.indices((T, U + 1)).reshape(2, -1) for T, U in zip(*lengths)]
    sequence = np.repeat(np.arange(len(found)), [x.shape[1] for x in found])
    nodes = np.concatenate([sequence[None], np.concatenate(found, 1)]).astype(np.int32)
    return np.pad(nodes, ((0, 0), (0, -nodes.shape[1] % ROWS)), "edge")


class Ours:
    """A compiled step on one batch; `megabytes` of arguments, results and workspace."""

    def __init__(self, loss, arguments):
        self.step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
        self.arguments = arguments
        memory = self.step.memory_analysis()
        parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes") if memory else ()
        self.megabytes = sum(getattr(memory, part) for part in parts) / 1e6 or None

    def run(self):
        start = time.perf_counter()
        value, gradient = jax.block_until_ready(self.step(*self.arguments))
        seconds = time.perf_counter() - start
        sample = np.asarray(gradient[0][0]).reshape(-1)[::997].astype(np.float64)
        return {"seconds": seconds, "loss": float(value), "gradient": sample, "megabytes": self.megabytes}


class Torchaudio:
    """The process of librispeech_torch.py."""

    def __init__(self, python, threads):
        command = [python, str(HERE / "librispeech_torch.py"), *([str(threads)] if threads else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = json.loads(self.process.stdout.readline() or "{}")
        if not self.version:
            self.close()
            raise OSError(f"{python} has no torch and torchaudio")

    def close(self):
        self.process.communicate()

    def run(self, *batch):
        try:
            print(json.dumps(batch), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise OSError("the process of torchaudio ended")
        found = json.loads(answer)
        return found | {"gradient": np.array(found["gradient"])}


def take_turns(row, contestants, repeat, limit, left, left_out):
    """Every contestant runs once untimed, then all in turn; those that fail are left out."""
    runs, first = {}, None
    for turn in range(repeat + 1):
        for name, make_run in contestants.items():
            what = f"{row['order']}, batch {row['index']}: {name}"
            if name in row["failed"]:
                continue
            if left() <= 0:
                left_out.append((what, f"no time left for turn {turn}"))
                row["failed"].append(name)
                continue
            try:
                runs[name] = runs.get(name) or make_run()
                found = runs[name]()
                first = first or found
                check(found, first, limit)
            except Exception as error:
                left_out.append((what, f"{type(error).__name__}: {str(error)[:300]}"))
                row["failed"].append(name)
                continue
            if turn == 0:
                row["times"][name] = {"seconds": [], "megabytes": found["megabytes"]}
            else:
                row["times"][name]["seconds"].append(found["seconds"])
    row["times"] = {name: found for name, found in row["times"].items() if found["seconds"]}


class Disagreement(ValueError):
    """Contestants computed different losses or gradients."""


def check(found, first, limit):
    """Losses and gradients of one batch must agree; `limit` is relative to the largest."""
    off = abs(found["loss"] / first["loss"] - 1)
    truth = first["gradient"]
    off = max(off, float(np.abs(found["gradient"] - truth).max() / np.abs(truth).max()))
    if not off <= limit:
        raise Disagreement(f"loss and gradient are off those of the first contestant by {off:.1e}")


def report(record):
    """Markdown: for each order and contestant, the mean over the batches that all contestants have run."""
    text = []
    for order in ORDERS:
        rows = [row for row in record["batches"] if row["order"] == order]
        names = list(dict.fromkeys(name for row in rows for name in row["times"]))
        common = [row for row in rows if all(name in row["times"] for name in names)]
        if not common:
            continue
        sizes = [(len(row["T"]), max(row["T"]), max(row["U"])) for row in common]
        B, T, U = (sum(x) / len(x) for x in zip(*sizes))
        nodes = [np.dot(row["T"], np.add(row["U"], 1)) for row in common]
        valid = np.mean([n / (B * T * (U + 1)) for n, (B, T, U) in zip(nodes, sizes)])
        size = f"B={B:.1f} T={T:.0f} U={U:.0f}, {valid:.0%} of the nodes valid"
        text.append(f"### {order}: {len(common)} batches, on average {size}\n")
        lines = ["| | ms a batch | of the fastest steps | x in memory | MB at most |", "|---|--:|--:|--:|--:|"]
        mean, best = (
            {n: np.mean([f(r["times"][n]["seconds"]) for r in common]) * 1e3 for n in names} for f in (np.median, min)
        )
        for name in names:
            peaks = [row["times"][name]["megabytes"] for row in common]
            peak = "" if None in peaks else f"{max(peaks):.0f}"
            ratio = mean[name] / mean[names[0]]
            lines.append(f"| {name} | {mean[name]:.1f} | {best[name]:.1f} | {ratio:.2f} | {peak} |")
        text.append("\n".join(lines) + "\n")
    text += [f"left out: {what}: {why}\n" for what, why in record["left_out"]]
    return "\n".join(text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=3, help="of each order (%(default)s)")
    parser.add_argument("--share", type=float, help="of the utterances of each batch (GPU: 1, CPU: 0.1)")
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths, for trials (%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="steps of each batch and contestant (%(default)s)")
    parser.add_argument("--budget", type=float, default=600, help="seconds (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores on a CPU (%(default)s)")
    parser.add_argument("--torch-python", help="Python that has torch and torchaudio (this one)")
    parser.add_argument("--output", type=Path, help="folder of DATE-DEVICE-librispeech.json (none)")
    args = parser.parse_args(argv)
    start, gpu, load = time.monotonic(), jax.default_backend() == "gpu", os.getloadavg()
    if not gpu and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    share = args.share or (1.0 if gpu else 0.1)
    now, device = datetime.datetime.now(datetime.UTC), jax.devices()[0].device_kind
    record = {
        "date": now.isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT")
        or bench.command_output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "machine": bench.machine() | {"device": device},
        "load_average": {"before": load},
        "versions": {"jax": jax.__version__},
        "share": share,
        "shrink": args.shrink,
        "batches": [],
        "left_out": [],
    }
    try:
        peer = Torchaudio(args.torch_python or sys.executable, None if gpu else args.threads)
        record["versions"] |= peer.version
    except OSError as error:
        peer = None
        record["left_out"].append(("torchaudio", str(error)))

    def left():
        return args.budget - (time.monotonic() - start)

    # The same number of batches of either order, spread over those of the published table.
    for i in range(args.batches):
        for order in ORDERS:
            chosen = batches(order, share, args.shrink)
            index = i * len(chosen) // args.batches
            lengths = chosen[index]
            row = {"order": order, "index": index, "T": lengths[0].tolist(), "U": lengths[1].tolist()}
            row |= {"times": {}, "failed": []}
            record["batches"].append(row)
            arguments = jax.tree.map(jnp.asarray, make(lengths, *padded(lengths, FRAMES, COLUMNS), seed=index))
            arguments = *arguments, jnp.asarray(nodes_of(lengths))
            contestants = {name: lambda f=f, a=arguments: Ours(f, a).run for name, f in OURS.items()}
            if peer:
                contestants["torchaudio"] = lambda batch=(order, index, share, args.shrink): lambda: peer.run(*batch)
            limit = 2e-2 if gpu else 1e-3  # a GPU multiplies float32 as TF32
            take_turns(row, contestants, args.repeat, limit, left, record["left_out"])
    if peer:
        peer.close()
    record["load_average"]["after"] = os.getloadavg()
    print(report(record))
    if args.output:
        name = device.lower().replace(" ", "-")
        args.output.mkdir(parents=True, exist_ok=True)
        file = args.output / f"{now:%Y-%m-%d}-{name}-librispeech.json"
        file.write_text(bench.compact(record) + "\n")
    wrong = any(why.startswith("Disagreement") for _, why in record["left_out"])
    return int(wrong or not any(row["times"] for row in record["batches"]))


if __name__ == "__main__":
    sys.exit(main())
