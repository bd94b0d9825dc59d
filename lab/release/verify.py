"""Checks the files of a release, and that the commit makes the same bytes again: lab/release/check.sh.

    python lab/release/verify.py [--dist dist] [ARGUMENTS of wheels.py ...]

The second build is in the same folder: nvcc writes a hash of it into the names of kernels. Needs the packages of
check.txt.
"""

import argparse
import hashlib
import pathlib
import re
import shutil
import sys
import tarfile
import zipfile

import sbom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from rattler_build import Stage0Recipe, VariantConfig
from wheels import ROOT, output, run

# Of the repository, and not for who builds: pyproject.toml leaves them out.
NOT_IN_SDIST = (".ci/", ".github/", "lab/", "speech/")


def hashes(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def members(path):
    """{name: bytes} of an archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(path) as archive:
        return {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}


def check_source(path):
    """The source distribution has the files of the commit, and its metadata."""
    root = path.name.removesuffix(".tar.gz")
    found = {name.removeprefix(f"{root}/") for name in members(path)}
    tracked = {f for f in output("git", "ls-files", cwd=ROOT).splitlines() if not f.startswith(NOT_IN_SDIST)}
    if found != tracked | {"PKG-INFO"}:
        sys.exit(f"{path.name} differs from the commit in {sorted(found ^ (tracked | {'PKG-INFO'}))[:9]}")
    print(f"{path.name}: the {len(tracked)} files of the commit")


def check_parts(path):
    """Every SBOM is valid CycloneDX."""
    for name, text in members(path).items():
        if name.endswith(".cdx.json"):
            if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.decode()):
                sys.exit(f"{path.name}: {name} is no CycloneDX 1.6: {error}")
            print(f"{path.name}: {name} is valid")


def check_recipe():
    """Parses and renders conda-forge's recipe, which has the version of the package."""
    recipe = Stage0Recipe.from_file(ROOT / "lab/release/conda/recipe.yaml")
    choices = {"python": ["3.12.* *_cpython"], "cxx_compiler": ["gxx"], "c_stdlib": ["sysroot"]}
    (rendered,) = recipe.render(VariantConfig(choices))
    version, expected = str(rendered.recipe.package.version), sbom.version(ROOT)
    if version != expected:
        sys.exit(f"lab/release/conda/recipe.yaml is of version {version}, expected {expected}")
    print(f"recipe.yaml: {rendered.recipe.package.name} {version}")


def check_bytes(dist, arguments):
    """A second build from nothing makes the same files."""
    again = ROOT / "build/again"
    shutil.rmtree(again, ignore_errors=True)
    for machine in sorted({m[1] for name in hashes(dist) if (m := re.search(r"_(x86_64|aarch64)\.whl$", name))}):
        shutil.rmtree(ROOT / "build/wheels" / machine)
        run(sys.executable, ROOT / "lab/release/wheels.py", "--out", again, "--machine", machine, *arguments)
    first, second = hashes(dist), hashes(again)
    for name in first.keys() | second.keys():
        if first.get(name) != second.get(name):
            print(f"two builds of the commit differ in {name}", file=sys.stderr)
            if name in first.keys() & second.keys():
                one, other = members(dist / name), members(again / name)
                print(*sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k)), file=sys.stderr)
    if first != second:
        sys.exit("two builds of one commit must have the same bytes")
    print(f"{len(first)} files have the same bytes in a second build")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=pathlib.Path, default=ROOT / "dist")
    options, arguments = parser.parse_known_args()
    if changed := output("git", "status", "--porcelain", cwd=ROOT):
        sys.exit(f"a release is built of a commit, and there are changes:\n{changed}")
    files = sorted(options.dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    print(f"twine check --strict: {len(files)} files")
    for path in files:
        check_parts(path) if path.suffix == ".whl" else check_source(path)
    check_recipe()
    check_bytes(options.dist, arguments)


if __name__ == "__main__":
    main()
