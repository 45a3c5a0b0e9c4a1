"""A policy's side of a session, without the policy: when to decide, on what, and what to send. No torch, no clock.

Pictures and state are brought together as the simulator would show them at one moment: a decision waits for a picture of
every camera from after the last control step, and takes the state that was measured nearest to them.

Synchronous: decide, run the rows, decide again; the arm keeps its last goal meanwhile. Asynchronous: decide on what was seen
while the rows before still run; a chunk's rows count from the moment of its observation, and those that have passed by the
time it comes are dropped by the supervisor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from real.messages import Chunk, Frame, Message, Notice, Refused, State, Welcome
from real.tasks import parse
from vla_rl.errors import ConfigError, UserError

KINDS = ("synchronous", "asynchronous")
_LOST_S = 0.5  # after which a chunk of which nothing runs is taken for lost
_KEPT = 128  # states

Decide = Callable[[dict[str, np.ndarray], np.ndarray, str, bool], np.ndarray]
"""({camera: uint8 [H W 3]}, proprio float32 [p], instruction, whether it is the first since somebody else moved the arm) →
actions [h a] in the robot's units."""
Pictures = Callable[[Frame], "np.ndarray | None"]


@dataclass(frozen=True)
class ActingConfig:
    """``steps`` of each chunk are run before the next is due (0: all of them, asynchronously half of them). A chunk whose
    first row has not begun ``valid_s`` seconds after it was sent is void."""

    acting: str = "synchronous"
    steps: int = 0
    valid_s: float = 0.3

    def __post_init__(self) -> None:
        if self.acting not in KINDS:
            raise ConfigError(f"robot.acting={self.acting!r} is unknown: use one of {', '.join(KINDS)}")
        if self.steps < 0 or not 0 < self.valid_s <= 2:
            raise ConfigError(f"robot.steps={self.steps} must be 0 or more, and robot.valid_s={self.valid_s} in (0, 2]")


@dataclass
class _Sent:
    """The newest chunk. ``last`` is the index of its last row, ``captured`` when its observation was."""

    decision: int
    last: int
    captured: float
    at: float
    seq: int = -1
    running: bool = False


