"""Does each block of the pages on decoding and models run alone, pasted into a fresh Python?"""

import pytest

from pages import blocks, run_alone

PAGES = "docs/decoding.md", "docs/models.md"
NEEDED = "flax", "optax", "rapidfuzz", "praatio", "matplotlib"


@pytest.mark.parametrize(("page", "line"), [(page, line) for page in PAGES for line in blocks(page)])
def test_block(page, line, tmp_path, monkeypatch, capsys):
    """It asserts or prints something, and its files are written."""
    block = blocks(page)[line]
    for name in NEEDED:
        if name in block:
            pytest.importorskip(name)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    run_alone(page, line)
    assert "assert" in block or capsys.readouterr().out
    assert all(path.stat().st_size > 0 for path in tmp_path.iterdir())
