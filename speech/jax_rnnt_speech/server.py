"""Texts over HTTP and WebSocket, on aiohttp.

Files are read into memory, decoded and transcribed in a thread, together with those that wait; streams share a batch in
another. No file of a client is kept. What is wrong with a request is an answer in OpenAI's form.
"""

import asyncio
import concurrent.futures
import json
import logging
from pathlib import Path

import aiohttp
import av
import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from jax_rnnt import timing
from jax_rnnt_speech import audio, features, manifests, recognise, streams, transcripts
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.utterances import shown

FORMATS = "json", "text", "srt", "vtt", "verbose_json"
SAMPLES = {"pcm16": np.dtype("<i2"), "float32": np.dtype("<f4")}
GRANULARITIES = "timestamp_granularities[]"
FIELDS = {"file", "model", "response_format", "language", "temperature", "prompt", "stream", GRANULARITIES}
FIELD = 4096  # bytes of a field that is no file
MESSAGE = 2**20  # bytes of a message of a stream
TOGETHER = 8  # files that are transcribed together
PATIENCE = 60  # seconds that a client has to send a form, or the next message, or to read
# What aiohttp raises, or warns of, where a form is none.
MALFORMED = ValueError, AssertionError, RuntimeError, RuntimeWarning, aiohttp.ClientError, BadHttpMessage


class Problem(Exception):
    """What is wrong with a request."""

    def __init__(self, status, message, field=None, code=None):
        self.status, self.error = status, {"message": message, "type": "server_error", "param": field, "code": code}
        if status < 500:
            self.error["type"] = "rate_limit_error" if status == 429 else "invalid_request_error"


class Together:
    """Calls of coroutines, as one call of `run` in a thread for all that wait, at most so many."""

    def __init__(self, run, most):
        self.run, self.most, self.waiting, self.task = run, most, [], None
        self.thread = concurrent.futures.ThreadPoolExecutor(1)

    async def __call__(self, job):
        loop = asyncio.get_running_loop()
        self.waiting.append((job, future := loop.create_future()))
        if self.task is None or self.task.done():
            self.task = loop.create_task(self.work(loop))
        return await future

    async def work(self, loop):
        while self.waiting:
            chosen, self.waiting = self.waiting[: self.most], self.waiting[self.most :]
            if not (chosen := [x for x in chosen if not x[1].done()]):  # whoever waited has gone
                continue
            try:
                results = await loop.run_in_executor(self.thread, self.run, [job for job, _ in chosen])
            except Exception as error:
                results = [error] * len(chosen)
            for (_, future), result in zip(chosen, results, strict=True):
                if not future.done():
                    (future.set_exception if isinstance(result, Exception) else future.set_result)(result)


