"""Does the loader of the example give every utterance once, in few shapes, in another order each epoch?"""

import importlib.util
import pathlib

import numpy as np
import pytest

pytest.importorskip("grain")

FILE = pathlib.Path(__file__).parents[2] / "examples" / "batching.py"
BUCKETS = [(8, 2), (16, 4), (32, 8)]


@pytest.fixture(scope="module")
def batching():
    spec = importlib.util.spec_from_file_location("example_batching", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def utterances():
    """Features hold the number of their utterance."""
    rng = np.random.default_rng(0)
    sizes = [(frames, frames // 4) for frames in rng.integers(1, 33, 60)]
    return [(np.full((frames, 2), i, np.float32), np.full(labels, i)) for i, (frames, labels) in enumerate(sizes)]


def members(batch):
    return batch["features"][:, 0, 0].astype(int).tolist()


def test_batches(batching, utterances):
    data = batching.batches(utterances, BUCKETS, 64, seed=1)
    shapes, seen = set(), []
    for batch in data:
        frames, labels = batch["features"].shape[1], batch["targets"].shape[1]
        assert (frames, labels) in BUCKETS and len(batch["features"]) == 64 // frames
        shapes.add((frames, labels))
        arrays = (batch[name] for name in ("features", "targets", "lengths"))
        for i, features, targets, lengths in zip(members(batch), *arrays, strict=True):
            seen.append(i)
            t, u = lengths
            assert (t, u) == tuple(map(len, utterances[i]))
            np.testing.assert_array_equal(features[:t], utterances[i][0])
            np.testing.assert_array_equal(targets[:u], utterances[i][1])
            assert not features[t:].any() and not targets[u:].any()
            assert (frames, labels) == next(b for b in BUCKETS if t <= b[0] and u <= b[1])
    assert shapes == set(BUCKETS) and len(seen) == len(set(seen)) > 60 - (8 + 4 + 2)


def test_epochs_differ(batching, utterances):
    data = batching.batches(utterances, BUCKETS, 64, seed=1)
    first, second = ([members(data.repeat(2)[i + n * len(data)]) for i in range(len(data))] for n in (0, 1))
    assert first != second and sorted(map(sorted, first)) != sorted(map(sorted, second))


def test_program(batching, capsys):
    batching.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(np.isfinite(float(line.split()[-1])) for line in lines)
    assert last.startswith("4 programs; ")


def test_too_long(batching):
    with pytest.raises(ValueError, match="utterance 1 of 33 frames and 0 labels fits no bucket"):
        batching.batches([(np.zeros((3, 2)), []), (np.zeros((33, 2)), [])], BUCKETS, 64, seed=0)
