"""``vla-rl robot``: sessions with an arm, and what can be done with their records."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.commands import franka, so101
from vla_rl.commands.shared import Add, add_overrides
from vla_rl.errors import UserError, visible

if TYPE_CHECKING:
    from vla_rl.robot.session import SessionRequest


def add(command: Add) -> None:
    """``vla-rl robot run``, ``teach``, ``learn``, ``doctor``, ``limits``, ``so101``, ``franka``,
    ``verify``, ``replay`` and ``export``."""
    robot = command("robot", None, "sessions with a real or simulated arm")
    kinds = robot.add_subparsers(title="what to do", metavar="WHAT", required=True)

    add_run(kinds)
    add_teach(kinds)
    add_learn(kinds)
    doctor = kinds.add_parser(
        "doctor", help="what this machine lacks for a session, and how to get it"
    )
    doctor.set_defaults(function=run_doctor)

    _add_limits(kinds)
    add_describe(kinds)
    for arm in (so101, franka):
        arm.add(kinds, (add_run, add_teach, add_learn, add_describe))

    verify = kinds.add_parser("verify", help="name every gap of a session's journals")
    verify.set_defaults(function=run_verify)
    verify.add_argument(
        "session", type=Path, metavar="SESSION", help="the folder that a session wrote"
    )
    verify.add_argument(
        "--recover",
        action="store_true",
        help="close what a kill left open, at its last good record",
    )

    again = kinds.add_parser(
        "replay", help="do on the arm again what was asked of it in a recorded episode, and compare"
    )
    again.set_defaults(function=run_replay)
    again.add_argument(
        "session", type=Path, metavar="SESSION", help="the folder that a session wrote"
    )
    again.add_argument(
        "--episode", type=int, default=None, metavar="N", help="default: the last that succeeded"
    )
    again.add_argument(
        "--headless", action="store_true", help="without console: simulated arms only"
    )
    again.add_argument("--lockstep", action="store_true", help="in virtual time; no console")
    add_overrides(again, "the robot of that session, e.g. robot=fake")

    export = kinds.add_parser(
        "export", help="write a session as a LeRobotDataset, or as FILE.rrd for the Rerun viewer"
    )
    export.set_defaults(function=run_export)
    export.add_argument(
        "sessions",
        type=Path,
        nargs="+",
        metavar="SESSION",
        help="folders that sessions wrote, in order",
    )
    export.add_argument(
        "dataset",
        type=Path,
        metavar="DATASET",
        help="a new folder; or a new file that ends in .rrd",
    )
    export.add_argument(
        "--append",
        action="store_true",
        help="to a dataset that export wrote: it is made anew from its sessions, which have to be "
        "there, and from these",
    )
    export.add_argument(
        "--video", action="store_true", help="H.264 files instead of exact pictures"
    )
    export.add_argument(
        "--discarded", action="store_true", help="with the episodes that the operator discarded"
    )


def add_run(kinds: Any) -> argparse.ArgumentParser:
    run = kinds.add_parser(
        "run", help="a policy drives, a person watches and takes over in the browser"
    )
    run.set_defaults(function=run_run)
    run.add_argument(
        "--episodes",
        type=int,
        default=None,
        metavar="N",
        help="end after N episodes; default: at Ctrl-C",
    )
    run.add_argument("--no-policy", action="store_true", help="nobody but a person drives")
    run.add_argument(
        "--headless", action="store_true", help="without console: a simulated arm goes on by itself"
    )
    run.add_argument(
        "--lockstep",
        action="store_true",
        help="in virtual time, as fast as it computes; no console",
    )
    add_overrides(run, "e.g. robot=fake checkpoint=PATH")
    return run  # type: ignore[no-any-return]


def add_teach(kinds: Any) -> argparse.ArgumentParser:
    teach = kinds.add_parser("teach", help="record demonstrations: a person drives in the browser")
    teach.set_defaults(function=run_teach)
    teach.add_argument(
        "--episodes",
        type=int,
        default=None,
        metavar="N",
        help="end after N episodes; default: at Ctrl-C",
    )
    add_overrides(teach, "e.g. robot=lerobot robot.limits=FILE")
    return teach  # type: ignore[no-any-return]


def add_learn(kinds: Any) -> argparse.ArgumentParser:
    learn = kinds.add_parser(
        "learn", help="a policy gets better from the session's own episodes and from who helps"
    )
    learn.set_defaults(function=run_learn)
    learn.add_argument("checkpoint", metavar="CKPT", help="the policy that it starts from")
    learn.add_argument(
        "--task",
        action="append",
        default=[],
        help="a task, or several in turn; default: the world's own",
    )
    learn.add_argument(
        "--robot",
        default="tabletop",
        metavar="NAME",
        help="tabletop or so101_sim (simulated), fake or lerobot",
    )
    learn.add_argument(
        "--out", type=Path, required=True, metavar="NAME", help="the run's name or folder"
    )
    learn.add_argument(
        "--episodes", type=int, default=None, metavar="N", help="in all; default: until Ctrl-C"
    )
    learn.add_argument(
        "--headless", action="store_true", help="without console: a simulated arm goes on by itself"
    )
    learn.add_argument(
        "--lockstep",
        action="store_true",
        help="by turns in virtual time, with operator=stuck as the person",
    )
    learn.add_argument(
        "--evaluate",
        type=int,
        default=0,
        metavar="N",
        help="of --lockstep: judge on N held-out episodes",
    )
    learn.add_argument(
        "--every", type=int, default=20, metavar="N", help="episodes between judgements"
    )
    add_overrides(learn, "e.g. run=hil_serl robot.KEY=...")
    return learn  # type: ignore[no-any-return]


def _add_limits(kinds: Any) -> None:
    text = "find an arm's limits: it is limp and read alone, a person moves it through what it does"
    limits = kinds.add_parser("limits", help=text, description=text)
    limits.set_defaults(function=run_limits)
    limits.add_argument("file", type=Path, metavar="FILE", help="the limits file to write")
    limits.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="default: until Enter is pressed"
    )
    add_overrides(limits, "the arm, e.g. robot=lerobot robot.type=so101_follower robot.port=PORT")


def add_describe(kinds: Any) -> argparse.ArgumentParser:
    text = (
        "write what an arm is (joints, units, ends, rate, cameras), for a training's env.embodiment"
    )
    describe = kinds.add_parser("describe", help=text, description=text)
    describe.set_defaults(function=run_describe)
    describe.add_argument("file", type=Path, metavar="FILE", help="the file to write, NAME.json")
    add_overrides(
        describe, "the arm and its cameras, as of a session: robot=lerobot robot.type=..."
    )
    return describe  # type: ignore[no-any-return]


def run_describe(arguments: argparse.Namespace) -> None:
    from vla_rl.config.robot import compose
    from vla_rl.robot.describe import describe

    describe(compose(arguments.overrides, moves=False), arguments.file, print)


def run_limits(arguments: argparse.Namespace) -> None:
    from vla_rl.config.robot import compose
    from vla_rl.robot.limits import find

    find(compose(arguments.overrides, moves=False), arguments.file, arguments.seconds, print)


def run_learn(arguments: argparse.Namespace) -> None:
    from vla_rl.robot.learning import compose, learn

    a = arguments
    tasks = [f"robot.tasks=[{','.join(a.task)}]"] if a.task else []
    learning = compose(
        a.checkpoint,
        a.out,
        [f"robot={a.robot}", *tasks, *a.overrides],
        episodes=a.episodes or 0,
        console=not (a.headless or a.lockstep),
        lockstep=a.lockstep,
        evaluate=a.evaluate,
        every=a.every,
    )
    # one write: two threads have something to say
    learn(learning, lambda text: print(f"{text}\n", end="", flush=True))


def run_run(arguments: argparse.Namespace) -> None:
    from vla_rl.robot.session import SessionRequest

    headless = arguments.headless or arguments.lockstep
    _session(
        arguments,
        SessionRequest(
            arguments.episodes or 0, not arguments.no_policy, not headless, arguments.lockstep
        ),
    )


def run_teach(arguments: argparse.Namespace) -> None:
    from vla_rl.robot.session import SessionRequest

    _session(arguments, SessionRequest(arguments.episodes or 0, policy=False))


def _session(arguments: argparse.Namespace, request: SessionRequest) -> None:
    from vla_rl.config.robot import compose
    from vla_rl.robot.session import run

    folder = run(compose(arguments.overrides), request, lambda text: print(text, flush=True))
    print(f"recorded in {folder}; check it with: vla-rl robot verify {folder}")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Exit status 1 where a simulated session cannot run."""
    from vla_rl.doctor.robot import doctor, render

    checks = doctor()
    print(render(checks))
    return int(any(check.core and check.status != "ok" for check in checks))


