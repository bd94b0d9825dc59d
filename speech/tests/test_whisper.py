"""Does Whisper compute its definition, and what other programs computed for golden/whisper.npz?"""

import json
import os
import pathlib
import shutil
import struct
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import scipy.special
from safetensors.numpy import save_file
from tones import recordings

from support import arrays, asr, configuration, run

GOLDEN = arrays(pathlib.Path(__file__).parent / "golden/whisper.npz")
RNG = np.random.default_rng(0)
WIDTH, HEADS, HIDDEN, BINS, PLACES = 8, 2, 12, 5, 40


def arrays_of_whisper(places=PLACES):
    """Random weights of an encoder of two layers, by the names of CTranslate2, in float16."""
    draw = lambda *shape: RNG.normal(0, 0.5, shape).astype(np.float16)
    angles = np.arange(places)[:, None] / 10000.0 ** (np.arange(WIDTH // 2) / (WIDTH // 2 - 1))
    positions = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float16)
    shapes = {"conv1": (WIDTH, BINS, 3), "conv2": (WIDTH, WIDTH, 3)}
    for i in range(2):
        shapes |= {f"layer_{i}/self_attention/linear_0": (3 * WIDTH, WIDTH)}
        shapes |= {f"layer_{i}/self_attention/linear_1": (WIDTH, WIDTH)}
        shapes |= {f"layer_{i}/ffn/linear_0": (HIDDEN, WIDTH), f"layer_{i}/ffn/linear_1": (WIDTH, HIDDEN)}
    norms = ["layer_norm", *(f"layer_{i}/{x}/layer_norm" for i in range(2) for x in ("self_attention", "ffn"))]
    arrays = {f"{name}/weight": draw(*shape) for name, shape in shapes.items()}
    arrays |= {f"{name}/bias": draw(shape[0]) for name, shape in shapes.items()}
    arrays |= {f"{name}/{leaf}": draw(WIDTH) for name in norms for leaf in ("gamma", "beta")}
    for i in range(2):
        arrays[f"layer_{i}/self_attention/linear_0/bias"][WIDTH : 2 * WIDTH] = 0  # of the keys: Whisper has none
    return arrays | {"position_encodings/encodings": positions, "num_heads": np.int16(HEADS)}


def write_binary(file, arrays):
    """A model.bin as CTranslate2 writes it."""
    text = lambda x: struct.pack("<H", len(x) + 1) + x.encode() + b"\0"
    data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(arrays) + 1)
    names = {name if name.startswith("decoder/") else f"encoder/{name}": x for name, x in arrays.items()}
    for name, x in {"decoder/alibi": np.int8(0), **names}.items():
        kind = {np.dtype(np.int8): 1, np.dtype(np.int16): 2, np.dtype(np.float16): 4}[x.dtype]
        data += text(name) + struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape) + struct.pack("<BI", kind, x.nbytes)
        data += x.tobytes()
    file.write_bytes(data + struct.pack("<I", 0))


