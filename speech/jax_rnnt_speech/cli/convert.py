"""Writes a model to hand on."""

import dataclasses
import functools
from pathlib import Path

from jax_rnnt_speech import runs
from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import option
from jax_rnnt_speech.models import Opening
from jax_rnnt_speech.pretrained import hugging_face, package
from jax_rnnt_speech.system import UserError, as_user_error, outputs, refuse_if


@dataclasses.dataclass(frozen=True)
class Converting:
    """The options of the folder that is written."""

    dtype: str = option("float32", str, "type of the weights", choices=("float32", "bfloat16", "float16"))
    card: Path | None = option(None, Path, "write our own form, with the text of this file in card.md", metavar="FILE")
    overwrite: bool = option(
        False, bool, "write into a folder that is not empty, and replace the model in it", action="store_true"
    )


def claim(folder, source, overwrite):
    """Raises an error where a folder cannot take the files of a model that is read from another one."""
    for place in (folder, *folder.parents):
        refuse_if(place.exists() and not place.is_dir(), f"{folder}: {place} must be a folder, and is a file")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UserError(f"{folder} must be an empty folder: --overwrite writes into a full one")
    refuse_if((folder / runs.CHECKPOINTS).exists(), f"{folder} holds a training: name another folder")
    refuse_if(folder.resolve() == source.resolve(), f"{folder} must not be the folder that is read")
    outputs.claim(folder, f"{folder}")


def convert(args):
    to, opening = command_line.taken(args, Converting), command_line.taken(args, Opening)
    claim(args.folder, opening.folder, to.overwrite)
    model = opening.opened()
    if to.dtype != "float32":
        print(f"weights are rounded to {to.dtype}")
    if to.card is None and hugging_face.fits(model):
        hugging_face.write(model, args.folder, to.dtype)
        return 0
    with as_user_error(f"--card {to.card} is not readable", OSError, UnicodeDecodeError):
        card = to.card.read_text("utf-8") if to.card else ""
    package.write(model, args.folder, to.dtype, card)
    return 0


def folder(parser):
    about = "folder that is written, for transformers if it can read the model, else in our own form"
    parser.add_argument("folder", type=Path, help=about)


COMMAND = (
    "convert", "write a model that you want to hand on", convert, folder,
    functools.partial(command_line.add_fields, kind=Opening, but=["platform"]), Converting,
)  # fmt: skip
