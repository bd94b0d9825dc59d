#!/usr/bin/env bash
# What .github/workflows/release.yml does before it uploads: the wheels, their files, a second build with the same bytes, and
# tests under the interpreters at hand. Environment: as wheels.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
make --silent setup
test -x build/check/bin/python || "$PYTHON" -m venv build/check
build/check/bin/pip install --quiet --no-deps --no-compile --require-hashes -r lab/release/check.txt
rm -rf dist
lab/release/wheels.sh
CUDACXX=${NVCC:-$("$PYTHON" lab/release/cuda12.py build/cuda12)} build/check/bin/python lab/release/verify.py
"$PYTHON" lab/release/matrix.py --only oldest newest free-threaded pure
