"""Texts over HTTP and WebSocket, on aiohttp.

Files are read into memory, decoded and transcribed in a thread, together with those that wait; streams share a batch in
another. No file of a client is kept, and none is transcribed further once its client has gone. Answers have the schema
of OpenAI's API, errors too.
"""

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys

import aiohttp
import av
import numpy as np
from aiohttp import web

from jax_rnnt_speech.data import audio, features, rows
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.recognition import recognise, streams, transcripts, unheard
from jax_rnnt_speech.serving import form
from jax_rnnt_speech.serving.schema import (
    UNLIKELY,
    UNUSED,
    Problem,
    answer,
    log_probs,
    require,
    unexpected,
    unused_header,
)
from jax_rnnt_speech.serving.together import Together
from jax_rnnt_speech.serving.windowed import Places
from jax_rnnt_speech.system import UserError, leave, reason, refuse_if

SAMPLES = {"pcm16": np.dtype("<i2"), "float32": np.dtype("<f4")}
MESSAGE = 2**20  # bytes of a message of a stream
TOGETHER = 8  # files that are transcribed together
ALIVE = 5  # seconds of work after which events have a comment, as proxies end connections on which nothing comes
RETRY = 5  # seconds after which a client that was refused may try again
CLOSING = 0.5  # seconds that clients have to take their last answers, twice
ALIASES = "whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe", "gpt-transcribe"  # clients look for these
SLASHES = "{_:/*}"  # behind a path, as some clients write them


