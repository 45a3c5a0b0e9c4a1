"""Files and folders that a run reads and writes, and the room on the disk."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl import files
from vla_rl.checks.planned import Planned
from vla_rl.config import RunConfig
from vla_rl.config.serving import require_wire
from vla_rl.errors import UserError
from vla_rl.hub import DATASET, MODEL, fetch_hint
from vla_rl.options import AlgorithmOptions, EnvOptions, PolicyOptions, view
from vla_rl.paths import is_address

_MEGABYTE = 10**6
_LEAST_SPACE = 100 * _MEGABYTE  # of any run: small checkpoints, videos and a report
_FRAMES = 50  # of a demonstration, roughly; a pixel takes about a byte, as three of them compress
# Keys of component configs that name files or folders which exist already, by the group that they
# are in.
_PLACES = {
    "reward": ("checkpoint", "reference", "release", "comparisons", "backbone_checkpoint"),
    "env": ("assets", "root", "seeds"),
    "policy": ("checkpoint",),
    "sft": ("filter",),
}


def check_folder(run: Planned) -> None:
    """Raise `UserError` where the run's folder could not be written."""
    c = run.config
    files.require_writable(c.run_dir, f"output_dir={c.output_dir} name={c.name}")


def check(run: Planned) -> None:
    """Raise `UserError` for a file or folder that the config names and that is not there, or not
    whole as far as can be seen quickly, and where the disk has no room for the run."""
    config = run.config
    if not run.open_phases:
        return
    if config.given:
        key = "checkpoint" if config.checkpoint else "sft.start"
        files.check_checkpoint(_exists(key, config.given))
    for dataset in config.datasets:
        _exists("dataset", dataset)
    if is_address(config.collect.policy):
        require_wire(f"collect.policy={config.collect.policy}")
    elif config.collect.policy:
        files.check_checkpoint(_exists("collect.policy", config.collect.policy))
    for group, names in _PLACES.items():
        if group != "policy" or not config.given:
            for key, value in _named(getattr(config, group), names, group):
                _exists(key, value)
    _check_space(config, run.open_phases)


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
        view(config.env, EnvOptions),
        view(config.policy, PolicyOptions),
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
        view(config.algorithm, AlgorithmOptions).remembered
        * _FRAMES
        // (policy.chunk_length or _FRAMES)
    )
    need += ("rl" in open_phases) * tasks * kept * 3 * frame * 3
    start = config.given or policy.checkpoint
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
