"""Manifests of every dialect, audio files of every format, and the command `check`."""

import csv
import gzip
import json
import pathlib
import struct

import av
import numpy as np
import pytest
import scipy.io.wavfile

from jax_rnnt_speech.data import audio, augmentation, corpora, rows, sources
from jax_rnnt_speech.data.names import SUFFIXES
from jax_rnnt_speech.recognition import recognise, transcripts
from recordings import RATE, SWEEP, TIMES, cut, encode
from support import asr, configuration, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """a.wav of 3 s, b.flac of two channels, and c.opus at 48 kHz."""
    folder = tmp_path_factory.mktemp("reading")
    encode(folder / "a.wav")
    encode(folder / "b.flac", np.stack([SWEEP, -0.5 * SWEEP]))
    encode(folder / "c.opus", np.interp(np.arange(3 * 48000) / 48000, TIMES, SWEEP), 48000)
    return folder


def listed(path, **options):
    """[(name, text, start, end, channel)] of the entries, with a speaker that is known; {reason: [names]}."""
    entries, faults = [], {}
    for x in sources.read(path, **options):
        if isinstance(x, rows.Entry):
            assert x.audio.is_file(), x
            entries.append((x.name, x.text, x.start, x.end, x.channel, *[x.speaker] * bool(x.speaker)))
        else:
            faults.setdefault(x.reason, []).append(x.name)
    return entries, faults


BAD = [  # what is wrong with a line that is good otherwise, or a line, and why it is left out
    ({"start": 1, "end": 2, "duration": 3}, "end and duration contradict each other"),
    ({"offset": 1, "start": 2}, "offset and start contradict each other"),
    ({"start": 2, "end": 2}, "the end is not after the start"),
    ({"frame_offset": 8000}, "the key frame_offset is not in seconds: give start and end"),
    *(({"channel": x}, "channel is no number from 0 on") for x in ("left", -1)),
    ({"segments": [{"text": "x"}]}, "a segment without start and end"),
    ({"segments": "x"}, "segments are no list of objects"),
    ({"offset": 1, "segments": [{"start": 0, "end": 1, "text": "x"}]}, "segments of a segment are not read"),
    ({"segments": [{"start": 0, "end": 1}]}, "no text"),
    *(({"text": x}, "the text is no string of characters") for x in (["A"], "\ud800")),
    ({"audio": None}, "no name of an audio file"),
    *(({"audio": x}, "the name of the audio is no string of characters") for x in ("\ud800.wav", 5, True)),
    *(
        ({"start": 0, "duration": x}, "duration is no number of seconds")
        for x in ("nan", True, -1, [], "long", 10**400)
    ),
    ({"offset": 1, "duration": 0}, "duration is no number of seconds above 0"),
    *(({"channel": x}, "channel is no number from 0 on") for x in (1.5, True, [], [0, "x"], {})),
    ({"audio": "https://example.org/a.wav"}, "an address of https: only files of this computer are read"),
    ({"audio": "file://server/a.wav"}, "an address of a file on another computer"),
    *((x, "not JSON") for x in ("{", "[" * 100_000)),
    *((x, "not an object with keys") for x in ('"x"', "[1]")),
]


# Keys that choose no samples: the channel and the speaker that they give a line, and a note about what is not read.
OPTIONAL = [
    *(({"speaker": x}, None, "12", None) for x in (12, 12.0, "12")),
    *(({"speaker": x}, None, "", None) for x in (np.nan, None, "")),
    *(({"speaker": x}, None, "", "the speaker is no name") for x in (["x"], {}, "\ud800")),
    *(({"channels": x, "num_channels": x, "sampling_rate": 8000.0}, None, "", None) for x in (1, 2, "1", np.nan)),
    *(({"channel": x}, 1, "", None) for x in (1, 1.0, "1", "1.0")),
    *(({key: [0.0, 1]}, (0, 1), "", None) for key in ("channel", "channels", "channel_selector")),
    ({"channel": np.nan, "offset": np.nan, "end": None, "segments": np.nan, "start_ms": np.nan}, None, "", None),
    *(({"duration": x}, None, "", None) for x in (np.nan, None, "", 3, "3.0")),
    *(({"duration": x}, None, "", "duration is no number of seconds") for x in ("nan", True, -1, [], 10**400)),
    ({"duration": 0}, None, "", "duration is no number of seconds above 0"),
    ({"lang": np.nan, "id": 5, "snr": {}, "tags": [1]}, None, "", None),
]


