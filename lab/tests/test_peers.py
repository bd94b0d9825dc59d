"""Is what docs/coming_from says of other libraries true of the versions that the pages name?

`lab/run.sh coming-from` installs those versions and runs these tests and the programs of the pages. Elsewhere they are
skipped. Numbers that need a GPU there: tests/losses/test_vectors.py.
"""

import importlib
import importlib.metadata
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import project
from jax_rnnt import MultiblankRNNTLoss, RNNTLoss, TDTLoss, decode, rnnt_loss

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 20, 6, 9)).astype(np.float32)
TARGETS, LENGTHS, COUNTS = RNG.integers(0, 5, (2, 5)), np.array([20, 17]), np.array([5, 3])
BATCH = TARGETS, LENGTHS, COUNTS


def tensors(*arrays):
    return [torch.tensor(x) for x in arrays]


def both(there, here, *, logits=LOGITS, atol=1e-4):
    """Value and gradient, there and here, are equal."""
    x = torch.tensor(logits, requires_grad=True)
    value = there(x)
    value.backward()
    found, gradient = jax.value_and_grad(here)(logits)
    np.testing.assert_allclose(found, value.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=atol)


def test_versions():
    """Those that the pages name are installed."""
    named = {}
    for page in (project.ROOT / "docs/coming_from").glob("*.md"):
        named |= dict(re.findall(r"Checked against (\w+) ([\d.]+\d)", page.read_text()))
    assert set(named) == {"torchaudio", "nemo_toolkit", "espnet", "optax", "transformers"}
    assert {name: importlib.metadata.version(name) for name in named} == named


def test_key_of_torchaudio():
    """Score / (labels + 2): its tokens begin with the blank, and it adds one."""
    decoder = pytest.importorskip("torchaudio.models.rnnt_decoder")
    search = decoder.RNNTBeamSearch(Model(), blank=8)
    (start,) = search._init_b_hypos("cpu")
    assert start[0] == [8]
    assert search.hypo_sort_key(([8, 1, 2], None, None, -6.0)) == -6.0 / (2 + 2)
    assert search.step_max_tokens == 100


class Model(torch.nn.Module):
    """A transducer whose joint adds rows, of nine classes; the predictor forbids its last label."""

    def predict(self, labels, lengths, state):
        rows = -30.0 * torch.nn.functional.one_hot(labels, 9).float() * (labels < 8)[..., None]
        return rows, lengths, [[torch.zeros(len(labels), 1)]]

    def join(self, encoder, lengths, predictor, counts):
        return encoder[:, :, None] + predictor[:, None], lengths, counts

    def transcribe(self, x, lengths):
        return x, lengths


def test_blank_of_torchaudio():
    """Its search takes the last class for the blank, whichever is named. The name decides how hypotheses begin."""
    decoder = pytest.importorskip("torchaudio.models.rnnt_decoder")
    frames = 15 * torch.eye(9)[[8, 1, 8, 4, 8, 2]] + 7 * torch.eye(9)[8]
    for blank in (8, 3):
        (tokens, *_), *_ = decoder.RNNTBeamSearch(Model(), blank)(frames, torch.tensor(6), 4)
        assert tokens == [blank, 1, 4, 2]
    predictor = decode.stateless_predictor(
        lambda labels: jnp.where(labels < 8, jnp.float32(-30), 0) * jax.nn.one_hot(labels[:, 0], 9, dtype=jnp.float32),
        1,
        start=8,
    )
    found = decode.Search(RNNTLoss(), jnp.add, predictor, max_labels=9).beam(frames.numpy()[None], [6], width=4)
    assert found.labels[0, 0, :3].tolist() == [1, 4, 2] and found.counts[0, 0] == 3


@pytest.mark.parametrize("reduction", ["mean_batch", "mean", "mean_volume", "sum"])
def test_reductions_of_nemo(reduction):
    losses = pytest.importorskip("nemo.collections.asr.losses.rnnt")
    criterion = losses.RNNTLoss(num_classes=8, reduction=reduction, loss_name="warprnnt_numba", loss_kwargs={})
    batch = dict(zip(("targets", "input_lengths", "target_lengths"), tensors(*BATCH)))
    ours = {"mean_batch": "mean", "mean": "mean_target"}.get(reduction, reduction)
    both(lambda x: criterion(log_probs=x, **batch), lambda x: RNNTLoss(reduction=ours)(x, *BATCH))


# NeMo's own loops in PyTorch: its kernels for these losses need a GPU.
DURATIONS, BIG = [0, 1, 2], [2, 3]


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_losses_of_nemo(sigma, monkeypatch):
    losses = pytest.importorskip("nemo.collections.asr.losses.rnnt")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # they ask for a GPU without need
    batch = dict(zip(("targets", "input_lengths", "target_lengths"), tensors(*BATCH)))
    for name, classes, options, ours in (
        ("tdt_pytorch", 5, {"durations": DURATIONS}, TDTLoss(DURATIONS, sigma=sigma)),
        ("multiblank_rnnt_pytorch", 8, {"big_blank_durations": BIG}, MultiblankRNNTLoss(BIG, sigma=sigma)),
    ):
        criterion = losses.RNNTLoss(classes, "mean_batch", name, options | {"sigma": sigma})
        targets = np.minimum(TARGETS, 4)
        batch["targets"] = torch.tensor(targets)
        both(lambda x: criterion(log_probs=x, **batch), lambda x: ours(x, targets, LENGTHS, COUNTS))


