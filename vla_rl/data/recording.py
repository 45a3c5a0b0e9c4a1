"""A LeRobotDataset v3 as somebody recorded it: its robot, cameras, rate and tasks, under this
project's names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.config.recording import RecordingConfig
from vla_rl.data.checks import Report
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.data.frames import OnDisk
from vla_rl.data.lerobot_format import (
    ACTION_KEY,
    AGAIN,
    IMAGE_PREFIX,
    STATE_KEY,
    DatasetError,
    is_depth,
)
from vla_rl.data.lerobot_reader import (
    Choose,
    assembled,
    damage,
    flat_names,
    load_demonstrations,
    read_embodiment,
    read_info,
    require_fit,
    require_videos,
    successes,
)
from vla_rl.data.lerobot_rows import LeRobotRows, read_rows, sizes
from vla_rl.errors import ConfigError, require_packages
from vla_rl.files import EMBODIMENT
from vla_rl.files import read_embodiment as read_embodiment_file
from vla_rl.specs import OTHER, CameraSpec, EmbodimentSpec, TaskSpec

AS_RECORDED = "as recorded"
# What other tools call them, where lerobot's own names are not there.
_ALIASES = {STATE_KEY: ("state", "observation/state"), ACTION_KEY: ("actions",)}
_PREFIXES = (IMAGE_PREFIX, "observation.image.", "observation.", "observation/", "images.")
_RESERVED = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_NO_NAME = ("", "unknown", "none")


@dataclass(frozen=True)
class Keys:
    """What the dataset calls what is needed: ``vectors`` {ours: its}, ``cameras`` {our name: its
    feature}, ``numbers`` {its name of a number of state or action: ours}."""

    vectors: Mapping[str, str]
    cameras: Mapping[str, str]
    numbers: Mapping[str, str] = field(default_factory=dict)

    def renamed(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """``meta/info.json`` with state and action, and their numbers, under our names."""
        features = dict(info["features"])
        for ours, its in self.vectors.items():
            features[ours] = features[its]
            if names := flat_names(features[its].get("names")):
                features[ours] = {**features[its], "names": list(self.called(names))}
        return {**info, "features": features}

    def called(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names of numbers, as ours."""
        return tuple(self.numbers.get(name, name) for name in names)


def keys_of(
    path: Path, info: Mapping[str, Any], rename: Mapping[str, str], cameras: Sequence[str] = ()
) -> Keys:
    """Which features are state, action and the ``cameras`` (empty: all that show colours); raises
    `DatasetError` where one is not there."""
    features = info["features"]
    if unknown := [key for key in rename if key not in renamable(info)]:
        raise DatasetError(
            f"env.rename has {unknown[0]!r}, and {path} has only {', '.join(sorted(features))}: "
            "name one of those, or of their numbers"
        )
    numbers = {key: ours for key, ours in rename.items() if key not in features}
    told: dict[str, str] = {}
    for its, ours in rename.items():
        if its in features and told.setdefault(ours, its) != its:
            raise DatasetError(
                f"env.rename={dict(rename)} gives two keys of {path} the name {ours!r}: give each "
                "its own"
            )
    vectors: dict[str, str] = {}
    for ours, others in _ALIASES.items():
        its = told.get(ours) or next((key for key in (ours, *others) if key in features), "")
        if not its:
            raise DatasetError(
                f"{path} has no feature {ours}, only {', '.join(sorted(features))}: say which it "
                f"is with 'env.rename={{KEY: {ours}}}'"
            )
        if its in _RESERVED or its in vectors.values():
            what = "what the format itself needs" if its in _RESERVED else "both state and action"
            raise DatasetError(
                f"env.rename={dict(rename)}: {its} of {path} would be {what}: name another feature"
            )
        vectors[ours] = its
    shown: dict[str, str] = {}
    for key, feature in features.items():
        if feature.get("dtype") not in ("image", "video") or is_depth(feature):
            continue
        name = rename.get(key) or _camera_name(key)
        if name in shown:
            raise DatasetError(
                f"{path} has two cameras {name!r}, {shown[name]} and {key}: give one another name "
                f"with 'env.rename={{{key}: NAME}}'"
            )
        shown[name] = key
    if missing := [name for name in cameras if name not in shown]:
        raise DatasetError(
            f"env.cameras has {missing[0]!r}, and {path} has {', '.join(shown) or 'none'}: name "
            f"those, or give one that name with 'env.rename={{KEY: {missing[0]}}}' (its keys: "
            f"{', '.join(shown.values()) or 'none'})"
        )
    keys = Keys(vectors, {name: shown[name] for name in (cameras or shown)}, numbers)
    for its in (*keys.vectors.values(), *keys.cameras.values()):
        shape, needed = features[its].get("shape"), 3 if its in keys.cameras.values() else 1
        if len(sizes(shape)) < needed:
            raise DatasetError(
                f"{path / 'meta' / 'info.json'} says the shape {shape!r} of {its}, and "
                f"{needed} sizes above 0 are needed: {AGAIN}"
            )
    for its in vectors.values():
        names = keys.called(flat_names(features[its].get("names")) or ())
        if twice := [name for name in names if numbers and names.count(name) > 1]:
            raise DatasetError(
                f"env.rename={dict(rename)} gives two numbers of {its} the name {twice[0]!r}: give "
                "each its own"
            )
    return keys


