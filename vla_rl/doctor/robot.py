"""``vla-rl robot doctor``: what this machine lacks for a session with an arm. It opens no device
and moves nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vla_rl.doctor.machine import FAIL, MISSING, OK, Check, check_package, listed
from vla_rl.errors import UserError, install_command
from vla_rl.monitoring.machine import available_cores
from vla_rl.robot.session import default_checkpoint

_PACKAGES = (
    ("msgpack", "real", "messages between the processes of a session", True),
    ("aiohttp", "real", "the operator's console", True),
    ("simplejpeg", "real", "pictures in the console and in the record", True),
    ("mujoco", "sim", "the simulated Panda", True),
    ("robosuite", "sim", "the simulated Panda", True),
    ("lerobot", "lerobot", "lerobot's robots and leader arms, and datasets", False),
    ("pyrealsense2", "real", "RealSense cameras", False),
    ("mink", "real", "arms of joints that are driven by poses of the hand", False),
)
_DEVICES = (
    ("serial ports", ("ttyACM*", "ttyUSB*"), "dialout", "arms and leader arms of lerobot"),
    ("video devices", ("video*",), "video", "cameras"),
    ("hidraw devices", ("hidraw*",), "", "a SpaceMouse"),
    (
        "gamepads",
        ("input/js*",),
        "input",
        "a gamepad (the console's page reads it without this device)",
    ),
)
_CORES = 4  # arm, supervisor, policy, and the rest
_ROOM = 5e9


def doctor(dev: Path = Path("/dev"), port: int = 8765) -> list[Check]:
    """All checks, in a fixed order. A session on the simulated arm needs those with ``core``."""
    return [
        check_system(),
        *(_package(*row) for row in _PACKAGES),
        *(check_devices(dev, *row) for row in _DEVICES),
        check_cores(),
        check_clock(),
        check_real_time(),
        check_port(port),
        check_room(Path.cwd()),
        check_policy(),
    ]


def render(checks: Sequence[Check]) -> str:
    """A line each, with the remedy below what is not in order."""
    broken = [c.name for c in checks if c.core and c.status != OK]
    word = (
        f"A session cannot run yet: {', '.join(broken)}."
        if broken
        else "A simulated session can run: vla-rl robot run"
    )
    return "\n".join([*listed(checks), "", word])


def check_system() -> Check:
    good = sys.platform == "linux"
    fix = "use a Linux machine, or a virtual one, for the session; the console opens in any browser"
    detail = "the processes talk over SEQPACKET sockets and memfd rings of Linux"
    return Check(
        "linux",
        OK if good else FAIL,
        detail if good else f"{sys.platform}: {detail}",
        fix,
        core=True,
    )


def _package(name: str, extra: str, purpose: str, core: bool) -> Check:
    if core and importlib.util.find_spec(name) is None:
        return Check(
            name, FAIL, f"not installed ({purpose})", install_command(extra, name), core=True
        )
    return dataclasses.replace(check_package(name, extra, purpose), core=core)


def check_devices(
    dev: Path, name: str, patterns: tuple[str, ...], group: str, purpose: str
) -> Check:
    """Which there are, and whether this user may open them."""
    found = sorted(str(p) for pattern in patterns for p in dev.glob(pattern))
    if not found:
        return Check(
            name,
            MISSING,
            f"none ({purpose})",
            f"connect it; `dmesg` says why there is no {dev}/{patterns[0]}",
        )
    closed = [p for p in found if not os.access(p, os.R_OK | os.W_OK)]
    if closed:
        rule = "a udev rule: docs/how_to/real_robots_console.md"
        way = f"sudo usermod -aG {group} $USER, then log in again" if group else rule
        return Check(name, FAIL, f"no permission for {', '.join(closed)} ({purpose})", way)
    return Check(name, OK, ", ".join(found))


def check_cores() -> Check:
    cores, load = available_cores(), os.getloadavg()[0]
    detail = f"{cores} for this process, load average {load:.1f}"
    if cores >= _CORES and load < cores:
        return Check("cores", OK, detail)
    fix = (
        f"{_CORES} free ones keep 100 Hz beside a policy; on fewer end other work, or use "
        "--lockstep for figures"
    )
    return Check("cores", MISSING, f"{detail}: ticks will be late", fix)


def check_clock(tries: int = 200) -> Check:
    """How exactly this process wakes up, and how fine its clock is."""
    fine = time.get_clock_info("monotonic").resolution
    late = []
    for _ in range(tries):
        begun = time.monotonic()
        time.sleep(0.001)
        late.append(time.monotonic() - begun - 0.001)
    late.sort()
    p50, p99 = 1e3 * late[tries // 2], 1e3 * late[int(0.99 * tries)]
    detail = (
        f"resolution {1e9 * fine:.0f} ns; wakes up {p50:.2f} ms late at the median, {p99:.2f} ms "
        "at p99"
    )
    if fine <= 1e-5 and p99 < 5.0:
        return Check("clock", OK, detail)
    return Check(
        "clock", MISSING, detail, "end other work; then robot.real_time=20, where that is allowed"
    )


def check_real_time() -> Check:
    """Whether SCHED_FIFO may be asked for. It is not asked for here."""
    allowed = os.geteuid() == 0 or resource.getrlimit(resource.RLIMIT_RTPRIO)[0] >= 20
    detail = (
        "allowed: robot.real_time=20 gives it to the supervisor"
        if allowed
        else "not allowed; sessions run without it"
    )
    fix = (
        "add '@realtime - rtprio 20' to /etc/security/limits.conf and yourself to the group "
        "realtime, then log in again"
    )
    return Check("SCHED_FIFO", OK if allowed else MISSING, detail, fix)


def check_port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                "console port",
                FAIL,
                f"{port}: {error.strerror}",
                "end what listens there, or use console.port=0",
            )
    return Check("console port", OK, f"{port} is free")


def check_room(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    detail = (
        f"{free / 1e9:.0f} GB free in {folder}; two cameras at 640 × 480 and 30 Hz take about 11 "
        "GB an hour"
    )
    return Check(
        "disk",
        OK if free >= _ROOM else FAIL,
        detail,
        "make room, or name another disk with output_dir=",
    )


def check_policy() -> Check:
    try:
        return Check("policy", OK, str(default_checkpoint()))
    except UserError:
        fix = "vla-rl quickstart makes one; or checkpoint=FOLDER; or --no-policy"
        return Check("policy", MISSING, "no checkpoint of the quickstart below this folder", fix)
