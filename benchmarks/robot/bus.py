"""``vla-rl bench bus``: an SO-101 behind its simulated serial bus, driven by lerobot's own classes in
virtual time (`benchmarks.robot.bus_arm`): a policy's success there and, from the same states, in
env=so101; and faults at random of the bus and of who drives it.

Judged is what is independent of the code that is judged: the physics behind the bus and the torque
of its servos.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import say, table
from benchmarks.robot.bus_arm import LATENCY_S, BusSession
from benchmarks.robot.people import Person
from benchmarks.robot.soak import Kind, Over, Told
from real.acting import ActingConfig
from real.episodes import Outcome, Plan
from real.journal import SUFFIX, read
from real.messages import Message, Notice, State
from real.so101 import FIRST
from real.tasks import Task
from sim.so101.bus import VOLTS
from sim.so101.servos import STEPS
from sim.so101.world import Scene
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec

_MOVING = ("AUTO",)
FAULTS = {
    "policy frozen": Kind((0.2, 2), modes=_MOVING),
    "recorder frozen": Kind((0.3, 2), modes=_MOVING),
    "supervisor frozen": Kind((0.2, 2), modes=_MOVING),
    "unplug": Kind((0.1, 2), modes=_MOVING),
    "lose": Kind((0.3, 2), (0.05, 1), _MOVING),
    "corrupt": Kind((0.3, 2), (0.05, 1), _MOVING),
    "deaf": Kind((0.3, 2), (0.05, 1), _MOVING),
    "late": Kind((0.3, 1), (0.005, 0.08), _MOVING),
    "sag": Kind((0.1, 1), (3.6, 3.9), _MOVING),
    "overload": Kind((0.1, 1), (0, 6), _MOVING),
}
ENDING = {
    "policy killed": Kind((1.5, 1.5), modes=_MOVING),
    "supervisor killed": Kind((1.5, 1.5), modes=_MOVING),
    "power off": Kind((0.1, 1), (0, 3), _MOVING),  # its servos start without torque
}
KINDS = FAULTS | ENDING
ARMS = ("unplug", "lose", "corrupt", "deaf", "late")  # it does not answer, now and then
_PER_BAG = 4  # of each kind that ends no session, for one of each that does
_REST = 3.0  # degrees a second: slower is a standstill
_WINDOW = 5  # ticks, over which a speed is measured
_BEYOND = 1.0  # degrees that an arm may give way beyond its limits
_ROUNDING = 1.5 * 360.0 / STEPS  # degrees, of a goal in steps
_GIVES_UP_S = 30.0
_HOLD_S = 0.17  # in which it is to be told to hold
_HOLDS_S = 0.05  # longer than between two chunks
_SETTLED_S = 1.0  # in which an arm that was just put somewhere gives way to its weight
_STEP = 3.0  # degrees a control step, as fast as the limits allow


@dataclass
class Struck:
    """One fault, at ``speed`` degrees a second. ``hold_s`` from it until the session drove the
    arm no further, of `ARMS` from when it had answered last (None: nothing stopped it);
    ``rest_s`` from it until the arm stood still (None: it did not)."""

    kind: str
    at: float
    seconds: float
    value: float
    speed: float
    stopped: bool = False
    hold_s: float | None = None
    rest_s: float | None = None
    moved_on: bool = False


class Sway:
    """A policy that wants other joints every few seconds, all over their range."""

    def __init__(self, low: np.ndarray, high: np.ndarray, rng: np.random.Generator):
        self.low, self.high, self.rng = low, high, rng
        self.goal: np.ndarray = np.zeros(0)
        self.left = 0

    def __call__(self, images: Any, proprio: np.ndarray, text: str, first: bool) -> np.ndarray:
        if self.left <= 0:
            self.goal, self.left = self.rng.uniform(self.low, self.high), 12
        self.left -= 1
        way = self.goal - proprio
        return proprio + np.array([np.clip(way, -_STEP * i, _STEP * i) for i in range(1, 5)])


class Campaign:
    """``count`` faults, over as many sessions as they take."""

    def __init__(
        self,
        folder: Path,
        scene: Scene,
        count: int,
        seed: int,
        every_s: float,
        wall_s: float = math.inf,
    ):
        self.folder, self.scene, self.count, self.every_s = folder, scene, count, every_s
        self.wall_s, self.until = wall_s, math.inf  # from when the first session is there
        self.rng = np.random.default_rng(seed)
        self.struck: list[Struck] = []
        self.problems: list[str] = []
        self.bag: list[str] = []
        self.sessions, self.seconds, self.records = 0, 0.0, 0
        # worst of all: degrees beyond a limit, and at once; degrees a second that were told and that
        # were seen; ticks
        self.beyond, self.step, self.told, self.fastest, self.dropped = 0.0, 0.0, 0.0, 0.0, 0

    def run(self) -> None:
        while not self.over:
            self.sessions += 1
            session = _Session(self, self.folder / f"{self.sessions:04d}")
            session.run()
            self.seconds += session.lockstep.now
            say(
                f"{len(self.struck)} of {self.count} faults, {self.sessions} sessions, "
                f"{self.seconds:.0f} virtual s, {len(self.problems)} problems"
            )

    @property
    def over(self) -> bool:
        return len(self.struck) >= self.count or time.perf_counter() > self.until

    def drawn(self) -> str:
        if not self.bag:
            self.bag = [*(_PER_BAG * [*FAULTS]), *ENDING]
            self.rng.shuffle(self.bag)
        return self.bag.pop()


class _Session:
    def __init__(self, campaign: Campaign, folder: Path):
        self.campaign, self.rng = campaign, campaign.rng
        self.folder, self._told = folder, Told()
        self.lockstep = BusSession(folder, campaign.scene)
        self.arm, self.bus = self.lockstep.robot, self.lockstep.robot.bus
        self.lockstep.join("campaign", "viewer", self._hear)
        Person(self.lockstep, self.rng)
        own = self.lockstep.supervisor.session.gate.limits
        self._low, self._high = np.array(own.joint_low), np.array(own.joint_high)
        self._fault: Struck | None = None
        self._until = self._moving_since = math.inf
        self._undo: list[Any] = []
        self._path: list[tuple[float, np.ndarray]] = []
        self._last_motion = 0.0
        self._halted: tuple[float, float] | None = None  # since when, and when it had answered
        self._powered = True
        self._moved, self._settled = self.lockstep.now, 0.0
        self._begun = -1
        self._goal: tuple[float, np.ndarray, bool] = (0.0, np.zeros(5), False)
        campaign.until = min(campaign.until, time.perf_counter() + campaign.wall_s)

    def run(self) -> None:
        margin = 5.0
        policy = Sway(self._low + margin, self._high - margin, self.rng)
        task = Task("lift_cube", "sway", horizon=100_000)
        with contextlib.suppress(Over):
            self.lockstep.run(
                Plan((task,), judged=False), policy, "sway", ActingConfig(), lambda _: None
            )
        recorder = self.lockstep.recorder
        running = recorder is not None and recorder.journal is not None
        self.lockstep.close()
        if running:
            self._compare()
        self.arm.unplug()
        shutil.rmtree(self.folder)

    # --------------------------------------------------------------------------------- what is seen
    def _hear(self, message: Message) -> None:
        self._told.hear(message)
        if isinstance(message, State):
            self._look(message)
        elif isinstance(message, Notice) and message.name in ("end_episode", "discard"):
            self._compare()

    def _compare(self) -> None:
        """The newest record with what was said to the recorder."""
        journals = (self.folder / "session" / "journal").glob(f"*{SUFFIX}")
        episode = read(max(journals, key=lambda path: path.name), pictures=False)
        counts = self._told.against(episode)
        self.campaign.records += sum(n for _, n in counts.values())
        for text in self._told.wrong(counts):
            self._problem(text)

    def _look(self, state: State) -> None:
        now, world = self.arm.now, self.arm.world  # (its own time: a call that lasts is in it)
        self._path = [*self._path[-_WINDOW:], (now, world.told())]
        if self.arm.begun != self._begun:  # it was put elsewhere
            self._begun, self._path, self._settled = (
                self.arm.begun,
                self._path[-1:],
                now + _SETTLED_S,
            )
        (since, before), (_, here) = self._path[0], self._path[-1]
        speed = np.abs(here - before) / max(now - since, 1e-3)
        if len(self._path) <= _WINDOW:
            speed = np.zeros(6)
        if self._powered and now > self._settled:
            self._judge(here, speed, self.lockstep.now, bool(state.reference))
        fastest = float(speed[:5].max())
        self._last_motion = now if fastest > _REST else self._last_motion
        moving = state.mode == "AUTO" and not state.holding
        if self._fault is not None:
            self._follow(self._fault, state, now, moving)
        elif self.campaign.over:
            raise Over
        elif moving and fastest > 5.0:
            self._moving_since = min(self._moving_since, now)
            if now - self._moving_since > self.campaign.every_s:
                self._strike(now, fastest)
        self._moved = now if moving and fastest > _REST else self._moved
        if now - self._moved > _GIVES_UP_S:
            self._problem(f"nothing moved for {_GIVES_UP_S:g} s: {state.mode}, {state.faults}")
            raise Over

    def _judge(self, here: np.ndarray, speed: np.ndarray, now: float, driven: bool) -> None:
        """What its servos were told while somebody drove, and where the arm is. ``now`` is the
        session's: an answer that was late has held up a goal, and the next comes at once."""
        c = self.campaign
        goal = np.array([servo.goal for servo in self.bus.servos])[:5] * 360.0 / STEPS
        before, self._goal = self._goal, (now, goal, driven)
        if before[2] and driven:
            if (goal == before[1]).all():
                self._goal = before  # (a lost one is made up for by the next)
            step = float(np.abs(goal - before[1]).max()) - _ROUNDING
            rate = step / max(now - before[0], 1e-3)
            c.told, c.step = max(c.told, rate), max(c.step, step)
            if step > float(FIRST["joint_step"]):
                self._problem(f"a servo is told to go on by {step:.1f} degrees at once")
            if rate > float(FIRST["joint_speed"]):
                self._problem(f"a servo is told to go at {rate:.0f} degrees a second")
        beyond = float(np.maximum(self._low - here, here - self._high)[:5].max())
        c.beyond, c.fastest = max(c.beyond, beyond), max(c.fastest, float(speed[:5].max()))
        if beyond > _BEYOND:
            self._problem(f"a joint is {beyond:.1f} degrees beyond its limit")
        if limp := [s.id for s in self.bus.servos if not s.holds]:
            c.dropped += 1
            self._problem(f"servos {limp} have let go")

    def _problem(self, text: str) -> None:
        full = f"{text}; {self._fault}"
        if len(self.campaign.problems) < 50:
            self.campaign.problems.append(full)
            say(f"problem: {full}")

    # --------------------------------------------------------------------------------------- faults
    def _strike(self, now: float, speed: float) -> None:
        name = self.campaign.drawn()
        kind = KINDS[name]
        seconds, value = (float(self.rng.uniform(*r)) for r in (kind.seconds, kind.value))
        self._fault = Struck(
            name, round(now, 2), round(seconds, 2), round(value, 3), round(speed, 1)
        )
        self._until = now + seconds
        self.campaign.struck.append(self._fault)
        self._inject(name, seconds, value)

    def _inject(self, name: str, seconds: float, value: float) -> None:
        bus, session, undo = self.bus, self.lockstep, self._undo
        if name in ("policy frozen", "recorder frozen"):
            source = name.split()[0]
            session.silent.add(source)
            undo.append(lambda: session.silent.discard(source))
        elif name == "policy killed":
            session.leave("policy")
        elif name in ("supervisor frozen", "supervisor killed"):
            session.frozen_until = session.now + seconds
        elif name == "unplug":
            self.arm.unplug()
            undo.append(bus.cable.plug)
        elif name in ("lose", "corrupt", "deaf"):
            bus.strike(**{name: value}, seed=int(self.rng.integers(2**31)))
            undo.append(bus.strike)
        elif name == "late":
            self.arm.late_s = value
            undo.append(lambda: setattr(self.arm, "late_s", LATENCY_S))
        elif name in ("sag", "power off"):
            self._powered = name == "sag"
            bus.sag(value)
            undo.append(lambda: bus.sag(VOLTS))
        else:
            bus.overload(int(value) % 6)
            undo.append(lambda: bus.overload(int(value) % 6, on=False))

    def _follow(self, fault: Struck, state: State, now: float, moving: bool) -> None:
        """Until it is over, and the arm has moved on, or the session has ended."""
        if state.reference:
            self._halted = None
        elif self._halted is None:
            self._halted = now, self.arm.heard
        if fault.hold_s is None and self._halted and now - self._halted[0] > _HOLDS_S:
            since, heard = self._halted
            begins = max(fault.at, heard) if fault.kind in ARMS else fault.at
            fault.stopped, fault.hold_s = True, round(max(0.0, since - begins), 3)
            if fault.hold_s > _HOLD_S:
                self._problem("nothing held it for too long")
        if fault.rest_s is None and now - max(self._last_motion, fault.at) > 0.15:
            fault.rest_s = round(max(0.0, self._last_motion - fault.at), 3)
        if now < self._until:
            return
        for end in self._undo:
            end()
        self._undo.clear()
        if fault.kind in ENDING:
            raise Over
        if moving and now > self._until + 0.3:
            fault.moved_on = True
            self._fault, self._halted, self._moving_since = None, None, math.inf


