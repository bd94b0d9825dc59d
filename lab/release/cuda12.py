"""Lays out a compiler for the drivers of CUDA 12 in a folder, from the package index, where it is not there yet.

    python lab/release/cuda12.py FOLDER    # prints the path of nvcc

The index has no nvcc of CUDA 12: its packages of 12.8 and 12.9 hold ptxas and headers (DECISIONS.md has what else was
tried). It has all of nvcc 13.0. So nvcc 13.0 parses the sources and writes PTX, and the rest is of CUDA 12.9: ptxas,
the headers and the static runtime. Both hosts of the wheels are there: `--target-directory sbsa-linux` is ARM.

A CUDA 12 toolkit by NVIDIA is as good, from 12.8 on: `make wheels NVCC=/usr/local/cuda-12.9/bin/nvcc`.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

LOCKS = pathlib.Path(__file__).parent
HOSTS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}
# In place of cudafe++ and cicc, which get the name of the source without its folder: they hash it into kernels' names,
# and a build in another folder should give the same bytes. ptxas 12.9 reads PTX up to version 8.8. Version 9.0, of cicc
# 13.0, is that and additions; ptxas fails where a program has one, since it does not know them.
WRAPPER = """#!/bin/sh
for argument; do
  shift
  test "$last" != --orig_src_path_name || argument=${argument##*/}
  set -- "$@" "$argument"
  last=$argument
done
"$0-13" "$@" || exit
case "$0" in
*/cicc) exec sed -i 's/^\\.version 9\\.0$/.version 8.8/' "$last" ;; # the output
esac
"""


def install(lock, target, *options):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", *options]
    subprocess.run([*pip, "-r", LOCKS / lock, "--target", target], check=True)
    return target / "nvidia"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1]).resolve()
    print(folder / "bin/nvcc")
    made_of = "".join(path.read_text() for path in [*sorted(LOCKS.glob("cud*12.txt")), pathlib.Path(__file__)])
    record = folder / "made_of.txt"
    if record.exists() and record.read_text() == made_of:
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        compiler = install("cuda12.txt", scratch / "compiler")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(compiler / "cu13", folder, ignore=shutil.ignore_patterns("lib"))
        shutil.copy(compiler / "cuda_nvcc/bin/ptxas", folder / "bin")
        for program in (folder / "bin/cudafe++", folder / "nvvm/bin/cicc"):
            program.rename(f"{program}-13")
            program.write_text(WRAPPER)
            program.chmod(0o755)
        for machine, host in HOSTS.items():
            options = ["--only-binary=:all:", f"--platform=manylinux2014_{machine}"]
            runtime = install("cudart12.txt", scratch / machine, *options) / "cuda_runtime"
            target = folder / "targets" / host
            shutil.copytree(runtime / "include", target / "include")
            # nvcc's own headers go with the program that it makes of kernels: those of 12.9 lack an argument.
            shutil.copytree(folder / "include", target / "include", dirs_exist_ok=True)
            shutil.copytree(runtime / "lib", target / "lib", ignore=shutil.ignore_patterns("*.so*"))
    record.write_text(made_of)


if __name__ == "__main__":
    main()
