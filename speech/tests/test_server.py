"""A server over time: live streams, events, signs of life, clients that go, other origins, and its end."""

import asyncio
import concurrent.futures
import contextlib
import errno
import itertools
import json
import os
import queue
import re
import signal
import socket
import threading
import time
import types

import numpy as np
import pytest

pytest.importorskip("aiohttp")

import aiohttp

from jax_rnnt_speech import system
from jax_rnnt_speech.data import audio
from jax_rnnt_speech.recognition import transcripts
from jax_rnnt_speech.recognition.results import Labels, no_labels
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.serving import form as form_module
from jax_rnnt_speech.serving import schema, server
from recordings import wav
from served import (
    END,
    FILE,
    ROUTE,
    another,
    assert_same_words,
    events_of,
    expected,
    fits,
    form,
    part,
    talk,
    upload,
    uploading,
)
from support import run

SILENCE = wav(np.zeros(800))


@pytest.fixture
def held(served, monkeypatch):
    """Files are held until `go_on` is set, and then say A. `begun`: the first is in hand; `files`: those in hand."""
    x = types.SimpleNamespace(go_on=threading.Event(), begun=threading.Event(), files=[])

    def transcribed(files):
        x.files.extend(files)
        x.begun.set()
        assert x.go_on.wait(20)
        return [transcripts.Transcript("A", 1.0, []) for _ in files]

    monkeypatch.setattr(served.files, "run", transcribed)
    return x


async def files_of(client):
    return (await (await client.get("/health")).json())["files"]


async def until(client, count):
    """Waits until the server has so many files in hand."""
    async with asyncio.timeout(20):
        while await files_of(client) != count:
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_streams_that_come_and_go(served):
    """Seven streams in three slots: the words of each are those of its recording, and a fourth at once is refused.

    They are beams, which hold labels back until no hypothesis differs.
    """
    served = server.Server(served.model, Decoding(beam=2), served.options)
    rng = np.random.default_rng(0)
    recordings = [rng.normal(0, 0.3, size).clip(-1, 1) for size in (4000, 9000, 2500, 6000, 30, 5000, 3000)]
    pcm = [np.int16(x * 32767) if i % 2 else np.float32(x) for i, x in enumerate(recordings)]

    async def words_of(client, x, free):
        async with (
            free,
            client.ws_connect(f"/v1/stream?rate=8000&format={'pcm16' if x.dtype == np.int16 else 'float32'}") as stream,
        ):
            data, cuts = x.tobytes() + b"\x01", [0, 1, 2, 2, 3, 1399, 1422, 6001, None]
            for a, b in itertools.pairwise(cuts):  # anywhere in a sample, or nothing
                await stream.send_bytes(data[a:b])
            await stream.send_str("end")
            events = [json.loads(message.data) async for message in stream]
        assert events[-1] == {"type": "end", "duration": round(len(x) / 8000, 3)}
        return [word for event in events if event["type"] == "words" for word in event["words"]]

    async with talk(served) as client:
        free = asyncio.Semaphore(3)
        every = await asyncio.gather(*(words_of(client, x, free) for x in pcm))
        truths = [expected(served, x).words for x in pcm]
        assert sum(map(len, truths)) > 4
        for words, truth in zip(every, truths):
            assert_same_words(words, truth)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(client.ws_connect("/v1/stream?rate=8000"))
            with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
                await client.ws_connect("/v1/stream?rate=8000")
        async with client.ws_connect("/v1/stream?rate=16000") as stream:  # resampled
            await stream.send_bytes(bytes(32000))
            await stream.send_str("end")
            assert [json.loads(x.data) async for x in stream][-1] == {"type": "end", "duration": 1.0}
    assert sorted(served.slots.free) == [0, 1, 2] and not served.sockets


async def test_signs_of_life(served, held, monkeypatch):
    """The head of a stream comes before there is a text, and comments after it; a proxy is told to pass them on."""
    monkeypatch.setattr(server, "ALIVE", 0.05)
    async with talk(served) as client, client.post(ROUTE, data=form(SILENCE, stream="true")) as answer:
        assert answer.status == 200 and not held.go_on.is_set()
        assert answer.headers["X-Accel-Buffering"] == "no" and answer.headers["Cache-Control"] == "no-cache"
        for _ in range(3):
            assert (await answer.content.readline()).startswith(b":") and await answer.content.readline() == b"\n"
        held.go_on.set()
        assert [x async for x in events_of(answer)][-1]["text"] == "A"


