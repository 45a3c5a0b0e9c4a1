"""The physics behind a simulated arm (`World`), and the plainest one: a point on three rails, in
numpy.

A `World` knows no wall clock, no messages and no faults: `real.robots.simulated` adds those. The
repository's MuJoCo scenes provide one too, which is named in a config and never imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from real.limits import Box, Limits
from real.robots.protocol import Capabilities, Reference
from vla_rl.bounds import Bounded, several
from vla_rl.specs import CameraSpec, EmbodimentSpec


class World(Protocol):
    """``kind``, ``gain`` and ``holds`` are as in `Capabilities`, ``own`` as in `Robot.limits`, told as plain
    values.

    ``tasks`` {name: {"instruction", "horizon" in control steps}} are what `reset` knows, the first
    one by default. Those of one ``scene`` (where they name any) can follow each other with nothing
    put back.
    """

    embodiment: EmbodimentSpec
    kind: str
    gain: float
    holds: bool
    own: dict[str, Any]
    tasks: dict[str, dict[str, Any]]

    def reset(self, episode: dict[str, Any]) -> None:
        """Put arm and objects into a start state, at rest. ``episode`` holds what the world
        understands of a task. With ``stay`` true nothing moves: only what `success` means is
        another task's."""
        ...

    def advance(self, seconds: float) -> None: ...

    def aim(
        self, position: np.ndarray, quaternion: np.ndarray, joints: np.ndarray, gripper: float
    ) -> None:
        """The target from now on."""
        ...

    def brake(self) -> None:
        """Come to rest as fast as it can, and stay."""
        ...

    def limp(self, on: bool) -> None:
        """Without power."""
        ...

    def push(self, force: np.ndarray) -> None:
        """A force [3] on the hand from now on (N)."""
        ...

    def read(self) -> dict[str, Any]:
        """position, quaternion, joints, joint_velocity, gripper, wrench, proprio, jacobian: as
        in `Measured`."""
        ...

    def success(self) -> bool: ...

    def pictures(self) -> dict[str, np.ndarray]:
        """{camera: uint8 [H W 3]}"""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Coach(Protocol):
    """A world that knows how its task is done: what a scripted operator knows."""

    embodiment: EmbodimentSpec

    def demonstrate(self, anew: bool) -> np.ndarray:
        """What an expert would do in this control step, as an action [a]; ``anew``: it did not
        do the step before."""
        ...

    def progress(self) -> float:
        """How far the task is: 0 at its start, 1 at its end."""
        ...


_TASKS = {
    "raise": {"instruction": "raise the point", "horizon": 60},
    "lower": {"instruction": "lower the point", "horizon": 60},
}


@dataclass
class PointConfig(Bounded, place="robot.options"):
    """``gain`` above 0: an impedance with the critically damped rate 2 gain (1/s); 0: it follows
    its target with ``lag_s``.

    ``brake`` is the deceleration (1/s) of its brake; the walls are where the rails end (m).
    ``joints``: it is commanded by its rails' positions instead of a pose. "raise" succeeds above
    the height ``goal`` (m), "lower" below ``floor``.
    """

    gain: float = 6.0
    lag_s: float = 0.02
    brake: float = 40.0
    mass: float = 2.0
    image_size: int = 16
    control_hz: float = 20.0
    joints: bool = False
    goal: float = 0.45
    floor: float = 0.25
    tasks: list[str] = several(["raise"], choices=tuple(_TASKS), least=1)


_ENDS = np.array([[-0.5, -0.5, 0.0], [0.5, 0.5, 0.6]])
_START = np.array([0.0, 0.0, 0.3])
_SUBSTEP = 0.002
_DOWN = np.array([0.0, 1.0, 0.0, 0.0])


