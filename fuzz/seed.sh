#!/bin/sh
# Fills corpus/ from the captures, so that fuzzing begins at real payloads, and with small scenarios. Safe to run again.
set -eu
cd "$(dirname "$0")"
mkdir -p corpus/wire
# Without the largest, which makes every run slow and has the structure of the others.
find ../tests/fixtures/golden -name '*.msgpack' -size -32 -exec cp {} corpus/wire/ \;
chmod -R u+w corpus/wire
echo "corpus/wire: $(find corpus/wire -type f | wc -l) files"
# A scenario each: a chain stored, cut in the middle and stored again; an orphan whose parent follows; coarse host blocks.
mkdir -p corpus/index_vs_naive
chain='\000\000\007\000\000\000\000\000\000'
printf '\000\007\000\000\007\010\000\003\000\000''%b' "$chain" >corpus/index_vs_naive/chain
printf '\000\007\000\000\007\010\000\003\000\000\000\000\007\000\000\000\000\000\000\000\000\004\000\007\000\000\004\000\000\000\000\000\007\000\000\000\000\000\000\000\000' >corpus/index_vs_naive/hole
printf '\002\007\000\000\007\010\000\003\000\000\000\000\007\000\000\004\000\000\000\000\000\000\000\003\000\000\000\000\000\000\000\000' >corpus/index_vs_naive/orphan
printf '\001\007\000\000\007\020\000\003\000\000\000\000\007\000\000\000\002\001\000\000\000\000\000\007\020\000\000\003\001\000\000\000' >corpus/index_vs_naive/coarse
