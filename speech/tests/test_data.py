"""Utterances that are read and left out, texts, features, labels and shapes of batches."""

import decimal
import itertools
import json
import re
import shutil
import unicodedata

import babel.numbers
import jax
import numpy as np
import pytest
import scipy.io.wavfile
import unicode_rbnf

from jax_rnnt_speech.config import Config, files
from jax_rnnt_speech.data import audio, batches, buckets, corpora, features, order, sources
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.training.evaluation import Evaluation
from support import CONVOLUTIONAL, TINY, asr, configuration, opened_source, write_audio


def test_several_sources(corpus, tmp_path):
    """One corpus of all; what lists nothing is named where corpora are tested, and an error of a training."""
    paths = [str(corpus / "all.jsonl"), str(tmp_path / "none"), str(corpus / "held-out.jsonl")]
    found = corpora.Recordings(paths, configuration(), lenient=True)
    assert len(found.utterances) == 12 and dict(found.report.names) == {"does not exist": [paths[1]]}
    assert len(corpora.open_corpus(paths[::2], configuration(), "train").utterances) == 12
    with pytest.raises(asr.system.UserError, match="none does not exist"):
        corpora.open_corpus(paths, configuration(), "train")
    found = {"train": paths, "valid": "a", "convolution": 3, "encoder": "whisper"}
    assert files.from_json(found | {"valid": ["a"]}, "") == found
    mixed = {"train": paths, "valid": "a", "synthetic": "b", "synthetic_share": 0.3}  # a training alone must know them
    assert files.from_json(mixed, "") == files.from_json({"data": mixed}, "") == {"train": paths, "valid": "a"}
    for tree in (mixed, {"data": mixed}):
        with pytest.raises(asr.system.UserError, match="x: there is no option synthetic any more, got b: name"):
            files.from_json(tree, "x", training=True)
    assert files.from_json({"data": mixed | {"synthetic": ""}}, "", training=True) == {"train": paths, "valid": "a"}
    sections = {"data": {"train": paths, "valid": "a"}, "blocks": {"convolution": 3}, "encoder": {"kind": "whisper"}}
    config = Config.from_options(**found)
    assert files.from_json(sections, "") == found and files.from_json(files.to_json(config), "") == (
        config.options()
        | {"train": paths, "strides": [[2, 2], [2, 2]], "durations": [0, 1, 2, 3, 4]}
        | {"speeds": [1.0], "snr": [5.0, 20.0], "rates": []}
    )


def test_check_says_the_batches_of_a_training(corpus, trained, said, tmp_path):
    """They are what a training with the same options prints, however it reads its utterances."""
    changes = {"speeds": [0.9, 1.1], "max_seconds": 0.7}, {"on_the_fly": True}, {"batch": 3, "buckets": 3}
    for change in ({}, *changes):
        options = TINY | CONVOLUTIONAL | {"train": str(corpus / "all.jsonl"), "valid": "v"} | change
        own = {name: x for name, x in options.items() if name not in ("heads", "expansion")}
        (tmp_path / "c.json").write_text(json.dumps(own))
        line = next(x for x in trained[1].splitlines() if x.startswith("batches: "))
        if change:
            line = opened_source(Config.from_options(**options), tmp_path).batches()
        out = said(["check", corpus / "all.jsonl", "--config", tmp_path / "c.json"], int("max_seconds" in change)).out
        (found,) = (x for x in out.splitlines() if x.startswith("batches: "))
        if "speeds" in change:  # the order of shards decides which speed an utterance has in the first epoch
            assert "; about " in line and "; about " in found
            line, found = (re.search(r", (\d+ x 68 frames x .*);.*;", x)[1] for x in (line, found))
        assert found == line, change
    (tmp_path / "c.json").write_text(json.dumps({"noise": str(tmp_path / "none")}))
    out = said(["check", corpus / "all.jsonl", "--rate", 8000, "--config", tmp_path / "c.json"]).out
    assert f"batches: none, as a training would be refused: --noise {tmp_path}/none is no folder" in out


