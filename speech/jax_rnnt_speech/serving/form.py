"""Forms with a file, as OpenAI's clients send them: reads them, and finds what they ask for."""

import asyncio
import json
import re
import unicodedata
from typing import NamedTuple

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from jax_rnnt_speech.data import audio
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.recognition import scripts, search_options
from jax_rnnt_speech.recognition.results import no_labels
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.serving.schema import FORMATS, Problem, brief, require
from jax_rnnt_speech.system import UserError

GRANULARITIES = "timestamp_granularities"
ONCE = {"file", "model", "response_format", "language", "temperature", "prompt", "hotwords", "stream"}
# Lists, which clients write as name[]; chunking_strategy is an object, written as name[key].
LISTS = {GRANULARITIES, "include", "languages", "keywords", "chunking_strategy"}
KNOWN = ", ".join(sorted(ONCE | LISTS))
# Fields that clients of other servers send by habit. Those of a search that draws, of a detector of speech, of threads
# and of logs have no effect here, ...
WITHOUT_EFFECT = (
    "user seed threads backend debug_mode no_fallback no_context no_language_probabilities temperature_inc "
    "beam_size best_of top_k top_p min_p length_penalty use_beam_search repetition_penalty presence_penalty "
    "frequency_penalty suppress_tokens suppress_non_speech suppress_nst max_context audio_ctx carry_initial_prompt "
    "condition_on_previous_text initial_prompt without_timestamps no_timestamps split_on_word word_thold "
    "entropy_thold logprob_thold no_speech_thold no_speech_threshold log_prob_threshold compression_ratio_threshold "
    "vad vad_filter vad_parameters vad_threshold vad_speech_pad_ms vad_min_speech_duration_ms "
    "vad_min_silence_duration_ms vad_max_speech_duration_s vad_samples_overlap"
)
NO, YES = ("", "false", "0", "no", "off"), ("true", "1", "yes", "on")
ZERO = "", "0", "0.0", "-1"
# ... or ask for nothing only where they have one of these values.
HARMLESS = {"task": ("", "transcribe")} | dict.fromkeys(("offset_t", "offset_n", "duration", "max_len"), ZERO)
SWITCHES = (
    "translate diarize diarization tinydiarize speaker_embeddings detect_language word_timestamps token_timestamps "
    "stream_include_usage stream_continuous_usage_stats"
)
HARMLESS |= dict.fromkeys(SWITCHES.split(), NO)
ONCE |= {*WITHOUT_EFFECT.split(), *HARMLESS}
ABSENT = "null", "none", "undefined"  # the value that JavaScript and Python write for a missing one
ANY = "", "auto", "und"  # languages which mean that nobody knows the language
FIELDS = 2**16  # bytes of all fields that are no file
PROMPT = 200  # characters of a prompt that may be a list of phrases
COMMA = re.compile("[,\N{ARABIC COMMA}\N{IDEOGRAPHIC COMMA}\N{FULLWIDTH COMMA}]")
PATIENCE = 60  # seconds in which a client has to send more of a form, or the next message, or to read
# Exceptions and warnings of aiohttp for a malformed form.
MALFORMED = ValueError, AssertionError, RuntimeError, RuntimeWarning
MALFORMED += aiohttp.ClientError, BadHttpMessage, web.RequestPayloadError


class File(audio.Memory):
    """An upload. `gone` says that its client has left; `listener` takes its Labels so far, where they are found."""

    def __init__(self, data, name):
        super().__init__(data, name)
        self.heard, self.gone, self.listener, self.decoding, self.own = no_labels(), False, None, None, None

    def watch(self, labels):
        self.heard = labels
        if self.listener:
            self.listener(labels)
        return not self.gone


class Asked(NamedTuple):
    """The wishes of a form."""

    form: str
    granularities: set
    language: str
    stream: bool
    log_probs: bool
    decoding: Decoding
    own: search_options.Own | None  # its phrases
    unused: list  # phrases without effect


