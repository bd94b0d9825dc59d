"""The README as the page on the package index, where relative links lead nowhere: `pyproject.toml` names this file."""

import pathlib
import re


def absolute(text, version, urls):
    """Relative links to pages of docs/ lead to the site, and all others to the files of this version."""

    def address(link):
        path, anchor = link.groups()
        if page := re.fullmatch(r"docs/([\w/]+)\.md", path):
            return f"]({urls['Documentation']}{page[1]}.html{anchor})"
        return f"]({urls['Source']}/{'raw' if path.endswith('.png') else 'blob'}/v{version}/{path}{anchor})"

    return re.sub(r"\]\(([\w/.-]+)(#[\w-]+|)\)", address, text)


def dynamic_metadata(settings, project):
    """What scikit-build-core calls."""
    text = pathlib.Path("README.md").read_text(encoding="utf-8")
    text = absolute(text, project["version"], project["urls"])
    return {"readme": {"content-type": "text/markdown", "text": text}}
