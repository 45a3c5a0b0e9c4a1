"""What stands beside a figure of success: where episodes start, what else it depends on, what it
compares with."""

from __future__ import annotations

from typing import Any

from vla_rl.config import RunConfig
from vla_rl.options import methods


def conditions_of(config: RunConfig, split: str) -> dict[str, Any]:
    """``initial_states``, ``conditions`` and ``benchmark``, each where the env's config tells
    it."""
    env = methods(config.env)
    found: dict[str, Any] = {}
    if env.initial_states is not None:  # a benchmark says whether they are its own
        found["initial_states"] = env.initial_states(split)
    if env.describe is not None:
        found["conditions"] = env.describe()
    if env.benchmark is not None:
        found["benchmark"] = dict(env.benchmark(split, config.slots.python))
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """The same as text, a line each."""
    said = {"initial states": found.get("initial_states"), "conditions": found.get("conditions")}
    said["benchmark"] = found.get("benchmark", {}).get("line")
    return [f"{name}: {text}" for name, text in said.items() if text]