async def test_streams_that_stand_still(served, monkeypatch):
    """The server asks a silent client whether it is there; one that answers is told why its stream ends, in words."""
    monkeypatch.setattr(form_module, "PATIENCE", 0.4)
    kinds, last = {}, {}
    async with talk(served) as client, asyncio.timeout(20):
        for answers in True, False:
            async with client.ws_connect("/v1/stream?rate=8000", autoping=answers) as stream:
                messages = [await stream.receive()]
                while messages[-1].type not in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE):
                    messages.append(await stream.receive())
                kinds[answers], last[answers] = [x.type for x in messages], messages[0].data
    assert json.loads(last[True])["error"]["message"] == "no message came for 0.4 seconds"
    assert kinds[False][0] is aiohttp.WSMsgType.PING and aiohttp.WSMsgType.TEXT not in kinds[False]
    assert sorted(served.slots.free) == [0, 1, 2] and not served.sockets


@pytest.mark.parametrize("late", [True, False])
async def test_the_end_of_a_server(served, held, monkeypatch, late):
    """What is new is refused at once; what is in hand has its time, and is then told that there is no more."""
    monkeypatch.setattr(served, "ending", False)
    async with talk(served) as client:
        waiting = asyncio.create_task(client.post(ROUTE, data=form(SILENCE)))
        await asyncio.to_thread(held.begun.wait, 20)
        events = await client.post(ROUTE, data=form(SILENCE, stream="true"))
        reader, writer = await uploading(client, 999, b"--x\r\n")  # which stands still
        stream = await client.ws_connect("/v1/stream?rate=8000")
        await until(client, 3)
        end = asyncio.create_task(served.end(0.5))
        await asyncio.sleep(0)
        for ask in client.post(ROUTE, data=form(SILENCE)), client.get("/health"), client.get("/v1/stream?rate=8000"):
            async with ask as refused:
                assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
                assert "shutting down" in fits((await refused.json())["error"], "error")["message"]
        if not late:
            held.go_on.set()
        await end
        answer, last = await waiting, [x async for x in events_of(events)][-1]
        assert answer.status == (503 if late else 200)
        assert ("shutting down" in last["error"]["message"]) if late else (last["text"] == "A")
        assert (await reader.readline()).split()[1] == b"503"
        closing = asyncio.create_task(served.shut_down(None))
        assert [json.loads(x.data)["type"] async for x in stream] == ["error"] and stream.close_code == 1001
        await closing
        held.go_on.set()
        writer.close()


GRACE = 0.3  # seconds
TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("ignored", "numbers", "statuses"),
    [
        ([], [TERM], [0]),
        ([], [TERM, TERM], [143, 0]),  # the test goes on where the process would have ended
        ([], [INT, INT], [130, 0]),
        ([INT], [INT, TERM], [0]),  # as `nohup` and `&` start it
    ],
)
def test_a_server_that_is_ended(served, monkeypatch, signals, ignored, numbers, statuses):
    """The port that it names listens. SIGTERM ends it with 0 after its grace, whatever stands still, and a second one
    at once."""
    ends, lines, site = [], queue.SimpleQueue(), another(served, port=0, grace=GRACE)
    monkeypatch.setattr(server, "leave", ends.append)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)

    def client():
        try:
            port = int(re.search(r" http://127\.0\.0\.1:(\d+): ", lines.get(timeout=30))[1])
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(upload(99999, b"--x\r\n"))
                for number in numbers:
                    time.sleep(0.1)
                    os.kill(os.getpid(), number)
                sent = time.monotonic()
                return connection.makefile("rb").readline(), sent, time.monotonic()
        except OSError:
            os.kill(os.getpid(), TERM)  # the server would wait for ever
            raise

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        future = thread.submit(client)
        with contextlib.redirect_stdout(types.SimpleNamespace(write=lines.put, flush=lambda: None)):
            server.run(site)
        answer, sent, answered = future.result()
    assert b" 503 " in answer and time.monotonic() < answered + 2
    assert len(numbers) > 1 or GRACE * 0.9 < answered - sent < GRACE + 2
    assert ends == statuses


def test_a_port_that_is_taken(served):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(system.UserError) as error:
            server.run(another(served, port=port))
    assert str(error.value) == f"--host 127.0.0.1 --port {port}: {os.strerror(errno.EADDRINUSE)}"


async def test_events(served, corpus):
    """Deltas make the text of `transcribe`, with log-probabilities where a form asks for them."""
    good = min(corpus.rglob("*.flac"))
    truth = expected(served, audio.read(good, 8000)).text
    async with talk(served) as client:
        for include, more in ({}, {}), ({"include[]": "logprobs"}, {"response_format": "json"}):
            async with client.post(ROUTE, data=form(good.read_bytes(), stream="true", **include, **more)) as answer:
                assert answer.content_type == "text/event-stream"
                *deltas, done = [x async for x in events_of(answer)]
            assert "".join(x["delta"] for x in deltas) == done["text"] == truth
            listed = [x for y in deltas for x in y.get("logprobs", [])]
            assert listed == done.get("logprobs", [])
            assert "".join(fits(x, "logprob")["token"] for x in listed) == (truth if include else "")


