"""Texts over HTTP and of live streams are those of `transcribe`, in OpenAI's schema; bad requests are told so; clients
that go leave nothing behind; an exported model alone."""

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import zlib

import jax
import numpy as np
import pytest

from jax_rnnt_speech import runs, system
from jax_rnnt_speech.cli import serve
from jax_rnnt_speech.data import features, rows
from jax_rnnt_speech.recognition.search import Decoding
from support import CONVOLUTIONAL, asr, configuration, random_model, run

pytest.importorskip("aiohttp")

from aiohttp import FormData, WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer

from jax_rnnt import timing
from jax_rnnt_speech.data import audio
from jax_rnnt_speech.recognition import recognise, subtitles, timed, transcripts
from jax_rnnt_speech.serving import form as form_module
from jax_rnnt_speech.serving import schema, server

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model with random weights that writes many words."""
    model, path = random_model(**CONVOLUTIONAL), tmp_path_factory.mktemp("run")
    of = runs.Run(path)
    of.open()
    of.save(1, model.setup(), params=model.params)
    of.close()
    return path


@pytest.fixture(scope="module")
def served(folder):
    """The server of the command line, with three slots."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "run", kept.append)
        limits = "--connections", 3, "--max-bytes", 40_000, "--max-seconds", 3, "--endpoint", 0.5
        run(["serve", "--model", folder, "--name", "tiny", "--language", "en", *limits])
    return kept[0]


def talk(served, conversation):
    """Runs a coroutine of (a client of the server), which is run as the command runs it."""

    class Local(TestServer):
        async def _make_runner(self, **_):
            return server.runner(served)

    async def main():
        async with TestClient(Local(web.Application())) as client:
            await conversation(client)

    asyncio.run(main())


def form(file, /, **fields):
    data = FormData()
    for name, x in ({"model": "tiny"} | fields).items():
        for text in x if isinstance(x, list) else [x]:
            data.add_field(name, text)
    data.add_field("file", file, filename="a.flac")
    return data


def wav(size):
    """So many samples of silence, by the definition of WAV."""
    head = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16) + b"data" + struct.pack("<I", 2 * size)
    return b"RIFF" + struct.pack("<I", 4 + len(head) + 2 * size) + b"WAVE" + head + bytes(2 * size)


def fits(x, kind):
    """Whether an object has the fields of the schema; an integer is a float, too, as in pydantic's strict mode."""
    for name, expected in SCHEMA[kind].items():
        assert type(x[name]) in ((int, float) if expected is float else (expected,)), (kind, name, x)
    return x


def heard(served, samples):
    """The Result that `transcribe` has."""
    (result,) = recognise.transcribe(served.model, [("a", samples)], served.forms.decoding)
    return result


def expected(served, samples):
    """The Transcript that `transcribe` writes."""
    return transcripts.transcript(served.model, rows.Entry("a", "a", ""), heard(served, samples))


def same(words, truth):
    """Whether objects are those of words, whose confidences depend on the batch by a rounding."""
    assert [x["word"] for x in words] == [x.text for x in truth]
    for name in ("start", "end", "confidence"):
        np.testing.assert_allclose([x[name] for x in words], [x[name] for x in timed.objects(truth)], atol=1e-4)


