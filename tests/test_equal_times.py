"""Rewards are judged at equal times: numbers by hand, and a table of models that see nothing and
must not pass."""

from __future__ import annotations

import dataclasses
import math
import zlib

import numpy as np
import pytest
import torch
from reward_helpers import picture, trajectory

from vla_rl.config.episodes import RewardCheckConfig
from vla_rl.rewards import equal_times as e
from vla_rl.rewards.quality import decide, judge
from vla_rl.rewards.scorer import CoEvolvingReward
from vla_rl.rewards.tools import co_evolving

LIMIT = 10


def lifts(count: int = 24, seed: int = 0) -> list:
    """Successes end after 5 to 8 decisions and failures at the limit of 10, in different places;
    where the arm is (proprio) says nothing, the picture says how far things are."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        won, speed = i % 2 == 0, 5 + i // 2 % 4
        reach = 0.95 if won else 0.3 + 0.2 * float(torch.rand((), generator=generator))
        steps = speed if won else LIMIT
        t = trajectory(
            [reach * min(1.0, k / speed) for k in range(steps + 1)],
            won,
            rollout_id=f"{seed}-{i}",
            noise=3.0,
        )
        path = torch.cumsum(torch.rand(steps + 1, 3, generator=generator), 0) / LIMIT
        seen, last = (
            dataclasses.replace(o, proprio=p)
            for o, p in ((t.observations, path[:-1]), (t.final_observation, path[-1:]))
        )
        found.append(dataclasses.replace(t, observations=seen, final_observation=last))
    return found


class Says:
    """A reward whose progress is a function of an episode."""

    def __init__(self, curve) -> None:
        self.curve = curve

    def score(self, ts):
        return [torch.zeros(len(t)) for t in ts]

    def progress(self, ts):
        return [torch.as_tensor(self.curve(t), dtype=torch.float32) for t in ts]


def looks(t) -> torch.Tensor:
    """The column of the bar: what the picture shows."""
    frames = torch.cat([t.observations.images["front"], t.final_observation.images["front"]])
    return frames[:, 12].float().mean(-1).argmax(-1) / (picture(0.0).shape[0] - 5)


def clock(t) -> torch.Tensor:
    return torch.arange(len(t) + 1) / LIMIT


BLIND = {
    "a clock": clock,
    "a clock that falls at the limit": lambda t: torch.where(clock(t) < 1.0, clock(t), 0.05),
    "a clock that runs back": lambda t: 1.0 - clock(t),
    "a clock that stops": lambda t: clock(t).clamp(max=0.6),
    "whether the episode was short": lambda t: (
        torch.full((len(t) + 1,), float(len(t) < LIMIT)) * clock(t)
    ),
    "how long it lasted": lambda t: clock(t) * (1.0 - len(t) / (2 * LIMIT)),
    "the share of the episode": lambda t: (
        torch.linspace(0, 1, len(t) + 1) * (1.0 if len(t) < LIMIT else 0.5)
    ),
    "whether time ran out": lambda t: clock(t) * (0.2 if t.truncated else 1.0),
    "whether it was told of a success": lambda t: clock(t) * (1.0 if t.success else 0.5),
    "nothing": lambda t: torch.full((len(t) + 1,), 0.5),
    "noise": lambda t: torch.rand(
        len(t) + 1, generator=torch.Generator().manual_seed(zlib.crc32(t.rollout_id.encode()))
    ),
}


@pytest.mark.parametrize("name", sorted(BLIND))
def test_what_sees_nothing_is_not_good(name):
    ts = lifts()
    quality = judge(Says(BLIND[name]), ts, name)
    assert quality.verdict == "bad", quality.text()
    assert quality.figures.auc_clock == 1.0  # in all of which success is told by the length alone
    if name != "noise":
        assert quality.figures.auc == pytest.approx(0.5)
    assert "AUC" in quality.reasons[0] and "proprio" in quality.text()


def test_what_sees_the_task_is_good():
    quality = judge(Says(looks), lifts(), "eyes")
    assert quality.verdict == "good" and quality.figures.auc > 0.98 > quality.figures.auc_proprio
    assert (
        f"proprioception alone {quality.figures.auc_proprio:.3f}" in quality.reasons[0]
        and len(quality.reasons) == 1
    )


def test_pairs_meet_where_the_first_of_them_ends():
    """Successes of 2 and 4 decisions, a failure of 3, another of 5 of another task."""
    ts = [
        trajectory([0.0, 0.5, 1.0], rollout_id="a"),
        trajectory([0.0, 0.2, 0.5, 0.7, 1.0], rollout_id="b"),
        trajectory([0.0, 0.4, 0.6, 0.1], False, rollout_id="c"),
        trajectory([0.0] * 6, False, rollout_id="d", task="other"),
    ]
    pairs = e.pairs_of(ts)
    assert pairs == [e.Pair(0, 2, 2), e.Pair(1, 2, 3)]
    ends = e.progress_ends(Says(looks), ts, pairs)
    assert [ends[p.won, p.time] for p in pairs] == pytest.approx([1.0, 0.7], abs=0.03)
    assert [ends[p.lost, p.time] for p in pairs] == pytest.approx([0.6, 0.1], abs=0.03)
    assert e.pair_auc(pairs, ends) == 1.0
    # one lost, one drawn
    assert e.pair_auc(pairs, {**ends, (0, 2): 0.1, (1, 3): ends[2, 3]}) == 0.25
    assert e.pair_auc(pairs, {**ends, (0, 2): math.nan}) == 1.0 and math.isnan(e.pair_auc([], {}))
    assert e.clock_auc(ts) == 0.5  # one shorter, one longer
    assert (
        e.clock_auc(ts[:1] + ts[2:]) == 1.0
        and e.clock_auc(ts[1:]) == 1.0
        and math.isnan(e.clock_auc(ts[:2]))
    )


def test_an_episode_that_is_cut_is_as_if_time_had_run_out():
    t = trajectory([0.0, 0.3, 0.6, 1.0], rollout_id="a")
    t = dataclasses.replace(
        t, value=torch.arange(3.0), replay={"x": torch.arange(3)}, is_human=t.valid
    )
    short = e.cut_at(t, 2)
    assert (len(short), short.success, short.terminated, short.truncated, short.rollout_id) == (
        2,
        False,
        False,
        True,
        "a~2",
    )
    assert looks(short).tolist() == looks(t)[:3].tolist()
    assert (
        short.value.tolist() == [0.0, 1.0]
        and short.replay["x"].tolist() == [0, 1]
        and short.proposed is None
    )
    assert len(short.is_human) == len(short.valid) == len(short.actions) == 2
    assert e.cut_at(t, 3) is t and e.cut_at(t, 9) is t


def test_times_with_most_pairs_are_asked_for():
    ts = [
        trajectory([0.0] * (k + 1), rollout_id=f"w{k}-{n}")
        for k in range(1, 13)
        for n in range(1 + (k > 4))
    ]
    ts += [trajectory([0.0] * 20, False, rollout_id="f")]
    assert sorted({pair.time for pair in e.pairs_of(ts)}) == list(range(5, 13)) and e.TIMES == 8


def test_proprioception_that_tells_success_has_to_be_beaten():
    """The arm of a success is where that of a failure never is: a model that looks no better
    than that is not good."""
    ts = []
    for t in lifts():
        last = t.final_observation.proprio + (0.6 if t.success else 0.0)
        ts.append(
            dataclasses.replace(
                t, final_observation=dataclasses.replace(t.final_observation, proprio=last)
            )
        )
    pairs = e.pairs_of(ts)
    found = e.pair_auc(pairs, e.proprio_ends(ts, pairs))
    assert (
        found > 0.9 > e.pair_auc(e.pairs_of(lifts()), e.proprio_ends(lifts(), e.pairs_of(lifts())))
    )
    worse = judge(Says(lambda t: looks(t) + 0.5 * BLIND["noise"](t)), ts, "half blind")
    assert worse.figures.auc_proprio == pytest.approx(found)
    figures, check = worse.figures, RewardCheckConfig()
    below = dataclasses.replace(
        figures, auc=0.8, auc_low=0.7, auc_high=0.85, auc_proprio=0.9, voc=0.9
    )
    assert decide(below, check)[0] == "bad" and "proprioception alone" in decide(below, check)[1][0]
    unclear = dataclasses.replace(below, auc_high=0.95)
    assert (
        decide(unclear, check)[0] == "unknown"
        and "no more than the 0.90" in decide(unclear, check)[1][0]
    )
    assert decide(dataclasses.replace(below, auc_proprio=0.7), check)[0] == "good"
    tied = dataclasses.replace(below, auc=0.99, auc_high=1.0, auc_proprio=1.0)
    assert (
        decide(tied, check)[0] == "unknown" and "no more than the 1.00" in decide(tied, check)[1][0]
    )
    few = dataclasses.replace(below, auc_low=0.4, auc_high=1.0, auc_proprio=0.6)
    assert decide(few, check)[0] == "unknown" and "clock" in decide(few, check)[1][0]


def test_a_ridge_regression_by_hand():
    """One feature, outcomes 0 and 1 at −1 and +1, two rows each: slope (½·2·2)/(4 + 1), and 0
    for what never changes."""
    x = np.array([[-1.0, 3.0], [-1.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    said = e._ridge(x, np.array([0.0, 0.0, 1.0, 1.0]), np.array([[-1.0, 3.0], [2.0, 9.0]]))
    assert said.tolist() == pytest.approx([-0.4, 0.8])


def test_an_episode_is_judged_by_proprioception_of_others_alone():
    """Outcomes at random: a fit that saw its own row would tell them apart, with more features
    than rows."""
    generator = torch.Generator().manual_seed(0)
    ts = []
    for i in range(30):
        t = trajectory([0.0, 0.5, 1.0], i % 2 == 0, rollout_id=str(i))
        seen = [
            dataclasses.replace(o, proprio=torch.randn(len(o), 20, generator=generator))
            for o in (t.observations, t.final_observation)
        ]
        ts.append(dataclasses.replace(t, observations=seen[0], final_observation=seen[1]))
    pairs = e.pairs_of(ts)
    assert 0.25 < e.pair_auc(pairs, e.proprio_ends(ts, pairs)) < 0.75
    assert not e.proprio_ends(ts[::2], e.pairs_of(ts[::2]))


def test_a_refit_that_turns_to_the_clock_is_sent_back():
    """At their ends it tells successes as well as before."""

    class Fitted(Says):
        learned = True

        def fit(self, ts, progress=None):
            self.curve = BLIND["a clock that falls at the limit"]
            return {"loss": 0.0}

        def state_dict(self):
            return {"curve": self.curve}

        def load_state_dict(self, state):
            self.curve = state["curve"]

    reward = Fitted(looks)
    guarded = co_evolving(reward, RewardCheckConfig(refit_every=1), [])
    assert isinstance(guarded, CoEvolvingReward)
    guarded.score(lifts(64, seed=3))
    told = guarded.metrics()
    assert told["reward/refit_accepted"] == 0.0 and reward.curve is looks
    assert told["reward/quality_before"] > 0.98 and told["reward/quality_after"] == pytest.approx(
        0.5
    )
