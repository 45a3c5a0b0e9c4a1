"""Which page has control, within the one lease that the supervisor grants.

The supervisor sees one client, the console; among the pages one at a time holds what the console
holds. Another page gets it only where that one gave it up, fell silent (which pauses the session),
or by force, which pauses first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from real.console.link import SocketLink
from real.console.viewers import Viewer
from real.messages import Event, Grant, Lease
from real.practice import GAVE_UP

RENEW_S = 0.5
ANSWER_S = 1.0  # the supervisor answers a request within a tick or two


class Control:
    """``tell(viewer, kind, **fields)`` sends a page an urgent message."""

    def __init__(self, link: SocketLink, clock: Callable[[], float], tell: Callable[..., None]):
        self.link, self.clock, self.tell = link, clock, tell
        self.page: Viewer | None = None
        self.who = ""
        self.token = ""
        self._asked: tuple[Viewer, str, float] | None = None
        self._renewed = 0.0
        # the token of a lease that was released: a renewal of it may still be answered
        self._given_up = ""

    def holds(self, viewer: Viewer) -> bool:
        return viewer is self.page and bool(self.token)

    def token_of(self, viewer: Viewer) -> str:
        return self.token if self.holds(viewer) else ""

    def shown(self) -> dict[str, Any]:
        return {"page": self.page.name if self.page else None, "who": self.who if self.page else ""}

    def request(self, viewer: Viewer, who: str, force: bool) -> None:
        if self.holds(viewer):
            self.who = who or viewer.name
            return self.tell(viewer, "control", mine=True, reason="")
        if self.page is not None and not force:
            return self.tell(viewer, "control", mine=False, reason=f"{self.who} has control")
        if self.page is not None:
            self.drop(f"{who or viewer.name} took control", "forced by another operator")
        now = self.clock()
        if self._asked is not None and now - self._asked[2] < ANSWER_S:
            return self.tell(
                viewer, "control", mine=False, reason="somebody else is just asking for control"
            )
        if self.link.send(Lease, ask="request", token="", force=force) is None:
            return self.tell(viewer, "control", mine=False, reason="the supervisor is gone")
        self._asked = (viewer, who or viewer.name, now)

    def hear(self, grant: Grant) -> None:
        """The answer to a request, a renewal or a release."""
        if grant.token and grant.token == self._given_up:
            return
        if grant.token and grant.granted:
            self.token = grant.token
            if self._asked is not None:
                (self.page, self.who, _), self._asked = self._asked, None
                self._renewed = self.clock()
                self.tell(self.page, "control", mine=True, reason="")
            elif self.page is None:  # who had asked is gone
                self._release()
            return
        if self._asked is not None and not grant.granted:
            (viewer, _, _), self._asked = self._asked, None
            reason = grant.reason or f"{grant.holder} has control"
            return self.tell(viewer, "control", mine=False, reason=reason)
        self.hear_holder(grant.holder)

    def hear_holder(self, holder: str) -> None:
        """Who holds control, as the supervisor says with every state: a lease that lapsed or was
        taken is not answered."""
        if self.page is not None and holder != self.link.source:
            page, self.page, self.token = self.page, None, ""
            self.tell(
                page,
                "control",
                mine=False,
                reason=f"{holder} took control" if holder else "control lapsed",
            )

    def renew(self) -> None:
        """The page that holds control is alive: keep the lease."""
        if self.token and self.clock() - self._renewed >= RENEW_S:
            self._renewed = self.clock()
            self.link.send(Lease, valid_s=1.0, ask="renew", token=self.token, force=False)

    def drop(self, reason: str, why: str) -> None:
        """Pause, and take control from the page that has it."""
        page, token = self.page, self.token
        if page is None:
            return
        self.link.send(Event, name="pause", value=why, at=self.clock(), lease=token)
        self._release()
        self.tell(page, "control", mine=False, reason=reason)

    def release(self, viewer: Viewer) -> None:
        if self.holds(viewer):
            self.drop("you gave control up", GAVE_UP)
        else:
            self.tell(viewer, "control", mine=False, reason="")

    def _release(self) -> None:
        self.link.send(Lease, ask="release", token=self.token, force=False)
        self._given_up = self.token
        self.page, self.token, self.who = None, "", ""

    def forget(self) -> None:
        """The supervisor is gone, and the lease with it."""
        page, self.page, self.token, self._asked = self.page, None, "", None
        if page is not None:
            self.tell(page, "control", mine=False, reason="the supervisor is gone")

    def gone(self, viewer: Viewer) -> None:
        """A page was closed."""
        if self._asked is not None and self._asked[0] is viewer:
            self._asked = None
        if viewer is self.page:
            self.drop("the page was closed", "the operator's page was closed")
