#!/usr/bin/env bash
# Runs the tests against real vLLM servers.
#
#   tests/engines/run.sh [pytest arguments]
#   tests/engines/run.sh --capture     write tests/fixtures/vllm-<version>/ again instead of testing
#
# Environment:
#   KVLANE_BIN              the kvlane binary (default: release build of this checkout, built when missing)
#   KVLANE_CACHE            cache folder of the vLLM installation, see setup.sh
#   KVLANE_ENGINES_TIMEOUT  seconds for the whole run of pytest (default 900)
#   KVLANE_ENGINES_KEEP     when set, logs are kept even if everything passed
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)

"$here/setup.sh"
root=$("$here/setup.sh" --path)

if [ "${1:-}" = --capture ]; then
  command=(capture.py)
  KVLANE_BIN=/bin/true
else
  command=(-m pytest -p no:cacheprovider --durations=0 --durations-min=0.5 -v "$@")
fi

if [ -z "${KVLANE_BIN:-}" ]; then
  KVLANE_BIN=${CARGO_TARGET_DIR:-$checkout/target}/release/kvlane
  if [ ! -x "$KVLANE_BIN" ]; then
    printf 'engines: building %s\n' "$KVLANE_BIN" >&2
    (cd "$checkout" && cargo build --release -p kvlane-sidecar)
  fi
fi
[ -x "$KVLANE_BIN" ] || { printf 'engines: error: no executable at KVLANE_BIN=%s\n' "$KVLANE_BIN" >&2; exit 2; }
KVLANE_BIN=$(realpath "$KVLANE_BIN")

run=$(mktemp -d "${TMPDIR:-/tmp}/kvlane-engines.XXXXXX")
mkdir -p "$run/groups"
export KVLANE_BIN KVLANE_ENGINES_RUN=$run
export KVLANE_VLLM_PYTHON=$root/venv/bin/python KVLANE_VLLM_MODEL=$root/model
export PYTHONDONTWRITEBYTECODE=1

# Each process that the tests start leads a group and is noted as groups/<id> for as long as it may live. A note is
# only trusted when the group still carries this run's folder in its environment, since ids are used again.
end_groups() {
  local note id member
  for note in "$run"/groups/*; do
    [ -e "$note" ] || continue
    id=$(basename "$note")
    for member in $(ps -eo pid=,pgid= | awk -v g="$id" '$2 == g {print $1}'); do
      if tr '\0' '\n' < "/proc/$member/environ" 2>/dev/null | grep -qxF "KVLANE_ENGINES_RUN=$run"; then
        printf 'engines: ending %s, left over in group %s\n' "$(cat "$note")" "$id" >&2
        kill -KILL -- "-$id" 2>/dev/null || true
        break
      fi
    done
    rm -f "$note"
  done
}

status=1
finish() {
  trap - EXIT
  trap '' INT TERM HUP
  if [ -n "${pytest_pid:-}" ] && kill -0 "$pytest_pid" 2>/dev/null; then
    kill -INT "$pytest_pid" 2>/dev/null || true
    for _ in $(seq 100); do kill -0 "$pytest_pid" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$pytest_pid" 2>/dev/null || true
  fi
  end_groups
  if [ "$status" -eq 0 ] && [ -z "${KVLANE_ENGINES_KEEP:-}" ]; then
    rm -rf "$run"
  else
    printf 'engines: logs are in %s/logs\n' "$run" >&2
  fi
  exit "$status"
}
trap finish EXIT
trap 'status=130; exit' INT
trap 'status=143; exit' TERM HUP

cd "$here"
# In the background, so that bash runs its traps at once. SIGINT makes pytest end its fixtures; KILL follows.
timeout --signal=INT --kill-after=40 "${KVLANE_ENGINES_TIMEOUT:-900}" "$KVLANE_VLLM_PYTHON" "${command[@]}" &
pytest_pid=$!
set +e
wait "$pytest_pid"
status=$?
set -e
[ "$status" -ne 124 ] || printf 'engines: stopped after KVLANE_ENGINES_TIMEOUT\n' >&2
exit "$status"
