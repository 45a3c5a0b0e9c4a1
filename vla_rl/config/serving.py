"""Options of a policy that another program serves."""

from __future__ import annotations

from dataclasses import dataclass, field

from vla_rl.bounds import Bounded, bound
from vla_rl.errors import ConfigError, require_packages
from vla_rl.paths import is_address


@dataclass
class RemoteConfig(Bounded, place="policy"):
    """A server of openpi's protocol. ``images``, ``state``, ``prompt`` and ``resize`` matter to
    other projects' servers: what their robot's observations are called, and the size that their
    clients send; those of this project know."""

    # where it listens, such as ws://localhost:8000
    url: str = ""
    # seconds that an answer may take; later, the connection counts as lost
    timeout: float = bound(60.0, gt=0)
    # seconds to try for a lost connection anew; 0: once
    reconnect: float = bound(30.0, ge=0)
    # {camera: its name on the wire}; those not named as openpi's LIBERO clients name them
    images: dict[str, str] = field(default_factory=dict)
    # name of the proprioception on the wire
    state: str = "observation/state"
    # name of the instruction on the wire
    prompt: str = "prompt"
    # pixels per side that pictures are resized to, padded with black; 0: as they are
    resize: int = bound(0, ge=0, le=4096)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url and not is_address(self.url):
            raise ConfigError(
                f"policy.url={self.url!r} is no address of a server: give one such as "
                "ws://localhost:8000"
            )
        if not self.state or not self.prompt or not all(self.images.values()):
            raise ConfigError(
                "policy.state, policy.prompt and those in policy.images are names: none may be "
                "empty"
            )


@dataclass(frozen=True)
class ServeOptions:
    """``sample``: what clients get that do not say. ``rows`` are the most of one message,
    ``connections`` at one time."""

    host: str = "127.0.0.1"
    port: int = 8000
    sample: bool = False
    rows: int = 64
    connections: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(
                f"--port {self.port}: give a port, 1 to 65535, or 0 for one that is free"
            )
        if self.rows < 1 or self.connections < 1:
            raise ConfigError(f"--connections {self.connections}: give 1 or more")


def require_wire(purpose: str) -> None:
    """Raise `MissingPackage` unless what speaks on the wire is installed."""
    require_packages("msgpack", "aiohttp", extra="serve", purpose=purpose)
