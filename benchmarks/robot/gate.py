"""Random and adversarial actions against a simulated arm, in lockstep virtual time; judged by
where the arm really went."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from real import limits as limit_files
from real.gate import STAGES, Gate, Request
from real.limits import Box, Limits
from real.robots.faults import Defects
from real.robots.protocol import Measured
from real.robots.simulated import SimulatedRobot
from real.rotations import from_vector, multiply
from vla_rl.errors import ConfigError
from vla_rl.paths import config_dir

DT = 0.01
OVER = 1.05  # of a speed, beyond which a sample counts
KINDS = (
    "random",
    "one way",
    "alternating",
    "keep-out",
    "joint limits",
    "absurd",
    "not finite",
    "spin",
    "square",
    "chirp",
    "stretched",
    "corners",
    "flips",
    "spiral",
    "mixed",
)
# of these one in ten is asked for up to so many ticks
_LONG, _LONGEST = ("one way", "square", "stretched", "flips"), 25
_WAVES = ("chirp", "spiral")  # change every tick
_ABSURD = (-300.0, -6.0, 0.0, 3.0, 9.0, 150.0, 300.0)  # decades
# options of a world
SMALL: dict[str, dict[str, Any]] = {"tabletop": {"cameras": ["agentview"], "camera_size": 84}}
# {world: {controller: options of the world}} that `vla-rl bench robot` tries
CONTROLLERS: dict[str, dict[str, dict[str, Any]]] = {
    "fake": {"impedance": {}, "following": {"gain": 0.0}, "joints": {"joints": True}},
    "tabletop": {name: {"controller": name} for name in ("osc_position", "osc_pose")},
}


def limits_of(world: str, given: Path | None) -> Path:
    """``--limits``, or the world's own."""
    names = {"fake": "fake_point", "tabletop": "tabletop"}
    if given is None and world not in names:
        raise ConfigError(f"--world {world} needs --limits; those of {', '.join(names)} are known")
    return (given or config_dir() / "limits" / f"{names[world]}.yaml").resolve()


def adversarial(
    world: Any, limits_file: Path, actions: int, seed: int, each: int = 80
) -> dict[str, Any]:
    """Counts of violations over ``actions``, each asked for during one to three ticks of 10 ms,
    some for up to 25: walls beyond one braking distance, joints beyond their ends, and speeds of
    the hand (m/s, rad/s) and of each joint above `OVER` times their limit, looked at after every
    tick.

    Where the limits know no keep-out, one stands 6 cm beside the start, so that every kind of wall
    is pushed against. What makes the gate pause a session (``trips``) ends in a new start.
    ``each``: actions of one kind before the next.
    """
    now = [0.0]
    robot = SimulatedRobot(world, Defects(), lambda: now[0])
    turns, kind = robot.embodiment.rotation != "none", robot.capabilities.kind
    limits = limit_files.load(
        limits_file, robot.limits, limit_files.needed(kind, turns, kind != "joints")
    )
    if not limits.keep_out and kind != "joints":
        limits = dataclasses.replace(limits, keep_out=(_beside(robot.observe().position),))
    gate, rng = Gate(limits, robot.capabilities, turns, DT), np.random.default_rng(seed)
    adversary, judge = (
        _Adversary(limits, kind == "joints", each, rng),
        Judge(limits, kind == "joints"),
    )
    clipped, refused, ticks, trips = np.zeros(len(STAGES), int), 0, 0, 0
    for action in range(actions):
        request, held = adversary.asks(action, robot.observe())
        for _ in range(held):
            passed = gate(request, robot.observe(), now[0])
            clipped += [passed.mask >> i & 1 for i in range(len(STAGES))]
            if passed.reference is None:
                refused += 1
                robot.hold()
                gate.reset()
            else:
                robot.command(passed.reference)
            ticks += 1
            now[0] += DT
            robot.advance_to(now[0])
            judge.look(robot)
            # the session would pause: the arm comes to rest, and a person begins anew
            if passed.trip:
                trips += 1
                now[0] += 0.3
                robot.advance_to(now[0])
                judge.look(robot)
                robot.begin({})
                judge.anew(robot)
                break
    return {
        "actions": actions,
        "ticks": ticks,
        "seed": seed,
        "violations": judge.violations,
        "of": judge.kinds,
        "refused": refused,
        "trips": trips,
        "clipped": dict(zip(STAGES, clipped.tolist())),
        "fastest": judge.fastest(),
        "braking_m": judge.braking,
        "nearest": judge.nearest,
    }


def _beside(place: np.ndarray) -> Box:
    low, high = place + np.array([-0.05, 0.06, -0.1]), place + np.array([0.05, 0.16, 0.1])
    return Box(tuple(low.tolist()), tuple(high.tolist()))


