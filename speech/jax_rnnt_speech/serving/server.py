"""Texts over HTTP and WebSocket, on aiohttp.

Files are read into memory, decoded and transcribed in a thread, together with those that wait; streams share a batch in
another. No file of a client is kept, and none is heard further once its client has gone. Answers have the schema of
OpenAI's API, errors too.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import sys
import zlib
from typing import NamedTuple

import aiohttp
import av
import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from jax_rnnt import timing
from jax_rnnt_speech.data import audio, features, manifests
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.recognition import recognise, search_options, streams, transcripts, unheard
from jax_rnnt_speech.recognition.results import no_labels
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.system import UserError, refuse_if

FORMATS = "json", "text", "srt", "vtt", "verbose_json"
ALIASES = "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe", "gpt-transcribe"  # many clients name no others
SAMPLES = {"pcm16": np.dtype("<i2"), "float32": np.dtype("<f4")}
GRANULARITIES = "timestamp_granularities"
ONCE = {"file", "model", "response_format", "language", "temperature", "prompt", "stream"}
# Lists, which clients write as name[]; chunking_strategy is an object, written as name[key].
LISTS = {GRANULARITIES, "include", "languages", "keywords", "chunking_strategy"}
FIELDS = 2**16  # bytes of all fields that are no file
UNLIKELY = -9999.0  # OpenAI's log-probability of what is very unlikely: JSON has no infinity
MESSAGE = 2**20  # bytes of a message of a stream
TOGETHER = 8  # files that are transcribed together
PATIENCE = 60  # seconds in which a client has to send more of a form, or the next message, or to read
# What aiohttp raises, or warns of, where a form is none.
MALFORMED = ValueError, AssertionError, RuntimeError, RuntimeWarning
MALFORMED += aiohttp.ClientError, BadHttpMessage, web.RequestPayloadError


class Problem(Exception):
    """What is wrong with a request."""

    def __init__(self, status, message, field=None, code=None):
        self.status, self.error = status, {"message": message, "type": "server_error", "param": field, "code": code}
        if status < 500:
            self.error["type"] = "rate_limit_error" if status == 429 else "invalid_request_error"


def require(fine, message, field=None, status=400):
    """Raises the Problem of a request that is not fine."""
    if not fine:
        raise Problem(status, message, field)


class Together:
    """Calls of coroutines, as one call of `run` in a thread for all that wait, at most so many."""

    def __init__(self, run, most):
        self.run, self.most, self.waiting, self.task = run, most, [], None
        self.thread = concurrent.futures.ThreadPoolExecutor(1)

    async def __call__(self, job):
        loop = asyncio.get_running_loop()
        self.waiting.append(entry := (job, future := loop.create_future()))
        if self.task is None or self.task.done():
            self.task = loop.create_task(self.work(loop))
        try:
            return await future
        finally:
            self.waiting = [x for x in self.waiting if x is not entry]  # nobody waits any more

    async def work(self, loop):
        while self.waiting:
            chosen, self.waiting = self.waiting[: self.most], self.waiting[self.most :]
            try:
                results = await loop.run_in_executor(self.thread, self.run, [job for job, _ in chosen])
            except Exception as error:
                results = [error] * len(chosen)
            for (_, future), result in zip(chosen, results, strict=True):
                if not future.done():
                    (future.set_exception if isinstance(result, Exception) else future.set_result)(result)


class File(audio.Memory):
    """An upload. `gone`: nobody waits for it; `listener`: takes its Labels so far, in the thread that finds them."""

    def __init__(self, data, name):
        super().__init__(data, name)
        self.heard, self.gone, self.listener, self.decoding = no_labels(), False, None, None

    def watch(self, labels):
        self.heard = labels
        if self.listener:
            self.listener(labels)
        return not self.gone


class Asked(NamedTuple):
    """What a form asks for."""

    form: str
    granularities: set
    language: str
    stream: bool
    log_probs: bool
    decoding: Decoding


class Server:
    """`options`: a `cli.serve.Serving` with a name."""

    def __init__(self, model, decoding, options):
        self.model, self.decoding, self.options = model, decoding, options
        self.languages = {}  # (Decoding, whether the language decides anything) of those that forms have named
        self.texts = [x.replace(model.tokens.separator, " ") for x in model.tokens.texts]
        self.files, self.uploads, self.sockets = Together(self.transcribed, TOGETHER), 0, set()
        self.slots = streams.Slots(model, options.connections, decoding) if model.chunk else None
        if self.slots:
            self.slots.step = Together(self.slots.run, options.connections)
            self.slots.run([])

    def application(self):
        app = web.Application(middlewares=[self.answered])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name:.+}", self.one_model)
        app.router.add_post("/v1/audio/transcriptions", self.transcription)
        app.router.add_post("/v1/audio/translations", self.translation)
        app.router.add_get("/v1/stream", self.stream)
        app.on_response_prepare.append(self.allow)
        app.on_shutdown.append(self.shut_down)
        return app

    @web.middleware
    async def answered(self, request, handler):
        """Errors as objects, in OpenAI's form."""
        try:
            if request.method == "OPTIONS" and self.allowed(request) in self.options.cors:
                return web.Response(status=204)
            return await handler(request)
        except Problem as error:
            problem, headers = error, {}
        except web.HTTPException as error:
            problem = Problem(error.status, f"{request.method} {shown(request.path)}: {error.reason}")
            headers = {name: x for name, x in error.headers.items() if name == "Allow"}
        except Exception:
            problem, headers = unexpected(request), {}
        return web.json_response({"error": problem.error}, status=problem.status, headers=headers)

    def allowed(self, request):
        """The origin whose pages may read the answer, if it is one of --cors."""
        return "*" if "*" in self.options.cors else request.headers.get("Origin")

    async def allow(self, request, response):
        """Adds the headers of CORS."""
        if self.options.cors:
            response.headers["Vary"] = "Origin"
        if (origin := self.allowed(request)) not in self.options.cors:
            return
        response.headers["Access-Control-Allow-Origin"] = origin
        if request.method == "OPTIONS":
            asked = request.headers.get("Access-Control-Request-Headers", "*")
            more = {"Methods": "GET, POST, OPTIONS", "Headers": asked}
            response.headers.update({f"Access-Control-Allow-{name}": x for name, x in more.items()})
            response.headers["Access-Control-Max-Age"] = "86400"

    async def health(self, _):
        counts = {"files": self.uploads, "streams": len(self.sockets), "connections": self.options.connections}
        return web.json_response({"status": "ok", "model": self.options.name} | counts)

    def described(self, name):
        return {"id": name, "object": "model", "created": 0, "owned_by": "jax_rnnt_speech"}

    async def models(self, _):
        return web.json_response({"object": "list", "data": [self.described(self.options.name)]})

    async def one_model(self, request):
        name = request.match_info["name"]
        self.check_name(name)
        return web.json_response(self.described(name))

    def check_name(self, name):
        if name != self.options.name and name not in ALIASES:
            raise Problem(404, f"no model {shown(name)}: there is {self.options.name}", "model", "model_not_found")

    async def translation(self, _):
        raise Problem(404, "nothing is translated: /v1/audio/transcriptions writes what is said")

    async def shut_down(self, _):
        for socket in list(self.sockets):
            await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)

    # ------------------------------------------------------------------------------------------------------------ files

    async def transcription(self, request):
        room = self.uploads < self.options.connections
        require(room, f"{self.uploads} files are being transcribed, which is the limit: try again later", None, 429)
        self.uploads += 1
        file = None
        try:
            file, fields = await flowing(request, self.form(request))
            asked = self.checked(fields)
            file.decoding = asked.decoding
            if asked.stream:
                return await self.told(request, file, asked)
            return answer(await self.files(file), *asked[:3], self.spelled(file.heard), asked.log_probs)
        finally:
            self.uploads -= 1
            if file:
                file.gone = True

    async def form(self, request):
        """(File, {name: texts}) of a form, of which no more than the limits is read."""
        most, fields, file, size = self.options.max_bytes, {}, None, 0
        too_large = Problem(413, f"the file must have {most} bytes or fewer (--max-bytes)", "file")
        kind = request.content_type
        require(kind == "multipart/form-data", f"the request must be multipart/form-data, got {kind}")
        if (request.content_length or 0) > most + 2 * FIELDS:
            raise too_large
        try:
            async for part in await request.multipart():
                name = getattr(part, "name", None) or ""
                key, data = name.partition("[")[0], bytearray()
                if not isinstance(part, aiohttp.BodyPartReader) or (key not in LISTS and name not in ONCE):
                    known = ", ".join(sorted(ONCE | LISTS))
                    raise Problem(
                        400, f"an unknown field, {shown(name) or '(no name)'}: known are {known}", shown(name)
                    )
                is_file = key == "file"
                known = file is not None if is_file else key in fields
                require(key not in ONCE or not known, f"{key} is there twice", key)
                while chunk := await part.read_chunk(2**16):
                    data += chunk
                    if len(data) > (most if is_file else FIELDS - size):
                        raise too_large if is_file else Problem(413, f"more than {FIELDS} bytes of fields", key)
                data = part.decode(data)  # of a transfer encoding, such as base64
                if is_file:
                    file = File(bytes(data), shown(part.filename or "file"))
                    require(data, f"{file}: an empty file", "file")
                else:
                    size += len(data) + 1
                    fields.setdefault(key, []).append(data.decode())
        except MALFORMED as error:
            raise Problem(400, f"the form is malformed or cut off: {shown(error) or type(error).__name__}") from None
        require(file is not None, "the field file is missing", "file")
        return file, fields

    def checked(self, fields):
        """What is Asked; raises where a field asks for what is not done."""
        one = {name: texts[0].strip() for name, texts in fields.items()}
        form, parts = one.get("response_format") or "json", fields.get(GRANULARITIES, [])
        require("model" in one, "the field model is missing", "model")
        self.check_name(one["model"])
        require(form in FORMATS, f"response_format must be one of {', '.join(FORMATS)}", "response_format")
        fine = set(parts) <= {"word", "segment"} and (not parts or form == "verbose_json")
        require(fine, f"{GRANULARITIES}[] must be word or segment, with verbose_json", GRANULARITIES)
        language, named = self.options.language, [one.get("language"), *fields.get("languages", [])]
        fine = not language or not any(named) or language.lower() in [x.lower() for x in named if x]
        require(fine, f"language must be {language}, which the model was trained on", "language")
        try:
            usual = 0 <= float(one.get("temperature") or 0) <= 1
        except ValueError:
            usual = False
        require(usual, "temperature must be a number from 0 to 1", "temperature")
        include, stream = set(fields.get("include", [])), one.get("stream", "").lower()
        fine = include <= {"logprobs"} and (not include or form == "json")
        require(fine, "include[] must be logprobs, with response_format json", "include")
        require(stream in ("", "false", "true"), "stream must be true or false", "stream")
        fine = stream != "true" or form in ("json", "text")
        require(fine, "stream has events with text alone: response_format must be json or text", "stream")
        decoding, named = self.decoding_of(one.get("language") or next(filter(None, named), ""))
        return Asked(form, set(parts) or {"segment"}, language or named, stream == "true", bool(include), decoding)

    def decoding_of(self, language):
        """(the Decoding of a language that a form names, the language if that decides anything)."""
        if not language:
            return self.decoding, ""
        if language not in self.languages:
            try:
                found = search_options.of_language(self.model, self.decoding, language)
            except UserError as error:
                raise Problem(400, f"language {shown(language)}: {error}", "language") from None
            code = "language must be a code of ISO 639 such as en"
            require(found is not None, f"{code}, got {shown(language)}", "language")
            self.languages[language] = found  # no more than CLDR has
        decoding, decides = self.languages[language]
        return decoding, shown(language) if decides else ""

    async def told(self, request, file, asked):
        """Server-sent events; what is wrong before the first one is an answer as usual."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            async with contextlib.aclosing(self.events(request, file, asked.log_probs)) as events:
                async for event in events:
                    async with asyncio.timeout(PATIENCE):
                        if not response.prepared:
                            await response.prepare(request)
                        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        except (TimeoutError, ConnectionError):  # the client is gone, or does not read
            response.force_close()
        return response

    async def events(self, request, file, include):
        """Those of a File: its text as it becomes final, and all of it. `include`: log-probabilities too."""
        loop, queue, said, count = asyncio.get_running_loop(), asyncio.Queue(), "", 0

        def tell(labels):
            text = self.model.tokens.decode(labels.labels).rstrip("\ufffd")  # of a character that is not whole
            loop.call_soon_threadsafe(queue.put_nowait, (text, self.spelled(labels) if include else []))

        def more(labels):
            return {"logprobs": log_probs(labels)} if include else {}

        file.listener = tell
        job = loop.create_task(self.files(file))
        job.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            found = ()
            while found is not None:
                found = await queue.get()
                text, labels = found or (job.result().text, self.spelled(file.heard))
                if text.startswith(said) and text != said:
                    yield {"type": "transcript.text.delta", "delta": text[len(said) :]} | more(labels[count:])
                    said, count = text, len(labels)
            yield {"type": "transcript.text.done", "text": text} | more(labels)
        except Exception as error:
            if not said:
                raise
            problem = error if isinstance(error, Problem) else unexpected(request)
            yield {"type": "error", "error": problem.error}
        finally:
            job.cancel()

    def spelled(self, heard):
        """(label, its text, log-probability) of each of the Labels."""
        return [(i, self.texts[i], max(UNLIKELY, x)) for i, x in zip(heard.labels, heard.log_probs)]

    def transcribed(self, files):
        """A Transcript, or the Problem, of each File. Runs in a thread."""
        found = {}
        for decoding in {id(x.decoding): x.decoding for x in files}.values():  # files of a language are a batch
            some = [x for x in files if x.decoding is decoding]
            recordings = map(self.samples, some)
            results = recognise.transcribe(self.model, recordings, decoding, lambda i, x, of=some: of[i].watch(x))
            found |= {id(file): self.transcript(file, result) for file, result in zip(some, results)}
        return [found[id(x)] for x in files]

    def samples(self, file):
        """Its name, and its samples in pieces, as it is decoded."""
        rate = self.model.extractor.rate

        def pieces():
            count = 0
            for piece in audio.pieces(file, rate):
                count += len(piece)
                if count > self.options.max_seconds * rate:
                    most = f"{self.options.max_seconds:g} seconds"
                    raise UserError(f"{file}: longer than {most}, which is the limit (--max-seconds)")
                yield piece

        return str(file), pieces()

    def transcript(self, file, result):
        try:
            refuse_if(result.error, result.error)
            if result.unheard:
                print(unheard.line(file, result.unheard), file=sys.stderr, flush=True)
            return transcripts.transcript(self.model, manifests.Entry(str(file), str(file), ""), result)
        except UserError as error:
            return Problem(400, str(error), "file")

    # ---------------------------------------------------------------------------------------------------------- streams

    async def stream(self, request):
        """Samples in, events out: words that are final, those that may change, endpoints."""
        kind, rate = request.query.get("format", "pcm16"), request.query.get("rate", "")
        require(self.slots, streams.WHOLE)
        for unknown in sorted(set(request.query) - {"format", "rate"}):
            raise Problem(400, f"unknown: {shown(unknown)}; a stream has format and rate", "format")
        require(kind in SAMPLES, f"format must be {' or '.join(SAMPLES)}", "format")
        limits = f"{audio.RATES.start} to {audio.RATES.stop - 1}"
        fine = rate.isascii() and rate.isdecimal() and len(rate) < 9 and int(rate) in audio.RATES
        require(fine, f"rate must be the samples in a second, {limits}, as in /v1/stream?rate=16000", "rate")
        socket = web.WebSocketResponse(max_msg_size=MESSAGE, heartbeat=PATIENCE / 2)
        require(socket.can_prepare(request), "/v1/stream is a WebSocket")
        busy = f"{self.slots.count} streams are open, which is the limit: try again later"
        require(self.slots.free, busy, None, 503)
        stream = streams.Stream(self.model, silence=self.options.endpoint, slots=self.slots)
        try:
            await socket.prepare(request)
            self.sockets.add(socket)
            await self.listen(socket, stream, Samples(SAMPLES[kind], int(rate), self.model.extractor.rate))
        except (TimeoutError, ConnectionError):  # the client is gone, or does not read
            await socket.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION)
        except Exception as error:
            problem = error if isinstance(error, Problem) else unexpected(request)
            with contextlib.suppress(TimeoutError, ConnectionError):
                await self.send(socket, [{"type": "error", "error": problem.error}])
            await socket.close(code=aiohttp.WSCloseCode.INVALID_TEXT)
        finally:
            self.sockets.discard(socket)
            self.slots.free.append(stream.slot)
        return socket

    async def listen(self, socket, stream, samples):
        end = False
        while not end:
            try:
                message = await socket.receive(timeout=PATIENCE)
            except TimeoutError:
                raise Problem(408, f"no message came for {PATIENCE} seconds") from None
            end = message.type is aiohttp.WSMsgType.TEXT and message.data.strip() == "end"
            if message.type is aiohttp.WSMsgType.TEXT and not end:
                raise Problem(400, 'messages must be samples, and at last the text "end"')
            if not end and message.type is not aiohttp.WSMsgType.BINARY:
                return
            x = samples.rest() if end else samples(message.data)
            seconds = samples.count / samples.rate
            async for found in stream.hear(x, end, seconds):
                await self.send(socket, stream.events(*found))
        await self.send(socket, [{"type": "end", "duration": round(seconds, 3)}])
        await socket.close()

    async def send(self, socket, events):
        async with asyncio.timeout(PATIENCE):
            for event in events:
                await socket.send_str(json.dumps(event, ensure_ascii=False))


async def flowing(request, reading):
    """The result of a coroutine that reads the body of a request, however long it takes, while data flow."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(reading)
    count, since = 0, loop.time()
    try:
        while not (await asyncio.wait([task], timeout=PATIENCE / 8))[0]:
            if request.content.total_bytes > count:
                count, since = request.content.total_bytes, loop.time()
            elif loop.time() - since >= PATIENCE:
                raise Problem(408, f"nothing of the form came for {PATIENCE} seconds")
        return task.result()
    finally:
        task.cancel()


