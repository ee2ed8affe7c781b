#!/usr/bin/env bash
# Installs the gateways that the tests of this folder run, each into an environment of its own, once, into a cache folder
# outside the checkout.
#
#   tests/gateways/setup.sh [NAME ...]    install what is missing of the named environments (requirements/NAME.txt), or of all
#   tests/gateways/setup.sh --path NAME   print an environment's folder
#
# Environment:
#   KVLANE_CACHE    cache folder (default: ~/.cache/kvlane); needs about 2 GB for all
#   KVLANE_PYTHON   interpreter of the environments (default: python3, or what scripts/lib.sh finds)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KVLANE_CACHE:-$HOME/.cache/kvlane}

say() { printf 'gateways setup: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Named after what it holds: another checkout with other versions has its own.
folder() {
  local requirements=$here/requirements/$1.txt
  [ -f "$requirements" ] || die "no environment is called $1; there are: $(cd "$here/requirements" && ls ./*.txt | sed 's|./||; s|.txt||' | tr '\n' ' ')"
  printf '%s/gateways/%s-%s\n' "$cache" "$1" "$(sha256sum "$requirements" | cut -c1-12)"
}

if [ "${1:-}" = --path ]; then
  folder "${2:?--path needs a name}"
  exit 0
fi

install() {
  local name=$1 at
  at=$(folder "$name")
  mkdir -p "$at"
  # Children inherit the lock: a pip that outlives a killed setup still keeps the next one out.
  exec 9>"$at/.lock"
  flock -n 9 || { say "another installation of $name is running; waiting for it"; flock 9; }
  [ ! -f "$at/.complete" ] || return 0
  say "installing $(tr '\n' ' ' <"$here/requirements/$name.txt")"
  rm -rf "$at/venv"
  "${KVLANE_PYTHON:-python3}" -m venv "$at/venv"
  "$at/venv/bin/python" -m pip install -q --disable-pip-version-check -r "$here/requirements/$name.txt" ||
    die "the packages of requirements/$name.txt cannot be installed; the tests of this gateway need them"
  touch "$at/.complete"
}

[ $# -gt 0 ] || set -- $(cd "$here/requirements" && ls ./*.txt | sed 's|./||; s|.txt||')
for name in "$@"; do
  install "$name"
done
