"""A reward judges the episode that runs: for the console's curve and the record, and nobody
waits for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from real_helpers import kill_child, spawned, stopped_by_guard
from test_robot_learn import EXACT, FAKE, RAISE, SPEC, composed, helped

from policies.settings import SmallConfig
from policies.small import SmallPolicy
from real.acting import ActingConfig
from real.episodes import Plan
from real.journal import journals, picture, read
from real.lockstep import Lockstep
from real.messages import Progress
from real.ring import Rings
from reward_models.vlac import VLAC, VLACConfig
from vla_rl.checkpoint import save_checkpoint
from vla_rl.cli import main
from vla_rl.config import compose as compose_run
from vla_rl.config.robot import compose
from vla_rl.data.session_trajectory import session_trajectory
from vla_rl.errors import ConfigError
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.rewards.build import build_reward, save_reward
from vla_rl.robot import learning
from vla_rl.robot import reward_process as lives
from vla_rl.robot.operator import make_operator
from vla_rl.robot.reward_process import AskedOnce, RewardWatcher
from vla_rl.robot.session import SessionRequest, run


def watched(folder: Path, judge, every: int = 4, episodes: int = 1):
    """Journals of a policy that raises the point by 1 mm a control step, watched by ``judge``."""
    session = Lockstep(folder, FAKE)
    try:
        session.scored(RewardWatcher(judge, Rings(), "level", every))
        session.watched(make_operator(EXACT, session.world))
        plan = Plan((dataclasses.replace(RAISE, horizon=60),), episodes, alone=True)
        session.run(
            plan,
            lambda *_: np.tile([[0.0, 0.0, 0.001, -1.0]], (4, 1)),
            "v1",
            ActingConfig(),
            lambda outcome: None,
        )
    finally:
        session.close()
    return [read(path) for path in journals(folder)]


def test_the_curve_is_of_what_was_seen_after_every_fourth_control_step(tmp_path):
    lengths = []

    def level(trajectory):
        lengths.append(len(trajectory))
        assert trajectory.observations.instruction[0] == "raise the point"
        return float(trajectory.final_observation.images["front"].float().mean()) / 255.0

    for episode in watched(tmp_path / "s", level, episodes=2):
        steps = [p["step"] for p in episode.progress]
        assert steps == list(range(4, steps[-1] + 1, 4)) and len(steps) >= 5, (
            "also while a person drives"
        )
        assert {(p["model"], p["source"]) for p in episode.progress} == {("level", "reward")}
        ended = {s["step"] + 1: s["stamp"] for s in episode.steps}
        for p in episode.progress:
            shown = next(f for f in episode.frames["front"] if f[2] >= ended[p["step"]] - 1e-9)
            # (JPEG)
            assert p["value"] == pytest.approx(
                float(picture(shown[5]).mean()) / 255.0, abs=1.5 / 255
            )
            assert shown[2] <= p["stamp"] + 1e-9
    assert lengths[0] == 1 and 1 in lengths[1:], "another episode begins anew"


def test_a_session_is_shown_by_rerun_with_all_its_numbers(tmp_path, capsys):
    rerun = pytest.importorskip("rerun")
    episodes = watched(tmp_path / "s", lambda trajectory: len(trajectory) / 100, episodes=2)
    target = tmp_path / "new" / "session.rrd"
    assert main(["robot", "export", str(tmp_path / "s"), str(target)]) == 0
    assert "2 episodes; show it with: rerun" in capsys.readouterr().out
    assert [p.name for p in target.parent.iterdir()] == [target.name]
    recording = rerun.dataframe.load_recording(target)

    def column(name: str, part: str) -> list:
        view = recording.view(index="time", contents=name)
        rows = view.select().read_all().to_pydict()
        return [x for x in rows[f"{name}:{part}"] if x is not None]

    ticks = [tick for e in episodes for tick in e.ticks]
    assert column("/pose", "Scalars:scalars") == [list(tick["pose"]) for tick in ticks]
    assert column("/sent", "Scalars:scalars") == [
        list(tick["sent"]) for tick in ticks if tick["sent"]
    ]
    assert (
        column("/human", "Scalars:scalars")
        == [list(tick["human"]) for tick in ticks if tick["human"]]
        != []
    )
    scores = [[p["value"]] for e in episodes for p in e.progress]
    assert column("/reward/level", "Scalars:scalars") == scores
    frames = [f[5] for e in episodes for f in e.frames["front"]]
    assert [
        bytes(np.asarray(x[0], np.uint8)) for x in column("/camera/front", "EncodedImage:blob")
    ] == frames
    said = [x[0] for x in column("/log", "TextLog:text")]
    assert "simulator: label success" in said and "task raise: raise the point" in said
    assert main(["robot", "export", str(tmp_path / "s"), str(target)]) == 2, "it is there already"


def test_a_long_episode_is_looked_at_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(lives, "MOST", 6)
    lengths = []
    (episode,) = watched(
        tmp_path / "s", lambda trajectory: lengths.append(len(trajectory)) or 0.5, every=2
    )
    assert max(lengths) <= 5, "six moments"
    gaps = np.diff([p["step"] for p in episode.progress])
    assert gaps[0] == 2 and set(gaps) <= {2, 4, 8} and (np.diff(gaps) >= 0).all()


def test_what_a_reward_does_not_know_is_not_said(tmp_path):
    assert not read(watched(tmp_path / "s", lambda trajectory: float("nan"))[0].path).progress
    assert not watched(tmp_path / "t", lambda trajectory: None)[0].progress


def test_of_a_late_score_the_record_of_the_next_episode_hears_nothing(tmp_path):
    session = Lockstep(tmp_path / "s", FAKE)
    try:
        session.scored(RewardWatcher(lambda trajectory: 0.5, Rings(), "level", 4))

        def late(images, proprio, instruction, first):
            session.send("reward", Progress, model="late", episode=99, step=1, value=0.5)
            return np.tile([[0.0, 0.0, 0.04, -1.0]], (4, 1))

        session.run(Plan((RAISE,), 1, alone=True), late, "v1", ActingConfig(), lambda outcome: None)
    finally:
        session.close()
    (episode,) = [read(path) for path in journals(tmp_path / "s")]
    assert {p["model"] for p in episode.progress} == {"level"}


def test_of_an_episode_that_grows_a_chat_model_is_asked_what_is_new():
    """VLAC compares neighbouring frames: one more frame is one more question, and the values are
    those of asking all."""
    asked = []

    class Backend:
        def reply(self, questions):
            asked.extend(questions)
            return [f"{int(q.images[1].float().mean()) % 40}" for q in questions]

    config = VLACConfig(checkpoint="none", done_weight=0.0, frame_skip=1)
    plain, remembering = VLAC(config, Backend()), VLAC(config, AskedOnce(Backend()))
    whole = _episode(6)
    counts, values = [], []
    for n in range(1, 7):
        asked.clear()
        values.append(remembering.progress([_cut(whole, n)])[0])
        counts.append(len(asked))
    assert counts == [1] * 6
    torch.testing.assert_close(values[-1], plain.progress([whole])[0])


def _episode(t: int):
    from vla_rl.types import EpisodeSpec, Observation, Trajectory

    torch.manual_seed(0)
    images = {"front": torch.randint(0, 256, (t + 1, 8, 8, 3), dtype=torch.uint8)}
    seen = Observation(images, torch.zeros(t + 1, 4), ("go",) * (t + 1))
    valid = torch.ones(t, 1, dtype=torch.bool)
    return Trajectory(
        EpisodeSpec("raise", 0),
        seen[:t],
        seen[t:],
        torch.zeros(t, 1, 4),
        valid,
        torch.zeros(t, 1),
        torch.zeros(t),
        {},
        terminated=False,
        truncated=True,
        success=False,
    )


def _cut(trajectory, n: int):
    from vla_rl.types import Observation

    seen = Observation.cat([trajectory.observations, trajectory.final_observation])
    return dataclasses.replace(
        trajectory,
        observations=seen[:n],
        final_observation=seen[n : n + 1],
        actions=trajectory.actions[:n],
        valid=trajectory.valid[:n],
        rewards=trajectory.rewards[:n],
        behavior_log_prob=trajectory.behavior_log_prob[:n],
    )


# ------------------------------------------------------------------------------- with a trained one
@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """A classifier that knows a raised point from one that is not."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("classifier")
    config = compose_run(["~run", "reward=classifier", "reward.updates=60"])
    trajectories = []
    for i, horizon in enumerate((60, 8, 60, 8)):
        (episode,) = helped(folder / str(i), task=dataclasses.replace(RAISE, horizon=horizon))
        trajectories.append(session_trajectory(episode, 4)[0])
    reward = build_reward("classifier", config.reward)
    save_reward(folder / "reward", "classifier", config.reward, reward, reward.fit(trajectories))
    return folder / "reward"


