"""``vla-rl robot run`` and ``teach``: starts what a session is made of, leads it through its
episodes, ends everything.

The arm and who watches it are up before a policy is; whatever goes wrong, the supervisor brings the
arm to rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl import build
from vla_rl.config.robot import SessionSettings
from vla_rl.errors import ConfigError, UserError
from vla_rl.files import check_checkpoint
from vla_rl.hub import located
from vla_rl.paths import is_address
from vla_rl.robot.operator import make_operator, start_operator
from vla_rl.specs import EmbodimentSpec

QUICKSTART = Path("outputs") / "quickstart" / "checkpoints"
_CHOICES = ("best", "rl", "sft")
HEARS_S = 0.1
HELPED = 2.5  # so that lift_cube's 80 control steps are the 200 of docs/results/robot.md


@dataclass(frozen=True)
class SessionRequest:
    """What the command line asks for besides the settings. ``episodes`` 0: until Ctrl-C.
    ``learns``: from episodes that a person helps."""

    episodes: int = 0
    policy: bool = True
    console: bool = True
    lockstep: bool = False
    learns: bool = False


def default_checkpoint() -> Path:
    """The newest of a quickstart's checkpoints. Raises `UserError` that says how to make one."""
    found = [p for name in _CHOICES if ((p := QUICKSTART / name) / "config.json").is_file()]
    if not found:
        raise UserError(
            f"there is no policy: {QUICKSTART} holds none of {', '.join(_CHOICES)}. Make one with "
            "`vla-rl quickstart`, name one with checkpoint=FOLDER, or leave it out with "
            "--no-policy and drive the arm yourself"
        )
    return max(found, key=lambda path: (path / "config.json").stat().st_mtime)


@contextlib.contextmanager
def private() -> Iterator[None]:
    """What is written meanwhile, and by what is started, is nobody else's to read: tokens, and
    pictures of a room."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@private()
def run(
    settings: SessionSettings, request: SessionRequest, say: Callable[[str], None] = print
) -> Path:
    """Returns the session's folder. Raises `UserError` where it cannot start, or came to an end
    that nobody wanted."""
    checkpoint = None
    if request.policy:
        checkpoint = located(settings.checkpoint) or str(default_checkpoint())
        if not is_address(checkpoint):
            check_checkpoint(Path(checkpoint))
        acting_config(settings)
    possible(settings, request)
    folder = settings.folder
    if (folder / "journal").exists():
        raise UserError(f"{folder} holds a session already: choose another name=")
    reward = reward_config(settings)
    (run_lockstep if request.lockstep else run_processes)(
        settings, request, checkpoint, folder, reward, say
    )
    return folder


def possible(settings: SessionSettings, request: SessionRequest) -> None:
    """Raises `ConfigError` for a session that nobody could watch, drive or end."""
    if request.lockstep and (settings.robot.driver or settings.cameras):
        raise ConfigError(
            "--lockstep is virtual time: only a simulated arm has that, not robot.driver or cameras"
        )
    if not request.console and settings.robot.driver:
        raise ConfigError(
            "--headless lets the session start by itself, which only a simulated arm "
            "may: leave it out"
        )
    if not request.policy and (not request.console or request.lockstep):
        raise ConfigError(
            "without a policy somebody has to drive: leave out --headless and --lockstep"
        )
    if settings.operator is not None and (settings.robot.driver or not request.policy):
        raise ConfigError(
            "operator.* plays a person who helps a policy, and who knows what a simulated world "
            "knows: it goes neither with robot.driver nor with --no-policy. Leave it out, and help "
            "or drive in the console"
        )
    if settings.teleop_options and not settings.teleop:
        raise ConfigError(
            "teleop.* are options of a device: name it, as teleop=spacemouse or teleop=lerobot"
        )
    if settings.teleop:
        if not request.console or settings.operator is not None:
            raise ConfigError(
                f"teleop={settings.teleop} is a person's: the console is where one labels and "
                "hands back. Leave out --headless, --lockstep and operator.*"
            )
        kind = build.attribute("real.teleop.process:TeleopConfig")
        kind(settings.teleop, settings.teleop_options).make(())  # its options are right
    if request.lockstep and not request.episodes:
        raise ConfigError(
            "--lockstep runs as fast as it can, with nobody watching: say how long "
            "with --episodes N"
        )


# ------------------------------------------------------------------------------------- in real time
def run_processes(
    settings: SessionSettings,
    request: SessionRequest,
    checkpoint: str | None,
    folder: Path,
    reward: Any,
    say: Callable[[str], None],
) -> None:
    """Each part in a process of its own, until the episodes are done, Ctrl-C, or one of them ends.

    SIGINT ends it even where the shell that started it had it ignored, as it does for background
    jobs: an arm moves.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    body = build.attribute("real.body:Body")(folder, body_config(settings))
    with body:
        say(f"session {folder}; end it with Ctrl-C, at once with a second one")
        about = json.loads((body.run / "robot.json").read_text(encoding="utf-8"))
        embodiment = EmbodimentSpec.from_dict(about["embodiment"])
        judge = build.attribute("real.robots.remote:Judge")(body.arm_socket)
        with contextlib.closing(judge):
            plan = make_plan(settings, request, judge.tasks)
            start_person(body, settings, embodiment)
            if checkpoint is not None:
                require_same(embodiment, checkpoint)
                say(f"loading {checkpoint}")
                start_policy(body, settings, checkpoint, about["embodiment"], plan)
            if reward is not None:
                from vla_rl.robot.reward_process import start_watcher

                say(f"loading the reward {reward.reward_type}")
                start_watcher(
                    body, reward, embodiment, settings.robot.score_every, settings.threads
                )
            if request.console:
                open_console(body, settings, plan, checkpoint, say)
            lead(body, plan, embodiment.control_hz, judge, say)


