"""``vla-rl bench soak``: hours of sessions in virtual time with a random fault every half minute;
what they left behind.

World, supervisor, policy, operator, console and recorder take turns in one process
(`real.lockstep`), so that two hours take minutes; what needs a wall clock (lateness, links that
fill up, processes that are killed) is `vla-rl bench robot`'s. Judged is what is independent of the
code that is judged: the simulator's own log, and a count of all that was said to the recorder.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import say, table
from benchmarks.robot.gate import SMALL, Judge, limits_of
from benchmarks.robot.people import CONSOLE, MoodyPolicy, Person
from real import limits as limit_files
from real.acting import ActingConfig
from real.body import BodyConfig
from real.episodes import Plan
from real.journal import OPEN, SUFFIX, Episode, read, recover
from real.lockstep import OPERATOR, Lockstep
from real.messages import Message, Notice, State
from real.tasks import Task
from real.teleop.coached import WorldExpert
from real.teleop.scripted import OperatorConfig, ScriptedOperator, Stuck
from real.verify import check
from vla_rl.errors import ConfigError

Range = tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """How long a fault lasts (s), how strong it is, and in which modes it strikes (empty: any in
    which something moves)."""

    seconds: Range = (0.0, 0.0)
    value: Range = (0.0, 0.0)
    modes: tuple[str, ...] = ("AUTO", "HUMAN")


_HUMAN, _AUTO = ("HUMAN",), ("AUTO",)
ARM = {  # of `real.robots.faults`
    "reflex": Kind(),
    "power": Kind((0.3, 2)),
    "silent": Kind((0.2, 2)),
    "drop": Kind((0.5, 3), (0.3, 1)),
    "latency": Kind((0.5, 3), (0.05, 0.3)),
    "force": Kind((0.2, 1), (10, 80)),
    "clock": Kind((0.3, 2), (0.1, 1)),
    "gripper": Kind((1, 3)),
    "camera_freeze": Kind((0.2, 2)),
    "camera_late": Kind((0.5, 2), (0.05, 0.5)),
    "camera_twice": Kind((0.5, 2)),
    "camera_gap": Kind((0.5, 2), (0.3, 0.9)),
    "camera_lost": Kind((0.2, 2)),
}
PEOPLE = {
    "policy hangs": Kind((0.1, 3), modes=_AUTO),
    "policy late": Kind((1, 3), (0.15, 0.6), _AUTO),
    "policy says NaN": Kind((0.5, 3), modes=_AUTO),
    "operator hangs": Kind((0.2, 2), modes=_HUMAN),
    "operator lost": Kind((0.5, 3), modes=_HUMAN),
    "e-stop": Kind((0.5, 3)),
    "stop": Kind(),
    "console gone": Kind((1, 3)),
}
# of a session
ENDING = {"policy killed": Kind((1.2, 1.2), modes=_AUTO), "recorder killed": Kind((0.5, 0.5))}
KINDS = ARM | PEOPLE | ENDING
DEFECTS = {"command_jitter": 0.004, "drop": 0.01, "drift": 0.001, "gripper_lag": 0.1}  # always
BAD = ("FAULT", "STOPPED", "PAUSED", "IDLE")
# what moves the arm without the supervisor: violations are counted apart
PUSHES = ("force", "power")
GROWN = 1.1  # no more may memory grow by, from the middle to the end
HANG_S, SETTLED_S, STILL_S = 60.0, 2.0, 0.5  # STILL_S: nobody followed for so long has stopped
_PER_BAG = 4  # of each kind that ends no session, for one of each that does


class Over(Exception):
    """The session ends here."""


@dataclass
class Struck:
    """One fault. ``at`` counts the seconds of all sessions, ``moved_on_s`` from it until the arm
    was followed again (0: it never stopped; None: the session ended)."""

    kind: str
    at: float
    seconds: float
    value: float
    mode: str
    stopped: bool = False
    moved_on_s: float | None = None


class Told:
    """What was said to a recorder since an episode began, to be held against what it wrote."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def hear(self, message: Message) -> None:
        if message.kind in ("state", "chunk", "frame", "event", "notice"):
            self.counts[message.kind] += 1
        if isinstance(message, Notice) and message.name == "begin":
            self.counts = Counter({"notice": 1})

    def against(self, episode: Episode) -> dict[str, tuple[int, int]]:
        """{kind: how many were told, and recorded}."""
        found = {
            "state": len(episode.ticks),
            "chunk": len(episode.chunks),
            "frame": sum(map(len, episode.frames.values())),
            "event": len(episode.events),
            "notice": len(episode.notices),
        }
        return {name: (self.counts[name], n) for name, n in found.items()}

    @staticmethod
    def wrong(counts: Mapping[str, tuple[int, int]]) -> list[str]:
        """What differs of them, in words."""
        return [
            f"{told} {name}s were told, {n} recorded"
            for name, (told, n) in counts.items()
            if n != told
        ]


