"""A Franka Research 3 as a `Robot`, by libfranka's Python package (pylibfranka).

Two processes of its own stand behind it: `real.robots.franka_loop`, which answers the robot each
millisecond, and `real.robots.franka_hand`. This one runs in the arm's process (`real.robots.server`)
and never waits for them. The robot itself stops a motion whose commands stay away for 20 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack
import numpy as np

from real.limits import Limits
from real.link import read_packet
from real.robots import franka_path as fr3
from real.robots.franka_loop import SILENCE_S
from real.robots.protocol import Capabilities, Measured, Reference, RobotLost
from real.scheduling import LAUNCHER
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError
from vla_rl.specs import EmbodimentSpec

JOINTS = tuple(f"joint{i + 1}" for i in range(7))
_START_S, _FIRST_S, _END_S = 30.0, 5.0, 3.0
_STALE_S = 0.1  # of what the loop says
HAND_ENDED = "the process of the hand has ended"
_OPEN = 0.5  # of a share of the hand's opening, above which it is asked to open


@dataclass(frozen=True)
class FrankaConfig(Bounded, place="robot.options"):
    """``control``: "cartesian", poses of the hand under Cartesian impedance, or "joints". An action
    moves the hand by at most ``step`` (m) and turns it by at most ``turn`` (rad; 0: not at all).

    ``dynamics`` is the share of Franka's limits of speed, acceleration and jerk that is used.
    Impedances (N m/rad; N/m and N m/rad) and collision thresholds (N m; N and N m), beyond which the
    robot stops by a reflex, are those of Franka's own examples. ``hand_speed`` m/s, ``hand_force`` N.
    """

    address: str = ""
    control: str = bound("cartesian", choices=("cartesian", "joints"))
    hand: bool = True
    control_hz: float = bound(20.0, gt=0, le=100)
    step: float = bound(0.05, gt=0, le=0.2)
    turn: float = bound(0.2, ge=0, le=1)
    dynamics: float = bound(0.3, gt=0, le=0.9)
    joint_impedance: list[float] = several(
        [3000.0, 3000.0, 3000.0, 2500.0, 2500.0, 2000.0, 2000.0], ge=1, least=7, most=7
    )
    cartesian_impedance: list[float] = several(
        [3000.0, 3000.0, 3000.0, 300.0, 300.0, 300.0], ge=1, least=6, most=6
    )
    collision_torque: list[float] = several(
        [20.0, 20.0, 18.0, 18.0, 16.0, 14.0, 12.0], ge=1, least=7, most=7
    )
    collision_force: list[float] = several(
        [20.0, 20.0, 20.0, 25.0, 25.0, 25.0], ge=1, least=6, most=6
    )
    hand_speed: float = bound(0.1, gt=0, le=0.1)
    hand_force: float = bound(20.0, gt=0, le=70)
    # a real-time kernel is asked for
    realtime: bool = True
    # what has the names of pylibfranka
    library: str = field(default="pylibfranka", repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.address:
            raise ConfigError("robot.options.address is empty: name the robot, such as 172.16.0.2")


class FrankaArm:
    """``options`` are those of `FrankaConfig`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, **options: Any):
        try:
            self.config = x = FrankaConfig(**options)
        except TypeError as error:
            raise ConfigError(f"robot.options of FrankaArm are wrong: {error}") from None
        self.clock, self.joints = clock, x.control == "joints"
        self.name = f"franka_{x.control}" + ("" if x.hand else "_bare")
        self.embodiment = _embodiment(self.name, x)
        self.limits = _limits(x)
        self.capabilities = Capabilities(
            kind=x.control, holds=True, watchdog_s=SILENCE_S, force=True, max_hz=100.0
        )
        self._loop: _Process | None = None
        self._hand: _Process | None = None
        self._opening, self._closes = 0.0, 0.0
        self._last: Measured | None = None
        self._lost, self._owes_stop = "", False

    def connect(self) -> None:
        self._start(reads=False)

    def watch(self) -> None:
        """To be read alone: a hand moves it, by the buttons on its wrist."""
        self._start(reads=True)

    def _start(self, reads: bool) -> None:
        told = {**asdict(self.config), "reads": reads}
        self._lost = ""
        self._loop = _Process("real.robots.franka_loop", told)
        if self.config.hand:
            self._hand = _Process("real.robots.franka_hand", told)
        until = self.clock() + _FIRST_S
        while True:
            try:
                self.observe()
                return
            except RobotLost as error:
                if self.clock() > until:
                    raise ConfigError(str(error)) from None
                time.sleep(0.01)

    def observe(self) -> Measured:
        if self._owes_stop:
            self.stop()
        assert self._loop is not None and (self._hand is not None) == self.config.hand
        for kind, what in self._hand.said() if self._hand is not None else ():
            if kind == "width":
                self._opening = float(np.clip(what, 0.0, 1.0))
        for kind, what in self._loop.said():
            if kind == "state":
                self._last, self._lost = self._measured(what), ""
            elif kind in ("lost", "said"):
                self._lost = what
        if self._loop.gone:
            raise RobotLost(
                f"the process that answers {self.name} has ended: it holds by itself; acknowledge, "
                "and the process starts anew"
            )
        if self._last is None or self.clock() - self._last.stamp > _STALE_S:
            raise RobotLost(
                f"{self.name}: {self._lost}" if self._lost else f"{self.name} says nothing"
            )
        return self._last

    def _measured(self, what: list[Any]) -> Measured:
        stamp, joints, speeds, pose, wrench, jacobian, errors, _ = what
        if self._hand is not None and self._hand.gone:
            errors = [*errors, HAND_ENDED]
        place, quaternion = fr3.placed(pose)
        q, dq = np.array(joints), np.array(speeds)
        own = np.concatenate([place, quaternion, [self._opening], q])
        # (libfranka counts what the robot does to its surroundings)
        load = -np.array(wrench)
        if not self.joints:
            whole = np.reshape(jacobian, (6, 7), order="F")
            return Measured(
                stamp, place, quaternion, q, dq, self._opening, load, own, whole, tuple(errors)
            )
        if self.config.hand:
            q, dq = np.append(q, self._opening), np.append(dq, 0.0)
        return Measured(
            stamp, place, quaternion, q, dq, self._opening, load, q, None, tuple(errors)
        )

    def command(self, reference: Reference) -> None:
        if self.joints:
            self._tell("aim", reference.joints[:7])
            if self.config.hand:
                self._grip(1.0 if reference.joints[7] < _OPEN else -1.0)
        else:
            self._tell("aim", np.concatenate([reference.position, reference.quaternion]))
            self._grip(reference.gripper)

    def _grip(self, closes: float) -> None:
        if not closes or closes == self._closes or self._hand is None:
            return
        if self._hand.tell("grip", 1 if closes > 0 else -1):
            self._closes = closes

    def hold(self) -> None:
        self._tell("hold", ())

    def stop(self) -> bool:
        self._owes_stop = True
        with contextlib.suppress(RobotLost):
            self._owes_stop = not self._tell("stop", ())
        return not self._owes_stop

    def clear(self) -> None:
        """libfranka's automatic error recovery, where the robot ended a motion by itself; and a
        process that has ended starts again."""
        self._owes_stop = False
        if self._loop is not None and self._loop.gone:
            self._loop, self._last = self._loop.anew(), None
        if self._hand is not None and self._hand.gone:
            self._hand, self._closes = self._hand.anew(), 0.0
        self._tell("clear", ())

    def close(self) -> None:
        """The loop brakes and ends its motion; the robot then keeps its pose by itself."""
        for process in (self._loop, self._hand):
            if process is not None:
                process.close()

    def _tell(self, kind: str, numbers: Any) -> bool:
        assert self._loop is not None
        if self._loop.gone:
            raise RobotLost(f"the process that answers {self.name} has ended")
        return self._loop.tell(kind, [float(x) for x in numbers])


