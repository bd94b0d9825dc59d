"""The server's answers, in the schema of OpenAI's API: texts, segments, errors."""

import json
import logging
import sys
import traceback
import zlib

import numpy as np
from aiohttp import web

from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.recognition import timed, transcripts

FORMATS = "json", "text", "srt", "vtt", "verbose_json"
BRIEF = 40  # longest part of a client's text in a line of ours, in characters
UNUSED = "X-Unused-Keywords"  # a header, as JSON in ASCII of at most so many characters
HEADER = 4096
UNLIKELY = -9999.0  # OpenAI's log-probability for very unlikely labels, as JSON has no infinity


class Problem(Exception):
    """The error of a request."""

    def __init__(self, status, message, field=None, code=None):
        self.status, self.error = status, {"message": message, "type": "server_error", "param": field, "code": code}
        if status < 500:
            self.error["type"] = "rate_limit_error" if status == 429 else "invalid_request_error"


def require(fine, message, field=None, status=400):
    """Raises a Problem if a request is not fine."""
    if not fine:
        raise Problem(status, message, field)


def brief(text):
    """Returns the beginning of a client's text, for a message."""
    text = shown(text)
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 3]}..."


def unexpected(request):
    """Returns the Problem that an exception of ours is to a client; logs it, without texts that it may contain."""
    error = sys.exception()
    place = "".join(traceback.format_tb(error.__traceback__))
    what = f"{type(error).__name__}: {brief(error)}"
    logging.getLogger(__name__).error("%s %s\n%s%s", request.method, brief(request.path), place, what)
    return Problem(500, "an error of the server")


def unused_header(texts):
    """Returns the header that names phrases without effect; of many, the first ones and the number of others."""
    for count in range(len(texts), 0, -1):
        others = [f"and {len(texts) - count} more"] * (count < len(texts))
        if len(line := json.dumps([*texts[:count], *others])) <= HEADER:
            return {UNUSED: line}
    return {}


def log_probs(labels):
    """Returns log-probabilities of labels (number, text, log-probability) as OpenAI's clients read them."""
    texts = ((data_of(text), x) for _, text, x in labels)
    return [{"token": data.decode(errors="replace"), "bytes": list(data), "logprob": x} for data, x in texts]


def data_of(text):
    """Returns the bytes that a label adds to a text, which may be a part of a character."""
    return text.encode(errors="surrogateescape")


def answer(transcript, form, granularities, language, labels=(), include=False, unused=()):
    """Returns the response in a form. `labels` are those of `Server.spelled`; `include` adds their log-probabilities.

    `unused` are phrases without effect.
    """
    if form == "text":
        return web.Response(text=f"{transcript.text}\n")
    if form == "json":
        more = {"logprobs": log_probs(labels)} if include else {}
        return web.json_response({"text": transcript.text} | more | transcript.doubts)
    if form != "verbose_json":
        captions = transcripts.captions(transcript.words, transcript.duration, transcript.space, transcript.text)
        return web.Response(text=transcripts.captioned(form, captions))
    # "und" is ISO 639's code of a language that is not known.
    whole = {"task": "transcribe", "language": language or "und"}
    whole |= {"duration": float(transcript.duration), "text": transcript.text} | transcript.doubts
    if unused:
        whole["unused_keywords"] = unused
    if "word" in granularities:
        whole["words"] = timed.objects(transcript.words)
    if "segment" in granularities:
        whole["segments"] = segments(transcripts.segments(transcript), labels)
    return web.json_response(whole)


def segments(captions, labels):
    """Returns captions with all that OpenAI's schema requires.

    `avg_logprob` is the mean of the labels, `compression_ratio` that of zlib, as in Whisper. The search draws nothing,
    so its `temperature` is 0, and it begins with the recording, so `seek` is 0. No model here has a `no_speech_prob`:
    with 0, no reader takes a segment for silence.
    """
    ends, begins = (np.cumsum([len(data_of("".join(x.split()))) for x in texts]) for texts in (
        [x.text for x in captions], ["", *(text for _, text, _ in labels)]
    ))  # fmt: skip
    places = np.minimum(np.searchsorted(ends, begins[:-1], side="right"), len(captions) - 1)
    bounds, objects = np.searchsorted(places, np.arange(len(captions) + 1)), []  # labels of a caption follow each other
    for i, x in enumerate(captions):
        own = labels[bounds[i] : bounds[i + 1]]
        data = x.text.encode()
        objects.append(
            {"id": i, "seek": 0, "start": round(float(x.start), 6), "end": round(float(x.end), 6), "text": x.text}
            | {"tokens": [label for label, *_ in own], "temperature": 0.0, "no_speech_prob": 0.0}
            | {"avg_logprob": float(np.mean([x for *_, x in own])) if own else 0.0}
            | {"compression_ratio": len(data) / len(zlib.compress(data))}
        )
    return objects
