"""What of pylibfranka a driver uses, without a robot: as ``library=fake_franka`` of a process, or
`Library` in this one. A motion whose commands exceed Franka's limits ends as on the robot."""

from __future__ import annotations

import enum
import math
from collections import deque
from types import SimpleNamespace

import numpy as np

from real.robots import franka_path as fr3

START = np.array([0.0, -0.5, 0.0, -2.2, 0.0, 1.8, 0.8])
POSE = [1.0, 0, 0, 0, 0, -1, 0, 0, 0, 0, -1, 0, 0.45, 0.0, 0.4, 1]  # the hand looks down


class RobotMode(enum.Enum):
    Other, Idle, Move, Guiding, Reflex, UserStopped, AutomaticErrorRecovery = range(7)


class ControllerMode(enum.Enum):
    JointImpedance, CartesianImpedance = range(2)


class RealtimeConfig(enum.Enum):
    kEnforce, kIgnore = range(2)


class CommandException(RuntimeError):
    pass


class ControlException(RuntimeError):
    pass


class NetworkException(RuntimeError):
    pass


class Errors:
    def __init__(self, *names):
        self.names = names

    def __bool__(self):
        return bool(self.names)

    def __str__(self):
        return "[" + ", ".join(f'"{name}"' for name in self.names) + "]"


class Duration:
    def __init__(self, ms):
        self.ms = ms

    def to_sec(self):
        return self.ms / 1e3


class JointPositions:
    def __init__(self, q):
        self.q, self.motion_finished = list(q), False


class CartesianPose:
    def __init__(self, pose):
        self.O_T_EE, self.motion_finished = list(pose), False


def judged(kind, now):
    """libfranka's names of what is too fast in ``now``: place,
    speed, acceleration and jerk of each joint, or of the hand."""
    place, speed, change, jerk = now
    if kind == "joints":
        out = (place <= fr3.LOW) | (place >= fr3.HIGH)
        wrong = {
            "joint_motion_generator_position_limits_violation": out.any(),
            "joint_motion_generator_velocity_limits_violation": (np.abs(speed) > fr3.SPEED).any(),
            "joint_motion_generator_velocity_discontinuity": (
                np.abs(change) > fr3.ACCELERATION + 1e-6
            ).any(),
            "joint_motion_generator_acceleration_discontinuity": (
                np.abs(jerk) > fr3.JERK + 1e-3
            ).any(),
        }
    else:
        size = [np.linalg.norm(x) for x in (speed, change, jerk)]
        wrong = {
            "cartesian_motion_generator_velocity_limits_violation": size[0] > fr3.HAND_SPEED[0],
            "cartesian_motion_generator_velocity_discontinuity": size[1]
            > fr3.HAND_ACCELERATION[0] + 1e-6,
            "cartesian_motion_generator_acceleration_discontinuity": size[2]
            > fr3.HAND_JERK[0] + 1e-3,
        }
    return tuple(name for name, is_wrong in wrong.items() if is_wrong)


class Body:
    """The arm itself. ``gaps`` are milliseconds until the next states (1 each, once it is empty);
    ``strike`` raises at the next call; ``sent`` are all commands, ``worst`` shares of the limits."""

    def __init__(self):
        self.q, self.pose, self.mode = START.copy(), list(POSE), RobotMode.Idle
        self.ms, self.gaps, self.sent = 0, deque(), []
        self.errors, self.strike, self.calls = Errors(), None, []
        self.width, self.max_width = 0.04, 0.08
        self.motion, self.load = None, [0.0] * 6
        self.heard, self.deaf = deque(maxlen=100), 0  # which commands came; how many will not
        self.rates = [[0.0] * 7] * 2  # of what is commanded: its speed, and the change of that

    def state(self):
        return SimpleNamespace(
            q=self.q.tolist(), dq=[0.0] * 7, O_T_EE=list(self.pose), robot_mode=self.mode,
            O_F_ext_hat_K=list(self.load), current_errors=self.errors,
            control_command_success_rate=sum(self.heard) / 100,
            q_d=self.q.tolist(), dq_d=self.rates[0][:7], ddq_d=self.rates[1][:7],
            O_T_EE_c=list(self.pose), O_dP_EE_c=self.rates[0][:6], O_ddP_EE_c=self.rates[1][:6],
        )  # fmt: skip

    def advance(self):
        gap = self.gaps.popleft() if self.gaps else 1
        self.ms += gap
        if self.strike is not None:
            strike, self.strike = self.strike, None
            self.reflex(strike)
        return gap

    def reflex(self, error):
        if self.motion is not None or not isinstance(error, ControlException):
            self.motion = None
            if isinstance(error, ControlException):
                self.mode = RobotMode.Reflex
                self.errors = Errors(str(error).split('"')[1])
            raise error


