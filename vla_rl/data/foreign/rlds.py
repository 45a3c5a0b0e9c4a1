"""RLDS, a folder of tensorflow-datasets: episodes of steps, as Open X-Embodiment has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.foreign.takes import Options, Take, colours, matrix, numbered
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.errors import ConfigError, MissingPackage, first_line

_STATES = ("state", "proprio", "robot_state")
_TEXTS = ("language_instruction", "natural_language_instruction")


class Rlds:
    """See `Source`. ``--rename KEY=...`` names observations without ``observation/``."""

    robot = ""

    def __init__(self, path: Path, options: Options):
        self.path, self.options, self.fps = path, options, options.fps
        try:
            import tensorflow  # noqa: F401  which tensorflow-datasets needs to read records
            import tensorflow_datasets as tfds
        except ImportError as error:
            package = "tensorflow" if error.name == "tensorflow" else "tensorflow-datasets"
            raise MissingPackage(package, "rlds", "Reading RLDS recordings") from None
        if not options.fps:
            raise ConfigError(f"{path} does not say how many steps a second it has: give --fps HZ")
        try:
            self._builder = tfds.builder_from_directory(str(path))
        except Exception as error:  # of tensorflow-datasets, of many kinds
            raise DatasetError(
                f"{path} is none of tensorflow-datasets: {first_line(error)}"
            ) from None
        self._tfds = tfds
        features = self._builder.info.features["steps"]
        observed = list(features["observation"])
        self._state = options.theirs("observation.state", observed, _STATES, path)
        if features["action"].shape is None or len(features["action"].shape) != 1:
            raise DatasetError(f"{path}: its action is no vector, and [a] is meant")
        self.action_names = tuple(f"action_{i}" for i in range(features["action"].shape[0]))
        state = np.zeros((1, *features["observation"][self._state].shape))
        self.state_names = numbered(self._state, state.reshape(1, -1))
        names = {
            key: options.ours(key)
            for key in observed
            if len(features["observation"][key].shape or ()) == 3
        }
        self._cameras = {name: key for key, name in names.items() if options.keeps(name)}

    def takes(self, pictures: bool = True) -> Iterator[Take]:
        number = 0
        for split in self._builder.info.splits:
            for episode in self._tfds.as_numpy(self._builder.as_dataset(split=split)):
                yield self._take(f"{split} {number}", list(episode["steps"]), pictures)
                number += 1

    def _take(self, name: str, steps: list[Any], pictures: bool) -> Take:
        where = f"{self.path}: {name}"
        seen = [step["observation"] for step in steps]
        shown = self._cameras if pictures else {}
        images = {
            camera: colours(np.stack([row[key] for row in seen]), f"{where}: {key}")
            for camera, key in shown.items()
        }
        texts = [steps[0].get(key) or seen[0].get(key) for key in _TEXTS]
        text = next((t.decode() for t in texts if isinstance(t, bytes)), "")
        rewards = [float(step.get("reward", np.nan)) for step in steps]
        return Take(
            name,
            images,
            matrix(np.stack([row[self._state] for row in seen]), f"{where}: {self._state}"),
            matrix(np.stack([step["action"] for step in steps]), f"{where}: action"),
            text or self.options.instruction,
            None if np.isnan(rewards).any() else max(rewards) > 0,
        )
