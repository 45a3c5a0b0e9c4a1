"""The whole pipeline on the toy task: what a run leaves, resuming after every kind of
interruption, and bad input."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from reward_helpers import trajectory

from vla_rl import checkpoint, cli, storage
from vla_rl import config as configs
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.ppo import PPO
from vla_rl.assembly import context
from vla_rl.assembly import env_and_policy as opening
from vla_rl.build import policy_class
from vla_rl.checkpoint import load_policy, load_training_state
from vla_rl.config import RunConfig, compose
from vla_rl.config.algorithms import PPOConfig
from vla_rl.config.phases import PHASES, evaluations, with_followers
from vla_rl.data.trajectories import ROLLOUTS
from vla_rl.errors import ConfigError, DiskFull, EmbodimentMismatch, TrainingDiverged, UserError
from vla_rl.evaluation.video import have_video
from vla_rl.learning.episode_queue import STATE
from vla_rl.learning.figures import rollout_metrics
from vla_rl.learning.learners import BatchLearner
from vla_rl.learning.sft import postponed_interrupts
from vla_rl.lock import RunLock
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.run import eval_phase, pipeline, reward_phases, rl_phase, sft_phase
from vla_rl.run.evaluate_checkpoints import evaluate_checkpoints
from vla_rl.run.pipeline import run_pipeline
from vla_rl.specs import FAILURE_KINDS
from vla_rl.terminal import terminable

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "run=toy",
    "tasks=[]",
    "collect.episodes_per_task=3",
    "sft.validation_episodes=1",
    "sft.updates=12",
    "sft.batch_size=16",
    "sft.warmup_updates=2",
    "slots.slots_per_worker=8",
    "rl.iterations=3",
    "rl.episodes_per_iteration=8",
    "algorithm.minibatch_size=16",
    "algorithm.critic_epochs=1",
    "algorithm.epochs=1",
    "evaluate.episodes_per_task=3",
    "evaluate.video_episodes=2",
    "sft.checkpoint_every=4",
]


def small(folder: Path, *overrides: str) -> RunConfig:
    return compose([*SMALL, f"output_dir={folder}", *overrides])


def weights(folder: Path, phase: str = "rl") -> dict[str, torch.Tensor]:
    return storage.load_tensors(folder / "checkpoints" / phase / "model.safetensors")


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def whole(finished_run) -> Path:
    """The folder of a run that was never interrupted."""
    return finished_run(*SMALL)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of that run, to go on with under ``tmp_path``."""
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.fixture
def before_rl(copy: Path) -> Path:
    """A run that was stopped just before RL."""
    shutil.rmtree(copy / "checkpoints" / "rl")
    shutil.rmtree(copy / "checkpoints" / "rl.last_good")
    phases = json.loads((copy / "phases.json").read_text())
    for name in ("rl", "eval_rl", "report"):
        phases.pop(name)
    (copy / "phases.json").write_text(json.dumps(phases))
    return copy


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python handles Ctrl-C, also where the tests run in the background of a shell, which has
    its children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, call: int, error: BaseException
) -> None:
    """Raise ``error`` at the given call (from 1) of a method."""
    plain, calls = getattr(owner, method), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, method, failing)


# -------------------------------------------------------------------------------- what a run leaves
def test_every_phase_is_one_row(whole):
    """What the rows say of the phases is so: each has its function, and they leave what others
    look for."""
    assert list(pipeline.FUNCTIONS) == list(PHASES)
    for row in PHASES.values():
        assert row.says and row.label
        assert row.needs in (
            "",
            "demonstrations",
            "start",
            *list(PHASES)[: list(PHASES).index(row.name)],
        )
        if row.steps is not None:
            assert attrgetter(row.steps[1])(small(whole.parent)) > 0
    rows = read_metrics(whole / "metrics.jsonl")
    logged = {name: {key for r in rows if r["phase"] == name for key in r} for name in PHASES}
    assert {d.key for d in PHASES["sft"].diagnostics} <= logged["sft"]
    assert {d.key for d in PPOConfig.diagnostics} | {PHASES["rl"].diagnostics[0].key} <= logged[
        "rl"
    ]
    left = {
        row.name: row.writes[0]
        for row in PHASES.values()
        if row.writes and (whole / row.writes[0]).exists()
    }
    assert left == {"collect": "dataset", "sft": "checkpoints/sft", "rl": "checkpoints/rl"}
    assert PHASES["reward"].writes == (ROLLOUTS, context.REWARD_FOLDER)
    assert PHASES["rl"].writes[1] == f"{context.LEARNER_FOLDER}/{STATE}"
    assert with_followers("rl") == {"rl", "eval_rl", "eval_student", "eval_test"}
    assert with_followers("sft") == {"sft", "eval_test"}
    assert list(evaluations()) == ["sft", "offline", "student", "rl"]