# --------------------------------------------------------------------------------------- success
def _on_the_bus(checkpoint: str, folder: Path, scene: Scene, episodes: int, size: int) -> list[Any]:
    """Each held-out state once; whether it succeeded, and its control steps."""
    from vla_rl.robot.policy import load
    from vla_rl.robot.session import require_same

    session = BusSession(folder, scene, size)
    require_same(session.robot.embodiment, checkpoint)
    decide, version = load(checkpoint, session.robot.embodiment, True, "cpu")
    tasks = tuple(_task(i) for i in range(episodes))
    done: list[Any] = []

    def told(outcome: Outcome) -> None:
        done.append([bool(outcome.success), outcome.steps, outcome.pauses])
        say(f"on the bus: {sum(x[0] for x in done)} of {len(done)}")

    plan = Plan(tasks, episodes, alone=True)
    conductor = session.run(plan, decide, version, ActingConfig(), told)
    session.close()
    session.robot.unplug()
    if conductor.problem:
        say(f"the session ended: {conductor.problem}")
    return done


def _task(number: int) -> Task:
    from sim.so101.tasks import TASKS

    spec = TASKS["lift_cube"].spec
    texts = spec.held_out_instructions
    return Task("lift_cube", texts[number % len(texts)], number, spec.horizon)