def test_optional_keys(folder):
    """What only statistics need leaves no line out, whatever tools write where there is nothing."""
    rows = [{"audio": "b.flac", "text": "good"} | x for x, *_ in OPTIONAL]
    (folder / "optional.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = corpora.Recordings(folder / "optional.jsonl", configuration(rate=RATE))
    assert [(x.channel, x.speaker) for x in corpus.entries] == [(channel, name) for _, channel, name, _ in OPTIONAL]
    assert [len(corpus.samples(i, None)) for i in range(len(rows))] == [3 * RATE] * len(
        rows
    ) and not corpus.report.names
    notes = [x for *_, x in OPTIONAL if x]
    assert {what: len(names) for what, names in corpus.report.notes.items()} == {x: notes.count(x) for x in notes}
    assert next(corpus.report.lines()) == "used all the same, the speaker is no name: 3 (b.flac, b.flac, b.flac)"


def test_sums_of_times(folder):
    """0.2 + 0.4 meets 0.6, in either order, and other segments overlap by what anyone can hear."""
    rows = [{"start": 0.2, "duration": 0.4}, {"start": 0.6, "end": 0.2 + 0.4 + 0.2}, {"start": 0.8, "end": 1}]
    rows += [{"start": 1.1 + 2.2 - 2, "offset": 1.3, "end": 2}, {"offset": 0.1 + 0.2, "start": 0.3, "end": 0.3}]
    (folder / "sums.jsonl").write_text("\n".join(json.dumps({"audio": "a.wav", "text": "x"} | x) for x in rows))
    *entries, fault = sources.read(folder / "sums.jsonl")
    assert fault == ("the end is not after the start", "sums.jsonl line 5") and 0.2 + 0.4 > 0.6
    names = transcripts.names_of(entries)
    assert {*names.values()} == {"a"}
    words = [transcripts.timing.Interval(a, b, "x") for a, b in ((0.6, 0.8), (0.2, 0.2 + 0.4))]
    assert [(x.start, x.end) for x in transcripts.in_order(words)] == [(0.2, 0.6), (0.6, 0.8)]
    overlap = [x._replace(end=x.end + 0.01) for x in entries]
    assert len({*transcripts.names_of(overlap).values()}) == len(entries)


def test_places(folder, tmp_path, monkeypatch):
    """~, addresses of files and the paths of Windows name the same file; a file of that very name comes first."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b#1%.wav").symlink_to(folder / "a.wav")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/~").mkdir()
    for name in ("c.wav", "~/own.wav"):
        (tmp_path / "sub" / name).symlink_to(folder / "a.wav")
    address = pathlib.Path(tmp_path / "a b#1%.wav").as_uri()
    names = ["~/a b#1%.wav", address, address.replace("file://", "file://localhost"), address.replace("//", "", 1)]
    names += [address.replace("file", "FILE").replace("%23", "#"), "..\\a b#1%.wav", "~/own.wav", "c.wav"]
    (tmp_path / "sub/m.jsonl").write_text("".join(json.dumps({"audio": x, "text": ""}) + "\n" for x in names))
    found = [x.audio for x in sources.read(tmp_path / "sub/m.jsonl")]
    assert all(x.is_file() for x in found) and found[-2] == tmp_path / "sub/~/own.wav"
    assert {str(x.resolve().parent) for x in found} == {str(folder)}


def test_own_lines(folder):
    """offset, start, end, duration, channel and segments say what is read; what contradicts itself is named.

    A byte order mark and ends of lines that only Unicode knows do no harm.
    """
    parts = [{"start": 0, "end": 1, "text": "x", "speaker": "me"}, {"start": 1, "end": 2, "text": "y"}]
    good = [
        {"audio": "a.wav", "text": "whole\u2028\x85", "duration": 3.0},
        {"audio": "a.wav", "text": None, "offset": 0, "duration": 1, "speaker_id": 7},
        {"audio": "b.flac", "text": "two", "start": 0.5, "end": 1.25, "channel": 1},
        {"audio": "b.flac", "text": "three", "offset": 2, "duration": None, "channel_selector": [0, 1]},
        {"audio": "a.wav", "channel": 0, "segments": parts, "speaker": "you"},
    ]
    lines = [json.dumps(x, ensure_ascii=False) for x in good]
    lines += [x if isinstance(x, str) else json.dumps({"audio": "a.wav", "text": "x"} | x) for x, _ in BAD]
    (folder / "own.jsonl").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    entries, faults = listed(folder / "own.jsonl")
    assert entries == [
        ("a.wav", "whole\u2028\x85", 0.0, None, None),
        ("a.wav from 0 s to 1 s", "", 0.0, 1.0, None, "7"),
        ("b.flac from 0.5 s to 1.25 s", "two", 0.5, 1.25, 1),
        ("b.flac from 2 s", "three", 2.0, None, (0, 1)),
        ("a.wav from 0 s to 1 s", "x", 0.0, 1.0, 0, "me"),
        ("a.wav from 1 s to 2 s", "y", 1.0, 2.0, 0, "you"),
    ]
    found = {name.removesuffix(" segment 1"): reason for reason, names in faults.items() for name in names}
    assert found == {f"own.jsonl line {i}": reason for i, (_, reason) in enumerate(BAD, 1 + len(good))}
    for name in (5, True):  # as rows are read whose audio is in an archive
        row = {"audio": name, "text": "x", "start": 0, "end": 1}
        (fault,) = rows.entries_of_row(row, lambda x: x, "a row", rows.keys_of())
        assert fault == ("the name of the audio is no string of characters", "a row")
    (folder / "own.json").write_text(json.dumps([*good[:2], 3], indent=1))
    assert listed(folder / "own.json") == (entries[:2], {"not an object with keys": ["own.json item 3"]})
    noted, named, _ = sources.read(folder / "own.json", speaker_column="speaker_id")
    assert noted.notes == ("no speaker_id, which is to name the speaker",) and (named.speaker, named.notes) == ("7", ())


def test_nemo(folder):
    """Parts of a file; accents of its name may be characters of their own on the disk, or in the list."""
    for name in ("caf\u00e9.wav", "e\u0301te\u0301.wav"):
        (folder / name).symlink_to(folder / "a.wav")
    lines = '{"audio_filepath": "a.wav", "duration": 3.0, "text": "whole"}\n'
    lines += '{"audio_filepath": "a.wav", "offset": 1.5, "duration": 0.5, "text": "part", "lang": "en"}\n'
    others = "cafe\u0301.wav", "\u00e9t\u00e9.wav"
    lines += "".join(f'{{"audio_filepath": "{name}", "text": "other"}}\n' for name in others)
    (folder / "nemo.json").write_text(lines)
    expected = [("a.wav", "whole", 0.0, None, None), ("a.wav from 1.5 s to 2 s", "part", 1.5, 2.0, None)]
    expected += [(name, "other", 0.0, None, None) for name in others]
    assert listed(folder / "nemo.json") == (expected, {})


def test_hugging_face(folder, tmp_path):
    """`to_json` of a data set, and metadata.csv of a folder of audio."""
    whole = str(folder / "a.wav")
    row = {"client_id": "1", "path": whole, "audio": {"path": whole, "bytes": None}, "sentence": "good morning"}
    rows = row, row | {"audio": {"path": None, "bytes": "x"}}
    (tmp_path / "hf.jsonl").write_text("\n".join(map(json.dumps, rows)))
    entries, faults = listed(tmp_path / "hf.jsonl")
    assert entries == [(whole, "good morning", 0.0, None, None, "1")]
    assert faults == {"no name of an audio file": ["hf.jsonl line 2"]}
    (tmp_path / "a.wav").symlink_to(whole)
    (tmp_path / "metadata.csv").write_text('file_name,transcription\na.wav,"good, morning"\n')
    assert listed(tmp_path) == ([("a.wav", "good, morning", 0.0, None, None)], {})


def test_lhotse(folder):
    """Cuts: a supervision is a part of its cut, which is a part of the recording; what is no file is named."""
    file = {"type": "file", "channels": [0], "source": "a.wav"}
    said = {"id": "s", "recording_id": "r", "start": 0.25, "duration": 1.0, "channel": 0, "text": "hello"}
    said |= {"speaker": "z"}
    two = {"type": "file", "channels": [0, 1], "source": "b.flac"}
    rows = [
        cut([file], [said, said | {"id": "t", "start": 1.25, "duration": 0.5}]),
        cut([two], [said | {"channel": 1}], type="MultiCut", channel=[0, 1]),
        cut([{"type": "command", "channels": [0], "source": "sox"}], [said]),
        cut([file], [said | {"start": 1.5}]),
        cut([file], [said | {"channel": 3}]),
        {"id": "m", "tracks": [], "type": "MixedCut"},
        cut([file], []),
    ]
    with gzip.open(folder / "cuts.jsonl.gz", "wt") as out:
        out.write("\n".join(map(json.dumps, rows)) + "\n")
    entries, faults = listed(folder / "cuts.jsonl.gz")
    parts = ("s", 0.75, 1.75, 0), ("t", 1.75, 2.25, 0), ("s", 0.75, 1.75, 1)
    assert entries == [(name, "hello", *where, "z") for name, *where in parts]
    line = "cuts.jsonl.gz line {}".format
    assert faults == {
        "a source of Lhotse that is no file is not read": [f"{line(3)} (r-0)"],
        "a supervision of Lhotse that goes beyond its cut": [f"{line(4)} (r-0)"],
        "no source of Lhotse has the channel": [f"{line(5)} (r-0)"],
        "a mixed cut of Lhotse is not read": [line(6)],
        "a cut of Lhotse without supervisions": [line(7)],
    }
    with pytest.raises(asr.system.UserError, match=r"/cuts\.jsonl\.gz has no columns or keys .*: leave out --text-col"):
        listed(folder / "cuts.jsonl.gz", text_column="text")
    (folder / "cut.jsonl.gz").write_bytes((folder / "cuts.jsonl.gz").read_bytes()[:-20])
    with pytest.raises(asr.system.UserError, match=r"cut\.jsonl\.gz is not readable: "):
        listed(folder / "cut.jsonl.gz")


def test_kaldi(folder, tmp_path):
    """wav.scp and text, with and without segments; commands are not run."""
    marker = tmp_path / "ran"
    (tmp_path / "wav.scp").write_text(f"a {folder}/a.wav\nb {folder}/b.flac\nc touch {marker} |\nd {folder}/a.wav\n")
    (tmp_path / "text").write_text("a GOOD MORNING\nb\nc NO\ne NO\n")
    (tmp_path / "utt2spk").write_text("a me\n")
    assert listed(tmp_path) == (
        [("a", "GOOD MORNING", 0.0, None, None, "me"), ("b", "", 0.0, None, None)],
        {
            "a command in wav.scp is not run": ["c"],
            "a text without its recording": ["e"],
            "a recording without a text": ["d"],
        },
    )
    (tmp_path / "m.jsonl").write_text(json.dumps({"sound": f"{folder}/a.wav", "text": "YES"}))
    found = sources.read_all([tmp_path / "m.jsonl", tmp_path], "sound")
    notes = [x.notes for x in found if isinstance(x, rows.Entry)]
    assert notes == [(), *[("--audio-column names no column of theirs",)] * 2]
    for form, texts in ((tmp_path, True), (folder, False)):
        with pytest.raises(asr.system.UserError, match=r"has no columns .*: leave out --audio-column"):
            listed(form, audio_column="sound", texts=texts)
    (tmp_path / "segments").write_text("u1 a 0.5 1.25\nu2 b 1 -1 1\nu3 x 0 1\nu4 a 1\nu5 a 2 1\nu6 a 0 1\n")
    (tmp_path / "text").write_text("".join(f"u{i} WORD {i}\n" for i in range(1, 6)))
    assert listed(tmp_path / "wav.scp") == (
        [("u1", "WORD 1", 0.5, 1.25, None), ("u2", "WORD 2", 1.0, None, 1)],
        {
            "a segment of a recording that wav.scp lacks": ["u3"],
            "no segment: expected a recording, a start and an end": ["u4"],
            "the end is not after the start": ["u5"],
            "a recording without a text": ["u6"],
        },
    )
    assert not marker.exists()
    assert [x.name for x in recognise.listed([tmp_path / "segments"])] == [f"u{i}" for i in (1, 2, 3, 4, 5, 6)]


def test_common_voice(folder, tmp_path):
    """Its columns, files in `clips`, and quotes that belong to the sentences, as its tool writes none for csv."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips/a.wav").symlink_to(folder / "a.wav")
    lines = ["client_id\tpath\tsentence\tup_votes\tsegment"]
    sentences = ["Good morning.", '"Who\'s there?" she said.', 'He said "no".', '"Unpaired', 'A 12" disc', '"again']
    sentences += ['"one', 'two"']
    lines += [f"x\ta.wav\t{text}\t2\t" for text in sentences]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    entries, faults = listed(tmp_path / "train.tsv")
    assert [x[1::4] for x in entries] == [(text, "x") for text in sentences] and not faults


