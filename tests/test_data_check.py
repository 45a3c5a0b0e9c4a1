"""Contents of recorded episodes: what training refuses, leaves out or warns of, in every form
they come in."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.cli import main
from vla_rl.config import RunConfig
from vla_rl.data import lerobot_pictures
from vla_rl.data.checks import DataCheck, Rows, as_success, bad_instruction
from vla_rl.data.demonstrations import dataset_of_episodes
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_reader import check_dataset, load_demonstrations, successes
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.data.recorded import check_recorded
from vla_rl.data.sources import check_folder
from vla_rl.errors import UserError
from vla_rl.types import CameraSpec, EmbodimentSpec

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

SPEC = EmbodimentSpec(
    name="arm",
    action_names=("a", "b"),
    action_units=("rad", "rad"),
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    frame="joints",
    rotation="none",
    gripper="none",
    control_hz=10.0,
    cameras=(CameraSpec("front", 8, 12),),
    proprio_names=("a", "b"),
)
LENGTHS, TEXT = (6, 5, 7), "lift the cup"
FRONT = "observation.images.front"


def shade(episode: int, row: int) -> int:
    """The grey that a picture shows, so that one can tell which it is."""
    return 20 * episode + 30 * row


def episode(i: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(i)
    pictures = np.stack([np.full((8, 12, 3), shade(i, t), np.uint8) for t in range(length)])
    vectors = {
        name: rng.uniform(-1, 1, (length, 2)).astype(np.float32) for name in ("proprio", "actions")
    }
    return {"images": {"front": pictures}, "instruction": TEXT, **vectors}


def write(path: Path, lengths: tuple[int, ...] = LENGTHS, video: bool = False) -> Path:
    with DemonstrationWriter(path, SPEC, video=video) as writer:
        for i, n in enumerate(lengths):
            writer.add_episode(**episode(i, n), success=True, task_id="cup", init_state_id=i)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("sound") / "data")


# ------------------------------------------------------------------------------- one bad thing each
def parquet(path: Path) -> Path:
    return next(path.glob("*/*.parquet"))


def table(where: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """An edit of the parquet files below ``where``, as a list of row dicts in and out."""

    def apply(path: Path) -> None:
        file = path / where if where.endswith(".parquet") else parquet(path / where)
        old = pq.read_table(file)
        rows = edit(old.to_pylist())
        pq.write_table(pa.Table.from_pylist(rows), file)

    return apply


def at(row: int, **changes: Any) -> Callable[[list], list]:
    def edit(rows: list) -> list:
        rows[row] |= {key.replace("__", "."): value for key, value in changes.items()}
        return rows

    return edit


def every(change: Callable[[int, dict], dict]) -> Callable[[list], list]:
    return lambda rows: [row | change(i, row) for i, row in enumerate(rows)]


def png(image: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def told(name: str, **changes: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        document = json.loads((path / name).read_text())
        for key, value in changes.items():
            *outer, last = key.split("__")
            inner = document
            for step in outer:
                inner = inner[step.replace("-", ".")]
            inner[last.replace("-", ".")] = value
        (path / name).write_text(json.dumps(document))

    return apply


def pointer(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        next(path.glob(name)).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 99\n"
        )

    return apply


def pipe(name: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = next(path.glob(name))
        file.unlink()
        os.mkfifo(file)

    return apply


def without(*rows: int) -> Callable[[list], list]:
    return lambda all_rows: [row for i, row in enumerate(all_rows) if i not in rows]


def said_to_be(text: Any) -> Callable[[Path], None]:
    """Another instruction for all episodes; pandas named its column as it liked."""
    return table(
        "meta/tasks.parquet",
        lambda rows: [{k: v if k == "task_index" else text for k, v in rows[0].items()}],
    )


DEPTH, SMALL, NOISE = (
    {"bytes": png(np.full((8, 12), 40_000, np.uint16)), "path": "x"},
    {"bytes": png(np.zeros((4, 4, 3), np.uint8)), "path": "x"},
    {"bytes": b"no picture", "path": "x"},
)
NAN, INF = float("nan"), float("inf")


def vast() -> dict[str, Any]:
    """A picture whose header says 60000 × 60000."""
    data = bytearray(png(np.zeros((8, 12), np.uint8)))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return {"bytes": bytes(data), "path": "x"}


VAST = vast()
# How a sound dataset is spoilt, and what is said of it. Row 8 of the data is row 2 of episode 1.
SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "nan action": (
        table("data", at(8, action=[0.1, NAN])),
        r"episode 1, row 2, action\[b\]: is nan",
    ),
    "inf state": (
        table("data", at(8, observation__state=[INF, 0.0])),
        r"episode 1, row 2, observation.state\[a\]: is inf",
    ),
    "huge action": (
        table("data", at(8, action=[1e30, 0.0])),
        r"episode 1, row 2, action\[a\]: is 1e\+30, which no robot",
    ),
    "huge state": (
        table("data", at(0, observation__state=[0.0, -3e7])),
        r"episode 0, row 0, .*state\[b\]: is -3e\+07",
    ),
    "degrees": (
        table("data", every(lambda i, r: {"action": [57.3 * v for v in r["action"]]})),
        r"episode 0, row \d, action\[a\]: is -?\d.*beyond the -1 … 1 of the robot \(in 3 episodes\)",
    ),
    "state in degrees": (
        table(
            "data",
            every(lambda i, r: {"observation.state": [57.3 * v for v in r["observation.state"]]}),
        ),
        r"episode 0, row \d, observation.state\[[ab]\]: is -?\d.*beyond the -1 … 1 of the robot",
    ),
    "one action outside": (
        table("data", at(17, action=[0.0, 1.5])),
        r"episode 2, row 6, action\[b\]: is 1.5, beyond",
    ),
    "null action": (table("data", at(8, action=None)), "action is empty in row 8"),
    "null number": (table("data", at(8, action=[0.1, None])), "action is empty in row 8"),
    "ragged": (
        table("data", lambda r: at(8, action=[0.1])(at(9, action=[0.1, 0.2, 0.3])(r))),
        "action has 1 numbers in row 8",
    ),
    "words": (
        table("data", every(lambda i, r: {"action": ["x", "y"]})),
        "incomplete or damaged|it holds",
    ),
    "no instruction": (said_to_be(""), "episode 0: its instruction is empty"),
    "null instruction": (said_to_be(None), "has None in place of the text of task_index 0"),
    "endless instruction": (said_to_be("x" * 20_000), "has 20000 letters"),
    "NUL in it": (said_to_be("lift\0it"), r"the character '\\x00'"),
    "hole in tasks": (
        table("data", at(8, task_index=7)),
        "no text for the task_index 7, which episode 1, row 2 has",
    ),
    "task twice": (table("meta/tasks.parquet", lambda r: [*r, dict(r[0])]), "more than one text"),
    "negative task": (
        table("data", at(0, task_index=-1)),
        "no text for the task_index -1, which episode 0, row 0",
    ),
    "task a fraction": (
        table("data", every(lambda i, r: {"task_index": 0.7})),
        "task_index is 0.7 in row 0 of",
    ),
    "task a text": (
        table("data", every(lambda i, r: {"task_index": "0"})),
        "task_index is of string, and whole numbers",
    ),
    "length a fraction": (
        table("meta/episodes", every(lambda i, r: {"length": r["length"] + 0.5})),
        "length is 6.5 in",
    ),
    "no texts": (
        table("meta/tasks.parquet", lambda rows: [{"task_index": 0}]),
        r"tasks.parquet has the columns \['task_index'\]: a task_index and a text are needed",
    ),
    "bounds upside down": (
        told("meta/embodiment.json", action_low=[1.0, -1.0], action_high=[-1.0, 1.0]),
        r"no robot .*of a are 1 … -1",
    ),
    "pipe for info": (pipe("meta/info.json"), "info.json is a pipe, and a plain file is needed"),
    "pipe for data": (pipe("data/*/*.parquet"), "parquet is a pipe"),
    "pipe for episodes": (pipe("meta/episodes/*/*.parquet"), "parquet is a pipe"),
    "pipe for tasks": (pipe("meta/tasks.parquet"), "tasks.parquet is a pipe"),
    "pipe for the robot": (pipe("meta/embodiment.json"), "embodiment.json is a pipe"),
    "pipe for statistics": (pipe("meta/stats.json"), "stats.json is a pipe"),
    "Unix time at another rate": (
        table("data", every(lambda i, r: {"timestamp": 1.7e9 + r["timestamp"] / 3})),
        "comes 0.033333. s after",
    ),
    "row lost": (table("data", without(8)), "hold 4 rows of episode 1, and its metadata say 5"),
    "episode lost": (
        table("data", without(*range(6, 11))),
        "hold 0 rows of episode 1, and its metadata say 5",
    ),
    "metadata lost": (
        table("meta/episodes", without(1)),
        "hold 5 rows of episode 1, and its metadata know no such",
    ),
    "metadata twice": (table("meta/episodes", lambda r: [*r, r[1]]), "metadata of episode 1 twice"),
    "frame twice": (
        table("data", at(8, frame_index=1)),
        "episode 1 has the frame_index 1 in place of 2",
    ),
    "no episode index": (
        table("data", at(8, episode_index=None)),
        "episode_index is empty in row 8",
    ),
    "time stands still": (
        table("data", at(8, timestamp=0.1)),
        r"episode 1, row 2, timestamp: is 0.1 s after 0.1 s",
    ),
    "time is nan": (table("data", at(8, timestamp=NAN)), r"episode 1, row 2, timestamp: is nan"),
    "rows missing in time": (
        table(
            "data",
            every(lambda i, r: {"timestamp": r["timestamp"] + (0.4 if 8 <= i < 11 else 0.0)}),
        ),
        r"episode 1, row 2, timestamp: this row comes 0.5 s after the one before, and 10 Hz are 0.1 s",
    ),
    "another rate": (
        table("data", every(lambda i, r: {"timestamp": r["timestamp"] / 3})),
        r"comes 0.0333333 s after .*\(in 3 episodes\)",
    ),
    "success is a word": (
        table("meta/episodes", every(lambda i, r: {"success": "maybe" if i == 1 else "x"})),
        "episode 0: its success is 'x'",
    ),
    "depth": (
        table("data", at(8, **{FRONT.replace(".", "__"): DEPTH})),
        "episode 1, row 2, .* camera front has more",
    ),
    "small picture": (
        table("data", at(8, **{FRONT.replace(".", "__"): SMALL})),
        r"episode 1, row 2, .*front is \(4, 4\)",
    ),
    "no picture": (
        table("data", at(8, **{FRONT.replace(".", "__"): NOISE})),
        "episode 1, row 2, .* cannot be read",
    ),
    "null picture": (
        table("data", at(8, **{FRONT.replace(".", "__"): None})),
        "episode 1, row 2, .* is missing",
    ),
    "depth by its name": (
        told(
            "meta/info.json",
            **{f"features__{FRONT.replace('.', '-')}__info": {"is_depth_map": True}},
        ),
        "has depth",
    ),
    "pointer for info": (pointer("meta/info.json"), "info.json is a git-lfs pointer.*git lfs pull"),
    "pointer for data": (pointer("data/*/*.parquet"), "parquet is a git-lfs pointer"),
    "pointer for episodes": (pointer("meta/episodes/*/*.parquet"), "parquet is a git-lfs pointer"),
    "pointer for tasks": (pointer("meta/tasks.parquet"), "tasks.parquet is a git-lfs pointer"),
    "pointer for the robot": (
        pointer("meta/embodiment.json"),
        "embodiment.json is a git-lfs pointer",
    ),
    "no rate": (told("meta/info.json", fps=0), "its fps is 0"),
    "a rate of no number": (told("meta/info.json", fps=NAN), "its fps is nan"),
    "nothing of a feature": (
        told("meta/info.json", features__action=None),
        "info.json is damaged .it says nothing of action",
    ),
    "named numbers": (
        table("data", every(lambda i, r: {"action": {"x": 1.0, "y": 2.0}})),
        "action is of struct<x: double, y: double>, and numbers are needed",
    ),
    "bytes": (
        table("data", every(lambda i, r: {"action": b"\0" * 8})),
        r"action has 1 numbers a row|and numbers are needed",
    ),
    "frames counted from 100": (
        table("data", every(lambda i, r: {"frame_index": r["frame_index"] + 100})),
        "episode 0 has the frame_index 100 in place of 0",
    ),
    "a success of a half": (
        table("meta/episodes", every(lambda i, r: {"success": 0.5})),
        "episode 0: its success is 0.5",
    ),
    "time in nanoseconds": (
        table("data", every(lambda i, r: {"timestamp": int(r["timestamp"] * 1e9)})),
        r"this row comes 1e\+08 s after",
    ),
    "a picture that is too large": (
        table("data", at(8, **{FRONT.replace(".", "__"): VAST})),
        "episode 1, row 2, .* cannot be read .*exceeds limit",
    ),
    "a picture of somebody else": (
        table("data", at(8, **{FRONT.replace(".", "__"): {"bytes": None, "path": "/etc/group"}})),
        "names the file '/etc/group', which lies outside of it",
    ),
    "other statistics": (
        told("meta/stats.json", **{"observation-state__max": [0.1, 0.1]}),
        r"observation.state\[b\]: is \S+, beyond the \S+ … 0.1 of meta/stats.json",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_bad_contents_are_refused_with_their_place(name, sound, tmp_path, capsys):
    spoil, said = SPOILT[name]
    path = Path(shutil.copytree(sound, tmp_path / "data"))
    spoil(path)
    with pytest.raises(UserError, match=rf"(?s){said}") as caught:
        load_demonstrations(path, SPEC)
    assert len(str(caught.value).splitlines()) <= 3 and str(path) in str(caught.value)
    # (of pictures the first of each episode are looked at)
    if "picture" not in name and name != "depth":
        assert main(["data", "check", str(path), "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert not document["sound"] and any(
            f["level"] == "error" for s in document["sources"] for f in s["findings"]
        )


def test_sound_data_pass_and_the_table_says_what_is_there(sound, capsys, tmp_path):
    assert main(["data", "check", str(sound), "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "LeRobotDataset v3, 3 episodes, 18 rows" in out and "nothing found" in out
    document = json.loads((tmp_path / "found.json").read_text())
    assert (
        document["sound"]
        and document["sources"][0]["rows"] == 18
        and document["sources"][0]["findings"] == []
    )
    assert check_dataset(sound, SPEC, ["Lift the  cup."]).findings == ()


def test_what_is_no_recording_is_named(tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    assert main(["data", "check", str(tmp_path / "notes")]) == 2
    assert "holds no recorded episodes" in capsys.readouterr().err
    assert main(["data", "check", "someone/arm-data"]) == 2
    assert "'vla-rl hub fetch someone/arm-data --dataset'" in capsys.readouterr().err


# ---------------------------------------------------------------------------- what is read, and how
def shades(data: Any) -> list[int]:
    return data.images["front"][:, 4, 6, 0].tolist()


def wanted(*numbers: int) -> list[int]:
    return [shade(i, t) for i in numbers for t in range(LENGTHS[i])]


def test_rows_are_those_of_their_episode_whatever_the_order_of_files(sound, tmp_path):
    """Written in two files, episodes 2 and 0 in the first, and rows within episode 0 from the
    last to the first."""
    path = Path(shutil.copytree(sound, tmp_path / "data"))
    file = parquet(path / "data")
    old = pq.read_table(file)
    order = [*range(11, 18), *range(5, -1, -1)]
    pq.write_table(old.take(order), file, row_group_size=3)
    pq.write_table(old.slice(6, 5), file.with_name("file-001.parquet"))
    ours, theirs = load_demonstrations(path, SPEC), load_demonstrations(sound, SPEC)
    assert shades(ours) == shades(theirs) == wanted(0, 1, 2)
    assert torch.equal(ours.actions, theirs.actions) and torch.equal(ours.proprio, theirs.proprio)
    assert [(e.start, e.length) for e in ours.episodes] == [(0, 6), (6, 5), (11, 7)]


def record(file: Path, times: list[float], shown: list[int], base: int = 1000) -> None:
    """A video of grey frames ``shown`` at ``times`` (s)."""
    av = pytest.importorskip("av")
    from fractions import Fraction

    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"crf": "1", "g": "10"})
        stream.width, stream.height, stream.pix_fmt = 12, 8, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, base)
        for time, grey in zip(times, shown, strict=True):
            frame = av.VideoFrame.from_ndarray(np.full((8, 12, 3), grey, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(time * base), Fraction(1, base)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def close(data: Any, greys: list[int]) -> bool:
    return max(abs(a - b) for a, b in zip(shades(data), greys, strict=True)) <= 4


@pytest.fixture
def filmed(tmp_path) -> Path:
    pytest.importorskip("av")
    return write(tmp_path / "film", video=True)


def test_pictures_are_paired_by_time_and_not_by_number(filmed):
    """30 Hz under rows of 10 Hz: row t is frame 3 t; episode i begins at frame 3 x (rows before
    it)."""
    file = next((filmed / "videos").rglob("*.mp4"))
    greys = [g for g in wanted(0, 1, 2) for _ in range(3)]
    decoys = [g if n % 3 == 0 else 250 for n, g in enumerate(greys)]
    record(file, [n / 30 for n in range(len(decoys))], decoys, 15360)
    assert close(load_demonstrations(filmed, SPEC), wanted(0, 1, 2))
    assert close(
        load_demonstrations(
            filmed, SPEC, choose=lambda e, _: [None, None, torch.ones(7, dtype=bool)]
        ),
        wanted(2),
    )


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (
            [n / 25 for n in range(60)],
            r"row 1, .*should be at 0.1 s, and the nearest frame is at 0\.(08|12) s",
        ),
        (
            [n / 10 for n in range(18) if n != 8],
            r"episode 1, row 2, .*should be at 0.8 s, and the nearest .* 0.[79] s",
        ),
        (
            [n / 10 for n in range(12)],
            r"episode 2, row 1, .*should be at 1.2 s, and the nearest frame is at 1.1 s",
        ),
        (
            [0.03 + n / 10 for n in range(18)],
            r"episode 0, row 0, .*should be at 0 s, and the nearest frame is at 0.03 s",
        ),
    ],
)
def test_a_video_without_a_frame_at_a_rows_time_is_refused(filmed, times, said):
    record(next((filmed / "videos").rglob("*.mp4")), times, [10] * len(times))
    with pytest.raises(DatasetError, match=said):
        load_demonstrations(filmed, SPEC)


@pytest.mark.parametrize("name", ["gone", "pointer", "cut", "outside", "depth"])
def test_a_bad_video_is_one_clear_error(filmed, name):
    file = next((filmed / "videos").rglob("*.mp4"))
    said = {
        "gone": "missing",
        "pointer": "git-lfs pointer",
        "cut": "decoded",
        "outside": "outside",
        "depth": "8 bits",
    }[name]
    if name == "gone":
        file.unlink()
    elif name == "pointer":
        pointer("videos/**/*.mp4")(filmed)
    elif name == "cut":
        file.write_bytes(file.read_bytes()[:200])
    elif name == "outside":
        told("meta/info.json", video_path="../{video_key}.mp4")(filmed)
    else:
        av = pytest.importorskip("av")
        with av.open(str(file), "w", format="matroska") as container:
            stream = container.add_stream("ffv1", rate=10)
            stream.width, stream.height, stream.pix_fmt = 12, 8, "gray16le"
            for _ in range(18):
                frame = av.VideoFrame.from_ndarray(
                    np.full((8, 12), 40_000, np.uint16), format="gray16le"
                )
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    with pytest.raises(DatasetError, match=said):
        check_dataset(filmed, SPEC)
        load_demonstrations(filmed, SPEC)
    (report,) = check_folder(filmed)
    assert any(said in f.text for f in report.errors)


def test_a_video_that_is_long_is_jumped_through(filmed, monkeypatch):
    """Of 20 s in front of what is wanted only frames near it are decoded."""
    file = next((filmed / "videos").rglob("*.mp4"))
    record(file, [n / 10 for n in range(220)], [*[250] * 202, *wanted(0, 1, 2)], 15360)
    starts = {i: 20.2 + (0, 6, 11)[i] / 10 for i in range(3)}
    table("meta/episodes", every(lambda i, r: {f"videos/{FRONT}/from_timestamp": starts[i]}))(
        filmed
    )
    frames, nearest = [], lerobot_pictures._nearest
    monkeypatch.setattr(
        lerobot_pictures,
        "_nearest",
        lambda decoded, *more: nearest((frames.append(f) or f for f in decoded), *more),
    )
    assert close(load_demonstrations(filmed, SPEC), wanted(0, 1, 2)) and len(frames) < 40


def test_only_what_is_kept_is_decoded(sound, monkeypatch):
    decoded, image = [], lerobot_pictures.image_of
    monkeypatch.setattr(lerobot_pictures, "image_of", lambda *a: decoded.append(a[3]) or image(*a))

    def choose(episodes: Any, actions: torch.Tensor) -> list:
        assert [e.length for e in episodes] == list(LENGTHS) and actions.shape == (18, 2)
        return [None, torch.tensor([True, False, True, False, False]), None]

    data = load_demonstrations(sound, SPEC, choose=choose)
    assert shades(data) == [shade(1, 0), shade(1, 2)] and len(decoded) == 2
    everything = load_demonstrations(sound, SPEC)
    assert torch.equal(data.actions, everything.actions[[6, 8]]) and len(decoded) == 20


# -------------------------------------------------------------------------- success, tasks, lengths
@pytest.mark.parametrize(
    ("value", "flag"),
    [
        (None, None),
        (NAN, None),
        (np.nan, None),
        (True, True),
        (np.False_, False),
        (1, True),
        (0, False),
        (0.0, False),
        (np.int64(1), True),
    ],
)
def test_success_flags_are_read_as_files_hold_them(value, flag):
    assert as_success(value) is flag


@pytest.mark.parametrize("value", ["true", "", 2, 0.5, -1, [True]])
def test_what_is_no_success_flag_is_refused(value):
    with pytest.raises(ValueError, match="neither true nor false"):
        as_success(value)


def test_failures_are_left_out_by_default_and_all_of_them_are_an_error(sound, tmp_path):
    path = Path(shutil.copytree(sound, tmp_path / "data"))
    table("meta/episodes", at(1, success=False))(path)
    data = load_demonstrations(path, SPEC, choose=successes)
    assert (
        shades(data) == wanted(0, 2) and "1 of 3 episodes are marked as failures" in data.notes[0]
    )
    assert len(load_demonstrations(path, SPEC)) == 18
    table("meta/episodes", every(lambda i, r: {"success": 0}))(path)
    with pytest.raises(
        DatasetError, match=r"all 3 demonstrations are marked as failures.*sft\.failures=true"
    ):
        load_demonstrations(path, SPEC, choose=successes)


def test_lerobots_own_success_flag_of_rows_counts(sound, tmp_path):
    path = Path(shutil.copytree(sound, tmp_path / "data"))
    table(
        "meta/episodes", lambda rows: [{k: v for k, v in r.items() if k != "success"} for r in rows]
    )(path)
    assert [e.success for e in load_demonstrations(path, SPEC).episodes] == [None] * 3
    told(
        "meta/info.json",
        **{"features__next-success": {"dtype": "bool", "shape": [1], "names": None}},
    )(path)
    table("data", every(lambda i, r: {"next.success": i in (5, 17)}))(path)
    assert [e.success for e in load_demonstrations(path, SPEC).episodes] == [True, False, True]


def test_instructions_are_compared_with_the_runs(sound, tmp_path):
    with pytest.raises(
        DatasetError,
        match=r"episode 0: 0 of 3 episodes have an instruction of the run's tasks; this one is "
        "'lift the cup', and the run asks for 'fold the towel'",
    ):
        load_demonstrations(sound, SPEC, texts=["fold the towel"])
    path = tmp_path / "two"
    with DemonstrationWriter(path, SPEC) as writer:
        for i, text in enumerate((TEXT, "fold the towel", TEXT)):
            writer.add_episode(
                **episode(i, 4) | {"instruction": text}, success=True, task_id="x", init_state_id=i
            )
    (note,) = check_dataset(path, SPEC, [TEXT]).warnings
    assert (
        note.kind == "other_task"
        and note.episode == "episode 1"
        and note.text.startswith("2 of 3 episodes have")
    )


def test_short_episodes_and_still_numbers_are_said(tmp_path):
    path = tmp_path / "short"
    with DemonstrationWriter(path, SPEC) as writer:
        for i, n in enumerate((3, 1)):
            e = episode(i, n)
            e["actions"][:, 1] = 0.5
            writer.add_episode(**e, success=True, task_id="x", init_state_id=i)
    table("meta/episodes", lambda rows: [*rows, {**rows[0], "episode_index": 2, "length": 0}])(path)
    told("meta/info.json", total_episodes=3)(path)
    report = check_dataset(path, SPEC)
    assert [(f.kind, f.episode, f.key) for f in report.warnings] == [
        ("one_row", "episode 1", ""),
        ("empty", "episode 2", ""),
        ("constant", "", "action"),
    ]
    assert len(load_demonstrations(path, SPEC)) == 4


def spans(*froms_and_tos: tuple[int, int]) -> Callable[[Path], None]:
    ends = [{"dataset_from_index": a, "dataset_to_index": b} for a, b in froms_and_tos]
    return table("meta/episodes", every(lambda i, r: ends[i]))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            spans((-5, 1), (6, 11), (11, 18)),
            "episode 0, dataset_from_index: is -5, and dataset_to_index 1: its 6 rows",
        ),
        (spans((0, 6), (0, 5), (11, 18)), "is 0, and dataset_to_index 5: its 5 rows are 6 to 11"),
        (
            spans((0, 6), (6, 11), (11, 10**12)),
            "episode 2, dataset_from_index: is 11, and dataset_to_index 1000000000000",
        ),
        (
            told("meta/info.json", total_episodes=2),
            "info.json, total_episodes: it says 2, and there are 3",
        ),
        (
            told("meta/info.json", total_frames="x"),
            "info.json, total_frames: it says 'x', and there are 18",
        ),
        (
            told("meta/stats.json", action__min=[NAN, NAN]),
            "stats.json: min and max of action are no two vectors",
        ),
        (
            told("meta/stats.json", action__max="large"),
            "stats.json: min and max of action are no two vectors",
        ),
        (
            told("meta/stats.json", action__max=[1.0]),
            "stats.json: min and max of action are no two vectors",
        ),
        (
            told("meta/stats.json", action__min=[-1.0], action__max=[1.0]),
            "stats.json: min and max of action are no two vectors of 2 finite numbers",
        ),
        (
            told("meta/info.json", data_path="../../etc/f-{file_index:03d}.parquet"),
            "info.json, data_path: it says '../../etc/f-{file_index:03d}.parquet', and no data",
        ),
        (told("meta/info.json", data_path="data/{nope}"), "it says 'data/{nope}', and no data"),
        (told("meta/info.json", data_path=7), "info.json, data_path: it says '7', and no data"),
    ],
)
def test_metadata_that_training_does_not_need_are_warned_of(spoil, said, sound, tmp_path):
    path = Path(shutil.copytree(sound, tmp_path / "data"))
    spoil(path)
    report = check_dataset(path, SPEC)
    assert not report.errors and [said in f.line() for f in report.warnings] == [True]


def test_an_episode_that_changes_its_task_is_warned_of_and_each_text_is_looked_at(sound, tmp_path):
    path = Path(shutil.copytree(sound, tmp_path / "data"))
    table(
        "meta/tasks.parquet",
        lambda rows: [rows[0], {k: 1 if k == "task_index" else "fold it" for k in rows[0]}],
    )(path)
    table("data", at(8, task_index=1))(path)
    report = check_dataset(path, SPEC)
    assert [(f.kind, f.episode, f.row, f.episodes) for f in report.warnings] == [
        ("task_changes", "episode 1", 2, 1)
    ]
    table(
        "meta/tasks.parquet",
        at(
            1,
            **{
                k: ""
                for k in pq.read_table(path / "meta/tasks.parquet").column_names
                if k != "task_index"
            },
        ),
    )(path)
    with pytest.raises(
        DatasetError, match="episode 1, row 2, task_index: the instruction from here on is empty"
    ):
        check_dataset(path, SPEC)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("pose la tasse\u00a0!", ""),
        ("カップを\u3000取る", ""),
        ("می\u200cخواهم", ""),
        ("👩\u200d🍳 cup", ""),
        ("a\r\nb", ""),
        ("a\u202eb", "has the character"),
        ("a\x1b[2J", "has the character"),
        ("a\ud800", "has the character"),
        ("\u00a0\u3000", "is empty"),
        ("\u200d", "is empty"),
    ],
)
def test_instructions_in_any_script_pass_and_what_is_no_text_does_not(text, fault):
    assert bad_instruction(text).startswith(fault) and bool(bad_instruction(text)) == bool(fault)


@pytest.mark.parametrize(
    ("first", "kind", "hz", "found"),
    [
        (0.0, np.float32, 10.0, []),
        (1.7e9, np.float64, 10.0, []),
        (1.7e9, np.float64, 20.0, ["rate"]),
        (0.0, np.float32, 20.0, ["rate"]),
        (2.0**17, np.float32, 10.0, ["coarse_time"]),
        (1.7e9, np.float32, 10.0, ["time"]),
    ],
)
def test_time_stamps_are_as_exact_as_their_type_says(first, kind, hz, found):
    """Rows at 10 Hz; at 2^17 s a float32 is a multiple of 1/64 s."""
    check = DataCheck("x", "x", hz=hz)
    check.add(
        Rows("e", "", {"q": np.zeros((5, 1))}, stamps=(first + np.arange(5) / 10).astype(kind))
    )
    assert [f.kind for f in check.report().findings] == found


def test_a_folder_whose_name_is_no_utf8_and_no_folder_at_all_are_said(sound, tmp_path, capsys):
    name = tmp_path / os.fsdecode(b"d\xe9t\xe9")
    shutil.copytree(sound, name)
    with pytest.raises(
        DatasetError, match="are no UTF-8: give that folder or file a name in UTF-8"
    ):
        load_demonstrations(name, SPEC)
    assert "no UTF-8" in check_folder(name)[0].errors[0].text
    assert main(["data", "check", ""]) == 2 and "is an empty text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (1.0, None),
        (1.00001, None),
        (1.05, "warning"),
        (-1.19, "warning"),
        (1.25, "error"),
        (-2.0, "error"),
    ],
)
def test_how_far_an_action_may_leave_its_bounds(value, level):
    """The range is 2: a tenth of it beyond is refused, rounding is not said."""
    check = DataCheck("x", "x", SPEC)
    check.add(Rows("e", "", {"action": np.array([[0.0, value], [0.1, 0.2]])}))
    assert [f.level for f in check.report().findings] == ([level] if level else [])


# ---------------------------------------------------------------------------------- the other forms
def test_episodes_in_memory_are_checked_alike():
    """What readers of HDF5 files hand over."""

    def each(**changes: Any) -> Any:
        known = {"success": True, "task_id": "x", "init_state_id": 4}
        return dataset_of_episodes(
            [episode(0, 3) | known, episode(1, 3) | known | changes], SPEC, 1, "the file"
        )

    assert len(each()) == 6
    nan = np.array([[0, 0], [0, NAN], [0, 0]], np.float32)
    for changes, said in (
        ({"actions": nan}, r"the file, episode 4, row 1, action\[b\]: is nan"),
        (
            {"actions": nan[:, :1]},
            r"episode 4, action: it has the shape \[3, 1\], and \[3, 2\] is needed",
        ),
        ({"proprio": nan}, r"row 1, observation.state\[b\]: is nan"),
        (
            {"proprio": nan[:2] * 0},
            r"2 rows of observation.state, 3 rows of action|row 1, observation.state",
        ),
        ({"success": "yes"}, "success is 'yes'"),
        ({"instruction": " "}, "instruction is empty"),
        ({"images": {"front": np.zeros((3, 8, 12, 3), np.uint16)}}, "as uint16: colours of 8 bits"),
    ):
        with pytest.raises(DatasetError, match=said):
            each(**changes)
    empty = {name: np.zeros((0, 2), np.float32) for name in ("actions", "proprio")}
    data = each(**empty, images={"front": np.zeros((0, 8, 12, 3), np.uint8)})
    assert (
        len(data) == 3 and len(data.episodes) == 1 and "episode 4: it has no row" in data.notes[0]
    )


def checked(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    """What the command finds, as errors and warnings; its status is that of the errors."""
    status = main(["data", "check", str(path), "--json", *options])
    document = json.loads(capsys.readouterr().out)
    findings = [f for source in document["sources"] for f in source["findings"]]
    assert status == int(any(f["level"] == "error" for f in findings)) and document["sound"] == (
        status == 0
    )
    return findings


def libero(path: Path, spoil: Callable[[Any], None] = lambda data: None) -> Path:
    """Two demonstrations as LIBERO publishes them; ``spoil`` gets the open group."""
    h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'vla-rl[libero]'")
    from test_libero_demos import demonstration

    path.mkdir(parents=True, exist_ok=True)
    with h5py.File(path / "KITCHEN_SCENE3_turn_on_the_stove_demo.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs["macros_image_convention"] = "opengl"
        for i in range(2):
            rows = demonstration(i)
            demo = data.create_group(f"demo_{i}")
            demo.create_dataset("actions", data=rows.pop("actions"))
            for name, values in rows.items():
                demo.create_dataset(f"obs/{name}", data=values)
        spoil(data)
    return path


def put(place: str, change: Callable[[np.ndarray], Any]) -> Callable[[Any], None]:
    """Another array in the second demonstration."""

    def spoil(data: Any) -> None:
        values = np.array(data[f"demo_1/{place}"])
        del data[f"demo_1/{place}"]
        data[f"demo_1/{place}"] = change(values)

    return spoil


def cell(row: int, number: int, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float64)
        values[row, number] = value
        return values

    return change


def remove(place: str) -> Callable[[Any], None]:
    return lambda data: data.__delitem__(f"demo_1/{place}")


def emptied(data: Any) -> None:
    for place in (
        "actions",
        "obs/ee_states",
        "obs/gripper_states",
        "obs/agentview_rgb",
        "obs/eye_in_hand_rgb",
    ):
        put(place, lambda v: v[:0])(data)


def only_one_row(data: Any) -> None:
    for place in (
        "actions",
        "obs/ee_states",
        "obs/gripper_states",
        "obs/agentview_rgb",
        "obs/eye_in_hand_rgb",
    ):
        put(place, lambda v: v[:1])(data)


def lost(data: Any) -> None:
    data["demo_1/rewards"] = np.zeros(9)


# What is said of it by the check, and by the reader of a run (None: it is read, without that
# demonstration).
HDF5: dict[str, tuple[Callable[[Any], None], str, str | None]] = {
    "nan action": (
        put("actions", cell(4, 2, NAN)),
        "is nan",
        r"demo_1, row 4, action\[dz\]: is nan",
    ),
    "inf state": (
        put("obs/ee_states", cell(4, 2, -INF)),
        "is -inf",
        r"demo_1, row 4, observation.state\[z\]: is -inf",
    ),
    "hundredfold": (put("actions", lambda a: 100 * a), "beyond the -1 … 1", "beyond the -1 … 1"),
    "eight wide": (
        put("actions", lambda a: np.pad(a, ((0, 0), (0, 1)))),
        "shape",
        r"shape \[\d, 8\]",
    ),
    "flat actions": (put("actions", lambda a: a[:, 0]), "shape", "shape"),
    "states cut": (
        put("obs/gripper_states", lambda g: g[:4]),
        "one row of each",
        "one row of each",
    ),
    "actions cut": (put("actions", lambda a: a[:4]), "rows of action", "rows of action"),
    "depth": (
        put("obs/agentview_rgb", lambda p: p.astype(np.uint16) * 100),
        "of uint16",
        "of uint16 for 9 actions",
    ),
    "float pictures": (put("obs/agentview_rgb", lambda p: p / 255.0), "of float64", "of float64"),
    "no wrist": (
        remove("obs/eye_in_hand_rgb"),
        "",
        r"no pictures of camera robot0_eye_in_hand.*env\.cameras",
    ),
    "robomimic": (remove("obs/ee_states"), "none of LIBERO's own", "none of LIBERO's own"),
    "empty": (emptied, "it has no row", None),
    "one row": (only_one_row, "a single row", None),
    "failed": (lost, "1 of 2 episodes are marked as failures", None),
    "flagged": (
        lambda data: data["demo_1"].attrs.__setitem__("success", False),
        "are marked as failures",
        None,
    ),
    "flag of words": (
        lambda data: data["demo_1"].attrs.__setitem__("success", "yes"),
        "neither true",
        "neither true",
    ),
}


@pytest.mark.parametrize("name", HDF5)
def test_contents_of_libero_files(name, tmp_path, capsys):
    from test_libero_demos import read

    spoil, found, refused = HDF5[name]
    path = libero(tmp_path / "suite", spoil)
    assert not found or any(found in f["text"] for f in checked(path, capsys))
    if refused is None:
        assert {e.init_state_id for e in read(path).episodes} == {0}
        return
    with pytest.raises(UserError, match=refused) as caught:
        read(path)
    assert "demo_1" in str(caught.value)


def test_files_of_libero_that_are_not_there(tmp_path, capsys):
    from test_libero_demos import read

    path = libero(tmp_path / "suite")
    assert not checked(path, capsys)
    pointer("*.hdf5")(path)
    assert "git-lfs pointer" in checked(path, capsys)[0]["text"]
    with pytest.raises(DatasetError, match="git-lfs pointer"):
        read(path)
    next(path.glob("*.hdf5")).write_bytes(b"nothing")
    assert checked(path, capsys)[0]["kind"] == "unreadable"


def test_all_demonstrations_of_a_file_without_a_row_are_one_error(tmp_path):
    from test_libero_demos import read

    def both(data: Any) -> None:
        emptied(data)
        del data["demo_0"]

    with pytest.raises(DatasetError, match="no demonstration to read"):
        read(libero(tmp_path / "suite", both))


@pytest.mark.parametrize("layout", ["older", "main"])
def test_contents_of_robotwin_files(layout, tmp_path, capsys):
    from test_robotwin import write_published

    h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'vla-rl[libero]'")
    path = write_published(tmp_path / "task", layout=layout)
    assert not checked(path, capsys)
    with h5py.File(sorted((path / "data").glob("*.hdf5"))[1], "r+") as file:
        if layout == "older":
            file["joint_action/vector"][2, 1] = NAN
        else:
            for group, row in (("state", 2), ("action", 1)):
                file[f"{group}/left_ee_joint_states"][row] = NAN
    (found,) = [
        f for f in checked(path, capsys) if f["level"] == "error" and f["key"].startswith("obs")
    ] or [None]
    assert found is None or (found["row"], found["episode"]) == (
        2,
        sorted((path / "data").glob("*.hdf5"))[1].stem,
    )
    assert any(f["level"] == "error" for f in checked(path, capsys))


def journal(folder: Path, steps: int = 4, **changes: Any) -> None:
    """A closed journal of a robot session; ``changes``: fields of its third tick."""
    import typing

    from real.journal import TICK_FIELDS, JournalWriter
    from real.messages import State
    from real.recorder import jpeg

    kinds = {
        name: kind for name, kind in typing.get_type_hints(State).items() if name in TICK_FIELDS
    }
    writer = JournalWriter(
        folder / "journal",
        0,
        {"session": "s", "embodiment": SPEC.to_dict(), "task": f"cup/0: {TEXT}"},
    )
    writer._write(
        ["frame", "front", 1, 1, 0.0, 0.0, [8, 12, 3], jpeg(np.zeros((8, 12, 3), np.uint8))]
    )
    for i in range(steps):
        tick = {
            name: kind() if kind in (float, int, bool, str) else [] for name, kind in kinds.items()
        }
        tick |= {"step": i, "step_done": True, "stamp": i / 10}
        tick |= {"sent": [0.1 * i, -0.1 * i], "proprio": [0.01 * i, 0.02 * i]} | (
            changes if i == 2 else {}
        )
        writer._write(["tick", *tick.values()])
    writer._write(["event", "label", "success", "operator", 1.0, 1.0])
    writer.close("operator")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"sent": [0.1, NAN]}, "sent of a tick is [0.1, nan]"),
        ({"sent": [0.1, 40.0]}, "action[b]: is 40, beyond the -1 … 1 of the robot"),
        ({"sent": [0.1]}, "sent of a tick has 1 numbers, and 2 belong to the robot"),
        ({"proprio": [INF, 0.0]}, "proprio of a tick is [inf, 0.0]"),
        ({"proprio": "xy"}, ""),
        ({"stamp": 0.05}, "timestamp: is 0.05 s after 0.1 s"),
        ({"stamp": None}, ""),
    ],
)
def test_contents_of_journals(changes, said, tmp_path, capsys):
    journal(tmp_path / "session", **changes)
    errors = [f for f in checked(tmp_path / "session", capsys) if f["level"] == "error"]
    assert bool(errors) == (said is not None)
    if said:
        assert (
            said in f"{errors[0]['key']}: {errors[0]['text']}"
            and errors[0]["episode"] == "episode_000000.vrj"
        )


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("actions", NAN, r"row 0, action\[x\]: is nan"),
        ("proposed", NAN, r"row 0, proposed\[0\]: is nan"),
        ("valid", 0, "decision whose valid control steps are not its first ones"),
        ("actions", 0.2, r"row 0, action\[x\]: is 0.2, beyond the -0.05 … 0.05"),
        ("proprio", INF, r"row 0, observation.state\[p\]: is inf"),
        ("rewards", 3e38, r"row 0, rewards\[0\]: is 3e\+38, which nobody's number is"),
    ],
)
def test_contents_of_replays(place, value, said, tmp_path, capsys, monkeypatch):
    """As a damaged writer may leave them: every checksum is right."""
    from test_replay_store import SPEC as ROBOT
    from test_replay_store import episode as trajectory

    from vla_rl.data import replay as replays

    monkeypatch.setattr(replays, "check_episode", lambda *a: None)
    replay = replays.Replay(tmp_path / "run" / "replay", embodiment=ROBOT)
    for i in range(3):
        e = trajectory(i)
        rewards = torch.zeros(len(e))
        if i == 1:
            known = {"proprio": e.observations.proprio, "rewards": rewards}
            values = known[place] if place in known else getattr(e, place)
            values.view(-1)[0] = value
        replay.add(e, rewards, "online")
    del replay
    found = [f for f in checked(tmp_path / "run", capsys) if f["level"] == "error"]
    assert len(found) == 1 and (found[0]["episode"] or found[0]["text"][:17]) in (
        "episode 1",
        "replay: episode 1",
    )
    with pytest.raises(UserError, match=rf"episode 1.*{said}"):
        check_recorded([str(tmp_path / "run")], tmp_path / "mine", ROBOT)


# ---------------------------------------------------------------------------------- what a run does
RUN = [
    "~run",
    "env=toy",
    "slots.workers=0",
    "policy=nano_toy",
    "critic=none",
    "phases=[sft]",
    "sft.updates=1",
    "sft.batch_size=4",
    "sft.validation_episodes=0",
]


def toy_data(
    path: Path, texts: tuple[str, ...], successes: tuple[bool, ...], scale: float = 1.0
) -> Path:
    from sim.toy import ToyReach

    toy = ToyReach()
    camera = toy.embodiment.cameras[0]
    p, a = toy.embodiment.proprio_dim, toy.embodiment.action_dim
    with DemonstrationWriter(path, toy.embodiment) as writer:
        for i, (text, success) in enumerate(zip(texts, successes, strict=True)):
            rng = np.random.default_rng(i)
            pictures = rng.integers(0, 256, (6, camera.height, camera.width, 3), dtype=np.uint8)
            proprio, actions = (rng.uniform(-0.1, 0.1, (6, n)) for n in (p, a))
            writer.add_episode(
                {camera.name: pictures},
                proprio,
                actions,
                text,
                success=success,
                task_id="reach_red",
                init_state_id=i,
            )
    if scale != 1.0:
        table("data", every(lambda i, r: {"action": [scale * v for v in r["action"]]}))(path)
    return path


@pytest.fixture(scope="module")
def red() -> str:
    from sim.toy import ToyReach

    return ToyReach().tasks[0].instructions[0]


def test_sft_learns_from_successes_alone_unless_failures_are_asked_for(red, tmp_path):
    from sim.toy import ToyReach
    from vla_rl.assembly.context import imitated, split_demonstrations

    data, said = toy_data(tmp_path / "data", (red, red, red), (True, False, True)), []
    for failures, numbers in ((False, [0, 2]), (True, [0, 1, 2])):
        config = RunConfig(
            dataset=str(data), env_type="toy", policy=SimpleNamespace(chunk_length=2)
        )
        config.sft = dataclasses.replace(config.sft, failures=failures, validation_episodes=0)
        env = SimpleNamespace(embodiment=ToyReach().embodiment)
        run = SimpleNamespace(
            config=config,
            env=env,
            dir=tmp_path,
            instructions=[red],
            tell=said.extend,
            progress=SimpleNamespace(say=said.append),
        )
        assert [e.init_state_id for e in imitated(run)[0].episodes] == numbers
        everything, _ = split_demonstrations(run, failures=True)  # for a reward
        assert [e.success for e in everything.episodes] == [True, False, True]
    assert (
        f"{data}: 1 of 3 episodes are marked as failures. They are not imitated unless "
        "sft.failures=true" in said[0]
    )


@pytest.mark.slow
def test_a_run_says_once_what_is_doubtful_in_its_data(red, tmp_path, capsys):
    data = toy_data(tmp_path / "data", (red, red, "fold it"), (True, False, True))
    assert main(["train", *RUN, "name=x", f"output_dir={tmp_path}", f"dataset={data}"]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("1 of 3 episodes are marked as failures")
        == out.count("2 of 3 episodes have an instruction")
        == 1
    )


@pytest.mark.parametrize(
    ("texts", "successes", "scale", "said"),
    [
        (
            ("fold the towel",) * 2,
            (True, True),
            1.0,
            "0 of 2 episodes have an instruction of the run's tasks",
        ),
        (("fold the towel", "x"), (True, True), 100.0, "beyond the"),
        (("red", "red"), (False, False), 1.0, "marked as failures"),
    ],
)
def test_a_run_refuses_nonsense_before_its_first_phase(
    texts, successes, scale, said, red, tmp_path, capsys
):
    texts = tuple(red if text == "red" else text for text in texts)
    data = toy_data(tmp_path / "data", texts, successes, scale)
    assert main(["train", *RUN, "name=x", f"output_dir={tmp_path}", f"dataset={data}"]) == 2
    error = capsys.readouterr().err
    assert (
        said in error and "Traceback" not in error and not (tmp_path / "x" / "checkpoints").exists()
    )
    status = main(["data", "check", str(data), "env=toy", "tasks=[reach_red]"])
    out = capsys.readouterr().out
    assert said in out and status == int(said != "marked as failures"), (
        "failures alone may teach a reward"
    )


def test_reward_fitting_reads_what_it_needs_and_says_what_failed(red, tmp_path, monkeypatch):
    from vla_rl.assembly.sources import load_source

    data = toy_data(tmp_path / "data", (red,) * 4, (True, False, True, True))
    decoded, image = [], lerobot_pictures.image_of
    monkeypatch.setattr(lerobot_pictures, "image_of", lambda *a: decoded.append(a[3]) or image(*a))
    source = load_source(data, limit=2)
    assert len(source.trajectories) == 2 and len(decoded) == 12
    assert "1 of 4 episodes are marked as failures" in source.what
    assert [t.success for t in load_source(data).trajectories] == [True, False, True, True], (
        "a reward learns from failures"
    )
    table("data", at(8, action=[NAN, 0.0]))(data)
    with pytest.raises(DatasetError, match=r"episode 1, row 2, action\[.*\]: is nan"):
        load_source(data)