class Server:
    """`options`: those of the command."""

    def __init__(self, recogniser, how, options):
        self.recogniser, self.how, self.options = recogniser, how, options
        self.name = options.name or Path(options.model).resolve().name
        self.files, self.uploads, self.sockets = Together(self.transcribed, TOGETHER), 0, set()
        self.slots = streams.Slots(recogniser, options.connections, how) if recogniser.chunk else None
        if self.slots:
            self.steps = Together(self.slots.run, options.connections)
            self.slots.run([])

    def application(self):
        app = web.Application(middlewares=[answered])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/audio/transcriptions", self.transcription)
        app.router.add_get("/v1/stream", self.stream)
        app.on_shutdown.append(self.shut_down)
        return app

    async def health(self, _):
        counts = {"files": self.uploads, "streams": len(self.sockets), "connections": self.options.connections}
        return web.json_response({"status": "ok", "model": self.name} | counts)

    async def models(self, _):
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "jax_rnnt_speech"}
        return web.json_response({"object": "list", "data": [model]})

    async def shut_down(self, _):
        for socket in list(self.sockets):
            await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)

    # ------------------------------------------------------------------------------------------------------------ files

    async def transcription(self, request):
        if self.uploads >= self.options.connections:
            raise Problem(429, f"{self.uploads} files are being transcribed, which is the limit: try again later")
        self.uploads += 1
        try:
            async with asyncio.timeout(PATIENCE):
                file, fields = await self.form(request)
            form, parts = self.checked(fields)
            return answer(await self.files(file), form, parts, self.options.language)
        except TimeoutError:
            raise Problem(408, f"the form did not arrive in {PATIENCE} seconds") from None
        finally:
            self.uploads -= 1

    async def form(self, request):
        """(file, {name: texts}) of a form, of which no more than the limits is read."""
        most, fields, file = self.options.max_bytes, {}, None
        too_large = Problem(413, f"the file must have {most} bytes or fewer (--max-bytes)", "file")
        if request.content_type != "multipart/form-data":
            raise Problem(400, f"the request must be multipart/form-data, got {request.content_type}")
        if (request.content_length or 0) > most + 2**16:
            raise too_large
        try:
            async for part in await request.multipart():
                if not isinstance(part, aiohttp.BodyPartReader) or part.name not in FIELDS:
                    name = getattr(part, "name", None)
                    raise Problem(400, f"an unknown field, {name}: known are {', '.join(sorted(FIELDS))}", name)
                is_file, data = part.name == "file", bytearray()
                if file is not None if is_file else part.name in fields and part.name != GRANULARITIES:
                    raise Problem(400, f"{part.name} is there twice", part.name)
                while chunk := await part.read_chunk(2**16):
                    data += chunk
                    if len(data) > (most if is_file else FIELD):
                        raise too_large if is_file else Problem(413, f"more than {FIELD} bytes", part.name)
                if is_file:
                    file = audio.Memory(bytes(data), shown(part.filename or "file"))
                elif len(kept := fields.setdefault(part.name, [])) < len(FIELDS):
                    kept.append(data.decode())
        except MALFORMED as error:
            raise Problem(400, f"the form is malformed or cut off: {shown(error) or type(error).__name__}") from None
        if file is None:
            raise Problem(400, "the field file is missing", "file")
        return file, fields

    def checked(self, fields):
        """(response_format, granularities); raises where a field asks for what is not done."""
        one = {name: texts[0] for name, texts in fields.items()}
        form, parts = one.get("response_format", "json"), fields.get(GRANULARITIES, [])
        if "model" not in one:
            raise Problem(400, "the field model is missing", "model")
        if one["model"] != self.name:
            found = f"no model {shown(one['model'])}: there is {self.name}"
            raise Problem(404, found, "model", "model_not_found")
        if form not in FORMATS:
            raise Problem(400, f"response_format must be one of {', '.join(FORMATS)}", "response_format")
        if not set(parts) <= {"word", "segment"} or (parts and form != "verbose_json"):
            raise Problem(400, f"{GRANULARITIES} must be word or segment, with verbose_json", GRANULARITIES)
        language = self.options.language
        if language and one.get("language", language) != language:
            raise Problem(400, f"language must be {language}, which the model was trained on", "language")
        try:
            warm = float(one.get("temperature") or 0) != 0
        except ValueError:
            warm = True
        if warm:
            raise Problem(400, "temperature must be 0: the search draws nothing", "temperature")
        if one.get("prompt"):
            raise Problem(400, "prompt must be empty: the model takes none (--phrases prefers texts)", "prompt")
        if one.get("stream", "false") != "false":
            raise Problem(400, "stream must be false: streams are at /v1/stream", "stream")
        return form, set(parts) or {"segment"}

    def transcribed(self, files):
        """A Transcript, or the Problem, of each file. Runs in a thread."""
        results = recognise.transcribe(self.recogniser, map(self.samples, files), self.how)
        return [self.transcript(file, result) for file, result in zip(files, results)]

    def samples(self, file):
        """Its name, and its samples in pieces, as it is decoded."""
        rate = self.recogniser.extractor.rate

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
            if result.error:
                raise UserError(result.error)
            return transcripts.transcript(self.recogniser, manifests.Entry(str(file), str(file), ""), result)
        except UserError as error:
            return Problem(400, str(error), "file")

    # ---------------------------------------------------------------------------------------------------------- streams

    async def stream(self, request):
        """Samples in, events out: words that are final, those that may change, endpoints."""
        kind, rate = request.query.get("format", "pcm16"), request.query.get("rate", "")
        if not self.slots:
            raise Problem(400, "the model sees whole utterances: only one that was trained with --chunk can stream")
        if unknown := set(request.query) - {"format", "rate"}:
            raise Problem(400, f"unknown: {shown(sorted(unknown)[0])}; a stream has format and rate", "format")
        if kind not in SAMPLES:
            raise Problem(400, f"format must be {' or '.join(SAMPLES)}", "format")
        if not (rate.isascii() and rate.isdecimal() and len(rate) < 9 and int(rate) in audio.RATES):
            limits = f"{audio.RATES.start} to {audio.RATES.stop - 1}"
            raise Problem(400, f"rate must be the samples in a second, {limits}, as in /v1/stream?rate=16000", "rate")
        socket = web.WebSocketResponse(max_msg_size=MESSAGE, heartbeat=PATIENCE / 2)
        if not socket.can_prepare(request):
            raise Problem(400, "/v1/stream is a WebSocket")
        if not self.slots.free:
            raise Problem(503, f"{self.slots.count} streams are open, which is the limit: try again later")
        stream = streams.Stream(self.recogniser, silence=self.options.endpoint, slots=self.slots)
        try:
            await socket.prepare(request)
            self.sockets.add(socket)
            await self.listen(socket, stream, Samples(SAMPLES[kind], int(rate), self.recogniser.extractor.rate))
        except Problem as problem:
            await socket.send_json({"type": "error", "error": problem.error})
            await socket.close(code=aiohttp.WSCloseCode.INVALID_TEXT)
        except (TimeoutError, ConnectionError):  # the client is gone
            await socket.close(code=aiohttp.WSCloseCode.POLICY_VIOLATION)
        finally:
            self.sockets.discard(socket)
            self.slots.free.append(stream.slot)
        return socket

    async def listen(self, socket, stream, samples):
        end = False
        while not end:
            message = await socket.receive(timeout=PATIENCE)
            end = message.type is aiohttp.WSMsgType.TEXT and message.data.strip() == "end"
            if message.type is aiohttp.WSMsgType.TEXT and not end:
                raise Problem(400, 'messages must be samples, and at last the text "end"')
            if not end and message.type is not aiohttp.WSMsgType.BINARY:
                return
            for step in stream.steps(samples.rest() if end else samples(message.data), end):
                await self.send(socket, stream.events(*stream.took(*await self.steps(step))))
        seconds = samples.count / samples.rate
        await self.send(socket, stream.events(stream.rest(seconds)))
        await self.send(socket, [{"type": "end", "duration": round(seconds, 3)}])
        await socket.close()

    async def send(self, socket, events):
        async with asyncio.timeout(PATIENCE):
            for event in events:
                await socket.send_str(json.dumps(event, ensure_ascii=False))


