"""``vla-rl bench robot``: figures of a session with a simulated arm, each with the machine's
load beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import milliseconds, say, table
from benchmarks.robot import sessions
from benchmarks.robot.gate import CONTROLLERS, SMALL, adversarial, limits_of
from benchmarks.robot.trials import swaying, trial
from real.body import Body, BodyConfig, StartError
from real.cameras.process import CameraConfig
from real.link import Client
from real.messages import Input, Lease, State
from real.named import make_world
from vla_rl.errors import ConfigError

VICTIMS = (
    ("policy", "killed"),
    ("policy", "frozen"),
    ("teleop", "killed"),
    ("teleop", "frozen"),
    ("console", "killed"),
    ("console", "frozen"),
    ("operator", "killed"),
    ("recorder", "killed"),
    ("recorder", "frozen"),
    ("supervisor", "killed"),
    ("supervisor", "frozen"),
    ("guard", "killed"),
    ("guard", "frozen"),
    ("camera", "killed"),
    ("camera", "frozen"),
    ("picture", "killed"),
    ("picture", "frozen"),
    ("launcher", "killed"),
    ("launcher", "frozen"),
)
LEARNER = ("learner", "killed"), ("learner", "frozen")
# what is aimed at: (hold begins, at rest) in seconds, metres
TARGETS = {"killed": (0.170, 0.300, 0.055), "frozen": (0.170, 0.300, 0.055)}


def measure(world: str, limits: Path | None, real_time: int, **options: Any) -> dict[str, Any]:
    """``options``: ``trials`` per victim (0: none), of which ``victims`` (empty: all), ``steps``
    actions against the gate, ``seconds`` of lateness and takeovers (0: neither), beside it ``busy``
    processes, and ``cameras`` of 640 × 480 that are recorded and shown in a console with a
    viewer."""
    known = list(dict.fromkeys(victim for victim, _ in (*VICTIMS, *LEARNER)))
    if unknown := [victim for victim in options["victims"] if victim not in known]:
        raise ConfigError(f"--victims {unknown[0]}: use some of {', '.join(known)}")
    small, file = SMALL.get(world, {}), limits_of(world, limits)
    config = BodyConfig(
        limits=str(file),
        world=world,
        options=small,
        real_time=real_time,
        supervisor={"required": ["guard", "console", "recorder"]},
    )
    told = {"actions" if name == "steps" else name: value for name, value in options.items()}
    document: dict[str, Any] = {
        "world": world,
        "real_time": real_time,
        "cores": len(os.sched_getaffinity(0)),
        **told,
    }
    document["load_at_start"] = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="starts") as place:
        document |= _struck(
            config, options, sessions.starts(Path(place)) if options["trials"] else {}
        )
    if options["seconds"]:
        document["lateness"] = lateness(
            with_cameras(config, options["cameras"]), options["seconds"], options["busy"]
        )
        document["takeover"] = takeover(config, max(3, options["trials"]))
    document["gate"] = {
        name: adversarial(
            make_world(world, small | given), _of(file, given), options["steps"], seed=0
        )
        for name, given in CONTROLLERS.get(world, {"its own": {}}).items()
    }
    return document


def text(document: Mapping[str, Any]) -> str:
    """Of the trials the worst, for they are limits."""
    rows: list[Sequence[str]] = [
        ("killed or frozen", "trials", "within", "holds after", "at rest after", "distance")
    ]
    for row in document["trials_by_victim"]:
        if row["trials"]:
            times = (f"{1e3 * row[key]['max']:.0f} ms" for key in ("hold_s", "rest_s"))
            within = (str(row["trials"]), str(row["within_targets"]))
            rows.append(
                (
                    f"{row['victim']} {row['how']}",
                    *within,
                    *times,
                    f"{row['distance_m']['max']:.3f} m",
                )
            )
    lines = [table(rows)] if len(rows) > 1 else []
    if "takeover" in document:
        lines.append(
            "a device's key to the first human command: "
            f"{_levels(document['takeover']['key_to_command_ms'])}"
        )
    if ages := document.get("lateness", {}).get("picture_age_ms"):
        lines.append(f"age of pictures in a viewer: {_levels(ages)}")
    for name, gate in document["gate"].items():
        lines.append(
            f"gate, {name}: {gate['violations']} violations in {gate['actions']} actions "
            f"({gate['trips']} pauses)"
        )
    return "\n".join(lines)


def _levels(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f} ms" for name, value in figures.items())


def _struck(config: BodyConfig, options: dict[str, Any], starts: dict[str, Path]) -> dict[str, Any]:
    """The trials, and what they come to by victim; ``starts``: `sessions.starts`, for the
    launcher's and the learner's. They take turns, so that a busy minute is no victim's alone."""
    # whoever has control counts anyway
    free = dataclasses.replace(config, supervisor={"required": ["guard", "recorder"]})
    own = {"cameras": config.options.get("cameras", ["front"])}
    pictures = dataclasses.replace(config, camera_hz=20.0, supervisor=config.supervisor | own)
    bodies = {"camera": with_cameras(config, 1), "operator": free, "picture": pictures}
    rng, failed = np.random.default_rng(0), 0
    rows: list[Any] = []
    learners: list[Any] = []
    asked = [
        (v, how)
        for v, how in (*VICTIMS, *LEARNER)
        if not options["victims"] or v in options["victims"]
    ]
    for victim, how in asked * options["trials"]:
        delay, row = float(rng.uniform(0.4, 0.7)), None
        while row is None:
            try:
                row = (
                    sessions.learner_trial(how, starts[victim], delay)
                    if victim == "learner"
                    else sessions.launcher_trial(how, starts[victim], delay)
                    if victim == "launcher"
                    else trial(victim, how, bodies.get(victim, config), delay)
                )
            except StartError as error:
                failed += 1
                if failed > options["trials"]:
                    raise
                say(f"once more, since {error}")
        (learners if victim == "learner" else rows).append(row)
        say(str(row))
    done = [
        (pair, [r for r in rows if (r.victim, r.how) == pair])
        for pair in asked
        if pair not in LEARNER
    ]
    return {
        "not_started": failed,
        "trials_by_victim": [_summary(*pair, found) for pair, found in done],
        "trials_of_learners": [
            sessions.summary(how, [r for r in learners if r.how == how]) for _, how in LEARNER
        ],
        "trials_all": [dataclasses.asdict(r) for r in rows],
    }


