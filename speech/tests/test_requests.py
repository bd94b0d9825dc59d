"""Phrases of requests and of streams, the ends of their utterances, and what stays private."""

import asyncio
import dataclasses
import json
import logging
import sys
import time

import jax
import numpy as np
import pytest

pytest.importorskip("aiohttp")

from jax_rnnt_speech.recognition import recognise, search_options, streams
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.serving import schema, server
from recordings import wav
from served import ROUTE, another, expected, form, talk
from support import CONVOLUTIONAL, random_model, run

STRONG = 1e3  # nats a label: what is written is then a phrase
SECRET = "CABBAGE"


def spelled(model, own):
    return None if own is None else [model.tokens.decode(labels) for labels, _ in own.phrases]


def noise(seconds, seed):
    return np.random.default_rng(seed).normal(0, 0.3, int(8000 * seconds)).clip(-1, 1).astype(np.float32)


@pytest.fixture(autouse=True)
def _within_words(monkeypatch):
    """Phrases count anywhere, so that the short texts here are made of them."""
    monkeypatch.setattr(search_options, "space_of", lambda tokens: None)


@pytest.fixture(scope="module")
def eager(served):
    """The server with phrases so strong that texts are made of them: nothing guards them."""
    room = search_options.Room(served.model, [], 5, STRONG, 0.0)
    options = dataclasses.replace(served.options, max_phrases=5, endpoint=0.0)
    return server.Server(served.model, dataclasses.replace(served.forms.decoding, room=room, guarded=False), options)


TABLE = [  # fields, phrases, those without effect
    ({"keywords[]": ["AB", "B A"]}, ["AB", "B A"], []),
    ({"keywords": ["AB, C"]}, ["AB", "C"], []),
    ({"keywords[]": ['["AB", "C\\u0041"]']}, ["AB", "CA"], []),
    ({"keywords": ["[AB, C]"]}, ["AB", "C"], []),
    ({"keywords[0]": ["AB"], "keywords[1]": ["null"]}, ["AB"], []),
    ({"keywords[]": ["AΩ", "AB"]}, ["AB"], ["AΩ"]),
    ({"prompt": ["AB, C\nBA."]}, ["AB", "C", "BA"], []),
    ({"prompt": ["AB、C，BA"]}, ["AB", "C", "BA"], []),
    ({"prompt": ["AB\r\n\r\nC"]}, ["AB", "C"], []),
    ({"prompt": ["AB C"]}, None, []),
    ({"prompt": ["A," * 100 + "B"]}, None, []),  # 201 characters
    ({"prompt": ["A\tB, CΩ"]}, ["A B"], ["CΩ"]),
    ({"prompt": ["undefined"]}, None, []),
    ({"hotwords": ["AB,C"]}, ["AB", "C"], []),
    ({"keywords[]": ["AB"], "prompt": ["A,B,C,AC,BC"]}, ["AB", "A", "B", "C", "AC"], ["BC"]),  # five have room
    ({"keywords[]": ["C" * 100] * 5}, ["C" * 100] * 5, []),
    ({"prompt": ["A" * 150 + ",B"]}, ["A" * 150, "B"], []),
]
BAD = [  # keywords, what is said of them
    (["A"] * 6, "more than 5 keywords (--max-phrases)"),
    (["B" * 101], f"keywords must have 100 characters at most, got 101: {'B' * 37}..."),
    (["A\tB"], "keywords must have no control characters, got A\\tB"),
    (["A\nB"], "control characters"),
    (["A\u2028B"], "control characters"),
    (['["\\ud800"]'], "control characters"),
]


def checked(site, fields):
    named = {}
    for name, texts in fields.items():
        named.setdefault(name.partition("[")[0], []).extend(texts)
    return site.forms.checked({"model": ["tiny"]} | named)


def test_fields(eager):
    for fields, phrases, unused in TABLE:
        asked = checked(eager, fields)
        assert (spelled(eager.model, asked.own), asked.unused) == (phrases, unused), fields
    for keywords, message in BAD:
        with pytest.raises(schema.Problem) as caught:
            checked(eager, {"keywords[]": keywords})
        error = caught.value
        assert error.status == 400 and message in error.error["message"] and error.error["param"] == "keywords"
    ignoring = another(eager, prompts="ignore")
    ignoring.forms = server.form.Forms(eager.model, eager.forms.decoding, ignoring.options)
    for fields, phrases in ({"prompt": ["A,B"]}, None), ({"hotwords": ["A,B"], "keywords[]": ["C"]}, ["C"]):
        assert spelled(eager.model, checked(ignoring, fields).own) == phrases