class Server:
    """The server. `options` are a `cli.serve.Serving` with a name."""

    def __init__(self, model, decoding, options):
        self.model, self.options, self.forms = model, options, form.Forms(model, decoding, options)
        self.texts = [x.replace(model.tokens.separator, " ") for x in model.tokens.texts]
        self.files, self.uploads, self.sockets = Together(self.transcribed, TOGETHER), 0, set()
        self.ending = False  # whether the server refuses new requests
        sizes = {name: x for name in ("chunk", "right") if (x := getattr(options, name)) is not None}
        self.slots = None
        if sizes or model.config.encoder.draws:
            self.slots = Places(model, options.connections, decoding, sizes)
            print(f"{options.name}: windows: {self.slots.said}", file=sys.stderr)
        elif model.chunk:
            self.slots = streams.Slots(model, options.connections, decoding)
            self.slots.step = Together(self.slots.run, options.connections)
            self.slots.run([])

    def application(self):
        app = web.Application(middlewares=[self.answered])
        for path, handler in (
            ("/", self.health), ("/health", self.health), ("/healthz", self.health), ("/v1/models", self.models),
            ("/v1/models/{name:.+?}", self.one_model), ("/v1/stream", self.stream),
        ):  # fmt: skip
            app.router.add_get(path + SLASHES, handler)  # and HEAD
        app.router.add_post("/v1/audio/transcriptions" + SLASHES, self.transcription)
        app.router.add_post("/v1/audio/translations" + SLASHES, self.translation)
        app.on_startup.append(self.start_up)
        app.on_response_prepare.append(self.allow)
        app.on_shutdown.append(self.shut_down)
        return app

    async def start_up(self, _):
        self.over = asyncio.get_running_loop().create_future()  # done once no work goes on

    @web.middleware
    async def answered(self, request, handler):
        """Answers errors as objects in OpenAI's form."""
        try:
            if request.method == "OPTIONS" and self.allowed(request) in self.options.cors:
                return web.Response(status=204)
            if self.ending:
                raise closed()
            return await handler(request)
        except Problem as error:
            problem, headers = error, {"Retry-After": f"{RETRY}"} if error.status in (429, 503) else {}
        except web.HTTPException as error:
            problem = Problem(error.status, f"{request.method} {shown(request.path)}: {error.reason}")
            headers = {name: x for name, x in error.headers.items() if name == "Allow"}
        except Exception:
            problem, headers = unexpected(request), {}
        return web.json_response({"error": problem.error}, status=problem.status, headers=headers)

    def allowed(self, request):
        """Returns the origin whose pages may read the answer, if it is one of --cors."""
        return "*" if "*" in self.options.cors else request.headers.get("Origin")

    async def allow(self, request, response):
        """Adds the headers of CORS."""
        if self.options.cors:
            response.headers["Vary"] = "Origin"
        if (origin := self.allowed(request)) not in self.options.cors:
            return
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = UNUSED
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
        if name != self.options.name and name not in ALIASES:
            raise Problem(404, f"no model {shown(name)}: there is {self.options.name}", "model", "model_not_found")
        return web.json_response(self.described(name))

    async def translation(self, _):
        raise Problem(404, "nothing is translated: /v1/audio/transcriptions writes what is said")

    async def end(self, seconds):
        """Refuses new requests, and gives work in hand so many seconds. Then its clients get the error that it ends."""
        self.ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.uploads or self.sockets:
                    await asyncio.sleep(0.02)
        self.over.set_result(None)

    async def before_the_end(self, work):
        """Returns the result of a coroutine; raises a Problem if the server ends before it."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self.over], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise closed()
            return task.result()
        finally:
            task.cancel()

    async def shut_down(self, _):
        async def leave(socket):
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(CLOSING):
                    await self.send(socket, [{"type": "error", "error": closed().error}])
                    await socket.close(code=aiohttp.WSCloseCode.GOING_AWAY)

        await asyncio.gather(*map(leave, self.sockets))

    # ------------------------------------------------------------------------------------------------------------ files

    async def transcription(self, request):
        room = self.uploads < self.options.connections
        require(room, f"{self.uploads} files are being transcribed, which is the limit: try again later", None, 429)
        self.uploads += 1
        file = None
        try:
            reading = form.flowing(request, self.forms.read(request))
            file, fields = await self.before_the_end(reading)
            asked = self.forms.checked(fields)
            file.decoding, file.own = asked.decoding, asked.own
            if asked.stream:
                return await self.told(request, file, asked)
            transcript = await self.before_the_end(self.files(file))
            response = answer(transcript, *asked[:3], self.spelled(file.heard), asked.log_probs, asked.unused)
            response.headers.update(unused_header(asked.unused))
            return response
        finally:
            self.uploads -= 1
            if file:
                file.gone = True

    async def told(self, request, file, asked):
        """Answers with server-sent events. A file without audio is refused as usual; a later error is an event."""
        await self.before_the_end(asyncio.to_thread(self.check_audio, file))
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers | unused_header(asked.unused))
        try:
            await response.prepare(request)
            async with contextlib.aclosing(self.events(request, file, asked.log_probs)) as events:
                async for event in events:
                    # The first comment takes the heads with it: they wait for what follows them.
                    text = f"data: {json.dumps(event)}\n\n" if event else ": transcribing\n\n"
                    async with asyncio.timeout(form.PATIENCE):
                        await response.write(text.encode())
        except (TimeoutError, ConnectionError):  # the client is gone, or does not read
            response.force_close()
        return response

    async def events(self, request, file, include):
        """Yields the events of a File: parts of its text as they become final, then all of it; None as a sign of life.

        With `include`, events have log-probabilities.
        """
        loop, queue, said, count = asyncio.get_running_loop(), asyncio.Queue(), "", 0

        def tell(labels):
            # It drops a character that is not whole, and white space, as a text may end here.
            text = self.model.tokens.decode(labels.labels).rstrip("\ufffd").strip()
            text = file.decoding.written.settled(text)
            loop.call_soon_threadsafe(queue.put_nowait, (text, self.spelled(labels) if include else []))

        def more(labels):
            return {"logprobs": log_probs(labels)} if include else {}

        file.listener = tell
        job = loop.create_task(self.before_the_end(self.files(file)))
        job.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            yield None
            news = ()
            while news is not None:
                try:
                    async with asyncio.timeout(ALIVE):
                        news = await queue.get()
                except TimeoutError:
                    yield None
                    continue
                text, labels = news or (job.result().text, self.spelled(file.heard))
                if text.startswith(said) and (text != said or (include and labels[count:])):
                    yield {"type": "transcript.text.delta", "delta": text[len(said) :]} | more(labels[count:])
                    said, count = text, len(labels)
            yield {"type": "transcript.text.done", "text": text} | more(labels)
        except Exception as error:
            problem = error if isinstance(error, Problem) else unexpected(request)
            yield {"type": "error", "error": problem.error}
        finally:
            job.cancel()

    def spelled(self, heard):
        """Returns (label, its text, log-probability) of each of the Labels."""
        return [(i, self.texts[i], max(UNLIKELY, x)) for i, x in zip(heard.labels, heard.log_probs)]

    def transcribed(self, files):
        """Returns the Transcript, or the Problem, of each File. It runs in a thread."""
        answers = {}
        for decoding in {id(x.decoding): x.decoding for x in files}.values():  # files of a language are a batch
            some = [x for x in files if x.decoding is decoding]
            recordings, owns = map(self.samples, some), [x.own for x in some]
            results = recognise.transcribe(
                self.model, recordings, decoding, lambda i, x, of=some: of[i].watch(x), owns=owns
            )
            answers |= {id(file): self.transcript(file, result) for file, result in zip(some, results)}
        return [answers[id(x)] for x in files]

    def check_audio(self, file):
        """Raises a Problem where nothing of a file can be decoded."""
        try:
            next(audio.blocks(file), None)
        except UserError as error:
            raise Problem(400, str(error), "file") from None

    def samples(self, file):
        """Returns (name, pieces of its samples as it is decoded) of a File."""
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
            for line in unheard.lines(file, result.unheard, result.invented, file.decoding.drop_invented):
                print(line, file=sys.stderr, flush=True)
            return transcripts.transcript(self.model, rows.Entry(str(file), str(file), ""), result)
        except UserError as error:
            return Problem(400, str(error), "file")

    # ---------------------------------------------------------------------------------------------------------- streams

    async def stream(self, request):
        """Takes samples and sends events: words that are final, text that may change, endpoints."""
        kind, rate = request.query.get("format", "pcm16"), request.query.get("rate", "")
        require(self.slots, streams.WHOLE)
        for unknown in sorted(set(request.query) - {"format", "rate"}):
            raise Problem(400, f"unknown: {shown(unknown)}; a stream has format and rate", "format")
        require(kind in SAMPLES, f"format must be {' or '.join(SAMPLES)}", "format")
        limits = f"{audio.RATES.start} to {audio.RATES.stop - 1}"
        fine = rate.isascii() and rate.isdecimal() and len(rate) < 9 and int(rate) in audio.RATES
        require(fine, f"rate must be the samples in a second, {limits}, as in /v1/stream?rate=16000", "rate")
        socket = web.WebSocketResponse(max_msg_size=MESSAGE, heartbeat=form.PATIENCE / 2)
        require(socket.can_prepare(request), "/v1/stream is a WebSocket")
        busy = f"{self.slots.count} streams are open, which is the limit: try again later"
        require(self.slots.free, busy, None, 503)
        stream = self.slots.stream(self.options.endpoint)
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
        text = ""
        while text != "end":
            try:
                async with asyncio.timeout(form.PATIENCE):  # that of `receive` begins anew with each answer to a ping
                    message = await socket.receive()
            except TimeoutError:
                raise Problem(408, f"no message came for {form.PATIENCE} seconds") from None
            text = message.data.strip() if message.type is aiohttp.WSMsgType.TEXT else ""
            if text in ("end", "commit", "clear"):
                x = samples.rest()
            elif text:
                await self.send(socket, [self.prefer(stream, text)])
                continue
            elif message.type is aiohttp.WSMsgType.BINARY:
                x = samples(message.data)
            else:
                return
            seconds = samples.count / samples.rate
            if text != "clear":
                async for words in stream.hear(x, bool(text), seconds):
                    await self.send(socket, stream.events(*words))
            if text in ("commit", "clear"):
                stream.restart(seconds)
                event = {"type": "endpoint"} if text == "commit" else {"type": "partial", "text": ""}
                await self.send(socket, [event | {"time": stream.time}])
        await self.send(socket, [{"type": "end", "duration": round(seconds, 3)}])
        await socket.close()

    def prefer(self, stream, text):
        """Returns the event that answers a message with the phrases of the next utterance."""
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        keywords = message.get("keywords") if isinstance(message, dict) and len(message) == 1 else None
        fine = isinstance(keywords, list) and all(isinstance(x, str) for x in keywords)
        require(fine, 'messages must be samples, the text "commit", "clear" or "end", or {"keywords": ["...", ...]}')
        stream.wanted, unused = self.forms.own([x for x in keywords if x.strip()])
        return {"type": "keywords", "unused": unused, "time": stream.time}

    async def send(self, socket, events):
        async with asyncio.timeout(form.PATIENCE):
            for event in events:
                await socket.send_str(json.dumps(event, ensure_ascii=False))


class Samples:
    """Turns bytes of a type into samples, at the rate of the model; FFmpeg changes the rate."""

    def __init__(self, dtype, rate, wanted):
        self.dtype, self.rate, self.wanted, self.count, self.left = dtype, rate, wanted, 0, b""
        self.used = False  # whether the resampler has had samples
        self.resampler = None if rate == wanted else av.AudioResampler("flt", "mono", wanted)

    def __call__(self, data):
        """Returns the samples of a message, which may end within a sample that the next one goes on with."""
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
        self.used = True
        frame = av.AudioFrame.from_ndarray(x[None], "flt", "mono")
        frame.sample_rate = self.rate
        return joined(self.resampler.resample(frame))

    def rest(self):
        """Returns the samples still in the resampler at an utterance's end. The next one has another resampler."""
        if not self.used:
            return np.zeros(0, np.float32)
        last, self.used = self.resampler, False
        self.resampler = av.AudioResampler("flt", "mono", self.wanted)
        return joined(last.resample(None))