def renamable(info: Mapping[str, Any]) -> set[str]:
    """What ``env.rename`` may name: features, and the numbers of vectors."""
    features = info["features"]
    return {*features, *(n for f in features.values() for n in _numbers_of(f))}


def _numbers_of(feature: Mapping[str, Any]) -> tuple[str, ...]:
    shown = feature.get("dtype") in ("image", "video")
    return () if shown else flat_names(feature.get("names")) or ()


def _camera_name(key: str) -> str:
    return next((key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)), key)


def camera_of(name: str, feature: Mapping[str, Any]) -> CameraSpec:
    """The channels may come first or last."""
    shape = [int(n) for n in feature["shape"]]
    height, width = shape[1:] if shape[0] in (1, 3, 4) and shape[-1] not in (1, 3, 4) else shape[:2]
    return CameraSpec(name, height, width)


# -------------------------------------------------------------------------------------------- robot
def describe(
    path: Path,
    info: Mapping[str, Any],
    keys: Keys,
    vectors: Mapping[str, np.ndarray],
    config: RecordingConfig,
) -> EmbodimentSpec:
    """The robot of a dataset that does not say which it is of, of ``info`` as `Keys.renamed`:
    ``vectors`` {key: [n d]} bound its actions."""
    name = config.name or robot_type(info) or path.resolve().name
    names = {key: _names(info["features"][key], key) for key in keys.vectors}
    actions = names[ACTION_KEY]
    units = config.units or [AS_RECORDED]
    if len(units) not in (1, len(actions)):
        raise ConfigError(
            f"env.units has {len(units)} for the {len(actions)} numbers of an action: give one, or "
            "one for each"
        )
    low, high = bounds(vectors[ACTION_KEY], config.margin)
    unknown = f"{OTHER}as recorded in {name}"
    words: dict[str, Any] = {
        word: getattr(config, word) or unknown for word in ("frame", "rotation", "gripper")
    }
    return EmbodimentSpec(
        name=name,
        action_names=actions,
        action_units=tuple(units) if len(units) > 1 else (units[0],) * len(actions),
        action_low=low,
        action_high=high,
        control_hz=float(info["fps"]),
        cameras=tuple(
            camera_of(camera, info["features"][key]) for camera, key in keys.cameras.items()
        ),
        proprio_names=names[STATE_KEY],
        **words,
    )


def robot_type(info: Mapping[str, Any]) -> str:
    """What the dataset calls its robot; "" where it does not."""
    told = str(info.get("robot_type") or "")
    return "" if told.lower() in _NO_NAME else told


