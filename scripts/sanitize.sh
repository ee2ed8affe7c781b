#!/usr/bin/env bash
# Runs the stress test of the index, readers against writers, under the thread sanitizer; needs a nightly toolchain. (The
# fuzz targets run under the address sanitizer: scripts/fuzz.sh.)
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if ! cargo +nightly --version >/dev/null 2>&1; then
  say "no nightly toolchain: the thread sanitizer is not run"
  printf '0 passed, 0 failed, 1 skipped\n'
  exit 0
fi
# The standard library is not instrumented: the channel by which the test harness hears of its tests, and a value that is
# set once, look like races.
suppressions=$target/tsan-suppressions
mkdir -p "$target"
printf 'race:%s\n' std::sync::mpmc sync::once >"$suppressions"
RUSTFLAGS='-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer' TSAN_OPTIONS="suppressions=$suppressions" \
  CARGO_TARGET_DIR="$target/tsan" \
  cargo +nightly test -p kvlane --release --target x86_64-unknown-linux-gnu --test index_stress
