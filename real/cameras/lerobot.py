"""Any camera that is registered with lerobot (0.4.4). It tells no frame numbers: a picture that differs has the next one."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from real.cameras.protocol import CameraLost, Changes, Grabbed
from vla_rl.errors import ConfigError, MissingPackage

_UNPLUGGED = (ConnectionError, OSError, RuntimeError)


class LeRobotCamera:
    """``kind`` is lerobot's name for it (opencv, intelrealsense …), ``options`` its config (index_or_path,
    serial_number_or_name, width, height, fps …), ``plugins`` modules that register further kinds."""

    def __init__(self, kind: str = "opencv", options: Mapping[str, Any] | None = None, plugins: tuple[str, ...] = ()):
        self.kind, self._options, self._plugins = kind, dict(options or {}), plugins
        self._device: Any = None
        self._changes = Changes()

    def open(self) -> None:
        try:
            from lerobot.cameras.configs import CameraConfig
            from lerobot.cameras.utils import make_cameras_from_configs
        except ModuleNotFoundError as error:
            raise MissingPackage("lerobot", "lerobot", "A camera of lerobot") from error
        for module in [*self._plugins, "lerobot.cameras.opencv", "lerobot.cameras.realsense"]:
            importlib.import_module(module)
        known = CameraConfig.get_known_choices()
        if self.kind not in known:
            raise ConfigError(f"lerobot knows no camera {self.kind!r}: it knows {', '.join(sorted(known))}")
        try:
            config = known[self.kind](**self._options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the options of lerobot's camera {self.kind} are wrong: {error}") from None
        self._device = make_cameras_from_configs({"it": config})["it"]
        try:
            self._device.connect()
        except _UNPLUGGED as error:
            raise CameraLost(f"lerobot's camera {self.kind} cannot be opened: {error}") from None

    def grab(self, timeout_s: float) -> Grabbed | None:
        try:
            image = np.asarray(self._device.async_read(timeout_ms=int(1000 * timeout_s)))
        except TimeoutError:
            return None
        except _UNPLUGGED as error:
            raise CameraLost(f"lerobot's camera {self.kind} does not answer: {error}") from None
        return Grabbed(image, self._changes.number(image), time.monotonic())

    def close(self) -> None:
        if self._device is not None:
            with contextlib.suppress(*_UNPLUGGED):
                self._device.disconnect()