def test_texts_of_files(served, corpus):
    """Every form, of files that are transcribed together."""
    files = sorted(corpus.rglob("*.flac"))[:3]
    results = [heard(served, audio.read(x, 8000)) for x in files]
    truths = [expected(served, audio.read(x, 8000)) for x in files]
    assert any(x.words for x in truths)

    async def conversation(client):
        async def texts(**fields):
            answers = await asyncio.gather(*(client.post(ROUTE, data=form(x.read_bytes(), **fields)) for x in files))
            assert [x.status for x in answers] == [200] * 3
            return [await x.text() for x in answers]

        assert [json.loads(x) for x in await texts()] == [{"text": x.text} for x in truths]
        usual = {"temperature": "0.7", "language": "en", "languages[]": "en", "prompt": "Hello", "stream": "False"}
        usual |= {"model": "whisper-1", "keywords[]": ["a", "b"], "chunking_strategy[type]": "server_vad"}
        assert await texts(response_format="text", **usual) == [f"{x.text}\n" for x in truths]
        for text, truth, result in zip(await texts(**{"include[]": "logprobs"}), truths, results):
            whole = json.loads(text)
            tokens = [fits(x, "logprob") for x in whole["logprobs"]]
            assert whole["text"] == truth.text == "".join(x["token"] for x in tokens)
            assert [bytes(x["bytes"]).decode() for x in tokens] == [x["token"] for x in tokens]
            np.testing.assert_allclose([x["logprob"] for x in tokens], result.log_probs, atol=1e-4)
        for name, write in (("srt", subtitles.srt), ("vtt", subtitles.vtt)):
            for text, truth in zip(await texts(response_format=name), truths):
                assert text == write(transcripts.captions(truth.words, truth.duration, truth.space))
        both, verbose = {"timestamp_granularities[]": ["word", "segment"]}, {"response_format": "verbose_json"}
        for some, names in (("word", {"words"}), ("segment", {"segments"}), ([], {"segments"})):
            whole = json.loads((await texts(**verbose, timestamp_granularities=some))[0])
            assert names == whole.keys() - {"task", "language", "duration", "text"}
        for text, truth, result in zip(await texts(**verbose, **both), truths, results):
            whole = fits(json.loads(text), "verbose")
            assert whole["language"] == "en"
            same([fits(x, "word") for x in whole["words"]], truth.words)
            assert [fits(x, "segment")["id"] for x in whole["segments"]] == [*range(len(whole["segments"]))]
            assert [i for x in whole["segments"] for i in x["tokens"]] == result.labels
            assert whole["duration"] == truth.duration >= max((x["end"] for x in whole["segments"]), default=0)
            segments = truth.space.join(x["text"] for x in whole["segments"])
            assert segments == truth.space.join(x.text for x in truth.words)
        head = '--x\r\nContent-Disposition: form-data; name="file"\r\nContent-Transfer-Encoding: base64\r\n\r\n'
        body = (
            head.encode() + base64.encodebytes(files[0].read_bytes()) + b"\r\n--x\r\nContent-Disposition: form-data; "
        )
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        async with client.post(ROUTE, data=body + b'name="model"\r\n\r\ntiny\r\n--x--\r\n', headers=kind) as coded:
            assert (await coded.json())["text"] == truths[0].text
        (model,) = (await (await client.get("/v1/models")).json())["data"]
        assert model == await (await client.get("/v1/models/tiny")).json()
        assert fits(model, "model")["id"] == "tiny"

    talk(served, conversation)


@pytest.mark.slow
def test_streams_that_come_and_go(served):
    """Seven streams in three slots: the words of each are those of its recording, and a fourth at once is refused.

    They are beams, which hold labels back until no hypothesis differs.
    """
    served = server.Server(served.model, Decoding(beam=2), served.options)
    rng = np.random.default_rng(0)
    recordings = [rng.normal(0, 0.3, size).clip(-1, 1) for size in (4000, 9000, 2500, 6000, 30, 5000, 3000)]
    pcm = [np.int16(x * 32767) if i % 2 else np.float32(x) for i, x in enumerate(recordings)]

    async def conversation(client):
        async def one(x, free):
            async with free:
                kind, words, events = "pcm16" if x.dtype == np.int16 else "float32", [], []
                async with client.ws_connect(f"/v1/stream?rate=8000&format={kind}") as socket:
                    data, cuts = x.tobytes() + b"\x01", [0, 1, 2, 2, 3, 1399, 1422, 6001, None]
                    for a, b in itertools.pairwise(cuts):  # anywhere in a sample, or nothing
                        await socket.send_bytes(data[a:b])
                    await socket.send_str("end")
                    async for message in socket:
                        events.append(json.loads(message.data))
                for event in events:
                    words += event["words"] if event["type"] == "words" else []
                assert events[-1] == {"type": "end", "duration": round(len(x) / 8000, 3)}
                return words

        free = asyncio.Semaphore(3)
        found = await asyncio.gather(*(one(x, free) for x in pcm))
        truths = [expected(served, x).words for x in pcm]
        assert sum(map(len, truths)) > 4
        for words, truth in zip(found, truths):
            same(words, truth)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(client.ws_connect("/v1/stream?rate=8000"))
            with pytest.raises(WSServerHandshakeError, match="503"):
                await client.ws_connect("/v1/stream?rate=8000")
        async with client.ws_connect("/v1/stream?rate=16000") as socket:  # resampled
            await socket.send_bytes(bytes(32000))
            await socket.send_str("end")
            assert [json.loads(x.data) async for x in socket][-1] == {"type": "end", "duration": 1.0}

    talk(served, conversation)
    assert sorted(served.slots.free) == [0, 1, 2] and not served.sockets


