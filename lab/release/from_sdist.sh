#!/usr/bin/env bash
# The kernels of the source distribution, built apart from this folder and isolated, and their own check of themselves. The
# checkout gets them, with their record for make; its Python is the same. ONLY=avx2: for that instruction set alone.
set -euo pipefail
cd "$(dirname "$0")/../.."

make --silent .venv/.packages .venv/tools/.installed
site=$PWD/build/sdist/site
rm -rf build/sdist
.venv/tools/bin/python -c "from scikit_build_core import build; build.build_sdist('build/sdist')"
.venv/bin/pip install --quiet --no-deps --target "$site" "--config-settings=cmake.define.JAX_RNNT_ONLY=${ONLY-}" \
  build/sdist/jax_rnnt-*.tar.gz
(cd build && PYTHONPATH=$site ../.venv/bin/python -c "import jax_rnnt; assert len(jax_rnnt.selftest()) > 1")
cp "$site"/jax_rnnt/_cpu* "$site/jax_rnnt/_build.py" jax_rnnt
diff -r -x __pycache__ -x DECISIONS.md -x '_cpu.*.so' jax_rnnt "$site/jax_rnnt"
touch ".venv/.kernels${ONLY-}"
