"""Scripted experts that read simulator state: closed-loop, one command for both arms per control
step (numpy only).

As in `sim.tabletop.demonstrator` an expert looks at where things are now, never at how they should
have moved, so it recovers from noise in what is executed. Hands point down; where a hand is to go
becomes joint angles by damped least squares from the measured ones (`sim.dualarm.kinematics`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from sim.dualarm import kinematics
from sim.dualarm.kinematics import ARMS, above
from sim.dualarm.shapes import FINGERTIP, THINGS
from sim.dualarm.tasks import GIVEN, LIFT_HEIGHT, TASKS, Task

if TYPE_CHECKING:
    from sim.dualarm.judge import View

# m, rad of the hand, rad of one joint: the most in a control step at full speed
MOVE, TURN, JOINT = 0.02, 0.18, 0.075
CLEAR = 0.06  # m above the grasp point at which a hand comes over a thing
CARRY = 0.035  # m by which what is carried is lifted over what it is put on
CLOSED = 0.02  # of the gripper: less than this holds nothing
MEET = np.array([0.0, 0.20, 0.10])  # where the stick changes hands (m)
WAIT = np.array([0.15, 0.19, 0.17])  # where the right hand waits for it
_IK_STEPS = 4
OPEN, CLOSE = 1.0, 0.0


class Hand:
    """One arm's hand, moved in straight lines."""

    def __init__(self, arm: int, speed: float) -> None:
        self.arm, self.name, self._speed = arm, ARMS[arm], speed

    def go(
        self, state: View, position: np.ndarray, yaw: float, grip: float, pace: float = 1.0
    ) -> np.ndarray:
        """The command [7] that brings the hand, pointing down and opening along ``yaw``, nearer
        to ``position``."""
        joints, pace = state.joints(self.arm), pace * self._speed
        place, frame, _ = kinematics.hand(self.name, joints)
        way, turn = position - place, kinematics.turn_between(frame, kinematics.downward(yaw))
        way = way * min(1.0, pace * MOVE / max(float(np.linalg.norm(way)), 1e-9))
        turn = turn * min(1.0, pace * TURN / max(float(np.linalg.norm(turn)), 1e-9))
        there = kinematics.solve(
            self.name, place + way, kinematics.turned(frame, turn), joints, _IK_STEPS
        )
        change = there - joints
        change *= min(1.0, pace * JOINT / max(float(np.abs(change).max()), 1e-9))
        return np.append(joints + change, grip)

    def rest(self, state: View) -> np.ndarray:
        """The command [7] that brings the arm back to where it waits, open."""
        joints = state.joints(self.arm)
        change = kinematics.home(self.name) - joints
        return np.append(
            joints + change * min(1.0, JOINT / max(float(np.abs(change).max()), 1e-9)), OPEN
        )

    def easy(self, position: np.ndarray, yaw: float, symmetry: float = np.pi) -> float:
        return kinematics.easy_yaw(self.name, position, yaw, symmetry)

    def keep(self, state: View, yaw: float, symmetry: float = np.pi) -> float:
        """``yaw`` plus the multiple of ``symmetry`` that is nearest to the present one: a load
        is not swung around."""
        _, frame, _ = kinematics.hand(self.name, state.joints(self.arm))
        return yaw + symmetry * round(
            (float(np.arctan2(frame[1, 1], frame[0, 1])) - yaw) / symmetry
        )


class _Grasp:
    """Takes hold of a thing: over it, down, close. `holds` from then on until it slips away."""

    def __init__(self, hand: Hand, thing: str, along: float = 0.0) -> None:
        self.hand, self._thing, self._along = hand, THINGS[thing], along
        self._closing = 0
        self.holds = False

    def point(self, state: View) -> np.ndarray:
        """Where the fingers are to close (m)."""
        own = np.array([self._along, 0.0, self._thing.grasp])
        return state.position(self._thing.name) + state.rotation(self._thing.name) @ own

    def yaw(self, state: View) -> float:
        opens = state.yaw(self._thing.name) + self._thing.opens
        if self._closing:
            return self.hand.keep(state, opens, self._thing.symmetry)
        return self.hand.easy(self.point(state), opens, self._thing.symmetry)

    def act(self, state: View) -> np.ndarray:
        """The next command [7] on the way to holding it; stays where it is once it does."""
        grasp, place = self.point(state), state.hand(self.hand.arm)
        way = grasp - place
        across, over = float(np.hypot(way[0], way[1])), -float(way[2])
        if self._closing and (
            across > 0.03 or abs(over) > 0.03 or (self.holds and self._empty(state))
        ):
            self._closing, self.holds = 0, False
        if self._closing or (across < 0.008 and abs(over) < 0.008):
            self._closing += 1
            self.holds = self._closing > 3 and not self._empty(state)
            if self._closing > 6 and not self.holds:
                self._closing = 0
            return self.hand.go(state, grasp, self.yaw(state), CLOSE, pace=0.5)
        height = min(CLEAR, 4.0 * max(0.0, across - 0.005))
        return self.hand.go(state, grasp + above(height), self.yaw(state), OPEN)

    def check(self, state: View) -> bool:
        """Whether it is still held."""
        off = float(np.linalg.norm(self.point(state) - state.hand(self.hand.arm)))
        if self.holds and (off > 0.03 or self._empty(state)):
            self._closing, self.holds = 0, False
        return self.holds

    def _empty(self, state: View) -> bool:
        return state.opening(self.hand.arm) < CLOSED


