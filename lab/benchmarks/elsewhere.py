"""Our own transcription beside sherpa-onnx and onnxruntime, with the same weights and recordings, on one core of a CPU.

    .venv-speech/bin/python lab/benchmarks/elsewhere.py --model runs/mine FOLDER    # --features sherpa-onnx, no --chunk

Each measurement is a process of its own, and they take turns. From its start to the first text passes the time to first
words: cold, with no compiled program on the disk, and warm, with those of the run before. Then all recordings are heard
again, one after the other: seconds of audio a second, the best of all turns. `text` is from samples to text; `rows` is
the encoder alone, from samples too. int8 has rounded matrices.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "speech")]
OURS, THEIRS = ("ours, text", "ours, rows"), ("sherpa-onnx, text", "onnxruntime, rows")
KINDS = *OURS, *(f"{x}, {kind}" for x in THEIRS for kind in ("float32", "int8"))


def decode(options, folder):
    """Writes samples and features of the recordings, so that a process imports nothing but what it measures."""
    import numpy as np

    from jax_rnnt_speech.data import audio
    from jax_rnnt_speech.models import open_model

    extractor = open_model(options.model, "cpu").extractor
    files = sorted(x for x in options.data.rglob("*") if x.suffix in (".wav", ".flac"))[: options.recordings]
    samples = [audio.read(x, extractor.rate) for x in files]
    np.savez(folder / "samples.npz", *samples)
    np.savez(folder / "features.npz", *map(extractor, samples))


def ours(kind, model, folder):
    """A function of samples to their text, or of features to the number of their rows."""
    import jax
    import numpy as np

    from jax_rnnt_speech.models import open_model
    from jax_rnnt_speech.recognition import recognise

    model = open_model(model, "cpu", dtype="float32")
    if kind.endswith("text"):
        return lambda x: next(recognise.transcribe(model, [("", x)])).text
    encode = jax.jit(lambda params, x, lengths: model.network(params).encode(x, lengths))

    def rows(x):
        padded = np.pad(model.standardised(x), ((0, -len(x) % 256), (0, 0)))[None]  # few shapes: few programs
        return int(jax.block_until_ready(encode(model.params, padded, np.array([len(x)])))[1][0])

    return rows


def theirs(kind, model, folder):
    options = json.loads((folder / "sherpa.json").read_text())
    files = {x: str(folder / options[x]) for x in ("encoder", "decoder", "joiner", "tokens")}
    if kind.startswith("sherpa"):
        import sherpa_onnx

        recogniser = getattr(sherpa_onnx, options.pop("class")).from_transducer(**options | files, num_threads=1)

        def text(x):
            stream = recogniser.create_stream()
            stream.accept_waveform(options["sample_rate"], x)
            recogniser.decode_stream(stream)
            return stream.result.text.strip()

        return text
    import numpy as np
    import onnxruntime

    threads = onnxruntime.SessionOptions()
    threads.intra_op_num_threads = threads.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(files["encoder"], threads)
    nemo, names = options["model_type"] == "nemo_transducer", [x.name for x in session.get_inputs()]

    def rows(x):
        inputs = (x.T if nemo else x)[None], np.array([len(x)])
        return int(session.run(None, dict(zip(names, inputs)))[1][0])

    return rows


def measure(kind, options):
    """Prints one object: seconds to the first result, seconds of audio a second, and the results; on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import numpy as np

    run = (ours if kind in OURS else theirs)(kind, options.model, options.folder)
    rate = json.loads((options.folder / "sherpa.json").read_text())["sample_rate"]
    samples, features = ([*np.load(options.folder.parent / f"{x}.npz").values()] for x in ("samples", "features"))
    recordings = samples if "text" in kind else features
    run(recordings[0])
    first = time.time() - options.started
    results = [run(x) for x in recordings]  # compiles what is left
    started = time.perf_counter()
    for x in recordings:
        run(x)
    speed = sum(map(len, samples)) / rate / (time.perf_counter() - started)
    print(json.dumps({"first": first, "speed": speed, "results": results}))


def process(kind, options, folder, programs):
    """What `measure` prints in a process of its own."""
    command = [sys.executable, __file__, "--model", options.model, options.data]
    command += ["--kind", kind, "--folder", folder, "--started", time.time()]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs), "OMP_NUM_THREADS": "1",
                                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{kind}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options, work):
    """{kind: figures}; the models of the two types are exported first."""
    folders = {"float32": work / "float32", "int8": work / "int8"}
    for kind, folder in folders.items():
        command = [sys.executable, "-m", "jax_rnnt_speech", "export", folder, "--model", options.model]
        command += ["--format", "sherpa-onnx", *(["--quantize", kind] if kind == "int8" else [])]
        subprocess.run([*map(str, command)], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[1:])})
    decode(options, work)
    found = {kind: {"warm": None} for kind in KINDS}
    for turn in range(options.turns):
        for kind, x in found.items():
            folder = folders["int8" if kind.endswith("int8") else "float32"]
            now = process(kind, options, folder, work / f"programs of {kind}")
            if turn:
                x["warm"] = min(now["first"], x["warm"] or now["first"])
            else:
                x |= {"cold": now["first"], "speed": 0, "results": now["results"]}
                x["MB"] = sum(y.stat().st_size for y in folder.glob("*.onnx*")) / 1e6 if kind not in OURS else None
            x["speed"] = max(now["speed"], x["speed"])
            print(f"{kind}, turn {turn + 1}: {now['first']:.2f} s to the first text", file=sys.stderr)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of recordings")
    parser.add_argument("--model", type=Path, required=True, help="a model that export --format sherpa-onnx takes")
    parser.add_argument("--recordings", type=int, default=40, help="how many of them (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="processes of each kind (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    for name, kind in (("kind", str), ("folder", Path), ("started", float)):  # of a process
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        measure(options.kind, options)
        return
    with tempfile.TemporaryDirectory() as work:
        found = compare(options, Path(work))
    truth = found[OURS[0]]["results"]
    print(f"{'':28} audio s / s  cold, s  warm, s     MB  texts as ours")
    for kind, x in found.items():
        equal = f"{sum(a == b for a, b in zip(truth, x['results']))} of {len(truth)}" if "text" in kind else ""
        warm, size = f"{x['warm'] or 0:.2f}", f"{x['MB'] or 0:.1f}"
        print(f"{kind:28} {x['speed']:11.1f} {x['cold']:8.2f} {warm:>8} {size:>6}  {equal:>13}")
    if options.json:
        options.json.write_text(json.dumps({"load": os.getloadavg(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
