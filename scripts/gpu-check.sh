#!/usr/bin/env bash
# Measures what one NVIDIA GPU does with KV that moves between two processes on it, and what the planner makes of that.
#
#   scripts/gpu-check.sh --pack [DIR]       here, with network: makes DIR (target/gpu-check) for a machine without one
#   scripts/gpu-check.sh [DIR]              there: prints tables in Markdown, and leaves JSON in $OUT, else in DIR/out
#
# DIR holds two files, which is all that has to be carried, together with this script:
#   kvlane.xz     the command, built for release without debugging symbols
#   nixl.tar.xz   of the wheel nixl-cu13 1.5.1 (nixl-cu12 with NIXL_WHEEL=nixl-cu12):
#                   .nixl_cu13.mesonpy.libs/libnixl_capi.so and plugins/libplugin_UCX.so,
#                   nixl_cu13.libs/ucx/lib{uct_cma,uct_cuda,ucm_cuda}.so.0.0.0,
#                   and of the wheel's libraries those that these need; libssl and libcrypto of this system, in spare/
#
# It needs the driver (libcuda.so.1, libnvidia-ml.so.1) and, for UCX to watch allocations, libcudart.so.13, which it looks for in
# installed Python packages. Without a GPU the part with memory of the host still runs, and a line says what was left out.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

wheel=${NIXL_WHEEL:-nixl-cu13}
folder=${wheel//-/_}

main() {
  if [ "${1:-}" = --pack ]; then
    pack "$(realpath -m "${2:-$target/gpu-check}")"
  else
    check "$(realpath -m "${1:-$target/gpu-check}")"
  fi
}

pack() {
  local dir=$1 site work file
  need_rust
  need_compiler
  have xz || apt_install xz-utils
  venv_root=$cache need_venv "$wheel-1.5.1" --no-deps "$wheel==1.5.1"
  site=$(echo "$venv"/lib/python3*/site-packages)
  say "building kvlane"
  [ -n "${KVLANE_BIN:-}" ] || cargo build --release -p kvlane-sidecar --bin kvlane
  mkdir -p "$dir"
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # the folder of now
  trap "rm -rf '$work'" EXIT
  strip -o "$work/kvlane" "${KVLANE_BIN:-$target/release/kvlane}"
  xz -2 -T0 -c "$work/kvlane" >"$dir/kvlane.xz"
  mkdir -p "$work/nixl/spare"
  (
    cd "$site"
    for file in ".$folder.mesonpy.libs/libnixl_capi.so" ".$folder.mesonpy.libs/plugins/libplugin_UCX.so" \
      "$folder.libs"/ucx/lib{uct_cma,uct_cuda,ucm_cuda}.so.0.0.0; do
      take "$file"
    done
  )
  for file in libssl.so.3 libcrypto.so.3; do
    cp -L "$(ldconfig -p | awk -v name="$file" '$1 == name {print $NF; exit}')" "$work/nixl/spare/"
  done
  tar -C "$work/nixl" -cf - . | xz -2 -T0 >"$dir/nixl.tar.xz"
  ls -l "$dir" >&2
}

# Copies a file of the wheel, and those that it needs and the wheel has, without debugging symbols.
take() {
  local file=$1 needed found
  [ ! -e "$work/nixl/$file" ] || return 0
  mkdir -p "$work/nixl/$(dirname "$file")"
  # The wheel's own tool moves sections in a way that `strip` does not follow.
  cp "$file" "$work/nixl/$file"
  for needed in $(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
    for found in ".$folder.mesonpy.libs/$needed" "$folder.libs/$needed"; do
      if [ -e "$found" ]; then
        take "$found"
        break
      fi
    done
  done
}

check() {
  local dir=$1
  [ -f "$dir/kvlane.xz" ] && [ -f "$dir/nixl.tar.xz" ] || die "$dir lacks kvlane.xz or nixl.tar.xz; make them with --pack"
  out=${OUT:-$dir/out}
  work=$(mktemp -d)
  trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
  mkdir -p "$out" "$work/nixl"
  xz -dc "$dir/kvlane.xz" >"$work/kvlane"
  chmod +x "$work/kvlane"
  xz -dc "$dir/nixl.tar.xz" | tar -C "$work/nixl" -xf -
  NIXL_CAPI_LIB=$(echo "$work"/nixl/.nixl_cu1*.mesonpy.libs/libnixl_capi.so)
  export NIXL_CAPI_LIB
  gpu_libraries "$work/nixl/spare"
  "$work/kvlane" --version >/dev/null || die "kvlane does not run here; glibc is $(ldd --version | head -n 1)"
  echo "## KV between two processes on one machine"
  echo
  printf '%s; %s cores, %s.\n' "$(gpu_name)" "$(nproc)" "$(uname -sr)"
  measure host host
  if "$work/kvlane" link listen --bind 127.0.0.1:0 --gpu 0 --transport nixl --max-size 1K >"$work/gpu.log" 2>&1 & then
    try=$!
  fi
  sleep 5
  if kill -0 "$try" 2>/dev/null; then
    kill "$try"
    measure gpu gpu --gpu 0
    measure gpu host --gpu 0
    plan gpu-gpu
  else
    echo
    echo "Left out: memory of a GPU. $(sed -n 's/.*ERROR[^:]*: //p' "$work/gpu.log" | head -n 1)"
    plan host-host
  fi
}

# Measures from one kind of memory to another: `measure FROM TO [FLAGS of a side in GPU memory]`.
measure() {
  local from=$1 to=$2 name=$1-$2 listening=() measuring=() address
  shift 2
  [ "$from" = host ] || listening=("$@")
  [ "$to" = host ] || measuring=("$@")
  "$work/kvlane" link listen --bind 127.0.0.1:0 --transport nixl --once "${listening[@]}" >"$work/$name.log" 2>&1 &
  for _ in $(seq 100); do
    address=$(sed -n 's/.*address=\([0-9.:]*\).*/\1/p' "$work/$name.log" 2>/dev/null | tail -n 1) || true
    [ -z "$address" ] || break
    sleep 0.1
  done
  [ -n "$address" ] || die "the listener does not start: $(tail -n 3 "$work/$name.log")"
  echo
  # JSON first: the second run finds everything warm.
  local flags=(--transport nixl --pieces "${PIECES:-whole,2M,64K,16K}" --sizes "${SIZES:-4K,1M,16M,64M,256M}" --rounds "${ROUNDS:-5}")
  "$work/kvlane" link "$address" "${flags[@]}" "${measuring[@]}" --write "$out/link-$name.yaml" | tee "$out/link-$name.md"
  wait
}

# What the planner chooses over the link that was measured, for an 8B model on an H200.
plan() {
  local speed fixed
  speed=$(awk '$1 == "link_bytes_per_second:" {printf "%.1f", $2 / 1e6}' "$out/link-$1.yaml")
  fixed=$(awk '$1 == "link_fixed_seconds:" {printf "%.3f", $2 * 1e3}' "$out/link-$1.yaml")
  echo
  echo "The planner's choice over $1 (8B shape, 8 streams, prefill of 8,000 tokens in 220 ms):"
  echo
  "$work/kvlane" plan --kv-bytes-per-token 147456 --attention-tokens 47104 --prefill 8000:220 --prefill 16000:496 \
    --link "${speed}MB/s" --link-fixed-ms "$fixed" --streams 8 --gap-ms 31 | tee "$out/plan-$1.md"
}

main "$@"
