#!/usr/bin/env bash
# Builds the release wheel of the Python package into target/wheels.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_rust
need_compiler
need_venv tools 'maturin>=1.16,<2'
(cd bindings-python && "$venv/bin/maturin" build --profile dist --locked --out "$target/wheels")
ls -l "$target/wheels"/*.whl