def test_bad_data_is_left_out_by_name(tmp_path):
    """Each kind of bad data is in the report under its reason; the good utterance alone remains."""
    config = configuration(max_seconds=2.0, alphabet="ABC ", tokens="characters")
    write_audio(tmp_path / "good.wav", 0.5, rate=16000, channels=2)
    write_audio(tmp_path / "long.wav", 2.5)
    write_audio(tmp_path / "short.wav", 0.01)
    write_audio(tmp_path / "crowded.wav", 0.2)
    (tmp_path / "bad.wav").write_bytes(b"RIFF, not really")
    odd = {"nan": np.nan, "inf": np.inf, "loud": 1e30, "integers": 9000}
    for name, sample in odd.items():
        samples = np.r_[np.zeros(4000), sample].astype(np.float32)
        scipy.io.wavfile.write(tmp_path / f"{name}.wav", 8000, samples)
    rows = [("good.wav", "A  B", 0.5), ("long.wav", "A", 2.5), ("short.wav", "A", 0.01), ("crowded.wav", "ABCABC", 0.2)]
    rows += [("bad.wav", "A", 1), ("missing.wav", "A", 1), *((f"{name}.wav", "A", 0.5) for name in odd)]
    lines = [json.dumps(dict(zip(("audio", "text", "duration"), row))) for row in rows]
    for name, text, duration in (("empty.wav", "  ", 0.5), ("foreign.wav", "AXB", 0.5), ("wrong.wav", "A", 0.9)):
        write_audio(tmp_path / name, 0.5)
        lines.append(json.dumps({"audio": name, "text": text, "duration": duration}))
    (tmp_path / "m.jsonl").write_text("\n".join([*lines, "not JSON"]))
    corpus = corpora.Recordings(tmp_path / "m.jsonl", config)
    data = batches.labelled(corpus, asr.data.tokens.train(config.head, []), 4)
    assert [corpus.utterances[i].text for i in data.labels] == ["A B"]
    assert dict(corpus.report.names) == {
        "not JSON": ["m.jsonl line 14"],
        "longer than 2 s": ["long.wav"],
        "shorter than a frame": ["short.wav"],
        "fewer frames than labels": ["crowded.wav"],
        "no audio that FFmpeg knows": ["bad.wav"],
        "no such file": ["missing.wav"],
        "empty transcript": ["empty.wav"],
        "characters outside the vocabulary": ["foreign.wav"],
        "duration differs from the manifest's": ["wrong.wav"],
        "samples that are NaN or infinite": ["nan.wav", "inf.wav"],
        "samples far beyond full scale: floats must be in [-1, 1], and 10 is the limit": ["loud.wav", "integers.wav"],
    }
    with pytest.raises(batches.NothingLeft, match=r"no usable held-out utterance is left; .*, characters outside"):
        batches.labelled(corpus, asr.data.tokens.Characters("X"), 4, held_out=True)
    (tmp_path / "m.jsonl").write_text(lines[5])
    with pytest.raises(asr.system.UserError, match=r"no usable utterance; left out, no such file: 1 \(missing\.wav\)"):
        corpora.open_corpus(str(tmp_path / "m.jsonl"), configuration(), "train")


