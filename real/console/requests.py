"""What pages say: who may, whether in time, and what goes on to the supervisor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from real.console.control import Control
from real.console.display import Display
from real.console.link import SocketLink
from real.console.pages import Pages
from real.console.settings import ConsoleConfig, Facts
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
from real.messages import Event, Input, Refused

ESTOP = "e-stop (console)"  # the fault's name
# asked for again while it holds already: no news for the operator
NO_CAUSE_TO_REFUSE = {"takeover", "release"}


class Requests:
    """Of all ``pages`` of one session."""

    def __init__(
        self,
        config: ConsoleConfig,
        link: SocketLink,
        pages: Pages,
        control: Control,
        display: Display,
        clock: Callable[[], float],
        facts: Facts,
    ):
        self.config, self.link, self.clock, self.facts = config, link, clock, facts
        self.pages, self.control, self.display = pages, control, display
        self._asked: OrderedDict[int, tuple[Viewer, str]] = OrderedDict()

    def hear(self, viewer: Viewer, text: str) -> None:
        """A text that a page sent."""
        try:
            message = parse(text, viewer.nonce)
        except PageError as error:
            return self.pages.refuse(viewer, f"a message was not understood: {error}")
        stops = message.name if isinstance(message, PageEvent) and message.name in STOPS else ""
        if not viewer.may("stop" if stops else _kind(message)):
            return self.pages.refuse(viewer, "too many messages", stops)
        if not viewer.newer(message.n):
            return self.pages.refuse(viewer, "a message came twice, or late", stops)
        now = viewer.heard = self.clock()
        if isinstance(message, PageSeen):
            viewer.out.seen(message.camera, message.number)
        elif isinstance(message, PageBeat):
            viewer.clock.answer(message.echo, message.seen_at, message.t, now)
        elif viewer.watches:
            self.pages.refuse(viewer, "this link is for watching alone", stops)
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
            self.pages.counts["stale"] += 1
            return
        self.pages.counts["inputs"] += 1
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
                return self.pages.tell(
                    viewer, "refused", name=name, reason="you do not have control: take it first"
                )
            if sent is None or pressed is None or now - sent > self.config.event_age_s:
                self.pages.counts["stale"] += 1
                return self.pages.tell(viewer, "refused", name=name, reason="it came too late")
            if now - pressed > (AGE_S if name == "label" else self.config.event_age_s):
                return self.pages.tell(
                    viewer, "refused", name=name, reason="that moment is too long ago"
                )
        at = now if pressed is None else max(pressed, now - AGE_S)
        if problem := self._wrong_value(name, message.value, at):
            return self.pages.tell(viewer, "refused", name=name, reason=problem)
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
            return self.pages.tell(
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

    def hear_refused(self, message: Refused) -> None:
        """The supervisor did not do it: news for the page that asked."""
        viewer, name = self._asked.pop(message.about, (None, ""))
        if viewer is not None and name not in NO_CAUSE_TO_REFUSE:
            self.pages.tell(viewer, "refused", name=name, reason=message.reason)


def _kind(message: PageMessage) -> str:
    return {PageInput: "input", PageEvent: "event", PageControl: "control"}.get(
        type(message), "other"
    )
