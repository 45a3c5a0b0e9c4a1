"""Scripted experts that read simulator state: closed-loop, one action per control step, the joints by
inverse kinematics on the model.

An expert looks at where things are now, never at how they should have moved, so it recovers from
noise in the executed actions: a missed or dropped cube is approached again.
"""

from __future__ import annotations

import mujoco
import numpy as np

from sim.so101.tasks import BIN_WALL, HALF, LIFT_HEIGHT, Task, goal
from sim.so101.world import INNER, World

OPEN, CLOSED = 60.0, 5.0  # percent of the gripper
LEAD = 2.5  # control steps' way that an action is ahead of the joints
CLEAR = 0.006  # between the fixed jaw and the cube before the jaws close
ABOVE = 0.045  # of the hand over the cube before it comes down
OVER = 0.045  # of the closed jaws' tip over where they push
BEHIND = 0.034  # of the closed jaws behind the cube's middle that they push
_ITERATIONS, _DAMPING, _LARGEST, _NEAR = 12, 0.003, 0.4, 1e-4
_TURN = 0.04  # m for each rad: what a wrong orientation weighs
_KP = 17.8  # N m/rad of a servo: what it gives way by under the arm's weight is added


class Kinematics:
    """Joint angles that put the hand somewhere, by damped least squares on the model (Wampler 1986,
    doi 10.1109/TSMC.1986.289285)."""

    def __init__(self, world: World):
        self._world, self._data = world, mujoco.MjData(world.scene.model)

    def solve(self, place: np.ndarray, opening: np.ndarray, beyond: float) -> np.ndarray:
        """Angles (rad) [6] from where the joints are, with the hand pointing down, its jaws opening
        along ``opening`` [3], and what is ``beyond`` (m) its frame towards the moving jaw at
        ``place`` [3]. The closest that the iterations came."""
        w, data, model = self._world, self._data, self._world.scene.model
        joints, angles = w.joints, w.joints.angles
        down = np.array([0.0, 0.0, -1.0])
        wanted = np.stack([down, np.cross(opening, down), opening], axis=1)
        jacobian = np.zeros((6, model.nv))
        for _ in range(_ITERATIONS):
            data.qpos[joints.position_at] = angles
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            frame = data.site_xmat[w.scene.site].reshape(3, 3)
            point = data.site_xpos[w.scene.site] + beyond * frame[:, 2]
            turn = 0.5 * np.cross(frame.T, wanted.T).sum(axis=0)
            error = np.concatenate([place - point, _TURN * turn])
            if np.abs(error).max() < _NEAR:
                break
            mujoco.mj_jac(
                model, data, jacobian[:3], jacobian[3:],
                point, model.site_bodyid[w.scene.site],
            )  # fmt: skip
            own = jacobian[:, joints.velocity_at[:5]].copy()
            own[3:] *= _TURN
            angles[:5] = _stepped(angles[:5], own, error, *joints.ranges[:5].T)
        return angles


