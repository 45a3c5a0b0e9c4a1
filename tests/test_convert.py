"""Recordings of other formats, converted and compared frame by frame with what the format's own
library reads."""

from __future__ import annotations

import base64
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from vla_rl.cli import main
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.specs import CameraSpec, EmbodimentSpec

LENGTHS = (7, 5, 9)
NAMES = ("pan", "lift", "grip")
SPEC = EmbodimentSpec(
    name="paper",
    action_names=NAMES,
    action_units=("deg",) * 3,
    action_low=(-50.0,) * 3,
    action_high=(50.0,) * 3,
    frame="joints",
    rotation="none",
    gripper="none",
    control_hz=10.0,
    cameras=(CameraSpec("front", 16, 24),),
    proprio_names=NAMES,
)


def pictures(episode: int, length: int) -> np.ndarray:
    """Every row differs in its blocks, coarse enough for a video."""
    rows = np.random.default_rng(episode).integers(0, 256, (length, 2, 3, 3), dtype=np.uint8)
    return rows.repeat(8, axis=1).repeat(8, axis=2)


def numbers(episode: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(100 + episode)
    state = random.uniform(-20, 20, (length, 3)).astype(np.float32)
    return state, state + random.uniform(-1, 1, (length, 3)).astype(np.float32)


def v3(path: Path, video: bool) -> Path:
    with DemonstrationWriter(path, SPEC, video=video) as writer:
        for i, length in enumerate(LENGTHS):
            state, actions = numbers(i, length)
            writer.add_episode(
                {"front": pictures(i, length)},
                state,
                actions,
                f"task {i % 2}",
                success=True,
                task_id="t",
                init_state_id=i,
            )
    return path


def older(path: Path, video: bool, version: str = "v2.1") -> Path:
    """The recording as lerobot wrote it then: an episode a file."""
    import av
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from vla_rl.data.lerobot_writer import encode_png, feature_statistics

    key = "observation.images.front"
    vector = {"dtype": "float32", "shape": [3], "names": list(NAMES)}
    plain = {k: {"dtype": "int64", "shape": [1], "names": None} for k in ("frame_index", "index")}
    plain |= {
        k: {"dtype": "int64", "shape": [1], "names": None} for k in ("episode_index", "task_index")
    }
    plain["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    picture = {
        "dtype": "video" if video else "image",
        "shape": [16, 24, 3],
        "names": ["height", "width", "channels"],
    }
    if video:
        picture["info"] = {"video.fps": 10.0, "video.codec": "h264", "video.pix_fmt": "yuv420p"}
    info = {
        "codebase_version": version,
        "robot_type": "paper",
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "total_tasks": 2,
        "total_videos": len(LENGTHS) if video else 0,
        "total_chunks": 1,
        "chunks_size": 1000,
        "fps": 10,
        "splits": {"train": f"0:{len(LENGTHS)}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        if video
        else None,
        "features": {"observation.state": vector, "action": vector, key: picture, **plain},
    }
    (path / "meta").mkdir(parents=True)
    (path / "data" / "chunk-000").mkdir(parents=True)
    (path / "videos" / "chunk-000" / key).mkdir(parents=True)
    (path / "meta" / "info.json").write_text(json.dumps(info))
    tasks = [{"task_index": i, "task": f"task {i}"} for i in (0, 1)]
    lines = {"tasks": tasks, "episodes": [], "episodes_stats": []}
    first = 0
    for i, length in enumerate(LENGTHS):
        state, actions = numbers(i, length)
        columns = {
            "observation.state": pa.array(state.tolist(), pa.list_(pa.float32(), 3)),
            "action": pa.array(actions.tolist(), pa.list_(pa.float32(), 3)),
            "timestamp": pa.array(np.arange(length, dtype=np.float32) / np.float32(10)),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, i),
            "index": np.arange(first, first + length),
            "task_index": np.full(length, i % 2),
        }
        first += length
        frames = pictures(i, length)
        if video:
            file = path / "videos" / "chunk-000" / key / f"episode_{i:06d}.mp4"
            with av.open(str(file), "w") as out:
                stream = out.add_stream("libx264", rate=10, options={"crf": "4", "g": "2"})
                stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
                for frame in frames:
                    out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
                out.mux(stream.encode())
        else:
            columns[key] = pa.array([{"bytes": encode_png(f), "path": None} for f in frames])
        parquet.write_table(
            pa.table(columns), path / "data" / "chunk-000" / f"episode_{i:06d}.parquet"
        )
        row = {"episode_index": i, "tasks": [f"task {i % 2}"], "length": length}
        lines["episodes"].append(row)
        stats = {"observation.state": state, "action": actions}
        stats |= {k: np.arange(length)[:, None] for k in plain}
        kept = ("min", "max", "mean", "std", "count")
        said = {
            k: {n: x.tolist() for n, x in feature_statistics(v).items() if n in kept}
            for k, v in stats.items()
        }
        said[key] = {n: [[[0.5]]] * 3 for n in kept[:4]} | {"count": [length]}
        lines["episodes_stats"].append({"episode_index": i, "stats": said})
    for name, rows in lines.items():
        text = "\n".join(json.dumps(row) for row in rows) + "\n"
        (path / "meta" / f"{name}.jsonl").write_text(text)
    return path


def same(path: Path, lengths=LENGTHS) -> None:
    """What this project reads of it is what was recorded."""
    data = load_demonstrations(path)
    expected = [numbers(i, n) for i, n in enumerate(lengths)]
    np.testing.assert_array_equal(data.proprio, np.concatenate([s for s, _ in expected]))
    np.testing.assert_array_equal(data.actions, np.concatenate([a for _, a in expected]))


# ---------------------------------------------------------------------------------------- lerobot 2
@pytest.mark.filterwarnings("ignore:The video decoding:UserWarning")  # torchvision's, by lerobot
@pytest.mark.parametrize("video", [False, True])
def test_older_lerobot_is_read_as_lerobots_own_conversion(video, tmp_path):
    """Frame by frame, beside what lerobot's script makes of the same folder."""
    pytest.importorskip("lerobot")
    try:
        from lerobot.datasets.v30 import convert_dataset_v21_to_v30 as script

        root = tmp_path / "hub"
    except ImportError:  # 0.6 has it elsewhere, and its root is the dataset's own folder
        from lerobot.scripts import convert_dataset_v21_to_v30 as script

        root = tmp_path / "hub" / "theirs"
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    old = older(tmp_path / "old", video)
    assert main(["data", "convert", str(old), str(tmp_path / "ours")]) == 0
    shutil.copytree(old, tmp_path / "hub" / "theirs")
    script.convert_dataset("theirs", root=root, push_to_hub=False)
    theirs = LeRobotDataset("theirs", root=tmp_path / "hub" / "theirs", video_backend="pyav")
    ours = LeRobotDataset("ours", root=tmp_path / "ours")
    assert len(ours) == len(theirs) == sum(LENGTHS) and ours.fps == theirs.fps
    for mine, its in zip(
        (ours[i] for i in range(len(ours))), (theirs[i] for i in range(len(ours)))
    ):
        for key in ("observation.state", "action", "timestamp", "episode_index", "frame_index"):
            np.testing.assert_allclose(mine[key], its[key], atol=1e-6, err_msg=key)
        gap = (mine["observation.images.front"] - its["observation.images.front"]).abs()
        assert float(gap.max()) <= (1.01 / 255 if video else 0.0)
        assert mine["task"] == its["task"]


def test_what_is_wrong_with_an_older_dataset_is_one_error(tmp_path, capsys):
    old = older(tmp_path / "old", False, "v2.0")
    assert main(["data", "convert", str(old), str(tmp_path / "good")]) == 0
    same(tmp_path / "good")
    lines = (old / "meta" / "episodes.jsonl").read_text()
    (old / "meta" / "episodes.jsonl").write_text(lines.replace('"length": 5', '"length": 6'))
    new = v3(tmp_path / "new", False)
    (tmp_path / "empty").mkdir()
    for given, said in (
        ([str(old), str(tmp_path / "b")], "has 5 rows, and episodes.jsonl says 6"),
        ([str(new), str(tmp_path / "b")], "v3 is read as it is"),
        ([str(tmp_path / "empty"), str(tmp_path / "b")], "is of no format that is known here"),
        ([str(tmp_path / "none"), str(tmp_path / "b")], "no such file or folder"),
        ([str(old), str(tmp_path / "good")], "exists already"),
        ([str(old), str(tmp_path / "b"), "--rename", "x"], "is no KEY=OURS"),
        ([str(old), str(tmp_path / "b"), "--rename", "hand=action"], "has no hand, it has"),
        ([str(old), str(tmp_path / "b"), "--stride", "0"], "must be 1 or more"),
        ([str(old), str(tmp_path / "b"), "--actions", "both"], "use one of"),
        ([str(old), str(tmp_path / "b"), "--weights", "1", "2"], "2 numbers for 1 sources"),
    ):
        assert main(["data", "convert", *given]) == 2, given
        assert said in capsys.readouterr().err, given
    assert not (tmp_path / "b").exists() and not list(tmp_path.glob(".*partial*"))


def test_stride_moves_goals_and_weights(tmp_path):
    old = older(tmp_path / "old", False)

    def converted(name: str, *more: str):
        assert main(["data", "convert", str(old), str(tmp_path / name), *more]) == 0
        return load_demonstrations(tmp_path / name)

    thinned = converted("thin", "--stride", "3")
    assert thinned.embodiment.control_hz == pytest.approx(10 / 3)
    state, actions = numbers(0, 7)
    np.testing.assert_array_equal(thinned.proprio[:3], state[[0, 3, 6]])
    np.testing.assert_array_equal(thinned.actions[:3], actions[[2, 5, 6]])
    moves = converted("delta", "--actions", "delta", "--keep", "grip")
    np.testing.assert_allclose(moves.actions[:7, :2], (actions - state)[:, :2], atol=1e-5)
    np.testing.assert_array_equal(moves.actions[:7, 2], actions[:, 2])

    args = ["data", "convert", str(old), str(old), str(tmp_path / "mixed"), "--weights", "1", "3"]
    assert main(args) == 0
    mixed = len(load_demonstrations(tmp_path / "mixed").actions)
    # all 21 rows of the one that weighs more, and about 7 of the other
    assert mixed - 21 in (5, 7, 9)


# --------------------------------------------------------------------------------------------- HDF5
def test_robomimic(tmp_path, capsys):
    """Beside what h5py, which robomimic reads with, says."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demo.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 20}})
        for i in (0, 1, 10):  # by number, not by letter
            state, actions = numbers(i, 6)
            demo = data.create_group(f"demo_{i}")
            demo["actions"], demo["rewards"] = actions, np.eye(6)[-1]
            demo["obs/robot0_eef_pos"], demo["obs/robot0_eef_quat"] = (
                state,
                np.tile(state, 2)[:, :4],
            )
            demo["obs/robot0_gripper_qpos"] = state[:, :2]
            demo["obs/agentview_image"] = pictures(i, 6)
            demo["obs/depth"] = pictures(i, 6)[..., :1].astype(np.float32)
    out = tmp_path / "out"
    command = ["data", "convert", str(path), str(out)]
    assert main(command) == 2 and "depth is float32" in capsys.readouterr().err
    assert main([*command, "--camera", "agentview"]) == 2
    assert "--instruction" in capsys.readouterr().err
    assert main([*command, "--camera", "agentview", "--instruction", "lift it"]) == 0
    found = load_demonstrations(out)
    with h5py.File(path, "r") as file:
        demos = [file["data"][f"demo_{i}"] for i in (0, 1, 10)]
        np.testing.assert_array_equal(
            found.actions, np.concatenate([np.asarray(d["actions"]) for d in demos])
        )
        shown = np.concatenate([np.asarray(d["obs/agentview_image"]) for d in demos])
    np.testing.assert_array_equal(np.stack([np.asarray(x) for x in frames(found)]), shown)
    assert found.embodiment.control_hz == 20 and found.proprio.shape == (18, 9)
    own = [*command[:3], str(tmp_path / "own"), "--instruction", "x", "--camera", "agentview"]
    assert main([*own, "--rename", "robot0_eef_pos=observation.state"]) == 0
    np.testing.assert_array_equal(
        load_demonstrations(tmp_path / "own").proprio[:6], numbers(0, 6)[0]
    )


def frames(data, camera: str = "agentview"):
    return [data.images[camera][i] for i in range(len(data.actions))]


def test_libero_is_read_as_its_env_reads_it(tmp_path):
    pytest.importorskip("h5py")
    import test_libero_demos as libero

    file = sorted(libero.write_hdf5(tmp_path / "libero", demos=3).glob("*.hdf5"))[0]
    assert main(["data", "convert", str(file), str(tmp_path / "out")]) == 0
    found = load_demonstrations(tmp_path / "out")
    demos = libero.LiberoDemonstrations.episodes(file, libero.SPEC)
    expected = {key: [] for key in ("actions", "proprio", "agentview")}
    for demo in demos:
        expected["actions"].append(demo["actions"])
        expected["proprio"].append(demo["proprio"])
        expected["agentview"].append(demo["images"]["agentview"])
    np.testing.assert_array_equal(found.actions, np.concatenate(expected["actions"]))
    np.testing.assert_array_equal(found.proprio, np.concatenate(expected["proprio"]))
    shown = np.stack([np.asarray(x) for x in frames(found)])
    np.testing.assert_array_equal(shown, np.concatenate(expected["agentview"]))


# --------------------------------------------------------------------------------------------- RLDS
def test_rlds_without_its_library_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    (tmp_path / "d").mkdir()
    for name in ("features.json", "dataset_info.json"):
        (tmp_path / "d" / name).write_text("{}")
    assert main(["data", "convert", str(tmp_path / "d"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "tensorflow" in said and "RLDS" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of tensorflow, many
def test_rlds_is_read_as_by_tensorflow_datasets(tmp_path, capsys):
    pytest.importorskip("tensorflow")
    tfds = pytest.importorskip("tensorflow_datasets")
    step = {
        "observation": {
            "image": tfds.features.Image(shape=(16, 24, 3)),
            "state": tfds.features.Tensor(shape=(3,), dtype=np.float32),
        },
        "action": tfds.features.Tensor(shape=(3,), dtype=np.float32),
        "reward": tfds.features.Scalar(dtype=np.float32),
        "language_instruction": tfds.features.Text(),
    }
    (tmp_path / "rlds").mkdir()
    features = tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step)})
    identity = tfds.core.dataset_info.DatasetIdentity(
        name="paper", version="1.0.0", data_dir=str(tmp_path / "rlds"), module_name=""
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features)
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=10)
    writer.initialize_splits(["train"])

    def rows(episode: int, length: int) -> list[dict]:
        state, actions = numbers(episode, length)
        return [
            {
                "observation": {"image": pictures(episode, length)[t], "state": state[t]},
                "action": actions[t],
                "reward": float(t == length - 1),
                "language_instruction": f"task {episode}",
            }
            for t in range(length)
        ]

    writer.add_examples({"train": [{"steps": rows(i, n)} for i, n in enumerate(LENGTHS)]})
    writer.close_all()
    given = ["data", "convert", str(tmp_path / "rlds"), str(tmp_path / "out")]
    assert main(given) == 2 and "--fps" in capsys.readouterr().err
    assert main([*given, "--fps", "5"]) == 0
    found = load_demonstrations(tmp_path / "out")
    builder = tfds.builder_from_directory(str(tmp_path / "rlds"))
    steps = [
        step
        for episode in tfds.as_numpy(builder.as_dataset(split="train"))
        for step in episode["steps"]
    ]
    assert len(steps) == sum(LENGTHS) and found.embodiment.control_hz == 5
    np.testing.assert_array_equal(found.actions, np.stack([x["action"] for x in steps]))
    seen = [x["observation"] for x in steps]
    np.testing.assert_array_equal(found.proprio, np.stack([x["state"] for x in seen]))
    np.testing.assert_array_equal(
        np.stack(frames(found, "image")), np.stack([x["image"] for x in seen])
    )


# --------------------------------------------------------------------------------------------- MCAP
def jpeg(frame: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(frame).save(out, format="PNG")
    return out.getvalue()


def test_mcap_topics_are_brought_to_one_rate(tmp_path, capsys):
    """Joints at 50 Hz, goals at 20, pictures at 10: a row has what was said last."""
    pytest.importorskip("mcap")
    from mcap.writer import Writer

    shots, path = pictures(0, 10), tmp_path / "a.mcap"
    with open(path, "wb") as file:
        writer = Writer(file)
        writer.start()
        schema = writer.register_schema("any", "jsonschema", b"{}")
        channels = {
            topic: writer.register_channel(topic, encoding, schema)
            for topic, encoding in (
                ("/joints", "json"), ("/goal", "json"), ("/front", "json"), ("/odd", "cdr"),
            )
        }  # fmt: skip

        def say(topic: str, at: float, message: dict) -> None:
            data, stamp = json.dumps(message).encode(), round(1e9 * (5.0 + at))
            writer.add_message(channels[topic], stamp, data, stamp)

        for i in range(50):
            say("/joints", i / 50, {"name": ["a", "b"], "position": [i, -i]})
        for i in range(20):
            say("/goal", i / 20, {"data": [i, 0.5]})
        for i in range(10):
            image = base64.b64encode(jpeg(shots[i])).decode()
            say("/front", i / 10, {"data": image, "format": "png"})
        say("/odd", 0.0, {})
        writer.finish()
    named = ["--rename", "/joints=observation.state", "--rename", "/goal=action"]
    given = ["data", "convert", str(path), str(tmp_path / "out"), "--instruction", "go"]
    assert main(given) == 2 and "--fps" in capsys.readouterr().err
    assert main([*given, "--fps", "10"]) == 2
    assert "/joints, /goal, /front, /odd" in capsys.readouterr().err
    assert main([*given, "--fps", "10", *named, "--rename", "/odd=side"]) == 2
    assert "encoded as 'cdr'" in capsys.readouterr().err
    assert main([*given, "--fps", "10", *named, "--rename", "/front=front"]) == 0
    found = load_demonstrations(tmp_path / "out")
    np.testing.assert_array_equal(found.proprio[:, 0], np.arange(0, 50, 5))
    np.testing.assert_array_equal(found.actions[:, 0], np.arange(0, 20, 2))
    np.testing.assert_array_equal(np.stack(frames(found, "front")), shots)
    assert found.embodiment.proprio_names == ("a", "b")
