"""`vla-rl bench sim`: which module measures a suite, and what it is given."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_rl import build
from vla_rl.config import compose
from vla_rl.errors import ConfigError


@dataclass(frozen=True)
class Suite:
    """``module`` has ``measure`` and ``text``. With ``overrides`` it takes a config, which these
    and the user's make."""

    module: str
    overrides: tuple[str, ...] | None = None


SUITES = {  # by the type of the env
    "tabletop": Suite("benchmarks.simulator.tabletop"),
    "libero": Suite("benchmarks.simulator.libero"),
    "dualarm": Suite(
        "benchmarks.simulator.dualarm",
        ("env.camera_size=240", "env.camera_width=320", "env.horizon=1000000"),
    ),
    "robotwin": Suite("benchmarks.simulator.robotwin", ()),
}


def measure(
    overrides: Sequence[str],
    suite: str,
    tasks: Sequence[str] | None,
    look: str | None,
    chunk: int | None,
    steps: int | None,
    workers: Sequence[int] | None,
) -> dict[str, Any]:
    """The suite's figures; what is None has the suite's own default."""
    env = build.suite(suite)[0]
    if env not in SUITES:
        known = ", ".join(name for name, env in build.suites().items() if env in SUITES)
        raise ConfigError(f"--suite {suite} has no benchmark. Choose one of {known}")
    own = SUITES[env]
    chosen: dict[str, Any] = {"chunk": chunk, "steps": steps, "workers": workers}
    if own.overrides is None:
        if overrides:
            raise ConfigError(f"{overrides[0]}: the benchmark of {suite} takes no key=value")
        chosen |= {"suite": suite, "tasks": tasks, "look": look}
    else:
        if look:
            raise ConfigError(f"--look {look}: say it with env.look=... for --suite {suite}")
        of_tasks = [f"env.tasks=[{','.join(tasks)}]"] if tasks else []
        config = compose(["~run", f"env={env}", *own.overrides, *of_tasks, *overrides])
        chosen |= {"config": config.env, "python": config.slots.python}
    given = {name: value for name, value in chosen.items() if value is not None}
    return {"suite": suite, **importlib.import_module(own.module).measure(**given)}


def text(document: Mapping[str, Any]) -> str:
    return importlib.import_module(SUITES[build.suite(document["suite"])[0]].module).text(document)
