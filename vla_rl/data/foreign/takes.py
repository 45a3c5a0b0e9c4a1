"""What every format is read as."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vla_rl.data.lerobot_format import DatasetError
from vla_rl.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """What a format leaves to be told. ``rename`` {its name of a camera, state or action: ours},
    where ours is observation.state, action, or a camera's; ``cameras`` are those that are kept
    (empty: all). ``fps`` where it says none; ``instruction`` of episodes that have none."""

    rename: dict[str, str] = field(default_factory=dict)
    cameras: Sequence[str] = ()
    fps: float = 0.0
    instruction: str = ""

    def ours(self, name: str) -> str:
        return self.rename.get(name, name)

    def keeps(self, camera: str) -> bool:
        return not self.cameras or camera in self.cameras

    def theirs(self, ours: str, found: Sequence[str], among: Sequence[str], place: Path) -> str:
        """Which of ``found`` is ``ours``: by ``rename``, else the first of ``among`` that is
        there. Raises `ConfigError`."""
        named = [name for name, word in self.rename.items() if word == ours]
        for name in named or among:
            if name in found:
                return name
        raise ConfigError(
            f"{place} has no {named[0] if named else ours}, it has {', '.join(found)}: say which "
            f"it is with --rename NAME={ours}"
        )


@dataclass(frozen=True)
class Take:
    """One episode of T rows: ``images`` {camera: uint8 [T H W 3]}, ``state`` [T p] and ``actions``
    [T a] as recorded. ``success`` None: nobody says."""

    name: str
    images: dict[str, np.ndarray]
    state: np.ndarray
    actions: np.ndarray
    instruction: str
    success: bool | None = None

    def every(self, stride: int) -> Take:
        """Every ``stride``-th row's picture and state, with the last action before the next, which
        is right for actions that are goals."""
        if stride == 1:
            return self
        seen = np.arange(0, len(self.state), stride)
        done = np.minimum(seen + stride - 1, len(self.state) - 1)
        return dataclasses.replace(
            self,
            images={name: frames[seen] for name, frames in self.images.items()},
            state=self.state[seen],
            actions=self.actions[done],
        )


class Source(Protocol):
    """An opened recording. ``robot`` "" where it says none."""

    path: Path
    robot: str
    fps: float
    state_names: tuple[str, ...]
    action_names: tuple[str, ...]

    def takes(self, pictures: bool = True) -> Iterator[Take]:
        """The episodes in their order; without ``pictures`` ``images`` is empty. Raises
        `UserError` that names the episode."""
        ...


def numbered(word: str, values: np.ndarray) -> tuple[str, ...]:
    return tuple(f"{word}_{i}" for i in range(values.shape[1]))


def matrix(values: Any, what: str) -> np.ndarray:
    """[T d] float32. Raises `DatasetError` for what is none."""
    found = np.asarray(values)
    if found.dtype.kind not in "fiub" or found.ndim not in (1, 2):
        raise DatasetError(f"{what} is {found.dtype} {list(found.shape)}, and [T d] is meant")
    return np.ascontiguousarray(found.reshape(len(found), -1), dtype=np.float32)


def colours(frames: np.ndarray, what: str) -> np.ndarray:
    """uint8 [T H W 3], the channels last. Raises `DatasetError`."""
    if frames.ndim == 4 and frames.shape[1] == 3 and frames.shape[3] != 3:
        frames = np.moveaxis(frames, 1, 3)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise DatasetError(
            f"{what} is {frames.dtype} {list(frames.shape)}, and uint8 [T H W 3] is meant: leave "
            "it out by naming the others with --camera"
        )
    return np.ascontiguousarray(frames)
