"""Error rates: counts, intervals and differences of texts, and what the command `test` makes of a corpus."""

import csv
import functools
import itertools
import json
import shutil

import numpy as np
import pytest

from jax_rnnt_speech.cli import testing
from jax_rnnt_speech.data import batches, corpora
from jax_rnnt_speech.recognition import errors
from jax_rnnt_speech.recognition.search import GREEDY
from jax_rnnt_speech.training.evaluation import Evaluation
from support import asr, write_audio


@functools.cache
def distance(a, b):
    """The fewest edits, by trying every one."""
    if not a or not b:
        return len(a) + len(b)
    return min(distance(a[1:], b[1:]) + (a[0] != b[0]), distance(a[1:], b) + 1, distance(a, b[1:]) + 1)


def test_counts():
    """The fewest edits, as trying all of them finds; their kinds by hand; both texts can be told from a difference."""
    texts = [x for n in range(4) for x in itertools.product("ab", repeat=n)]
    for a, b in itertools.product(texts, texts):
        found = errors.counted(a, b)
        assert found.errors == distance(a, b) and len(a) - found.deletions == len(b) - found.insertions
    x = errors.tested("u", "s", 2.0, "the cat sat on the mat", "a the hat sat on mat")
    assert x.words == (1, 1, 1, 6) and x.words.rate == 50
    assert errors.difference(x.reference, x.hypothesis) == "{+a+} the [-cat-]{+hat+} sat on [-the-] mat"
    assert x.characters == (2, 4, 1, 22)
    empty = errors.tested("v", "t", 1.0, "", "so")
    assert empty.words == (1, 0, 0, 0) and empty.words.rate == float("inf")
    assert errors.summed([x.words, empty.words]) == (2, 1, 1, 6)
    assert errors.confusions([x, empty, x], 1) == [(("", "a"), 2)]
    assert errors.confusions([x], 9) == [(("", "a"), 1), (("cat", "hat"), 1), (("the", ""), 1)]
    assert list(errors.by_speaker([x, empty])) == ["t", "s"] and errors.by_speaker([x._replace(speaker="")]) == {}
    assert errors.worst([empty, x], 1) == [x]
    one, two = (errors.tested(text, "", 1.0, text, "") for text in ("one", "one two"))
    assert errors.worst([two, one, one._replace(name="a")], 3)[0] == two
    assert errors.worst([x._replace(words=x.words._replace(length=9)), x], 1) == [x]  # as many errors in fewer words


def test_interval():
    """Of one word each, errors are binomial: the interval is that of its normal approximation."""
    wrong = np.arange(2000) % 5 == 0
    low, high = errors.interval([errors.Counts(0, 0, int(x), 1) for x in wrong])
    half = 100 * 1.96 * (0.2 * 0.8 / 2000) ** 0.5
    np.testing.assert_allclose([low, high], [20 - half, 20 + half], atol=0.25)
    assert errors.interval([errors.Counts(0, 0, 1, 4)] * 3) == [25, 25]
    assert errors.interval([errors.Counts(0, 0, 1, 4)]) is None
    assert errors.interval([errors.Counts(1, 0, 0, 0)] * 2) == [200, 200]  # no words: per cent of one