def test_models_that_prefer_nothing(served):
    """A head for CTC, or no room: keywords are named, whatever they are, and no request is refused for them."""
    for decoding in Decoding(ctc=True), Decoding():
        forms = server.form.Forms(served.model, decoding, dataclasses.replace(served.options, max_phrases=0))
        assert forms.own(["A", "B"], "A,C") == (None, ["A", "B", "A", "C"])
    alone = random_model(**CONVOLUTIONAL, loss="ctc", joint="linear")
    assert search_options.decoding_of(search_options.Searching(), alone, 100).room is None


def test_header():
    """It is JSON in ASCII, short enough for clients and proxies, and says how many it leaves out."""
    assert schema.unused_header([]) == {}
    assert json.loads(schema.unused_header(["Ω", 'a"']).popitem()[1]) == ["Ω", 'a"']
    many = [f"{i}{'漢' * 99}" for i in range(100)]
    line = schema.unused_header(many).popitem()[1]
    assert line.isascii() and len(line) <= 4096
    *some, rest = json.loads(line)
    assert some == many[: len(some)] and rest == f"and {100 - len(some)} more" and some


@pytest.mark.parametrize("beam", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_lists_of_a_batch(beam, monkeypatch):
    """A full list of one recording changes no bit of another's, in windows and in streams, and compiles nothing.

    A list alone is that of `--phrases`, also with a file of the server, which it joins.
    """
    model = random_model(**CONVOLUTIONAL, max_symbols=1)
    fixed = [(model.tokens.encode("BB"), 2.0)]
    room = search_options.Room(model, fixed, 100, 2.0, 0.5)
    decoding, sounds = Decoding(beam, room=room, guarded=False), [noise(1, 1), noise(1, 2)]
    texts = ["".join("ABC "[(i // 4**k) % 4] for k in range(4)) for i in range(100)]
    full, lacking = room.own(texts)
    few, _ = room.own(["CAB", "AC"])
    assert not lacking and len(full.phrases) == 100
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )

    def results(*owns):
        return [x[1:] for x in recognise.transcribe(model, list(enumerate(sounds)), decoding, owns=owns)]

    none, before = results(None, None), len(compiled)
    assert before
    alone, crowded, swapped = results(few, None), results(few, full), results(full, few)
    assert alone[0] == crowded[0] != none[0] and alone[1] == none[1] != crowded[1] and swapped[0] != alone[0]
    assert len(compiled) == before
    plain = [*fixed, *few.phrases]
    (of_file,) = recognise.transcribe(
        model,
        [(0, sounds[0])],
        Decoding(beam, fusion=((search_options.phrases(model, [plain], 0.5), 1.0),), guarded=False),
    )
    assert of_file.labels == alone[0][1] and of_file.frames == alone[0][2]

    slots = streams.Slots(model, 3, decoding)
    slots.run([])

    def heard(*owns):
        """The words of two streams whose steps alternate."""
        pair, found = [streams.Stream(model, slots=slots, listens=False, own=x) for x in owns], ([], [])
        for i in range(0, 8000, 500):
            for stream, sound, words in zip(pair, sounds, found):
                words += stream.feed(sound[i : i + 500], end=i == 7500)
        slots.free += [x.slot for x in pair]
        return found

    none, before = heard(None, None), len(compiled)
    alone, crowded = heard(few, None), heard(few, full)
    assert alone[0] == crowded[0] != none[0] and alone[1] == none[1] != crowded[1]
    assert len(compiled) == before and heard(None, None) == none


async def test_keywords_of_files(eager):
    """Files that are transcribed together have their own lists, and what cannot be spelled is named."""
    file = wav(noise(0.6, 3))
    async with talk(eager) as client:

        async def asked(**fields):
            async with client.post(ROUTE, data=form(file, **fields)) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.text(), answer.headers.get(schema.UNUSED)

        plain = await asked(response_format="text")
        only_c, only_a, both = await asyncio.gather(
            asked(response_format="text", **{"keywords[]": ["C", "Ω"]}),
            asked(response_format="srt", prompt="A, A\nΩ"),
            asked(response_format="verbose_json", **{"keywords[]": ["Ω", "C"]}),
        )
        assert plain[1] is None and not set(plain[0]) <= set("C\n")
        assert set(only_c[0]) == set("C\n") and json.loads(only_c[1]) == ["Ω"]
        assert set("ABC") & set(only_a[0]) == {"A"} and json.loads(only_a[1]) == ["Ω"]
        whole = json.loads(both[0])
        assert set(whole["text"]) == {"C"} and whole["unused_keywords"] == ["Ω"] == json.loads(both[1])
        assert (await asked(response_format="text", prompt="C"))[0] == plain[0]
        events, header = await asked(stream="true", prompt="C,Ω")
        assert json.loads(header) == ["Ω"] and set(json.loads(events.split("data: ")[-1])["text"]) == {"C"}
        for keywords, message in BAD:
            async with client.post(ROUTE, data=form(file, **{"keywords[]": keywords})) as answer:
                assert answer.status == 400 and message in (await answer.json())["error"]["message"]


def words_of(events):
    return [(x["word"], x["start"]) for event in events if event["type"] == "words" for x in event["words"]]


class Client:
    """A WebSocket, and what it answers."""

    def __init__(self, socket):
        self.socket = socket

    async def until(self, kind):
        """The events up to one of this kind."""
        events = []
        while not events or events[-1]["type"] != kind:
            events.append(json.loads((await self.socket.receive()).data))
            assert events[-1]["type"] != "error" or kind == "error", events
        return events

    async def say(self, *messages, until):
        for x in messages:
            await (self.socket.send_str(x) if isinstance(x, str) else self.socket.send_bytes(x.tobytes()))
        return await self.until(until)


async def test_utterances_of_a_stream(eager):
    """What follows a commit or a clear is an utterance of its own, with the words that a file of it has.

    Their times, and those of events, count from the start of the stream. Truth: `transcribe` of each part.
    """
    parts = [noise(x, 10 + i) for i, x in enumerate((0.9, 0.47, 0.7, 0.3))]
    truths = [[(x.text, x.start) for x in expected(eager, part).words] for part in parts]
    starts = np.cumsum([0, *map(len, parts)]) / 8000
    async with talk(eager) as client, client.ws_connect("/v1/stream?rate=8000&format=float32") as socket:
        x = Client(socket)
        first = await x.say(parts[0], "commit", until="endpoint")
        assert first[-1]["time"] == round(starts[1], 3)
        cleared = await x.say(parts[1], " clear\n", until="partial")
        while cleared[-1]["text"]:  # a partial text of what is forgotten
            cleared += await x.until("partial")
        assert cleared[-1]["time"] == round(starts[2], 3)
        again = await x.say("clear", until="partial")
        assert again == [cleared[-1]]
        third = await x.say(parts[2], "commit", until="endpoint")
        empty = await x.say("commit", until="endpoint")
        assert empty == [{"type": "endpoint", "time": round(starts[3], 3)}]
        last = await x.say(parts[3], "end", until="end")
        assert last[-1]["duration"] == round(starts[4], 3)
    times = [event["time"] for event in first + cleared + third + last[:-1]]
    assert times == sorted(times)
    for events, i in (first, 0), (third, 2), (last, 3):
        found = words_of(events)
        assert [word for word, _ in found] == [word for word, _ in truths[i]]
        np.testing.assert_allclose([at - starts[i] for _, at in found], [at for _, at in truths[i]], atol=1e-5)
    assert sum(map(len, truths)) > 4 and sorted(eager.slots.free) == [0, 1, 2]


async def test_keywords_of_a_stream(eager):
    """They hold from the next utterance on, for their own stream alone; nothing compiles."""
    part = noise(0.5, 4)
    plain = [x.text for x in expected(eager, part).words]
    assert set("".join(plain)) > {"C"}
    keywords = lambda *x: json.dumps({"keywords": x})
    query = "/v1/stream?rate=8000&format=float32"
    async with talk(eager) as client, client.ws_connect(query) as one, client.ws_connect(query) as other:
        x, y = Client(one), Client(other)
        assert await x.say(keywords("C", "Ω"), until="keywords") == [
            {"type": "keywords", "unused": ["Ω"], "time": 0.0},
        ]
        texts = []
        for before in (), (keywords("A"),), (keywords(),):
            for message in before:
                await x.say(message, until="keywords")
            found, others = await asyncio.gather(
                x.say(part, "commit", until="endpoint"), y.say(part, "commit", until="endpoint")
            )
            texts.append([word for word, _ in words_of(found)])
            assert [word for word, _ in words_of(others)] == plain
        assert [set("".join(x)) for x in texts[:2]] == [{"C"}, {"A"}] and texts[2] == plain
        for bad, message in (
            (keywords(*"ABCABC"), "more than 5 keywords"), ("stop", "commit"), ('{"keywords": "A"}', "keywords"),
            ('{"keywords": [1]}', "keywords"), ('{"keywords": ["A"], "x": 1}', "keywords"),
        ):  # fmt: skip
            async with client.ws_connect(query) as socket:
                (error,) = await Client(socket).say(bad, until="error")
                assert message in error["error"]["message"] and error["error"]["type"] == "invalid_request_error"
    assert sorted(eager.slots.free) == [0, 1, 2]


def test_phrases_wait_for_an_utterance():
    """Others become a stream's own where no word is open, and frames go on to count from its start.

    The search begins anew there, and the encoder does not.
    """
    model = random_model(**CONVOLUTIONAL, max_symbols=1)
    room = search_options.Room(model, [], 2, STRONG, 0.0)
    stream = streams.Stream(model, Decoding(room=room), silence=0.2, listens=False)
    own, _ = room.own(["C"])
    sound = noise(2, 5)
    first = stream.feed(sound[:8000])
    assert stream.words.end and first
    stream.wanted = own
    stream.feed(sound[8000:9000])
    assert stream.own is None  # a word is open
    stream.words.end, begun = 0, stream.words.rows  # as an endpoint leaves it
    stream.words.waiting = stream.words.waiting.part(0)
    words = stream.feed(sound[9000:]) + stream.finish()
    assert stream.own is own and {x.text for x in words} <= {"C" * n for n in range(1, 99)} and words
    assert stream.words.searched >= begun and words[0].start >= begun * model.seconds
    assert words[-1].end == pytest.approx(2, abs=0.2)


async def test_nothing_is_kept(eager, monkeypatch, caplog, capfd):
    """Neither prompts nor keywords nor texts are logged or written, also where the server fails."""
    written, listening = [], True

    def audit(event, arguments):
        if listening and event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            written.append(arguments[0])

    sys.addaudithook(audit)
    caplog.set_level(logging.DEBUG)
    fields = {"keywords[]": [SECRET, "Ω" * 60], "prompt": f"{SECRET}, {SECRET}"}
    async with talk(eager) as client:
        for more in fields, fields | {"stream": "true"}, fields | {"keywords[]": [SECRET * 20]}:
            async with client.post(ROUTE, data=form(wav(noise(0.3, 6)), **more)) as answer:
                await answer.read()

        def fail(files):
            raise ValueError(f"{'x' * 40}{SECRET}")

        monkeypatch.setattr(eager.files, "run", fail)
        async with client.post(ROUTE, data=form(wav(noise(0.3, 6)), **fields)) as answer:
            assert answer.status == 500 and SECRET not in await answer.text()
        async with client.ws_connect("/v1/stream?rate=8000") as socket:
            await Client(socket).say(json.dumps({"keywords": [SECRET]}), np.zeros(80, np.int16), "end", until="end")
    listening = False
    logged = caplog.text + "".join(capfd.readouterr())
    assert "ValueError: xxx" in logged and "in fail" in logged
    assert SECRET not in logged and "Ω" not in logged
    cache = str(jax.config.jax_compilation_cache_dir)
    assert [x for x in written if not str(x).startswith((cache, "/dev"))] == []


def test_options_of_the_command(talkative, monkeypatch, capsys):
    """The room is made at the start, with the depth, and its memory is said."""
    kept = []
    monkeypatch.setattr(server, "run", kept.append)
    monkeypatch.setattr(server.streams.Slots, "run", lambda *_: None)
    command = ["serve", "--model", talkative, "--name", "tiny"]
    run([*command, "--phrase-depth", 3, "--max-phrases", 7])
    run([*command, "--max-phrases", 0])
    room, none = (x.forms.decoding.room for x in kept)
    assert none is None and (room.most, room.depth, room.size) == (7, 3.0, 701)  # 1 for the space
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "room for" in x]
    assert "7 phrases" in line and f"{room.bytes / 2**20:.1f} MiB" in line


def test_time_of_a_list(served):
    """A list of 100 names for one recording takes 10 ms of a core at most."""
    room, names = search_options.Room(served.model, [], 100, 1.0, 0.0), []
    for i in range(100):
        names.append("".join("ABC "[x] for x in np.random.default_rng(i).integers(0, 4, 15)))
    times = []
    for _ in range(7):
        began = time.process_time()
        own, lacking = room.own(names)
        room.made((own,))
        times.append(time.process_time() - began)
    assert not lacking and len(own.phrases) == 100 and min(times) < 0.01, times
