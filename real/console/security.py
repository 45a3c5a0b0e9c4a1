"""Who may talk to the console, and how much.

A browser sends a page's cookies to any port of the same host, and lets any page on the web open a
WebSocket to this machine. So a cookie alone proves nothing: `Host` must be a known name (a name of
an attacker that is re-bound to this address is not), and the `Origin` of an upgrade or a POST must
be this very page.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping

from real.console.settings import ConsoleConfig

MAX_TEXT_BYTES = 4096  # of one message of a page
# refused messages before a connection is closed, and how many a second are forgiven
FLOOD = 400, 5.0

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src "
    "'self' {socket}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


class Rate:
    """A bucket that holds ``burst`` messages and fills at ``per_s``."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float]):
        self.per_s, self.burst, self.clock = per_s, burst, clock
        self.left, self.last = burst, clock()

    def allow(self) -> bool:
        now = self.clock()
        self.left = min(self.burst, self.left + (now - self.last) * self.per_s)
        self.last = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


FULL, WATCH = "full", "watch"  # what a link is good for: everything, or to watch alone


class Gate:
    """The tokens, the cookies that they are exchanged for, and the names of this server.

    A cookie is another secret than its token, which stays in terminals and histories; all live as
    long as the process.
    """

    def __init__(self, config: ConsoleConfig, clock: Callable[[], float]):
        self.config = config
        self.tokens = {right: secrets.token_urlsafe(24) for right in (FULL, WATCH)}
        self.cookies = {right: secrets.token_urlsafe(32) for right in (FULL, WATCH)}
        self.port = config.port
        # of wrong tokens, by all together: 144 bits are not guessed anyway
        self._tries = Rate(0.5, 10, clock)

    @property
    def cookie_name(self) -> str:
        # two sessions on one machine share the cookies of the host
        return f"vla_rl_console_{self.port}"

    def right_of_token(self, token: str) -> str:
        """`FULL`, `WATCH`, or "" for none of this session's."""
        return _which(self.tokens, token)

    def may_try(self) -> bool:
        return self._tries.allow()

    def right_of_cookie(self, cookies: Mapping[str, str]) -> str:
        """As of a token."""
        return _which(self.cookies, cookies.get(self.cookie_name, ""))

    def knows_host(self, host: str) -> bool:
        names = {"localhost", "127.0.0.1", "[::1]", self.config.host, *self.config.names}
        ports = {f":{self.port}", *([""] if self.port in (80, 443) else [])}
        return host.lower() in {f"{name.lower()}{port}" for name in names for port in ports}

    def knows_origin(self, origin: str | None, host: str) -> bool:
        """``host`` has been checked before: the page must be of the very name that was called."""
        return origin is not None and origin.lower() == f"{self.config.scheme}://{host.lower()}"

    def headers(self, host: str) -> dict[str, str]:
        scheme = "wss" if self.config.tls_key else "ws"
        return HEADERS | {
            "Content-Security-Policy": CONTENT_POLICY.format(socket=f"{scheme}://{host}")
        }


def _which(secret: Mapping[str, str], given: str) -> str:
    """Compares with all of them, in a time that tells nothing."""
    found = [
        right for right, own in secret.items() if hmac.compare_digest(given.encode(), own.encode())
    ]
    return found[0] if found else ""
