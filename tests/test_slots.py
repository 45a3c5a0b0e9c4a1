"""What all simulators do alike with their slots, tasks and actions, and how an expert's runs are
summed up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.simulator.experts import figures
from sim.slots import checked_actions, instruction, lasting, running, task_named
from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec, TaskSpec

TASK = TaskSpec("lift", ("lift", "raise"), ("up", "higher", "off"), horizon=40)


def test_a_slot_runs_until_its_episode_is_over() -> None:
    slots = {0: SimpleNamespace(over=False), 1: SimpleNamespace(over=True)}
    assert running(slots, 0) is slots[0] and running(slots, 1, over=True) is slots[1]
    for slot, over in ((1, False), (2, False), (2, True)):
        with pytest.raises(
            ValueError, match=f"slot {slot} has no running episode: call start first"
        ):
            running(slots, slot, over)


def test_actions_of_another_shape_or_not_finite_are_told_apart() -> None:
    actions = checked_actions(3, np.ones((2, 4), dtype=np.float32), 4)
    assert actions.dtype == np.float64 and actions.shape == (2, 4)
    for wrong in (np.ones((2, 5)), np.ones(4), 1.0):
        with pytest.raises(ValueError, match=r"slot 3: actions must be \[h, 4\], got \["):
            checked_actions(3, wrong, 4)
    with pytest.raises(ValueError, match=r"slot 3: actions must be finite, got \[ ?2\. +nan\]"):
        checked_actions(3, [[0.0, 1.0], [2.0, np.nan]], 2)


def test_tasks_are_found_by_name_asked_for_by_split_and_last_as_long_as_set() -> None:
    assert task_named({"lift": TASK}, "lift") is TASK
    with pytest.raises(
        ConfigError, match="task 'juggle' is not configured: use one of lift, press"
    ):
        task_named({"lift": TASK, "press": TASK}, "juggle")
    texts = [
        instruction(TASK, EpisodeSpec("lift", 0, split=split, instruction_index=3))
        for split in ("train", "held_out")
    ]
    assert texts == ["raise", "up"]
    assert [task.horizon for horizon in (0, 7) for task in lasting((TASK,), horizon)] == [40, 7]
    assert lasting((TASK,), 0) == (TASK,)


def test_an_experts_figures_are_those_of_its_successes() -> None:
    runs = [
        {"success": s, "actions": np.zeros((n, 2))} for s, n in ((True, 3), (False, 99), (True, 6))
    ]
    assert figures(runs) == {"successes": 2, "mean": 4.5, "longest": 6}
    assert figures(runs[1:2]) == {"successes": 0, "mean": 0.0, "longest": 0}
