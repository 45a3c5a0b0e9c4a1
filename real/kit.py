"""A person's arm in a folder: ``arm.yaml`` is the robot's config (``robot=FOLDER/arm.yaml``),
``limits.yaml`` the arm's limits. `real.so101` and `real.franka` say what else there is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from real import limits as limit_files
from real.robots.protocol import Robot
from vla_rl.errors import ConfigError, UserError, first_line

Row = tuple[str, bool, str, str]  # what, whether it is in order, what was found, what to do


@dataclass(frozen=True)
class ArmKit:
    """``what`` it is of, ``setup`` the command that makes it."""

    folder: Path
    what: ClassVar[str] = "arm"
    setup: ClassVar[str] = ""

    @property
    def arm(self) -> Path:
        return self.folder / "arm.yaml"

    @property
    def limits(self) -> Path:
        return self.folder / "limits.yaml"

    def overrides(self) -> list[str]:
        """Of a session with this arm. Raises `ConfigError` before it was set up."""
        if not self.arm.is_file():
            raise ConfigError(
                f"{self.folder} holds no {self.what}: make it with `{self.setup} --arm "
                f"{self.folder} ...`"
            )
        return [f"robot={self.arm}", f"robot.limits={self.limits}"]

    def read(self, path: Path) -> dict[str, Any]:
        """Of one of its files. Raises `ConfigError`."""
        import yaml

        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read: {first_line(error)}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{path} holds no keys: make it anew with `{self.setup}`")
        return found

    def write(self, path: Path, values: dict[str, Any] | str) -> None:
        """As a whole, or not at all."""
        import yaml

        text = values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)

    def limits_row(self, robot: Robot) -> Row:
        """Whether a session takes its limits."""
        try:
            limit_files.load_for(robot, self.limits)
        except UserError as error:
            return "limits", False, str(error), f"vla-rl robot limits {self.limits} ..."
        return "limits", True, str(self.limits), ""


def cameras_row(found: Iterable[str]) -> Row:
    names = ", ".join(found)
    fix = "name one: cameras.front=opencv cameras.front.source=0 ... (docs/how_to/real_robots.md)"
    return "cameras", bool(names), names or "none in arm.yaml", fix
