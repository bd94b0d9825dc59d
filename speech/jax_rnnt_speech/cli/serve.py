"""The command `serve`; the server itself needs aiohttp, which no other command does."""

import dataclasses

from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition.search_options import Searching, decoding_of
from jax_rnnt_speech.serving.options import Serving
from jax_rnnt_speech.system import UserError


def serve(args):
    try:
        from jax_rnnt_speech.serving import server
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise UserError("serve needs aiohttp: pip install 'jax_rnnt_speech[serve]'") from None
    searching, opening = command_line.taken(args, Searching).checked(), command_line.taken(args, Computing)
    options, model = command_line.taken(args, Serving), opening.opened()
    options = dataclasses.replace(options, name=options.name or opening.folder.resolve().name)
    server.run(server.Server(model, decoding_of(searching, model), options))
    return 0


def add_command(commands):
    parser = commands.add_parser(
        "serve", help="answer over HTTP: files in the form of OpenAI's clients, and live streams"
    )
    command_line.add_fields(parser, Serving)
    command_line.add_fields(parser, Computing)
    command_line.add_fields(parser.add_argument_group("search"), Searching, but=["confidence"])
    parser.set_defaults(run=serve)