@pytest.mark.parametrize(("suffix", "delimiter"), [("tsv", "\t"), ("csv", ","), ("csv", ";")])
def test_tables(folder, suffix, delimiter):
    """What Python's csv writes comes back, with other names of columns too; a row of another length is named."""
    said = ['a "quoted" word', "a, comma; and\ttab", "two\nlines", "plain"]
    path = folder / f"table.{suffix}"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(["id", "clip", "said", "offset", "duration", "channel"])
        rows.writerows([i, "b.flac", text, 0.5, 1, 1] for i, text in enumerate(said))
        rows.writerow(["x", "b.flac", "short"])
        rows.writerow(["y", "b.flac", "whole", "", "", ""])
        file.write("x" * 200_000)
    entries, faults = listed(path, audio_column="clip", text_column="said", speaker_column="id")
    expected = [*((text, 0.5, 1.5, 1, str(i)) for i, text in enumerate(said)), ("whole", 0.0, None, None, "y")]
    assert [x[1:] for x in entries] == expected
    assert faults == {"another number of columns than in the first line": [f"table.{suffix} line {i}" for i in (7, 9)]}
    run = {"audio_column": ["none", "clip"], "text_column": ["said"], "speaker_column": ["id"]}
    assert listed(path, **run)[0] == entries and len(listed(path, **run | {"speaker_column": ["none"]})[0]) == 5
    for columns, message in (
        ({}, r"must have one of the columns audio, .* \(--audio-column names another"),
        ({"audio_column": "clip", "text_column": "words"}, r"must have the column words in its first line \(--text"),
        (run | {"speaker_column": "voice"}, r"must have the column voice in its first line \(--speaker-column"),
    ):
        with pytest.raises(asr.system.UserError, match=message):
            listed(path, **columns)


