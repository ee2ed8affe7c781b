#!/bin/sh
# Fills corpus/ from the captures, so that fuzzing begins at real payloads. Safe to run again.
set -eu
cd "$(dirname "$0")"
mkdir -p corpus/wire
# Without the largest, which makes every run slow and has the structure of the others.
find ../tests/fixtures/golden -name '*.msgpack' -size -32 -exec cp {} corpus/wire/ \;
chmod -R u+w corpus/wire
echo "corpus/wire: $(find corpus/wire -type f | wc -l) files"
