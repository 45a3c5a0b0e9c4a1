"""Published LIBERO demonstrations, on small files written in the published layouts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sim.libero_demos import LiberoDemonstrations, moving_steps
from vla_rl.assembly.context import demonstrations
from vla_rl.config import RunConfig
from vla_rl.config.run import CollectConfig
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_writer import DemonstrationWriter
from vla_rl.data.published import Wanted, load_published
from vla_rl.errors import EmbodimentMismatch, UserError
from vla_rl.types import CameraSpec, EmbodimentSpec, TaskSpec

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'vla-rl[libero]'")

SIZE, STEPS = 8, 9
SPEC = EmbodimentSpec(
    name="libero_panda_osc_relative",
    action_names=("dx", "dy", "dz", "drx", "dry", "drz", "gripper"),
    action_units=("0.05 m",) * 3 + ("0.5 rad",) * 3 + ("command",),
    action_low=(-1.0,) * 7,
    action_high=(1.0,) * 7,
    frame="world",
    rotation="axis_angle_delta",
    gripper="-1 open, +1 close",
    control_hz=20.0,
    cameras=(CameraSpec("agentview", SIZE, SIZE), CameraSpec("robot0_eye_in_hand", SIZE, SIZE)),
    proprio_names=("x", "y", "z", "rx", "ry", "rz", "left", "right"),
)
TASKS = ("pick_up_the_milk_and_place_it_in_the_basket", "KITCHEN_SCENE3_turn_on_the_stove")
TEXTS = ("pick up the milk and place it in the basket", "turn on the stove")


def demonstration(seed: int) -> dict[str, np.ndarray]:
    """Random rows; the actions of steps 0, 3 and 5 do nothing, that of step 6 only closes the
    gripper."""
    rng = np.random.default_rng(seed)
    actions = np.concatenate([rng.uniform(-1, 1, (STEPS, 6)), np.full((STEPS, 1), -1.0)], axis=1)
    actions[[0, 3, 5, 6], :6] = 0.0
    actions[6:, 6] = 1.0
    return {
        "actions": actions,
        "agentview_rgb": rng.integers(0, 256, (STEPS, SIZE, SIZE, 3), dtype=np.uint8),
        "eye_in_hand_rgb": rng.integers(0, 256, (STEPS, SIZE, SIZE, 3), dtype=np.uint8),
        "ee_states": rng.normal(size=(STEPS, 6)),
        "gripper_states": rng.normal(size=(STEPS, 2)),
    }


def write_hdf5(folder: Path, demos: int = 11, convention: str | None = "opengl") -> Path:
    """One file per task; ``convention`` None is the layout of OpenVLA's regenerated files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, task in enumerate(TASKS):
        with h5py.File(folder / f"{task}_demo.hdf5", "w") as file:
            data = file.create_group("data")
            if convention is not None:
                data.attrs["macros_image_convention"] = convention
                data.attrs["problem_info"] = json.dumps({"language_instruction": TEXTS[number]})
                data.attrs["num_demos"] = demos
            for i in range(demos):
                rows = demonstration(100 * number + i)
                demo = data.create_group(f"demo_{i}")
                demo.create_dataset("actions", data=rows.pop("actions"))
                for name, values in rows.items():
                    demo.create_dataset(f"obs/{name}", data=values)
    return folder


def read(path: Path, spec: EmbodimentSpec = SPEC, **options: object) -> DemonstrationDataset:
    settings: dict = {
        "instructions": TEXTS,
        "episodes_per_task": 50,
        "keep_noops": False,
        **options,
    }
    return load_published(LiberoDemonstrations, path, spec, 4, Wanted(**settings))


def test_noops_are_those_of_openvla() -> None:
    """A step that only changes the gripper stays, also right after a dropped one; a first step
    that moves nothing goes."""
    still, move = [0.0] * 6, [0.1] + [0.0] * 5
    actions = np.array(
        [
            [*still, -1],
            [*move, -1],
            [*still, -1],
            [*still, 1],
            [*still, 1],
            [*move, 1],
            [1e-5] * 6 + [1],
        ]
    )
    assert moving_steps(actions).tolist() == [False, True, False, True, False, True, False]
    assert moving_steps(np.array([[*still, 1.0], [*still, -1.0]])).tolist() == [False, False]


