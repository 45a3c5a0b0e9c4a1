"""``vla-rl bench acting``: what happens where two chunks meet, in each way of acting
(`real.acting`), in virtual time.

The same policy acts in the same session in each way; a decision goes out ``thinking`` seconds after
it began. Counted is what the policy asked for, in half-ranges of the action (1: from the middle to
a bound), the largest of all dimensions but a gripper:

    seam       mean change from one control step to the next, where another decision begins to be followed
    within     the same inside of a chunk
    prefix     mean distance of what a chunk says of the control steps that had passed as it came, from what they ran
    late       control steps that had passed, in the mean
    steps/s    control steps in a second of the policy's

Without a checkpoint the policy is a small flow on the point robot, trained here on two ways of
doing the same: to the left or to the right, each as often, wherever the point is. What chunks
disagree on is all in the noise that each was drawn from.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import table
from real.acting import KINDS
from real.journal import journals, read
from real.lockstep import Lockstep
from real.robots.world import PointWorld
from vla_rl import build
from vla_rl import config as configs
from vla_rl.config.robot import SessionSettings, compose
from vla_rl.data.demonstrations import short_statistics
from vla_rl.data.lerobot_writer import feature_statistics
from vla_rl.errors import ConfigError, UserError
from vla_rl.robot import session as sessions
from vla_rl.robot.policy import load, make_decide
from vla_rl.robot.session import SessionRequest
from vla_rl.types import EmbodimentSpec, Observation

_POLICY = (
    "run=toy_flow",
    "policy.chunk_length=8",
    "policy.denoising_steps=10",
    "policy.noise_level=0.1",
)
_POINT = ("robot=fake", "robot.horizon=60", "robot.options.goal=0.6")  # which it cannot reach
_SIDE, _STEP = 0.1, 0.012  # m: where the toy policy goes to, and how far in a control step
_UPDATES, _ROWS = 400, 64


def measure(overrides: Sequence[str], episodes: int, thinking: float, seed: int) -> dict[str, Any]:
    """Every way of acting. ``overrides`` are those of ``vla-rl robot run``. Raises
    `ConfigError`."""
    named = any(o.startswith("checkpoint=") for o in overrides)
    if not 0 <= thinking <= 1:
        raise ConfigError(f"--thinking {thinking}: seconds, from 0 to 1")
    if not named and any(o.startswith("robot=") for o in overrides):
        raise ConfigError(
            "robot= needs checkpoint=, a policy of that robot: without one the point "
            "robot's is made here"
        )
    settings = compose([*([] if named else _POINT), *overrides])
    policy = None if named else toy_policy(seed)
    rows = {}
    for kind in KINDS:
        settings.robot.acting = kind
        torch.manual_seed(seed)
        rows[kind] = _measure(settings, policy, episodes, thinking)
    return {"episodes": episodes, "thinking_s": thinking, "seed": seed, "acting": rows}


def toy_policy(seed: int) -> Any:
    """The flow policy of the point robot that goes left or right."""
    spec = PointWorld().embodiment
    config = configs.compose([*_POLICY, "checkpoint=none"])
    draw = np.random.default_rng(seed)
    h, n = config.policy.chunk_length, 2048
    at, goal = draw.uniform(-1.3 * _SIDE, 1.3 * _SIDE, n), draw.choice([-_SIDE, _SIDE], n)
    proprio = np.zeros((n, spec.proprio_dim), np.float32)
    proprio[:, 0], proprio[:, 2:] = at, (0.3, 1.0)
    actions = np.zeros((n, h, spec.action_dim), np.float32)
    actions[:, :, -1] = -1.0
    for i in range(h):
        actions[:, i, 0] = np.clip(goal - at, -_STEP, _STEP)
        at = at + actions[:, i, 0]
    statistics = [
        short_statistics(feature_statistics(rows.reshape(-1, rows.shape[-1])))
        for rows in (actions, proprio)
    ]
    kind = build.implementation("policy", config.policy_type)
    policy = kind.from_statistics(config.policy, spec, *statistics, seed=seed).train()
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=_UPDATES)
    for _ in range(_UPDATES):
        pick = torch.from_numpy(draw.integers(n, size=_ROWS))
        seen = dataclasses.replace(
            Observation.blank(spec, _ROWS),
            proprio=torch.from_numpy(proprio)[pick],
            instruction=("raise the point",) * _ROWS,
        )
        loss, _ = policy.imitation_loss(
            seen, torch.from_numpy(actions)[pick], torch.ones(_ROWS, h, dtype=torch.bool)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return policy.eval()


def _measure(
    settings: SessionSettings, policy: Any, episodes: int, thinking: float
) -> dict[str, Any]:
    """Of one way of acting; why not, where the policy cannot."""
    with tempfile.TemporaryDirectory(prefix="vla_rl_acting_") as folder:
        session = Lockstep(folder, sessions.body_config(settings), thinking)
        try:
            spec, acting = session.robot.embodiment, settings.robot.acting
            if policy is not None:
                decide = make_decide(policy, False, acting=acting)
            else:
                sessions.require_same(spec, Path(settings.checkpoint))
                decide, _ = load(
                    settings.checkpoint, spec, settings.deterministic, settings.device, acting
                )
            plan = sessions.make_plan(
                settings,
                SessionRequest(episodes, console=False, lockstep=True),
                session.world.tasks,
            )
            plan = dataclasses.replace(plan, alone=True)
            done = session.run(
                plan, decide, "measured", sessions.acting_config(settings), lambda outcome: None
            )
        except ConfigError as error:
            return {"refused": str(error)}
        finally:
            session.close()
        if done.problem:
            raise UserError(done.problem)
        found = [seams(read(path, pictures=False), spec) for path in journals(folder)]
    rows = {
        name: np.concatenate([f[name] for f in found])
        for name in ("seam", "within", "prefix", "late", "seconds")
    }
    good = (
        None
        if policy is not None
        else sum(bool(o.success) for o in done.outcomes) / len(done.outcomes)
    )
    figures = {
        name: float(rows[name].mean()) if len(rows[name]) else 0.0
        for name in ("seam", "within", "prefix", "late")
    }
    steps = len(rows["seam"]) + len(rows["within"])
    return {
        **figures,
        "seams": len(rows["seam"]),
        "decisions": len(rows["late"]),
        "success": good,
        "steps_per_s": steps / float(rows["seconds"].sum()),
    }


def seams(episode: Any, spec: EmbodimentSpec) -> dict[str, np.ndarray]:
    """The single figures of an episode as of `real.journal.read`; see the module's text."""
    half = (np.array(spec.action_high) - np.array(spec.action_low)) / 2.0
    moved = half if spec.gripper == "none" else half[:-1]

    def apart(a: Any, b: Any) -> float:
        return float((np.abs(np.array(a) - np.array(b))[: len(moved)] / moved).max())

    ran = [tick for tick in episode.ticks if tick["policy"]]
    at = {tick["tick"]: tick["policy"] for tick in ran}
    steps = [tick for tick in ran if tick["step_done"]]
    jumps = [
        (apart(a["policy"], b["policy"]), a["decision"] != b["decision"])
        for a, b in itertools.pairwise(steps)
    ]
    prefix = []
    per_row = round(episode.header["supervisor"]["hz"] / spec.control_hz)
    for chunk in episode.chunks:
        passed = [
            (row, chunk["start"] + i * per_row)
            for i, row in enumerate(chunk["rows"][: chunk["delay"]])
        ]
        prefix += [apart(row, at[tick]) for row, tick in passed if tick in at]
    return {
        "seam": np.array([jump for jump, new in jumps if new]),
        "within": np.array([jump for jump, new in jumps if not new]),
        "prefix": np.array(prefix),
        "late": np.array([float(chunk["delay"]) for chunk in episode.chunks]),
        "seconds": np.array([steps[-1]["stamp"] - steps[0]["stamp"]]),
    }


def text(document: Mapping[str, Any]) -> str:
    rows = [("acting", "seam", "within", "prefix", "late", "steps/s", "decisions", "success")]
    for kind, row in document["acting"].items():
        if "refused" in row:
            continue
        jumps = [
            f"{row[name]:.3f}" if name != "prefix" or row["late"] else "-"
            for name in ("seam", "within", "prefix")
        ]
        success = "-" if row["success"] is None else f"{row['success']:.0%}"
        rows.append(
            (
                kind,
                *jumps,
                f"{row['late']:.1f}",
                f"{row['steps_per_s']:.1f}",
                str(row["decisions"]),
                success,
            )
        )
    refused = [
        f"{kind}: {row['refused']}" for kind, row in document["acting"].items() if "refused" in row
    ]
    head = (
        f"a decision takes {1e3 * document['thinking_s']:.0f} ms; {document['episodes']} episodes "
        "each"
    )
    return "\n".join([head, table(rows), *refused])
