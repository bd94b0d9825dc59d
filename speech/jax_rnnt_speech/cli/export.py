"""Writes a model as one file."""

import importlib.util
from pathlib import Path

from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import amount
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.serving.export import PLATFORMS, write
from jax_rnnt_speech.system import UserError, outputs


def export(args):
    outputs.check(args.file, [], option="FILE")
    if not importlib.util.find_spec("flatbuffers"):  # of jax.export
        raise UserError("export needs flatbuffers: pip install 'jax_rnnt_speech[export]'")
    model = command_line.taken(args, Computing).opened("cpu")
    write(model, args.file, args.seconds, args.platforms)
    print(f"{args.file}: {args.file.stat().st_size / 1e6:.1f} MB")
    return 0


def add_command(commands):
    parser = commands.add_parser("export", help="write a model as one file that JAX runs without this package")
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="file that is written: the program, and behind it a zip with the vocabulary",
    )
    command_line.add_fields(parser, Computing, but=["platform"])
    help = "platforms on which the program shall run (cpu cuda tpu)"
    parser.add_argument("--platforms", nargs="+", choices=PLATFORMS, default=["cpu", "cuda", "tpu"], help=help)
    parser.add_argument(
        "--seconds", type=amount, default=30, help="seconds to which the program pads recordings (%(default)s)"
    )
    parser.set_defaults(run=export)
