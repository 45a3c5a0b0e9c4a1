"""Evaluation on the toy env: fixed episodes, figures, saving, comparing, videos."""

from __future__ import annotations

import dataclasses
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sim.inline import InlineEnv
from sim.toy import ToyConfig, ToyReach
from vla_rl.config.episodes import EvaluateConfig
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation.clips import make_clips, write_failure_videos, write_videos
from vla_rl.evaluation.evaluate import evaluate, evaluation_episodes
from vla_rl.evaluation.outcome import (
    EpisodeOutcome,
    EvaluationResult,
    compare,
    comparison_text,
    count_failures,
    fallen_text,
    jerk_unit,
    mean_jerk,
)
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.evaluation.video import FAILURE, SUCCESS, Clip, grid, upscale, write_mp4
from vla_rl.rollout.engine import RolloutConfig, RolloutEngine
from vla_rl.types import ActionChunk, Observation, PolicyOutput


class Seeker:
    """Reads both goals from the image and goes to the named one; ``ignore_text`` makes it always
    go to red."""

    chunk_length = 4

    def __init__(self, embodiment, ignore_text=False):
        self.embodiment, self.ignore_text = embodiment, ignore_text

    def act(self, observation: Observation, *, deterministic=False, seeds=None) -> PolicyOutput:
        assert observation.privileged is None
        image = observation.images["top"].double()
        size = image.shape[1]
        centres = (torch.arange(size) + 0.5) / size * 0.24 - 0.12
        actions = torch.zeros(len(observation), 4, 2)
        for i, text in enumerate(observation.instruction):
            blob = image[i, :, :, 0 if self.ignore_text or "red" in text else 2] ** 2
            goal = (
                torch.stack([(blob.sum(0) * centres).sum(), -(blob.sum(1) * centres).sum()])
                / blob.sum()
            )
            for t in range(4):
                actions[i, t] = (
                    (goal - observation.proprio[i]) / 0.02 - actions[i, :t].sum(0)
                ).clamp(-1, 1)
        shape = actions.shape[:2]
        return PolicyOutput(
            ActionChunk(actions, torch.ones(shape, dtype=torch.bool)), torch.zeros(shape), {}
        )


def make_engine(ignore_text=False, repeatable=True, slots=5, **config):
    env = InlineEnv(ToyReach(ToyConfig(**config)), num_slots=slots)
    env.repeatable = repeatable
    return RolloutEngine(env, Seeker(env.embodiment, ignore_text), RolloutConfig())


@pytest.fixture(scope="module")
def results():
    config = EvaluateConfig(episodes_per_task=10, video_episodes=5)
    good, bad = make_engine(), make_engine(ignore_text=True)
    return evaluate(good, good.env.tasks, config), evaluate(bad, bad.env.tasks, config)


def test_episodes_are_fixed_and_held_out():
    tasks = ToyReach().tasks
    config = EvaluateConfig(episodes_per_task=4)
    episodes = evaluation_episodes(tasks, config)
    assert episodes == evaluation_episodes(tasks, config)
    assert {e.split for e in episodes} == {"held_out"} and len(
        {e.rollout_id for e in episodes}
    ) == 8
    assert [e.init_state_id for e in episodes if e.task_id == "reach_red"] == [0, 1, 2, 3]
    assert [e.instruction_index for e in episodes if e.task_id == "reach_red"] == [0, 1, 0, 1]
    other = evaluation_episodes(tasks, dataclasses.replace(config, seed=1))
    assert [e.init_state_id for e in other] == [e.init_state_id for e in episodes]
    assert all(a.seed != b.seed for a, b in zip(episodes, other))


