#!/usr/bin/env bash
# Runs everything that needs a GPU, in one command, under ten minutes and without network. See lab/cuda.md.
#
#   lab/benchmarks/gpu.sh                    all parts but those that have a record of these kernels already
#   lab/benchmarks/gpu.sh build benchmark    some of them
#   lab/benchmarks/gpu.sh --dry-run          the same without a GPU: emulated kernels, tiny sizes, nothing kept
#
# Needs Python with jax for CUDA, pytest, pytest-xdist, chex, flatbuffers, pybind11 and scikit-build-core, the packages of
# speech/, cmake, ninja, nvcc; torch, torchaudio and transformers for the comparison, compute-sanitizer for memcheck and
# racecheck, ncu for counters.
# Environment, with defaults: PYTHON (python3); OUT, the folder of results (lab/benchmarks/results); COMMIT, the commit, if
# git does not know it; LIMIT, seconds of all parts together (585); TORCH_PYTHON (PYTHON), which has torch, torchaudio and
# transformers, where these have another environment than JAX; FLASH (build/flash), a folder with three files of NeMo's
# Flash RNN-T of 2026-08: flash_rnnt.py, rnnt_joint.py and rnnt_loss.py.
#
# Parts come in the order of what they teach first. Every part has its own time limit and runs even if others fail; the
# exit code is 1 if any failed. Results: joint.json, joint.txt, bench.txt, librispeech.json, counters.txt, parts.tsv
# (part, seconds, exit code), gpu.log.
set -uo pipefail
cd "$(dirname "$0")/../.."
source lab/steps.sh

# With time limits in seconds; without those that have a record, they add up to less than ten minutes.
PARTS=(build joint searches check librispeech benchmark counters)
TOGETHER=(selftest suite large memcheck racecheck example) # time nothing, so they run side by side, at the end
SETTLED=' benchmark counters example ' # have a record: they run only where they are named
declare -A SECONDS_OF=([build]=110 [joint]=170 [searches]=70 [check]=30 [librispeech]=50 [benchmark]=120 [counters]=70
  [selftest]=120 [suite]=120 [large]=120 [memcheck]=60 [racecheck]=120 [example]=120)
# B, T, U, V: the first stands for LibriSpeech; the second has the narrowest rows. There XLA compiles plain JAX for two
# minutes, so the last alone has the other contestants.
SHAPES=('30 400 80 500 --alone' '64 1000 200 32 --alone' '30 400 80 500 --alone --loss tdt' '8 250 50 4096 --alone' '30 400 80 500')
# By ncu, for each kernel of the first three shapes: issue slots and DRAM, then what L1 does for loads of global memory. Those of L1 tell whether rows of a lane each (V = 32) take a cycle a cache line or a sector.
LOADS=pipe_lsu_mem_global_op_ld.sum
COUNTERS=gpu__time_duration.sum,sm__inst_issued.avg.pct_of_peak_sustained_active,sm__inst_issued.avg.per_cycle_active
COUNTERS+=,dram__throughput.avg.pct_of_peak_sustained_elapsed
L1=l1tex__t_requests_$LOADS,l1tex__t_sectors_$LOADS,l1tex__t_set_accesses_$LOADS,l1tex__t_output_wavefronts_$LOADS
L1+=,l1tex__data_pipe_lsu_wavefronts.sum,l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active

