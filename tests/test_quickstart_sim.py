"""The main job on the real simulator, as a user starts it, at the smallest size that goes
through every phase."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl import build, cli
from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.assembly import context
from vla_rl.assembly.env_and_policy import select_tasks
from vla_rl.config import load
from vla_rl.evaluation.evaluate import evaluation_episodes
from vla_rl.learning.online import OnlineRL
from vla_rl.learning.plan import UNLIMITED, propose_episodes
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run import sft_phase
from vla_rl.types import EpisodeSpec

pytestmark = [pytest.mark.real_sim, pytest.mark.slow]

DEMONSTRATIONS, VALIDATION, EVALUATIONS = 3, 1, 4
SMALL = [
    f"collect.episodes_per_task={DEMONSTRATIONS}",
    "collect.action_noise=0.0",
    "collect.workers=1",
    "wandb=false",
    f"sft.validation_episodes={VALIDATION}",
    "sft.updates=6",
    "sft.batch_size=16",
    "sft.warmup_updates=1",
    "slots.workers=1",
    "slots.slots_per_worker=4",
    "rl.iterations=1",
    "rl.episodes_per_iteration=4",
    "rl.eval_every=0",
    "algorithm.critic_warmup_iterations=0",
    "algorithm.epochs=1",
    "evaluate.video_episodes=1",
    f"evaluate.episodes_per_task={EVALUATIONS}",
]


def start(folder: Path, *extra: str) -> int:
    threads = torch.get_num_threads()
    try:
        return cli.main(["quickstart", *SMALL, f"output_dir={folder}", *extra])
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "outputs"
    assert start(folder) == 0
    return folder / "quickstart"


def test_the_folder_holds_the_whole_job(run_folder):
    for name in ("report.html", "summary.json", "config.yaml", "versions.json"):
        assert (run_folder / name).stat().st_size > 0, name
    phases = json.loads((run_folder / "phases.json").read_text())
    assert all(
        phases[name]["complete"]
        for name in ("collect", "sft", "eval_sft", "rl", "eval_rl", "report")
    )
    assert (
        phases["collect"]["episodes"] == DEMONSTRATIONS + VALIDATION
        and phases["rl"]["episodes"] == 4
    )
    for name in ("sft", "rl"):
        assert (run_folder / "checkpoints" / name / "model.safetensors").is_file()
        result = json.loads((run_folder / f"eval_{name}.json").read_text())
        assert result["total"]["episodes"] == EVALUATIONS and result["split"] == "held_out"
    before, after = (
        json.loads((run_folder / f"eval_{n}.json").read_text())["outcomes"] for n in ("sft", "rl")
    )
    assert [o["init_state_id"] for o in before] == [o["init_state_id"] for o in after]
    records = [r for r in read_metrics(run_folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert (
        len(records) == 1
        and records[0]["engine/episodes"] == 4
        and records[0]["engine/retries"] == 0
    )
    if importlib.util.find_spec("av"):
        assert (run_folder / "videos" / "rl.mp4").read_bytes()[4:8] == b"ftyp"
    assert "data:video/mp4" in (
        run_folder / "report.html"
    ).read_text() or not importlib.util.find_spec("av")


@pytest.mark.filterwarnings("ignore")  # of the packages that lerobot imports
def test_the_dataset_is_one_that_lerobot_loads(run_folder):
    pytest.importorskip("lerobot")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("local/quickstart", root=run_folder / "dataset")
    assert dataset.num_episodes == DEMONSTRATIONS + VALIDATION and dataset.num_frames > 4 * 10
    item = dataset[0]
    config = load(run_folder / "config.yaml")
    assert item["task"] and item["action"].ndim == 1 and bool(torch.isfinite(item["action"]).all())
    for camera in config.env.cameras:
        image = item[f"observation.images.{camera}"]
        assert image.shape[0] == 3 and float(image.max()) > float(image.min())


def test_training_and_evaluation_start_from_different_states(run_folder):
    """Of the very episodes that this config runs: the objects lie elsewhere in all of them."""
    config = load(run_folder / "config.yaml")
    config.slots.workers = 0
    simulator = build.implementation("env", config.env_type)(config.env)
    try:
        tasks = select_tasks(simulator.tasks, config.tasks)
        items = [(task.task_id, UNLIMITED) for task in tasks]
        curriculum = Curriculum(config.curriculum, items)
        rl = propose_episodes(config.rl, curriculum, tasks, 0, 0, config.seed)
        collected = [
            EpisodeSpec(tasks[0].task_id, i, split="train")
            for i in range(DEMONSTRATIONS + VALIDATION)
        ]
        held_out = evaluation_episodes(tasks, config.evaluate)
        assert {e.split for e in rl + collected} == {"train"} and {e.split for e in held_out} == {
            "held_out"
        }
        states = {
            name: np.stack([simulator.start(0, episode).privileged for episode in episodes])
            for name, episodes in (("train", rl + collected), ("held_out", held_out))
        }
    finally:
        simulator.close()
    distances = np.abs(states["train"][:, None] - states["held_out"][None]).max(-1)
    assert distances.min() > 1e-4
    again = np.abs(states["held_out"][:, None] - states["held_out"][None]).max(-1)
    assert np.allclose(np.diag(again), 0.0) and (again + np.eye(len(again))).min() > 1e-4


def test_the_same_command_again_skips_what_is_complete(run_folder, monkeypatch, capsys):
    parts = (
        (sft_phase, "collect_demonstrations"),
        (sft_phase, "train_sft"),
        (OnlineRL, "run"),
        (context, "evaluate"),
    )
    for owner, name in parts:
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("a complete phase ran again"))
    assert start(run_folder.parent) == 0
    text = capsys.readouterr().out
    assert all(
        f"{name}: complete" in text for name in ("collect", "sft", "eval_sft", "rl", "eval_rl")
    )


def test_eval_of_its_checkpoint_meets_the_same_episodes(run_folder, tmp_path):
    target = tmp_path / "result.json"
    checkpoint = run_folder / "checkpoints" / "rl"
    arguments = [
        "--episodes",
        "2",
        "--json",
        str(target),
        "slots.workers=0",
        "slots.slots_per_worker=2",
    ]
    assert cli.main(["eval", str(checkpoint), *arguments]) == 0
    mine = json.loads(target.read_text())["outcomes"]
    recorded = json.loads((run_folder / "eval_rl.json").read_text())["outcomes"]
    assert [(o["task_id"], o["init_state_id"], o["instruction"]) for o in mine] == [
        (o["task_id"], o["init_state_id"], o["instruction"]) for o in recorded[:2]
    ]


# What makes each command of the README small enough for a test.
FEW = ["slots.workers=0", "slots.slots_per_worker=2"]
README = {
    "vla-rl train name=first seed=1 rl.iterations=10": SMALL,
    "vla-rl eval outputs/quickstart/checkpoints/rl --episodes 100 --video grid.mp4": [
        "--episodes=2",
        *FEW,
    ],
    "vla-rl advise outputs/quickstart": ["--rollouts=2"],
    "vla-rl robot doctor": [],
    "vla-rl robot run --episodes 5": ["--episodes=1", "--lockstep", "robot.horizon=16"],
    "vla-rl robot learn outputs/quickstart/checkpoints/sft --task lift_cube --out lift": [
        "--episodes=2",
        "--lockstep",
        "robot.horizon=16",
        "algorithm.start_decisions=4",
        "algorithm.batch_size=8",
    ],
    "vla-rl train run=toy name=calm reward.type=my_reward:CalmSuccess reward.effort=0.001": [
        "collect.episodes_per_task=2",
        "sft.updates=2",
        "rl.iterations=1",
        "rl.episodes_per_iteration=4",
        "evaluate.episodes_per_task=2",
    ],
    "vla-rl train run=quickstart cluster=ray cluster.rollouts=2": [*SMALL, "name=on_ray"],
}
ROOT = Path(__file__).resolve().parent.parent


def readme_commands() -> list[str]:
    """Those that need no hardware and no download, as their comments say."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    lines = [line.partition("#") for block in blocks for line in block.splitlines() if line.strip()]
    return [command.strip() for command, _, comment in lines if "needs " not in comment]


def test_every_command_of_the_readme_is_run_by_a_test():
    elsewhere = {
        "make quickstart",
        "make test",
        "python examples/train_from_python.py",
    }  # above, CI, test_examples.py
    assert {c.partition("PYTHONPATH=examples ")[2] or c for c in readme_commands()} == {
        *README,
        *elsewhere,
    }


# Ray forgets the processes that it has ended
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("command", README)
def test_a_command_of_the_readme_runs(command, run_folder, monkeypatch):
    if "cluster=ray" in command:
        pytest.importorskip("ray")
    monkeypatch.chdir(run_folder.parent.parent)
    monkeypatch.syspath_prepend(ROOT / "examples")
    threads = torch.get_num_threads()
    try:
        status = cli.main([*shlex.split(command)[1:], *README[command]])
    finally:
        torch.set_num_threads(threads)
    assert status == 0 or command == "vla-rl robot doctor"  # which fails where something is missing