def _stepped(
    angles: np.ndarray, jacobian: np.ndarray, error: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """One damped step; a joint that would leave its range stays at its end, and the others do the
    step without it."""
    free = np.ones(len(angles), dtype=bool)
    while True:
        own = jacobian * free
        step = own.T @ np.linalg.solve(own @ own.T + _DAMPING**2 * np.eye(6), error)
        step *= min(1.0, _LARGEST / max(float(np.abs(step).max()), 1e-9))
        at_end = free & (((angles >= high) & (step > 0)) | ((angles <= low) & (step < 0)))
        if not at_end.any():
            return np.clip(angles + step, low, high)
        free &= ~at_end


class Expert:
    """One episode of ``task`` in ``world``. ``most`` is how far a joint's goal moves in a control
    step (degrees, percent)."""

    def __init__(self, task: Task, world: World, most: float):
        self.task, self.world, self.most = task, world, most
        self._solver = Kinematics(world)
        self._closing = 0  # control steps spent closing
        self._held = self._released = self._behind = False

    def act(self) -> np.ndarray:
        """A clean label [6]: lerobot's numbers, where each joint is to go next."""
        if self.task.kind == "push":
            beyond, (place, opening, grip) = 0.0, self._push()
        else:
            beyond, (place, opening, grip) = INNER + HALF, self._pick()
        w = self.world
        angles = self._solver.solve(place, opening, beyond)
        bias = w.data.qfrc_bias[w.joints.velocity_at]
        wanted = w.scene.units.told(angles + bias / _KP)
        wanted[5] = grip
        now, ahead = w.told(), LEAD * self.most
        label = now + np.clip(wanted - now, -ahead, ahead)
        if grip == CLOSED:  # (its jaws stand still at the cube, and are to press it)
            label[5] = max(CLOSED, now[5] - ahead)
        return label

    # ----------------------------------------------------------------------------- lift, and put down
    def _pick(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Where a held cube's middle goes, along what the jaws open, and the gripper."""
        w, cube = self.world, self.world.cube
        hand, opening = w.hand, self._along_cube()
        offset = cube - hand
        across, above = float(np.hypot(*offset[:2])), float(-offset[2])
        both = all(w.touches())
        if self._released:
            if across > 0.03 or above > 0.04:
                self._released = False  # away, and yet no success: try again
            apart = w.told()[5] > OPEN - 15.0
            return hand + np.array([0.0, 0.0, 0.05 if apart else 0.0]), w.frame[:, 2], OPEN
        if self._closing and (across > 0.03 or abs(above) > 0.03):
            self._closing, self._held = 0, False  # slipped away
        if self._held:
            return self._carry(hand, cube)
        beside = cube - CLEAR * opening  # so that the fixed jaw passes the cube
        gap = beside - hand
        if self._closing or (np.hypot(*gap[:2]) < 0.006 and abs(gap[2]) < 0.008):
            self._closing += 1
            self._held = both and self._closing >= 4
            if self._closing > 40:
                self._closing = 0
            return (beside if self._closing < 3 else hand), opening, CLOSED
        far = float(np.hypot(*gap[:2]))
        height = cube[2] + min(ABOVE, 3.0 * max(0.0, far - 0.006))
        return np.array([*beside[:2], height]), opening, OPEN

    def _carry(self, hand: np.ndarray, cube: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        end = goal(self.task.kind)
        opening = self.world.frame[:, 2].copy()
        opening[2] = 0.0
        opening /= np.linalg.norm(opening)
        if end is None:
            return np.array([*hand[:2], HALF + LIFT_HEIGHT + 0.03]), opening, CLOSED
        gap = end - cube
        far = float(np.hypot(*gap[:2]))
        high = BIN_WALL + HALF + 0.03
        if far < 0.015:
            if cube[2] < BIN_WALL + 0.02:
                self._released, self._held, self._closing = True, False, 0
                return hand, opening, OPEN
            return np.array([*(hand[:2] + gap[:2]), BIN_WALL + 0.012]), opening, CLOSED
        turned = self._radial(end)
        share = float(np.clip((cube[2] - BIN_WALL - HALF) / 0.008, 0.0, 1.0))  # up first
        place = np.array([*(hand[:2] + share * gap[:2]), high])
        return place, turned if share > 0 else opening, CLOSED

    def _along_cube(self) -> np.ndarray:
        """The horizontal direction across two faces of the cube that is nearest to ahead."""
        radial = self._radial(self.world.cube)
        yaw = self.world.yaw
        sides = [
            np.array([np.cos(yaw + k * np.pi / 2), np.sin(yaw + k * np.pi / 2), 0.0])
            for k in range(4)
        ]
        return max(sides, key=lambda side: float(side @ radial))

    def _radial(self, place: np.ndarray) -> np.ndarray:
        """From the arm's first joint to ``place``, horizontal [3]."""
        way = np.array([place[0] - 0.0388, place[1], 0.0])
        return way / np.linalg.norm(way)

    # --------------------------------------------------------------------------------------- push
    def _push(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Where the closed jaws go: behind the cube, then through it to the mark."""
        w, cube, end = self.world, self.world.cube, goal("push")
        assert end is not None
        way = end - cube
        way[2] = 0.0
        left = float(np.linalg.norm(way))
        way = way / max(left, 1e-6)
        tip = w.data.site_xpos[w.scene.site]
        behind = cube - BEHIND * way
        gap = tip - cube
        along, beside = float(gap @ way), float(np.linalg.norm((gap - (gap @ way) * way)[:2]))
        if self._behind and (along > -0.01 or beside > 0.014):
            self._behind = False
        if not self._behind:
            near = float(np.hypot(*(behind - tip)[:2]))
            self._behind = near < 0.008 and tip[2] < HALF + 0.008
            height = HALF + min(OVER, 3.0 * max(0.0, near - 0.006))
            return np.array([*behind[:2], height]), self._radial(behind), CLOSED
        reach = min(left, 0.022)
        return np.array([*(behind + reach * way)[:2], HALF]), self._radial(cube), CLOSED
