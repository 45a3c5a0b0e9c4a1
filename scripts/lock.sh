#!/usr/bin/env bash
# Rewrites constraints.txt from pyproject.toml: all extras, Python 3.10 to 3.14 on x86-64 Linux. Present pins are kept
# where they still fit; `scripts/lock.sh --upgrade` (or `-P PACKAGE`) moves them.
set -euo pipefail
cd "$(dirname "$0")/.."

raw=$(mktemp)
trap 'rm -f "$raw"' EXIT
cp constraints.txt "$raw"
UV_PYTHON_DOWNLOADS=never .venv/bin/uv pip compile pyproject.toml --extra all --extra libero-assets --extra dev --extra docs --universal \
    --python-version 3.10 --no-emit-index-url --no-emit-find-links --no-header --no-annotate --quiet -o "$raw" "$@" \
    >/dev/null

# Every line repeats the platform that [tool.uv] names; only what tells Python versions apart is worth keeping.
{
    echo "# Exact versions that vla-rl is tested with. Written by scripts/lock.sh; do not edit by hand."
    sed -E -e "s/ and (sys_platform == 'linux'|platform_machine == 'x86_64'|'linux' in sys_platform)//g" \
        -e "s/( and|;) python_full_version < '3\.15'//" -e "s/ and platform_python_implementation != 'PyPy'//" \
        -e "s/==([^ ]+) +and /==\1 ; /" -e 's/ +$//' "$raw" | grep -E '^[A-Za-z0-9]'
} >constraints.txt
