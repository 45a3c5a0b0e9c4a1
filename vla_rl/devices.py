"""Names of devices in the config, checked before torch is imported, and the memory that is free."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
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
    """What programs here may still take, in bytes: free memory, and what the system's cache would
    give back, within the limits of the control groups that this process is in (v2: of a container
    or a job). 0 where the system does not tell (no Linux)."""
    try:
        lines = dict(
            line.split(":", 1) for line in _MEMINFO.read_text(encoding="utf-8").splitlines()
        )
        return min(int(lines["MemAvailable"].split()[0]) * 1024, *_left_of_limits())
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def _left_of_limits() -> list[int]:
    """Bytes that each limit of a control group around this process leaves (at least an endless
    one)."""
    left = [sys.maxsize]
    with contextlib.suppress(OSError):
        own = [x[3:] for x in _OWN_GROUP.read_text(encoding="utf-8").splitlines() if x[:3] == "0::"]
        group = _GROUPS / (own[0] if own else "").lstrip("/")
        for folder in [f for f in (group, *group.parents) if f.is_relative_to(_GROUPS)]:
            with contextlib.suppress(OSError, ValueError, KeyError):  # "max", or it has none
                limit = int((folder / "memory.max").read_text())
                rows = (folder / "memory.stat").read_text().splitlines()
                cached = int(dict(row.split() for row in rows)["inactive_file"])
                used = int((folder / "memory.current").read_text()) - cached
                left.append(max(limit - used, 1))
    return left


def release_memory() -> None:
    """Give what was freed back to the system, where the C library would keep it (glibc)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another library has no such call
        ctypes.CDLL(None).malloc_trim(0)