def test_languages():
    """The language of a form decides the script of its labels; what decides nothing is not said, the unknown is 400."""
    pieces = asr.data.tokens.Characters("ABБ1 ")
    model = asr.model.Model(configuration(**CONVOLUTIONAL, chunk=0), pieces, [0.0] * 6, [1.0] * 6)
    x = server.Server(model, Decoding(), serve.Serving(name="tiny"))

    def asked(**fields):
        return x.forms.checked({"model": ["tiny"]} | {name: [text] for name, text in fields.items()})

    for language, allowed in (("ru", "Б1 "), ("Russian", "Б1 "), ("en", "AB1 "), ("pt-BR", "AB1 ")):
        found = asked(language=language)
        assert [y for y, z in zip(pieces.pieces, found.decoding.allowed) if z] == [*allowed]
        assert found.language == language and asked(language=language).decoding is found.decoding
    assert (
        asked().decoding is x.forms.decoding
        and asked().language == ""
        and asked(**{"languages": "ru"}).language == "ru"
    )
    for language, message in (("xx", "must be a code of ISO 639"), ("el", "no label of the script Greek")):
        with pytest.raises(schema.Problem) as caught:
            asked(language=language)
        assert caught.value.status == 400 and message in caught.value.error["message"]
    x.model.tokens = asr.data.tokens.Characters("ABCD ")  # of one script: English and German differ in nothing
    x.forms.languages.clear()
    assert asked(language="de").language == "" and asked(language="de").decoding == x.forms.decoding


def test_bad_requests(served, corpus):
    """Two hundred: each is told what is wrong, and nothing of it stays."""
    good = next(corpus.rglob("*.flac")).read_bytes()
    rng = np.random.default_rng(0)
    forms = [form(good[:n], response_format=x) for x in schema.FORMATS for n in rng.integers(0, len(good) - 9, 12)]
    forms += [form(rng.bytes(int(n))) for n in rng.integers(0, 3000, 40)]
    forms += [form(good, **{name: text}) for name, text in (
        ("response_format", "xml"), ("language", "de"), ("temperature", "1.1"), ("temperature", "x"),
        ("temperature", "nan"), ("stream", "x"), ("speed", "2"), ("timestamp_granularities[]", "word"), ("[]", "x"),
        ("prompt", "x" * 70_000), ("file", "twice"), ("languages[]", "de"), ("include[]", "x"), ("model[]", "tiny"),
        ("language", "de-AT"), ("translate", "true"), ("task", "translate"), ("duration", "9"),
        ("detect_language", "1"), ("word_timestamps", "true"),
    )]  # fmt: skip
    forms += [FormData({"model": "tiny"}), form(good, model=["tiny", "tiny"]), form(b"x", stream="true")]
    captions = {"stream": "true", "include[]": "logprobs"}  # which have neither
    forms += [form(good, response_format="srt", **{name: x}) for name, x in captions.items()]
    forms += [form(bytes(n)) for n in (50_000, 200_000)]
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    head = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--x\r\nContent-Disposition: form-data; '
    body = head + b'name="file"; filename="a"\r\n\r\n' + good[:99] + b"\r\n--x--\r\n"
    raw = [(body[: int(n)], kind) for n in rng.integers(0, len(body), 60)]
    raw += [(body, {"Content-Type": x}) for x in ("", "text/plain", "multipart/form-data", "multipart/x; boundary=x")]
    raw += [(body, kind | {"Content-Encoding": "gzip", "Connection": "close"})]
    raw += [(body.replace(b"name=", bytes([i]) * 40), kind) for i in range(8)] + [(b"--x\r\n" * 9, kind)]
    streams = "", "rate=0", "rate=x", "rate=16000&format=mp3", "rate=16000&speed=2", "rate=9999999999", "rate=16000"

    async def conversation(client):
        async def refused(answer, least=400):
            assert least <= answer.status < 500, await answer.text()
            error = fits((await answer.json())["error"], "error")
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"] and error["type"] and "\n" not in error["message"]

        async def everything():
            for data in [*forms, *raw]:
                data, headers = data if isinstance(data, tuple) else (data, None)
                async with client.post(ROUTE, data=data, headers=headers) as answer:
                    await refused(answer)
            for query in streams:
                await refused(await client.get(f"/v1/stream?{query}"))
            await refused(await client.get(ROUTE))
            async with client.post(ROUTE, data=form(b"")) as answer:
                assert "empty" in (await answer.json())["error"]["message"]
            for path in ("/v2", "/v1/models/huge"):
                await refused(await client.get(path), 404)
            await refused(await client.post("/v1/audio/translations", data=form(good)), 404)
            await refused(await client.options(ROUTE), 405)
            for data in (np.float32([np.nan]).tobytes(), np.float32([99]).tobytes(), "stop"):
                async with client.ws_connect("/v1/stream?rate=8000&format=float32") as socket:
                    await (socket.send_str if isinstance(data, str) else socket.send_bytes)(data)
                    assert json.loads((await socket.receive()).data)["error"]["message"]

        async def held():
            async with client.post(ROUTE, data=form(good)) as answer:
                assert answer.status == 200
            return np.array([len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())])

        before = await held()
        await everything()
        assert (await held() <= before + 4).all()
        health = await (await client.get("/health")).json()
        assert (health["files"], health["streams"]) == (0, 0)
        assert len(forms) + len(raw) + len(streams) >= 190

    talk(served, conversation)
    assert sorted(served.slots.free) == [0, 1, 2]


