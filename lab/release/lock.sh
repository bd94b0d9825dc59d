#!/usr/bin/env bash
# Renews the versions and hashes of everything that builds and tests: a lock for the library's tests and lint, one for the
# pages, one for speech and recipes, which need the same packages, and those of a release. Options are uv's: --upgrade.
set -euo pipefail
cd "$(dirname "$0")/../.."

compile() {
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
    --no-emit-find-links --custom-compile-command lab/release/lock.sh "$@"
}

for name in wheels cuda12 cudart12; do compile --no-deps "lab/release/$name.in" -o "lab/release/$name.txt" "$@"; done
compile lab/release/check.in -o lab/release/check.txt "$@"
compile pyproject.toml --extra dev --no-emit-package jax-rnnt -o tests/requirements.txt "$@"
compile pyproject.toml --extra all --extra test --no-emit-package jax-rnnt tests/oldest.in -o tests/oldest.txt "$@"
compile pyproject.toml --extra all --no-emit-package jax-rnnt docs/requirements.in -o docs/requirements.txt "$@"
compile speech/pyproject.toml --all-extras --no-emit-package jax-rnnt -o speech/requirements.txt "$@"
