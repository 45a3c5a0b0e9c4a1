#!/usr/bin/env bash
# The tests of the wire with other projects' own programs at its other end: openpi's client and server, vla-eval. They need
# another numpy than this project, and so an environment of their own, which is kept in build/. Options of pytest are passed on.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/peers
[ -x "$venv/bin/python" ] || .venv/bin/uv venv --quiet --python .venv/bin/python "$venv"
UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} .venv/bin/uv pip install --quiet --python "$venv/bin/python" \
    openpi-client==0.1.2 openpi-server==0.1.0 vla-eval==0.8.0
exec .venv/bin/python -m pytest tests/test_serving_peers.py "$@"