def test_a_run_leaves_everything(whole):
    for name in (
        "report.html",
        "summary.json",
        "config.yaml",
        "versions.json",
        "phases.json",
        "metrics.jsonl",
    ):
        assert (whole / name).stat().st_size > 0, name
    assert (whole / "dataset" / "meta" / "info.json").is_file()
    phases = json.loads((whole / "phases.json").read_text())
    for name in ("collect", "sft", "eval_sft", "rl", "eval_rl", "report"):
        assert phases[name]["complete"] is True and phases[name]["seconds"] >= 0
    assert phases["collect"]["episodes"] == 2 * (3 + 1) and phases["rl"]["episodes"] == 24
    assert phases["peak_memory_bytes"] > 0
    for name in ("sft", "rl"):
        result = json.loads((whole / f"eval_{name}.json").read_text())
        assert result["total"]["episodes"] == 6 and result["split"] == "held_out"
        assert load_policy(whole / "checkpoints" / name, policy_class) is not None
        assert sum(result["total"]["failures"].values()) == 6 - result["total"]["successes"]
        if have_video():
            clips = {f"{name}_failure_{kind}.mp4" for kind in result["total"]["failures"]}
            assert {path.name for path in (whole / "videos").glob(f"{name}*")} == {
                f"{name}.mp4"
            } | clips
    checked = [r for r in read_metrics(whole / "metrics.jsonl") if "validation/loss" in r]
    assert [r["step"] for r in checked] == [4, 8, 12]
    assert {"validation/image_use", "validation/image_spread"} < checked[0].keys()
    records = [r for r in read_metrics(whole / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["step"] for r in records] == [1, 2, 3]
    for r in records:
        shares = [r[f"rollout/failure/{kind}"] for kind in FAILURE_KINDS]
        assert r["rollout/success"] + sum(shares) == pytest.approx(1.0)
    assert "</html>" in (whole / "report.html").read_text()
    assert json.loads((whole / "summary.json").read_text())


def test_failures_are_logged_where_they_are_told():
    def logged(*failures: str) -> dict[str, float]:
        metrics = rollout_metrics([episode([0.0, 1.0], not f, f) for f in failures], {})
        return {name: share for name, share in metrics.items() if "failure" in name}

    def episode(positions: list[float], success: bool, failure: str):
        return dataclasses.replace(trajectory(positions, success), failure=failure.replace("?", ""))

    told = logged("", "dropped", "?", "dropped")
    assert told["rollout/failure/dropped"] == 0.5 and told["rollout/failure/wrong_place"] == 0.0
    assert list(told) == [f"rollout/failure/{kind}" for kind in FAILURE_KINDS]
    assert logged("", "?", "?") == {} and set(logged("", "").values()) == {0.0}


def test_rl_changes_the_policy_and_counts_what_it_did(whole):
    before, after = weights(whole, "sft"), weights(whole, "rl")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    counters = load_training_state(whole / "checkpoints" / "rl")["counters"]
    assert (counters["iteration"], counters["episodes"]) == (3, 24) and counters[
        "control_steps"
    ] > 24


def test_running_a_complete_run_again_only_writes_the_report(copy, tmp_path, monkeypatch, capsys):
    work = [
        (sft_phase, "collect_demonstrations"),
        (sft_phase, "train_sft"),
        (rl_phase.OnlineRL, "run"),
    ]
    for owner, name in [*work, (context, "evaluate"), (opening, "open_env"), (context, "open_env")]:
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("a complete phase ran again"))
    kept = {p: p.stat().st_mtime_ns for p in copy.rglob("*.safetensors")}
    (copy / "report.html").unlink()
    assert run_pipeline(small(tmp_path)) == copy
    assert (copy / "report.html").is_file() and {
        p: p.stat().st_mtime_ns for p in copy.rglob("*.safetensors")
    } == kept
    assert capsys.readouterr().out.count("complete") >= 5


