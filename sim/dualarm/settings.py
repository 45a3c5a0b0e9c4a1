"""The options of the embedded dual-arm suite (no SAPIEN, no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from sim.dualarm.tasks import TASKS
from sim.slots import time_limit
from sim.vulkan import ensure_driver, require_sapien
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError

CAMERAS = ("head", "left_wrist", "right_wrist")
CONTROLS = ("joint_delta", "joint_position")
LOOKS = ("fast", "default", "paper")
OBSERVE = ("pictures", "state")


@dataclass
class DualArmConfig(Bounded, place="env"):
    """Which tasks, how the arms are controlled, what is seen.

    ``control``: "joint_delta", how far each joint's target moves in a control step (rad), or
    "joint_position", where to (rad); grippers are 0 closed ... 1 open in both. ``observe`` "state"
    shows no pictures, and the things' places in the proprioception instead: that needs no Vulkan
    driver. ``look``: "fast" (no shadows), "default" (shadows) or "paper" (ray tracing, for a GPU).
    ``camera_width`` 0 makes pictures square. ``horizon`` 0 keeps each task's own.
    """

    # ids of the tasks that may be asked for
    tasks: list[str] = several(list(TASKS), choices=tuple(TASKS), least=1, once=True)
    control: str = bound("joint_delta", choices=CONTROLS)
    observe: str = bound("pictures", choices=OBSERVE)
    # names of the cameras to render
    cameras: list[str] = several(["head"], choices=CAMERAS, once=True)
    # height of a picture, pixels
    camera_size: int = bound(96, ge=16, le=2048)
    # its width, pixels; 0: as its height
    camera_width: int = bound(128, ge=16, le=2048, also=[0], hint="0: as high")
    look: str = bound("fast", choices=LOOKS)
    horizon: int = bound(0, ge=0, hint="0: each task's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observe == "pictures" and not self.cameras:
            raise ConfigError(
                "env.cameras=[] shows nothing: name a camera, or set env.observe=state"
            )

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
        limit = time_limit(self.horizon)
        return f"{seen if self.pictured else 'state, no pictures'}, {self.control} control, {limit}"