@pytest.mark.slow
def test_of_a_corpus(corpus, trained, tmp_path, monkeypatch, said):
    """Figures are those of the texts that `transcribe` prints, also of utterances that no training takes."""
    (tmp_path / "a.py").write_text("def plain(x): return x.replace('!', '')\n")
    write_audio(tmp_path / "long.wav", 21.0)
    write_audio(tmp_path / "short.wav", 0.001)
    listed = sorted(corpus.rglob("*.flac"))
    texts = dict.fromkeys(map(str, listed), "A AB") | {f"{tmp_path}/long.wav": "C! Ω", f"{tmp_path}/short.wav": "B A"}
    lines = [{"audio": name, "text": text, "speaker": len(name) % 2} for name, text in texts.items()]
    lines += [{"audio": "missing.wav", "text": "A"}, {"audio": str(listed[0]), "text": ""}]
    manifest = tmp_path / "m.jsonl"
    manifest.write_text("".join(json.dumps(x) + "\n" for x in lines))
    heard = dict(line.split("\t") for line in said(["transcribe", "--model", trained[0], *texts]).out.splitlines())
    workdir = shutil.copytree(trained[0], tmp_path / "run")
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # cut off
    command = ["test", "--model", workdir, manifest, "--normalize", f"{tmp_path}/a.py:plain"]
    out, error = said([*command, "--json", "--output", tmp_path / "o.jsonl"], 1)
    x = json.loads(out)
    assert list(x) == ["wer", "cer", "interval", "insertions", "deletions", "substitutions", "words", "utterances",
                       "left_out", "seconds_of_audio", "seconds"]  # fmt: skip
    assert x["left_out"] == {"no such file": ["missing.wav"], "empty transcript": [str(listed[0])]}
    assert "left out, no such file: 1 (missing.wav)" in error
    pairs = [(text.replace("!", ""), " ".join(heard[name].split())) for name, text in texts.items()]
    wrong = sum(distance(tuple(a.split()), tuple(b.split())) for a, b in pairs)
    assert x["utterances"] == 12 and x["words"] == sum(len(a.split()) for a, _ in pairs) == 24
    assert x["insertions"] + x["deletions"] + x["substitutions"] == wrong
    assert x["wer"] == pytest.approx(100 * wrong / 24) and x["interval"][0] <= x["wer"] <= x["interval"][1]
    letters = sum(errors.counted(a, b).errors for a, b in pairs)
    assert x["cer"] == pytest.approx(100 * letters / sum(len(a) for a, _ in pairs))
    assert x["seconds_of_audio"] == pytest.approx(21.001 + sum(0.3 + 0.05 * i for i in range(10)), abs=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [(row["reference"], row["hypothesis"]) for row in rows] == pairs
    assert {row["speaker"] for row in rows} == {"0", "1"}
    monkeypatch.setattr(testing, "SPEAKERS", 1)
    out, error = said([*command[:4], tmp_path / "nowhere", *command[4:], "--output", tmp_path / "o.tsv"], 1)
    assert f"left out, does not exist: 1 ({tmp_path}/nowhere)" in error and "and 1 more speakers, all with a low" in out
    assert f"WER {x['wer']:.1f}% (95% interval " in out and "1000 resamples" in out and "speaker " in out
    with (tmp_path / "o.tsv").open(newline="") as file:
        assert [row["difference"] for row in csv.DictReader(file, delimiter="\t")] == [y["difference"] for y in rows]


def test_what_cannot_be_tested(corpus, trained, tmp_path, refused, said):
    command = ["test", "--model", trained[0]]
    for more, message in (
        ([tmp_path / "nowhere"], "nowhere does not exist"),
        ([corpus / "all.jsonl", "--output", corpus / "all.jsonl"], "all.jsonl is one of the files that are read"),
        ([corpus / "all.jsonl", "--output", "x.txt"], "--output x.txt must end in .tsv or .jsonl"),
        ([corpus / "all.jsonl", "--output", tmp_path / "n/x.tsv"], "n is no folder"),
        ([corpus / "all.jsonl", "--ngram", "x"], "--ngram needs --beam"),
    ):
        refused([*command, *more], message)
    assert "batches for each update (1)\n" in said(["train", "--help"]).out  # a default of 1 is said


def test_rates_of_a_training(corpus, trained, tmp_path, said):
    """They are those of `test`, also of texts without a loss: too many labels, or characters that no label has."""
    rows = [json.loads(x) for x in (corpus / "all.jsonl").read_text().splitlines()][:4]
    rows[1]["text"], rows[3]["text"] = "A B " * 20, "AZ B"
    (corpus / "rates.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = asr.models.open_model(trained[0])

    def rates(numbers):
        (corpus / "some.jsonl").write_text("\n".join(json.dumps(rows[i]) for i in numbers))
        found = corpora.open_corpus(str(corpus / "some.jsonl"), model.config, "valid")
        data = batches.labelled(found, model.tokens, model.subsampling, held_out=True)
        config = model.config.replace(buckets=1)
        buckets = [x._replace(frames=60, labels=4) for x in batches.make_buckets(data, config, 1)]
        result, _ = Evaluation(model, data, buckets, lambda x: x, GREEDY).rates(model.params)
        return result, data.corpus.report.names

    (some, names), (two, _) = rates(range(4)), rates([0, 2])
    assert {x.removeprefix("from the loss alone, ") for x in names} == {
        "characters outside the vocabulary", "fewer frames than labels"}  # fmt: skip
    x = json.loads(said(["test", "--model", trained[0], corpus / "rates.jsonl", "--json"]).out)
    assert x["utterances"] == 4 and (some.wer, some.cer) == pytest.approx((x["wer"], x["cer"]))
    assert some.loss == pytest.approx(two.loss, rel=1e-5) and some.cer != two.cer
