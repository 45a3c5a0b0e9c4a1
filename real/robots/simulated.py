"""A simulated arm behind the `Robot` Protocol: a `World`, its latencies, and faults that strike by
the clock.

It runs in whatever time its ``clock`` tells: `advance_to` brings the physics there. In lockstep the
caller does so (virtual time, as fast as it computes); in real time `real.robots.server` does, in a
process of its own, since a real arm goes on moving too when its driver dies. ``log`` holds what the
arm physically did, apart from every journal: tests take it as truth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from real.robots.faults import Defects, Fault, Script
from real.robots.protocol import Measured, Reference, RobotLost
from real.robots.world import World, aim, capabilities, own_limits

STEP_S = 0.002  # of the physics


@dataclass
class Log:
    """What happened to the arm: targets as they took effect, where it was after each advance,
    and what struck it."""

    # time, Reference.vector()
    targets: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)
    # time, position [3] or joints
    path: list[tuple[float, np.ndarray]] = field(default_factory=list)
    # time, "reflex", "hold", "stop", "watchdog", "clear" …
    events: list[tuple[float, str]] = field(default_factory=list)
    keep: int = 0  # of the newest entries; 0: all (tests); a long session bounds its memory

    def trim(self) -> None:
        for entries in (self.targets, self.path, self.events):
            if self.keep and len(entries) > 2 * self.keep:
                del entries[: -self.keep]


@dataclass(frozen=True)
class Picture:
    """``device_no`` and ``device_stamp`` are the camera's own."""

    camera: str
    device_no: int
    device_stamp: float
    image: np.ndarray


class _Cameras:
    """What the cameras deliver, with their defects; a camera's own numbers count its pictures."""

    def __init__(self, script: Script, rng: np.random.Generator):
        self._script, self._rng = script, rng
        self._numbers: dict[str, int] = {}
        self._late: deque[tuple[float, Picture]] = deque()
        self._last: dict[str, Picture] = {}

    def deliver(
        self, images: dict[str, np.ndarray], time: float, now: float, stamp: float
    ) -> list[Picture]:
        """Of ``images`` at ``time``, ``now`` seconds after the start, what arrives; ``stamp`` is
        the device's."""

        def fault(name: str, camera: str) -> float:
            return self._script.value(name, now, camera)

        fresh = []
        for camera, image in images.items():
            if fault("camera_lost", camera):
                continue
            if fault("camera_freeze", camera) and camera in self._last:
                fresh.append(self._last[camera])
                continue
            number = self._numbers[camera] = self._numbers.get(camera, -1) + 1
            if self._rng.random() < fault("camera_gap", camera):
                continue
            picture = self._last[camera] = Picture(camera, number, stamp, image)
            fresh += [picture] * (2 if fault("camera_twice", camera) else 1)
        self._late += [(time + fault("camera_late", p.camera), p) for p in fresh]
        due = [p for t, p in self._late if t <= time]
        self._late = deque((t, p) for t, p in self._late if t > time)
        return due


