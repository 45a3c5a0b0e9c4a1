"""What a page shows of a session, as one JSON text for all pages."""

from __future__ import annotations

import json
import math
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from real.console.remedies import remedy
from real.console.settings import ConsoleConfig
from real.labels import Span, meant
from real.messages import Event, Frame, Notice, Progress, State, Welcome
from real.modes import IN_EPISODE, TABLE, Mode
from real.practice import CALL, LEADER, REMIND_S
from real.returns import SHOW

DISK_EVERY_S = 2.0
_STORY = 60  # events that a page which is opened later gets
_STOPPED = (Mode.PAUSED.value, Mode.STOPPED.value, Mode.FAULT.value)
_IN_EPISODE = {mode.value for mode in IN_EPISODE}
_CURVE = 240  # values of the reward model's curve that a page gets


class Share:
    """Of the control steps of an episode and of the session, how many a person decided."""

    def __init__(self) -> None:
        self.episode = -1
        self.steps = self.human = self.all_steps = self.all_human = self.takeovers = 0
        self._was_human = False

    def add(self, state: State) -> None:
        if state.episode != self.episode:
            self.episode, self.steps, self.human, self.takeovers, self._was_human = (
                state.episode,
                0,
                0,
                0,
                False,
            )
        if not state.step_done or state.step < 0:
            return
        self.steps, self.all_steps = self.steps + 1, self.all_steps + 1
        if state.is_human:
            self.human, self.all_human = self.human + 1, self.all_human + 1
            self.takeovers += not self._was_human
        self._was_human = state.is_human

    def shown(self) -> dict[str, Any]:
        return {
            "episode": self.human / self.steps if self.steps else None,
            "session": self.all_human / self.all_steps if self.all_steps else None,
            "takeovers": self.takeovers,
        }


class Camera:
    """The newest picture of one camera: when it was taken, how many come a second, how many are
    missing."""

    def __init__(self, name: str):
        self.name = name
        self.capture: float | None = None
        self.period = 0.0
        self.lost = self.frozen = 0
        self._device_no: int | None = None

    def add(self, frame: Frame) -> bool:
        """False where it is the same picture again, or an older one."""
        before, self._device_no = self._device_no, frame.device_no
        if before is not None and frame.device_no <= before:
            self.frozen += 1
            return False
        self.lost += 0 if before is None else frame.device_no - before - 1
        if self.capture is not None:
            period = frame.capture - self.capture
            self.period += 0.1 * (period - self.period) if self.period else period
        self.capture = frame.capture
        return True

    def shown(self, now: float) -> dict[str, Any]:
        age = None if self.capture is None else round(now - self.capture, 3)
        fps = round(1 / self.period, 1) if self.period > 0 else None
        return {"name": self.name, "age": age, "fps": fps, "lost": self.lost, "frozen": self.frozen}


def _rounded(numbers: tuple[float, ...]) -> list[float | None]:
    return [round(x, 4) if math.isfinite(x) else None for x in numbers]


@dataclass
class _Told:
    """An episode as far as it is known: its ``verdict`` is "success", "failure" or ""."""

    span: Span
    task: str
    verdict: str = ""
    discarded: bool = False


class _Disk:
    """The room on the disk of ``config.folder``, looked at now and then."""

    def __init__(self, config: ConsoleConfig, clock: Callable[[], float]):
        self._config, self._clock = config, clock
        self._left: dict[str, Any] | None = None
        self._at = -1e9

    def left(self) -> dict[str, Any] | None:
        now = self._clock()
        if self._config.folder and now - self._at > DISK_EVERY_S:
            self._at = now
            try:
                left = shutil.disk_usage(self._config.folder).free / 1e9
                self._left = {"gb": round(left, 1), "low": left < self._config.disk_low_gb}
            except OSError:
                self._left = {"gb": None, "low": True}
        return self._left


