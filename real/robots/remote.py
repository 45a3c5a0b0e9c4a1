"""The driver's side of an arm in another process (`real.robots.server`), as a `Robot`."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import msgpack
import numpy as np

from real.limits import Box, Limits
from real.link import read_packet
from real.robots.protocol import Capabilities, Measured, Reference, RobotLost
from vla_rl.specs import EmbodimentSpec

STOP_S = 0.2  # that the arm's process has to confirm a guard's stop


class RemoteRobot:
    """Connects to the socket ``address``. ``frames`` collects what its cameras say, until
    somebody takes it."""

    def __init__(self, address: str):
        self.address, self.frames = address, []  # type: str, list[list[Any]]
        self._newest: Measured | None = None
        self._owes_stop = False  # one that the arm's process had no room for
        self._troubles: list[str] = []  # what its driver raised since it was asked last
        self.connect()

    def connect(self) -> None:
        self._socket, about = described(self.address)
        self.embodiment = EmbodimentSpec.from_dict(about["embodiment"])
        self.name = self.embodiment.name
        self.capabilities = Capabilities(
            **about["capabilities"] | {"stopper": tuple(about["capabilities"]["stopper"])}
        )
        self.limits = _limits(about["limits"])
        self._socket.setblocking(False)

    def observe(self) -> Measured:
        self._pay()
        self._drain()
        deadline = time.monotonic() + 1.0
        while self._newest is None and not self._troubles:  # at the start only
            if time.monotonic() > deadline:
                raise RobotLost(f"{self.name} sends no measurement")
            time.sleep(0.002)
            self._drain()
        if self._troubles:
            why, self._troubles = self._troubles[0], []
            raise RobotLost(why)
        assert self._newest is not None
        return self._newest

    def _drain(self) -> None:
        while True:
            try:
                packet = read_packet(self._socket)
            except BlockingIOError:
                return
            except OSError as error:
                raise RobotLost(f"{self.name} is gone ({error.strerror})") from None
            if not packet:
                raise RobotLost(f"{self.name} is gone")
            message = msgpack.unpackb(packet)
            if message[0] == "frame":
                self.frames.append(message[1:])
            elif message[0] == "measured":
                self._newest = _measured(message[1:])
            elif message[0] == "trouble":
                self._troubles.append(message[1])

    def command(self, reference: Reference) -> None:
        arrays = (reference.position, reference.quaternion, reference.joints)
        self._send(["command", *(a.tolist() for a in arrays), float(reference.gripper)])

    def hold(self) -> None:
        self._send(["hold"])

    def clear(self) -> None:
        self._send(["clear"])

    def begin(self, episode: dict[str, Any]) -> None:
        self._send(["begin", episode])

    def stop(self) -> bool:
        """True once it is on its way; until then every other call tries again."""
        self._owes_stop = True
        with contextlib.suppress(RobotLost):
            self._pay()
        return not self._owes_stop

    def _pay(self) -> None:
        if self._owes_stop:
            self._owes_stop = not self._put(["stop"])

    def _send(self, message: list[Any]) -> None:
        self._pay()
        if not self._owes_stop:
            self._put(message)

    def _put(self, message: list[Any]) -> bool:
        """False where it does not read: its watchdog or the guard will stop it, and its state
        turns stale here."""
        try:
            self._socket.send(msgpack.packb(message))
        except BlockingIOError:
            return False
        except OSError as error:
            raise RobotLost(f"{self.name} is gone ({error.strerror})") from None
        return True

    def close(self) -> None:
        with contextlib.suppress(RobotLost, OSError):
            self.hold()
        self._socket.close()


class Judge:
    """What a simulated arm says of its episodes besides its measurements, for the label with source
    "simulator".

    ``tasks`` are those of its world; empty for a driver's arm, which says nothing.
    """

    def __init__(self, address: str):
        self._socket, about = described(address)
        self.tasks: dict[str, dict[str, Any]] = about["tasks"]
        self._socket.setblocking(False)

    def news(self) -> list[str]:
        """ "began" for each new start state, "success" once per episode, in order. Raises
        `RobotLost`."""
        found: list[str] = []
        while True:
            try:
                packet = read_packet(self._socket)
            except BlockingIOError:
                return found
            except OSError as error:
                raise RobotLost(f"the arm is gone ({error.strerror})") from None
            if not packet:
                raise RobotLost("the arm is gone")
            kind = msgpack.unpackb(packet)[0]
            if kind in ("began", "success"):
                found.append(kind)

    def close(self) -> None:
        self._socket.close()


def inject(address: str, name: str, seconds: float, value: float = 0.0) -> None:
    """Let a defect of `real.robots.faults.FAULTS` strike the simulated arm at ``address`` now.
    Raises `RobotLost`."""
    with _open(address) as link:
        link.send(msgpack.packb(["inject", name, seconds, value]))


def stop_arm(address: str) -> None:
    """A guard's way: connect, stop, wait until the arm's process says that it was. Raises
    `RobotLost` where that is gone, and OSError where it does not say so within `STOP_S`: call it
    again."""
    deadline = time.monotonic() + STOP_S
    with _open(address) as link:
        link.settimeout(STOP_S)
        link.send(msgpack.packb(["stop"]))
        while (packet := read_packet(link)) and msgpack.unpackb(packet)[0] != "stopped":
            link.settimeout(max(0.001, deadline - time.monotonic()))
    if not packet:
        raise RobotLost(f"the arm at {address} is gone")


def described(address: str) -> tuple[socket.socket, dict[str, Any]]:
    """A connection to the arm's process, and what it says of the arm. Raises `RobotLost`."""
    link = _open(address)
    link.settimeout(10.0)
    link.send(msgpack.packb(["describe"]))
    while (message := msgpack.unpackb(read_packet(link)))[0] != "described":
        pass
    return link, message[1]


def _open(address: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(address)
    except OSError as error:
        link.close()
        raise RobotLost(f"no simulated arm answers at {address} ({error.strerror})") from None
    return link


def _measured(values: list[Any]) -> Measured:
    stamp, *arrays, jacobian, gripper, errors = values
    position, quaternion, joints, velocity, wrench, proprio = (
        np.array(a, dtype=float) for a in arrays
    )
    shaped = np.array(jacobian, dtype=float).reshape(6, -1) if jacobian is not None else None
    return Measured(
        stamp,
        position,
        quaternion,
        joints,
        velocity,
        gripper,
        wrench,
        proprio,
        shaped,
        tuple(errors),
    )


def _limits(values: dict[str, Any]) -> Limits:
    def box(x: Any) -> Box | None:
        return Box(tuple(x["low"]), tuple(x["high"])) if x else None

    tuples = {
        name: tuple(value)
        for name, value in values.items()
        if name.startswith("joint_") and isinstance(value, list)
    }
    return Limits(
        **values
        | tuples
        | {"box": box(values["box"]), "keep_out": tuple(box(b) for b in values["keep_out"])}
    )