def test_audio_that_breaks_later(corpus, tmp_path):
    """A file that shrinks after it was listed makes a row that does not count, and a name in the report."""
    shutil.copytree(corpus, tmp_path / "c")
    config = configuration(buckets=1, **CONVOLUTIONAL)
    recordings = corpora.Recordings(tmp_path / "c", config)
    data = batches.labelled(recordings, asr.data.tokens.train(config.head, ["ABC "]), 4)
    (tmp_path / "c" / recordings.utterances[3].name).write_bytes(b"")
    found = batches.make_buckets(data, config, 1)
    tested = batches.testing(data, config, found, (0, 1))
    valid = {int(i): v for b in tested for i, v in zip(b["index"], b["valid"])}
    assert 3 not in valid and set(valid) - {-1} == set(range(10)) - {3}
    assert recordings.report.names["an empty file"] == [recordings.utterances[3].name]
    model = Model(config, data.corpus and asr.data.tokens.Characters("ABC "), [0.0] * 6, [1.0] * 6)
    tested = lambda data: Evaluation(model, data, batches.make_buckets(data, config, 1), lambda x: x, Decoding())
    rates = lambda data: tested(data).rates(model.params)[0]
    readable = data._replace(labels={i: x for i, x in data.labels.items() if i != 3})
    assert rates(data).loss == pytest.approx(rates(readable).loss, rel=1e-5)
    for i in data.labels:
        (tmp_path / "c" / recordings.utterances[i].name).write_bytes(b"")
    with pytest.raises(asr.system.UserError, match="no held-out utterance has readable audio"):
        rates(data)