def unexpected(request):
    """The Problem that an exception of ours is to a client; it is logged."""
    logging.getLogger(__name__).exception("%s %s", request.method, shown(request.path))
    return Problem(500, "an error of the server")


class Samples:
    """Samples of bytes of a type, at the rate of the model; FFmpeg changes the rate."""

    def __init__(self, dtype, rate, wanted):
        self.dtype, self.rate, self.count, self.left = dtype, rate, 0, b""
        self.resampler = None if rate == wanted else av.AudioResampler("flt", "mono", wanted)

    def __call__(self, data):
        """Messages may end within a sample, which the next one goes on with."""
        data = self.left + data
        whole = len(data) - len(data) % self.dtype.itemsize
        self.left = data[whole:]
        try:
            x = features.scaled(np.frombuffer(data[:whole], self.dtype))
        except ValueError as error:
            raise Problem(400, str(error)) from None
        self.count += len(x)
        if self.resampler is None or not len(x):
            return x
        frame = av.AudioFrame.from_ndarray(x[None], "flt", "mono")
        frame.sample_rate = self.rate
        return joined(self.resampler.resample(frame))

    def rest(self):
        """Those that the resampler holds at the end."""
        return joined(self.resampler.resample(None)) if self.resampler and self.count else np.zeros(0, np.float32)


