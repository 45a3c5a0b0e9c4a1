"""What is checked before the first phase of a run, and before torch is imported.

A mistake that would end a run after hours of collecting and training is found here within a second:
values that do not go with each other, phases that lack their input, files that are missing or
damaged, a place that cannot be written, no room on the disk, a rendering backend that does not
exist. Nothing is created. What needs the open env (tasks, the robot of a checkpoint or dataset) is
checked by `pipeline` right after, still before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vla_rl import files
from vla_rl.checks import inputs, options, places, rewards
from vla_rl.checks.cluster import check_room
from vla_rl.checks.machine import check_machine, check_workers
from vla_rl.checks.options import check_run
from vla_rl.checks.planned import Planned
from vla_rl.config import RunConfig
from vla_rl.config.serving import require_wire
from vla_rl.devices import check_device
from vla_rl.errors import ConfigError
from vla_rl.monitoring.machine import available_cores, default_threads
from vla_rl.options import PolicyOptions, view
from vla_rl.paths import is_address


def _together(run: Planned) -> None:
    check_run(run.config)


def _processes(run: Planned) -> None:
    threads(run.config)
    check_device(run.config.device)
    check_workers(run.config)


def _packages(run: Planned) -> None:
    c = run.config
    if not run.open_phases:
        return
    acting = [] if c.given or run.open_phases == ["collect"] else [c.policy]
    check_machine(c, [*acting, *(part for _, _, part in rewards.reward_parts(c))])


def _room(run: Planned) -> None:
    c, phases = run.config, run.open_phases
    if c.cluster_type == "ray" and ("rl" in phases or ("sft" in phases and c.cluster.has_ranks)):
        check_room(c)


# From what takes no time to what does; what names the folder comes before what reads it.
PARTS: tuple[Callable[[Planned], None], ...] = (
    _together,
    _processes,
    places.check_folder,
    inputs.check,
    rewards.check,
    options.check,
    places.check,
    options.check_given,
    _packages,
    _room,
)


def check(config: RunConfig, *, fresh: bool = False) -> None:
    """Raise `UserError` for what would end this run later on. ``fresh``: what its folder holds
    will be moved away."""
    run = Planned(config, fresh)
    for part in PARTS:
        part(run)


def threads(config: RunConfig) -> int:
    """Threads of the main process."""
    cores = available_cores()
    if config.threads > cores:
        raise ConfigError(
            f"threads={config.threads} is more than the {cores} cores here: threads=0 takes all"
        )
    return config.threads or default_threads()


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
        view(config.policy, PolicyOptions).checkpoint is not None
        and path.is_dir()
        and not (path / files.EMBODIMENT).exists()
    ):
        return
    files.check_checkpoint(path)
