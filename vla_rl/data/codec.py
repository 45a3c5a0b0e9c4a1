"""A trajectory as nested dicts of tensors, numbers and strings (which `checkpoint.save_state`
can write), and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vla_rl.specs import Instead
from vla_rl.types import EpisodeSpec, Observation, Trajectory


def observation_state(o: Observation) -> dict[str, Any]:
    """Nested dicts of tensors and strings; `observation_from_state` inverts it."""
    return {
        "images": dict(o.images),
        "proprio": o.proprio,
        "instruction": list(o.instruction),
        "privileged": o.privileged,
    }


def observation_from_state(state: Mapping[str, Any]) -> Observation:
    """Inverse of `observation_state`."""
    return Observation(**{**state, "instruction": tuple(state["instruction"])})


def trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    """Nested dicts of tensors, numbers and strings; `trajectory_from_state` inverts it."""
    trajectory = trajectory.whole()
    state = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(trajectory)}
    del state["payload"]
    state["episode"] = dataclasses.asdict(trajectory.episode)
    if trajectory.instead is not None:
        state["instead"] = dataclasses.asdict(trajectory.instead)
    for name in ("observations", "final_observation"):
        state[name] = observation_state(state[name])
    return state


def trajectory_from_state(state: Mapping[str, Any]) -> Trajectory:
    """Inverse of `trajectory_state`; states of before a field was added get its default."""
    values = dict(state)
    values["episode"] = EpisodeSpec(**state["episode"])
    if state.get("instead") is not None:
        values["instead"] = Instead(**state["instead"])
    for name in ("observations", "final_observation"):
        values[name] = observation_from_state(state[name])
    return Trajectory(**values)
