"""Commands for a Franka arm, one each millisecond: ``python -m real.robots.franka_loop CONFIG FD``.

libfranka has to be answered within a millisecond, and its Python calls keep the interpreter to
themselves while they wait, so this is a process of its own. What it is told (`real.robots.franka`)
comes over the socket with the number FD, at any rate: it moves to that within Franka's limits, and
brakes and holds once nobody tells it any more. It clears no error unless it is asked to.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np

from real.link import read_packet
from real.robots.franka_path import DT, JointPath, PosePath
from real.scheduling import freeze_garbage
from vla_rl.errors import ConfigError, MissingPackage, UserError, first_line

SILENCE_S = 0.1  # without a word, after which it holds
_EVERY = 4  # milliseconds between two that it tells of
_STILL = 1e-7  # rad or m in a millisecond
_AGAIN_S = 1.0  # between two tries to reach a robot that was lost
# what keeps a robot from moving, by libfranka's mode of it
_MODES = {
    "UserStopped": "user stop",
    "Guiding": "guided by hand",
    "Other": "not ready: joints locked, or FCI off",
    "AutomaticErrorRecovery": "recovering",
}
STOPPED = "stopped"


class _Line:
    """To who tells this process what to do, over the socket ``link``: messages of a kind and what
    goes with it. It never waits."""

    def __init__(self, link: socket.socket):
        self.link = link
        link.setblocking(False)

    def waiting(self) -> Iterator[tuple[str, list[float]] | None]:
        """All messages that have come; None, as the last, where nobody is at the other end."""
        while True:
            try:
                packet = read_packet(self.link)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                yield None
                return
            kind, numbers = msgpack.unpackb(packet)
            yield kind, numbers

    def send(self, kind: str, what: Any) -> None:
        with contextlib.suppress(OSError):  # nobody reads
            self.link.send(msgpack.packb([kind, what]))


class Loop:
    """``config``: address, control ("joints" or "cartesian"), dynamics (share of Franka's limits),
    joint_impedance, cartesian_impedance, collision_torque, collision_force, realtime, reads (it is
    never to move). ``link`` is the socket, ``library`` pylibfranka or what has its names."""

    def __init__(
        self,
        config: dict[str, Any],
        link: socket.socket,
        library: Any,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config, self.library, self.clock = config, library, clock
        self.line = _Line(link)
        self.path: JointPath | PosePath = (
            JointPath(config["dynamics"])
            if config["control"] == "joints"
            else PosePath(config["dynamics"])
        )
        self.ended = False  # who told it what to do is gone
        self._active: Any = None  # the motion that runs
        self._begun = False  # whether it has had its first command
        self._told: np.ndarray = np.zeros(0)  # what the robot said last that it was commanded
        self._aimed: tuple[float, np.ndarray] | None = None  # a target that waits for its motion
        self._heard = -np.inf  # a target, or a hold
        self._stopped = False
        self._broken: tuple[str, ...] = ()  # by what the last motion ended, until it is cleared
        self._tried, self._turns, self.lost_ms = self.clock(), 0, 0
        self._robot: Any = None
        self._connect()

    def _connect(self) -> None:
        x, library = self.config, self.library
        mode = library.RealtimeConfig.kEnforce if x["realtime"] else library.RealtimeConfig.kIgnore
        robot = library.Robot(x["address"], mode)
        if not x["reads"]:
            torque, force = x["collision_torque"], x["collision_force"]
            robot.set_collision_behavior(torque, torque, force, force)
            robot.set_joint_impedance(x["joint_impedance"])
            robot.set_cartesian_impedance(x["cartesian_impedance"])
        self._model, self._robot = robot.load_model(), robot

    @property
    def over(self) -> bool:
        """Nobody is left, and the arm is at rest by itself."""
        return self.ended and self._active is None

    def turn(self) -> None:
        """As long as the robot takes to say where it is: a millisecond."""
        self._hear()
        if self._robot is None:
            return self._reconnect()
        try:
            if self._active is None:
                state = self._robot.read_once()
                self._idle(state)
            else:
                state = self._moving()
        except Exception as error:  # libfranka's own, of which pybind makes RuntimeErrors
            return self._failed(error)
        self._turns += 1
        if self._turns % _EVERY == 0:
            self._tell(state)
        return None

    # ------------------------------------------------------------------------------- what it is told
    def _hear(self) -> None:
        now = self.clock()
        for message in self.line.waiting():
            if message is None:
                self.ended = True
                self.path.hold()
            else:
                self._take(*message, now)
        if now - self._heard > SILENCE_S:
            self._aimed = None
            self.path.hold()

    def _take(self, kind: str, numbers: list[float], now: float) -> None:
        if kind == "aim" and not (self._stopped or self._broken or self.config["reads"]):
            target = np.array(numbers)
            if self._begun:
                self.path.aim(target, now - self._heard)
            self._aimed, self._heard = (now, target), now
        elif kind == "hold":
            self._aimed, self._heard = None, now
            self.path.hold()
        elif kind == "stop":
            self._stopped, self._aimed = True, None
            self.path.hold(at_once=True)
        elif kind == "clear":
            self._clear()

    def _clear(self) -> None:
        """A person asked for it."""
        if self._broken and self._robot is not None and self._active is None:
            try:
                self._robot.automatic_error_recovery()
            except Exception as error:
                return self.line.send("said", f"the robot does not recover: {first_line(error)}")
        self._stopped, self._broken = False, ()
        return None

    # ----------------------------------------------------------------------------------- the robot
    def _idle(self, state: Any) -> None:
        """The robot keeps its pose by itself; a motion begins where one is asked for."""
        if state.current_errors and not self._broken:
            self._broken = errors_of(state.current_errors)
        if self._aimed is None or self._troubles(state):
            return
        library, robot = self.library, self._robot
        if self.config["control"] == "joints":
            start, mode = robot.start_joint_position_control, library.ControllerMode.JointImpedance
        else:
            mode = library.ControllerMode.CartesianImpedance
            start = robot.start_cartesian_pose_control
        self._active, self._begun = start(mode), False

    def _moving(self) -> Any:
        state, gone = self._active.readOnce()
        if not self._begun:
            self._begin(state)
        else:
            self.lost_ms += max(round(1e3 * gone.to_sec()) - 1, 0)
            self._resume(state)
            self.path.step()
        kind = (
            self.library.JointPositions
            if self.config["control"] == "joints"
            else self.library.CartesianPose
        )
        command = kind(self.path.numbers())
        if self.ended and self.path.at_rest:
            command.motion_finished = True
        self._active.writeOnce(command)
        if command.motion_finished:
            self._active = None
        return state

    def _begin(self, state: Any) -> None:
        if isinstance(self.path, JointPath):
            self.path.begin(np.array(state.q_d))
        else:
            self.path.begin(state.O_T_EE_c)
        self._begun, self._told = True, np.array(self.path.numbers())
        if self._aimed is not None:
            self.path.aim(self._aimed[1], SILENCE_S)

    def _resume(self, state: Any) -> None:
        """What it was commanded by its own word, as libfranka's limiter counts too: where a command
        was lost or late it has gone on at a steady acceleration. A word that is from before the last
        command says nothing new."""
        joints = isinstance(self.path, JointPath)
        place = np.array(state.q_d if joints else state.O_T_EE_c)
        way = float(np.abs(self.path.velocity).max()) * DT
        told, self._told = self._told, place
        if way > _STILL and np.abs(place - told).max() < 0.1 * way:
            return
        rates = (state.dq_d, state.ddq_d) if joints else (state.O_dP_EE_c, state.O_ddP_EE_c)
        self.path.resume(place, *rates)

    def _failed(self, error: Exception) -> None:
        """A motion that the robot ended, or a robot that does not answer. Its own errors come with
        the states that follow."""
        self._active, self._begun, self._aimed = None, False, None
        self.path.hold()
        if isinstance(error, self.library.NetworkException):
            self._robot, self._tried = None, self.clock()
            return self.line.send("lost", f"the robot does not answer: {first_line(error)}")
        self._broken = named_in(str(error)) or (first_line(error),)
        return None

    def _reconnect(self) -> None:
        """Nothing moves by that."""
        if self.clock() - self._tried < _AGAIN_S:
            time.sleep(1e-3)
            return
        self._tried = self.clock()
        try:
            self._connect()
        except Exception as error:
            self.line.send("lost", f"the robot does not answer: {first_line(error)}")

    # ------------------------------------------------------------------------------- what it tells
    def _troubles(self, state: Any) -> tuple[str, ...]:
        told = [STOPPED] if self._stopped else []
        told += [*self._broken, *(errors_of(state.current_errors) if state.current_errors else ())]
        told += [_MODES[mode]] if (mode := state.robot_mode.name) in _MODES else []
        return tuple(dict.fromkeys(told))

    def _tell(self, state: Any) -> None:
        jacobian = list(self._model.zero_jacobian(state))
        if isinstance(self.path, PosePath):
            self.path.within(np.reshape(jacobian, (6, 7), order="F"))
        found = [
            self.clock(),
            list(state.q),
            list(state.dq),
            list(state.O_T_EE),
            list(state.O_F_ext_hat_K),
            jacobian,
            list(self._troubles(state)),
            self.lost_ms,
        ]
        self.line.send("state", found)


def errors_of(errors: Any) -> tuple[str, ...]:
    """libfranka's names of them."""
    return named_in(str(errors))


def named_in(text: str) -> tuple[str, ...]:
    """The names that libfranka puts into brackets and quotes: ``["cartesian_reflex", ...]``."""
    return tuple(re.findall(r'"([a-z_]+)"', text))


def library_named(name: str) -> Any:
    """Raises `MissingPackage`."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackage(name, "franka", "A Franka arm") from error


def connected(make: Callable[[Any], Any], config: dict[str, Any]) -> Any:
    """What ``make`` makes with the library. Raises `UserError` alone."""
    library = library_named(config["library"])
    try:
        return make(library)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the Franka at {config['address']} cannot be reached: {first_line(error)}. Check "
            "robot.options.address, that FCI is on in Desk and the joints are unlocked; without a "
            "real-time kernel robot.options.realtime=false tries it all the same"
        ) from None


def serve(make: Callable[[dict[str, Any], socket.socket, Any], Any]) -> None:
    """The process of a part of this arm, which ``make`` makes of config, socket and library: it
    turns until it is over. It ends by its socket alone."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    config, link = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    try:
        part = connected(lambda library: make(config, link, library), config)
    except UserError as error:
        link.send(msgpack.packb(["error", str(error)]))
        return
    freeze_garbage()
    link.send(msgpack.packb(["ready", None]))
    while not part.over:
        part.turn()


if __name__ == "__main__":
    serve(Loop)
