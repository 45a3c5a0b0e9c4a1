"""What is checked before the first phase of a run, and before torch is imported.

A mistake that would end a run after hours of collecting and training is found here within a second:
values that do not go with each other, phases that lack their input, files that are missing or
damaged, a place that cannot be written, no room on the disk, a rendering backend that does not
exist. Nothing is created. What needs the open env (tasks, the robot of a checkpoint or dataset) is
checked by `pipeline` right after, still before anything is written.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl import build, files
from vla_rl.asked import (
    ActorOptions,
    AlgorithmClass,
    AlgorithmOptions,
    EnvOptions,
    PolicyOptions,
    RewardClass,
    RewardOptions,
    asked,
    methods,
)
from vla_rl.assembly.folder import pending
from vla_rl.checks.cluster import check_cluster, check_room
from vla_rl.checks.data import (
    check_demonstrations,
    check_offline_replays,
    check_recording,
    is_recording,
)
from vla_rl.checks.machine import check_machine, check_workers
from vla_rl.config import RunConfig, checked
from vla_rl.config.algorithms import advantage_entry, advantage_of
from vla_rl.config.episodes import refuse_potential
from vla_rl.config.phases import PHASES
from vla_rl.config.serving import require_wire
from vla_rl.devices import check_device
from vla_rl.errors import ConfigError, UserError
from vla_rl.hub import DATASET, MODEL, fetch_hint
from vla_rl.monitoring.machine import available_cores, default_threads
from vla_rl.paths import is_address

_MEGABYTE = 10**6
_LEAST_SPACE = 100 * _MEGABYTE  # of any run: small checkpoints, videos and a report
_FRAMES = 50  # of a demonstration, roughly; a pixel takes about a byte, as three of them compress
# Keys of component configs that name files or folders which exist already, by the group that they
# are in.
_PLACES = {
    "reward": ("checkpoint", "reference", "release", "comparisons", "backbone_checkpoint"),
    "env": ("assets", "root", "seeds"),
    "policy": ("checkpoint", "vlm"),
    "sft": ("filter",),
}


def check(config: RunConfig, *, fresh: bool = False) -> None:
    """Raise `UserError` for what would end this run later on. ``fresh``: what its folder holds
    will be moved away."""
    check_run(config)
    threads(config)
    check_device(config.device)
    check_workers(config)
    files.require_writable(config.run_dir, f"output_dir={config.output_dir} name={config.name}")
    open_phases = pending(config, fresh)
    _check_inputs(config, open_phases, fresh)
    _check_rewards(config, open_phases, fresh)
    _check_values(config, open_phases)
    if (
        "rl" in config.phases
        and not config.checkpoint
        and (check := methods(config.algorithm).check_policy) is not None
    ):
        check(config.policy)  # the algorithm asks the policy itself again
    if open_phases:
        _check_places(config)
        _check_space(config, open_phases)
        acting = [] if config.checkpoint or open_phases == ["collect"] else [config.policy]
        check_machine(config, [*acting, *(part for _, _, part in reward_parts(config))])
    if "rl" in open_phases and config.cluster_type == "ray":
        check_room(config)


def threads(config: RunConfig) -> int:
    """Threads of the main process."""
    cores = available_cores()
    if config.threads > cores:
        raise ConfigError(
            f"threads={config.threads} is more than the {cores} cores here: threads=0 takes all"
        )
    return config.threads or default_threads()


def _check_inputs(config: RunConfig, open_phases: list[str], fresh: bool) -> None:
    """Does every phase find what it starts from, made by a phase before it or there already?"""

    def made(phase: str, by: str) -> bool:
        before = config.phases[: config.phases.index(by)]
        return phase in before or (
            not fresh and (config.run_dir / PHASES[phase].writes[0]).exists()
        )

    for name in open_phases:
        needs, has_data = PHASES[name].needs, config.dataset or made("collect", name)
        if needs == "demonstrations" and not (config.checkpoint or has_data):
            raise ConfigError(
                f"phases has {name}, and there are no demonstrations to learn from: put collect "
                "before it, or name some with dataset=FOLDER"
            )
        published = "" if "sft" in config.phases else asked(config.policy, PolicyOptions).checkpoint
        if needs == "start" and not (config.checkpoint or published or made("sft", name)):
            raise ConfigError(
                f"phases has {name}, and there is no policy to start from: put sft before it "
                f"(phases=[collect,sft,{name}]), or name one with checkpoint=FOLDER"
            )
        if needs in PHASES and not made(needs, name):
            raise ConfigError(
                f"phases has {name}, and {needs} has trained no policy that it could judge: put "
                f"{needs} before it, or leave {name} out"
            )
        if name == "offline" and not (
            has_data or config.offline.start_episodes or config.replay.offline
        ):
            raise ConfigError(
                "phases has offline, and there is no data to learn from: put collect before it, "
                "name demonstrations with dataset=FOLDER, or let the policy act first with "
                "offline.start_episodes=64"
            )
        if name == "eval_actions" and not has_data:
            raise ConfigError(
                "phases has eval_actions, which compares actions with demonstrations, and there "
                "are none: name some with dataset=FOLDER, or put collect before it"
            )
        if name == "rl" and not (config.rl.iterations or is_recording(config)):
            raise ConfigError(
                "rl.iterations=0 trains nothing: give 1 or more, or leave rl and "
                "eval_rl out of phases=[...]"
            )


# ---------------------------------------------------------------------- values that belong together
def check_run(config: RunConfig) -> None:
    """Raise `ConfigError` for a phase that could learn nothing, before any phase runs."""
    check_offline_replays(config)
    check_recording(config)
    if "sft" in config.phases and not config.checkpoint:
        policy = build.entry("policy", config.policy_type)
        if isinstance(policy, build.PolicyEntry) and "imitation" not in policy.can:
            raise ConfigError(
                f"phases has sft, and policy.type={config.policy_type} cannot be trained by "
                f"imitation: use policy.type={' or '.join(build.policies_that_can('imitation'))}"
            )
    if "offline" in config.phases:
        _check_offline(config)
    if "rl" not in config.phases or not (config.rl.iterations or is_recording(config)):
        return
    if not config.checkpoint:  # which brings its own policy
        build.require_fit(config.algorithm_type, config.policy_type, config.actor_type)
    _check_actor(config)
    if config.rl.rhythm == "concurrent":
        _check_rhythm(config)
    if config.cluster_type == "ray":
        check_cluster(config)
    algorithm = asked(config.algorithm, AlgorithmOptions)
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
    check_demonstrations(config, _has_data(config))
    _check_fallback(config)


def _check_actor(config: RunConfig) -> None:
    """Raise `ConfigError` for an actor that the algorithm does not train, or whose own eyes would
    have nothing to see. Policies' cameras are asked as it is made."""
    actor, env = asked(config.actor, ActorOptions), asked(config.env, EnvOptions)
    made = build.implementation("algorithm", config.algorithm_type) if actor.distribution else None
    needed = asked(made, AlgorithmClass).actor_distribution
    if needed and actor.distribution != needed:
        other = "sac" if needed == "deterministic" else "td3"
        raise ConfigError(
            f"algorithm.type={config.algorithm_type} trains a {needed} actor, and "
            f"actor.distribution={actor.distribution}: set actor.distribution={needed}, or use "
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
    if entry.needs == "candidates":
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
    needed = {"likelihood", "features", "noise", "kept"}
    if (
        not config.checkpoint
        and isinstance(policy, build.PolicyEntry)
        and not needed <= set(policy.can)
    ):
        raise ConfigError(
            "phases has offline, which needs a policy with a denoising chain of this project, and "
            f"policy.type={config.policy_type} has none: use policy=nano_flow or nano_diffusion, "
            "or leave offline out of phases=[...] (algorithm=iql learns offline with any)"
        )


def _check_values(config: RunConfig, open_phases: list[str]) -> None:
    """Does SFT learn, does augmentation leave something to see, and does the advantage have
    values to work with?"""
    if "sft" in open_phases and not config.checkpoint:
        if not config.sft.learning_rate:
            raise ConfigError(
                "sft.learning_rate=0.0 trains nothing: give a value above 0, such as 1e-3"
            )
        size = asked(config.env, EnvOptions).pixels
        if size and config.sft.augment.shift >= size:
            raise ConfigError(
                f"sft.augment.shift={config.sft.augment.shift} pushes whole pictures of {size} "
                "pixels out of sight: use a few pixels, such as 4"
            )
    steps, policy = config.rollout.replan_steps, asked(config.policy, PolicyOptions)
    if not config.checkpoint and policy.chunk_length is not None and steps > policy.chunk_length:
        raise ConfigError(
            f"rollout.replan_steps={steps} is more than policy.chunk_length={policy.chunk_length}: "
            "a chunk cannot be followed past its end. Use 0 for the whole chunk"
        )
    if (
        "rl" not in open_phases
        or config.critic_type != "none"
        or policy.value_head is not False
        or config.checkpoint
    ):
        return
    advantage = asked(config.algorithm, AlgorithmOptions).advantage
    if advantage and advantage_entry(advantage).needs_value:
        raise ConfigError(
            f"algorithm.advantage={advantage} needs values, and there is neither a critic nor a "
            "value head: set critic=privileged or policy.value_head=true, or "
            "algorithm.advantage=grpo with rl.group_size=8"
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
    if asked(reward, RewardOptions).refit_updates is not None:
        return True
    return ":" in kind and bool(asked(build.implementation("reward", kind), RewardClass).learned)


def _check_rewards(config: RunConfig, open_phases: list[str], fresh: bool) -> None:
    if "rl" not in open_phases and "reward" not in open_phases:
        return
    parts = list(reward_parts(config))
    learned = [(name, part) for name, kind, part in parts if _learned(kind, part)]
    every = config.reward_check.refit_every
    if every and not learned and "rl" in open_phases:
        raise ConfigError(
            f"reward_check.refit_every={every} refits a learned reward, and "
            f"reward={config.reward_type} is none: set it to 0, or choose reward=pairwise, "
            "process, classifier, value_progress or preference"
        )
    untrained = [name for name, part in learned if not asked(part, RewardOptions).checkpoint]
    trained = "reward" in config.phases or (not fresh and (config.run_dir / "reward").is_dir())
    if "rl" in open_phases and untrained and not trained:
        raise ConfigError(
            f"reward={untrained[0]} is learned, and nothing trains it: put reward before rl in "
            "phases, or name a trained one with reward.checkpoint=FOLDER ('vla-rl reward fit "
            f"reward={untrained[0]} data=FOLDER' writes one)"
        )
    names = asked(config.algorithm, AlgorithmOptions).reward_names
    unknown = [name for name in names if name not in {part for part, _, _ in parts}]
    if unknown or (names and config.reward_type != "combined"):
        raise ConfigError(
            f"algorithm.reward_names has {(unknown or names)[0]!r}, and "
            f"reward={config.reward_type} has no such part: name parts of reward=combined "
            f"({', '.join(part for part, _, _ in parts)}), or leave it empty"
        )
    for _, _, part in parts:
        refuse_potential(asked(part, RewardOptions).shaping, config.algorithm)


def is_sparse(config: RunConfig) -> bool:
    """Whether an algorithm that meets no success has nothing to learn from."""
    return config.reward_type == "success" or not reads_rewards(config)


def reads_rewards(config: RunConfig) -> bool:
    """Whether the algorithm learns from rewards at all."""
    return asked(
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


def _has_data(config: RunConfig) -> bool:
    collects = "collect" in config.phases and not config.checkpoint
    return bool(config.dataset) or collects or (config.run_dir / "dataset").is_dir()


def _check_fallback(config: RunConfig) -> None:
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
    if not reward.checkpoint and not (_has_data(config) and config.reward_check.demonstrations):
        raise ConfigError(
            f"{given} learns progress from demonstrations, and this run has none: give those of "
            "the start as dataset=FOLDER (with reward_check.demonstrations above 0), or a trained "
            "reward as rl.fallback_reward.checkpoint=FOLDER ('vla-rl reward fit reward=process "
            "data=FOLDER' writes one)"
        )


# ------------------------------------------------------------------------------- files and the disk
def _check_places(config: RunConfig) -> None:
    """Is every file and folder that the config names there, and whole as far as can be seen
    quickly?"""
    if config.checkpoint:
        files.check_checkpoint(_exists("checkpoint", config.checkpoint))
    if config.dataset:
        _exists("dataset", config.dataset)
    if is_address(config.collect.policy):
        require_wire(f"collect.policy={config.collect.policy}")
    elif config.collect.policy:
        files.check_checkpoint(_exists("collect.policy", config.collect.policy))
    for group, names in _PLACES.items():
        if group != "policy" or not config.checkpoint:
            for key, value in _named(getattr(config, group), names, group):
                _exists(key, value)


def check_start(config: RunConfig, path: Path | str) -> None:
    """Raise `UserError` unless a policy could be read at ``path``: a checkpoint of this project, or
    a published one that ``config.policy`` says how to read; and unless ``config`` could run it
    here. Who serves at an address is asked later."""
    check_device(config.device)
    check_workers(config)
    if is_address(path):
        require_wire(f"{path}, where a policy is served,")
        return
    path = Path(path)
    if (
        asked(config.policy, PolicyOptions).checkpoint is not None
        and path.is_dir()
        and not (path / files.EMBODIMENT).exists()
    ):
        return
    files.check_checkpoint(path)


def _named(value: Any, names: tuple[str, ...], where: str) -> Iterator[tuple[str, str]]:
    """(key, path) of what a config and the ones in it name, as far as something is named."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in names and isinstance(inner, str) and inner:
                yield f"{where}.{name}", inner
            else:
                yield from _named(inner, names, f"{where}.{name}")


def _exists(key: str, value: str) -> Path:
    path = Path(value)
    try:
        path.stat()
    except OSError as error:
        if key == "checkpoint" and files.last_good(path).is_dir():
            return path
        kind = {"dataset": DATASET, "checkpoint": MODEL, "policy.checkpoint": MODEL}.get(key)
        hint = fetch_hint(value, kind) if kind else ""
        raise UserError(f"{key}={value}: {files.reason(error)}{hint}") from error
    return path


def _check_space(config: RunConfig, open_phases: list[str]) -> None:
    """Is there about enough room? Of a start, and of what an algorithm keeps: three copies (new,
    last, the one before)."""
    need, env, policy = (
        _LEAST_SPACE,
        asked(config.env, EnvOptions),
        asked(config.policy, PolicyOptions),
    )
    tasks, frame = len(config.tasks or env.tasks or ()) or 1, len(env.cameras) * env.pixels**2
    if "collect" in open_phases and not (config.checkpoint or config.dataset):
        need += (
            tasks
            * (config.collect.episodes_per_task + config.sft.validation_episodes)
            * _FRAMES
            * frame
        )
    kept = (
        asked(config.algorithm, AlgorithmOptions).remembered
        * _FRAMES
        // (policy.chunk_length or _FRAMES)
    )
    need += ("rl" in open_phases) * tasks * kept * 3 * frame * 3
    start = config.checkpoint or policy.checkpoint
    if start and {"sft", "rl"} & set(open_phases):
        need += 3 * sum(p.stat().st_size for p in Path(start).glob("*.safetensors"))
    place = files.nearest_folder(config.run_dir)
    free = shutil.disk_usage(place).free
    if free < need:
        raise UserError(
            f"{config.run_dir} would lie on a disk with {free / _MEGABYTE:,.0f} MB free ({place}), "
            f"and this run needs about {need / _MEGABYTE:,.0f} MB. Free some space, or choose "
            "another place with output_dir=FOLDER"
        )
