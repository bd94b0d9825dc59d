"""Texts over HTTP are those of `transcribe`, in OpenAI's schema; bad requests get a reason; habits change nothing."""

import asyncio
import base64
import json
import os
import zlib

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from aiohttp import FormData

from jax_rnnt import timing
from jax_rnnt_speech.cli import serve
from jax_rnnt_speech.data import audio
from jax_rnnt_speech.recognition import subtitles, transcripts
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.serving import schema, server
from served import (
    END,
    FILE,
    MULTIPART,
    ROUTE,
    SCHEMA,
    assert_same_words,
    events_of,
    expected,
    fits,
    form,
    heard,
    part,
    talk,
)
from support import CONVOLUTIONAL, asr, configuration


@pytest.fixture(scope="module")
def three(served, corpus):
    """(bytes of three files, their Results, their Transcripts)."""
    files = sorted(corpus.rglob("*.flac"))[:3]
    results, truths = ([of(served, audio.read(x, 8000)) for x in files] for of in (heard, expected))
    assert any(x.words for x in truths)
    return [x.read_bytes() for x in files], results, truths


@pytest.fixture(scope="module")
def spoken(served, corpus):
    """(bytes of a file, its text)."""
    file = max(corpus.rglob("*.flac"))
    return file.read_bytes(), expected(served, audio.read(file, 8000)).text


async def texts(client, files, **fields):
    """Answers to files that are transcribed together."""
    answers = await asyncio.gather(*(client.post(ROUTE, data=form(x, **fields)) for x in files))
    assert [x.status for x in answers] == [200] * len(files)
    return [await x.text() for x in answers]


async def test_texts_of_files(served, three):
    """Plain forms; log-probabilities spell the text; fields that change nothing; a file in base64; captions."""
    files, results, truths = three
    async with talk(served) as client:
        assert [json.loads(x) for x in await texts(client, files)] == [{"text": x.text} for x in truths]
        usual = {"temperature": "0.7", "language": "en", "languages[]": "en", "prompt": "Hello", "stream": "False"}
        usual |= {"model": "whisper-1", "keywords[]": ["x", "y"], "chunking_strategy[type]": "server_vad"}
        assert await texts(client, files, response_format="text", **usual) == [f"{x.text}\n" for x in truths]
        for text, truth, result in zip(await texts(client, files, **{"include[]": "logprobs"}), truths, results):
            whole = json.loads(text)
            tokens = [fits(x, "logprob") for x in whole["logprobs"]]
            assert whole["text"] == truth.text == "".join(x["token"] for x in tokens)
            assert [bytes(x["bytes"]).decode() for x in tokens] == [x["token"] for x in tokens]
            np.testing.assert_allclose([x["logprob"] for x in tokens], result.log_probs, atol=1e-4)
        coded = part('"file"', base64.encodebytes(files[0]), "Content-Transfer-Encoding: base64")
        body = coded + part('"model"', b"tiny") + END
        async with client.post(ROUTE, data=body, headers=MULTIPART) as answer:
            assert (await answer.json())["text"] == truths[0].text
        for name, write in (("srt", subtitles.srt), ("vtt", subtitles.vtt)):
            for text, truth in zip(await texts(client, files, response_format=name), truths):
                assert text == write(transcripts.captions(truth.words, truth.duration, truth.space))


async def test_verbose_answers(served, three):
    """Words and segments that were asked for; all labels are in the segments, and no time is behind the end."""
    files, results, truths = three
    verbose = {"response_format": "verbose_json"}
    async with talk(served) as client:
        for some, names in (("word", {"words"}), ("segment", {"segments"}), ([], {"segments"})):
            whole = json.loads((await texts(client, files[:1], **verbose, timestamp_granularities=some))[0])
            assert names == whole.keys() - {"task", "language", "duration", "text"}
        both = await texts(client, files, **verbose, **{"timestamp_granularities[]": ["word", "segment"]})
    for text, truth, result in zip(both, truths, results):
        whole = fits(json.loads(text), "verbose")
        assert whole["language"] == "en"
        assert_same_words([fits(x, "word") for x in whole["words"]], truth.words)
        assert [fits(x, "segment")["id"] for x in whole["segments"]] == [*range(len(whole["segments"]))]
        assert [i for x in whole["segments"] for i in x["tokens"]] == result.labels
        assert whole["duration"] == truth.duration >= max((x["end"] for x in whole["segments"]), default=0)
        segments = truth.space.join(x["text"] for x in whole["segments"])
        assert segments == truth.space.join(x.text for x in truth.words)