def _of(limits: Path, given: dict[str, Any]) -> Path:
    """A world that is commanded by joints has a file of limits of its own, beside the other."""
    return (
        limits.with_name(f"{limits.stem}_joints{limits.suffix}") if given.get("joints") else limits
    )


def _summary(victim: str, how: str, rows: list[Any]) -> dict[str, Any]:
    if not rows:
        return {"victim": victim, "how": how, "trials": 0}
    worst = [max(getattr(r, name) for r in rows) for name in ("hold_s", "rest_s", "distance")]
    within = sum(
        all(getattr(r, n) <= t for n, t in zip(("hold_s", "rest_s", "distance"), TARGETS[how]))
        for r in rows
    )
    return {
        "victim": victim,
        "how": how,
        "trials": len(rows),
        "within_targets": within,
        "speed_m_s": float(np.mean([r.speed for r in rows])),
        "hold_s": {"median": float(np.median([r.hold_s for r in rows])), "max": worst[0]},
        "rest_s": {"median": float(np.median([r.rest_s for r in rows])), "max": worst[1]},
        "distance_m": {"median": float(np.median([r.distance for r in rows])), "max": worst[2]},
        "lost": sum(r.lost for r in rows),
        "unwritten": max(r.unwritten for r in rows),
        "load": float(np.mean([r.load for r in rows])),
    }


