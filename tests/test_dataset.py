"""Demonstration datasets: what is written is what is read, by us and by lerobot; bad folders
give one clear error."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import warnings

import numpy as np
import pytest
import torch

from vla_rl.assembly.context import Run, split_demonstrations
from vla_rl.assembly.sources import load_source
from vla_rl.config import compose
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_reader import load_demonstrations, read_embodiment
from vla_rl.data.lerobot_writer import (
    DemonstrationWriter,
    encode_png,
    feature_statistics,
    image_statistics,
)
from vla_rl.data.sources import check_folder
from vla_rl.data.trajectories import trajectories_of_dataset
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.monitoring.progress import Progress
from vla_rl.types import CameraSpec, EmbodimentSpec

pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")

SPEC = EmbodimentSpec(
    name="arm",
    action_names=("dx", "dy", "gripper"),
    action_units=("m", "m", "1"),
    action_low=(-6.0, -6.0, -6.0),
    action_high=(6.0, 6.0, 6.0),
    frame="base",
    rotation="none",
    gripper="-1 open, +1 close",
    control_hz=20.0,
    cameras=(CameraSpec("front", 12, 16), CameraSpec("wrist", 10, 10)),
    proprio_names=("x", "y", "z", "gripper_open"),
)
LENGTHS = (7, 4, 9)


def episode(number: int, length: int) -> dict:
    rng = np.random.default_rng(number)
    images = {
        c.name: rng.integers(0, 256, (length, c.height, c.width, 3), dtype=np.uint8)
        for c in SPEC.cameras
    }
    proprio = rng.normal(size=(length, 4)).astype(np.float32)
    actions = rng.normal(size=(length, 3)).astype(np.float32)
    return {
        "images": images,
        "proprio": proprio,
        "actions": actions,
        "instruction": f"task {number % 2}",
    }


def write(path, video=False):
    with DemonstrationWriter(path, SPEC, video=video) as writer:
        for i, n in enumerate(LENGTHS):
            writer.add_episode(
                **episode(i, n), success=i != 1, task_id=f"t{i % 2}", init_state_id=100 + i
            )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "demos")


def test_png_is_lossless():
    rng = np.random.default_rng(0)
    for shape in ((1, 1, 3), (5, 7, 3), (84, 84, 3)):
        image = rng.integers(0, 256, shape, dtype=np.uint8)
        import io

        with Image.open(io.BytesIO(encode_png(image))) as decoded:
            assert np.array_equal(np.asarray(decoded), image)


def test_round_trip(folder):
    data = load_demonstrations(folder, SPEC, chunk_length=3)
    assert len(data) == sum(LENGTHS) and data.embodiment == SPEC == read_embodiment(folder)
    start = 0
    for i, n in enumerate(LENGTHS):
        expected, info = episode(i, n), data.episodes[i]
        rows = slice(start, start + n)
        assert np.array_equal(data.actions[rows].numpy(), expected["actions"])
        assert np.array_equal(data.proprio[rows].numpy(), expected["proprio"])
        for camera, frames in expected["images"].items():
            assert data.images[camera].dtype == torch.uint8
            assert np.array_equal(data.images[camera][rows].numpy(), frames)
        assert (info.start, info.length, info.instruction) == (start, n, f"task {i % 2}")
        assert (info.success, info.task_id, info.init_state_id) == (i != 1, f"t{i % 2}", 100 + i)
        start += n


def test_chunks_stop_at_the_episode_end(folder):
    data = load_demonstrations(folder, SPEC, chunk_length=3)
    observation, actions, valid = data.at(torch.tensor([0, 5, 6, 7]))
    assert valid.tolist() == [[True] * 3, [True, True, False], [True, False, False], [True] * 3]
    assert torch.equal(actions[0], data.actions[0:3])
    # the last action repeats, never the next episode's
    assert torch.equal(actions[1], data.actions[[5, 6, 6]])
    assert torch.equal(actions[2], data.actions[[6, 6, 6]])
    assert observation.instruction == ("task 0", "task 0", "task 0", "task 1")
    assert torch.equal(observation.images["wrist"], data.images["wrist"][[0, 5, 6, 7]])


def test_sampling_follows_the_generator_and_covers_everything(folder):
    data = load_demonstrations(folder, chunk_length=2)
    a, b = (data.sample(16, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a[1], b[1]) and torch.equal(a[0].proprio, b[0].proprio)
    epoch = torch.cat([o.proprio for o, _, _ in data.batches(8, torch.Generator().manual_seed(0))])
    assert torch.equal(epoch.sort(0).values, data.proprio.sort(0).values)
    with pytest.raises(ConfigError, match="chunk_length=0"):
        load_demonstrations(folder, chunk_length=0)


def test_what_is_not_worth_imitating_is_not_drawn(folder):
    """Its actions still follow in the chunks of the steps before it, and it stays what it was in
    a part of the data."""
    data = load_demonstrations(folder, chunk_length=2)
    data.worth = torch.arange(len(data)) % 3 != 1
    wanted = data.proprio[data.worth]
    epoch = torch.cat([o.proprio for o, _, _ in data.batches(8, torch.Generator().manual_seed(0))])
    assert torch.equal(epoch.sort(0).values, wanted.sort(0).values)
    drawn = torch.cat([data.sample(64)[0].proprio, data.evenly(1000)[0].proprio])
    assert {tuple(row) for row in drawn.tolist()} <= {tuple(row) for row in wanted.tolist()}
    assert torch.equal(data.at(torch.tensor([0]))[1][0], data.actions[:2])
    part, _ = data.split(0)
    last = data.episodes[-1]
    kept = data.subset(
        [None] * (len(data.episodes) - 1) + [torch.ones(last.length, dtype=torch.bool)]
    )
    assert part.worth is data.worth and torch.equal(kept.worth, data.worth[last.start :])


def test_first_decisions_are_drawn_more_often_where_that_is_asked(folder):
    data = load_demonstrations(folder, chunk_length=2)
    first = {tuple(data.proprio[e.start + i].tolist()) for e in data.episodes for i in (0, 1)}

    def share(asked: float) -> float:
        rows = data.sample(2000, torch.Generator().manual_seed(0), asked)[0].proprio.tolist()
        return sum(tuple(row) in first for row in rows) / len(rows)

    plain = 6 / 20  # two of the control steps of each of the three episodes
    assert share(0.0) == pytest.approx(plain, abs=0.05)
    assert share(0.5) == pytest.approx(0.5 + 0.5 * plain, abs=0.05)
    assert share(1.0) == 1.0
    data.worth = torch.tensor([tuple(row) not in first for row in data.proprio.tolist()])
    assert share(1.0) == 0.0  # none of them is worth imitating


def test_the_last_episodes_of_each_task_are_kept_out(folder):
    """Episodes 0, 1, 2 of tasks t0, t1, t0 and lengths 7, 4, 9."""
    data = load_demonstrations(folder, SPEC)
    train, validation = data.split(1, largest_share=0.5)
    # t1 has one alone: half of it is none
    assert [e.init_state_id for e in train.episodes] == [100, 101]
    assert [e.init_state_id for e in validation.episodes] == [102]
    assert torch.equal(validation.actions, data.actions[11:]) and len(train) == 11
    assert validation.evenly(3)[1][:, 0].tolist() == data.actions[[11, 15, 19]].tolist()
    assert data.split(5) == (data, None)  # a fifth of two is none
    assert data.split(0, largest_share=1.0) == (data, None)


def test_statistics(folder):
    data = load_demonstrations(folder)
    values = np.concatenate([episode(i, n)["actions"] for i, n in enumerate(LENGTHS)]).astype(
        np.float64
    )
    stats = data.statistics["action"]
    assert np.allclose(stats["mean"], values.mean(0)) and np.allclose(stats["std"], values.std(0))
    assert np.allclose(stats["q01"], np.quantile(values, 0.01, axis=0))
    assert np.allclose(stats["max"], values.max(0)) and stats["q99"].dtype == np.float32
    assert list(data.action_stats) == ["low", "high", "mean", "std", "q01", "q99"]
    assert np.allclose(data.proprio_stats["low"], data.proprio.min(0).values)
    images = np.random.default_rng(1).integers(10, 200, (4, 6, 6, 3), dtype=np.uint8)
    histogram = np.stack([np.bincount(images[..., c].ravel(), minlength=256) for c in range(3)])
    found, scaled = image_statistics(histogram, 4), images.reshape(-1, 3) / 255.0
    for key, expected in (("min", scaled.min(0)), ("max", scaled.max(0)), ("mean", scaled.mean(0))):
        assert np.allclose(found[key].ravel(), expected)
    assert np.allclose(found["std"].ravel(), scaled.std(0))
    assert np.allclose(
        found["q50"].ravel(), np.quantile(scaled, 0.5, axis=0, method="inverted_cdf")
    )
    assert feature_statistics(np.ones((1, 2)))["std"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("video", [False, True])
def test_lerobot_loads_what_we_write(tmp_path, monkeypatch, video):
    pytest.importorskip("av")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lerobot's own imports warn
        lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset")
        path = write(tmp_path / "demos", video)
        ours = load_demonstrations(path, SPEC)
        theirs = lerobot.LeRobotDataset(
            "local/demos", root=path, video_backend="pyav", tolerance_s=1e-3
        )
        assert (len(theirs), theirs.num_episodes, theirs.fps) == (sum(LENGTHS), len(LENGTHS), 20)
        stats = theirs.meta.stats
        assert np.allclose(stats["action"]["mean"], ours.statistics["action"]["mean"])
        assert stats["observation.images.front"]["mean"].shape == (3, 1, 1)
        for i in (0, 6, 7, 11, 19):
            item = theirs[i]
            assert torch.equal(item["action"], ours.actions[i]) and torch.equal(
                item["observation.state"], ours.proprio[i]
            )
            assert item["task"] == ours.at(torch.tensor([i]))[0].instruction[0]
            for camera in SPEC.camera_names:
                pixels = (
                    (item[f"observation.images.{camera}"] * 255)
                    .round()
                    .to(torch.uint8)
                    .permute(1, 2, 0)
                )
                gap = (pixels.int() - ours.images[camera][i].int()).abs().float().mean()
                # two decoders convert YUV to RGB a little differently
                assert gap < 3 if video else gap == 0


def test_we_load_what_lerobot_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset")
        from vla_rl.data.lerobot_format import lerobot_features

        features = {
            k: v
            for k, v in lerobot_features(SPEC).items()
            if k.startswith(("observation", "action"))
        }
        features = {k: v | {"shape": tuple(v["shape"])} for k, v in features.items()}
        theirs = lerobot.LeRobotDataset.create(
            "local/x", 20, features, root=tmp_path / "x", use_videos=False
        )
        for i in range(2):
            e = episode(i, 3)
            for t in range(3):
                frame = {f"observation.images.{c}": v[t] for c, v in e["images"].items()}
                frame |= {
                    "observation.state": e["proprio"][t],
                    "action": e["actions"][t],
                    "task": e["instruction"],
                }
                theirs.add_frame(frame)
            theirs.save_episode()
        theirs.finalize()
    data = load_demonstrations(tmp_path / "x", SPEC, 2)
    assert np.array_equal(data.images["front"][3:].numpy(), episode(1, 3)["images"]["front"])
    assert np.array_equal(data.actions[:3].numpy(), episode(0, 3)["actions"])
    assert [e.instruction for e in data.episodes] == ["task 0", "task 1"] and data.episodes[
        0
    ].success is None
    with pytest.raises(DatasetError, match="does not say which robot"):
        load_demonstrations(tmp_path / "x")


@pytest.mark.parametrize("video", [False, True])
def test_we_load_what_lerobot_06_adds(tmp_path, monkeypatch, video):
    """A depth map, columns of language, and what its encoder was set to, beside what is ours."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset")
        language = pytest.importorskip(
            "lerobot.datasets.language", reason="columns of language came with lerobot 0.6"
        )
        from vla_rl.data.lerobot_format import lerobot_features

        kept = {
            k: v
            for k, v in lerobot_features(SPEC, video).items()
            if k.startswith(("observation", "action"))
        }
        features = {
            k: {n: x for n, x in v.items() if n != "info"} | {"shape": tuple(v["shape"])}
            for k, v in kept.items()
        }
        depth = {
            "shape": (64, 64, 1),
            "names": ["height", "width", "channels"],
            "info": {"is_depth_map": True},
        }
        features["observation.images.front_depth"] = {
            "dtype": "video" if video else "image",
            **depth,
        }
        from lerobot.configs.video import RGBEncoderConfig

        h264 = RGBEncoderConfig(vcodec="h264")  # (that of AV1 ends the process at so few pixels)
        create = lerobot.LeRobotDataset.create
        theirs = create(
            "local/x", 20, features, root=tmp_path / "x", use_videos=video, rgb_encoder=h264
        )
        e = episode(0, 3)
        for t in range(3):
            frame = {f"observation.images.{c}": v[t] for c, v in e["images"].items()}
            frame["observation.images.front_depth"] = np.full((64, 64, 1), 1000 + t, np.uint16)
            frame |= {
                "observation.state": e["proprio"][t],
                "action": e["actions"][t],
                "task": e["instruction"],
            }
            theirs.add_frame(frame)
        theirs.save_episode()
        theirs.finalize()
    told = {
        "role": "user",
        "content": "now lift",
        "style": "subtask",
        "timestamp": 0.0,
        "camera": None,
        "tool_calls": None,
    }
    file, info = tmp_path / "x/data/chunk-000/file-000.parquet", tmp_path / "x/meta/info.json"
    pyarrow = pytest.importorskip("pyarrow.parquet") and pytest.importorskip("pyarrow")
    table = pyarrow.parquet.read_table(file)
    text, number = pyarrow.string(), pyarrow.float32()
    fields = {
        "role": text,
        "content": text,
        "style": text,
        "timestamp": number,
        "camera": text,
        "tool_calls": text,
    }
    assert set(fields) == set(language.PERSISTENT_ROW_FIELDS)
    column = pyarrow.array([[told]] * 3, pyarrow.list_(pyarrow.struct(list(fields.items()))))
    pyarrow.parquet.write_table(table.append_column(language.LANGUAGE_PERSISTENT, column), file)
    written = json.loads(info.read_text())
    written["features"][language.LANGUAGE_PERSISTENT] = {
        "dtype": "language",
        "shape": [1],
        "names": None,
    }
    info.write_text(json.dumps(written))
    if video:
        assert {"video.crf", "video.preset"} & set(
            written["features"]["observation.images.front"]["info"]
        )
    data = load_demonstrations(tmp_path / "x", SPEC, 2)
    assert np.array_equal(data.actions.numpy(), e["actions"]) and set(data.images) == set(
        SPEC.camera_names
    )
    assert video or np.array_equal(data.images["front"].numpy(), e["images"]["front"])
    assert not any(report.errors for report in check_folder(tmp_path / "x", SPEC))
    deep = dataclasses.replace(SPEC, cameras=(CameraSpec("front_depth", 64, 64),))
    with pytest.raises(
        EmbodimentMismatch, match="camera front_depth: expected colours, the dataset has depth"
    ):
        load_demonstrations(tmp_path / "x", deep)