def joined(frames):
    return np.concatenate([np.zeros(0, np.float32), *(x.to_ndarray()[0] for x in frames)])


def log_probs(labels):
    """Of (label, text, log-probability) of each, as OpenAI's clients read them."""
    texts = ((data_of(text), x) for _, text, x in labels)
    return [{"token": data.decode(errors="replace"), "bytes": list(data), "logprob": x} for data, x in texts]


def data_of(text):
    """The bytes of what a label adds to a text, which may be a part of a character."""
    return text.encode(errors="surrogateescape")


def answer(transcript, form, granularities, language, labels=(), include=False):
    """The response in a form. `labels`: -> `Server.spelled`; `include`: their log-probabilities."""
    if form == "text":
        return web.Response(text=f"{transcript.text}\n")
    missed = {"unheard": unheard.rounded(transcript.unheard)} if transcript.unheard else {}
    if form == "json":
        more = {"logprobs": log_probs(labels)} if include else {}
        return web.json_response({"text": transcript.text} | more | missed)
    if form != "verbose_json":
        captions = transcripts.captions(transcript.words, transcript.duration, transcript.space, transcript.text)
        return web.Response(text=transcripts.captioned(form, captions))
    # "und" is ISO 639's code of a language that is not known.
    whole = {"task": "transcribe", "language": language or "und"}
    whole |= {"duration": float(transcript.duration), "text": transcript.text} | missed
    if "word" in granularities:
        whole["words"] = timing.to_json(transcript.words)
    if "segment" in granularities:
        whole["segments"] = segments(transcripts.segments(transcript), labels)
    return web.json_response(whole)


