"""Between the supervisor and the pages: what each page may send on, and what all of them are
told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from real.console.control import Control
from real.console.display import Display
from real.console.link import SocketLink
from real.console.pages import Pages
from real.console.requests import Requests
from real.console.settings import ConsoleConfig, Facts
from real.console.video import pack
from real.console.viewers import Viewer
from real.messages import (
    Beat,
    Event,
    Frame,
    Grant,
    Message,
    Notice,
    Progress,
    Refused,
    State,
    Welcome,
)

RELAYED = ("label", "task", "note", "loss")

# [height width channels] uint8 RGB, None where it was overwritten
Pictures = Callable[[Frame], "np.ndarray | None"]


class Hub:
    """All pages of one session, and the supervisor. Everything runs in one event loop; nothing here
    waits. What pages say goes to ``requests``."""

    def __init__(
        self,
        config: ConsoleConfig,
        link: SocketLink,
        pictures: Pictures,
        clock: Callable[[], float],
        facts: Facts,
    ):
        self.config, self.link, self.pictures, self.clock = config, link, pictures, clock
        self.pages = Pages(config.max_viewers, clock)
        self.display = Display(config, clock)
        self.control = Control(link, clock, self.pages.tell)
        self.requests = Requests(config, link, self.pages, self.control, self.display, clock, facts)
        self.lost = False
        self._beats = 0

    # ---------------------------------------------------------------------------------------- pages
    def enter(self, watches: bool = False) -> Viewer | None:
        """A page was opened; None where there are too many."""
        viewer = self.pages.enter(watches)
        if viewer is not None:
            self.pages.tell(viewer, "hello", **self._hello(viewer))
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
            "tasks": list(self.requests.facts.tasks),
            "checkpoint": self.requests.facts.checkpoint,
            "story": list(self.display.story),
        }

    def leave(self, viewer: Viewer) -> None:
        if viewer in self.pages.viewers:
            self.pages.viewers.remove(viewer)
            self.control.gone(viewer)

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
            self.requests.hear_refused(message)
        elif isinstance(message, Welcome):
            self.display.hear_welcome(message)
            for viewer in self.pages.viewers:
                self.pages.tell(viewer, "hello", **self._hello(viewer))

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
        self.pages.tell_all("notice", **news)

    def hear_nothing(self) -> None:
        """The connection to the supervisor ended."""
        self.lost = True
        self.control.forget()
        self._news(self.clock(), "loss", "the supervisor is gone", "console", "")

    def _frame(self, frame: Frame) -> None:
        place = self.display.camera(frame.camera)
        if place < 0 or not self.display.cameras[place].add(frame) or not self.pages.viewers:
            return
        picture = self.pictures(frame)
        if picture is None:
            return
        # once for all pages
        data = pack(place, frame.number, frame.capture, picture, self.config.quality)
        self.pages.counts["pictures"] += 1
        for viewer in self.pages.viewers:
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
        if not self.pages.viewers:
            return
        common = self.display.text(
            {**self.control.shown(), "lost": self.lost, "viewers": len(self.pages.viewers)}
        )
        for viewer in self.pages.viewers:
            you = {
                "mine": self.control.holds(viewer),
                "stamp": round(self.clock(), 6),
                "offset": viewer.clock.offset,
                "rtt": round(viewer.clock.round_trip, 4),
                "dropped": viewer.out.dropped,
            }
            viewer.out.state(f'{{"k":"state","you":{json.dumps(you)},"s":{common}}}')
