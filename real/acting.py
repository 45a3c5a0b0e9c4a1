"""A policy's side of a session, without the policy: when to decide, on what, and what to send. No
torch, no clock.

Pictures and state are brought together as the simulator would show them at one moment: a decision
waits for a picture of every camera from after the last control step, and takes the state that was
measured nearest to them.

Synchronous: decide, run the rows, decide again; the arm keeps its last goal meanwhile. In all other
ways it decides on what was seen while the rows before still run. A chunk then begins with the first
control step after its observation, in step with the rows before; those that have passed by the time
it comes are dropped by the supervisor. How two chunks meet:

- asynchronous: the new one replaces the old one;
- ensemble (temporal ensembling, ACT, arXiv 2304.13705): a control step runs the mean of all that
  was predicted for it;
- rtc (real-time chunking, arXiv 2506.07339): the policy denoises the new chunk towards what is left
  of the old one. How many rows will have passed (d) is foreseen from how long decisions took
  lately.

Whoever else moves the arm makes all that was predicted void: no chunk is mixed with, or held to,
one from before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from real.messages import Chunk, Frame, Message, Notice, Refused, State, Welcome
from real.overlap import SCHEDULES, Guide, ensemble_weights, mean_action, soft_mask
from real.tasks import parse
from vla_rl.bounds import Bounded, bound
from vla_rl.errors import UserError

KINDS = ("synchronous", "asynchronous", "ensemble", "rtc")
_LOST_S = 0.5  # after which a chunk of which nothing runs is taken for lost
_KEPT = 128  # states
_KEPT_WAITS = 1000  # decisions
_RECENT, _SHARE = 20, 0.95  # decisions, and the share of them that takes no longer than is foreseen

Decide = Callable[..., Any]
"""({camera: uint8 [H W 3]}, proprio float32 [p], instruction, whether it is the first since
somebody else moved the arm) → actions [h a] in the robot's units, or they and the shares [h 1] of
a control step that each lasts; with rtc a `Guide` may follow. None: nobody answers, and nothing is
sent, so that the arm holds still."""
Pictures = Callable[[Frame], "np.ndarray | None"]


@dataclass(frozen=True)
class ActingConfig(Bounded, place="robot"):
    """``steps`` of each chunk are run before the next is due (0: synchronously all of them, with
    ensemble 1, else half). A chunk whose first row has not begun ``valid_s`` seconds after it was
    sent is void. ``ensemble_decay`` is m of the weights exp(−m i), ``rtc_guidance`` the limit β of
    the guidance's factor, ``rtc_schedule`` how its weights fall."""

    acting: str = bound("synchronous", choices=KINDS)
    steps: int = bound(0, ge=0)
    valid_s: float = bound(0.3, gt=0, le=2)
    ensemble_decay: float = bound(0.01, ge=0, lt=math.inf)
    rtc_guidance: float = bound(5.0, gt=0, lt=math.inf)
    rtc_schedule: str = bound("exp", choices=SCHEDULES)

    def executed(self, rows: int) -> int:
        """How many of a chunk's ``rows`` are run before the next is due."""
        usual = {"synchronous": rows, "ensemble": 1}.get(self.acting, max(1, rows // 2))
        return min(self.steps, rows) if self.steps else usual


@dataclass
class _Sent:
    """The newest chunk. ``rows`` [h a] are what was predicted, but for those that were late: there
    it is what ran instead (an ensemble keeps its predictions as they are). ``begins`` is the tick
    of the first one (-1: at once, and no state has shown when that was), ``captured`` when its
    observation was."""

    decision: int
    rows: np.ndarray
    begins: int
    captured: float
    at: float
    seq: int = -1
    running: bool = False

    @property
    def last(self) -> int:
        """The index of its last row."""
        return len(self.rows) - 1

    def place(self, state: State, hz: float, per_row: float) -> _Place:
        """Where a chunk begins that is decided on what was seen at ``state``: with the first
        control step after it. ``hz`` ticks are a second, ``per_row`` a control step."""
        over = max(0, math.floor((state.tick - self.begins) / per_row) + 1)
        begins = self.begins + round(over * per_row)
        return _Place(begins, state.stamp + (begins - state.tick) / hz, self.rows[over:])


@dataclass
class _Place:
    """Where a chunk begins: at tick ``begins``, which is due at ``due`` (seconds); -1: at once.
    ``rest`` [k a] are the rows of the chunk before from there on."""

    begins: int = -1
    due: float = 0.0
    rest: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def late(self, at: float, hz: float) -> int:
        """How many of its rows, ``hz`` a second, are due by then."""
        return 0 if self.begins < 0 else max(0, math.floor((at - self.due) * hz + 1e-6) + 1)


class Acting:
    """Takes the supervisor's messages (`hear`), and says which chunk to send (`chunk`), if any."""

    def __init__(
        self,
        decide: Decide,
        pictures: Pictures,
        version: str,
        config: ActingConfig,
        instruction: str = "",
        swap: Callable[[], str | None] = lambda: None,
    ):
        """``swap`` is called as an episode ends: it may take other weights, and returns the name
        of their version."""
        # policies of their own, and their versions, by instruction
        self.others: dict[str, tuple[Decide, str]] = {}
        self.decide, self.pictures, self.version, self.config = decide, pictures, version, config
        self._swap = swap
        self.instruction = instruction
        self.decisions = 0
        self.waited: list[float] = []  # seconds that the newest decisions took
        self._welcome: Welcome | None = None
        self._states: deque[State] = deque(maxlen=_KEPT)
        self._frames: dict[str, Frame] = {}
        self._epoch, self._since = -1, math.inf
        self._first = True
        self._sent: _Sent | None = None
        self._past: list[_Sent] = []  # of an ensemble, the oldest first

    # -------------------------------------------------------------------------------------- hearing
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
                self._void(True)  # what the policy remembers of it was not executed
        elif isinstance(message, State):
            self._hear_state(message)

    def _hear_state(self, state: State) -> None:
        self._states.append(state)
        if state.mode != "AUTO":
            self._epoch = -1
        elif state.epoch != self._epoch:
            self._epoch, self._since = state.epoch, state.stamp
            self._void(True)
        elif (sent := self._sent) is not None:
            self._follow(sent, state)

    def _follow(self, sent: _Sent, state: State) -> None:
        mine = state.decision == sent.decision
        sent.running = sent.running or mine
        if mine:
            begins = state.tick - round(state.index * self._per_row)
            sent.begins = begins if sent.begins < 0 else min(sent.begins, begins)
        over = mine and state.index == sent.last and state.step_done
        # the tick that ends a step was skipped
        skipped = sent.running and not mine and state.decision < sent.decision
        lost = not sent.running and state.stamp - sent.at > _LOST_S
        if over or skipped or lost:
            self._since = state.stamp + (1.0 / self._hz if over else 0.0)
            self._void(self._first or lost)

    def _void(self, first: bool) -> None:
        """Nothing that was predicted counts any more."""
        self._first, self._sent, self._past = first, None, []

    @property
    def _hz(self) -> float:
        return self._welcome.hz if self._welcome is not None else 100.0

    @property
    def _per_row(self) -> float:
        """Ticks of a control step."""
        return self._hz / self._welcome.control_hz if self._welcome is not None else 1.0

    # --------------------------------------------------------------------------------------- acting
    @property
    def due(self) -> bool:
        """Whether `chunk` would decide now."""
        if self._welcome is None or self._epoch < 0 or not self._welcome.cameras:
            return False
        if any(name not in self._frames for name in self._welcome.cameras):
            return False
        since = self._since
        if self._sent is not None:
            if self.config.acting == "synchronous" or self._sent.begins < 0:
                return False
            since = (
                self._sent.captured
                + (self.config.executed(self._sent.last + 1)) / self._welcome.control_hz
            )
        captured, newest = self._captured, self._states[-1]
        paired = (
            newest.measured >= captured - 0.5 / self._hz or newest.stamp > captured + 3.0 / self._hz
        )
        return captured >= since - 0.2 / self._hz and paired

    @property
    def wants(self) -> bool:
        """Whether a picture that is taken now would be decided on: for a simulation that takes
        them when they are wanted."""
        return self._epoch >= 0 and self._sent is None

    @property
    def _captured(self) -> float:
        assert self._welcome is not None
        return min(self._frames[name].capture for name in self._welcome.cameras)

    def chunk(self, now: Callable[[], float]) -> dict[str, Any] | None:
        """The fields of a `Chunk`, for which the policy was asked; None where a picture was
        overwritten meanwhile, or where nobody answered.

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
        place = _Place() if self._sent is None else self._sent.place(state, self._hz, self._per_row)
        guide = self._guide(place, begun)
        given = (images, np.array(state.proprio, np.float32), self.instruction, self._first)
        answer = decide(*given) if guide is None else decide(*given, guide)
        if answer is None:
            return None
        answer, lasts = answer if isinstance(answer, tuple) else (answer, ())
        rows = self._checked(answer)
        ended = now()
        self.waited = [*self.waited[1 - _KEPT_WAITS :], ended - begun]
        late = place.late(ended, self._welcome.control_hz)
        sent = _Sent(self.decisions, rows, place.begins, captured, ended)
        actions = rows
        if self.config.acting == "ensemble":
            actions = self._averaged(sent, state.tick)
        elif k := min(late, len(place.rest), len(rows)):
            sent.rows = np.concatenate([place.rest[:k], rows[k:]])
        self._sent, self._first = sent, False
        self.decisions += 1
        return {
            "epoch": self._epoch,
            "start": max(place.begins, 0),
            "hz": self._welcome.control_hz,
            "decision": sent.decision,
            "policy_version": version,
            "obs_stamp": captured,
            "acting": self.config.acting,
            "prefix": 0 if guide is None else int((guide.weight == 1.0).sum()),
            "delay": late,
            "actions": _tuples(actions),
            "predicted": () if actions is rows else _tuples(rows),
            "lasts": _tuples(lasts[: len(rows)]) if len(lasts) else (),
        }

    def _checked(self, answer: Any) -> np.ndarray:
        """A policy's answer as rows [h a]: those that are run, where it decides again only after
        them."""
        assert self._welcome is not None
        rows = np.asarray(answer)
        width = len(self._welcome.action_names)
        if rows.ndim != 2 or rows.shape[1] != width or not len(rows):
            raise UserError(
                f"the policy answers with actions {list(rows.shape)}; this robot takes "
                f"[steps, {width}]"
            )
        return (
            rows[: self.config.executed(len(rows))] if self.config.acting == "synchronous" else rows
        )

    def _guide(self, place: _Place, begun: float) -> Guide | None:
        """What a chunk is held to that begins to be inferred now."""
        if self.config.acting != "rtc" or not len(place.rest):
            return None
        assert self._welcome is not None
        foreseen = float(np.quantile(self.waited[-_RECENT:], _SHARE))
        delay = place.late(begun + foreseen, self._welcome.control_hz)
        mask = soft_mask(len(place.rest), delay, self.config.rtc_schedule)
        return Guide(place.rest, mask, self.config.rtc_guidance)

    def _averaged(self, sent: _Sent, tick: int) -> np.ndarray:
        """The mean [h a] of all that was predicted for each control step of ``sent``, which
        counts from now on too."""
        assert self._welcome is not None
        self._past = [s for s in self._past if s.begins + len(s.rows) * self._per_row > tick] + [
            sent
        ]
        means = []
        for i, own in enumerate(sent.rows):
            at = [round(i + (sent.begins - s.begins) / self._per_row) for s in self._past]
            found = np.stack([s.rows[k] for s, k in zip(self._past, at) if k < len(s.rows)])
            if len(found) == 1:
                means.append(own)
                continue
            weights = ensemble_weights(len(found), self.config.ensemble_decay)
            means.append(mean_action(found, weights, self._welcome.turns, self._welcome.grips))
        return np.stack(means)

    def sent(self, message: Message) -> None:
        """The chunk went out as ``message``: a refusal of it will name its number."""
        if self._sent is not None:
            self._sent.seq = message.seq


def _tuples(rows: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in rows)


def serve(client: Any, acting: Acting) -> None:
    """The loop of a policy's process. Returns when the session ends; ``client`` is a
    `real.link.Client`."""
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
