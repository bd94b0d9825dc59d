"""Folders of pretrained models: what is written, which files are read, and what is wrong with others."""

import json
import re
import shutil

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support import GOLDEN, asr, run, saved, small_disk


@pytest.mark.parametrize("kind", ["tdt", "streaming"])
def test_what_is_written_is_read(kind, tmp_path, capsys, said):
    """Small steps of training come back to the bit; rounding is asked for, and said."""
    model = asr.models.open_model(GOLDEN / kind)
    model.params = jax.tree.map(lambda x: x + np.float32(1e-5), model.params)
    saved(model, tmp_path / "run")
    assert not said(["convert", tmp_path / "whole", "--model", tmp_path / "run"]).out
    again = asr.models.read(tmp_path / "whole")
    chex.assert_trees_all_equal(again.params, model.params)
    assert again.config == model.config.replace(init=str(tmp_path / "whole"))
    run(["convert", tmp_path / "half", "--model", tmp_path / "whole", "--dtype", "bfloat16"])
    assert capsys.readouterr().out == "weights are rounded to bfloat16\n"
    for name, dtype in (("whole", "float32"), ("half", "bfloat16")):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype
    old, new = (load_file(x / "model.safetensors") for x in (GOLDEN / kind, tmp_path / "whole"))
    assert {name: x.shape for name, x in new.items()} == {name: x.shape for name, x in old.items()}
    run(["convert", tmp_path / "half", "--model", tmp_path / "run"], 2)
    assert "must be an empty folder: --overwrite writes" in capsys.readouterr().err
    for place in (GOLDEN / "write.py", GOLDEN / "write.py/inside"):
        run(["convert", place, "--model", tmp_path / "run"], 2)
        assert f"{place}: {GOLDEN / 'write.py'} must be a folder, and is a file" in capsys.readouterr().err
    model.params = jax.tree.map(lambda x: x * np.float32("nan"), model.params)
    with pytest.raises(asr.system.UserError, match="must be finite, got NaN or infinity: nothing is written"):
        asr.models.hugging_face.write(model, tmp_path / "nan")
    assert not (tmp_path / "nan").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["transformers", "own"])
def test_disks_without_room(form, tmp_path, refused):
    """A conversion that fails says so in a line, and leaves the model before it; one that works leaves other files."""
    model, folder = GOLDEN / "tdt", tmp_path / "model"
    (tmp_path / "card.txt").write_text("text")
    command, card = ["convert", folder, "--model", model], ["--card", tmp_path / "card.txt"]
    ways = [[*command, *card], command]
    command, other = ways if form == "own" else ways[::-1]
    run(command)
    (folder / "more").mkdir()
    (folder / "more/README.md").write_text("mine")
    (tmp_path / ".model.99999999.part").mkdir()  # of a process that was killed
    before = {x.relative_to(folder): x.read_bytes() for x in folder.rglob("*") if x.is_file()}
    with small_disk(4000):
        refused([*command, "--overwrite", "--dtype", "bfloat16"], f"{folder} cannot be written: ")
    assert {x.relative_to(folder): x.read_bytes() for x in folder.rglob("*") if x.is_file()} == before
    run([*other, "--overwrite"])
    names = {x.name for x in folder.rglob("*") if x.is_file()}
    assert ("config.json" in names, "recogniser.json" in names) == ((True, False) if form == "own" else (False, True))
    assert (folder / "more/README.md").read_text() == "mine"
    assert {x.name for x in tmp_path.iterdir()} == {"card.txt", "model"}
    chex.assert_trees_all_equal(asr.models.read(folder).params, asr.models.read(model).params)


def test_files_of_weights(tmp_path, capsys):
    """Of several files, those that an index names, model.safetensors, a whole set, or the only one; else an error."""
    whole = "model.safetensors"
    a, b, old = {"a": np.ones(2, np.float32)}, {"b": np.zeros(3, np.float32)}, {"a": np.full(2, 7, np.float32)}
    one, two, spare = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.fp16.safetensors"
    both, index = a | b, lambda **names: {"weight_map": names}
    for i, (files, listed, expected) in enumerate((
        ({whole: both, "model_old.safetensors": old, spare: old}, None, f"not used: {spare}, model_old.safetensors"),
        ({whole: both, "z.safetensors": old}, index(a=whole, b=whole), "not used: z.safetensors"),
        ({one: a, two: b, whole: old}, index(a=one, b=two), "not used: model.safetensors"),
        ({one: a, two: b}, None, ""),
        ({one: a, two: b, "consolidated.safetensors": old}, None, "not used: consolidated.safetensors"),
        ({"mine.safetensors": both, "._mine.safetensors": None}, None, ""),
        ({whole: both, "model.bin": None, "x.nemo": None}, None, "not used: model.bin, x.nemo"),
        ({one: a}, None, f"has no {two}, one of the files of its weights"),
        ({one: a}, index(a=one, b=two), f"has no {two}, one of the files of its weights"),
        ({one: a, two: both}, index(a=one, b=two), f"a is in {one} and in {two}"),
        ({one: a, two: both}, None, f"a is in {one} and in {two}"),
        ({one: a, two: a}, index(a=one, b=two), f"{two} has no tensor b, which"),
        ({"x.safetensors": a, "y.safetensors": b}, None, "has several files of weights, and no model.safetensors or"),
        ({one: a, two: b, "x-1-of-2.safetensors": a, "x-2-of-2.safetensors": b}, None, "several files of weights"),
        ({whole: both}, index(a="../x.safetensors"), "weight_map must be an object of files in this folder"),
        ({whole: both}, index(), "weight_map must be an object of files in this folder"),
        ({whole: None}, None, "model.safetensors must be a file of safetensors"),
        ({"pytorch_model.bin": None}, None, "has no *.safetensors, and pytorch_model.bin is a pickle"),
    )):  # fmt: skip
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, tensors in files.items():
            (folder / name).touch() if tensors is None else save_file(tensors, folder / name)
        if listed is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps(listed))
        if i > 6:
            with pytest.raises(asr.system.UserError, match=re.escape(expected)):
                asr.pretrained.files.read_tensors(folder)
            continue
        found, said = asr.pretrained.files.read_tensors(folder), capsys.readouterr().err
        assert found.keys() == {"a", "b"} and found["a"].tolist() == [1, 1] and found["b"].tolist() == [0, 0, 0]
        assert expected in said and bool(said) == bool(expected), (files, said)


