"""The action gate: whatever a policy or a person asks for, what leaves it keeps the limits.

Stages work in the order of `STAGES`, each on what the one before left, and each reports by how much
it changed the request:

| stage | what it does | unit of its figure |
|---|---|---|
| finite | refuses a request, or a measured pose, with a NaN, an infinity, another shape or what no arm has | 1 |
| age | refuses a policy's request whose observation is too old | s too old |
| step | keeps the target within reach of the measured pose (translation, rotation angle, joints) | m, rad, joint units |
| rate | limits speed, acceleration and jerk of what is commanded | m/s, rad/s, joint units/s, by the largest |
| workspace | slows down before the box's walls and keep-outs so that the arm can stop, and slides along them | m/s |
| joints | the same before the joints' ends | rad/s |
| ik | refuses a jump to another branch; slows down where the hand's motion needs too fast joints | share taken away |
| force | nothing pushes on against a force above the limit; twice as much trips | m/s |
| gripper | a threshold, and a lock-out after each change | 1 |

All limits bind one quantity, the commanded velocity u. For an arm that follows its target closely
the target moves by u dt in a tick. An arm under impedance control moves at ``gain`` times the
distance to its target, and gets one u / gain ahead of its measured pose: a goal that no limit
touches goes to the robot unchanged. Stages behind "rate" take speed away, or turn it against an arm
that is faster than its limit, and may do so faster than the jerk limit. Pure numpy, no clock of its
own.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from real.foresight import Foresight, motion_of, of_joints, turning_of
from real.joint_ends import CREEP, JointEnds
from real.limits import Limits
from real.pacing import paced, shorten, towards
from real.robots.protocol import MOST, UNIT, Capabilities, Measured, Reference
from real.rotations import difference, from_vector, multiply, normalised
from real.walls import Walls

STAGES = ("finite", "age", "step", "rate", "workspace", "joints", "ik", "force", "gripper")
FINITE, AGE, STEP, RATE, WORKSPACE, JOINTS, IK, FORCE, GRIPPER = range(len(STAGES))
# Stages whose steady work says that something is wrong; "step" and "rate" shape motion all the
# time.
SIGNALS = sum(1 << s for s in (FINITE, AGE, WORKSPACE, JOINTS, IK, FORCE))

_TINY, _HUGE = 1e-9, 1e9
_SOON = 0.05  # seconds that it takes to stop, with a tick or two of its way bending
_SWING = 0.05  # m: how far the hand may swing out for each radian that its turn takes to stop
_ABSURD = 1e6  # no robot's metres, radians or degrees
_ALLOWED = 0.95  # of the speed limit, for a target
_HOLDBACK = 8.0  # taken off a target's speed for what the arm is faster


@dataclass(frozen=True)
class Request:
    """Where somebody wants the robot: a pose or joints. ``obs_stamp`` is None where no observation
    stands behind it. ``seconds`` is when it is to be there, for an arm without impedance; 0: as
    soon as the limits allow."""

    gripper: float
    position: np.ndarray = field(default_factory=lambda: np.empty(0))
    quaternion: np.ndarray = field(default_factory=lambda: np.empty(0))
    joints: np.ndarray = field(default_factory=lambda: np.empty(0))
    obs_stamp: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Passed:
    """``reference`` None: refused, the robot must hold. ``trip`` says why the session should
    pause, or is empty."""

    reference: Reference | None
    mask: int
    amounts: np.ndarray  # [stages]
    trip: str = ""


class Gate:
    """One robot's gate, called once per tick of ``dt`` seconds. `reset` wherever the robot holds
    by itself."""

    def __init__(self, limits: Limits, capabilities: Capabilities, turns: bool, dt: float):
        self.limits, self.dt, self.gain, self.turns = limits, dt, capabilities.gain, turns
        self.joint_space = capabilities.kind == "joints"
        x = limits
        pairs = zip(
            (x.speed, x.acceleration, x.jerk, x.step),
            (x.rotation_speed, x.rotation_acceleration, x.rotation_jerk, x.rotation_step),
        )
        self.joints = JointEnds(limits, self.gain, dt)
        wide = [self.joints.speed, [x.joint_acceleration], [x.joint_jerk], [x.joint_step]]
        rows = wide if self.joint_space else [list(p) for p in pairs]
        self._speed, self._acceleration, self._jerk, self._step = (
            np.minimum(np.array(r), _HUGE) for r in rows
        )
        self.walls = Walls(limits, self.gain, dt)
        self.gripper = _Gripper(limits)
        self.ahead = Foresight(limits, capabilities.gain, dt)
        self.reset()

    def reset(self) -> None:
        """At rest: what is commanded next starts from the measured pose and from no speed."""
        self._velocity = self._change = np.zeros((0, 0))  # u and its derivative, [groups, width]
        self.ahead.rest()
        # the last target of an arm without impedance
        self._base: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def velocity(self) -> np.ndarray:
        """What is commanded now, flat: m/s and rad/s [6], or joint units/s [n]; empty at rest."""
        return self._velocity.ravel()

    def origin(self, measured: Measured) -> Measured:
        """From where a delta counts: the measured pose of an arm under impedance control, the last
        target of one that follows closely (its lag would add up otherwise; the step keeps the
        target near the arm)."""
        if self.gain or self.joint_space or self._base is None:
            return measured
        return dataclasses.replace(measured, position=self._base[0], quaternion=self._base[1])

    def __call__(
        self, request: Request, measured: Measured, now: float, slow: bool = False
    ) -> Passed:
        """What may go to the robot for ``request``. Never raises for what a request holds."""
        work = np.zeros(len(STAGES))
        if not _is_pose(measured, self.limits, self.joint_space, self.turns):
            work[FINITE] = 1.0
            return _refused(work, "the robot reports a pose that no arm has")
        self.ahead.see(measured)
        if not _is_request(request, measured, self.joint_space, self.turns):
            work[FINITE] = 1.0
            return _refused(work, "")
        if (
            request.obs_stamp is not None
            and (age := now - request.obs_stamp) > self.limits.observation_age
        ):
            work[AGE] = age - self.limits.observation_age
            return _refused(work, "")
        if not self.joint_space and (trip := _escapes(self.walls, measured, work)) is not None:
            return _refused(work, trip)
        beyond = 0.0 if self.joint_space else self.joints.leaving(measured)
        work[JOINTS] = beyond
        too_fast, too_fast_joint = self.ahead.excess()
        work[RATE], work[IK] = too_fast, too_fast_joint
        # it brakes; a force that trips is told all the same
        if beyond > 0.0 or too_fast > 0.0 or too_fast_joint > 0.0:
            trip = (
                "" if self.joint_space else _force(self.limits, np.zeros((2, 3)), measured, work)[1]
            )
            return _refused(work, trip)
        self._start(measured)
        wanted, error = self._wanted(request, measured, work)
        if self.joint_space and float(np.max(np.abs(error))) > 3.0 * float(self._step.max()):
            work[IK] = 1.0
            return _refused(work, "a jump of the joints")
        return self._move(wanted, request, measured, work, now, slow)

    def ramp(self, measured: Measured, now: float) -> Passed:
        """Towards standstill within the limits, for an arm that cannot hold by itself; the same
        pose once it is reached. From the measured one where something has carried the arm further
        from its target than a step. Refused where that is none: nobody knows then where to stand
        still."""
        if not _is_pose(measured, self.limits, self.joint_space, self.turns):
            return _refused(np.zeros(len(STAGES)), "")
        if not self._near(measured):
            self.reset()
        self.ahead.see(measured)
        self._start(measured)
        request = Request(0.0, quaternion=self._base[1] if self._base else measured.quaternion)
        return self._move(
            np.zeros_like(self._velocity), request, measured, np.zeros(len(STAGES)), now, False
        )

    def _start(self, measured: Measured) -> None:
        if not self._velocity.size:
            shape = (len(measured.joints), 1) if self.joint_space else (2, 3)
            self._velocity, self._change = np.zeros(shape), np.zeros(shape)
        if self._base is None:
            place = measured.joints if self.joint_space else measured.position
            self._base = (place.copy(), measured.quaternion.copy())

    def _near(self, measured: Measured) -> bool:
        """Whether the last target is one that a step could lead to."""
        if self._base is None:
            return True
        place, quaternion = self._base
        if self.joint_space:
            return bool((np.abs(place - measured.joints) <= self._step).all())
        turn = difference(quaternion, measured.quaternion) if self.turns else np.zeros(3)
        return bool(
            (
                np.linalg.norm(np.stack([place - measured.position, turn]), axis=1) <= self._step
            ).all()
        )

    def _here(self, measured: Measured) -> tuple[np.ndarray, np.ndarray]:
        """From where the velocity leads to the next target."""
        assert self._base is not None
        return (measured.position, measured.quaternion) if self.gain else self._base

    def _wanted(
        self, request: Request, measured: Measured, work: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The velocity [groups, width] that the request asks for, its target clipped to the step
        around the pose; and how far from that pose it was."""
        if self.joint_space:
            error = (request.joints - measured.joints)[:, None]
        else:
            turn = (
                difference(normalised(request.quaternion), measured.quaternion)
                if self.turns
                else np.zeros(3)
            )
            error = np.stack([request.position - measured.position, turn])
        near = shorten(error, self._step)
        work[STEP] = _largest(error - near)
        if self.gain:
            return self.gain * near, error
        place, quaternion = self._here(measured)
        if self.joint_space:
            ahead = near + (measured.joints - place)[:, None]
        else:
            turn = (
                difference(multiply(from_vector(near[1]), measured.quaternion), quaternion)
                if self.turns
                else np.zeros(3)
            )
            ahead = np.stack([measured.position + near[0] - place, turn])
        # so that it is there in time, and can stop there
        return towards(ahead, self._acceleration, max(self.dt, request.seconds)), error

    def _move(
        self,
        wanted: np.ndarray,
        request: Request,
        measured: Measured,
        work: np.ndarray,
        now: float,
        slow: bool,
    ) -> Passed:
        before = self._velocity
        velocity, change = self._rate(wanted, slow, work)
        limited = velocity
        if self.joint_space:
            velocity = _joint_ends(self.joints, velocity, self._here(measured)[0], work)
            trip = ""
        else:
            place, _ = self._here(measured)
            if self.gain and measured.jacobian is not None:
                velocity = shorten(velocity, self.walls.share(measured.position) * self._speed)
            hand = self._overspeed(velocity[0], measured, work)
            stopped = _stopped(self.gain, measured)
            kept = self.walls.kept(hand, (place, place if stopped is None else stopped))
            work[WORKSPACE] = float(np.linalg.norm(kept - hand))
            velocity = _by_joints(self.joints, np.stack([kept, velocity[1]]), measured, work)
            velocity = self._eased(velocity, measured, work)
            velocity, trip = _force(self.limits, velocity, measured, work)
        if velocity is not limited:
            change = shorten((velocity - before) / self.dt, self._acceleration)
        self._velocity, self._change = velocity, change
        return Passed(self._reference(request, measured, work, now), _mask(work), work, trip)

    def _rate(
        self, wanted: np.ndarray, slow: bool, work: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next velocity and its derivative: towards ``wanted``, within all limits."""
        speed = self._speed * (self.limits.slow if slow else 1.0)
        # what is left takes up the last of an acceleration in another direction
        goal = shorten(wanted, _ALLOWED * speed)
        limits = self._acceleration, self._jerk
        velocity, change = paced(goal, self._velocity, self._change, limits, self.dt)
        # (it was, where "slow" has just begun)
        faster = np.maximum(speed, np.linalg.norm(self._velocity, axis=1))
        velocity = shorten(velocity, np.where(faster > self._speed, self._speed, faster))
        work[RATE] = _largest(wanted - velocity)
        return velocity, change

    def _overspeed(self, u: np.ndarray, measured: Measured, work: np.ndarray) -> np.ndarray:
        """The hand's velocity [3] with less of it along the arm's own motion where that is, or will
        be in a tick's time, faster than any target may be: under impedance control what its joints
        do to each other, and the posture it keeps, can push it on."""
        motion = motion_of(measured)
        if not self.gain or motion is None:
            return u
        if (excess := self.ahead.hand - _ALLOWED * float(self._speed[0])) <= 0.0:
            return u
        work[RATE] = max(work[RATE], excess)
        most = np.minimum(self._speed, self.gain * self._step)[:1]
        direction = motion / max(float(np.linalg.norm(motion)), _TINY)
        return shorten((u - _HOLDBACK * excess * direction)[None], most)[0]

    def _eased(self, velocity: np.ndarray, measured: Measured, work: np.ndarray) -> np.ndarray:
        """A sudden turn of the hand pushes hand and joints along: no more of it at once than
        leaves them their limits."""
        if not self.turns:
            return velocity
        eased = self.ahead.eased(velocity, measured, self.walls.swing(measured.position))
        if eased is velocity:
            return velocity
        eased = shorten(eased, np.minimum(self._speed, self.gain * self._step))
        work[RATE] = max(work[RATE], _largest(eased - velocity))
        return eased

    def _reference(
        self, request: Request, measured: Measured, work: np.ndarray, now: float
    ) -> Reference:
        place, quaternion = self._here(measured)
        time = 1.0 / self.gain if self.gain else self.dt
        if not self.gripper(request.gripper, now):
            work[GRIPPER] = 1.0
        grip = self.gripper.state
        if self.joint_space:
            target = place + self._velocity[:, 0] * time
            self._base = (target, quaternion)
            return Reference(grip, joints=target)
        target = place + self._velocity[0] * time
        if self.turns:
            quaternion = normalised(multiply(from_vector(self._velocity[1] * time), quaternion))
        elif len(request.quaternion) == 4:
            quaternion = request.quaternion
        self._base = (target, quaternion)
        return Reference(grip, position=target, quaternion=quaternion)


class _Gripper:
    """What the gripper was told last: a threshold, and a lock-out after each change."""

    def __init__(self, limits: Limits):
        self.limits, self.state, self._changed = limits, 0.0, -math.inf

    def __call__(self, wanted: float, now: float) -> bool:
        """Take what is ``wanted`` (-1 opens, 1 closes, 0 as it is) into ``state``; False where it
        comes too soon."""
        firm = abs(wanted) > self.limits.gripper_threshold
        want = math.copysign(1.0, wanted) if firm else self.state
        if want == self.state:
            return True
        if now - self._changed < self.limits.gripper_lockout:
            return False
        self.state, self._changed = want, now
        return True


def _refused(work: np.ndarray, trip: str) -> Passed:
    # (of NaN and _HUGE the latter)
    return Passed(None, _mask(work), np.fmin(work, _HUGE), trip)


def _stopped(gain: float, measured: Measured) -> np.ndarray | None:
    """Where an arm under (critically damped) impedance control would come to rest if nothing
    pulled any more; None: it follows its target, or nobody knows."""
    motion = motion_of(measured)
    return None if not gain or motion is None else measured.position + motion / (4.0 * gain)


def _by_joints(
    joints: JointEnds, velocity: np.ndarray, measured: Measured, work: np.ndarray
) -> np.ndarray:
    """Slow the hand where the joints that carry it come to their ends, or would have to turn
    too fast."""
    jacobian = measured.jacobian
    if jacobian is None or not velocity.any():
        return velocity
    wanted = of_joints(jacobian, velocity.ravel())
    share, work[JOINTS], work[IK] = joints.share(wanted, measured.joints)
    return velocity if share >= 1.0 else velocity * share


def _joint_ends(
    joints: JointEnds, velocity: np.ndarray, place: np.ndarray, work: np.ndarray
) -> np.ndarray:
    """Slow each joint so that it can stop before its ends, from ``place``."""
    if not joints.limits.joint_low:
        return velocity
    room = joints.room(velocity[:, 0], place)[:, None]
    kept = np.clip(velocity, -room, room)
    work[JOINTS] = _largest(velocity - kept)
    return velocity if work[JOINTS] == 0.0 else kept


def _force(
    limits: Limits, velocity: np.ndarray, measured: Measured, work: np.ndarray
) -> tuple[np.ndarray, str]:
    """Take away what pushes on: against the force on the hand, and turning against the
    torque."""
    if len(measured.wrench) != 6:
        return velocity, ""
    kept, trip = velocity, ""
    for row, limit in ((0, limits.force), (1, limits.torque)):
        load = measured.wrench[3 * row : 3 * row + 3]
        size = float(np.linalg.norm(load))
        if not size > limit:  # (NaN: a broken sensor trips)
            trip = trip if size == size else "the force sensor reports no number"
            continue
        towards = -float(velocity[row] @ load) / size
        if towards > 0.0:
            kept = kept.copy()
            kept[row] += towards * load / size
            work[FORCE] = max(work[FORCE], towards)
        if size > 2.0 * limit:
            work[FORCE] = max(work[FORCE], size - limit)
            trip = f"{size:.0f} {'N' if row == 0 else 'N m'} at the hand"
    return kept, trip


def _is_request(request: Request, measured: Measured, joint_space: bool, turns: bool) -> bool:
    """Whether all is there that a target needs, in numbers that one may be."""
    if joint_space:
        parts = [(request.joints, len(measured.joints))]
    else:
        parts = [(request.position, 3), *([(request.quaternion, 4)] if turns else [])]
    if not all(
        np.shape(value) == (size,) and bool((np.abs(value) < _ABSURD).all())
        for value, size in parts
    ):
        return False  # (NaN is not below it either)
    return math.isfinite(request.gripper) and (
        not turns or float(request.quaternion @ request.quaternion) > 0.1
    )


def _is_pose(measured: Measured, limits: Limits, joint_space: bool, turns: bool) -> bool:
    """Whether all is there that a target is led from, and an arm may be there."""
    sizes = {"joints": {len(limits.joint_low) or np.size(measured.joints)}}
    if not joint_space:
        sizes |= {"position": {3}, "quaternion": {4} if turns else {0, 4}}
    for name, allowed in sizes.items():
        value = getattr(measured, name)
        if np.shape(value) not in {(size,) for size in allowed} or not bool(
            (np.abs(value) < MOST[name]).all()
        ):
            return False  # (NaN is not below it either)
    return joint_space or not turns or abs(float(np.linalg.norm(measured.quaternion)) - 1.0) <= UNIT


def _escapes(walls: Walls, measured: Measured, work: np.ndarray) -> str | None:
    """Whether to brake, and why the session should pause ("": it need not). The hand runs through a
    wall, and is beyond it already; or a joint is within half its margin and goes on. Where an arm's
    controller holds a posture against its target no target brings it back; only standing still
    helps."""
    motion = motion_of(measured)
    if motion is None:
        return None
    x, speed = walls.limits, measured.joint_velocity
    if x.joint_low:
        room = np.where(
            speed > 0,
            np.array(x.joint_high) - measured.joints,
            measured.joints - np.array(x.joint_low),
        )
        ending = np.flatnonzero((room < 0.5 * x.joint_margin) & (np.abs(speed) > CREEP))
        if len(ending):
            work[JOINTS] = float(np.max(np.abs(speed[ending])))
            return f"joint {ending[0] + 1} runs into its end"
    # a stiff arm may come nearer before it is slowed down
    soon = min(_SOON, 0.5 / walls.gain) if walls.gain else _SOON
    ahead = measured.position + soon * motion
    now, then = walls.beyond(measured.position), walls.beyond(ahead)
    if then > now + 0.1 * soon * CREEP and (reach := then + _swing(walls.gain, measured)) > 0.0:
        work[WORKSPACE] = reach
        pause = now > 0.0 and then > 0.5 * walls.braking
        return (
            "the hand drifts through a wall, and its controller does not bring it back"
            if pause
            else ""
        )
    return None


def _swing(gain: float, measured: Measured) -> float:
    """How far (m) the end of the hand's turn may carry it, under (critically damped) impedance
    control."""
    if not gain or measured.jacobian is None:
        return 0.0
    return _SWING * float(np.linalg.norm(turning_of(measured))) / (4.0 * gain)


def _largest(vectors: np.ndarray) -> float:
    return math.sqrt(float(np.max(np.einsum("gw,gw->g", vectors, vectors))))


def _mask(work: np.ndarray) -> int:
    return sum(1 << int(i) for i in np.flatnonzero(work > _TINY))