class Motion:
    def __init__(self, body, kind):
        self.body, self.kind, self.first = body, kind, True
        body.motion, body.mode = self, RobotMode.Move
        at = body.q if kind == "joints" else np.array(body.pose[12:15])
        self.last = at.copy(), np.zeros_like(at), np.zeros_like(at)

    def readOnce(self):
        if self.body.motion is not self:
            raise ControlException("libfranka: no motion")
        gap = self.body.advance()
        place, speed, change = self.last
        for _ in range(0 if self.first else gap - 1):  # lost: it goes on by itself
            speed = speed + change * fr3.DT
            place = place + speed * fr3.DT
        self.body.heard.extend([0] * (0 if self.first else gap - 1))
        self._be(place, speed, change)
        gap, self.first = (0 if self.first else gap), False
        return self.body.state(), Duration(gap)

    def writeOnce(self, command):
        body = self.body
        if body.deaf:
            body.deaf -= 1
            place, speed, change = self.last
            speed = speed + change * fr3.DT
            self._be(place + speed * fr3.DT, speed, change)
            return body.heard.append(0)
        body.heard.append(1)
        at = np.array(command.q if self.kind == "joints" else command.O_T_EE[12:15])
        place, speed, change = self.last
        new_speed = (at - place) / fr3.DT
        new_change = (new_speed - speed) / fr3.DT
        now = at, new_speed, new_change, (new_change - change) / fr3.DT
        body.sent.append((body.ms, at, *now[1:]))
        if wrong := judged(self.kind, now):
            body.reflex(ControlException(f'libfranka: motion aborted by reflex! ["{wrong[0]}"]'))
        if self.kind == "cartesian":
            body.pose = list(command.O_T_EE)
        self._be(*now[:3])
        if command.motion_finished:
            body.motion, body.mode = None, RobotMode.Idle

    def _be(self, place, speed, change):
        self.last = place, speed, change
        if self.kind == "joints":
            self.body.q = place
        else:
            self.body.pose[12:15] = place.tolist()
        self.body.rates = [[*x.tolist(), 0.0, 0.0, 0.0, 0.0][:7] for x in (speed, change)]


class Library:
    """``Library().body`` is the arm that every `Robot` of it connects to; ``reachable`` is False
    while its cable is out."""

    RobotMode, ControllerMode, RealtimeConfig = RobotMode, ControllerMode, RealtimeConfig
    CommandException, ControlException = CommandException, ControlException
    NetworkException = NetworkException
    JointPositions, CartesianPose = JointPositions, CartesianPose

    def __init__(self):
        self.body, self.reachable = Body(), True
        self.Robot = lambda address, mode=None: _Robot(self, address, mode)
        self.Gripper = lambda address: _Gripper(self)

    def require(self):
        if not self.reachable:
            self.body.motion = None
            raise NetworkException("libfranka: UDP receive: Timeout")


class _Robot:
    def __init__(self, library, address, mode):
        library.require()
        self.library, self.body = library, library.body
        self.body.calls.append(("connect", address, mode))

    def read_once(self):
        self.library.require()
        self.body.advance()
        return self.body.state()

    def load_model(self):
        whole = np.zeros((6, 7))
        whole[:6, :6] = np.eye(6) * 0.5
        return SimpleNamespace(zero_jacobian=lambda state: list(whole.ravel(order="F")))

    def set_collision_behavior(self, *thresholds):
        self.body.calls.append(("collision", *thresholds))

    def set_joint_impedance(self, stiffness):
        self.body.calls.append(("joint impedance", stiffness))

    def set_cartesian_impedance(self, stiffness):
        self.body.calls.append(("cartesian impedance", stiffness))

    def start_joint_position_control(self, mode):
        return self._start("joints", mode)

    def start_cartesian_pose_control(self, mode):
        return self._start("cartesian", mode)

    def _start(self, kind, mode):
        self.library.require()
        if self.body.mode is not RobotMode.Idle:
            raise CommandException("libfranka: command rejected")
        self.body.calls.append(("start", kind, mode.name))
        return Motion(self.body, kind)

    def automatic_error_recovery(self):
        self.body.calls.append(("recover",))
        if self.body.mode is RobotMode.UserStopped:
            raise CommandException("libfranka: automatic error recovery: user stop pressed")
        self.body.errors, self.body.mode = Errors(), RobotMode.Idle


class _Gripper:
    def __init__(self, library):
        self.library, self.body = library, library.body
        library.require()

    def read_once(self):
        self.library.require()
        return SimpleNamespace(width=self.body.width, max_width=self.body.max_width)

    def move(self, width, speed):
        self.body.calls.append(("move", width, speed))
        self.body.width = width
        return True

    def grasp(self, width, speed, force, epsilon_inner=0.005, epsilon_outer=0.005):
        self.body.calls.append(("grasp", width, speed, force))
        self.body.width = 0.02
        return math.isclose(self.body.width, width, abs_tol=epsilon_outer)

    def homing(self):
        self.body.calls.append(("homing",))
        self.body.max_width = 0.08
        return True


_OWN = Library()  # of a process
Robot, Gripper = _OWN.Robot, _OWN.Gripper
