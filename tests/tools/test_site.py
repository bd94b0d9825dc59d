"""Do links and lists of pages lead where they say? `make docs` finds pages and public names that no list has."""

import ast
import re

import jax_rnnt
import project

DOCS = project.ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix().removesuffix(".md")
    for path in DOCS.rglob("*.md")
    if not {"_build", "api", "notes"} & set(path.relative_to(DOCS).parts)
}


def test_llms_txt_names_every_page():
    """Each with a line of its own, by its address, under the title that it has."""
    lines = re.findall(r"^- \[(.+)\]\((.+)\.html\): (.+)$", (DOCS / "llms.txt").read_text(), re.M)
    titles = {page: title for title, page, _ in lines}
    assert set(titles) == PAGES and len(titles) == len(lines)
    for page, title in titles.items():
        text = (DOCS / f"{page}.md").read_text()
        head = re.search(r"^# (.+)$", text, re.M)  # of an included file: none
        assert head is None or title == head[1], page


def test_readme_links_lead_to_pages():
    """The README is read where relative links lead nowhere: all are addresses, of the site or the repository."""
    text = (project.ROOT / "README.md").read_text()
    assert {link[:8] for link in re.findall(r"\]\((.+?)\)", text)} == {"https://"}
    files = re.findall(r"jax-rnnt/jax_rnnt/(?:(?:blob|tree)/)?main/([\w./]+)", text)
    assert len(files) > 3 and [file for file in files if not (project.ROOT / file).exists()] == []
    pages = re.findall(r"\(https://jax-rnnt\.github\.io/jax_rnnt/dev/([\w/]*?)(?:\.html)?(?:#[\w-]+)?\)", text)
    assert len(pages) > 10 and {page or "index" for page in pages} <= PAGES


def test_links_into_the_repository_lead_to_files():
    """The build makes addresses of them, and does not look."""
    for page in PAGES:
        for link in re.findall(r"\]\((\.\./[^)#]*)", (DOCS / f"{page}.md").read_text()):
            assert (DOCS / f"{page}.md").parent.joinpath(link).exists(), (page, link)


def test_every_promise_has_tests():
    """The table of docs/correct.md names each promise, and tests that exist."""
    promises = (DOCS / "promises.md").read_text().split("## Sharp bits")[0]
    rows = dict(re.findall(r"^\| (\w+) \| (\[.+) \|$", (DOCS / "correct.md").read_text(), re.M))
    assert list(rows) == re.findall(r"^\* \*\*(\w+)\*\*", promises, re.M)
    for promise, cell in rows.items():
        links = re.findall(r"\[`(\w+)`\]\(\.\./(tests/\w+/\w+\.py)\)", cell)
        assert len(links) == cell.count("](")
        for test, file in links:
            assert f"\ndef {test}(" in (project.ROOT / file).read_text(), (promise, test)


RECORDS = "2026-11-26-h100-log.txt", "2026-11-26-h100-second-log.txt", "2026-11-26-h100-bench.txt"


def shares():
    """{loss, dtype, shape: the lowest and the highest share of a copy, in percent}, of the records of an H100."""
    found = {}
    for name in RECORDS:
        case = None
        for line in (project.ROOT / f"lab/benchmarks/results/{name}").read_text().splitlines():
            if match := re.match(r"(rnnt|tdt) (\w+) \[(.+)\] on NVIDIA H100", line):
                case = match.groups()
            elif case and (match := re.match(r"jax_rnnt +[\d.]+ +(\d+)% ", line)):
                found.setdefault(case, []).append(int(match[1]))
    return {case: (min(x), max(x)) for case, x in found.items()}


def test_status():
    """One text, in the README: two pages include it, llms.txt has its figures, and all of them are the records'."""
    readme = (project.ROOT / "README.md").read_text()
    text = " ".join(re.search(r"<!-- status -->\n(.*?)<!-- end of the status -->", readme, re.DOTALL)[1].split())
    for page in ("index", "accelerators"):
        assert '{include} ../README.md\n:start-after: "<!-- status -->"' in (DOCS / f"{page}.md").read_text()
    found, table = shares(), (DOCS / "accelerators.md").read_text()
    written = re.findall(r"^\| (rnnt|tdt) \| ([\d, ]+) \| ([\d to]+) \| ([\d to]+) \|$", table, re.M)
    for loss, shape, *cells in written:
        for dtype, cell in zip(("float32", "bfloat16"), cells):
            low, high = found.pop((loss, dtype, shape))
            assert cell == (str(low) if low == high else f"{low} to {high}"), (loss, shape, dtype)
    assert found == {}
    for loss, classes in (("rnnt", "500"), ("rnnt", "32"), ("tdt", "500")):
        ranges = [x for (name, _, shape), x in shares().items() if name == loss and shape.endswith(f", {classes}")]
        figures = f"{min(low for low, _ in ranges)} to {max(high for _, high in ranges)}%"
        assert figures in text and figures in (DOCS / "llms.txt").read_text(), (loss, classes, figures)


def test_citation():
    """Its version is the library's."""
    assert f"\nversion: {jax_rnnt.__version__}\n" in (project.ROOT / "CITATION.cff").read_text()


def test_size():
    """A page is read in five minutes."""
    words = {page: len((DOCS / f"{page}.md").read_text().split()) for page in PAGES}
    assert {page: count for page, count in words.items() if count > 1200} == {}


# What a native would not write here, except where it is right.
AVOIDED = re.compile(
    r"\b(?:(?:stands?|stood|standing)\b(?! for)|(?:lies?|lay|lain|lying)\b(?! (?:in|inside|between)\b)|mend\w*|"
    r"cure[sd]?\b|by turns\b|no entry\b|what has\b|asked for\b|"
    r"(?<!all )(?<!none )(?<!sure )(?<!out )(?<!front )(?<!is )of it\b)",
    re.IGNORECASE,
)


def docstrings(node):
    """Of a module and its classes and functions without an underscore."""
    yield ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield from docstrings(child)


def test_english():
    """Of pages, and of docstrings."""
    texts = {project.ROOT / "README.md": "", **{DOCS / f"{page}.md": "" for page in PAGES}}
    for path in texts:
        texts[path] = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path in (project.ROOT / "jax_rnnt").rglob("*.py"):
        texts[path] = " ".join(docstrings(ast.parse(path.read_text())))
    found = {path: AVOIDED.findall(" ".join(text.split())) for path, text in texts.items()}
    assert {path.name: words for path, words in found.items() if words} == {}
