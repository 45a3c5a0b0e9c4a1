"""A device of an operator in a process of its own: ``python -m real.teleop.process CONFIG.json``
with socket, teleop (the fields of `TeleopConfig`) and names (of the robot's action). Its inputs go
out at a steady rate, on the wall clock.

A device that is lost lets go, and is opened again once a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from real.link import Client, LinkError
from real.named import named
from real.scheduling import freeze_garbage, own_config
from real.teleop.client import Line, TeleopClient
from real.teleop.protocol import Device
from vla_rl.errors import ConfigError, UserError

HZ = 30.0
# and CLASSConfig
KINDS = {"spacemouse": "real.teleop.spacemouse:SpaceMouse", "lerobot": "real.teleop.leader:Leader"}
_AGAIN_S = 1.0


@dataclass(frozen=True)
class TeleopConfig:
    """``kind`` one of `KINDS`, or "module:Class" of a `Device` that takes its ``options`` as
    keywords."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, names: Sequence[str]) -> Device:
        """Not connected yet; ``names`` are the robot's action dimensions. Raises `ConfigError`."""
        if self.kind not in KINDS and ":" not in self.kind:
            raise ConfigError(
                f"teleop={self.kind}: there is no such device, use one of {', '.join(KINDS)}, or "
                "package.module:Class; keyboard, mouse and gamepad work in the console's page"
            )
        path, given = KINDS.get(self.kind, self.kind), dict(self.options)
        device: Any = named(path)
        try:
            if self.kind not in KINDS:
                return device(**given)  # type: ignore[no-any-return]
            config = named(f"{path}Config")
            own = {f.name for f in dataclasses.fields(config)}
            if "options" in own:  # what is no key of this project's is the vendor's: port, id ...
                given["options"] = {
                    **given.get("options", {}),
                    **{k: given.pop(k) for k in set(given) - own},
                }
            return device(config(**given), names)  # type: ignore[no-any-return]
        except TypeError as error:
            raise ConfigError(f"the options of teleop={self.kind} are wrong: {error}") from None


def serve(client: Client, device: Device) -> None:
    """Until the session ends. What comes is heard at once, the device is read `HZ` times a
    second."""
    teleop = TeleopClient(device, Line(client.writer.source, client.send))
    due, again = time.monotonic(), math.inf
    try:
        while True:
            message = client.receive(max(0.001, due - time.monotonic()))
            while message is not None:
                teleop.hear(message)
                message = client.receive(0.0)
            now = time.monotonic()
            if now < due:
                continue
            due = max(due + 1.0 / HZ, now)
            if teleop.step() is not None:
                again = math.inf
            elif now >= (again := min(again, now + _AGAIN_S)):
                device.close()
                with contextlib.suppress(UserError):  # it is not there yet
                    device.connect()
                again = math.inf
    except LinkError:
        return
    finally:
        device.close()


def main() -> None:
    config = own_config()
    teleop = TeleopConfig(**config["teleop"])
    try:
        device = teleop.make(config["names"])
        device.connect()
        client = Client(config["socket"], "teleop", f"teleop.{device.name}")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    freeze_garbage()
    print("ready", flush=True)
    serve(client, device)


if __name__ == "__main__":
    main()
