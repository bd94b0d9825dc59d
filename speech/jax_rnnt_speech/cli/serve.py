"""The command `serve`; the server itself needs aiohttp, which no other command does."""

import argparse
import re

from jax_rnnt_speech import models
from jax_rnnt_speech.config.options import amount, number, positive
from jax_rnnt_speech.recognition import search_options
from jax_rnnt_speech.system import UserError


def serve(args):
    try:
        from jax_rnnt_speech.serving import server
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise UserError("serve needs aiohttp: pip install 'jax_rnnt_speech[serve]'") from None
    search_options.check(args)
    model = models.opened(args)
    server.run(server.Server(model, search_options.decoding_of(args, model), args), args)
    return 0


def origin(text):
    """An argument of --cors, as browsers write origins."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text) and text != "null":
        raise argparse.ArgumentTypeError(f"expected *, or SCHEME://HOST[:PORT] without a path, got {text}")
    return text


def add_command(commands):
    parser = commands.add_parser(
        "serve", help="answer over HTTP: files in the form of OpenAI's clients, and live streams"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address that the server listens at (%(default)s)")
    parser.add_argument("--port", type=number(int, 0, 65536), default=8000, metavar="N", help="its port (%(default)s)")
    parser.add_argument("--name", help="name by which requests call the model; default: that of its folder")
    help = "language of the model, such as en; a request that names another one is refused (default: any is accepted)"
    parser.add_argument("--language", default="", metavar="CODE", help=help)
    help = (
        "origins of the pages whose browsers may read answers, such as http://localhost:3000, or * for all "
        "(default: none)"
    )
    parser.add_argument("--cors", type=origin, nargs="+", default=[], metavar="ORIGIN", help=help)
    limits = parser.add_argument_group("limits")
    help = "how many streams, and how many files, are served at once (%(default)s)"
    limits.add_argument("--connections", type=positive, default=16, metavar="N", help=help)
    help = "bytes of an uploaded file, at most (%(default)s)"
    limits.add_argument("--max-bytes", type=positive, default=25 * 2**20, metavar="N", help=help)
    limits.add_argument(
        "--max-seconds", type=amount, default=1500.0, metavar="S", help="seconds of a file, at most (%(default)s)"
    )
    help = "seconds of silence that end an utterance of a stream; with 0, none does (%(default)s)"
    parser.add_argument("--endpoint", type=amount, default=1.0, metavar="SECONDS", help=help)
    models.add_options(parser)
    models.add_dtype(parser)
    search_options.add_options(parser.add_argument_group("search"))
    parser.set_defaults(run=serve)