def test_tables_of_other_tools(folder):
    """Spellings of what is missing, numbers of columns with gaps, suffixes: as pandas, polars and Excel have them."""
    for nothing in ("", "NaN", "nan", "None", "null", "<NA>"):
        lines = ["path,text,start,end,channel,speaker", "b.flac,NaN,0.5,1.5,1.0,7.0"]
        lines += [f"b.flac,null{f',{nothing}' * 3},"]
        (folder / "TABLE.CSV").write_text("\n".join(lines))
        expected = [("b.flac from 0.5 s to 1.5 s", "NaN", 0.5, 1.5, 1, "7"), ("b.flac", "null", 0.0, None, None)]
        assert listed(folder / "TABLE.CSV") == (expected, {}), nothing
    (folder / "TABLE.Tsv").write_text("path\ttext\na.wav\tx,y\n")
    (folder / "lines.ndjson").write_text('{"path": "a.wav", "text": "x,y"}\n')
    with gzip.open(folder / "LINES.JSONL.GZ", "wt") as file:
        file.write((folder / "lines.ndjson").read_text())
    for name in ("TABLE.Tsv", "lines.ndjson", "LINES.JSONL.GZ"):
        assert sources.is_list(folder / name)
        assert listed(folder / name) == ([("a.wav", "x,y", 0.0, None, None)], {})


