"""scripts/offline_sets.py: sets that are repeatable, as long as asked for, and hold what was done;
the small policy with a density is trained, saved and opened."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.settings import SmallConfig
from policies.small import SmallPolicy
from sim import toy
from sim.inline import InlineEnv
from vla_rl import build
from vla_rl.algorithms.actor_critic import SAC
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.config.replay_algorithms import SACConfig
from vla_rl.data.recorded import recorded
from vla_rl.data.replay import OFFLINE, Replay

ROOT = Path(__file__).parent.parent


@pytest.fixture
def sets(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "scripts.offline_sets", raising=False)
    import scripts.offline_sets

    return scripts.offline_sets


def made(sets, folder, seed, decisions=400):
    env = InlineEnv(toy.ToyReach(toy.ToyConfig(success_radius=0.08)), num_slots=4)
    env.tasks = env.tasks[:1]
    replay = Replay(folder, embodiment=env.embodiment)
    solved = sets.write(
        replay, sets.scripted(env, lambda state: np.array([1.0, 0.0]), seed), decisions
    )
    return env.embodiment, replay, solved


def test_a_set_holds_what_was_done(sets, tmp_path):
    robot, replay, solved = made(sets, tmp_path / "set", seed=1)
    episodes = list(recorded(tmp_path / "set", robot, 1, {}))
    assert 400 <= len(replay) < 400 + len(episodes[-1])
    assert sum(map(len, episodes)) == len(replay) and len(episodes) == replay.episodes
    assert 0 < solved == sum(t.success for t in episodes) < len(episodes)
    assert all(t.terminated == t.success for t in episodes)
    # the first eight are half a half-range away from what the expert says, on average less
    spread = torch.cat([t.actions[:, 0, 1] for t in episodes[:8]]).std()
    assert 0.35 < spread < 0.6
    at_random = torch.cat([t.actions[:, 0] for t in episodes[24:32]])
    assert at_random.mean(0).abs().max() < 0.2 and (at_random.std(0) - 3**-0.5).abs().max() < 0.1


def test_a_set_follows_its_seed(sets, tmp_path):
    first, again, other = (
        torch.cat(
            [
                t.actions
                for t in recorded(tmp_path / name, made(sets, tmp_path / name, seed)[0], 1, {})
            ]
        )
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert len(first) != len(other) or not torch.equal(first, other)


def test_the_small_gaussian_learns_by_cal_ql_and_opens_again(sets, tmp_path):
    robot, _, _ = made(sets, tmp_path / "set", seed=1)
    policy = SmallPolicy(SmallConfig(chunk_length=1, hidden=[32], distribution="gaussian"), robot)
    config = SACConfig(
        conservatism="cal_ql", offline_updates=20, batch_size=32, demonstration_share=0.0
    )
    algorithm, replay = SAC(config, policy), Replay()
    for t in recorded(tmp_path / "set", robot, 1, {}):
        rewards = t.rewards.sum(1)
        replay.add(t, rewards, OFFLINE, algorithm.annotate(t, rewards))
    before = [p.clone() for p in policy.actor.parameters()]
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        figures = algorithm.update(
            lambda n, **k: replay.draw(n, generator, **{**k, "shares": None})
        )
    assert np.isfinite(list(figures.values())).all() and "sac/conservative_gap" in figures
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.actor.parameters()))
    save_checkpoint(tmp_path / "kept", policy, keep_last_good=False)
    opened = load_policy(tmp_path / "kept", build.policy_class)
    seen = episodes_first(tmp_path / "set", robot)
    torch.testing.assert_close(
        opened.act(seen, deterministic=True).chunk.actions,
        policy.act(seen, deterministic=True).chunk.actions,
    )


def episodes_first(folder, robot):
    return next(recorded(folder, robot, 1, {})).observations
