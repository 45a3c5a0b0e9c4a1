"""Options that belong together, each of which is right by itself."""

from __future__ import annotations

from pathlib import Path

from vla_rl import build, files
from vla_rl.checks.cluster import check_cluster, check_sft
from vla_rl.checks.data import (
    check_demonstrations,
    check_offline_replays,
    check_recording,
    has_data,
    is_recording,
)
from vla_rl.checks.planned import Planned
from vla_rl.checks.rewards import check_fallback
from vla_rl.config import RunConfig
from vla_rl.config.algorithms import advantage_entry, advantage_of
from vla_rl.errors import ConfigError
from vla_rl.options import (
    ActorOptions,
    AlgorithmClass,
    AlgorithmOptions,
    EnvClass,
    EnvOptions,
    MemoryOptions,
    PolicyOptions,
    methods,
    view,
)


def check_run(config: RunConfig) -> None:
    """Raise `ConfigError` for a phase that could learn nothing, before any phase runs."""
    check_offline_replays(config)
    check_recording(config)
    if config.sft.start and (config.checkpoint or "sft" not in config.phases):
        other = (
            f"checkpoint={config.checkpoint} brings a"
            if config.checkpoint
            else "no phase sft makes that run's"
        )
        raise ConfigError(
            f"sft.start={config.sft.start} is where SFT goes on from, and {other} policy: leave "
            "sft.start out, or "
            + ("checkpoint" if config.checkpoint else "name sft in phases=[...]")
        )
    if "sft" in config.phases and not config.checkpoint:
        policy = build.entry("policy", config.policy_type)
        lacks = isinstance(policy, build.PolicyEntry) and "imitation" not in policy.can
        if lacks and not config.given:
            raise ConfigError(
                f"phase sft needs a policy that imitates, and policy.type={config.policy_type} "
                "cannot be trained by imitation: use "
                f"policy.type={' or '.join(build.policies_that_can('imitation'))}"
            )
        if config.cluster_type == "ray" and config.cluster.has_ranks:
            check_sft(config)
    if "offline" in config.phases:
        _check_offline(config)
    if "eval_test" in config.phases:
        config.evaluate.test_states(config.env)
    if "rl" not in config.phases or not (config.rl.iterations or is_recording(config)):
        check_demonstrations(config, has_data(config))
        return
    if not config.given:  # which brings its own policy
        build.require_fit(config.algorithm_type, config.policy_type, config.actor_type)
    _check_actor(config)
    if config.rl.rhythm == "concurrent":
        _check_rhythm(config)
    if config.cluster_type == "ray":
        check_cluster(config)
    algorithm = view(config.algorithm, AlgorithmOptions)
    advantage, grouped = algorithm.advantage, advantage_of(config.algorithm).grouped
    # a virtual sample joins groups of one
    joined = advantage == "grpo" and algorithm.virtual_best != "none"
    if grouped and not joined and config.rl.group_size < 2:
        raise ConfigError(
            f"rl.group_size={config.rl.group_size} with algorithm.advantage={advantage}: a group "
            "of one has nothing to be compared with, so every advantage would be 0 and nothing "
            "would be learned. Set rl.group_size=8 (at least 2; rl.episodes_per_iteration must be "
            "a multiple of it), or algorithm.advantage=gae"
        )
    memory = view(algorithm.memory, MemoryOptions)
    if memory.episodes and memory.hindsight:
        _check_hindsight(config)
    check_demonstrations(config, has_data(config))
    check_fallback(config)


def _check_hindsight(config: RunConfig) -> None:
    """Raise `ConfigError` where nobody says which other task was solved, or there is none."""
    env = build.implementation("env", config.env_type)
    if not view(env, EnvClass).tells_instead:
        raise ConfigError(
            f"algorithm.memory.hindsight needs an env that tells which other task was solved, and "
            f"env={config.env_type} does not: use algorithm.memory.hindsight=false"
        )
    kept_apart = {name.rpartition("/")[2] for name in config.held_out_tasks}
    if len({name.rpartition("/")[2] for name in config.tasks} - kept_apart) == 1:
        raise ConfigError(
            f"algorithm.memory.hindsight needs other tasks, and tasks={config.tasks} has none: use "
            "algorithm.memory.hindsight=false"
        )


def _check_actor(config: RunConfig) -> None:
    """Raise `ConfigError` for an actor that the algorithm does not train, or whose own eyes would
    have nothing to see. Policies' cameras are asked as it is made."""
    actor, env = view(config.actor, ActorOptions), view(config.env, EnvOptions)
    key, distribution = "actor", actor.distribution
    if not distribution and not config.given:  # a policy that is its own actor
        key, distribution = "policy", view(config.policy, ActorOptions).distribution
    made = build.implementation("algorithm", config.algorithm_type) if distribution else None
    needed = view(made, AlgorithmClass).actor_distribution
    if needed and distribution != needed:
        other = "sac" if needed == "deterministic" else "td3"
        raise ConfigError(
            f"algorithm.type={config.algorithm_type} needs a {needed} actor, and "
            f"{key}.distribution={distribution}: set {key}.distribution={needed}, or use "
            f"algorithm={other}"
        )
    if actor.eyes != "pictures":
        return
    if not (env.cameras or env.finds_cameras) or env.observe == "state":
        raise ConfigError(
            f"actor.eyes=pictures, and env={config.env_type} shows none here: set "
            "actor.eyes=features, or give it cameras (env.observe=pictures, env.cameras)"
        )
    for key, value in {"shift": actor.shift, "stride": actor.stride}.items():
        if env.pixels and value >= env.pixels:
            raise ConfigError(
                f"actor.{key}={value} is too much for pictures of {env.pixels} pixels: use a few, "
                "such as 4"
            )


