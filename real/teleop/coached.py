"""The knowledge of a scripted operator, from the simulated world that it watches."""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgpack
import numpy as np

from real.messages import MAX_BYTES, State
from real.modes import Mode
from real.robots.remote import described
from real.robots.world import Coach
from real.teleop.protocol import DeviceLost
from real.teleop.scripted import Expert
from vla_rl.errors import ConfigError
from vla_rl.specs import EmbodimentSpec

_ANSWER_S = 0.1  # as long may the arm's process take


class RemoteCoach:
    """The `Coach` of a simulated arm in another process (`real.robots.server` at ``address``).
    Raises `ConfigError` for an arm that knows no expert, and `DeviceLost` where no answer comes."""

    def __init__(self, address: str):
        self._socket, about = described(address)
        if not about["coached"]:
            self.close()
            raise ConfigError(
                "operator: this arm's world knows no expert (Coach), so that nobody "
                "can play a person"
            )
        self.embodiment = EmbodimentSpec.from_dict(about["embodiment"])
        self._socket.settimeout(_ANSWER_S)
        self._numbers = itertools.count()

    def demonstrate(self, anew: bool) -> np.ndarray:
        return np.array(self._ask("demonstrate", anew), dtype=float)

    def progress(self) -> float:
        return float(self._ask("progress"))

    def close(self) -> None:
        self._socket.close()

    def _ask(self, what: str, *about: Any) -> Any:
        number, until = next(self._numbers), time.monotonic() + _ANSWER_S
        try:
            self._socket.send(msgpack.packb([what, number, *about]))
            while time.monotonic() < until and (packet := self._socket.recv(MAX_BYTES)):
                message = msgpack.unpackb(packet)  # (its measurements come too)
                if message[:2] == [what, number]:
                    return message[2]
        except OSError:
            pass
        raise DeviceLost("the simulated arm does not say how its task is done")


class WorldExpert(Expert):
    """Does what the world's expert would do, at ``speed`` times its motion: people are slower, and
    a hand that lags behind its eyes overshoots at full speed. It leaves the labels to the
    simulator."""

    def __init__(self, world: Coach, speed: float = 0.3):
        """Raises `ConfigError` for a world that knows no expert."""
        if not isinstance(world, Coach):
            raise ConfigError(
                f"operator: {type(world).__name__} knows no expert (Coach): nobody "
                "can play a person"
            )
        self.world, self.speed = world, speed
        self.rate = speed * world.embodiment.control_hz
        self._at, self._action = -np.inf, np.zeros(0)
        self._known: tuple[tuple[float, ...], float] = ((0.0,) * 6, 0.0)

    def action(self, state: State) -> tuple[tuple[float, ...], float]:
        spec = self.world.embodiment
        if self._ask(state):
            action = self._action
            bounds = np.where(action >= 0, np.abs(spec.action_high), np.abs(spec.action_low))
            share = np.clip(action / bounds, -1.0, 1.0)
            grips = spec.gripper != "none"
            moves = self.speed * (share[:-1] if grips else share)
            self._known = (
                (*moves.tolist(), *(0.0,) * (6 - len(moves))),
                float(share[-1]) if grips else 0.0,
            )
        return self._known

    def goal(self, state: State) -> tuple[float, ...]:
        if self.world.embodiment.frame != "joints":
            return ()
        self._ask(state)
        return tuple(self._action.tolist())

    def _ask(self, state: State) -> bool:
        """The world, once in a control step: whether it was."""
        period = 1.0 / self.world.embodiment.control_hz
        if self._at <= state.stamp < self._at + period - 1e-6:
            return False
        self._at = state.stamp
        self._action = self.world.demonstrate(anew=state.mode != Mode.HUMAN.value)
        return True

    def outcome(self, state: State) -> str:
        return ""

    def progress(self, state: State) -> float:
        return self.world.progress()
