"""Who is silent, whose clock is off, which picture is old: judged by this machine's clock."""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from dataclasses import dataclass

from real.messages import Frame

_DRIFT = 0.002  # of a device's clock, seconds per second
_JUMP_S = 0.05  # more than a drift explains


@dataclass
class Client:
    """A connected process. ``heard`` is when it last said anything."""

    role: str
    source: str
    heard: float


class DeviceClock:
    """How old a device's stamp is, whose clock has an unknown offset that may drift.

    What arrives was made earlier, so stamp - now never exceeds the true offset: its largest value,
    which is let down by `_DRIFT` seconds per second so that it can follow, estimates it.
    """

    def __init__(self) -> None:
        self._offset: float | None = None
        self._newest = -math.inf
        self._time = 0.0

    def reset(self) -> None:
        self._offset, self._newest = None, -math.inf

    def age(self, stamp: float, now: float) -> float:
        """Seconds; negative where the clock jumped: ahead by more than a drift explains, or back by
        as much. It is measured anew then: a clock that went back would have to be let down for
        minutes, and one that seems to have gone ahead may be one whose first stamp came late, after
        which every age would be too small."""
        seen, before, self._newest = stamp - now, self._newest, stamp
        if stamp < before - _JUMP_S:  # what is older does not come after what is newer
            self._offset = None
            return stamp - before
        if self._offset is None:
            self._offset, self._time = seen, now
        self._offset -= _DRIFT * max(0.0, now - self._time)
        self._time = now
        ahead = seen - self._offset
        if ahead > _JUMP_S:
            self._offset = seen
            return -ahead
        self._offset = max(self._offset, seen)
        return self._offset - seen


class Cameras:
    """The newest picture of each camera. A number that does not grow is a frozen stream,
    whatever keeps arriving."""

    def __init__(self, names: tuple[str, ...], limit_s: float):
        self.names, self.limit_s = names, limit_s
        self._newest: dict[str, tuple[int, float]] = {}
        self._source: dict[str, str] = {}  # whose connection it came over
        self._gone: set[str] = set()
        self.gaps: dict[str, int] = {}

    def see(self, frame: Frame, now: float) -> str:
        """Take note of it; says what is wrong with it, or ""."""
        before = self._newest.get(frame.camera)
        self._source[frame.camera] = frame.source
        self._gone.discard(frame.camera)
        if frame.capture > now + 0.05:
            return f"{frame.camera}: a picture from the future"
        if before is not None and frame.device_no <= before[0]:
            backwards = frame.device_no < before[0]
            # it was plugged in again, and counts anew
            if backwards and now - before[1] > self.limit_s:
                self._newest[frame.camera] = (frame.device_no, frame.capture)
                return ""
            return (
                f"{frame.camera}: picture {frame.device_no} came "
                f"{'after' if backwards else 'twice, as'} {before[0]}"
            )
        if before is not None and frame.device_no > before[0] + 1:
            self.gaps[frame.camera] = (
                self.gaps.get(frame.camera, 0) + frame.device_no - before[0] - 1
            )
        self._newest[frame.camera] = (frame.device_no, frame.capture)
        return ""

    def left(self, source: str) -> None:
        """The process whose messages bear this name has ended: faster than its pictures' age
        tells."""
        self._gone |= {name for name, other in self._source.items() if other == source}

    def stale(self, now: float) -> str:
        """Why no picture of a required camera is young enough, or ""."""
        for name in self.names:
            newest = self._newest.get(name)
            if newest is None:
                return f"camera {name} has sent no picture"
            if name in self._gone:
                return f"camera {name} is gone: its process has ended"
            if now - newest[1] > self.limit_s:
                return f"camera {name} shows what was {now - newest[1]:.2f} s ago"
        return ""


class Share:
    """Whether more than half of the last ``ticks`` ticks were bad, and in what."""

    def __init__(self, ticks: int):
        self._last: deque[int] = deque(maxlen=max(2, ticks))

    def add(self, bad: int) -> int:
        """Bits of what is bad now (0: nothing). Those of all these ticks where more than half were
        bad, the present one or not; then it starts anew. Else 0."""
        self._last.append(bad)
        full = len(self._last) == self._last.maxlen
        if full and 2 * sum(map(bool, self._last)) > len(self._last):
            found = functools.reduce(operator.or_, self._last)
            self._last.clear()
            return found
        return 0
