"""The options of RoboTwin (no SAPIEN, no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sim.robotwin import branches, primitive_arm
from sim.robotwin.seeds import SEED_LISTS, SeedFile
from sim.robotwin.tasks import LIMITS, RLINF, TASKS
from sim.vulkan import ensure_driver
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError

SETTINGS = ("demo_clean", "demo_randomized")
CAMERAS = ("head_camera", "left_camera", "right_camera")
LOOKS = ("fast", "default", "paper")
STATES = ("commanded", "measured")
CONTROLS = ("qpos", "ee")
PATHS = ("", *branches.PATHS)
SHOWN = ("split", "seen", "unseen")  # textures, and phrases


@dataclass
class RoboTwinConfig(Bounded, place="env"):
    """A checkout of RoboTwin 2.0, and how it is used.

    ``root``: the checkout, whose branch is found out (`branches.detect`). ``assets``: the folder
    that has its ``assets`` (empty: the checkout). ``embodiment``: the name of an arm of its
    ``_embodiment_config.yml``, which stands ``distance`` m beside another one, or of a robot with
    two arms (``distance`` 0); "primitive" is an arm of boxes that needs no download. ``limit``:
    whose step limits hold, "official", "simplevla" or "rlinf" (of ten tasks); ``horizon`` above 0
    overrules them. ``seeds``: a file of `vla-rl robotwin seeds` (empty: seeds in a row, some of
    which no expert can solve).

    What a published figure is compared with: ``seed_list`` says where the seeds begin. Those of
    RoboTwin's evaluation, 100000 on, are held out under "official", whose training has those of its
    data collection, 0 on; SimpleVLA-RL and RLinf train from 100000 on and hold out 100100000 on
    ("simplevla"). ``textures`` of walls and tables, in a randomised setting: "split" has unseen
    ones in held-out scenes alone (``eval_mode``, as RoboTwin evaluates). ``instructions``: "split"
    has seen phrases in training and in ``demo_clean``, unseen ones in held-out scenes of
    ``demo_randomized``, as RoboTwin has.

    ``state``: the proprioception, "commanded" joint targets as RoboTwin has it, or "measured" ones.
    ``control``: what an action is, "qpos", joint targets, or "ee", where the hands go in the world,
    with a path for each action, which the planner finds. ``path``: whether a "chunk" or an "action"
    of joint targets is one path from rest to rest (empty: as the branch has it). ``look``: "fast"
    (no shadows), "default" (shadows) or "paper" (ray tracing, 32 samples, for a GPU).
    """

    root: str = ""
    assets: str = ""
    # names of the checkout's tasks that may be asked for
    tasks: list[str] = several(["stack_blocks_two"], choices=tuple(TASKS), least=1, once=True)
    # the checkout's file of scene settings, such as demo_clean, demo_randomized
    setting: str = bound("demo_clean", choices=SETTINGS)
    # an arm of the checkout, or primitive: boxes that need no download
    embodiment: str = "piper"
    # metres between two arms; 0: a robot with two
    distance: float = bound(0.6, ge=0)
    # names of the cameras to render
    cameras: list[str] = several(["head_camera"], choices=CAMERAS, least=1, once=True)
    # the checkout's camera model, which sets the size of a picture
    camera_type: str = "D435"
    look: str = bound("fast", choices=LOOKS)
    # whose step limits hold
    limit: str = bound("official", choices=LIMITS)
    # control steps that end an episode; 0: as limit says
    horizon: int = bound(0, ge=0)
    seeds: str = ""
    # which seeds are trained on, which held out
    seed_list: str = bound("official", choices=tuple(SEED_LISTS))
    # those of walls and tables, where the setting changes them
    textures: str = bound("split", choices=SHOWN)
    instructions: str = bound("split", choices=SHOWN)  # phrases of instructions
    state: str = bound("commanded", choices=STATES)
    control: str = bound("qpos", choices=CONTROLS)
    path: str = bound("", choices=PATHS)

    @property
    def chunk_is_path(self) -> bool:
        """Whether a chunk may be another motion than its actions one by one."""
        return self.control == "qpos" and self.path != "action"

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [task for task in self.tasks if task not in RLINF]
        if self.limit == "rlinf" and unknown and not self.horizon:
            raise ConfigError(
                f"env.limit=rlinf: RLinf has no recipe for {', '.join(unknown)}, only for "
                f"{', '.join(RLINF)}. Use env.limit=simplevla, or a number with env.horizon"
            )
        if self.embodiment == primitive_arm.NAME and not self.distance:
            raise ConfigError(
                "env.distance=0.0 is for a robot with two arms; primitive is one arm: "
                "set it to 0.56, say"
            )

    def unseen_textures(self, split: str) -> bool:
        """RoboTwin's ``eval_mode`` for a scene of ``split``."""
        return self.textures == "unseen" or (self.textures == "split" and split != "train")

    def unseen_instructions(self, split: str) -> bool:
        """Whether a scene of ``split`` is told with an unseen phrase."""
        held_out = split != "train" and self.setting != "demo_clean"
        return self.instructions == "unseen" or (self.instructions == "split" and held_out)

    def check_machine(self) -> None:
        """Raise `UserError` where checkout, assets, packages or driver are missing."""
        from sim.robotwin.checkout import Checkout

        Checkout(self).check()
        ensure_driver()

    def state_count(self, split: str) -> int | None:
        """How many initial states ``split`` has of each task (None: no end)."""
        if not self.seeds:
            return None
        known = SeedFile.read(Path(self.seeds)).tasks
        return min(len(known.get(name, {}).get("solved", {}).get(split, [])) for name in self.tasks)

    def describe(self) -> str:
        """What a figure measured here depends on besides the policy, in a line for reports."""
        limit = f"at most {self.horizon} actions" if self.horizon else f"{self.limit} step limits"
        seeds = f"{self.seed_list} seeds, " + (
            f"those of {Path(self.seeds).name}" if self.seeds else "in a row"
        )
        shown = "unseen" if self.unseen_textures("held_out") else "seen"
        told = "unseen" if self.unseen_instructions("held_out") else "seen"
        branch = branches.detect(self.root)
        moved = (
            branches.PATHS[self.path or branch.path]
            if self.control == "qpos"
            else "a planned path an action"
        )
        scene = f"branch {branch.name}, {self.setting}, {self.embodiment} at {self.distance:g} m"
        held_out = f"held out with {shown} textures and {told} instructions"
        return f"{scene}, {self.look} look, {limit}, {seeds}, {held_out}, {moved}"
