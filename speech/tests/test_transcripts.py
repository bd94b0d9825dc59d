"""Words with their times, the forms of transcripts, and forced alignment."""

import json
import types

import numpy as np
import pytest
from praatio import textgrid

from jax_rnnt_speech import transcripts
from support import asr, run


@pytest.mark.parametrize("text", ["A AB  BA", " A", "B ", "", " ", "BAB"])
def test_words(text):
    """They are those of the text, of characters and of subwords; times and confidence by hand."""
    characters = asr.tokens.Characters("AB ")
    config = asr.config.Config(tokens="subwords", vocabulary=8)
    subwords = asr.tokens.train(config, ["A AB BA", "BAB A", "ABBA AB"] * 9)
    for tokens in (characters, subwords):
        labels = [int(x) for x in tokens.encode(text)]
        recogniser = types.SimpleNamespace(tokens=tokens, seconds=0.5)
        frames = 2 * np.arange(len(labels))
        found = transcripts.words(recogniser, labels, frames, np.log(0.5 + 0.01 * frames), start=10.0)
        assert [x.word for x in found] == text.split()
        if tokens is characters:
            first = {i for i, x in enumerate(text) if x != " " and (not i or text[i - 1] == " ")}
            last = {i for i, x in enumerate(text) if x != " " and text[i + 1 : i + 2] in ("", " ")}
            assert [x.start for x in found] == [10.0 + i for i in sorted(first)]
            assert [x.end for x in found] == [10.5 + i for i in sorted(last)]
            assert [x.confidence for x in found] == [round(0.5 + 0.02 * i, 4) for i in sorted(first)]
    recogniser = types.SimpleNamespace(tokens=characters, seconds=0.5)
    assert transcripts.words(recogniser, [0], [3], durations=[4], end=3.1) == [("A", 1.5, 3.1, None)]


def test_forms(corpus, trained, tmp_path, capsys):
    """Every form has the text; segments have the times of their file; what is bad is named, and the rest written."""
    files = [*sorted(corpus.rglob("*.flac"))[:2], corpus / "missing.flac"]
    manifest = tmp_path / "m.jsonl"
    lines = [{"audio": str(files[0]), "text": "A"}, {"audio": str(files[1]), "text": "A", "offset": 0.2}]
    manifest.write_text("".join(json.dumps(x) + "\n" for x in lines))
    command = ["transcribe", "--model", trained[0], "--beam", 3]
    run([*command, *files], 1)
    texts = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    run([*command, "--format", "json", "--nbest", 2, *files], 1)
    out, error = capsys.readouterr()
    found = json.loads(out)
    assert f"{corpus}/missing.flac: no such file" in error and [x["file"] for x in found] == list(map(str, files[:2]))
    for x in found:
        assert list(x) == ["file", "text", "duration", "words", "nbest"] and x["text"] == texts[x["file"]]
        assert " ".join(word["word"] for word in x["words"]) == " ".join(x["text"].split())
        assert all(0 <= y["start"] < y["end"] <= x["duration"] and 0 < y["confidence"] <= 1 for y in x["words"])
        assert x["nbest"][0]["text"] == x["text"] and len(x["nbest"]) == 2
        assert x["nbest"][0]["score"] >= x["nbest"][1]["score"]
    run([*command, "--format", "jsonl", "--output", tmp_path / "o.jsonl", manifest])
    whole, part = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert "nbest" not in whole and whole == {name: x for name, x in found[0].items() if name != "nbest"}
    assert part["duration"] < 0.3 and all(0.2 <= x["start"] < x["end"] <= 0.2 + part["duration"] for x in part["words"])
    run(["transcribe", "--model", trained[0], "--format", "json", corpus / "missing.flac"], 2)
    assert capsys.readouterr().err.splitlines()[-1] == "rnnt-speech: no recording could be used"
    for more, message in (
        (["--format", "ctm"], "--format ctm needs --output"),
        (["--nbest", 2], "--nbest needs --beam"),
    ):
        run(["transcribe", "--model", trained[0], files[0], *more], 2)
        assert message in capsys.readouterr().err


def test_align(corpus, trained, tmp_path, capsys):
    """The words of the texts in their order, within their files; texts outside the vocabulary are named."""
    files = sorted(corpus.rglob("*.flac"))[:3]
    texts = ["AB A", "C", "B Ω"]
    manifest = tmp_path / "m.jsonl"
    lines = [{"audio": str(file), "text": text} for file, text in zip(files, texts)]
    lines.append({"audio": str(files[2]), "text": "BA A", "offset": 0.2})
    manifest.write_text("".join(json.dumps(x) + "\n" for x in lines))
    command = ["align", "--workdir", trained[0], manifest]
    run([*command, "--output", tmp_path / "o.ctm"], 1)
    assert "left out, characters outside the vocabulary: 1" in capsys.readouterr().err
    rows = [line.split() for line in (tmp_path / "o.ctm").read_text().splitlines()]
    expected = dict(zip((x.stem for x in files), ("AB A", "C", "BA A")))
    for name, text in expected.items():
        mine = [row for row in rows if row[0] == name]
        assert [row[4] for row in mine] == text.split()
        starts = [float(row[2]) for row in mine]
        assert starts == sorted(starts) and starts[0] >= (0.2 if name == files[2].stem else 0)
        assert float(mine[-1][2]) + float(mine[-1][3]) < 0.8
    run([*command, "--format", "textgrid", "--output", tmp_path / "grids"], 1)
    grid = textgrid.openTextgrid(str(tmp_path / f"grids/{files[0].stem}.TextGrid"), includeEmptyIntervals=False)
    assert [x.label for x in grid.getTier("words").entries] == ["AB", "A"]
