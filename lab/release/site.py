"""Builds the site with a folder for each version: python lab/release/site.py FOLDER. lab/release/README.md"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
SITE = "https://jax-rnnt.github.io/jax_rnnt"  # assumed: lab/release/README.md


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def releases():
    """The newest tag of each vX.Y that has a site, newest first."""
    newest = {}
    for tag in git("tag", "--list", "v*", "--sort=version:refname").split():
        if re.fullmatch(r"v\d+\.\d+\.\d+", tag) and git("ls-tree", "--name-only", tag, "docs/conf.py"):
            newest[tag.rpartition(".")[0]] = tag
    return dict(reversed(newest.items()))


def build(checkout, version, folder):
    subprocess.run(["make", "docs"], cwd=checkout, check=True, env=os.environ | {"SITE_VERSION": version})
    folder.parent.mkdir(parents=True, exist_ok=True)
    (checkout / "docs/_build").rename(folder)


def main():
    site = pathlib.Path(sys.argv[1]).absolute()
    if site.exists():
        raise SystemExit(f"site.py: {site} must not exist yet")
    build(ROOT, "dev", site / "dev")
    found = releases()
    for version, tag in found.items():
        with tempfile.TemporaryDirectory() as folder:
            checkout = pathlib.Path(folder) / "checkout"
            git("worktree", "add", "--detach", os.fspath(checkout), tag)
            build(checkout, version, site / version)
            git("worktree", "remove", "--force", os.fspath(checkout))
    versions = ["dev", *found]
    (site / "versions.json").write_text(json.dumps([{"version": x, "url": f"{SITE}/{x}/"} for x in versions]))
    first = next(iter(found), "dev")
    (site / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={first}/">\n')


if __name__ == "__main__":
    main()