def run_verify(arguments: argparse.Namespace) -> int:
    """Exit status 1 where something is missing or contradicts itself."""
    from vla_rl import build

    if arguments.recover:
        for path in build.attribute("real.journal:journals")(arguments.session):
            closed = build.attribute("real.journal:recover")(path)
            if closed != path:
                print(
                    f"removed {path.name}, of which no record was whole"
                    if closed is None
                    else f"closed {closed.name}"
                )
    problems, lines = build.attribute("real.verify:verify")(arguments.session)
    for line in lines:
        print(visible(line))
    for problem in problems:
        print(f"problem: {visible(problem)}")
    print(f"{len(lines)} episodes, {len(problems)} problems")
    return 1 if problems else 0


def run_replay(arguments: argparse.Namespace) -> None:
    from vla_rl.config.robot import compose
    from vla_rl.robot.replay import replay
    from vla_rl.robot.session import SessionRequest

    a = arguments
    request = SessionRequest(1, console=not (a.headless or a.lockstep), lockstep=a.lockstep)
    told = compose(a.overrides)
    replay(a.session, a.episode, told, request, lambda text: print(visible(text), flush=True))


def run_export(arguments: argparse.Namespace) -> None:
    from vla_rl.data.session_export import append_sessions, export_sessions

    a = arguments
    if a.dataset.exists() and not a.append:
        raise UserError(
            f"{a.dataset} exists already: choose another name for the dataset, or add "
            "to it with --append"
        )
    if a.dataset.suffix == ".rrd":
        from vla_rl.data.rerun_export import export_session_rerun

        if len(a.sessions) > 1 or a.append:
            raise UserError(
                f"{a.dataset}: a Rerun recording is of one session, and is not added to"
            )
        count = export_session_rerun(a.sessions[0], a.dataset)
        print(f"{a.dataset}: {count} episodes; show it with: rerun {a.dataset}")
        return
    if a.append:
        done = append_sessions(a.sessions, a.dataset)
    else:
        done = export_sessions(a.sessions, a.dataset, video=a.video, discarded=a.discarded)
    print(f"{done.path}: {done.episodes} episodes, {done.steps} control steps")
    for line in done.left_out:
        print(f"left out: {visible(line)}")
    for line in done.doubtful:
        print(f"exported, and doubtful: {visible(line)}")
