"""A person's device for sessions of the point robot, which ``teleop=session_device:Raiser``
names: it pushes up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real.teleop.protocol import DeviceLost, Sample


class Raiser:
    """Engaged while an episode runs, or ``always``. While the file ``unplugged`` is there, it
    does not answer."""

    name = "raiser"

    def __init__(self, unplugged: str = "", always: bool = False) -> None:
        self.always = always
        self.unplugged = Path(unplugged or "/nowhere")
        self.connected = self.released = 0

    def connect(self) -> None:
        if self.unplugged.exists():
            raise DeviceLost("there is no device")
        self.connected += 1

    def read(self, now: float, state: Any) -> Sample:
        if self.unplugged.exists() or not self.connected:
            raise DeviceLost("it is unplugged")
        engaged = self.always or (state is not None and state.mode in ("AUTO", "HUMAN"))
        return Sample(now, engaged, (0.0, 0.0, 1.0, 0.0, 0.0, 0.0))

    def release(self) -> None:
        self.released += 1

    def close(self) -> None:
        self.connected = 0
