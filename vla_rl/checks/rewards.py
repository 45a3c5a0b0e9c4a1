"""What a run is rewarded for, and who trains that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vla_rl import build
from vla_rl.checks.data import has_data
from vla_rl.checks.planned import Planned
from vla_rl.config import RunConfig, checked
from vla_rl.config.episodes import refuse_potential
from vla_rl.errors import ConfigError
from vla_rl.options import (
    AlgorithmClass,
    AlgorithmOptions,
    EnvOptions,
    RewardClass,
    RewardOptions,
    view,
)


def check(run: Planned) -> None:
    """Raise `ConfigError` for a reward that nothing trains, for parts of one that there are not,
    and for a potential that would pay for something else than success."""
    config, open_phases = run.config, run.open_phases
    if "rl" not in open_phases and "reward" not in open_phases:
        return
    parts = list(reward_parts(config))
    _check_env(config, [kind for _, kind, _ in parts])
    learned = [(name, part) for name, kind, part in parts if _learned(kind, part)]
    every = config.reward_check.refit_every
    if every and not learned and "rl" in open_phases:
        raise ConfigError(
            f"reward_check.refit_every={every} refits a learned reward, and "
            f"reward={config.reward_type} is none: set it to 0, or choose reward=pairwise, "
            "process, classifier, value_progress or preference"
        )
    untrained = [name for name, part in learned if not view(part, RewardOptions).checkpoint]
    trained = "reward" in config.phases or (not run.fresh and (config.run_dir / "reward").is_dir())
    if "rl" in open_phases and untrained and not trained:
        raise ConfigError(
            f"reward={untrained[0]} is learned, and nothing trains it: put reward before rl in "
            "phases, or name a trained one with reward.checkpoint=FOLDER ('vla-rl reward fit "
            f"reward={untrained[0]} data=FOLDER' writes one)"
        )
    names = view(config.algorithm, AlgorithmOptions).reward_names
    unknown = [name for name in names if name not in {part for part, _, _ in parts}]
    if unknown or (names and config.reward_type != "combined"):
        raise ConfigError(
            f"algorithm.reward_names has {(unknown or names)[0]!r}, and "
            f"reward={config.reward_type} has no such part: name parts of reward=combined "
            f"({', '.join(part for part, _, _ in parts)}), or leave it empty"
        )
    for _, _, part in parts:
        refuse_potential(view(part, RewardOptions).shaping, config.algorithm)


def _check_env(config: RunConfig, kinds: list[str]) -> None:
    """Does somebody read the rewards that the env gives, and does it give those that are read?"""
    given = view(config.env, EnvOptions).reward
    if given == "env" and "env" not in kinds:
        raise ConfigError(
            f"env.reward=env gives the env's own rewards, and reward={config.reward_type} reads "
            "none of them: set reward=env, or leave env.reward at success"
        )
    if given == "success" and "env" in kinds:
        raise ConfigError(
            "reward=env pays what the env gives, and env.reward=success makes that its success "
            "alone: set env.reward=env, or reward=success"
        )


def reward_parts(config: RunConfig) -> Iterator[tuple[str, str, Any]]:
    """(name, type, config) of the reward, or of each part of a combined one."""
    if config.reward_type == "combined":
        for name, options in config.reward.parts.items():
            kind, part, _ = config.reward.part(name, options)
            yield name, kind, part
    else:
        yield config.reward_type, config.reward_type, config.reward


def _learned(kind: str, reward: Any) -> bool:
    # the learned ones of this project; no need to import them
    if view(reward, RewardOptions).refit_updates is not None:
        return True
    return ":" in kind and bool(view(build.implementation("reward", kind), RewardClass).learned)


def is_sparse(config: RunConfig) -> bool:
    """Whether an algorithm that meets no success has nothing to learn from."""
    return config.reward_type == "success" or not reads_rewards(config)


def reads_rewards(config: RunConfig) -> bool:
    """Whether the algorithm learns from rewards at all."""
    return view(
        build.implementation("algorithm", config.algorithm_type), AlgorithmClass
    ).reads_rewards


def fallback_config(config: RunConfig) -> Any:
    """The config of the progress reward: ``rl.fallback_reward`` over the defaults of ``process``
    in mode delta."""
    options = dict(config.rl.fallback_reward)
    shaping = options.pop("shaping", {})
    if isinstance(shaping, Mapping):
        shaping = {"mode": "delta", **shaping}
    where = "rl.fallback_reward"
    return checked(build.config_class("reward", "process"), {**options, "shaping": shaping}, where)


def check_fallback(config: RunConfig) -> None:
    """Raise `ConfigError` where ``rl.fallback`` could not stand in for the run's reward."""
    if config.rl.fallback == "none":
        return
    rl, given = config.rl, f"rl.fallback={config.rl.fallback}"
    if config.reward_type != "success":
        raise ConfigError(
            f"{given} stands in for the task's own success, and reward.type={config.reward_type} "
            "pays for more than that already: set rl.fallback=none, or reward=success"
        )
    if not reads_rewards(config):
        raise ConfigError(
            f"{given}: algorithm.type={config.algorithm_type} reads no rewards. Use "
            "algorithm=ppo or grpo"
        )
    if rl.dynamic_sampling and rl.dynamic_sampling_by == "success":
        raise ConfigError(
            f"{given}: rl.dynamic_sampling_by=success drops every group without a success, "
            "whatever it is rewarded. Set rl.dynamic_sampling_by=reward"
        )
    reward = fallback_config(config)
    if reward.shaping.mode == "potential":
        raise ConfigError(
            f"{given}: rl.fallback_reward.shaping.mode=potential says nothing where nothing "
            "succeeds. Use delta or final"
        )
    if not reward.checkpoint and not (has_data(config) and config.reward_check.demonstrations):
        raise ConfigError(
            f"{given} learns progress from demonstrations, and this run has none: give those of "
            "the start as dataset=FOLDER (with reward_check.demonstrations above 0), or a trained "
            "reward as rl.fallback_reward.checkpoint=FOLDER ('vla-rl reward fit reward=process "
            "data=FOLDER' writes one)"
        )