class _Process:
    """``module`` beside this one, over a socket. Raises `ConfigError` with what it says where it
    cannot begin."""

    def __init__(self, module: str, config: dict[str, Any]):
        self._module, self._config = module, config
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(config), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {LAUNCHER: str(os.getpid())},
                start_new_session=True,
            )
        self.gone = False
        self._link.settimeout(_START_S)
        try:
            packet = read_packet(self._link)
            kind, what = msgpack.unpackb(packet) if packet else ("error", f"{module} has ended")
        except OSError:
            kind, what = "error", f"{module} did not begin in {_START_S:g} s"
        if kind != "ready":
            self.close()
            raise ConfigError(what)
        self._link.setblocking(False)

    def said(self) -> list[tuple[str, Any]]:
        """All that it has said since it was asked last."""
        found: list[tuple[str, Any]] = []
        while not self.gone:
            try:
                packet = read_packet(self._link)
            except BlockingIOError:
                break
            except OSError:
                packet = b""
            if not packet:
                self.gone = True
                break
            found.append(tuple(msgpack.unpackb(packet)))
        return found

    def tell(self, kind: str, what: Any) -> bool:
        """False where it does not read."""
        try:
            self._link.send(msgpack.packb([kind, what]))
        except BlockingIOError:
            return False
        except OSError:
            self.gone = True
            return False
        return True

    def anew(self) -> _Process:
        """Another in the place of this one, which has ended. Raises `RobotLost`."""
        self.close()
        try:
            return _Process(self._module, self._config)
        except ConfigError as error:
            raise RobotLost(str(error)) from None

    def close(self) -> None:
        self._link.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.gone = True


