"""Any camera that is registered with lerobot. It tells no frame numbers: a picture that differs
has the next one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from real.cameras.protocol import CameraLost, Changes, Grabbed
from real.lerobot_kinds import make

_UNPLUGGED = (ConnectionError, OSError, RuntimeError)


class LeRobotCamera:
    """``kind`` is lerobot's name for it (opencv, intelrealsense …), ``options`` its config
    (index_or_path, serial_number_or_name, width, height, fps …), ``plugins`` modules that register
    further kinds."""

    def __init__(
        self,
        kind: str = "opencv",
        options: Mapping[str, Any] | None = None,
        plugins: tuple[str, ...] = (),
    ):
        self.kind, self._options, self._plugins = kind, dict(options or {}), plugins
        self._device: Any = None
        self._changes = Changes()

    def open(self) -> None:
        self._device = make(
            "camera",
            self.kind,
            self._options,
            "lerobot.cameras.configs:CameraConfig",
            f"{__name__}:_one",
            self._plugins,
        )
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


def _one(config: Any) -> Any:
    from lerobot.cameras.utils import make_cameras_from_configs

    return make_cameras_from_configs({"it": config})["it"]
