"""Feetech STS3215 servos as they are on the wire: registers, instruction and status packets.

Facts: Feetech's memory table of the STS series, and what its SDK on PyPI (``scservo_sdk``) sends
and expects. A packet is FF FF, id, length, instruction or error bits, parameters, and the
complement of their sum; words are little-endian; signed ones have a sign bit and a magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STEPS = 4096  # of a turn
BROADCAST = 0xFE
PING, READ, WRITE, REG_WRITE, ACTION, SYNC_READ, SYNC_WRITE = 1, 2, 3, 4, 5, 0x82, 0x83
VOLTAGE, ANGLE, HEAT, CURRENT, OVERLOAD = 1, 2, 4, 8, 32  # bits of a status packet's error

ID, MIN, MAX, MAX_TORQUE, OFFSET, MODE = 5, 9, 11, 16, 31, 33
TORQUE, GOAL, TORQUE_LIMIT, LOCK = 40, 42, 48, 55
POSITION, VELOCITY, LOAD, VOLTS, CELSIUS, STATUS, MOVING = 56, 58, 60, 62, 63, 65, 66
_MODEL, _MIN_VOLTS = 3, 15
_READ_ONLY = (*range(5), *range(POSITION, 71))
_EEPROM = range(ID, TORQUE)
_SIZE = 128
_FIRMWARE = {0: 3, 1: 10, _MODEL: 0x09, _MODEL + 1: 0x03}  # 3.10, model 777
_SHIPPED = {  # address: byte, of a servo as it is sold
    ID: 1, MAX: 0xFF, MAX + 1: 0x0F, 13: 70, 14: 80, _MIN_VOLTS: 40, MAX_TORQUE: 0xE8,
    MAX_TORQUE + 1: 3, 18: 12, 19: 44, 20: 47, 21: 32, 22: 32, 24: 16, 26: 1, 27: 1, 28: 0xF4,
    29: 1, 30: 1, 34: 20, 35: 200, 36: 80, 37: 10, 38: 200, 39: 200, 85: 254,
}  # fmt: skip


def packet(id: int, kind: int, parameters: bytes = b"") -> bytes:
    """``kind`` is an instruction, or a status packet's error bits."""
    body = bytes((id, len(parameters) + 2, kind)) + parameters
    return b"\xff\xff" + body + bytes((~sum(body) & 0xFF,))


def packets(buffer: bytearray) -> list[tuple[int, int, bytes]]:
    """(id, kind, parameters) of each whole and sound packet, taken off ``buffer``; what is none is
    dropped, and an unfinished end is left."""
    found: list[tuple[int, int, bytes]] = []
    while True:
        begin = buffer.find(b"\xff\xff")
        if begin < 0:
            del buffer[: -1 if buffer.endswith(b"\xff") else len(buffer)]
            return found
        del buffer[:begin]
        if len(buffer) < 6:
            return found
        length = buffer[3]
        if buffer[2] == 0xFF or length < 2 or length > 250:
            del buffer[0]
            continue
        whole = length + 4
        if len(buffer) < whole:
            return found
        body = bytes(buffer[2 : whole - 1])
        if buffer[whole - 1] != ~sum(body) & 0xFF:
            del buffer[0]
            continue
        found.append((body[0], body[2], body[3:]))
        del buffer[:whole]


def signed(value: int, bit: int) -> int:
    magnitude = value & ((1 << bit) - 1)
    return -magnitude if value >> bit & 1 else magnitude


def unsigned(value: int, bit: int) -> int:
    """Sign bit and magnitude; what is too large is cut off there."""
    most = (1 << bit) - 1
    return min(abs(value), most) | ((1 << bit) if value < 0 else 0)


