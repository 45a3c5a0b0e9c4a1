"""How fast batches of demonstrations are drawn from videos on the disk, in how much memory, beside
lerobot's own loader.

Both read the same dataset: one made here, whose episodes share a few videos, or ``--dataset``. Each
side has a process of its own, in turns; a batch is rows drawn at random with their pictures and the
chunk of actions that follows. Nothing is learned meanwhile, so that is the loader's own pace.
lerobot's has a `torch.utils.data.DataLoader` with each number of ``loader_workers``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import in_turns, say, table
from vla_rl.data.lerobot_format import (
    ACTION_KEY,
    STATE_KEY,
    av_package,
    image_key,
    lerobot_features,
    pyarrow_package,
)
from vla_rl.errors import ConfigError, require_packages
from vla_rl.types import CameraSpec, EmbodimentSpec

OURS = "vla-rl"
CAMERAS = ("front", "wrist")
# rows a second; rows of an episode; different episodes that are filmed
_HZ, _EPISODE, _FILMED = 30, 300, 10
BATCH, _CHUNK, _WARM = 64, 8, 3
_SECONDS = 1800  # that a side may take


def measure(
    frames: int,
    size: int,
    batches: int,
    loader_workers: Sequence[int],
    rounds: int,
    codec: str,
    ram: float,
    dataset: Path | None = None,
) -> dict[str, Any]:
    """``rounds`` turns of ``batches`` batches of `BATCH` rows for each side. ``ram``: GiB of
    decoded pictures that this project may hold; what is larger stays on the disk."""
    require_packages("lerobot", "av", "pyarrow", extra="lerobot", purpose="vla-rl bench data")
    if min(frames, size, batches, rounds) < 1 or ram < 0 or min(loader_workers, default=-1) < 0:
        raise ConfigError(
            "bench data needs frames, size, batches and rounds >= 1, ram and loader-workers >= 0"
        )
    with tempfile.TemporaryDirectory(prefix="bench_data") as place:
        where = dataset or generate(Path(place) / "data", frames, size, codec)
        job = {"dataset": str(where), "batches": batches, "ram": ram, "folder": place}
        sides = [OURS, *(f"lerobot, {n} workers" for n in loader_workers)]
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for side, number in in_turns(sides, rounds):
            say(f"{side}, round {number + 1}")
            found[side].append(_in_process(job | {"side": side, "seed": number}))
    best = max(sides[1:], key=lambda side: _mean(found[side], "rows_per_second"))
    ratio = _mean(found[OURS], "rows_per_second") / _mean(found[best], "rows_per_second")
    of = (
        {"frames": frames, "size": size, "codec": codec}
        if dataset is None
        else {"dataset": str(dataset)}
    )
    return of | {
        "batch": BATCH,
        "batches": batches,
        "ram_gib": ram,
        "sides": found,
        "fastest_lerobot": best,
        "ratio": ratio,
        "lerobot_decodes_by": _backend(),
    }


def text(document: dict[str, Any]) -> str:
    rows = [
        (
            "",
            "rows/s",
            "CPU ms a row",
            "peak memory",
            "seconds to open",
            "the same rows' brightness",
        )
    ]
    for side, rounds in document["sides"].items():
        bright = rounds[0]["brightness"]  # (of one that cannot tell it: the rows of a batch)
        peak = max(r["peak_bytes"] for r in rounds) / 1e9
        means = [
            f"{_mean(rounds, 'rows_per_second'):.0f}",
            f"{_mean(rounds, 'cpu_ms_per_row'):.1f}",
            f"{peak:.2f} GB",
        ]
        rows.append(
            (
                side,
                *means,
                f"{_mean(rounds, 'open_seconds'):.1f}",
                f"{bright:.4f}" if bright < 1 else "",
            )
        )
    return (
        f"{table(rows)}\n{document['ratio']:.2f} times as many rows a second as "
        f"{document['fastest_lerobot']} (which decodes by {document['lerobot_decodes_by']})"
    )


def _mean(rounds: Sequence[dict[str, float]], key: str) -> float:
    return sum(r[key] for r in rounds) / len(rounds)


# -------------------------------------------------------------------------------------------- sides
def _in_process(job: dict[str, Any]) -> dict[str, float]:
    code = "import sys; from benchmarks.learning.loader import side; side(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise ConfigError(
            f"{job['side']} ended with {done.returncode}: {done.stderr.strip()[-800:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def side(argument: str) -> None:
    """One side's process: prints what it measured. ``brightness`` is the mean of the first rows'
    pictures, 0 … 1."""
    from vla_rl.monitoring.machine import MemoryWatch, memory_bytes

    job = json.loads(argument)
    with MemoryWatch(every=0.2, measure=memory_bytes) as memory:
        began = time.perf_counter()
        batches = _ours(job) if job["side"] == OURS else _lerobot(job)
        first = next(batches)
        opened = time.perf_counter() - began
        for _ in range(_WARM - 1):
            next(batches)
        began, worked = time.perf_counter(), _work()
        for _ in range(job["batches"]):
            next(batches)
        seconds = time.perf_counter() - began
        batches.close()  # (whose workers' time is known once they have ended)
        del batches
        worked = _work() - worked
    rows = BATCH * job["batches"]
    found = {
        "rows_per_second": rows / seconds,
        "cpu_ms_per_row": 1e3 * worked / rows,
        "peak_bytes": memory.peak,
    }
    print(json.dumps(found | {"open_seconds": opened, "brightness": first}))


def _work() -> float:
    """CPU seconds of this process and of those below it that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _ours(job: dict[str, Any]) -> Generator[float]:
    from vla_rl.config.recording import RecordingConfig
    from vla_rl.data.demonstrations import DatasetSampler
    from vla_rl.data.frames import OnDisk
    from vla_rl.data.recording import open_recording

    recording = open_recording(job["dataset"], RecordingConfig())
    disk = OnDisk(Path(job["folder"]), int(job["ram"] * 2**30))
    data = recording.demonstrations(_CHUNK, [task.task_id for task in recording.tasks], disk=disk)
    some = data.at(_same(len(data)))[0].images
    yield float(np.mean([frames.float().mean() / 255 for frames in some.values()]))
    sampler = DatasetSampler(data, BATCH, job["seed"])
    while True:
        yield float(len(sampler.next_batch()[0]))


