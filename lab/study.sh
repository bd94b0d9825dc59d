#!/usr/bin/env bash
# Studies whose packages are large: each has an environment in build/, which is made where it is missing.
#
#   lab/study.sh rivals      the decoders beside those of NeMo, torchaudio and sherpa-onnx: lab/benchmarks/rivals.py
#   lab/study.sh tpu         the losses compiled for five generations of TPUs: lab/benchmarks/tpu.py
#   lab/study.sh mutation    random faults in the Python sources: how many the tests find: lab/mutation/score.py
#
# Further arguments are those of the program.
set -euo pipefail
cd "$(dirname "$0")/.."

study=${1-}
case $study in
  rivals) program=lab/benchmarks/rivals.py
    packages=(. ./speech torch==2.11.0 torchaudio==2.11.0 'nemo_toolkit[asr]==3.0.0' sherpa-onnx==2.0.1 onnx) ;;
  tpu) program=lab/benchmarks/tpu.py packages=(. 'jax[tpu]') ;;
  mutation) program=lab/mutation/score.py packages=('.[all,test]' 'cosmic-ray>=8.7') ;;
  *)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
    ;;
esac
test -x "build/$study/bin/python" || "${PYTHON:-python3}" -m venv "build/$study"
"build/$study/bin/pip" install --quiet "${packages[@]}"
"build/$study/bin/python" "$program" "${@:2}"