def test_published_rows_are_paired_with_the_next_action(tmp_path: Path) -> None:
    """LIBERO's recorder stores what it sees after each action."""
    dataset = read(write_hdf5(tmp_path / "libero_object"), keep_noops=True)
    # files in alphabetical order
    assert len(dataset.episodes) == 22 and dataset.instructions == TEXTS[::-1]
    # demo_10 after demo_9
    assert [e.init_state_id for e in dataset.episodes[:11]] == list(range(11))
    episode = dataset.episodes[11]
    assert (
        episode.task_id == TASKS[0]
        and episode.instruction == TEXTS[0]
        and episode.length == STEPS - 1
    )
    rows, part = demonstration(0), slice(episode.start, episode.start + episode.length)
    np.testing.assert_array_equal(dataset.actions[part], rows["actions"][1:].astype(np.float32))
    state = np.concatenate([rows["ee_states"], rows["gripper_states"]], axis=1)[:-1].astype(
        np.float32
    )
    np.testing.assert_array_equal(dataset.proprio[part], state)
    for camera, name in (("agentview", "agentview_rgb"), ("robot0_eye_in_hand", "eye_in_hand_rgb")):
        turned = np.rot90(rows[name][:-1], 2, axes=(1, 2))  # by 180 degrees
        np.testing.assert_array_equal(dataset.images[camera][part], turned)


def test_regenerated_rows_are_paired_with_their_own_action(tmp_path: Path) -> None:
    dataset = read(
        write_hdf5(tmp_path, demos=1, convention=None), keep_noops=True, instructions=TEXTS[:1]
    )
    rows = demonstration(0)
    np.testing.assert_array_equal(dataset.actions, rows["actions"].astype(np.float32))
    np.testing.assert_array_equal(dataset.images["agentview"], rows["agentview_rgb"][:, ::-1, ::-1])


def test_images_of_the_other_convention_are_only_mirrored(tmp_path: Path) -> None:
    dataset = read(
        write_hdf5(tmp_path, demos=1, convention="opencv"), keep_noops=True, instructions=TEXTS[:1]
    )
    np.testing.assert_array_equal(
        dataset.images["agentview"], demonstration(0)["agentview_rgb"][:-1, :, ::-1]
    )


def test_noops_are_dropped_with_their_rows(tmp_path: Path) -> None:
    dataset = read(write_hdf5(tmp_path, demos=1, convention=None), instructions=TEXTS[:1])
    rows, kept = demonstration(0), [1, 2, 4, 6, 7, 8]
    np.testing.assert_array_equal(dataset.actions, rows["actions"][kept].astype(np.float32))
    np.testing.assert_array_equal(
        dataset.images["agentview"], rows["agentview_rgb"][kept, ::-1, ::-1]
    )
    _, chunk, valid = dataset.at(torch.tensor([3]))
    np.testing.assert_array_equal(chunk[0, :3], rows["actions"][[6, 7, 8]].astype(np.float32))
    assert valid.tolist() == [[True, True, True, False]]


def test_only_the_tasks_and_as_many_as_asked_for(tmp_path: Path) -> None:
    folder = write_hdf5(tmp_path / "suite")
    dataset = read(folder, instructions=[TEXTS[1].upper()], episodes_per_task=3)
    assert [(e.task_id, e.init_state_id) for e in dataset.episodes] == [
        (TASKS[1], i) for i in range(3)
    ]
    assert len(read(folder / f"{TASKS[0]}_demo.hdf5").episodes) == 11  # a single file
    with pytest.raises(
        DatasetError, match=r"2 files\), none of the tasks asked for: \['open the drawer'\]"
    ):
        read(folder, instructions=["open the drawer"])


def test_fewer_cameras_are_read(tmp_path: Path) -> None:
    one = dataclasses.replace(SPEC, cameras=SPEC.cameras[:1])
    assert list(read(write_hdf5(tmp_path, demos=1), one).images) == ["agentview"]


def test_what_does_not_fit(tmp_path: Path) -> None:
    folder = write_hdf5(tmp_path / "suite", demos=1)
    for changes, text in (
        ({"cameras": (CameraSpec("agentview", 16, 16),)}, "set env.camera_size=8"),
        (
            {"cameras": (CameraSpec("frontview", SIZE, SIZE),)},
            "no camera 'frontview', only agentview",
        ),
        ({"action_high": (3.0,) * 7}, "env.control_mode=relative"),
        (
            {"proprio_names": tuple("abcdefg")},
            r"demo_0, observation.state: it has the shape \[9, 8\], and \[9, 7\] is",
        ),
    ):
        with pytest.raises(UserError, match=text):
            read(folder, dataclasses.replace(SPEC, **changes))
    damaged = tmp_path / "damaged" / f"{TASKS[0]}_demo.hdf5"
    damaged.parent.mkdir()
    damaged.write_bytes((folder / damaged.name).read_bytes()[:2000])
    with pytest.raises(UserError, match=r"_demo.hdf5: .*file.*Fetch the file again"):
        read(damaged.parent)
    with h5py.File(damaged, "w") as file:
        file.create_group("data/demo_0/obs")
    with pytest.raises(UserError, match=r"damaged.*actions"):
        read(damaged)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DatasetError, match=r"no meta/info.json"):
        read(empty)


