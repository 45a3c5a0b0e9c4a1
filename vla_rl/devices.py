"""Names of devices in the config, checked before torch is imported, and the memory that is free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch

_MEMINFO = Path("/proc/meminfo")
_NAME = re.compile(r"auto|cpu|mps|(?:cuda|xpu)(?::\d+)?")


def check_device(name: str, key: str = "device") -> None:
    """Raise `ConfigError` unless ``name`` is one that `pick_device` reads."""
    if not _NAME.fullmatch(name):
        remedy = "cuda" if name.lower() in ("gpu", "nvidia") else "auto"
        raise ConfigError(
            f"{key}={name} is no device. Use {key}=auto, cpu, cuda or cuda:1 (a GPU's number). Did "
            f"you mean {key}={remedy}?"
        )


def pick_device(name: str, key: str = "device") -> torch.device:
    """The device of that name; "auto" is the first GPU, else the CPU. `ConfigError` for one that
    is not there."""
    import torch

    check_device(name, key)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{key}={name} was asked for, but torch sees no GPU. Use {key}=cpu or {key}=auto"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"{key}={name}: torch sees {torch.cuda.device_count()} GPUs, counted "
                f"from 0. Use {key}=cuda:0"
            )
    elif device.type != "cpu" and not getattr(torch, device.type).is_available():
        raise ConfigError(
            f"{key}={name} was asked for, but torch sees no such device. Use "
            f"{key}=cpu or {key}=auto"
        )
    return device


def free_memory_bytes() -> int:
    """What programs may still take, in bytes: free memory, and what the system's cache would give
    back. 0 where the system does not tell (no Linux)."""
    try:
        lines = dict(
            line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return 0
