"""Options of a session with an arm: ``vla-rl robot run robot=NAME robot.KEY=VALUE
console.KEY=VALUE checkpoint=...``."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.bounds import Bounded, bound
from vla_rl.config.overrides import dotlist
from vla_rl.config.own_files import searched
from vla_rl.diagnostics import Diagnostic
from vla_rl.errors import ConfigError
from vla_rl.paths import config_dir

# What a learning session logs: {phase of its lines: (what a line stands for, what the report
# draws)}.
SESSION_LOGS = {
    "robot": (
        "episode",
        (
            Diagnostic(
                "robot/autonomous_success",
                "Success without a person",
                "Of the last 20 episodes on the arm, exploring ones; and the share of control "
                "steps that a person chose.",
                share=True,
                beside=("robot/recent_interventions", "succeeded by itself", "a person's steps"),
            ),
            Diagnostic(
                "robot/cycle_seconds",
                "Seconds of an episode",
                "From its begin to its end.",
                smooth=True,
            ),
            Diagnostic(
                "robot/progress_end",
                "What the reward said at the end",
                "The last value of the running episode's curve, before its label; of episodes that "
                "a learned reward watched.",
                share=True,
                smooth=True,
            ),
        ),
    ),
    "judged": (
        "episode",
        (
            Diagnostic(
                "eval/success",
                "Held-out starts",
                "Success of the most likely actions, without help.",
                share=True,
            ),
        ),
    ),
}


@dataclass
class PracticeSettings(Bounded, place="robot.practice"):
    """``reset`` is the task that undoes the others, and follows each; "": a person or the simulator
    puts things back.

    ``checkpoint``: a policy of its own for it, which is not trained (empty: the session's). A
    person is asked after ``failures`` resets in a row, and where the hand leaves the box from
    ``low`` to ``high`` (m). A reward that says at least ``confident`` twice running has seen a
    success (0: it decides nothing).
    """

    reset: str = ""
    checkpoint: str = ""
    # resets in a row that fail before a person is asked
    failures: int = bound(3, ge=1)
    # lower corner of the box that the hand stays in, metres; empty: none
    low: list[float] = field(default_factory=list)
    # upper corner, metres
    high: list[float] = field(default_factory=list)
    confident: float = bound(0.0, ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reset and (self.checkpoint or self.low or self.high or self.confident):
            raise ConfigError("robot.practice.reset is empty: name the task that undoes the others")


@dataclass
class ReturnsSettings(Bounded, place="robot.returns"):
    """``share`` of the episodes (below 1; 0: none) begin where an earlier one failed or needed
    help. After ``shown`` failures running from one start a person is asked to show it (0: never);
    it is done with after ``mastered`` successes running without help."""

    share: float = bound(0.0, ge=0, lt=1)
    # failures in a row from one start after which a person shows it; 0: never
    shown: int = bound(3, ge=0)
    # successes in a row without help after which it is done with
    mastered: int = bound(2, ge=1)


@dataclass
class RobotSettings(Bounded, place="robot"):
    """A simulated arm (``world``) or a driver ("module:Class"), with ``options``; see
    `real.body.BodyConfig`.

    ``limits`` is a file, as such or inside the config folder. ``acting``, ``steps``, ``valid_s``,
    ``ensemble_decay`` and ``rtc_...``: see `real.acting.ActingConfig`. ``horizon`` (control steps)
    ends an episode, 0: the task's own, which are 2.5 times as many where a person helps (``robot
    learn``, ``operator``). ``tasks`` are done in turn: those of the world where it is empty; an
    instruction where there is no world. ``practice``: without a person; ``returns``: to where it
    failed. ``score_every``: control steps between two scores of the episode that runs, by the
    reward that was asked for. ``camera_device`` realsense: a simulated arm's pictures go through
    that SDK's software device.
    """

    # a simulated arm: fake, tabletop or so101
    world: str = ""
    # package.module:Class of a real arm's driver
    driver: str = ""
    # of the driver or the world
    options: dict[str, Any] = field(default_factory=dict)
    # faults of the simulated arm, for tests
    defects: dict[str, Any] = field(default_factory=dict)
    # the file of the arm's limits; required
    limits: str = ""
    # of the supervisor: `SupervisorConfig` below
    supervisor: dict[str, Any] = field(default_factory=dict)
    # ticks of the simulated arm a second
    arm_hz: float = bound(100.0, gt=0)
    # pictures of the simulated cameras a second
    camera_hz: float = bound(20.0, gt=0)
    camera_device: str = ""
    # the supervisor's SCHED_FIFO priority; 0: an ordinary process
    real_time: int = 0
    # synchronous | asynchronous | ensemble | rtc: how chunks meet
    acting: str = "synchronous"
    # control steps of a chunk that are run before the next is due; 0: all, with ensemble 1, else
    # half
    steps: int = 0
    # seconds after it was sent by which a chunk must have begun, or it is void
    valid_s: float = 0.3
    # m of the weights exp(-m i) of an ensemble's chunks
    ensemble_decay: float = 0.01
    # largest factor of the guidance of rtc
    rtc_guidance: float = 5.0
    # how the weights of that guidance fall: see `real.acting`
    rtc_schedule: str = "exp"
    horizon: int = bound(0, ge=0)
    tasks: list[str] = field(default_factory=list)
    score_every: int = bound(4, ge=1)
    practice: PracticeSettings = field(default_factory=PracticeSettings)
    returns: ReturnsSettings = field(default_factory=ReturnsSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.practice.reset and self.returns.share:
            raise ConfigError(
                f"robot.returns.share={self.returns.share}: in practice nobody puts things back, "
                "so that an episode begins where the one before ended. Leave out robot.returns or "
                "robot.practice"
            )
        if bool(self.world) == bool(self.driver):
            raise ConfigError(
                f"robot.world={self.world!r} and robot.driver={self.driver!r}: give one of them"
            )


@dataclass
class OperatorSettings(Bounded, place="operator"):
    """A scripted operator takes over after ``patience_s`` without ``gain`` of the task's progress
    (0 to 1), and a reaction; hands back once it has brought ``help_gain`` of it, or after
    ``longest_s``. Its hand moves at ``speed`` times the expert's motion, ``lag_s`` late and with
    ``noise``."""

    # seconds without progress before it takes over
    patience_s: float = bound(1.0, gt=0)
    # progress (0 to 1) that counts as some
    gain: float = 0.02
    # progress that it brings before it hands back
    help_gain: float = 0.4
    # seconds after which it hands back anyway
    longest_s: float = bound(5.0, gt=0)
    # share of the expert's speed
    speed: float = bound(0.5, gt=0, le=1)
    # seconds that its hand is late
    lag_s: float = 0.15
    # of its hand's motion
    noise: float = 0.15
    # median of its reaction time, seconds
    reaction_median_s: float = 0.5
    # of its reactions and its noise
    seed: int = 0

    @classmethod
    def of(cls, overrides: Sequence[str]) -> OperatorSettings:
        """From ``operator.KEY=VALUE``; ``operator=stuck`` takes the defaults."""
        keys = [o.removeprefix("operator.") for o in overrides if o.startswith("operator.")]
        if wrong := [
            o for o in overrides if not o.startswith("operator.") and o != "operator=stuck"
        ]:
            raise ConfigError(
                f"{wrong[0]!r}: there is operator=stuck, and its keys as operator.KEY=VALUE"
            )
        return checked_options(cls, keys, "operator.")


@dataclass
class SessionSettings:
    """``checkpoint`` empty: the newest of the quickstart's. ``name`` empty: the time.
    ``deterministic`` policies act with their most likely action. ``threads`` are torch's in the
    policy's process (0: its own choice). ``reward`` are the overrides of the reward that scores
    each episode as it runs (none: nobody does). ``cameras`` {name: options}
    (`real.cameras.process.CameraConfig`) run beside the robot's own, each in its process.
    ``operator`` None: nobody is played. ``teleop``: a person's device beside the console's
    (`real.teleop.process.TeleopConfig`)."""

    robot: RobotSettings
    cameras: dict[str, Any] = field(default_factory=dict)
    # of the console: `ConsoleConfig` below
    console: dict[str, Any] = field(default_factory=dict)
    checkpoint: str = ""
    name: str = ""
    # the folder that sessions are kept in
    output_dir: str = "outputs/robot"
    deterministic: bool = True
    # of the policy: "auto", "cpu", "cuda"
    device: str = "auto"
    threads: int = 0
    reward: list[str] = field(default_factory=list)
    operator: OperatorSettings | None = None
    teleop: str = ""
    # of that device
    teleop_options: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / (self.name or time.strftime("%Y-%m-%d_%H-%M-%S"))


def compose(overrides: Sequence[str], moves: bool = True) -> SessionSettings:
    """The settings that the overrides ask for; one that ``moves`` needs limits. Raises
    `ConfigError` that names the key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    wrong = [o for o in overrides if "=" not in o or o.startswith("=")]
    if wrong:
        raise ConfigError(
            f"{wrong[0]!r} is no key=value, such as robot=fake, "
            "robot.acting=asynchronous or checkpoint=PATH"
        )
    chosen = [o.partition("=")[2] for o in overrides if o.startswith("robot=")]
    reward = [o for o in overrides if o.startswith(("reward=", "reward."))]
    operator = [o for o in overrides if o.startswith("operator")]
    overrides = [o for o in overrides if o not in operator]
    overrides = [re.sub(r"^teleop\.", "teleop_options.", o) for o in overrides]
    # cameras.NAME=TYPE
    overrides = [re.sub(r"^(cameras\.\w+)=(?!\{)", r"\1.type=", o) for o in overrides]
    # (no octal number)
    overrides = [re.sub(r"^(cameras\.\w+\.serial)=(\w+)$", r"\1='\2'", o) for o in overrides]
    try:
        robot = dict(OmegaConf.load(_robot_file(chosen[-1] if chosen else "tabletop")))
        for key, long in robot.pop("short", {}).items():
            overrides = [re.sub(rf"^robot\.{key}=", f"robot.{long}=", o) for o in overrides]
        given = dotlist([o for o in overrides if not o.startswith("robot=") and o not in reward])
        tree = OmegaConf.to_container(OmegaConf.merge({"robot": robot}, given), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the overrides {' '.join(overrides)} cannot be read: {error}") from None
    assert isinstance(tree, dict)
    values: dict[str, Any] = {str(k): v for k, v in tree.items()}
    for part, kind in (("practice", PracticeSettings), ("returns", ReturnsSettings)):
        if part in values["robot"]:
            values["robot"][part] = _checked(kind, values["robot"][part], f"robot.{part}.")
    values["robot"] = _checked(RobotSettings, values["robot"], "robot.")
    values["reward"] = reward
    if operator:
        values["operator"] = OperatorSettings.of(operator)
    settings: SessionSettings = _checked(SessionSettings, values, "")
    if moves:
        settings.robot.limits = str(limits_file(settings.robot.limits))
    return settings


def _robot_file(name: str) -> Path:
    if name.endswith(".yaml") and Path(name).is_file():
        return Path(name)
    known = {
        p.stem: p
        for folder in (*searched(), config_dir())
        for p in sorted((folder / "robot").glob("*.yaml"))
    }
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"there is no robot {name!r}: use one of {', '.join(sorted(known))}, or a file.{hint}"
        )
    return known[name]


