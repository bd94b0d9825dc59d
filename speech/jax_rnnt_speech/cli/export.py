"""Writes a model as one file that runs without this package: samples to labels, and the vocabulary.

`jax.export.deserialize` reads the file. Behind the program there is a zip, with `model.json` in it.
"""

import importlib.util
import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export as exporting

from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import amount
from jax_rnnt_speech.data.tokens import SILENT
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.system import UserError, outputs

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
DATE = 1980, 1, 1, 0, 0, 0  # of the member, so that equal models are equal files


def program_of(model):
    """A function of samples [B, S] in [-1, 1] and their numbers [B]: what greedy search finds in them."""

    def program(samples, lengths):
        """Labels, their frames and log-probabilities [B, L], and how many there are [B]."""
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


def export(args):
    outputs.check(args.file, [], option="FILE")
    if not importlib.util.find_spec("flatbuffers"):  # of jax.export
        raise UserError("export needs flatbuffers: pip install 'jax_rnnt_speech[export]'")
    model = command_line.taken(args, Computing).opened("cpu")
    write(model, args.file, args.seconds, args.platforms)
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.1f} MB")
    print(f"written by jax {jax.__version__}: versions more than six months newer may refuse it, so keep the model")
    return 0


def arguments(parser):
    about = "file that is written: the program, and behind it a zip with the vocabulary"
    parser.add_argument("file", type=Path, metavar="FILE", help=about)
    command_line.add_fields(parser, Computing, but=["platform"])
    about = "platforms on which the program shall run (cpu cuda tpu)"
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=["cpu", "cuda", "tpu"], help=about)
    about = "seconds to which the program pads recordings (%(default)s)"
    parser.add_argument("--seconds", type=amount, default=30, help=about)


COMMAND = "export", "write a model as one file that JAX runs without this package", export, arguments