# ----------------------------------------------------------------------------------------- resuming
def test_interrupted_twice_equals_never_interrupted(whole, tmp_path, monkeypatch):
    """Ctrl-C in update 7 of SFT (last checkpoint: 4) and in iteration 2 of RL; the same command
    goes on each time."""
    config = small(tmp_path)
    with monkeypatch.context() as patch:
        interrupt(patch, Imitation, "update", 7, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(config)
    folder = config.run_dir
    assert json.loads((folder / "phases.json").read_text())["sft"]["complete"] is False
    assert load_training_state(folder / "checkpoints" / "sft")["counters"]["iteration"] == 4
    with monkeypatch.context() as patch:
        interrupt(patch, PPO, "update", 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(config)
    assert load_training_state(folder / "checkpoints" / "rl")["counters"]["iteration"] == 1
    run_pipeline(config)
    assert_same_weights(weights(whole, "sft"), weights(folder, "sft"))
    assert_same_weights(weights(whole), weights(folder))
    theirs, mine = (load_training_state(f / "checkpoints" / "rl") for f in (whole, folder))
    for state in (theirs, mine):
        state["counters"].pop("seconds")
    assert theirs["counters"] == mine["counters"]
    assert_same_weights(
        theirs["algorithm"]["critic"]["weights"], mine["algorithm"]["critic"]["weights"]
    )
    rows = [r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert rows == [1, 2, 3]  # no iteration is there twice
    outcomes = [json.loads((f / "eval_rl.json").read_text())["outcomes"] for f in (whole, folder)]
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_sft_after_the_present_update(
    interruptible, stop, whole, tmp_path, monkeypatch, capsys
):
    """In update 7, three after the last checkpoint; the same command goes on from 7."""
    config, plain, calls = small(tmp_path, "phases=[collect,sft]"), Imitation.update, []

    def update(self):
        calls.append(1)
        if len(calls) == 7:
            os.kill(os.getpid(), stop)
        return plain(self)

    monkeypatch.setattr(Imitation, "update", update)
    with terminable(), pytest.raises(KeyboardInterrupt):
        run_pipeline(config)
    assert load_training_state(config.run_dir / "checkpoints" / "sft")["counters"]["iteration"] == 7
    assert "SFT is saved at update 7 of 12" in capsys.readouterr().out
    run_pipeline(config)
    assert len(calls) == 12
    assert_same_weights(weights(whole, "sft"), weights(config.run_dir, "sft"))


def test_a_second_ctrl_c_is_not_waited_for(interruptible):
    with postponed_interrupts() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_real_signal_stops_with_130_and_resumes(stop, before_rl, whole, tmp_path):
    arguments = ["train", *SMALL, f"output_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vla_rl", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while (
        process.poll() is None
        and not (before_rl / "checkpoints" / "rl").exists()
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=120)
    if process.returncode:  # it may have been over before the signal came
        assert process.returncode == 130 and "the same command resumes" in errors, errors
        assert "Traceback" not in errors
    run_pipeline(small(tmp_path))
    counters = load_training_state(before_rl / "checkpoints" / "rl")["counters"]
    assert (
        json.loads((before_rl / "phases.json").read_text())["rl"]["seconds"] >= counters["seconds"]
    )
    assert_same_weights(weights(whole), weights(before_rl))


def test_fresh_keeps_the_old_run_aside(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "FUNCTIONS", dict.fromkeys(PHASES, lambda run: {}))
    run_pipeline(small(tmp_path, "seed=9"), fresh=True)
    aside = [p for p in tmp_path.iterdir() if p != copy]
    assert len(aside) == 1 and aside[0].name.startswith("toy.")
    assert (aside[0] / "checkpoints" / "rl" / "model.safetensors").is_file()
    assert not (copy / "checkpoints").exists() and compose([*SMALL]).name == copy.name


# ---------------------------------------------------------------------------------------- the guard
# speaks after iteration 2, unless all succeed
GUARDED = ["phases=[rl]", "rl.guard_iterations=1", "rl.guard_success=1"]
PROGRESS = [
    "rl.fallback=progress",
    "rl.fallback_reward={updates: 3, network: {image_size: 16, width: 8}}",
    "rl.iterations=4",
    "reward_check.episodes=8",
    "reward_check.stride=1",
    "reward_check.on_bad=warn",
]


def guarded(whole: Path, folder: Path, *overrides: str) -> RunConfig:
    start = [f"checkpoint={whole / 'checkpoints' / 'sft'}", f"dataset={whole / 'dataset'}"]
    return small(folder, *start, *GUARDED, *overrides)


def test_the_guard_warns_once_and_the_run_goes_on(whole, tmp_path, capsys):
    folder = run_pipeline(guarded(whole, tmp_path))
    text = json.loads((folder / "phases.json").read_text())["rl"]["guard"]
    assert "of 8 in iteration 2" in text and "rl.fallback=progress" in text
    assert capsys.readouterr().out.count(f"warning: {text}") == 1
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
    assert ["guard/no_success" in r for r in rows] == [False, True, False] and rows[1][
        "guard/no_success"
    ] == 1.0
    assert_same_weights(weights(whole), weights(folder))  # it only looks


def test_the_guard_stops_with_a_checkpoint_from_which_a_warning_goes_on(
    whole, tmp_path, monkeypatch
):
    options = ["rl.guard=stop", "rl.checkpoint_every=3"]
    with pytest.raises(UserError, match=r"of 8 in iteration 2.*rl\.guard=warn"):
        run_pipeline(guarded(whole, tmp_path, *options))
    folder = guarded(whole, tmp_path).run_dir
    assert load_training_state(folder / "checkpoints" / "rl")["counters"]["iteration"] == 2
    record = json.loads((folder / "phases.json").read_text())["rl"]
    assert record["complete"] is False and "in iteration 2" in record["guard"]
    with monkeypatch.context() as patch, pytest.raises(UserError, match="in iteration 2"):
        patch.setattr(
            RolloutEngine, "collect", lambda *_, **__: pytest.fail("it was to stop again at once")
        )
        run_pipeline(guarded(whole, tmp_path, *options))
    run_pipeline(guarded(whole, tmp_path, "rl.guard=warn", "rl.checkpoint_every=3"))
    assert_same_weights(weights(whole), weights(folder))


def test_a_run_goes_on_with_progress_and_resumes_with_it(whole, tmp_path, monkeypatch):
    """Interrupted in the first iteration after the switch, it ends as the run that was not, and
    not as one without it."""
    straight = run_pipeline(guarded(whole, tmp_path, *PROGRESS, "name=straight"))
    rows = [r for r in read_metrics(straight / "metrics.jsonl") if r["phase"] == "rl"]
    assert [r["reward/switched"] for r in rows] == [
        0.0,
        0.0,
        1.0,
        1.0,
    ] and "reward/progress_end" in rows[2]
    # those that it was judged on count
    assert [r["episodes"] for r in rows] == [8, 16, 16 + 8 + 8, 40]
    assert (straight / "reward_quality.html").is_file() and (
        straight / "reward" / "reward.json"
    ).is_file()
    with monkeypatch.context() as patch:
        interrupt(patch, PPO, "update", 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(guarded(whole, tmp_path, *PROGRESS))
    folder = guarded(whole, tmp_path, *PROGRESS).run_dir
    state = load_training_state(folder / "checkpoints" / "rl")
    assert state["counters"]["iteration"] == 2 and state["reward"]["switched"] is True
    monkeypatch.setattr(
        reward_phases, "fit_and_judge", lambda *_: pytest.fail("the reward was there already")
    )
    run_pipeline(guarded(whole, tmp_path, *PROGRESS))
    assert_same_weights(weights(straight), weights(folder))
    plain = run_pipeline(guarded(whole, tmp_path, "name=plain", "rl.iterations=4"))
    assert any(not torch.equal(x, weights(straight)[name]) for name, x in weights(plain).items())


def test_a_progress_reward_that_is_not_good_enough_ends_the_run(whole, tmp_path, monkeypatch):
    plain = reward_phases.fit_and_judge

    def judged_badly(*arguments):
        quality, figures = plain(*arguments)
        return dataclasses.replace(quality, verdict="bad", reasons=["it is made up"]), figures

    monkeypatch.setattr(reward_phases, "fit_and_judge", judged_badly)
    with pytest.raises(UserError, match=r"it is made up.*reward_check\.on_bad=warn"):
        run_pipeline(guarded(whole, tmp_path, *PROGRESS, "reward_check.on_bad=stop"))


# ------------------------------------------------------------------------------ one folder, one run
def test_another_config_in_the_same_folder_is_refused_by_its_keys(copy, tmp_path):
    with pytest.raises(UserError) as caught:
        run_pipeline(small(tmp_path, "seed=1", "algorithm.gamma=0.5"))
    text = str(caught.value)
    assert "algorithm.gamma: 0.97 there, 0.5 now" in text and "seed: 0 there, 1 now" in text
    assert "--fresh" in text and "name=" in text and "rl.iterations" not in text


def test_what_depends_on_the_machine_alone_may_change(copy, tmp_path):
    """So that a run can go on with fewer workers, or after its folder was moved."""
    assert (
        run_pipeline(small(tmp_path, "slots.slots_per_worker=4", "collect.workers=2", "threads=2"))
        == copy
    )
    torch.set_num_threads(1)


def test_a_finished_run_may_be_given_more_iterations(whole, tmp_path):
    """The same as if it had been as long from the start; fewer are another run."""
    short = run_pipeline(small(tmp_path, "name=grown", "rl.iterations=2"))
    assert (short / "eval_rl.json").exists() and (short / "summary.json").exists()
    kept = {
        n: (short / "checkpoints" / n / "model.safetensors").stat().st_mtime_ns
        for n in ("sft", "rl")
    }
    assert run_pipeline(small(tmp_path, "name=grown", "rl.iterations=3")) == short
    assert (short / "checkpoints" / "sft" / "model.safetensors").stat().st_mtime_ns == kept["sft"]
    assert (short / "checkpoints" / "rl" / "model.safetensors").stat().st_mtime_ns != kept["rl"]
    assert_same_weights(weights(short), weights(whole))
    assert [r["step"] for r in read_metrics(short / "metrics.jsonl") if r["phase"] == "rl"] == [
        1,
        2,
        3,
    ]
    phases = json.loads((short / "phases.json").read_text())
    assert (
        phases["rl"]["iterations"] == 3
        and phases["rl"]["complete"]
        and phases["eval_rl"]["complete"]
    )
    with pytest.raises(UserError, match=r"rl\.iterations: 3 there, 2 now"):
        run_pipeline(small(tmp_path, "name=grown", "rl.iterations=2"))


def test_a_run_that_made_nothing_leaves_its_name_free(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="unknown task 'x'"):
        run_pipeline(small(tmp_path, "tasks=[x]"))
    assert list(tmp_path.iterdir()) == []
    folder = small(tmp_path).run_dir  # what a kill leaves before anything was collected
    folder.mkdir()
    configs.save(small(tmp_path, "seed=5"), folder / "config.yaml")
    (folder / "phases.json").write_text('{"collect": {"seconds": 99.0, "complete": false}}')
    (folder / "metrics.jsonl").touch()
    monkeypatch.setattr(pipeline, "FUNCTIONS", dict.fromkeys(PHASES, lambda run: {}))
    run_pipeline(small(tmp_path))
    assert configs.load(folder / "config.yaml").seed == 0
    assert json.loads((folder / "phases.json").read_text())["collect"]["seconds"] < 99


def test_a_failure_after_something_was_made_keeps_it(copy, tmp_path, monkeypatch):
    def failing(run):
        raise UserError("it failed")

    monkeypatch.setitem(pipeline.FUNCTIONS, "report", failing)
    with pytest.raises(UserError, match="it failed"):
        run_pipeline(small(tmp_path))
    assert (copy / "config.yaml").exists() and (copy / "checkpoints" / "rl").is_dir()


def test_a_copied_folder_goes_on_under_its_new_name(copy, tmp_path, monkeypatch):
    renamed = copy.rename(tmp_path / "renamed")
    for name in ("collect_demonstrations", "train_sft"):
        monkeypatch.setattr(
            sft_phase, name, lambda *_, **__: pytest.fail("a complete phase ran again")
        )
    assert run_pipeline(small(tmp_path, "name=renamed", "rl.iterations=4")) == renamed
    assert load_training_state(renamed / "checkpoints" / "rl")["counters"]["iteration"] == 4
    assert configs.load(renamed / "config.yaml").name == "renamed" and not copy.exists()


# ----------------------------------------------------------------------- best and numbered policies
def test_the_best_policy_and_the_last_ones_are_kept(whole, tmp_path, monkeypatch, capsys):
    # SFT, which is what is there before iteration 1; before 2 and 3; RL
    plain, wins = context.evaluate_held_out, iter([1, 4, 3, 4])

    def evaluate(*arguments, **changes):
        result, k = plain(*arguments, **changes), next(wins)
        outcomes = [dataclasses.replace(o, success=i < k) for i, o in enumerate(result.outcomes)]
        return dataclasses.replace(result, outcomes=outcomes)

    for owner in (eval_phase, rl_phase):
        monkeypatch.setattr(owner, "evaluate_held_out", evaluate)
    start = f"checkpoint={whole / 'checkpoints' / 'sft'}"
    folder = run_pipeline(small(tmp_path, start, "rl.eval_every=1", "rl.keep_checkpoints=2"))
    assert [p.name for p in sorted((folder / "checkpoints").glob("rl_*"))] == ["rl_2", "rl_3"]
    assert_same_weights(weights(folder, "rl_3"), weights(folder))
    with pytest.raises(AssertionError):
        assert_same_weights(weights(folder, "rl_2"), weights(folder))
    best = {"iteration": 1, "success": pytest.approx(4 / 6), "episodes": 6}
    assert json.loads((folder / "checkpoints" / "best.json").read_text()) == best
    straight = run_pipeline(small(tmp_path, start, "name=one", "phases=[rl]", "rl.iterations=1"))
    assert_same_weights(weights(folder, "best"), weights(straight))
    assert json.loads((folder / "summary.json").read_text())["best"] == {
        "checkpoint": "checkpoints/best",
        **best,
    }
    said = "the policy after iteration 1, with 66.7 % of 6 held-out episodes"
    assert said in capsys.readouterr().out and said[1:] in (folder / "report.html").read_text()


def test_the_start_is_judged_once(whole, tmp_path, monkeypatch):
    """By eval_sft where the run has that phase, else before the first iteration, which finds the
    same; not where it learns before the first episode."""
    plain, judged = context.evaluate_held_out, []

    def evaluate(run, policy, label, *arguments, **changes):
        judged.append(label)
        return plain(run, policy, label, *arguments, **changes)

    for owner in (eval_phase, rl_phase):
        monkeypatch.setattr(owner, "evaluate_held_out", evaluate)
    start = f"checkpoint={whole / 'checkpoints' / 'sft'}"
    found = []
    for phases in ("[eval_sft,rl]", "[rl]"):
        given = ["rl.eval_every=1", "rl.iterations=1", f"phases={phases}", f"name=r{len(found)}"]
        folder = run_pipeline(small(tmp_path, start, *given))
        first = next(r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl")
        found.append({k: v for k, v in first.items() if k.startswith("eval/")})
    assert judged == ["sft", "iteration 0"] and found[0] == found[1] and found[0]
    assert_same_weights(*(weights(tmp_path / f"r{i}") for i in range(2)))

    judged.clear()
    monkeypatch.setattr(BatchLearner, "prepare", lambda *_: {"offline/loss": 1.0})
    given = ["rl.eval_every=1", "rl.iterations=1", "phases=[eval_sft,rl]", "name=learns"]
    run_pipeline(small(tmp_path, start, *given))
    assert judged == ["sft", "iteration 0"]


def test_no_best_policy_where_none_is_wanted(whole, tmp_path):
    folder = run_pipeline(
        small(tmp_path, f"checkpoint={whole / 'checkpoints' / 'sft'}", "rl.keep_best=false")
    )
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["rl", "rl.last_good"]
    assert json.loads((folder / "summary.json").read_text())["best"] is None


def test_a_second_run_in_the_same_folder_is_refused(copy, tmp_path):
    with RunLock(copy), pytest.raises(UserError, match=r"in use by process \d+"):
        run_pipeline(small(tmp_path))
    assert run_pipeline(small(tmp_path)) == copy


# ---------------------------------------------------------------------------------------- bad input
def test_a_checkpoint_of_another_embodiment_is_refused(whole, tmp_path):
    config = small(tmp_path, "env.image_size=12")
    with pytest.raises(EmbodimentMismatch, match="cameras") as caught:
        evaluate_checkpoints(config, [whole / "checkpoints" / "rl"], episodes=2)
    assert "height=16" in str(caught.value) and "height=12" in str(caught.value)


def test_a_start_checkpoint_skips_collecting_and_sft(whole, tmp_path):
    start = f"checkpoint={whole / 'checkpoints' / 'sft'}"
    folder = run_pipeline(small(tmp_path, start, "rl.iterations=1", "policy.temperature=0.5"))
    assert (
        json.loads((folder / "checkpoints" / "rl" / "config.json").read_text())["config"][
            "temperature"
        ]
        == 0.5
    )
    phases = json.loads((folder / "phases.json").read_text())
    assert (
        "skipped" in phases["collect"]
        and "skipped" in phases["sft"]
        and phases["rl"]["iterations"] == 1
    )
    assert not (folder / "dataset").exists() and not (folder / "checkpoints" / "sft").exists()


def test_a_start_checkpoint_of_another_embodiment_is_refused(whole, tmp_path):
    with pytest.raises(EmbodimentMismatch):
        run_pipeline(
            small(tmp_path, f"checkpoint={whole / 'checkpoints' / 'sft'}", "env.image_size=12")
        )


def test_a_dataset_with_other_cameras_is_refused(whole, tmp_path):
    with pytest.raises(EmbodimentMismatch, match="camera"):
        run_pipeline(small(tmp_path, f"dataset={whole / 'dataset'}", "env.image_size=12"))


def test_an_unknown_task_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(UserError, match=r"'reach_green'.*reach_blue, reach_red"):
        run_pipeline(small(tmp_path, "tasks=[reach_green]"))


def test_evaluations_say_under_which_conditions(whole):
    conditions = "picture of 16 px, at most 20 control steps"
    phases = json.loads((whole / "phases.json").read_text())
    assert {phases[name]["conditions"] for name in ("eval_sft", "eval_rl")} == {conditions}
    assert f"Conditions: {conditions}." in (whole / "report.html").read_text(encoding="utf-8")


def test_a_ratio_that_does_not_fit_the_policys_noise_is_refused_before_anything_is_collected(
    tmp_path,
):
    with pytest.raises(
        ConfigError, match=r"algorithm.ratio_level=chunk.*policy.noise_correlation=0"
    ):
        run_pipeline(small(tmp_path, "algorithm.ratio_level=chunk", "policy.noise_correlation=0.5"))
    assert not list(tmp_path.iterdir())


def test_a_held_out_task_is_evaluated_and_never_trained_on(whole, tmp_path):
    start = f"checkpoint={whole / 'checkpoints' / 'sft'}"
    folder = run_pipeline(small(tmp_path, start, "held_out_tasks=[reach_blue]", "rl.iterations=1"))
    assert set(json.loads((folder / "eval_rl.json").read_text())["tasks"]) == {
        "reach_red",
        "reach_blue",
    }
    state = load_training_state(folder / "checkpoints" / "rl")["curriculum"]
    assert "reach_red" in json.dumps(state, default=str) and "reach_blue" not in json.dumps(
        state, default=str
    )


def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_good_checkpoint(
    before_rl, tmp_path, monkeypatch
):
    config = small(tmp_path, "algorithm.max_bad_updates=2")
    (before_rl / "config.yaml").unlink()
    plain, calls = PPO._backward, []

    def poisoned(self, data, rows, value_only):
        stats, loss = plain(self, data, rows, value_only)
        calls.append(1)
        return stats, loss * float("nan") if self.iteration >= 2 else loss

    monkeypatch.setattr(PPO, "_backward", poisoned)
    with pytest.raises(TrainingDiverged, match="2 updates in a row") as caught:
        run_pipeline(config)
    assert f"checkpoint={before_rl / 'checkpoints' / 'rl'}" in str(caught.value)
    assert "another run: name=NEW_NAME" in str(caught.value) and "Resume" not in str(caught.value)
    assert load_training_state(before_rl / "checkpoints" / "rl")["counters"]["iteration"] == 2
    policy = load_policy(before_rl / "checkpoints" / "rl", policy_class)
    assert all(bool(torch.isfinite(p).all()) for p in policy.parameters()) and len(calls) >= 2


def test_a_full_disk_is_named_and_the_run_resumes(before_rl, tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        interrupt(
            patch, checkpoint, "save_tensors", 2, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        )
        with pytest.raises(DiskFull, match=r"the disk is full: .*rl could not be written.*resumes"):
            run_pipeline(small(tmp_path))
    assert load_training_state(before_rl / "checkpoints" / "rl")["counters"]["iteration"] == 1
    assert not list((before_rl / "checkpoints").glob(".*part*"))
    run_pipeline(small(tmp_path))
    assert_same_weights(weights(whole), weights(before_rl))


def test_a_killed_worker_is_survived_and_reported(before_rl, tmp_path, monkeypatch):
    plain, calls = RolloutEngine._serve, []

    def killing(self, *args):
        lost = plain(self, *args)
        calls.append(1)
        if len(calls) == 2:  # chunks are under way in its slots
            os.kill(self.env.workers[0].pid, signal.SIGKILL)
        return lost

    monkeypatch.setattr(RolloutEngine, "_serve", killing)
    config = small(
        tmp_path, "slots.workers=1", "slots.slots_per_worker=4", "env.step_seconds=0.002"
    )
    (before_rl / "config.yaml").unlink()
    run_pipeline(config)
    records = [r for r in read_metrics(before_rl / "metrics.jsonl") if r["phase"] == "rl"]
    assert len(records) == 3 and sum(r["engine/retries"] for r in records) >= 1
    assert records[0]["engine/episodes"] == 8
    assert "ran again after a simulator failure" in (before_rl / "report.html").read_text()


def test_a_missing_simulator_package_is_named_with_the_extra(tmp_path):
    """Blocked in every process of the run, by a start-up file on the path."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import importlib.abc, sys

            class Blocker(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path=None, target=None):
                    if name.partition(".")[0] == "robosuite":
                        raise ModuleNotFoundError("No module named 'robosuite'", name="robosuite")

            sys.meta_path.insert(0, Blocker())
            """
        )
    )
    arguments = [
        "train",
        "run=quickstart",
        f"output_dir={tmp_path}",
        "slots.workers=1",
        "wandb=false",
    ]
    path = os.pathsep.join(p for p in (str(tmp_path), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "-m", "vla_rl", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "needs the package 'robosuite'" in done.stderr and "[sim]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("algorithm", ["filtered_bc", "grpo"])
def test_other_algorithms_run_on_the_same_pipeline(whole, tmp_path, algorithm):
    plain = [o for o in SMALL if not o.startswith("algorithm.")]
    groups = ["rl.group_size=4", "rl.dynamic_sampling=true"] if algorithm == "grpo" else []
    overrides = [
        *plain,
        f"algorithm={algorithm}",
        "critic=none",
        "rl.iterations=1",
        "algorithm.learning_rate=1e-4",
    ]
    start = f"checkpoint={whole / 'checkpoints' / 'sft'}"
    folder = run_pipeline(compose([*overrides, *groups, start, f"output_dir={tmp_path}"]))
    assert json.loads((folder / "phases.json").read_text())["rl"]["complete"] is True
    row = next(r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl")
    # of all rounds of sampling
    assert row["engine/episodes"] == row["episodes"] == 8 * row["rollout/rounds"]
    assert cli.main(["report", str(folder)]) == 0
