#!/usr/bin/env bash
# Removes what the scripts keep between runs: virtual environments, wheels, npm packages, fuzz builds and corpora, Envoy,
# and the vLLM installation of the engine tests (6 GB, minutes to install again).
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

for path in "$target/venv" "$target/wheels" "$target/npm" "$target/fuzz" "$target/test-logs" bindings-node/node_modules examples/node_modules \
  fuzz/target fuzz/corpus fuzz/artifacts "$cache"; do
  if [ -e "$path" ]; then
    say "removing $path"
    rm -rf "$path"
  fi
done
