"""Texts over HTTP and of live streams are those of `transcribe`; bad requests are told so; an exported model alone."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from support import CONVOLUTIONAL, asr, random_recogniser, run

pytest.importorskip("aiohttp")

from aiohttp import FormData, WSServerHandshakeError
from aiohttp.test_utils import TestClient, TestServer

from jax_rnnt import timing
from jax_rnnt_speech import audio, recognise, server, transcripts

ROUTE = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model with random weights that writes many words."""
    recogniser, path = random_recogniser(**CONVOLUTIONAL), tmp_path_factory.mktemp("run")
    of = asr.runs.Run(path)
    of.open()
    of.save(1, recogniser.setup(), params=recogniser.params)
    of.close()
    return path


@pytest.fixture(scope="module")
def served(folder):
    """The server of the command line, with three slots."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "run", lambda x, _: kept.append(x))
        limits = "--connections", 3, "--max-bytes", 40_000, "--max-seconds", 3, "--endpoint", 0.5
        run(["serve", "--model", folder, "--name", "tiny", "--language", "en", *limits])
    return kept[0]


def talk(served, conversation):
    """Runs a coroutine of (a client of the server)."""

    async def main():
        async with TestClient(TestServer(served.application())) as client:
            await conversation(client)

    asyncio.run(main())


def form(file, /, **fields):
    data = FormData()
    for name, x in ({"model": "tiny"} | fields).items():
        for text in x if isinstance(x, list) else [x]:
            data.add_field(name, text)
    data.add_field("file", file, filename="a.flac")
    return data


def expected(served, samples):
    """The Transcript that `transcribe` writes."""
    (result,) = recognise.transcribe(served.recogniser, [("a", samples)], served.how)
    return transcripts.transcript(served.recogniser, asr.manifests.Entry("a", "a", ""), result)


def same(words, truth):
    """Whether objects are those of words, whose confidences depend on the batch by a rounding."""
    assert [x["word"] for x in words] == [x.text for x in truth]
    for name in ("start", "end", "confidence"):
        np.testing.assert_allclose([x[name] for x in words], [x[name] for x in timing.to_json(truth)], atol=1e-4)


def test_texts_of_files(served, corpus, tmp_path):
    """Every form, of files that are transcribed together."""
    files = sorted(corpus.rglob("*.flac"))[:3]
    truths = [expected(served, audio.read(x, 8000)) for x in files]
    assert any(x.words for x in truths)

    async def conversation(client):
        async def texts(**fields):
            answers = await asyncio.gather(*(client.post(ROUTE, data=form(x.read_bytes(), **fields)) for x in files))
            assert [x.status for x in answers] == [200] * 3
            return [await x.text() for x in answers]

        assert [json.loads(x) for x in await texts()] == [{"text": x.text} for x in truths]
        assert await texts(response_format="text", temperature="0", language="en") == [f"{x.text}\n" for x in truths]
        for name, write in (("srt", timing.write_srt), ("vtt", timing.write_vtt)):
            for text, truth in zip(await texts(response_format=name), truths):
                write(tmp_path / "x", transcripts.captions(truth.words, truth.duration, truth.space))
                assert text == (tmp_path / "x").read_text()
        both = {"timestamp_granularities[]": ["word", "segment"]}
        for text, truth in zip(await texts(response_format="verbose_json", **both), truths):
            whole = json.loads(text)
            same(whole["words"], truth.words)
            assert whole["duration"] == truth.duration >= max((x["end"] for x in whole["segments"]), default=0)
            assert truth.space.join(x["text"] for x in whole["segments"]) == truth.space.join(
                x.text for x in truth.words
            )
        assert (await (await client.get("/v1/models")).json())["data"][0]["id"] == "tiny"

    talk(served, conversation)


def test_streams_that_come_and_go(served):
    """Seven streams in three slots: the words of each are those of its recording, and a fourth at once is refused.

    They are beams, which hold labels back until no hypothesis differs.
    """
    served = server.Server(served.recogniser, asr.recogniser.Search(beam=2), served.options)
    rng = np.random.default_rng(0)
    recordings = [rng.normal(0, 0.3, size).clip(-1, 1) for size in (4000, 9000, 2500, 6000, 30, 5000, 3000)]
    pcm = [np.int16(x * 32767) if i % 2 else np.float32(x) for i, x in enumerate(recordings)]

    async def conversation(client):
        async def one(x, free):
            async with free:
                kind, words, events = "pcm16" if x.dtype == np.int16 else "float32", [], []
                async with client.ws_connect(f"/v1/stream?rate=8000&format={kind}") as socket:
                    for part in np.array_split(x, [1, 700, 711, 3000]):
                        await socket.send_bytes(part.tobytes())
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


def test_bad_requests(served, corpus):
    """Two hundred: each is told what is wrong, and nothing of it stays."""
    good = next(corpus.rglob("*.flac")).read_bytes()
    rng = np.random.default_rng(0)
    forms = [form(good[:n], response_format=x) for x in server.FORMATS for n in rng.integers(0, len(good) - 9, 12)]
    forms += [form(rng.bytes(int(n))) for n in rng.integers(0, 3000, 40)]
    forms += [form(good, **{name: text}) for name, text in (
        ("model", "huge"), ("response_format", "xml"), ("language", "de"), ("temperature", "0.5"), ("temperature", "x"),
        ("prompt", "hello"), ("stream", "true"), ("user", "me"), ("timestamp_granularities[]", "word"),
        ("prompt", "x" * 5000), ("file", "twice"),
    )]  # fmt: skip
    forms += [FormData({"model": "tiny"}), form(good, model=["tiny", "tiny"])]
    forms += [form(bytes(n)) for n in (50_000, 200_000)]
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    head = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--x\r\nContent-Disposition: form-data; '
    body = head + b'name="file"; filename="a"\r\n\r\n' + good[:99] + b"\r\n--x--\r\n"
    raw = [(body[: int(n)], kind) for n in rng.integers(0, len(body), 60)]
    raw += [(body, {"Content-Type": x}) for x in ("", "text/plain", "multipart/form-data", "multipart/x; boundary=x")]
    raw += [(body.replace(b"name=", bytes([i]) * 40), kind) for i in range(8)] + [(b"--x\r\n" * 9, kind)]
    streams = "", "rate=0", "rate=x", "rate=16000&format=mp3", "rate=16000&speed=2", "rate=9999999999", "rate=16000"

    async def conversation(client):
        async def refused(answer, least=400):
            assert least <= answer.status < 500, await answer.text()
            error = (await answer.json())["error"]
            assert error["message"] and error["type"] and "\n" not in error["message"]

        async def everything():
            for data in [*forms, *raw]:
                data, headers = data if isinstance(data, tuple) else (data, None)
                async with client.post(ROUTE, data=data, headers=headers) as answer:
                    await refused(answer)
            for query in streams:
                await refused(await client.get(f"/v1/stream?{query}"))
            await refused(await client.get(ROUTE))
            await refused(await client.get("/v2"))
            for data in (b"abc", np.float32([np.nan]).tobytes(), np.float32([99]).tobytes(), "stop"):
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
print(json.dumps(texts))
"""


def test_export(served, folder, tmp_path):
    """A process that cannot import the packages finds the same texts, whatever is behind the samples."""
    pytest.importorskip("flatbuffers")
    run(["export", tmp_path / "x.zip", "--model", folder, "--seconds", 1])
    samples = np.random.default_rng(0).normal(0, 0.3, 7000).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    command = [sys.executable, "-c", ALONE, tmp_path / "x.zip", tmp_path / "x.npy"]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == [expected(served, samples[:n]).text for n in (7000, 5000, 100, 0)]
    run(["export", tmp_path / "x.zip", "--model", folder, "--seconds", 0.001], 2)


@pytest.mark.parametrize("preset", asr.features.PRESETS)
def test_features_of_padded_recordings(preset):
    """Whatever is behind a recording, its frames are those of it alone."""
    extractor = asr.features.made(preset, 16000, 16, 25, 10, False)
    samples = np.random.default_rng(0).normal(0, 0.3, (3, 9000)).astype(np.float32)
    lengths = np.array([9000, 4321, 800])
    counts = extractor.counts(lengths, np)
    for row, frames, size, count in zip(samples, extractor(samples, np, lengths), lengths, counts):
        np.testing.assert_allclose(frames[:count], extractor(row[:size]), atol=1e-4)
