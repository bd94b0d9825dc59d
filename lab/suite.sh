#!/usr/bin/env bash
# The library's tests on other kernels, or on another build of them.
#
#   lab/suite.sh emulation      the CUDA kernels, run by the CPU
#   lab/suite.sh interpret      the Pallas kernels for TPUs, interpreted by the CPU; the emission is XLA's there
#   lab/suite.sh sanitize       the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer
#   lab/suite.sh threads        the tests of threads under ThreadSanitizer, in a CPython without a GIL: FREE names one
#   lab/suite.sh gpu-compile    training steps compiled for eight GPUs, without one
#
# Further arguments are pytest's. ONLY=avx2: the CPU kernels for that instruction set alone.
set -euo pipefail
cd "$(dirname "$0")/.."

need() {
  command -v "$1" > /dev/null || { echo "suite.sh: no $1: $2" >&2; exit 2; }
}

# The package alone, in a folder of its own: build FOLDER OPTIONS.
build() {
  local folder=$1
  shift
  .venv/tools/bin/pip install --quiet --no-deps --no-build-isolation --upgrade --target "$folder" \
    "-Cbuild-dir=$folder-objects" "-Ccmake.define.JAX_RNNT_ONLY=${ONLY-}" "$@" .
  export JAX_RNNT_INSTALLED=$PWD/$folder
}

# A package with all that it needs, in an environment of its own: environment FOLDER PYTHON REQUIREMENTS OPTIONS.
environment() {
  local folder=$1 python=$2
  shift 2
  test -x "$folder/bin/python" || "$python" -m venv "$folder"
  "$folder/bin/pip" install --quiet "-Cbuild-dir=$folder-objects" "$@"
  JAX_RNNT_INSTALLED=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  export JAX_RNNT_INSTALLED
}

CXX=${CXX:-g++}
library() { "$CXX" -print-file-name="lib$1.so"; }

quick() { .venv/bin/pytest -n auto --dist worksteal -m "not slow$1" "${@:2}"; }

mode=${1-}
shift || true
case $mode in
  emulation | interpret | sanitize) make --silent .venv/.packages .venv/tools/.installed ;;
esac
case $mode in
  emulation)
    need "$CXX" 'install a C++ compiler (Debian, Ubuntu: apt install g++)'
    build build/emulation -Ccmake.define.JAX_RNNT_EMULATE=ON
    JAX_RNNT_REQUIRE=cpu quick ' and not no_kernel' -k 'not reference' "$@"
    ;;
  interpret)
    make --silent setup "ONLY=${ONLY-}"
    (($#)) || set -- tests/kernels/test_tpu.py tests/losses/test_{lattices,values,gradients,promises,edges,accuracy,family}.py \
      tests/transforms/test_{sharding,vmap,remat,export}.py
    JAX_RNNT_INTERPRET=1 quick '' -k 'not reference and not symbolic' "$@"
    ;;
  sanitize) # without products and sums in one instruction: rounding must not matter
    need "$CXX" 'install a C++ compiler (Debian, Ubuntu: apt install g++)'
    build build/sanitize '-Ccmake.define.JAX_RNNT_SANITIZE=address,undefined' -Ccmake.define.JAX_RNNT_CONTRACT=off \
      -Cinstall.strip=false
    LD_PRELOAD="$(library asan) $(library ubsan)" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
      UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 quick '' --ignore tests/transforms/test_memory.py "$@"
    ;;
  threads) # it sees the module's code, not jaxlib's; its memory must not lie at random places
    FREE=${FREE:-python3.14t}
    need "$FREE" 'a CPython without a GIL; FREE=COMMAND names another one'
    need setarch 'install util-linux; the tests are for Linux'
    environment build/threads "$FREE" '.[test]' -Ccmake.define.JAX_RNNT_SANITIZE=thread -Cinstall.strip=false
    LD_PRELOAD=$(library tsan) JAX_PLATFORMS=cpu \
      TSAN_OPTIONS="exitcode=66 ignore_noninstrumented_modules=1 suppressions=$PWD/lab/fuzz/threads.supp" \
      setarch -R build/threads/bin/python -m pytest -q -p no:xdist tests/kernels/test_threads.py "$@"
    ;;
  gpu-compile) # XLA asks for names and sizes alone: those of the emulation do
    environment build/gpu-compile "${PYTHON:-python3}" '.[test]' 'jax[cuda13-local]' -Ccmake.define.JAX_RNNT_EMULATE=ON
    echo 'from jax_rnnt._cpu import *' > "$JAX_RNNT_INSTALLED/jax_rnnt/_cuda.py"
    JAX_RNNT_REQUIRE=gpu-compile JAX_PLATFORMS=cpu build/gpu-compile/bin/pytest -q lab/tests/test_gpu_compile.py "$@"
    ;;
  *)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
    ;;
esac