async def test_events_as_they_come(served, monkeypatch):
    """A client has read what is final before the rest is found. Errors are events, or answers where none was sent."""
    go_on, encode = threading.Event(), served.model.tokens.encode

    def slow(files):  # in the place of a recording of several windows
        (file,) = files
        for text in "A", "A", "A B":
            assert file.watch(Labels(encode(text), [], [-0.5, -0.25, -1.0][: len(text)], [], []))
        assert go_on.wait(20)
        file.watch(Labels(encode("A BC"), [], [-0.5, -0.25, -1.0, 0.0], [], []))
        bad = b"bad" in file.getvalue()
        return [schema.Problem(400, "cut off") if bad else transcripts.Transcript("A BC", 1.0, [])]

    monkeypatch.setattr(served.files, "run", slow)
    async with talk(served) as client:
        for file, last in (SILENCE, "transcript.text.done"), (SILENCE + b"bad", "error"):
            go_on.clear()
            async with client.post(ROUTE, data=form(file, stream="true", **{"include[]": "logprobs"})) as answer:
                events, seen = events_of(answer), []
                while not go_on.is_set():
                    seen.append(await anext(events))
                    if "".join(x["delta"] for x in seen) == "A B":
                        go_on.set()
                seen += [x async for x in events]
            assert [x["delta"] for x in seen[:-1]] == ["A", " B", "C"] and seen[-1]["type"] == last
            assert [x["logprob"] for y in seen[:-1] for x in y["logprobs"]] == [-0.5, -0.25, -1.0, 0.0]
        monkeypatch.setattr(served.files, "run", lambda files: 1 / 0)
        for fields in {}, {"stream": "true"}:
            async with client.post(ROUTE, data=form(SILENCE, **fields)) as answer:
                assert answer.status == (200 if fields else 500)
                (error,) = [x async for x in events_of(answer)] if fields else [await answer.json()]
                fits(error["error"], "error")


HEAD = part('"model"', b"tiny") + part(FILE, b"").removesuffix(b"\r\n")


async def test_clients_that_go(served, held):
    """Their places are free, what waits is dropped, and what runs hears that nobody waits."""
    async with talk(served) as client:
        waiting = []
        for _ in range(3):  # the first one runs, and two wait
            waiting.append(asyncio.create_task(client.post(ROUTE, data=form(b"x"))))
            await asyncio.to_thread(held.begun.wait, 60)
        await until(client, 3)
        async with client.post(ROUTE, data=form(b"x")) as answer:
            assert answer.status == 429 and int(answer.headers["Retry-After"]) > 0
        for x in waiting:
            x.cancel()
        await asyncio.wait(waiting)
        await until(client, 0)
        assert [x.watch(no_labels()) for x in held.files] == [False]
        _, writer = await uploading(client, 999, HEAD)
        await until(client, 1)
        writer.close()  # within its upload
        await until(client, 0)
        held.go_on.set()
        async with client.post(ROUTE, data=form(b"x")) as answer:
            assert answer.status == 200
        assert len(held.files) == 2 and await files_of(client) == 0


async def test_slow_uploads(served, held, monkeypatch):
    """An upload may take long, but not pause."""
    monkeypatch.setattr(form_module, "PATIENCE", 1)
    held.go_on.set()
    end = b"\r\n" + END

    async def status(client, pause, count):
        """That of the answer to a form whose file comes byte by byte."""
        reader, writer = await uploading(client, len(HEAD) + count + len(end), HEAD)
        for _ in range(count):
            await asyncio.sleep(pause)
            writer.write(b"x")
        writer.write(end)
        answer = await reader.readline()
        writer.close()
        return answer.split()[1]

    async with talk(served) as client:
        assert await asyncio.gather(status(client, 0.2, 8), status(client, 2.5, 1)) == [b"200", b"408"]
        assert len(held.files) == 1 and await files_of(client) == 0


MINE, OTHER = "http://localhost:3000", "http://b.org"


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [([], MINE, None), ([MINE], MINE, MINE), ([MINE], OTHER, None), (["*"], OTHER, "*"), ([MINE], None, None)],
)
async def test_pages_of_other_origins(served, origins, origin, allowed):
    """Truth: the Fetch standard. Without --cors, and to others, no header; errors have them, so that pages read why."""
    headers = {"Origin": origin} if origin else {}
    async with talk(another(served, cors=origins)) as client:
        for path, status in ("/v1/models", 200), ("/v2", 404):
            async with client.get(path, headers=headers) as answer:
                assert answer.status == status
                assert answer.headers.get("Access-Control-Allow-Origin") == allowed
        headers |= {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with client.options(ROUTE, headers=headers) as answer:
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed
            assert answer.ok == bool(allowed)
            if allowed:
                assert "POST" in answer.headers["Access-Control-Allow-Methods"]
                assert answer.headers["Access-Control-Allow-Headers"] == "authorization"


def test_an_origin_with_a_path(talkative):
    run(["serve", "--model", talkative, "--cors", f"{MINE}/"], 2)
