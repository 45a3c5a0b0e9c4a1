"""OpenVLA and OpenVLA-OFT checkpoints as policies (arXiv 2406.09246, 2502.19645)."""

from __future__ import annotations

from typing import Any

from policies.openvla.config import OpenVLAConfig

__all__ = ["OpenVLA", "OpenVLAConfig", "OpenVLAL1"]


def __getattr__(name: str) -> Any:
    """The policies, imported when they are asked for: `policies.openvla.config` alone needs no
    torch."""
    if name not in ("OpenVLA", "OpenVLAL1"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from policies.openvla import policy

    return getattr(policy, name)
