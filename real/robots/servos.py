"""What lerobot leaves unsaid of the servos on an arm's bus: the errors that they report, whether
one has let go, and a port that is not used again after its cable was out.

lerobot's SDKs keep a port marked as in use when a call ended by an exception, keep what came too
late as the answer to the next question, and so on to each that follows, and read beyond the end of
one that is too short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ERRORS = {1: "voltage", 2: "angle sensor", 4: "too hot", 8: "current", 32: "overload"}  # Feetech's
LET_GO = "has let go"
_LOOK_S, _REOPEN_S = 0.25, 1.0  # between two looks at one register, and two tries at a port
_CARRIED: dict[str, Callable[[list[int]], int]] = {  # parameters of a status packet, by the SDK
    "scservo_sdk": lambda packet: packet[3] - 2,
    "dynamixel_sdk": lambda packet: packet[5] + 256 * packet[6] - 4,  # protocol 2
}
# of a bus that is none of those whose makers' SDKs lerobot uses
_BROKEN = (AttributeError, KeyError, TypeError, NotImplementedError)


class Servos:
    """``parts`` {what the names of its joints begin with: an arm of lerobot}; those without such a
    bus are never in trouble."""

    def __init__(self, parts: Mapping[str, Any]):
        buses = {prefix: vars(part).get("bus") for prefix, part in parts.items()}
        self._buses = {prefix: bus for prefix, bus in buses.items() if bus is not None}
        self._looked = self._reopened = float("-inf")
        self._torque_next = False
        self._found: dict[str, tuple[str, ...]] = {"Status": (), "Torque_Enable": ()}
        self._said: dict[str, int] = {}  # the error bits of each servo's last answer
        for prefix, bus in self._buses.items():
            with contextlib.suppress(*_BROKEN):  # another vendor's
                self._listen(prefix, bus)

    def trouble(self, now: float) -> tuple[str, ...]:
        """ "shoulder_lift: overload", "gripper has let go": errors as each servo's last answer has
        them, whatever it was asked, and both as they were when last looked at. One register is read
        at a time, four a second; a packet that is lost is left to the next."""
        if now - self._looked >= _LOOK_S:
            self._looked = now
            register = "Torque_Enable" if self._torque_next else "Status"
            self._torque_next = not self._torque_next
            words = _released if register == "Torque_Enable" else reported
            try:
                found = tuple(words(self._read(register)))
                # a packet that came late answers what was asked before: seen twice, or not at all
                self._found[register] = found and tuple(words(self._read(register)))
            except Exception:  # the next measurement says what is wrong
                self.mend(now)
        said = (*reported(self._said.items()), *self._found["Status"])
        return tuple(dict.fromkeys((*said, *self._found["Torque_Enable"])))

    def _listen(self, prefix: str, bus: Any) -> None:
        """Feetech's servos say their errors in every answer; lerobot's ``sync_read`` passes over
        them."""
        packets = bus.packet_handler
        if not type(packets).__module__.startswith("scservo_sdk"):
            return
        names = {motor.id: f"{prefix}{name}" for name, motor in bus.motors.items()}
        receive = packets.rxPacket

        def received(port: Any) -> Any:
            packet, result = receive(port)
            if result == 0 and packet[2] in names:
                self._said[names[packet[2]]] = packet[4]
            return packet, result

        packets.rxPacket = received

    def _read(self, register: str) -> Iterable[tuple[str, int]]:
        for prefix, bus in self._buses.items():
            with contextlib.suppress(*_BROKEN):  # another vendor's
                if knows(bus, register):
                    for name, value in bus.sync_read(register, normalize=False).items():
                        yield f"{prefix}{name}", int(value)

    def mend(self, now: float) -> None:
        """After a call that failed: a port that was left marked as in use is free again, what came
        too late is dropped, and a port that hung up is opened anew where it is back. Nothing is
        written to it."""
        for bus in self._buses.values():
            with contextlib.suppress(Exception):  # termios raises one of its own
                bus.port_handler.is_using = False
                bus.port_handler.ser.reset_input_buffer()
        if now - self._reopened < _REOPEN_S:
            return
        self._reopened = now
        for bus in self._buses.values():
            with contextlib.suppress(Exception):  # it is not there yet
                bus.port_handler.closePort()
                bus.port_handler.openPort()


def arms(device: Any) -> dict[str, Any]:
    """{what the names of its joints begin with: the arm} of ``device``, one of lerobot's that has
    motors, or of the two that it is made of."""
    whole = vars(device)
    sides = {
        f"{side}_": whole[f"{side}_arm"] for side in ("left", "right") if f"{side}_arm" in whole
    }
    return sides or {"": device}


def in_step(device: Any) -> None:
    """From now on each question to the motors of ``device``, an arm of lerobot or two, gets its own
    answer: what came before it was asked is dropped, and an answer of another length is a
    `ConnectionError`."""
    for part in arms(device).values():
        with contextlib.suppress(*_BROKEN):  # another vendor's
            bus: Any = vars(part).get("bus")
            _in_step(bus.port_handler, bus.packet_handler)


def _in_step(port: Any, packets: Any) -> None:
    carried = _CARRIED.get(type(packets).__module__.partition(".")[0])
    clear, receive, read = port.clearPort, packets.rxPacket, packets.readRx
    last: list[int] = []

    def drop() -> None:  # called before each instruction
        clear()
        port.ser.reset_input_buffer()

    def received(port: Any) -> Any:
        nonlocal last
        last, *more = receive(port)
        return last, *more

    def answer(port: Any, motor: int, length: int) -> Any:
        found = read(port, motor, length)
        if found[1] == 0 and carried is not None and (bytes_ := carried(last)) != length:
            raise ConnectionError(f"motor {motor} sent {bytes_} bytes where {length} were asked")
        return found

    port.clearPort, packets.rxPacket, packets.readRx = drop, received, answer


def knows(bus: Any, register: str) -> bool:
    """Whether every motor of lerobot's ``bus`` has this register."""
    try:
        return all(register in bus.model_ctrl_table[m.model] for m in bus.motors.values())
    except (AttributeError, KeyError):
        return False


def reported(said: Iterable[tuple[str, int]]) -> Iterable[str]:
    for name, bits in said:
        if bits:
            words = [word for bit, word in ERRORS.items() if bits & bit]
            yield f"{name}: {', '.join(words) or f'error {bits}'}"


def _released(said: Iterable[tuple[str, int]]) -> Iterable[str]:
    return (f"{name} {LET_GO}" for name, on in said if not on)