def start_person(body: Any, settings: SessionSettings, embodiment: EmbodimentSpec) -> None:
    """The process of who helps beside the console: a device, or a scripted operator. Raises
    `UserError`."""
    if settings.operator is not None:
        start_operator(body, settings.operator)
    if settings.teleop:
        teleop = {"kind": settings.teleop, "options": settings.teleop_options}
        job = {"socket": body.socket, "teleop": teleop, "names": list(embodiment.action_names)}
        body.process("teleop", "real.teleop.process", [body.write_config("teleop", job)])


def reward_config(settings: SessionSettings) -> Any:
    """The config of the reward that scores episodes as they run; None: nobody does. Raises
    `ConfigError`."""
    if not settings.reward:
        return None
    from vla_rl.config import compose
    from vla_rl.robot.reward_process import why_not

    place = settings.folder
    config = compose(
        ["~run", f"output_dir={place.parent}", f"name={place.name}", "device=cpu", *settings.reward]
    )
    if problem := why_not(config):
        raise ConfigError(
            f"reward={config.reward_type} has nothing to say of an episode that runs: {problem}"
        )
    return config


def open_console(
    body: Any,
    settings: SessionSettings,
    plan: Any,
    checkpoint: Path | str | None,
    say: Callable[[str], None],
) -> None:
    console = {"folder": str(body.folder), **settings.console}
    chooses = plan.practice is None and plan.returns is None  # else what was tried before chooses
    facts = {
        "tasks": [task.text for task in plan.tasks] if chooses else [],
        "checkpoint": str(checkpoint or ""),
    }
    # no token is in the file: the console makes its own
    config = body.write_config(
        "console", {"socket": body.socket, "console": console, "facts": facts}
    )
    said = body.process("console", "real.console.process", [config]).splitlines()
    say(f"console: {said[1]}")
    say(f"to watch alone: {said[2]}")
    say(_hint(plan))