def layers_of(arrays):
    """A linear layer, a norm and an attention of the arrays with a name, in float64."""
    a = {name: np.float64(x) for name, x in arrays.items()}
    linear = lambda name, x: x @ a[f"{name}/weight"].T + a[f"{name}/bias"]

    def norm(name, x):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        return x * a[f"{name}/gamma"] + a[f"{name}/beta"]

    def attend(query, key, value, seen=np.inf):
        """(sums of values [S, WIDTH], weights [HEADS, S, K]); row i sees the first i + 1, if there are no more seen."""
        query, key, value = (y.reshape(len(y), HEADS, -1) for y in (query, key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(WIDTH / HEADS)
        hidden = np.arange(len(key)) > np.arange(len(query))[:, None] + seen
        weights = scipy.special.softmax(np.where(hidden, -np.inf, scores), -1)
        return np.einsum("hqk,khd->qhd", weights, value).reshape(len(query), WIDTH), weights

    return linear, norm, attend


def gelu(x):
    return x * scipy.special.ndtr(x)


def forward(arrays, x):
    """Rows of features [T, BINS] by the definition, in float64."""
    linear, norm, attend = layers_of(arrays)
    a = {name: np.float64(x) for name, x in arrays.items()}
    for name, stride in (("conv1", 1), ("conv2", 2)):
        padded = np.pad(x, ((1, 1), (0, 0)))
        windows = [padded[i : i + 3] for i in range(0, len(x), stride)]
        x = gelu(np.einsum("nkc,ock->no", windows, a[f"{name}/weight"]) + a[f"{name}/bias"])
    x = x + a["position_encodings/encodings"][: len(x)]
    for i in range(2):
        joined = linear(f"layer_{i}/self_attention/linear_0", norm(f"layer_{i}/self_attention/layer_norm", x))
        x = x + linear(f"layer_{i}/self_attention/linear_1", attend(*np.split(joined, 3, 1))[0])
        y = linear(f"layer_{i}/ffn/linear_0", norm(f"layer_{i}/ffn/layer_norm", x))
        x = x + linear(f"layer_{i}/ffn/linear_1", gelu(y))
    return norm("layer_norm", x)


def as_hugging_face(arrays):
    """The same weights under the names of `transformers`."""
    names = {"layer_norm": "layer_norm", "conv1": "conv1", "conv2": "conv2"}
    for i in range(2):
        names |= {f"layer_{i}/self_attention/linear_1": f"layers.{i}.self_attn.out_proj"}
        names |= {f"layer_{i}/self_attention/layer_norm": f"layers.{i}.self_attn_layer_norm"}
        names |= {f"layer_{i}/ffn/layer_norm": f"layers.{i}.final_layer_norm"}
        names |= {f"layer_{i}/ffn/linear_0": f"layers.{i}.fc1", f"layer_{i}/ffn/linear_1": f"layers.{i}.fc2"}
    leaves = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
    tensors = {"model.encoder.embed_positions.weight": arrays["position_encodings/encodings"]}
    for name, x in arrays.items():
        module, _, leaf = name.rpartition("/")
        if module in names:
            tensors[f"model.encoder.{names[module]}.{leaves[leaf]}"] = x
        elif module.endswith("linear_0"):
            for which, part in zip("qkv", np.split(x, 3)):
                if (which, leaf) != ("k", "bias"):
                    tensors[f"model.encoder.layers.{module[6]}.self_attn.{which}_proj.{leaf}"] = part
    return {name: np.ascontiguousarray(x) for name, x in tensors.items()} | {"model.decoder.x": np.zeros(1)}


# Tokens of a byte-level tokenizer: bytes, merged ones, a capital letter, half of an umlaut, an empty one; special ones.
TOKENS = ["a", "b", "c", "Ġ", "ab", "Ġab", "Ġc", "A", "Ã", "'", ""]
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
MERGES = ["a b", "Ġ ab", "Ġ c"]
SPELL = ["a", "b", "c", "▁", "ab", "▁ab", "▁c"]  # what is left of them for texts of a, b, c and spaces
END = len(SPELL)  # the label behind them
SPAN = 3  # rows
HEARS = [[0, 1], [1, 0]]  # layer and head


def arrays_of_decoder():
    """Random weights of two layers of a decoder, by the names of CTranslate2."""
    draw = lambda *shape: RNG.normal(0, 0.5, shape).astype(np.float16)
    shapes, norms = {}, ["layer_norm"]
    for i in range(2):
        sizes = {"self_attention/linear_0": (3 * WIDTH, WIDTH), "self_attention/linear_1": (WIDTH, WIDTH)}
        sizes |= {"attention/linear_0": (WIDTH, WIDTH), "attention/linear_1": (2 * WIDTH, WIDTH)}
        sizes |= {
            "attention/linear_2": (WIDTH, WIDTH),
            "ffn/linear_0": (HIDDEN, WIDTH),
            "ffn/linear_1": (WIDTH, HIDDEN),
        }
        shapes |= {f"layer_{i}/{name}": x for name, x in sizes.items()}
        norms += [f"layer_{i}/{x}/layer_norm" for x in ("self_attention", "attention", "ffn")]
    arrays = {f"{name}/weight": draw(*shape) for name, shape in shapes.items()}
    arrays |= {f"{name}/bias": draw(shape[0]) for name, shape in shapes.items()}
    arrays |= {f"{name}/{leaf}": draw(WIDTH) for name in norms for leaf in ("gamma", "beta")}
    arrays |= {"embeddings/weight": draw(len(TOKENS + SPECIAL), WIDTH), "position_encodings/encodings": draw(20, WIDTH)}
    return {f"decoder/{name}": x for name, x in arrays.items()} | {"decoder/num_heads": np.int16(HEADS)}


def decoder_of_hugging_face(arrays):
    """The same weights under the names of `transformers`."""
    names = {"decoder/embeddings": "embed_tokens", "decoder/layer_norm": "layer_norm"}
    for i in range(2):
        there, here = f"decoder/layer_{i}", f"layers.{i}"
        for attention, name in (("self_attention", "self_attn"), ("attention", "encoder_attn")):
            names |= {f"{there}/{attention}/layer_norm": f"{here}.{name}_layer_norm"}
        names |= {f"{there}/self_attention/linear_1": f"{here}.self_attn.out_proj"}
        names |= {f"{there}/attention/linear_0": f"{here}.encoder_attn.q_proj"}
        names |= {f"{there}/attention/linear_2": f"{here}.encoder_attn.out_proj"}
        names |= {f"{there}/ffn/layer_norm": f"{here}.final_layer_norm"}
        names |= {f"{there}/ffn/linear_0": f"{here}.fc1", f"{there}/ffn/linear_1": f"{here}.fc2"}
    leaves = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
    tensors = {"embed_positions.weight": arrays["decoder/position_encodings/encodings"]}
    for name, x in arrays.items():
        module, _, leaf = name.rpartition("/")
        if module in names:
            tensors[f"{names[module]}.{leaves[leaf]}"] = x
        elif module.endswith(("self_attention/linear_0", "attention/linear_1")):
            which, attention = ("kv", "encoder_attn") if module.endswith("1") else ("qkv", "self_attn")
            for part, y in zip(which, np.split(x, len(which))):
                tensors[f"layers.{module[14]}.{attention}.{part}_proj.{leaf}"] = y
    return {f"model.decoder.{name}": np.ascontiguousarray(x) for name, x in tensors.items()}


def read_out(arrays, rows, labels):
    """(log q [U + 1, V], C [U + 1, N]) after U labels on rows [N, WIDTH], by the definition, in float64."""
    a = {name.removeprefix("decoder/"): np.float64(x) for name, x in arrays.items() if name.startswith("decoder/")}
    linear, norm, attend = layers_of(a)
    numbers = [TOKENS.index(x.replace("▁", "Ġ")) for x in SPELL] + [len(TOKENS)]
    tokens = [len(TOKENS) + i for i in (1, 2, 4, 5)] + [numbers[x] for x in labels]
    x, heard = a["embeddings/weight"][tokens] + a["position_encodings/encodings"][: len(tokens)], 0
    for i in range(2):
        here = f"layer_{i}"
        joined = linear(f"{here}/self_attention/linear_0", norm(f"{here}/self_attention/layer_norm", x))
        x = x + linear(f"{here}/self_attention/linear_1", attend(*np.split(joined, 3, 1), seen=0)[0])
        query = linear(f"{here}/attention/linear_0", norm(f"{here}/attention/layer_norm", x))
        found, weights = attend(query, *np.split(linear(f"{here}/attention/linear_1", rows), 2, 1))
        x = x + linear(f"{here}/attention/linear_2", found)
        y = linear(f"{here}/ffn/linear_0", norm(f"{here}/ffn/layer_norm", x))
        x = x + linear(f"{here}/ffn/linear_1", gelu(y))
        heard = heard + sum(weights[head] for layer, head in HEARS if layer == i) / len(HEARS)
    logits = norm("layer_norm", x) @ a["embeddings/weight"][numbers].T
    return scipy.special.log_softmax(logits, 1)[3:], np.cumsum(heard, 1)[3:]


def probabilities(arrays, rows, labels):
    """P of the labels [N, U + 1, V] and of the blank [N, U + 1]; after the end all are blanks."""
    log_q, seen = read_out(arrays, rows, labels)
    due, late = (
        scipy.special.expit(20 * (x - 0.5)) for x in (seen.T, np.pad(seen.T, ((SPAN, 0), (0, 0)))[: len(rows)])
    )
    leaves = due * (1 - late)
    leaves[:, [i for i in range(len(labels) + 1) if i and labels[i - 1] == END]] = 0
    return leaves[..., None] * np.exp(log_q), 1 - leaves


def likelihood(arrays, rows, labels):
    """Of the labels and the end, summed over all alignments."""
    labels = [*labels, END]
    label, blank = probabilities(arrays, rows, labels)
    alpha = np.zeros((len(rows) + 1, len(labels) + 1))
    alpha[0, 0] = 1
    for t in range(len(rows)):
        for u in range(len(labels) + 1):
            if u:
                alpha[t, u] += alpha[t, u - 1] * label[t, u - 1, labels[u - 1]]
            alpha[t + 1, u] += alpha[t, u] * blank[t, u]
    return alpha[-1, -1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(its arrays, a Whisper as CTranslate2 writes it, the same as `transformers` does)."""
    folder = tmp_path_factory.mktemp("whisper")
    encoder, decoder = arrays_of_whisper(200), arrays_of_decoder()
    arrays = encoder | decoder
    for name in ("a", "b"):
        (folder / name).mkdir()
        vocabulary = {x: i for i, x in enumerate(TOKENS)}
        added = [{"content": x, "id": len(TOKENS) + i} for i, x in enumerate(SPECIAL)]
        model = {"type": "BPE", "vocab": vocabulary, "merges": MERGES}
        (folder / name / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    write_binary(folder / "a/model.bin", arrays)
    (folder / "a/config.json").write_text(json.dumps({"alignment_heads": HEARS}))
    save_file(as_hugging_face(encoder) | decoder_of_hugging_face(decoder), folder / "b/model.safetensors")
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN}
    sizes |= {"decoder_layers": 2, "decoder_attention_heads": HEADS, "decoder_ffn_dim": HIDDEN}
    sizes |= {"num_mel_bins": BINS, "max_source_positions": 200, "max_target_positions": 20, "model_type": "whisper"}
    (folder / "b/config.json").write_text(json.dumps(sizes))
    (folder / "b/generation_config.json").write_text(json.dumps({"alignment_heads": HEARS}))
    return arrays, folder / "a", folder / "b"


def attending(folder, **options):
    config = configuration(
        **{
            "encoder": "whisper",
            "features": "whisper",
            "rate": 16000,
            "mels": BINS,
            "predictor": "attention",
            **options,
        }
    )
    return asr.pretrained.whisper.with_decoder(folder, config, ["ab c"])


def test_attention_decoder(folders, monkeypatch):
    """Losses and searches of a random one, with rows of NaN behind the end, against the definition in float64."""
    monkeypatch.setattr(asr.attention_decoder, "SPAN", SPAN)
    arrays, *both = folders
    recogniser, other = map(attending, both)
    for x, y in zip(*(jax.tree.leaves(x.params) for x in (recogniser, other)), strict=True):
        np.testing.assert_array_equal(x, y)
    rows, lengths = RNG.normal(size=(3, 9, WIDTH)).astype(np.float32), np.array([9, 7, 5])
    targets, counts = np.array([[5, 0, 1, 6], [4, 3, -1, 99], [1, 1, 1, 1]]), np.array([4, 2, 0])
    rows[1, 7:] = np.nan

    @jax.jit
    def computed(params, rows):
        model = recogniser.model(params)
        states = model.states(targets, rows, lengths)
        encoded = asr.losses.Encoded(rows, states, targets, lengths, counts)
        values = asr.losses.of_all_logits(recogniser.loss, model, encoded, False)
        hows = [asr.ngrams.Search(beam=n) for n in (0, 12)]  # a CPU takes 36 hypotheses in packs, in any order
        searches = [recogniser.search(model, rows, lengths, how) for how in hows]
        return values, searches

    values, (greedy, beam) = computed(recogniser.params, rows)
    expected = [likelihood(arrays, x[:n], y[:m]) for x, n, y, m in zip(np.float64(rows), lengths, targets, counts)]
    np.testing.assert_allclose(values, -np.log(expected), rtol=2e-4)
    for i, n in enumerate(lengths):
        place, found, frames = 0, [], []
        while place < n:  # the most probable move; ten labels in a row of the encoder at most
            label, blank = (x[place, -1] for x in probabilities(arrays, np.float64(rows[i, :n]), found))
            if label.max() > blank and frames.count(place) < recogniser.config.max_symbols and len(found) < 16:
                found.append(int(label.argmax()))
                frames.append(place)
            else:
                place += 1
        assert greedy.labels[i, : greedy.counts[i]].tolist() == found
        assert greedy.frames[i, : greedy.counts[i]].tolist() == frames
        for x in (greedy, beam):  # each label has its probability after those before it
            labels, frames = (np.array(y[i, : x.counts[i]]) for y in (x.labels, x.frames))
            label, _ = probabilities(arrays, np.float64(rows[i, :n]), labels)
            expected = np.log(label[frames, np.arange(len(labels)), labels])
            np.testing.assert_allclose(x.label_log_probs[i, : len(labels)], expected, atol=1e-3)


def test_attention_decoder_learns(folders, corpus, tmp_path, refused, capsys):
    """A training of it: its labels are Whisper's tokens, its weights change, and all commands take the model."""
    (tmp_path / "texts.jsonl").write_text("".join(
        json.dumps({"audio": str(x), "text": "ab c ab"}) + "\n" for x in sorted(corpus.rglob("*.flac"))
    ))  # fmt: skip
    data = ["--train", tmp_path / "texts.jsonl", "--valid", tmp_path / "texts.jsonl"]
    start = ["train", *data, "--init", folders[1], "--predictor", "attention", "--workdir", tmp_path / "run"]
    start += ["--batch", 4, "--buckets", 1, "--devices", 1, "--max-seconds", 3, "--mel-mask", 1, "--prompt", "de"]
    run([*start, "--steps", 4, "--learning-rate", 0.01, "--save-every", 2, "--freeze", "encoder:2", "--log-every", 1])
    assert "8 labels" in capsys.readouterr().out
    run(["convert", tmp_path / "run", tmp_path / "model", "--dtype", "float16"])
    audio = min(corpus.rglob("*.flac"))
    run(["transcribe", "--model", tmp_path / "model", audio, "--beam", 2])
    run(
        [
            "align",
            "--workdir",
            tmp_path / "run",
            tmp_path / "texts.jsonl",
            "--output",
            tmp_path / "a.ctm",
            "--prompt",
            "de",
        ]
    )
    assert (tmp_path / "a.ctm").read_text().count(" ab\n") == 20
    run(["test", "--workdir", tmp_path / "run", tmp_path / "texts.jsonl", "--pictures", tmp_path / "pictures"])
    assert (tmp_path / "pictures/lattice.png").is_file()
    losses = [x["loss"] for x in asr.runs.metrics_of(tmp_path / "run") if "loss" in x]
    assert losses[-1] < losses[0]
    long = np.concatenate([asr.audio.read(audio, 16000)] * 20)
    recogniser = asr.pretrained.read(tmp_path / "run")
    (found,) = asr.recognise.transcribe(recogniser, [("long", long)])
    assert not found.error and found.frames == sorted(found.frames)
    assert max(found.frames) * recogniser.seconds > recogniser.longest  # of windows after the first, too
    window = asr.windows.Recording("long", long, recogniser)
    window.go_on(50)
    assert (window.begin, window.row) == (50, 50)  # nothing before it: the first label would not find its place
    for more, message in (
        (["--ctc", 0.3], "--ctc 0.3 needs another --predictor"),
        (["--init", tmp_path / "run", "--new-head"], "holds no decoder of Whisper to begin with"),
        (["--prompt", "fr"], "has no token <|fr|>"),
        (["--init", tmp_path / "run", "--prompt", "fr"], "run has de"),
        (["--train", "handwritten-digits"], "hears 5 features a frame, handwritten-digits has 12"),
    ):
        refused([*start, *more, "--overwrite"], message)
    other = ["--workdir", tmp_path / "run", "--prompt", "fr"]
    refused(["train", *other, "--resume", "--change"], "holds a model with --prompt de, got fr")
    refused(["align", *other, tmp_path / "texts.jsonl", "--output", tmp_path / "b.ctm"], "the model knows no prompts")


def test_folders_with_a_decoder(folders, tmp_path, monkeypatch):
    """What does not fit is an error that names the file; Whisper for English alone has no token of a language."""
    arrays, binary, tensors = folders

    def changed(folder, name, **fields):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        stored = json.loads((folder / name).read_text())
        (tmp_path / name).write_text(json.dumps(stored | fields))
        return attending(tmp_path)

    added = [{"content": x, "id": 15 + i} for i, x in enumerate(SPECIAL)]
    heads = [
        ([[2, 0]], "pairs below 2 and 2"),
        ([[0.5, 1]], "pairs below"),
        (["01"], "pairs below"),
        (3, "pairs below"),
    ]
    for name, fields, message in (
        *(("config.json", {"alignment_heads": x}, f"alignment_heads must be {y}") for x, y in heads),
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "must be one of byte pairs"),
        ("tokenizer.json", {"added_tokens": added}, "numbers of tokens must be below 17, got 20"),
    ):
        with pytest.raises(asr.config.UserError, match=f"{name}: .*{message}"):
            changed(binary, name, **fields)
    name = "decoder/layer_0/ffn/linear_0/weight"
    write_binary(tmp_path / "model.bin", arrays | {name: np.zeros((HIDDEN, WIDTH), np.int16)})
    with pytest.raises(asr.config.UserError, match=f"{name} must be of float32"):
        attending(tmp_path)
    first = attending(tensors).params["predictor"]["embedding"][...][END + 1 :]
    assert len(first) == 4
    heard = [asr.utterances.Utterance(f"{n}", 400, "ab " * n) for n in (16, 17)]  # 20 places, of which 4 are taken
    corpus, recogniser = (
        SimpleNamespace(utterances=heard, further=(), report=asr.utterances.Report()),
        attending(tensors),
    )
    data = asr.batches.labelled(corpus, recogniser.tokens, recogniser.subsampling, most=recogniser.most)
    assert [*data.labels] == [0] and corpus.report.names == {"more labels than the predictor reads": ["17"]}
    monkeypatch.setattr(asr.pretrained.whisper, "ENGLISH", len(TOKENS + SPECIAL))
    english = attending(tensors)
    np.testing.assert_array_equal(
        english.params["predictor"]["embedding"][...][END + 1 :], first[jax.numpy.array([0, 3])]
    )
    with pytest.raises(asr.config.UserError, match="it knows one language"):
        attending(tensors, prompt="de")


def test_labels_of_whisper(folders):
    """Of a byte-level tokenizer, those that spell the texts; words are encoded as before."""
    stored = json.loads((folders[1] / "tokenizer.json").read_text())
    vocabulary, numbers = asr.tokens.spelled(stored, set("abc "))
    assert vocabulary.pieces == [*SPELL, "<EOU>"]
    assert [TOKENS[i] for i in numbers] == ["a", "b", "c", "Ġ", "ab", "Ġab", "Ġc"]
    assert [vocabulary.pieces[i] for i in vocabulary.encode("ab cab b")] == ["▁ab", "▁c", "ab", "▁", "b"]
    assert vocabulary.decode([*vocabulary.encode("ab cab b"), END]) == "ab cab b"
    assert vocabulary.encode("abA") is None
    with pytest.raises(
        asr.config.UserError, match="no token for these characters of the training texts: x é; --alphabet"
    ):
        attending(folders[1], alphabet="abxé")
    model = {"vocab": {x: i for i, x in enumerate(["a", "Ġ", "Ã", "¼", "¶", "ĠÃ", "Ġü", "ü", "ö", "aÃ", "aaÃ"])}}
    model["vocab"] |= {"Ġü": 20, "ü": 21, "ö": 22}
    model["vocab"] = {x.replace("ü", "Ã¼").replace("ö", "Ã¶"): i for x, i in model["vocab"].items()}
    model["merges"] = [["Ġ", "Ã"], ["ĠÃ", "¼"], ["a", "Ã"], ["Ã", "¼"], ["Ã", "¶"]]
    vocabulary, numbers = asr.tokens.spelled({"model": model}, set("aüö "))
    assert numbers == [0, 1, 20, 21, 22]
    for each in (vocabulary, asr.tokens.from_json(json.loads(json.dumps(vocabulary.to_json())))):
        spelled = {x: [each.pieces[i] for i in each.encode(x)] for x in ("üüa", "aö ö")}
        # Merges go through parts of a character; where they end in one, they begin again with characters.
        assert spelled == {"üüa": ["▁ü", "ü", "a"], "aö ö": ["▁", "a", "ö", "▁", "ö"]}
        assert each.encode("aé") is None


def test_whisper(tmp_path, refused):
    """A random encoder, from both formats, with padding of NaN, against its definition in float64."""
    arrays = arrays_of_whisper()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write_binary(tmp_path / "a/model.bin", arrays)
    save_file(as_hugging_face(arrays), tmp_path / "b/model.safetensors")
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN}
    sizes |= {"num_mel_bins": BINS, "max_source_positions": PLACES, "model_type": "whisper", "dropout": 0.1}
    (tmp_path / "b/config.json").write_text(json.dumps(sizes))
    recogniser, other = (asr.pretrained.read(tmp_path / name) for name in ("a", "b"))
    for x, y in zip(*(jax.tree.leaves(x.params) for x in (recogniser, other)), strict=True):
        np.testing.assert_array_equal(x, y)
    x, lengths = RNG.normal(size=(2, 21, BINS)).astype(np.float32), np.array([21, 12])
    x[1, 12:] = np.nan
    rows, counts = jax.jit(lambda params: recogniser.model(params).encoder(x, lengths))(recogniser.params)
    assert counts.tolist() == [11, 6]
    for i, count in enumerate(counts):
        np.testing.assert_allclose(rows[i, :count], forward(arrays, x[i, : lengths[i]]), atol=2e-5)
    refused(["transcribe", "--model", tmp_path / "a", "a.wav"], "has an encoder alone: rnnt-speech train --init")
    (long,) = asr.recognise.transcribe(recogniser, [("x.wav", np.zeros(16000))])
    assert (long.error, long.duration) == ("", 1.0)
    assert recogniser.longest == pytest.approx(2 * PLACES * 0.01 - 0.5)  # half a second is silence
    data = (tmp_path / "a/model.bin").read_bytes()
    for changed, message in (
        (data[:-500], "is cut off"),
        (data.replace(b"Whisper", b"Wav2Vec"), "must hold a Whisper"),
    ):
        (tmp_path / "a/model.bin").write_bytes(changed)
        with pytest.raises(asr.config.UserError, match=message):
            asr.pretrained.config_of(tmp_path / "a")


def test_whisper_features():
    """Those of faster-whisper."""
    config = asr.config.Config(features="whisper")
    results = asr.features.extractor(config)(recordings()[2])
    np.testing.assert_allclose(results[::7], GOLDEN["features"], atol=1e-5)


@pytest.mark.skipif("WHISPER" not in os.environ, reason="WHISPER names no folder with model.bin of Whisper tiny.en")
def test_whisper_rows():
    """Rows of the released weights are those of CTranslate2."""
    recogniser = asr.pretrained.read(os.environ["WHISPER"])
    x, expected = recogniser.features(recordings()[2])[None], GOLDEN["rows"]
    encode = jax.jit(lambda params: recogniser.model(params).encoder(x, np.array([x.shape[1]]))[0])
    results = np.asarray(encode(recogniser.params))[0, ::5]
    assert np.linalg.norm(results - expected) < 2e-5 * np.linalg.norm(expected)


def test_length_of_utterances():
    """The positions of the weights say how long an utterance may be; other encoders hear any length."""
    config = configuration(encoder="whisper", features="whisper", init="x", rate=16000, max_seconds=20.0)
    for places, seconds in ((1500, 29.5), (500, 9.5)):
        assert asr.encoders.longest(config, {"config.json": {"max_source_positions": places}}) == seconds
    with pytest.raises(asr.config.UserError, match=r"--max-seconds 20: the encoder hears 9\.5 s at most"):
        asr.encoders.checked(config, {"config.json": {"max_source_positions": 500}})
    assert asr.encoders.longest(configuration(features="whisper"), None) == float("inf")
