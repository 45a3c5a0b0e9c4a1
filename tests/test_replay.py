"""The replay against values worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sim.toy import ToyReach
from vla_rl.data.replay import Replay
from vla_rl.errors import UserError
from vla_rl.types import EpisodeSpec, Observation, Trajectory

SPEC = ToyReach().embodiment


def seen(first: int, count: int) -> Observation:
    """Observations that are known by their proprio: (i, 0)."""
    proprio = torch.tensor([[float(i), 0.0] for i in range(first, first + count)])
    return Observation(
        {"top": torch.zeros(count, 16, 16, 3, dtype=torch.uint8)}, proprio, ("go",) * count
    )


def episode(
    first: int, t: int = 3, *, terminated: bool = True, last_steps: int = 4, source: str = "a"
) -> Trajectory:
    """Decisions ``first`` … ``first + t − 1``, four control steps each but the last one."""
    valid = torch.ones(t, 4, dtype=torch.bool)
    valid[-1, last_steps:] = False
    return Trajectory(
        episode=EpisodeSpec("reach_red", first, rollout_id=f"{source}-{first}"),
        observations=seen(first, t),
        final_observation=seen(first + t, 1),
        actions=torch.arange(first, first + t).float().view(t, 1, 1).expand(t, 4, 2).clone(),
        valid=valid,
        rewards=torch.zeros(t, 4),
        behavior_log_prob=torch.zeros(t),
        replay={},
        terminated=terminated,
        truncated=not terminated,
        success=terminated,
    )


def drawn(replay: Replay, **options) -> dict[int, tuple[float, float, int]]:
    """{decision: (reward, discount, where it leads to)} of every decision that was drawn."""
    batch = replay.draw(500, torch.Generator().manual_seed(0), **options)
    before, after = (
        batch.observations.proprio[:, 0].tolist(),
        batch.next_observations.proprio[:, 0].tolist(),
    )
    assert torch.equal(batch.actions[:, 0, 0], batch.observations.proprio[:, 0])
    rows = zip(before, batch.rewards.tolist(), batch.discounts.tolist(), after)
    return {int(b): (r, d, int(a)) for b, r, d, a in rows}


def test_transitions_lead_on_inside_their_episode_and_end_where_it_does():
    replay = Replay()
    replay.add(episode(0, last_steps=2), torch.tensor([0.0, 0.5, 1.0]))
    replay.add(episode(10, terminated=False), torch.tensor([0.0, 0.0, 2.0]))
    one = 0.5**4  # gamma per control step, four of them
    assert drawn(replay, gamma=0.5) == {
        0: (0.0, one, 1),
        1: (0.5, one, 2),
        2: (1.0, 0.0, 3),  # terminated: nothing beyond
        # time ran out: the value of what was seen then
        10: (0.0, one, 11),
        11: (0.0, one, 12),
        12: (2.0, one, 13),
    }
    assert drawn(replay, gamma=0.5, n_step=2) == {
        0: (0.5 * one, one * one, 2),
        1: (0.5 + one * 1.0, 0.0, 3),
        2: (1.0, 0.0, 3),
        10: (0.0, one * one, 12),
        11: (2.0 * one, one * one, 13),
        12: (2.0, one, 13),
    }


def test_chosen_decisions_come_as_they_were_added():
    replay = Replay()
    for first, t in ((0, 3), (10, 1), (20, 2)):
        replay.add(episode(first, t=t), torch.arange(t).float())
    assert replay.first_decisions().tolist() == [0, 3, 4]
    taken = replay.take(torch.tensor([5, 0, 3]), images=False)
    assert (
        taken.observations.proprio[:, 0].tolist() == [21.0, 0.0, 10.0]
        and not taken.observations.images
    )
    assert taken.rewards.tolist() == [1.0, 0.0, 0.0] and taken.discounts.tolist()[0] == 0.0


def test_sources_are_drawn_by_their_shares():
    replay = Replay()
    replay.add(episode(0, t=1, source="few"), torch.ones(1), "few")
    for i in range(30):
        replay.add(episode(100 + 10 * i, t=8), torch.zeros(8), "many")
    generator = torch.Generator().manual_seed(1)
    batch = replay.draw(100, generator, shares={"few": 0.5, "many": 0.5, "none": 0.9})
    assert batch.source.count("few") == 50 and batch.source.count("many") == 50
    assert replay.draw(400, generator).source.count("few") < 20
    assert replay.count("few") == 1 and replay.count("none") == 0 and len(replay) == 241


def test_sources_in_a_tuple_are_drawn_as_one_and_an_empty_one_changes_nothing():
    """Two demonstrated decisions and six that a person chose online: a quarter and three
    quarters of their common half."""
    replay, alone = Replay(), Replay()
    for kept in (replay, alone):
        kept.add(episode(0, t=2, source="shown"), torch.ones(2), "demonstrations")
        kept.add(episode(50, t=40), torch.zeros(40))
    for i in (100, 110):  # two episodes of five decisions, the last three of each a person's
        human = torch.zeros(5, 4, dtype=torch.bool)
        human[2:, 1] = True
        replay.add(
            dataclasses.replace(episode(i, t=5, last_steps=2), is_human=human), torch.zeros(5)
        )
    shares = {("demonstrations", "interventions"): 0.5, ("online",): 0.5}
    batch = replay.draw(4000, torch.Generator().manual_seed(0), shares=shares)
    numbers = batch.observations.proprio[:, 0]
    first, counts = numbers[:2000].unique(return_counts=True)
    assert first.tolist() == [0, 1, 102, 103, 104, 112, 113, 114]
    assert all(190 < n < 310 for n in counts.tolist())  # 250 each
    # theirs are online as well
    assert set(numbers[2000:].tolist()) == {*range(50, 90), *range(100, 105), *range(110, 115)}
    one, two = (
        alone.draw(
            64, torch.Generator().manual_seed(3), shares={key: 0.5, "online": 0.5}
        ).observations.proprio
        for key in ("demonstrations", ("demonstrations", "interventions"))
    )
    assert torch.equal(one, two)


def test_what_a_learner_annotates_stays_with_its_frame():
    replay = Replay()
    replay.add(episode(0), torch.zeros(3), extra={"base": torch.arange(4.0)[:, None]})
    batch = replay.draw(50, torch.Generator().manual_seed(0))
    assert torch.equal(batch.extra["base"][:, 0], batch.observations.proprio[:, 0])
    assert torch.equal(batch.next_extra["base"][:, 0], batch.next_observations.proprio[:, 0])
    with pytest.raises(UserError, match="one env, camera set and learner"):
        replay.add(episode(5), torch.zeros(3))


def test_a_replay_on_disk_goes_on_where_the_checkpoint_left_it(tmp_path):
    replay = Replay(tmp_path / "replay")
    for i in range(3):
        replay.add(episode(10 * i), torch.tensor([0.0, 0.5, float(i)]), "a" if i else "b")
    same = Replay(tmp_path / "replay", episodes=3)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    a, b = (r.draw(64, g, shares={"a": 0.3, "b": 0.7}) for r, g in zip((replay, same), generators))
    assert torch.equal(a.rewards, b.rewards) and a.source == b.source
    assert torch.equal(a.next_observations.proprio, b.next_observations.proprio)
    earlier = Replay(tmp_path / "replay", episodes=2)  # its checkpoint is older
    assert (
        earlier.episodes == 2
        and len(earlier) == 6
        and earlier.count("a") == earlier.count("b") == 3
    )
    with pytest.raises(UserError, match="holds 2 episodes and the checkpoint needs 5"):
        Replay(tmp_path / "replay", episodes=5)


def test_bad_rewards_and_an_empty_replay_are_named():
    with pytest.raises(UserError, match="nothing was added"):
        Replay().draw(4, torch.Generator())
    for rewards in (torch.zeros(2), torch.tensor([0.0, float("nan"), 0.0])):
        with pytest.raises(UserError, match="rollout a-0 must be 3 finite numbers"):
            Replay().add(episode(0), rewards)


def test_a_demonstration_is_a_persons_unless_it_says_otherwise():
    """Of a session that a person helped in the second decision alone is."""
    replay, helped = Replay(), torch.zeros(3, 4, dtype=torch.bool)
    helped[1] = True
    replay.add(episode(0), torch.zeros(3), "demonstrations")
    session = dataclasses.replace(episode(10), is_human=helped)
    replay.add(session, torch.zeros(3), "demonstrations")
    replay.add(episode(20), torch.zeros(3))
    human = replay.take(torch.arange(9)).is_human
    assert human.all(1).tolist() == [True] * 3 + [False, True, False] + [False] * 3
    assert human.any(1).tolist() == human.all(1).tolist()