class Samples:
    """Samples of bytes of a type, at the rate of the model; FFmpeg changes the rate."""

    def __init__(self, dtype, rate, wanted):
        self.dtype, self.rate, self.count = dtype, rate, 0
        self.resampler = None if rate == wanted else av.AudioResampler("flt", "mono", wanted)

    def __call__(self, data):
        if len(data) % self.dtype.itemsize:
            raise Problem(400, f"a message must have whole samples of {self.dtype.itemsize} bytes, got {len(data)}")
        try:
            x = features.scaled(np.frombuffer(data, self.dtype))
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


def answer(transcript, form, parts, language):
    """The response in a form."""
    if form == "text":
        return web.Response(text=f"{transcript.text}\n")
    if form == "json":
        return web.json_response({"text": transcript.text})
    if form != "verbose_json":
        captions = transcripts.captions(transcript.words, transcript.duration, transcript.space, transcript.text)
        return web.Response(text=transcripts.captioned(form, captions))
    whole = {"task": "transcribe", "language": language, "duration": transcript.duration, "text": transcript.text}
    if "word" in parts:
        whole["words"] = timing.to_json(transcript.words)
    if "segment" in parts:
        lines = transcripts.segments(transcript)
        texts = ({"start": round(x.start, 6), "end": round(x.end, 6), "text": x.text} for x in lines)
        whole["segments"] = [{"id": i} | x for i, x in enumerate(texts)]
    return web.json_response(whole)


@web.middleware
async def answered(request, handler):
    """Errors as objects, in OpenAI's form."""
    try:
        return await handler(request)
    except Problem as error:
        problem = error
    except web.HTTPException as error:
        if error.status < 400:
            raise
        problem = Problem(error.status, f"{request.method} {shown(request.path)}: {error.reason}")
    except Exception:
        logging.getLogger(__name__).exception("%s %s", request.method, shown(request.path))
        problem = Problem(500, "an error of the server")
    return web.json_response({"error": problem.error}, status=problem.status)


def run(server, options):
    """Serves until it is interrupted."""
    ways = "POST /v1/audio/transcriptions" + (", WebSocket /v1/stream" if server.slots else "")
    print(f"{server.name} at http://{options.host}:{options.port}: {ways}", flush=True)
    web.run_app(server.application(), host=options.host, port=options.port, access_log=None, print=None)
