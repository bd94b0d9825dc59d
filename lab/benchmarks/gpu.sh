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

PARTS=(build joint searches check selftest librispeech benchmark counters decode suite large memcheck racecheck example)
SETTLED=' benchmark counters decode example ' # have a record: they run only where they are named
TOGETHER=' selftest suite large memcheck racecheck example ' # time nothing, so they run side by side, at the end
# Time limits in seconds. Those of the others and the longest of these add up to less than ten minutes.
declare -A SECONDS_OF=([build]=110 [joint]=170 [searches]=70 [check]=30 [selftest]=120 [benchmark]=120 [counters]=70 [librispeech]=50 [decode]=80 [suite]=120
  [large]=120 [memcheck]=60 [racecheck]=120 [example]=120)
# B, T, U, V: the first stands for LibriSpeech; the second has the narrowest rows. There XLA compiles plain JAX for two
# minutes, so the last alone has the other contestants.
SHAPES=('30 400 80 500 --alone' '64 1000 200 32 --alone' '30 400 80 500 --alone --loss tdt' '8 250 50 4096 --alone' '30 400 80 500')
# By ncu, for each kernel of the first three shapes: issue slots and DRAM, then what L1 does for loads of global memory. Those of L1 tell whether rows of a lane each (V = 32) take a cycle a cache line or a sector.
LOADS=pipe_lsu_mem_global_op_ld.sum
COUNTERS=gpu__time_duration.sum,sm__inst_issued.avg.pct_of_peak_sustained_active,sm__inst_issued.avg.per_cycle_active
COUNTERS+=,dram__throughput.avg.pct_of_peak_sustained_elapsed
L1=l1tex__t_requests_$LOADS,l1tex__t_sectors_$LOADS,l1tex__t_set_accesses_$LOADS,l1tex__t_output_wavefronts_$LOADS
L1+=,l1tex__data_pipe_lsu_wavefronts.sum,l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active
KERNELS=(xla_kernels/cuda/{softmax_emission,lattice,skip_lattice,joint,devices}.cu)