class Acting:
    """Takes the supervisor's messages (`hear`), and says which chunk to send (`chunk`), if any."""

    def __init__(
        self, decide: Decide, pictures: Pictures, version: str, config: ActingConfig, instruction: str = "",
        swap: Callable[[], str | None] = lambda: None,
    ):  # fmt: skip
        """``swap`` is called as an episode ends: it may take other weights, and returns the name of their version."""
        self.others: dict[str, tuple[Decide, str]] = {}  # policies of their own, and their versions, by instruction
        self.decide, self.pictures, self.version, self.config = decide, pictures, version, config
        self._swap = swap
        self.instruction = instruction
        self.decisions = 0
        self.waited: list[float] = []  # seconds that each decision took
        self._welcome: Welcome | None = None
        self._states: deque[State] = deque(maxlen=_KEPT)
        self._frames: dict[str, Frame] = {}
        self._epoch, self._since = -1, math.inf
        self._first = True
        self._sent: _Sent | None = None

    # ------------------------------------------------------------------------------------------------------------ hearing
    def hear(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._welcome = message
        elif isinstance(message, Frame):
            self._frames[message.camera] = message
        elif isinstance(message, Notice) and message.name == "begin" and message.value:
            self.instruction = parse(message.value).instruction
        elif isinstance(message, Notice) and message.name in ("end_episode", "discard"):
            self.version = self._swap() or self.version
        elif isinstance(message, Refused):
            if self._sent is not None and message.about == self._sent.seq:
                self._first, self._sent = True, None  # what the policy remembers of it was not executed
        elif isinstance(message, State):
            self._hear_state(message)

    def _hear_state(self, state: State) -> None:
        self._states.append(state)
        if state.mode != "AUTO":
            self._epoch = -1
        elif state.epoch != self._epoch:
            self._epoch, self._since = state.epoch, state.stamp
            self._first, self._sent = True, None
        elif (sent := self._sent) is not None:
            self._follow(sent, state)

    def _follow(self, sent: _Sent, state: State) -> None:
        mine = state.decision == sent.decision
        sent.running = sent.running or mine
        over = mine and state.index == sent.last and state.step_done
        skipped = sent.running and not mine and state.decision < sent.decision  # the tick that ends a step was skipped
        lost = not sent.running and state.stamp - sent.at > _LOST_S
        if over or skipped or lost:
            self._since = state.stamp + (1.0 / self._hz if over else 0.0)
            self._first, self._sent = self._first or lost, None

    @property
    def _hz(self) -> float:
        return self._welcome.hz if self._welcome is not None else 100.0

    # ------------------------------------------------------------------------------------------------------------- acting
    @property
    def due(self) -> bool:
        """Whether `chunk` would decide now."""
        if self._welcome is None or self._epoch < 0 or not self._welcome.cameras:
            return False
        if any(name not in self._frames for name in self._welcome.cameras):
            return False
        since = self._since
        if self._sent is not None:
            if self.config.acting == "synchronous":
                return False
            since = self._sent.captured + (self._steps(self._sent.last + 1)) / self._welcome.control_hz
        captured, newest = self._captured, self._states[-1]
        paired = newest.measured >= captured - 0.5 / self._hz or newest.stamp > captured + 3.0 / self._hz
        return captured >= since - 0.2 / self._hz and paired

    @property
    def wants(self) -> bool:
        """Whether a picture that is taken now would be decided on: for a simulation that takes them when they are wanted."""
        return self._epoch >= 0 and self._sent is None

    @property
    def _captured(self) -> float:
        assert self._welcome is not None
        return min(self._frames[name].capture for name in self._welcome.cameras)

    def _steps(self, rows: int) -> int:
        usual = rows if self.config.acting == "synchronous" else max(1, rows // 2)
        return min(self.config.steps, rows) if self.config.steps else usual

    def chunk(self, now: Callable[[], float]) -> dict[str, Any] | None:
        """The fields of a `Chunk`, for which the policy was asked; None where a picture was overwritten meanwhile.

        Raises `UserError` for what the policy answers that is no chunk of this robot.
        """
        assert self._welcome is not None
        begun, captured = now(), self._captured
        found = {name: self.pictures(self._frames[name]) for name in self._welcome.cameras}
        images = {name: image for name, image in found.items() if image is not None}
        if len(images) < len(found):
            return None
        state = min(self._states, key=lambda s: abs(s.measured - captured))
        decide, version = self.others.get(self.instruction, (self.decide, self.version))
        rows = np.asarray(decide(images, np.array(state.proprio, np.float32), self.instruction, self._first))
        width = len(self._welcome.action_names)
        if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
            raise UserError(f"the policy answers with actions {list(rows.shape)}; this robot takes [steps, {width}]")
        queued = self.config.acting == "asynchronous"
        if not queued:
            rows = rows[: self._steps(len(rows))]
        ended = now()
        self.waited.append(ended - begun)
        self._sent = _Sent(self.decisions, len(rows) - 1, captured, ended)
        start = state.tick + 1 if queued and not self._first else 0
        self._first = False
        self.decisions += 1
        return {
            "epoch": self._epoch, "start": start, "hz": self._welcome.control_hz, "decision": self._sent.decision,
            "policy_version": version, "obs_stamp": captured, "prefix": 0,
            "delay": math.ceil((ended - captured) * self._welcome.control_hz) if queued else 0,
            "actions": tuple(tuple(map(float, row)) for row in rows),
        }  # fmt: skip

    def sent(self, message: Message) -> None:
        """The chunk went out as ``message``: a refusal of it will name its number."""
        if self._sent is not None:
            self._sent.seq = message.seq


def serve(client: Any, acting: Acting) -> None:
    """The loop of a policy's process. Returns when the session ends; ``client`` is a `real.link.Client`."""
    from real.link import LinkError

    clock = client.writer.clock
    try:
        while True:
            message = client.receive(0.1)
            while message is not None:
                acting.hear(message)
                message = client.receive(0.0)
            if acting.due and (fields := acting.chunk(clock)) is not None:
                acting.sent(client.send(Chunk, acting.config.valid_s, **fields))
    except LinkError:
        return