def test_doubts():
    """Both forms of JSON have what words and speech do not have in common, if there is any."""
    word = timing.Interval(1.0, 1.5, "so", 0.5)
    x = transcripts.Transcript("so", 9.0, [word], unheard=((3.0, 5.0),), invented=(word,))
    truth = {"unheard": [{"start": 3.0, "end": 5.0}]}
    truth |= {"invented": [{"word": "so", "start": 1.0, "end": 1.5, "confidence": 0.5}]}
    for kind in "json", "verbose_json":
        body = lambda x: json.loads(schema.answer(x, kind, ["word"], "en").body)
        assert body(x).items() >= truth.items()
        assert not truth.keys() & body(transcripts.Transcript("so", 9.0, [word])).keys()


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


async def assert_refused(answer, least=400):
    """The error of a request must have OpenAI's schema, in one line."""
    assert least <= answer.status < 500, await answer.text()
    error = fits((await answer.json())["error"], "error")
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and "\n" not in error["message"]


def bad_forms(good):
    """Forms that ask for what is not done, and requests that are no forms: (body, headers)."""
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
    body = part('"model"', b"tiny") + part(FILE, good[:99]) + END
    raw = [(body[: int(n)], MULTIPART) for n in rng.integers(0, len(body), 60)]
    kinds = "", "text/plain", "multipart/form-data", "multipart/x; boundary=x"
    raw += [(body, {"Content-Type": x}) for x in kinds]
    raw += [(body, MULTIPART | {"Content-Encoding": "gzip", "Connection": "close"})]
    raw += [(body.replace(b"name=", bytes([i]) * 40), MULTIPART) for i in range(8)] + [(b"--x\r\n" * 9, MULTIPART)]
    return [*((x, None) for x in forms), *raw]


STREAMS = "", "rate=0", "rate=x", "rate=16000&format=mp3", "rate=16000&speed=2", "rate=9999999999", "rate=16000"


async def test_bad_requests(served, corpus):
    """Two hundred: each is told what is wrong, and nothing of it stays."""
    good = next(corpus.rglob("*.flac")).read_bytes()
    bad = bad_forms(good)
    assert len(bad) + len(STREAMS) >= 190

    async def held():
        async with client.post(ROUTE, data=form(good)) as answer:
            assert answer.status == 200
        return np.array([len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())])

    async with talk(served) as client:
        before = await held()
        for data, headers in bad:
            async with client.post(ROUTE, data=data, headers=headers) as answer:
                await assert_refused(answer)
        for query in STREAMS:
            await assert_refused(await client.get(f"/v1/stream?{query}"))
        await assert_refused(await client.get(ROUTE))
        async with client.post(ROUTE, data=form(b"")) as answer:
            assert "empty" in (await answer.json())["error"]["message"]
        for path in ("/v2", "/v1/models/huge"):
            await assert_refused(await client.get(path), 404)
        await assert_refused(await client.post("/v1/audio/translations", data=form(good)), 404)
        await assert_refused(await client.options(ROUTE), 405)
        for data in (np.float32([np.nan]).tobytes(), np.float32([99]).tobytes(), "stop"):
            async with client.ws_connect("/v1/stream?rate=8000&format=float32") as stream:
                await (stream.send_str if isinstance(data, str) else stream.send_bytes)(data)
                assert json.loads((await stream.receive()).data)["error"]["message"]
        assert (await held() <= before + 4).all()
        health = await (await client.get("/health")).json()
        assert (health["files"], health["streams"]) == (0, 0)
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


