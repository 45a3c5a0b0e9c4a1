"""Episodes whose images and replay stay where they were made until the rank that learns from them
fetches them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from test_cluster import TOY, start  # noqa: F401

from vla_rl.cluster.packing import packed, unpacked
from vla_rl.cluster.payload import (
    Payload,
    fetched,
    handed_out,
    light_state,
    light_trajectories,
    owners,
    places,
    split,
    stored,
)
from vla_rl.config import compose
from vla_rl.data.codec import trajectory_state
from vla_rl.learning.learners import EpisodesLost
from vla_rl.learning.online import OnlineRL
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.ranks import Ranks
from vla_rl.run.pipeline import run_pipeline
from vla_rl.storage import split_state
from vla_rl.types import EpisodeSpec, Held, Observation, RolloutBatch, Trajectory


class Gone(Exception):
    """Ray's ObjectLostError."""


class Store:
    """Ray's object store."""

    exceptions = SimpleNamespace(ObjectLostError=Gone)

    def __init__(self):
        self.held, self.asked = [], []

    def put(self, thing):
        self.held.append(thing)
        return len(self.held) - 1

    def get(self, reference):
        self.asked.append(reference)
        if self.held[reference] is None:
            raise Gone
        return self.held[reference]


def episode(number: int, decisions: int = 2) -> Trajectory:
    def seen(rows: int) -> Observation:
        image = torch.full((rows, 4, 4, 3), number, dtype=torch.uint8)
        return Observation({"front": image}, torch.full((rows, 3), float(number)), ("go",) * rows)

    return Trajectory(
        episode=EpisodeSpec("task", number, seed=number, rollout_id=f"e{number}"),
        observations=seen(decisions),
        final_observation=seen(1),
        actions=torch.zeros(decisions, 1, 2),
        valid=torch.ones(decisions, 1, dtype=torch.bool),
        rewards=torch.zeros(decisions, 1),
        behavior_log_prob=torch.zeros(decisions, 1, 2),
        replay={"tokens": torch.full((decisions, 2), number)},
        terminated=True,
        truncated=False,
        success=True,
    )


@pytest.mark.parametrize("alike", [True, False])
def test_what_is_told_of_episodes_comes_back_bit_for_bit(alike):
    """Also where only some have a value, and where shapes differ."""
    every = [dataclasses.replace(episode(i, 1 + i), value=torch.rand(1 + i)) for i in range(3)]
    if not alike:
        every[1] = dataclasses.replace(every[1], value=None)
        every[2] = dataclasses.replace(every[2], behavior_log_prob=torch.rand(3, 5).double())
    state = light_state(every)
    data = packed(state)
    back = light_trajectories(unpacked(data, held=True))
    for told, one in zip(back, every, strict=True):
        expected, found = trajectory_state(one.light()), trajectory_state(told)
        own = [dict[str, torch.Tensor](), dict[str, torch.Tensor]()]
        assert split_state(expected, own[0]) == split_state(found, own[1])
        for name, x in own[0].items():
            assert torch.equal(x, own[1][name]) and x.dtype == own[1][name].dtype
    tensors: dict[str, torch.Tensor] = {}
    split_state(state, tensors)
    assert (len(tensors) == 7) == alike  # one of a kind, however many episodes
    back[0].rewards.fill_(1)  # nothing of what was sent is held
    assert torch.equal(light_trajectories(unpacked(data))[0].rewards, every[0].rewards)


def test_the_driver_knows_all_but_images_and_replay_and_fetches_them_only_where_asked():
    store, every = Store(), [episode(i, 1 + i) for i in range(3)]
    reference = store.put(handed_out(every))
    told = [
        dataclasses.replace(light, payload=Payload(store, light.rollout_id, reference, place))
        for place, light in enumerate(light_trajectories(light_state(every)))
    ]
    assert [len(t) for t in told] == [1, 2, 3] and not store.asked
    assert all(not t.observations.images and not t.replay for t in told)
    assert torch.equal(told[2].observations.proprio, every[2].observations.proprio)
    assert packed(light_state(told)).nbytes < sum(data.nbytes for data in handed_out(every))
    assert not store.asked  # a light state fetches nothing
    whole = told[1].whole()
    assert store.asked == [reference] and whole.payload is None
    assert torch.equal(whole.observations.images["front"], every[1].observations.images["front"])
    assert torch.equal(whole.replay["tokens"], every[1].replay["tokens"])
    # what a checkpoint keeps is whole
    assert trajectory_state(told[0])["replay"]["tokens"].tolist() == [[0, 0]]
    renumbered = dataclasses.replace(
        told[1], episode=dataclasses.replace(told[1].episode, group_id=7)
    )
    assert renumbered.whole().episode.group_id == 7


def test_an_object_that_is_gone_names_its_episode():
    store = Store()
    (told,) = stored(store, store.put, [episode(4)])
    assert told.payload is not None and not told.observations.images
    assert fetched(store.get(told.payload.reference)[0]).rollout_id == "e4"
    store.held[0] = None
    with pytest.raises(EpisodesLost) as lost:
        told.whole()
    assert lost.value.rollout_ids == ("e4",)


