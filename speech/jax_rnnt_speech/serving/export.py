"""A model as one file that runs without this package: samples to labels, and the vocabulary.

`jax.export.deserialize` reads the file. Behind the program there is a zip, with `model.json` in it.
"""

import importlib.util
import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import export as exporting

from jax_rnnt_speech import pretrained
from jax_rnnt_speech.config import amount
from jax_rnnt_speech.data.tokens import SILENT
from jax_rnnt_speech.system import UserError, outputs

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
DATE = 1980, 1, 1, 0, 0, 0  # of the member, so that equal models are equal files


def program_of(recogniser):
    """A function of samples [B, S] in [-1, 1] and their numbers [B]: what greedy search finds in them."""

    def program(samples, lengths):
        """-> labels, frames, log-probabilities [B, L] and the number of each, [B]."""
        extractor, model = recogniser.extractor, recogniser.model(recogniser.params)
        x = recogniser.standardised(extractor(samples, jnp, lengths))
        found = recogniser.search(model, *model.encode(x, extractor.counts(lengths, jnp)))
        return found.labels, found.frames, found.label_log_probs, found.counts

    return jax.jit(program)


def export(args):
    outputs.check(args.file, [], option="FILE")
    if not importlib.util.find_spec("flatbuffers"):  # of jax.export
        raise UserError("export needs flatbuffers: pip install 'jax_rnnt_speech[export]'")
    recogniser = pretrained.open_model(args.model, "cpu", args.checkpoint)
    tokens, extractor = recogniser.tokens, recogniser.extractor
    rate, samples = extractor.rate, round(args.seconds * extractor.rate)
    if not extractor.count(samples) or args.seconds > recogniser.longest:
        most = "one frame or more" + (
            f", and {recogniser.longest:g} seconds at most" if recogniser.longest < 1e9 else ""
        )
        raise UserError(f"--seconds {args.seconds:g}: the model hears {most}")
    print(f"lowering for {', '.join(args.platforms)}", flush=True)
    shape = exporting.symbolic_shape(f"recordings, {samples}")
    shapes = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    made = exporting.export(program_of(recogniser), platforms=args.platforms)(*shapes)
    about = {"rate": rate, "seconds": recogniser.seconds, "samples": samples, "platforms": args.platforms}
    about |= {"labels": ["" if x in SILENT else x for x in tokens.texts], "separator": tokens.separator}
    with outputs.whole(args.file) as part:
        part.write_bytes(made.serialize())
        with zipfile.ZipFile(part, "a") as file:
            file.writestr(zipfile.ZipInfo("model.json", DATE), json.dumps(about, ensure_ascii=False))
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.1f} MB")
    return 0


def add_command(commands):
    parser = commands.add_parser("export", help="a model as one file that JAX runs without this package")
    parser.add_argument("file", type=Path, metavar="FILE", help="to write: the program, and a zip with its vocabulary")
    parser.add_argument("--model", type=Path, required=True, help="folder of a training, or of transformers")
    pretrained.add_checkpoint(parser)
    help = "on which it runs (cpu cuda tpu)"
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=["cpu", "cuda", "tpu"], help=help)
    parser.add_argument("--seconds", type=amount, default=30, help="of a padded recording (%(default)s)")
    parser.set_defaults(run=export)
