"""What the simulators do alike: which slot runs, which task is meant, what it is called, and
whether actions can be sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.specs import EpisodeSpec, Instead, SlotObservation, SlotStep, TaskSpec

Named = TypeVar("Named")


class Slot(Protocol):
    """An episode that may be over, and is still looked at then."""

    over: bool


Running = TypeVar("Running", bound=Slot)


def running(slots: Mapping[int, Running], slot: int, over: bool = False) -> Running:
    """What ``slot`` runs; with ``over`` also what ran there last. ValueError where there is
    nothing."""
    s = slots.get(slot)
    if s is None or (s.over and not over):
        raise ValueError(f"slot {slot} has no running episode: call start first")
    return s


def checked_actions(slot: int, actions: Any, width: int) -> np.ndarray:
    """``actions`` as float64 [h, width]. ValueError for another shape, and for a number that is
    not finite."""
    actions = np.asarray(actions, dtype=np.float64)
    if actions.ndim != 2 or actions.shape[1] != width:
        raise ValueError(f"slot {slot}: actions must be [h, {width}], got {list(actions.shape)}")
    if not np.isfinite(actions).all():
        bad = actions[~np.isfinite(actions).all(axis=1)][0]
        raise ValueError(f"slot {slot}: actions must be finite, got {bad}")
    return actions


def task_named(tasks: Mapping[str, Named], task_id: str) -> Named:
    """What ``tasks`` has under that name; `ConfigError` for a task that is not configured."""
    if task_id not in tasks:
        raise ConfigError(f"task {task_id!r} is not configured: use one of {', '.join(tasks)}.")
    return tasks[task_id]


def instruction(task: TaskSpec, episode: EpisodeSpec) -> str:
    """The phrasing of the episode's split that its ``instruction_index`` picks."""
    texts = task.held_out_instructions if episode.split == "held_out" else task.instructions
    return texts[episode.instruction_index % len(texts)]


def in_words(tasks: Iterable[TaskSpec], task_id: str, episode: EpisodeSpec) -> Instead:
    """Another task that ``episode`` has solved, asked for in the phrasing that it would have had."""
    task = task_named({task.task_id: task for task in tasks}, task_id)
    return Instead(task_id, instruction(task, episode))


def chunk_result(
    observation: SlotObservation,
    rewards: np.ndarray,
    executed: int,
    success: bool,
    truncated: bool,
    failure: str = "",
    instead: Instead | None = None,
) -> SlotStep:
    """A chunk's result in a simulator whose episodes end with success, or with their time."""
    return SlotStep(
        observation, rewards, executed, success, truncated, success, failure, instead=instead
    )


def lasting(tasks: Iterable[TaskSpec], horizon: int) -> tuple[TaskSpec, ...]:
    """The tasks with ``horizon`` control steps each; 0 keeps their own."""
    return tuple(dataclasses.replace(task, horizon=horizon or task.horizon) for task in tasks)


def time_limit(horizon: int) -> str:
    """What `lasting` makes of ``horizon``, for reports."""
    return f"at most {horizon} control steps" if horizon else "each task's own time limit"