HABITS = [{"language": x} for x in ("auto", "", "AUTO", "en", "EN", "en-US", "en_us", "english", "eng", "und")]
HABITS += [{"model": x} for x in ("", "large-v3", "Systran/faster-whisper-small", "gpt-4o-transcribe-diarize")]
HABITS += [{"stream": x} for x in ("", "false", "False", "0")]
HABITS += [{"temperature": x} for x in ("", "0", "0.0", "1")]
HABITS += [{"response_format": x} for x in ("", "JSON", "json")]
HABITS += [{"languages[]": "auto"}, {"languages": "de,en"}, {"languages[0]": "en-GB"}, {"include": '["logprobs"]'}]
HABITS += [dict.fromkeys(("language", "temperature", "stream"), x) for x in ("null", "None", "undefined")]
# What the documentation or sources of these clients and servers send, or have as the default.
HABITS += [{name: x for name, _, x in (y.partition("=") for y in fields.split())} for fields in (
    "user=me task=transcribe translate=false hotwords=x temperature_inc=0.2",
    "offset_t=0 offset_n=0 duration=0 max_context=-1 max_len=0 split_on_word=false best_of=2 beam_size=-1 "
    "audio_ctx=0 word_thold=0.01 entropy_thold=2.40 logprob_thold=-1.00 debug_mode=false diarize=false "
    "tinydiarize=false detect_language=false no_timestamps=false carry_initial_prompt=false suppress_nst=true "
    "no_context=true token_timestamps=false vad=false vad_threshold=0.5 vad_samples_overlap=0.1",  # whisper.cpp
    "timestamp_granularities[]=segment vad_filter=true without_timestamps=true diarization=false",  # speaches
    "backend= threads=4 translate=false diarize=false prompt=",  # LocalAI
    "seed=1 top_p=1.0 repetition_penalty=1.0 use_beam_search=false stream_include_usage=false",  # vLLM
)]  # fmt: skip


async def text_of(client, data, path=ROUTE, **more):
    async with client.post(path, data=data, **more) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["text"]


async def test_habits(served, spoken):
    """What clients of OpenAI and Whisper send by habit changes no text. Truth: the text of `transcribe`."""
    good, truth = spoken
    async with talk(served) as client:
        for fields in HABITS:
            assert await text_of(client, form(good, **fields)) == truth, fields
        for x in "true", "True", "1":
            async with client.post(ROUTE, data=form(good, stream=x)) as answer:
                assert [x async for x in events_of(answer)][-1]["text"] == truth
        for both in ["word", "segment"], "word,segment", '["word", "segment"]':
            fields = {"response_format": "verbose_json", "timestamp_granularities[]": both}
            async with client.post(ROUTE, data=form(good, **fields)) as answer:
                assert {"words", "segments"} <= (await answer.json()).keys()


async def test_habits_of_http(served, spoken):
    """A file alone, in chunks, after a 100; slashes behind paths; HEAD. Truth: the text of `transcribe`."""
    good, truth = spoken
    alone = FormData()
    alone.add_field("file", good, filename="a.flac")

    async def chunks(body):
        for i in range(0, len(body), 999):
            yield body[i : i + 999]

    async with talk(served) as client:
        assert await text_of(client, alone, f"{ROUTE}/") == truth
        assert await text_of(client, chunks(part(FILE, good) + END), headers=MULTIPART) == truth
        assert await text_of(client, form(good), expect100=True) == truth
        for path in "/", "/health", "/health/", "/healthz", "/v1/models", "/v1/models/", "/v1/models/tiny/":
            for ask in client.get, client.head:
                assert (await ask(path)).status == 200, path
        (model,) = (await (await client.get("/v1/models")).json())["data"]
        assert model == await (await client.get("/v1/models/tiny")).json()
        assert fits(model, "model")["id"] == "tiny"


@pytest.mark.slow
async def test_the_client_of_openai(served, corpus):
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
            # The vocabulary has A, B and C alone.
            for fields in {"keywords": ["AB", "Ωmega"]}, {"prompt": "AB, Ωmega"}:
                for name, kind in ("json", types.Transcription), ("verbose_json", types.TranscriptionVerbose):
                    answer = create(**strict, response_format=name, **fields)
                    kind.model_validate_json(answer.text, strict=True)
                    assert json.loads(answer.headers["X-Unused-Keywords"]) == ["Ωmega"]
                assert json.loads(answer.text)["unused_keywords"] == ["Ωmega"]
            with pytest.raises(openai.BadRequestError, match="more than 100 keywords"):
                create(**strict, keywords=["A"] * 101)
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

    async with talk(served) as client:
        await asyncio.to_thread(calls, client.port)