def body_config(settings: SessionSettings) -> Any:
    """What `real.body.Body` starts."""
    robot = settings.robot
    names = (
        "limits",
        "driver",
        "options",
        "defects",
        "supervisor",
        "arm_hz",
        "camera_hz",
        "camera_device",
        "real_time",
    )
    chosen = {name: getattr(robot, name) for name in names}
    if robot.practice.low or robot.practice.high:
        chosen["supervisor"] = {
            **robot.supervisor,
            "safe_low": robot.practice.low,
            "safe_high": robot.practice.high,
        }
    kind = build.attribute("real.cameras.process:CameraConfig")
    cameras = {name: kind.of(name, given) for name, given in settings.cameras.items()}
    return build.attribute("real.body:BodyConfig")(
        world=robot.world or "fake", cameras=cameras, **chosen
    )


def make_plan(
    settings: SessionSettings, request: SessionRequest, known: dict[str, dict[str, Any]]
) -> Any:
    """``known`` are the world's tasks (TASK, or TASK/NUMBER of an initial state); without a world
    they are instructions.

    A world's own time limit is what its task takes a policy. Where somebody helps, or is played, an
    episode that got stuck late has to have time for that: `HELPED` times as long, unless
    ``robot.horizon`` says how long."""
    task = build.attribute("real.tasks:Task")
    resets = settings.robot.practice.reset
    names = settings.robot.tasks or [name for name in known if name != resets] or ["teleoperated"]
    # (of an instruction no part is a number)
    asked_for = [name.partition("/")[0] for name in names] if known else []
    unknown = [
        name for name in [*asked_for, *([resets] if resets else [])] if known and name not in known
    ]
    if unknown:
        raise ConfigError(
            f"robot.tasks or robot.practice.reset has {unknown[0]!r}, which this world does not "
            f"know: {', '.join(known)}"
        )
    horizon = settings.robot.horizon
    stretch = HELPED if request.learns or settings.operator is not None else 1.0

    def made(name: str) -> Any:
        if not known:
            return build.attribute("real.tasks:spoken")(name, horizon)
        name, _, number = name.partition("/")
        own, at = known[name], int(number) if number.isascii() and number.isdigit() else -1
        return task(
            name, own["instruction"], at, horizon=horizon or round(stretch * own["horizon"])
        )

    plan = build.attribute("real.episodes:Plan")(
        tuple(map(made, names)),
        request.episodes,
        leads=bool(known),
        policy=request.policy,
        alone=not request.console,
        judged=bool(known),
    )
    if settings.robot.returns.share:
        returns = build.attribute("real.returns:Returns")(
            **dataclasses.asdict(settings.robot.returns)
        )
        plan = dataclasses.replace(plan, returns=returns)
    if not resets:
        return plan
    _check_practice(settings, request, names, known)
    x, attended = settings.robot.practice, request.console or settings.operator is not None
    kind = build.attribute("real.practice:Practice")
    return dataclasses.replace(
        plan, practice=kind(made(resets), x.failures, x.confident, attended=attended)
    )


def _check_practice(
    settings: SessionSettings,
    request: SessionRequest,
    names: list[str],
    known: dict[str, dict[str, Any]],
) -> None:
    """Raises `ConfigError` for a practice that could not go on."""
    x, horizon = settings.robot.practice, settings.robot.horizon
    if x.reset in names:
        raise ConfigError(
            f"robot.practice.reset={x.reset} is one of robot.tasks too: name the "
            "tasks that it undoes alone"
        )
    scenes = {known[name].get("scene") for name in [*names, x.reset]} if known else set()
    if len(scenes) > 1:
        raise ConfigError(
            f"robot.practice.reset={x.reset} plays in another scene than "
            f"{', '.join(names)}: choose one of it"
        )
    if not request.policy:
        raise ConfigError("robot.practice is practice of a policy: leave out --no-policy")
    if not known and not horizon:
        raise ConfigError(
            "robot.practice needs robot.horizon, the control steps after which an "
            "attempt has failed"
        )
    if not known and not x.confident:
        raise ConfigError(
            "robot.practice.confident=0: no simulator says what succeeded. Give a reward "
            "(reward=classifier reward.checkpoint=FOLDER), and from what value on it is sure, such "
            "as robot.practice.confident=0.9"
        )


