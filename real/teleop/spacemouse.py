"""A SpaceMouse through the kernel's hidraw device; its reports are small enough to be parsed here.

Report 1 holds the translation, 2 the rotation (three little-endian 16-bit numbers each, newer
devices send all six in report 1), 3 the buttons. The device's axes are right, towards the operator,
down. It sends nothing while it rests, so one that died looks like one that rests, unless it died
displaced: then its silence is a fault.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from real.messages import State
from real.teleop.engage import Hysteresis, MotionEngage
from real.teleop.protocol import DeviceLost, Sample
from vla_rl.errors import MissingDependency

VENDORS = {
    0x256F: (),
    0x046D: (
        0xC603,
        0xC605,
        0xC606,
        0xC621,
        0xC623,
        0xC625,
        0xC626,
        0xC627,
        0xC628,
        0xC629,
        0xC62B,
    ),
}
FULL = 350.0  # counts at full deflection
REPORT_BYTES = 64
DEVICES = Path("/sys/class/hidraw")
RULE = 'SUBSYSTEM=="hidraw", ATTRS{idVendor}=="256f", MODE="0664", GROUP="input", TAG+="uaccess"'


@dataclass(frozen=True)
class SpaceMouseConfig:
    """``path`` of the device (empty: the first that is found). ``dead_zone`` and full deflection
    span the axes' range.

    ``silence_s`` without a report while displaced means that it is lost. Button 0 closes the
    gripper, button 1 opens it.
    """

    path: str = ""
    dead_zone: float = 0.08
    silence_s: float = 0.15
    engage: Hysteresis = field(default_factory=Hysteresis)


class Reports:
    """What the reports so far say: raw counts and the buttons' bits."""

    def __init__(self) -> None:
        self.translation = self.rotation = (0, 0, 0)
        self.buttons = 0
        self.stamp: float | None = None
        self.unknown = 0

    def feed(self, report: bytes, now: float) -> None:
        kind, body = (report[0], report[1:]) if report else (0, b"")
        if kind == 1 and len(body) >= 12:
            numbers = struct.unpack_from("<6h", body)
            self.translation, self.rotation = numbers[:3], numbers[3:]
        elif kind in (1, 2) and len(body) >= 6:
            numbers = struct.unpack_from("<3h", body)
            if kind == 1:
                self.translation = numbers
            else:
                self.rotation = numbers
        elif kind == 3 and body:
            self.buttons = int.from_bytes(body[:4], "little")
        else:
            self.unknown += 1
            return
        self.stamp = now

    def axes(self, dead_zone: float) -> tuple[float, ...]:
        """Six numbers in [-1, 1] about the robot's forward, left, up: a rotation of the device's
        right, towards, down."""

        def one(counts: int) -> float:
            x = max(-1.0, min(1.0, counts / FULL))
            return (
                0.0
                if abs(x) < dead_zone
                else (abs(x) - dead_zone) / (1 - dead_zone) * (1 if x > 0 else -1)
            )

        (tx, ty, tz), (rx, ry, rz) = self.translation, self.rotation
        return tuple(one(-n) for n in (ty, tx, tz, ry, rx, rz))


def find(devices: Path = DEVICES) -> str:
    """The path of the first SpaceMouse, as the kernel lists them. Raises `MissingDependency`."""
    for entry in sorted(devices.glob("hidraw*")):
        try:
            lines = (entry / "device" / "uevent").read_text().splitlines()
        except OSError:
            continue
        ids = next(
            (line.partition("=")[2].split(":") for line in lines if line.startswith("HID_ID=")), []
        )
        if len(ids) == 3:
            vendor, product = int(ids[1], 16), int(ids[2], 16)
            if vendor in VENDORS and (not VENDORS[vendor] or product in VENDORS[vendor]):
                return f"/dev/{entry.name}"
    raise MissingDependency(f"there is no SpaceMouse in {devices}: plug it in, or give teleop.path")


class SpaceMouse:
    """Moved is engaged, with a hysteresis (`MotionEngage`)."""

    name = "spacemouse"

    def __init__(self, config: SpaceMouseConfig, names: Sequence[str] = ()):
        """Whatever the robot's action is called (``names``), this has axes."""
        self.config = config
        self.reports = Reports()
        self._engage = MotionEngage(config.engage)
        self._handle: int | None = None

    def connect(self) -> None:
        path = self.config.path or find()
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise MissingDependency(
                f"the SpaceMouse at {path} cannot be opened ({error.strerror}). Put this line into "
                "/etc/udev/rules.d/70-spacemouse.rules, reload the rules and plug it in again: "
                f"{RULE}"
            ) from None

    def adopt(self, handle: int) -> None:
        """Read an open descriptor, whose every read is one report."""
        os.set_blocking(handle, False)
        self._handle = handle

    def read(self, now: float, state: State | None) -> Sample:
        if self._handle is None:
            raise DeviceLost("the SpaceMouse is not connected")
        while True:
            try:
                report = os.read(self._handle, REPORT_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self.close()
                raise DeviceLost(
                    f"the SpaceMouse is gone: {errno.errorcode.get(error.errno or 0, error.errno)}"
                ) from None
            if not report:
                self.close()
                raise DeviceLost("the SpaceMouse is gone")
            self.reports.feed(report, now)
        axes = self.reports.axes(self.config.dead_zone)
        deflection = max(map(abs, axes))
        stamp = self.reports.stamp
        if deflection > 0 and (stamp is None or now - stamp > self.config.silence_s):
            self._engage.release()
            raise DeviceLost("the SpaceMouse is displaced and says nothing: its connection is lost")
        buttons = self.reports.buttons
        gripper = 1.0 if buttons & 1 else -1.0 if buttons & 2 else 0.0
        engaged = self._engage.update(max(deflection, abs(gripper)), now)
        keys = tuple(f"button {i}" for i in range(16) if buttons >> i & 1)
        return Sample(now, engaged, axes, gripper, keys)

    def release(self) -> None:
        self._engage.release()

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