run_part() {
  if [[ $DRY_RUN ]]; then SHAPES=('2 12 5 7 --alone --loss tdt'); fi
  case $1 in
    build)
      rm -rf build/gpu/site
      compile_check > build/gpu/check.log 2>&1 &
      local check=$!
      install site "-Ccmake.define.JAX_RNNT_CUDA=on" "-Ccmake.define.CMAKE_CUDA_ARCHITECTURES=$ARCHITECTURE-real"
      local code=$?
      wait $check || { code=$?; cat build/gpu/check.log; }
      if [[ $DRY_RUN ]]; then
        install emulation-site "-Ccmake.define.JAX_RNNT_EMULATE=ON" || code=$?
        "${CXX:-g++}" -std=c++17 -O1 -w -I. -x c++ "${KERNELS[@]}" \
          lab/emulation/{cuda_emulation,check}.cc -o build/gpu/check-emulated -pthread || code=$?
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
    suite)
      local tests=(--ignore=tests/kernels/test_gpu.py) # a part of its own
      if [[ $DRY_RUN ]]; then tests=(tests/losses/test_values.py tests/kernels/test_kernel_choice.py); fi
      # Without autotuning: the matmuls of the tests are not worth it.
      XLA_FLAGS=--xla_gpu_autotune_level=0 pytest -n "$((DRY_RUN ? 2 : 16))" --dist worksteal -m 'not slow and not no_kernel' -k 'not reference' \
        "${tests[@]}"
      ;;
    large)
      if [[ $DRY_RUN ]]; then
        pytest -m 'not slow' tests/kernels/test_gpu.py
      else
        pytest -n 4 --dist worksteal tests/kernels/test_gpu.py
      fi
      ;;
    example)
      local options=(--expect-cer 3)
      if [[ $DRY_RUN ]]; then options=(--steps 4 --batch 4); fi
      PYTHONPATH=$PWD/speech:$PYTHONPATH "$PYTHON" -P -m jax_rnnt_speech train --config speech/recipes/corpora/handwritten_digits.json --overwrite --workdir build/gpu/example "${options[@]}" 2>&1 | tr "\r" "\n" | tail -n 12
      ;;
    benchmark) # loss and gradient, beside a copy
      local shape dtype
      for shape in "${SHAPES[@]}"; do
        for dtype in float32 bfloat16; do
          "$PYTHON" -P -m jax_rnnt bench $shape --dtype $dtype | tee -a "$OUT/bench.txt" || return
        done
      done
      ;;
    counters) # of the first step
      local steps=("$PYTHON" -P -m jax_rnnt bench)
      for shape in "${SHAPES[@]:0:3}"; do
        # Without command buffers, whose kernels ncu may see as one.
        profile "$COUNTERS,$L1" "${steps[@]}" $shape || return
        profile "$COUNTERS" "${steps[@]}" $shape --dtype bfloat16 || return
      done
      ;;
    joint) # ours, tiles, those of others, and the bare products
      local options=(--limit "$((SECONDS_OF[joint] - 30))" --budget 1 --repeat 20)
      if [[ $DRY_RUN ]]; then options=(--shrink 40 --share 0.04 --limit 30 --budget 0.1 --repeat 1); fi
      if [[ -d $FLASH ]]; then options+=(--flash "$FLASH"); fi
      "$PYTHON" lab/benchmarks/peers.py joint --products --torch-python "$TORCH_PYTHON" "${options[@]}" \
        --output "$OUT/joint.json" | tee "$OUT/joint.txt"
      ;;
    searches) # at the sizes of Parakeet TDT 0.6B
      local options=(--only parakeet\ {1,8,16,128} --frames 100 --budget 1 --repeat 20)
      if [[ $DRY_RUN ]]; then options=(--only 'parakeet 1' --frames 10 --budget 0.1 --repeat 1); fi
      "$PYTHON" benchmarks/decode.py "${options[@]}" --output "$OUT/parakeet-search.json"
      ;;
    decode)
      local options=(--only 'lstm 16' 'stateless 128' --frames 200 --budget 1 --repeat 5)
      if [[ $DRY_RUN ]]; then options=(--only 'lstm 1' --frames 20 --budget 0.1 --repeat 1); fi
      "$PYTHON" benchmarks/decode.py "${options[@]}" --output "$OUT/decode.json"
      ;;
    librispeech)
      local options=(--limit "$((SECONDS_OF[librispeech] - 15))" --budget 1 --repeat 5)
      if [[ $DRY_RUN ]]; then options=(--batches 1 --repeat 1 --share 0.1 --shrink 20); fi
      "$PYTHON" lab/benchmarks/peers.py joint --torch-python "$TORCH_PYTHON" --librispeech "${options[@]}" --output "$OUT/librispeech.json"
      ;;
  esac
}

# Builds without isolation, so against the XLA headers of the installed jaxlib, which will run the module.
install() {
  local folder=$1
  shift
  rm -rf "build/gpu/$folder"
  "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-index --target "build/gpu/$folder" \
    "-Cbuild-dir=build/gpu/objects-$folder" "$@" .
}

