#!/usr/bin/env bash
# On a Mac with an ARM processor: its wheel, for every interpreter, into dist; the checkout gets its kernels.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ "$(uname -sm)" != "Darwin arm64" ]]; then
  echo "macos_wheel.sh needs a Mac with an ARM processor, got $(uname -sm)" >&2
  exit 2
fi
make --silent .venv/.packages .venv/tools/.installed
PYTHONPATH=lab/release .venv/bin/python -c "import pathlib, sbom; \
  sbom.write(pathlib.Path('build/macos.cdx.json'), pathlib.Path(), None, None, pybind11=False)"
JAX_RNNT_WHEEL=plain MACOSX_DEPLOYMENT_TARGET=11.0 .venv/bin/python -m build --quiet --wheel --outdir dist \
  "-Ccmake.define.JAX_RNNT_SBOM=$PWD/build/macos.cdx.json" .
.venv/bin/pip install --quiet --no-deps --target build/macos-site dist/*.whl
cp build/macos-site/jax_rnnt/_cpu* build/macos-site/jax_rnnt/_build.py jax_rnnt
touch .venv/.kernels
