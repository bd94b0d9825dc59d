"""Lays out an nvcc of CUDA 12 in a folder, for machines that have another one: `make build/cuda12/bin/nvcc`.

    python tools/release/cuda12.py FOLDER

The package index has the headers, ptxas and the static runtime of CUDA 12, but no nvcc. Debian's package has it; it is
unpacked, not installed. Its host compiler is g++ 6 to 13. Each download is checked against a hash. A CUDA 12 toolkit by
NVIDIA is as good: `make wheels NVCC=/usr/local/cuda-12.9/bin/nvcc`.
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = (
    "http://deb.debian.org/debian/pool/non-free/n/nvidia-cuda-toolkit/nvidia-cuda-toolkit_12.4.131~12.4.1-2_amd64.deb"
)
SHA256 = "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319"
PROFILE = """TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        archive = scratch / "nvcc.deb"
        urllib.request.urlretrieve(PACKAGE, archive)
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            sys.exit(f"{PACKAGE} has another hash than expected")
        subprocess.run(["dpkg-deb", "-x", archive, scratch], check=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "-r", ROOT / "tools/release/cuda12.txt", "--target", scratch / "index"], check=True)
        index, nvcc = scratch / "index/nvidia", scratch / "usr/lib/nvidia-cuda-toolkit/bin"

        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(nvcc, folder / "bin", ignore=shutil.ignore_patterns("cicc", "g++", "gcc", "nvcc.profile"))
        for program in ("cudafe++", "fatbinary", "nvlink", "ptxas"):
            shutil.copy(scratch / "usr/bin" / program, folder / "bin")
        (folder / "nvvm/bin").mkdir(parents=True)
        shutil.copy(nvcc / "cicc", folder / "nvvm/bin")
        shutil.copytree(index / "cuda_nvcc/nvvm/libdevice", folder / "nvvm/libdevice")
        for part in ("cuda_cccl", "cuda_nvcc", "cuda_runtime"):
            shutil.copytree(index / part / "include", folder / "include", dirs_exist_ok=True)
        (folder / "bin/nvcc.profile").write_text(PROFILE)
        # The index has the static runtime of CUDA 12.9 alone; it serves all of CUDA 12. nvcc names a second library,
        # which only launches from kernels need.
        subprocess.run([*pip, "-r", ROOT / "tools/release/cudart12.txt", "--target", scratch / "static"], check=True)
        (folder / "lib64").mkdir()
        shutil.copy(scratch / "static/nvidia/cuda_runtime/lib/libcudart_static.a", folder / "lib64")
        subprocess.run(["ar", "cr", folder / "lib64/libcudadevrt.a"], check=True)


if __name__ == "__main__":
    main()