def limits_file(name: str) -> Path:
    """Raises `ConfigError` where there is none: no robot moves without limits."""
    if not name:
        raise ConfigError(
            "robot.limits is empty: no robot moves without limits. Write a file with this robot's "
            f"own, like {config_dir() / 'limits' / 'tabletop.yaml'}, and name it"
        )
    for place in (Path(name), config_dir() / name):
        if place.is_file():
            return place
    raise ConfigError(
        f"robot.limits={name}: there is no such file, and no robot moves without its limits"
    )


def checked_options(kind: type[Any], keys: Sequence[str], place: str) -> Any:
    """``KEY=VALUE`` of one dataclass whose keys stand at ``place``. Raises `ConfigError` that
    names the key."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(dotlist(keys), resolve=True)
    return _checked(kind, values, place)


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}


def _checked(kind: Any, values: Any, place: str) -> Any:
    """``values`` as the dataclass ``kind``."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{place.rstrip('.')} is {values!r}, and keys are expected, such as {place}limits=FILE"
        )
    fields = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f" Did you mean {place}{close[0]}?" if close else ""
            raise ConfigError(
                f"there is no key {place}{name}.{hint} Known are "
                f"{', '.join(place + n for n in fields)}"
            )
        nested = (RobotSettings, PracticeSettings, ReturnsSettings, OperatorSettings)
        other = (dict,) if fields[name].startswith("dict") else (list, kind, *nested)
        expected = _KINDS.get(fields[name], other)
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            raise ConfigError(
                f"{place}{name}={value!r} is of the wrong type: {fields[name]} is expected"
            )
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(x, float) and not math.isfinite(x) for x in parts):
            raise ConfigError(f"{place}{name}={value} is not finite: give a number")
    return kind(**values)
