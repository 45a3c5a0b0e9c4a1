"""A leader arm: any registered `Teleoperator` of lerobot whose actions are the follower's joints.

An absolute leader never makes the follower jump. It stays disengaged until each of its joints
stands where the follower's does (`Align`); with ``relative`` it need not, and what it does is added
to where the follower was (`Clutch`). With ``follows`` it goes where the arm goes until a hand pulls
at it (`real.teleop.follow`), and leads from there; without, its motors are never driven.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from real.lerobot_kinds import make
from real.messages import State
from real.modes import Mode
from real.teleop.engage import Align, Clutch, Hysteresis, MotionEngage
from real.teleop.follow import Follower
from real.teleop.protocol import DeviceLost, Sample
from vla_rl.bounds import Bounded, bound
from vla_rl.errors import UserError, first_line

_FOLLOWED = (Mode.READY, Mode.AUTO, Mode.PAUSED)  # in which a leader may go where the arm is


class _Teleoperator(Protocol):
    """What is used of lerobot's class of that name."""

    action_features: dict[str, Any]
    is_calibrated: bool

    def connect(self, calibrate: bool = True) -> None: ...

    def get_action(self) -> dict[str, float]: ...

    def disconnect(self) -> None: ...


@dataclass(frozen=True)
class LeaderConfig(Bounded, place="teleop"):
    """``type`` is lerobot's name of the device ("so101_leader"), ``options`` the fields of its
    config (port, id …).

    ``tolerance`` and ``jump`` are in the leader's units (lerobot: degrees or percent of the range).
    ``motion`` is how fast a joint moves, in units per second, for full deflection of ``engage``: a
    leader engages by being moved, and stays engaged while it is held still; what ends it is the
    operator's hand-back or pause, or a jump. With ``follows``, which takes Feetech servos and means
    ``relative`` too, it goes after the arm at ``follow_speed`` at most (units per second) with
    ``follow_torque``, a share of what its motors can, until a joint is ``pull`` off.
    """

    type: str = "so101_leader"
    options: dict[str, Any] = field(default_factory=dict)
    relative: bool = False
    tolerance: float = 5.0
    jump: float = 15.0
    motion: float = 100.0
    engage: Hysteresis = field(default_factory=Hysteresis)
    follows: bool = False
    follow_speed: float = bound(60.0, gt=0)
    follow_torque: float = bound(0.25, gt=0, le=1)
    pull: float = bound(8.0, gt=0)


def build(config: LeaderConfig) -> _Teleoperator:
    """lerobot's device. Raises as `real.lerobot_kinds.make`."""
    return make(
        "leader arm",
        config.type,
        config.options,
        "lerobot.teleoperators.config:TeleoperatorConfig",
        "lerobot.teleoperators.utils:make_teleoperator_from_config",
    )


class Leader:
    """``names`` are the robot's action dimensions, which the leader's must be; ``device``
    replaces lerobot's in tests."""

    name = "leader"

    def __init__(
        self, config: LeaderConfig, names: Sequence[str], device: _Teleoperator | None = None
    ):
        self.config, self.names = config, tuple(names)
        self._device = device
        self._align = Align(self.names, config.tolerance, config.jump)
        self._clutch, self._engage = Clutch(), MotionEngage(config.engage)
        self._engaged = False
        self._before: tuple[float, tuple[float, ...]] | None = None
        self._follower: Follower | None = None

    def connect(self) -> None:
        if self._device is None:
            self._device = build(self.config)
        device = self._device
        if set(device.action_features) != set(self.names):
            raise UserError(
                f"the leader {self.config.type} commands {', '.join(device.action_features)}, and "
                f"the robot takes {', '.join(self.names)}: choose a leader of the same joints"
            )
        try:
            device.connect(calibrate=False)
        except Exception as error:  # whatever the vendor's driver raises
            raise UserError(
                f"the leader {self.config.type} does not connect: {first_line(error)}"
            ) from None
        if not device.is_calibrated:
            raise UserError(
                f"the leader {self.config.type} is not calibrated, or by another file: run "
                "lerobot-calibrate with its id"
            )
        if self.config.follows:
            x, bus = self.config, vars(device).get("bus")
            motors = [name.removesuffix(".pos") for name in self.names]
            self._follower = Follower(bus, motors, x.follow_torque, x.follow_speed, x.pull)
            self._follower.connect()

    def read(self, now: float, state: State | None) -> Sample:
        if self._device is None:
            raise DeviceLost("the leader arm is not connected")
        try:
            action = self._device.get_action()
            leader = tuple(float(action[name]) for name in self.names)
        except Exception as error:
            self.release()
            raise DeviceLost(f"the leader arm does not answer: {first_line(error)}") from None
        if state is None or not state.proprio:
            return Sample(now, problem="the robot has not said yet where it is")
        moved = self._moved(leader, now)
        follower = state.proprio[: len(leader)]
        if len(follower) != len(leader):
            raise UserError(f"the robot says {len(follower)} joints, and the leader {len(leader)}")
        if self._follower is not None and (following := self._follows(leader, follower, state)):
            return Sample(now, problem=following)
        # a jump counts in both
        relative = self.config.relative or self.config.follows
        problem = self._align.update(leader, leader if relative else follower)
        if problem:
            self._engaged = False
            self._engage.release()
            self._clutch.update(False, leader, follower)
            return Sample(now, problem=problem)
        self._engaged = self._engaged or self._engage.update(
            min(moved / self.config.motion, 1.0), now
        )
        target = self._clutch.update(self._engaged, leader, follower) if relative else leader
        return Sample(now, self._engaged, target=target if self._engaged else ())

    def _follows(self, leader: tuple[float, ...], follower: tuple[float, ...], state: State) -> str:
        """Why it does not lead: it follows, which it does while nobody's hand has it."""
        assert self._follower is not None
        try:
            self._follower.update(
                leader, follower, Mode(state.mode) in _FOLLOWED and not self._engaged
            )
        except Exception as error:
            self.release()
            raise DeviceLost(f"the leader arm does not answer: {first_line(error)}") from None
        if not self._follower.follows:
            return ""
        self._align.release()
        self._engage.release()
        self._clutch.update(False, leader, follower)
        return "the leader follows the arm: pull at it to lead"

    def _moved(self, leader: tuple[float, ...], now: float) -> float:
        """The fastest joint, in units per second."""
        before, self._before = self._before, (now, leader)
        if before is None or now <= before[0]:
            return 0.0
        return max(abs(x - y) for x, y in zip(leader, before[1])) / (now - before[0])

    def release(self) -> None:
        self._engaged = False
        self._engage.release()
        self._align.release()
        self._clutch = Clutch()

    def close(self) -> None:
        device, self._device, self._follower = self._device, None, None
        if device is not None:
            with contextlib.suppress(Exception):  # it is going away anyway
                device.disconnect()
