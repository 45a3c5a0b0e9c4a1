"""``vla-rl eval``: checkpoints on held-out episodes."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.commands.shared import Add, Names, add_overrides, place, write_result
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.options import EnvOptions, methods, view
from vla_rl.paths import is_address


def add(command: Add) -> None:
    """``vla-rl eval``."""
    evaluate = command(
        "eval",
        run_eval,
        "success of a checkpoint, with intervals; a second one is compared pairwise",
    )
    evaluate.add_argument(
        "checkpoint",
        type=place,
        help="a folder such as outputs/quickstart/checkpoints/rl, or the address of a server of "
        "openpi's protocol (ws://HOST:PORT; its options: policy=remote policy.KEY=VALUE)",
    )
    evaluate.add_argument(
        "--compare",
        type=place,
        metavar="CHECKPOINT",
        help="a second checkpoint, same initial states",
    )
    evaluate.add_argument(
        "--suite",
        metavar="ENV",
        help="env, or LIBERO suite (libero_spatial ...; with its own time limit), to evaluate on "
        "(default: that of the checkpoint's own run)",
    )
    evaluate.add_argument(
        "--protocol",
        metavar="NAME",
        help="run LIBERO as a published evaluation does: openvla, "
        "openvla-oft, simplevla-rl, openpi, lerobot or vla-eval; "
        "50 episodes of each task, unless said otherwise",
    )
    evaluate.add_argument(
        "--tasks", nargs="+", action=Names, metavar="TASK", help="only these tasks"
    )
    evaluate.add_argument(
        "--episodes",
        type=int,
        help="episodes in all, spread over the tasks (default: as the checkpoint's run, else 100)",
    )
    evaluate.add_argument(
        "--episodes-per-task", type=int, metavar="N", help="this many for each task instead"
    )
    evaluate.add_argument(
        "--perturb",
        metavar="FACTORS",
        help="the same episodes again, perturbed: all, or names such as camera,light",
    )
    evaluate.add_argument(
        "--levels", type=int, nargs="+", metavar="N", help="of --perturb, spread over the episodes"
    )
    evaluate.add_argument(
        "--split", choices=["held_out", "train"], help="default: as the run, else held_out"
    )
    evaluate.add_argument("--seed", type=int, help="default: as the run, else 0")
    evaluate.add_argument(
        "--sample",
        action=argparse.BooleanOptionalAction,
        help="sampled or most likely actions (default: as the run)",
    )
    evaluate.add_argument(
        "--video", type=Path, metavar="FILE", help="write a grid of the first checkpoint's episodes"
    )
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    add_overrides(evaluate, "config overrides, e.g. slots.workers=1")


_PER_TASK = "evaluate.episodes_per_task="
EVAL_EPISODES = 100  # of a checkpoint outside of its run
PUBLISHED_EPISODES = 50  # of each task, with --protocol


def run_eval(arguments: argparse.Namespace) -> None:
    from vla_rl.checks import preflight

    config = _config(arguments)
    if arguments.protocol:
        config = _with_protocol(config, arguments)
        if arguments.episodes is None and arguments.episodes_per_task is None:
            arguments.episodes_per_task = PUBLISHED_EPISODES
    own = arguments.suite is None and _recorded(arguments.checkpoint).is_file()
    said = any(o.lstrip("+").startswith(_PER_TASK) for o in arguments.overrides)
    held_out, config.held_out_tasks = config.held_out_tasks, []
    if arguments.tasks or arguments.suite:
        config.tasks = arguments.tasks or []
    elif config.tasks:  # what the run itself evaluates
        config.tasks = [*config.tasks, *held_out]
    env: Any = config.env
    if arguments.tasks and view(env, EnvOptions).tasks is not None:
        config.env = dataclasses.replace(env, tasks=list(arguments.tasks))
    # a part of the env: a bare number may mean another's task
    if arguments.suite and arguments.suite != config.env_type:
        held_out = [name for name in held_out if name.startswith(f"{arguments.suite}/")]
    _set_evaluation(config.evaluate, arguments)
    paths = [arguments.checkpoint] + ([arguments.compare] if arguments.compare else [])
    if arguments.levels and not arguments.perturb:
        raise ConfigError("--levels belongs to --perturb: add --perturb all, or leave it out")
    for path in paths:
        preflight.check_start(config, path)
    from vla_rl.evaluation.conditions import conditions_of, lines
    from vla_rl.run.evaluate_checkpoints import evaluate_checkpoints

    try:
        document = evaluate_checkpoints(
            config,
            paths,
            episodes=arguments.episodes or (None if own or said else EVAL_EPISODES),
            per_task=arguments.episodes_per_task,
            video=arguments.video,
            perturb=[name for name in (arguments.perturb or "").split(",") if name],
            levels=arguments.levels or (),
            held_out_tasks=held_out,
        )
    except EmbodimentMismatch as error:
        if own or arguments.suite:
            raise
        raise EmbodimentMismatch(
            f"{error}\n{arguments.checkpoint} lies in no run that would say which env it is of, so "
            f"this was {config.env_type}: name its own with --suite ENV"
        ) from error
    document["env"] = {"type": config.env_type, **dataclasses.asdict(config.env)}
    document |= (found := conditions_of(config, config.evaluate.split))
    for line in lines(found):
        print(line)
    write_result(arguments.json, document)


def _config(arguments: argparse.Namespace) -> Any:
    """Of ``checkpoint``, which may be an address, or be left out where ``policy.url`` names one."""
    from vla_rl.config.serving import RemoteConfig

    envs = [word for word in arguments.overrides if word.startswith("env=")]
    if envs and arguments.suite is None:  # as other commands have it
        arguments.suite = envs[-1].removeprefix("env=")
        arguments.overrides = [word for word in arguments.overrides if word not in envs]
    if isinstance(arguments.checkpoint, str):
        address = arguments.checkpoint
        named = [f"policy.url={address}"] if is_address(address) else [address]
        chosen = [] if named == [address] else ["policy=remote"]
        arguments.overrides = [*chosen, *named, *arguments.overrides]
        config = config_of_checkpoint(None, arguments.suite, arguments.overrides)
        if not isinstance(config.policy, RemoteConfig) or not config.policy.url:
            raise ConfigError(
                f"{address}: name a checkpoint before it, or a served policy with "
                "policy=remote policy.url=ws://HOST:PORT"
            )
        arguments.checkpoint, config.policy_changes = config.policy.url, {}
        return config
    return config_of_checkpoint(arguments.checkpoint, arguments.suite, arguments.overrides)


def _with_protocol(config: Any, arguments: argparse.Namespace) -> Any:
    """``config`` with the scenes and limits of the named protocol, and outside of a run its cameras
    too: a policy of ours was trained on those of its run. Raises `ConfigError` where figures would
    not be those of the published benchmark."""
    from vla_rl import build
    from vla_rl import config as configs

    name, split = arguments.protocol, arguments.split or "held_out"
    known = build.env_entry(config.env_type).protocols
    if not known:
        raise ConfigError(
            f"--protocol {name}: {config.env_type} has no published ones. Name a "
            "LIBERO --suite, or drop it"
        )
    chosen = build.attribute(known)(
        name, config.env, view=not _recorded(arguments.checkpoint).is_file()
    )
    config = configs.override(config, [*chosen, *arguments.overrides])
    benchmark = methods(config.env).benchmark
    if benchmark is not None and (why := benchmark(split, config.slots.python)["departures"]):
        raise ConfigError(
            f"--protocol {name} is of the published benchmark, and this is another "
            f"one: {'; '.join(why)}"
        )
    return config


def _set_evaluation(config: Any, arguments: argparse.Namespace) -> None:
    """What the command line says of an evaluation goes before what the checkpoint's run
    recorded."""
    if arguments.split is not None:
        config.split = arguments.split
    if arguments.seed is not None:
        config.seed = arguments.seed
    if arguments.sample is not None:
        config.deterministic = not arguments.sample


def _recorded(checkpoint: Path | str | None) -> Path:
    """The config of the run that a checkpoint belongs to, if it does."""
    if checkpoint is None or is_address(checkpoint):
        return Path(os.devnull)  # (no file)
    return Path(os.path.realpath(checkpoint)).parent.parent / "config.yaml"


def config_of_checkpoint(
    checkpoint: Path | None, suite: str | None, overrides: Sequence[str]
) -> Any:
    """The env as the checkpoint's own run recorded it; with a named suite, or outside of a run,
    that suite's defaults."""
    from vla_rl import build
    from vla_rl import config as configs

    recorded = _recorded(checkpoint)
    env, chosen = build.suite(suite) if suite else ("tabletop", [])
    if recorded.is_file():
        config = configs.load(recorded)
        # the run's checkpoints hold them already, and a student may lack their keys
        config.policy_changes = {}
        # Cameras and control stay those it has learnt with.
        if suite is None or (chosen and config.env_type == env):
            return configs.override(config, [*chosen, *overrides])
    return configs.compose(configs.with_run([f"env={env}", *chosen, *overrides], ["~run"]))
