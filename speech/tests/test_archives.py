"""Archives are read as the recordings in them are, and on the fly in an order that nothing but its seed decides."""

import collections
import contextlib
import functools
import gzip
import io
import itertools
import json
import pathlib
import pickle
import shutil
import tarfile

import chex
import numpy as np
import pytest

import jax_rnnt_speech as asr
from jax_rnnt_speech.data import archives, audio, corpora, index, lists, order, sources
from jax_rnnt_speech.data import source as road
from jax_rnnt_speech.data.archives import storage
from jax_rnnt_speech.data.rows import Entry, keys_of
from jax_rnnt_speech.recognition import recognise
from recordings import cut_of, pack, parquet
from support import ABC, configuration, losses, opened_source, run

RATE = 8000
COUNT = 12
TEXTS = [f"{'ABC'[i % 3]}{' AB' * (i // 5)}" for i in range(COUNT)]
SECONDS = [0.3 + 0.05 * i for i in range(COUNT)]


def samples(i):
    """Of an utterance, in sixteen bits."""
    x = 0.1 * np.random.default_rng(i).normal(size=round(SECONDS[i] * RATE))
    return np.round(x * 2**15).astype(np.float32) / 2**15


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder of the same utterances, u0 to u11, in archives of each kind."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "files").mkdir()
    sound, halves = {}, (range(7), range(7, COUNT))
    for i in range(COUNT):
        audio.write(folder / f"files/u{i}.flac", samples(i), RATE)
        sound[i] = (folder / f"files/u{i}.flac").read_bytes()
        audio.write(folder / f"files/u{i}.wav", samples(i), RATE)
    rows = [{"audio": f"files/u{i}.flac", "text": TEXTS[i], "duration": SECONDS[i]} for i in range(COUNT)]
    (folder / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "bare.jsonl").write_text("\n".join(json.dumps(x | {"duration": None}) for x in rows))
    for k, half in enumerate(halves):
        texts = [
            ("txt", TEXTS[i].encode()) if i % 2 else ("json", json.dumps({"text": TEXTS[i]}).encode()) for i in half
        ]
        files = [((f"a/u{i}.flac", sound[i]), (f"a/u{i}.{kind}", text)) for i, (kind, text) in zip(half, texts)]
        pack(folder / f"web/part-{k:03}.tar", itertools.chain(*files))
        pack(folder / f"nemo/audio_{k}.tar", [(f"u{i}.flac", sound[i]) for i in half])
        cuts = [cut_of(f"u{i}", TEXTS[i], SECONDS[i]) for i in half]
        files = [((f"u{i}.flac", sound[i]), (f"u{i}.json", json.dumps(x["recording"]).encode()))
                 for i, x in zip(half, cuts)]  # fmt: skip
        pack(folder / f"shar/recording.00000{k}.tar", itertools.chain(*files))
        with gzip.open(folder / f"shar/cuts.00000{k}.jsonl.gz", "wt") as file:
            file.write("\n".join(map(json.dumps, cuts)))
    lines = [{"audio_filepath": f"u{i}{'-sub1' * (i == 3)}.flac", "text": TEXTS[i], "duration": SECONDS[i],
              "shard_id": int(i >= 7)} for i in range(COUNT)]  # fmt: skip
    (folder / "nemo/tarred_audio_manifest.json").write_text("\n".join(map(json.dumps, lines)))
    rows = [{"audio": {"bytes": sound[i], "path": f"u{i}.flac"}, "sentence": TEXTS[i], "speaker_id": str(i)}
            for i in range(COUNT)]  # fmt: skip
    with contextlib.suppress(pytest.skip.Exception):
        parquet(folder / "parquet/train-00000-of-00001.parquet", rows, row_group_size=5)
    return folder


