"""What is known, before a run begins, of the data that it learns from: that there are
demonstrations, and that they say what was sent; that episodes of other runs are there, and would be
learned from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vla_rl import build, files
from vla_rl.config import RunConfig
from vla_rl.config.phases import PHASES
from vla_rl.config.run import DEMONSTRATIONS
from vla_rl.errors import ConfigError
from vla_rl.options import AlgorithmOptions, EnvOptions, view

_AGAIN = "write or fetch the dataset again"


def check_demonstrations(config: RunConfig, has_data: bool) -> None:
    """Raise `ConfigError` where RL would learn from demonstrations and there are none, or where
    ``rl.restarts`` or ``sft.labels=sent`` could not work. ``has_data``: there will be
    demonstrations."""
    if "rl" in config.phases and not has_data:
        _check_replayed(config)
    restarts, asks = config.rl.restarts, ""
    if restarts.share and "rl" in config.phases:
        _check_restarts(config)
        if DEMONSTRATIONS in restarts.used:
            asks = (
                f"rl.restarts.share={restarts.share:g} with "
                f"rl.restarts.sources={list(restarts.sources)}"
            )
            remedy = (
                "name sources that are the policy's own, rl.restarts.sources=[successes,failures]"
            )
    if config.sft.labels == "sent" and "sft" in config.phases and not config.checkpoint:
        asks, remedy = "sft.labels=sent", "use sft.labels=clean"
    if not asks:
        return
    if not has_data:
        raise ConfigError(
            f"{asks} needs demonstrations, and this run has none: name those that the start was "
            f"trained on with dataset=FOLDER (with checkpoint= nothing is collected), or {remedy}"
        )
    for dataset in config.datasets:
        info = Path(dataset) / "meta" / "info.json"
        if not info.is_file():
            continue
        features = files.read_json(info, _AGAIN).get("features")
        if not isinstance(features, Mapping) or "sent" not in features:
            raise ConfigError(
                f"{asks}: {dataset} does not hold what was sent to the robot (the column "
                "'sent', which scripted experts and collect.policy write): collect it anew, or "
                f"{remedy}"
            )


def check_offline_replays(config: RunConfig) -> None:
    """Raise `ConfigError` where nothing would learn from ``replay.offline``, or a share is asked
    of none."""
    algorithm, given = (
        view(config.algorithm, AlgorithmOptions),
        f"replay.offline={list(config.replay.offline)}",
    )
    if not config.replay.offline:
        if algorithm.offline_share and "rl" in config.phases:
            raise ConfigError(
                f"algorithm.offline_share={algorithm.offline_share:g} needs episodes of other "
                "runs: name those runs, replay.offline=[outputs/NAME], or set it to 0"
            )
        return
    if "offline" in config.phases or "rl" not in config.phases:
        return
    if algorithm.updates_per_decision is None:
        raise ConfigError(
            f"{given} needs an algorithm that learns from a replay, and "
            f"algorithm.type={config.algorithm_type} has none: use algorithm=rlpd, residual, iql "
            "or another of docs/explanation/off_policy.md, or leave it out"
        )
    if algorithm.offline_share == 0:
        raise ConfigError(
            f"{given}: algorithm.offline_share=0 draws none of those episodes. Set "
            "algorithm.offline_share=0.25, or leave replay.offline out"
        )


def has_data(config: RunConfig) -> bool:
    """Whether there will be demonstrations."""
    collects = "collect" in config.phases and not config.checkpoint
    return bool(config.dataset) or collects or (config.run_dir / "dataset").is_dir()


def is_recording(config: RunConfig) -> bool:
    """Whether the run's env is a recording, in which no episode can be run."""
    return bool(build.env_entry(config.env_type).records)


