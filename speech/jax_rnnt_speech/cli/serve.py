"""The command `serve`; the server itself needs aiohttp, which no other command does."""

import argparse
import dataclasses
import functools
import re
import sys

from jax_rnnt_speech.config import command_line
from jax_rnnt_speech.config.options import amount, natural, number, option, positive
from jax_rnnt_speech.models import Computing
from jax_rnnt_speech.recognition.search_options import Searching, decoding_of
from jax_rnnt_speech.system import UserError, refuse_if


def origin(text):
    """Checks an argument of --cors, which is written as browsers write origins."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text) and text != "null":
        raise argparse.ArgumentTypeError(f"expected *, or SCHEME://HOST[:PORT] without a path, got {text}")
    return text


@dataclasses.dataclass(frozen=True)
class Serving:
    """The options of a server."""

    host: str = option("127.0.0.1", str, "address that the server listens at", metavar="HOST")
    port: int = option(8000, number(int, 0, 65536), "its port")
    name: str = option("", str, "name by which requests call the model; default: that of its folder", metavar="NAME")
    language: str = option(
        "", str, "language of the model, such as en; a request that names another one is refused (default: any is "
        "accepted that the model can write)", metavar="CODE",
    )  # fmt: skip
    cors: tuple = option(
        (), origin, "origins of the pages whose browsers may read answers, such as http://localhost:3000, or * for all "
        "(default: none)", nargs="+", metavar="ORIGIN",
    )  # fmt: skip
    connections: int = option(16, positive, "how many streams, and how many files, are served at once")
    max_bytes: int = option(25 * 2**20, positive, "bytes of an uploaded file, at most")
    max_seconds: float = option(1500.0, amount, "seconds of a file, at most", metavar="S")
    max_phrases: int = option(
        100, natural, "phrases of a request, at most, for which room is kept; with 0, requests have none"
    )
    prompts: str = option(
        "phrases", str, "what a short prompt with commas or line breaks is: a list of phrases, or nothing",
        choices=("phrases", "ignore"),
    )  # fmt: skip
    grace: float = option(8.0, amount, "seconds that work in hand has after SIGTERM or Ctrl-C", metavar="SECONDS")
    endpoint: float = option(
        1.0, amount, "seconds of silence that end an utterance of a stream; with 0, none does", metavar="SECONDS"
    )
    chunk: float | None = option(
        None, amount, "for a model that sees whole utterances: seconds of a stream that become final at once; of a "
        "model for several contexts, the nearest is taken (2)", metavar="S",
    )  # fmt: skip
    right: float | None = option(None, amount, "seconds that it hears after each chunk, likewise (2)", metavar="S")


@dataclasses.dataclass(frozen=True)
class Searched(Searching):
    """The options of a search; the depth is that of requests' phrases, too."""

    phrase_depth: float = option(
        0.0, amount, "how much more each label of a phrase earns from the second one on", metavar="D"
    )


def serve(args):
    try:
        from jax_rnnt_speech.serving import server
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise UserError("serve needs aiohttp: pip install 'jax_rnnt_speech[serve]'") from None
    searching, opening = command_line.taken(args, Searched).checked(), command_line.taken(args, Computing)
    options = command_line.taken(args, Serving)
    refuse_if(not options.host, "--host must be an address, such as 127.0.0.1, or 0.0.0.0 for all of this machine")
    model = opening.opened()
    options = dataclasses.replace(options, name=options.name or opening.folder.resolve().name)
    decoding = decoding_of(searching, model, options.max_phrases)
    if decoding.room:
        size = f"{decoding.room.bytes / 2**20:.1f} MiB for each stream, and each file of a batch"
        print(f"{options.name}: room for {options.max_phrases} phrases of a request: {size}", file=sys.stderr)
    server.run(server.Server(model, decoding, options))
    return 0


COMMAND = (
    "serve", "answer over HTTP: files in the form of OpenAI's clients, and live streams", serve, Serving, Computing,
    functools.partial(command_line.add_fields, kind=Searched, but=["confidence"], group="search"),
)  # fmt: skip