def require_same(embodiment: EmbodimentSpec, checkpoint: Path | str) -> None:
    """Before the seconds that loading takes: robot, bounds, rate and cameras are those that the
    policy was made for."""
    if is_address(checkpoint):  # (the policy's process asks who serves it)
        return
    checkpoint = Path(checkpoint)
    embodiment.require(
        check_checkpoint(checkpoint), "this session's robot", f"the checkpoint {checkpoint}"
    )


def acting_config(settings: SessionSettings) -> Any:
    kind = build.attribute("real.acting:ActingConfig")
    return kind(**{f.name: getattr(settings.robot, f.name) for f in dataclasses.fields(kind)})


def start_policy(
    body: Any,
    settings: SessionSettings,
    checkpoint: Path | str,
    embodiment: dict[str, Any],
    plan: Any,
    learner: str = "",
) -> str:
    """``learner``: the folder of the learner whose weights it acts with. Returns what the
    process says."""
    config = {
        "socket": body.socket,
        "checkpoint": str(checkpoint),
        "embodiment": embodiment,
        "instruction": plan.tasks[0].instruction,
        "acting": dataclasses.asdict(acting_config(settings)),
        "deterministic": settings.deterministic,
        "device": settings.device,
        "threads": settings.threads,
        "report": str(body.run / "policy.json"),
        "learner": learner,
        "resets": reset_policy(settings, plan),
    }
    return body.process(
        "policy", "vla_rl.robot.policy", [body.write_config("policy", config)], timeout=600.0
    )


def reset_policy(settings: SessionSettings, plan: Any) -> dict[str, str]:
    """{instruction: checkpoint} of a policy of its own for the resets of practice. Raises
    `UserError` for a wrong one."""
    checkpoint = settings.robot.practice.checkpoint
    if plan.practice is None or not checkpoint:
        return {}
    check_checkpoint(Path(checkpoint))
    return {plan.practice.reset.instruction: checkpoint}


def _hint(plan: Any) -> str:
    if not plan.leads:
        return (
            "there: C takes control, L arms, P starts; Enter success, Backspace failure; ` e-stop"
        )
    if not plan.policy:
        return (
            "there: C takes control, Shift with W A S D E Q drives; Enter success, Backspace "
            "failure; then O resets"
        )
    return (
        "episodes start by themselves while nobody has control. There: Space pauses, C takes "
        "control, Shift drives"
    )


def lead(
    body: Any,
    plan: Any,
    control_hz: float,
    judge: Any,
    say: Callable[[str], None],
    ready: Callable[[], bool] = lambda: True,
) -> None:
    """The launcher's loop. ``ready`` is asked all the time between episodes; the next one waits
    for it."""
    client_class, link_error = (
        build.attribute("real.link:Client"),
        build.attribute("real.link:LinkError"),
    )
    conductor = build.attribute("real.episodes:Conductor")(plan, control_hz)
    roles = {"launcher": "launcher", "simulator": "viewer"} | (
        {"reward.confident": "viewer"} if plan.practice else {}
    )
    clients = {name: client_class(body.socket, role, name) for name, role in roles.items()}
    told, noted = 0, 0
    try:
        while not conductor.done:
            _hear(clients, conductor, judge)
            waits = conductor.between and not ready()
            for source, kind, fields in [] if waits else conductor.due(time.monotonic()):
                clients[source].send(kind, **fields)
            for outcome in conductor.outcomes[told:]:
                say(line(outcome))
            for note in conductor.notes[noted:]:
                say(note)
            told, noted = len(conductor.outcomes), len(conductor.notes)
            if problem := body.ended():
                raise UserError(problem)
    except link_error as error:
        raise UserError(body.ended() or str(error)) from None
    finally:
        for line_ in summary(conductor.outcomes):
            say(line_)
        for client in clients.values():
            client.close()
    if conductor.problem:
        raise UserError(conductor.problem)


