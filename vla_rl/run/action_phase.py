"""The phase that judges policies by the actions of demonstrations which were kept out, where no
simulator can."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.algorithms.validation import ROWS, described, input_use
from vla_rl.assembly.context import Run, split_demonstrations, start_checkpoint
from vla_rl.data.demonstrations import DemonstrationEpisode
from vla_rl.errors import UserError
from vla_rl.evaluation.action_error import ROWS as DECISIONS
from vla_rl.evaluation.action_error import action_errors, table, verdict
from vla_rl.monitoring.metrics import ACTIONS_FILE, write_json


def eval_actions(run: Run) -> dict[str, Any]:
    """Of the start, and of what offline rounds and RL left, in ``actions.json``."""
    c, found = run.config, {}
    for name, checkpoint in _policies(run):
        policy = run.acting(checkpoint)
        train, held_out = split_demonstrations(run, c.sft.base_part, policy)
        if held_out is None or all(e.length < 2 for e in held_out.episodes):
            raise UserError(
                "no episode of two control steps was kept out to judge the policy on "
                f"(sft.validation_episodes={c.sft.validation_episodes}, of the "
                f"{len(train.episodes)} that there are): record more, set "
                "sft.validation_episodes=1 or more, or leave eval_actions out of phases=[...]"
            )
        with run.progress.task(f"action errors of {name}", min(len(held_out), DECISIONS)) as bar:
            figures = action_errors(
                policy, held_out, train.actions, device=run.device, progress=bar.update
            )
        if "imitation" in policy.can:
            observation, actions, valid = held_out.evenly(ROWS)
            use = input_use(
                policy, observation.to(run.device), actions.to(run.device), valid.to(run.device)
            )
            figures["input_use"] = use
            run.progress.say(f"{name}, {described(use)}")
        figures |= {
            "verdict": verdict(figures),
            "held_out": _said(run, held_out.episodes, len(train.episodes)),
        }
        run.progress.say(f"{table(figures)}\n{name}, {figures['verdict']}\n{figures['held_out']}")
        run.logger.log(
            "actions",
            0,
            {f"actions_{name}/{key}": value for key, value in figures["overall"].items()},
        )
        found[name] = figures
    write_json(run.dir / ACTIONS_FILE, found)
    return {"verdict": next(reversed(found.values()))["verdict"]}


def _policies(run: Run) -> list[tuple[str, Path]]:
    later = [(name, run.dir / "checkpoints" / name) for name in ("offline", "rl")]
    return [
        ("sft", start_checkpoint(run)),
        *((name, path) for name, path in later if path.exists()),
    ]


def _said(run: Run, held_out: Sequence[DemonstrationEpisode], others: int) -> str:
    how = (
        f"drawn by seed={run.config.seed}"
        if run.config.env_type == "dataset" and not all(e.kept_out for e in held_out)
        else "the last of each task"
    )
    trained = (
        "it was not trained on"
        if "sft" in run.config.phases and not run.config.given
        else (
            "this run did not train on (where the checkpoint comes from another, that one may have)"
        )
    )
    return f"measured on {len(held_out)} whole episodes that {trained}, {how}; {others} others"
