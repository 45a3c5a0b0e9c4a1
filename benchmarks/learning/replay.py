"""How fast the replay writes and draws, beside the plain form: (s, a, r, s') in RAM, which keeps
every frame twice."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Took, table, take_turns, timed
from vla_rl.data.replay import Replay
from vla_rl.devices import free_memory_bytes
from vla_rl.errors import ConfigError, UserError
from vla_rl.types import CameraSpec, EmbodimentSpec, EpisodeSpec, Observation, Trajectory

EPISODE = 100  # decisions
BATCH = 256
# of RAM for what is measured on the disk: enough for the small columns of the default size
_CACHED_BYTES = 64 << 20
_ACTIONS, _PROPRIO = 7, 8
_POOL = 509  # different frames; a prime, so that episodes differ


@dataclass(frozen=True)
class Sizes:
    """``steps`` control steps, a frame of every camera (``size`` pixels square) each ``chunk``
    of them."""

    steps: int = 20_000
    size: int = 128
    cameras: int = 2
    chunk: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "size", "cameras", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 1")

    @property
    def decisions(self) -> int:
        return -(-self.steps // self.chunk)

    @property
    def frame_bytes(self) -> int:
        return self.cameras * self.size * self.size * 3


def measure(
    steps: int,
    size: int,
    cameras: int,
    chunk: int,
    folder: Path | None = None,
    rounds: int = 3,
    batches: int = 10,
) -> dict[str, Any]:
    """Write, open and draw from synthetic episodes, with one thread.

    ``folder``: where a temporary folder may be made (default: the system's place for them). Each
    way of drawing gets ``rounds`` turns of ``batches`` batches; the median counts. Raises
    `UserError` where the disk has no room.
    """
    sizes, threads = Sizes(steps, size, cameras, chunk), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="bench_replay", dir=folder) as place:
            return _measured(sizes, Path(place) / "replay", rounds, batches)
    finally:
        torch.set_num_threads(threads)


def _measured(sizes: Sizes, folder: Path, rounds: int, batches: int) -> dict[str, Any]:
    needed, free = (
        sizes.decisions * sizes.frame_bytes * 1.1 + 1e8,
        shutil.disk_usage(folder.parent).free,
    )
    if needed > free:
        raise UserError(
            f"--steps {sizes.steps} needs {needed / 1e9:.1f} GB in {folder.parent}, which has "
            f"{free / 1e9:.1f} GB free: take fewer steps, or name another place with --folder"
        )
    written = Replay(folder, embodiment=robot(sizes), ram_bytes=_CACHED_BYTES)
    seconds = write_episodes(written, sizes, sizes.decisions)
    size = written.bytes
    result: dict[str, Any] = {
        "steps": sizes.steps,
        "chunk": sizes.chunk,
        "cameras": sizes.cameras,
        "pixels": sizes.size,
        "batch": BATCH,
        "rows_in_ram": min(sizes.decisions, _rows_in_ram(sizes)),
        "written": {
            "bytes": size,
            "seconds": seconds,
            "decisions_per_second": sizes.decisions / seconds,
            "bytes_per_second": size / seconds,
            "bytes_for_1_million_steps": size / sizes.steps * 1e6,
        },
    }
    del written
    started = time.perf_counter()
    mapped = _opened(folder, float("inf"))
    result["opened_seconds"] = time.perf_counter() - started
    result["images"], result["no_images"] = _race(
        sizes, mapped, result["rows_in_ram"], rounds, batches
    )
    del mapped
    if (direct := _opened(folder, 0)).reads_directly:
        generator = torch.Generator().manual_seed(2)
        result["images"]["disk_direct"] = _speed(
            [timed(direct.draw, BATCH, generator) for _ in range(3 * batches)]
        )
    if hasattr(os, "posix_fadvise"):
        result["images"]["disk_uncached"] = _uncached(folder, batches)
    for speeds in (result["images"], result["no_images"]):
        for speed in speeds.values():
            speed["ratio"] = speed["per_second"] / speeds["tuples"]["per_second"]
    result["bytes_ratio"] = sizes.decisions * Tuples.row_bytes(sizes) / size
    return result


Speeds = dict[str, dict[str, float]]


def _opened(folder: Path, cache_bytes: float) -> Replay:
    """``cache_bytes`` infinite: mapped, 0: read directly."""
    return Replay(folder, episodes=None, ram_bytes=_CACHED_BYTES, cache_bytes=cache_bytes)


def _race(
    sizes: Sizes, disk: Replay, rows: int, rounds: int, batches: int
) -> tuple[Speeds, Speeds]:
    """With images and without: tuples and replay in RAM (``rows``), replay on disk, in turns."""
    tuples, memory = Tuples(sizes, rows), Replay()
    write_episodes(memory, sizes, rows)
    generator = torch.Generator().manual_seed(0)
    draws: dict[str, Callable[[bool], Any]] = {
        "tuples": lambda images: tuples.draw(BATCH, generator, images),
        "ram": lambda images: memory.draw(BATCH, generator, images=images),
        "disk": lambda images: disk.draw(BATCH, generator, images=images),
    }
    calls = {
        (images, way): partial(draw, images)
        for images in (True, False)
        for way, draw in draws.items()
    }
    took = take_turns(calls, rounds, batches)
    with_images, without = (
        {way: _speed(took[images, way]) for way in draws} for images in (True, False)
    )
    return with_images, without


def _uncached(folder: Path, batches: int) -> dict[str, float]:
    """Where the system has none of the images in memory."""
    times, generator = [], torch.Generator().manual_seed(1)
    for _ in range(batches):
        for path in folder.iterdir():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        replay = _opened(folder, float("inf"))
        times.append(timed(replay.draw, BATCH, generator))
        del replay  # its map would keep the pages
    return _speed(times)


def _speed(took: Sequence[Took]) -> dict[str, float]:
    """Batches per second, and per second of work: what a core of one's own gives where nothing
    waits for the disk."""
    clock, work = (statistics.median(column) for column in zip(*took))
    return {"per_second": 1.0 / clock, "per_cpu_second": 1.0 / work}


class Tuples:
    """Shuffled (s, a, r, discount, s'), as plain replays keep them."""

    def __init__(self, sizes: Sizes, count: int) -> None:
        shape = (count, sizes.size, sizes.size, 3)
        self._images = [torch.empty(shape, dtype=torch.uint8) for _ in range(2 * sizes.cameras)]
        self._small = [torch.zeros(count, width) for width in self._widths(sizes)]
        pool = _pool(sizes)
        for start in range(0, count, EPISODE):
            rows = np.arange(start, min(start + EPISODE, count))
            for i, images in enumerate(self._images):
                images[start : start + len(rows)] = pool[i % sizes.cameras][
                    (rows + i // sizes.cameras) % _POOL
                ]

    @staticmethod
    def _widths(sizes: Sizes) -> list[int]:
        return [_PROPRIO, _PROPRIO, sizes.chunk * _ACTIONS, 1, 1]

    @classmethod
    def row_bytes(cls, sizes: Sizes) -> int:
        return 2 * sizes.frame_bytes + 4 * sum(cls._widths(sizes))

    def draw(self, count: int, generator: torch.Generator, images: bool) -> list[torch.Tensor]:
        rows = torch.randint(len(self._small[0]), (count,), generator=generator)
        return [column[rows] for column in (*self._small, *(self._images if images else ()))]


# ----------------------------------------------------------------------------------------- episodes
def robot(sizes: Sizes) -> EmbodimentSpec:
    """What the synthetic episodes are of."""
    return EmbodimentSpec(
        name="bench_arm",
        action_names=tuple(f"a{i}" for i in range(_ACTIONS)),
        action_units=("m",) * _ACTIONS,
        action_low=(-1.0,) * _ACTIONS,
        action_high=(1.0,) * _ACTIONS,
        frame="base",
        rotation="axis_angle",
        gripper="none",
        control_hz=10.0,
        cameras=tuple(
            CameraSpec(f"camera_{i}", sizes.size, sizes.size) for i in range(sizes.cameras)
        ),
        proprio_names=tuple(f"p{i}" for i in range(_PROPRIO)),
    )


def _pool(sizes: Sizes) -> list[torch.Tensor]:
    """Frames of noise, uint8 [pool size size 3] per camera."""
    rng = np.random.default_rng(0)
    shape = (_POOL, sizes.size, sizes.size, 3)
    return [
        torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(sizes.cameras)
    ]


def synthetic_episodes(sizes: Sizes, decisions: int) -> Iterator[Trajectory]:
    """Episodes of frames of noise, of ``decisions`` decisions in all."""
    pool = _pool(sizes)
    for start in range(0, decisions, EPISODE):
        yield _episode(sizes, pool, start, min(EPISODE, decisions - start))


def write_episodes(replay: Replay, sizes: Sizes, decisions: int) -> float:
    """Add episodes of ``decisions`` decisions in all; seconds that the replay took."""
    seconds = 0.0
    for trajectory in synthetic_episodes(sizes, decisions):
        rewards = trajectory.rewards.sum(1)
        started = time.perf_counter()
        replay.add(trajectory, rewards)
        seconds += time.perf_counter() - started
    return seconds


def _episode(sizes: Sizes, pool: list[torch.Tensor], start: int, t: int) -> Trajectory:
    rows = torch.arange(start, start + t + 1)
    images = {f"camera_{i}": pool[i][rows % _POOL] for i in range(sizes.cameras)}
    seen = Observation(
        images, torch.rand(t + 1, _PROPRIO), ("put the cube into the bowl",) * (t + 1)
    )
    actions = torch.rand(t, sizes.chunk, _ACTIONS)
    return Trajectory(
        episode=EpisodeSpec("bench", start),
        observations=seen[:t],
        final_observation=seen[t:],
        actions=actions,
        valid=torch.ones(t, sizes.chunk, dtype=torch.bool),
        rewards=torch.rand(t, sizes.chunk),
        behavior_log_prob=torch.zeros(t),
        replay={},
        terminated=True,
        truncated=False,
        success=True,
        proposed=actions,
    )


def _rows_in_ram(sizes: Sizes) -> int:
    """How many decisions the plain form and the replay may hold in RAM side by side: in half of
    what is free."""
    free = free_memory_bytes() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(BATCH, int(0.5 * free / (Tuples.row_bytes(sizes) * 1.6)))


def text(r: Mapping[str, Any]) -> str:
    w, every = r["written"], "every step" if r["chunk"] == 1 else f"every {r['chunk']} steps"
    ways = {
        "tuples": f"tuples in RAM ({r['rows_in_ram']} rows)",
        "ram": f"replay in RAM ({r['rows_in_ram']} rows)",
        "disk": "replay on disk, mapped",
        "disk_uncached": "replay on disk, mapped, not in the cache",
        "disk_direct": "replay on disk, read past the cache",
    }
    rows: list[Sequence[str]] = [
        (f"batches of {r['batch']}", "a second", "CPU second", "", "no images", "CPU second", "")
    ]
    for way, name in ways.items():
        cells = []
        for speed in (speeds[way] for speeds in (r["images"], r["no_images"]) if way in speeds):
            cells += [
                f"{speed['per_second']:.1f}",
                f"{speed['per_cpu_second']:.1f}",
                f"({speed['ratio']:.2f}x)",
            ]
        rows += [(name, *cells)] if cells else []
    return (
        f"{r['steps']} control steps, {r['cameras']} cameras of {r['pixels']} px, a frame {every}; "
        f"one core\nwritten: {w['decisions_per_second']:.0f} decisions/s "
        f"({w['bytes_per_second'] / 1e6:.0f} MB/s, each synced); opened again in "
        f"{r['opened_seconds']:.2f} s\n{w['bytes'] / 1e9:.2f} GB; 1 million steps: "
        f"{w['bytes_for_1_million_steps'] / 1e9:.1f} GB on disk, as tuples {r['bytes_ratio']:.2f} "
        f"times that in RAM\n{table(rows)}"
    )
