"""Reward models inside runs: combining, overlapping, refitting, judging, the phase, the
commands."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reward_helpers import episodes, trajectory

from benchmarks.learning import reward as bench_reward
from reward_models.pairwise import PairwiseConfig
from reward_models.process import ProcessConfig
from reward_models.settings import ValueProgressConfig
from reward_models.shaping import ShapedProgress, ShapingConfig, shaped_reward
from reward_models.success import TaskSuccess, TaskSuccessConfig
from reward_models.value_progress import ValueProgress
from vla_rl import cli
from vla_rl.algorithms.advantages import decision_discounts, discounted_returns
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.assembly import prior_data
from vla_rl.assembly.sources import load_source
from vla_rl.checkpoint import CheckpointError
from vla_rl.config import compose
from vla_rl.config.episodes import CombinedConfig
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.trajectories import (
    demonstration_trajectories,
    load_rollouts,
    save_rollouts,
    trajectories_of_dataset,
)
from vla_rl.errors import ConfigError, UserError
from vla_rl.interfaces import RewardModel
from vla_rl.learning.groups import GroupBuffer
from vla_rl.monitoring.metrics import MetricsLogger, read_metrics
from vla_rl.rewards import tools as reward_tools
from vla_rl.rewards.build import (
    RewardContext,
    build_reward,
    fit_updates,
    linked_to_algorithm,
    load_reward,
    save_reward,
)
from vla_rl.rewards.combined import CombinedReward
from vla_rl.rewards.handle import is_fitted
from vla_rl.rewards.quality import (
    Figures,
    RewardCheckConfig,
    backwards,
    decide,
    judge,
    render_quality,
    write_quality,
)
from vla_rl.rewards.scorer import CoEvolvingReward, RewardScorer
from vla_rl.rewards.tools import mark_worth
from vla_rl.rollout.episodes import rollout_episodes
from vla_rl.run import reward_phases
from vla_rl.run.pipeline import run_pipeline
from vla_rl.splits import stable_seed
from vla_rl.types import RolloutBatch

NETWORK = {"image_size": 16, "width": 8}


class Known:
    """A reward that reads progress off the bar; ``learned`` by setting a flag."""

    learned = judge_first = True

    def __init__(self, config=None):
        self.fits, self.scale, self.fitted, self.threads = 0, 1.0, False, []

    def prepare(self, t):
        self.threads.append(threading.current_thread() is threading.main_thread())
        time.sleep(0.01)

    def progress(self, ts):
        frames = [
            torch.cat([t.observations.images["front"], t.final_observation.images["front"]])
            for t in ts
        ]
        at = [f[:, 12].float().mean(-1).argmax(-1) / 19 for f in frames]
        return [self.scale * a if self.scale > 0 else 1 + self.scale * a for a in at]

    def score(self, ts):
        return [torch.cat([torch.zeros(len(t) - 1), p[-1:]]) for t, p in zip(ts, self.progress(ts))]

    def metrics(self):
        return {"reward/progress_end": 0.5}

    def fit(self, ts, progress=None):
        self.fits, self.fitted = self.fits + 1, True
        return {"loss": 0.1, "trajectories": float(len(ts))}

    def state_dict(self):
        return {"scale": self.scale, "fits": self.fits, "fitted": self.fitted}

    def load_state_dict(self, state):
        self.scale, self.fits, self.fitted = state["scale"], state["fits"], state["fitted"]


# ----------------------------------------------------------------------------------------- building
def test_the_base_describes_what_there_is():
    known, plain = RewardModel.of(Known()), TaskSuccess(TaskSuccessConfig())
    assert known.learned and known.can >= {"progress", "state"}
    assert "progress" in build_reward("srpo", srpo()).can
    assert not plain.can and not plain.learned and plain.metrics() == {}


def srpo(**options):
    from reward_models.srpo import SRPOConfig

    return SRPOConfig(**options)


def test_discount_and_end_follow_the_algorithm():
    reward = build_reward(
        "pairwise", PairwiseConfig(), RewardContext(PPOConfig(gamma=0.9, bootstrap_truncated=False))
    )
    assert (reward.config.shaping.gamma, reward.config.shaping.truncated_end) == (0.9, "zero")
    reward = build_reward(
        "pairwise", PairwiseConfig(), RewardContext(PPOConfig(gamma_per_control_step=True))
    )
    assert (
        reward.config.shaping.gamma_per_control_step
        and reward.config.shaping.truncated_end == "keep"
    )
    reward = build_reward(
        "pairwise", PairwiseConfig(), RewardContext(PPOConfig(advantage="reinforce++"))
    )
    # it never bootstraps, whatever bootstrap_truncated says
    assert reward.config.shaping.truncated_end == "zero"
    with pytest.raises(ConfigError, match=r"mode=final or delta"):
        build_reward("process", ProcessConfig(), RewardContext(PPOConfig(advantage="grpo")))


def test_policy_features_need_a_policy():
    from reward_models.encoders import EncoderConfig

    config = srpo(encoder=EncoderConfig(type="policy"))
    with pytest.raises(ConfigError, match="no policy is at hand"):
        build_reward("srpo", config)
    with pytest.raises(ConfigError, match="object has none"):
        build_reward("srpo", config, RewardContext(policy=object()))


def test_trained_rewards_are_saved_and_found_again(tmp_path):
    from reward_models.network import NetworkConfig

    config = PairwiseConfig(updates=2, batch_size=4, network=NetworkConfig(**NETWORK))
    reward = build_reward("pairwise", config)
    assert not is_fitted(reward)
    ts = episodes(2)
    figures = reward.fit(ts)
    save_reward(tmp_path / "r", "pairwise", config, reward, figures)
    again = build_reward("pairwise", dataclasses.replace(config, checkpoint=str(tmp_path / "r")))
    assert is_fitted(again)
    torch.testing.assert_close(again.score(ts), reward.score(ts))
    with pytest.raises(CheckpointError, match="use reward=pairwise"):
        load_reward(tmp_path / "r", "process", reward)
    with pytest.raises(CheckpointError, match="no trained reward"):
        load_reward(tmp_path / "nowhere", "pairwise", reward)


# ----------------------------------------------------------------------------------------- combined
def combined(**options):
    config = CombinedConfig(**options)
    return build_reward("combined", config)


def test_the_progress_bar_of_a_fit_knows_how_long_it_takes():
    parts = {"success": {}, "process": {"updates": 7}, "pairwise": {"updates": 5}}
    assert fit_updates(CombinedConfig(parts=parts)) == 7
    assert fit_updates(ProcessConfig(updates=3)) == 3 and fit_updates(TaskSuccessConfig()) == 1


def test_a_part_gets_demonstrations_where_it_wants_some():
    wants = {"type": "srpo", "weight": 0.5, "all_fail": "buffer", "demonstrations": 1}
    model = combined(parts={"success": {"weight": 1.0}, "near": wants})
    assert (
        model.wants_demonstrations
        and not combined(parts={"success": {"weight": 1.0}}).wants_demonstrations
    )
    model.set_demonstrations(episodes(8))
    assert len(model.parts["near"].reward.buffer["slide"]) == 1


def test_parts_are_normalised_each_for_itself_then_weighted():
    ts = episodes(8)
    parts = {
        "success": {"weight": 1.0},
        "big": {"type": "success", "coefficient": 50.0, "weight": 0.5},
    }
    total = [float(r.sum()) for r in combined(parts=parts, normalise="running_std").score(ts)]
    # half of them succeed, so the (population) standard deviation is half of the reward
    spread = 0.5
    assert total == pytest.approx([1.5 * float(t.success) / spread for t in ts])
    ranged = combined(parts=parts, normalise="range")
    assert [float(r.sum()) for r in ranged.score(ts)] == pytest.approx(
        [1.5 * float(t.success) for t in ts]
    )
    plain = [float(r.sum()) for r in combined(parts=parts, normalise="none").score(ts)]
    assert plain == pytest.approx([26.0 * float(t.success) for t in ts])
    assert ranged.metrics()["reward/big_mean"] == pytest.approx(25.0)
    copy = combined(parts=parts, normalise="range")
    copy.load_state_dict(ranged.state_dict())
    assert copy.parts["big"].largest == 50.0


def test_a_potential_leaves_reinforce_plus_plus_the_same_gradient():
    """Rewards to go must change by −Φ(s) alone, which is no function of the actions: by hand, γ
    = 0.9, time ran out."""
    t, potential = trajectory([0.0, 0.5, 1.0], success=False), torch.tensor([0.1, 0.4, 0.8])
    algorithm = PPOConfig(advantage="reinforce++", gamma=0.9)
    shaping = linked_to_algorithm(ProcessConfig(), algorithm).shaping
    rewards = shaped_reward(t, potential, shaping)
    assert rewards.tolist() == pytest.approx([0.9 * 0.4 - 0.1, -0.4])
    batch = RolloutBatch.from_trajectories([t])
    discounts = decision_discounts(batch.valid, 0.9, False)
    assert discounted_returns(rewards, discounts, batch.lengths).tolist() == pytest.approx(
        [-0.1, -0.4]
    )


class Climb(ShapedProgress):
    """Progress that a test writes down."""

    def __init__(self, *curves: list[float], **shaping):
        super().__init__()
        self.config = SimpleNamespace(
            shaping=ShapingConfig(success_coefficient=0.0, truncated_end="zero", **shaping)
        )
        self.curves = [torch.tensor(c) for c in curves]

    def progress(self, trajectories):
        return self.curves[: len(trajectories)]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_potential_is_scaled_by_its_rewards_to_go_and_not_by_its_sums(gamma):
    """Φ = (0.1, 0.5, 0.9) and (0.12, 0.3, 0.5): sums −0.1 and −0.12 (γ = 1) have a spread of 0.01,
    which would multiply the part by 100. Rewards to go are −Φ(s): −(0.1, 0.5, 0.12, 0.3), standard
    deviation 0.1615, largest 0.5."""
    ts = [trajectory([0, 0.5, 1.0]), trajectory([0, 0.2, 0.5], success=False)]
    curves = [0.1, 0.5, 0.9], [0.12, 0.3, 0.5]
    for normalise, divisor in (("running_std", 0.161478), ("range", 0.5)):
        config = CombinedConfig(
            parts={"climb": {"type": "process", "weight": 2.0}}, normalise=normalise
        )
        model = CombinedReward(config, lambda *_: Climb(*curves, gamma=gamma))
        rewards = model.score(ts)
        assert model.metrics()["reward/climb_divisor"] == pytest.approx(divisor, rel=1e-4)
        assert rewards[0].tolist() == pytest.approx(
            [2 / divisor * (gamma * 0.5 - 0.1), 2 / divisor * -0.5], rel=1e-4
        )
        # sums 0.8 and 0.38 say how much it pays
        delta = CombinedReward(config, lambda *_: Climb(*curves, mode="delta"))
        delta.score(ts)
        assert delta.metrics()["reward/climb_divisor"] == pytest.approx(
            0.21 if normalise == "running_std" else 0.8
        )


def test_success_and_progress_combine():
    ts = episodes(10, noise=0.0)
    model = combined(parts={"success": {}, "srpo": {"weight": 0.5, "scale": 0.4}}, normalise="none")
    rewards = [float(r.sum()) for r in model.score(ts)]
    assert (
        all((r == 1.5) == t.success for r, t in zip(rewards, ts))
        and max(r for r in rewards if r < 1.5) > 0.1
    )
    assert len(model.progress(ts)) == 10 and not model.learned and model.score([]) == []
    with pytest.raises(UserError, match="estimates progress"):
        combined(parts={"success": {}}).progress(ts)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"parts": {}}, "at least one"),
        ({"parts": {"success": 3}}, "must be a mapping"),
        ({"parts": {"success": {"weight": "much"}}}, "must be a number"),
        ({"parts": {"srpo": {"scle": 1}}}, "reward.parts.srpo.scle"),
        ({"parts": {"a": {"type": "nothing"}}}, "'nothing'"),
        ({"parts": {"combined": {}}}, "itself combined"),
        ({"normalise": "max"}, "running_std, range"),
    ],
)
def test_unfit_combinations_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        CombinedConfig(**options)


# -------------------------------------------------------------------------------------- in the loop
def test_scoring_overlaps_in_one_thread_and_errors_come_through():
    model, ts = Known(), episodes(6)
    with RewardScorer(model) as scorer:
        for t in ts:
            scorer.begin(t)
        rewards, learn, metrics = scorer.score(ts)
    assert (
        model.threads == [False] * 6 and len(rewards) == 6 and len(learn) == sum(len(t) for t in ts)
    )
    assert metrics["time/reward_overlapped"] > 0.05 and metrics["reward/progress_end"] == 0.5

    def broken(_):
        raise UserError("the camera is gone")

    model.prepare = broken
    with RewardScorer(model) as scorer, pytest.raises(UserError, match="camera is gone"):
        scorer.begin(ts[0])
        scorer.score(ts)


def test_several_rewards_reach_the_algorithm_by_name():
    ts = episodes(4)
    model = combined(
        parts={"success": {}, "more": {"type": "success", "coefficient": 2.0}}, normalise="none"
    )
    with RewardScorer(model) as scorer:
        _, learn, _ = scorer.score(ts, ["success", "more"])
        assert set(learn) == {"success", "more"} and torch.equal(
            2 * learn["success"], learn["more"]
        )
        with pytest.raises(ConfigError, match="'other'"):
            scorer.score(ts, ["other"])


def test_groups_may_be_chosen_by_reward():
    ts = [trajectory([0, 1], False, group=g, rollout_id=f"{g}{i}") for g in (0, 1) for i in (0, 1)]
    buffer = GroupBuffer()
    assert buffer.add(ts) == 0  # all fail
    assert buffer.add(ts, {"00": 0.1, "01": 0.4, "10": 0.2, "11": 0.2}) == 1
    assert [t.rollout_id for t in buffer.take(5)] == ["00", "01"]


def test_refit_is_kept_only_where_quality_holds():
    ts, quality = episodes(16), []

    def auc(model, trajectories):
        quality.append(len(trajectories))
        return judge(model, trajectories).figures.auc

    good = CoEvolvingReward(Known(), auc, every=2, buffer=16)
    good.score(ts)
    assert good.reward.fits == 0
    good.score(ts)
    assert good.reward.fits == 1 and good.metrics()["reward/refit_accepted"] == 1.0
    assert len(good._train) == 16 and len(good._held) == 4
    assert not {t.rollout_id for t in good._train} & {t.rollout_id for t in good._held}
    led = [
        dataclasses.replace(t, episode=dataclasses.replace(t.episode, lead=((0.0,),))) for t in ts
    ]
    late = CoEvolvingReward(Known(), auc, every=9)
    # all are scored; labels of progress count from the initial state
    assert len(late.score([*led, ts[0]])) == len(ts) + 1
    assert [t.rollout_id for t in (*late._train, *late._held)] == [ts[0].rollout_id]

    class Worse(Known):
        def fit(self, ts, progress=None):
            self.scale = -1.0
            return super().fit(ts)

    bad = CoEvolvingReward(Worse(), auc, every=1)
    bad.score(ts)
    assert bad.metrics()["reward/refit_accepted"] == 0.0 and bad.reward.scale == 1.0
    assert bad.metrics()["reward/quality_after"] < bad.metrics()["reward/quality_before"]

    class Stuck(Known):
        def fit(self, ts, progress=None):
            raise UserError("no success yet")

    stuck = CoEvolvingReward(Stuck(), auc, every=1)
    stuck.score(ts)
    assert stuck.metrics()["reward/refit_accepted"] == 0.0
    copy = CoEvolvingReward(Known(), auc, every=2)
    copy.load_state_dict(good.state_dict())
    assert copy.reward.fits == 1 and copy._batches == 2


# ------------------------------------------------------------------------------------------ judging
def test_verdicts_and_their_reasons(tmp_path):
    ts, check = episodes(20, felt=False), RewardCheckConfig()
    good = judge(Known(), ts, "known", check)
    assert good.verdict == "good" and good.figures.auc > 0.95 and list(good.tasks) == ["slide"]
    upside_down = Known()
    upside_down.scale = -1.0
    bad = judge(upside_down, ts, "known", check)
    assert bad.verdict == "bad" and "AUC" in bad.reasons[0] and "VOC" in bad.reasons[1]
    with pytest.raises(UserError, match=r"reward_check.on_bad=warn"):
        reward_tools.enforce(bad, check, tmp_path)
    reward_tools.enforce(bad, RewardCheckConfig(on_bad="warn"), tmp_path)
    assert decide(dataclasses.replace(good.figures, invalid_share=0.5), check)[0] == "bad"
    nothing = dataclasses.replace(good.figures, auc=float("nan"), successes=20)
    assert decide(nothing, check) == (
        "unknown",
        ["there is no failed episode among the 20, so success and failure cannot be told apart"],
    )
    page = write_quality(bad, tmp_path).read_text()
    assert "Verdict: bad" in page and page.count("<svg") == 2 and "http" not in render_quality(bad)
    stored = json.loads((tmp_path / "reward_quality.json").read_text())
    assert stored["verdict"] == "bad" and set(stored["figures"]) == set(
        Figures.__dataclass_fields__
    )
    assert "VOC" in bad.text() and "verdict: bad" in bad.text()


def test_what_cannot_be_judged_is_named():
    with pytest.raises(UserError, match="nothing to judge"):
        judge(TaskSuccess(TaskSuccessConfig()), episodes(2), "success")
    with pytest.raises(UserError, match="got none"):
        judge(Known(), [])
    for options in ({"on_bad": "ignore"}, {"episodes": 1}, {"held_out_share": 1.0}):
        with pytest.raises(ConfigError, match="reward_check"):
            RewardCheckConfig(**options)


def test_backwards_reverses_frames_under_another_id():
    t = trajectory([0.0, 0.5, 1.0], rollout_id="x")
    b = backwards(t)
    assert b.rollout_id == "x~backwards" and len(b) == len(t)
    assert torch.equal(b.observations.images["front"][0], t.final_observation.images["front"][0])
    assert torch.equal(b.final_observation.images["front"][0], t.observations.images["front"][0])


def test_a_learned_reward_is_judged_on_rollouts_it_has_not_seen():
    seen = []

    class Watching(Known):
        def fit(self, ts, progress=None):
            seen.extend(t.rollout_id for t in ts)
            return super().fit(ts)

    rollouts = episodes(20)
    quality, figures = reward_tools.fit_and_judge(
        Watching(), episodes(4, seed=8), rollouts, RewardCheckConfig(), "w"
    )
    assert (
        figures["trajectories"] == 4 + 12
        and quality.figures.trajectories == 8
        and quality.figures.successes == 4
    )
    fitted = Known()
    fitted.fitted = True
    assert (
        reward_tools.fit_and_judge(fitted, [], rollouts, RewardCheckConfig(), "w")[
            0
        ].figures.trajectories
        == 20
    )


# --------------------------------------------------------------------------------------- the report
@pytest.mark.parametrize(
    ("rewards", "warned"), [([0.2, 0.4, 0.6, 0.8], True), ([0.2, 0.25, 0.3, 0.3], False)]
)
def test_reward_that_rises_without_success_raises_a_warning(tmp_path, rewards, warned):
    from vla_rl.reporting.diagnostics import warnings
    from vla_rl.reporting.runs import load_run

    with MetricsLogger(tmp_path) as logger:
        for i, value in enumerate([r for r in rewards for _ in range(3)]):
            logger.log("rl", i + 1, {"reward/progress_end": value, "rollout/success": 0.2})
    found = [w for w in warnings([load_run(tmp_path)]) if "reward model" in w]
    assert bool(found) == warned


# -------------------------------------------------------------------------------- runs and commands
TOY = [
    "run=toy",
    "collect.episodes_per_task=6",
    "sft.updates=6",
    "sft.batch_size=8",
    "sft.warmup_updates=1",
    "slots.slots_per_worker=8",
    "rl.iterations=2",
    "rl.episodes_per_iteration=8",
    "algorithm.minibatch_size=16",
    "algorithm.critic_epochs=1",
    "algorithm.epochs=1",
    "evaluate.episodes_per_task=2",
    "evaluate.video_episodes=0",
    "env.success_radius=0.04",
    "reward_check.episodes=12",
    "reward_check.on_bad=warn",
    "reward_check.stride=2",
]
PAIRWISE = [
    "reward=pairwise",
    "reward.updates=3",
    "reward.refit_updates=2",
    "reward.network.image_size=16",
    "reward.network.width=8",
]


@pytest.fixture(scope="module")
def run(finished_run) -> Path:
    """A toy run with a learned reward that is refitted on the way."""
    return finished_run(*TOY, *PAIRWISE, "reward_check.refit_every=2")


def test_a_run_trains_judges_and_refits_its_reward(run):
    phases = json.loads((run / "phases.json").read_text())
    assert phases["reward"]["complete"] and phases["reward"]["episodes"] == 12
    assert phases["reward"]["verdict"] in ("good", "bad", "unknown")
    assert (run / "reward" / "reward.json").is_file() and (run / "reward_quality.html").is_file()
    rows = [r for r in read_metrics(run / "metrics.jsonl") if r["phase"] == "rl"]
    assert len(rows) == 2 and all(r["time/reward_overlapped"] > 0 for r in rows)
    assert "reward/refit_accepted" in rows[1] and "reward/progress_end" in rows[0]


def test_a_bad_reward_stops_a_run(run, tmp_path, monkeypatch):
    def judged_badly(*arguments):
        quality, figures = reward_tools.fit_and_judge(*arguments)
        return dataclasses.replace(quality, verdict="bad", reasons=["it is made up"]), figures

    monkeypatch.setattr(reward_phases, "fit_and_judge", judged_badly)
    start = [
        f"checkpoint={run / 'checkpoints' / 'sft'}",
        f"dataset={run / 'dataset'}",
        "phases=[reward]",
    ]
    config = compose(
        [*TOY, *PAIRWISE, *start, f"output_dir={tmp_path}", "reward_check.on_bad=stop"]
    )
    with pytest.raises(UserError, match=r"it is made up.*reward_check.on_bad=warn"):
        run_pipeline(config)
    config.reward_check.on_bad = "warn"  # the same run goes on
    run_pipeline(config)
    assert json.loads((config.run_dir / "phases.json").read_text())["reward"]["verdict"] == "bad"


def test_sft_leaves_out_what_a_critic_calls_a_mistake(run, tmp_path, monkeypatch, capsys):
    """GR-RL's drop filter from its command on: the value is fitted, and where it soon falls
    nothing is imitated."""
    fitted = tmp_path / "value"
    words = [
        "reward=value_progress",
        "reward.updates=3",
        "reward.network.image_size=16",
        "reward.network.width=8",
    ]
    assert cli.main(["reward", "fit", *words, f"data={run / 'dataset'}", "--out", str(fitted)]) == 0

    def fall(self, trajectories):  # at the second decision of each
        assert self.config.updates == 3 and is_fitted(self)
        return [torch.tensor([0.5, 0.9] + [0.2] * (len(t) - 1)) for t in trajectories]

    monkeypatch.setattr(ValueProgress, "progress", fall)
    sft = [f"dataset={run / 'dataset'}", "phases=[sft]", f"output_dir={tmp_path}"]
    folder = run_pipeline(compose([*TOY, *sft, f"sft.filter={fitted}"]))
    data, _ = load_demonstrations(run / "dataset").split(5, 0.2)
    lengths = [e.length for e in data.episodes]
    # the first two decisions, of four control steps each and the last frame; an episode of 5 has
    # only one
    share = 1 - sum(n if n < 10 else 8 for n in lengths if n > 5) / sum(lengths)
    record = json.loads((folder / "phases.json").read_text())["sft"]
    assert (
        record["worth_imitating"] == pytest.approx(share)
        and f"{share:.0%} of" in capsys.readouterr().out
    )

    for name, named in (
        (run / "reward", "PairwiseCritic, which does not say"),
        (tmp_path, "is no trained reward"),
    ):
        with pytest.raises(UserError, match=f"sft.filter={name}.*{named}.*vla-rl reward fit"):
            run_pipeline(compose([*TOY, *sft, "name=other", f"sft.filter={name}"]))
    monkeypatch.setattr(
        ValueProgress, "progress", lambda self, ts: [torch.linspace(1, 0, len(t) + 1) for t in ts]
    )
    with pytest.raises(UserError, match=r"no step of these demonstrations.*drop_threshold"):
        mark_worth(data, ValueProgress(ValueProgressConfig(drop_threshold=0.0)), stride=1)


def test_commands_fit_score_and_judge(run, tmp_path, capsys):
    small = [*PAIRWISE, "reward.batch_size=8", "reward_check.stride=2", "--episodes", "10"]
    fitted = tmp_path / "fitted"
    assert (
        cli.main(
            [
                "reward",
                "fit",
                *small,
                f"data={run / 'dataset'}",
                f"data={run}",
                "--out",
                str(fitted),
            ]
        )
        == 0
    )
    assert "verdict" in capsys.readouterr().out and (fitted / "reward.json").is_file()
    judged = cli.main(
        [
            "reward",
            "quality",
            str(run),
            *small,
            f"reward.checkpoint={fitted}",
            "--out",
            str(tmp_path / "q"),
        ]
    )
    assert judged in (0, 1) and (tmp_path / "q" / "reward_quality.html").is_file()
    pairs = tmp_path / "pairs.jsonl"
    scored = [
        "reward",
        "score",
        str(run),
        "reward=srpo",
        "--episodes",
        "10",
        "--videos",
        "1",
        "--preferences",
        str(pairs),
    ]
    assert cli.main([*scored, "--out", str(tmp_path / "s")]) == 0
    rows = json.loads((tmp_path / "s" / "scores.json").read_text())
    assert len(rows) == 10 and {"rollout_id", "reward", "progress", "success"} <= set(rows[0])
    capsys.readouterr()
    assert cli.main(["reward", "fit", "reward=srpo", f"data={run / 'dataset'}"]) == 2
    assert "nothing to train" in capsys.readouterr().err
    assert cli.main(["reward", "quality", "reward=srpo", str(tmp_path)]) == 2
    assert "neither a dataset" in capsys.readouterr().err
    assert cli.main(["reward", "quality", "reward=srpo"]) == 2
    assert "name what to read" in capsys.readouterr().err


def test_demonstrations_become_trajectories(run):
    ts = trajectories_of_dataset(run / "dataset", stride=3, limit=4)
    assert len(ts) == 4 and all(t.success and t.terminated for t in ts)
    for t in ts:
        assert t.actions.shape[1] == 3 and int(t.valid.sum()) >= 1 and bool(t.valid[:-1].all())
        assert float(t.rewards.sum()) == 1.0
    assert len({t.rollout_id for t in ts}) == 4
    data = load_demonstrations(run / "dataset")
    # what was sent acted; the label is what was asked for
    t = demonstration_trajectories(data, stride=3)[0]
    rows = slice(0, int(t.valid.sum()))
    bounds = [
        torch.tensor(bound) for bound in (data.embodiment.action_low, data.embodiment.action_high)
    ]
    assert torch.equal(t.actions[t.valid], data.sent[rows].clamp(*bounds)) and not torch.equal(
        t.actions, t.proposed
    )
    assert torch.equal(t.proposed[t.valid], data.actions[rows])
    data.sent = None
    t = demonstration_trajectories(data, stride=3)[0]
    assert t.proposed is None and torch.equal(t.actions[t.valid], data.actions[rows])


def test_a_replay_has_demonstrations_with_the_rewards_of_the_run(run):
    """Whatever the run's reward is: its critics learn one scale."""
    config = compose(
        [
            "run=toy",
            f"dataset={run / 'dataset'}",
            "reward.coefficient=5",
            "reward.time_discount=0.9",
        ]
    )
    made = SimpleNamespace(
        config=config, has_dataset=True, env=SimpleNamespace(embodiment=None, tasks=()), dir=run
    )
    policy = SimpleNamespace(chunk_length=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            prior_data,
            "split_demonstrations",
            lambda _: (load_demonstrations(run / "dataset"), None),
        )
        ts = list(prior_data.given(made, policy))
    assert ts and {source for source, _ in ts} == {"demonstrations"}
    for _, t in ts:
        given = t.rewards.sum(1)
        assert (
            float(given[-1]) == pytest.approx(5 * 0.9 ** int(t.valid.sum()))
            and not given[:-1].any()
        )
    made.has_dataset = False
    assert list(prior_data.given(made, policy)) == []


