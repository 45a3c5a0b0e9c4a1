"""What a figure depends on besides the code: the machine, its load on memory, and the packages'
versions."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vla_rl

PACKAGES = (
    "vla-rl",
    "torch",
    "numpy",
    "transformers",
    "timm",
    "hydra-core",
    "safetensors",
    "robosuite",
    "mujoco",
    "numba",
    "hf-libero",
    "lerobot",
    "ray",
    "pyarrow",
    "av",
    "wandb",
    "tensorboard",
    "rerun-sdk",
    "peft",
    "diffusers",
    "simplejpeg",
    "pyrealsense2",
)


# ------------------------------------------------------------------------------------------- memory
def memory_bytes() -> int:
    """Memory of this process and all its children, in bytes; shared pages count once (proportional
    set size).

    0 where the system does not tell (no Linux).
    """
    total = 0
    for pid in process_tree(os.getpid()):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (OSError, ValueError):  # it ended meanwhile, or is not ours to read
            continue
    return total


def process_tree(root: int) -> list[int]:
    """A process and all below it; itself alone where the system does not tell (no Linux)."""
    # (not each process has a file of its children: that is an option of the kernel)
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(file.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
        children.setdefault(parent, []).append(int(file.parent.name))
    found = [root]
    for pid in found:  # which grows
        found += children.get(pid, [])
    return found


class MemoryWatch:
    """Samples `memory_bytes` at once, then in a thread; ``peak`` is the most seen, from
    ``initial`` (earlier sessions)."""

    def __init__(
        self, initial: int = 0, every: float = 2.0, measure: Callable[[], int] = memory_bytes
    ):
        self.peak, self._every, self._measure = int(initial), every, measure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self.sample()  # (a run may end before the thread's first sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()

    def sample(self) -> int:
        """The peak with what is in use now, in bytes."""
        self.peak = max(self.peak, self._measure())
        return self.peak

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self.sample()


# ----------------------------------------------------------------------------------------- versions
def versions() -> dict[str, Any]:
    """Packages, machine and source commit: what somebody else needs to know to repeat the run."""
    import torch

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": available_cores(),
        "memory_gib": round(total_memory_bytes() / 2**30, 1),
        "gpus": gpus,
        "mujoco_gl": os.environ.get("MUJOCO_GL", ""),
        "packages": packages,
        "git_commit": git_commit(),
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """Cores this process may use: an affinity mask or a container's quota may be smaller than
    the machine."""
    cores = len(own_cores()) or os.cpu_count() or 1
    quota = cgroup_quota(Path("/sys/fs/cgroup"))
    return min(cores, math.ceil(quota)) if quota else cores


def own_cores() -> list[int]:
    """The numbers of the cores that this process may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def cgroup_quota(root: Path) -> float:
    """Cores' worth of time that a container allows (cgroup v2's ``cpu.max``, v1's
    ``cfs_quota_us``); 0: no limit."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota, period = (
                (root / "cpu" / f"cpu.cfs_{name}_us").read_text().strip()
                for name in ("quota", "period")
            )
        return max(0.0, float(quota) / float(period))  # (v1 says -1, v2 "max")
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def default_threads() -> int:
    """Threads for torch where nothing else is said: all available cores, or fewer where
    ``OMP_NUM_THREADS`` says so."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return (
        min(available_cores(), int(wanted))
        if wanted.isdigit() and int(wanted)
        else available_cores()
    )


def total_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def git_commit() -> str:
    """Commit of the source that runs, "+changes" where tracked files differ from it; empty
    outside a checkout."""
    here = Path(vla_rl.__file__).resolve().parents[1]  # not this file's folder, which moves

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD") if (here / ".git").exists() else ""
        return f"{commit} +changes" if commit and git("status", "--porcelain", "-uno") else commit
    except (OSError, subprocess.TimeoutExpired):
        return ""
