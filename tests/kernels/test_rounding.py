"""Does rounding that matters depend on a compiler? Flags that reorder sums are refused; products that must be rounded
stay apart. `xla_kernels/common/rounding.h` says which. Needs a C++ compiler.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]

CPU = '#include "xla_kernels/cpu/softmax_rows.h"\nint main() {}\n'


def compile_program(compiler, source, path, *flags):
    """(exit code, messages) of compiling and linking the text `source` into the file `path`."""
    file = path.with_suffix(".cc")
    file.write_text(source)
    command = [compiler, "-std=c++17", f"-I{ROOT}", *flags, file, "-o", path]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.quick("-ffast-math-g++", "-O2-g++")
@pytest.mark.skipif(not COMPILERS, reason="no C++ compiler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only", "-O2"])
def test_flags_that_change_arithmetic_are_refused(compiler, flag, tmp_path):
    code, messages = compile_program(compiler, CPU, tmp_path / "program", "-DJAX_RNNT_TARGET=portable", flag)
    refused = flag != "-O2"
    assert (code != 0) == refused, messages
    assert ("jax_rnnt needs IEEE arithmetic" in messages) == refused


# Differences of equal products: 0, or the error of the product where the compiler makes a multiply-add. The factors are
# arguments of the program, so that nothing is computed while it is compiled.
PRODUCTS = """#include <cstdio>
#include <cstdlib>
#include "xla_kernels/common/rounding.h"
template <class A>
void Print(const char** text) {
  const A x = A(atof(text[1])), y = A(atof(text[2])), u = A(atof(text[3])), v = A(atof(text[4]));
  using jax_rnnt::RoundedProduct;
  printf("%a %a ", double(x * y - u * v), double(RoundedProduct(x, y) - RoundedProduct(u, v)));
}
int main(int, const char** text) { Print<float>(text), Print<double>(text); }
"""


@pytest.mark.skipif(not COMPILERS, reason="no C++ compiler")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("contract", ["fast", "off"])
def test_products_stay_rounded(compiler, contract, tmp_path):
    program = tmp_path / "program"
    fused = contract == "fast"
    flags = "-O2", f"-ffp-contract={contract}", *(["-march=native"] if fused else [])
    code, messages = compile_program(compiler, PRODUCTS, program, *flags)
    assert code == 0, messages
    text = subprocess.run([program, "1.1", "1.3", "1.1", "1.3"], capture_output=True, text=True, check=True).stdout
    plain, rounded, plain64, rounded64 = map(float.fromhex, text.split())
    assert rounded == rounded64 == 0
    if not fused:
        assert plain == plain64 == 0
