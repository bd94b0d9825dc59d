#!/usr/bin/env bash
# The wheels of a release, into dist: `make wheels`. Environment: NVCC=PATH names a compiler of CUDA 12 in place of the one
# that is laid out in build/cuda12, off leaves CUDA out; MACHINES=x86_64 leaves ARM out. Arguments are those of wheels.py.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
for machine in ${MACHINES:-x86_64 aarch64}; do
  compiler=$machine-linux-gnu-g++
  if [[ $machine != "$(uname -m)" ]] && ! command -v "$compiler" > /dev/null; then
    echo "wheels.sh: no $compiler: install it (Debian, Ubuntu: apt install g++-${machine//_/-}-linux-gnu), or go without:" \
      "make wheels MACHINES=$(uname -m)" >&2
    exit 2
  fi
done
NVCC=${NVCC:-$("$PYTHON" lab/release/cuda12.py build/cuda12)}
for machine in ${MACHINES:-x86_64 aarch64}; do
  CUDACXX=$NVCC "$PYTHON" lab/release/wheels.py --machine "$machine" "$@"
done