def test_folders(folder, tmp_path):
    """LibriSpeech's with any audio, and a text beside each file; what lacks the other half is named."""
    for i, name in enumerate(("a.wav", "b.flac", "c.opus")):
        for place in ("libri/1/2", "pairs"):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            (tmp_path / place / f"1-2-{i}{name[1:]}").symlink_to(folder / name)
    (tmp_path / "libri/1/2/other.wav").symlink_to(folder / "a.wav")
    (tmp_path / "libri/1/2/1-2.trans.txt").write_text("\ufeff1-2-0 GOOD MORNING\n1-2-1 YES\n/etc/passwd NO\nother SO\n")
    expected = [("1-2-0.wav", "GOOD MORNING"), ("1-2-1.flac", "YES")]
    entries, faults = listed(tmp_path / "libri")
    assert [(x[0], x[1], x[5]) for x in entries[:2]] == [(f"1/2/{name}", text, "1") for name, text in expected]
    assert entries[2][:2] == ("1/2/other.wav", "SO") and len(entries[2]) == 5 and len(entries) == 3
    missing = {"an audio file without a text": ["1/2/1-2-2.opus"]}
    assert faults == missing | {"a text without its audio file": ["1-2.trans.txt line 3"]}
    (tmp_path / "pairs/1-2-0.txt").write_text("\ufeffGOOD MORNING\n")
    (tmp_path / "pairs/1-2-1.TXT").write_text("YES")
    (tmp_path / "pairs/other.txt").write_text("NO")
    entries, faults = listed(tmp_path / "pairs")
    assert [(x[0], x[1].strip()) for x in entries] == expected
    assert faults == {"an audio file without a text": ["1-2-2.opus"], "a text without its audio file": ["other.txt"]}
    (tmp_path / "pairs/1-2-2.txt").write_text("A")
    (tmp_path / "pairs/1-2-2.wav").symlink_to(folder / "a.wav")
    (tmp_path / "linked").mkdir()
    (tmp_path / "pairs/loop").symlink_to(tmp_path / "linked")
    for name in ("one", "two"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "pairs")
    entries, faults = listed(tmp_path / "linked")  # a link to the same folder, and one back
    assert [x[0] for x in entries] == [f"one/1-2-{i}.{x}" for i, x in enumerate(("wav", "flac", "opus"))]
    assert faults["a second audio file for the same text"] == ["one/1-2-2.wav"]
    assert len(augmentation.noises_of(tmp_path / "linked")) == 4
    (tmp_path / "empty").mkdir()
    (tmp_path / "kaldi").mkdir()
    (tmp_path / "kaldi/wav.scp").write_text("a a.wav\n")
    with pytest.raises(asr.system.UserError, match=r"/kaldi is not readable: text: No such file"):
        list(sources.read(tmp_path / "kaldi"))
    with pytest.raises(asr.system.UserError, match=r"holds no \*\.trans\.txt as LibriSpeech does"):
        listed(tmp_path / "empty")
    (tmp_path / "empty/part").mkdir()
    (tmp_path / "empty/part/train.tsv").write_text("clip\na.wav\n")
    (tmp_path / "empty/part/durations.tsv").touch()
    for texts in (True, False):
        with pytest.raises(asr.system.UserError, match=r"to read a manifest, name it \(such as .*part/train\.tsv\)"):
            listed(tmp_path / "empty", texts=texts)


