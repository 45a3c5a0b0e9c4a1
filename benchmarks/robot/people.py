"""Who takes part in a soak besides the arm, all of it seeded: a policy of moods, and a person at
the console."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from real.lockstep import Lockstep
from real.messages import Event, Grant, Lease, Message, State
from real.robots.world import Coach

CONSOLE = "console.person"
MOODS = ("able", "stuck", "wanders")
_SHARES = (0.6, 0.25, 0.15)
_ROWS = 4  # control steps of a chunk
_AGAIN_S = 0.3  # between two keys


class MoodyPolicy:
    """Does what the world's expert would do, or nothing, or goes anywhere (into walls too): a mood
    for each episode. ``breaks``: it answers with numbers that are none."""

    def __init__(self, world: Coach, rng: np.random.Generator):
        self.world, self.rng = world, rng
        self.mood, self.breaks = MOODS[0], False
        self._way: np.ndarray = np.zeros(0)

    def begin(self, mood: str = "") -> None:
        """An episode; or another ``mood`` in the middle of one."""
        self.mood = mood or str(self.rng.choice(MOODS, p=_SHARES))

    def __call__(
        self, images: Any, proprio: np.ndarray, instruction: str, first: bool
    ) -> np.ndarray:
        spec = self.world.embodiment
        low, high = np.array(spec.action_low), np.array(spec.action_high)
        action: np.ndarray = np.zeros(len(low))
        if self.mood == "able":
            noise = 0.02 * self.rng.standard_normal(len(low)) * (high - low)
            action = np.clip(self.world.demonstrate(first) + noise, low, high)
        elif self.mood == "wanders":
            if first or not self._way.size or self.rng.random() < 0.2:
                self._way = self.rng.uniform(low, high)
            action = self._way
        rows = np.tile(action, (_ROWS, 1))
        if self.breaks:
            rows[:, self.rng.integers(len(low))] = self.rng.choice([np.nan, np.inf])
        return rows


class Person:
    """Watches the console. Where the session does not go on by itself, the person takes control a
    reaction time later, does what the console's page says (release the e-stop, acknowledge, arm,
    full speed, resume) and gives control up again."""

    def __init__(self, session: Lockstep, rng: np.random.Generator):
        self.session, self.rng = session, rng
        self.pressed_until = -math.inf  # the e-stop
        self._token, self._due, self._next = "", math.inf, 0.0
        session.join(CONSOLE, "console", self.hear)

    def estop(self, seconds: float) -> None:
        self.pressed_until = self.session.now + seconds
        self._press("estop")

    def stop(self) -> None:
        self._press("stop")

    def hear(self, message: Message) -> None:
        if isinstance(message, Grant):
            self._token = message.token if message.granted else ""
        elif isinstance(message, State):
            self._look(message, self.session.now)

    def _look(self, state: State, now: float) -> None:
        if state.holder != CONSOLE:
            self._token = ""
        if state.mode not in ("FAULT", "STOPPED", "PAUSED") and not self._token:
            self._due = math.inf
            return
        if self._due == math.inf:
            self._due = now + 0.2 + float(self.rng.lognormal(math.log(0.5), 0.4))
        if now < max(self._due, self._next, self.pressed_until):
            return
        self._next = now + _AGAIN_S
        if not self._token:
            latched = state.mode in ("FAULT", "STOPPED")
            self.session.send(CONSOLE, Lease, ask="request", token="", force=latched)
        elif name := self._key(state):
            self._press(name)
        else:
            self.session.send(CONSOLE, Lease, ask="release", token=self._token, force=False)
            self._due = math.inf

    def _key(self, state: State) -> str:
        if state.slow and state.mode in ("READY", "PAUSED"):
            return "full_speed"
        fault = "estop_clear" if state.estop else "ack"
        return {"FAULT": fault, "STOPPED": "ack", "IDLE": "arm", "PAUSED": "start"}.get(
            state.mode, ""
        )

    def _press(self, name: str) -> None:
        self.session.send(
            CONSOLE, Event, name=name, value="", at=self.session.now, lease=self._token
        )
