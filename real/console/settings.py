"""What can be set of the console."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from vla_rl.bounds import Bounded, bound
from vla_rl.errors import ConfigError


def is_loopback(host: str) -> bool:
    """True where only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Facts:
    """What a page shows of the session besides what the supervisor says: the ``tasks`` that an
    operator may choose from (none: somebody else chooses), as `real.tasks.Task.text`; the
    ``checkpoint`` of its policy, "" without one."""

    tasks: tuple[str, ...] = ()
    checkpoint: str = ""


@dataclass(frozen=True)
class ConsoleConfig(Bounded, place="console"):
    """``host`` and ``port`` (0: any free one) are where it listens; ``names`` by which other names
    or addresses a browser may call it. Beyond this machine it speaks TLS alone, with the PEM files
    ``tls_certificate`` and ``tls_key``.

    ``state_hz`` is how often a page hears the state. An input is void ``input_expiry_s`` after the
    page took it, and what was asked for by a control after ``event_age_s``, unless it asks for less
    motion. An operator whose page is silent for ``silence_s`` loses control, and the session
    pauses; a page that hears nothing for ``link_silence_s`` locks its controls and says so.
    ``stale_image_s`` is how old the newest picture may be before the page locks teleoperation.
    ``quality`` is that of the JPEGs. ``folder`` is the disk whose room is shown (empty: none),
    ``disk_low_gb`` from where it is a warning. ``end_on_label``: success and failure end the
    episode.
    """

    # address that it listens on
    host: str = "127.0.0.1"
    # port that it listens on; 0: any free one
    port: int = bound(8765, ge=0, le=65535)
    # other names or addresses by which a browser may call it
    names: tuple[str, ...] = ()
    # PEM file; needed beyond this machine
    tls_certificate: str = ""
    # PEM file of its key
    tls_key: str = ""
    state_hz: float = bound(25.0, ge=1, le=60)
    # seconds after which an input is void
    input_expiry_s: float = bound(0.15, ge=0.05, le=0.5)
    # seconds after which what a control asked for is void
    event_age_s: float = bound(0.5, ge=0.2, le=5)
    # seconds of a page's silence after which its operator loses control
    silence_s: float = bound(0.5, ge=0.2, le=5)
    # seconds after which a page that hears nothing locks its controls
    link_silence_s: float = bound(0.35, ge=0.1, le=5)
    stale_image_s: float = bound(0.3, ge=0.05, le=5)
    quality: int = bound(80, ge=10, le=100)
    # pages that may watch at a time
    max_viewers: int = bound(12, ge=1, le=64)
    # disk whose room is shown; empty: none
    folder: str = ""
    # room from where it is a warning, GB
    disk_low_gb: float = 5.0
    end_on_label: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError(
                "console.tls_certificate and console.tls_key go together: give both "
                "PEM files or neither"
            )
        if not is_loopback(self.host) and not self.tls_key:
            raise ConfigError(
                f"console.host is {self.host}, which others can reach, and there is no TLS: the "
                "token would be readable on the network. Set console.tls_certificate and "
                "console.tls_key (docs/how_to/real_robots_console.md shows how), or leave "
                "console.host at 127.0.0.1 and use an SSH tunnel"
            )

    @property
    def scheme(self) -> str:
        return "https" if self.tls_key else "http"