def test_fields_of_segments():
    """Truth: the mean, and zlib's ratio, by their definitions; each label is in the segment that has its characters."""
    texts, words = [], []
    for i in range(40):  # at 6 words a second in two lines of 42 columns; commas and spaces are labels of their own
        texts += [" ", "ab", f"{i:02d}", ","]
        words.append(timing.Interval(i / 6, (i + 1) / 6, f"ab{i:02d},", 0.5))
    labels = [(i, text, -(i % 7) / 8) for i, text in enumerate(texts)]
    for space in " ", "":
        transcript = transcripts.Transcript(space.join(x.text for x in words), 40 / 6, words, space=space)
        found = json.loads(schema.answer(transcript, "verbose_json", {"segment"}, "", labels).text)
        assert found["language"] == "und" and len(found["segments"]) > 2
        assert space.join(x["text"] for x in found["segments"]) == transcript.text
        for x in found["segments"]:
            assert "".join(texts[i] for i in x["tokens"]).replace(" ", "") == x["text"].replace(" ", "")
            assert x["avg_logprob"] == pytest.approx(-sum(i % 7 for i in x["tokens"]) / 8 / len(x["tokens"]))
            data = x["text"].encode()
            assert x["compression_ratio"] == len(data) / len(zlib.compress(data))
        assert [i for x in found["segments"] for i in x["tokens"]] == [*range(160)]


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


