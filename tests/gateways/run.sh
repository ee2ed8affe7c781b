#!/usr/bin/env bash
# Runs the gateway modules of the Python package inside the real gateways, with simulated engines.
#
#   tests/gateways/run.sh WHEEL [pytest arguments]
#
# Environment:
#   KVLANE_BIN                the kvlane binary (default: the release build of this checkout)
#   KVLANE_GATEWAYS_TIMEOUT   seconds for the tests of one environment (default 300)
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

examples=$here/../../examples/python
status=0
cd "$here"
# environment, the module and the example that it type-checks (or -), and its tests
while read -r name module example tests; do
  echo "--- $name: $tests"
  python=$("$here/setup.sh" --path "$name")/venv/bin/python
  if [ "$module" != - ]; then
    MYPYPATH=$site:$examples "$python" -m mypy --strict --cache-dir "$target/gateways/mypy-$name" -m "$module" -m "$example" || status=$?
  fi
  # shellcheck disable=SC2086
  timeout --signal=INT --kill-after=20 "${KVLANE_GATEWAYS_TIMEOUT:-300}" \
    "$python" -m pytest -p no:cacheprovider -W ignore -q -rP --show-capture=stdout --durations=3 $tests "$@" </dev/null || status=$?
done <<'TESTS'
asgi kvlane.asgi asgi_gateway test_asgi.py test_docs.py
litellm kvlane.litellm litellm_gateway test_litellm.py test_docs.py
litellm-proxy - - test_litellm.py test_litellm_proxy.py
ray kvlane.ray ray_serve test_ray.py test_docs.py
TESTS
exit "$status"