@pytest.fixture
def riser(tmp_path) -> Path:
    """A checkpoint that goes up slowly."""
    torch.manual_seed(0)
    policy = SmallPolicy(SmallConfig(chunk_length=4, hidden=[16]), SPEC)
    save_checkpoint(tmp_path / "riser", policy)
    return tmp_path / "riser"


def asked_for(tmp_path: Path, riser: Path, reward: Path, *more: str) -> list[str]:
    slow = [
        "robot.supervisor.silence_s=0.3",
        "robot.supervisor.frame_age_s=2.0",
        "threads=1",
        "robot.horizon=40",
    ]
    score = ["reward=classifier", f"reward.checkpoint={reward}"]
    return [
        f"checkpoint={riser}",
        "robot=fake",
        f"output_dir={tmp_path}",
        "name=s",
        *slow,
        *score,
        *more,
    ]


def test_a_session_in_virtual_time_is_scored_by_a_trained_reward(
    tmp_path, riser, classifier, capsys
):
    given = asked_for(tmp_path, riser, classifier, "robot.score_every=8")
    assert main(["robot", "run", "--lockstep", "--episodes", "2", *given]) == 0
    said = capsys.readouterr().out
    assert (
        "autonomy " in said and "a person's share of the control steps 0.0%, median cycle " in said
    ), said
    reward = build_reward(
        "classifier",
        compose_run(["~run", "reward=classifier", f"reward.checkpoint={classifier}"]).reward,
    )
    for path in journals(tmp_path / "s"):
        episode = read(path)
        assert [p["step"] for p in episode.progress][:3] == [8, 16, 24]
        # a row of eight control steps: the same moments, but for JPEG
        trajectory, _ = session_trajectory(episode, 8)
        wanted = reward.progress([trajectory])[0]
        for i, p in enumerate(episode.progress[:4], 1):
            assert p["value"] == pytest.approx(float(wanted[i]), abs=0.1)


