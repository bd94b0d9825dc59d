"""Reads registers, shared memory and spills of the CUDA kernels from the compiler. Needs no GPU.

    python lab/resources.py [--architectures 75 90] [--nvcc NVCC] [--check]

Prints a Markdown table. With --check it fails if a kernel spills registers or keeps a stack frame. The default is all
architectures that wheels have code for.
"""

import argparse
import concurrent.futures
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("softmax_emission", "lattice", "skip_lattice", "joint")
OPTIONS = ["-std=c++17", "-O3", "--extended-lambda", "--expt-relaxed-constexpr", f"-I{ROOT}"]


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
    command = [nvcc, *OPTIONS, code, "--resource-usage", "-cubin", f"{ROOT}/xla_kernels/cuda/{source}.cu", "-o", out]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["75", "80", "86", "89", "90", "100", "120"])
    parser.add_argument("--nvcc", default=shutil.which("nvcc"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.nvcc is None:
        sys.exit("no nvcc on the path; name one with --nvcc")
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
