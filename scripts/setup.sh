#!/usr/bin/env bash
# Makes .venv ready: `scripts/setup.sh quickstart` for the main job, `full` for tests and everything else, `docs` for the
# docs' site as well.
# Does nothing when nothing changed, never asks a question, and names what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-full}
case $profile in
quickstart) extras=sim,wandb ;;
full) extras=all,dev,libero-assets ;;
docs) extras=all,dev,docs,libero-assets ;;
*) echo "usage: $0 [quickstart|full|docs], got '$profile'" >&2 && exit 2 ;;
esac

say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }
stop() { say "$*" && exit 1; }

state=$(cat pyproject.toml setup.py constraints.txt scripts/overrides.txt scripts/setup.sh scripts/vulkan.sh | sha256sum | cut -c1-16)
state="$state $PWD" # a moved checkout has a stale venv

ready() { # an environment that has more serves as well
    local stamp more=.venv/.ready-docs
    [ "$profile" = quickstart ] && more=".venv/.ready-full $more"
    for stamp in ".venv/.ready-$profile" $more; do
        [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ] && return 0
    done
    return 1
}

install_gl() { # llvmpipe through EGL: works without GPU and display
    local packages=(libegl1 libgl1-mesa-dri) root=()
    local command="apt-get update && apt-get install -y ${packages[*]}"
    if ! command -v apt-get >/dev/null; then
        stop "No OpenGL library can render off-screen. Install Mesa's EGL and its software driver (Debian: ${packages[*]})."
    elif [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2>/dev/null || stop "An OpenGL library is missing. Run:  sudo sh -c '$command'  and try again."
        root=(sudo -n)
    fi
    say "installing ${packages[*]} (software OpenGL for off-screen rendering)"
    {
        "${root[@]}" apt-get -q update || say "apt-get update failed; trying with the package lists at hand"
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${packages[@]}"
    } </dev/null >&2 || stop "Could not install the OpenGL library. As root, run:  $command"
}

has_gl_library() {
    "$python" -c "from ctypes.util import find_library as f; raise SystemExit(not (f('EGL') or f('OSMesa')))"
}

renders() { .venv/bin/python -c "from sim.gl import choose_backend; choose_backend()"; }

version() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'; }

# PYTHON, or the first Python from 3.12 on that can make an environment, those of pyenv too, or python3.
choose() {
    local candidate
    for candidate in ${PYTHON:-python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python python3.13 python3}; do
        "$candidate" -c 'import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 12))' 2>/dev/null &&
            echo "$candidate" && return
    done
    echo "${PYTHON:-python3}"
}

if ready; then exit 0; fi

python=$(choose)
command -v "$python" >/dev/null || stop "'$python' was not found. Install it:  apt-get install -y python3 python3-venv"
said=$("$python" -V 2>&1) || stop "'$python' does not run (${said%%$'\n'*}). Name another one:  PYTHON=/path/to/python3.12 make"
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' ||
    stop "vla-rl needs Python 3.10 or newer, and '$python' is $said. Name another one:  PYTHON=python3.12 make"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    stop "The venv module of '$python' is missing. Install it (as root):  apt-get install -y python3-venv"
has_gl_library || install_gl

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    if "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 12))'; then
        say "creating .venv with Python $(version "$python") ($python), which lerobot 0.6 needs"
    else
        say "creating .venv with Python $(version "$python") ($python) and lerobot 0.4.4: 0.6 needs Python 3.12 or newer" \
            "${PYTHON:-(none was found; PYTHON=/path/to/python3.12 names one)}"
    fi
    "$python" -m venv --clear .venv
elif [ -n "${PYTHON:-}" ] && [ "$(version "$python")" != "$(version .venv/bin/python)" ]; then
    say ".venv has Python $(version .venv/bin/python) and stays; 'make clean' before 'PYTHON=$PYTHON make setup' begins anew"
fi
if ! .venv/bin/uv --version >/dev/null 2>&1; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt uv
fi
say "installing vla-rl[$extras] into .venv"
UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} .venv/bin/uv pip install --quiet --python .venv/bin/python -c constraints.txt \
    --override scripts/overrides.txt -e ".[$extras]"

if ! problem=$(renders 2>&1); then
    install_gl # the library was there, its driver was not
    problem=$(renders 2>&1) || stop "Off-screen rendering does not work: ${problem##*$'\n'}"
fi
# RealSense cameras need libusb of the system; who has none can do without.
if [ "$profile" != quickstart ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null &&
    ! "$python" -c "from ctypes.util import find_library as f; raise SystemExit(not f('usb-1.0'))"; then
    env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends libusb-1.0-0 </dev/null >&2 ||
        say "RealSense cameras cannot be used: libusb-1.0-0 could not be installed"
fi
# Pictures of the dual-arm suite need a Vulkan driver; all else runs without, so that this is no reason to stop.
[ "$profile" = quickstart ] || scripts/vulkan.sh || say "the dual-arm suite has no pictures here; try scripts/vulkan.sh again later"
echo "$state" >".venv/.ready-$profile"
say "ready"