def test_habits(served, corpus):
    """What clients of OpenAI and Whisper send by habit changes no text. Truth: the text of `transcribe`."""
    good = max(corpus.rglob("*.flac"))
    truth = expected(served, audio.read(good, 8000)).text
    habits = [
        {"language": x} for x in ("auto", "", "AUTO", "en", "EN", "en-US", "en_us", "english", "eng", "und")
    ]  # fmt: skip
    habits += [{"model": x} for x in ("", "large-v3", "Systran/faster-whisper-small", "gpt-4o-transcribe-diarize")]
    habits += [{"stream": x} for x in ("", "false", "False", "0")]
    habits += [{"temperature": x} for x in ("", "0", "0.0", "1")]
    habits += [{"response_format": x} for x in ("", "JSON", "json")]
    habits += [{"languages[]": "auto"}, {"languages": "de,en"}, {"languages[0]": "en-GB"}, {"include": '["logprobs"]'}]
    habits += [dict.fromkeys(("language", "temperature", "stream"), x) for x in ("null", "None", "undefined")]
    # What the documentation or sources of these clients and servers send, or have as the default.
    habits += [{name: x for name, _, x in (y.partition("=") for y in fields.split())} for fields in (
        "user=me task=transcribe translate=false hotwords=x temperature_inc=0.2",
        "offset_t=0 offset_n=0 duration=0 max_context=-1 max_len=0 split_on_word=false best_of=2 beam_size=-1 "
        "audio_ctx=0 word_thold=0.01 entropy_thold=2.40 logprob_thold=-1.00 debug_mode=false diarize=false "
        "tinydiarize=false detect_language=false no_timestamps=false carry_initial_prompt=false suppress_nst=true "
        "no_context=true token_timestamps=false vad=false vad_threshold=0.5 vad_samples_overlap=0.1",  # whisper.cpp
        "timestamp_granularities[]=segment vad_filter=true without_timestamps=true diarization=false",  # speaches
        "backend= threads=4 translate=false diarize=false prompt=",  # LocalAI
        "seed=1 top_p=1.0 repetition_penalty=1.0 use_beam_search=false stream_include_usage=false",  # vLLM
    )]  # fmt: skip

    async def chunks(body):
        for i in range(0, len(body), 999):
            yield body[i : i + 999]

    async def conversation(client):
        async def text(data, path=ROUTE, **more):
            async with client.post(path, data=data, **more) as answer:
                assert answer.status == 200, await answer.text()
                return (await answer.json())["text"]

        for fields in habits:
            assert await text(form(good.read_bytes(), **fields)) == truth, fields
        alone = FormData()
        alone.add_field("file", good.read_bytes(), filename="a.flac")
        assert await text(alone, f"{ROUTE}/") == truth
        for x in "true", "True", "1":
            async with client.post(ROUTE, data=form(good.read_bytes(), stream=x)) as answer:
                assert [x async for x in events_of(answer)][-1]["text"] == truth
        for both in ["word", "segment"], "word,segment", '["word", "segment"]':
            parts = {"response_format": "verbose_json", "timestamp_granularities[]": both}
            async with client.post(ROUTE, data=form(good.read_bytes(), **parts)) as answer:
                assert {"words", "segments"} <= (await answer.json()).keys()
        body = (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            + good.read_bytes()
            + b"\r\n--x--\r\n"
        )
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        assert await text(chunks(body), headers=kind) == truth
        assert await text(form(good.read_bytes()), expect100=True) == truth
        for path in "/", "/health", "/health/", "/healthz", "/v1/models", "/v1/models/", "/v1/models/tiny/":
            for ask in client.get, client.head:
                assert (await ask(path)).status == 200, path

    talk(served, conversation)


def test_signs_of_life(served, monkeypatch):
    """The head of a stream comes before there is a text, and comments after it; a proxy is told to pass them on."""
    go_on = threading.Event()

    def slow(jobs):
        assert go_on.wait(20)
        return [transcripts.Transcript("A", 1.0, []) for _ in jobs]

    monkeypatch.setattr(served.files, "run", slow)
    monkeypatch.setattr(server, "ALIVE", 0.05)

    async def conversation(client):
        async with client.post(ROUTE, data=form(wav(800), stream="true")) as answer:
            assert answer.status == 200 and not go_on.is_set()
            assert answer.headers["X-Accel-Buffering"] == "no" and answer.headers["Cache-Control"] == "no-cache"
            for _ in range(3):
                assert (await answer.content.readline()).startswith(b":") and await answer.content.readline() == b"\n"
            go_on.set()
            assert [x async for x in events_of(answer)][-1]["text"] == "A"

    talk(served, conversation)