def segments(captions, labels):
    """Captions with all that OpenAI's schema requires.

    `avg_logprob` is the mean of the labels, `compression_ratio` that of zlib, as in Whisper. The search draws nothing,
    so its `temperature` is 0, and it begins with the recording, so `seek` is 0. No model here has a `no_speech_prob`:
    with 0, no reader takes a segment for silence.
    """
    ends, begins = (np.cumsum([len(data_of("".join(x.split()))) for x in texts]) for texts in (
        [x.text for x in captions], ["", *(text for _, text, _ in labels)]
    ))  # fmt: skip
    places = np.minimum(np.searchsorted(ends, begins[:-1], side="right"), len(captions) - 1)
    bounds, found = np.searchsorted(places, np.arange(len(captions) + 1)), []  # labels of a caption follow each other
    for i, x in enumerate(captions):
        own = labels[bounds[i] : bounds[i + 1]]
        data = x.text.encode()
        found.append(
            {"id": i, "seek": 0, "start": round(float(x.start), 6), "end": round(float(x.end), 6), "text": x.text}
            | {"tokens": [label for label, *_ in own], "temperature": 0.0, "no_speech_prob": 0.0}
            | {"avg_logprob": float(np.mean([x for *_, x in own])) if own else 0.0}
            | {"compression_ratio": len(data) / len(zlib.compress(data))}
        )
    return found


def run(server):
    """Serves until it is interrupted."""
    options = server.options
    ways = "POST /v1/audio/transcriptions" + (", WebSocket /v1/stream" if server.slots else "")
    print(f"{options.name} at http://{options.host}:{options.port}: {ways}", flush=True)
    # Handlers end with their clients, which makes their places free.
    quiet = {"access_log": None, "print": None, "handler_cancellation": True}
    web.run_app(server.application(), host=options.host, port=options.port, **quiet)