class PointWorld:
    """A point on three rails, to be raised or lowered; its picture is a grey level of its
    height."""

    holds = True

    def __init__(self, config: PointConfig | None = None):
        self.config = config or PointConfig()
        self.tasks: dict[str, dict[str, Any]] = {name: _TASKS[name] for name in self.config.tasks}
        size, by_joints = self.config.image_size, self.config.joints
        self.kind = "joints" if by_joints else "cartesian"
        self.gain = 0.0 if by_joints else self.config.gain
        names = ("rail_x", "rail_y", "rail_z") if by_joints else ("dx", "dy", "dz", "gripper")
        step = 0.05
        self.embodiment = EmbodimentSpec(
            name="fake_point_joints" if by_joints else "fake_point",
            action_names=names,
            action_units=("m",) * 3 + (() if by_joints else ("command",)),
            action_low=tuple(_ENDS[0]) if by_joints else (-step,) * 3 + (-1.0,),
            action_high=tuple(_ENDS[1]) if by_joints else (step,) * 3 + (1.0,),
            frame="joints" if by_joints else "world",
            rotation="none",
            gripper="none" if by_joints else "-1 open, +1 close",
            control_hz=self.config.control_hz,
            cameras=(CameraSpec("front", size, size),),
            proprio_names=("x", "y", "z", "gripper_open"),
        )
        self.own: dict[str, Any] = {
            "speed": 0.5,
            "acceleration": 20.0,
            "jerk": 2000.0,
            "step": 0.06,
            "force": 60.0,
            "torque": 20.0,
            "joint_low": tuple(_ENDS[0]),
            "joint_high": tuple(_ENDS[1]),
            "joint_speed": 0.5,
            "joint_acceleration": 20.0,
            "joint_jerk": 2000.0,
            "joint_step": 0.06,
        }
        self.reset({})

    def reset(self, episode: dict[str, Any]) -> None:
        name = str(episode.get("task", "")).partition(":")[0].partition("/")[0]
        self._lowers = (name if name in self.tasks else self.config.tasks[0]) == "lower"
        if episode.get("stay"):
            return
        self.position = np.array(episode.get("start", _START), dtype=float)
        self.velocity: np.ndarray = np.zeros(3)
        self.fingers = 1.0
        self._grip = 0.0
        self._target: np.ndarray | None = None
        self._limp = False
        self._force: np.ndarray = np.zeros(3)

    def aim(
        self, position: np.ndarray, quaternion: np.ndarray, joints: np.ndarray, gripper: float
    ) -> None:
        self._target = np.array(joints if self.config.joints else position, dtype=float)
        self._grip = gripper

    def brake(self) -> None:
        self._target = None

    def limp(self, on: bool) -> None:
        self._limp = on
        self._target = None

    def push(self, force: np.ndarray) -> None:
        self._force = np.array(force, dtype=float)

    def advance(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / _SUBSTEP))):
            self._substep()

    def _substep(self) -> None:
        dt, rate = _SUBSTEP, 2.0 * self.config.gain
        if self._limp:
            pull = -1.0 * self.velocity
        elif self._target is None:
            pull = -self.config.brake * self.velocity
        elif self.gain:
            pull = rate**2 * (self._target - self.position) - 2.0 * rate * self.velocity
        else:
            pull = ((self._target - self.position) / self.config.lag_s - self.velocity) / (
                0.25 * self.config.lag_s
            )
        self.velocity = self.velocity + dt * (pull + self._force / self.config.mass)
        ahead = self.position + dt * self.velocity
        self.position = np.clip(ahead, _ENDS[0] - 0.05, _ENDS[1] + 0.05)
        self.velocity = np.where(ahead == self.position, self.velocity, 0.0)
        self.fingers = float(np.clip(self.fingers - 4.0 * dt * self._grip, 0.0, 1.0))

    def read(self) -> dict[str, Any]:
        return {
            "position": self.position.copy(),
            "quaternion": _DOWN.copy(),
            "joints": self.position.copy(),
            "joint_velocity": self.velocity.copy(),
            "gripper": self.fingers,
            "wrench": np.concatenate([self._force, np.zeros(3)]),
            "proprio": np.array([*self.position, self.fingers]),
            "jacobian": np.vstack([np.eye(3), np.zeros((3, 3))]),
        }

    def success(self) -> bool:
        height = float(self.position[2])
        return height < self.config.floor if self._lowers else height > self.config.goal

    def demonstrate(self, anew: bool) -> np.ndarray:
        if self.config.joints:
            return np.array([*self.position[:2], _ENDS[0 if self._lowers else 1][2]])
        step = self.embodiment.action_low[2] if self._lowers else self.embodiment.action_high[2]
        return np.array([0.0, 0.0, step, -1.0])

    def progress(self) -> float:
        goal = self.config.floor if self._lowers else self.config.goal
        return float(self.position[2] - _START[2]) / (goal - float(_START[2]))

    def pictures(self) -> dict[str, np.ndarray]:
        size = self.config.image_size
        level = int(np.clip(255 * self.position[2] / 0.6, 0, 255))
        return {"front": np.full((size, size, 3), level, np.uint8)}

    def close(self) -> None:
        pass


def capabilities(
    world: World, watchdog_s: float, stopper: tuple[str, str] = ("", "")
) -> Capabilities:
    """What a robot with this physics can do."""
    return Capabilities(
        kind=world.kind,
        gain=world.gain,
        holds=world.holds,
        watchdog_s=watchdog_s,
        force=True,
        resets=True,
        max_hz=500.0,
        stopper=stopper,
    )


def own_limits(world: World) -> Limits:
    values = dict(world.own)
    if "box" in values:
        values["box"] = Box(*(tuple(float(x) for x in end) for end in values["box"]))
    for name in ("joint_low", "joint_high"):
        values[name] = tuple(float(x) for x in values.get(name, ()))
    return Limits(**values)


def aim(world: World, reference: Reference) -> None:
    world.aim(reference.position, reference.quaternion, reference.joints, reference.gripper)