def _in_the_env(checkpoint: str, episodes: int, size: int) -> list[Any]:
    """The same of env=so101."""
    from sim.so101.simulator import SO101Config, SO101Simulator
    from vla_rl.robot.policy import load

    simulator = SO101Simulator(SO101Config(camera_size=size))
    decide, _ = load(checkpoint, simulator.embodiment, True, "cpu")
    done: list[Any] = []
    for i in range(episodes):
        episode = EpisodeSpec("lift_cube", i, "held_out", instruction_index=i)
        seen, steps, first = simulator.start(0, episode), 0, True
        while True:
            rows = decide(seen.images, seen.proprio, seen.instruction, first)
            step = simulator.step(0, np.asarray(rows))
            seen, steps, first = step.observation, steps + step.executed, False
            if step.success or step.truncated:
                break
        done.append([bool(step.success), steps, 0])
        say(f"in env=so101: {sum(x[0] for x in done)} of {len(done)}")
    simulator.close()
    return done


def measure(
    checkpoint: str, episodes: int, size: int, faults: int, every: float, seed: int, wall: float
) -> dict[str, Any]:
    """A fault comes ``every`` so many seconds of motion after the one before. They end after
    ``wall`` minutes on the wall's clock, if not before."""
    if not checkpoint and not faults:
        raise ConfigError("--faults 0 without --checkpoint measures nothing: give one of them")
    document: dict[str, Any] = {"seed": seed, "checkpoint": checkpoint, "load": os.getloadavg()[0]}
    scene = Scene()
    with tempfile.TemporaryDirectory(prefix="bus") as place:
        if checkpoint and episodes:
            document["env"] = _in_the_env(checkpoint, episodes, size)
            document["bus"] = _on_the_bus(checkpoint, Path(place) / "s", scene, episodes, size)
        if faults:
            campaign = Campaign(Path(place), scene, faults, seed, every, 60.0 * wall)
            campaign.run()
            document |= _document(campaign)
    scene.close()
    return document


