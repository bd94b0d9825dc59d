"""Do links and lists of pages lead where they say? `make docs` finds pages and public names that no list has."""

import ast
import re
import sys
import tomllib

import jax_rnnt
import project

DOCS = project.ROOT / "docs"
sys.path.append(str(DOCS / "_ext"))
import package_page  # noqa: E402

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


def anchors(path):
    """The headings of a page as GitHub and MyST name them in links, and its own targets."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    names = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return names | set(re.findall(r"^\((.+)\)=$", text, re.M))


OTHERS = "*.md", "*/README.md", "*/DECISIONS.md", "jax_rnnt/*/*.md", "lab/**/*.md", "speech/recipes/*.md"


def test_links_lead_to_files_and_headings():
    """Of every page: they are relative, so they work in a clone and on the host of the repository."""
    count = 0
    others = {path for pattern in OTHERS for path in project.ROOT.glob(pattern)}
    for page in others | {DOCS / f"{page}.md" for page in PAGES}:
        for link, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", page.read_text()):
            count += 1
            path = page.parent.joinpath(link).resolve() if link else page
            folder = path.relative_to(project.ROOT).parts[0]
            if folder in ("lab", "speech") and not (project.ROOT / folder).exists():
                continue  # a source distribution
            assert path.exists(), (page, link)
            assert not anchor or anchor in anchors(path), (page, link, anchor)
    assert count > 150
    readme = (project.ROOT / "README.md").read_text()
    assert re.findall(r"\]\(\w+:", readme) == []


def test_readme_on_the_package_index(monkeypatch):
    """There, every link of it is an address: of the site, or of a file of this version."""
    settings = tomllib.loads((project.ROOT / "pyproject.toml").read_text())
    urls = settings["project"]["urls"]
    site, files = "https://jax-rnnt.github.io/jax_rnnt/dev/", "https://github.com/jax-rnnt/jax_rnnt/"
    for link, address in (
        ("docs/losses.md", f"{site}losses.html"),
        ("docs/coming_from/index.md", f"{site}coming_from/index.html"),
        ("docs/speech/transcribing.md#live-audio", f"{site}speech/transcribing.html#live-audio"),
        ("SECURITY.md", f"{files}blob/v1.2.3/SECURITY.md"),
        ("docs/lattice.png", f"{files}raw/v1.2.3/docs/lattice.png"),
        ("https://example.org/a.md", "https://example.org/a.md"),
    ):
        assert package_page.absolute(f"![a]({link}), b", "1.2.3", urls) == f"![a]({address}), b"
    providers = [entry["provider"] for entry in settings["tool"]["dynamic-metadata"]]
    assert {"path": "docs/_ext", "module": package_page.__name__} in providers
    monkeypatch.chdir(project.ROOT)  # where a build runs
    page = package_page.dynamic_metadata({}, {"version": jax_rnnt.__version__, "urls": urls})["readme"]
    assert page["content-type"] == "text/markdown"
    assert {link[:8] for link in re.findall(r"\]\((.+?)\)", page["text"])} == {"https://"}


def test_commands_of_the_readme():
    """Before anything else a door for each kind of user, with its commands, and CI runs the tests as they are there."""
    readme = (project.ROOT / "README.md").read_text()
    doors = r"\*\*(You [\w ]+)\.\*\*[^`]*(?:`[\w-]+`[^`]*)?```\n(.*?)^```$"
    found = [
        (door, [line for line in block.splitlines() if not line.startswith("#")])
        for door, block in re.findall(doors, readme, re.MULTILINE | re.DOTALL)
    ]
    doors = {
        "You train in JAX": ["pip install .", "make test"],
        "You have recordings": ["pip install . ./speech", "make demo"],
    }
    assert dict(found) == doors
    assert readme.index("make test") < 1200
    if (project.ROOT / ".ci").exists():  # a source distribution has none
        assert "\nstep make test\n" in (project.ROOT / ".ci/run").read_text()


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