def _lerobot(job: dict[str, Any]) -> Generator[float]:
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    torch.set_num_threads(1)  # (each worker's; more would fight for the cores)
    hz = json.loads((Path(job["dataset"]) / "meta" / "info.json").read_text())["fps"]
    chunk = {ACTION_KEY: [i / hz for i in range(_CHUNK)]}
    data: Any = LeRobotDataset(
        "local/data", root=job["dataset"], delta_timestamps=chunk, video_backend=_backend()
    )
    workers = int(job["side"].split()[1])
    if not workers:  # (a forked worker would read on where this process's decoders stand)
        some = [data[int(i)] for i in _same(len(data))]
        yield float(
            np.mean([item[key].float().mean() for item in some for key in data.meta.camera_keys])
        )
    generator = torch.Generator().manual_seed(job["seed"])
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=BATCH,
        sampler=_Endless(len(data), generator),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    for batch in loader:
        yield float(len(batch[ACTION_KEY]))


def _backend() -> str:
    """lerobot's decoder of videos: torchcodec, its usual one, where its libraries can be loaded."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return "pyav"
    return "torchcodec"


class _Endless:
    """Rows at random, for ever."""

    def __init__(self, count: int, generator: Any) -> None:
        self.count, self.generator = count, generator

    def __iter__(self) -> Iterator[int]:
        import torch

        while True:
            yield from torch.randint(self.count, (4096,), generator=self.generator).tolist()


def _same(count: int) -> Any:
    """Rows that all sides look at first, to show that they see the same."""
    import torch

    return torch.linspace(0, count - 1, 8).round().long()


# ------------------------------------------------------------------------------------------ dataset
def generate(folder: Path, frames: int, size: int, codec: str) -> Path:
    """A LeRobotDataset v3 of ``frames`` rows with two cameras, whose episodes share a few that
    are filmed."""
    spec = EmbodimentSpec(
        name="bench",
        action_names=tuple(f"j{i}" for i in range(7)),
        action_units=("rad",) * 7,
        action_low=(-4.0,) * 7,
        action_high=(4.0,) * 7,
        frame="joints",
        rotation="none",
        gripper="none",
        control_hz=float(_HZ),
        cameras=tuple(CameraSpec(name, size, size) for name in CAMERAS),
        proprio_names=tuple(f"j{i}" for i in range(7)),
    )
    lengths = [_EPISODE] * (frames // _EPISODE) + ([frames % _EPISODE] if frames % _EPISODE else [])
    filmed = min(_FILMED, len(lengths))
    for name in CAMERAS:
        _film(
            folder / "videos" / image_key(name) / "chunk-000" / "file-000.mp4",
            filmed * _EPISODE,
            size,
            codec,
        )
    (folder / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
    (folder / "data" / "chunk-000").mkdir(parents=True)
    info = {
        "codebase_version": "v3.0",
        "robot_type": "bench",
        "total_episodes": len(lengths),
        "total_frames": frames,
        "total_tasks": 1,
        "chunks_size": 1000,
        "fps": _HZ,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "features": lerobot_features(spec, video=True),
    }
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    _write_rows(folder, frames, lengths)
    _write_episodes(folder, lengths, filmed)
    return folder


def _write_rows(folder: Path, frames: int, lengths: Sequence[int]) -> None:
    pa, rng = pyarrow_package(), np.random.default_rng(0)
    index = np.arange(frames)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    frame = np.concatenate([np.arange(n) for n in lengths])
    vectors = {
        key: rng.uniform(-1, 1, (frames, 7)).astype(np.float32) for key in (STATE_KEY, ACTION_KEY)
    }
    columns = {
        key: pa.FixedSizeListArray.from_arrays(pa.array(v.reshape(-1)), 7)
        for key, v in vectors.items()
    }
    columns |= {
        "timestamp": pa.array((frame / _HZ).astype(np.float32)),
        "frame_index": pa.array(frame),
        "index": pa.array(index),
        "episode_index": pa.array(episode),
        "task_index": pa.array(np.zeros(frames, np.int64)),
    }
    pa.parquet.write_table(pa.table(columns), folder / "data" / "chunk-000" / "file-000.parquet")
    pa.parquet.write_table(
        pa.table({"task_index": [0], "__index_level_0__": ["do it"]}),
        folder / "meta" / "tasks.parquet",
    )
    stats = {
        key: {
            "min": v.min(0).tolist(),
            "max": v.max(0).tolist(),
            "mean": v.mean(0).tolist(),
            "std": v.std(0).tolist(),
            "count": [frames],
        }
        for key, v in vectors.items()
    }
    (folder / "meta" / "stats.json").write_text(json.dumps(stats))


def _write_episodes(folder: Path, lengths: Sequence[int], filmed: int) -> None:
    pa, ends = pyarrow_package(), np.cumsum(lengths)
    rows = []
    for i, (n, end) in enumerate(zip(lengths, ends)):
        row = {
            "episode_index": i,
            "length": n,
            "tasks": ["do it"],
            "dataset_from_index": int(end - n),
            "dataset_to_index": int(end),
            "data/chunk_index": 0,
            "data/file_index": 0,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        begin = (i % filmed) * _EPISODE / _HZ
        for name in CAMERAS:
            key = f"videos/{image_key(name)}"
            row |= {
                f"{key}/chunk_index": 0,
                f"{key}/file_index": 0,
                f"{key}/from_timestamp": begin,
                f"{key}/to_timestamp": begin + n / _HZ,
            }
        rows.append(row)
    pa.parquet.write_table(
        pa.Table.from_pylist(rows), folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    )


def _film(path: Path, frames: int, size: int, codec: str) -> None:
    """A moving pattern, with a key frame every second frame, as lerobot writes its videos."""
    av = av_package()
    path.parent.mkdir(parents=True)
    options = {"g": "2", "crf": "30"} | (
        {"preset": "12"} if codec == "libsvtav1" else {"preset": "veryfast"}
    )
    rng = np.random.default_rng(0)
    scene = (
        rng.integers(0, 256, (size // 8 + 2, size // 8 + 2, 3), dtype=np.uint8)
        .repeat(8, 0)
        .repeat(8, 1)
    )
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=_HZ, options=options)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        for t in range(frames):
            shown = np.roll(scene, (t % (size // 2), (3 * t) % size), (0, 1))[:size, :size].copy()
            shown[: size // 8, : size * (t % _EPISODE) // _EPISODE] = 255
            for packet in stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
