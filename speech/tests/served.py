"""A server and its clients, for tests: forms, requests as bytes, and the schema of what is answered."""

import asyncio
import contextlib
import dataclasses
import json

import numpy as np
from aiohttp import FormData, web
from aiohttp.test_utils import TestClient, TestServer

from jax_rnnt_speech.data import rows
from jax_rnnt_speech.recognition import recognise, timed, transcripts
from jax_rnnt_speech.serving import server

ROUTE = "/v1/audio/transcriptions"
# Required fields of openai-python 3.57: types.audio.TranscriptionVerbose, TranscriptionSegment, TranscriptionWord, the
# events of a TranscriptionStreamEvent, Transcription's Logprob, types.Model, and shared.ErrorObject.
SCHEMA = {
    "verbose": {"duration": float, "language": str, "text": str},
    "segment": {"id": int, "seek": int, "start": float, "end": float, "text": str, "tokens": list, "temperature": float,
                "avg_logprob": float, "compression_ratio": float, "no_speech_prob": float},
    "word": {"start": float, "end": float, "word": str},
    "transcript.text.delta": {"type": str, "delta": str},
    "transcript.text.done": {"type": str, "text": str},
    "logprob": {"token": str, "bytes": list, "logprob": float},
    "model": {"id": str, "created": int, "object": str, "owned_by": str},
    "error": {"message": str, "type": str},
}  # fmt: skip
MULTIPART = {"Content-Type": "multipart/form-data; boundary=x"}
FILE = '"file"; filename="a"'
END = b"--x--\r\n"


@contextlib.asynccontextmanager
async def talk(served):
    """A client of the server, which runs as the command runs it."""

    class Local(TestServer):
        async def _make_runner(self, **_):
            return server.runner(served)

    async with TestClient(Local(web.Application())) as client:
        yield client


def another(served, **options):
    """The same server with other options."""
    site = server.Server.__new__(server.Server)
    vars(site).update(vars(served) | {"options": dataclasses.replace(served.options, **options)})
    return site


def form(file, /, **fields):
    """A form with a file, and with a field for each text of a list."""
    data = FormData()
    for name, x in ({"model": "tiny"} | fields).items():
        for text in x if isinstance(x, list) else [x]:
            data.add_field(name, text)
    data.add_field("file", file, filename="a.flac")
    return data


def part(name, data, *headers):
    """A part of a form as bytes, by RFC 7578; `END` follows the last one."""
    lines = "--x", f"Content-Disposition: form-data; name={name}", *headers, "", ""
    return "\r\n".join(lines).encode() + data + b"\r\n"


def upload(size, data):
    """The bytes of a request whose form has so many bytes, as far as these."""
    lines = f"POST {ROUTE} HTTP/1.1", "Host: a", f"Content-Length: {size}", f"Content-Type: {MULTIPART['Content-Type']}"
    return "\r\n".join([*lines, "", ""]).encode() + data


async def uploading(client, size, data):
    """(reader, writer) of a connection that has sent this much of an upload."""
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(upload(size, data))
    return reader, writer


def fits(x, kind):
    """The object, which must have the fields of the schema. An integer is a float, too, as for pydantic if strict."""
    for name, expected in SCHEMA[kind].items():
        assert type(x[name]) in ((int, float) if expected is float else (expected,)), (kind, name, x)
    return x


async def events_of(answer):
    """Yields the objects of server-sent events, after which an empty line stands; lines with a colon are comments."""
    lines = [(await answer.content.readline()).decode()]
    while lines[-1]:
        lines.append((await answer.content.readline()).decode())
        if lines[-2].startswith("data: "):
            assert lines[-1] == "\n"
            x = json.loads(lines[-2][6:])
            yield fits(x, x["type"]) if "error" not in x else x
        assert lines[-1][:6] in ("", "\n", "data: ") or lines[-1][0] == ":"


def heard(served, samples):
    """The Result that `transcribe` has."""
    (result,) = recognise.transcribe(served.model, [("a", samples)], served.forms.decoding)
    return result


def expected(served, samples):
    """The Transcript that `transcribe` writes."""
    return transcripts.transcript(served.model, rows.Entry("a", "a", ""), heard(served, samples))


def assert_same_words(words, truth):
    """Objects must be those of words; their confidences depend on the batch by a rounding."""
    assert [x["word"] for x in words] == [x.text for x in truth]
    for name in ("start", "end", "confidence"):
        np.testing.assert_allclose([x[name] for x in words], [x[name] for x in timed.objects(truth)], atol=1e-4)
