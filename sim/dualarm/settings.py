"""The options of the embedded dual-arm suite (no SAPIEN, no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.dualarm.tasks import TASKS
from sim.vulkan import ensure_driver, require_sapien
from vla_rl.errors import ConfigError

CAMERAS = ("head", "left_wrist", "right_wrist")
CONTROLS = ("joint_delta", "joint_position")
LOOKS = ("fast", "default", "paper")
OBSERVE = ("pictures", "state")


@dataclass
class DualArmConfig:
    """Which tasks, how the arms are controlled, what is seen.

    ``control``: "joint_delta", how far each joint's target moves in a control step (rad), or
    "joint_position", where to (rad); grippers are 0 closed ... 1 open in both. ``observe`` "state"
    shows no pictures, and the things' places in the proprioception instead: that needs no Vulkan
    driver. ``look``: "fast" (no shadows), "default" (shadows) or "paper" (ray tracing, for a GPU).
    ``camera_width`` 0 makes pictures square. ``horizon`` 0 keeps each task's own.
    """

    # ids of the tasks that may be asked for
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    control: str = "joint_delta"
    observe: str = "pictures"
    # names of the cameras to render
    cameras: list[str] = field(default_factory=lambda: ["head"])
    # height of a picture, pixels
    camera_size: int = 96
    # its width, pixels; 0: as its height
    camera_width: int = 128
    look: str = "fast"
    horizon: int = 0

    def __post_init__(self) -> None:
        for key, allowed in (("control", CONTROLS), ("observe", OBSERVE), ("look", LOOKS)):
            _check(key, getattr(self, key), allowed)
        for key, known in (("tasks", tuple(TASKS)), ("cameras", CAMERAS)):
            names = getattr(self, key)
            for name in names:
                _check(key, name, known)
            if len(set(names)) < len(names):
                raise ConfigError(f"env.{key}={names}: name each once")
        if not self.tasks or (self.observe == "pictures" and not self.cameras):
            raise ConfigError(
                "env needs at least one task, and a camera (or env.observe=state), got "
                f"{self.tasks} and {self.cameras}"
            )
        if not 16 <= self.camera_size <= 2048 or not (
            self.camera_width == 0 or 16 <= self.camera_width <= 2048
        ):
            raise ConfigError(
                f"env.camera_size={self.camera_size} and env.camera_width={self.camera_width}: use "
                "16 to 2048 pixels (width 0: as high)"
            )
        if self.horizon < 0:
            raise ConfigError(f"env.horizon={self.horizon} must be 0 (each task's own) or more")

    @property
    def pictured(self) -> tuple[str, ...]:
        """The cameras that are drawn."""
        return tuple(self.cameras) if self.observe == "pictures" else ()

    def check_machine(self) -> None:
        """Raise `MissingPackage` or `MissingDependency` where this env cannot run here."""
        require_sapien("The dual-arm suite")
        if self.pictured:
            ensure_driver(" Or set env.observe=state for no pictures.")

    def describe(self) -> str:
        """What a figure measured here depends on besides the policy, in a line for reports."""
        seen = f"{self.look} look at {self.camera_width or self.camera_size}x{self.camera_size} px"
        limit = (
            f"at most {self.horizon} control steps"
            if self.horizon
            else "each task's own time limit"
        )
        return f"{seen if self.pictured else 'state, no pictures'}, {self.control} control, {limit}"


def _check(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"env.{key}={value!r} is unknown: use one of {', '.join(choices)}.")
