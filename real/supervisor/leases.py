"""One holder of control at a time; everybody else watches, and may always stop."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    granted: bool
    reason: str = ""


class Leases:
    """A lease lapses ``seconds`` after it was last renewed. Tokens are random and known to the
    holder alone."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.holder, self.token, self.until = "", "", 0.0

    def lapsed(self, now: float) -> bool:
        """True once, when the holder's time is over."""
        if self.holder and now > self.until:
            self.drop()
            return True
        return False

    def drop(self) -> None:
        self.holder, self.token, self.until = "", "", 0.0

    def holds(self, token: str, now: float) -> bool:
        return (
            bool(self.token)
            and now <= self.until
            and secrets.compare_digest(token.encode(), self.token.encode())
        )

    def ask(self, source: str, ask: str, token: str, force: bool, now: float) -> Answer:
        """``source`` asks to "request", "renew" or "release". The caller pauses before a forced
        change."""
        if ask == "request":
            if self.holder and self.holder != source and now <= self.until and not force:
                return Answer(False, f"{self.holder} holds control")
            if not (self.holder == source and self.holds(token, now)):
                self.holder, self.token = source, secrets.token_hex(8)
            self.until = now + self.seconds
            return Answer(True)
        if not self.holds(token, now):
            return Answer(False, "this is not the token of the holder of control")
        if ask == "release":
            self.drop()
        else:
            self.until = now + self.seconds
        return Answer(True)

    def renewed(self, token: str, now: float) -> bool:
        """An input with the holder's token renews it."""
        if not self.holds(token, now):
            return False
        self.until = now + self.seconds
        return True