def test_video_frames_stay_close(tmp_path):
    pytest.importorskip("av")
    ramp = np.linspace(0, 255, 16).astype(np.uint8)
    with DemonstrationWriter(tmp_path / "v", SPEC, video=True) as writer:
        for i in range(2):
            smooth = {
                "front": np.broadcast_to(ramp[None, None, :, None], (5, 12, 16, 3)) // (i + 1),
                "wrist": np.full((5, 10, 10, 3), 60 * (i + 1), np.uint8),
            }
            e = episode(i, 5) | {"images": smooth}
            writer.add_episode(**e, success=True, task_id="t", init_state_id=i)
    data = load_demonstrations(tmp_path / "v", SPEC)
    assert (data.images["wrist"][:5].int() - 60).abs().max() < 6 and (
        data.images["wrist"][5:].int() - 120
    ).abs().max() < 6
    assert (data.images["front"][5:].float().mean() - ramp.mean() / 2).abs() < 6


@pytest.mark.parametrize(
    "change, names",
    [
        ({"cameras": (CameraSpec("front", 12, 16), CameraSpec("side", 10, 10))}, ["side", "wrist"]),
        ({"cameras": (CameraSpec("front", 24, 32), CameraSpec("wrist", 10, 10))}, ["24", "12"]),
        ({"action_names": ("dx", "dz", "gripper")}, ["dz", "dy"]),
        ({"proprio_names": ("x", "y", "z")}, ["gripper_open"]),
        ({"control_hz": 10.0}, ["control_hz", "10.0", "20"]),
        ({"frame": "world"}, ["frame", "world", "base"]),
    ],
)
def test_another_embodiment_is_refused(folder, change, names):
    with pytest.raises(EmbodimentMismatch) as caught:
        load_demonstrations(folder, dataclasses.replace(SPEC, **change), 2)
    assert all(name in str(caught.value) for name in names)