def nearer(state: View, name: str) -> int:
    """The arm on whose side a thing is."""
    return int(state.position(name)[0] > 0.0)


class Demonstrator:
    """A scripted expert for one episode, and its two hands."""

    def __init__(self, speed: float) -> None:
        self._hands = [Hand(arm, speed) for arm in (0, 1)]

    def act(self, state: View) -> np.ndarray:
        """What to command now [2, 7]: joint angles (rad) of each arm, and how far its gripper is
        to open, 0 ... 1."""
        raise NotImplementedError


class _Ring(Demonstrator):
    """Comes over the bell with a closed hand and pushes."""

    def __init__(self, task: Task, state: View, speed: float) -> None:
        self._name = task.targets[0]
        super().__init__(speed)
        self._active = nearer(state, self._name)

    def act(self, state: View) -> np.ndarray:
        hand, thing = self._hands[self._active], THINGS[self._name]
        top = state.position(self._name) + above(thing.top + FINGERTIP)
        across = float(np.hypot(*(top - state.hand(self._active))[:2]))
        height = -1.5 * thing.travel if across < 0.008 else min(0.04, 0.02 + 4.0 * across)
        command = [other.rest(state) for other in self._hands]
        command[self._active] = hand.go(state, top + above(height), hand.easy(top, 0.0), CLOSE)
        return np.stack(command)


class _PutOn(Demonstrator):
    """Picks the target up, carries it over the goal, lowers it, opens and goes away upwards."""

    def __init__(self, task: Task, state: View, speed: float) -> None:
        self._target, self._goal = task.targets[0], task.goal
        super().__init__(speed)
        # the thing that is not in the middle
        away = max(task.zones, key=lambda name: abs(float(state.position(name)[0])))
        self._active = nearer(state, away)
        self._grasp = _Grasp(self._hands[self._active], self._target)
        self._released: np.ndarray | None = None

    def act(self, state: View) -> np.ndarray:
        command = [hand.rest(state) for hand in self._hands]
        command[self._active] = self._one(state)
        return np.stack(command)

    def _one(self, state: View) -> np.ndarray:
        hand, place = self._hands[self._active], state.hand(self._active)
        goal = state.position(self._goal) + above(
            THINGS[self._goal].top + THINGS[self._target].rest
        )
        gap = goal - state.position(self._target)
        across = float(np.hypot(gap[0], gap[1]))
        if self._released is not None:
            if across < 0.03 and abs(gap[2]) < 0.02:
                return self._retreat(state, place, self._released)
            self._released = None  # it is not where it should be: once more
        if not self._grasp.check(state):
            return self._grasp.act(state)
        yaw = self._grasp.yaw(state)
        if across < 0.006 and gap[2] > -0.004:
            self._released, self._grasp = place, _Grasp(hand, self._target)
            return hand.go(state, place, yaw, OPEN)
        safe = CARRY if across > 0.03 else min(CARRY, 0.002 + 2.0 * max(0.0, across - 0.003))
        up = float(gap[2]) + safe  # that it has to rise
        # up first, then across
        ahead = np.array([gap[0], gap[1], 0.0]) * (1.0 if across <= 0.03 or up < 0.012 else 0.0)
        return hand.go(
            state, place + ahead + above(up), yaw, CLOSE, pace=1.0 if across > 0.03 else 0.6
        )

    def _retreat(self, state: View, place: np.ndarray, released: np.ndarray) -> np.ndarray:
        hand, apart = self._hands[self._active], state.opening(self._active) > 0.85
        yaw = self._grasp.yaw(state)
        return hand.go(state, place + above(0.05) if apart else released, yaw, OPEN)


