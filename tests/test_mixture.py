"""Several recordings of one robot as one: ``dataset=[A,B]`` and ``'dataset={A: 3, B: 1}'``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_recording import SMALL, TEXTS, foreign, helped, write

from vla_rl.cli import main
from vla_rl.config import compose
from vla_rl.config.recording import RecordingConfig, as_datasets
from vla_rl.data.demonstrations import DatasetSampler, DemonstrationDataset
from vla_rl.data.frames import OnDisk, StoredFrames, on_disk
from vla_rl.data.lerobot_writer import feature_statistics
from vla_rl.data.mixture import Mixture, open_mixture
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation.action_error import action_errors, table

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("PIL.Image")

FEW, MANY = (10, 10, 10, 10), (20, 20, 20, 20, 20, 20)


def edited(path: Path, **info: Any) -> Path:
    """With other ``meta/info.json``: ``fps``, ``robot_type``, ``names`` of state and action."""
    file = path / "meta" / "info.json"
    for data in path.glob("data/*/*.parquet") if "fps" in info else ():
        rows = pq.read_table(data)
        stamps = pa.array([i / info["fps"] for i in rows["frame_index"].to_pylist()], pa.float32())
        place = rows.column_names.index("timestamp")
        pq.write_table(rows.set_column(place, "timestamp", stamps), data)
    found = json.loads(file.read_text())
    if names := info.pop("names", None):
        for key in ("observation.state", "action"):
            found["features"][key]["names"] = names
    file.write_text(json.dumps(found | info))
    return path


def scaled(
    path: Path, factor: float, keys: tuple[str, ...] = ("observation.state", "action")
) -> Path:
    """With state and action in another unit."""
    for file in path.glob("data/*/*.parquet"):
        found = pq.read_table(file)
        for key in keys:
            rows = [[factor * x for x in row] for row in found[key].to_pylist()]
            place, kind = found.column_names.index(key), found.schema.field(key).type
            found = found.set_column(place, key, pa.array(rows, kind))
        pq.write_table(found, file)
    (path / "meta" / "stats.json").unlink()
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, Path]:
    """40 rows in four episodes, and 120 in six; two tasks."""
    folder = tmp_path_factory.mktemp("two")
    return (
        foreign(write(folder / "few", lengths=FEW)),
        foreign(write(folder / "many", lengths=MANY)),
    )


def opened(paths: Any, weights: tuple[float, ...] = (), **options: Any) -> Mixture:
    return open_mixture([str(path) for path in paths], weights, RecordingConfig(**options))


def shown(
    paths: Any, weights: tuple[float, ...] = (), disk: OnDisk | None = None, **options: Any
) -> DemonstrationDataset:
    return opened(paths, weights, **options).demonstrations(2, TEXTS, disk=disk)


# ------------------------------------------------------------------------------------------- config
def test_what_dataset_may_be():
    assert compose(["run=sft", "dataset=[a,b/c]"]).datasets == ["a", "b/c"]
    config = compose(["run=sft", "dataset={a: 3, user/name@v1: 1}"])
    assert config.dataset == {"a": 3.0, "user/name@v1": 1.0}
    assert compose(["run=sft", "dataset=[a]"]).dataset == "a"
    assert compose(["run=sft", "dataset={a: 2}"]).dataset == "a"
    assert compose(["run=sft"]).datasets == []
    assert as_datasets(["a", "b"], str.upper) == ["A", "B"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("dataset=[]", r"dataset=\[\] names none: give a folder"),
        ("dataset={}", r"names none"),
        ("dataset={a: 0, b: 1}", r"dataset.a=0 is out of range: a weight is above 0"),
        ("dataset={a: -2, b: 1}", r"dataset.a=-2 is out of range"),
        ("dataset={a: nan, b: 1}", r"dataset.a=nan is out of range"),
        ("dataset={a: inf, b: 1}", r"dataset.a=inf is out of range"),
        ("dataset={a: much, b: 1}", r"dataset.a='much' is no weight: give a number above 0"),
        ("dataset={a: true, b: 1}", r"dataset.a=True is no weight"),
        ("dataset={a: null, b: 1}", r"dataset.a=None is no weight"),
        ("dataset=[a,a]", r"dataset names a twice: name it once, and give it a weight"),
        ("dataset=[a,./a/]", r"dataset names ./a/ twice|dataset names a twice"),
        ("dataset=[a,'']", r"has an empty name"),
        ("dataset=[a,[b]]", r"dataset has \['b'\], which is no name"),
        ("dataset=[a,true]", r"dataset has True, which is no name"),
        ("dataset=null", r"dataset has None, which is no name"),
    ],
)
def test_what_dataset_may_not_be(told, said):
    with pytest.raises(ConfigError, match=said):
        compose(["run=sft", told])


# -------------------------------------------------------------------------------------- what is one
def test_what_is_put_together_is_one_robot_with_the_tasks_and_bounds_of_all(two):
    mixed = opened(two)
    assert [t.task_id for t in mixed.tasks] == list(TEXTS)
    assert [t.horizon for t in mixed.tasks] == [20, 20]
    assert mixed.embodiment.name == "few", "none says its robot: the first one's folder"
    # goals of joint 0: 2 … 30 + 20 in one, 2 … 50 + 40 in the other; a tenth of 88 on both sides
    assert (mixed.embodiment.action_low[0], mixed.embodiment.action_high[0]) == (-6.8, 98.8)
    assert {part.embodiment for part in mixed.parts} == {mixed.embodiment}
    assert "25.0% of what is drawn is of few: 4 episodes, 40 rows" in mixed.said()
    assert "every row is drawn as often as any other" in mixed.said()
    assert "75.0% of what is drawn is of few" in opened(two, (3.0, 1.0)).said()


def test_rows_and_pictures_are_those_of_each(two):
    mixed = shown(two)
    parts = [shown([path]) for path in two]
    assert len(mixed) == 160 and [e.source for e in mixed.episodes] == [0] * 4 + [1] * 6
    assert torch.equal(mixed.actions, torch.cat([part.actions for part in parts]))
    index = torch.tensor([3, 159, 40, 39, 3])
    for name in ("front", "wrist"):
        whole = torch.cat([part.images[name] for part in parts])
        assert torch.equal(mixed.images[name][index], whole[index])
    observation, actions, valid = mixed.at(torch.tensor([39, 40]))
    assert observation.instruction == (TEXTS[1], TEXTS[0])
    assert valid.tolist() == [[True, False], [True, True]], "a chunk ends with its dataset"
    assert actions[0, 0].tolist() == actions[0, 1].tolist()


# ------------------------------------------------------------------------------------------ weights
def test_each_is_drawn_by_its_weight_whatever_its_rows(two):
    """Of 20,000 draws three quarters are of the small one: 15,000, give or take 5 x 61."""
    mixed = shown(two, (3.0, 1.0))
    rows = mixed.draw(20_000, torch.Generator().manual_seed(0))
    few = rows[rows < 40]
    assert abs(len(few) - 15_000) < 306
    assert few.unique().numel() == 40 and rows[rows >= 40].unique().numel() == 120
    # each of the 40 rows 375 times, give or take 5 x 19
    assert (few.bincount() - 375).abs().max() < 97
    alike = shown(two).draw(20_000, torch.Generator().manual_seed(0))
    assert abs(int((alike < 40).sum()) - 5_000) < 306
    first = mixed.draw(20_000, torch.Generator().manual_seed(0), first_share=1.0)
    assert abs(int((first < 40).sum()) - 15_000) < 306 and first.unique().numel() == 2 * 10


def test_weights_hold_for_what_is_worth_drawing(two):
    mixed = shown(two, (1.0, 1.0))
    mixed.worth = torch.arange(160) >= 38  # two rows of one, all of the other
    rows = mixed.draw(2_000, torch.Generator().manual_seed(0))
    assert rows.min() >= 38 and abs(int((rows < 40).sum()) - 1_000) < 112
    mixed.worth = torch.arange(160) >= 40
    assert mixed.draw(500, torch.Generator().manual_seed(0)).min() >= 40


def test_a_session_is_drawn_from_by_the_rows_that_a_person_chose(two, tmp_path):
    """Forty rows of demonstrations, and thirty of a session, of which a person chose every third:
    five of each episode of thirteen, two of that of four."""
    session = foreign(helped(tmp_path / "session", lengths=(13, 13, 4)))
    mixed = opened([two[0], session])
    joined = mixed.demonstrations(2, TEXTS)
    assert joined.drawing.count == 40 + 12
    assert bool(joined.by_person[:40].all())
    assert " 76.9% of what is drawn is of few: 4 episodes, 40 rows\n" in mixed.said()
    assert " 23.1% of what is drawn is of session: 3 episodes, 30 rows, 12 of them" in mixed.said()


def test_statistics_are_of_what_is_drawn():
    """Rows 0, 1, 2, 3 of one dataset and 10 of another, as often drawn: by hand."""
    values, mass = np.array([[0.0], [1.0], [2.0], [3.0], [10.0]]), np.array([1.0, 1, 1, 1, 4])
    found = feature_statistics(values, mass)
    assert found["mean"] == pytest.approx([5.75])  # (1.5 + 10) / 2
    # E x^2 = (0 + 1 + 4 + 9) / 8 + 100 / 2 = 51.75
    assert found["std"] == pytest.approx([np.sqrt(51.75 - 5.75**2)])
    assert (found["min"], found["max"]) == ([0.0], [10.0])
    assert [float(found[q][0]) for q in ("q01", "q10", "q50", "q90")] == [0.0, 0.0, 3.0, 10.0]
    again = feature_statistics(np.repeat(values, [1, 1, 1, 1, 4], axis=0))
    assert found["mean"] == again["mean"] and found["std"] == pytest.approx(again["std"])


def test_statistics_of_a_mixture_follow_its_weights(two):
    alone = [shown([path]).action_stats["mean"][0] for path in two]
    assert shown(two).action_stats["mean"][0] == pytest.approx(
        (40 * alone[0] + 120 * alone[1]) / 160
    )
    mixed = shown(two, (3.0, 1.0))
    assert mixed.action_stats["mean"][0] == pytest.approx((3 * alone[0] + alone[1]) / 4)
    train, _ = mixed.split(1, 0.2, 0)
    assert train.weights == (3.0, 1.0)
    of = torch.cat([torch.full((e.length,), e.source) for e in train.episodes])
    parts = [train.actions[of == i, 0].mean() for i in (0, 1)]
    assert train.action_stats["mean"][0] == pytest.approx(float(3 * parts[0] + parts[1]) / 4)


def test_batches_are_those_of_the_seed_and_go_on_after_a_resume(two, tmp_path):
    held, stored = shown(two, (3.0, 1.0)), shown(two, (3.0, 1.0), OnDisk(tmp_path, 30_000))
    assert not held.stays_on_disk and stored.stays_on_disk
    one, other = DatasetSampler(held, 8, 1, 0.2), DatasetSampler(stored, 8, 1, 0.2)

    def alike() -> None:
        a, b = one.next_batch(), other.next_batch()
        assert torch.equal(a[1], b[1]) and a[0].instruction == b[0].instruction
        assert all(torch.equal(a[0].images[name], b[0].images[name]) for name in a[0].images)

    for _ in range(4):
        alike()
    state = other.state_dict()
    other = DatasetSampler(stored, 8, 9, 0.2)
    other.next_batch()
    other.load_state_dict(state)
    for _ in range(4):
        alike()


def test_what_is_held_in_memory_is_shared_by_rows(two, tmp_path):
    picture = 16 * 16 * 3
    whole = 160 * 2 * picture
    assert not shown(two, disk=OnDisk(tmp_path, whole)).stays_on_disk
    stored = shown(two, disk=OnDisk(tmp_path, whole - 2 * picture))
    parts = stored.images["front"].parts
    assert all(isinstance(part, StoredFrames) and on_disk(part) for part in parts)
    stored.at(torch.arange(160))
    kept = [part._kept for part in parts]
    assert sum(k._bytes for k in kept) <= whole - 2 * picture
    assert [k.most // picture for k in kept] == [79, 238]


def test_one_that_has_none_of_the_tasks_is_not_drawn_from(two, tmp_path):
    other = edited(foreign(write(tmp_path / "other", lengths=(5,))), robot_type="unknown")
    mixed = opened([two[0], other], (1.0, 9.0))
    assert len(mixed.demonstrations(2, [TEXTS[1]])) == 20
    assert len(mixed.demonstrations(2, TEXTS)) == 45


# ------------------------------------------------------------------------------------------- alike?
def test_names_that_differ_are_given_alike(two, tmp_path):
    other = foreign(write(tmp_path / "o"), {"observation.images.front": "observation.images.top"})
    edited(other, names=["main_shoulder", "claw"])
    with pytest.raises(
        UserError, match=r"differ in action: \['shoulder.pos', 'gripper.pos'\], and"
    ):
        opened([two[0], other])
    numbers = {"main_shoulder": "shoulder.pos", "claw": "gripper.pos"}
    with pytest.raises(UserError, match=r"differ in cameras: .*'top': .*env.cameras=\[wrist\], or"):
        opened([two[0], other], rename=numbers)
    mixed = opened([two[0], other], rename={**numbers, "observation.images.top": "front"})
    assert mixed.embodiment.action_names == ("shoulder.pos", "gripper.pos")
    assert mixed.embodiment.camera_names == ("front", "wrist")
    assert len(opened([two[0], other], rename=numbers, cameras=["wrist"]).parts) == 2
    alone = opened([other], rename=numbers).embodiment
    assert alone.action_names == alone.proprio_names == ("shoulder.pos", "gripper.pos")
    with pytest.raises(UserError, match=r"two numbers of observation.state the name 'claw'"):
        opened([other], rename={"main_shoulder": "claw"})
    with pytest.raises(UserError, match=r"env.rename has 'elbow', and none of .* has it"):
        opened([two[0], other], rename={"elbow": "x"})


def test_rates_that_differ_are_brought_to_one(two, tmp_path):
    slow = edited(foreign(write(tmp_path / "slow")), fps=10)
    with pytest.raises(UserError, match=r"differ in rate \(Hz\): 30.0, and 10.*env.control_hz=10,"):
        opened([two[0], slow])
    mixed = opened([two[0], slow], control_hz=10.0)
    assert [part.rows.stride for part in mixed.parts] == [3, 1]
    assert mixed.embodiment.control_hz == 10.0


@pytest.mark.parametrize(
    ("made", "options", "said"),
    [
        (
            lambda path: edited(foreign(write(path)), fps=12.7),
            {},
            r"rows of 30 and 12.7 Hz make no common rate",
        ),
        (
            lambda path: edited(foreign(write(path)), robot_type="koch"),
            {"also": "so101"},
            r"is of the robot 'so101', and .* of 'koch': only recordings of one robot",
        ),
        (
            lambda path: edited(foreign(write(path)), names=["gripper.pos", "shoulder.pos"]),
            {},
            r"differ in action: .* write one of them anew in the order of the other",
        ),
        (lambda path: write(path), {}, r"says which robot it is of, and .* does not: say that"),
        (
            lambda path: scaled(foreign(write(path)), np.pi / 180),
            {},
            r"action of .* reaches .* times as far as that of .*, as degrees do beside radians",
        ),
    ],
)
def test_what_is_not_of_one_robot_is_refused(two, tmp_path, made, options, said):
    first = two[0]
    if also := options.pop("also", ""):
        first = edited(foreign(write(tmp_path / "first")), robot_type=also)
    other = made(tmp_path / "other")
    with pytest.raises(UserError, match=said):
        opened([first, other], **options)


def test_who_says_the_unit_is_believed(two, tmp_path):
    small = scaled(foreign(write(tmp_path / "small")), np.pi / 180)
    assert opened([two[0], small], units=["rad"]).embodiment.action_units == ("rad", "rad")


def test_goals_in_another_unit_than_the_state_are_doubtful(tmp_path, capsys):
    data = scaled(foreign(write(tmp_path / "d")), np.pi / 180, keys=("action",))
    assert main(["data", "check", str(data)]) == 0
    said = capsys.readouterr().out
    assert "times less far than the state of the same names" in said and "radians" in said


def test_whose_demonstrations_all_failed_is_said(tmp_path):
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    for file in other.glob("meta/episodes/*/*.parquet"):
        found = pq.read_table(file)
        place = found.column_names.index("success")
        failed = pa.array([False] * len(found))
        pq.write_table(found.set_column(place, "success", failed), file)
    with pytest.raises(UserError, match=r"other: all 8 demonstrations are marked as failures"):
        opened([one, other]).require(failures=False)


def test_files_of_one_robot_agree_or_are_refused(tmp_path):
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert opened([one, other]).embodiment.name == "nobody"
    file = other / "meta" / "embodiment.json"
    spec = json.loads(file.read_text())
    for change, said in (
        ({"action_units": ["rad", "deg"]}, r"differ in action_units: \['deg', 'deg'\], and"),
        ({"action_high": [99.0, 100.0]}, r"differ in action_high: .*with env.embodiment=FOLDER"),
        ({"name": "somebody"}, r"differ in name: 'nobody', and 'somebody'"),
    ):
        file.write_text(json.dumps(spec | change))
        with pytest.raises(UserError, match=said):
            opened([one, other])


# --------------------------------------------------------------------------------------------- runs
def test_held_out_episodes_and_errors_are_of_each_dataset(two):
    train, held = shown(two, (3.0, 1.0)).split(10, 0.2, 0)
    # of each task, two and three episodes, one is spared where there are three
    assert held is not None and [e.source for e in held.episodes] == [1, 1]
    more = shown([two[1], two[0]]).split(10, 0.5, 0)[1]
    assert more is not None and [e.source for e in more.episodes] == [0, 0, 1, 1]

    class Perfect:
        """The goal of joint 0 is 2 ahead; off by one in the first dataset, whose rows are 20."""

        chunk_length, can, training = 2, frozenset(), False

        def act(self, observation, **_):
            from vla_rl.types import ActionChunk, PolicyOutput

            actions = observation.proprio[:, None] + torch.tensor([[3.0, 0.0], [5.0, 0.0]])
            chunk = ActionChunk(actions, torch.ones(actions.shape[:2], dtype=torch.bool))
            return PolicyOutput(chunk, torch.zeros(len(actions)), {})

        def eval(self):
            return self

        def train(self, mode=True):
            return self

    found = action_errors(Perfect(), more, train.actions)
    spread = float(train.actions[:, 0].double().std(unbiased=False))
    assert [(d["dataset"], d["episodes"], d["decisions"]) for d in found["datasets"]] == [
        ("many", 2, 38),
        ("few", 2, 18),
    ]
    assert all(d["policy"] == pytest.approx(1.0 / spread) for d in found["datasets"])
    assert "few: off by" in table(found)
    assert [
        d["decisions"] for d in action_errors(Perfect(), more, train.actions, rows=20)["datasets"]
    ] == [10, 10]


def test_sft_on_two_datasets_and_on_after_a_stop(two, tmp_path, capsys):
    few, many = two
    run = [
        "train",
        "run=sft",
        f"dataset={{{few}: 3, {many}: 1}}",
        *SMALL,
        f"output_dir={tmp_path}",
        "sft.checkpoint_every=6",
    ]
    assert main([*run, "name=whole"]) == 0
    said = capsys.readouterr().out
    assert "75.0% of what is drawn is of few: 4 episodes, 40 rows" in said
    found = json.loads((tmp_path / "whole" / "actions.json").read_text())["sft"]
    assert [d["dataset"] for d in found["datasets"]] == ["many"]
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "By dataset, in spreads of the action" in page
    # another weight is another run
    assert main([arg.replace(": 3", ": 2") for arg in run] + ["name=whole"]) == 2
    assert "dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["phases=[sft,rl,report]", "algorithm=iql", "rl.iterations=0"],
            "has weights, by which SFT",
        ),
        (
            ["env=toy", "phases=[sft]"],
            "names several, which env=dataset alone puts together",
        ),
        (["dataset=[{few},{missing}]"], "missing: there is no such file or folder"),
        (["dataset=[{few},someone/else]"], "'vla-rl hub fetch someone/else --dataset'"),
        (["dataset=[{few},{file}]"], "file is not a LeRobotDataset folder"),
        (["sft.labels=sent"], "does not hold what was sent"),
        (["env.cameras=[top]"], "env.cameras has 'top'"),
        (["env.control_hz=7"], "whose rows make no 7 Hz"),
        (["tasks=[fold]"], "unknown task 'fold'"),
    ],
)
def test_what_a_run_refuses_of_several(two, tmp_path, capsys, given, said):
    (tmp_path / "file").write_text("no folder")
    few, many = two
    given = [
        arg.format(few=few, missing=tmp_path / "missing", file=tmp_path / "file")
        if "dataset=[" in arg
        else arg
        for arg in given
    ]
    if not any("dataset=" in arg for arg in given):
        given = [f"dataset={{{few}: 3, {many}: 1}}", *given]
    run = "run=toy" if "env=toy" in given else "run=sft"
    assert main(["train", run, *SMALL, f"output_dir={tmp_path}", "name=bad", *given]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "bad").exists()
