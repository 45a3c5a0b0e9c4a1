"""Episodes that begin in the middle of another one: what is sent again, what is drawn, what is
counted."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from test_rollout import SeeingPolicy, toy

from sim.pool import ProcessPool
from sim.toy import ToyConfig, ToyReach
from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.config import compose
from vla_rl.config.algorithms import CurriculumConfig
from vla_rl.config.run import RestartsConfig, RLConfig
from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.errors import ConfigError, UserError
from vla_rl.learning.plan import UNLIMITED, propose_episodes
from vla_rl.learning.restarts import Restarts, restart_metrics, whole
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.run.pipeline import run_pipeline
from vla_rl.types import EpisodeSpec

TASK = "reach_red"


def played(specs, **env):
    """Deterministic episodes of the toy env."""
    return RolloutEngine(toy(**env), SeeingPolicy()).collect(specs, deterministic=True).trajectories


def sent(trajectory, steps: int):
    return tuple(map(tuple, trajectory.actions[trajectory.valid][:steps].tolist()))


# ---------------------------------------------------------------------------------- the lead itself
@pytest.mark.parametrize("steps", [1, 4, 5])
def test_an_episode_begins_where_its_lead_ends(steps):
    (whole,) = played([EpisodeSpec(TASK, 6)])
    assert whole.num_control_steps > 5, "there must be something left to do"
    (rest,) = played([EpisodeSpec(TASK, 6, lead=sent(whole, steps))])
    by_hand = toy(1)
    by_hand.start(0, EpisodeSpec(TASK, 6))
    by_hand.poll()
    by_hand.step(0, np.array(sent(whole, steps), np.float32))
    (event,) = by_hand.poll()
    torch.testing.assert_close(
        rest.observations.proprio[0], torch.from_numpy(event.observation.proprio)
    )
    assert rest.success
    if steps == 4:  # a whole decision: from there on it is the same episode
        torch.testing.assert_close(rest.actions, whole.actions[1:])
        assert (
            torch.equal(rest.valid, whole.valid[1:]) and len(rest.rewards) == len(whole.rewards) - 1
        )


def test_the_lead_takes_its_part_of_the_time_limit():
    idle = tuple((0.0, 0.0) for _ in range(7))
    (late,) = played([EpisodeSpec(TASK, 0, lead=idle)], horizon=8)
    assert late.truncated and late.num_control_steps == 1


def test_a_lead_that_ends_the_episode_is_done_by_half():
    (whole,) = played([EpisodeSpec(TASK, 6)])
    assert whole.num_control_steps == 8 and whole.success
    (again,) = played([EpisodeSpec(TASK, 6, lead=sent(whole, 8))])
    torch.testing.assert_close(again.actions, whole.actions[1:])
    with ProcessPool(functools.partial(ToyReach, ToyConfig()), 1, 1) as pool:
        (there,) = (
            RolloutEngine(pool, SeeingPolicy())
            .collect([again.episode], deterministic=True)
            .trajectories
        )
    torch.testing.assert_close(there.actions, again.actions)


def test_leads_survive_a_file(tmp_path):
    (episode,) = played([EpisodeSpec(TASK, 6, lead=((0.5, 0.25), (0.0, 0.0)))])
    state = trajectory_state(episode)
    state["episode"] = json.loads(json.dumps(state["episode"]))  # lists
    assert trajectory_from_state(state).episode == episode.episode


# ------------------------------------------------------------------------------------ what is drawn
def known(sources, **config):
    trajectories = played([EpisodeSpec(TASK, i) for i in range(6)], horizon=12)
    restarts = Restarts(RestartsConfig(share=0.5, sources=sources, **config), toy().tasks)
    restarts.keep(trajectories)
    return restarts, trajectories


def test_states_are_drawn_along_what_was_sent():
    restarts, trajectories = known(["successes", "failures"])
    led = [dataclasses.replace(trajectories[0], episode=EpisodeSpec(TASK, 77, lead=((0.0, 0.0),)))]
    restarts.keep(led)  # of episodes that were led themselves nothing is kept
    generator, drawn = torch.Generator().manual_seed(0), []
    for _ in range(200):
        state, lead = restarts.draw(TASK, generator)
        done = trajectories[state].actions[trajectories[state].valid]
        assert torch.equal(lead, done[: len(lead)]) and 0 < len(lead) < len(done)
        drawn.append((state, len(lead)))
    assert {state for state, _ in drawn} == {
        i for i, t in enumerate(trajectories) if t.num_control_steps > 1
    }
    assert restarts.draw("reach_blue", generator) is None, "of another task nothing is known"


def test_late_states_and_the_second_half_of_failures_are_left_out():
    task = next(t for t in toy().tasks if t.task_id == TASK)
    tasks = [dataclasses.replace(task, horizon=20)]
    restarts = Restarts(
        RestartsConfig(share=0.5, sources=["successes", "failures"], latest=0.3), tasks
    )
    (good,) = played([EpisodeSpec(TASK, 6)])
    bad = dataclasses.replace(good, success=False)
    for trajectory, most in (
        (good, min(6, good.num_control_steps - 1)),
        (bad, min(6, good.num_control_steps // 2)),
    ):
        restarts._kept.clear()
        restarts.keep([trajectory])
        generator = torch.Generator().manual_seed(1)
        assert {len(restarts.draw(TASK, generator)[1]) for _ in range(200)} == set(
            range(1, most + 1)
        )


def test_only_the_newest_of_the_sources_that_are_named():
    restarts, trajectories = known(["successes"], episodes=2)
    wins = [i for i, t in enumerate(trajectories) if t.success and t.num_control_steps > 1]
    generator = torch.Generator().manual_seed(0)
    assert len(wins) > 2 and {restarts.draw(TASK, generator)[0] for _ in range(50)} == set(
        wins[-2:]
    )


def test_what_was_kept_resumes():
    restarts, _ = known(["successes", "failures"])
    again = Restarts(restarts.config, toy().tasks)
    again.load_state_dict(restarts.state_dict())
    draws = [
        [r.draw(TASK, torch.Generator().manual_seed(i)) for i in range(20)]
        for r in (restarts, again)
    ]
    for (a, lead_a), (b, lead_b) in zip(*draws, strict=True):
        assert a == b and torch.equal(lead_a, lead_b)


def test_a_share_of_the_groups_begins_in_the_middle_and_counts_apart():
    restarts, known_ones = known(["successes"])
    config = RLConfig(episodes_per_iteration=16, group_size=2, restarts=restarts.config)
    curriculum, tasks = Curriculum(CurriculumConfig(), [(TASK, UNLIMITED)]), toy().tasks
    proposed = propose_episodes(config, curriculum, tasks, 0, 0, 0)
    plan = restarts.of(proposed)
    begun = [bool(spec.lead) for spec in plan]
    assert sum(begun) == 8 and begun != sorted(begun), (
        "drawn, as a curriculum may rank what it proposes"
    )
    for old, new in zip(proposed, plan, strict=True):
        assert (
            new == old
            if not new.lead
            else new.lead == sent(known_ones[new.init_state_id], len(new.lead))
        )
    for a, b in zip(plan[::2], plan[1::2], strict=True):  # members of a group begin alike
        assert (a.group_id, a.init_state_id, a.lead) == (
            b.group_id,
            b.init_state_id,
            b.lead,
        ) and a.seed != b.seed
    assert restarts.of(proposed) == plan
    trajectories = [dataclasses.replace(t, success=bool(t.episode.lead)) for t in played(plan)]
    rest = [t for t in trajectories if t.success]
    assert [t.episode.lead for t in whole(trajectories)] == 8 * [()] and len(rest) == 8
    assert restart_metrics(trajectories) == {"rollout/led": 8.0, "rollout/led_success": 1.0}
    assert restart_metrics(whole(trajectories)) == {} and whole(rest) == rest
    restarts.config = dataclasses.replace(restarts.config, share=1.0)
    assert sum(bool(spec.lead) for spec in restarts.of(proposed)) == 14, "one group is always whole"
    other = [dataclasses.replace(spec, seed=spec.seed + 1) for spec in proposed]
    assert [spec.lead for spec in restarts.of(other)] != [
        spec.lead for spec in restarts.of(proposed)
    ]


# ----------------------------------------------------------------------------------------- in a run
@pytest.mark.parametrize(
    "wrong",
    [{"sources": ["dreams"]}, {"sources": []}, {"share": 1.5}, {"latest": 1.0}, {"episodes": 0}],
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"rl\.restarts"):
        RestartsConfig(**wrong)


TINY = [
    "run=toy",
    "collect.episodes_per_task=3",
    "sft.updates=3",
    "rl.iterations=3",
    "rl.episodes_per_iteration=8",
    "rl.eval_every=0",
    "evaluate.episodes_per_task=2",
    "rl.restarts.share=0.5",
    "slots.workers=0",
    "collect.workers=1",
    "rl.restarts.sources=[demonstrations,successes,failures]",
    "phases=[collect,sft,rl,report]",
    "rollout.serve_fraction=1",
]


def rows(folder):
    return [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "rl"]


@pytest.mark.slow
def test_a_run_with_restarts_resumes_exactly(tmp_path):
    whole = run_pipeline(compose([*TINY, f"output_dir={tmp_path / 'a'}"]))
    run_pipeline(compose([*TINY, f"output_dir={tmp_path / 'b'}", "rl.iterations=1"]))
    parts = run_pipeline(compose([*TINY, f"output_dir={tmp_path / 'b'}"]))
    names = [
        "rollout/led",
        "rollout/led_success",
        "rollout/success",
        "control_steps",
        "ppo/policy_loss",
    ]
    assert [[r.get(n) for n in names] for r in rows(whole)] == [
        [r.get(n) for n in names] for r in rows(parts)
    ]
    assert [r["rollout/led"] for r in rows(whole)] == [4.0] * 3, (
        "demonstrations are there from the first iteration on"
    )
    sampled = sum(r["engine/control_steps"] for r in rows(whole))
    assert rows(whole)[-1]["control_steps"] > sampled, (
        "what was sent to get there was simulated too"
    )
    assert "restarts of simulator workers" not in (whole / "report.html").read_text()
    assert sum(r["curriculum/effective_items"] for r in rows(whole)) > 0
    shown = load_demonstrations(whole / "dataset")
    assert shown.sent is not None and shown.sent.shape == shown.actions.shape
    assert not torch.equal(shown.sent, shown.actions), (
        "noise was executed and the label stayed clean"
    )


@pytest.mark.slow
def test_what_was_sent_may_be_imitated(tmp_path):
    folder = run_pipeline(compose([*TINY, f"output_dir={tmp_path}", "phases=[collect]"]))
    clean = load_demonstrations(folder / "dataset", chunk_length=4)
    low, high = (
        torch.tensor(b) for b in (clean.embodiment.action_low, clean.embodiment.action_high)
    )
    sent = clean.as_sent()
    assert torch.equal(sent.actions, clean.sent.clamp(low, high)) and not torch.equal(
        sent.actions, clean.actions
    )
    _, chunks, _ = sent.at(torch.tensor([0]))
    assert torch.equal(chunks[0], sent.actions[:4])
    assert sent.action_stats["std"] == pytest.approx(
        sent.actions.std(0, correction=0).tolist(), rel=1e-4
    )
    assert clean.action_stats != sent.action_stats and clean.proprio_stats == sent.proprio_stats
    losses = []
    for labels in ("clean", "sent"):
        given = [
            f"output_dir={tmp_path}",
            f"name={labels}",
            f"dataset={folder / 'dataset'}",
            "phases=[sft]",
        ]
        trained = run_pipeline(
            compose([*TINY, *given, "rl.restarts.share=0", f"sft.labels={labels}"])
        )
        losses.append(
            [r["sft/loss"] for r in read_metrics(trained / "metrics.jsonl") if "sft/loss" in r]
        )
    assert losses[0] and losses[0] != losses[1], "the option reaches what is trained on"


@pytest.mark.slow
def test_demonstrations_that_do_not_say_what_was_sent_are_refused(tmp_path, monkeypatch):
    folder = run_pipeline(compose([*TINY, f"output_dir={tmp_path}", "phases=[collect,sft]"]))
    for name in ("meta/info.json",):
        info = json.loads((folder / "dataset" / name).read_text())
        del info["features"]["sent"]
        (folder / "dataset" / name).write_text(json.dumps(info))
    with pytest.raises(ConfigError, match="does not hold what was sent"):
        run_pipeline(compose([*TINY, f"output_dir={tmp_path}"]))
    with pytest.raises(UserError, match=r"sft\.labels=sent.*do not hold it"):
        load_demonstrations(folder / "dataset").as_sent()
