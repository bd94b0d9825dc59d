#!/usr/bin/env bash
# What no user needs: the library's tests on other kernels and builds, and studies with large packages.
#
#   lab/run.sh kernels        every check of the kernels without a GPU: before a release or a commit that changes them
#   lab/run.sh emulation      the tests on the CUDA kernels, run by the CPU
#   lab/run.sh interpret      on the Pallas kernels for TPUs, interpreted by the CPU; the emission is XLA's there
#   lab/run.sh sanitize       on the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer
#   lab/run.sh fuzz           random calls of the CPU kernels under the same, then of 16 threads under ThreadSanitizer
#   lab/run.sh threads        those of threads under ThreadSanitizer, in a CPython without a GIL: FREE names one
#   lab/run.sh gpu-compile    training steps compiled for eight GPUs, without one
#   lab/run.sh searches       what a step of the searches launches on an H100 and a B200; cycles of a TPU v5e
#   lab/run.sh training       memory and launches of a training step of a Parakeet, on one H100 and on eight TPUs v5e
#   lab/run.sh parakeet       a training step of transformers beside ours, in time and memory; alone on the machine
#   lab/run.sh tpu            the losses compiled for five generations of TPUs
#   lab/run.sh coming-from    the programs of docs/coming_from beside other libraries, in the versions that the pages name
#
# Further arguments are those of pytest, or of the program. ONLY=avx2: the CPU kernels for that instruction set alone.
set -euo pipefail
cd "$(dirname "$0")/.."
source lab/steps.sh
export JAX_RNNT_KERNELS=all # no device has shown that the kernels of joint networks and those of TPUs are right
PYTHON=${PYTHON:-python3} PIP=.venv/tools/bin/pip CXX=${CXX:-g++} FREE=${FREE:-python3.14t}
mode=${1-}
shift || true

need() {
  command -v "$1" > /dev/null || { echo "run.sh: no $1: $2" >&2; exit 2; }
}

# The package alone, in a folder of its own: build NAME OPTIONS.
build() {
  need "$CXX" 'install a C++ compiler (Debian, Ubuntu: apt install g++)'
  make --silent .venv/.packages .venv/tools/.installed
  package "$1" "-Ccmake.define.JAX_RNNT_ONLY=${ONLY-}" "${@:2}"
  export JAX_RNNT_INSTALLED=$PWD/build/$1
}

# An environment with these packages, build/MODE, and what to call there: environment PYTHON PACKAGES.
environment() {
  test -x "build/$mode/bin/python" || "$1" -m venv "build/$mode"
  "build/$mode/bin/pip" install --quiet "-Cbuild-dir=build/$mode-objects" "${@:2}"
  JAX_RNNT_INSTALLED=$("build/$mode/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  export JAX_RNNT_INSTALLED
}

# The same, where XLA compiles for CUDA. It asks for names and sizes of kernels alone: those of the emulation do.
emulated() {
  environment "$PYTHON" "$@" -Ccmake.define.JAX_RNNT_EMULATE=ON
  echo 'from jax_rnnt._cpu import *' > "$JAX_RNNT_INSTALLED/jax_rnnt/_cuda.py"
}

library() { "$CXX" -print-file-name="lib$1.so"; }
# Under sanitizers: of memory, without products and sums in one instruction, since rounding must not matter; of threads,
# which sees the module's code, not jaxlib's, and whose memory must not lie at random places.
memory() {
  build sanitize '-Ccmake.define.JAX_RNNT_SANITIZE=address,undefined' -Ccmake.define.JAX_RNNT_CONTRACT=off \
    -Cinstall.strip=false
  LD_PRELOAD="$(library asan) $(library ubsan)" PYTHONPATH=$JAX_RNNT_INSTALLED ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 "$@"
}
unordered() {
  need setarch 'install util-linux; the tests are for Linux'
  LD_PRELOAD=$(library tsan) PYTHONPATH=$JAX_RNNT_INSTALLED JAX_PLATFORMS=cpu \
    TSAN_OPTIONS="exitcode=66 ignore_noninstrumented_modules=1 suppressions=$PWD/lab/fuzz/threads.supp" \
    setarch -R "$@"
}
quick() { .venv/bin/pytest -n auto --dist worksteal -m "not slow$1" "${@:2}"; }

case $mode in
  kernels)
    unset ONLY
    "$PYTHON" lab/emulation/checks.py
    lab/run.sh sanitize -q -x -k 'not reference' tests/kernels/test_door.py \
      tests/losses/test_{targets,edges,promises,offsets,emissions,lattices}.py
    ;;
  emulation)
    build emulation -Ccmake.define.JAX_RNNT_EMULATE=ON
    JAX_RNNT_REQUIRE=cpu quick ' and not no_kernel' -k 'not reference' "$@"
    ;;
  interpret)
    make --silent setup "ONLY=${ONLY-}"
    (($#)) || set -- tests/kernels/test_tpu.py tests/losses/test_{lattices,values,gradients,promises,edges,accuracy,family}.py \
      tests/transforms/test_{sharding,vmap,remat,export}.py
    JAX_RNNT_INTERPRET=1 quick '' -k 'not reference and not symbolic' "$@"
    ;;
  sanitize) memory quick '' --ignore tests/transforms/test_memory.py "$@" ;;
  fuzz)
    memory .venv/bin/python lab/fuzz/fuzz.py "$@"
    build fuzz -Ccmake.define.JAX_RNNT_SANITIZE=thread -Cinstall.strip=false
    unordered .venv/bin/python lab/fuzz/fuzz.py --threads 16 "$@"
    ;;
  threads)
    need "$FREE" 'a CPython without a GIL; FREE=COMMAND names another one'
    environment "$FREE" '.[test]' -Ccmake.define.JAX_RNNT_SANITIZE=thread -Cinstall.strip=false
    unordered build/threads/bin/python -m pytest -q -p no:xdist tests/kernels/test_threads.py "$@"
    ;;
  gpu-compile)
    emulated '.[test]' 'jax[cuda13-local]'
    JAX_RNNT_REQUIRE=gpu-compile JAX_PLATFORMS=cpu build/gpu-compile/bin/pytest -q lab/tests/test_gpu_compile.py "$@"
    ;;
  searches)
    environment "$PYTHON" '.[test]' 'jax[cuda13-local]' 'jax[tpu]'
    JAX_RNNT_REQUIRE=searches build/searches/bin/pytest -q lab/tests/test_searches.py
    build/searches/bin/python lab/benchmarks/searches.py "$@"
    ;;
  training)
    emulated . ./speech 'jax[cuda13-local]' 'jax[tpu]'
    build/training/bin/python lab/benchmarks/training.py "$@"
    ;;
  parakeet)
    environment "$PYTHON" . ./speech torch torchaudio transformers
    build/parakeet/bin/python lab/benchmarks/parakeet.py "$@"
    ;;
  tpu)
    environment "$PYTHON" . 'jax[tpu]'
    build/tpu/bin/python lab/benchmarks/tpu.py "$@"
    ;;
  coming-from)
    environment "$PYTHON" '.[test,metrics]' -r docs/coming_from/requirements.txt
    build/coming-from/bin/pip install --quiet --no-deps espnet==202511 # it wants a setuptools that torch refuses
    build/coming-from/bin/python -m pytest -q -p no:xdist -k 'coming_from or peers' tests/tools/test_docs.py lab/tests/test_peers.py "$@"
    ;;
  *)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
    ;;
esac