def test_the_end_of_a_server(served, monkeypatch):
    """What is new is refused at once; what is in hand has its time, and is then told that there is no more."""
    go_on, begun = threading.Event(), threading.Event()

    def slow(jobs):
        begun.set()
        assert go_on.wait(20)
        return [transcripts.Transcript("A", 1.0, []) for _ in jobs]

    monkeypatch.setattr(served.files, "run", slow)

    async def conversation(client, late):
        async def texts(socket):
            return [json.loads(x.data) async for x in socket]

        go_on.clear()
        waiting = asyncio.create_task(client.post(ROUTE, data=form(wav(800))))
        await asyncio.to_thread(begun.wait, 20)
        stream = await client.post(ROUTE, data=form(wav(800), stream="true"))
        reader, writer = await asyncio.open_connection(client.host, client.port)  # an upload that stands still
        writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n" % ROUTE.encode())
        writer.write(b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n")
        socket = await client.ws_connect("/v1/stream?rate=8000")
        while (await (await client.get("/health")).json())["files"] < 3:
            await asyncio.sleep(0.01)
        end = asyncio.create_task(served.end(0.5))
        await asyncio.sleep(0)
        for ask in client.post(ROUTE, data=form(wav(800))), client.get("/health"), client.get("/v1/stream?rate=8000"):
            async with ask as refused:
                assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
                assert "shutting down" in fits((await refused.json())["error"], "error")["message"]
        if not late:
            go_on.set()
        await end
        answer, last = await waiting, [x async for x in events_of(stream)][-1]
        assert answer.status == (503 if late else 200)
        assert ("shutting down" in last["error"]["message"]) if late else (last["text"] == "A")
        assert (await reader.readline()).split()[1] == b"503"
        closing = asyncio.create_task(served.shut_down(None))
        assert [x["type"] for x in await texts(socket)] == ["error"] and socket.close_code == 1001
        await closing
        go_on.set()
        writer.close()

    for late in True, False:
        try:
            talk(served, functools.partial(conversation, late=late))
        finally:
            served.ending = False


def test_a_server_that_is_ended(served, monkeypatch, signals):
    """The port that it names listens; SIGTERM ends it with 0, whatever stands still, and a second one at once."""
    statuses, lines = [], queue.SimpleQueue()
    monkeypatch.setattr(server, "leave", statuses.append)
    site = server.Server.__new__(server.Server)
    vars(site).update(vars(served) | {"options": dataclasses.replace(served.options, port=0, grace=0.3)})

    def client(count):
        port = int(re.search(r" http://127\.0\.0\.1:(\d+): ", lines.get(timeout=30))[1])
        with socket.create_connection(("127.0.0.1", port)) as upload:
            upload.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n" % ROUTE.encode())
            upload.sendall(b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n")
            for _ in range(count):
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGTERM)
            return upload.makefile("rb").readline(), time.monotonic()

    for count, expected_statuses in (1, [0]), (2, [143, 0]):
        statuses.clear()
        site.ending = False
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            future = thread.submit(client, count)
            with contextlib.redirect_stdout(types.SimpleNamespace(write=lines.put, flush=lambda: None)):
                server.run(site)
            answered, at = future.result()
        assert b" 503 " in answered and time.monotonic() < at + 2
        assert statuses == expected_statuses
        lines.get()  # the end of the line
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        site.options = dataclasses.replace(site.options, port=port)
        with pytest.raises(system.UserError) as error:
            server.run(site)
    assert str(error.value) == f"--host 127.0.0.1 --port {port}: {os.strerror(errno.EADDRINUSE)}"


def test_events(served, corpus, monkeypatch):
    """A client has read what is final before the rest is found; deltas make the text. Errors are events."""
    (good, *_), go_on = sorted(corpus.rglob("*.flac")), threading.Event()
    truth, labels = expected(served, audio.read(good, 8000)), lambda x: served.model.tokens.encode(x)

    def slow(jobs):  # in the place of a recording of several windows
        (file,) = jobs
        for text in "A", "A", "A B":
            found = asr.recognition.results.Labels(labels(text), [], [-0.5, -0.25, -1.0][: len(text)], [], [])
            assert file.watch(found)
        assert go_on.wait(20)
        file.watch(asr.recognition.results.Labels(labels("A BC"), [], [-0.5, -0.25, -1.0, 0.0], [], []))
        bad = b"bad" in file.getvalue()
        return [schema.Problem(400, "cut off") if bad else transcripts.Transcript("A BC", 1.0, [])]

    async def conversation(client):
        for include, more in ({}, {}), ({"include[]": "logprobs"}, {"response_format": "json"}):
            async with client.post(ROUTE, data=form(good.read_bytes(), stream="true", **include, **more)) as answer:
                assert answer.content_type == "text/event-stream"
                *deltas, done = [x async for x in events_of(answer)]
            assert "".join(x["delta"] for x in deltas) == done["text"] == truth.text
            listed = [x for y in deltas for x in y.get("logprobs", [])]
            assert listed == done.get("logprobs", [])
            assert "".join(fits(x, "logprob")["token"] for x in listed) == (truth.text if include else "")
        monkeypatch.setattr(served.files, "run", slow)
        for file, last in (wav(800), "transcript.text.done"), (wav(800) + b"bad", "error"):
            go_on.clear()
            async with client.post(ROUTE, data=form(file, stream="true", **{"include[]": "logprobs"})) as answer:
                events, found = events_of(answer), []
                while not go_on.is_set():
                    found.append(await anext(events))
                    if "".join(x["delta"] for x in found) == "A B":
                        go_on.set()
                found += [x async for x in events]
            assert [x["delta"] for x in found[:-1]] == ["A", " B", "C"] and found[-1]["type"] == last
            assert [x["logprob"] for y in found[:-1] for x in y["logprobs"]] == [-0.5, -0.25, -1.0, 0.0]
        monkeypatch.setattr(served.files, "run", lambda jobs: 1 / 0)
        for fields in {}, {"stream": "true"}:
            async with client.post(ROUTE, data=form(wav(800), **fields)) as answer:
                assert answer.status == (200 if fields else 500)
                (error,) = [x async for x in events_of(answer)] if fields else [await answer.json()]
                fits(error["error"], "error")

    talk(served, conversation)


@pytest.mark.slow
def test_the_client_of_openai(served, corpus):
    """Where it is installed, its types accept all answers, and require what the table above has."""
    openai = pytest.importorskip("openai")
    from openai.types import audio as types
    from openai.types import model, shared

    kinds = {
        "verbose": types.TranscriptionVerbose, "segment": types.TranscriptionSegment, "word": types.TranscriptionWord,
        "transcript.text.delta": types.TranscriptionTextDeltaEvent, "model": model.Model, "error": shared.ErrorObject,
        "transcript.text.done": types.TranscriptionTextDoneEvent,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert {field for field, x in kind.model_fields.items() if x.is_required()} == SCHEMA[name].keys(), name
    file = max(corpus.rglob("*.flac"))

    def calls(port):
        with openai.OpenAI(api_key="any", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0) as client:
            create, strict = client.audio.transcriptions.with_raw_response.create, {"model": "whisper-1", "file": file}
            text = types.Transcription.model_validate_json(create(**strict).text, strict=True).text
            assert text and create(**strict, response_format="text", prompt="x", temperature=0.3).text == f"{text}\n"
            assert "-->" in create(**strict, response_format="srt").text
            assert create(**strict, response_format="vtt", language="en").text.startswith("WEBVTT")
            logs = create(**strict, include=["logprobs"], chunking_strategy={"type": "server_vad"}, keywords=["a"])
            types.Transcription.model_validate_json(logs.text, strict=True)
            for parts in ["word"], ["segment"], ["word", "segment"], openai.omit:
                answer = create(**strict, response_format="verbose_json", timestamp_granularities=parts)
                whole = types.TranscriptionVerbose.model_validate_json(answer.text, strict=True)
                assert whole.text == text and (whole.words or whole.segments)
            events = [*client.audio.transcriptions.create(**strict, stream=True, include=["logprobs"])]
            for x in events:
                kinds[x.type].model_validate(x.model_dump(), strict=True)
            assert "".join(x.delta for x in events[:-1]) == events[-1].text == text
            assert [x.id for x in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").created == 0
            for call in (
                lambda: client.models.retrieve("huge"),
                lambda: create(**strict | {"file": b"x"}),
                lambda: create(**strict, temperature=2),
            ):
                with pytest.raises(openai.APIStatusError) as error:
                    call()
                kinds["error"].model_validate(error.value.body, strict=True)

    async def conversation(client):
        await asyncio.to_thread(calls, client.port)

    talk(served, conversation)


def test_clients_that_go(served, monkeypatch):
    """Their places are free, what waits is dropped, what runs hears so; an upload may take long, but not pause."""
    ran, begun, go_on = [], threading.Event(), threading.Event()

    def slow(jobs):
        ran.extend(jobs)
        begun.set()
        assert go_on.wait(20)
        return [schema.Problem(400, "it has arrived") for _ in jobs]

    monkeypatch.setattr(served.files, "run", slow)
    monkeypatch.setattr(form_module, "PATIENCE", 1)
    head = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--x\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'

    async def conversation(client):
        async def health():
            return (await (await client.get("/health")).json())["files"]

        async def until(count):
            async with asyncio.timeout(20):
                while await health() != count:
                    await asyncio.sleep(0.01)

        async def slowly(pause, count):
            """The answer to a form whose file comes byte by byte."""
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\n" % ROUTE.encode())
            size = len(head) + count + len(b"\r\n--x--\r\n")
            writer.write(b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: %d\r\n\r\n" % size + head)
            for _ in range(count):
                await asyncio.sleep(pause)
                writer.write(b"x")
            writer.write(b"\r\n--x--\r\n")
            answer = await reader.readline()
            writer.close()
            return answer.split()[1]

        waiting = []
        for _ in range(3):  # the first one runs, and two wait
            waiting.append(asyncio.create_task(client.post(ROUTE, data=form(b"x"))))
            await asyncio.to_thread(begun.wait, 60)
        await until(3)
        async with client.post(ROUTE, data=form(b"x")) as answer:
            assert answer.status == 429 and int(answer.headers["Retry-After"]) > 0
        for x in waiting:
            x.cancel()
        await asyncio.wait(waiting)
        await until(0)
        assert [x.watch(asr.recognition.results.no_labels()) for x in ran] == [False]
        _, writer = await asyncio.open_connection(client.host, client.port)  # gone within its upload
        writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: 999\r\n" % ROUTE.encode())
        writer.write(b"Content-Type: multipart/form-data; boundary=x\r\n\r\n" + head)
        await until(1)
        writer.close()
        await until(0)
        go_on.set()
        assert await asyncio.gather(slowly(0.2, 8), slowly(2.5, 1)) == [b"400", b"408"]
        assert len(ran) == 2 and await health() == 0

    talk(served, conversation)


def test_pages_of_other_origins(served, folder):
    """Truth: the Fetch standard. Without --cors, and to others, no header; errors have them, so that pages read why."""
    mine, other = "http://localhost:3000", "http://b.org"
    run(["serve", "--model", folder, "--cors", f"{mine}/"], 2)
    for origins, origin, allowed in (
        ([], mine, None), ([mine], mine, mine), ([mine], other, None), (["*"], other, "*"), ([mine], None, None),
    ):  # fmt: skip
        options = dataclasses.replace(served.options, cors=origins)
        site = server.Server.__new__(server.Server)
        vars(site).update(vars(served) | {"options": options})

        async def conversation(client, origin=origin, allowed=allowed):
            headers = {"Origin": origin} if origin else {}
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

        talk(site, conversation)


ALONE = """
import json, sys, zipfile
import jax, numpy as np
sys.modules["jax_rnnt_speech"] = sys.modules["jax_rnnt"] = None
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
with zipfile.ZipFile(sys.argv[1]) as file:
    about = json.loads(file.read("model.json"))
x, texts = np.zeros((3, about["samples"]), np.float32), []
for size in (7000, 5000, 100, 0):
    x[0, :size], x[0, size:] = np.load(sys.argv[2])[:size], 9
    labels, frames, log_probs, counts = program.call(x, np.array([size, 0, 0], np.int32))
    texts.append("".join(about["labels"][i] for i in labels[0, : counts[0]]))
assert about["jax"] == jax.__version__
print(json.dumps(texts))
"""


@pytest.mark.slow
def test_export(served, folder, tmp_path, capsys):
    """A process that cannot import the packages finds the same texts, whatever is behind the samples. The command says
    which JAX wrote the file, since later ones may refuse it."""
    pytest.importorskip("flatbuffers")
    run(["export", tmp_path / "x.zip", "--model", folder, "--seconds", 1])
    said = capsys.readouterr().out
    assert f"jax {jax.__version__}" in said and "six months" in said
    samples = np.random.default_rng(0).normal(0, 0.3, 7000).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    command = [sys.executable, "-c", ALONE, tmp_path / "x.zip", tmp_path / "x.npy"]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == [expected(served, samples[:n]).text for n in (7000, 5000, 100, 0)]
    run(["export", tmp_path / "x.zip", "--model", folder, "--seconds", 0.001], 2)


@pytest.mark.parametrize("preset", features.PRESETS)
def test_features_of_padded_recordings(preset):
    """Whatever is behind a recording, its frames are those of it alone."""
    extractor = features.extractor(asr.config.Config.of(features=preset, mels=16).features)
    samples = np.random.default_rng(0).normal(0, 0.3, (3, 9000)).astype(np.float32)
    lengths = np.array([9000, 4321, 800])
    counts = extractor.counts(lengths, np)
    for row, frames, size, count in zip(samples, extractor(samples, np, lengths), lengths, counts):
        np.testing.assert_allclose(frames[:count], extractor(row[:size]), atol=1e-4)
