"""Several recordings of one robot as one, drawn from by rows or by weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.config.recording import RecordingConfig
from vla_rl.data.checks import OTHER_UNIT, reaches
from vla_rl.data.demonstrations import DemonstrationDataset, joined
from vla_rl.data.frames import OnDisk
from vla_rl.data.lerobot_format import ACTION_KEY, STATE_KEY, DatasetError
from vla_rl.data.lerobot_reader import Choose, read_embodiment, read_info
from vla_rl.data.recording import Recording, bounds, open_recording, renamable, robot_type
from vla_rl.errors import EmbodimentMismatch
from vla_rl.hub import cached_name
from vla_rl.specs import EmbodimentSpec, TaskSpec


@dataclass(frozen=True)
class Mixture:
    """What `open_mixture` found: ``parts`` of one robot, and how often each is drawn from (no
    ``weights``: all rows alike)."""

    parts: tuple[Recording, ...]
    weights: tuple[float, ...] = ()

    @property
    def embodiment(self) -> EmbodimentSpec:
        return self.parts[0].embodiment

    @property
    def tasks(self) -> tuple[TaskSpec, ...]:
        """Those of all parts, each once, with all its instructions, and as long as it was
        anywhere."""
        found: dict[str, TaskSpec] = {}
        for task in (task for part in self.parts for task in part.tasks):
            known = found.get(task.task_id, task)
            texts = tuple(dict.fromkeys(known.instructions + task.instructions))
            longest = max(known.horizon, task.horizon)
            found[task.task_id] = dataclasses.replace(task, instructions=texts, horizon=longest)
        return tuple(found.values())

    @property
    def names(self) -> tuple[str, ...]:
        """What each is called: by its hub's name or its folder, or its whole path where two would
        be called alike."""
        short = [cached_name(part.path) or part.path.resolve().name for part in self.parts]
        return tuple(
            name if short.count(name) == 1 else str(part.path)
            for name, part in zip(short, self.parts)
        )

    def require(self, failures: bool = True) -> None:
        """As `Recording.require`, of each."""
        for part in self.parts:
            try:
                part.require(failures)
            except DatasetError as error:
                named = str(part.path) in str(error)
                raise DatasetError(str(error) if named else f"{part.path}: {error}") from error

    def demonstrations(
        self,
        chunk_length: int,
        tasks: Collection[str],
        failures: bool = False,
        disk: OnDisk | None = None,
        choose: Choose | None = None,
    ) -> DemonstrationDataset:
        """As `Recording.demonstrations`, of all that have one of ``tasks``; they share what
        ``disk`` lets be held in memory by their rows."""
        total, found = sum(len(part.rows.places) for part in self.parts), []
        those = [
            i
            for i, part in enumerate(self.parts)
            if len(self.parts) == 1 or {task.task_id for task in part.tasks} & set(tasks)
        ]
        names = self.names
        for part in (self.parts[i] for i in those or [0]):
            share = len(part.rows.places) / total
            own = disk and dataclasses.replace(disk, ram_bytes=math.ceil(disk.ram_bytes * share))
            found.append(part.demonstrations(chunk_length, tasks, failures, own, choose))
        if len(found) == 1:
            return found[0]
        weights = [self.weights[i] for i in those] if self.weights else ()
        return joined(found, [names[i] for i in those], weights)

    def said(self) -> str:
        """Which robot it is, in a line, and how that is known; of several, a line each of how often
        it is drawn from."""
        first, rest = self.parts[0].said(), []
        if len(self.parts) == 1:
            return first
        drawn = [
            len(p.rows.places) if (i := p.rows.imitated) is None else i.sum() for p in self.parts
        ]
        weights = np.array(self.weights or drawn, np.float64)
        for name, part, n, share in zip(self.names, self.parts, drawn, weights / weights.sum()):
            rows = len(part.rows.places)
            rest.append(
                f"  {share:6.1%} of what is drawn is of {name}: {len(part.rows.episodes)} episodes, "
                f"{rows} rows" + (f", {n} of them a person's" if n < rows else "")
            )
        how = (
            "statistics of state and action are of what is drawn so (mean, deviation, quantiles), "
            "least and greatest of all rows"
            if self.weights
            else "every row is drawn as often as any other, and counts so in statistics"
        )
        return "\n".join([first, *rest, f"  {how}"])


def open_mixture(
    paths: Sequence[str], weights: Sequence[float], config: RecordingConfig
) -> Mixture:
    """Open each as `open_recording` does. ``weights``: one for each, or none.

    Raises what that raises, and `EmbodimentMismatch` where they are not of one robot: names, units,
    rate, cameras and what its numbers mean have to agree. Where no file says which robot it is, the
    bounds are of the actions of all.
    """
    if len(paths) == 1:
        return Mixture((open_recording(paths[0], config),))
    infos = [read_info(Path(path)) for path in paths]
    known = [bool(config.embodiment) or read_embodiment(path) is not None for path in paths]
    if len(set(known)) > 1:
        told, silent = (paths[known.index(x)] for x in (True, False))
        raise EmbodimentMismatch(
            f"{told} says which robot it is of, and {silent} does not: say that it is the same "
            f"with env.embodiment={told}"
        )
    if unknown := [key for key in config.rename if not any(key in renamable(i) for i in infos)]:
        raise DatasetError(
            f"env.rename has {unknown[0]!r}, and none of {', '.join(paths)} has it: name a feature "
            "of one of them, or one of its numbers"
        )
    name = config.name if known[0] else config.name or _one_name(paths, infos)
    parts = []
    for path, info in zip(paths, infos):
        rename = {key: ours for key, ours in config.rename.items() if key in renamable(info)}
        own = dataclasses.replace(config, rename=rename, name=name, margin=0.0)
        parts.append(open_recording(path, own))
    for other in parts[1:]:
        _require_alike(parts[0], other, config)
    spec, margin = parts[0].embodiment, None
    if not known[0]:
        ends = [
            x for part in parts for x in (part.embodiment.action_low, part.embodiment.action_high)
        ]
        low, high = bounds(np.array(ends), config.margin)
        spec, margin = dataclasses.replace(spec, action_low=low, action_high=high), config.margin
    alike = (dataclasses.replace(part, embodiment=spec, margin=margin) for part in parts)
    return Mixture(tuple(alike), tuple(weights))


def _one_name(paths: Sequence[str], infos: Sequence[dict[str, Any]]) -> str:
    told = {robot_type(info): path for path, info in zip(paths, infos) if robot_type(info)}
    if len(told) > 1:
        (one, first), (two, second), *_ = told.items()
        raise EmbodimentMismatch(
            f"{first} is of the robot {one!r}, and {second} of {two!r}: only recordings of one "
            "robot are put together. Where it is one, say so with env.name=NAME"
        )
    return next(iter(told), Path(paths[0]).resolve().name)


# -------------------------------------------------------------------------------------------- alike
def _require_alike(first: Recording, other: Recording, config: RecordingConfig) -> None:
    """Raise `EmbodimentMismatch`, with what differs first and its remedy."""
    mine, its = first.embodiment, other.embodiment
    called = _names_remedy(mine, its)
    again = "write one of them anew in the units of the other: nothing here converts numbers"
    which = "say which robot it is, and whose bounds hold, with env.embodiment=FOLDER"
    remedies = {
        "action_names": called,
        "proprio_names": called,
        "cameras": _cameras_remedy(mine, its),
        "control_hz": _rate_remedy(first, other),
        "action_units": again,
        "frame": which,
        "rotation": which,
        "gripper": which,
        "name": which,
        "action_low": which,
        "action_high": which,
    }
    words = {"action_names": "action", "proprio_names": "state", "control_hz": "rate (Hz)"}
    for key, remedy in remedies.items():
        if key in ("action_low", "action_high") and first.margin is not None:
            continue  # (they become those of all)
        one, two = _comparable(mine, key), _comparable(its, key)
        if one != two:
            raise EmbodimentMismatch(
                f"{first.path} and {other.path} differ in {words.get(key, key)}: {one!r}, and "
                f"{two!r}. To put them together, {remedy}"
            )
    if first.margin is not None and not config.units:
        _require_one_unit(first, other)


def _comparable(spec: EmbodimentSpec, key: str) -> object:
    value = spec.to_dict()[key]
    if key == "cameras":
        return {c.name: f"{c.width}x{c.height}" for c in sorted(spec.cameras, key=lambda c: c.name)}
    return list(value) if isinstance(value, tuple) else value


def _names_remedy(mine: EmbodimentSpec, its: EmbodimentSpec) -> str:
    pairs = ((mine.action_names, its.action_names), (mine.proprio_names, its.proprio_names))
    one, two = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    if sorted(one) == sorted(two):
        return "write one of them anew in the order of the other"
    if len(one) != len(two):
        return "they would have to be of one robot, with as many numbers"
    return "give its numbers those names with 'env.rename={ITS: OURS}'"


def _cameras_remedy(mine: EmbodimentSpec, its: EmbodimentSpec) -> str:
    if not (mine.cameras and its.cameras):
        return "both need pictures, or neither"
    both = [camera.name for camera in mine.cameras if camera in its.cameras]
    leave = f"use those that both have, env.cameras=[{','.join(both)}], or " if both else ""
    return f"{leave}give one of them another name with 'env.rename={{KEY: NAME}}'"


def _rate_remedy(first: Recording, other: Recording) -> str:
    """The highest rate that the rows of both make."""
    one, two = (float(part.info["fps"]) for part in (first, other))
    for k in range(1, 61):
        if math.isclose(two * k / one, round(two * k / one), abs_tol=1e-3) and two * k >= one:
            return f"set env.control_hz={one / k:g}, which the rows of both make"
    return f"write one of them anew: the rows of {one:g} and {two:g} Hz make no common rate"


def _require_one_unit(first: Recording, other: Recording) -> None:
    """Raise `EmbodimentMismatch` where most numbers that move reach so much further in one that they
    are in another unit, and nobody said in which they are."""
    for key in (ACTION_KEY, STATE_KEY):
        one, two = (
            np.ptp(part.rows.vectors[key].astype(np.float64), axis=0) for part in (first, other)
        )
        ratio = reaches(one, two)
        if not 1 / OTHER_UNIT < ratio < OTHER_UNIT:
            large, small = (first, other) if ratio > 1 else (other, first)
            raise EmbodimentMismatch(
                f"{key} of {large.path} reaches {max(ratio, 1 / ratio):.3g} times as far as that of "
                f"{small.path}, as degrees do beside radians: write one of them anew in the units "
                "of the other, or, where both are in one, say in which with env.units=[UNIT]"
            )
