"""Masks of labels by script and by character: against lists that the test writes, in searches of every kind."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt_speech.recognition import recognise, scripts, search_options, streams
from jax_rnnt_speech.recognition.search import GREEDY, Decoding
from support import CONVOLUTIONAL, asr, random_model, subwords


def kept(tokens, mask):
    return [piece for piece, x in zip(tokens.pieces, mask) if x]


def test_labels_of_scripts():
    """Digits, marks and punctuation are of all scripts, mixed pieces of none; bytes are for scripts without labels."""
    tokens = asr.data.tokens.Characters("Aäжб今はハ가1.ー\u0301 ")
    for names, expected in (
        ("latin", "Aä"), ("Cyrillic", "жб"), ("latin,Cyrl", "Aäжб"), ("Jpan", "今はハ"), ("han", "今"),
        ("kore", "今가"),
    ):  # fmt: skip
        mask = scripts.mask_of_scripts(tokens, 14, scripts.codes(names))
        assert kept(tokens, mask) == [x for x in tokens.pieces if x in expected + "1.ー\u0301 "] and mask[13]
    for names, message in (("latn,klingon", "expected names of scripts"), ("thai", "has no label of the script Thai")):
        with pytest.raises(asr.system.UserError, match=message):
            scripts.mask_of_scripts(tokens, 14, scripts.codes(names))
    lines, mixed = ["the cat кот", "a xж b"], ["▁the", "xж", "<EOU>"]
    tokens = subwords(lines, vocab_size=280, byte_fallback=True, user_defined_symbols=",".join(mixed))
    bytes_ = [x for x in tokens.pieces if x.startswith("<0x")]
    for names in ("latin", "cyrillic", "latin,cyrillic", "greek"):
        found = kept(tokens, scripts.mask_of_scripts(tokens, 300, scripts.codes(names)))
        assert "▁" in found and "<EOU>" in found and tokens.pieces[tokens.unknown] not in found
        assert ("▁the" in found) == ("t" in found) == ("latin" in names)
        assert ("т" in found) == ("cyrillic" in names) and ("xж" in found) == ("," in names)
        # Of Greek all is missing: its characters are U+0370 to U+03FF and U+1F00 to U+1FFF, and a few others.
        greek = {f"<0x{x:02X}>" for x in "αβγωΩἀ".encode()}
        assert greek <= set(found) if names == "greek" else not {*found} & {*bytes_}
        assert "<0xD0>" not in found and "<0xE4>" not in found  # of Cyrillic, of Han


def test_labels_of_characters():
    tokens = subwords(["one 1 2 12 ten"], vocab_size=268, byte_fallback=True, user_defined_symbols="12")
    found = kept(tokens, scripts.mask_of_characters(tokens, 300, "12é"))
    found = [x for x in found if x not in ("<s>", "</s>")]  # which write nothing
    assert sorted(found) == sorted([*({"12", "1", "2", "▁", "▁1", "▁2", "▁12"} & {*tokens.pieces}), "<0xC3>", "<0xA9>"])
    with pytest.raises(asr.system.UserError, match="no label of the model's vocabulary is z"):
        scripts.mask_of_characters(asr.data.tokens.Characters("ab "), 4, "abz")


@pytest.mark.parametrize(
    ("language", "expected"),
    [("ru", ["Cyrl"]), ("RUS", ["Cyrl"]), ("Russian", ["Cyrl"]), ("sr-Latn", ["Latn"]), ("zh_TW", ["Hani"]),
     ("ja", ["Hani", "Hira", "Kana"]), ("pt-BR", ["Latn"]), ("xx", None), ("und", None), ("", None), ("e n", None)],
)  # fmt: skip
def test_scripts_of_languages(language, expected):
    found = scripts.scripts_of_language(language)
    assert found is None if expected is None else sorted(found) == expected


@pytest.mark.parametrize("beam", [0, 2])
def test_masked_searches(beam):
    """No other label is written, by windows and streams; what the mask allows anyway stays, with its scores."""
    model = random_model(**CONVOLUTIONAL, ctc=0.3)
    samples = np.random.default_rng(0).normal(0, 0.2, 12000).astype(np.float32)
    assert search_options.decoding_for(model, GREEDY, "de") == (GREEDY, False)
    found = {}
    for text in ("ABC", "AB", "B"):
        decoding = Decoding(beam, allowed=search_options.allowed(model, characters=text))
        assert (decoding.allowed is None) == (text == "ABC")
        for ctc in [False, True][: 1 if beam else 2]:
            (found[text, ctc],) = recognise.transcribe(model, [("", samples)], dataclasses.replace(decoding, ctc=ctc))
            assert {*found[text, ctc].text} <= {*text, " "}
    assert "C" in found["ABC", False].text and "B" in found["AB", False].text
    stream = streams.Stream(model, Decoding(beam, allowed=jnp.array([False, True, False, True, False])))
    words = stream.feed(samples) + stream.finish()
    assert [x.text for x in words] == found["B", False].text.split() and words
