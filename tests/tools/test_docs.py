"""Does the code of the documentation run, and does it do what its text promises?"""

import warnings

import jax
import numpy as np
import pytest

import batches
import compare
import family
import project
import reference_numpy as truth
from pages import blocks, code, run_alone

pytestmark = pytest.mark.slow
ROOT = project.ROOT
EXACT = 1e-12


PRICE = 0.7


def bypass_emission(logits, labels, *, blank, fused=True):
    arcs, pull = truth.softmax_emission(logits, labels, blank=blank, fused=fused)
    return {**arcs, "bypass": np.full_like(arcs["blank"], -PRICE)}, pull


def test_a_loss_with_one_more_arc(kernel):
    """With every option and rule, from fewer than 30 lines with public names."""
    names, block = code("docs/own_loss.md", "class BypassLoss")
    assert len(block.splitlines()) < 30 and "._" not in block and "import _" not in block
    arcs = (truth.Arc("blank", 1, 0), truth.Arc("label", 0, 1), truth.Arc("bypass", 0, 1))

    tables = {"topology": arcs, "emission": bypass_emission}
    loss = family.Loss("bypass", names["BypassLoss"], tables, {"price": PRICE})
    p = batches.poisoned(batches.problem(loss=loss))
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
    for options in ({}, {"fastemit_lambda": 0.5, "delay_penalty": 0.125, "blank": 0, "label_windows": windows}):
        got = compare.evaluate(loss, p, kernel, **options)
        np.testing.assert_allclose(got[0], loss.expected(p, **options)[0], rtol=EXACT)
        np.testing.assert_allclose(got[1], loss.expected(p, **options)[1], atol=EXACT)

    def value(price):
        return names["BypassLoss"](price=price, reduction="sum", implementation=kernel)(*p)

    np.testing.assert_allclose(jax.grad(value)(PRICE), (value(PRICE + 1e-5) - value(PRICE - 1e-5)) / 2e-5, rtol=1e-7)


FOLDERS = ROOT / "docs", ROOT / "docs/speech", ROOT / "docs/coming_from"
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted(folder.glob("*.md")))]
NEEDED = "flax", "optax", "rapidfuzz", "matplotlib", "torchaudio", "transformers", "espnet2", "nemo"


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line, block in blocks(page).items() if "jax_rnnt_speech" not in block],
)
def test_block_runs_alone(page, line, tmp_path, monkeypatch, capsys):
    """As if pasted into a fresh Python: it asserts or prints something, and its files are written. Those of speech run
    in its tests."""
    block = blocks(page)[line]
    for name in NEEDED:
        if name in block:
            pytest.importorskip(name)
    if "import torch" in block:
        warnings.simplefilter("ignore")  # what other libraries import
    if "jax.set_mesh" in block and not hasattr(jax, "set_mesh"):
        pytest.skip("needs jax.set_mesh")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    run_alone(page, line)
    assert "assert" in block or capsys.readouterr().out
    assert all(path.stat().st_size > 0 for path in tmp_path.iterdir())
