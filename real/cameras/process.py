"""A camera in a process of its own: ``python -m real.cameras.process CONFIG.json`` with socket,
name and camera.

It may hang, crash or be unplugged without anybody waiting for it: who needs its pictures sees their
age. A camera that is lost is opened again once a second; a call into a driver that does not come
back ends the process, and the session starts another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from real.cameras.protocol import Camera, CameraLost, fitted
from real.link import Client, LinkError
from real.messages import Frame
from real.named import named
from real.ring import RingWriter
from real.scheduling import freeze_garbage, own_config
from real.supervisor.watch import DeviceClock
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import CameraSpec

KINDS = {
    "realsense": "real.cameras.realsense:RealSenseCamera",
    "opencv": "real.cameras.opencv:OpenCVCamera",
    "lerobot": "real.cameras.lerobot:LeRobotCamera",
    "so101_sim": "real.cameras.so101_sim:SimulatedCamera",
}
HUNG_S = 5.0  # in one call of a driver
_AGAIN_S = 1.0
_OLDEST_S = 1.0  # that a device's stamp can make a picture: beyond it the clock is wrong


@dataclass(frozen=True)
class CameraConfig:
    """``type`` one of `KINDS` or "module:Class" of a `Camera` with its ``options``. Pictures are
    cut and brought to ``height`` × ``width``, the size that the policy was made for."""

    type: str
    height: int = 480
    width: int = 640
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, given: Mapping[str, Any]) -> CameraConfig:
        """From ``cameras.NAME.KEY=VALUE``; what is no key of this class is the camera's own.
        Raises `ConfigError`."""
        own = {k: v for k, v in given.items() if k in ("type", "height", "width")}
        kind = own.get("type", "")
        if kind not in KINDS and ":" not in str(kind):
            raise ConfigError(
                f"cameras.{name}={kind}: there is no such camera, use one of {', '.join(KINDS)}, "
                "or package.module:Class"
            )
        for key in ("height", "width"):
            if not isinstance(own.get(key, 1), int) or own.get(key, 1) < 1:
                raise ConfigError(f"cameras.{name}.{key}={own[key]}: give pixels, 1 or more")
        return cls(**own, options={k: v for k, v in given.items() if k not in own})

    def spec(self, name: str) -> CameraSpec:
        return CameraSpec(name, self.height, self.width)

    def make(self, name: str) -> Camera:
        """Raises `ConfigError` for options that the camera does not take."""
        try:
            return named(KINDS.get(self.type, self.type))(**self.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the options of cameras.{name} ({self.type}) are wrong: {error}"
            ) from None


class _Station:
    """Passes a camera's pictures on: into a ring, and a `Frame` to the session."""

    def __init__(self, name: str, config: CameraConfig, client: Client, say: Callable[[str], None]):
        self.name, self.config, self.camera, self._client, self._say = (
            name,
            config,
            config.make(name),
            client,
            say,
        )
        self._ring = RingWriter(name, (config.height, config.width, 3))
        self._clock, self._number = DeviceClock(), -1

    def start(self) -> None:
        """Until the first picture has come. Raises `CameraLost` or `UserError`."""
        self.camera.open()
        if not self.pass_on(10.0):
            raise CameraLost(f"{self.name} sends no picture")

    def pass_on(self, timeout_s: float = 0.5) -> bool:
        """One picture, if one comes. Raises `CameraLost`, and `LinkError` at the session's end."""
        grabbed = self.camera.grab(timeout_s)
        if grabbed is None:
            return False
        now = time.monotonic()
        age = min(max(0.0, self._clock.age(grabbed.device_stamp, now)), _OLDEST_S)
        self._number += 1
        slot = self._ring.write(
            fitted(grabbed.image, self.config.height, self.config.width, grabbed.mixes),
            self._number,
        )
        self._client.send(
            Frame,
            camera=self.name,
            ring=self._ring.address,
            slot=slot,
            number=self._number,
            device_no=grabbed.device_no,
            capture=now - age,
            device_stamp=grabbed.device_stamp,
            height=self.config.height,
            width=self.config.width,
            channels=3,
        )
        return True

    def run(self) -> None:
        """Until the session ends."""
        while True:
            # fires even where a driver holds Python's lock
            faulthandler.dump_traceback_later(HUNG_S, exit=True)
            try:
                self.pass_on()
            except CameraLost as error:
                self._open_again(str(error))

    def _open_again(self, why: str) -> None:
        self._say(f"lost: {why}")
        while True:
            faulthandler.cancel_dump_traceback_later()
            self.camera.close()
            time.sleep(_AGAIN_S)
            self._client.skip()  # raises where the session is over
            self._clock.reset()
            with contextlib.suppress(CameraLost):
                self.camera.open()
                self._say("there again")
                return


def main() -> None:
    config = own_config()
    name = config["name"]
    try:
        chosen = CameraConfig(**config["camera"])
        client = Client(config["socket"], "camera", f"camera.{name}")
        station = _Station(name, chosen, client, lambda text: print(text, flush=True))
        station.start()
    except (UserError, CameraLost) as error:
        raise SystemExit(f"error: {error}") from None
    freeze_garbage()
    print("ready", flush=True)
    with contextlib.suppress(LinkError):
        station.run()


if __name__ == "__main__":
    main()