def test_defaults_of_nemo():
    """Of confidences and, by its text, of W-transducer, whose module needs k2."""
    (file,) = (x for x in importlib.metadata.files("nemo_toolkit") if x.name == "w_transducer.py")
    text = file.read_text()
    assert 'FORCE_FINAL = "force_final"' in text and "use_grid_implementation=True" in text
    assert "= LastBlankMode.FORCE_FINAL," in text
    confidences = pytest.importorskip("nemo.collections.asr.parts.utils.asr_confidence_utils")
    method = confidences.ConfidenceMethodConfig()
    bank = confidences.get_confidence_measure_bank()
    log_probs = jax.nn.log_softmax(LOGITS[0])
    there = bank[f"{method.name}_{method.entropy_type}_{method.entropy_norm}"](
        torch.tensor(np.asarray(log_probs)), 9, method.alpha
    )
    np.testing.assert_allclose(decode.Entropy(exponent=0.33).confidence(log_probs), there, atol=1e-5)


def test_clamp_of_nemo_on_a_cpu():
    """It clips after the reduction; ours clips the gradient of each sequence's loss before."""
    losses = pytest.importorskip("nemo.collections.asr.losses.rnnt")
    options = {"fastemit_lambda": 0.0, "clamp": 0.05}
    criterion = losses.RNNTLoss(8, "mean_batch", "warprnnt_numba", dict(options))
    x = torch.tensor(LOGITS, requires_grad=True)
    batch = dict(zip(("targets", "input_lengths", "target_lengths"), tensors(*BATCH)))
    criterion(log_probs=x, **batch).backward()
    plain = np.asarray(jax.grad(RNNTLoss())(LOGITS, *BATCH))
    np.testing.assert_allclose(x.grad.numpy(), plain.clip(-0.05, 0.05), atol=1e-5)
    ours = np.asarray(jax.grad(RNNTLoss(clamp=0.05))(LOGITS, *BATCH))
    np.testing.assert_allclose(ours, (2 * plain).clip(-0.05, 0.05) / 2, atol=1e-5)


def test_espnet():
    """Defaults of the task's search, and its norm: by the length of a hypothesis, which begins with the blank."""
    (file,) = (
        x for x in importlib.metadata.files("espnet") if str(x) == "espnet2/asr_transducer/beam_search_transducer.py"
    )
    text = file.read_text()
    for line in ("score_norm: bool = False", "max_sym_exp: int = 3", "u_max: int = 50", "lm_weight: float = 0.1"):
        assert line in text
    assert "x.score / len(x.yseq)" in text and "yseq=[0]" in text


@pytest.mark.parametrize("reduction", ["mean_volume", "mean_batch", "mean", "sum"])
def test_reductions_of_transformers(reduction):
    """Of both losses, and the defaults."""
    rnnt = pytest.importorskip("transformers.loss.loss_rnnt").rnnt_loss
    tdt = importlib.import_module("transformers.loss.loss_tdt").tdt_loss
    ours = {"mean_batch": "mean", "mean": "mean_target"}.get(reduction, reduction)
    x = torch.tensor(LOGITS)
    there = rnnt(x, *tensors(*BATCH), 8, reduction).item()
    np.testing.assert_allclose(RNNTLoss(reduction=ours)(LOGITS, *BATCH), there, rtol=1e-5)
    targets = np.minimum(TARGETS, 4)
    there = tdt(x[..., :6], x[..., 6:], *tensors(targets, LENGTHS, COUNTS), 5, DURATIONS, reduction=reduction).item()
    np.testing.assert_allclose(TDTLoss(DURATIONS, reduction=ours)(LOGITS, targets, LENGTHS, COUNTS), there, rtol=1e-5)
    if reduction == "mean_volume":
        np.testing.assert_allclose(
            rnnt(x, *tensors(*BATCH), 8).item(), RNNTLoss(reduction=ours)(LOGITS, *BATCH), rtol=1e-5
        )


def test_edges_of_torchaudio():
    """Sequences without frames and labels out of range are errors there; here +inf and NaN, without a gradient."""
    loss = pytest.importorskip("torchaudio").functional.rnnt_loss
    there = loss(
        *tensors(LOGITS, TARGETS.astype(np.int32), LENGTHS.astype(np.int32), COUNTS.astype(np.int32)), clamp=0.01
    )
    np.testing.assert_allclose(rnnt_loss(LOGITS, *BATCH, clamp=0.01), there, rtol=1e-5)
    for targets, lengths, expected in ((TARGETS, [0, 17], np.inf), (TARGETS + 9, LENGTHS, np.nan)):
        value, gradient = jax.value_and_grad(lambda x, *batch: rnnt_loss(x, *batch, reduction="none")[0])(
            LOGITS, targets, jnp.array(lengths), COUNTS
        )
        np.testing.assert_equal(np.asarray(value), np.float32(expected))
        assert not gradient[0].any()