def test_resampling(tmp_path):
    """A tone keeps its place among the filters, and the frames are those that the header promised."""
    config = configuration(mels=20)
    peaks = []
    for rate in (8000, 11025, 48000):
        time = np.arange(int(0.4 * rate) + 1) / rate  # no whole number of samples at 8 kHz
        audio.write(tmp_path / "a.wav", 0.3 * np.sin(2 * np.pi * 1000 * time), rate)
        samples = audio.read(tmp_path / "a.wav", 8000)
        size = audio.size(audio.stretches(tmp_path / "a.wav"), 8000)
        assert len(samples) == size == -(-len(time) * 8000 // rate)
        peaks.append(int(features.extractor(config)(samples).mean(0).argmax()))
    assert len(set(peaks)) == 1


def test_host_and_device_features():
    """The same spectra, against a discrete Fourier sum in float64."""
    config = configuration()
    samples = np.random.default_rng(0).normal(size=(2, 900)).astype(np.float32)
    extractor = features.extractor(config)
    host = extractor(samples)
    np.testing.assert_allclose(jax.jit(lambda x: extractor(x, jax.numpy))(samples), host, atol=1e-4)
    window = samples[1, 160:360].astype(np.float64) * np.hanning(200)
    angles = np.outer(np.arange(129), np.arange(200)) * 2 * np.pi / 256
    power = (window @ np.cos(angles).T) ** 2 + (window @ np.sin(angles).T) ** 2
    np.testing.assert_allclose(host[1, 2], np.log(power @ extractor.filters + 1e-6), atol=1e-4)


def test_masks():
    """Spans over time and features have the mean of what is kept, nothing else changes; they are as long as allowed."""
    config = configuration(time_masks=2, mel_masks=1, mel_mask=3, time_mask=0.25)
    spans = np.stack([features.draw_spans(config, np.random.default_rng(i), 20, 6) for i in range(50)])
    sizes = spans[..., 1] - spans[..., 0]
    assert sizes.min() == 0 and sizes[:, :2].max() == 5 and sizes[:, 2].max() == 3 and spans[:, 2].max() <= 6
    x, lengths = np.random.default_rng(0).normal(3, size=(50, 22, 6)).astype(np.float32), np.full(50, 20)
    x[:, 20:] = np.nan  # padding
    results = np.asarray(features.hide(x, lengths, spans, 2))
    for result, original, (a, b, c) in zip(results, x, spans):
        hidden = np.zeros((22, 6), bool)
        hidden[a[0] : a[1]] = hidden[b[0] : b[1]] = hidden[:, c[0] : c[1]] = True
        np.testing.assert_array_equal(result[~hidden], original[~hidden])
        np.testing.assert_allclose(result[hidden], np.float64(original[:20][~hidden[:20]]).mean(), rtol=1e-5)


SPOKEN = [  # language, written, and what is said; a part that is left as it is stands as it was
    ("en", "I don’t have 1,234.5 'things' — but x-rays: 21!",
     "i don't have one thousand two hundred thirty four point five things but x rays twenty one"),
    ("en", "-5, \u22125 and COVID-19; a 10-year-old", "minus five minus five and covid nineteen a ten year old"),
    ("en", "The 1st, 2nd, 3rd, 21ST, 112th", "the first second third twenty first one hundred twelfth"),
    ("en", "50%, 1 %, 2.0‰; -5 °C", "fifty percent one percent two point zero permille minus five degrees celsius"),
    ("en", "3.05 (and \"2.0\") １，２００", "three point zero five and two point zero one thousand two hundred"),
    ("en", "12 000 and 10 20, 555 123 4567", "12 000 and ten twenty 555 123 4567"),
    ("fr", "12 000 euros, 1\u202f200,5, la 1re et le 2e, 1er",
     "douze mille euros mille deux cents virgule cinq la première et le deuxième premier"),
    ("fr-CH", "1’234’567", "un million deux cent trente quatre mille cinq cent soixante sept"),
    ("es-MX", "1,234.5 y 1.º, 1,234", "1,234.5 y primero mil doscientos treinta y cuatro"),  # punto, not coma
    ("fr", "12 000 %, 1\u202f500\xa0% et 12 000 €", "douze mille pour cent mille cinq cents pour cent et 12 000 €"),
    ("fr", "$ 12 100, 12 000-15 100 km", "$ 12 100 12 000-15 100 km"),
    ("sv", "1 500 °C", "ettusen femhundra grader celsius"),
    ("en", "3 - 5, 1 – 2, 5 % - 10 %; 5 -3", "3-5 1–2 5 %-10 % five minus three"),
    ("en", "\u20115 °C, a 5\u2011year, --5, ...5", "minus five degrees celsius a five year five five"),
    ("es", "1.234,5", "mil doscientos treinta y cuatro coma cinco"),
    ("de", "1.021,5 um 9.30, am 3. Mai, es waren 21.", "eintausendeinundzwanzig komma fünf um 9.30 am 3. mai es waren "
     "einundzwanzig"),
    ("de", "1\u202f234 von 12\u00a0000", "eintausendzweihundertvierunddreißig von zwölftausend"),
    ("de", "1 % von 50 %", "1 % von fünfzig prozent"),  # ein or eins
    ("pl", "601 123 456, 12 345", "601 123 456 dwanaście tysięcy trzysta czterdzieści pięć"),
    ("tr", "%50 IŞIK İZMİR 2024'te", "yüzde elli ışık izmir 2024'te"),
    ("ja", "1.5と3月、50%", "一点五と三月五十パーセント"),
    ("zh-Hant-TW", "我有3個蘋果，第12章", "我有三個蘋果第十二章"),
    ("ko", "3월", "삼월"),
    ("uk", "5 п’ять пʼять п'ять", "п'ять п'ять п'ять п'ять"),
    ("th", "ราคา5บาท ๑๒", "ราคาห้าบาท สิบสอง"),
    ("fa", "۱٬۲۳۴٫۵", "یک هزار و دویست و سی و چهار ممیز پنج"),
    # Not by one word of a language, or not surely.
    *(("en", x, x) for x in ("007", ".5", "10:30", "1/2", "½", "1.2.3", "10-20", "1914–1918", "555-1234", "$5", "£3m",
      "$ 5", "5 €", "+5", "at&t", "3d", "mp3", "1990s", "5'", "6\"", "1,23,456", "#5", "5°", "m²", "a@b.org", "11st",
      "https://x.org/5", "♪", "👩\u200d👩\u200d👧", "10^6", "9" * 20, "5-", "–5", "-$5", "👍🏽", "10 200")),
    *(("ru", x, x) for x in ("5 %", "10-летний", "1-й")),
    *((x, "100000", "100000") for x in ("lt", "zu")),  # for which unicode-rbnf has 100, and nonsense
    # Words, by their letters.
    ("en", "don’t O'Neil rock’n’roll dogs' ´tis x_y", "don't o'neil rock'n'roll dogs tis x y"),
    ("en", "Zusam\u00admen no\u2060where \u200eright\ufeff", "zusammen nowhere right"),
    ("fa", "می\u200cخواهم\u200c", "می\u200cخواهم"),
    ("fa", "\u200c'می‌خواهم'\u200c", "می‌خواهم"),
    ("hi", "क्\u200dष की", "क्\u200dष की"),
    ("he", "צה\"ל צה״ל", "צה״ל צה״ל"),
    ("ca", "col·laborar", "col·laborar"),
    ("hy", "Ինչո՞ւ", "ինչու"),
    ("ar", "مـــرحبا", "مرحبا"),
    ("ja", "ジョン・スミス、です。ﾃｽﾄ", "ジョンスミスですテスト"),
    ("el", "ΟΔΟΣ, ΣΑΣ.", "οδος σας"),
    ("de", "STRAẞE Straße", "straße straße"),
    ("en", "İSTANBUL ＡＢＣ", "istanbul abc"),
    ("az", "İI", "iı"),
]  # fmt: skip


def test_normalize(tmp_path, monkeypatch):
    normalizer, unread = asr.data.texts.normalizer, asr.data.texts.unread
    assert (
        normalizer("none")("\ufeff  Cafe\u0301\u2028 A\x07\ufeffB ") == "Café A B"
    )  # no format has controls in a text
    for name, expected in (("none", "ist i"), ("none:tr", "ist ı"), ("none:az", "ist ı"), ("basic:tr", "ist ı")):
        assert normalizer(name, lower=True)("İST I") == expected
    functions = {language: normalizer(f"basic:{language}") for language, *_ in SPOKEN} | {"en": normalizer("basic")}
    for language, text, expected in SPOKEN:
        said = functions[language](text)
        assert said == expected == functions[language](said)
        left = {x for x in said.split() if any(unicodedata.category(y)[0] in "NS" or y in "%&@#/" for y in x)}
        assert {*unread(said)} == left, said
    (tmp_path / "mine.py").write_text("def swap(text):\n    return text.swapcase()\ndef bad(text):\n    return None\n")
    assert normalizer(f"{tmp_path}/mine.py:swap")("Ab\u00a0 a") == "aB A"
    monkeypatch.chdir(tmp_path)
    for file in ("basic", "none", "a:b"):
        (tmp_path / file).touch()
    for name in ("basic:de", "none:tr"):
        assert asr.data.texts.absolute(name) == name  # not a function of that file
    assert sources.absolute("mine.py:swap:a:b") == f"{tmp_path}/mine.py:swap:{tmp_path}/a:b"
    for name, message in (
        ("other", "--normalize must be none, basic, .* got other"),
        ("basic:xx", "has no numbers in words; languages: "),
        ("basic:bn", "has no numbers in words; languages: "),
        ("none:xx", "--normalize none:xx has no language that CLDR knows"),
        (f"{tmp_path}/mine.py:none", r"has no function none"),
        (f"{tmp_path}/mine.py:bad", r"must return a string, got None of 'x'"),
    ):
        with pytest.raises(asr.system.UserError, match=message):
            normalizer(name)("x")


LETTERS = "Ll", "Lo", "Mn", "Mc"  # the apostrophe is another one
ZEROS = {"arab": "٠", "arabext": "۰", "cakm": "\U00011136", "deva": "०", "khmr": "០", "laoo": "໐", "mymr": "၀",
         "tamldec": "௦", "thai": "๐"}  # fmt: skip


def test_numbers_of_all_languages():
    """A number that Babel writes by the rules of a language, in its own digits too, is read as its words.

    Different numbers have different words, or stay digits.
    """
    letters = lambda text: "".join(x for x in text.lower() if unicodedata.category(x) in LETTERS or x == "〇")
    values = [5, 1234, 56_789, 1_234_567, 100, 100_000, 2000, 3000, 20_000, 20_000_000, 10_001, 11_000, 100_000_001]
    values += [101_000_000, 10_000]  # in pairs that the library takes for one another in some language
    for name in unicode_rbnf.RbnfEngine.get_supported_languages():
        engine, locale = unicode_rbnf.RbnfEngine.for_language(name), babel.Locale.parse(name)
        change = asr.data.texts.normalizer(f"basic:{name}")
        systems = {"latn", locale.default_numbering_system, locale.other_numbering_systems.get("native")}
        for system in systems & {"latn", *ZEROS}:
            known = system if "decimal" in locale.number_symbols.get(system, ()) else "latn"
            digits = {48 + i: chr(ord(ZEROS.get(system, "0")) + i) for i in range(10)}
            for value in (*values[:4], -1234, decimal.Decimal("1234.5"), decimal.Decimal("-1234567.05")):
                plain = str(value).replace(".", locale.number_symbols[known]["decimal"]).translate(digits)
                written = babel.numbers.format_decimal(value, locale=locale, numbering_system=known).translate(digits)
                said = change(plain)
                if asr.data.texts.unread(said):
                    assert said == plain, (name, value)
                else:
                    assert change(written) == said, (name, system, written)
                    if value == int(value):
                        expected = letters(engine.format_number(value).text)
                        assert letters(said) == expected, (name, written)
        said = {x: change(str(x)) for x in values}
        assert len({*said.values()}) == len({*values}), name
        assert not asr.data.texts.unread(said[5]) and (name == "sl" or not asr.data.texts.unread(said[10_000])), name


@pytest.mark.parametrize("kind", ["characters", "subwords"])
def test_tokens(kind):
    texts = ["THE CAT SAT ON THE MAT", "A MAT AND A CAT", "THE RAT SAT ON A CAT"] * 5
    config = configuration(tokens=kind, vocabulary=16)
    tokens = asr.data.tokens.train(config.head, texts)
    stored = asr.data.tokens.from_json(json.loads(json.dumps(tokens.to_json())))
    for text in texts:
        assert stored.decode(stored.encode(text)) == text and max(stored.encode(text)) < len(stored.pieces)
    assert stored.encode("THE CAT?") is None


def test_buckets(corpus):
    """Every utterance is in one bucket that holds it; shapes are few."""
    config = configuration(batch=2, buckets=3)
    data = batches.labelled(corpora.Recordings(corpus, config), asr.data.tokens.Characters("ABC "), 4)
    buckets = batches.make_buckets(data, config, 2)
    assert sorted(i for b in buckets for i in b.members) == list(range(10)) and len(buckets) == 3
    for i, x in enumerate(data.corpus.utterances):
        samples = 2400 + 400 * int(x.name[-6])
        assert x.frames == len([n for n in range(0, samples, 80) if n + 200 <= samples])
        assert data.corpus.load(i, None).shape == (x.frames, 6)
    for bucket in buckets:
        frames = [data.corpus.utterances[i].frames for i in bucket.members]
        assert max(frames) == bucket.frames and bucket.batch % 2 == 0
        assert max(len(data.labels[i]) for i in bucket.members) == bucket.labels
    tested = list(batches.testing(data, config, buckets, (0, 1)))
    assert {batch["features"].shape for batch in tested} == {(b.batch, b.frames, 6) for b in buckets}
    for batch in tested:
        for i, length, labels, count in zip(*(batch[x] for x in ("index", "lengths", "targets", "target_lengths"))):
            if i >= 0:
                assert length == data.corpus.utterances[i].frames
                assert asr.data.tokens.Characters("ABC ").decode(labels[:count]) == data.corpus.utterances[i].text
    full = batches.make_buckets(data, configuration(batch=4, buckets=3), 1)  # a third of the utterances fills none
    assert [x.batch for x in full] == [4, 4] and sum(len(x.members) for x in full) == 10
    for bucket in batches.make_buckets(data, configuration(batch_seconds=1.6, buckets=4), 1):
        assert bucket.batch == min(160 // bucket.frames, len(bucket.members))  # as many as the longest fits into 1.6 s


def test_the_least_padding():
    """The cuts of lengths into buckets leave the least padding. Truth: all ways to cut."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 7):
        seconds, counts = np.sort(rng.choice(99, size, False)) + 1.0, rng.integers(0, 9, size)
        for most, places in enumerate(buckets.cuts(seconds, counts, 5), 1):
            assert places[-1] == size - 1 and len(places) == most
            ways = [(*x, size - 1) for x in itertools.combinations(range(size - 1), most - 1)]
            cost = lambda way, s=seconds, n=counts: sum(c * s[min(j for j in way if j >= i)] for i, c in enumerate(n))
            assert cost(places.tolist()) == min(map(cost, ways)), (seconds, counts, most)


class Lengths:
    """What a reader asks of an index: utterances of given lengths, in 20 shards."""

    def __init__(self, seconds):
        self.seconds, self.shards = seconds, np.arange(len(seconds)) * 20 // len(seconds)

    def lengths_of_versions(self, items, versions, speeds, most):
        return versions, self.seconds[items]


@pytest.mark.parametrize("used", [0, 3])
@pytest.mark.parametrize("window", [0, 50])
def test_shapes_where_most_is_left_out(used, window):
    """What is left out, as it is too long, has 0 s in the order and no bucket of its own."""
    seconds = np.repeat([0, 12.0], [60 - used, used])
    reader = order.Reader(0, 0, Lengths(seconds), [np.arange(60)], [None], 1, [1.0], 20, 9)
    ends, rows = buckets.planned(*order.lengths([reader], 0, window), Config().data, 1, 1, bool(window), False)
    assert min(ends) >= 12 and min(rows) >= 1


@pytest.mark.parametrize("options", [{}, {"batch": 40}, {"batch_seconds": 200.0}, {"window": 4000}, {"count": 700}])
@pytest.mark.parametrize("devices", [1, 2])
def test_padding(options, devices):
    """Lengths as in LibriSpeech leave 10% padding with 8 shapes. Truth: rows and utterances, counted one by one."""
    options = dict(options)
    window, count = options.pop("window", 0), options.pop("count", 20_000)
    draws = np.random.default_rng(0).uniform(size=count)
    quantiles = np.interp(draws, [0, 0.01, 0.25, 0.5, 0.75, 0.99, 1], [1.2, 2.5, 11.4, 13.7, 15.3, 18.1, 20])
    most, seconds = 20.0, np.round(quantiles, 2)
    reader = order.Reader(0, 0, Lengths(seconds), [np.arange(count)], [None], 1, [1.0], most, 500)
    data = Config.from_options(train="t", **options).data
    found = order.lengths([reader], 0, window)
    ends, rows = buckets.planned(*found, data, devices, devices, bool(window), bool(window))
    shapes = [order.Shape(float(x), n) for x, n in zip(ends, rows)]
    drawn = order.Order([reader], shapes, 0, window)
    total, seen, sizes, each = 0.0, [], [], order.Batches(drawn, 0, 0, until=1)
    for _, shape, members in itertools.takewhile(bool, map(each.__getitem__, itertools.count())):
        some = [x[1] for x in members if x]
        assert len(members) == rows[shape] and len(members) % devices == 0 and seconds[some].max() <= ends[shape] + 1e-6
        if data.batch_seconds:
            assert len(members) * ends[shape] <= 200
        total += len(members) * ends[shape]
        seen += some
        sizes.append(len(some))
    assert sorted(seen) == [*range(count)] and len(shapes) <= 8
    assert 1 - seconds.sum() / total <= (0.1 if count > 1000 and not window else 0.11)
    batch_seconds = ends * rows
    assert count < 1000 or batch_seconds.max() < 1.5 * batch_seconds.min()
    assert data.batch_seconds or np.mean(sizes) == pytest.approx(data.batch, rel=0.1)
