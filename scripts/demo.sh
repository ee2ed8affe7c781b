#!/usr/bin/env bash
# Builds kvlane and plays the measured story: scripts/demo.sh [ARGUMENTS of kvlane demo]
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_rust
need_compiler
exec cargo run --release -p kvlane-sidecar --bin kvlane -- demo "$@"
