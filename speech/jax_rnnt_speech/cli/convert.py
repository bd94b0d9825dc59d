"""Writes a model to hand on."""

from pathlib import Path

from jax_rnnt_speech import runs
from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.models import Opening
from jax_rnnt_speech.pretrained import hugging_face, package
from jax_rnnt_speech.system import UserError, reason


def convert(args):
    if args.folder.is_file() or (args.folder.is_dir() and any(args.folder.iterdir()) and not args.overwrite):
        raise UserError(f"{args.folder} must be an empty folder: --overwrite writes into a full one")
    if (args.folder / runs.CHECKPOINTS).exists():
        raise UserError(f"{args.folder} holds a training: name another folder")
    opening = command_line.taken(args, Opening)
    if args.folder.resolve() == opening.folder.resolve():
        raise UserError(f"{args.folder} must not be the folder that is read")
    model = opening.opened()
    if args.dtype != "float32":
        print(f"weights are rounded to {args.dtype}")
    if args.card is None and hugging_face.fits(model):
        hugging_face.write(model, args.folder, args.dtype)
        return 0
    try:
        card = args.card.read_text("utf-8") if args.card else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--card {args.card} is not readable: {reason(error)}") from None
    package.write(model, args.folder, args.dtype, card)
    return 0


def add_command(commands):
    parser = commands.add_parser("convert", help="write a model that you want to hand on")
    parser.add_argument(
        "folder",
        type=Path,
        help="folder that is written, for transformers if it can read the model, else in our own form",
    )
    command_line.add_fields(parser, Opening, but=["platform"])
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="type of the weights (%(default)s)",
    )
    parser.add_argument(
        "--card", type=Path, metavar="FILE", help="write our own form, with the text of this file in card.md"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="write into a folder that is not empty, and replace the model in it"
    )
    parser.set_defaults(run=convert)
