"""Random and adversarial actions against a simulated arm, in lockstep virtual time; judged by where the arm really went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from real import limits as limit_files
from real.gate import STAGES, Gate, Request
from real.limits import Limits
from real.robots.faults import Defects
from real.robots.protocol import Measured
from real.robots.simulated import SimulatedRobot
from real.rotations import from_vector, multiply

DT = 0.01
KINDS = ("random", "one way", "alternating", "keep-out", "absurd", "not finite")
_RUN = 400  # ticks of one kind before the next


def adversarial(world: Any, limits_file: Path, ticks: int, seed: int) -> dict[str, Any]:
    """Counts of violations beyond one braking distance over ``ticks`` of 10 ms. A new action comes every fifth tick."""
    now = [0.0]
    robot = SimulatedRobot(world, Defects(), lambda: now[0])
    turns = robot.embodiment.rotation != "none"
    limits = limit_files.load(limits_file, robot.limits, limit_files.needed("cartesian", turns, True))
    gate, rng = Gate(limits, robot.capabilities, turns, DT), np.random.default_rng(seed)
    judge = _Judge(limits)
    clipped, refused = np.zeros(len(STAGES), int), 0
    request, kind = None, KINDS[0]
    for tick in range(ticks):
        measured = robot.observe()
        if tick % _RUN == 0:
            kind = KINDS[int(rng.integers(len(KINDS)))]
        if tick % 5 == 0 or request is None:
            request = _asked(rng, kind, measured, limits, tick)
        passed = gate(request, measured, now[0])
        clipped += [passed.mask >> i & 1 for i in range(len(STAGES))]
        if passed.reference is None:
            refused += 1
            robot.hold()
            gate.reset()
        else:
            robot.command(passed.reference)
        now[0] += DT
        robot.advance_to(now[0])
        judge.look(robot)
    return {
        "ticks": ticks, "seed": seed, "violations": judge.violations, "of": judge.kinds, "refused": refused,
        "clipped": dict(zip(STAGES, clipped.tolist())), "largest_speed": judge.speed, "braking_m": judge.braking,
        "furthest_outside_m": judge.outside, "speed_limit": limits.speed,
    }  # fmt: skip


def _asked(rng: np.random.Generator, kind: str, measured: Measured, limits: Limits, tick: int) -> Request:
    here, sign = measured.position, 1.0 if (tick // _RUN) % 2 else -1.0
    corner = np.array(limits.keep_out[0].low if limits.keep_out else limits.box.low)  # type: ignore[union-attr]
    move = {
        "random": 0.05 * rng.standard_normal(3),
        "one way": sign * np.array([1.0, 1.0, -1.0]),
        "alternating": rng.choice([-0.05, 0.05], 3),
        "keep-out": corner + 0.02 - here,
        "absurd": rng.standard_normal(3) * 10.0 ** rng.integers(-6, 9),
        "not finite": np.array([np.nan, np.inf, -np.inf])[rng.permutation(3)],
    }[kind]
    turn = multiply(from_vector(rng.standard_normal(3)), measured.quaternion)
    return Request(float(rng.choice([-1.0, 1.0])), here + move, turn)


class _Judge:
    """Looks at the arm, not at the gate."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.braking = limits.speed**2 / (2.0 * limits.acceleration)
        self.kinds = {"box": 0, "keep_out": 0, "speed": 0, "joints": 0}
        self.speed = self.outside = 0.0
        self._last: tuple[float, np.ndarray] | None = None

    @property
    def violations(self) -> int:
        return sum(self.kinds.values())

    def look(self, robot: SimulatedRobot) -> None:
        x, path = self.limits, robot.log.path
        box = x.box
        for t, place in path:
            beyond = float(max(np.max(np.array(box.low) - place), np.max(place - np.array(box.high))))  # type: ignore[union-attr]
            self.outside = max(self.outside, beyond)
            self.kinds["box"] += beyond > self.braking
            for out in x.keep_out:
                depth = float(min(np.min(place - np.array(out.low)), np.min(np.array(out.high) - place)))
                self.kinds["keep_out"] += depth > self.braking
            if self._last is not None and t - self._last[0] > 1e-6:
                speed = float(np.linalg.norm(place - self._last[1]) / (t - self._last[0]))
                self.speed = max(self.speed, speed)
                self.kinds["speed"] += speed > x.speed * 1.05
            self._last = (t, place)
        path.clear()
        joints = robot.observe().joints
        low, high = np.array(x.joint_low), np.array(x.joint_high)
        self.kinds["joints"] += bool(((joints < low) | (joints > high)).any())
