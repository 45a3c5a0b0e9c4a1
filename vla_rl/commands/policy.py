"""Commands that make something of a checkpoint: a faster student, or another project's format."""

from __future__ import annotations

import argparse
from pathlib import Path

from vla_rl.commands.evaluate import config_of_checkpoint
from vla_rl.commands.shared import Add, add_overrides, write_result


def add(command: Add) -> None:
    """``vla-rl distill`` and ``export``."""
    distill = command(
        "distill", run_distill, "train a faster student of a policy whose actions are denoised"
    )
    distill.add_argument(
        "checkpoint", type=Path, help="the folder of the denoising policy that teaches"
    )
    distill.add_argument("--steps", type=int, default=1, help="denoising steps of the student")
    distill.add_argument(
        "--method", default="same_noise", help="same_noise | lcm: how the student learns"
    )
    distill.add_argument(
        "--episodes", type=int, default=100, help="episodes of the teacher to learn on"
    )
    distill.add_argument(
        "--updates", type=int, default=1000, help="0: take over a student that learnt beside RL"
    )
    distill.add_argument(
        "--learning-rate",
        type=float,
        default=5e-4,
        help="after the warm-up; then it falls by a cosine",
    )
    distill.add_argument(
        "--evaluate-episodes",
        type=int,
        default=200,
        help="held-out episodes that compare both; 0: none",
    )
    distill.add_argument("--seed", type=int, default=0, help="of the episodes and of the training")
    distill.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: CHECKPOINT_student<steps>, beside it"
    )
    distill.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    add_overrides(distill, "config overrides, e.g. slots.workers=1")

    export = command(
        "export", run_export, "write a checkpoint in the form that its policy's own project loads"
    )
    export.add_argument("checkpoint", type=Path, help="the folder of the checkpoint to export")
    export.add_argument("folder", type=Path, help="the folder to create")
    export.add_argument(
        "--form",
        choices=["lerobot", "openpi"],
        help="of another project, for policies that it knows (default: the policy's own project's)",
    )


def run_distill(arguments: argparse.Namespace) -> None:
    from vla_rl.checks import preflight
    from vla_rl.config.episodes import DistillConfig
    from vla_rl.errors import ConfigError
    from vla_rl.hub import is_cached

    names = ("steps", "method", "episodes", "updates", "learning_rate", "evaluate_episodes", "seed")
    settings = DistillConfig(**{name: getattr(arguments, name) for name in names})
    checkpoint = arguments.checkpoint
    if arguments.out is None and is_cached(checkpoint):
        raise ConfigError("a student is written beside its teacher, which is a hub's: name --out")
    folder = arguments.out or checkpoint.with_name(f"{checkpoint.name}_student{settings.steps}")
    config = config_of_checkpoint(checkpoint, None, arguments.overrides)
    preflight.check_start(config, checkpoint)
    from vla_rl.run.distill import distill

    document = distill(config, checkpoint, settings, folder)
    print(f"wrote {folder}")
    write_result(arguments.json, document)


def run_export(arguments: argparse.Namespace) -> None:
    from vla_rl.files import check_checkpoint

    check_checkpoint(arguments.checkpoint)
    from vla_rl.assembly.env_and_policy import export_policy

    export_policy(arguments.checkpoint, arguments.folder, arguments.form or "")
    print(f"wrote {arguments.folder}")
