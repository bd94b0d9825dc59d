#!/usr/bin/env bash
# Every check of the kernels without a GPU, before a commit that changes them: the emulation, and what calls the CPU kernels
# most under sanitizers. It records their sources in xla_kernels/checked.txt. --quick: a part. --changed: all where the
# sources are not those of the record, else a part.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
mode=${1-}
if [[ $mode == --changed ]] && "$PYTHON" lab/emulation/checked.py; then mode=--quick; fi
tests=(tests/kernels/test_door.py tests/losses/test_targets.py)
if [[ $mode != --quick ]]; then
  tests+=(tests/losses/test_{edges,promises,offsets,emissions,lattices}.py)
  unset ONLY
fi
"$PYTHON" lab/emulation/checks.py ${mode:+$([[ $mode == --quick ]] && echo --quick)}
lab/suite.sh sanitize -q -x -k 'not reference' "${tests[@]}"
[[ $mode == --quick ]] || "$PYTHON" lab/emulation/checked.py --write
