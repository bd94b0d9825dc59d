"""What a server is told. The server itself needs aiohttp, and its command can be asked for help without it."""

import argparse
import dataclasses
import re

from jax_rnnt_speech.config.options import amount, number, option, positive


def origin(text):
    """An argument of --cors, as browsers write origins."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text) and text != "null":
        raise argparse.ArgumentTypeError(f"expected *, or SCHEME://HOST[:PORT] without a path, got {text}")
    return text


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a server is told."""

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
    endpoint: float = option(
        1.0, amount, "seconds of silence that end an utterance of a stream; with 0, none does", metavar="SECONDS"
    )
