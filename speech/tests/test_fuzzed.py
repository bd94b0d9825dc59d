"""Mutated manifests and audio files: each is read, or left out with a reason in one line; nothing else happens.

MANIFESTS=10000 AUDIO=2000 SEED=1 pytest -s speech/tests/test_fuzzed.py
"""

import collections
import itertools
import json
import os
import sys

import numpy as np
import pytest

from jax_rnnt_speech.data import audio, corpora, rows, sources
from recordings import FORMATS, RATE, SWEEP, TIMES, cut, encode
from support import asr, configuration, write_audio

pytestmark = pytest.mark.slow
MANIFESTS, AUDIO, SEED = (int(os.environ.get(name, x)) for name, x in (("MANIFESTS", 200), ("AUDIO", 90), ("SEED", 0)))

# fmt: off
TOKENS = [
    *rb"""' nan 1e400 -1 [ ] { } , null true \ud800 ../ /etc/passwd | a.wav 0.1 "offset": "channel":7 "segments":[]
    "duration":0.1 "text":["x"] http://localhost/a.wav""".split(), b"\0", b"\t", b"\n", b"\r", b" ", b'"', b"9" * 400,
    b"\xff\xfe", b"\xef\xbb\xbf",
]
# fmt: on
OPENED = []  # paths, as the interpreter's audit tells them
FORBIDDEN = "subprocess.Popen", "os.system", "socket.connect", "os.exec", "os.posix_spawn"


def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and not str(arguments[0]).endswith((".py", ".pyc")):
        OPENED.append(str(arguments[0]))
    elif event in FORBIDDEN:
        OPENED.append(event)


def dialects():
    """{file or folder: {name: bytes}} of small corpora."""
    said = {"id": "s", "start": 0.0, "duration": 0.1, "channel": 0, "text": "A"}
    lines = lambda rows: "\n".join(map(json.dumps, rows)).encode()
    own = [{"audio": "a.wav", "text": "A B"}]
    own += [{"audio": "b.wav", "text": "C", "offset": 0.1, "duration": 0.1, "channel": 1}]
    own += [{"audio": "a.wav", "segments": [{"start": 0, "end": 0.1, "text": "A"}]}]
    nemo = [{"audio_filepath": "a.wav", "offset": 0, "duration": 0.2, "text": "A"}] * 2
    recording = cut([{"type": "file", "channels": [0, 1], "source": "b.wav"}], [said], start=0.0, duration=0.2)
    table = 'path\tsentence\toffset\tduration\na.wav\t"A ""b"""\t0.1\t0.1\nb.wav\tC\t\t\n'
    return {
        "m.jsonl": {"m.jsonl": lines(own)},
        "m.json": {"m.json": json.dumps(own).encode()},
        "n.json": {"n.json": lines(nemo)},
        "h.jsonl": {"h.jsonl": lines([{"audio": {"path": "a.wav"}, "sentence": "A"}] * 2)},
        "cuts.jsonl": {"cuts.jsonl": lines([recording] * 2)},
        "m.tsv": {"m.tsv": table.encode()},
        "m.csv": {"m.csv": table.replace("\t", ",").encode()},
        "kaldi": {"kaldi/wav.scp": b"r a.wav\nq b.wav\n", "kaldi/text": b"u A\nv B C\n",
                  "kaldi/segments": b"u r 0 0.1\nv q 0.1 -1 1\n"},
        "libri": {"libri/1.trans.txt": b"x A B\n"},
        "pairs": {"pairs/x.txt": b"A B\n"},
    }  # fmt: skip


