"""Options of the supervisor."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_rl.bounds import Bounded, bound
from vla_rl.errors import ConfigError


@dataclass(frozen=True)
class SupervisorConfig(Bounded, place="supervisor"):
    """``hz`` ticks per second, a whole multiple of the embodiment's control rate.

    An input, a role's beat or a policy older than ``silence_s`` makes the arm hold; a policy that
    stays silent for ``fault_s`` latches a fault, one that lives and sends nothing pauses after
    ``thinking_s``. ``required`` roles must live while anything moves, and ``cameras`` must deliver
    new pictures younger than ``frame_age_s`` (at 10 Hz it takes 0.25). ``state_age_s`` is how old
    the robot's own state may be. A gate that clips (beyond shaping the motion) for more than half
    of ``sustained_s`` pauses. ``home`` is the scripted reset's pose (x y z, and w x y z) or joints;
    empty: the simulator resets itself, or the operator is asked and confirms. ``home_tolerance`` in
    metres, or joint units. A policy that brings the hand out of the box from ``safe_low`` to
    ``safe_high`` (m; empty: none) is paused: a smaller box than the limits', to practise in.
    """

    hz: float = bound(100.0, ge=10, le=1000)
    # seconds of silence after which the arm holds
    silence_s: float = bound(0.15, gt=0, le=0.3)
    # seconds of a policy's silence that latch a fault
    fault_s: float = bound(1.0, gt=0, le=10)
    # seconds without a decision after which a policy that lives pauses
    thinking_s: float = bound(10.0, gt=0, le=600)
    # seconds after which control that is not renewed lapses
    lease_s: float = bound(2.0, gt=0, le=10)
    # roles that must live while anything moves
    required: tuple[str, ...] = ()
    # cameras that must deliver
    cameras: tuple[str, ...] = ()
    # largest age of their pictures, seconds
    frame_age_s: float = bound(0.15, gt=0, le=5)
    state_age_s: float = bound(0.15, gt=0, le=5)
    sustained_s: float = bound(1.0, gt=0, le=60)
    home: tuple[float, ...] = ()
    home_tolerance: float = bound(0.01, gt=0, lt=math.inf, hint="metres, or joint units")
    # seconds that the scripted reset may take
    home_timeout_s: float = bound(20.0, gt=0, le=600)
    # lower corner of the box that a policy's hand stays in, metres; empty: none
    safe_low: tuple[float, ...] = ()
    # upper corner, metres
    safe_high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in self.home):
            raise ConfigError(f"supervisor.home={list(self.home)}: give finite numbers")
        low, high = self.safe_low, self.safe_high
        if (low or high) and not (
            len(low) == len(high) == 3 and all(a < b for a, b in zip(low, high))
        ):
            raise ConfigError(
                f"supervisor.safe_low={list(low)}, supervisor.safe_high={list(high)}: give x y z "
                "in metres, the low ones below the high"
            )


def from_options(options: Mapping[str, Any]) -> SupervisorConfig:
    """Of a file, where lists stand for tuples. Raises `ConfigError` for a key that there is not,
    and a value of another type."""
    kinds = {f.name: str(f.type) for f in dataclasses.fields(SupervisorConfig)}
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    for name, value in given.items():
        if name not in kinds:
            close = difflib.get_close_matches(str(name), kinds, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"there is no key robot.supervisor.{name}.{hint} Known are {', '.join(kinds)}"
            )
        if not _is(kinds[name], value):
            many = "a list of " if kinds[name].startswith("tuple") else "a "
            what = "text" if "str" in kinds[name] else "number"
            raise ConfigError(
                f"robot.supervisor.{name}={value!r} is not what it takes: give {many}{what}"
                + ("s" if many != "a " else "")
            )
    return SupervisorConfig(**given)


def _is(kind: str, value: Any) -> bool:
    if kind.startswith("tuple"):
        entry = "str" if "str" in kind else "float"
        return isinstance(value, tuple) and all(_is(entry, x) for x in value)
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, int | float) and not isinstance(value, bool)
