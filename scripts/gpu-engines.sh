#!/usr/bin/env bash
# Puts `kvlane serve` in front of two real vLLM servers that share one NVIDIA GPU: the hit table of the shared-prefix workload, and
# what the planner chooses over the link that this card is.
#
#   scripts/gpu-engines.sh --pack [DIR]     here, with network: makes DIR (target/gpu-engines) for a machine without one
#   scripts/gpu-engines.sh [DIR]            there: prints tables in Markdown, and leaves them and logs in $OUT, else in DIR/out
#   scripts/gpu-engines.sh --simulated      anywhere: the same with `kvlane engine`, to check this script; its times mean nothing
#
# DIR then holds kvlane.xz, the command built for release, and vllm.tar.xz.00 and on, some 250 MB in pieces of 28 MiB, so that they
# can be carried one by one. They are vLLM 0.22.1, NIXL 1.5.1 and those of their dependencies that a Python with torch 2.11.0 for
# CUDA 13 and transformers 5 does not bring. Left out is what one Hopper card does not need: Flash Attention 2, mixtures of
# experts, DeepGEMM, FlashInfer, CUTLASS, NIXL's backends other than UCX.
#
# There it needs that Python, as python3 or GPU_PYTHON, of version 3.12. A link measured on the card (scripts/gpu-check.sh) is taken
# from LINK, a file that `kvlane link --write` wrote; without it, what one H200 gave. MODE is graphs (CUDA graphs, no compilation)
# or eager. The model has Qwen3-0.6B's shape and random weights.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

vllm=0.22.1
nixl=1.5.1

main() {
  case ${1:-} in
    --pack) pack "$(realpath -m "${2:-$target/gpu-engines}")" ;;
    --simulated) simulate ;;
    *) play "$(realpath -m "${1:-$target/gpu-engines}")" ;;
  esac
}

pack() {
  local dir=$1 site
  need_rust
  need_compiler
  have xz || apt_install xz-utils
  have unzip || apt_install unzip
  need_venv gpu-engines pip==25.3
  mkdir -p "$dir"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  site=$work/site
  say "taking vLLM $vllm and what it needs"
  wheels "$work"
  rm -rf "$site"/nixl_ep* "$site/nixl_cu13.scripts" "$site/include" "$site/bin" "$site"/nixl_cu13.libs/ucx/libucx_perftest* \
    "$site"/nixl_cu13.libs/ucx/libuct_ib*
  find "$site/.nixl_cu13.mesonpy.libs/plugins" "$site/nixl_cu13.libs/nixl" -type f -not -name '*_UCX.so' -delete
  for file in libssl.so.3 libcrypto.so.3; do
    install -D "$(ldconfig -p | awk -v name="$file" '$1 == name {print $NF; exit}')" "$site/spare/$file"
  done
  say "packing"
  rm -f "$dir"/vllm.tar.xz.*
  tar -C "$site" -cf - . | xz -1 -T0 | split -b 28M -d - "$dir/vllm.tar.xz."
  [ -n "${KVLANE_BIN:-}" ] || cargo build --release -p kvlane-sidecar --bin kvlane
  strip -o "$work/kvlane" "${KVLANE_BIN:-$target/release/kvlane}"
  xz -1 -T0 -c "$work/kvlane" >"$dir/kvlane.xz"
  git describe --always --dirty --abbrev=12 >"$dir/commit"
  ls -l "$dir" >&2
}

# Fills WORK/site with wheels for Python 3.12, whatever Python is here.
wheels() {
  local work=$1 pip=("$venv/bin/python" -m pip --disable-pip-version-check) there
  there=(--only-binary=:all: --python-version 3.12 --implementation cp)
  for minor in 39 38 37 36 35 34 33 32 31 30 29 28 27 26 24 17 12 5; do
    there+=(--platform "manylinux_2_${minor}_x86_64")
  done
  there+=(--platform manylinux2014_x86_64)
  "${pip[@]}" download -q --no-deps "${there[@]}" -d "$work" "vllm==$vllm"
  mkdir -p "$work/site"
  unzip -q "$work"/vllm-*.whl -d "$work/site" \
    -x 'vllm/vllm_flash_attn/_vllm_fa2_C*' 'vllm/_moe_C*' vllm/vllm-rs 'vllm/third_party/deep_gemm/*'
  # With --no-deps, since the metadata of each asks for what the machine has, or for what is not used.
  "${pip[@]}" install -q --no-deps --no-compile "${there[@]}" --target "$work/site" -r scripts/gpu-engines.txt \
    "nixl==$nixl" "nixl-cu13==$nixl" >&2
}

play() {
  local dir=$1
  [ -f "$dir/kvlane.xz" ] && [ -f "$dir/vllm.tar.xz.00" ] || die "$dir lacks kvlane.xz or vllm.tar.xz.00; make them with --pack"
  out=${OUT:-$dir/out}
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$out" "$dir/site"
  xz -dc "$dir/kvlane.xz" >"$work/kvlane"
  chmod +x "$work/kvlane"
  "$work/kvlane" --version >/dev/null || die "kvlane does not run here; glibc is $(ldd --version | head -n 1)"
  if [ ! -e "$dir/site/whole" ]; then
    cat "$dir"/vllm.tar.xz.* | xz -dc | tar -C "$dir/site" -xf -
    touch "$dir/site/whole"
  fi
  gpu_libraries "$dir/site/spare"
  export PYTHONPATH=$dir/site${PYTHONPATH:+:$PYTHONPATH}
  "${GPU_PYTHON:-python3}" scripts/gpu_engines.py --kvlane "$work/kvlane" --commit "$(cat "$dir/commit" 2>/dev/null || echo unknown)" \
    --out "$out" --card "$(gpu_name)" --mode "${MODE:-graphs}" ${LINK:+--link "$LINK"}
}

simulate() {
  need_python
  have "${KVLANE_BIN:-$target/release/kvlane}" || cargo build --release -p kvlane-sidecar --bin kvlane
  "$python" scripts/gpu_engines.py --simulated --kvlane "${KVLANE_BIN:-$target/release/kvlane}" --out "${OUT:-$target/gpu-engines/simulated}" \
    --card "simulated engines" ${LINK:+--link "$LINK"}
}

main "$@"