class Soak:
    """``minutes`` of virtual time, a fault every ``every`` seconds."""

    def __init__(self, config: BodyConfig, folder: Path, minutes: float, every: float, seed: int):
        self.config, self.folder, self.seconds, self.every = config, folder, 60.0 * minutes, every
        self.rng = np.random.default_rng(seed)
        self.struck: list[Struck] = []
        self.problems: list[str] = []
        self.sessions = 0
        self.counts: Counter[str] = Counter()  # episodes, records and what became of them
        self.refused: Counter[str] = Counter()
        self.longest_still = 0.0
        # virtual seconds, resident bytes, open files
        self.memory: list[tuple[float, int, int]] = []
        self.judges: dict[str, Any] = {}
        self.until = math.inf  # on the wall's clock
        self.past = 0.0  # virtual seconds of the sessions before
        self.bag: list[str] = []  # the kinds that are to come, the next one last

    def run(self) -> None:
        began = time.perf_counter()
        while not self.is_over(0.0):
            session = _Session(self)
            try:
                session.run()
            finally:
                self.past += session.lockstep.now
                session.close()
            say(
                f"{self.past / 60:.1f} of {self.seconds / 60:.0f} min, {len(self.struck)} faults, "
                f"{self.counts['episodes']} episodes, {len(self.problems)} problems, "
                f"{time.perf_counter() - began:.0f} s"
            )

    def is_over(self, now: float) -> bool:
        return self.past + now >= self.seconds or time.perf_counter() > self.until

    def fill(self) -> None:
        if not self.bag:
            self.bag = [*(_PER_BAG * [*ARM, *PEOPLE]), *ENDING]
            self.rng.shuffle(self.bag)

    def look(self, now: float) -> None:
        """Memory and open files."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.memory.append(
            (now, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")))
        )

    def conclude(self) -> None:
        """What only the whole shows."""
        exceeded = {name: count for name, count in self.judges["own"].kinds.items() if count}
        if exceeded:
            self.problems.append(f"limits were exceeded in the simulator's own log: {exceeded}")
        (_, middle, files), (_, end, left) = self.memory[len(self.memory) // 2], self.memory[-1]
        if end > GROWN * middle or left > files:
            self.problems.append(
                f"it grew from the middle on: {middle} to {end} bytes, {files} to {left} open files"
            )


class _Session:
    """One session, from its begin until something ends it."""

    def __init__(self, soak: Soak):
        soak.sessions += 1
        self.soak, self.rng = (
            soak,
            np.random.default_rng([int(soak.rng.integers(2**31)), soak.sessions]),
        )
        self.folder = soak.folder / f"{soak.sessions:04d}"
        self.lockstep = Lockstep(self.folder, soak.config, thinking_s=0.02)
        world = self.lockstep.world
        self.policy, self.person = MoodyPolicy(world, self.rng), Person(self.lockstep, self.rng)
        self.operator = WorldExpert(world, 0.5)
        self.lockstep.join("soak", "viewer", self._hear)
        self._watch()
        self._told = Told()
        self._camera_faults, self._camera_until = False, 0.0  # whether one was in this episode
        self._fault: Struck | None = None
        self._due = self._waited = self.lockstep.now + soak.every
        self._until = 0.0  # the fault lasts
        self._undo: Callable[[], None] = lambda: None
        self._followed = self.lockstep.now  # last
        self._bad: float | None = None  # last, since the fault struck
        self._begun = 0
        limits = limit_files.load(
            soak.config.limits,
            self.lockstep.robot.limits,
            limit_files.needed("cartesian", False, True),
        )
        if not soak.judges:
            soak.judges = {"own": Judge(limits), "pushed": Judge(limits)}
        self._pushed, self._pushed_until = False, 0.0

    def run(self) -> None:
        known = self.lockstep.world.tasks
        tasks = tuple(
            Task(name, task["instruction"], horizon=task["horizon"]) for name, task in known.items()
        )
        kind = ("synchronous", "asynchronous", "ensemble")[self.soak.sessions % 3]
        plan = Plan(tasks)
        with contextlib.suppress(Over):
            self.lockstep.run(
                plan, self.policy, f"soak-{kind}", ActingConfig(kind), lambda outcome: None
            )

    def close(self) -> None:
        soak, recorder = self.soak, self.lockstep.recorder
        running = recorder is not None and recorder.journal is not None
        self.lockstep.close()
        if running:
            self._check(self._newest())
        soak.refused.update(self.lockstep.supervisor.session.refused)
        if not any((self.folder / "journal").glob("*")):  # (what is wrong stays)
            shutil.rmtree(self.folder, ignore_errors=True)

    # -------------------------------------------------------------------------------- every message
    def _hear(self, message: Message) -> None:
        if self.lockstep.recorder is not None:
            self._told.hear(message)
        if isinstance(message, Notice):
            self._notice(message)
        elif isinstance(message, State):
            self._tick(message)

    def _notice(self, n: Notice) -> None:
        if n.name == "begin":
            self._camera_faults = self._camera_fault
            self.policy.begin("stuck" if self._wants_help else "")
        elif n.name in ("end_episode", "discard") and self.lockstep.recorder is not None:
            self._check(self._newest())

    @property
    def _camera_fault(self) -> bool:
        return self.lockstep.now < self._camera_until

    @property
    def _wants_help(self) -> bool:
        """Whether the next fault is waiting for a person to drive."""
        bag = self.soak.bag
        return (
            self._fault is None
            and bool(bag)
            and KINDS[bag[-1]].modes == _HUMAN
            and self.lockstep.now >= self._due - 5.0
        )

    def _tick(self, state: State) -> None:
        now = self.lockstep.now
        self._judge(now)
        self._camera_faults |= self._camera_fault
        if state.mode in ("AUTO", "HUMAN") and not state.holding:
            self._followed = now
        still = now - self._followed
        self.soak.longest_still = max(self.soak.longest_still, still)
        if still > HANG_S:
            self._problem(
                f"nothing has moved for {still:.0f} s: {state.mode}, "
                f"{', '.join(state.faults)}; {self._fault}"
            )
            raise Over
        if self._fault is not None:
            self._follow(self._fault, state, now)
        elif self.soak.is_over(now):
            raise Over
        elif now >= self._due:
            self._strike(state, now)

    def _judge(self, now: float) -> None:
        robot = self.lockstep.robot
        if robot.begun != self._begun:  # it was put elsewhere
            self._begun = robot.begun
            for judge in self.soak.judges.values():
                judge.anew(robot)
            self._pushed &= now < self._pushed_until
        judge = self.soak.judges["pushed" if self._pushed else "own"]
        judge.look(robot)
        self._pushed &= now < self._pushed_until or judge.room < 0.0  # and where it was left

    # --------------------------------------------------------------------------------------- faults
    def _strike(self, state: State, now: float) -> None:
        soak = self.soak
        soak.fill()
        kind = KINDS[soak.bag[-1]]
        if state.holding or state.mode not in kind.modes:
            if kind.modes == _HUMAN and state.mode == "AUTO" and self.policy.mood != "stuck":
                self.policy.begin("stuck")
            if now - self._due < HANG_S:
                return
        name = soak.bag.pop()
        seconds, value = (float(self.rng.uniform(*r)) for r in (kind.seconds, kind.value))
        self._fault = Struck(
            name, round(soak.past + now, 2), round(seconds, 2), round(value, 3), state.mode
        )
        self._until, self._bad = now + seconds, None
        soak.struck.append(self._fault)
        soak.look(soak.past + now)
        self._undo = self._inject(name, seconds, value)

    def _inject(self, name: str, seconds: float, value: float) -> Callable[[], None]:
        """Returns what ends it."""
        session, person = self.lockstep, self.person
        if name in ARM:
            session.robot.inject(name, seconds, value)
            if name.startswith("camera"):
                self._camera_until = self._until + 1.0  # (late pictures still come)
            if name in PUSHES:
                self._pushed, self._pushed_until = True, self._until + 0.5
        elif name == "policy late":
            session.thinking_s = value
            return lambda: setattr(session, "thinking_s", 0.02)
        elif name == "policy says NaN":
            self.policy.breaks = True
            return lambda: setattr(self.policy, "breaks", False)
        elif name in ("policy hangs", "operator hangs"):
            source = OPERATOR if name == "operator hangs" else "policy"
            session.silent.add(source)
            return lambda: session.silent.discard(source)
        elif name == "operator lost":
            session.leave(OPERATOR)
            return self._watch
        elif name in ("e-stop", "stop"):
            person.estop(seconds) if name == "e-stop" else person.stop()
        elif name == "console gone":
            session.silent.add(CONSOLE)
            return lambda: session.silent.discard(CONSOLE)
        elif name == "policy killed":
            session.leave("policy")
        elif name == "recorder killed":
            self._kill_recorder()
        return lambda: None

    def _watch(self) -> None:
        """A person with a device comes."""
        rule = Stuck(self.operator, patience_s=1.0, help_gain=0.5)
        config = OperatorConfig(seed=int(self.rng.integers(2**31)), reaction_median_s=0.3)
        self.lockstep.watched(ScriptedOperator(self.operator, rule, config))

    def _kill_recorder(self) -> None:
        """Its file stays as it is; the session's next start recovers it."""
        session, recorder = self.lockstep, self.lockstep.recorder
        session.recorder = None
        session.leave("recorder")
        if recorder is not None and recorder.journal is not None:
            os.close(recorder.journal._fd)
            if (closed := recover(self._newest(OPEN))) is not None:
                self._check(closed, killed=True)

    def _follow(self, fault: Struck, state: State, now: float) -> None:
        """Until it is over, and the arm is followed again."""
        bad = state.mode in BAD or now - self._followed > STILL_S
        if bad and (now < self._until + SETTLED_S or self._bad is not None):
            self._bad = now
        if now < self._until:
            return
        self._undo()
        self._undo = lambda: None
        if fault.kind in ENDING:
            fault.stopped = (
                not state.policy
                if fault.kind == "policy killed"
                else state.holding or state.mode in BAD
            )
            if not fault.stopped:
                self._problem(f"{fault}: the arm goes on")
            raise Over
        if now < self._until + SETTLED_S and self._bad is None:
            return
        if self._bad is None:
            fault.moved_on_s = 0.0
        elif state.mode in ("AUTO", "HUMAN") and not state.holding:
            fault.stopped, fault.moved_on_s = True, round(now - (fault.at - self.soak.past), 2)
        else:
            return
        self._fault, self._due = None, max(now, self._due + self.soak.every)

    # -------------------------------------------------------------------------------------- records
    def _newest(self, suffix: str = "") -> Path:
        return max(
            (self.folder / "journal").glob(f"*{SUFFIX}{suffix}"),
            key=lambda path: path.stat().st_mtime_ns,
        )

    def _check(self, path: Path, killed: bool = False) -> None:
        """Hold a closed episode against what was told; keep it only where something is wrong."""
        soak, episode = self.soak, read(path, pictures=False)
        counts = self._told.against(episode)
        wrong = self._told.wrong(counts)
        soak.counts["lost"] += sum(abs(n - told) for told, n in counts.values())
        cameras = tuple(f"{name}: " for name in episode.frames)
        for text in check(episode):
            if text.startswith(cameras) and self._camera_faults and "were not recorded" not in text:
                soak.counts["gaps of pictures that verify names"] += 1
            elif not (killed and text.startswith("recovered after a kill")):
                wrong.append(text)
        for text in wrong:
            self._problem(f"{path.parent.parent.name}/{path.name}: {text}")
        soak.counts.update(
            episodes=1,
            recovered=int(killed),
            records=sum(n for _, n in counts.values()),
            ticks=len(episode.ticks),
        )
        labels = [e["value"] for e in episode.events if e["name"] == "label"]
        soak.counts["successes"] += labels[-1:] == ["success"]
        soak.counts["human_ticks"] += sum(tick["is_human"] for tick in episode.ticks)
        if not wrong:
            path.unlink()

    def _problem(self, text: str) -> None:
        self.soak.problems.append(text)
        say(f"problem: {text}")