def test_a_reward_that_is_fitted_on_the_way_is_shown_from_then_on(tmp_path, riser):
    small = [
        "reward=classifier",
        "reward.updates=40",
        "reward.refit_updates=20",
        "reward_check.refit_every=1",
    ]
    asked = composed(riser, tmp_path / "a", *small, "reward_check.demonstrations=0", episodes=6)
    for session, horizon in enumerate((60, 8, 60, 8), 1):  # what an earlier session left
        helped(
            tmp_path / "a" / "sessions" / f"{session:04d}",
            task=dataclasses.replace(RAISE, horizon=horizon),
        )
    learning.learn(asked, lambda text: None)
    rows = [r for r in read_metrics(tmp_path / "a" / "metrics.jsonl") if r["phase"] == "robot"]
    fitted = [i for i, r in enumerate(rows) if "reward/loss" in r]
    assert fitted and fitted[0] < 4, "once successes and failures were labelled"
    assert [i for i, r in enumerate(rows) if "robot/progress_end" in r] == [4, 5]
    episodes = [read(path) for path in journals(tmp_path / "a" / "sessions" / "0005")]
    assert [r["robot/progress_end"] for r in rows[4:]] == [
        e.progress[-1]["value"] for e in episodes
    ]
    assert "What the reward said at the end" in (tmp_path / "a" / "report.html").read_text()


@pytest.mark.slow
def test_a_reward_that_dies_does_not_end_the_session(tmp_path, riser, classifier):
    given = ["--headless", "--episodes", "3", *asked_for(tmp_path, riser, classifier)]
    for i in range(6):
        process = spawned("robot", "run", *given, f"name=s{i}")
        said = []
        assert process.stdout is not None
        for text in process.stdout:
            said.append(text)
            if text.startswith("episode 1:"):
                kill_child(process, "vla_rl.robot.reward_process")
        process.communicate(timeout=240)
        if not stopped_by_guard("".join(said)):
            break
    assert process.returncode == 0, said
    first, *_, last = [read(path) for path in journals(tmp_path / f"s{i}")]
    assert first.progress and {p["model"] for p in first.progress} == {"classifier"}
    assert len({p["step"] for p in first.progress}) == len(first.progress) and not last.progress


@pytest.mark.parametrize(
    "given, said",
    [
        (
            ["reward=srpo"],
            "reward=srpo has nothing to say of an episode that runs: it judges whole episodes",
        ),
        (["reward=success"], "it judges whole episodes"),
        (["reward=classifier", "reward.chekpoint=x"], "chekpoint"),
        (
            ["reward=combined", "reward.parts={a: {type: srpo, encoder: {type: policy}}}"],
            "the policy's own features",
        ),
    ],
)
def test_a_reward_without_a_curve_is_refused_before_anything_moves(tmp_path, riser, given, said):
    settings = compose(
        [f"checkpoint={riser}", "robot=fake", f"output_dir={tmp_path}", "name=s", *given]
    )
    with pytest.raises(ConfigError) as error:
        run(settings, SessionRequest(1, console=False))
    assert said in str(error.value) and not (tmp_path / "s").exists()