KINDS = {
    "web": ["web", "web/part-{000..001}.tar", "web/*.tar"],
    "nemo": ["nemo", "nemo/audio__OP_0..1_CL_.tar", "nemo/tarred_audio_manifest.json"],
    "shar": ["shar", "shar/cuts.*.jsonl.gz"],
    "parquet": ["parquet", "parquet/*.parquet"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read(packed, kind, tmp_path):
    """Each name of an archive gives its texts and samples; so does each row that an index finds again."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    for name in KINDS[kind]:
        assert sources.listed([packed / name])[str(packed / name)]  # as train names what it reads
        entries = list(sources.read(packed / name))
        assert [x.text for x in entries] == TEXTS
        for i, x in enumerate(entries):
            np.testing.assert_array_equal(audio.read(x.audio, RATE, x.start, x.end, x.channel), samples(i))
        loaded = recognise.loaded(recognise.listed([packed / name]), RATE)  # as transcribe does
        for i, (_, pieces) in enumerate(loaded):
            np.testing.assert_array_equal(np.concatenate([*pieces]), samples(i))
        assert i == COUNT - 1 and archives.wanted([str(packed / name)]) and sources.is_list(packed / name)
    corpus = corpora.Recordings([packed / kind], configuration())
    assert len(corpus.utterances) == COUNT and not corpus.report.names
    keys = keys_of()
    shards = archives.all_shards(packed / kind)
    found = index.indexed(shards, keys, tmp_path)
    np.testing.assert_allclose(found.lengths(np.arange(COUNT)), SECONDS, atol=1e-3)
    assert found.seconds.all() == (kind != "parquet")  # what is in tars was read with them
    again = [shards[k].entry(row.tolist(), keys) for k, row in zip(found.shards, found.rows)]
    assert [x.text for x in again] == TEXTS and [str(x.audio) for x in again] == [str(x.audio) for x in entries]
    np.testing.assert_array_equal(audio.read(again[8].audio, RATE), samples(8))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members(form, tmp_path, monkeypatch):
    """Files of a tar are those that Python's tarfile finds, from the start and from each; few need that module."""
    sizes = [0, 1, 511, 512, 513, 3071, 3583, 3584, 3585, 9000, 0, 200]
    names = [f"a/{i}" + "é" * (i % 3) * (form != tarfile.USTAR_FORMAT) for i in range(len(sizes))]
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as tar:
        for i, (name, size) in enumerate(zip(names, sizes)):
            info = tarfile.TarInfo(name + "/x" * 60 * (i % 4 == 3) + f".{'txt' if i % 2 else 'flac'}")
            info.size, info.mtime = size, 1.5 * (i % 5)
            tar.addfile(info, io.BytesIO(bytes([i]) * size))
        for kind, name in ((tarfile.DIRTYPE, "a/folder"), (tarfile.SYMTYPE, "a/link")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a/0"
            tar.addfile(info)
        info, more = tarfile.TarInfo("last.txt"), {"size": "3"} if form == tarfile.PAX_FORMAT else {}
        info.size, info.pax_headers = 3, more
        tar.addfile(info, io.BytesIO(b"end"))
    if more:  # a size that a header has no room for stands before it alone
        data = bytearray((tmp_path / "x.tar").read_bytes())
        place = data.rindex(b"last.txt")
        data[place + 124 : place + 135] = b"%011o" % 0
        data[place + 148 : place + 156] = b" " * 8
        data[place + 148 : place + 155] = b"%06o\0" % sum(data[place : place + 512])
        (tmp_path / "x.tar").write_bytes(data)
    with tarfile.open(tmp_path / "x.tar") as tar:
        expected = [(x.name, x.offset, x.offset_data, x.size) for x in tar if x.isreg()]
    assert len(expected) == len(sizes) + 1
    data = (tmp_path / "x.tar").read_bytes()
    found = list(archives.tars.walked(tmp_path / "x.tar"))
    assert [x[:4] for x in found] == expected
    for x in found:
        assert data[x.offset_data :].startswith(x.start) and len(x.start) >= min(x.size, 256)
        assert [y[:4] for y in archives.tars.walked(tmp_path / "x.tar", x.offset, x.end)] == [x[:4]]
    monkeypatch.setattr(archives.tars.tarfile, "open", None)
    assert list(archives.tars.walked(tmp_path / "x.tar", 0, expected[-2][2])) == found[:-1]


def test_one_tar_of_nemo(packed, tmp_path):
    """The lines of its manifest need no number of a tar."""
    lines = [json.dumps({"audio_filepath": f"u{i}.flac", "text": TEXTS[i]}) for i in range(7)]
    (tmp_path / "tarred_audio_manifest.json").write_text("\n".join(lines))
    shutil.copy(packed / "nemo/audio_0.tar", tmp_path)
    assert [x.text for x in sources.read(tmp_path / "audio_0.tar")] == TEXTS[:7]


def test_rows_of_other_lists(packed, tmp_path):
    """Lines of a manifest, and entries of any other, in shards; seconds of headers are those of the samples."""
    keys = keys_of()
    for name, written in (("all.jsonl", SECONDS), ("bare.jsonl", [0] * COUNT)):
        shards = archives.all_shards(packed / name, readers=2)
        assert 2 < len(shards) <= COUNT
        found = index.indexed(shards, keys, tmp_path)
        np.testing.assert_allclose(found.seconds, written, atol=1e-4)
        np.testing.assert_allclose(found.lengths(np.arange(COUNT)), SECONDS, atol=1e-4)
        entries = [shards[k].entry(row.tolist(), keys) for k, row in zip(found.shards, found.rows)]
        assert [x.text for x in entries] == TEXTS
    (tmp_path / "m.csv").write_text(
        "path,text\n" + "".join(f"{packed}/files/u{i}.wav,{TEXTS[i]}\n" for i in range(COUNT))
    )
    shards = archives.all_shards(tmp_path / "m.csv", readers=2)
    found = index.indexed(shards, keys, tmp_path)
    np.testing.assert_allclose(found.lengths(np.array([3, 1, 3])), np.array(SECONDS)[[3, 1, 3]], atol=1e-4)
    assert [*np.flatnonzero(index.indexed(shards, keys, tmp_path).later)] == [1, 3]  # as another start finds
    rows = [{"audio": f"{packed}/files/u{i}.wav", "text": "A", "offset": 0.1} for i in range(COUNT)]  # to their ends
    (tmp_path / "parts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = index.indexed(archives.all_shards(tmp_path / "parts.jsonl"), keys, tmp_path)
    np.testing.assert_allclose(found.lengths(np.arange(COUNT)), np.subtract(SECONDS, 0.1), atol=1e-4)
    (tmp_path / "bad.jsonl").write_text('{"audio": "a.wav", "text": "A"}\nno\n{"text": "A", "duration": 1}\nnor this\n')
    found = index.indexed(archives.all_shards(tmp_path / "bad.jsonl", readers=2), keys, tmp_path)
    assert sorted(found.faults) == [["no name of an audio file", "bad.jsonl line 3"],
                                    *(["not JSON", f"bad.jsonl line {i}"] for i in (2, 4))]  # fmt: skip
    assert np.isnan(found.lengths(np.array([0])))


def test_damaged_archives(packed, tmp_path, refused, said):
    """Whole members before the damage are used, the rest is named, the same each time; check ends with 1."""
    whole = (packed / "web/part-000.tar").read_bytes()
    with tarfile.open(packed / "web/part-000.tar") as tar:
        places = {x.name: (x.offset, x.offset_data) for x in tar}
    cut, within = "an archive that is cut off; what comes before was read", places["a/u3.flac"][1] + 100
    damaged = "a damaged archive; what comes before was read"
    flipped = bytearray(whole)
    flipped[places["a/u3.flac"][0] + 150] ^= 1
    cases = {
        "half": (whole[:within], 3, {cut: ["x.tar: a/u3.flac"]}),
        "at-a-border": (whole[: places["a/u3.flac"][0]], 3, {cut: ["x.tar after a/u2.json"]}),
        "between": (whole[: places["a/u3.txt"][0]], 3, {cut: ["x.tar after a/u3.flac"], "no text": ["x.tar/a/u3"]}),
        "header": (bytes(flipped), 3, {damaged: ["x.tar after a/u2.json"]}),
        "none": (b"no tar at all" * 100, 0, {"no tar archive": ["x.tar after the start"]}),
        "alone": (None, 3, {"no text": ["x.tar/b"], "a text without its audio": ["x.tar/c"], "not JSON": ["x.tar/d"],
                            "no audio that FFmpeg knows": ["x.tar/e.flac"]}),
    }  # fmt: skip
    for name, (data, count, left_out) in cases.items():
        path = tmp_path / name / "x.tar"
        flac = (packed / "files/u0.flac").read_bytes()
        if data is None:
            pack(path, [("a.flac", flac), ("a.txt", b"A"), ("a.flac", flac), ("a.txt", TEXTS[1].encode()),
                        ("b.flac", flac), ("c.txt", b"A"), ("d.flac", flac), ("d.json", b"{"), ("e.flac", b"flac"),
                        ("e.txt", b"A"), ("f.g.flac", flac), ("f.txt", TEXTS[2].encode())])  # fmt: skip
        else:
            path.parent.mkdir()
            path.write_bytes(data)
        for _ in range(2):
            corpus = corpora.Recordings([path], configuration())
            assert [x.text for x in corpus.utterances] == TEXTS[:count], name
            assert dict(corpus.report.names) == left_out, name
    assert f"left out, {cut}: 1 (x.tar: a/u3.flac)" in said(["check", tmp_path / "half/x.tar", "--rate", RATE], 1).out
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(whole))
    refused(["check", tmp_path / "x.tar.gz"], "x.tar.gz is compressed by gzip, so that no part can be read alone")
    refused(["check", f"{packed}/web/part-{{000..003}}.tar"], "lacks 2 of 4 files")
    for name in ("none*.tar", "none?.jsonl"):
        refused(["check", tmp_path / name], f"{name} matches no file")
    with pytest.raises(lists.ListError, match=r"none\.jsonl does not exist"):
        archives.all_shards(tmp_path / "none.jsonl")
    shutil.copytree(packed / "nemo", tmp_path / "nemo")
    (tmp_path / "nemo/audio_1.tar").unlink()
    refused(["check", tmp_path / "nemo/tarred_audio_manifest.json"], "names 1 tars that are not beside it: number 1")
    shutil.copytree(packed / "shar", tmp_path / "shar")
    (tmp_path / "shar/recording.000001.tar").unlink()
    refused(["check", tmp_path / "shar"], "cuts.000001.jsonl.gz lacks the tar of its recordings beside it")


class Failing:
    """`open`, which fails some times."""

    def __init__(self, times):
        self.times = times

    def __call__(self, *args, **kwargs):
        self.times -= 1
        if self.times >= 0:
            raise OSError(5, "Input/output error")
        return open(*args, **kwargs)


def test_storage_of_a_run(source, tmp_path, monkeypatch):
    """Storage that comes back changes nothing; where it stays away the run ends, and goes on with the same bits."""
    monkeypatch.setattr(storage, "WAITS", (0, 0))
    config = configuration(**source, batch=4, buffer=5)
    found = opened_source(config, tmp_path)
    whole = batches_of(found, 0, 6)
    monkeypatch.setattr(storage, "open", Failing(2), raising=False)
    again = opened_source(config, tmp_path / "other")
    equal(batches_of(again, 0, 6), whole)
    assert storage.open.times < 0
    cut = opened_source(config, tmp_path)
    first = batches_of(cut, 0, 2)
    state = json.loads(json.dumps(cut.at(2)))
    monkeypatch.setattr(storage, "open", Failing(10**9), raising=False)
    if not source["on_the_fly"]:  # what is remembered needs no storage
        return equal(first | batches_of(cut, 2, 6), whole)
    with pytest.raises(asr.system.UserError, match=r"/packed.* cannot be read \(Input/output error; tried 3 times"):
        batches_of(cut, 2, 6)
    monkeypatch.undo()
    monkeypatch.setattr(order, "LEAST", 5)
    monkeypatch.setattr(road, "FULL", 0)
    equal(first | batches_of(opened_source(config, tmp_path, known=state, step=2), 2, 6), whole)


def batches_of(found, first, end):
    """{step: batch} of a corpus."""
    return dict(zip(range(first, end), found.read(first, end)))


def equal(a, b):
    assert a
    chex.assert_trees_all_equal(a, b)


def rows_of(batches):
    """(features without padding, labels) of the valid rows."""
    return [(x["features"][i, : x["lengths"][i]], tuple(x["targets"][i, : x["target_lengths"][i]]))
            for x in batches for i in np.flatnonzero(x["valid"])]  # fmt: skip


@pytest.fixture(params=["web", "bare.jsonl", "remembered"])
def source(request, packed, monkeypatch):
    """Options of sources: one whose lengths are known at the start, one whose headers are read within windows of 5
    utterances, and one that remembers features.
    """
    monkeypatch.setattr(order, "LEAST", 5)
    monkeypatch.setattr(road, "FULL", 0)
    kept = request.param == "remembered"
    return {"train": str(packed / ("bare.jsonl" if kept else request.param)), "on_the_fly": not kept}


def test_epochs_are_exact(source, tmp_path):
    """Each epoch has each utterance once, with its features and labels; in another order each time."""
    web = source["train"].endswith("web")
    readers = 3 if web else 1  # more than there are tars: each reads a part of every tar
    config = configuration(**source, batch=4, buffer=5, readers=readers)
    found = opened_source(config, tmp_path)
    assert found.written == (web or not source["on_the_fly"]) and found.order.windows == (1 if found.written else 3)
    expected = [found.extractor(samples(i)) for i in range(COUNT)]
    orders = []
    for epoch in (1, 2):
        batches = dict(enumerate(found.read(found.place[0], None, until=epoch)))
        assert [x.pop("last") for x in batches.values()] == [False] * (len(batches) - 1) + [True]
        assert not found.written or found.steps(epoch) == found.place[0]
        rows = rows_of(batches.values())
        which = [next(i for i, x in enumerate(expected) if len(x) == len(row)) for row, _ in rows]
        assert sorted(which) == [*range(COUNT)]
        for i, (row, labels) in zip(which, rows):
            np.testing.assert_allclose(row, expected[i], atol=1e-5 if source["on_the_fly"] else 4e-3)  # float16
            assert "".join("ABC "[k] for k in labels) == TEXTS[i]
        orders.append(which)
    assert orders[0] != orders[1] and not found.report.names
    turns = [found.order.sequence(*x, (40,) * len(found.order.shapes)) for x in ((0, 0), (0, 1), (1, 0))]
    assert len(found.order.shapes) > 1 and len({x.tobytes() for x, _ in turns}) == 3
    edge = found.order.shapes[0].seconds
    assert found.order.bucket(np.array([edge, edge + 0.01])).tolist() == [0, 1]


def test_lengths():
    """Of a part of a recording, and of what is written, which may be a little less than there is."""
    entry = Entry("a", pathlib.Path("a"), "")
    ways = {"start": 1.5, "end": 3.5}, {"start": 1.5, "whole": 3.5}, {"whole": 3.5}, {}
    assert [index.written(entry._replace(**x)) for x in ways] == [2, 2, 3.5, 0]
    assert index.longest(np.array([2.0])) >= 2.04


def test_the_same_whoever_works(source, tmp_path):
    """Batches do not depend on workers, on where a run resumed, on the process that makes them; but on the epoch."""
    (tmp_path / "noise").mkdir()
    audio.write(tmp_path / "noise/n.wav", np.sin(np.arange(4000)), RATE)
    more = {"speeds": [0.9, 1.1], "noise": str(tmp_path / "noise"), "gain": 6.0, "batch": 4, "buffer": 3}
    config, fly = configuration(**source, readers=2, **more), source["on_the_fly"]
    found, kept = opened_source(config, tmp_path), None if fly else tmp_path / "kept"
    whole = batches_of(found, 0, 2)
    state = found.at(2)
    whole |= dict(enumerate(found.read(2, None, until=2), 2))
    end = len(whole)
    assert [x.pop("last", False) for x in whole.values()] == [False] * (end - 1) + [True]
    # Two workers have copies of their own, and find headers that nobody has read.
    again = opened_source(config, tmp_path / "other")
    work = functools.partial(road.batch_of, order.Batches(again.order, 0, 0, until=2), again.loads)
    copies = [pickle.loads(pickle.dumps(work)) for _ in range(2)]
    made = {i: copies[i % 2](i) for i in reversed(range(end))}
    assert [x.pop("left_out") for x in made.values()] == [[]] * end and copies[0](end) == copies[1](end + 9) == {}
    equal(dict(sorted(made.items())), whole)
    later = opened_source(config, tmp_path, known=state, step=2)
    equal(batches_of(later, 2, end), {i: x for i, x in whole.items() if i >= 2})
    drawn = [reader.epoch(epoch)[1].tolist() for reader in found.order.readers for epoch in (0, 1)]
    assert len({tuple(x[:5]) for x in drawn}) == 4  # versions, by the reader and the epoch
    tones = {len(x) for x, _ in rows_of(whole.values())}
    assert len(tones) > COUNT  # other speeds in other epochs
    first = (int(x[0]) for x in found.order.sequence(0, 0, found.order.most(0, 0)))
    _, shape, items = found.order.batch(0, 0, *first)
    one, other = (found.loads(epoch, shape, items) for epoch in (0, 1))
    assert (one["features"] != other["features"]).any() == fly  # versions that are remembered are drawn once
    assert (one["spans"] != other["spans"]).any()
    # Each of two processes has the rows of its own reader.
    both = []
    for part in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(road.hosts, "part", lambda part=part: (part, 2))
            both.append(road.Source(config, tmp_path, 0, state, 2, kept))
    assert [list(x.own) for x in both] == [[0], [1]]
    shards = [set(one.indices[0].listed) for one in both]
    assert not shards[0] & shards[1] and shards[0] | shards[1] == {x for one in found.indices for x in one.listed}
    rows = whole[0]["features"].shape[0] // 2
    for one, half in zip(both, (slice(0, rows), slice(rows, None))):
        readers = [x for x in found.order.readers if x.number == one.own[0]]
        mine = order.Order(readers, found.order.shapes, config.run.seed, found.order.window)
        loaded = one.loader(ABC, mine.shapes)
        (shape, *_), (number, *_) = found.order.sequence(0, 0, found.order.most(0, 0))
        batch = loaded(*mine.batch(0, 0, shape, number))
        for name in ("features", "spans", "targets", "valid"):
            np.testing.assert_array_equal(batch[name], whole[0][name][half])
    # With other readers or options the epoch begins anew, from the step at which the run is.
    later = found.at(end)
    assert (state["epoch"], later["epoch"]) == (0, 2)
    for known in (later | {"readers": 3}, later | {"options": "others"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(road.hosts, "part", lambda: (1, 2))
            anew = opened_source(config, tmp_path, known=known, step=end)
        assert anew.state["first"] == [end, 2] and anew.readers == 2
    if not fly:  # an epoch of the earlier order had 12 recordings at 3 speeds, without noise and with it, by four
        epochs = [opened_source(config, tmp_path, known=road.EARLIER, step=n).first[1] for n in (17, 40)]
        assert epochs[0] == 0 and 1 <= epochs[1] <= 40 // (12 * 3 * 2 // 4)


def test_what_breaks_on_the_way(packed, tmp_path):
    """Bad audio is found when its turn comes, and named once in all epochs; all else is there."""
    flac = (packed / "files/u3.flac").read_bytes()
    files = [[(f"u{i}.flac", (packed / f"files/u{i}.flac").read_bytes()), (f"u{i}.txt", TEXTS[i].encode())]
             for i in range(COUNT)]  # fmt: skip
    files[3][0] = ("u3.flac", flac[:60] + bytes(len(flac) - 60))
    files[4][1] = ("u4.txt", b"AXB")
    files[5][1] = ("u5.txt", b"ABCABCABCABCABCABCABC")
    pack(tmp_path / "a.tar", itertools.chain(*files))
    config = configuration(train=str(tmp_path / "a.tar"), on_the_fly=True, max_seconds=0.82)
    expected = {
        "longer than 0.82 s": ["a.tar/u11.flac"],
        "characters outside the vocabulary": ["a.tar/u4.flac"],
        "fewer frames than labels": ["a.tar/u5.flac"],
        "damaged audio": ["a.tar/u3.flac"],
    }
    found = opened_source(config, tmp_path)
    batches = batches_of(found, 0, found.steps(2))
    assert {k: sorted(x) for k, x in found.report.names.items()} == expected
    assert len(rows_of(batches.values())) == 2 * (COUNT - 4)


def test_weights(packed, tmp_path):
    """An epoch of a weighted mix is a number of draws; all utterances of a source come before any comes again."""
    web, nemo = str(packed / "web"), str(packed / "nemo")
    assert archives.weighted(f"{web}:0.75") == (web, 0.75) and archives.weighted(f"{web}:x") == (f"{web}:x", None)
    assert archives.weighted("f.py:f:0.5") == ("f.py:f:0.5", None)
    (tmp_path / "a:0.5").write_text("")
    assert archives.weighted(str(tmp_path / "a:0.5"))[1] is None
    assert sources.absolute(f"{web}/*.tar:0.5") == f"{web}/*.tar:0.5"

    def draws(epochs=3, **options):
        found = opened_source(configuration(on_the_fly=True, **options), tmp_path)
        kinds = np.zeros(len(found.indices[0].shards), int)
        kinds[found.items[0][1]] = 1
        each = [found.order.readers[0].epoch(i)[0] for i in range(epochs)]
        return kinds, each

    for weights in ({"train": [f"{web}:9", f"{nemo}:1"], "temperature": 0.5}, {"train": [f"{web}:3", f"{nemo}:1"]}):
        kinds, each = draws(**weights)
        assert [np.bincount(kinds[x]).tolist() for x in each] == [[18, 6]] * 3  # of 24 utterances
    first = collections.Counter(np.concatenate([x[kinds[x] == 0] for x in each]).tolist())
    assert len(first) == COUNT and max(first.values()) - min(first.values()) <= 1
    with pytest.raises(asr.system.UserError, match="a weight behind each"):
        draws(train=[f"{web}:3", nemo])
    with pytest.raises(asr.system.UserError, match="weights are for --train"):
        corpora.open_corpus([f"{web}:3", nemo], configuration(), "train")


def test_the_buffer():
    """Shards are permuted whole, and an utterance moves by as much as the buffer holds at most."""
    shards = np.repeat(np.arange(50), np.arange(50) % 7 + 20)
    for buffer in (0, 1, 100):
        found = order.shuffled(np.random.default_rng(0), shards, buffer)
        assert sorted(found) == [*range(len(shards))]
        ranks = list(dict.fromkeys(shards[order.shuffled(np.random.default_rng(0), shards, 1)]))
        plain = np.concatenate([np.flatnonzero(shards == k) for k in ranks])
        place = np.empty(len(shards), int)
        place[plain] = np.arange(len(shards))
        moved = np.abs(place[found] - np.arange(len(shards)))
        assert ranks != sorted(ranks) and moved.max() <= buffer
        assert buffer < 2 or moved.max() > buffer // 2
    sizes = np.random.default_rng(1).integers(1, 100, 400)
    dealt = order.dealt(sizes, 8)
    assert sorted(itertools.chain(*dealt)) == [*range(400)] and np.ptp([sizes[x].sum() for x in dealt]) < 100


@pytest.mark.slow
def test_a_run(packed, tmp_path, capsys, refused, monkeypatch, said, signals):
    """Two epochs; a run by a worker that is stopped within one goes on without it, with the same losses.

    Once from tars, and once in windows of utterances whose lengths nothing tells.
    """
    usual = ["--valid", packed / "all.jsonl", "--rate", RATE, "--mels", 6, "--encoder", "convolutional", "--width", 8]
    usual += ["--blocks", 1, "--convolution", 3, "--channels", 2, "--batch", 4, "--buckets", 1, "--epochs", 2]
    usual += ["--save-every", 3, "--log-every", 1, "--devices", 1, "--joint", "logits", "--learning-rate", 0.01]
    command = ["train", "--train", packed / "bare.jsonl", *usual, "--buffer", 5, "--save-every", 2]
    monkeypatch.setattr(order, "LEAST", 5)
    monkeypatch.setattr(road, "FULL", 0)
    out = said([*command, "--workdir", tmp_path / "windows", "--on-the-fly"]).out
    whole = losses(tmp_path / "windows")
    assert "2 epochs of about 5 batches" in out and "within windows of 5 utterances" in out and len(whole) == 10
    shutil.rmtree(tmp_path / "windows/checkpoints/10")
    again = ["train", "--workdir", tmp_path / "windows", "--resume", "--devices", 1]
    run([*again, "--workers", 1])  # from step 8, in the second window of the second epoch
    assert "best test" not in said(again).out.rpartition("CER")[2] and losses(tmp_path / "windows") == whole
    (tmp_path / "kill.py").write_text(
        "import multiprocessing\nhook = lambda i, x: i == 3 and [y.kill() for y in multiprocessing.active_children()]\n"
    )
    run([*command, "--workdir", tmp_path / "killed", "--workers", 1, "--hook", f"{tmp_path}/kill.py:hook"], 2)
    error = capsys.readouterr().err
    assert "unexpectedly with exit code -9; it may have needed more memory than there is; step " in error
    assert f" is saved: rnnt-speech train --workdir {tmp_path / 'killed'} --resume goes on" in error
    assert 2 < len(losses(tmp_path / "killed")) < 10
    run([x if x != tmp_path / "windows" else tmp_path / "killed" for x in again])
    assert losses(tmp_path / "killed") == whole
    command = ["train", "--train", packed / "web", *usual]
    out = said([*command, "--workdir", tmp_path / "a"]).out
    assert "2 epochs of 3 batches" in out and "12 utterances" in out and "padding" in out
    (tmp_path / "hook.py").write_text(
        "import os\nend = lambda i, x: i == 1 and 'loss' in x and os.kill(os.getpid(), 2)\n"
    )
    run([*command, "--workdir", tmp_path / "b", "--workers", 1, "--hook", f"{tmp_path}/hook.py:end"], 130)
    capsys.readouterr()
    run(["train", "--workdir", tmp_path / "b", "--resume", "--devices", 1])
    assert losses(tmp_path / "b") == losses(tmp_path / "a") and len(losses(tmp_path / "a")) == 6
    shutil.copytree(packed / "web", tmp_path / "web")
    more = [*command[:1], "--train", tmp_path / "web", *usual, "--workdir", tmp_path / "b", "--resume"]
    refused(more, f"holds a run with --train {packed}/web, got {tmp_path}/web: --change allows that")
    shutil.copy(packed / "web/part-001.tar", packed / "web/part-002.tar")
    refused([*command, "--workdir", tmp_path / "b", "--resume"], "holds a run with other training utterances")
    run([*command, "--workdir", tmp_path / "b", "--epochs", 3, "--resume", "--change"])
    assert "epoch 3 begins anew, in another order: the run had other data" in capsys.readouterr().out
    assert losses(tmp_path / "b")[:6] == losses(tmp_path / "a") and len(losses(tmp_path / "b")) > 6
    (packed / "web/part-002.tar").unlink()
