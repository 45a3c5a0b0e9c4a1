"""``vla-rl reward``: score, fit and judge reward models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vla_rl.commands.shared import Add, add_overrides
from vla_rl.errors import UserError


def add(command: Add) -> None:
    """``vla-rl reward score``, ``fit`` and ``quality``."""
    reward = command(
        "reward",
        None,
        "score trajectories, train a reward model, or judge whether one is worth training on",
    )
    actions = reward.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, function, text in (
        (
            "score",
            run_reward_score,
            "curves, table and a video of what a reward model says of a dataset or run",
        ),
        (
            "fit",
            run_reward_fit,
            "train a reward model on datasets and runs: data=FOLDER, more than once if need be",
        ),
        (
            "quality",
            run_reward_quality,
            "is a reward model good enough to train on? exit status 1 for a bad verdict",
        ),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        add_overrides(sub, "dataset, run, rollouts; reward=NAME ...", "SOURCE|key=value")
        sub.add_argument(
            "--out",
            type=Path,
            metavar="FOLDER",
            help="where to write (default: outputs/reward_<name>)",
        )
        sub.add_argument(
            "--episodes",
            type=int,
            default=64,
            help="rollouts of a run's policy (kept in <run>/rollouts)",
        )
        sub.add_argument("--limit", type=int, default=0, help="demonstrations per dataset (0: all)")
        sub.add_argument(
            "--policy", default="", metavar="NAME", help="which checkpoint of a run acts: sft or rl"
        )
        if name == "score":
            sub.add_argument("--videos", type=int, default=8, help="episodes in the video")
            sub.add_argument(
                "--preferences",
                type=Path,
                metavar="FILE",
                help="write comparisons for reward=preference",
            )


def _reward_sources(
    arguments: argparse.Namespace, to_learn_from: bool = False
) -> tuple[Any, list[Any]]:
    """The composed config of a reward command, and the sources that it names."""
    from vla_rl.config import compose, with_run

    folders = list(_sources_from(arguments.overrides))
    if not folders:
        raise UserError(
            "name what to read: a dataset, a run or rollouts (vla-rl reward score "
            "FOLDER reward=NAME)"
        )
    options = [o for o in arguments.overrides if "=" in o and not o.startswith("data=")]
    config = compose(with_run(options, ["~run"]))
    from vla_rl.assembly.sources import load_source

    reading = {
        "limit": arguments.limit,
        "episodes": arguments.episodes,
        "checkpoint": arguments.policy,
        "to_learn_from": to_learn_from,
    }
    return config, [
        load_source(folder, stride=config.reward_check.stride, **reading) for folder in folders
    ]


def _sources_from(texts: Sequence[str]) -> Iterator[str]:
    """Source folders among command-line words: plain ones, and ``data=FOLDER``."""
    for text in texts:
        if text.startswith("data="):
            yield text.removeprefix("data=")
        elif "=" not in text and not text.startswith("~"):
            yield text


def _only(sources: Sequence[Any]) -> Any:
    if len(sources) > 1:
        raise UserError(
            f"score and quality read one source, got {len(sources)}: run the command once for each"
        )
    return sources[0]


def _reward_folder(arguments: argparse.Namespace, config: Any) -> Path:
    return (
        arguments.out or Path(config.output_dir) / f"reward_{config.reward_type.replace(':', '.')}"
    )


def run_reward_score(arguments: argparse.Namespace) -> None:
    config, sources = _reward_sources(arguments)  # before the seconds that torch takes to import
    from vla_rl.rewards.tools import run_score

    options = {"videos": arguments.videos, "preferences": arguments.preferences}
    run_score(
        config.reward_type,
        config.reward,
        _only(sources),
        _reward_folder(arguments, config),
        **options,
    )


def run_reward_fit(arguments: argparse.Namespace) -> None:
    config, sources = _reward_sources(arguments, to_learn_from=True)
    from vla_rl.monitoring.progress import Progress
    from vla_rl.rewards.build import fit_updates
    from vla_rl.rewards.tools import run_fit

    folder = _reward_folder(arguments, config)
    with Progress() as progress, progress.task("fit", fit_updates(config.reward)) as bar:

        def update(done: int, loss: float) -> None:
            bar.update(done, loss=loss)

        quality = run_fit(
            config.reward_type,
            config.reward,
            sources,
            folder,
            config.reward_check,
            seed=config.seed,
            progress=update,
        )
    print(f"{config.reward_type}: trained on {', '.join(s.what for s in sources)}")
    print(
        "not judged: no rollouts were given, only demonstrations (add data=RUN)"
        if quality is None
        else quality.text()
    )
    print(
        f"use it: vla-rl train run=quickstart reward={config.reward_type} "
        f"reward.checkpoint={folder}"
    )


def run_reward_quality(arguments: argparse.Namespace) -> int:
    config, sources = _reward_sources(arguments)
    from vla_rl.rewards.tools import run_quality

    folder = _reward_folder(arguments, config)
    quality = run_quality(
        config.reward_type, config.reward, _only(sources), folder, config.reward_check
    )
    return int(quality.verdict == "bad")
