"""`vla-rl bench learn --start`: several methods of RL from one start, each in a run folder of
its own, side by side."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning import runs as made_runs
from benchmarks.learning.runs import require_level
from benchmarks.measuring import say
from vla_rl import build
from vla_rl import config as configs
from vla_rl.checkpoint import load_policy
from vla_rl.config import RunConfig
from vla_rl.errors import ConfigError, TrainingDiverged
from vla_rl.files import CONFIG, check_checkpoint, existing_checkpoint, read_json
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics
from vla_rl.options import ConfigMethods, view
from vla_rl.run.pipeline import plan, run_pipeline

PHASES = ["eval_sft", "rl", "eval_rl", "report"]
# Keys that the command sets itself, and by what.
_CHOSEN = {
    "checkpoint": "--start",
    "policy": "--start",
    "seed": "--seeds",
    "output_dir": "--out",
    "name": "--out",
    "algorithm": "--methods",
    "actor": "--methods",
    "phases": "itself (eval_sft, rl, eval_rl, report)",
}


@dataclass(frozen=True)
class Method:
    """``run``: the preset of a whole run; ``algorithm``: the preset that goes onto another run
    instead."""

    run: str
    algorithm: str
    shown: bool = False  # it starts from demonstrations


METHODS = {
    "ppo": Method("quickstart", "ppo_quickstart"),
    "residual": Method("residual_quickstart", "residual_quickstart"),
    "steer": Method("steer_quickstart", "steer_quickstart"),
    "rlpd": Method("rlpd_quickstart", "rlpd_quickstart", shown=True),
    "wsrl": Method("wsrl_quickstart", "wsrl_quickstart", shown=True),
    "parl": Method("parl_quickstart", "parl_quickstart"),
}


def measure(
    start: Path,
    methods: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    seeds: Sequence[int],
    level: float,
    out: Path,
    figure: Path | None = None,
) -> dict[str, Any]:
    """Run every method with every seed from the policy ``start``, then read the runs; the same call
    resumes.

    The runs lie in ``out``/METHOD/seed_N. Each takes its quickstart's preset, or with ``run=NAME``
    among the overrides that run with the method's algorithm. A run that diverges does not keep the
    others. Raises `UserError` before the first run for a method that does not fit the start, or
    lacks the demonstrations that it needs.
    """
    require_level(level)
    _require_once("--methods", methods)
    _require_once("--seeds", seeds)
    runs = method_runs(start, methods, overrides, seeds, out)
    if runs[0].dataset:
        print(f"demonstrations: {runs[0].dataset}")
    diverged: dict[str, str] = {}
    for number, config in enumerate(runs, 1):
        say(f"{config.name} ({number} of {len(runs)})")
        try:
            run_pipeline(config)
        except TrainingDiverged as error:
            diverged[str(config.run_dir)] = str(error)
            say(f"{config.run_dir} diverged: {error}")
    begun = [
        c.run_dir
        for c in runs
        if any(r["phase"] == "rl" for r in read_metrics(c.run_dir / METRICS_FILE))
    ]
    return made_runs.measure(begun, level, figure) | {"start": str(start), "diverged": diverged}


def method_runs(
    start: Path, methods: Sequence[str], overrides: Sequence[str], seeds: Sequence[int], out: Path
) -> list[RunConfig]:
    """The checked config of every run. Raises `UserError`; makes nothing."""
    _require_names(methods, overrides)
    kind = _kind(start)
    shown = _demonstrations(start)
    runs = {
        name: [_config(start, name, overrides, seed, out, shown) for seed in seeds]
        for name in methods
    }
    for name, (config, *_) in runs.items():
        with _named(name):
            build.require_fit(config.algorithm_type, kind, config.actor_type)
        if METHODS[name].shown and config.algorithm.demonstration_share and not config.dataset:
            raise ConfigError(
                f"--methods {name} learns from demonstrations, and there are none beside {start}: "
                "give dataset=FOLDER (a LeRobotDataset, such as the dataset of the start's own "
                f"run), or leave {name} out"
            )
    for config in (config for of_method in runs.values() for config in of_method):
        plan(config)
    changes = next(iter(runs.values()))[0].policy_changes
    policy = load_policy(start, build.policy_class, changes=changes)
    for name, (config, *_) in runs.items():
        with _named(name):
            if (check := view(config.algorithm, ConfigMethods).check_policy) is not None:
                check(policy)
            if config.actor_type != "none":
                build.implementation("actor", config.actor_type).from_base(config.actor, policy)
    return [config for of_method in runs.values() for config in of_method]


def _config(
    start: Path, name: str, overrides: Sequence[str], seed: int, out: Path, shown: Path | None
) -> RunConfig:
    method = _preset(name, start)
    own = (
        [f"algorithm={method.algorithm}"]
        if any(_key(o) == "run" for o in overrides)
        else [f"run={method.run}"]
    )
    config = configs.compose([*own, *overrides])
    config.checkpoint, config.phases, config.seed = str(start), list(PHASES), seed
    config.output_dir, config.name = str(out), f"{name}/seed_{seed}"
    config.dataset = config.dataset or ("" if shown is None else str(shown))
    return configs.with_policy_changes(config, overrides)


def _preset(name: str, start: Path) -> Method:
    """A method's presets; PPO has some of its own for policies that denoise."""
    header = read_json(existing_checkpoint(start) / CONFIG, "name another checkpoint")
    if name != "ppo" or header.get("policy_type") != "denoising_vla":
        return METHODS[name]
    diffuses = header.get("config", {}).get("sampler") in ("ddim", "ddpm")
    return Method("diffusion_quickstart" if diffuses else "flow_quickstart", "ppo_denoising")


def _kind(start: Path) -> str:
    """The type of the start's policy. Raises `UserError` for what is no checkpoint of one."""
    check_checkpoint(start)
    kind = read_json(existing_checkpoint(start) / CONFIG, "name another checkpoint")["policy_type"]
    if kind in build.names("actor"):
        raise ConfigError(
            f"--start {start} holds an actor ({kind}) on top of a policy: name the checkpoint of "
            "the policy beneath it, such as outputs/quickstart/checkpoints/sft"
        )
    return kind


def _demonstrations(start: Path) -> Path | None:
    """The dataset of the run that the start lies in."""
    folder = start.parent.parent / "dataset"
    return folder if start.parent.name == "checkpoints" and folder.is_dir() else None


def _require_names(methods: Sequence[str], overrides: Sequence[str]) -> None:
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods:
        close = difflib.get_close_matches(unknown[0], METHODS, n=1) if unknown else []
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"--methods {','.join(methods) or '(none)'}: "
            f"{f'there is no {unknown[0]!r}. ' if unknown else ''}Choose from "
            f"{','.join(METHODS)}.{hint}"
        )
    for text in overrides:
        if _key(text) in _CHOSEN:
            raise ConfigError(
                f"{text}: a comparison of methods sets this by {_CHOSEN[_key(text)]}; leave it out"
            )


def _require_once(option: str, given: Sequence[Any]) -> None:
    if len(set(given)) < len(given):
        raise ConfigError(f"{option} {' '.join(map(str, given))}: name each once")


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


@contextmanager
def _named(method: str) -> Iterator[None]:
    """What a method cannot do with the start, with its name and the way out."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"--methods {method} does not fit this start: {error}; or leave {method} out"
        ) from error