def _document(campaign: Campaign) -> dict[str, Any]:
    rows = []
    for kind in KINDS:
        mine = [s for s in campaign.struck if s.kind == kind]
        counts = {"count": len(mine), "stopped": sum(s.stopped for s in mine)}
        rows.append(
            {"kind": kind, **counts, "moved_on": sum(s.moved_on for s in mine)}
            | {"hold_s": _spread([s.hold_s for s in mine])}
            | {"rest_s": _spread([s.rest_s for s in mine])}
        )
    return {
        "faults": rows,
        "struck": [vars(s) for s in campaign.struck],
        "sessions": campaign.sessions,
        "virtual_s": campaign.seconds,
        "records": campaign.records,
        "most_beyond_deg": campaign.beyond,
        "told_deg_s": campaign.told,
        "most_at_once_deg": campaign.step,
        "fastest_deg_s": campaign.fastest,
        "torque_dropped": campaign.dropped,
        "problems": campaign.problems,
    }


def _spread(seconds: list[float | None]) -> dict[str, float] | None:
    known = [s for s in seconds if s is not None]
    return {"median": float(np.median(known)), "max": max(known)} if known else None


def text(document: Mapping[str, Any]) -> str:
    lines = []
    if "bus" in document:
        for name in ("env", "bus"):
            won = [x[0] for x in document[name]]
            lines.append(f"{name}: {sum(won)} of {len(won)}")
        pairs = [(a[0], b[0]) for a, b in zip(document["env"], document["bus"])]
        alike = sum(a == b for a, b in pairs)
        lines.append(f"the same outcome in {alike} of {len(pairs)} states")
    if "faults" in document:
        rows = [("fault", "struck", "stopped", "moved on", "holds after", "stands still after")]
        for row in document["faults"]:
            words = [
                f"median {row[key]['median']:.2f} s, at most {row[key]['max']:.2f} s"
                if row[key]
                else ""
                for key in ("hold_s", "rest_s")
            ]
            counts = (str(row[name]) for name in ("count", "stopped", "moved_on"))
            rows.append((row["kind"], *counts, *words))
        lines.append(table(rows))
        lines.append(
            f"{document['sessions']} sessions, {document['virtual_s']:.0f} virtual s, "
            f"{document['records']} records; at most "
            f"{document['most_beyond_deg']:.2f} degrees beyond a limit, told at most "
            f"{document['told_deg_s']:.0f} (by {document['most_at_once_deg']:.1f} degrees at once) "
            f"and seen at {document['fastest_deg_s']:.0f} degrees a "
            "second; torque dropped unasked "
            f"{document['torque_dropped']} times; {len(document['problems'])} problems"
        )
    return "\n".join(lines)
