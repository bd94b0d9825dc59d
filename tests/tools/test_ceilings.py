"""What must not grow unnoticed: the lines that ship, and the words of pages.

A commit that raises a figure says what for, and by how much.
"""

import re

import pytest

from project import ROOT

# The lines of each house when its figure was decided; it may have 2% more.
LINES = {"jax_rnnt": 19_722, "xla_kernels": 9_415, "speech/jax_rnnt_speech": 17_344}
CODE = ".c", ".cc", ".cu", ".cuh", ".h", ".py", ".sh"
# The words of pages for people who work on the repository, and of those for users without their code.
WORDS = {
    15_000: ("CHANGELOG.md", "*/DECISIONS.md", "jax_rnnt/*/DECISIONS.md", "lab/**/*.md"),
    20_000: ("README.md", "speech/README.md", "docs/*.md", "docs/[a-z]*/*.md"),
}


@pytest.mark.parametrize("house", LINES)
def test_lines(house):
    files = [path for path in (ROOT / house).rglob("*") if path.suffix in CODE and path.name != "_build.py"]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= 1.02 * LINES[house], f"{house} has {lines:,} lines, and its figure is {LINES[house]:,}"


@pytest.mark.parametrize("limit", WORDS)
def test_words(limit):
    words = {}
    for path in {path for pattern in WORDS[limit] for path in ROOT.glob(pattern) if path.parent.name != "api"}:
        text = path.read_text()
        if limit == 20_000:
            text = re.sub(r"^```.*?^```$|^    [^\n]*$|\A---\n.*?^---$", "", text, flags=re.DOTALL | re.MULTILINE)
        words[str(path.relative_to(ROOT))] = len(text.split())
    longest = sorted(words.items(), key=lambda x: -x[1])[:5]
    assert sum(words.values()) <= limit, f"{sum(words.values()):,} words; the longest pages are {longest}"
