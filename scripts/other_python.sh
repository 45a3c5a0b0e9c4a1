#!/usr/bin/env bash
# The tests that touch lerobot, under the other of its two lines: Python 3.12 where .venv has an older one, else 3.11. Options of
# pytest are passed on. Its environment is kept in build/; `--prepare` makes that alone.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=3.12
if .venv/bin/python -c 'import sys; raise SystemExit(sys.version_info < (3, 12))'; then wanted=3.11; fi
python=
for candidate in "python$wanted" "$HOME"/.pyenv/versions/"$wanted".*/bin/python; do
    if "$candidate" -c "import sys; raise SystemExit(sys.version_info[:2] != (3, ${wanted#3.}))" 2>/dev/null; then
        python=$candidate && break
    fi
done
if [ -z "$python" ]; then
    echo "[other python] no Python $wanted on this machine: the lerobot that it takes was not tried" && exit 0
fi
venv=build/python-$wanted
echo "[other python] Python $wanted ($python) in $venv"
[ -x "$venv/bin/python" ] || .venv/bin/uv venv --quiet --python "$python" "$venv"
UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} .venv/bin/uv pip install --quiet --python "$venv/bin/python" -c constraints.txt \
    --override scripts/overrides.txt -e ".[all,dev]"
if [ "${1:-}" = --prepare ]; then # compiled once here, and not by every worker of the tests
    exec "$venv/bin/python" -c "import lerobot.policies, transformers, torch._dynamo"
fi
exec "$venv/bin/python" -m pytest --timeout 900 -n logical --maxprocesses 4 --dist loadgroup -m "not slow" tests/test_lerobot_policies.py \
    tests/test_lerobot_families.py tests/test_pi0.py tests/test_dataset.py tests/test_real_lerobot.py tests/test_real_so101.py \
    tests/test_libero_demos.py tests/test_openvla.py tests/test_toy.py "$@"