class SimulatedRobot:
    """See the module's text. ``stopper`` is passed on in the capabilities."""

    def __init__(
        self,
        world: World,
        defects: Defects,
        clock: Callable[[], float],
        stopper: tuple[str, str] = ("", ""),
    ):
        self.world, self.defects, self.clock = world, defects, clock
        self.name = world.embodiment.name
        self.embodiment = world.embodiment
        self.capabilities = capabilities(world, defects.watchdog_s, stopper)
        self.limits = own_limits(world)
        self.log = Log()
        self.errors: set[str] = set()
        self.begun = 0  # episodes
        self.script = Script(defects.script)
        self._rng = np.random.default_rng(defects.seed)
        self._cameras = _Cameras(self.script, self._rng)
        self._zero = self._time = clock()
        # when it takes effect; None: hold
        self._inbox: deque[tuple[float, Reference | None]] = deque()
        self._measured: deque[Measured] = deque(maxlen=512)
        self._seen: Measured | None = None
        self._heard = self._time
        self._holding = True
        self._stopped = False
        self._grips: deque[tuple[float, float]] = deque()
        self._grip = 0.0
        self._remember()

    # --------------------------------------------------------------------------- the Robot Protocol
    def connect(self) -> None:
        pass

    def observe(self) -> Measured:
        if self._fault("silent") or self._fault("power"):
            raise RobotLost(f"{self.name} does not answer")
        limit = self._time - self.defects.observation_latency
        newest = next((m for m in reversed(self._measured) if m.stamp <= limit), self._measured[0])
        # none is older than the one before
        if self._seen is None or newest.stamp > self._seen.stamp:
            self._seen = newest
        return self._as_seen(self._seen)

    def command(self, reference: Reference) -> None:
        self._send(reference)

    def hold(self) -> None:
        self._send(None)

    def stop(self) -> bool:
        self._inbox.clear()
        if not self._stopped:
            self._event("stop")
        self._stopped = True
        self.errors.add("stopped")
        self._rest()
        return True

    def clear(self) -> None:
        if self._fault("power"):
            raise RobotLost(f"{self.name} has no power")
        self.errors.clear()
        self._stopped = False
        self._event("clear")

    def close(self) -> None:
        self._inbox.clear()
        self._rest()

    # ------------------------------------------------------------------------------------ the world
    def begin(self, episode: dict[str, Any]) -> None:
        """Arm and objects into an episode's start state, which no real arm can do: the
        simulator's own reset."""
        self._inbox.clear()
        self._grips.clear()
        self._grip = 0.0
        self.world.reset(episode)
        self._rest()
        self._measured.clear()
        self._seen = None
        self._remember()
        self.begun += 1
        self._event("reset")

    def inject(self, name: str, seconds: float = 0.0, value: float = 0.0) -> None:
        """A fault of `real.robots.faults.FAULTS` that strikes now; those of the script that are
        long over are forgotten."""
        self.script.inject(Fault(name, self._time - self._zero, seconds, value))

    def advance_to(self, time: float) -> None:
        """Bring the physics to ``time``, in whole steps of `STEP_S`; targets and faults strike
        in between."""
        while self._time + STEP_S <= time + 1e-9:
            self._strike()
            self._deliver()
            reach = min([time, *(t for t, _ in self._inbox)], default=time)
            steps = max(1, int((max(reach, self._time + STEP_S) - self._time + 1e-9) / STEP_S))
            steps = min(steps, 5)  # faults strike within 10 ms
            self.world.advance(steps * STEP_S)
            self._time += steps * STEP_S
            self._remember()
        self.log.trim()

    def pictures(self) -> list[Picture]:
        """What the cameras deliver now, with their defects. Call it at the cameras' rate."""
        stamp = self._clock(self._time)
        return self._cameras.deliver(
            self.world.pictures(), self._time, self._time - self._zero, stamp
        )

    # --------------------------------------------------------------------------------------- inside
    def _clock(self, time: float) -> float:
        """What the device's clock shows."""
        return time + self.defects.drift * (time - self._zero) + self._fault("clock")

    def _fault(self, name: str) -> float:
        """Its value (1 where that is 0) while the fault lasts, else 0."""
        return self.script.value(name, self._time - self._zero)

    def _send(self, reference: Reference | None) -> None:
        if self._fault("power"):
            raise RobotLost(f"{self.name} has no power")
        if self._rng.random() < max(self.defects.drop, self._fault("drop")):
            return
        delay = (
            self.defects.command_latency
            + self._fault("latency")
            + self.defects.command_jitter * self._rng.random()
        )
        self._inbox.append((max(self._time, self.clock()) + delay, reference))

    def _deliver(self) -> None:
        while self._inbox and self._inbox[0][0] <= self._time + 1e-9:
            _, reference = self._inbox.popleft()
            self._heard = self._time
            if self._stopped or self.errors:
                continue
            if reference is None:
                if not self._holding:
                    self._event("hold")
                self._rest()
                continue
            self._holding = False
            self.log.targets.append((self._time, reference.vector()))
            self._grips.append((self._time + self.defects.gripper_lag, reference.gripper))
            while self._grips and self._grips[0][0] <= self._time:
                self._grip = self._grips.popleft()[1]
            grip = 0.0 if self._fault("gripper") else self._grip
            aim(
                self.world,
                Reference(grip, reference.position, reference.quaternion, reference.joints),
            )
        if (
            self.defects.watchdog_s
            and not self._holding
            and self._time - self._heard > self.defects.watchdog_s
        ):
            self._event("watchdog")
            self._rest()

    def _strike(self) -> None:
        for fault, strikes in self.script.due(self._time - self._zero):
            if not strikes:
                self._end(fault.name)
                continue
            self._event(fault.name)
            if fault.name == "reflex":
                self.errors.add("reflex")
                self._rest()
            elif fault.name == "power":
                self.world.limp(True)
            elif fault.name == "force":
                speed = self.world.read()["joint_velocity"]
                axis = np.zeros(3)
                axis[int(np.argmax(np.abs(speed[:3])))] = (
                    -np.sign(speed[int(np.argmax(np.abs(speed[:3])))]) or 1.0
                )
                self.world.push(fault.value * axis)

    def _end(self, name: str) -> None:
        if name == "force":
            self.world.push(np.zeros(3))
        else:
            self.world.limp(False)
            self.errors.add("reflex")
            self._rest()

    def _rest(self) -> None:
        self._holding = True
        self.world.brake()

    def _event(self, name: str) -> None:
        self.log.events.append((self._time, name))

    def _remember(self) -> None:
        values = self.world.read()
        place = values["position"] if len(values["position"]) else values["joints"]
        self.log.path.append((self._time, place))
        self._measured.append(Measured(stamp=self._time, errors=(), **values))

    def _as_seen(self, measured: Measured) -> Measured:
        fields = {name: getattr(measured, name) for name in measured.__dataclass_fields__}
        return Measured(
            **fields | {"stamp": self._clock(measured.stamp), "errors": tuple(sorted(self.errors))}
        )