def _limits(x: FrankaConfig) -> Limits:
    """What the loop does at most; of the hand's opening a share of it."""
    low, high, speed = (fr3.LOW, fr3.HIGH, x.dynamics * fr3.SPEED)
    if x.control == "joints" and x.hand:
        low, high, speed = np.append(low, 0.0), np.append(high, 1.0), np.append(speed, 10.0)
    joints: dict[str, Any] = {
        "joint_low": tuple(low.tolist()),
        "joint_high": tuple(high.tolist()),
        "joint_speed": tuple(speed.tolist()),
    }
    if x.control == "joints":
        return Limits(
            **joints,
            joint_acceleration=x.dynamics * fr3.ACCELERATION,
            joint_jerk=x.dynamics * fr3.JERK,
        )
    of_hand = fr3.HAND_SPEED, fr3.HAND_ACCELERATION, fr3.HAND_JERK
    for name, (place, turn) in zip(("speed", "acceleration", "jerk"), of_hand):
        joints |= {name: x.dynamics * place, f"rotation_{name}": x.dynamics * turn}
    return Limits(joint_margin=fr3.MARGIN, **joints)


def _embodiment(name: str, x: FrankaConfig) -> EmbodimentSpec:
    grip = ("gripper",) if x.hand else ()
    rest: dict[str, Any] = {"name": name, "control_hz": x.control_hz, "cameras": ()}
    if x.control == "joints":
        return EmbodimentSpec(
            action_names=(*JOINTS, *grip),
            action_units=("rad",) * 7 + ("share",) * len(grip),
            action_low=(*(fr3.LOW + fr3.MARGIN).tolist(), *(0.0 for _ in grip)),
            action_high=(*(fr3.HIGH - fr3.MARGIN).tolist(), *(1.0 for _ in grip)),
            frame="joints",
            rotation="none",
            gripper="none",
            proprio_names=(*JOINTS, *grip),
            **rest,
        )
    turns = ("rx", "ry", "rz") if x.turn else ()
    most = (x.step,) * 3 + (x.turn,) * len(turns) + (1.0,) * len(grip)
    return EmbodimentSpec(
        action_names=("dx", "dy", "dz", *turns, *grip),
        action_units=("m",) * 3 + ("rad",) * len(turns) + ("command",) * len(grip),
        action_low=tuple(-x for x in most),
        action_high=most,
        frame="base",
        rotation="axis_angle_delta" if turns else "none",
        gripper="-1 open, +1 close" if grip else "none",
        proprio_names=("x", "y", "z", "qw", "qx", "qy", "qz", "gripper_open", *JOINTS),
        **rest,
    )