def test_rollouts_survive_saving(tmp_path):
    ts = episodes(3)
    save_rollouts(tmp_path / "r", ts)
    again = load_rollouts(tmp_path / "r")
    assert [t.rollout_id for t in again] == [t.rollout_id for t in ts]
    assert torch.equal(again[1].observations.images["front"], ts[1].observations.images["front"])
    source = load_source(tmp_path / "r")
    assert len(source.trajectories) == 3 and source.run is None


def test_rollouts_of_a_run_are_kept_until_config_or_checkpoint_change(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("rollouts"))
    reads = [
        load_source(copy, episodes=4, overrides=o) for o in ([], ["seed=7"], ["env.horizon=3"], [])
    ]
    assert ["rollouts kept in" in r.what for r in reads] == [False, False, False, True]
    ids, seeded, short, again = ([t.rollout_id for t in r.trajectories] for r in reads)
    assert ids == again and ids != seeded and ids == short
    assert max(t.num_control_steps for t in reads[2].trajectories) <= 3
    weights = copy / "checkpoints" / "rl" / "model.safetensors"
    os.utime(weights, ns=(1, 1))  # as if written anew
    assert "rollouts kept in" not in load_source(copy, episodes=4).what


def test_rollout_episodes_are_unique_and_of_the_train_split():
    from sim.toy import ToyReach

    specs = rollout_episodes(ToyReach().tasks, 10, seed=3)
    assert len({s.rollout_id for s in specs}) == len({s.group_id for s in specs}) == 10
    assert {s.split for s in specs} == {"train"} and stable_seed("reward", 3, 0) != stable_seed(
        "reward", 4, 0
    )


def test_bench_counts_frames(run):
    kinds = [f"reward={name}" for name in ("success", "srpo", "process")]
    document = bench_reward.measure(kinds, episodes=4, decisions=3, size=16, repeats=1, run=run)
    assert document["frames"] == 16 and document["rewards"]["srpo"]["frames_per_second"] > 0
    assert (
        0 <= document["run"]["share"] < 1
        and 0 < document["rewards"]["srpo"]["share_of_iteration"] < 1
    )