def test_what_one_object_holds_goes_to_one_rank_and_every_rank_gets_some():
    # 5 + 2 + 2 + 1: the largest first, to whoever has least
    assert split([1, 5, 2, 2], 2) == [1, 0, 1, 1] and split([], 2) == []

    def held(*references: int) -> list[Trajectory]:
        return [
            dataclasses.replace(episode(i).light(), payload=Payload(None, f"e{i}", r, 0))
            for i, r in enumerate(references)
        ]

    assert owners(held(0, 0, 1, 1), 2) == [0, 0, 1, 1]
    assert sorted({*owners(held(0, 0, 0, 0), 2)}) == [0, 1]  # of one object there are two fetches
    assert sorted(owners(held(3, 3, 3), 3)) == [0, 1, 2]
    assert places(held(5, 6)) == [(5, 0), (6, 0)]


def test_a_rank_holds_the_rows_of_its_own_episodes():
    every = [episode(i, 1 + i) for i in range(4)]  # 10 decisions
    batch = RolloutBatch.from_trajectories([e.light() for e in every])
    owner = torch.tensor([1, 0, 1, 0])
    held = [
        Held.of(owner, batch.lengths, rank, (e for e, r in zip(every, owner.tolist()) if r == rank))
        for rank in range(2)
    ]
    assert [len(h.observations) for h in held] == [6, 4]
    assert held[0].owner.tolist() == [1, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert held[0].at.tolist() == [0, 0, 1, 1, 2, 3, 2, 3, 4, 5]
    # row for row what the episode of that decision shows
    shows = torch.repeat_interleave(torch.arange(4), batch.lengths)
    for i, rank in enumerate(held[0].owner.tolist()):
        row = held[rank].at[i]
        assert int(held[rank].observations.images["front"][row].unique()) == shows[i]
        assert held[rank].replay["tokens"][row].tolist() == [shows[i]] * 2
    assert held[1].final_observations.images["front"][:, 0, 0, 0].tolist() == [0, 2]
    assert held[0].final_at.tolist() == [0, 0, 1, 1]


def test_shares_by_owner_have_one_length_and_fill_up_where_a_rank_has_fewer():
    owner = torch.tensor([0, 0, 1, 0])
    ranks = [Ranks() for _ in range(3)]
    for index, rank in enumerate(ranks):
        rank.index, rank.size = index, 3
    shares = [rank.share_of(owner) for rank in ranks]
    assert [rows.tolist() for rows, _ in shares] == [[0, 1, 3], [2, 2, 2], [-1, -1, -1]]
    assert [real.tolist() for _, real in shares] == [[True] * 3, [True, False, False], [False] * 3]


def test_episodes_that_are_lost_before_they_are_learned_from_run_again():
    every, asked = [episode(i) for i in range(3)], []

    class Collector:
        def publish(self, version): ...

        def collect(self, plan, **options):
            asked.extend(spec.rollout_id for spec in plan)
            return SimpleNamespace(trajectories=[dataclasses.replace(every[1], success=False)])

    loop = OnlineRL.__new__(OnlineRL)
    loop.collector = Collector()
    calls = []

    def use(episodes):
        calls.append([t.success for t in episodes])
        if len(calls) == 1:
            raise EpisodesLost(["e1"])
        return "learned"

    found, result = loop._with_all(every, use)
    assert result == "learned" and asked == ["e1"]
    assert calls == [[True] * 3, [True, False, True]] and not found[1].success


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_learn_from_parts_what_one_driver_learns_from_all(ray_here, start, tmp_path):  # noqa: F811
    """The first iteration's episodes are the same, so the first update is, to rounding; a rank gets
    about half of the bytes, and the driver a small share."""
    own = [*TOY, "phases=[rl]", f"checkpoint={start}", f"output_dir={tmp_path}", "cluster=ray"]
    own += ["rl.episodes_per_iteration=16", "rl.iterations=2", "algorithm.learning_rate=1e-4"]
    own += ["critic=none", "algorithm.advantage=rloo", "rl.group_size=4"]
    own += ["algorithm.critic_warmup_iterations=0"]
    folders = [
        run_pipeline(compose([*own, "name=alone", "cluster.learners=0"])),
        run_pipeline(compose([*own, "name=two", "cluster.learners=2"])),
    ]
    alone, two = (
        [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]
        for folder in folders
    )
    assert alone[0]["rollout/success"] == two[0]["rollout/success"]
    for name in ("ppo/policy_loss", "ppo/grad_norm", "ppo/advantage_std"):
        assert two[0][name] == pytest.approx(alone[0][name], rel=2e-4, abs=1e-5), name
    assert alone[0]["cluster/bytes_in"] == alone[0]["cluster/bytes_episodes"]
    for row in two:
        whole, light = row["cluster/bytes_episodes"], row["cluster/bytes_in"]
        assert light < 0.7 * whole  # (of 16 pixels)
        assert row["cluster/bytes_rank"] - light < 0.75 * whole
