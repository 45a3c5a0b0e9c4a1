"""When an operator's device moves the arm: a dead-man, or motion with a hysteresis; and how an
absolute one joins in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Vector = tuple[float, ...]


@dataclass(frozen=True)
class Hysteresis:
    """Engaged by deflection above ``on``, until it stays below ``off`` for ``hold_s``
    (real_offpolicy.md §8.3, 5).

    Per-step engagement, as HIL-SERL has it, hands control back and forth in the middle of a
    correction.
    """

    on: float = 0.1
    off: float = 0.05
    hold_s: float = 0.25


class MotionEngage:
    def __init__(self, config: Hysteresis):
        self.config = config
        self.engaged = False
        self._quiet_since: float | None = None

    def update(self, deflection: float, now: float) -> bool:
        """``deflection`` is the largest of the axes, 0 to 1."""
        if deflection >= self.config.on:
            self.engaged = True
        if deflection >= self.config.off:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if (
            self.engaged
            and self._quiet_since is not None
            and now - self._quiet_since >= self.config.hold_s
        ):
            self.engaged = False
        return self.engaged

    def release(self) -> None:
        self.engaged, self._quiet_since = False, None


class Clutch:
    """Turns positions of a device into targets: where the robot was when it was engaged, plus how
    far the device has gone.

    Both origins are taken anew at each engagement, so letting go, moving the hand back and engaging
    again moves nothing.
    """

    def __init__(self) -> None:
        self._origins: tuple[Vector, Vector] | None = None

    def update(self, engaged: bool, device: Sequence[float], robot: Sequence[float]) -> Vector:
        """The target in the robot's numbers; empty while it is not engaged."""
        if not engaged:
            self._origins = None
            return ()
        if self._origins is None:
            self._origins = tuple(device), tuple(robot)
        start, base = self._origins
        return tuple(b + d - s for b, d, s in zip(base, device, start, strict=True))


class Align:
    """An absolute leader may move its follower only once it stands where the follower stands, and
    not after a jump.

    ``tolerance`` is the largest difference of any joint, ``jump`` how far a joint may go between
    two readings.
    """

    def __init__(self, names: Sequence[str], tolerance: float, jump: float):
        self.names, self.tolerance, self.jump = tuple(names), tolerance, jump
        self.aligned = False
        self._last: Vector | None = None

    def update(self, leader: Sequence[float], follower: Sequence[float]) -> str:
        """Empty where they are aligned; else what has to move, for the operator."""
        moved = () if self._last is None else tuple(abs(x - y) for x, y in zip(leader, self._last))
        self._last = tuple(leader)
        if not all(map(math.isfinite, leader)):
            self.aligned = False
            return "the leader arm says no number"
        if moved and max(moved) > self.jump:
            self.aligned = False
            return f"the leader's {self.names[moved.index(max(moved))]} jumped: align it again"
        if self.aligned:
            return ""
        away = [x - y for x, y in zip(leader, follower, strict=True)]
        worst = max(range(len(away)), key=lambda i: abs(away[i]))
        if abs(away[worst]) > self.tolerance:
            return (
                f"move the leader's {self.names[worst]} by {-away[worst]:+.2f} to where the arm is"
            )
        self.aligned = True
        return ""

    def release(self) -> None:
        self.aligned, self._last = False, None