# sized ARGUMENTS -- ARGUMENTS: the first ones on a GPU, the others without, into $options.
sized() {
  options=()
  while [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  if [[ $DRY_RUN ]]; then options=("${@:2}"); fi
}

run_part() {
  local options shape dtype
  case $1 in
    build)
      compile_check > build/gpu/check.log 2>&1 &
      local check=$! code=0
      package gpu/site "-Ccmake.define.JAX_RNNT_CUDA=on" "-Ccmake.define.CMAKE_CUDA_ARCHITECTURES=$ARCHITECTURE-real" || code=$?
      wait $check || { code=$?; cat build/gpu/check.log; }
      if [[ $DRY_RUN ]]; then
        package gpu/emulation-site "-Ccmake.define.JAX_RNNT_EMULATE=ON" || code=$?
        "$PYTHON" lab/emulation/checks.py --quick || code=$?
      fi
      return $code
      ;;
    selftest) "$PYTHON" -P -c "import jax_rnnt; assert len(jax_rnnt.selftest()) > 1" ;;
    check) # both runs must give the same bits
      local first second
      first=$("$CHECK") && second=$("$CHECK")
      local code=$?
      printf '%s\n' "$first"
      [[ $code == 0 && $first == "$second" ]]
      ;;
    memcheck) sanitizer "$CHECK" --tool memcheck --padding 32 ;;
    racecheck) sanitizer "$CHECK 10000" --tool racecheck ;; # without the largest 30 problems: all took more than 120 s
    suite) # without autotuning, which the matmuls of the tests are not worth, and without what is a part of its own
      sized -n 16 --ignore=tests/kernels/test_gpu.py -- -n 2 tests/losses/test_values.py tests/kernels/test_kernel_choice.py
      XLA_FLAGS=--xla_gpu_autotune_level=0 pytest --dist worksteal -m 'not slow and not no_kernel' -k 'not reference' "${options[@]}"
      ;;
    large)
      sized -n 4 --dist worksteal -- -m 'not slow'
      pytest "${options[@]}" tests/kernels/test_gpu.py
      ;;
    example)
      sized --expect-cer 3 -- --steps 4 --batch 4
      PYTHONPATH=$PWD/speech:$PYTHONPATH "$PYTHON" -P -m jax_rnnt_speech train --config speech/recipes/corpora/handwritten_digits.json --overwrite \
        --workdir build/gpu/example "${options[@]}" 2>&1 | tr "\r" "\n" | tail -n 12
      ;;
    benchmark) # loss and gradient, beside a copy
      for shape in "${SHAPES[@]}"; do
        for dtype in float32 bfloat16; do
          "$PYTHON" -P -m jax_rnnt bench $shape --dtype $dtype | tee -a "$OUT/bench.txt" || return
        done
      done
      ;;
    counters) # of the first step
      for shape in "${SHAPES[@]:0:3}"; do
        profile "$COUNTERS,$L1" $shape && profile "$COUNTERS" $shape --dtype bfloat16 || return
      done
      ;;
    joint) # ours, tiles, those of others, and the bare products
      sized --limit "$((SECONDS_OF[joint] - 30))" --budget 1 --repeat 20 -- --shrink 40 --share 0.04 --limit 30 --budget 0.1 --repeat 1
      if [[ -d $FLASH ]]; then options+=(--flash "$FLASH"); fi
      "$PYTHON" lab/benchmarks/peers.py joint --products --torch-python "$TORCH_PYTHON" "${options[@]}" \
        --output "$OUT/joint.json" | tee "$OUT/joint.txt"
      ;;
    searches) # at the sizes of Parakeet TDT 0.6B
      sized --only parakeet\ {1,8,16,128} --frames 100 --budget 1 --repeat 20 -- --only 'parakeet 1' --frames 10 --budget 0.1 --repeat 1
      "$PYTHON" benchmarks/decode.py "${options[@]}" --output "$OUT/parakeet-search.json"
      ;;
    librispeech)
      sized --limit "$((SECONDS_OF[librispeech] - 15))" --budget 1 --repeat 5 -- --batches 1 --repeat 1 --share 0.1 --shrink 20
      "$PYTHON" lab/benchmarks/peers.py joint --torch-python "$TORCH_PYTHON" --librispeech "${options[@]}" --output "$OUT/librispeech.json"
      ;;
  esac
}