def mutated(rng, data):
    """The bytes with one to four changes."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        place, length = int(rng.integers(len(data) + 1)), int(rng.integers(1, max(2, len(data) // 3)))
        kind = rng.integers(7)
        if kind == 0 and data:
            data[place % len(data)] = rng.integers(256)
        elif kind == 1:
            del data[place : place + length]
        elif kind == 2:
            data[place:place] = data[place : place + length]
        elif kind == 3:
            data[place:place] = TOKENS[rng.integers(len(TOKENS))]
        elif kind == 4:
            del data[place:]
        elif kind == 5:
            data[place : place + 4] = [bytes(4), b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\1\0\0\0"][rng.integers(4)]
        elif data:
            data[place % len(data)] ^= 1 << rng.integers(8)
    return bytes(data)


def one_line(error):
    assert "\n" not in str(error), error


def rows_of(name, data):
    """How many entries and faults a manifest must have at least."""
    if not name.endswith("jsonl"):
        return 0
    text = data.decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
    try:
        whole = json.loads(text)  # one entry, on however many lines, or an array
        return len(whole) if isinstance(whole, list) else 1
    except (ValueError, RecursionError):
        return sum(bool(x.strip()) for x in text.split("\n"))


def test_manifests(tmp_path):
    sys.addaudithook(audit)
    folder, rng, config = tmp_path, np.random.default_rng(SEED), configuration()
    cases, seen = dialects(), collections.Counter()
    write_audio(folder / "a.wav", 0.3)
    write_audio(folder / "b.wav", 0.3, channels=2)
    for name in ("kaldi", "libri", "pairs"):
        (folder / name).mkdir()
    for path in ("libri/x.wav", "pairs/x.wav", "kaldi/a.wav", "kaldi/b.wav"):
        (folder / path).symlink_to(folder / ("b.wav" if "b" in path[-5:] else "a.wav"))
    for _, (name, files) in zip(range(MANIFESTS), itertools.cycle(cases.items())):
        chosen = list(files)[rng.integers(len(files))]
        contents = files | {chosen: mutated(rng, files[chosen])}
        for path, data in contents.items():
            (folder / path).write_bytes(data)
        OPENED.clear()
        try:
            corpus = corpora.Recordings(folder / name, config)
        except asr.system.UserError as error:
            one_line(error)
            seen["error"] += 1
            continue
        except Exception:
            print(name, contents)
            raise
        left = sum(map(len, corpus.report.names.values()))
        assert left + len(corpus.utterances) >= rows_of(name, contents.get(name, b"")), contents
        allowed = {str(folder / x) for x in files} | {str(x.audio) for x in sources.read(folder / name)
                                                      if isinstance(x, rows.Entry)}  # fmt: skip
        assert set(OPENED) <= allowed, (set(OPENED) - allowed, contents)
        for x in corpus.entries:
            assert x.start >= 0 and 0 < x.whole <= 0.3 + 1e-9, contents
        seen["whole" if not left else "some left out" if corpus.utterances else "all left out"] += 1
    print(dict(seen))
    assert len(seen) == 4


def cases_of(folder):
    """Bytes of small audio files, by suffix."""
    for suffix, codec in FORMATS.items():
        rate, short = (48000 if codec == "libopus" else RATE), TIMES[: RATE // 2]
        encode(folder / f"a.{suffix}", np.interp(np.arange(rate // 2) / rate, short, SWEEP[: RATE // 2]), rate)
        yield suffix, (folder / f"a.{suffix}").read_bytes()


def test_audio(tmp_path):
    rng, cases, seen = np.random.default_rng(SEED), dict(cases_of(tmp_path)), collections.Counter()
    for _, (suffix, data) in zip(range(AUDIO), itertools.cycle(cases.items())):
        path, changed = tmp_path / f"b.{suffix}", mutated(rng, data)
        path.write_bytes(changed)
        try:
            file = audio.stretches(path)
            samples = audio.read(path, RATE)
            assert samples.dtype == np.float32 and len(samples) == audio.size(file, RATE)
            assert not len(samples) or np.abs(samples).max() < 20
            stored = sum(x.samples * x.channels for x in file)
            assert suffix not in ("wav", "aiff") or stored <= 8 * len(changed), (stored, len(changed))  # a bit a sample
            seen["read"] += 1
        except audio.AudioError as error:
            one_line(error)
            seen[error.reason] += 1
        except Exception:
            print(suffix, changed[:300])
            raise
    print(dict(seen))
    assert len(seen) > 2