def write_lerobot(folder: Path, names: dict[str, str]) -> Path:
    """Both tasks in a v3 folder as a conversion has it: other feature names, no embodiment, 10
    Hz."""
    with DemonstrationWriter(folder, dataclasses.replace(SPEC, control_hz=10.0)) as writer:
        for i in range(4):
            rows = demonstration(i)
            writer.add_episode(
                {"agentview": rows["agentview_rgb"], "robot0_eye_in_hand": rows["eye_in_hand_rgb"]},
                np.concatenate([rows["ee_states"], rows["gripper_states"]], axis=1),
                rows["actions"],
                TEXTS[i % 2],
                success=True,
                task_id="",
                init_state_id=i,
            )
    import pyarrow.parquet

    (folder / "meta/embodiment.json").unlink()
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"] = {names.get(k, k): v for k, v in info["features"].items()}
    info["features"]["observation.state"]["names"] = ["state"]
    info["features"]["action"]["names"] = {"motors": list("abcdefg")}
    (folder / "meta/info.json").write_text(json.dumps(info))
    for file in (folder / "data").rglob("*.parquet"):
        table = pyarrow.parquet.read_table(file)
        pyarrow.parquet.write_table(
            table.rename_columns([names.get(n, n) for n in table.column_names]), file
        )
    return folder


@pytest.mark.parametrize("wrist", ["image2", "wrist_image"])
def test_lerobot_conversions(tmp_path: Path, wrist: str) -> None:
    names = {
        "observation.images.agentview": "observation.images.image",
        "observation.images.robot0_eye_in_hand": f"observation.images.{wrist}",
    }
    folder = write_lerobot(tmp_path / "libero", names)
    dataset = read(folder, instructions=TEXTS[:1], episodes_per_task=1)
    rows, kept = demonstration(0), [1, 2, 4, 6, 7, 8]
    assert len(dataset.episodes) == 1 and dataset.episodes[0].instruction == TEXTS[0]
    np.testing.assert_array_equal(dataset.actions, rows["actions"][kept].astype(np.float32))
    # turned already
    np.testing.assert_array_equal(dataset.images["agentview"], rows["agentview_rgb"][kept])
    np.testing.assert_array_equal(
        dataset.images["robot0_eye_in_hand"], rows["eye_in_hand_rgb"][kept]
    )
    assert len(read(folder, keep_noops=True)) == 4 * STEPS
    with pytest.raises(DatasetError, match=r"none of the tasks asked for"):
        read(folder, instructions=["open the drawer"])
    with pytest.raises(EmbodimentMismatch, match=r"no image of camera 'sideview'"):
        read(folder, dataclasses.replace(SPEC, cameras=(CameraSpec("sideview", SIZE, SIZE),)))
    with pytest.raises(EmbodimentMismatch, match=r"expected .7., the dataset has .8."):
        read(folder, dataclasses.replace(SPEC, proprio_names=tuple("abcdefg")))


def test_own_datasets_are_read_as_they_are(tmp_path: Path) -> None:
    with DemonstrationWriter(tmp_path / "own", SPEC) as writer:
        rows = demonstration(0)
        writer.add_episode(
            {"agentview": rows["agentview_rgb"], "robot0_eye_in_hand": rows["eye_in_hand_rgb"]},
            np.concatenate([rows["ee_states"], rows["gripper_states"]], axis=1),
            rows["actions"],
            TEXTS[0],
            success=True,
            task_id="libero_object/0",
            init_state_id=0,
        )
    assert len(read(tmp_path / "own")) == STEPS  # no-ops too
    with pytest.raises(
        DatasetError,
        match="0 of 1 episodes have an instruction of the run's tasks; this one is 'pick",
    ):
        read(tmp_path / "own", instructions=["another"])


def test_a_run_reads_its_training_tasks(tmp_path: Path) -> None:
    """What ``dataset=/path`` comes to in phase SFT; held-out tasks stay out."""
    config = RunConfig(
        dataset=str(write_hdf5(tmp_path / "suite")),
        env_type="libero",
        policy=SimpleNamespace(chunk_length=4),
        collect=CollectConfig(episodes_per_task=2),
    )
    task = TaskSpec("libero_object/0", TEXTS[:1], (), 280)
    run = SimpleNamespace(
        config=config,
        env=SimpleNamespace(embodiment=SPEC),
        dir=tmp_path,
        instructions=list(task.instructions),
    )
    dataset = demonstrations(run)
    assert [e.task_id for e in dataset.episodes] == [TASKS[0]] * 2 and dataset.chunk_length == 4
    # of 8 rows, without those whose next action does nothing
    assert [e.length for e in dataset.episodes] == [6, 6]