def _hear(clients: dict[str, Any], conductor: Any, judge: Any) -> None:
    """What has come, for `HEARS_S` at most: a process that is too slow to hear all still asks."""
    until = time.monotonic() + HEARS_S
    message = clients["launcher"].receive(0.02)
    while message is not None:
        conductor.hear(message)
        message = clients["launcher"].receive(0.0) if time.monotonic() < until else None
    for name in clients.keys() - {"launcher"}:
        clients[name].skip()  # what it does not read would wait for it
    for news in judge.news():
        conductor.judged(news)


# ---------------------------------------------------------------------------------- in virtual time
def run_lockstep(
    settings: SessionSettings,
    request: SessionRequest,
    checkpoint: str | None,
    folder: Path,
    reward: Any,
    say: Callable[[str], None],
) -> None:
    from vla_rl.robot.policy import load, load_others

    session = build.attribute("real.lockstep:Lockstep")(folder, body_config(settings))
    try:
        assert checkpoint is not None
        require_same(session.robot.embodiment, checkpoint)
        spec, acting = session.robot.embodiment, settings.robot.acting
        decide, version = load(checkpoint, spec, settings.deterministic, settings.device, acting)
        plan = dataclasses.replace(make_plan(settings, request, session.world.tasks), alone=True)
        session.others = load_others(reset_policy(settings, plan), spec, settings.device, acting)
        if settings.operator is not None:
            session.watched(make_operator(settings.operator, session.world))
        if reward is not None:
            from vla_rl.robot.reward_process import load_watcher

            session.scored(load_watcher(reward, spec, settings.robot.score_every))
        say(f"session {folder}, in virtual time")
        conductor = session.run(
            plan, decide, version, acting_config(settings), lambda outcome: say(line(outcome))
        )
        for line_ in summary(conductor.outcomes):
            say(line_)
        if conductor.problem:
            raise UserError(conductor.problem)
    finally:
        session.close()


# -------------------------------------------------------------------------------------------- words
def line(outcome: Any) -> str:
    """One episode."""
    judged = (
        "discarded"
        if outcome.discarded
        else {True: "success", False: "failure", None: "no label"}[outcome.success]
    )
    by = f" ({outcome.labelled_by})" if outcome.labelled_by and not outcome.discarded else ""
    human = f", {outcome.human_steps} by a person" if outcome.human_steps else ""
    pauses = f", paused {outcome.pauses} times" if outcome.pauses else ""
    took = f"after {outcome.steps} control steps{human}, {outcome.seconds:.1f} s{pauses}"
    return f"episode {outcome.episode}: {judged}{by} {took}; {outcome.task.text}"


def summary(outcomes: list[Any]) -> Iterator[str]:
    """Success with and without a person's help, never mixed; how much a person did, and how long
    an episode took."""
    resets = [o for o in outcomes if o.reset and not o.discarded]
    if resets:
        good = sum(bool(o.success) for o in resets)
        yield f"resets: {good} of {len(resets)} succeeded ({100 * good / len(resets):.0f} %)"
    outcomes = [o for o in outcomes if not o.reset]
    kept = [o for o in outcomes if not o.discarded and o.success is not None]
    for what, group in (
        ("autonomous", [o for o in kept if not o.human_steps]),
        ("with a person's help", [o for o in kept if o.human_steps]),
    ):
        if group:
            good = sum(bool(o.success) for o in group)
            yield (
                f"{what}: {good} of {len(group)} episodes succeeded ({100 * good / len(group):.0f} "
                "%)"
            )
    if kept:
        share = sum(o.human_steps for o in kept) / max(1, sum(o.steps for o in kept))
        alone = sum(bool(o.success) and not o.human_steps for o in kept) / len(kept)
        seconds = statistics.median(o.seconds for o in kept)
        yield (
            f"autonomy {alone:.0%}, a person's share of the control steps {share:.1%}, median "
            f"cycle {seconds:.1f} s"
        )
    unlabelled = sum(o.success is None and not o.discarded for o in outcomes)
    if unlabelled:
        yield f"{unlabelled} episodes without a label"
