"""Lists what others wrote and a wheel with kernels holds, as CycloneDX: .dist-info/sboms/jax_rnnt.cdx.json (PEP 770).

Versions and hashes are those of lab/release/wheels.txt, and what the compilers say of themselves.
"""

import json
import re
import subprocess


def write(path, root, cxx, nvcc):
    """The list of a wheel compiled by `cxx` and `nvcc` (None: without CUDA); without `cxx` the C++ library is the
    system's."""
    lock = (root / "lab/release/wheels.txt").read_text()
    components = [locked(lock, "jaxlib", "Apache-2.0", "XLA's FFI headers")]
    components.append(locked(lock, "pybind11", "BSD-3-Clause", "headers"))
    for library in ("libstdc++", "libgcc") if cxx else ():
        license, gcc = "GPL-3.0-or-later WITH GCC-exception-3.1", output(cxx, "-dumpfullversion", "-dumpversion")
        components.append(component(library, gcc, license, "linked statically"))
    if nvcc:
        # That of the runtime: nvcc may be newer than what it links.
        cuda = re.search(r"release (\d[\d.]*)", output(nvcc.with_name("ptxas"), "--version"))[1]
        components.append(component("cudart_static", cuda, "LicenseRef-NVIDIA-CUDA-EULA", "linked statically"))
    own = component("jax_rnnt", version(root), "Apache-2.0", purl=f"pkg:pypi/jax-rnnt@{version(root)}")
    inside = [c["bom-ref"] for c in components]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": inside}, *({"ref": ref} for ref in inside)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def version(root):
    return re.search(r'__version__ = "(.*)"', (root / "jax_rnnt/__init__.py").read_text())[1]


def component(name, version, license, description="", **more):
    named = {"expression": license}
    made = {"type": "library", "bom-ref": f"{name}@{version}", "name": name, "version": version, "licenses": [named]}
    return made | ({"description": description} if description else {}) | more


def locked(lock, name, license, description):
    """A package of the lock file, with its hashes: the build took one of these files."""
    version, hashes = re.search(rf"^{name}==(\S+) \\\n((?: +--hash=sha256:\w+.*\n)+)", lock, re.MULTILINE).groups()
    found = [{"alg": "SHA-256", "content": h} for h in re.findall(r"sha256:(\w+)", hashes)]
    return component(name, version, license, description, purl=f"pkg:pypi/{name}@{version}", hashes=found)


def output(*command, **keywords):
    return subprocess.run(
        [str(c) for c in command], check=True, capture_output=True, text=True, **keywords
    ).stdout.strip()