def _check_rhythm(config: RunConfig) -> None:
    """Raise `ConfigError` for an algorithm that cannot learn in another process than the one
    that acts."""
    entry, given = (
        build.entry("algorithm", config.algorithm_type),
        f"algorithm.type={config.algorithm_type}",
    )
    # (users' own say so as they start)
    if not isinstance(entry, build.AlgorithmEntry) or entry.needs == "actor":
        return
    why = (
        "learns from the episodes of the present policy alone, so it has to wait for them, and "
        "they for it"
    )
    if entry.needs == "ranked_candidates":
        why = (
            "chooses actions by its critics, which would be with the learner, in the other process"
        )
    raise ConfigError(
        f"rl.rhythm=concurrent: {given} {why}. Use rl.rhythm=alternate, or algorithm=td3, sac, "
        "residual, rlpd, wsrl or dsrl"
    )


def _check_offline(config: RunConfig) -> None:
    """Offline rounds train a denoising chain by PPO."""
    if not config.offline.rounds:
        raise ConfigError(
            "phases has offline, and offline.rounds=0 trains nothing: set offline.rounds=3, or "
            "leave offline and eval_offline out of phases=[...] (algorithm=rl100 chooses numbers)"
        )
    if config.algorithm_type != "ppo":
        raise ConfigError(
            "phases has offline, which needs algorithm.type=ppo, and this is "
            f"{config.algorithm_type}: set algorithm=rl100, or leave offline out of phases=[...]"
        )
    policy = build.entry("policy", config.policy_type)
    needed = {"likelihood", "features", "noise", "cached_features"}
    if not config.given and isinstance(policy, build.PolicyEntry) and not needed <= set(policy.can):
        raise ConfigError(
            "phases has offline, which needs a policy with a denoising chain of this project, and "
            f"policy.type={config.policy_type} has none: use policy=nano_flow or nano_diffusion, "
            "or leave offline out of phases=[...] (algorithm=iql learns offline with any)"
        )


def check_given(run: Planned) -> None:
    """Raise `ConfigError` where SFT or the algorithm could not train the policy of the run's
    checkpoint, which is whole, as far as its kind tells."""
    config, open_phases = run.config, run.open_phases
    if not (config.given and open_phases):
        return
    path = files.existing_checkpoint(Path(config.given)) / files.CONFIG
    kind = files.read_json(path, "")["policy_type"]
    entry = build.REGISTRY["policy"].get(kind)
    if not isinstance(entry, build.PolicyEntry):
        return  # an actor on one, or somebody's own
    key = "checkpoint" if config.checkpoint else "sft.start"
    place = f"{key}={config.given} holds a {kind} policy"
    if "sft" in open_phases and not config.checkpoint and "imitation" not in entry.can:
        raise ConfigError(f"{place}, which cannot be trained by imitation")
    if "rl" in open_phases:
        try:
            build.require_fit(config.algorithm_type, kind, config.actor_type)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None


def check(run: Planned) -> None:
    """Raise `ConfigError` for options that leave SFT or RL nothing to learn by."""
    _check_values(run.config, run.open_phases)
    c = run.config
    asks = methods(c.algorithm).check_policy
    if "rl" in c.phases and not c.given and asks is not None:
        asks(c.policy)  # the algorithm asks the policy itself again


def _check_values(config: RunConfig, open_phases: list[str]) -> None:
    """Does SFT learn, does augmentation leave something to see, and does the advantage have
    values to work with?"""
    if "sft" in open_phases and not config.checkpoint:
        if not config.sft.learning_rate:
            raise ConfigError(
                "sft.learning_rate=0.0 trains nothing: give a value above 0, such as 1e-3"
            )
        size = view(config.env, EnvOptions).pixels
        if size and config.sft.augment.shift >= size:
            raise ConfigError(
                f"sft.augment.shift={config.sft.augment.shift} pushes whole pictures of {size} "
                "pixels out of sight: use a few pixels, such as 4"
            )
    steps, policy = config.rollout.replan_steps, view(config.policy, PolicyOptions)
    if not config.given and policy.chunk_length is not None and steps > policy.chunk_length:
        raise ConfigError(
            f"rollout.replan_steps={steps} is more than policy.chunk_length={policy.chunk_length}: "
            "a chunk cannot be followed past its end. Use 0 for the whole chunk"
        )
    if (
        "rl" not in open_phases
        or config.critic_type != "none"
        or policy.value_head is not False
        or config.given
    ):
        return
    advantage = view(config.algorithm, AlgorithmOptions).advantage
    if advantage and advantage_entry(advantage).needs_value:
        raise ConfigError(
            f"algorithm.advantage={advantage} needs values, and there is neither a critic nor a "
            "value head: set critic=privileged or policy.value_head=true, or "
            "algorithm.advantage=grpo with rl.group_size=8"
        )
