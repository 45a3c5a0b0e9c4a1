"""``vla-rl data convert``: recordings of other formats become one LeRobotDataset v3."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vla_rl.data.foreign.takes import Options, Source, Take
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.data.recording import bounds
from vla_rl.errors import ConfigError
from vla_rl.files import read_json
from vla_rl.specs import OTHER, CameraSpec, EmbodimentSpec

ACTIONS = ("as-recorded", "absolute", "delta")
FORMATS = "LeRobotDataset 2.0 and 2.1, robomimic's and LIBERO's HDF5, RLDS, MCAP"


@dataclass(frozen=True)
class Conversion:
    """``stride`` takes every k-th row. ``actions`` makes goals of moves or moves of goals, of each
    number that is also one of the state, but for those ``kept``. ``weights``: which share of the
    rows is to be of each source (empty: all of all)."""

    options: Options = field(default_factory=Options)
    stride: int = 1
    actions: str = ACTIONS[0]
    kept: Sequence[str] = ()
    weights: Sequence[float] = ()
    name: str = ""
    video: bool = False

    def __post_init__(self) -> None:
        if self.stride < 1 or self.options.fps < 0:
            raise ConfigError(
                f"--stride {self.stride} must be 1 or more, --fps {self.options.fps:g} above 0"
            )
        if self.actions not in ACTIONS:
            raise ConfigError(f"--actions {self.actions}: use one of {', '.join(ACTIONS)}")
        if any(not 0 < weight < np.inf for weight in self.weights):
            raise ConfigError(f"--weights {' '.join(map(str, self.weights))} must be above 0")
        if self.stride > 1 and self.actions == "delta":
            raise ConfigError(
                "--actions delta with --stride: the moves of the rows between are lost"
            )


@dataclass(frozen=True)
class _Done:
    path: Path
    episodes: int
    steps: int
    shares: tuple[float, ...]  # of the rows, by source


def open_source(path: Path, options: Options) -> Source:
    """By what lies there. Raises `UserError` for what is of no known format."""
    if not path.exists():
        raise DatasetError(f"{path}: there is no such file or folder")
    if (info := path / "meta" / "info.json").is_file():
        told = read_json(info, "fetch the dataset again", DatasetError)
        version = str(told.get("codebase_version"))
        from vla_rl.data.foreign.lerobot_v2 import VERSIONS, LeRobotV2

        if version in VERSIONS:
            return LeRobotV2(path, options)
        raise DatasetError(
            f"{path} is a LeRobotDataset {version}: v3 is read as it is (dataset={path}), and "
            f"{', '.join(VERSIONS)} are converted"
        )
    if (path / "features.json").is_file() and (path / "dataset_info.json").is_file():
        from vla_rl.data.foreign.rlds import Rlds

        return Rlds(path, options)
    if path.suffix == ".mcap" or (path.is_dir() and any(path.rglob("*.mcap"))):
        from vla_rl.data.foreign.mcap_files import Mcap

        return Mcap(path, options)
    if path.suffix in (".hdf5", ".h5"):
        from vla_rl.data.foreign.hdf5 import Libero, Robomimic, is_libero

        return Libero(path, options) if is_libero(path) else Robomimic(path, options)
    inside = sorted(path.rglob("*.hdf5")) if path.is_dir() else []
    if inside:
        raise ConfigError(f"{path} has {len(inside)} HDF5 files: name them, each is a source")
    raise DatasetError(f"{path} is of no format that is known here: {FORMATS}")


def convert(paths: Sequence[Path], out: Path, conversion: Conversion) -> _Done:
    """Write ``out``, a new folder, with the episodes of all ``paths``, whose robots have to be
    alike. Raises `UserError`."""
    c = conversion
    if out.exists():
        raise DatasetError(f"{out} exists already: choose another name for the dataset")
    if c.weights and len(c.weights) != len(paths):
        raise ConfigError(f"--weights has {len(c.weights)} numbers for {len(paths)} sources")
    sources = [open_source(path, c.options) for path in paths]
    _require_alike(sources)
    lengths, actions = _numbers(sources, c)
    chosen = _chosen(lengths, c.weights)
    first = next(take for take in _takes(sources[0], c, True))
    spec = _robot(sources[0], first, actions, c)
    rows = [0] * len(sources)
    with DemonstrationWriter(out, spec, video=c.video) as writer:
        for number, (source, wanted) in enumerate(zip(sources, chosen)):
            for index, take in enumerate(_takes(source, c, True)):
                if index not in wanted:
                    continue
                if not take.instruction:
                    raise DatasetError(
                        f"{source.path}: {take.name} says no task: give --instruction TEXT"
                    )
                rows[number] += len(take.actions)
                writer.add_episode(
                    take.images,
                    take.state,
                    take.actions,
                    take.instruction,
                    success=take.success is not False,
                    task_id=take.instruction,
                    init_state_id=len(writer),
                )
        count = len(writer)
    shares = tuple(row / max(sum(rows), 1) for row in rows)
    return _Done(out, count, sum(rows), shares)


def _takes(source: Source, c: Conversion, pictures: bool) -> Iterator[Take]:
    for take in source.takes(pictures):
        yield _turned(take, source, c).every(c.stride)


def _turned(take: Take, source: Source, c: Conversion) -> Take:
    if c.actions == ACTIONS[0]:
        return take
    pairs = [
        (i, source.state_names.index(name))
        for i, name in enumerate(source.action_names)
        if name in source.state_names and name not in c.kept
    ]
    lacking = [n for n in source.action_names if n not in source.state_names and n not in c.kept]
    if lacking or not pairs:
        raise ConfigError(
            f"--actions {c.actions}: {source.path} has the action {lacking[0] if lacking else ''} "
            f"and no state of that name ({', '.join(source.state_names)}): name what stays as it "
            "is with --keep, or leave --actions out"
        )
    actions, (mine, its) = take.actions.copy(), np.array(pairs).T
    sign = 1.0 if c.actions == "absolute" else -1.0
    actions[:, mine] += sign * take.state[:, its]
    return dataclasses.replace(take, actions=actions)


def _require_alike(sources: Sequence[Source]) -> None:
    first = sources[0]
    for other in sources[1:]:
        for word in ("fps", "state_names", "action_names"):
            mine, its = getattr(first, word), getattr(other, word)
            if mine != its:
                raise DatasetError(
                    f"{first.path} has {word} {mine}, and {other.path} {its}: only recordings of "
                    "one kind of robot are put together"
                )


def _numbers(sources: Sequence[Source], c: Conversion) -> tuple[list[list[int]], np.ndarray]:
    """Rows of each episode of each source, and the least and greatest actions [2 a]."""
    lengths: list[list[int]] = []
    ends: list[np.ndarray] = []
    for source in sources:
        own = []
        for take in _takes(source, c, False):
            if not len(take.actions) == len(take.state) > 0:
                raise DatasetError(
                    f"{source.path}: {take.name} has {len(take.actions)} actions and "
                    f"{len(take.state)} states"
                )
            own.append(len(take.actions))
            ends += [take.actions.min(axis=0), take.actions.max(axis=0)]
        if not own:
            raise DatasetError(f"{source.path} has no episode")
        lengths.append(own)
    found = np.stack(ends)
    if not np.isfinite(found).all():
        raise DatasetError(f"{sources[0].path}: actions that are no finite numbers")
    return lengths, np.stack([found.min(axis=0), found.max(axis=0)])


def _chosen(lengths: Sequence[Sequence[int]], weights: Sequence[float]) -> list[set[int]]:
    """Which episodes of each source: as many rows as the ``weights`` leave, spread evenly over its
    episodes; none is taken twice."""
    if not weights:
        return [set(range(len(own))) for own in lengths]
    share = np.array(weights) / sum(weights)
    total = min(sum(own) / part for own, part in zip(lengths, share))
    chosen = []
    for own, part in zip(lengths, share):
        wanted, ends = total * part, list(itertools.accumulate(own))
        fraction = wanted / ends[-1]
        taken: set[int] = set()
        for i, end in enumerate(ends):
            before = sum(own[k] for k in taken)
            if before + own[i] / 2 <= fraction * end:
                taken.add(i)
        chosen.append(taken or {0})
    return chosen


def _robot(source: Source, take: Take, actions: np.ndarray, c: Conversion) -> EmbodimentSpec:
    """As recorded: what its numbers mean is told later, by ``env.frame`` and its like."""
    fps = source.fps / c.stride
    if fps <= 0:
        raise ConfigError(
            f"{source.path} does not say how many rows a second it has: give --fps HZ"
        )
    name = c.name or source.robot or source.path.stem
    low, high = bounds(actions, 0.1)
    unknown = f"{OTHER}as recorded in {name}"
    return EmbodimentSpec(
        name=name,
        action_names=source.action_names,
        action_units=("as recorded",) * len(source.action_names),
        action_low=low,
        action_high=high,
        frame=unknown,
        rotation=unknown,
        gripper=unknown,
        control_hz=fps,
        cameras=tuple(CameraSpec(name, *x.shape[1:3]) for name, x in take.images.items()),
        proprio_names=source.state_names,
    )
