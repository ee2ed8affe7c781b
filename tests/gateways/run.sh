#!/usr/bin/env bash
# Runs the gateway modules of the Python package inside the real gateways, with simulated engines.
#
#   tests/gateways/run.sh WHEEL [pytest arguments]
#
# Environment:
#   KVLANE_BIN                the kvlane binary (default: the release build of this checkout)
#   KVLANE_GATEWAYS_TIMEOUT   seconds for the tests of one environment (default 240)
#   KVLANE_CACHE, KVLANE_PYTHON   see setup.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
wheel=${1:?the wheel to test}
shift
export KVLANE_BIN=${KVLANE_BIN:-$target/release/kvlane}
[ -x "$KVLANE_BIN" ] || { echo "gateways: error: no executable at KVLANE_BIN=$KVLANE_BIN" >&2; exit 2; }

"$here/setup.sh"

# The wheel stays out of the cached environments, which other checkouts use as well.
site=$target/gateways/site
rm -rf "$site"
"$("$here/setup.sh" --path litellm)/venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --target "$site" "$wheel"
export PYTHONPATH=$site:$here PYTHONDONTWRITEBYTECODE=1
export LITELLM_LOCAL_MODEL_COST_MAP=True  # its price list comes from the network otherwise
export RAY_USAGE_STATS_ENABLED=0

status=0
cd "$here"
# environment, the module that it type-checks (or -), and its tests
while read -r name module tests; do
  echo "--- $name: $tests"
  python=$("$here/setup.sh" --path "$name")/venv/bin/python
  [ "$module" = - ] || MYPYPATH=$site "$python" -m mypy --strict --cache-dir "$target/gateways/mypy" -m "$module" || status=$?
  # shellcheck disable=SC2086
  timeout --signal=INT --kill-after=20 "${KVLANE_GATEWAYS_TIMEOUT:-240}" \
    "$python" -m pytest -p no:cacheprovider -W ignore -q -rP --show-capture=stdout --durations=3 $tests "$@" </dev/null || status=$?
done <<'TESTS'
asgi kvlane.asgi test_asgi.py
litellm kvlane.litellm test_litellm.py
litellm-proxy - test_litellm.py test_litellm_proxy.py
ray kvlane.ray test_ray.py
TESTS
exit "$status"
