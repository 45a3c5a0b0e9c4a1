from __future__ import annotations

import dataclasses
import functools
from collections import deque

import numpy as np
import pytest
import torch
from contracts import check_policy, check_step
from supervised_toy import SupervisedToy

from sim.inline import InlineEnv
from sim.pool import ProcessPool
from sim.toy import CAMERA, ToyConfig, ToyReach
from vla_rl.config.episodes import EPISODE_SECONDS
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.errors import ConfigError, EmbodimentMismatch, UserError
from vla_rl.rollout.engine import RolloutConfig, RolloutEngine, pooled_stats
from vla_rl.splits import stable_seed
from vla_rl.types import (
    ActionChunk,
    EpisodeSpec,
    Observation,
    PolicyOutput,
    RolloutBatch,
    SlotEvent,
    SlotObservation,
    SlotStep,
)

SPEC = ToyReach().embodiment
PIXELS = (torch.arange(16) + 0.5) * 0.015 - 0.12  # metres


class SeeingPolicy:
    """Steers to the named goal from the image, with noise from the seeds; remembers what it was
    asked."""

    chunk_length = 4
    embodiment = SPEC

    def __init__(self, noise: float = 0.3, with_value: bool = False) -> None:
        self.noise, self.with_value = noise, with_value
        self.calls: list[tuple[Observation, list[int], bool]] = []

    def act(self, observation, *, deterministic=False, seeds=None):
        self.calls.append((observation, list(seeds or []), deterministic))
        b = len(observation)
        channel = torch.tensor([0 if "red" in text else 2 for text in observation.instruction])
        image = observation.images[CAMERA].float()[torch.arange(b), :, :, channel]
        image = image * (image > 64)
        weight = image.sum((1, 2))
        goal = torch.stack(
            [(image.sum(1) * PIXELS).sum(1) / weight, -(image.sum(2) * PIXELS).sum(1) / weight], 1
        )
        actions = ((goal - observation.proprio) / (4 * 0.02)).clamp(-1, 1)[:, None].repeat(1, 4, 1)
        noise = torch.zeros_like(actions)
        if not deterministic and self.noise:
            generators = [torch.Generator().manual_seed(s) for s in (seeds or range(b))]
            noise = self.noise * torch.stack([torch.randn(4, 2, generator=g) for g in generators])
        return PolicyOutput(
            chunk=ActionChunk(actions + noise, torch.ones(b, 4, dtype=torch.bool)),
            behavior_log_prob=-0.5 * noise.square().sum(-1),
            replay={"noise": noise, "row": torch.arange(b)},
            value=goal.sum(1) if self.with_value else None,
        )


def toy(num_slots: int = 4, **config) -> InlineEnv:
    return InlineEnv(ToyReach(ToyConfig(**config)), num_slots)