# The kernels and their check program, by nvcc.
compile_check() {
  local source pids=()
  mkdir -p build/gpu/check.d
  for source in xla_kernels/cuda/{softmax_emission,lattice,skip_lattice,joint,devices}.cu lab/emulation/check.cc; do
    nvcc -x cu -std=c++17 -O2 -lineinfo -w -I. --extended-lambda --expt-relaxed-constexpr \
      "-gencode=arch=compute_$ARCHITECTURE,code=sm_$ARCHITECTURE" -c "$source" \
      -o "build/gpu/check.d/$(basename "$source").o" &
    pids+=($!)
  done
  for source in "${pids[@]}"; do wait "$source" || return; done
  nvcc -Xcompiler -pthread build/gpu/check.d/*.o -o build/gpu/check
}

# profile METRICS ARGUMENTS: of `bench`, without command buffers, whose kernels ncu may see as one.
profile() {
  local steps=("$PYTHON" -P -m jax_rnnt bench "${@:2}")
  if [[ $DRY_RUN ]]; then "${steps[@]}"; return; fi
  XLA_FLAGS=--xla_gpu_enable_command_buffer= ncu --clock-control none --launch-count 6 --kill yes \
    --kernel-name 'regex:Forward|Backward|Skew|Sweep|Total|Loss' --metrics "$1" "${steps[@]}" | tee build/gpu/profile.txt | tee -a "$OUT/counters.txt"
  grep -q dram build/gpu/profile.txt # --kill ends the program with an error
}

sanitizer() {
  if [[ $DRY_RUN ]]; then $1; else compute-sanitizer --error-exitcode 9 "${@:2}" $1; fi
}

# Only warnings of this library are errors, not those of the driver or of JAX's plugin.
pytest() { "$PYTHON" -P -m pytest -p no:benchmark -q --tb=short -W default -W error:jax_rnnt "$@"; }

DRY_RUN=${DRY_RUN-}
if [[ ${1-} == --dry-run ]]; then
  DRY_RUN=1
  shift
fi
if [[ ${1-} == --part ]]; then # the script calls itself for each part, so that `step` can end the part and all that it started
  if [[ $DRY_RUN ]]; then SHAPES=('2 12 5 7 --alone --loss tdt'); fi
  run_part "$2"
  exit
fi

if [[ $DRY_RUN ]]; then
  OUT=build/gpu/dry-run
  JAX_PLATFORMS=cpu JAX_RNNT_REQUIRE=cpu ARCHITECTURE=90
  CHECK=build/emulation-check/plain/check SITE=$PWD/build/gpu/emulation-site
else
  OUT=${OUT:-lab/benchmarks/results}
  JAX_PLATFORMS=cuda,cpu JAX_RNNT_REQUIRE=cuda
  ARCHITECTURE=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 | tr -d ". ") || { echo "no GPU: --dry-run runs without one"; exit 2; }
  CHECK=build/gpu/check SITE=$PWD/build/gpu/site
fi
mkdir -p "$OUT" build/gpu
PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$SITE${PYTHONPATH:+:$PYTHONPATH}
export DRY_RUN ARCHITECTURE CHECK JAX_PLATFORMS JAX_RNNT_REQUIRE PYTHONPATH PYTHONUNBUFFERED=1 JAX_RNNT_INSTALLED=$SITE
OUT=$(cd "$OUT" && pwd)
export OUT PYTHON=${PYTHON:-python3} FLASH=${FLASH:-build/flash} XLA_PYTHON_CLIENT_PREALLOCATE=false
# Built without isolation, so against the XLA headers of the installed jaxlib, which will run the module.
export PIP="$PYTHON -m pip" PIP_NO_INDEX=1
export JAX_RNNT_KERNELS=all # also those that no device has shown to be right: this is where they show it
export TORCH_PYTHON=${TORCH_PYTHON:-$PYTHON}
LIMIT=${LIMIT:-$((DRY_RUN ? 9000 : 585))}

run() {
  local part=$1 most=$((DRY_RUN ? 1800 : SECONDS_OF[$1])) left=$((LIMIT - SECONDS)) code=0 took
  echo "== $part, $((left < most ? left : most)) s at most"
  LIMIT=$((left < most ? left : most)) step bash lab/benchmarks/gpu.sh --part "$part" || code=$?
  printf '%s\t%s\t%s\n' "$part" "$took" "$code" >> "$OUT/parts.tsv"
  return $code
}

# chosen PART PARTS: whether it is one of these, or one of all where none is named.
chosen() {
  if (($# > 1)); then [[ " ${*:2} " == *" $1 "* ]]; else [[ $DRY_RUN || $SETTLED != *" $1 "* ]]; fi
}

main() {
  local failed=0 part last=()
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader || true
  for part in "$@"; do
    [[ ${SECONDS_OF[$part]-} ]] || { echo "no such part: $part; there are ${PARTS[*]} ${TOGETHER[*]}"; return 2; }
  done
  rm -f "$OUT"/{parts.tsv,joint.txt,bench.txt,counters.txt}
  for part in "${PARTS[@]}"; do
    if chosen "$part" "$@"; then run "$part" || failed=1; fi
  done
  for part in "${TOGETHER[@]}"; do
    if chosen "$part" "$@"; then last+=("run $part"); fi
  done
  together "${last[@]}" || failed=1
  echo "== part, seconds, exit code"
  cat "$OUT/parts.tsv"
  return $failed
}

# A pipe, whose end the shell awaits, so that the log has the last lines.
main "$@" 2>&1 | tee "$OUT/gpu.log"
exit "${PIPESTATUS[0]}"
