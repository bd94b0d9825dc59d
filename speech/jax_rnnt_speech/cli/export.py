"""Writes a model as files that run without this package: a folder for sherpa-onnx, or one program of JAX's.

The latter, from samples to labels, is what `jax.export.deserialize` reads. Behind it there is a zip, with `model.json`.
"""

import dataclasses
import functools
import importlib.util
import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export as exporting

from jax_rnnt_speech.cli import convert
from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import amount, option
from jax_rnnt_speech.data.tokens import SILENT
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.system import UserError, outputs, refuse_if

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
USUAL = "cpu", "cuda", "tpu"
STABLEHLO = lambda x: x.format == "stablehlo", "--format stablehlo"
DATE = 1980, 1, 1, 0, 0, 0  # date of the member, so that equal models are equal files


def program_of(model):
    """Returns a function from samples [B, S] in [-1, 1] and their numbers [B] to the result of greedy search."""

    def program(samples, lengths):
        """Returns labels, their frames and log-probabilities [B, L], and the number of labels [B]."""
        extractor, network = model.extractor, model.network(model.params)
        x = model.standardised(extractor(samples, jnp, lengths))
        hypotheses = search(model, network, *network.encode(x, extractor.counts(lengths, jnp)))
        return hypotheses.labels, hypotheses.frames, hypotheses.label_log_probs, hypotheses.counts

    return jax.jit(program)


def write(model, path, seconds, platforms):
    """Writes the program for recordings that are padded to `seconds`."""
    tokens, extractor = model.tokens, model.extractor
    rate, samples = extractor.rate, round(seconds * extractor.rate)
    if not extractor.count(samples) or seconds > model.longest:
        most = "one frame or more" + (f", and {model.longest:g} seconds at most" if model.longest < 1e9 else "")
        raise UserError(f"--seconds {seconds:g}: the model hears {most}")
    print(f"lowering for {', '.join(platforms)}", flush=True)
    shape = exporting.symbolic_shape(f"recordings, {samples}")
    shapes = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    made = exporting.export(program_of(model), platforms=platforms)(*shapes)
    about = {"jax": jax.__version__, "rate": rate, "seconds": model.seconds, "samples": samples, "platforms": platforms}
    about |= {"labels": ["" if x in SILENT else x for x in tokens.texts], "separator": tokens.separator}
    with outputs.whole(path) as part:
        part.write_bytes(made.serialize())
        with zipfile.ZipFile(part, "a") as file:
            file.writestr(zipfile.ZipInfo("model.json", DATE), json.dumps(about, ensure_ascii=False))


@dataclasses.dataclass(frozen=True)
class Exporting:
    """Options of the exported form."""

    format: str = option(
        "stablehlo", str, "a file with one program for JAX, or a folder with ONNX files for sherpa-onnx, which runs "
        "without Python too", choices=("stablehlo", "sherpa-onnx"),
    )  # fmt: skip
    platforms: tuple = option(
        (), str, "platforms on which the program shall run (cpu cuda tpu)", nargs="+", choices=PLATFORMS,
        needs=STABLEHLO,
    )  # fmt: skip
    seconds: float = option(30.0, amount, "seconds to which the program pads recordings", needs=STABLEHLO)
    quantize: str | None = option(
        None, str, "type to which the matrices of the ONNX files are rounded", choices=("int8",),
        needs=(lambda x: x.format == "sherpa-onnx", "--format sherpa-onnx"),
    )  # fmt: skip
    overwrite: bool = option(
        False, bool, "write into a folder that is not empty, and replace the model in it", action="store_true",
        needs=(lambda x: x.format == "sherpa-onnx", "--format sherpa-onnx"),
    )  # fmt: skip


def say_written(path, size, model, more):
    """Prints what was written, and for which recordings."""
    print(f"{path}: {size / 1e6:.1f} MB{more}")
    if model.config.encoder.draws:
        print("it hears whole recordings: the contexts for live text, in which the model was trained too, are those of "
              "stream and serve")  # fmt: skip


def export(args):
    to, opening = command_line.taken(args, Exporting), command_line.taken(args, Computing)
    if to.format == "sherpa-onnx":
        return export_folder(args.file, to, opening)
    outputs.check(args.file, [], option="FILE")
    if not importlib.util.find_spec("flatbuffers"):  # jax.export needs it
        raise UserError("export needs flatbuffers: pip install 'jax_rnnt_speech[export]'")
    model = opening.opened("cpu")
    write(model, args.file, to.seconds, to.platforms or USUAL)
    say_written(args.file, args.file.stat().st_size, model, "")
    print(f"written by jax {jax.__version__}: versions more than six months newer may refuse it, so keep the model")
    return 0


def export_folder(folder, to, opening):
    if not importlib.util.find_spec("onnx"):
        raise UserError("--format sherpa-onnx needs onnx: pip install 'jax_rnnt_speech[export]'")
    from jax_rnnt_speech.export import sherpa

    refuse_if(opening.dtype == "bfloat16", "--dtype bfloat16: files for sherpa-onnx are of float32, or by --quantize")
    convert.claim(folder, opening.folder, to.overwrite)
    model = dataclasses.replace(opening, dtype="float32").opened("cpu")
    with outputs.whole_folder(folder, keep=lambda name: name.partition(".")[0] not in sherpa.PARTS) as new:
        sherpa.write(model, new, opening.folder, to.quantize)
    size = sum(x.stat().st_size for part in sherpa.PARTS for x in folder.glob(f"{part}.onnx*"))
    say_written(folder, size, model, " for sherpa-onnx; README.md says how to run it")
    return 0


ABOUT = "what is written: a file for JAX, or a folder for sherpa-onnx"
COMMAND = (
    "export", "write a model as files that run without this package", export,
    lambda parser: parser.add_argument("file", type=Path, metavar="PATH", help=ABOUT),
    Exporting, functools.partial(command_line.add_fields, kind=Computing, but=["platform"]),
)  # fmt: skip