class Forms:
    """Reads and checks the forms that a server with these options takes."""

    def __init__(self, model, decoding, options):
        self.model, self.decoding, self.options = model, decoding, options
        self.languages = {}  # (Decoding, whether the language decides anything) of those that forms have named

    async def read(self, request):
        """Returns (File, {name: texts}) of a form, of which no more than the limits is read."""
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
                    unknown = f"an unknown field, {brief(name) or '(no name)'}: known are {KNOWN}"
                    raise Problem(400, unknown, brief(name))
                is_file = key == "file"
                twice = file is not None if is_file else key in fields
                require(key not in ONCE or not twice, f"{key} is there twice", key)
                while chunk := await part.read_chunk(2**16):
                    data += chunk
                    if len(data) > (most if is_file else FIELDS - size):
                        raise too_large if is_file else Problem(413, f"more than {FIELDS} bytes of fields", key)
                data = part.decode(data)  # decoded from a transfer encoding, such as base64
                if is_file:
                    file = File(bytes(data), shown(part.filename or "file"))
                    require(data, f"{file}: an empty file", "file")
                else:
                    size += len(data) + 1
                    try:
                        fields.setdefault(key, []).append(data.decode())
                    except UnicodeDecodeError:
                        raise Problem(400, f"{key} must be text in UTF-8", key) from None
        except MALFORMED as error:
            raise Problem(400, f"the form is malformed or cut off: {shown(error) or type(error).__name__}") from None
        require(file is not None, "the field file is missing", "file")
        return file, fields

    def checked(self, fields):
        """Returns the `Asked` of the fields; raises an error where a field asks for what the server does not do."""
        one = {name: texts[0].strip() for name, texts in fields.items()}
        one = {name: "" if x.lower() in ABSENT else x for name, x in one.items()}
        form, parts = one.get("response_format", "").lower() or "json", listed(fields.get(GRANULARITIES, []))
        for name, fine in HARMLESS.items():
            wanted = f"{name} must be {fine[1]}: the server writes what is said in a whole file, and no more"
            require(one.get(name, "").lower() in fine, wanted, name)
        require(form in FORMATS, f"response_format must be one of {', '.join(FORMATS)}", "response_format")
        # Clients send segment, which is the default, with any form.
        fine = set(parts) <= {"word", "segment"} and ("word" not in parts or form == "verbose_json")
        require(fine, f"{GRANULARITIES}[] must be segment, or word with verbose_json", GRANULARITIES)
        language, named = self.options.language, [one.get("language", ""), *listed(fields.get("languages", []))]
        named = [x for x in named if x.lower() not in ANY]
        fine = not language or not named or scripts.subtags(language)[0] in [scripts.subtags(x)[0] for x in named]
        require(fine, f"language must be {language}, which the model was trained on", "language")
        try:
            usual = 0 <= float(one.get("temperature") or 0) <= 1
        except ValueError:
            usual = False
        require(usual, "temperature must be a number from 0 to 1", "temperature")
        include, stream = set(listed(fields.get("include", []))), one.get("stream", "").lower()
        fine = include <= {"logprobs"} and (not include or form == "json")
        require(fine, "include[] must be logprobs, with response_format json", "include")
        require(stream in NO + YES, "stream must be true or false", "stream")
        fine = stream in NO or form in ("json", "text")
        require(fine, "stream has events with text alone: response_format must be json or text", "stream")
        decoding, decisive = self.decoding_of(named[0] if named else "")
        language, parts = language or decisive, set(parts) or {"segment"}
        phrases = self.own(keywords_of(fields.get("keywords", [])), one.get("prompt") or one.get("hotwords", ""))
        return Asked(form, parts, language, stream in YES, bool(include), decoding, *phrases)

    def own(self, keywords, prompt=""):
        """Returns (search_options.Own or None, phrases without effect) of keywords, and of a prompt if it is a list."""
        room, most = self.decoding.room, self.options.max_phrases
        require(not most or len(keywords) <= most, f"more than {most} keywords (--max-phrases)", "keywords")
        for x in keywords:
            limit = f"keywords must have {search_options.LONGEST} characters at most, got {len(x)}: {brief(x)}"
            require(len(x) <= search_options.LONGEST, limit, "keywords")
            control = any(unicodedata.category(y) in ("Cc", "Cs", "Zl", "Zp") for y in x)
            require(not control, f"keywords must have no control characters, got {brief(x)}", "keywords")
        if self.options.prompts == "phrases":
            keywords = [*keywords, *phrases_of(prompt)]
        own, lacking = room.own(keywords[:most]) if room else (None, keywords[:most])
        return own, lacking + keywords[most:]

    def decoding_of(self, language):
        """Returns (the Decoding for the language of a form, the language if it decides anything and else "")."""
        if not language:
            return self.decoding, ""
        if language not in self.languages:
            try:
                decided = search_options.decoding_for(self.model, self.decoding, language)
            except UserError as error:
                raise Problem(400, f"language {brief(language)}: {error}", "language") from None
            code = "language must be a code of ISO 639 such as en"
            require(decided is not None, f"{code}, got {brief(language)}", "language")
            self.languages[language] = decided  # no more than CLDR has
        decoding, decides = self.languages[language]
        return decoding, shown(language) if decides else ""


def listed(texts):
    """Returns the elements of a list, which some clients send as one text: with commas, or as JSON."""
    elements = [x.strip().strip("\"'") for text in texts for x in text.strip("[] ").split(",")]
    return [x for x in elements if x and x.lower() not in ABSENT]


def keywords_of(texts):
    """Returns the keywords of a form: one in each text, several with commas, or a list of JSON."""
    found = []
    for text in texts:
        try:
            more = json.loads(text) if text.lstrip().startswith("[") else None
        except ValueError:
            more = None
        if not isinstance(more, list) or not all(isinstance(x, str) for x in more):
            more = COMMA.split(text.strip("[] "))
        found += [y for x in more if (y := x.strip(" ")) and y.lower() not in ABSENT]
    return found


def phrases_of(prompt):
    """Returns the phrases in a prompt, between commas or line breaks; none if it is long, or has neither.

    Clients of Whisper send the text that came before, or a sentence in the style that they want: no phrases.
    """
    parts = [x for line in prompt.splitlines() for x in COMMA.split(line)] if len(prompt) <= PROMPT else []
    return [y for x in parts if (y := x.strip().rstrip("."))] if len(parts) > 1 else []


async def flowing(request, reading):
    """Returns the result of a coroutine that reads the body of a request, however long it takes, while data flow."""
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