@dataclass
class Servo:
    """One servo. ``mounted`` is what its encoder says (steps) where the joint stands at 0;
    ``error`` are the bits that it reports. ``memory`` is what it has now, ``kept`` what survives
    without power."""

    id: int
    mounted: int = STEPS // 2
    error: int = 0
    memory: bytearray = field(default_factory=lambda: bytearray(_SIZE))
    kept: bytearray = field(default_factory=lambda: bytearray(_SIZE))

    def __post_init__(self) -> None:
        for address, value in {**_FIRMWARE, **_SHIPPED, ID: self.id}.items():
            self.kept[address] = value
        self.start()

    def start(self) -> None:
        """Power comes: what was not kept is as shipped, and nothing is held."""
        self.memory[:] = self.kept
        self.memory[TORQUE] = 0
        self.memory[LOCK] = 1
        self.memory[TORQUE_LIMIT : TORQUE_LIMIT + 2] = self.memory[MAX_TORQUE : MAX_TORQUE + 2]
        self.error = 0

    def word(self, address: int, bit: int = 16) -> int:
        return signed(int.from_bytes(self.memory[address : address + 2], "little"), bit)

    def set_word(self, address: int, value: int, bit: int = 15) -> None:
        self.memory[address : address + 2] = unsigned(value, bit).to_bytes(2, "little")

    @property
    def holds(self) -> bool:
        return bool(self.memory[TORQUE])

    @property
    def torque(self) -> float:
        """The share of its most that it may use."""
        return min(self.word(TORQUE_LIMIT), self.word(MAX_TORQUE)) / 1000.0

    @property
    def goal(self) -> int:
        """Where it is to go, in steps of its encoder: its limits bind what it was told."""
        told = self.word(GOAL, 15)
        return min(max(told, self.word(MIN, 15)), self.word(MAX, 15)) + self.word(OFFSET, 11)

    def feel(self, steps: float, speed: float, load: float, volts: float) -> None:
        """What it measures: encoder (steps), speed (steps/s), share of its torque, V."""
        self.set_word(POSITION, (round(steps) - self.word(OFFSET, 11)) % STEPS)
        self.set_word(VELOCITY, round(speed))
        self.set_word(LOAD, round(1000 * load), 10)
        self.memory[VOLTS] = round(10 * volts)
        self.memory[CELSIUS] = 30
        self.memory[MOVING] = int(abs(speed) > 20)
        low = 10 * volts < self.memory[_MIN_VOLTS]
        self.error = (self.error & ~VOLTAGE) | (VOLTAGE if low else 0)
        self.memory[STATUS] = self.error

    def write(self, address: int, data: bytes) -> None:
        """As the firmware does: nothing into what is only read; EEPROM is kept while `LOCK` is
        0; a servo whose torque comes on holds where it is."""
        came_on = not self.holds
        for place, value in enumerate(data, address):
            if place >= _SIZE or place in _READ_ONLY:
                continue
            self.memory[place] = value
            if place in _EEPROM and not self.memory[LOCK]:
                self.kept[place] = value
        self.id = self.memory[ID]
        if address <= MAX_TORQUE < address + len(data):
            self.memory[TORQUE_LIMIT : TORQUE_LIMIT + 2] = self.memory[MAX_TORQUE : MAX_TORQUE + 2]
        if came_on and self.holds:
            self.memory[GOAL : GOAL + 2] = self.memory[POSITION : POSITION + 2]


class Chain:
    """Servos on one line."""

    def __init__(self, servos: list[Servo]):
        self.servos = servos
        self._waiting: dict[int, tuple[int, bytes]] = {}  # of REG_WRITE, until ACTION

    def answer(self, id: int, kind: int, parameters: bytes) -> list[bytes]:
        """The status packets that an instruction gets, in order."""
        if kind == SYNC_WRITE:
            self._write_all(parameters)
            return []
        if kind == SYNC_READ:
            address, count, ids = parameters[0], parameters[1], parameters[2:]
            asked = (servo for wanted in ids for servo in self.servos if servo.id == wanted)
            return [self._read(servo, address, count) for servo in asked]
        return [
            reply
            for servo in self.servos
            if id in (servo.id, BROADCAST)
            for reply in self._one(servo, kind, parameters, silent=id == BROADCAST)
        ]

    def _one(self, servo: Servo, kind: int, parameters: bytes, silent: bool) -> list[bytes]:
        if kind == READ:
            return [] if silent else [self._read(servo, parameters[0], parameters[1])]
        before = servo.id
        if kind == WRITE:
            servo.write(parameters[0], parameters[1:])
        elif kind == REG_WRITE:
            self._waiting[servo.id] = parameters[0], parameters[1:]
        elif kind == ACTION and servo.id in self._waiting:
            servo.write(*self._waiting.pop(servo.id))
        return [] if silent and kind != PING else [packet(before, servo.error)]

    def _read(self, servo: Servo, address: int, count: int) -> bytes:
        return packet(servo.id, servo.error, bytes(servo.memory[address : address + count]))

    def _write_all(self, parameters: bytes) -> None:
        address, count = parameters[0], parameters[1]
        rest = parameters[2:]
        for at in range(0, len(rest) - count, count + 1):
            for servo in self.servos:
                if servo.id == rest[at]:
                    servo.write(address, rest[at + 1 : at + 1 + count])
