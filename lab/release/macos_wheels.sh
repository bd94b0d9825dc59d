#!/usr/bin/env bash
# On a Mac with an ARM processor: its wheels, one for each interpreter at hand, into dist; the checkout gets the kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ "$(uname -sm)" != "Darwin arm64" ]]; then
  echo "macos_wheels.sh needs a Mac with an ARM processor, got $(uname -sm)" >&2
  exit 2
fi
make --silent .venv/.packages .venv/tools/.installed
.venv/bin/python lab/release/wheels.py
.venv/bin/pip install --quiet --no-deps --no-index --find-links dist --target build/macos-site jax_rnnt
cp build/macos-site/jax_rnnt/_cpu* build/macos-site/jax_rnnt/_build.py jax_rnnt
touch .venv/.kernels