def test_figures(results):
    good, bad = results
    assert (
        good.success_rate == 1.0
        and good.episodes == 20
        and good.interval == wilson_interval(20, 20)
    )
    tasks = bad.per_task()
    assert tasks["reach_red"]["successes"] == 10 and tasks["reach_blue"]["successes"] == 0
    assert bad.success_rate == 0.5 and tasks["reach_blue"]["control_steps"] == 20
    assert tasks["reach_blue"]["control_steps_to_success"] is None
    assert (
        good.control_steps
        == sum(o.control_steps for o in good.outcomes)
        == good.engine["control_steps"]
    )
    assert all(o.decisions == -(-o.control_steps // 4) for o in good.outcomes)
    assert {o.failure for o in good.outcomes} == {""} and good.per_task()["reach_red"][
        "failures"
    ] == {}
    assert {(o.task_id, o.failure) for o in bad.outcomes} == {
        ("reach_red", ""),
        ("reach_blue", "wrong_object"),
    }
    assert tasks["reach_red"]["failures"] == {} and tasks["reach_blue"]["failures"] == {
        "wrong_object": 10
    }
    assert bad.to_dict()["total"]["failures"] == {"wrong_object": 10}
    assert good.seconds_per_decision > 0 and good.latency_s > 0
    assert {o.instruction for o in good.outcomes} == {
        t for task in ToyReach().tasks for t in task.held_out_instructions
    }


def test_progress_counts_over_portions(monkeypatch):
    import vla_rl.evaluation.evaluate as module

    monkeypatch.setattr(module, "_PORTION_BYTES", 1)  # as many episodes at once as there are slots
    engine, seen = make_engine(slots=3), []
    portions = evaluate(
        engine,
        engine.env.tasks,
        EvaluateConfig(episodes_per_task=4, video_episodes=4),
        progress=lambda *a: seen.append(a),
    )
    assert seen == [(i + 1, 8, i + 1) for i in range(8)] and len(portions.clips) == 4
    whole = make_engine(slots=8)
    monkeypatch.undo()
    again = evaluate(whole, whole.env.tasks, EvaluateConfig(episodes_per_task=4))
    assert [(o.key, o.success, o.control_steps) for o in again.outcomes] == [
        (o.key, o.success, o.control_steps) for o in portions.outcomes
    ]


def test_tasks_run_one_after_the_other_and_outcomes_keep_their_order():
    engine, plans = make_engine(slots=3), []
    asked = evaluation_episodes(engine.env.tasks, EvaluateConfig(episodes_per_task=3))

    def collect(plan, **options):
        plans.append([e.task_id for e in plan])
        return engine.collect(plan, **options)

    found = evaluate(
        engine, engine.env.tasks, episodes=asked, collector=SimpleNamespace(collect=collect)
    )
    assert plans == [["reach_blue"] * 3 + ["reach_red"] * 3]
    assert [o.task_id for o in found.outcomes] == ["reach_red", "reach_blue"] * 3
    assert [o.init_state_id for o in found.outcomes] == [0, 0, 1, 1, 2, 2]


def test_failures_are_counted_in_order():
    def outcomes(*kinds):
        return [
            EpisodeOutcome("t", i, "go", kind is None, 10, 2, failure=kind or "")
            for i, kind in enumerate(kinds)
        ]

    some = outcomes("dropped", "out_of_time", None, "never_reached", "dropped")
    assert list(count_failures(some).items()) == [
        ("never_reached", 1),
        ("dropped", 2),
        ("out_of_time", 1),
    ]
    assert list(count_failures(outcomes("", "dropped", "")).items()) == [
        ("dropped", 1),
        ("not told", 2),
    ]
    # an env that never tells
    assert count_failures(outcomes("", "", None)) == {} == count_failures([])


def test_one_clip_of_each_failure(monkeypatch, tmp_path):
    """The first episode of a kind, in whichever portion it ran; with episodes that are in the
    grid, too."""
    pytest.importorskip("av")
    import vla_rl.evaluation.evaluate as module

    monkeypatch.setattr(module, "_PORTION_BYTES", 1)
    engine = make_engine(ignore_text=True, slots=2)
    config = EvaluateConfig(episodes_per_task=3, video_episodes=1)
    result = evaluate(engine, engine.env.tasks, config)
    first = next(o for o in result.outcomes if o.failure)
    assert list(result.failure_clips) == ["wrong_object"] and len(result.clips) == 1
    clip = result.failure_clips["wrong_object"]
    assert clip.caption == f"reach_blue #{first.init_state_id} · 20 steps · wrong object"
    assert len(clip.frames) == 21 and not clip.success
    stale = tmp_path / "sft_failure_dropped.mp4"
    stale.write_bytes(b"of an earlier evaluation")
    assert write_failure_videos(result, tmp_path / "sft.mp4") == {
        "wrong_object": tmp_path / "sft_failure_wrong_object.mp4"
    }
    assert [path.name for path in tmp_path.iterdir()] == ["sft_failure_wrong_object.mp4"]
    everything = evaluate(engine, engine.env.tasks, dataclasses.replace(config, video_episodes=6))
    assert everything.failure_clips["wrong_object"] is everything.clips[1]  # replayed once
    none = evaluate(engine, engine.env.tasks, dataclasses.replace(config, video_episodes=0))
    assert not none.clips and not none.failure_clips and none.per_task() == result.per_task()


def test_save_and_load(results, tmp_path):
    result = results[1]
    result.save(tmp_path / "eval.json")
    text = (tmp_path / "eval.json").read_text()
    loaded = EvaluationResult.load(tmp_path / "eval.json")
    assert loaded.to_dict() == result.to_dict() == json.loads(text)
    assert json.loads(text)["total"]["rate"] == 0.5 and "clips" not in text
    older = json.loads(text)
    for o in older["outcomes"]:
        del o["failure"]
    # of before failures were told
    assert EvaluationResult.from_dict(older).to_dict()["total"]["failures"] == {}
    (tmp_path / "x.json").write_text("{}")
    for name in ("x.json", "missing.json"):
        with pytest.raises(UserError, match="not an evaluation result"):
            EvaluationResult.load(tmp_path / name)


def test_table(results):
    text = results[1].table()
    assert (
        "reach_red" in text
        and "10/10 = 100%" in text
        and "0/10 = 0%" in text
        and "all tasks" in text
    )
    assert "10/20 = 50%" in text and "29.9% – 70.1%" in text and "max_step/s³" in text
    assert "failures: 10 wrong object" in text and "failures" not in results[0].table()
    one = dataclasses.replace(results[0], outcomes=results[0].outcomes[::2])
    assert "all tasks" not in one.table()


def test_success_is_logged_in_all_and_of_each_of_several_tasks(results):
    _, bad = results
    assert bad.metrics() == {
        "eval/success": 0.5,
        "eval/success/reach_red": 1.0,
        "eval/success/reach_blue": 0.0,
    }
    one = dataclasses.replace(bad, outcomes=[o for o in bad.outcomes if o.task_id == "reach_red"])
    assert one.metrics() == {"eval/success": 1.0}


def test_tasks_that_fell_are_told_from_chance(results):
    def solved(**losses):  # of 10 episodes each
        outcomes = [
            EpisodeOutcome(task, i, "go", i >= lost, 10, 2)
            for task, lost in sorted(losses.items())
            for i in range(10)
        ]
        return dataclasses.replace(results[0], outcomes=outcomes)

    def fallen(a, b):
        return list(compare(a, b).fallen_tasks)

    start = solved(a=0, b=0, c=0)
    assert fallen(start, solved(a=6, b=0, c=0)) == []  # p = 0.03, and there are three tasks
    # the last of three may have 0.05
    assert fallen(start, solved(a=6, b=8, c=9)) == ["c", "b", "a"]
    assert set(fallen(solved(a=0, b=9, c=0), solved(a=8, b=0, c=6))) == {"a", "c"}  # b rose
    assert fallen(solved(a=0), solved(a=10)) == []  # one task: the comparison of all says it


def test_compare(results):
    good, bad = results
    c = compare(bad, good)
    assert (
        (c.trials, c.only_b, c.only_a, c.both) == (20, 10, 0, 10)
        and c.significant
        and c.difference == 0.5
    )
    text = comparison_text(c, "SFT", "RL")
    assert (
        "RL − SFT: +50 points on the same 20 episodes" in text
        and "more than chance" in text
        and "p = 0.002" in text
    )
    assert "within what chance" in comparison_text(compare(good, good))
    assert fallen_text(c) == "" and compare(good, bad).to_dict()["fallen_tasks"] == ["reach_blue"]
    fell = "Lower than before by more than chance explains: reach_blue (10 to 0 of 10)."
    assert comparison_text(compare(good, bad)).endswith(f"). {fell}") and "Lower" not in text
    fewer = dataclasses.replace(good, outcomes=good.outcomes[3:7])
    assert compare(bad, fewer).trials == 4
    with pytest.raises(UserError, match=r"other episodes.*--seed"):
        compare(good, dataclasses.replace(good, seed=1))
    renamed = [dataclasses.replace(o, task_id="x") for o in good.outcomes]
    with pytest.raises(UserError, match="share no episode"):
        compare(good, dataclasses.replace(good, outcomes=renamed))


def test_jerk():
    spec = ToyReach().embodiment
    t = np.arange(6.0)
    cubic = np.stack([t**3, 0 * t], 1)  # third difference 6 in one of two dims
    assert mean_jerk(cubic, spec) == pytest.approx(3.0 * 10.0**3)
    assert mean_jerk(np.stack([t**2, t], 1), spec) == pytest.approx(0.0)
    assert mean_jerk(cubic[:3], spec) is None
    arm = dataclasses.replace(spec, action_names=("dx", "gripper"), action_units=("m", "1"))
    assert mean_jerk(cubic[:, ::-1], arm) == pytest.approx(0.0)  # the gripper does not count
    assert jerk_unit(arm) == "m/s³" and jerk_unit(spec) == "max_step/s³"


def test_bad_config():
    with pytest.raises(ConfigError, match=r"evaluate.split='test' .* one of train, held_out"):
        EvaluateConfig(split="test")
    with pytest.raises(ConfigError, match="episodes_per_task"):
        EvaluateConfig(episodes_per_task=0)
    engine = make_engine()
    with pytest.raises(ConfigError, match="no task"):
        evaluate(engine, [])


# ------------------------------------------------------------------------------------------- videos
def test_clips_show_every_control_step(results):
    pytest.importorskip("av")
    good = results[0]
    assert len(good.clips) == 5
    for clip, o in zip(good.clips, good.outcomes):
        assert len(clip.frames) == o.control_steps + 1 and clip.hz == 10 and clip.success
        assert f"{o.task_id} #{o.init_state_id} · {o.control_steps} steps" == clip.caption


def test_clips_fall_back_to_decisions():
    """A real robot is never moved again for a video, and a simulator that is not deterministic
    is noticed."""
    engine = make_engine(repeatable=False)
    run = engine.collect(
        evaluation_episodes(engine.env.tasks, EvaluateConfig(episodes_per_task=1)),
        deterministic=True,
    )
    engine.env.start = None  # any attempt to replay would fail
    t = run.trajectories[0]
    clip = make_clips(engine.env, run.trajectories)[0]
    assert len(clip.frames) == len(t) + 1 and clip.hz == pytest.approx(
        10 * len(t) / t.num_control_steps
    )
    other = make_engine()
    t.final_observation.images["top"].add_(1)  # as if it had ended elsewhere
    assert len(make_clips(other.env, [t])[0].frames) == len(t) + 1


def test_a_failing_replay_leaves_no_events():
    engine = make_engine(slots=2)
    episodes = evaluation_episodes(engine.env.tasks, EvaluateConfig(episodes_per_task=3))
    run = engine.collect(episodes, deterministic=True)
    faulty = InlineEnv(
        ToyReach(ToyConfig(fault="raise", fault_init_state_id=1, fault_control_step=2)), num_slots=2
    )
    faulty.repeatable = True
    clips = make_clips(faulty, run.trajectories)
    smooth = [len(c.frames) == t.num_control_steps + 1 for c, t in zip(clips, run.trajectories)]
    assert (
        smooth == [t.episode.init_state_id != 1 for t in run.trajectories]
        and faulty.poll(0.0) == []
    )


def test_grid_frames_mark_the_outcome():
    frames = np.zeros((4, 8, 8, 3), np.uint8)
    clips = [
        Clip(frames, 10, True, "a"),
        Clip(frames[:2], 10, False, "b" * 80),
        Clip(frames[:1], 5, True, "c"),
    ]
    images, hz = grid(clips, columns=2, cell=16, hold_s=0.2)
    images = [image.copy() for image in images]
    assert hz == 10 and len(images) == 6 and all(n % 2 == 0 for n in images[0].shape[:2])

    def border(image, row, column):
        tile_h, tile_w = 8 * 2 + 16 + 30 + 8, 8 * 2 + 16 + 8  # image, border, caption, gap
        return tuple(image[8 + row * tile_h + 1, 8 + column * tile_w + 1])

    assert border(images[0], 0, 0) not in (SUCCESS, FAILURE) and border(images[-1], 0, 0) == SUCCESS
    assert border(images[0], 0, 1) not in (SUCCESS, FAILURE) and border(images[1], 0, 1) == FAILURE
    assert border(images[0], 1, 0) == SUCCESS
    with pytest.raises(ValueError, match="at least one clip"):
        grid([])


def test_upscale_keeps_flat_colours():
    image = np.full((3, 5, 3), 77, np.uint8)
    assert (
        upscale(image, 4).shape == (12, 20, 3)
        and (upscale(image, 4) == 77).all()
        and upscale(image, 1) is image
    )


def test_video_plays_back(results, tmp_path):
    av = pytest.importorskip("av")
    path = write_videos(results[0], tmp_path / "v" / "good.mp4", control_hz=10)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264" and stream.codec_context.pix_fmt == "yuv420p"
        assert float(stream.average_rate) == 10
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    longest = max(len(clip.frames) for clip in results[0].clips)
    assert len(decoded) == longest + 15
    head = path.read_bytes()
    assert head.index(b"moov") < head.index(b"mdat")  # the index comes first
    flat = iter([np.full((32, 32, 3), 90, np.uint8)] * 3)
    with av.open(str(write_mp4(tmp_path / "flat.mp4", flat, 5))) as container:
        assert all(
            abs(f.to_ndarray(format="rgb24").astype(int) - 90).max() < 4
            for f in container.decode(video=0)
        )


def test_no_clips_no_video(results, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert write_videos(dataclasses.replace(results[0], clips=[]), tmp_path / "x.mp4") is None
    assert "no episode was recorded" in caplog.text and not (tmp_path / "x.mp4").exists()


def test_outcome_key():
    o = EpisodeOutcome("t", 3, "go", True, 10, 2)
    assert o.key == ("t", 3, "go") and o.mean_jerk is None
