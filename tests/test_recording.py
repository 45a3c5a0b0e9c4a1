"""``env=dataset``: a robot that only its recording knows, from data to a policy that is judged
and driven."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.cli import main
from vla_rl.config.recording import RecordingConfig
from vla_rl.data import frames as frames_module
from vla_rl.data.demonstrations import DatasetSampler, DemonstrationDataset, DemonstrationEpisode
from vla_rl.data.frames import OnDisk
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.data.recording import bounds, load_whoever, open_recording
from vla_rl.data.trajectories import demonstration_trajectories
from vla_rl.errors import ConfigError, EmbodimentMismatch, UserError
from vla_rl.evaluation.action_error import action_errors, table, verdict
from vla_rl.run.action_phase import _said
from vla_rl.types import ActionChunk, CameraSpec, EmbodimentSpec, PolicyOutput

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL.Image")

JOINTS = ("shoulder.pos", "gripper.pos")
SPEC = EmbodimentSpec(
    name="nobody",
    action_names=JOINTS,
    action_units=("deg", "deg"),
    action_low=(-90.0, 0.0),
    action_high=(90.0, 100.0),
    frame="joints",
    rotation="none",
    gripper="none",
    control_hz=30.0,
    cameras=(CameraSpec("front", 16, 16), CameraSpec("wrist", 16, 16)),
    proprio_names=JOINTS,
)
TEXTS = ("touch the blob", "point at it")
LENGTHS = (14, 12, 13, 14, 12, 13, 14, 12)
SMALL = [
    "policy=nano_toy",
    "threads=1",
    "wandb=false",
    "sft.updates=12",
    "sft.augment.shift=0",
    "sft.batch_size=8",
]


def episode(i: int, length: int) -> dict[str, Any]:
    """Joint 0 rises by 2 degrees a row from 10 i, one row ahead of the state; pictures tell
    episode and row."""
    t = np.arange(length)
    state = np.stack([10.0 * i + 2.0 * t, 50.0 + 0 * t], -1)
    shades = np.stack([np.full((16, 16, 3), 20 * i + 3 * k, np.uint8) for k in t])
    actions = state + np.array([2.0, 0.0])
    images = {"front": shades, "wrist": 255 - shades}
    return {
        "images": images,
        "proprio": state.astype(np.float32),
        "actions": actions.astype(np.float32),
    }


def write(path: Path, video: bool = False, lengths: tuple[int, ...] = LENGTHS) -> Path:
    with DemonstrationWriter(path, SPEC, video=video) as writer:
        for i, n in enumerate(lengths):
            writer.add_episode(
                **episode(i, n),
                instruction=TEXTS[i % 2],
                success=True,
                task_id=f"t{i % 2}",
                init_state_id=i,
            )
    return path


def helped(path: Path, column: str = "control", lengths: tuple[int, ...] = LENGTHS) -> Path:
    """A session as it is exported: a person chose every third row."""
    with DemonstrationWriter(path, SPEC, extra={column: ("is_human", "gate")}) as writer:
        for i, n in enumerate(lengths):
            chose = np.stack([np.arange(n) % 3 == 0, np.zeros(n)], 1).astype(np.float32)
            writer.add_episode(
                **episode(i, n),
                instruction=TEXTS[i % 2],
                success=True,
                task_id=f"t{i % 2}",
                init_state_id=i,
                extra={column: chose},
            )
    return path


def foreign(path: Path, names: dict[str, str] | None = None) -> Path:
    """As another tool would write it: nothing of ours, features under other ``names``."""
    names = names or {}
    (path / "meta" / "embodiment.json").unlink()
    for file in path.glob("meta/episodes/*/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(
            table.drop_columns(
                [c for c in ("success", "task_id", "init_state_id") if c in table.column_names]
            ),
            file,
        )
    for file in path.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([names.get(c, c) for c in table.column_names]), file)
    info = json.loads((path / "meta" / "info.json").read_text())
    info["features"] = {names.get(key, key): feature for key, feature in info["features"].items()}
    info["robot_type"] = "unknown"
    (path / "meta" / "info.json").write_text(json.dumps(info))
    return path


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    return foreign(write(tmp_path_factory.mktemp("theirs") / "towels"))


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("ours") / "data")


def opened(path: Path, **options: Any):
    return open_recording(path, RecordingConfig(**options))


# --------------------------------------------------------------------------------------- what it is
def test_a_dataset_of_another_tool_describes_its_robot(theirs):
    found = opened(theirs)
    spec = found.embodiment
    assert (spec.name, spec.action_names, spec.proprio_names, spec.control_hz) == (
        "towels",
        JOINTS,
        JOINTS,
        30.0,
    )
    assert spec.cameras == SPEC.cameras and spec.action_units == ("as recorded",) * 2
    assert spec.frame == spec.rotation == spec.gripper == "other: as recorded in towels"
    # actions of joint 0 go from 2 to 70 + 2 * 12 + ... : its longest reach is episode 6 (14 rows):
    # 60 + 26 + 2
    highest = max(10.0 * i + 2.0 * n for i, n in enumerate(LENGTHS))
    wider = 0.1 * (highest - 2.0)
    assert np.allclose([spec.action_low[0], spec.action_high[0]], [2.0 - wider, highest + wider])
    # a constant 50, wider by a tenth of it
    assert np.allclose([spec.action_low[1], spec.action_high[1]], [45.0, 55.0])
    assert [(t.task_id, t.instructions, t.horizon) for t in found.tasks] == [
        (text, (text,), 14) for text in TEXTS
    ]
    assert "10% of their range" in found.said()


def test_what_is_told_takes_the_place_of_as_recorded(theirs):
    spec = opened(
        theirs,
        name="so101",
        frame="joints",
        rotation="none",
        gripper="none",
        units=["deg"],
        margin=0.0,
    ).embodiment
    assert (spec.name, spec.frame, spec.rotation, spec.gripper) == (
        "so101",
        "joints",
        "none",
        "none",
    )
    assert spec.action_units == ("deg", "deg") and spec.action_low[0] == 2.0
    with pytest.raises(ConfigError, match=r"env.units has 3 for the 2 numbers"):
        opened(theirs, units=["deg", "deg", "mm"])


def test_bounds_by_hand():
    low, high = bounds(np.array([[0.0, -4.0, 0.0], [10.0, -4.0, 0.0]]), 0.25)
    assert low == (-2.5, -5.0, -0.00025) and high == (12.5, -3.0, 0.00025)


def test_ours_says_which_robot_it_is_of(ours):
    found = opened(ours)
    assert found.embodiment == SPEC and found.margin is None and "no file says" not in found.said()
    assert [t.task_id for t in found.tasks] == ["t0", "t1"]
    one = opened(ours, cameras=["wrist"])
    assert one.embodiment.camera_names == ("wrist",) and list(
        one.demonstrations(2, ["t0"]).images
    ) == ["wrist"]


def test_a_foreign_recording_of_a_known_robot(ours, theirs, tmp_path):
    """A dataset, or a checkpoint's file, says which robot the foreign recording is of, bounds
    and all."""
    assert opened(theirs, embodiment=str(ours)).embodiment == SPEC
    other = foreign(
        write(tmp_path / "other"), {"observation.images.front": "observation.images.cam_high"}
    )
    with pytest.raises(
        DatasetError,
        match=r"cameras cam_high, wrist, and the robot nobody has 'front': say which it is",
    ):
        opened(other, embodiment=str(ours))
    renamed = opened(other, embodiment=str(ours), rename={"observation.images.cam_high": "front"})
    assert renamed.embodiment == SPEC
    with pytest.raises(ConfigError, match=r"has no embodiment.json: name a dataset or checkpoint"):
        opened(theirs, embodiment=str(theirs))
    other = foreign(write(tmp_path / "another"))
    info = json.loads((other / "meta" / "info.json").read_text())
    info["features"]["action"]["names"] = ["hip", "knee"]
    (other / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(
        EmbodimentMismatch,
        match=r"action names: expected \['shoulder.pos', 'gripper.pos'\], the dataset has",
    ):
        opened(other, embodiment=str(ours))


@pytest.mark.parametrize(
    "names",
    [
        {
            "observation.state": "state",
            "action": "actions",
            "observation.images.front": "image",
            "observation.images.wrist": "wrist_image",
        },
        {"observation.images.front": "observation.image"},
    ],
)
def test_names_that_other_tools_use(tmp_path, names):
    data = foreign(write(tmp_path / "d"), names)
    found = opened(data)
    known = {"observation.images.front": "front", "observation.images.wrist": "wrist"}
    expected = [names.get(key, name).removeprefix("observation.") for key, name in known.items()]
    assert list(found.embodiment.camera_names) == expected
    shown = found.demonstrations(3, TEXTS)
    plain = load_demonstrations(write(tmp_path / "plain"), SPEC, 3)
    assert torch.equal(shown.actions, plain.actions) and torch.equal(shown.proprio, plain.proprio)
    assert torch.equal(shown.images[expected[0]], plain.images["front"])
    assert len(load_whoever(data)) == sum(LENGTHS)
    assert main(["data", "show", str(data)]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"cameras": ["top"]},
            r"env.cameras has 'top', and .* has front, wrist: name those, or give one that name with",
        ),
        (
            {"rename": {"observation.images.top": "front"}},
            r"env.rename has 'observation.images.top', and .* has only action,",
        ),
        (
            {"rename": {"observation.images.wrist": "front"}},
            r"two cameras 'front', .*front and .*wrist: give one another",
        ),
        (
            {"control_hz": 7.0},
            r"was recorded at 30 Hz, whose rows make no 7 Hz: set env.control_hz to 30, 15, 10",
        ),
        ({"control_hz": 60.0}, r"was recorded at 30 Hz, whose rows make no 60 Hz"),
        ({"embodiment": "nowhere"}, r"env.embodiment=nowhere has no embodiment.json"),
        (
            {"rename": {"action": "observation.state"}},
            r"action of .* would be both state and action",
        ),
        (
            {"rename": {"timestamp": "action"}},
            r"timestamp of .* would be what the format itself needs",
        ),
        ({"rename": {"shoulder.pos": " "}}, r"env.rename gives 'shoulder.pos' an empty name"),
        (
            {"rename": {"shoulder.pos": "gripper.pos"}},
            r"two numbers of observation.state the name 'gripper.pos'",
        ),
    ],
)
def test_what_is_not_there_is_one_clear_error(theirs, options, said):
    with pytest.raises(UserError, match=said):
        opened(theirs, **options)


@pytest.mark.parametrize("key", ["observation.state", "action"])
def test_a_feature_that_is_missing_is_asked_for(tmp_path, key):
    data = foreign(write(tmp_path / "d"), {key: "joints"})
    with pytest.raises(
        DatasetError,
        match=rf"has no feature {key}, only .*joints.*: say which it is with 'env.rename=",
    ):
        opened(data)
    assert opened(data, rename={"joints": key}).embodiment.action_dim == 2


@pytest.mark.parametrize(
    ("key", "shape", "said"),
    [
        ("action", [7], r"action has 2 numbers a row, and meta/info.json says \[7\]"),
        ("action", None, r"says the shape None of action, and 1 sizes above 0 are needed"),
        (
            "observation.images.front",
            [3],
            r"says the shape \[3\] of observation.images.front, and 3",
        ),
        ("observation.images.front", ["a", 2, 3], r"says the shape \['a', 2, 3\] of"),
    ],
)
def test_a_shape_that_is_none_is_said(tmp_path, key, shape, said):
    data = foreign(write(tmp_path / "d"))
    info = json.loads((data / "meta" / "info.json").read_text())
    info["features"][key]["shape"] = shape
    (data / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(DatasetError, match=said):
        opened(data)


def test_a_policy_that_looks_needs_a_camera(tmp_path, capsys):
    data = foreign(write(tmp_path / "d"))
    info = json.loads((data / "meta" / "info.json").read_text())
    for name in ("front", "wrist"):
        info["features"][f"observation.images.{name}"]["info"] = {"is_depth_map": True}
    (data / "meta" / "info.json").write_text(json.dumps(info))
    run = ["train", "run=sft", f"dataset={data}", *SMALL, f"output_dir={tmp_path}", "name=blind"]
    assert main(run) == 2
    assert (
        "d has no camera, and this policy looks at pictures: use policy=small"
        in capsys.readouterr().err
    )
    assert main([*run, "policy=small"]) == 0


def test_a_video_needs_a_decoder(tmp_path, monkeypatch):
    pytest.importorskip("av")
    data = foreign(write(tmp_path / "d", video=True))
    assert opened(data).embodiment.camera_names == ("front", "wrist")
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "av" else find(name, *a)
    )
    with pytest.raises(UserError, match=r"decoding the videos of .* needs the package 'av'"):
        opened(data)


# --------------------------------------------------------------------------------------------- rate
def test_every_third_row_has_the_last_of_three_goals(theirs):
    found = opened(theirs, control_hz=10.0)
    assert found.embodiment.control_hz == 10.0 and found.rows.stride == 3
    data = found.demonstrations(2, TEXTS)
    # an episode of 14 rows: begun at rows 0, 3, 6, 9, 12; the goals of rows 2, 5, 8, 11, 13
    assert data.episodes[0].length == 5
    assert data.proprio[:5, 0].tolist() == [0.0, 6.0, 12.0, 18.0, 24.0]
    assert data.actions[:5, 0].tolist() == [6.0, 12.0, 18.0, 24.0, 28.0]
    assert data.images["front"][:5, 0, 0, 0].tolist() == [0, 9, 18, 27, 36]
    assert found.rows.where(6) == "episode 1, row 3"


def test_rows_of_moves_are_not_left_out_unless_they_are_goals(tmp_path):
    data = foreign(write(tmp_path / "d"))
    info = json.loads((data / "meta" / "info.json").read_text())
    info["features"]["action"]["names"] = ["dx", "gripper"]
    (data / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(
        ConfigError,
        match=r"leaves out 2 of 3 actions, which is right for goals and loses moves or speeds",
    ):
        opened(data, control_hz=10.0)
    assert opened(data, control_hz=10.0, goals=True).rows.stride == 3


def test_a_known_robots_rate_is_taken(ours, theirs, tmp_path):
    slow = json.loads((ours / "meta" / "embodiment.json").read_text()) | {"control_hz": 15.0}
    (tmp_path / "embodiment.json").write_text(json.dumps(slow))
    found = opened(theirs, embodiment=str(tmp_path / "embodiment.json"))
    assert (found.embodiment.control_hz, found.rows.stride) == (15.0, 2)


# -------------------------------------------------------------------------------------- on the disk
@pytest.mark.parametrize("video", [False, True])
def test_pictures_on_the_disk_are_those_in_memory(tmp_path, video, monkeypatch):
    if video:
        pytest.importorskip("av")
    data = write(tmp_path / "d", video)
    held = load_demonstrations(data, SPEC, 4)
    size = 16 * 16 * 3
    stored = load_demonstrations(data, SPEC, 4, disk=OnDisk(tmp_path, 5 * size))
    assert (
        stored.stays_on_disk
        and not held.stays_on_disk
        and stored.images["front"].shape == held.images["front"].shape
    )
    for each in (held.split(2, 0.5, 3), stored.split(2, 0.5, 3)):
        assert each[1] is not None
    (some, _), (other, _) = held.split(2, 0.5, 3), stored.split(2, 0.5, 3)
    index = torch.tensor([5, 5, 40, 3, 41, 0])
    for name in some.images:
        assert torch.equal(some.images[name][index], other.images[name][index])
    one, two = DatasetSampler(some, 8, 1, 0.2), DatasetSampler(other, 8, 1, 0.2)
    for _ in range(6):
        _alike(one.next_batch(), two.next_batch())
    state = two.state_dict()
    assert torch.equal(state["generator"], one.state_dict()["generator"]), (
        "what was drawn ahead is not counted"
    )
    third = DatasetSampler(other, 8, 9, 0.2)
    third.next_batch()
    third.load_state_dict(state)
    _alike(third.next_batch(), one.next_batch())
    assert not list(tmp_path.glob("tmp*")), "what was put aside has no name"


def _alike(a: Any, b: Any) -> None:
    assert (
        torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) and a[0].instruction == b[0].instruction
    )
    assert all(torch.equal(a[0].images[name], b[0].images[name]) for name in a[0].images)


def test_what_is_kept_in_memory_is_bounded_and_not_decoded_again(tmp_path, monkeypatch):
    size = 16 * 16 * 3
    data = load_demonstrations(write(tmp_path / "d"), SPEC, 1, disk=OnDisk(tmp_path, 3 * size))
    decoded: list[int] = []
    read = frames_module.ImageReader.read
    monkeypatch.setattr(
        frames_module.ImageReader,
        "read",
        lambda self, rows, out: decoded.extend(rows.tolist()) or read(self, rows, out),
    )
    for _ in range(3):
        data.at(torch.arange(4))
    assert data.images["front"]._kept._bytes == 3 * size
    assert len(decoded) == 8 + 5 + 5, "of eight pictures three are kept"


def test_small_datasets_are_held_in_memory(tmp_path):
    whole = sum(LENGTHS) * 2 * 16 * 16 * 3
    data = write(tmp_path / "d")
    assert not load_demonstrations(data, SPEC, disk=OnDisk(tmp_path, whole)).stays_on_disk
    assert load_demonstrations(data, SPEC, disk=OnDisk(tmp_path, whole - 1)).stays_on_disk


def test_a_damaged_picture_is_named_when_it_is_drawn(tmp_path):
    data = write(tmp_path / "d")
    (file,) = data.glob("data/*/*.parquet")
    rows = pq.read_table(file).to_pylist()
    rows[15]["observation.images.wrist"] = {"bytes": b"no picture", "path": None}
    pq.write_table(pa.Table.from_pylist(rows), file)
    stored = load_demonstrations(data, SPEC, disk=OnDisk(tmp_path, 0))
    stored.at(torch.tensor([14]))
    with pytest.raises(
        DatasetError, match=r"episode 1, row 1, the picture of camera wrist cannot be read"
    ):
        stored.at(torch.tensor([15]))


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    data = write(tmp_path / "d")
    monkeypatch.setattr(frames_module, "_SPARE", 1 << 60)
    with pytest.raises(UserError, match=r"GB free, and the pictures of .* take up to"):
        load_demonstrations(data, SPEC, disk=OnDisk(tmp_path, 0))


# ------------------------------------------------------------------------------------------- errors
class Told:
    """Acts as it is told: (observation) → actions [b h a]."""

    def __init__(self, act: Any, valid: int = 2) -> None:
        self._act, self._valid = act, valid

    def act(
        self, observation: Any, *, deterministic: bool = False, seeds: Any = None
    ) -> PolicyOutput:
        assert deterministic
        actions = self._act(observation).float()
        valid = torch.zeros(actions.shape[:2], dtype=torch.bool)
        valid[:, : self._valid] = True
        return PolicyOutput(ActionChunk(actions, valid), torch.zeros(len(observation)), {})


def two_episodes() -> DemonstrationDataset:
    """Joint 0 rises by 2 a row, its goal is one row ahead; the gripper stands still."""
    from vla_rl.data.demonstrations import dataset_of_episodes

    episodes = [
        episode(i, 5)
        | {"instruction": "up", "success": None, "task_id": None, "init_state_id": None}
        for i in (0, 1)
    ]
    return dataset_of_episodes(episodes, SPEC, chunk_length=2)


def test_action_errors_by_hand():
    data = two_episodes()
    # goals of rows t and t + 1 are 2 t + 2 and 2 t + 4 above 10 i: one that is off by 1 and 3
    off = torch.tensor([1.0, 3.0])
    perfect = Told(
        lambda o: torch.stack(
            [
                torch.stack([o.proprio[:, 0] + 2 * (h + 1) + off[h], o.proprio[:, 1]], -1)
                for h in (0, 1)
            ],
            1,
        )
    )
    found = action_errors(perfect, data, data.actions)
    # decisions at rows 1 … 4 of both; at row 4 only the first action is there: 8 of step 0, 6 of
    # step 1
    assert found["decisions"] == 8 and found["control_steps"] == 10
    shoulder, gripper = found["joints"]
    assert shoulder["policy"] == pytest.approx((8 * 1 + 6 * 3) / 14)
    # where it is, 2 and 4 behind the goals
    assert shoulder["hold"] == pytest.approx((8 * 2 + 6 * 4) / 14)
    # the goal before is where it is
    assert shoulder["repeat"] == pytest.approx((8 * 2 + 6 * 4) / 14)
    spread = float(data.actions[:, 0].std(unbiased=False))
    assert shoulder["spread"] == pytest.approx(spread) and gripper["policy"] == 0.0
    assert [s["policy"] for s in found["steps"]] == pytest.approx([1 / spread, 3 / spread]), (
        "the gripper does not move"
    )
    assert np.allclose(found["table"], [[1.0, 0.0], [3.0, 0.0]])
    mean = float(data.actions[:, 0].mean())
    first = torch.cat([data.actions[1:5, 0], data.actions[6:10, 0]])
    second = torch.cat([data.actions[2:5, 0], data.actions[7:10, 0]])
    guessed = float(((first - mean).abs().sum() + (second - mean).abs().sum()) / 14)
    assert shoulder["mean"] == pytest.approx(guessed, rel=1e-5)
    assert found["best_guess"] in ("hold", "repeat") and [e["rows"] for e in found["episodes"]] == [
        4,
        4,
    ]
    assert verdict(found).startswith(
        "35% nearer than a guess"
    ) and "nearer in 2 of 2 held-out episodes" in verdict(found)
    assert found["traces"]["recorded"][0] == [2.0, 50.0] and found["traces"]["predicted"][0] == [
        3.0,
        50.0,
    ]
    assert "shoulder.pos" in table(found)


def test_a_policy_that_stands_still_is_no_better_than_a_guess():
    data = two_episodes()
    still = Told(lambda o: o.proprio[:, None].expand(-1, 2, -1))
    found = action_errors(still, data, data.actions)
    assert found["overall"]["policy"] == pytest.approx(found["overall"]["hold"])
    assert verdict(found).startswith("no nearer than a guess")


def test_rows_are_thinned_evenly_and_what_was_not_told_does_not_count():
    data = two_episodes()
    # a chunk of one step, of two asked for
    one = Told(lambda o: o.proprio[:, None] + torch.tensor([2.0, 0.0]), valid=1)
    found = action_errors(one, data, data.actions, rows=3)
    assert (
        found["decisions"] == 3
        and found["joints"][0]["policy"] == 0.0
        and found["steps"][1]["policy"] == 0.0
    )


def test_held_out_episodes_are_drawn_by_seed():
    data = in_memory(LENGTHS)
    train, held = data.split(2, 0.2, 0)
    assert held is not None and len(held.episodes) == 2 and len(train.episodes) == 6, (
        "one of four of each task"
    )
    drawn = {
        float(part.actions[0, 0])
        for seed in range(8)
        if (part := data.split(2, 0.2, seed)[1]) is not None
    }
    assert len(drawn) > 1, "another seed draws others"
    assert in_memory((5, 5)).split(2, 0.2, 0)[1] is None, "of one episode a task none can be spared"


def in_memory(lengths: tuple[int, ...]) -> DemonstrationDataset:
    from vla_rl.data.demonstrations import dataset_of_episodes

    known = {"success": None, "task_id": None, "init_state_id": None}
    return dataset_of_episodes(
        [episode(i, n) | {"instruction": TEXTS[i % 2], **known} for i, n in enumerate(lengths)],
        SPEC,
    )


# --------------------------------------------------------------------------------------------- runs
def test_sft_on_a_recording_and_its_page(theirs, tmp_path, capsys):
    run = ["train", "run=sft", f"dataset={theirs}", *SMALL, f"output_dir={tmp_path}", "name=mine"]
    assert main(run) == 0
    said = capsys.readouterr().out
    assert "towels: 2 numbers of action" in said and "10% of their range" in said
    found = json.loads((tmp_path / "mine" / "actions.json").read_text())["sft"]
    assert (
        found["held_out"]
        == "measured on 2 whole episodes that it was not trained on, drawn by seed=0; 6 others"
    )
    assert (
        set(found["input_use"]) >= {"loss", "image_use", "image_use/front"}
        and len(found["joints"]) == 2
    )
    assert all(math.isfinite(j["policy"]) for j in found["joints"])
    page = (tmp_path / "mine" / "report.html").read_text()
    assert (
        "Are its actions right?" in page
        and "shoulder.pos" in page
        and "One episode that was kept out" in page
    )
    assert "Does it use its images?" in page
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (
        summary["actions"]["sft"]["overall"]["policy"] > 0
        and "traces" not in summary["actions"]["sft"]
    )
    assert summary["verdict"].startswith("The SFT policy's actions are ")
    assert main(run) == 0 and "eval_actions: complete" in capsys.readouterr().out
    # the same checkpoint on the same recording, in a run that has not trained it
    again = [
        *run[:-1],
        "name=again",
        f"checkpoint={tmp_path}/mine/checkpoints/sft",
        "phases=[eval_actions,report]",
    ]
    assert main(again) == 0
    other = json.loads((tmp_path / "again" / "actions.json").read_text())["sft"]
    assert other["overall"] == found["overall"] and "that one may have" in other["held_out"]
    (tmp_path / "mine" / "actions.json").write_text('{"sft": {"joints": 1}}')
    assert main(["report", str(tmp_path / "mine")]) == 0
    assert "actions.json is incomplete: sft" in (tmp_path / "mine" / "report.html").read_text()


def test_what_the_run_that_collected_it_kept_out_is_not_called_drawn():
    config = SimpleNamespace(seed=3, env_type="dataset", phases=["sft"], given="")
    run: Any = SimpleNamespace(config=config)
    drawn = DemonstrationEpisode(0, 4, "fold")
    marked = dataclasses.replace(drawn, kept_out=True)
    assert "the last of each task" in _said(run, [marked], 5)
    assert "drawn by seed=3" in _said(run, [marked, drawn], 5)


def test_a_recording_on_the_disk_trains_the_same_policy(theirs, tmp_path):
    for name, more in (("held", []), ("stored", ["sft.ram_bytes=10000"])):
        assert (
            main(
                [
                    "train",
                    "run=sft",
                    f"dataset={theirs}",
                    *SMALL,
                    f"output_dir={tmp_path}",
                    f"name={name}",
                    *more,
                ]
            )
            == 0
        )
    held, stored = (
        json.loads((tmp_path / n / "actions.json").read_text())["sft"] for n in ("held", "stored")
    )
    assert held["overall"] == stored["overall"]


def test_only_the_tasks_that_are_asked_for_are_learned(theirs, tmp_path):
    given = ["train", "run=sft", f"dataset={theirs}", *SMALL, f"output_dir={tmp_path}", "name=one"]
    assert main([*given, f"tasks=['{TEXTS[0]}']"]) == 0
    found = json.loads((tmp_path / "one" / "actions.json").read_text())["sft"]
    assert {e["task"] for e in found["episodes"]} == {TEXTS[0]}


@pytest.mark.slow
def test_values_are_learned_from_a_recording_alone(theirs, tmp_path):
    """IQL's offline updates, and RL-100's offline rounds, with no episode."""
    given = [
        "train",
        "~run",
        "env=dataset",
        "critic=none",
        f"dataset={theirs}",
        *SMALL,
        f"output_dir={tmp_path}",
    ]
    iql = [
        "algorithm=iql",
        "algorithm.offline_updates=5",
        "rl.iterations=0",
        "phases=[sft,rl,eval_actions,report]",
    ]
    assert main([*given, *iql, "name=iql"]) == 0
    assert set(json.loads((tmp_path / "iql" / "actions.json").read_text())) == {"sft", "rl"}
    rounds = [
        "start_episodes=0",
        "episodes=0",
        "rounds=1",
        "critic_updates=5",
        "imitation_updates=2",
        "candidates=1",
        "states=16",
        "epochs=1",
        "dynamics.updates=5",
        "gate_states=8",
    ]
    rl100 = [
        "algorithm=rl100_quickstart",
        "policy=nano_flow_toy",
        "phases=[sft,offline,eval_actions,report]",
    ]
    assert main([*given, *rl100, *(f"offline.{key}" for key in rounds), "name=rl100"]) == 0
    assert set(json.loads((tmp_path / "rl100" / "actions.json").read_text())) == {"sft", "offline"}
    student = ["distill", str(tmp_path / "rl100" / "checkpoints" / "sft"), "--updates", "3"]
    assert (
        main(
            [*student, "--out", str(tmp_path / "student"), "--json", str(tmp_path / "student.json")]
        )
        == 0
    )
    assert json.loads((tmp_path / "student.json").read_text())["student"]["decisions"] > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["run=sft", "dataset="],
            "env=dataset is read from a recording, and none is named: give dataset=FOLDER",
        ),
        (
            ["run=sft", "phases=[collect,sft]"],
            "phases has collect, which runs episodes, and env=dataset is a recording",
        ),
        (["run=sft", "phases=[sft,eval_sft,report]"], "use run=sft, or phases=[sft,report]"),
        (["run=sft", "phases=[sft,rl]"], "rl.iterations=20 runs episodes"),
        (["run=sft", "phases=[sft,rl]", "rl.iterations=0"], "learn from them before the first one"),
        (["run=sft", "env.cameras=[top]"], "env.cameras has 'top'"),
        (["run=sft", "tasks=[fold]"], "unknown task 'fold'"),
    ],
)
def test_what_needs_a_simulator_is_refused_in_a_line(theirs, tmp_path, capsys, given, said):
    assert (
        main(["train", f"dataset={theirs}", *SMALL, f"output_dir={tmp_path}", "name=bad", *given])
        == 2
    )
    assert said in capsys.readouterr().err and not (tmp_path / "bad").exists()


def test_other_commands_say_that_a_recording_has_no_episodes(theirs, tmp_path, capsys):
    run = [
        "train",
        "run=sft",
        f"dataset={theirs}",
        *SMALL,
        f"output_dir={tmp_path}",
        "name=m",
        "phases=[sft]",
    ]
    assert main(run) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "m" / "checkpoints" / "sft"), "--episodes", "2"]) == 2
    assert (
        "env=dataset is a recording, in which no episode can be run: judge by action errors"
        in capsys.readouterr().err
    )


# --------------------------------------------------------------------------------------------- show
def test_what_is_in_a_recording_is_shown(theirs, tmp_path, capsys):
    assert (
        main(
            [
                "data",
                "show",
                str(theirs),
                "--figure",
                str(tmp_path / "d.png"),
                "--json",
                str(tmp_path / "d.json"),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "front 16x16 (observation.images.front, image)" in said
        and "8, 104 rows" in said
        and "point at it" in said
    )
    assert "10% of their range wider on each side" in said
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["lengths"] == {"shortest": 12, "median": 13.0, "longest": 14} and found[
        "tasks"
    ] == dict.fromkeys(TEXTS, 4)
    shoulder = found["numbers"]["action"][0]
    assert (shoulder["name"], shoulder["min"], shoulder["max"]) == ("shoulder.pos", 2.0, 94.0)
    from PIL import Image

    with Image.open(tmp_path / "d.png") as sheet:
        assert sheet.getpixel((8, 18 + 8)) == (0, 0, 0) and sheet.width >= 6 * 16
    assert (
        main(
            ["data", "show", str(theirs), "--figure", str(tmp_path / "d.html"), "env.control_hz=10"]
        )
        == 0
    )
    page = (tmp_path / "d.html").read_text()
    assert "10 Hz, of 30 Hz recorded" in page and "data:image/png;base64," in page
    capsys.readouterr()
    assert main(["data", "show", str(theirs), "--figure", str(tmp_path / "d.txt")]) == 2
    assert main(["data", "show", str(tmp_path / "nowhere")]) == 2
    assert (
        "has to end in .png" in (err := capsys.readouterr().err) and "no such file or folder" in err
    )


# --------------------------------------------------------------- four commands, no code, an own arm
def raised(folder: Path) -> None:
    """What a person at the console does: reset, take over, drive up, until the session ends with
    the last episode."""
    from real.link import Client, LinkError
    from real.messages import Event, Input, Lease, State

    client = Client(folder, "teleop", "hand")
    asked, state = -math.inf, None
    try:
        while True:
            message = client.receive(1.0)
            state = message if isinstance(message, State) else state
            if state is None or time.monotonic() - asked < 0.03:
                continue
            asked = time.monotonic()
            if state.holder != "hand":
                client.send(Lease, 1.0, ask="request", token="", force=True)
                continue
            begins = "takeover" if state.proprio[2] < 0.31 else "reset"
            doing = {
                "IDLE": "arm",
                "READY": begins,
                "PAUSED": "takeover",
                "FAULT": "ack",
                "STOPPED": "ack",
            }
            if name := doing.get(state.mode):
                client.send(Event, name=name, value="", at=asked, lease=client.token)
            if state.mode == "HUMAN":
                client.send(
                    Input,
                    0.15,
                    lease=client.token,
                    device_stamp=asked,
                    dead_man=True,
                    axes=(0.0, 0.0, 1.0, 0.0, 0.0, 0.0),
                    gripper=0.0,
                    keys=(),
                    target=(),
                )
    except LinkError:  # the session is over
        pass
    finally:
        client.close()


@pytest.mark.slow
@pytest.mark.real_time
def test_from_teaching_an_arm_to_a_policy_that_drives_it(tmp_path, capsys):
    """Four commands: teach, export, train, run; the arm is nowhere named but in its own files."""
    from test_robot_session import begun

    session, data = tmp_path / "s", tmp_path / "data"
    arm = [
        "robot=fake",
        "robot.supervisor.silence_s=0.3",
        "robot.supervisor.frame_age_s=2.0",
        f"output_dir={tmp_path}",
    ]
    process, said = begun(
        "teach", "--episodes", "3", *arm, "name=s", "console.port=0", until="console:"
    )
    try:
        raised(session / "run" / "s")
        rest = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, (said, rest)
    assert main(["robot", "export", str(session), str(data)]) == 0
    train = [
        "train",
        "run=sft",
        f"dataset={data}",
        *SMALL,
        "sft.updates=80",
        "sft.batch_size=32",
        f"output_dir={tmp_path}",
    ]
    assert main([*train, "name=up"]) == 0
    found = json.loads((tmp_path / "up" / "actions.json").read_text())["sft"]
    assert [j["name"] for j in found["joints"]] == ["dx", "dy", "dz", "gripper"] and len(
        found["episodes"]
    ) == 1
    capsys.readouterr()
    checkpoint = tmp_path / "up" / "checkpoints" / "sft"
    run = [
        "robot",
        "run",
        "--lockstep",
        "--episodes",
        "2",
        "robot=fake",
        f"output_dir={tmp_path}",
        "name=r",
    ]
    assert main([*run, f"checkpoint={checkpoint}"]) == 0
    assert "autonomous: 2 of 2 episodes succeeded (100 %)" in capsys.readouterr().out


def test_of_a_session_that_a_person_helped_in_the_persons_rows_are_imitated(tmp_path):
    """HG-DAgger (arXiv 1810.02890, Algorithm 1); chunks still are what followed, whoever chose it.
    A column of another name says nothing of who chose."""
    data = load_demonstrations(helped(tmp_path / "session"), chunk_length=2)
    theirs = torch.cat([torch.arange(e.length) % 3 == 0 for e in data.episodes])
    drawn = data.drawing.draw(500, torch.Generator().manual_seed(0))
    assert bool(theirs[drawn].all()) and drawn.unique().numel() == int(theirs.sum())
    assert f"of {len(data)} control steps the {int(theirs.sum())} that a person" in data.notes[0]
    _, actions, valid = data.at(torch.tensor([0]))
    assert valid.all() and torch.equal(actions[0], data.actions[:2])
    (first, *_) = demonstration_trajectories(data, stride=2)  # what HG-DAgger's replay gets
    assert first.is_human.flatten().tolist() == [i % 3 == 0 for i in range(LENGTHS[0])]
    part = data.subset([theirs[e.start : e.start + e.length] == 0 for e in data.episodes])
    assert part.drawing.count == len(part) == len(data) - int(theirs.sum())  # all of the policy's
    assert not demonstration_trajectories(part, stride=2)[0].is_human.any()
    other = load_demonstrations(helped(tmp_path / "other", "steering"))
    assert other.by_person is None and not any("person" in note for note in other.notes)