def joined(frames):
    return np.concatenate([np.zeros(0, np.float32), *(x.to_ndarray()[0] for x in frames)])


def closed():
    """Returns the Problem of a request that meets the end of the server."""
    return Problem(503, "the server is shutting down: try again")


def runner(server):
    # Handlers end with their clients, which makes their places free.
    return web.AppRunner(
        server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=CLOSING, handle_signals=False
    )


@contextlib.contextmanager
def listening(options):
    """Turns the error of an unavailable address into a line that names the options."""
    try:
        yield
    except OSError as error:  # asyncio says more than the reason; the resolver's errors have negative numbers
        why = os.strerror(error.errno) if (error.errno or 0) > 0 else reason(error)
        raise UserError(f"--host {options.host} --port {options.port}: {why}") from None


async def serving(server):
    """Serves until Ctrl-C or SIGTERM, and then for as long as `end` takes. The second of these ends at once."""
    options, loop, asked = server.options, asyncio.get_running_loop(), asyncio.Event()

    def hear(number):
        if asked.is_set():
            leave(128 + number)
        asked.set()
        print(f"{options.name}: shutting down, in {options.grace:g} seconds at most", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and & have it
            loop.add_signal_handler(number, functools.partial(hear, number))
    running = runner(server)
    await running.setup()
    with listening(options):
        await web.TCPSite(running, options.host, options.port).start()
    port = running.addresses[0][1]
    host = f"[{options.host}]" if ":" in options.host else options.host
    ways = "POST /v1/audio/transcriptions" + (", WebSocket /v1/stream" if server.slots else "")
    print(f"{options.name} at http://{host}:{port}: {ways}", flush=True)
    await asked.wait()
    await server.end(options.grace)
    await running.cleanup()


def run(server):
    """Serves until it is interrupted; ends the process, as the thread of a window would hold it up."""
    asyncio.run(serving(server))
    leave(0)
