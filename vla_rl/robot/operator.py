"""The scripted operator of a session with a simulated arm: in this process in virtual time, else in
one of its own, ``python -m vla_rl.robot.operator CONFIG.json`` with socket, arm (the arm's socket)
and operator (`OperatorSettings`).

There it is a client like a person's device: it asks for control, holds its dead-man, and what it
sends expires.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vla_rl import build
from vla_rl.config.robot import OperatorSettings
from vla_rl.robot.process import run_process

SOURCE = "teleop.scripted"


def make_operator(settings: OperatorSettings, world: Any) -> Any:
    """A `real.teleop.scripted.ScriptedOperator` that knows what ``world`` (a
    `real.robots.world.Coach`) knows. Raises `ConfigError` for one that knows nothing."""
    s = settings
    expert = build.attribute("real.teleop.coached:WorldExpert")(world, s.speed)
    rule = build.attribute("real.teleop.scripted:Stuck")(
        expert, s.patience_s, s.gain, s.help_gain, s.longest_s
    )
    names = ("lag_s", "noise", "reaction_median_s", "seed")
    config = build.attribute("real.teleop.scripted:OperatorConfig")(
        **{name: getattr(s, name) for name in names}
    )
    return build.attribute("real.teleop.scripted:ScriptedOperator")(expert, rule, config)


def start_operator(body: Any, settings: OperatorSettings) -> None:
    """Start its process. A session that is to be helped ends where that ends. Raises
    `UserError`."""
    job = {"socket": body.socket, "arm": body.arm_socket, "operator": dataclasses.asdict(settings)}
    body.process("operator", "vla_rl.robot.operator", [body.write_config("operator", job)])


def main(config: dict[str, Any]) -> None:
    """Until the session ends."""
    coach = build.attribute("real.teleop.coached:RemoteCoach")(config["arm"])
    device = make_operator(OperatorSettings(**config["operator"]), coach)
    client = build.attribute("real.link:Client")(config["socket"], "teleop", SOURCE)
    print("ready", flush=True)
    build.attribute("real.teleop.process:serve")(client, device)


if __name__ == "__main__":
    run_process(main)
