"""``vla-rl robot limits``: a sweep by hand becomes the limits file of an arm."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vla_rl import build
from vla_rl.config.robot import SessionSettings
from vla_rl.errors import ConfigError
from vla_rl.files import write_whole

_HZ = 50.0


def find(settings: SessionSettings, file: Path, seconds: float, say: Callable[[str], None]) -> Path:
    """Reads the arm for ``seconds`` (0: until Enter), and writes ``file``. Raises `UserError`."""
    robot = settings.robot
    if not robot.driver:
        raise ConfigError(
            f"robot.world={robot.world} is simulated, and nobody moves it by hand: name an arm, as "
            "robot=lerobot"
        )
    if seconds < 0:
        raise ConfigError(f"--seconds {seconds:g} must be above 0, or left out")
    arm = build.attribute("real.named:named")(robot.driver)(**robot.options)
    end = f"for {seconds:g} s" if seconds else "until Enter is pressed"
    say(f"move {arm.name} by hand through all that it is to do, as fast as it may, {end}")
    began = time.monotonic()

    def ended() -> bool:
        return time.monotonic() - began >= seconds if seconds else entered()

    try:
        sweep = build.attribute("real.sweep:record")(arm, ended, pause)
        found, still = sweep.limits(arm.limits, arm.capabilities.kind == "joints")
    finally:
        arm.close()
    about = f"limits of {arm.name}, from {len(sweep.stamps)} measurements of a sweep by hand"
    units = arm.embodiment.action_units
    write_whole(file, build.attribute("real.sweep:as_file")(found, units, still, about))
    for name in still:
        say(f"{name} was not moved: it keeps its own ends and the slowest speed of the others")
    say(f"wrote {file}: halve the speeds for the first session")
    return file


def entered() -> bool:
    """Whether Enter was pressed."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return False
    sys.stdin.readline()
    return True


def pause() -> None:
    time.sleep(1.0 / _HZ)
