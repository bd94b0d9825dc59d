"""The command `serve`; the server itself needs aiohttp, which no other command does."""

import argparse
import re
from pathlib import Path

from jax_rnnt_speech import pretrained
from jax_rnnt_speech.config import amount, number, positive
from jax_rnnt_speech.recognition import ngrams
from jax_rnnt_speech.system import UserError


def serve(args):
    try:
        from jax_rnnt_speech.serving import server
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise UserError("serve needs aiohttp: pip install 'jax_rnnt_speech[serve]'") from None
    ngrams.check(args)
    recogniser = pretrained.open_model(args.model, args.platform, args.checkpoint)
    server.run(server.Server(recogniser, ngrams.search_of(args, recogniser), args), args)
    return 0


def origin(text):
    """An argument of --cors, as browsers write origins."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text) and text != "null":
        raise argparse.ArgumentTypeError(f"expected *, or SCHEME://HOST[:PORT] without a path, got {text}")
    return text


def add_command(commands):
    parser = commands.add_parser("serve", help="texts over HTTP, in the form of OpenAI's clients, and of live streams")
    parser.add_argument("--model", type=Path, required=True, help="folder of a training, or of transformers")
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    parser.add_argument("--port", type=number(int, 0, 65536), default=8000, metavar="N", help="(%(default)s)")
    parser.add_argument("--name", help="by which requests call the model; default: that of its folder")
    help = "of the model, such as en; requests may name no other (default: any)"
    parser.add_argument("--language", default="", metavar="CODE", help=help)
    help = "of pages in browsers that may read answers, such as http://localhost:3000; *: any (default: none)"
    parser.add_argument("--cors", type=origin, nargs="+", default=[], metavar="ORIGIN", help=help)
    limits = parser.add_argument_group("limits")
    help = "streams at once, and files at once (%(default)s)"
    limits.add_argument("--connections", type=positive, default=16, metavar="N", help=help)
    help = "of a file (%(default)s)"
    limits.add_argument("--max-bytes", type=positive, default=25 * 2**20, metavar="N", help=help)
    limits.add_argument("--max-seconds", type=amount, default=1500.0, metavar="S", help="of a file (%(default)s)")
    help = "of silence that end an utterance of a stream; 0: none (%(default)s)"
    parser.add_argument("--endpoint", type=amount, default=1.0, metavar="SECONDS", help=help)
    pretrained.add_options(parser)
    ngrams.add_options(parser.add_argument_group("search"))
    parser.set_defaults(run=serve)
