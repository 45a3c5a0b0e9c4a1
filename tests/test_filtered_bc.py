"""Filtered BC as an online algorithm: it clones exactly the successes, survives a batch without
any, and resumes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn

from vla_rl import build
from vla_rl.algorithms.filtered_bc import FilteredBC, FilteredBCConfig, kept_decisions
from vla_rl.config import compose
from vla_rl.errors import ConfigError, TrainingDiverged
from vla_rl.storage import load_state, save_state
from vla_rl.types import EpisodeSpec, Observation, RolloutBatch, Trajectory

H, A, P = 2, 1, 1


class Constant(nn.Module):
    """Always predicts ``action``; the loss is ½ · squared error, averaged over valid control
    steps."""

    embodiment = None
    chunk_length = H

    def __init__(self):
        super().__init__()
        self.action = nn.Parameter(torch.zeros(A))
        self.seen: list[Tensor] = []

    def act(self, observation, *, deterministic=False, seeds=None):
        raise AssertionError("learning never acts")

    def imitation_loss(self, observation, actions, valid):
        assert observation.privileged is None
        self.seen.append(observation.proprio[:, 0].clone())
        error = 0.5 * (self.action - actions).square().mean(-1)
        return (error * valid).sum() / valid.sum(), {"error": float(error.detach().mean())}


def trajectory(
    index: int, success: bool, decisions: int = 2, action: float | None = None
) -> Trajectory:
    """Its proprio and (by default) its actions are its index; the last control step was not
    executed."""
    rows = torch.full((decisions, P), float(index))
    valid = torch.ones(decisions, H, dtype=torch.bool)
    valid[-1, -1] = False
    seen = Observation(
        {"front": torch.zeros(decisions, 4, 4, 3, dtype=torch.uint8)},
        rows,
        ("go",) * decisions,
        torch.ones(decisions, 3),
    )
    return Trajectory(
        episode=EpisodeSpec("task", index, group_id=index),
        observations=seen,
        final_observation=seen[:1],
        actions=torch.full((decisions, H, A), float(index) if action is None else action),
        valid=valid,
        rewards=torch.zeros(decisions, H),
        behavior_log_prob=torch.zeros(decisions, H),
        replay={},
        terminated=success,
        truncated=not success,
        success=success,
    )


def batch(*trajectories: Trajectory) -> RolloutBatch:
    return RolloutBatch.from_trajectories(trajectories)


def config(**changes) -> FilteredBCConfig:
    plain = {"betas": [0.0, 0.0], "grad_clip": None, "epochs": 1, "minibatch_size": 100}
    return FilteredBCConfig(**plain | changes)


def test_only_successes_short_enough_are_kept():
    data = batch(
        trajectory(0, False),
        trajectory(1, True, 3),
        trajectory(2, True, 1),
        trajectory(3, False, 4),
    )
    assert kept_decisions(data).tolist() == [2, 3, 4, 5]
    assert kept_decisions(data, max_control_steps=5).tolist() == [2, 3, 4, 5]
    assert kept_decisions(data, max_control_steps=4).tolist() == [5]
    late = dataclasses.replace(data.episodes[2], lead=((0.0,),) * 4)
    led = dataclasses.replace(data, episodes=(*data.episodes[:2], late, data.episodes[3]))
    assert kept_decisions(led, max_control_steps=4).tolist() == []
    assert kept_decisions(batch(trajectory(0, False))).tolist() == []


def test_one_update_by_hand():
    """From 0, successes at 2 and 4 (3 and 1 valid steps) pull with gradient −(3·2 + 1·4) / 4;
    Adam steps by its sign."""
    policy = Constant()
    data = batch(trajectory(9, False), trajectory(2, True, 2), trajectory(4, True, 1))
    algorithm = FilteredBC(config(learning_rate=0.1), policy)
    metrics = algorithm.update(data, rewards=torch.zeros(5))
    assert policy.action.item() == pytest.approx(0.1, rel=1e-5)
    assert sorted(torch.cat(policy.seen).tolist()) == [2.0, 2.0, 4.0]
    assert metrics["filtered_bc/loss"] == pytest.approx(0.5 * (3 * 4 + 1 * 16) / 4)
    assert metrics["filtered_bc/grad_norm"] == pytest.approx(2.5)
    assert (metrics["filtered_bc/episodes"], metrics["filtered_bc/decisions"]) == (2.0, 3.0)
    assert (metrics["filtered_bc/updates"], metrics["filtered_bc/nothing_to_clone"]) == (1.0, 0.0)


def test_it_converges_on_what_succeeded():
    policy = Constant()
    algorithm = FilteredBC(config(learning_rate=0.05, epochs=20, betas=[0.9, 0.95]), policy)
    for _ in range(10):
        algorithm.update(batch(trajectory(0, True, action=0.7), trajectory(1, False, action=-5.0)))
    assert policy.action.item() == pytest.approx(0.7, abs=0.02)


def test_epochs_see_every_kept_decision_equally_often():
    policy = Constant()
    data = batch(*(trajectory(i, i % 2 == 0, 2) for i in range(8)))
    metrics = FilteredBC(config(epochs=3, minibatch_size=4), policy).update(data)
    assert metrics["filtered_bc/updates"] == 6 and [len(x) for x in policy.seen] == [4] * 6
    values, counts = torch.cat(policy.seen).unique(return_counts=True)
    assert values.tolist() == [0.0, 2.0, 4.0, 6.0] and counts.tolist() == [6] * 4


def test_a_batch_without_success_changes_nothing_and_says_so():
    policy = Constant()
    algorithm = FilteredBC(config(learning_rate=0.1), policy)
    algorithm.update(batch(trajectory(1, True)))
    before, optimizer = (
        policy.action.clone(),
        json.dumps(algorithm.state_dict()["imitation"]["guard"]),
    )
    metrics = algorithm.update(batch(trajectory(1, False), trajectory(2, False)))
    assert torch.equal(policy.action, before) and optimizer == json.dumps(
        algorithm.state_dict()["imitation"]["guard"]
    )
    assert metrics["filtered_bc/nothing_to_clone"] == 1.0 and metrics["filtered_bc/updates"] == 0.0
    assert "filtered_bc/loss" not in metrics and algorithm.iteration == 2


def test_resuming_goes_on_as_if_never_interrupted(tmp_path):
    batches = [
        batch(*(trajectory(i, (i + k) % 3 > 0, action=0.1 * i + k) for i in range(6)))
        for k in range(4)
    ]
    settings = config(learning_rate=0.03, epochs=2, minibatch_size=3, betas=[0.9, 0.95])
    whole, first, second = Constant(), Constant(), Constant()
    algorithm = FilteredBC(settings, whole)
    for data in batches:
        algorithm.update(data)
    algorithm = FilteredBC(settings, first)
    for data in batches[:2]:
        algorithm.update(data)
    save_state(tmp_path / "state", algorithm.state_dict())
    second.load_state_dict(first.state_dict())
    resumed = FilteredBC(settings, second)
    resumed.load_state_dict(load_state(tmp_path / "state"))
    for data in batches[2:]:
        resumed.update(data)
    assert torch.equal(whole.action, second.action) and resumed.iteration == 4


def test_losses_that_are_not_finite_are_skipped_then_end_the_run():
    policy = Constant()
    algorithm = FilteredBC(config(max_bad_updates=2), policy)
    bad = batch(trajectory(1, True, action=float("nan")))
    assert algorithm.update(bad)["filtered_bc/skipped_updates"] == 1.0
    assert policy.action.item() == 0.0
    with pytest.raises(TrainingDiverged, match="2 updates in a row"):
        algorithm.update(bad)


def test_a_policy_that_cannot_imitate_is_refused():
    class Actor(nn.Linear):
        embodiment, chunk_length, act = None, H, Constant.act

    with pytest.raises(ConfigError, match="imitation_loss"):
        FilteredBC(config(), Actor(1, 1))


@pytest.mark.parametrize(
    "change", [{"epochs": 0}, {"minibatch_size": 0}, {"learning_rate": -1.0}, {"betas": [0.9]}]
)
def test_settings_out_of_range(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        FilteredBCConfig(**change)


def test_it_is_registered_and_configured_by_name():
    settings = compose(["~run", "algorithm=filtered_bc", "algorithm.epochs=4"]).algorithm
    assert dataclasses.asdict(settings) == dataclasses.asdict(FilteredBCConfig(epochs=4))
    assert build.implementation("algorithm", "filtered_bc") is FilteredBC


def test_what_a_policy_freezes_for_rl_stays_as_it_is():
    class Towered(Constant):
        def __init__(self):
            super().__init__()
            self.tower = nn.Parameter(torch.ones(A))

        def prepare_for_rl(self):
            self.tower.requires_grad_(False)

        def imitation_loss(self, observation, actions, valid):
            return super().imitation_loss(observation, actions * self.tower, valid)

    policy = Towered()
    FilteredBC(FilteredBCConfig(learning_rate=0.1, minibatch_size=4), policy).update(
        batch(trajectory(3, True))
    )
    assert float(policy.action.detach()) != 0.0 and float(policy.tower) == 1.0