def test_recordings_without_texts(tmp_path):
    """What is to be transcribed needs no texts: files of a folder, rows, recordings of Kaldi.

    In a folder, files have the names that FFmpeg knows of the forms that are read, but those of pictures and subtitles.
    """
    names = {x for form in audio.FORMATS.split(",") for x in av.format.ContainerFormat(form, "r").extensions}
    others = {"avif", "heic", "heif", "mj2", "mks", "apl", "mac"}
    assert len(names) > 30 and names - others <= {x[1:] for x in SUFFIXES}
    with pytest.raises(asr.system.UserError, match="--audio-column clip names a column, and no FILE is a manifest"):
        list(recognise.listed([tmp_path / "a.sph"], "clip"))
    for name in ("a.sph", "b/c.wav", "b/c.txt", "b/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    expected = [("a.sph", "", 0.0, None, None), ("b/c.wav", "", 0.0, None, None)]
    assert listed(tmp_path, texts=False) == (expected, {})
    (tmp_path / "list.tsv").write_text("clip\na.sph\nb/c.wav\n")
    assert listed(tmp_path / "list.tsv", audio_column="clip", texts=False) == (expected, {})
    (tmp_path / "list.jsonl").write_text('{"audio": "a.sph"}\n{"audio": "b/c.wav", "text": 5}\n')
    assert listed(tmp_path / "list.jsonl", texts=False) == (expected, {})
    assert listed(tmp_path / "list.jsonl")[1] == {
        "no text": ["list.jsonl line 1"],
        "the text is no string of characters": ["list.jsonl line 2"],
    }
    (tmp_path / "wav.scp").write_text("one a.sph\ntwo b/c.wav\n")
    assert [x[0] for x in listed(tmp_path, texts=False)[0]] == ["one", "two"]


def test_bytes_that_are_no_utf8(tmp_path):
    """A line with such a text is named, in every dialect, and the others are read; UTF-16 has a mark."""
    encode(tmp_path / "a.wav")
    contents = {
        "m.jsonl": b'{"audio": "a.wav", "text": "A"}\n{"audio": "a.wav", "text": "caf\xe9"}\n',
        "m.tsv": b"path\tsentence\tclient\na.wav\tA\t\xe9\na.wav\tcaf\xe9\t1\n",
        "wav.scp": b"u a.wav\nv a.wav\n",
        "text": b"u A\nv caf\xe9\n",
        "l/1.trans.txt": b"a A\nb caf\xe9\n",
    }
    (tmp_path / "l").mkdir()
    for name in ("a.wav", "b.wav"):
        (tmp_path / "l" / name).symlink_to(tmp_path / "a.wav")
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    lines = {"m.jsonl": "m.jsonl line 2", "m.tsv": "m.tsv line 3", "wav.scp": "v", "l": "1.trans.txt line 2"}
    for name, line in lines.items():
        entries, faults = listed(tmp_path / name)
        assert [x[1] for x in entries] == ["A"] and faults == {"the text is not UTF-8": [line]}
    for kind in ("utf-16", "utf-16-be"):  # spreadsheets' "Unicode text"
        data = "\ufeff" * (kind != "utf-16") + "path\tsentence\r\na.wav\té\r\n"
        (tmp_path / "m.tsv").write_bytes(data.encode(kind))
        assert listed(tmp_path / "m.tsv") == ([("a.wav", "é", 0.0, None, None)], {})
    (tmp_path / "m.tsv").write_bytes(data.encode(kind)[:-1])
    with pytest.raises(asr.system.UserError, match=r"m\.tsv is UTF-16 with damaged characters"):
        listed(tmp_path / "m.tsv")


def test_segments_and_channels(folder):
    """Decoded time and the channel decide, in compressed files as well."""
    whole = audio.read(folder / "b.flac", RATE, channel=1)
    np.testing.assert_allclose(whole, -0.5 * SWEEP, atol=2e-5)
    np.testing.assert_allclose(audio.read(folder / "b.flac", RATE), 0.25 * SWEEP, atol=2e-5)
    for path in ("b.flac", "c.opus"):
        file = audio.stretches(folder / path)
        rate, channel = file[0].rate, 1 if path == "b.flac" else 0
        whole = audio.read(folder / path, rate, channel=channel)
        for start, end in ((0.0, 0.5), (0.123, 2.5), (2.9, None), (1.5, 3.05)):
            part = audio.read(folder / path, rate, start, end, channel)
            last = None if end is None else round(end * rate)
            np.testing.assert_array_equal(part, whole[round(start * rate) : last])
            assert audio.size(file, rate, start, end) == len(part)
    for options, reason in (
        ({"start": 3.0}, "a segment beyond the end of its file"),
        ({"start": 2.0, "end": 3.2}, "a segment beyond the end of its file"),
        ({"channel": 2}, "no channel 2: the first is 0, and the file has 2"),
        ({"channel": (0, 5)}, "no channel 5: the first is 0, and the file has 2"),
    ):
        with pytest.raises(audio.AudioError) as caught:
            audio.read(folder / "b.flac", RATE, **options)
        assert caught.value.reason == reason


def test_reasons(tmp_path):
    """One for each cause; a playlist opens no other file, however it is called."""
    encode(tmp_path / "good.wav")
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("hello " * 99)
    (tmp_path / "list.wav").write_text(f"ffconcat version 1.0\nfile {tmp_path}/good.wav\n")
    (tmp_path / "list.mp3").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\n{tmp_path}/good.wav\n")
    (tmp_path / "picture.mp4").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    with av.open(str(tmp_path / "film.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for part in (av.VideoFrame(16, 16, "yuv420p"), None):
            file.mux(stream.encode(part))
    data = (tmp_path / "good.wav").read_bytes()
    (tmp_path / "rate.wav").write_bytes(data[:24] + struct.pack("<I", 10**9) + data[28:])
    scipy.io.wavfile.write(tmp_path / "wide.wav", RATE, np.zeros(RATE, np.int64))
    for name, reason in {
        "wide.wav": "samples of an unknown form, s64",
        "gone.wav": "no such file",
        "\0.wav": "no such file",
        "good.wav/x.wav": "no such file",
        "": "a folder, not a file",
        "/dev/zero": "a device or pipe, not a file",
        "empty.wav": "an empty file",
        **dict.fromkeys(("text.wav", "list.wav", "list.mp3", "picture.mp4"), "no audio that FFmpeg knows"),
        "film.mp4": "a file without a track of audio",
        "rate.wav": "a sample rate of 1000000000 Hz",
        # A damaged AAC whose frames get 18 channels, of which PyAV would read memory that is not theirs.
        pathlib.Path(__file__).with_name("broken") / "channels.aac": "audio of more than 8 channels",
    }.items():
        with pytest.raises(audio.AudioError) as caught:
            audio.read(tmp_path / name, RATE)
        assert caught.value.reason == reason, name


def test_corpus_of_segments(folder):
    """Frames are those of the segment, and `load` gives its samples."""
    rows = [{"offset": 0.5, "duration": 1, "channel": 1}, {"text": "B"}, {"offset": 2.5, "duration": 1}]
    rows = [{"audio": "b.flac", "text": "A"} | x for x in rows] + [{"audio": "a.wav", "text": "C", "channel": 1}]
    (folder / "parts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = corpora.Recordings(folder / "parts.jsonl", configuration(rate=RATE))
    assert [x.text for x in corpus.utterances] == ["A", "B", "A"]
    assert audio.read(corpus.entries[2].audio, RATE, 2.5).size == len(corpus.samples(2, None)) == RATE // 2
    np.testing.assert_allclose(corpus.samples(0, None), -0.5 * SWEEP[RATE // 2 : 3 * RATE // 2], atol=2e-5)
    assert corpus.utterances[0].frames == 1 + (16000 - 400) // 160
    assert dict(corpus.report.notes) == {audio.OVERRUN: ["b.flac from 2.5 s to 3.5 s"]}
    assert dict(corpus.report.names) == {
        "no channel 1: the first is 0, and the file has 1": ["a.wav"],
    }


def test_check(folder, capsys, tmp_path, refused, said):
    """Figures of a corpus, by hand; the status says whether something is left out, or all."""
    rows = [{"audio": "a.wav", "text": f"Word {i}"} for i in range(12)] + [{"audio": "b.flac", "text": "é"}]
    (folder / "check.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = json.loads(said(["check", folder / "check.jsonl", "--json", "--normalize", "basic"]).out)
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
    assert found["utterances"] == 13 and found["hours"] == pytest.approx(13 * 3 / 3600)
    assert found["words"] == 25 and found["left_out"] == {}
    assert found["characters"] == 12 * 5 + sum(map(len, words)) + 1
    assert found["labels"] == len(set("word " + "".join(words) + "é"))
    out = said(["check", folder / "check.jsonl", "--normalize", "basic"]).out
    assert "13 utterances, 0.0108 hours" in out and "'Word 1' -> 'word one'" in out
    assert len([x for x in out.splitlines() if " -> " in x]) == 10 and " x 298 frames x " in out
    rows = {"audio": "a.wav", "text": "It cost $5.", "speaker": []}, {"audio": "b.flac", "text": "$5 and $5, 007 and 7"}
    (tmp_path / "left.jsonl").write_text("\n".join(json.dumps(x | {"audio": f"{folder}/{x['audio']}"}) for x in rows))
    command, names = ["check", tmp_path / "left.jsonl"], [f"{folder}/a.wav", f"{folder}/b.flac"]
    found = json.loads(said([*command, "--normalize", "basic", "--json"]).out)
    assert found["not_read_aloud"] == {"$5": names, "007": names[1:]} and not found["left_out"]
    assert found["notes"] == {"the speaker is no name": names[:1]}
    out = said([*command, "--normalize", "basic"]).out
    assert f"not read aloud, $5: 2 ({names[0]}, {names[1]})" in out and "in 2 utterances: 2 different" in out
    assert f"used all the same, the speaker is no name: 1 ({names[0]})" in out
    assert json.loads(said([*command, "--json"]).out)["not_read_aloud"] == {}  # texts as they are
    run(["check", folder / "check.jsonl", folder / "none.jsonl", "--alphabet", "Word 0123456789", "--json"], 1)
    found, error = capsys.readouterr()
    left = {"characters outside the vocabulary": ["b.flac"], "does not exist": [str(folder / "none.jsonl")]}
    assert json.loads(found)["left_out"] == left
    assert error == f"reading {folder / 'check.jsonl'} (1 file of manifest)\n"
    (tmp_path / "c.json").write_text('{"batch_seconds": 60, "encoder": "whisper", "new_head": true}')  # no --init
    run(["check", folder / "check.jsonl", "--config", tmp_path / "c.json", "--batch", 2])
    assert "batches: 2 x" in capsys.readouterr().out
    for more, message in (
        ([folder / "none.jsonl", "--normalize", "basic:xx"], "--normalize basic:xx has no numbers in words"),
        (["--rate", 30], "a window of 25 ms has fewer than two samples at --rate 30"),
    ):
        refused(["check", folder / "check.jsonl", *more], message)
    (tmp_path / "nothing.jsonl").write_text("\n")
    run(["check", tmp_path / "nothing.jsonl", folder / "check.jsonl", "--json"], 1)
    assert json.loads(capsys.readouterr().out)["left_out"] == {"nothing is listed": ["nothing.jsonl"]}
    (tmp_path / "bad.jsonl").write_text("{")
    found, error = said(["check", tmp_path / "bad.jsonl", "--json"], 2)
    assert json.loads(found)["left_out"] == {"not JSON": ["bad.jsonl line 1"]} and error.count("\n") == 2
