"""Data as tools and people leave it: each kind of source, with what may be odd about it.

An utterance is a tone, and its text is the number of its hertz: so what is heard says whether a text is with its own
audio.
"""

import bz2
import gzip
import json
import lzma
import os
import re
import tarfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from jax_rnnt_speech.data import archives, audio, corpora, index, lists, sources
from jax_rnnt_speech.data import workers as processes
from jax_rnnt_speech.data.rows import ARRAY, Entry, Fault, keys_of
from jax_rnnt_speech.recognition import segments
from jax_rnnt_speech.system import UserError
from recordings import cut_of, parquet, tar, wav
from support import configuration

RATE = 8000
APPLE = bytes.fromhex("0005160700020000") + bytes(160)  # what a Mac writes into ._NAME
TARS, FILES = ("web", "nemo", "shar"), ("folder", "manifest", "kaldi")
KINDS = TARS + FILES
NFC, NFD = ("é/ü", "é/o"), tuple(unicodedata.normalize("NFD", x) for x in ("é/ü", "é/o"))


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Waiting for the disk would be half of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def tone(hertz):
    """A quarter of a second in a WAV file."""
    return wav(8000 * np.sin(2 * np.pi * hertz * np.arange(RATE // 4) / RATE), RATE)


def joined(members):
    """As `cat a.tar b.tar c.tar` makes it: an empty one is among them, and ends of one block and of many."""
    parts = [tar(members[i : i + 2]) for i in range(0, len(members), 2)]
    return (
        parts[0].rstrip(b"\0").ljust(-(-len(parts[0].rstrip(b"\0")) // 512) * 512 + 512, b"\0")
        + tar([])
        + b"".join(x + bytes(3 * 2**20) * (i == 0) for i, x in enumerate(parts[1:]))
    )


def of_a_mac(members):
    """As bsdtar writes a folder of a Mac: with what belongs to each file, and other things that are no data."""
    beside = [(re.sub("([^/]+)$", r"._\1", name), APPLE) for name, *_ in members]
    others = [
        ("__MACOSX/._x.wav", APPLE),
        (".DS_Store", b"x"),
        *((f"PaxHeaders.7/{x[0]}", b"9 a=b\n") for x in members),
    ]
    return tar([(f"./{x[0]}", *x[1:]) for pair in zip(beside, members) for x in pair] + others)


def linked(kind):
    """The last audio is a link to the first one."""

    def pack(members):
        first, last = [x for x in members if x[0].endswith(".wav")][:: len(members) // 2 - 1 or 1][:2]
        return tar([(x[0], first[0], kind) if x is last else x for x in members])

    return pack


def by_kind(members):
    """As `tar cf x.tar *.wav *.txt` does."""
    return tar(sorted(members, key=lambda x: x[0].rpartition(".")[2], reverse=True))


def built(kind, folder, sounds, texts, pack=tar):
    """The source of a kind that has (name, hertz) as audio, and as texts."""
    folder.mkdir(parents=True, exist_ok=True)
    waves = [(f"{name}.wav", tone(hertz)) for name, hertz in sounds]
    rows = [{"audio_filepath": f"{name}.wav", "text": str(hertz), "duration": 0.25} for name, hertz in texts]
    lines = "\n".join(map(json.dumps, rows))
    if kind == "web":
        files = waves + [(f"{name}.txt", str(hertz).encode()) for name, hertz in texts]
        (folder / "x.tar").write_bytes(pack(files if pack is by_kind else sorted(files, key=lambda x: x[0])))
        return folder / "x.tar"
    if kind == "nemo":
        (folder / "audio_0.tar").write_bytes(pack(waves))
        (folder / "manifest_0.json").write_text(lines)
        return folder / "audio_0.tar"
    if kind == "shar":
        (folder / "recording.000000.tar").write_bytes(pack(waves))
        with gzip.open(folder / "cuts.000000.jsonl.gz", "wt") as file:
            file.write("\n".join(json.dumps(cut_of(*x)) for x in texts))
        return folder
    for name, data in waves + [(f"{name}.txt", str(hertz).encode()) for name, hertz in texts * (kind == "folder")]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
        if pack is of_a_mac:
            (folder / name).with_name(f"._{Path(name).name}").write_bytes(APPLE)
    if kind == "manifest":
        (folder / "x.jsonl").write_text(lines)
        return folder / "x.jsonl"
    if kind == "kaldi":
        (folder / "wav.scp").write_text("".join(f"{name} {folder}/{name}.wav\n" for name, _ in sounds))
        (folder / "text").write_text("".join(f"{name} {hertz}\n" for name, hertz in texts))
    return folder


def tones_of(source, tmp_path):
    """(hertz of the texts that have audio, {reason: names}) of a source; the same by the rows of an index."""
    entries, reasons = [], {}
    for x in sources.read(source):
        reasons.setdefault(x.reason, []).append(x.name) if isinstance(x, Fault) else entries.append(x)
    keys, shards = keys_of(), archives.all_shards(source)
    found = index.indexed(shards, keys, tmp_path / "index")
    rows = [shards[k].entry(row.tolist(), keys) for k, row in zip(found.shards, found.rows)]
    again = [x for x in rows if isinstance(x, Entry)]
    assert [str(x.audio) for x in again] == [str(x.audio) for x in entries]
    assert len(found.faults) + len(rows) - len(again) == sum(map(len, reasons.values()))
    lengths = found.lengths(np.array([i for i, x in enumerate(rows) if x in again], int))
    used = []
    for x, length in zip(entries + again, [*lengths] * 2):
        try:
            samples = audio.read(x.audio, RATE, x.start, x.end, x.channel)
        except audio.AudioError as error:
            reasons.setdefault(error.reason, []).append(x.name)
            continue
        spectrum = np.abs(np.fft.rfft(samples))
        assert 4 * spectrum.argmax() == int(x.text), f"{x.name}: {x.text} Hz"
        assert abs(length - 0.25) < 1e-3
        used.append(int(x.text))
    assert used[: len(used) // 2] == used[len(used) // 2 :]
    return used[: len(used) // 2], reasons


def both(*names):
    """The same names for the audio and for the texts, with a tone for each."""
    some = [(x, 400 + 40 * i) for i, x in enumerate(names)]
    return some, some


TWO = both("one", "two")
# {what is odd: (kinds, (audio, texts), how a tar is packed, the texts that are used, what is said of the others)}
ODD = {
    "nothing": (KINDS, TWO, tar, [400, 440], ""),
    "joined": (TARS, both(*"abcdef"), joined, [400, 440, 480, 520, 560, 600], ""),
    "followed by others": (TARS, TWO, lambda x: tar(x) + b"no tar", [400, 440], "bytes behind the end of an archive"),
    "followed by much": (TARS, TWO, lambda x: tar(x) + b"a" * 9999, [400, 440], "bytes behind the end of an archive"),
    "of a Mac": (KINDS, TWO, of_a_mac, [400, 440], ""),
    "slashes": (KINDS, both("a/1", "b/1", "a/b/1"), tar, [400, 440, 480], ""),
    "dots": (KINDS, both("v1.0.1", "v1.0.2", "v1.1"), tar, [400, 440, 480], ""),
    "dots in some": (KINDS, both("a", "a.b", "a.c", "d"), tar, [400, 440, 480, 520], ""),
    "left out": (KINDS, (TWO[0][:1], TWO[1]), tar, [400], ""),
    "a namesake is there": (KINDS, ([("a/1", 400)], [("b/1", 440), ("a/1", 400)]), tar, [400], ""),
    "accents by a Mac": (KINDS, (both(*NFD)[0], both(*NFC)[1]), tar, [400, 440], ""),
    "accents in texts": (KINDS, (both(*NFC)[0], both(*NFD)[1]), tar, [400, 440], ""),
    "accents of two forms": (("nemo", "shar", "manifest", "kaldi"), ([(f"é/{NFD[0][3:]}", 400)], [("é/ü", 400)]), tar,
                             [400], ""),
    "no folders in the tar": (("nemo",), (TWO[0], [(f"/data/{x}", hertz) for x, hertz in TWO[1]]), tar, [400, 440], ""),
    "no folders in lines": (("nemo",), ([("a/1", 400), ("b/2", 440)], both("1", "2")[1]), tar, [400, 440], ""),
    "one for two": (("nemo",), ([("1", 400)], both("a/1", "b/1")[1]), tar, [],
                    "1.wav of audio_0.tar has no folder, and lines name it in several"),
    "two for one": (("nemo",), (both("a/1", "b/1")[0], [("1", 400)]), tar, [],
                    "two recordings of one name: a/1.wav and b/1.wav"),
    "two of one name": (("nemo", "shar"), ([("a/1", 400), ("a/1", 440)], [("a/1", 400)]), tar, [],
                        "two recordings of one name: a/1.wav at byte 0 and at byte"),
    "no name": (("web", "nemo", "shar"), both("", "a"), tar, [400, 440], ""),
    "hard links": (TARS, both("a", "b"), linked(tarfile.LNKTYPE), [400], "a link within the archive"),
    "soft links": (TARS, both("a", "b"), linked(tarfile.SYMTYPE), [400], "a link within the archive"),
    "apart": (("web",), both("b", "a"), by_kind, [400, 440], ""),
    "apart, with dots": (("web",), both(*(f"v1.{i}" for i in range(70))), by_kind, list(range(400, 3200, 40)), ""),
    "apart, and joined": (("web",), TWO, lambda x: by_kind(x) + tar(x[::2]),
        [], "two files of one name, apart"),
    "folders of their own": (("web",), ([("wavs/a", 400)], [("texts/a", 400)]), tar, [],
                             "no text; one of the same name is in another folder"),
    "arrays": (("web",), TWO, lambda x: tar([(y[0].replace("one.wav", "one.npy"), y[1]) for y in x]), [440],
               "an array (.npy) in place of audio"),
    "texts of another kind": (("web",), TWO, lambda x: tar([(y[0].replace("one.txt", "one.lab"), y[1]) for y in x]),
                              [440], "no text, but .lab"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd(odd, tmp_path):
    """Each text is with its own audio or it is named with the reason, read from the start and by an index."""
    kinds, (sounds, texts), pack, expected, reason = ODD[odd]
    for kind in kinds:
        found, reasons = tones_of(built(kind, tmp_path / kind, sounds, texts, pack), tmp_path / kind)
        assert sorted(found) == sorted(expected), f"{kind}: {found}, {reasons}"
        left = len(texts) > len(expected) or reason
        assert bool(reasons) == bool(left) and any(reason in x for x in reasons) == bool(left), f"{kind}: {reasons}"


def lines(path, rows):
    text = "\n".join(map(json.dumps, rows)).encode()
    if path.suffix == ".gz":  # of two members, as `cat a.gz b.gz` makes it
        place = text.find(b"\n") + 1
        text = gzip.compress(text[:place]) + gzip.compress(text[place:])
    path.write_bytes(text)


def table(path, rows):
    path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, x.values())) for x in rows)]))


def test_marks_to_skip(tmp_path):
    """NeMo skips a line whose _skipme is true in Python; of tables, what their words mean counts."""
    marks = [True, 1, "too long", "True", False, 0, "", None, "false", "0"]
    rows = [{"audio": f"{i}.wav", "text": str(400 + 4 * i), "duration": 0.25, "_skipme": x}
            for i, x in enumerate(marks)]  # fmt: skip
    for i in range(len(marks)):
        (tmp_path / f"{i}.wav").write_bytes(tone(400 + 4 * i))
    lines(tmp_path / "x.jsonl", rows)
    table(tmp_path / "x.csv", [x | {"_skipme": "" if x["_skipme"] is None else x["_skipme"]} for x in rows])
    waves = [(x["audio"], tone(int(x["text"]))) for x in rows]
    (tmp_path / "web.tar").write_bytes(tar([y for x, sound in zip(rows, waves) for y in (
        sound, (f"{sound[0][:-4]}.json", json.dumps(x).encode()))]))  # fmt: skip
    (tmp_path / "nemo").mkdir()
    (tmp_path / "nemo/audio_0.tar").write_bytes(tar(waves))
    lines(tmp_path / "nemo/manifest_0.jsonl.gz", rows)
    (tmp_path / "shar").mkdir()
    (tmp_path / "shar/recording.0.tar").write_bytes(tar(waves))
    cuts = [cut_of(str(i), x["text"], custom={"_skipme": x["_skipme"]}) for i, x in enumerate(rows)]
    lines(tmp_path / "shar/cuts.0.jsonl", cuts)
    every = ["x.jsonl", "x.csv", "web.tar", "nemo", "shar"]
    said = ["" if x["_skipme"] is None else str(x["_skipme"]) for x in rows]
    cells = [{"audio": {"bytes": data, "path": name}} for name, data in waves]
    parquet(tmp_path / "x.parquet", [x | y | {"_skipme": z} for x, y, z in zip(rows, cells, said)])
    every.append("x.parquet")
    for source in every:
        found, reasons = tones_of(tmp_path / source, tmp_path / f"of-{source}")
        assert found == [400 + 4 * i for i in range(4, len(marks))], source
        assert {x: len(names) for x, names in reasons.items()} == {"marked to be skipped (_skipme)": 4}, source
    corpus = corpora.Recordings([tmp_path / "x.jsonl"], configuration())
    assert len(corpus.report.names["marked to be skipped (_skipme)"]) == 4
    parts = {"audio": "0.wav", "segments": [{"start": 0, "end": 0.1, "text": "A", "_skipme": x} for x in (1, 0)]}
    lines(tmp_path / "parts.jsonl", [parts])
    assert [type(x) for x in sources.read(tmp_path / "parts.jsonl")] == [Fault, Entry]


ROWS = [{"audio": f"{x}.wav", "text": str(hertz)} for x, hertz in TWO[0]]
MORE = [*ROWS, ROWS[0]]
CUTS = [cut_of(*x) for x in TWO[0]]
# {what stands beside each other: (files, the source, a tar or tones, who says that it is left aside or None: an error)}
TWINS = {
    "compressed": ({"x.jsonl": ROWS, "x.jsonl.gz": ROWS}, "*.jsonl*", "x.jsonl.gz is not read"),
    "other forms": ({"x.json": ROWS, "x.jsonl": ROWS, "x.ndjson.gz": ROWS}, "x.*", "x.jsonl is not read"),
    "that differ": ({"x.jsonl": ROWS, "x.jsonl.gz": MORE}, "*.jsonl*", None),
    "accents": ({"é.jsonl": ROWS, f"{NFD[0][:2]}.jsonl": ROWS}, "*.jsonl", "is not read"),
    "accents that differ": ({"é.jsonl": ROWS, f"{NFD[0][:2]}.jsonl": MORE}, "*.jsonl", None),
    "tables": ({"metadata.jsonl": ROWS, "metadata.csv": ROWS}, "", "metadata.jsonl is not read"),
    "tables that differ": ({"metadata.jsonl": ROWS, "metadata.csv": MORE}, "", None),
    "Shar": ({"cuts.0.jsonl": CUTS, "cuts.0.jsonl.gz": CUTS, "recording.0.tar": TWO[0]}, "", "cuts.0.jsonl.gz is not"),
    "Shar that differ": ({"cuts.0.jsonl": CUTS, "cuts.0.jsonl.gz": CUTS[1:], "recording.0.tar": TWO[0]}, "", None),
    "all of Shar": ({"cuts.0.jsonl": CUTS, "recording.0.tar": TWO[0]}, "*", "recording.0.tar is not read by itself"),
    "NeMo": ({"manifest_0.json": ROWS, "manifest_0.jsonl.gz": ROWS, "audio_0.tar": TWO[0]}, "*.tar", "jsonl.gz is not"),
    "NeMo that differ": ({"manifest_0.json": ROWS, "manifest_0.jsonl": MORE, "audio_0.tar": TWO[0]}, "*.tar", None),
    "NeMo in two places": ({"manifest_0.json": ROWS, "sharded_manifests/manifest_0.json": MORE, "audio_0.tar": TWO[0]},
                           "audio_0.tar", None),
    "NeMo's common one": ({"tarred_audio_manifest.json": [x | {"shard_id": 0} for x in MORE], "audio_0.tar": TWO[0],
                           "sharded_manifests/manifest_0.json": ROWS}, "", "manifest_0.json, and not tarred_audio"),
    "all of NeMo": ({"tarred_audio_manifest.json": [x | {"shard_id": 0} for x in MORE], "audio_0.tar": TWO[0],
                     "sharded_manifests/manifest_0.json": ROWS}, "*", "is not read by itself"),
    "one of NeMo's": ({"manifest__OP_0..0_CL_.json": ROWS, "manifest_0.json": ROWS, "audio_0.tar": TWO[0]},
                      "manifest_{0..0}.json", ""),
    "tars": ({"x.tar": TWO[0], "x.tar.gz": TWO[0]}, "", "x.tar.gz is not read"),
}  # fmt: skip


@pytest.mark.parametrize("case", TWINS)
def test_what_stands_for_the_same(case, tmp_path, capsys):
    """It is read once, and a line says so; where it differs, an error names both."""
    files, source, said = TWINS[case]
    for name, rows in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if ".tar" in name:
            texts = [(f"{x}.txt", str(hertz).encode()) for x, hertz in rows * name.startswith("x.")]
            data = tar(sorted([(f"{x}.wav", tone(hertz)) for x, hertz in rows] + texts))
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        elif name.endswith(".csv"):
            table(path, rows)
        elif name == "x.json":
            path.write_text(json.dumps(rows))
        else:
            lines(path, rows)
    if not any(".tar" in x for x in files):
        for x, hertz in TWO[0]:
            (tmp_path / f"data/{x}.wav").write_bytes(tone(hertz))
    source = str(tmp_path / "data" / source) if source else tmp_path / "data"
    if said is None:
        with pytest.raises(lists.ListError) as error:
            tones_of(source, tmp_path)
        few = [x for x in files if ".tar" not in x]
        assert all(Path(x).name in str(error.value) for x in few), error.value
        return
    assert tones_of(source, tmp_path) == ([400, 440], {})
    assert said in capsys.readouterr().err


def test_what_is_refused(tmp_path, refused):
    """Compressed tars in any form, pipes, folders of datasets, arrays: in words that say what to do."""
    whole = tar([("a.wav", tone(400)), ("a.txt", b"400")])
    forms = {
        "x.tar.gz": gzip.compress(whole) * 2,
        "x.tgz": gzip.compress(whole[:99]) + gzip.compress(whole[99:]),
        "x.tar.bz2": bz2.compress(whole),
        "x.tar.xz": lzma.compress(whole),
        "y.tar": gzip.compress(whole),
    }
    for name, data in forms.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
        refused(["check", tmp_path / name], "so that no part can be read alone: unpack it")
    (tmp_path / "gzipped").mkdir()
    (tmp_path / "gzipped/a.tar.gz").write_bytes(gzip.compress(whole))
    refused(["check", tmp_path / "gzipped"], "so that no part can be read alone: unpack it")
    os.mkfifo(tmp_path / "pipe.tar")
    refused(["check", tmp_path / "pipe.tar"], "is a pipe or device, of which no part can be read alone")
    for name in ("saved/data-00000-of-00001.arrow", "split/train/data-00000-of-00001.arrow"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
        (tmp_path / name).with_name("dataset_info.json").write_text("{}")
        for source in (name.split("/")[0], name):
            refused(["check", tmp_path / source], "datasets.load_from_disk(FOLDER)[SPLIT].to_parquet(FILE)")
    lines(tmp_path / "x.jsonl", [{"audio": x, "text": "A"} for x in ({"array": [0.0], "sampling_rate": RATE}, [0.0])])
    assert [x.reason for x in sources.read(tmp_path / "x.jsonl")] == [ARRAY] * 2
    for i, cell in enumerate(([0.0, 0.1], {"array": [0.0, 0.1], "sampling_rate": RATE})):
        parquet(tmp_path / f"{i}.parquet", [{"audio": cell, "text": "A"}])
        assert [x.reason for x in sources.read(tmp_path / f"{i}.parquet")] == [ARRAY]


def test_names_of_files_and_segments(tmp_path, refused):
    """One look more says why there is no file; segments go with the one recording that their name means."""
    for name in ("a.flac", "B.WAV", NFD[0][3:] + ".wav", "x/audio.wav", "y/audio.wav", "z/other.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(tone(400))
    (tmp_path / "link.wav").symlink_to("nowhere.wav")
    reasons = {"a.wav": "no such file, but .flac", "b.wav": "no such file, but one with other capital letters",
               "link.wav": "a link to a file that is not there", "c.wav": "no such file"}  # fmt: skip
    for name, reason in reasons.items():
        with pytest.raises(audio.AudioError) as error:
            audio.read(tmp_path / name, RATE)
        assert error.value.reason == reason

    for name in ("ü.wav", f"{NFD[0][3:]}.wav"):  # whatever the disk has
        assert len(audio.read(tmp_path / name, RATE)) == RATE // 4
    for i, kind in enumerate(("web", "folder", "manifest")):
        forms = NFC[0], NFD[0]
        source = built(kind, tmp_path / kind / forms[i % 2], *both("a", "b"))
        other = Path(str(source).replace(*forms[:: 1 - 2 * (i % 2)]))
        for named in (other, f"{other}*"):
            assert tones_of(named, tmp_path) == ([400, 440], {}) and sources.is_list(Path(named))

    def cut(names, lines, form="rttm"):
        (tmp_path / f"t.{form}").write_text("".join(f"{x}\n" for x in lines))
        whole = [Entry(str(tmp_path / x), tmp_path / x, "") for x in names]
        return segments.entries(tmp_path / f"t.{form}", whole)

    rttm = "SPEAKER {} 1 0.000 0.100 <NA> <NA> Anna <NA> <NA>".format
    u = f"{NFD[0][3:]}.wav"
    for names, said in (
        ([u], "ü"),
        (["z/other.wav", u], "ü"),
        (["x/audio.wav", "z/other.wav"], "audio"),
        (["x/audio.wav", "y/audio.wav"], "x/audio"),
        (["x/audio.wav", "y/audio.wav"], "y/audio.wav"),
    ):
        found = cut(names, [rttm(said)])  # fmt: skip
        (used,) = (x for x in found if isinstance(x, Entry))
        assert unicodedata.normalize("NFC", str(used.audio)).endswith(said.partition(".")[0] + ".wav")
    for form, line in (("rttm", rttm("audio")), ("ctm", "audio 1 0.0 0.1 word")):
        with pytest.raises(UserError, match=r"audio may be .*x/audio\.wav or .*y/audio\.wav: name their folders"):
            cut(["x/audio.wav", "y/audio.wav"], [line], form)
    (tmp_path / "kaldi").mkdir()
    (tmp_path / "kaldi/wav.scp").write_text(
        f"a {tmp_path}/x/audio.wav\na {tmp_path}/y/audio.wav\nü {tmp_path}/z/other.wav\n"
    )
    (tmp_path / "kaldi/segments").write_text(f"a-1 a 0 0.1\n{NFD[0][3:]}-1 {NFD[0][3:]} 0 0.1\n")
    (tmp_path / "kaldi/text").write_text("a-1 A\nü-1 B\nü-1 C\n")
    found = list(sources.read(tmp_path / "kaldi"))
    assert [getattr(x, "text", "") for x in found] == ["", "B", ""] and found[
        2
    ].reason == "a second text of the same name"
    assert "x/audio.wav and" in found[0].reason and found[0].reason.endswith("y/audio.wav")
    (tmp_path / "x/audio.txt").write_text("A")
    (tmp_path / "x/x.trans.txt").write_text("audio A\n")
    assert [getattr(x, "reason", "") for x in sources.read(tmp_path / "x")] == [
        "",
        "a second text for the same audio file",
    ]


@pytest.mark.parametrize(("code", "said"), [(-9, "more memory than there is"), (-7, "/dev/shm"), (-11, "")])
def test_why_a_worker_ends(code, said):
    """SIGKILL is mostly that of a system without memory, and SIGBUS that of shared memory without room."""
    found = processes.cause(f"Worker process was terminated unexpectedly with exit code {code}")
    assert said in found and ("memory" in found) == (code == -9) and bool(found) == (code != -11)