def test_data_from_before_there_were_words_still_fits_its_robot(folder, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    file = old / "meta" / "embodiment.json"
    prose = {"rotation": "fixed, hand down", "gripper": "-1 opens, +1 closes"}
    file.write_text(json.dumps(json.loads(file.read_text()) | prose))
    assert len(load_demonstrations(old, SPEC, 2)) == sum(LENGTHS)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"gripper": "a suction cup"}))
    with pytest.raises(EmbodimentMismatch, match="other: a suction cup"):
        load_demonstrations(old, SPEC, 2)
    suction = dataclasses.replace(SPEC, gripper="other: a suction cup")
    assert len(load_demonstrations(old, suction, 2)) == sum(LENGTHS)


def test_further_cameras_are_ignored(folder):
    data = load_demonstrations(folder, dataclasses.replace(SPEC, cameras=SPEC.cameras[:1]), 2)
    assert set(data.images) == {"front"}


def test_existing_folder_is_refused(folder):
    before = sorted(p.name for p in folder.parent.iterdir())
    with pytest.raises(DatasetError, match="exists already"):
        DemonstrationWriter(folder, SPEC)
    assert sorted(p.name for p in folder.parent.iterdir()) == before


def test_nothing_is_left_of_an_aborted_dataset(tmp_path):
    with pytest.raises(KeyboardInterrupt), DemonstrationWriter(tmp_path / "d", SPEC) as writer:
        writer.add_episode(**episode(0, 4), success=True, task_id="t", init_state_id=0)
        raise KeyboardInterrupt
    with pytest.raises(DatasetError, match="No episode"):
        DemonstrationWriter(tmp_path / "d", SPEC).close()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_named(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")

    def refuse(self, table, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", refuse)
    with pytest.raises(DatasetError, match=r"No space left on device.*GiB free"):
        write(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


def test_bad_episodes_are_refused(tmp_path):
    writer = DemonstrationWriter(tmp_path / "d", SPEC)
    good = episode(0, 4) | {"success": True, "task_id": "t", "init_state_id": 0}
    nan = good["actions"].copy()
    nan[2, 1] = np.nan
    with pytest.raises(DatasetError, match=r"episode 0, row 2, action\[dy\]: is nan"):
        writer.add_episode(**good | {"actions": nan})
    with pytest.raises(EmbodimentMismatch, match="wrist"):
        writer.add_episode(**good | {"images": {"front": good["images"]["front"]}})
    with pytest.raises(EmbodimentMismatch, match="actions"):
        writer.add_episode(**good | {"actions": good["actions"][:, :2]})
    with pytest.raises(DatasetError, match="uint8"):
        writer.add_episode(**good | {"images": {k: v / 255.0 for k, v in good["images"].items()}})
    with pytest.raises(DatasetError, match="no control step"):
        writer.add_episode(**episode(0, 0), success=True, task_id="t", init_state_id=0)
    writer.abort()
    with pytest.raises(DatasetError, match="closed"):
        writer.add_episode(**good)
    odd = dataclasses.replace(SPEC, cameras=(CameraSpec("front", 11, 16),))
    with pytest.raises(ConfigError, match="even image sizes"):
        DemonstrationWriter(tmp_path / "e", odd, video=True)


def test_damaged_folders(tmp_path):
    with pytest.raises(DatasetError, match=r"no meta/info\.json"):
        load_demonstrations(tmp_path, SPEC)
    path = write(tmp_path / "d")
    info = path / "meta/info.json"
    text = info.read_text()
    info.write_text(json.dumps(json.loads(text) | {"codebase_version": "v2.1"}))
    with pytest.raises(DatasetError, match=r"v2.1.*Convert"):
        load_demonstrations(path, SPEC)
    info.write_text("{")
    with pytest.raises(DatasetError, match="damaged"):
        load_demonstrations(path, SPEC)
    info.write_text(text)
    data = next((path / "data").glob("*/*.parquet"))
    raw = data.read_bytes()
    data.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DatasetError, match="incomplete or damaged"):
        load_demonstrations(path, SPEC)
    data.unlink()
    with pytest.raises(DatasetError, match="no parquet file"):
        load_demonstrations(path, SPEC)


def test_a_missing_feature_shows_both_sides(tmp_path):
    path = write(tmp_path / "d")
    info = json.loads((path / "meta/info.json").read_text())
    del info["features"]["observation.state"]
    (path / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(
        EmbodimentMismatch, match=r"observation.state: expected.*gripper_open.*no such feature"
    ):
        load_demonstrations(path, SPEC)


# ------------------------------------------------------------------- what is not to be trained on
def test_what_its_own_run_keeps_out_of_training_stays_out(tmp_path):
    with DemonstrationWriter(tmp_path / "d", SPEC, kept_out=2) as writer:
        for i in range(7):  # tasks t0 and t1 in turn: four and three episodes
            writer.add_episode(**episode(i, 4), success=True, task_id=f"t{i % 2}", init_state_id=i)
    train, held_out = load_demonstrations(tmp_path / "d", SPEC, 3).split(10, 0.2)
    assert [e.init_state_id for e in train.episodes] == [0, 1, 2]
    assert [e.init_state_id for e in held_out.episodes] == [3, 4, 5, 6]
    again = load_demonstrations(tmp_path / "d", SPEC, 3).split(0, 0.2, seed=5)
    assert [e.init_state_id for e in again[0].episodes] == [0, 1, 2]
    file = tmp_path / "d" / "meta" / "kept_out.json"
    file.write_text('{"last_episodes_of_each_task": 3}')
    with pytest.raises(DatasetError, match=r"all 3 demonstrations of 't1' .*kept_out\.json"):
        load_demonstrations(tmp_path / "d", SPEC, 3).split(10, 0.2)
    file.write_text('{"last_episodes_of_each_task": "2"}')
    with pytest.raises(DatasetError, match=r"kept_out\.json is damaged .*'2'"):
        load_demonstrations(tmp_path / "d", SPEC, 3)


def test_a_reward_learns_from_nothing_that_is_kept_out(tmp_path):
    with DemonstrationWriter(tmp_path / "d", SPEC, kept_out=2) as writer:
        for i in range(7):
            writer.add_episode(**episode(i, 4), success=True, task_id=f"t{i % 2}", init_state_id=i)

    def states(trajectories):
        return sorted(t.episode.init_state_id for t in trajectories)

    assert states(trajectories_of_dataset(tmp_path / "d", SPEC)) == [0, 1, 2]
    drawn = states(trajectories_of_dataset(tmp_path / "d", SPEC, limit=2, seed=1))
    assert len(drawn) == 2 and set(drawn) < {0, 1, 2}
    to_fit = load_source(tmp_path / "d", to_learn_from=True)
    assert states(to_fit.trajectories) == [0, 1, 2] and "without those" in to_fit.what
    assert states(load_source(tmp_path / "d").trajectories) == list(range(7))  # to be scored
    (tmp_path / "d" / "meta" / "kept_out.json").write_text('{"last_episodes_of_each_task": 4}')
    with pytest.raises(DatasetError, match=r"all 7 demonstrations of .*kept_out\.json"):
        load_source(tmp_path / "d", to_learn_from=True)


def test_a_run_on_anothers_demonstrations_trains_on_the_same_ones(finished_run, tmp_path):
    few = ("collect.episodes_per_task=4", "sft.validation_episodes=10", "sft.updates=1")
    made = finished_run("run=toy", "phases=[collect]", *few)
    rows = []
    itself = [f"output_dir={made.parent}", f"name={made.name}"]
    for given in (itself, [f"output_dir={tmp_path}", f"dataset={made / 'dataset'}"]):
        config = compose(["run=toy", *few, *given])
        run = Run(config, None, Progress(stream=io.StringIO()), {})
        with run.resources:
            train, held_out = split_demonstrations(run)
            rows.append([[e.init_state_id for e in x.episodes] for x in (train, held_out)])
    assert rows[0] == rows[1] and [len(x) for x in rows[0]] == [4, 10]