class Display:
    """The newest of everything that the supervisor says, and what came before: ``story`` is what
    happened, the oldest first, and ``episodes`` all that it has seen begin."""

    def __init__(self, config: ConsoleConfig, clock: Callable[[], float]):
        self.config, self.clock = config, clock
        self.welcome: Welcome | None = None
        self.state: State | None = None
        self.state_at = -1e9
        self.share = Share()
        self.cameras: list[Camera] = []
        self.curve: list[tuple[int, float]] = []
        self.model = ""
        self.story: deque[dict[str, Any]] = deque(maxlen=_STORY)
        self.episodes: list[_Told] = []
        self.task = ""  # of the next episode, or of the one that runs
        self._why = ("", "")  # the mode that was entered last, and why
        self._curve_episode = -1
        self._call, self._call_at = "", -1e9
        self._disk = _Disk(config, clock)

    def hear_welcome(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.cameras = [Camera(name) for name in welcome.cameras]

    def hear_state(self, state: State) -> None:
        self.state, self.state_at = state, self.clock()
        self.share.add(state)
        last = self.episodes[-1] if self.episodes else None
        running = last.span if last is not None and last.span.ended == math.inf else None
        if state.mode in _IN_EPISODE and (running is None or running.episode != state.episode):
            # it had begun before anybody listened
            self.episodes.append(_Told(Span(state.episode, -math.inf), self.task))
        elif last is not None and running is not None and state.mode not in _IN_EPISODE:
            last.span = Span(running.episode, running.begun, state.stamp)
        if state.episode != self._curve_episode:
            self._curve_episode, self.curve = state.episode, []

    def hear_notice(self, n: Notice) -> None:
        if n.mode != self._why[0]:
            self._why = (
                n.mode,
                f"{n.name.replace('_', ' ')}{f': {n.value}' if n.value else ''} ({n.by})",
            )
        if n.name == "begin":
            self.task = n.value
            self.episodes.append(_Told(Span(n.episode, n.stamp), n.value))
        elif n.name in ("end_episode", "discard") and self.episodes:
            told = self.episodes[-1]
            told.span, told.discarded = (
                Span(told.span.episode, told.span.begun, n.stamp),
                n.name == "discard",
            )

    def hear_event(self, event: Event) -> None:
        """One that the supervisor passed on to all."""
        if event.name == "label" and event.value in ("success", "failure"):
            found = meant(event.at, self.spans())
            for told in self.episodes:
                if told.span is found:
                    told.verdict = event.value
        elif event.name == "task":
            self.task = event.value
        elif event.name == "note" and event.source == LEADER:  # others may write what they like
            self.hear_note(event.value)

    def spans(self) -> list[Span]:
        return [told.span for told in self.episodes]

    def counts(self) -> dict[str, int]:
        """Of the episodes that have ended."""
        ended = [told for told in self.episodes if told.span.ended < math.inf]
        kept = [told.verdict for told in ended if not told.discarded]
        names = {"success": "successes", "failure": "failures", "": "unlabelled"}
        return {name: kept.count(verdict) for verdict, name in names.items()} | {
            "discarded": len(ended) - len(kept)
        }

    def why(self) -> str:
        """What stopped the arm, as long as it is stopped."""
        mode = self.state.mode if self.state is not None else ""
        return self._why[1] if self._why[0] == mode and mode in _STOPPED else ""

    def hear_note(self, text: str) -> None:
        """Practice calls for help, and again every `REMIND_S` while it is wanted; or a person is
        to show an episode."""
        if text.startswith((CALL, SHOW)):
            self._call, self._call_at = text.removeprefix(CALL).lstrip(": "), self.clock()

    def call(self) -> str:
        """What is wanted of a person; "" where nothing is: the arm practises again, the policy no
        longer does what was to be shown, or nobody has called for longer than it would."""
        shows = self._call.startswith(SHOW)
        later = self.state if self.state_at > self._call_at else None
        if later is not None and (later.mode == Mode.AUTO.value) != shows:
            return ""
        if self.clock() - self._call_at > 1.5 * REMIND_S:
            return ""
        if shows:
            return (
                f"{self._call.replace(SHOW, SHOW.capitalize(), 1)}. Take control and do all of it."
            )
        return f"Help is wanted: {self._call}. Take control, help, and give control up."

    def hear_progress(self, progress: Progress) -> None:
        self.model = progress.model
        if progress.episode == self._curve_episode:
            self.curve = [*self.curve, (progress.step, round(progress.value, 4))][-4 * _CURVE :]

    def camera(self, name: str) -> int:
        """Its place among the cameras, or -1."""
        return next((i for i, camera in enumerate(self.cameras) if camera.name == name), -1)

    def silent(self) -> bool:
        return self.clock() - self.state_at > 0.3

    def text(self, control: dict[str, Any]) -> str:
        """The state for all pages; ``control`` is who holds control, as `real.console.control`
        says it."""
        now = self.clock()
        shown: dict[str, Any] = {
            "control": control,
            "cameras": [camera.shown(now) for camera in self.cameras],
            "disk": self._disk.left(),
            "share": self.share.shown(),
            "progress": {
                "model": self.model,
                "curve": self.curve[:: 1 + len(self.curve) // _CURVE],
            },
            "label": self.episodes[-1].verdict if self.episodes else "",
            "task": self.task,
            "counts": self.counts(),
            "why": self.why(),
            "help": self.call(),
            "robot": None,
        }
        if self.state is not None:
            shown["robot"] = self._robot(self.state, now)
        return json.dumps(shown, separators=(",", ":"), allow_nan=False)

    def _robot(self, s: State, now: float) -> dict[str, Any]:
        stages = self.welcome.stages if self.welcome else ()
        return {
            "silent": self.silent(),
            "age": round(now - s.stamp, 3),
            "mode": s.mode,
            "holder": s.holder,
            "may": sorted(
                event for mode, event in TABLE if mode is Mode(s.mode) and event != "fault"
            ),
            "episode": s.episode,
            "step": s.step,
            "clock": round(s.step / self.welcome.control_hz, 2)
            if self.welcome and s.step >= 0
            else None,
            "pose": _rounded(s.pose),
            "joints": _rounded(s.joints),
            "gripper": round(s.gripper, 3),
            "wrench": _rounded(s.wrench),
            "policy": _rounded(s.policy),
            "human": _rounded(s.human),
            "sent": _rounded(s.sent),
            "is_human": s.is_human,
            "holding": s.holding,
            "version": s.policy_version,
            "queue": s.queue,
            "gate": [name for i, name in enumerate(stages) if s.gate >> i & 1],
            "clipped": dict(zip(stages, s.clipped)),
            "slow": s.slow,
            "estop": s.estop,
            "faults": [{"name": fault, "remedy": remedy(fault)} for fault in s.faults],
            "lateness": round(1000 * s.lateness, 2),
            "overruns": s.overruns,
        }
