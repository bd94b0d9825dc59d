"""What the server answers, in the schema of OpenAI's API: texts, segments, errors."""

import logging
import zlib

import numpy as np
from aiohttp import web

from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.recognition import timed, transcripts

FORMATS = "json", "text", "srt", "vtt", "verbose_json"
UNLIKELY = -9999.0  # OpenAI's log-probability of what is very unlikely: JSON has no infinity


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


def unexpected(request):
    """The Problem that an exception of ours is to a client; it is logged."""
    logging.getLogger(__name__).exception("%s %s", request.method, shown(request.path))
    return Problem(500, "an error of the server")


def log_probs(labels):
    """The log-probabilities of labels as OpenAI's clients read them. A label is (number, text, log-probability)."""
    texts = ((data_of(text), x) for _, text, x in labels)
    return [{"token": data.decode(errors="replace"), "bytes": list(data), "logprob": x} for data, x in texts]


def data_of(text):
    """The bytes of what a label adds to a text, which may be a part of a character."""
    return text.encode(errors="surrogateescape")


def answer(transcript, form, granularities, language, labels=(), include=False):
    """The response in a form. `labels`: as `Server.spelled` returns them; `include`: their log-probabilities."""
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
    if "word" in granularities:
        whole["words"] = timed.objects(transcript.words)
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
