"""Which files sources are, what the times of their rows mean, and that no guess leaves anything out.

Each table has kinds of sources by oddities; what is expected is arithmetic on what the tests write.
"""

import gzip
import itertools
import json
import struct

import av
import numpy as np
import pytest

import jax_rnnt_speech as asr
import recordings
from jax_rnnt_speech.cli import train as command
from jax_rnnt_speech.data import corpora, order, sources
from jax_rnnt_speech.data import source as road
from jax_rnnt_speech.data.rows import Entry
from jax_rnnt_speech.recognition import segments
from jax_rnnt_speech.system import refuse_if
from recordings import cut_of, encode, pack, parquet
from support import configuration, opened_source, write_audio

RATE = 8000


def wav(seconds, stated=None):
    """A WAV whose header states so many seconds, by default those that it has."""
    data = bytearray(recordings.wav(3000 * np.sin(np.arange(round(seconds * RATE)) / 3), RATE))
    if stated is not None:
        data[40:44] = struct.pack("<I", round(stated * RATE) * 2)
    return bytes(data)


def write(path, rows):
    """A source of rows (name, bytes of its audio, keys): a Parquet, a tar, a manifest, or a folder of audio."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        empty = dict.fromkeys(key for *_, keys in rows for key in keys)
        cells = [{"audio": {"bytes": data, "path": f"{name}.wav"}, "text": "AB"} | empty | keys
                 for name, data, keys in rows]  # fmt: skip
        parquet(path, cells)
    elif path.name == "audio_0.tar":  # as NeMo has it
        pack(path, [(f"{name}.wav", data) for name, data, _ in rows])
        lines = [json.dumps({"audio_filepath": f"{name}.wav", "text": "AB"} | keys) for name, _, keys in rows]
        path.with_name("tarred_audio_manifest.json").write_text("\n".join(lines))
    elif path.suffix == ".tar":
        texts = [(f"{name}.json", json.dumps({"text": "AB"} | keys).encode()) for name, _, keys in rows]
        pack(path, itertools.chain(*zip([(f"{name}.wav", data) for name, data, _ in rows], texts)))
    elif path.name == "text":
        for name, data, _ in rows:
            (path.parent / f"{name}.wav").write_bytes(data)
        path.write_text("".join(f"{name} AB\n" for name, *_ in rows))
        path.with_name("wav.scp").write_text("".join(f"{name} {path.parent}/{name}.wav\n" for name, *_ in rows))
    elif path.name == "cuts.0.jsonl":
        pack(path.with_name("recording.0.tar"), [(f"{name}.wav", data) for name, data, _ in rows])
        path.write_text("\n".join(json.dumps(cut_of(name, "AB")) for name, *_ in rows))
    else:
        folder = path if not path.suffix else path.parent / f"{path.stem}-audio"
        folder.mkdir(exist_ok=True)
        for name, data, _ in rows:
            (folder / f"{name}.wav").write_bytes(data)
            if folder == path:
                (folder / f"{name}.txt").write_text("AB")
        lines = [{"audio": f"{folder.name}/{name}.wav", "text": "AB"} | keys for name, _, keys in rows]
        if folder != path:
            path.write_text("\n".join(map(json.dumps, lines)))


def found(said, *more, status=0):
    """What `check` finds."""
    return json.loads(said(["check", "--rate", RATE, *more, "--json"], status).out)


# Files with their utterances; what is named below them; for each split its utterances, and what the refusal says of it.
LAYOUTS = [
    ({"data/train-00000-of-00002.parquet": 3, "data/train-00001-of-00002.parquet": 1, "data/test-0.parquet": 2}, "",
     {"train": (4, "2 of train ({}/data/train*.parquet)"), "test": (2, "1 of test ({}/data/test-0.parquet)")}),
    ({"train-0.tar": 1, "dev_0.tar": 1, "a.test.tar": 2}, "*.tar",
     {"train": (1, "1 of train ({}/train-0.tar)"), "validation": (1, "1 of validation ({}/dev_0.tar)"),
      "test": (2, "1 of test ({}/a.test.tar)")}),
    ({"train.jsonl": 2, "valid.jsonl": 1}, "*.jsonl",
     {"train": (2, "1 of train ({}/train.jsonl)"), "validation": (1, "1 of validation ({}/valid.jsonl)")}),
    ({"train-clean/7": 2, "dev-clean/8": 1, "test.other/9": 1}, "",
     {"train": (2, "2 of train ({}/train-clean)"), "validation": (1, "1 of validation ({}/dev-clean)"),
      "test": (1, "1 of test ({}/test.other)")}),
    ({"a/eval/x": 1, "a/more/x": 1}, "*", {"test": (1, "1 of test ({}/a/eval)"), "none": (1, "1 of no split ({}/a)")}),
    ({"train-0.tar": 2, "more-0.tar": 1}, "", {"train": (2, None), "none": (1, None)}),  # both are for a training
    ({"dev/a": 1, "valid/b": 1}, "", {"validation": (2, None)}),
    ({"test-drive/a": 2}, "test-drive", {}),  # this is what somebody names
    ({"bob/a": 1, "eve/a": 1, "test/a": 2}, "", {"none": (2, None), "test": (2, None)}),  # speakers
    ({"latest/a": 1, "contest-2019/a": 1, "device/a": 1}, "*", {}),
    ({"data/train/text": 2, "data/dev/text": 1}, "data/*",
     {"train": (2, "1 of train ({}/data/train)"), "validation": (1, "1 of validation ({}/data/dev)")}),
    ({"test/cuts.0.jsonl": 1, "train/cuts.0.jsonl": 2}, "",
     {"train": (2, "1 of train ({}/train)"), "test": (1, "1 of test ({}/test)")}),
]  # fmt: skip


@pytest.mark.parametrize(("files", "name", "splits"), LAYOUTS)
def test_splits(files, name, splits, tmp_path, refused, said):
    """A source of several splits is counted apart by `check`; `train` and `test` refuse it, and name its parts."""
    names, top = itertools.count(), tmp_path / "set"
    for file, count in files.items():
        write(top / file, [(f"u{next(names)}", wav(0.25), {}) for _ in range(count)])
    write(tmp_path / "o.jsonl", [("o", wav(0.4), {})])
    source, other = top / name, tmp_path / "o.jsonl"
    out, error = said(["check", "--rate", RATE, source, "--json"])
    assert json.loads(out)["utterances"] == sum(files.values()) and error.startswith(f"reading {source} (")
    assert json.loads(out)["splits"] == {split: n for split, (n, _) in splits.items()}
    parts = [x.format(top) for _, x in splits.values() if x]
    for option, both in (("--train", (source, other)), ("--valid", (other, source))) if parts else ():
        for x in parts:
            refused(["train", "--train", both[0], "--valid", both[1], "--workdir", tmp_path / "w"], x)
        refused(["train", "--train", both[0], "--valid", both[1]], f"{option} {source} mixes splits")
    if parts:
        refused(["test", "--model", tmp_path, source], f"{source} mixes splits")
        refused(["ngram", tmp_path / "a.arpa", source], f"{source} mixes splits")
        chosen = [x[x.index("(") + 1 : -1] for x in parts]  # each by itself, as the refusal names it
        if all("no split" not in x for x in parts):
            assert [found(said, x)["utterances"] for x in chosen] == [n for n, _ in splits.values()]
    else:
        (tmp_path / "o.jsonl").write_text('{"audio": "o-audio/o.wav", "text": ""}')
        command = ["train", "--train", source, "--valid", other, "--rate", RATE, "--workdir", tmp_path / "w"]
        refused(command, f"{other}: no usable utterance; left out, empty transcript")


ROWS = ["train", "train-clean-100", "dev", "TEST"]


@pytest.mark.parametrize("kind", ["m.jsonl", "m.parquet", "m.csv", "m.tar", "audio_0.tar"])
def test_splits_of_rows(kind, tmp_path, refused, said):
    """A column may say the split of each row: it counts as names of files do, and more than these."""
    source, one = tmp_path / f"dev/{kind}", tmp_path / f"one/{kind}"
    for file, key, values in ((source, "split", ROWS), (one, "subset", ["train", "train-other"])):
        write(file, [(f"{file.parent.name}{i}", wav(0.4), {key: x}) for i, x in enumerate(values)])
        if kind == "m.csv":
            rows = [json.loads(x) for x in file.read_text().splitlines()]
            file.write_text("\n".join([",".join(rows[0]), *(",".join(x.values()) for x in rows)]))
    assert found(said, source)["splits"] == {"train": 2, "validation": 1, "test": 1}
    assert found(said, one)["splits"] == {"train": 2}
    message = "mixes splits, as its rows say under split or subset or partition: 2 of train, 1 of validation, 1 of test"
    for name, train, valid in (("--train", source, one), ("--valid", one, source)):
        refused(["train", "--train", train, "--valid", valid], f"{name} {source} {message}")
    refused(["ngram", tmp_path / "a.arpa", source], message)
    refused(["test", "--model", tmp_path, source], message)
    write(tmp_path / "numbers.jsonl", [(f"n{i}", wav(0.4), {"split": i, "text": "split"}) for i in range(3)])
    assert found(said, tmp_path / "numbers.jsonl")["splits"] == {}


def test_named_twice(tmp_path, said, refused):
    """What is named twice, in whatever way, is read once, with a line; what differs is all read."""
    for name in ("a/one", "a/two", "b/two", "m.jsonl", "n.jsonl"):
        write(tmp_path / name, [(name[-1], wav(0.4), {})])
    text = (tmp_path / "m.jsonl").read_bytes()
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "n.json").write_bytes(text)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for names, count, line in (
        ("m.jsonl m.jsonl", 1, "m.jsonl is named twice, and read once"),
        ("m.jsonl m.jsonl.gz", 1, "m.jsonl.gz is not read"), ("n.json n.jsonl", 2, ""),
        ("a b link", 3, "link is not read by itself"), ("a/one a", 2, "one is not read by itself"),
        ("m*l m.jsonl n.jsonl", 2, "m.jsonl is not read by itself"), ("a b m.jsonl n.jsonl", 5, ""),
        ("m.jsonl n*l ?.jsonl", 2, "n*l is not read by itself"), ("[mn].jsonl [m].jsonl", 2, "[m].jsonl is not read"),
    ):  # fmt: skip
        out, error = said(["check", "--rate", RATE, *(tmp_path / x for x in names.split()), "--json"])
        assert json.loads(out)["utterances"] == count, names
        assert (line in error) if line else error.startswith("reading"), error
    (tmp_path / "o.jsonl").write_text('{"audio": "m-audio/l.wav", "text": ""}')
    more = "--valid", tmp_path / "o.jsonl", "--workdir", tmp_path / "w"
    errors = said(["train", "--rate", RATE, "--train", *[tmp_path / "n.jsonl"] * 2, *more], 2).err.splitlines()
    assert errors[0].endswith("is named twice, and read once") and errors[1].count("n.jsonl (1 file of manifest)") == 1
    both = said(["check", "--rate", RATE, tmp_path / "[mo].jsonl", tmp_path / "[mn].jsonl", "--json"], 1).err
    assert "another source has 1 of its files, too" in both


def test_the_same_files(tmp_path, refused):
    """--valid must be other files than --train, however both are named."""
    for name in ("a/one", "b/two", "m.jsonl", "n.jsonl"):
        write(tmp_path / name, [(name[-1], wav(0.4), {})])
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "l.jsonl").symlink_to("m.jsonl")
    line = "put some of its lines"
    for train, valid, message in (
        ("m.jsonl", "m.jsonl", line), ("*.jsonl", "n.jsonl", line), ("m.jsonl", "l.jsonl", line),
        ("l*.jsonl", "m.jsonl", line), ("m.jsonl", "l*.jsonl", line),
        ("a", "link/one", "by speakers"), ("?", "b", "by speakers"),
    ):  # fmt: skip
        train, valid = tmp_path / train, tmp_path / valid
        refused(["train", "--train", train, "--valid", valid, "--workdir", tmp_path / "w"], message)
        refused(["train", "--train", train, "--valid", valid], "--train and --valid both read")
    for train, kept in (("m.jsonl", None), ("a", None), ("a", tmp_path / "kept")):  # a manifest of the same audio
        (tmp_path / "valid.jsonl").write_text("\n".join(
            json.dumps({"audio": f"{tmp_path}/{x}", "text": "AB"}) for x in ("link/one/e.wav", "m-audio/l.wav")
        ))  # fmt: skip
        held_out = corpora.open_corpus(str(tmp_path / "valid.jsonl"), configuration())
        config = configuration(train=str(tmp_path / train), on_the_fly=kept is None)
        assert sources.in_both(road.Source(config, tmp_path / "index", kept=kept), held_out) == 1


def test_which_way(tmp_path, said, monkeypatch):
    """Hours decide, and options more; a line says which way is taken and what the other would be."""
    write(tmp_path / "m.jsonl", [(f"u{i}", wav(0.5), {"duration": 0.5} if i % 2 else {}) for i in range(4)])
    write(tmp_path / "o.jsonl", [("o", wav(0.4), {})])
    write(tmp_path / "t.tar", [("u", wav(0.4), {})])
    (tmp_path / "of").mkdir()
    (tmp_path / "of/x.csv").write_text(f"path,sentence\n{tmp_path}/o-audio/o.wav,A\n")
    (tmp_path / "o.jsonl").write_text('{"audio": "o-audio/o.wav", "text": ""}')
    late = "--valid", tmp_path / "o.jsonl", "--rate", RATE, "--workdir"
    fly, cache = "train reads audio on the fly", "train decodes all audio before the first step"
    for small, name, more, way in (
        (20, "m.jsonl", [], cache), (20, "m.jsonl", ["--on-the-fly"], fly), (20, "t.tar", [], fly),
        (2.1 / 3600, "m.jsonl", [], cache), (1.9 / 3600, "m.jsonl", [], fly), (1e-5, "of/x.csv", [], fly),
        (1.9 / 3600, "m.jsonl", ["--no-on-the-fly"], cache), (20, "m.jsonl", ["--workers", 1], fly),
        (20, "m.jsonl", ["--freeze", "encoder:1"], cache), (1.9 / 3600, "m.jsonl", ["--freeze", "encoder:1"], fly),
    ):  # fmt: skip
        monkeypatch.setattr(command, "SMALL", small)
        error = said(["train", "--train", tmp_path / name, *late, tmp_path / "w", *more], 2).err.splitlines()
        assert error[0].startswith(f"reading --train {tmp_path / name} (1 file of ") and error[1].startswith(way)
        other = "; --on-the-fly reads" if way == cache else "; --no-on-the-fly decodes all audio"
        assert ("rows of the frozen layers" in error[1]) == ("--freeze" in more)
        assert other in error[1] and "no usable utterance" in error[2] and len(error) == 3


# (seconds of the file, keys of its row, seconds that are used, what is noted); None: it is left out.
ORIGINAL, CUT = "the recording from which it was cut", "at whose end it is cut"
TIMES = {
    "a clip": (0.8, {"begin_time": 12.5, "end_time": 13.3}, 0.8, ORIGINAL),
    "by duration": (0.8, {"offset": 99, "duration": 0.81}, 0.8, ORIGINAL),
    "soon": (0.8, {"start_time": 0.4, "end_time": 1.2}, 0.8, ORIGINAL),
    "at the start": (0.8, {"begin_time": 0, "end_time": 0.8}, 0.8, None),
    "near the start": (0.8, {"begin_time": 0.05, "end_time": 0.85}, 0.8, ORIGINAL),
    "a part": (1.2, {"start": 0.3, "end": 0.7}, 0.4, None),
    "a part by duration": (1.2, {"offset": 0.3, "duration": 0.9}, 0.9, None),
    "rounded": (1.2, {"start": 0.5, "end": 1.28}, 0.7, None),
    "overrun": (1.2, {"offset": 0.4, "duration": 1.1}, 0.8, CUT),
}
BEHIND = {
    "behind": (0.8, {"begin_time": 5, "end_time": 9}),
    "mostly behind": (1.2, {"offset": 1.0, "duration": 0.9}),
}


@pytest.mark.parametrize("kind", ["m.jsonl", "m.tar", "m.parquet"])
def test_times(kind, tmp_path, said):
    """Keys of a row choose a part of its file, or are those of the recording that the file was cut from."""
    write(tmp_path / kind, [(name, wav(x[0]), x[1]) for name, x in (TIMES | BEHIND).items()])
    whole = kind == "m.parquet"  # where a row holds a clip in any case
    expected = {name: x[2] for name, x in TIMES.items()} | ({name: x[0] for name, x in BEHIND.items()} if whole else {})
    if whole:
        expected["overrun"] = 1.2
    checked = found(said, tmp_path / kind, status=0 if whole else 1)
    assert checked["utterances"] == len(expected)
    assert checked["hours"] * 3600 == pytest.approx(sum(expected.values()), abs=0.01)
    left = checked["left_out"].get("a segment beyond the end of its file", [])
    assert len(left) == (0 if whole else 2) and all("behind" in x for x in left)
    for name, (*_, note) in TIMES.items():
        noted = [text for text, names in checked["notes"].items() if any(f"{name}.wav" in x for x in names)]
        assert len(noted) == bool(note) and (whole or not note or note in noted[0])
    frames, left = trained(tmp_path / kind, tmp_path)
    extractor = asr.data.features.extractor(configuration())
    assert sorted(frames) == sorted(extractor.count(round(x * RATE)) for x in expected.values())
    assert len(left) == (0 if whole else 1)


def opened(source, folder, known=None, step=0, **options):
    """A corpus on the fly."""
    config = configuration(**{"train": str(source), "on_the_fly": True, "batch": 2, "buckets": 3} | options)
    return opened_source(config, folder, known, step)


def trained(source, folder, **options):
    """(frames of each row that an epoch on the fly has, names of what is left out by reason)."""
    corpus = opened(source, folder, **options)
    batches = list(corpus.read(0, None, until=1))
    assert [x["last"] for x in batches] == [False] * (len(batches) - 1) + [True]
    return [n for x in batches for n, valid in zip(x["lengths"].tolist(), x["valid"]) if valid], corpus.report.names


def mp3(path, seconds, loud_first):
    """An MP3 of variable rate that does not say how long it is: noise in a quarter of it, then nearly nothing."""
    x = np.random.default_rng(1).normal(0, 0.2, round(seconds * 16000))
    x[len(x) // 4 :] *= 1e-4
    with av.open(str(path), "w", format="mp3", options={"write_xing": "0", "id3v2_version": "0"}) as file:
        stream = file.add_stream("libmp3lame", rate=16000, options={"flags": "+qscale", "global_quality": "590"})
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(np.float32(x if loud_first else x[::-1])[None], "fltp", "mono")
        frame.sample_rate = 16000
        resampler = av.AudioResampler(stream.codec_context.format.name, "mono", 16000, frame_size=576)
        for part in (*resampler.resample(frame), *resampler.resample(None), None):
            file.mux(stream.encode(part))
    return path.read_bytes()


def of_guesses(folder):
    """(bytes of audio, keys, seconds) by names: what headers and manifests say of its length is wrong."""
    guesses = {}
    for i in range(3):
        seconds = 1.2 + i / 5
        guesses[f"mp3-{i}"] = mp3(folder / "x.mp3", seconds, i % 2), {}, seconds
        guesses[f"header-{i}"] = wav(seconds, stated=0.3), {}, seconds
        guesses[f"joined-{i}"] = wav(0.5) + wav(seconds - 0.5), {}, seconds
        encode(folder / "x.aac", np.zeros(round(seconds * 16000)), bit_rate="8000")
        guesses[f"aac-{i}"] = (folder / "x.aac").read_bytes(), {}, seconds
        guesses[f"rounded-{i}"] = wav(seconds), {"duration": (1, 2.0, 2)[i]}, seconds
    guesses["cut"] = wav(1.6), {"start": 0, "end": 3.15}, 1.6  # longer than all limits, and cut by its file
    return guesses


@pytest.mark.parametrize(("kind", "windows"), [("m.jsonl", False), ("m.tar", True)])
def test_guesses(kind, windows, tmp_path, said, monkeypatch):
    """Lengths that are guessed decide when an utterance comes, and never whether; a resumed run goes on alike."""
    if windows:
        monkeypatch.setattr(order, "LEAST", 5)
        monkeypatch.setattr(road, "FULL", 0)
    most = {"max_seconds": 1.55, "buffer": 5}
    rows = of_guesses(tmp_path)
    write(tmp_path / kind, [(name, data, keys) for name, (data, keys, _) in rows.items()])
    expected = [seconds for *_, seconds in rows.values()]
    assert found(said, tmp_path / kind, "--max-seconds", 1.85)["utterances"] == len(expected)
    frames, left = trained(tmp_path / kind, tmp_path, max_seconds=1.85, buffer=5)
    extractor = asr.data.features.extractor(configuration())
    sizes = sorted(extractor.count(round(x * RATE)) for x in expected)
    assert not left and np.abs(np.array(sorted(frames)) - sizes).max() <= 15  # codecs add up to 0.15 s
    corpus = opened(tmp_path / kind, tmp_path, **most)
    whole = list(corpus.read(0, None, until=2))
    first = 1 + [x["last"] for x in opened(tmp_path / kind, tmp_path, **most).read(0, None, until=1)].index(True)
    long = {x for names in corpus.report.names.values() for x in names}
    assert {*corpus.report.names} == {"longer than 1.55 s"} and len(long) == 6  # those of 1.6 s
    for step in (2, first - 1, first, len(whole) - 1):  # the last batches of an epoch are for what is longer
        again = opened(tmp_path / kind, tmp_path, **most)
        some = list(itertools.islice(again.read(0, 10**9), step))
        state = json.loads(json.dumps(again.at(step)))
        rest = list(opened(tmp_path / kind, tmp_path, known=state, step=step, **most).read(step, None, until=2))
        assert len(some) + len(rest) == len(whole)
        for a, b in zip([*some, *rest], whole):
            np.testing.assert_array_equal(a["features"], b["features"])


@pytest.mark.parametrize("held", [60, 1])
@pytest.mark.parametrize("form", ["rttm", "ctm", "json"])
def test_turns_behind_the_end(form, held, tmp_path, monkeypatch, capsys):
    """A turn that ends behind its recording is cut there, with a note; one that lies behind it is an error."""
    monkeypatch.setattr(segments, "HELD", held)
    turns = [("A", 0.0, 1.5), ("B", 2.0, 3.3), ("C", 5.1, 1.0)]  # start and duration
    write_audio(tmp_path / "m.wav", 5.0)
    lines = {
        "rttm": [f"SPEAKER m 1 {start} {size} <NA> <NA> {who} <NA> <NA>" for who, start, size in turns],
        "ctm": [f"m 1 {start} {size} word 0.9 lex {who}" for who, start, size in turns],
        "json": [json.dumps([{"speaker": who, "start": start, "end": start + size} for who, start, size in turns])],
    }
    (tmp_path / f"m.{form}").write_text("\n".join(lines[form]))
    entries = segments.entries(tmp_path / f"m.{form}", [Entry("m.wav", tmp_path / "m.wav", "")])
    sizes = []
    for _, x in segments.loaded(entries, RATE):
        try:
            refuse_if(isinstance(x, asr.system.UserError), x)
            sizes.append(len(x) if isinstance(x, np.ndarray) else sum(map(len, x)))
        except asr.system.UserError as error:
            sizes.append(str(error).partition(": ")[2])
    assert sizes == [1.5 * RATE, 3 * RATE, "a segment beyond the end of its file"]
    assert "B: a segment that ends behind its file, at whose end it is cut" in capsys.readouterr().err
