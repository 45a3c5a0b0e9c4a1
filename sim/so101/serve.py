"""A simulated SO-101 and its leader behind two serial ports, until Ctrl-C; what a person's hand
does, and what goes wrong, is typed: ``vla-rl robot so101 sim``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sim.so101.bus import VOLTS, Bus
from sim.so101.joints import NAMES
from sim.so101.tasks import REGION
from sim.so101.view import Shown

# as two persons happened to screw them on; each leaves its joint's range within one turn
MOUNTED = {
    "follower": (2100, 1960, 2180, 2048, 2010, 1300),
    "leader": (2000, 2110, 1990, 2090, 2048, 1250),
}
HELP = """middle ARM: a hand brings it to the middle of its range   sweep ARM: through all of it
hand ARM D D D D D D: there (degrees)                    off ARM: the hand lets go
unplug ARM, plug ARM   sag ARM VOLTS   lose ARM SHARE   corrupt ARM SHARE   late ARM SECONDS
overload ARM MOTOR   power ARM: off and on   cube X Y: put it there (m), such as cube 0.2 0.03"""
_START = np.array([np.mean(REGION[::2]), np.mean(REGION[1::2]), 0.0])  # of the cube


@contextlib.contextmanager
def pair(folder: Path, pace: float = 0.0, table: bool = False) -> Iterator[dict[str, Bus]]:
    """{"follower", "leader"}: their ports are links in ``folder``; ``pace`` as in `Bus`. With
    ``table`` the follower stands at one, which cameras of ``folder`` show."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        more = {"follower": _table(folder, stack)} if table else {}
        yield {
            name: stack.enter_context(Bus(folder / name, mounted, pace, **more.get(name, {})))
            for name, mounted in MOUNTED.items()
        }


def _table(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    from sim.so101.world import Scene, World

    world = World(Scene())
    world.begin(_START)
    return {"world": world, "shown": stack.enter_context(contextlib.closing(Shown(folder)))}


def middle(bus: Bus) -> np.ndarray:
    return bus.arm.joints.ranges.mean(axis=1)


def sweep(bus: Bus, seconds: float = 2.0, joints: Iterable[int] = range(len(NAMES))) -> None:
    """A hand leads one joint after the other from end to end, and all back to the middle."""
    at = middle(bus)
    for joint in joints:
        for end in bus.arm.joints.ranges[joint]:
            goal = at.copy()
            goal[joint] = end
            bus.lead(goal)
            time.sleep(seconds)
    bus.lead(at)
    time.sleep(seconds)


def do(buses: dict[str, Bus], line: str) -> None:
    """One line of `HELP`. Raises ValueError, KeyError or IndexError for another."""
    word, name, *rest = line.split()
    if word == "cube":
        return buses["follower"].put(np.array([float(name), float(rest[0]), 0.0]))
    bus = buses[name]
    if word == "middle":
        bus.lead(middle(bus))
    elif word == "sweep":
        sweep(bus)
    elif word == "hand":
        angles = np.radians([float(x) for x in rest])
        if angles.shape != (len(NAMES),):
            raise ValueError(line)
        bus.lead(angles)
    elif word == "off":
        bus.lead(None)
    elif word == "unplug":
        bus.cable.unplug()
    elif word == "plug":
        bus.cable.plug()
    elif word == "sag":
        bus.sag(float(rest[0]))
    elif word in ("lose", "corrupt", "late"):
        bus.strike(**{word: float(rest[0])})
    elif word == "overload":
        bus.overload(NAMES.index(rest[0]))
    elif word == "power":
        bus.sag(0.0)
        bus.sag(VOLTS)
    else:
        raise ValueError(line)
    return None


def serve(folder: Path, lines: Iterable[str], say: Callable[[str], None]) -> None:
    """Until ``lines`` end."""
    with pair(folder, table=True) as buses:
        for name, bus in buses.items():
            say(f"{name}: {bus.cable.port}")
        say(HELP)
        for line in lines:
            if not line.strip():
                continue
            try:
                do(buses, line)
            except (ValueError, KeyError, IndexError):
                say(HELP)
            else:
                degrees = {n: np.degrees(b.angles).round(1).tolist() for n, b in buses.items()}
                say(f"{degrees}")