def episodes(count: int) -> list[EpisodeSpec]:
    return [
        EpisodeSpec(("reach_red", "reach_blue")[i % 2], i, seed=100 + i, group_id=i // 2)
        for i in range(count)
    ]


def assert_same(a, b) -> None:
    for x, y in zip(a.trajectories, b.trajectories, strict=True):
        assert x.episode == y.episode
        for name in ("actions", "rewards", "valid", "behavior_log_prob"):
            torch.testing.assert_close(getattr(x, name), getattr(y, name), rtol=0, atol=1e-5)
        assert torch.equal(x.observations.images[CAMERA], y.observations.images[CAMERA])
        assert (x.terminated, x.truncated, x.success) == (y.terminated, y.truncated, y.success)


class ScriptedEnv:
    """Episodes of scripted lengths (decisions); ``polls`` gives the order in which open requests
    are answered."""

    tasks, privileged_dim = ToyReach().tasks, 0
    embodiment = SPEC

    def __init__(self, num_slots: int, lengths: list[int], answers_per_poll: int = 1) -> None:
        self.num_slots, self.lengths, self.answers = num_slots, lengths, answers_per_poll
        self.open: deque[tuple[int, EpisodeSpec, int]] = deque()
        self.running: dict[int, list] = {}
        self.started: list[tuple[int, int]] = []

    def start(self, slot, episode):
        assert slot not in [s for s, *_ in self.open]
        self.started.append((slot, episode.init_state_id))
        self.running[slot] = [episode, 0]
        self.open.append((slot, episode, 0))

    def step(self, slot, actions):
        assert slot not in [s for s, *_ in self.open]
        self.running[slot][1] += 1
        self.open.append((slot, self.running[slot][0], len(actions)))

    def poll(self, timeout=None):
        events = []
        for _ in range(min(self.answers, len(self.open)) if timeout is None else 0):
            slot, episode, executed = self.open.popleft()
            seen = SlotObservation(
                {CAMERA: np.full((16, 16, 3), 200, np.uint8)}, np.zeros(2, np.float32), "red"
            )
            over = self.running[slot][1] >= self.lengths[episode.init_state_id]
            rewards = np.zeros(executed, np.float32)
            step = SlotStep(seen, rewards, executed, False, over, False) if executed else None
            events.append(SlotEvent(slot, episode, seen, step))
        return events

    def close(self):
        self.open.clear()


def test_results_come_in_order_and_slots_are_refilled():
    env, policy, seen = toy(3), SeeingPolicy(), []
    specs = episodes(20)
    engine = RolloutEngine(env, policy)
    engine.publish(7)
    result = engine.collect(specs, progress=lambda *counts: seen.append(counts))
    assert [t.episode for t in result.trajectories] == specs
    # episodes of different lengths
    assert len({t.num_control_steps for t in result.trajectories}) > 3
    assert sum(t.success for t in result.trajectories) >= 18
    assert [s[:2] for s in seen] == [(i + 1, 20) for i in range(20)]
    assert seen[-1][2] == result.stats["successes"] == sum(t.success for t in result.trajectories)
    assert result.stats["control_steps"] == sum(t.num_control_steps for t in result.trajectories)
    assert result.stats["decisions"] == sum(len(t) for t in result.trajectories)
    assert result.stats["policy_batch"] == pytest.approx(
        result.stats["decisions"] / len(policy.calls)
    )
    assert result.stats["episodes"] == 20 and result.stats["retries"] == 0
    assert 0 < result.stats["env_utilisation"] <= 1
    assert {t.policy_version for t in result.trajectories} == {7}


def test_a_source_feeds_free_slots_and_each_decision_knows_its_version():
    """Twelve episodes, four at first, the others in lists of one to three as slots ask for them; a
    new version at every third policy call. Episodes are the same as from one list."""
    specs = episodes(12)
    env, policy = toy(3), SeeingPolicy()
    engine = RolloutEngine(env, policy)
    lists = deque([specs[4:5], [], specs[5:8], [], [], specs[8:10], specs[10:]])
    calls, found = [], []

    def before() -> None:
        calls.append(len(calls))
        engine.publish(5 + len(calls) // 3)

    engine.before_decision = before
    begun = engine.mark()
    result = engine.collect(
        specs[:4], on_trajectory=found.append, more=lambda: lists.popleft() if lists else []
    )
    assert not lists and not result.trajectories and result.stats["episodes"] == 12
    assert (
        engine.figures(begun, engine.mark())["decisions"]
        == sum(len(t) for t in found)
        == result.stats["decisions"]
    )
    expected = {
        t.rollout_id: t for t in RolloutEngine(toy(3), SeeingPolicy()).collect(specs).trajectories
    }
    assert sorted(t.rollout_id for t in found) == sorted(expected)
    for t in found:
        assert torch.equal(t.actions, expected[t.rollout_id].actions)
    mixed = [t for t in found if t.decision_version is not None]
    assert mixed and all(len(t.decision_version) == len(t) for t in mixed)
    assert all(
        t.policy_version == t.decision_version.min() and (t.decision_version.diff() >= 0).all()
        for t in mixed
    )
    # Each call's rows carry the version that it began with.
    sizes, versions = [len(observation) for observation, *_ in policy.calls], {}
    for i, size in enumerate(sizes):
        versions[5 + (i + 1) // 3] = versions.get(5 + (i + 1) // 3, 0) + size
    told: dict[int, int] = {}
    for t in found:
        for v in (
            [t.policy_version] * len(t)
            if t.decision_version is None
            else t.decision_version.tolist()
        ):
            told[v] = told.get(v, 0) + 1
    assert told == versions
    again = engine.collect(specs[:2]).trajectories
    assert [t.episode for t in again] == specs[:2]


def test_trajectories_hold_what_happened():
    (trajectory,) = (
        RolloutEngine(toy(1), SeeingPolicy(with_value=True)).collect(episodes(1)).trajectories
    )
    simulator = ToyReach()
    observation = simulator.start(0, trajectory.episode)
    for i in range(len(trajectory)):
        np.testing.assert_array_equal(
            trajectory.observations.images[CAMERA][i], observation.images[CAMERA]
        )
        np.testing.assert_array_equal(trajectory.observations.privileged[i], observation.privileged)
        step = simulator.step(0, trajectory.actions[i].numpy())
        assert int(trajectory.valid[i].sum()) == step.executed
        np.testing.assert_array_equal(trajectory.rewards[i], step.rewards)
        observation = step.observation
    np.testing.assert_array_equal(trajectory.final_observation.proprio[0], observation.proprio)
    assert trajectory.terminated and trajectory.success and step.terminated
    assert trajectory.replay[
        "noise"
    ].shape == trajectory.actions.shape and trajectory.value.shape == (len(trajectory),)
    tensors = [
        trajectory.actions,
        trajectory.behavior_log_prob,
        trajectory.value,
        *trajectory.replay.values(),
    ]
    assert not any(t.is_inference() for t in tensors)  # autograd may save them


def test_the_policy_never_sees_privileged_state():
    policy = SeeingPolicy()
    result = RolloutEngine(toy(), policy).collect(episodes(6))
    assert all(observation.privileged is None for observation, _, _ in policy.calls)
    assert all(t.observations.privileged.shape == (len(t), 9) for t in result.trajectories)
    assert RolloutBatch.from_trajectories(result.trajectories).observations.privileged is not None


@pytest.mark.parametrize("slots, fraction", [(1, 1.0), (3, 0.0), (5, 0.5), (16, 1.0)])
def test_outcomes_do_not_depend_on_slots_or_batches(slots, fraction):
    specs = episodes(12)
    expected = RolloutEngine(toy(4), SeeingPolicy()).collect(specs)
    result = RolloutEngine(
        toy(slots), SeeingPolicy(), RolloutConfig(serve_fraction=fraction)
    ).collect(specs)
    assert_same(expected, result)


def test_every_decision_has_its_own_seed():
    policy = SeeingPolicy()
    specs = episodes(8)
    result = RolloutEngine(toy(), policy).collect(specs)
    seeds = [seed for _, call, _ in policy.calls for seed in call]
    assert len(set(seeds)) == len(seeds) == result.stats["decisions"]
    again = RolloutEngine(toy(), SeeingPolicy()).collect(
        [dataclasses.replace(e, seed=e.seed + 1) for e in specs]
    )
    assert not any(
        torch.equal(a.actions[0], b.actions[0])
        for a, b in zip(result.trajectories, again.trajectories)
    )


def test_deterministic_is_passed_on():
    policy = SeeingPolicy()
    result = RolloutEngine(toy(), policy).collect(episodes(4), deterministic=True)
    assert all(deterministic for _, _, deterministic in policy.calls)
    assert all(not t.replay["noise"].any() for t in result.trajectories)


def test_replanning_executes_the_first_control_steps_only():
    result = RolloutEngine(toy(), SeeingPolicy(), RolloutConfig(replan_steps=2)).collect(
        episodes(6)
    )
    for t in result.trajectories:
        assert (
            t.actions.shape[1:] == (4, 2)
            and not t.valid[:, 2:].any()
            and not t.rewards[:, 2:].any()
        )
        assert t.valid[:-1, :2].all()
    whole = RolloutEngine(toy(), SeeingPolicy()).collect(episodes(6))
    assert result.stats["decisions"] > whole.stats["decisions"]


def test_only_valid_control_steps_are_executed():
    class Hesitant(SeeingPolicy):
        def act(self, observation, **kwargs):
            output = super().act(observation, **kwargs)
            valid = output.chunk.valid.clone()
            valid[:, 3:] = False
            return dataclasses.replace(output, chunk=ActionChunk(output.chunk.actions, valid))

    result = RolloutEngine(toy(), Hesitant()).collect(episodes(4))
    assert all(t.valid[:, :3].sum() == t.valid.sum() for t in result.trajectories)


@pytest.mark.parametrize(
    "make",
    [
        lambda: toy(2),
        lambda: ProcessPool(functools.partial(ToyReach, ToyConfig()), 1, 2),
    ],
)
def test_the_first_other_task_that_was_solved_is_told_with_its_decision(make):
    class Colourblind(SeeingPolicy):
        def act(self, observation, **kwargs):
            red = ("reach the red goal",) * len(observation)
            return super().act(dataclasses.replace(observation, instruction=red), **kwargs)

    with make() as env:
        result = RolloutEngine(env, Colourblind(noise=0.0)).collect(episodes(8))
    for t in result.trajectories:
        assert t.success == (t.episode.task_id == "reach_red")
        assert (t.instead is None) == t.success
        if t.instead is None:
            continue
        assert (t.instead.task_id, t.instead.instruction) == ("reach_red", "reach the red goal")
        after = torch.cat([t.observations.proprio[1:], t.final_observation.proprio])
        goal = t.observations.privileged[0, 2:4]
        there = (after - goal).norm(dim=1) <= ToyConfig().success_radius
        # (an agent that stays is there at the end of the decision in which it came)
        assert t.instead.decisions == 1 + int(there.nonzero()[0])
        same = trajectory_from_state(trajectory_state(t))
        assert same.instead == t.instead


@pytest.mark.parametrize(
    "make", [lambda: InlineEnv(SupervisedToy(), 2), lambda: ProcessPool(SupervisedToy, 1, 2)]
)
def test_what_was_sent_and_who_chose_it_are_kept_apart_from_what_the_policy_proposed(make):
    with make() as env:
        result = RolloutEngine(env, SeeingPolicy(noise=1.0)).collect(episodes(4))
    helped = [t for t in result.trajectories if t.is_human is not None]
    assert len(helped) >= 2
    for t in helped:
        assert t.label_source == "operator"
        assert t.valid[0].all() and not t.is_human[0].any()
        # out of range: the simulator clips
        assert torch.equal(t.actions[0], t.proposed[0].clamp(-1, 1))
        later = t.valid[1:]
        # cut after the third, and the episode goes on
        assert not later[:, 3:].any() and later[:-1, :3].all()
        assert torch.equal(t.is_human[1:, 2], later[:, 2]) and not t.is_human[1:, [0, 1, 3]].any()
        torch.testing.assert_close(t.actions[t.is_human], 0.5 * t.proposed[t.is_human].clamp(-1, 1))
        own = t.valid & ~t.is_human
        assert torch.equal(t.actions[own], t.proposed[own].clamp(-1, 1))
    simulator = SupervisedToy()
    simulator.start(0, episodes(1)[0])
    for _ in range(2):
        check_step(simulator.step(0, np.full((4, 2), 0.1, np.float32)), SPEC, 9, 4, may_cut=True)
    batch = RolloutBatch.from_trajectories(result.trajectories)
    assert batch.is_human.sum() == sum(int(t.is_human.sum()) for t in helped)


def test_a_policy_s_memory_belongs_to_its_episode():
    class Counting(SeeingPolicy):
        """Remembers how many decisions the episode had, and its first seed."""

        def initial_memory(self):
            return (0, None)

        def act(self, observation, *, deterministic=False, seeds=None, memory=None):
            output = super().act(observation, deterministic=deterministic, seeds=seeds)
            memory = [
                (count + 1, seeds[i] if first is None else first)
                for i, (count, first) in enumerate(memory)
            ]
            seen = torch.tensor([[count, first % 1009] for count, first in memory])
            return dataclasses.replace(
                output, replay=output.replay | {"memory": seen}, memory=memory
            )

    specs = episodes(9)
    result = RolloutEngine(toy(3), Counting()).collect(specs)
    for trajectory in result.trajectories:
        first = stable_seed("decision", trajectory.episode.seed, 0) % 1009
        assert trajectory.replay["memory"].tolist() == [
            [i + 1, first] for i in range(len(trajectory))
        ]


@pytest.mark.parametrize("fraction, smallest", [(0.5, 2), (1.0, 4), (0.0, 1)])
def test_the_policy_serves_once_enough_slots_wait(fraction, smallest):
    policy = SeeingPolicy()
    env = ScriptedEnv(4, lengths=[6] * 4)
    RolloutEngine(env, policy, RolloutConfig(serve_fraction=fraction)).collect(episodes(4))
    assert [len(observation) for observation, _, _ in policy.calls] == [smallest] * (24 // smallest)


def test_a_free_slot_takes_the_next_episode_at_once():
    env = ScriptedEnv(2, lengths=[5, 1, 1, 1, 2])
    result = RolloutEngine(env, SeeingPolicy()).collect(episodes(5))
    assert env.started[:2] == [(0, 0), (1, 1)]
    # while slot 0 still runs episode 0
    assert [slot for slot, state in env.started if state in (2, 3)] == [1, 1]
    assert [len(t) for t in result.trajectories] == [5, 1, 1, 1, 2]


def test_lockstep_batches_do_not_depend_on_the_order_of_answers():
    lengths = [3, 1, 2, 2, 4, 1, 3]
    calls = []
    for answers in (1, 2, 4):
        policy = SeeingPolicy()
        env = ScriptedEnv(4, lengths, answers)
        RolloutEngine(env, policy, RolloutConfig(serve_fraction=1.0)).collect(episodes(7))
        calls.append([seeds for _, seeds, _ in policy.calls])
    assert calls[0] == calls[1] == calls[2]


def test_trajectories_are_handed_out_as_they_end():
    ended = []
    result = RolloutEngine(toy(), SeeingPolicy()).collect(episodes(9), on_trajectory=ended.append)
    assert len(ended) == 9 and {id(t) for t in ended} == {id(t) for t in result.trajectories}


@pytest.mark.parametrize("fault", ["raise", "nan"])
def test_a_failed_episode_runs_again_from_its_start(tmp_path, fault):
    specs = episodes(6)
    expected = RolloutEngine(toy(), SeeingPolicy()).collect(specs)
    env = toy(
        fault=fault,
        fault_init_state_id=2,
        fault_control_step=5,
        fault_marker=str(tmp_path / "once"),
    )
    result = RolloutEngine(env, SeeingPolicy()).collect(specs)
    assert result.stats["retries"] == 1
    assert_same(expected, result)


def test_an_episode_that_always_fails_is_named():
    engine = RolloutEngine(
        toy(fault="raise", fault_init_state_id=2), SeeingPolicy(), RolloutConfig(max_retries=1)
    )
    specs = episodes(6)
    with pytest.raises(
        UserError,
        match=f"{specs[2].rollout_id}.*'reach_red', initial state 2.*failed 2 times.*Runtime",
    ):
        engine.collect(specs)


def test_blameless_losses_do_not_use_up_retries():
    class Unlucky(ScriptedEnv):
        losses = 5

        def poll(self, timeout=None):
            events = super().poll(timeout)
            if events and events[0].step is not None and self.losses:
                self.losses -= 1
                lost = SlotEvent(
                    events[0].slot, events[0].episode, None, error="the worker died", blameless=True
                )
                return [lost, *events[1:]]
            return events

    result = RolloutEngine(
        Unlucky(2, [2, 2, 2]), SeeingPolicy(), RolloutConfig(max_retries=0)
    ).collect(episodes(3))
    assert result.stats["retries"] == 5 and [len(t) for t in result.trajectories] == [2, 2, 2]


def test_an_interrupted_run_does_not_disturb_the_next():
    env, policy = toy(4), SeeingPolicy()
    engine = RolloutEngine(env, policy)

    def interrupt(*_):
        raise KeyboardInterrupt

    specs = episodes(8)
    with pytest.raises(KeyboardInterrupt):
        engine.collect(specs, progress=interrupt)
    assert_same(RolloutEngine(toy(4), SeeingPolicy()).collect(specs), engine.collect(specs))


def test_actions_that_are_not_finite_stop_the_run_and_the_engine_stays_usable():
    class Diverged(SeeingPolicy):
        bad = True

        def act(self, observation, **kwargs):
            output = super().act(observation, **kwargs)
            if self.bad:
                output.chunk.actions[-1, 2, 1] = float("nan")
            return output

    policy = Diverged()
    engine = RolloutEngine(toy(), policy)
    with pytest.raises(
        UserError, match=r"Slot 3, task 'reach_blue', initial state 3.*control step 2 .*not finite"
    ):
        engine.collect(episodes(4))
    policy.bad = False
    assert engine.collect(episodes(4)).stats["episodes"] == 4


def test_no_episodes_give_an_empty_result():
    result = RolloutEngine(toy(), SeeingPolicy()).collect([])
    assert result.trajectories == [] and result.stats["episodes"] == 0


def test_stats_of_several_rounds_add_up():
    """24 decisions in 12 calls and 60 in 10: 84/22 rows; 3 s half busy and 1 s wholly: (1.5 +
    1)/4."""
    names = (
        "episodes",
        "decisions",
        "control_steps",
        "seconds",
        "wait_seconds",
        "env_utilisation",
        "policy_batch",
    )
    rounds = [
        dict(zip(names, x))
        for x in ((4, 24, 90, 3.0, 1.0, 0.5, 2.0), (4, 60, 110, 1.0, 0.25, 1.0, 6.0))
    ]
    pooled = pooled_stats(rounds)
    expected = dict(zip(names, (8, 84, 200, 4.0, 1.25, 0.625, 84 / 22)))
    rates = {"decisions_per_second": 21.0, "control_steps_per_second": 50.0}
    assert pooled == pytest.approx(expected | rates | dict.fromkeys(EPISODE_SECONDS, 0.0))
    noted = [
        dict(r, **dict(zip(EPISODE_SECONDS, x)))
        for r, x in zip(rounds, ((1, 2, 3, 4), (2, 2, 5, 9)))
    ]
    noted[1]["episodes"] = 12  # of 16: three quarters
    pooled = pooled_stats(noted)
    assert [pooled[name] for name in EPISODE_SECONDS] == [1.75, 2.0, 4.5, 9.0]
    alone = RolloutEngine(toy(), SeeingPolicy()).collect(episodes(3)).stats
    assert pooled_stats([alone]) == pytest.approx(alone)


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match=r"serve_fraction=1.5"):
        RolloutConfig(serve_fraction=1.5)
    with pytest.raises(ConfigError, match="replan_steps"):
        RolloutConfig(replan_steps=-1)
    with pytest.raises(ConfigError, match=r"replan_steps=5 .*chunk_length 4"):
        RolloutEngine(toy(), SeeingPolicy(), RolloutConfig(replan_steps=5))
    with pytest.raises(UserError, match=r"'reach_green'.*reach_blue, reach_red"):
        RolloutEngine(toy(), SeeingPolicy()).collect([EpisodeSpec("reach_green", 0)])
    with pytest.raises(UserError, match="'test'"):
        RolloutEngine(toy(), SeeingPolicy()).collect([EpisodeSpec("reach_red", 0, "test")])
    other = SeeingPolicy()
    other.embodiment = dataclasses.replace(SPEC, control_hz=5.0)
    with pytest.raises(EmbodimentMismatch, match="control_hz"):
        RolloutEngine(toy(), other)


def test_a_policy_that_returns_the_wrong_shape_is_named():
    class Short(SeeingPolicy):
        def act(self, observation, **kwargs):
            output = super().act(observation, **kwargs)
            return dataclasses.replace(
                output, chunk=ActionChunk(output.chunk.actions[:, :3], output.chunk.valid[:, :3])
            )

    with pytest.raises(UserError, match=r"shape \(4, 3, 2\).*expected \(4, 4, 2\)"):
        RolloutEngine(toy(), Short()).collect(episodes(4))


def test_the_seeing_policy_keeps_the_policy_contract():
    simulator = ToyReach()
    seen = [simulator.start(0, EpisodeSpec("reach_red", i)) for i in range(5)]
    check_policy(SeeingPolicy(), Observation.from_slots(seen).without_privileged())
