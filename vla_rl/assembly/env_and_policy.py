"""From the config to live objects: env, policy, critic, demonstrations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl import build
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.checkpoint import EMBODIMENT, load_policy
from vla_rl.config import RunConfig
from vla_rl.config.phases import PHASES
from vla_rl.config.serving import RemoteConfig
from vla_rl.data.lerobot_reader import check_dataset
from vla_rl.data.recorded import check_recorded
from vla_rl.devices import pick_device
from vla_rl.errors import ConfigError, UserError
from vla_rl.files import check_checkpoint, require_new
from vla_rl.interfaces import Env
from vla_rl.options import AlgorithmOptions, PolicyOptions, methods, view
from vla_rl.paths import is_address
from vla_rl.storage import replacing
from vla_rl.types import EmbodimentSpec, TaskSpec


def open_env(config: RunConfig) -> Env:
    """The configured simulator in worker processes, or in this process for ``slots.workers`` =
    0; or a recording."""
    if opens := build.env_entry(config.env_type).records:
        return build.attribute(opens)(config)
    simulator = build.implementation("env", config.env_type)
    slots = config.slots
    if slots.workers == 0:
        inline = build.attribute("sim.inline:InlineEnv")
        return inline(simulator(config.env), num_slots=slots.slots_per_worker)
    pool = build.attribute("sim.pool:ProcessPool")
    return pool(
        functools.partial(simulator, config.env),
        num_workers=slots.workers,
        slots_per_worker=slots.slots_per_worker,
        max_chunk_length=max(128, view(config.policy, PolicyOptions).chunk_length or 0),
        hang_timeout=slots.hang_timeout,
        max_restarts=slots.max_restarts,
        python=slots.python,
    )


def checked_env(config: RunConfig, resources: contextlib.ExitStack, fresh: bool = False) -> Env:
    """The open env, once the tasks, the robot of checkpoint, dataset and replays, cameras and
    critic are known to fit it."""
    pick_device(config.device)
    env = resources.enter_context(contextlib.closing(open_env(config)))
    tasks = select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
    if not tasks and any(PHASES[name].trains for name in config.phases):
        raise ConfigError(
            f"held_out_tasks={list(config.held_out_tasks)} leaves no task to train on. This env "
            f"has: {', '.join(t.task_id for t in env.tasks)}"
        )
    imitated = "sft" in config.phases and not config.checkpoint
    if isinstance(env, RecordedEnv):
        env.recording.require(config.sft.failures or not imitated)
    elif config.dataset and not build.env_entry(config.env_type).demonstrations:
        texts = [text for task in tasks for text in task.instructions]
        check_dataset(
            config.one_dataset, env.embodiment, texts, config.sft.failures or not imitated
        )
    if config.given:
        env.embodiment.require(
            check_checkpoint(Path(config.given)), "the env", f"the checkpoint {config.given}"
        )
    else:
        _require_cameras(config.policy, env.embodiment)
        if (check := methods(config.policy).check_robot) is not None:
            check(env.embodiment)
    begun = any(
        (config.run_dir / "checkpoints" / name / "training_state").exists()
        for name in ("rl", "offline")
    )
    if fresh or not begun:  # who goes on has those episodes
        check_recorded(config.replay.offline, config.run_dir / "replay", env.embodiment)
    imitates = "sft" in config.phases and config.sft.augment.mirror and not config.checkpoint
    if imitates or ("rl" in config.phases and view(config.algorithm, AlgorithmOptions).mirrors):
        env.embodiment.require_mirror("augment.mirror is set", "augment.mirror=0")
    if "rl" in config.phases and config.critic_type == "privileged" and env.privileged_dim < 1:
        raise ConfigError(
            f"critic=privileged reads simulator state, and env.type={config.env_type} "
            "shows none: critic=none"
        )
    return env


def _require_cameras(policy: Any, embodiment: EmbodimentSpec) -> None:
    """Raise `ConfigError` where a new policy's config asks for cameras that the env does not
    show, or cannot cut up."""
    wanted, known = view(policy, PolicyOptions).cameras, embodiment.camera_names
    # (feature:camera is another form)
    missing = [name for name in wanted if ":" not in name and name not in known]
    if missing:
        raise ConfigError(
            f"policy.cameras has {missing[0]!r}, and the env shows only "
            f"{', '.join(known)}: name those"
        )
    check = methods(policy).check_camera
    for camera in embodiment.cameras:
        if check is not None and camera.name in (wanted or known):
            check(camera.name, camera.height, camera.width)


def acting_policy(config: RunConfig, path: Path, embodiment: EmbodimentSpec) -> Any:
    """The policy of a checkpoint of this project, with the changes to its own config that the
    run asks for."""
    return load_policy(
        path, build.policy_class, expected_embodiment=embodiment, changes=config.policy_changes
    )


def open_policy(config: RunConfig, path: Path | str, embodiment: EmbodimentSpec) -> Any:
    """The policy of a checkpoint of this project, of a published one that ``config.policy``
    says how to read, or at the address of who serves it."""
    if is_address(path):
        options = config.policy if isinstance(config.policy, RemoteConfig) else RemoteConfig()
        served = dataclasses.replace(options, url=str(path))
        return build.implementation("policy", "remote")(served, embodiment)
    path = Path(path)
    reads_published = view(config.policy, PolicyOptions).checkpoint is not None
    if (path / EMBODIMENT).exists() or not reads_published:
        return acting_policy(config, path, embodiment)
    published = dataclasses.replace(config.policy, checkpoint=str(path))
    return build.implementation("policy", config.policy_type).from_published(published, embodiment)


def export_policy(checkpoint: Path, folder: Path, form: str = "") -> None:
    """Write a checkpoint's policy in the form that its own project publishes
    (``save_pretrained``), or in another project's."""
    require_new(folder)
    policy = load_policy(checkpoint, build.policy_class)
    if form:
        if form not in policy.forms:
            has = f"--form {' or '.join(policy.forms)}" if policy.forms else "leave out --form"
            raise UserError(
                f"{checkpoint} holds a {policy.policy_type} policy, which {form} has no form for: "
                f"{has}"
            )
        with replacing(folder, keep_last_good=False) as part:
            policy.save_as(form, part)
        return
    if "publishing" not in policy.can:
        raise UserError(
            f"{checkpoint} holds a {policy.policy_type} policy, which has no form but this "
            "project's own: use the checkpoint"
        )
    with replacing(folder, keep_last_good=False) as part:
        policy.save_pretrained(part)


def select_tasks(
    tasks: Sequence[TaskSpec], wanted: Sequence[str] | None, exclude: Sequence[str] = ()
) -> list[TaskSpec]:
    """The named tasks in the suite's order; all of them for an empty list, none for None.

    Of an id like ``suite/3`` the last part is enough.
    """
    known = {
        name: task.task_id
        for task in tasks
        for name in (task.task_id.rpartition("/")[2], task.task_id)
    }
    missing = [name for name in [*(wanted or []), *exclude] if name not in known]
    if missing:
        raise ConfigError(
            f"unknown task {missing[0]!r}. This env has: "
            f"{', '.join(sorted(t.task_id for t in tasks))}"
        )
    if wanted is None:
        return []
    chosen, left_out = {known[name] for name in wanted}, {known[name] for name in exclude}
    return [t for t in tasks if (not wanted or t.task_id in chosen) and t.task_id not in left_out]


def seeded(config: Any, seed: int) -> Any:
    """The run's seed in a component's config, where it has one and leaves it at 0."""
    if any(f.name == "seed" for f in dataclasses.fields(config)) and config.seed == 0:
        return dataclasses.replace(config, seed=seed)
    return config
