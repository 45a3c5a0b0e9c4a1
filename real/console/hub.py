"""Between the supervisor and the pages: what each page may send on, and what all of them are
told."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from real.console.control import Control
from real.console.display import Display
from real.console.link import Link
from real.console.settings import ConsoleConfig, Facts
from real.console.video import pack
from real.console.viewers import Viewer
from real.console.wire import (
    FOR_ALL,
    STOPS,
    PageBeat,
    PageControl,
    PageError,
    PageEvent,
    PageInput,
    PageMessage,
    PageSeen,
    parse,
)
from real.labels import AGE_S, meant
from real.messages import (
    Beat,
    Event,
    Frame,
    Grant,
    Input,
    Message,
    Notice,
    Progress,
    Refused,
    State,
    Welcome,
)

RELAYED = ("label", "task", "note", "loss")
ESTOP = "e-stop (console)"  # the fault's name
# asked for again while it holds already: no news for the operator
NO_CAUSE_TO_REFUSE = {"takeover", "release"}

# [height width channels] uint8 RGB, None where it was overwritten
Pictures = Callable[[Frame], "np.ndarray | None"]


class Hub:
    """All pages of one session. Everything runs in one event loop; nothing here waits."""

    def __init__(
        self,
        config: ConsoleConfig,
        link: Link,
        pictures: Pictures,
        clock: Callable[[], float],
        facts: Facts,
    ):
        self.config, self.link, self.pictures, self.clock, self.facts = (
            config,
            link,
            pictures,
            clock,
            facts,
        )
        self.viewers: list[Viewer] = []
        self.display = Display(config, clock)
        self.control = Control(link, clock, self.tell)
        self.lost = False
        self.counts = {"inputs": 0, "stale": 0, "refused": 0, "pictures": 0}
        self._pages = 0
        self._beats = 0
        self._asked: OrderedDict[int, tuple[Viewer, str]] = OrderedDict()

    # ---------------------------------------------------------------------------------------- pages
    def enter(self, watches: bool = False) -> Viewer | None:
        """A page was opened; None where there are too many."""
        if len(self.viewers) >= self.config.max_viewers:
            return None
        self._pages += 1
        viewer = Viewer(self._pages, self.clock, watches)
        self.viewers.append(viewer)
        self.tell(viewer, "hello", **self._hello(viewer))
        return viewer

    def _hello(self, viewer: Viewer) -> dict[str, Any]:
        welcome = self.display.welcome
        return {
            "nonce": viewer.nonce,
            "name": viewer.name,
            "session": welcome.session if welcome else "",
            "robot": welcome.robot if welcome else "",
            "cameras": list(welcome.cameras) if welcome else [],
            "actions": list(welcome.action_names) if welcome else [],
            "low": list(welcome.action_low) if welcome else [],
            "high": list(welcome.action_high) if welcome else [],
            "stages": list(welcome.stages) if welcome else [],
            "stale_image_s": self.config.stale_image_s,
            "silence_s": self.config.silence_s,
            "link_silence_s": self.config.link_silence_s,
            "end_on_label": self.config.end_on_label,
            "watches": viewer.watches,
            "tasks": list(self.facts.tasks),
            "checkpoint": self.facts.checkpoint,
            "story": list(self.display.story),
        }

    def leave(self, viewer: Viewer) -> None:
        if viewer in self.viewers:
            self.viewers.remove(viewer)
            self.control.gone(viewer)

    def tell(self, viewer: Viewer, kind: str, **fields: Any) -> None:
        viewer.out.urgent(json.dumps({"k": kind, **fields}, separators=(",", ":")))

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for viewer in self.viewers:
            self.tell(viewer, kind, **fields)

    def refuse(self, viewer: Viewer, reason: str, stops: str = "") -> None:
        """One more message that was not taken: of the first twenty a page hears, and of each
        that was to stop the arm."""
        viewer.refuse()
        self.counts["refused"] += 1
        if viewer.refused <= 20 or stops:
            self.tell(viewer, "refused", name=stops, reason=reason)

    def hear_page(self, viewer: Viewer, text: str) -> None:
        """A text that a page sent."""
        try:
            message = parse(text, viewer.nonce)
        except PageError as error:
            return self.refuse(viewer, f"a message was not understood: {error}")
        stops = message.name if isinstance(message, PageEvent) and message.name in STOPS else ""
        if not viewer.may("stop" if stops else text_kind(message)):
            return self.refuse(viewer, "too many messages", stops)
        if not viewer.newer(message.n):
            return self.refuse(viewer, "a message came twice, or late", stops)
        now = viewer.heard = self.clock()
        if isinstance(message, PageSeen):
            viewer.out.seen(message.camera, message.number)
        elif isinstance(message, PageBeat):
            viewer.clock.answer(message.echo, message.seen_at, message.t, now)
        elif viewer.watches:
            self.refuse(viewer, "this link is for watching alone", stops)
        elif isinstance(message, PageControl):
            self._control(viewer, message)
        elif isinstance(message, PageInput):
            self._input(viewer, message, now)
        else:
            self._event(viewer, message, now)

    def _control(self, viewer: Viewer, message: PageControl) -> None:
        if message.ask == "release":
            self.control.release(viewer)
        else:
            self.control.request(viewer, message.who.strip(), message.force)

    def _input(self, viewer: Viewer, message: PageInput, now: float) -> None:
        if not self.control.holds(viewer):
            return
        taken = viewer.clock.here(message.t, now)
        left = -1.0 if taken is None else taken + self.config.input_expiry_s - now
        if left <= 0:
            self.counts["stale"] += 1
            return
        self.counts["inputs"] += 1
        self.link.send(
            Input,
            valid_s=left,
            lease=self.control.token,
            device_stamp=message.t,
            dead_man=message.dead_man,
            axes=message.axes,
            gripper=message.gripper,
            keys=message.keys,
            target=(),
        )

    def _event(self, viewer: Viewer, message: PageEvent, now: float) -> None:
        name, holds = message.name, self.control.holds(viewer)
        pressed, sent = viewer.clock.here(message.at, now), viewer.clock.here(message.t, now)
        if name not in FOR_ALL:
            if not holds:
                return self.tell(
                    viewer, "refused", name=name, reason="you do not have control: take it first"
                )
            if sent is None or pressed is None or now - sent > self.config.event_age_s:
                self.counts["stale"] += 1
                return self.tell(viewer, "refused", name=name, reason="it came too late")
            if now - pressed > (AGE_S if name == "label" else self.config.event_age_s):
                return self.tell(viewer, "refused", name=name, reason="that moment is too long ago")
        at = now if pressed is None else max(pressed, now - AGE_S)
        if problem := self._wrong_value(name, message.value, at):
            return self.tell(viewer, "refused", name=name, reason=problem)
        value = (
            ESTOP if name == "estop" else message.value or (viewer.name if name in FOR_ALL else "")
        )
        self._pass_on(viewer, name, value, at)

    def _wrong_value(self, name: str, value: str, at: float) -> str:
        """Why ``value`` says nothing, or ""."""
        if name == "label" and value not in ("success", "failure"):
            return "a label is success or failure"
        if name == "label" and meant(at, self.display.spans()) is None:
            return "that moment is in no episode"
        if name == "task" and value not in self.facts.tasks:
            return (
                "it is none of the session's tasks"
                if self.facts.tasks
                else "this session chooses its tasks itself"
            )
        return ""

    def _pass_on(self, viewer: Viewer, name: str, value: str, at: float) -> None:
        valid_s = float("inf") if name in FOR_ALL else self.config.event_age_s
        sent = self.link.send(
            Event, valid_s, name=name, value=value, at=at, lease=self.control.token_of(viewer)
        )
        if sent is None:
            return self.tell(
                viewer,
                "refused",
                name=name,
                reason="the supervisor did not take it: use the arm's own button",
            )
        self._asked[sent.seq] = (viewer, name)
        while len(self._asked) > 64:
            self._asked.popitem(last=False)

    def estop(self) -> bool:
        """From outside a page's connection; False where the supervisor does not take it."""
        return (
            self.link.send(Event, name="estop", value=ESTOP, at=self.clock(), lease="") is not None
        )

    # ----------------------------------------------------------------------------------- supervisor
    def start(self) -> None:
        self.link.listen(self.hear, self.hear_nothing)

    def hear(self, message: Message) -> None:
        if isinstance(message, State):
            self.display.hear_state(message)
            self.control.hear_holder(message.holder)
        elif isinstance(message, Frame):
            self._frame(message)
        elif isinstance(message, Grant):
            self.control.hear(message)
        elif isinstance(message, Progress):
            self.display.hear_progress(message)
        elif isinstance(message, Notice):
            self.display.hear_notice(message)
            self._news(message.stamp, message.name, message.value, message.by, message.mode)
        elif isinstance(message, Event):
            self._relayed(message)
        elif isinstance(message, Refused):
            viewer, name = self._asked.pop(message.about, (None, ""))
            if viewer is not None and name not in NO_CAUSE_TO_REFUSE:
                self.tell(viewer, "refused", name=name, reason=message.reason)
        elif isinstance(message, Welcome):
            self.display.hear_welcome(message)
            for viewer in self.viewers:
                self.tell(viewer, "hello", **self._hello(viewer))

    def _relayed(self, event: Event) -> None:
        """An event that the supervisor passed on to all: what changes the mode comes as a notice
        too."""
        if event.name in RELAYED:
            self.display.hear_event(event)
            self._news(event.stamp, event.name, event.value, event.source, "")

    def _news(self, at: float, name: str, value: str, by: str, mode: str) -> None:
        """Something happened: for all pages, and for those that are opened later."""
        news = {"at": round(at, 3), "name": name, "value": value, "by": by, "mode": mode}
        self.display.story.append(news)
        self._tell_all("notice", **news)

    def hear_nothing(self) -> None:
        """The connection to the supervisor ended."""
        self.lost = True
        self.control.forget()
        self._news(self.clock(), "loss", "the supervisor is gone", "console", "")

    def _frame(self, frame: Frame) -> None:
        place = self.display.camera(frame.camera)
        if place < 0 or not self.display.cameras[place].add(frame) or not self.viewers:
            return
        picture = self.pictures(frame)
        if picture is None:
            return
        # once for all pages
        data = pack(place, frame.number, frame.capture, picture, self.config.quality)
        self.counts["pictures"] += 1
        for viewer in self.viewers:
            viewer.out.picture(place, frame.number, data)

    # -------------------------------------------------------------------------------------- by time
    def beat(self) -> None:
        """Called some twenty times a second."""
        self._beats += 1
        self.link.send(Beat, valid_s=1.0, tick=self._beats)
        page = self.control.page
        if page is not None and self.clock() - page.heard > self.config.silence_s:
            self.control.drop(
                "this page was silent: take control again", "the operator's page was silent"
            )
        elif page is not None:
            self.control.renew()

    def show(self) -> None:
        """The state, to every page."""
        if not self.viewers:
            return
        common = self.display.text(
            {**self.control.shown(), "lost": self.lost, "viewers": len(self.viewers)}
        )
        for viewer in self.viewers:
            you = {
                "mine": self.control.holds(viewer),
                "stamp": round(self.clock(), 6),
                "offset": viewer.clock.offset,
                "rtt": round(viewer.clock.round_trip, 4),
                "dropped": viewer.out.dropped,
            }
            viewer.out.state(f'{{"k":"state","you":{json.dumps(you)},"s":{common}}}')


def text_kind(message: PageMessage) -> str:
    return {PageInput: "input", PageEvent: "event", PageControl: "control"}.get(
        type(message), "other"
    )
