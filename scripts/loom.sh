#!/usr/bin/env bash
# Runs the models of router-core under every order of at most PREEMPTIONS forced switches (default 2: about
# 15 s of running on one core; 3 takes minutes): scripts/loom.sh [PREEMPTIONS]
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

preemptions=${1:-2}
[[ $preemptions =~ ^[1-9]$ ]] || die "PREEMPTIONS is $preemptions, expected 1 to 9"
need_rust
export RUSTFLAGS='--cfg loom' LOOM_MAX_PREEMPTIONS=$preemptions CARGO_TARGET_DIR=$target/loom
cargo test -p kvlane --release --lib -- --test-threads=1 model::
cargo test -p kvlane --release --test loom -- --test-threads=1
