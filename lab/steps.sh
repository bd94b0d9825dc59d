# What .ci/run, lab/run.sh and lab/benchmarks/gpu.sh share. Each sources this file at the root of the repository.

# step COMMAND: runs it, and says how long it took and how it ended, which $took and the status hold.
# LIMIT=SECONDS: ends the command and all that it started after so long.
step() {
  local begun=$EPOCHREALTIME code=0 group
  if [[ ! ${LIMIT-} ]]; then
    "$@" || code=$?
  elif ((LIMIT <= 0)); then
    code=124
  else
    set -m # without it, what runs in the background ignores SIGINT
    timeout --signal=INT --kill-after=8 "$LIMIT" "$@" &
    group=$! # timeout leads the group of all that the command starts
    wait "$group" || code=$?
    kill -KILL -- "-$group" 2> /dev/null || true # what is left would hold the log open
  fi
  took=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begun }")
  echo "== $took s, exit code $code: $*"
  return "$code"
}

# together COMMAND COMMAND: runs them side by side, and shows the log of each as a whole, build/logs/LAST_WORD.log.
together() {
  local command name failed=0
  local -A running
  mkdir -p build/logs
  for command in "$@"; do
    name=${command##* }
    $command > "build/logs/$name.log" 2>&1 &
    running[$name]=$!
  done
  for command in "$@"; do
    name=${command##* }
    wait "${running[$name]}" || failed=1
    cat "build/logs/$name.log"
  done
  return $failed
}

# package FOLDER OPTIONS: the package alone, in build/FOLDER, built by these options of $PIP.
package() {
  rm -rf "build/$1"
  $PIP install --quiet --no-deps --no-build-isolation --target "build/$1" "-Cbuild-dir=build/$1-objects" "${@:2}" .
}