TEXT, ENCODER = "version https://git-lfs", "encoder_config"


CONFIG, SOUNDS, GENERATION = "config.json", "preprocessor_config.json", "generation_config.json"


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("tdt", CONFIG, None, "has no config.json"),
        ("tdt", SOUNDS, None, "the extractor of features must be an object, got None"),
        ("tdt", "model.safetensors", None, "has no *.safetensors"),
        ("tdt", CONFIG, {"model_type": "parakeet"}, "model_type must be one of parakeet_ctc, parakeet_rnnt"),
        ("tdt", CONFIG, {"model_type": "parakeet_rnnt", ENCODER: None}, "encoder_config must be an object"),
        ("tdt", CONFIG, {"hidden_act": "swish"}, "hidden_act must be one of relu, silu, gelu, got 'swish'"),
        ("tdt", CONFIG, {"durations": None}, "durations must be different whole numbers, got None"),
        ("tdt", CONFIG, {"blank_token_id": 3}, "blank_token_id must be 19, the last of vocab_size, got 3"),
        ("streaming", CONFIG, {"vocab_size": None}, "vocab_size must be a whole number of 2 or more, got None"),
        ("tdt", CONFIG, {"decoder_hidden_size": 0}, "decoder_hidden_size must be a whole number of 1 or more"),
        ("tdt", CONFIG, {ENCODER: {"model_type": "foo"}}, "model_type of encoder_config must be parakeet"),
        ("tdt", CONFIG, {ENCODER: {"num_key_value_heads": 2}}, "num_key_value_heads must be 4, got 2"),
        ("tdt", CONFIG, {ENCODER: {"subsampling_factor": 6}}, "subsampling_factor must be a power of 2"),
        ("tdt", CONFIG, {ENCODER: {"dropout": "no"}}, "dropout must be a number of 0 or more and less"),
        ("tdt", SOUNDS, {"feature_size": 80}, "feature_size must be 16, the encoder's num_mel_bins"),
        ("tdt", SOUNDS, {"padding_value": 1.0}, "padding_value must be 0, got 1.0"),
        ("tdt", SOUNDS, {"feature_extractor_type": "WhisperFeatureExtractor"},
         "feature_extractor_type must be ParakeetFeatureExtractor, got 'WhisperFeatureExtractor'"),
        ("tdt", GENERATION, {"decoder_start_token_id": 1}, "decoder_start_token_id must be 19, the blank"),
        ("tdt", CONFIG, TEXT, "config.json must be JSON"),
        ("tdt", "model.safetensors", TEXT, "model.safetensors must be a file of safetensors"),
    ],
)  # fmt: skip
def test_bad_folders(tmp_path, kind, name, change, message, said):
    """One line and status 2. Here null means that the key is gone."""
    folder = shutil.copytree(GOLDEN / kind, tmp_path / "checkpoint")
    if change is None:
        (folder / name).unlink()
    elif isinstance(change, str):
        (folder / name).write_text(change)
    else:
        fields = json.loads((folder / name).read_text())
        fields |= {k: fields[k] | x if isinstance(x, dict) else x for k, x in change.items()}
        (folder / name).write_text(json.dumps({k: x for k, x in fields.items() if x is not None}))
    *warnings, error = said(["transcribe", "--model", folder, "a.wav"], 2).err.splitlines()
    assert message in error and all("not used" in x for x in warnings)


def test_what_is_not_used_is_named(tmp_path, capsys):
    """A field that would change what is computed; what describes the file is none."""
    folder = shutil.copytree(GOLDEN / "tdt", tmp_path / "checkpoint")
    fields = json.loads((folder / "config.json").read_text())
    fields["encoder_config"] |= {"layerdrop": 0.1, "max_position_embeddings": 9}
    (folder / "config.json").write_text(json.dumps(fields | {"new_trick": [1]}))
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suppress_tokens": 7}))
    asr.models.config_of(folder)
    names = [line.split("not used: ")[1] for line in capsys.readouterr().err.splitlines()]
    assert names == ["layerdrop 0.1, max_position_embeddings 9", "new_trick [1]", "suppress_tokens 7"]
    tensors = load_file(folder / "model.safetensors")
    spare = tensors | {"ctc_head.weight": tensors["joint.head.bias"]}
    for changed, message in ((spare, r"not of this model: ctc_head\.weight"), ({}, "has no tensor")):
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(asr.system.UserError, match=message):
            asr.models.read(folder)


def test_other_folders(tmp_path, refused):
    """What holds no model that transcribes is said in words."""
    (tmp_path / "a.nemo").touch()
    for folder, message in (
        (tmp_path / "a.nemo", "must be an archive of NeMo"),
        (tmp_path, "a.nemo must be an archive of NeMo"),
        (tmp_path / "none", "is no folder"),
        (GOLDEN, "golden has several archives of NeMo: name eou.nemo or hybrid.nemo"),
        (GOLDEN.parent, "has no checkpoint"),
    ):
        refused(["transcribe", "--model", folder, "a.wav"], message)
