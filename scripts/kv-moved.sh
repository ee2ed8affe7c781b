#!/usr/bin/env bash
# Measures KV that simulated engines move with NIXL beside NIXL's own loop, and puts the table into benches/RESULTS.md.
#
#   scripts/kv-moved.sh [--rounds 9] [--json FILE]
#
# Fails when the engines stay below 80 % of the loop. How it is measured: scripts/kv_moved.py.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_rust
need_compiler
need_nixl
cargo build --release -p kvlane-sidecar --bin kvlane
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
git diff --quiet HEAD -- sidecar 2>/dev/null || commit+=" with changes"
[ -n "$(ls /sys/class/infiniband 2>/dev/null)" ] || export UCX_MODULES='^ib'
"$venv/bin/python" scripts/kv_moved.py "$target/release/kvlane" --commit "$commit" --results benches/RESULTS.md "$@"
