"""``vla-rl robot describe``: what an arm's actions and observations mean, as a file that
``env.embodiment`` of a training takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from vla_rl import build
from vla_rl.config.robot import SessionSettings
from vla_rl.errors import ConfigError
from vla_rl.files import write_whole
from vla_rl.robot.session import body_config
from vla_rl.specs import EmbodimentSpec

_TURN = (-180.0, 180.0)


def describe(settings: SessionSettings, file: Path, say: Callable[[str], None]) -> EmbodimentSpec:
    """Write what a session of these settings would be of, cameras included; the arm is not opened.
    Raises `UserError`, also for an arm whose joints have no ends yet."""
    body = body_config(settings)
    if body.driver:
        arm = build.attribute("real.named:named")(body.driver)(**body.options)
    else:
        arm = build.attribute("real.named:make_world")(body.world, body.options)
    cameras = [[name, c.height, c.width] for name, c in body.cameras.items()]
    spec: EmbodimentSpec = build.attribute("real.supervisor.loop:with_cameras")(
        arm.embodiment, cameras
    )
    ends = {
        (low, high)
        for unit, low, high in zip(spec.action_units, spec.action_low, spec.action_high)
        if unit == "deg"
    }
    if ends == {_TURN}:
        raise ConfigError(
            f"every joint of {spec.name} goes from -180 to 180 deg, as of an arm that is not "
            "calibrated: calibrate it first and give its id (robot.id), or its ends, "
            "robot.options.low and robot.options.high"
        )
    write_whole(file, json.dumps(spec.to_dict(), indent=2) + "\n")
    shown = ", ".join(f"{c.name} {c.width}x{c.height}" for c in spec.cameras) or "no camera"
    say(f"{spec.name}: {', '.join(spec.action_names)}; {shown}; {spec.control_hz:g} Hz")
    say(f"wrote {file}: train on recordings of it with env.embodiment={file}")
    return spec
