"""A session in virtual time, in one process: world, supervisor, policy, conductor and recorder take
turns, tick by tick.

Nothing is late, deciding takes one tick (or ``thinking_s``), and cameras show what the policy waits
for at once: it does here what it can do at best, and twice the same, as fast as it computes. What
this cannot show is what time does to a session: that is what the processes of `real.body` are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from real import limits as limit_files
from real.acting import Acting, ActingConfig, Decide
from real.body import BodyConfig
from real.episodes import JUDGE, LEADER, SEER, Conductor, Outcome, Plan
from real.messages import Beat, Chunk, Frame, Hello, Message, Progress, Writer
from real.modes import Mode
from real.named import make_world
from real.recorder import Recorder
from real.ring import Rings, RingWriter
from real.robots.faults import Defects, Fault
from real.robots.simulated import SimulatedRobot
from real.supervisor.core import Supervisor
from real.supervisor.settings import from_options
from real.teleop.client import Line, TeleopClient
from real.teleop.protocol import Device

OPERATOR, _REWARD = "teleop.scripted", "reward"
_ROLES = {
    "policy": "policy",
    LEADER: "launcher",
    JUDGE: "viewer",
    SEER: "viewer",
    "guard": "guard",
    "recorder": "recorder",
}
_BEAT_S = 0.05
_INPUT_S = 1.0 / 30.0  # of an operator's device

_M = TypeVar("_M", bound=Message)


class _Scorer(Protocol):
    """What says of the running episode how far it is
    (`vla_rl.robot.reward_process.RewardWatcher`)."""

    @property
    def due(self) -> bool: ...

    def hear(self, message: Message) -> None: ...

    def score(self) -> dict[str, Any] | None: ...


class Lockstep:
    """``config`` as for `real.body.Body`, of a simulated world. ``folder`` gets the journals, where
    they are wanted. A decision goes out ``thinking_s`` of virtual time after it began."""

    def __init__(self, folder: str | Path, config: BodyConfig, thinking_s: float = 0.0):
        self.config, self.now, self.thinking_s = config, 1.0, thinking_s
        self._thought: tuple[float, dict[str, Any]] | None = None  # when it goes out, and what
        self.world, self.robot = self._made(config)
        spec, capabilities = self.robot.embodiment, self.robot.capabilities
        limits = limit_files.load_for(self.robot, config.limits)
        settings = from_options(config.supervisor)
        name = Path(folder).name
        self.supervisor = Supervisor(self.robot, limits, settings, self.now, name)
        about = {
            "session": name,
            "embodiment": spec.to_dict(),
            "limits": asdict(limits),
            "virtual_time": True,
        }
        about |= {"capabilities": asdict(capabilities), "supervisor": asdict(settings)}
        self.recorder = Recorder(Path(folder) / "journal", about) if config.record else None
        self._writers = {
            source: Writer(source, lambda: self.now)
            for source in (*_ROLES, OPERATOR, _REWARD, "arm")
        }
        self._rings = {c.name: RingWriter(c.name, (c.height, c.width, 3)) for c in spec.cameras}
        self._pictures = Rings()
        self._numbers: dict[str, int] = {}  # of pictures, whatever the device calls them
        self._tick, self._shown, self._beaten = -1, -1.0, -1.0
        self._resets = 0
        self._good, self._told = 0, False
        self._teleop: TeleopClient | None = None
        self._looked = -1.0  # the operator
        self._scorer: _Scorer | None = None
        self._guests: dict[str, Callable[[Message], None]] = {}
        self.silent: set[str] = set()  # sources that hang, or are gone: they say nothing
        self.others: dict[str, tuple[Decide, str]] = {}  # as of `Acting`

    def _made(self, config: BodyConfig) -> tuple[Any, Any]:
        """The world, and the arm in it."""
        defects = dict(config.defects)
        script = tuple(Fault(**f) for f in defects.pop("script", ()))
        world = make_world(config.world, config.options)
        robot = SimulatedRobot(world, Defects(script=script, **defects), lambda: self.now)
        robot.log.keep = 2000
        return world, robot

    def watched(self, device: Device) -> None:
        """Let an operator with this device watch from now on; it may take over and hand back."""
        self._teleop = TeleopClient(
            device, Line(OPERATOR, functools.partial(self.send, OPERATOR)), lambda: self.now
        )
        self.silent.discard(OPERATOR)
        self.send(OPERATOR, Hello, role="teleop", pid=1)

    def join(self, source: str, role: str, hear: Callable[[Message], None]) -> None:
        """Let another client hear what is said to it, from now on; it speaks by `send`, and
        beats."""
        self._writers[source] = Writer(source, lambda: self.now)
        self._guests[source] = hear
        self.send(source, Hello, role=role, pid=1)

    def leave(self, source: str) -> None:
        """Its connection ends, as that of a process that was killed does."""
        self.silent.add(source)
        self.supervisor.reception.left(source)

    def scored(self, scorer: _Scorer) -> None:
        """Let a reward judge each episode as it runs, from now on."""
        self._scorer = scorer
        self.send(_REWARD, Hello, role="viewer", pid=1)

    def run(
        self,
        plan: Plan,
        decide: Decide | None,
        version: str,
        acting: ActingConfig,
        told: Callable[[Outcome], str | None],
    ) -> Conductor:
        """Until the plan is done. ``told`` hears of every episode once its record is closed, and
        may answer with the name of the policy's version from then on. Without ``decide`` nobody
        acts."""
        conductor, self._thought = Conductor(plan, self.robot.embodiment.control_hz), None
        policy = Acting(decide, self._pictures, version, acting) if decide is not None else None
        if policy is not None:
            policy.others = self.others
        for source, role in _ROLES.items():
            if source != "policy" or policy is not None:
                self.send(source, Hello, role=role, pid=1)
        self._spread(conductor, policy)
        counted = 0
        while not conductor.done:
            self._step(conductor, policy)
            for outcome in conductor.outcomes[counted:]:
                name = told(outcome)
                if name and policy is not None:
                    policy.version = name
            counted = len(conductor.outcomes)
        return conductor

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        for ring in self._rings.values():
            ring.close()
        self.world.close()

    def _step(self, conductor: Conductor, policy: Acting | None) -> None:
        """One tick of the supervisor, and what everybody says to it before."""
        self._tick += 1
        now = self.now = 1.0 + self._tick / self.supervisor.session.config.hz
        self.robot.advance_to(now)
        self._judge(conductor)
        wanted = policy is not None and policy.wants
        hz = self.config.camera_hz or 20.0
        # what a person does is decided on at every control step
        if self.supervisor.session.modes.mode is Mode.HUMAN:
            hz = max(hz, self.robot.embodiment.control_hz)
        if wanted or now - self._shown >= 1.0 / hz - 1e-6:
            self._shown = now
            self._show(now)
        if now - self._beaten >= _BEAT_S:
            self._beaten = now
            for source in (*_ROLES, *self._guests):
                if source in self.silent:
                    continue
                self.send(source, Beat, 0.5, tick=self._tick)
        for source, kind, fields in conductor.due(now):
            self.send(source, kind, **fields)
        if (
            self._teleop is not None
            and OPERATOR not in self.silent
            and now - self._looked >= _INPUT_S
        ):
            self._looked = now
            self._teleop.step()
        self.supervisor.tick(self._tick, now)
        self._spread(conductor, policy)
        if (
            self._scorer is not None
            and self._scorer.due
            and (found := self._scorer.score()) is not None
        ):
            self.send(_REWARD, Progress, **found)
            self._spread(conductor, policy)
        if policy is not None:
            self._think(conductor, policy)

    def _think(self, conductor: Conductor, policy: Acting) -> None:
        if "policy" in self.silent:
            return
        if self._thought is None and policy.due:
            times = iter((self.now, self.now + self.thinking_s))  # of its begin and its end
            row = policy.chunk(lambda: next(times))
            self._thought = None if row is None else (self.now + self.thinking_s, row)
        if self._thought is not None and self.now >= self._thought[0] - 1e-9:
            row, self._thought = self._thought[1], None
            policy.sent(self.send("policy", Chunk, policy.config.valid_s, **row))
            self._spread(conductor, policy)

    def _judge(self, conductor: Conductor) -> None:
        """As `real.robots.server` does."""
        if self.robot.begun != self._resets:
            self._resets, self._good, self._told = self.robot.begun, 0, False
            conductor.judged("began")
        self._good = self._good + 1 if self.world.success() else 0
        lasted = self._good * self.robot.embodiment.control_hz >= self.supervisor.session.config.hz
        if lasted and not self._told:
            self._told = True
            conductor.judged("success")

    def _show(self, now: float) -> None:
        for p in self.robot.pictures():
            number = self._numbers[p.camera] = self._numbers.get(p.camera, -1) + 1
            slot = self._rings[p.camera].write(p.image, number)
            height, width, channels = p.image.shape
            frame = self._writers["arm"].make(
                Frame,
                camera=p.camera,
                ring=self._rings[p.camera].address,
                slot=slot,
                number=number,
                device_no=p.device_no,
                capture=now,
                device_stamp=p.device_stamp,
                height=height,
                width=width,
                channels=channels,
            )
            self.supervisor.reception.see(frame)

    def send(
        self, source: str, kind: type[_M], valid_s: float = float("inf"), /, **fields: Any
    ) -> _M:
        message = self._writers[source].make(kind, valid_s, **fields)
        self.supervisor.receive(source, message, self.now)
        return message

    def _spread(self, conductor: Conductor, policy: Acting | None) -> None:
        outbox, self.supervisor.session.outbox = self.supervisor.session.outbox, []
        for client, message in outbox:
            if client in (None, LEADER):
                conductor.hear(message)
            if policy is not None and client in (None, "policy"):
                policy.hear(message)
            if self._teleop is not None and client in (None, OPERATOR):
                self._teleop.hear(message)
            if self._scorer is not None and client in (None, _REWARD):
                self._scorer.hear(message)
            if self.recorder is not None and client is None:
                self.recorder.take(message)
            for source, hear in self._guests.items():
                if client in (None, source):
                    hear(message)