def bounds(actions: np.ndarray, margin: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Least and greatest of ``actions`` [n d], wider by ``margin`` of their range (where there
    is none, of their size)."""
    low, high = actions.astype(np.float64).min(0), actions.astype(np.float64).max(0)
    wider = margin * np.where(high > low, high - low, np.maximum(np.abs(high), 1e-3))
    return tuple(float(f"{x:.6g}") for x in low - wider), tuple(
        float(f"{x:.6g}") for x in high + wider
    )


def _names(feature: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A vector's names; numbers behind ``key``'s last word where it has none, or not one for
    each."""
    size = int(np.prod(feature["shape"]))
    found = flat_names(feature.get("names")) or ()
    if len(found) == size == len(set(found)):
        return found
    return tuple(f"{key.rpartition('.')[2]}_{i}" for i in range(size))


def known_robot(path: Path, config: RecordingConfig, keys: Keys) -> EmbodimentSpec | None:
    """The robot that the dataset, or ``env.embodiment``, says it is, with the cameras that are
    used; None: nobody says."""
    if config.embodiment:
        given = Path(config.embodiment).expanduser()
        inside = (given / EMBODIMENT, given / "meta" / EMBODIMENT, given)
        file = next((place for place in inside if place.is_file()), None)
        if file is None:
            raise ConfigError(
                f"env.embodiment={given} has no {EMBODIMENT}: name a dataset or "
                "checkpoint of this project"
            )
        spec: EmbodimentSpec | None = read_embodiment_file(file, AGAIN)
    else:
        spec = read_embodiment(path)
    if spec is None:
        return None
    if unknown := [name for name in config.cameras if name not in spec.camera_names]:
        raise DatasetError(
            f"env.cameras has {unknown[0]!r}, and the robot {spec.name} has "
            f"{', '.join(spec.camera_names) or 'none'}: name those"
        )
    used = tuple(c for c in spec.cameras if c.name in (config.cameras or spec.camera_names))
    if missing := [c.name for c in used if c.name not in keys.cameras]:
        raise DatasetError(
            f"{path} has the cameras {', '.join(keys.cameras) or '(none)'}, and the robot "
            f"{spec.name} has {missing[0]!r}: say which it is with 'env.rename={{KEY: "
            f"{missing[0]}}}', or leave it out with env.cameras=[...]"
        )
    changed: dict[str, Any] = {} if used == spec.cameras else {"cameras": used, "mirror": None}
    if keys.numbers and not config.embodiment:
        ours = {
            word: keys.called(getattr(spec, word)) for word in ("action_names", "proprio_names")
        }
        changed |= {**ours, "mirror": None}
    told = {
        word: value
        for word in ("name", "frame", "rotation", "gripper")
        if (value := getattr(config, word))
    }
    return dataclasses.replace(spec, **changed, **told)


# ---------------------------------------------------------------------------------------- recording
@dataclass(frozen=True)
class Recording:
    """What `open_recording` found. ``rows`` are those that are used, ``report`` what is wrong
    with all."""

    path: Path
    info: Mapping[str, Any]
    keys: Keys
    embodiment: EmbodimentSpec
    rows: LeRobotRows
    report: Report
    # by which bounds are wider than the actions; None: a file says which robot it is, and its
    # bounds
    margin: float | None

    @functools.cached_property
    def tasks(self) -> tuple[TaskSpec, ...]:
        """Each task id, or instruction, that was recorded, in that order; as long as its longest
        episode."""
        texts: dict[str, dict[str, None]] = {}
        longest: dict[str, int] = {}
        for e in self.rows.episodes:
            task = e.task_id or e.instruction
            texts.setdefault(task, {})[e.instruction] = None
            longest[task] = max(longest.get(task, 0), e.length)
        return tuple(TaskSpec(task, tuple(said), (), longest[task]) for task, said in texts.items())

    def require(self, failures: bool = True) -> None:
        """Raise `DatasetError` for what training would refuse, unless it learns from ``failures``
        where nothing else is there, and for a video that is missing."""
        self.report.require()
        if not failures:
            successes(self.rows.episodes)
        with damage(self.path):
            require_videos(self.path, self.info, self.keys.cameras.values(), self.rows)

    def demonstrations(
        self,
        chunk_length: int,
        tasks: Collection[str],
        failures: bool = False,
        disk: OnDisk | None = None,
        choose: Choose | None = None,
    ) -> DemonstrationDataset:
        """The episodes of ``tasks`` (ids) of those that ``choose`` takes, with what failed only if
        asked for; ``disk`` as `load_demonstrations`. Raises what `require` raises, and for damaged
        pictures."""
        self.report.require()
        episodes, actions = (
            self.rows.episodes,
            torch.from_numpy(self.rows.vectors[ACTION_KEY].astype(np.float32)),
        )
        sound = (
            [torch.ones(e.length, dtype=torch.bool) for e in episodes]
            if failures
            else successes(episodes)
        )
        masks = sound if choose is None else choose(episodes, actions)
        chosen = [
            mask if known is not None and (e.task_id or e.instruction) in tasks else None
            for e, mask, known in zip(episodes, masks, sound, strict=True)
        ]
        with damage(self.path):
            dataset = assembled(
                self.path,
                self.info,
                self.embodiment,
                self.keys.cameras,
                self.rows,
                chosen,
                chunk_length,
                disk,
            )
        dataset.notes += tuple(finding.line() for finding in self.report.warnings)
        return dataset

    def said(self) -> str:
        """Which robot it is, in a line, and how that is known."""
        e = self.embodiment
        cameras = ", ".join(f"{c.name} {c.width}x{c.height}" for c in e.cameras) or "no camera"
        line = (
            f"{e.name}: {e.action_dim} numbers of action, {e.proprio_dim} of state, {cameras}, "
            f"{e.control_hz:g} Hz"
        )
        if self.rows.stride > 1:
            line += (
                f" (one row in {self.rows.stride} of {float(self.info['fps']):g} Hz, with the last of "
                "their actions)"
            )
        if self.margin is not None:
            line += (
                f"; no file says its bounds: they are those of its actions and {self.margin:.0%} "
                "of their range on each side"
            )
        return line


def open_recording(path: str | Path, config: RecordingConfig) -> Recording:
    """Read the numbers and what is known of the robot; no picture is decoded.

    Raises `DatasetError` or `ConfigError` where a feature, camera or rate that is asked for is not
    there, the dataset is of another robot than ``config.embodiment`` says, or nothing decodes its
    videos.
    """
    path = Path(path)
    require_packages("pyarrow", extra="lerobot", purpose=f"reading {path}")
    info = read_info(path)
    with damage(path):
        keys = keys_of(path, info, config.rename, config.cameras)
        ours = keys.renamed(info)
        known = known_robot(path, config, keys)
        wanted_hz = config.control_hz
        if known is not None:
            wanted_hz = wanted_hz or known.control_hz
            known = (
                dataclasses.replace(known, control_hz=float(info["fps"]))
                if config.embodiment
                else known
            )
            keys = dataclasses.replace(
                keys, cameras={name: keys.cameras[name] for name in known.camera_names}
            )
            require_fit(
                path,
                ours,
                None if config.embodiment else known,
                known,
                keys.cameras,
                compare_names=True,
            )
        if any(info["features"][key]["dtype"] == "video" for key in keys.cameras.values()):
            require_packages("av", extra="lerobot", purpose=f"decoding the videos of {path}")
        rows = read_rows(path, ours, stored_as=keys.vectors)
        if config.instruction:
            _name_unnamed(rows, config.instruction)
        report = rows.report(ours, known)
        spec = known
        if spec is None:
            report.require()  # (what bounds would come of numbers that are none)
            spec = describe(path, ours, keys, rows.vectors, config)
    stride = stride_of(path, spec, wanted_hz, config.goals)
    if stride > 1:
        rows, spec = rows.every(stride), dataclasses.replace(spec, control_hz=wanted_hz)
    return Recording(path, info, keys, spec, rows, report, config.margin if known is None else None)


def _name_unnamed(rows: LeRobotRows, instruction: str) -> None:
    rows.instructions[:] = [text if text.strip() else instruction for text in rows.instructions]
    rows.episodes[:] = [
        e if e.instruction.strip() else dataclasses.replace(e, instruction=instruction)
        for e in rows.episodes
    ]


def stride_of(path: Path, spec: EmbodimentSpec, wanted: float, goals: bool) -> int:
    """Rows for each that is used at ``wanted`` Hz (0: all). Raises `ConfigError` for a rate that
    does not divide the dataset's, or moves that would be lost."""
    hz = spec.control_hz
    stride = round(hz / wanted) if wanted else 1
    if stride < 1 or (wanted and abs(hz / wanted - stride) > 1e-3):
        near = ", ".join(f"{hz / k:g}" for k in range(1, 7))
        raise ConfigError(
            f"{path} was recorded at {hz:g} Hz, whose rows make no {wanted:g} Hz: set "
            f"env.control_hz to {near} or another whole part of it"
        )
    if stride > 1 and not (goals or set(spec.action_names) <= set(spec.proprio_names)):
        raise ConfigError(
            f"{wanted:g} of {hz:g} Hz leaves out {stride - 1} of {stride} actions, which is right "
            "for goals and loses moves or speeds, and nothing says which these are: set "
            f"env.goals=true if each says where to go, or env.control_hz={hz:g}"
        )
    return stride


def moved(spec: EmbodimentSpec, config: RecordingConfig) -> tuple[str, ...]:
    """The actions that are learned as moves (``env.actions=delta``). Raises `ConfigError` for one
    whose number the state does not have, or where there is none."""
    if config.actions == "absolute":
        if config.keep:
            raise ConfigError(
                f"env.keep={config.keep} is of env.actions=delta: set that, or leave it out"
            )
        return ()
    if unknown := [name for name in config.keep if name not in spec.action_names]:
        raise ConfigError(
            f"env.keep has {unknown[0]!r}, and the actions are {', '.join(spec.action_names)}: "
            "name those"
        )
    names = tuple(name for name in spec.action_names if name not in config.keep)
    lacking = [name for name in names if name not in spec.proprio_names]
    if lacking or not names:
        raise ConfigError(
            f"env.actions=delta: {lacking[0] if lacking else 'no action'} is "
            f"{'no number of the state' if lacking else 'left to learn as a move'} (state: "
            f"{', '.join(spec.proprio_names)}): name what stays as it is with env.keep=[...], give "
            "numbers the state's names with env.rename, or use env.actions=absolute"
        )
    return names


def load_whoever(path: str | Path, choose: Choose | None = None) -> DemonstrationDataset:
    """`load_demonstrations`, also of a dataset that does not say which robot it is of; that is
    then as it describes it."""
    if read_embodiment(path) is not None:
        return load_demonstrations(path, choose=choose)
    recording = open_recording(path, RecordingConfig())
    return recording.demonstrations(
        1, [task.task_id for task in recording.tasks], failures=True, choose=choose
    )