class _Adversary:
    """What is asked for next. The kinds change every ``each`` actions; "mixed" draws one for each.
    ``joints``: the robot is commanded by them; what moves a hand otherwise moves the joints then,
    in shares of their range."""

    def __init__(self, limits: Limits, joints: bool, each: int, rng: np.random.Generator):
        self.limits, self.joints, self.each, self.rng = limits, joints, each, rng
        self._kind, self._age = KINDS[0], 0
        self._sign, self._joint = 1.0, 0
        self._way: np.ndarray = np.zeros(3)
        self._axis: np.ndarray = np.zeros(3)

    def asks(self, action: int, measured: Measured) -> tuple[Request, int]:
        """The request, and for how many ticks."""
        rng = self.rng
        width = len(measured.joints) if self.joints else 3
        if action % self.each == 0:
            self._kind, self._age = KINDS[(action // self.each) % len(KINDS)], 0
            self._way = rng.choice([-1.0, 1.0], width)
            axis = rng.standard_normal(3)
            self._axis = axis / np.linalg.norm(axis)
            self._joint = int(rng.integers(max(1, len(measured.joints))))
        self._sign, self._age = -self._sign, self._age + 1
        kind = KINDS[int(rng.integers(len(KINDS) - 1))] if self._kind == "mixed" else self._kind
        most = _LONGEST if kind in _LONG and rng.random() < 0.1 else 1 if kind in _WAVES else 3
        held = int(rng.integers(1, most + 1))
        if self.joints:
            return Request(
                0.0, joints=measured.joints + self._reach() * self._joint_step(kind, measured)
            ), held
        move, turn = self._step(kind, measured)
        quaternion = multiply(from_vector(turn), measured.quaternion)
        return Request(float(rng.choice([-1.0, 1.0])), measured.position + move, quaternion), held

    def _reach(self) -> float:
        """What 5 cm are, of joints."""
        return self.limits.joint_step / 0.05

    def _joint_step(self, kind: str, measured: Measured) -> np.ndarray:
        """How far the joints are to move, in 5 cm each; but for what is to be a jump at most 10
        cm."""
        x = self.limits
        if kind in ("keep-out", "joint limits", "corners", "stretched"):
            ends = np.where(self._way > 0, np.array(x.joint_high), np.array(x.joint_low))
            return np.clip((ends - measured.joints) / self._reach(), -0.1, 0.1)
        move, turn = self._step(kind, measured)
        asked = np.resize(np.concatenate([move, 0.1 * turn]), len(measured.joints))
        return asked if kind in ("absurd", "not finite", "flips") else np.clip(asked, -0.1, 0.1)

    def _step(self, kind: str, measured: Measured) -> tuple[np.ndarray, np.ndarray]:
        """How far the hand is to move (m) and to turn (rad)."""
        rng, way = self.rng, np.resize(self._way, 3)
        turn = rng.standard_normal(3)
        t = DT * self._age
        moves: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
            "random": lambda: (0.05 * rng.standard_normal(3), turn),
            "one way": lambda: (way, turn),
            "alternating": lambda: (self._sign * 0.05 * way, self._sign * turn),
            "keep-out": lambda: (self._into(measured), turn),
            "joint limits": lambda: self._towards_end(measured),
            "absurd": lambda: (rng.standard_normal(3) * 10.0 ** rng.choice(_ABSURD), turn),
            "not finite": lambda: (self._broken(), turn),
            "spin": lambda: (0.01 * turn, 3.0 * self._axis),  # always the same way round
            "square": lambda: (self._sign * 0.06 * way, self._sign * 0.6 * self._axis),
            "chirp": lambda: (0.1 * self._wave(t) * way, 0.6 * self._wave(t) * self._axis),
            "stretched": lambda: (
                np.array([1.0, self._sign, 0.1 * turn[2]]),
                0.6 * self._sign * self._axis,
            ),
            "corners": lambda: (self._corner() - measured.position, self._sign * self._axis),
            "flips": lambda: (0.02 * turn, math.pi * self._sign * self._axis),
            "spiral": lambda: (
                0.06 * np.array([math.cos(20 * t), math.sin(20 * t), 0.3 * way[2]]),
                0.6 * self._axis,
            ),
        }
        return moves[kind]()

    def _wave(self, t: float) -> float:
        """Ever faster, up to 12 Hz."""
        return math.sin(2.0 * math.pi * (1.0 + 11.0 * self._age / self.each) * t)

    def _corner(self) -> np.ndarray:
        box = self.limits.box
        assert box is not None
        return np.where(self.rng.random(3) < 0.5, box.low, box.high)

    def _into(self, measured: Measured) -> np.ndarray:
        box = self.limits.keep_out[int(self.rng.integers(len(self.limits.keep_out)))]
        return self.rng.uniform(np.array(box.low), np.array(box.high)) - measured.position

    def _broken(self) -> np.ndarray:
        bad = np.array([np.nan, np.inf, -np.inf])[self.rng.integers(3, size=3)]
        bad[self.rng.random(3) < 0.5] = 0.01  # often only one number is; now and then none
        return bad

    def _towards_end(self, measured: Measured) -> tuple[np.ndarray, np.ndarray]:
        """The motion of the hand that one joint makes on its way to its nearer end."""
        x, j = self.limits, self._joint
        if measured.jacobian is None or not x.joint_low:
            return np.resize(self._way, 3) * 0.05, np.zeros(3)
        sign = (
            1.0
            if x.joint_high[j] - measured.joints[j] < measured.joints[j] - x.joint_low[j]
            else -1.0
        )
        motion = 0.2 * sign * measured.jacobian[:, j]
        return motion[:3], motion[3:]


class Judge:
    """Looks at the arm, not at the gate. ``nearest`` (m, rad): how near it came to each wall;
    below 0: beyond."""

    def __init__(self, limits: Limits, joints: bool = False):
        """``joints``: the robot is commanded by them, and nothing limits its hand."""
        self.limits, self.joints = limits, joints
        self.braking = (
            limits.speed**2 / (2.0 * limits.acceleration) if math.isfinite(limits.speed) else 0.0
        )
        self.kinds = {
            "box": 0,
            "keep_out": 0,
            "joints": 0,
            "speed": 0,
            "rotation_speed": 0,
            "joint_speed": 0,
        }
        self.nearest = {"box": np.inf, "keep_out": np.inf, "joints": np.inf}
        self.speeds = {"speed": 0.0, "rotation_speed": 0.0}
        self.joint_speeds = np.zeros(0)  # the fastest of each joint
        self.room = np.inf  # to the nearest wall or end, where it is
        self._last: tuple[float, np.ndarray] | None = None

    @property
    def violations(self) -> int:
        return sum(self.kinds.values())

    def fastest(self) -> dict[str, Any]:
        """Of each speed: its largest, and the limit (None: there is none). Joints one by one."""
        limits = {name: getattr(self.limits, name) for name in (*self.speeds, "joint_speed")}
        found: dict[str, Any] = {**self.speeds, "joint_speed": self.joint_speeds.tolist()}
        return {
            n: {"measured": found[n], "limit": x if np.isfinite(x).all() else None}
            for n, x in limits.items()
        }

    def look(self, robot: SimulatedRobot) -> None:
        x, path = self.limits, robot.log.path
        for t, place in path:
            self.room = np.inf
            if x.box is not None:
                self._wall(
                    "box",
                    float(
                        min(
                            np.min(place - np.array(x.box.low)),
                            np.min(np.array(x.box.high) - place),
                        )
                    ),
                )
            for out in x.keep_out:
                self._wall("keep_out", _distance(place, out))
            if self._last is not None and t - self._last[0] > 1e-6 and not self.joints:
                self._fast(
                    "speed", float(np.linalg.norm(place - self._last[1]) / (t - self._last[0]))
                )
            self._last = (t, place)
        path.clear()
        seen = robot.world.read()
        self._joints(seen["joints"], np.abs(seen["joint_velocity"]))
        if not self.joints:
            motion = seen["jacobian"] @ seen["joint_velocity"]
            self._fast("speed", float(np.linalg.norm(motion[:3])))
            self._fast("rotation_speed", float(np.linalg.norm(motion[3:])))

    def _joints(self, joints: np.ndarray, speeds: np.ndarray) -> None:
        x = self.limits
        room = float(
            min(np.min(joints - np.array(x.joint_low)), np.min(np.array(x.joint_high) - joints))
        )
        self.nearest["joints"] = min(self.nearest["joints"], room)
        self.kinds["joints"] += room < 0.0
        self.room = min(self.room, room)
        self.joint_speeds = (
            np.maximum(self.joint_speeds, speeds) if self.joint_speeds.size else speeds
        )
        self.kinds["joint_speed"] += bool((speeds > OVER * np.array(x.joint_speed)).any())

    def _fast(self, name: str, speed: float) -> None:
        self.speeds[name] = max(self.speeds[name], speed)
        self.kinds[name] += speed > OVER * getattr(self.limits, name)

    def anew(self, robot: SimulatedRobot) -> None:
        """It was put elsewhere."""
        robot.log.path.clear()
        self._last = None

    def _wall(self, name: str, room: float) -> None:
        self.nearest[name], self.room = min(self.nearest[name], room), min(self.room, room)
        self.kinds[name] += room < -self.braking


def _distance(place: np.ndarray, box: Box) -> float:
    """From the outside; below 0 inside of it."""
    low, high = np.array(box.low), np.array(box.high)
    outside = float(np.linalg.norm(place - np.clip(place, low, high)))
    return outside or -float(min(np.min(place - low), np.min(high - place)))
