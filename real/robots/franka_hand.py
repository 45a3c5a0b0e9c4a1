"""A Franka Hand: ``python -m real.robots.franka_hand CONFIG FD``. A call that moves it keeps the
interpreter for as long as it takes, so it has a process of its own; of what it is told meanwhile the
newest counts. It keeps its grasp whatever happens."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import msgpack

from real.link import read_packet
from real.robots.franka_loop import serve
from vla_rl.errors import ConfigError, first_line

_EVERY_S = 0.05
_ANY = 0.1  # m: a grasp is one whatever it holds


class Hand:
    """``config``: address, hand_speed (m/s), hand_force (N)."""

    def __init__(self, config: dict[str, Any], link: socket.socket, library: Any):
        self.config, self.link, self.library = config, link, library
        self.over = False
        self._wanted = self._done = 0  # 1 closes, -1 opens
        self._hand = library.Gripper(config["address"])
        self._widest = float(self._hand.read_once().max_width)
        if self._widest <= 0.0:
            raise ConfigError(
                "the hand does not know how wide it opens: home it, by `vla-rl robot franka setup "
                "--home` or in Desk"
            )
        link.settimeout(_EVERY_S)

    def turn(self) -> None:
        self._hear()
        try:
            if self._wanted != self._done and not self.over:
                self._done = self._wanted
                self._move()
            self._send("width", float(self._hand.read_once().width) / self._widest)
        except Exception as error:  # libfranka's own
            self._send("said", f"the hand failed: {first_line(error)}")
            time.sleep(_EVERY_S)
            with contextlib.suppress(Exception):
                self._hand = self.library.Gripper(self.config["address"])

    def _hear(self) -> None:
        """All that came, or nothing for a while."""
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while not self.over:
                packet = read_packet(self.link)
                if not packet:
                    self.over = True
                    break
                self._wanted = msgpack.unpackb(packet)[1]
                self.link.setblocking(False)
        self.link.settimeout(_EVERY_S)

    def _move(self) -> None:
        x = self.config
        if self._wanted > 0:
            self._hand.grasp(0.0, x["hand_speed"], x["hand_force"], _ANY, _ANY)
        else:
            self._hand.move(self._widest, x["hand_speed"])

    def _send(self, kind: str, what: Any) -> None:
        with contextlib.suppress(OSError):
            self.link.send(msgpack.packb([kind, what]))


if __name__ == "__main__":
    serve(Hand)
