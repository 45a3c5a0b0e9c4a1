"""``vla-rl serve``: a checkpoint's policy for programs that speak openpi's protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vla_rl.assembly.env_and_policy import acting_policy, open_env, open_policy
from vla_rl.checkpoint import EMBODIMENT, fingerprint
from vla_rl.config import RunConfig
from vla_rl.devices import pick_device
from vla_rl.files import check_checkpoint
from vla_rl.serving.server import PolicyServer, ServeOptions
from vla_rl.types import Observation

_OPEN_TO_ALL = "0.0.0.0", "::", ""


def serve(
    config: RunConfig, path: Path, options: ServeOptions, say: Callable[[str], None] = print
) -> None:
    """Until Ctrl-C. Raises `UserError` for a policy that cannot be served, or an address that
    cannot be had."""
    device = pick_device(config.device)
    policy = _policy(config, path).to(device)
    server = PolicyServer(policy, f"{path.name}@{fingerprint(path)[:12]}", device, options)
    _warm(policy, device)

    def ready(port: int) -> None:
        here = "localhost" if options.host in ("127.0.0.1", "::1", *_OPEN_TO_ALL) else options.host
        say(
            f"serving {path} at ws://{here}:{port} (openpi), ws://{here}:{port}/vla-eval (vla-eval)"
        )
        if options.host not in ("127.0.0.1", "localhost", "::1"):
            say(
                f"whoever reaches {options.host or 'this machine'} can ask it: nobody is asked who "
                "they are"
            )
        say("end it with Ctrl-C")

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.run(ready))


def _policy(config: RunConfig, path: Path) -> Any:
    """A published one is read for the robot of the env that ``config`` names."""
    if (path / EMBODIMENT).exists():
        return acting_policy(config, path, check_checkpoint(path))
    with contextlib.closing(open_env(config)) as env:
        return open_policy(config, path, env.embodiment)


def _warm(policy: Any, device: torch.device) -> None:
    """The first decision is slow, and nobody should wait for it."""
    blank = Observation.blank(policy.embodiment)
    with torch.inference_mode():
        policy.act(
            Observation(blank.images, blank.proprio, ("wait",)).to(device), deterministic=True
        )