def lateness(config: BodyConfig, seconds: float, busy: int) -> dict[str, Any]:
    """How late the supervisor's ticks began, while the arm moves and ``busy`` processes at nice 19
    compute; each process' share of a core; and how old the cameras' pictures were as they reached a
    console's viewer."""
    burn = (
        "import numpy as n\nimport os\nos.nice(19)\na = n.random.rand(300, 300)\nwhile True: a = "
        "(a @ a) % 1.0"
    )
    burners = [
        subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) for _ in range(busy)
    ]
    with tempfile.TemporaryDirectory(prefix="late") as place:
        try:
            with Body(place, config) as body, swaying(body, config.world) as operator:
                viewed = _show(body) if config.cameras else None
                operator.drive()
                before = {
                    name: _cpu_seconds(process.pid) for name, process in body.processes.items()
                }
                began = time.monotonic()
                operator.watch(seconds)
                over = time.monotonic() - began
                shares = {
                    name: (_cpu_seconds(body.processes[name].pid) - s) / over
                    for name, s in before.items()
                }
                ages = _ages(body, viewed) if viewed else []
            report = json.loads(
                (Path(place) / "run" / "supervisor.json").read_text(encoding="utf-8")
            )
        finally:
            for process in burners:
                process.kill()
                process.wait()
    figures = {"seconds": seconds, "busy": busy, "load": os.getloadavg()[0], "cpu_share": shares}
    if ages:
        figures |= {"pictures": len(ages), "picture_age_ms": milliseconds(ages, (50, 95, 100))}
    return report | figures


def with_cameras(config: BodyConfig, count: int) -> BodyConfig:
    """``count`` cameras of 640 × 480 at 30 Hz beside the arm."""
    pattern = CameraConfig("benchmarks.robot.pattern:Pattern", 480, 640, {"hz": 30.0})
    return dataclasses.replace(config, cameras={f"side{i}": pattern for i in range(count)})


def _show(body: Body) -> Path:
    """Start a console and a page that watches it, which writes its pictures' ages to this file
    as it ends."""
    file = body.run / "ages.json"
    asked = body.write_config("console", {"socket": body.socket, "console": {"port": 0}})
    url = body.process("console", "real.console.process", [asked], may_end=True).split()[1]
    body.process("viewer", "benchmarks.robot.viewer", [url, str(file)], may_end=True)
    return file


def _ages(body: Body, file: Path) -> list[float]:
    viewer = body.processes["viewer"]
    viewer.terminate()
    viewer.wait(10.0)
    return json.loads(file.read_text(encoding="utf-8"))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    # utime and stime; proc(5)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def takeover(config: BodyConfig, trials: int) -> dict[str, Any]:
    """From a device's first message with its dead-man held to the first human command, as the
    supervisor's `State` says."""
    waits, policy_after = [], 0
    with (
        tempfile.TemporaryDirectory(prefix="take") as place,
        Body(place, config) as body,
        swaying(body, config.world) as operator,
        contextlib.closing(Client(body.socket, "teleop")) as device,
    ):
        operator.drive()
        rng = np.random.default_rng(0)
        for _ in range(trials):
            operator.watch(0.3 + float(rng.uniform(0, 0.02)))
            operator.resume()
            wait, after = _taken(device, operator.client.token, time.monotonic())
            waits.append(wait)
            policy_after += after
            operator.press("hand_back")
            operator.watch(0.1)
    figures = milliseconds(waits, (50, 99, 100))
    return {
        "trials": trials,
        "key_to_command_ms": figures,
        "policy_steps_after": policy_after,
        "load": os.getloadavg()[0],
    }


def _taken(device: Client, token: str, pressed: float) -> tuple[float, int]:
    device.newest()
    held = {
        "axes": (0.3, 0.0, 0.0, 0.0, 0.0, 0.0),
        "gripper": 0.0,
        "keys": (),
        "target": (),
        "device_stamp": pressed,
    }
    device.send(Input, 0.15, lease=token, dead_man=True, **held)
    first, after, sent = None, 0, time.monotonic()
    while time.monotonic() - pressed < 0.4:
        if time.monotonic() - sent > 0.03:
            sent = time.monotonic()
            device.send(Input, 0.15, lease=token, dead_man=True, **held)
        state = device.receive(0.02)
        if not isinstance(state, State):
            continue
        if state.is_human and state.reference and first is None:
            first = state.stamp - pressed
        after += bool(first is not None and state.policy)
    device.send(Input, 0.15, lease=token, dead_man=False, **held)
    device.send(Lease, ask="renew", token=token, force=False)
    return first if first is not None else float("inf"), after