class _LiftApart(Demonstrator):
    """Each arm lifts the block on its side."""

    def __init__(self, task: Task, state: View, speed: float) -> None:
        super().__init__(speed)
        self._grasps = [_Grasp(self._hands[nearer(state, name)], name) for name in task.targets]
        self._grasps.sort(key=lambda grasp: grasp.hand.arm)

    def act(self, state: View) -> np.ndarray:
        return np.stack([self._one(state, grasp) for grasp in self._grasps])

    def _one(self, state: View, grasp: _Grasp) -> np.ndarray:
        if not grasp.check(state):
            return grasp.act(state)
        place = state.hand(grasp.hand.arm)
        return grasp.hand.go(
            state, np.array([*place[:2], 2.0 * LIFT_HEIGHT]), grasp.yaw(state), CLOSE
        )


class _LiftTogether(Demonstrator):
    """Both hands take the bar by its grips and raise it in step."""

    def __init__(self, task: Task, state: View, speed: float) -> None:
        self._name = task.targets[0]
        super().__init__(speed)
        self._grasps = [
            _Grasp(hand, self._name, x) for hand, x in zip(self._hands, THINGS[self._name].grips)
        ]

    def act(self, state: View) -> np.ndarray:
        held = [grasp.check(state) for grasp in self._grasps]
        if not all(held):
            return np.stack([grasp.act(state) for grasp in self._grasps])
        low = min(float(state.hand(arm)[2]) for arm in (0, 1))
        up = min(low + 0.02, THINGS[self._name].rest + 2.0 * LIFT_HEIGHT)
        commands = []
        for grasp in self._grasps:
            x, y, _ = state.hand(grasp.hand.arm)
            commands.append(grasp.hand.go(state, np.array([x, y, up]), grasp.yaw(state), CLOSE))
        return np.stack(commands)


class _HandOver(Demonstrator):
    """The left hand brings the stick to the middle, the right one takes its other end, then the
    left lets go."""

    def __init__(self, task: Task, state: View, speed: float) -> None:
        self._name = task.targets[0]
        super().__init__(speed)
        self._grasps = [
            _Grasp(hand, self._name, x) for hand, x in zip(self._hands, THINGS[self._name].grips)
        ]

    def act(self, state: View) -> np.ndarray:
        left, right = (grasp.check(state) for grasp in self._grasps)
        if right:
            return np.stack([self._let_go(state, left), self._take_away(state)])
        wait = self._hands[1].go(state, WAIT, self._hands[1].easy(WAIT, np.pi / 2), OPEN)
        if not left:
            return np.stack([self._grasps[0].act(state), wait])
        goal = MEET + np.array([THINGS[self._name].grips[0], 0.0, 0.0])
        gap = goal - state.hand(0)
        there = float(np.linalg.norm(gap)) < 0.015
        if float(state.hand(0)[2]) < MEET[2] - 0.03:
            goal = np.array([*state.hand(0)[:2], MEET[2]])  # up first
        bring = self._hands[0].go(state, goal, self._hands[0].keep(state, np.pi / 2), CLOSE)
        return np.stack([bring, self._grasps[1].act(state) if there else wait])

    def _let_go(self, state: View, held: bool) -> np.ndarray:
        place, hand = state.hand(0), self._hands[0]
        apart = state.opening(0) > 0.85
        return hand.go(
            state, place + above(0.06) if apart else place, hand.keep(state, np.pi / 2), OPEN
        )

    def _take_away(self, state: View) -> np.ndarray:
        hand, place = self._hands[1], state.hand(1)
        goal = (
            place if state.opening(0) < 0.5 else np.array([GIVEN + 0.12, MEET[1], MEET[2] + 0.02])
        )
        return hand.go(state, goal, hand.keep(state, np.pi / 2), CLOSE)


_EXPERTS: dict[str, Callable[[Task, View, float], Demonstrator]]
_EXPERTS = {"ring": _Ring, "place": _PutOn, "stack": _PutOn, "hand_over": _HandOver}


def make_demonstrator(task_id: str, state: View, speed: float = 1.0) -> Demonstrator:
    """A fresh expert for one episode of a task that begins in ``state``; ``speed`` scales its
    motion."""
    task = TASKS[task_id]
    if task.kind == "lift":
        return (
            _LiftApart(task, state, speed)
            if len(task.targets) > 1
            else _LiftTogether(task, state, speed)
        )
    return _EXPERTS[task.kind](task, state, speed)