def check_recording(config: RunConfig) -> None:
    """Raise `ConfigError` where the env is a recording and none is named, or a phase would run
    episodes in it; where it is none, for several datasets."""
    if not is_recording(config):
        _ = config.one_dataset
        return
    if not config.dataset:
        raise ConfigError(
            "env=dataset is read from a recording, and none is named: give dataset=FOLDER"
        )
    if running := [name for name in config.phases if not PHASES[name].recorded]:
        usable = ",".join(name for name in config.phases if PHASES[name].recorded)
        raise ConfigError(
            f"phases has {running[0]}, which runs episodes, and env=dataset is a recording without "
            f"a simulator: use run=sft, or phases=[{usable}] (with eval_actions: errors of actions "
            "on episodes that were kept out)"
        )
    others = [name for name in ("offline", "rl", "reward") if name in config.phases]
    if isinstance(config.dataset, dict) and others:
        raise ConfigError(
            f"dataset={config.dataset} has weights, by which SFT draws its batches, and phases has "
            f"{others[0]}, which takes all rows alike: name them without, dataset="
            f"[{','.join(config.datasets)}]"
        )
    if config.env.actions == "delta":
        _check_moves(config)
    asks = {"rl.iterations": config.rl.iterations} if "rl" in config.phases else {}
    if "offline" in config.phases:
        asks |= {
            "offline.start_episodes": config.offline.start_episodes,
            "offline.episodes": config.offline.episodes,
        }
    for key, value in asks.items():
        if value:
            raise ConfigError(
                f"{key}={value} runs episodes, and env=dataset is a recording, "
                f"without any: set {key}=0"
            )
    if "rl" in config.phases and not view(config.algorithm, AlgorithmOptions).offline_updates:
        raise ConfigError(
            "phases has rl, and env=dataset has no episodes but those that were recorded: learn "
            "from them before the first one with an algorithm that can (algorithm=iql "
            "algorithm.offline_updates=5000 rl.iterations=0), or leave rl out"
        )


def _check_moves(config: RunConfig) -> None:
    if {"rl", "offline"} & set(config.phases):
        raise ConfigError(
            "env.actions=delta is SFT's, and phases has RL, which learns of a recording in the robot's "
            "own actions: use env.actions=absolute, or leave RL out"
        )
    if any("use_relative_actions" in str(x) for x in vars(config.policy).get("options") or ()):
        raise ConfigError(
            "env.actions=delta and policy.options=[use_relative_actions:...] both count actions from "
            "the state: leave one of them out"
        )


def _check_replayed(config: RunConfig) -> None:
    algorithm = view(config.algorithm, AlgorithmOptions)
    for name in (
        ("demonstration_share",)
        if config.replay.offline
        else ("offline_updates", "demonstration_share")
    ):
        if value := getattr(algorithm, name):
            raise ConfigError(
                f"algorithm.{name}={value:g} needs demonstrations, and this run has none: name "
                "those that the start was trained on with dataset=FOLDER (with checkpoint= nothing "
                f"is collected), or set algorithm.{name}=0"
            )


def _check_restarts(config: RunConfig) -> None:
    rl = config.rl
    groups, given = (
        rl.episodes_per_iteration // rl.group_size,
        f"rl.restarts.share={rl.restarts.share:g}",
    )
    if not round(rl.restarts.share * groups) or groups < 2:
        raise ConfigError(
            f"{given} of {groups} groups an iteration "
            f"(rl.episodes_per_iteration={rl.episodes_per_iteration}, "
            f"rl.group_size={rl.group_size}) is none, as one is always whole: raise the share or "
            "rl.episodes_per_iteration, or set rl.restarts.share=0"
        )
    if view(config.env, EnvOptions).chunk_is_path:
        raise ConfigError(
            f"{given}: in env.type={config.env_type} a chunk is one path from rest to rest, so the "
            "same actions in other chunks lead elsewhere, and no episode can begin in the middle "
            "of another. Set rl.restarts.share=0, or let each action be a path (RoboTwin: "
            "env.path=action)"
        )
    if config.cluster_type == "ray" and config.cluster.max_late:
        raise ConfigError(
            f"{given}: cluster.max_late={config.cluster.max_late} takes what ends first, and "
            "episodes that begin in the middle end first: set cluster.max_late=0, or "
            "rl.restarts.share=0"
        )
