"""Reads registers, shared memory and spills of the CUDA kernels from the compiler. Needs no GPU.

    python lab/resources.py [--architectures 75 90] [--nvcc NVCC] [--check]
    python lab/resources.py --sizes --architectures 75 80 90 100 100-ptx 120
    python lab/resources.py --same-as COMMIT --architectures 90

Prints a Markdown table. With --check it fails if a kernel spills registers or keeps a stack frame. The default is all
architectures that wheels have code for. --sizes records what the code takes of a wheel; --same-as fails if the machine
code of a kernel of the loss is not that of the commit.
"""

import argparse
import concurrent.futures
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("softmax_emission", "lattice", "skip_lattice", "joint")
OPTIONS = ["-std=c++17", "-O3", "--extended-lambda", "--expt-relaxed-constexpr"]
SIZES = ROOT / "lab/release/sizes.json"


def kernel_name(mangled):
    """`ForwardKernel<float, 8>` from the symbol of a kernel in an anonymous namespace."""
    text = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    return re.search(
        r"(\w+(?:<[^()]*>)?)\(", text.replace("jax_rnnt::cuda::", "").replace("(anonymous namespace)", "")
    )[1]


def compile_kernels(nvcc, source, architecture, folder):
    """Rows (kernel, architecture, registers, static shared bytes, stack bytes, spill bytes)."""
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    out = folder / f"{source}.{architecture}.cubin"
    command = [nvcc, *OPTIONS, f"-I{ROOT}", code, "--resource-usage", "-cubin"]
    command += [f"{ROOT}/xla_kernels/cuda/{source}.cu", "-o", out]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for entry in text.split("Compiling entry function '")[1:]:
        numbers = {
            key: int(match[1]) if (match := re.search(pattern, entry)) else 0
            for key, pattern in {
                "registers": r"Used (\d+) registers",
                "shared": r"(\d+) bytes smem",
                "stack": r"(\d+) bytes stack frame",
                "spills": r"(\d+) bytes spill stores",
            }.items()
        }
        yield kernel_name(entry.split("'")[0]), architecture, numbers


def record_sizes(nvcc, architectures):
    """Updates the record: for each source and architecture, the bytes of the code as a wheel compresses it.

    "100-ptx" is PTX. `lab/tests/test_size.py` adds them up.
    """
    found = json.loads(SIZES.read_text()) if SIZES.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        out = pathlib.Path(name, "code")
        for architecture in architectures:
            for source in SOURCES:
                if source == "joint" and architecture in ("75", "100-ptx"):  # CMakeLists.txt
                    continue
                number, kind = architecture.removesuffix("-ptx"), "-ptx" if "ptx" in architecture else "-cubin"
                code = f"arch=compute_{number},code={'compute' if kind == '-ptx' else 'sm'}_{number}"
                file = f"{ROOT}/xla_kernels/cuda/{source}.cu"
                subprocess.run([nvcc, *OPTIONS, f"-I{ROOT}", f"-gencode={code}", kind, file, "-o", out], check=True)
                found.setdefault(source, {})[architecture] = len(zlib.compress(out.read_bytes()))
                SIZES.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")


def machine_code(path):
    """{kernel: its instructions} of a cubin, an ELF file; a hash of the source's place is taken out of names."""
    data = path.read_bytes()
    start, size, count, names = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    at = headers[names][4]
    found = {}
    for name, _, _, _, offset, length in headers:
        text = data[at + name : data.index(b"\0", at + name)].decode()
        if text.startswith(".text."):
            found[re.sub(r"_GLOBAL__N__\w{8}_|_cu_\w{8}", "", text)] = data[offset : offset + length]
    return found


def same_as(nvcc, commit, architectures):
    """Ends the program where the code of a kernel of the loss is not that of the commit."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        archive = ["git", "archive", commit, "xla_kernels"]
        files = subprocess.run(archive, cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=files, check=True)
        for source, architecture in ((s, a) for s in SOURCES if s != "joint" for a in architectures):
            code = []
            for root in (folder, ROOT):
                target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
                file = f"{root}/xla_kernels/cuda/{source}.cu"
                subprocess.run(
                    [nvcc, *OPTIONS, f"-I{root}", target, "-cubin", file, "-o", folder / "cubin"], check=True
                )
                code.append(machine_code(folder / "cubin"))
            then, now = code
            title = f"{source} for sm_{architecture}:"
            if changed := sorted(k for k in then.keys() | now.keys() if then.get(k) != now.get(k)):
                sys.exit(f"{title} {len(changed)} kernels differ from {commit}: {changed[:3]}")
            print(f"{title} the {len(now)} kernels have the machine code of {commit}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["75", "80", "86", "89", "90", "100", "120"])
    parser.add_argument("--nvcc", default=shutil.which("nvcc"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--same-as", metavar="COMMIT")
    options = parser.parse_args()
    if options.nvcc is None:
        sys.exit("no nvcc on the path; name one with --nvcc")
    if options.sizes:
        record_sizes(options.nvcc, options.architectures)
        return
    if options.same_as:
        same_as(options.nvcc, options.same_as, options.architectures)
        return
    release = subprocess.run([options.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release ([\d.]+)", release)[1]

    rows, faults = {}, []
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(2) as pool:
        folder = pathlib.Path(name)
        jobs = [
            pool.submit(lambda *job: list(compile_kernels(*job)), options.nvcc, source, architecture, folder)
            for source in SOURCES
            for architecture in options.architectures
        ]
        for kernel, architecture, numbers in (row for job in jobs for row in job.result()):
            rows.setdefault(kernel, {})[architecture] = numbers
            if numbers["stack"] or numbers["spills"]:
                faults.append(
                    f"{kernel} for sm_{architecture}: {numbers['stack']} bytes of stack, {numbers['spills']} spilled"
                )
        sizes = {a: sum(p.stat().st_size for p in folder.glob(f"*.{a}.cubin")) for a in options.architectures}

    title = " | ".join(f"registers sm_{a}" for a in options.architectures)
    table = [
        f"| kernel (nvcc {version}) | {title} | shared, bytes |",
        "|---|" + "--:|" * (len(options.architectures) + 1),
    ]
    for kernel, found in sorted(rows.items()):
        registers = " | ".join(str(found[a]["registers"]) for a in options.architectures)
        table.append(f"| `{kernel}` | {registers} | {max(n['shared'] for n in found.values())} |")
    table.append(f"| bytes of all | {' | '.join(str(sizes[a]) for a in options.architectures)} | |")
    print("\n".join(table))
    if options.check and faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
