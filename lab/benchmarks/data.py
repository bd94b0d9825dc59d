"""Costs of data at scale: a million utterances that are made of few files, without a model. Alone on the machine.

    PYTHONPATH=speech python lab/benchmarks/data.py [--utterances 1000000] [--folder FOLDER] [--parts start ...]

Parts: `start` is a manifest with and without durations, and tars: seconds until the first batch, and memory. `memory`
is that after an epoch of all utterances beside that after 10,000; they last a quarter of a second, and the decoder is
replaced by silence (`--parts memory --utterances 1000000`). `rate` is seconds of audio that a second of one core makes
features of: FLAC, MP3 and tars of FLAC, plain and at other speeds in noise.
"""

import argparse
import io
import itertools
import json
import pathlib
import resource
import subprocess
import sys
import tarfile
import time
import types

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ "
RATE, FILES = 16000, 20
AUGMENTED = {"speeds": [0.9, 1.1], "gain": 6.0}


def sounds(folder, seconds, kind):
    """A few files of noise with the envelope of syllables."""
    import numpy as np

    from jax_rnnt_speech.data import audio

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i}.{kind}" for i in range(FILES)]
    for i, path in enumerate(paths):
        if not path.exists():
            rng, time = np.random.default_rng(i), np.arange(int(seconds * RATE)) / RATE
            audio.write(path, 0.1 * rng.normal(size=len(time)) * np.sin(8 * time) ** 2, RATE)
    return paths


def manifest(path, files, count, seconds):
    """Lines for `count` utterances; `seconds`: their durations are written, too."""
    if not path.exists():
        with path.open("w") as out:
            for i in range(count):
                row = {"audio": str(files[i % len(files)]), "text": "A TEXT OF SOME WORDS"[: 4 + i % 16]}
                out.write(json.dumps(row | ({"duration": seconds} if seconds else {})) + "\n")
    return path


def tars(folder, files, count, each=1000):
    """Tars of `each` utterances. All but the first are links, as only their names differ."""
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "part-000000.tar"
    if not first.exists():
        with tarfile.open(first, "w") as tar:
            for i, j in enumerate(itertools.islice(itertools.cycle(range(len(files))), min(each, count))):
                for kind, data in ((files[j].suffix, files[j].read_bytes()), (".txt", b"A TEXT OF SOME WORDS")):
                    info = tarfile.TarInfo(f"{i:06}{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    for k in range(1, -(-count // each)):
        link = folder / f"part-{k:06}.tar"
        link.exists() or link.symlink_to(first.name)
    return folder


def opened(source, folder, **options):
    from jax_rnnt_speech.config import Config
    from jax_rnnt_speech.data import tokens
    from jax_rnnt_speech.data.source import Source

    config = Config.from_options(train=str(source), on_the_fly=True, **options)
    model = types.SimpleNamespace(tokens=tokens.Characters(ALPHABET), subsampling=4)
    return Source(config, folder).opened(model, 1)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def resident():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def start(args):
    """One row of `start`, in a process of its own."""
    began = time.perf_counter()
    found = opened(args.source, args.index)
    next(iter(found.read(0, 1)))
    return {"seconds": time.perf_counter() - began, "GB": peak()}


def memory(args):
    import numpy as np

    from jax_rnnt_speech.data import loading

    loading.samples_of = lambda entry, rate, again: (np.zeros(rate // 4, np.float32), None)
    found, sizes = opened(args.source, args.index, batch=64), []
    steps = found.steps(1)
    for i, _ in enumerate(found.read(0, steps)):
        if (i + 1) * 64 >= 10_000 and not sizes:
            sizes.append(resident())
    return {"utterances": steps * 64, "GB after 10,000": sizes[0] if sizes else resident(), "GB": resident()}


def rate(args):
    found = opened(args.source, args.index, **(AUGMENTED | {"noise": args.noise} if args.noise else {}))
    batches = found.read(0, 2 + args.steps)
    for _ in range(2):
        next(batches)
    began, frames = time.process_time(), 0
    for batch in batches:
        frames += int(batch["lengths"][batch["valid"]].sum())
    return {"seconds of audio a second": frames * found.hop / (time.process_time() - began)}


PARTS = {"start": start, "memory": memory, "rate": rate}


def alone(part, source, index, **options):
    """The figures of a part, from a process of its own."""
    more = [x for name, value in options.items() for x in (f"--{name}", str(value))]
    command = [sys.executable, __file__, "--child", part, "--source", source, "--index", index, *more]
    out = subprocess.run([str(x) for x in command], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def shown(name, found):
    numbers = (f"{key} {x:.3g}" if isinstance(x, float) else f"{key} {x}" for key, x in found.items())
    print(f"{name}: {', '.join(numbers)}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=1_000_000)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/data"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--steps", type=int, default=20)
    for name in ("child", "source", "noise"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, default="")
    parser.add_argument("--index", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(PARTS[args.child](args)))
        return
    folder, count = args.folder.resolve() / str(args.utterances), args.utterances
    fresh = itertools.count()

    def index():
        return folder / f"index-{time.time_ns()}-{next(fresh)}"

    short, long = sounds(folder.parent / "short", 0.25, "flac"), sounds(folder.parent / "long", 10, "flac")
    noise = sounds(folder.parent / "noise", 20, "flac")[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    written, bare = (
        manifest(folder / f"{name}.jsonl", short, count, x) for name, x in (("written", 0.25), ("bare", 0))
    )
    if "start" in args.parts:
        for name, source in (
            ("manifest with durations", written),
            ("without", bare),
            ("tars", tars(folder / "tars", short, count)),
        ):
            place = index()
            shown(f"{count:,} utterances, {name}", alone("start", source, place))
            shown("  again, with its index", alone("start", source, place))
    if "memory" in args.parts:
        found = shown("an epoch", alone("memory", written, index()))
        print(f"  ratio {found['GB'] / found['GB after 10,000']:.3f}")
    if "rate" in args.parts:
        for kind in ("flac", "mp3"):
            files = sounds(folder.parent / f"long-{kind}", 10, kind)
            lines = manifest(folder.parent / f"{kind}.jsonl", files, 2000, 10)
            for name, more in (("plain", {}), ("speeds, noise and gain", {"noise": noise})):
                shown(f"{kind}, {name}", alone("rate", lines, index(), steps=args.steps, **more))
        source = tars(folder.parent / "long-tars", long, 2000)
        for name, more in (("plain", {}), ("speeds, noise and gain", {"noise": noise})):
            shown(f"tar of flac, {name}", alone("rate", source, index(), steps=args.steps, **more))


if __name__ == "__main__":
    main()