compile_check() {
  local source pids=()
  mkdir -p build/gpu/check.d
  for source in "${KERNELS[@]}" lab/emulation/check.cc; do
    nvcc -x cu -std=c++17 -O2 -lineinfo -w -I. --extended-lambda --expt-relaxed-constexpr \
      "-gencode=arch=compute_$ARCHITECTURE,code=sm_$ARCHITECTURE" -c "$source" \
      -o "build/gpu/check.d/$(basename "$source").o" &
    pids+=($!)
  done
  for source in "${pids[@]}"; do wait "$source" || return; done
  nvcc -Xcompiler -pthread build/gpu/check.d/*.o -o build/gpu/check
}

profile() {
  local metrics=$1
  shift
  if [[ $DRY_RUN ]]; then "$@"; return; fi
  XLA_FLAGS=--xla_gpu_enable_command_buffer= ncu --clock-control none --launch-count 6 --kill yes \
    --kernel-name 'regex:Forward|Backward|Skew|Sweep|Total|Loss' --metrics "$metrics" "$@" | tee build/gpu/profile.txt | tee -a "$OUT/counters.txt"
  grep -q dram build/gpu/profile.txt # --kill ends the program with an error
}

sanitizer() {
  if [[ $DRY_RUN ]]; then $1; else compute-sanitizer --error-exitcode 9 "${@:2}" $1; fi
}

# Only warnings of this library are errors, not those of the driver or of JAX's plugin.
pytest() { "$PYTHON" -P -m pytest -p no:benchmark -q --tb=short -W default -W error:jax_rnnt "$@"; }

# The script calls itself for each part, so that `timeout` can end the part and all that it started.
if [[ ${1-} == --part ]]; then
  echo $PPID > "build/gpu/group-$2" # timeout leads the group of all that the part starts
  run_part "$2"
  exit
fi

DRY_RUN=
if [[ ${1-} == --dry-run ]]; then
  DRY_RUN=1
  shift
fi
if [[ $DRY_RUN ]]; then
  OUT=build/gpu/dry-run
  JAX_PLATFORMS=cpu JAX_RNNT_REQUIRE=cpu ARCHITECTURE=90
  CHECK=build/gpu/check-emulated SITE=$PWD/build/gpu/emulation-site
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
export JAX_RNNT_KERNELS=all # also those that no device has shown to be right: this is where they show it
export TORCH_PYTHON=${TORCH_PYTHON:-$PYTHON}
LIMIT=${LIMIT:-$((DRY_RUN ? 9000 : 585))}

chosen=("$@")
if [[ $# == 0 ]]; then
  for part in "${PARTS[@]}"; do
    [[ $DRY_RUN || $SETTLED != *" $part "* ]] && chosen+=("$part")
  done
fi

run() {
  local part=$1 most begun code took
  most=$((DRY_RUN ? 1800 : SECONDS_OF[$part]))
  most=$((LIMIT - SECONDS < most ? LIMIT - SECONDS : most))
  begun=$EPOCHREALTIME code=124
  echo "== $part, $most s at most"
  if ((most > 0)); then
    timeout --signal=INT --kill-after=8 "$most" bash lab/benchmarks/gpu.sh --part "$part"
    code=$?
    kill -KILL -- "-$(cat "build/gpu/group-$part")" 2> /dev/null # what it has left behind would hold the log open
  fi
  took=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begun }")
  printf '%s\t%s\t%s\n' "$part" "$took" "$code" >> "$OUT/parts.tsv"
  echo "== $part: exit code $code after $took s"
  return "$code"
}

main() {
  local failed=0 part
  local -A running
  set -m # without it, what runs in the background ignores SIGINT
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader || true
  for part in "${chosen[@]}"; do
    [[ ${SECONDS_OF[$part]-} ]] || { echo "no such part: $part; there are ${PARTS[*]}"; return 2; }
  done
  rm -f "$OUT"/{parts.tsv,joint.txt,bench.txt,counters.txt}
  for part in "${PARTS[@]}"; do
    if [[ " ${chosen[*]} " != *" $part "* ]]; then
      continue
    elif [[ $TOGETHER == *" $part "* ]]; then
      run "$part" > "build/gpu/$part.log" 2>&1 &
      running[$part]=$!
    else
      run "$part" || failed=1
    fi
  done
  for part in "${!running[@]}"; do
    wait "${running[$part]}" || failed=1
    cat "build/gpu/$part.log"
  done
  echo "== part, seconds, exit code"
  cat "$OUT/parts.tsv"
  return $failed
}

# A pipe, whose end the shell awaits, so that the log has the last lines.
main 2>&1 | tee "$OUT/gpu.log"
exit "${PIPESTATUS[0]}"
