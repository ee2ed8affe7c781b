#!/usr/bin/env bash
# Measures kvlane's index and decision beside its peers.
#
#   scripts/bench.sh                           full run; rewrites benches/RESULTS.md and a table of README.md (10 to 20 minutes)
#   QUICK=1 JSON=out.json scripts/bench.sh     at smaller sizes; leaves benches/RESULTS.md alone (under 5 minutes)
#
# The first call also builds the peers, which takes minutes. JSON is relative to the root of the repository and defaults to
# a file in benches/results. What else is on the command line goes to the driver, such as `--rounds 9`.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_rust
need_compiler
say "building the benches and the peers"
cargo build --release --manifest-path benches/Cargo.toml --target-dir "$target/benches"

commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
git diff --quiet HEAD -- router-core benches/src 2>/dev/null || commit+=" with changes"
args=(--commit "$commit" --toolchain "$(rustc --version)")
if [ "${QUICK:-0}" = 1 ]; then
  json=${JSON:-benches/results/quick.json}
  args+=(--quick)
else
  json=${JSON:-benches/results/full.json}
  args+=(--markdown benches/RESULTS.md --readme README.md)
fi
"$target/benches/release/bench" run --json "$json" "${args[@]}" "$@"
say "wrote $json"
