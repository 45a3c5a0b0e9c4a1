"""What the phases of a run start from."""

from __future__ import annotations

from vla_rl.checks.data import is_recording
from vla_rl.checks.planned import Planned
from vla_rl.config.phases import PHASES
from vla_rl.errors import ConfigError
from vla_rl.options import PolicyOptions, view


def check(run: Planned) -> None:
    """Raise `ConfigError` for a phase that finds nothing to start from, neither made by a phase
    before it nor there already."""
    config = run.config
    if {"random", "sft"} <= set(config.phases):
        raise ConfigError(
            "phases has sft and random, and a run starts from one policy: leave out random "
            "(random weights), or sft"
        )

    def made(phase: str, by: str) -> bool:
        before = config.phases[: config.phases.index(by)]
        return phase in before or (
            not run.fresh and (config.run_dir / PHASES[phase].writes[0]).exists()
        )

    for name in run.open_phases:
        needs, has_data = PHASES[name].needs, config.dataset or made("collect", name)
        if needs == "demonstrations" and not (config.checkpoint or has_data):
            raise ConfigError(
                f"phases has {name}, and there are no demonstrations to learn from: put collect "
                "before it, or name some with dataset=FOLDER"
            )
        published = "" if "sft" in config.phases else view(config.policy, PolicyOptions).checkpoint
        start = config.checkpoint or published or made("sft", name) or made("random", name)
        if needs == "start" and not start:
            raise ConfigError(
                f"phases has {name}, and there is no policy to start from: put sft before it "
                f"(phases=[collect,sft,{name}]), or random (random weights: phases=[random,{name}]), "
                "or name one with checkpoint=FOLDER"
            )
        if needs in PHASES and not made(needs, name):
            raise ConfigError(
                f"phases has {name}, and {needs} has trained no policy that it could judge: put "
                f"{needs} before it, or leave {name} out"
            )
        if name == "offline" and not (
            has_data or config.offline.start_episodes or config.replay.offline
        ):
            raise ConfigError(
                "phases has offline, and there is no data to learn from: put collect before it, "
                "name demonstrations with dataset=FOLDER, or let the policy act first with "
                "offline.start_episodes=64"
            )
        if name == "eval_actions" and not has_data:
            raise ConfigError(
                "phases has eval_actions, which compares actions with demonstrations, and there "
                "are none: name some with dataset=FOLDER, or put collect before it"
            )
        if name == "rl" and not (config.rl.iterations or is_recording(config)):
            raise ConfigError(
                "rl.iterations=0 trains nothing: give 1 or more, or leave rl and "
                "eval_rl out of phases=[...]"
            )