def measure(
    world: str,
    limits: Path | None,
    minutes: float,
    wall: float,
    every: float,
    seed: int,
    keep: Path | None,
) -> dict[str, Any]:
    """``keep``: a folder that keeps what is wrong; else it is a temporary one. After ``wall``
    minutes on the wall's clock it ends earlier."""
    if not (minutes > 0 and every > 0):
        raise ConfigError(f"--minutes {minutes:g} --every {every:g}: give more than 0")
    file = limits_of(world, limits)
    options = {"tasks": ["lift_cube"], **SMALL[world]} if world in SMALL else {}
    config = BodyConfig(
        limits=str(file),
        world=world,
        options=options,
        defects=DEFECTS | {"seed": seed},
        camera_hz=20.0,
        supervisor={
            "required": ["guard", "recorder"],
            "cameras": options.get("cameras", ["front"]),
        },
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="soak") as place:
        soak = Soak(config, keep or Path(place), minutes, every, seed)
        soak.until = began + 60.0 * wall
        soak.run()
        soak.look(soak.past)
        soak.conclude()
    return _document(soak) | {
        "world": world,
        "seed": seed,
        "every_s": every,
        "wall_s": time.perf_counter() - began,
    }


def _document(soak: Soak) -> dict[str, Any]:
    def row(kind: str) -> dict[str, Any]:
        mine = [s for s in soak.struck if s.kind == kind]
        times = [s.moved_on_s for s in mine if s.moved_on_s]
        return {
            "kind": kind,
            "count": len(mine),
            "stopped": sum(s.stopped for s in mine),
            "moved_on_s": {"median": float(np.median(times)), "max": max(times)} if times else None,
        }

    judged = {
        name: {
            "violations": j.kinds,
            "nearest_m_or_rad": j.nearest,
            "fastest": j.fastest(),
            "braking_m": j.braking,
        }
        for name, j in soak.judges.items()
    }
    at = [0, len(soak.memory) // 2, -1]
    memory = {name: soak.memory[i] for name, i in zip(("start", "middle", "end"), at)}
    return {
        "virtual_minutes": soak.past / 60,
        "sessions": soak.sessions,
        "faults": [row(kind) for kind in KINDS],
        "struck": [vars(s) for s in soak.struck],
        "counts": dict(soak.counts),
        "longest_standstill_s": soak.longest_still,
        "limits": judged,
        "refused": dict(soak.refused),
        "problems": soak.problems,
        "load": os.getloadavg()[0],
        "memory": {
            n: {"virtual_s": t, "rss_bytes": b, "open_files": f} for n, (t, b, f) in memory.items()
        },
        "rss_peak_bytes": max(b for _, b, _ in soak.memory),
    }


def text(document: Mapping[str, Any]) -> str:
    rows = [("fault", "struck", "stopped", "until motion went on")]
    for row in document["faults"]:
        took = row["moved_on_s"]
        shown = f"median {took['median']:.1f} s, at most {took['max']:.1f} s" if took else ""
        rows.append((row["kind"], str(row["count"]), str(row["stopped"]), shown))
    c, own, pushed = (
        document["counts"],
        *(document["limits"][name]["violations"] for name in ("own", "pushed")),
    )
    memory = [document["memory"][name] for name in ("start", "middle", "end")]
    mib = " / ".join(f"{each['rss_bytes'] / 2**20:.1f}" for each in memory)
    files = " / ".join(str(each["open_files"]) for each in memory)
    return "\n".join(
        [
            table(rows),
            f"{document['virtual_minutes']:.0f} virtual minutes in {document['wall_s'] / 60:.1f}, "
            f"{document['sessions']} sessions, longest standstill "
            f"{document['longest_standstill_s']:.1f} s",
            f"{c['episodes']} episodes ({c['recovered']} recovered), {c['records']} records, "
            f"{c['lost']} lost",
            f"limits exceeded in the simulator's own log: {sum(own.values())} ({own}); while it "
            f"was pushed or without power: {sum(pushed.values())}",
            f"memory at start / middle / end {mib} MiB, open files {files}",
            f"{len(document['problems'])} problems",
        ]
    )
