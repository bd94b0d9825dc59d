"""Do links and lists of pages lead where they say? `make docs` finds pages and public names that no list has."""

import ast
import re

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
