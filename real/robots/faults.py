"""What goes wrong with a simulated arm: steady defects, and a script of faults by time. All of
it is seeded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vla_rl.errors import ConfigError

# name of a scripted fault: what it does while it lasts, and what its value means
FAULTS: dict[str, str] = {
    "reflex": "the arm brakes and stays so until somebody clears it (value unused; strikes once)",
    "power": "no torque, no answer any more, until it ends; then a reflex",
    "silent": "it does not answer, and goes on tracking its last target",
    "drop": "commands are lost with this probability",
    "latency": "commands come this many seconds later",
    "force": "the hand is pushed with this many newtons, against the axis that it moves along",
    "clock": "its clock is ahead by this many seconds",
    "gripper": "the fingers do not move",
    "camera_freeze": "the same picture and number again and again",
    "camera_late": "pictures come this many seconds later",
    "camera_twice": "every picture comes twice",
    "camera_gap": "pictures are lost with this probability",
    "camera_lost": "no pictures",
}


@dataclass(frozen=True)
class Fault:
    """``name`` is one of `FAULTS`, from ``at`` seconds after the start on, for ``seconds``;
    ``camera`` "" means all."""

    name: str
    at: float
    seconds: float = 0.0
    value: float = 0.0
    camera: str = ""

    def __post_init__(self) -> None:
        if self.name not in FAULTS:
            raise ConfigError(f"there is no fault {self.name!r}: use one of {', '.join(FAULTS)}")

    def lasts(self, t: float) -> bool:
        return self.at <= t < self.at + self.seconds


@dataclass(frozen=True)
class Defects:
    """What is always so. Seconds; ``drift`` is seconds per second; ``watchdog_s`` 0: the arm
    keeps its last target."""

    observation_latency: float = 0.0
    command_latency: float = 0.0
    command_jitter: float = 0.0
    drop: float = 0.0
    drift: float = 0.0
    gripper_lag: float = 0.0
    watchdog_s: float = 0.0
    seed: int = 0
    script: tuple[Fault, ...] = ()


class Script:
    """Faults that strike as time goes on; ``now`` is in seconds after the start."""

    def __init__(self, faults: Sequence[Fault]):
        self.faults = list(faults)
        self._struck: set[Fault] = set()
        self._over: set[Fault] = set()

    def value(self, name: str, now: float, camera: str = "") -> float:
        """Of a fault (1 where that is 0) while it lasts, else 0."""
        for fault in self.faults:
            if fault.name == name and fault.lasts(now) and fault.camera in ("", camera):
                return fault.value or 1.0
        return 0.0

    def inject(self, fault: Fault) -> None:
        """One that strikes now; those that are long over are forgotten."""
        self.faults = [f for f in self.faults if f.at + f.seconds > fault.at - 1.0]
        self.faults.append(fault)
        self._struck &= set(self.faults)
        self._over &= set(self.faults)

    def due(self, now: float) -> Iterator[tuple[Fault, bool]]:
        """What strikes (True), and what of power and force ends, each once."""
        for fault in self.faults:
            lasting = fault.name in ("power", "force") and fault in self._struck - self._over
            if lasting and not fault.lasts(now):
                self._over.add(fault)
                yield fault, False
            if fault not in self._struck and now >= fault.at:
                self._struck.add(fault)
                yield fault, True
