"""The options of the LIBERO simulator, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim.gl import ensure_backend
from sim.libero import package, pro
from sim.libero.tasks import HORIZONS
from vla_rl import splits
from vla_rl.errors import ConfigError, require_packages

CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview", "galleryview", "sideview", "birdview")
_CHOICES = {
    "look": ("exact", "light"),
    "controller": ("exact", "fast"),
    "control_mode": ("relative", "absolute"),
    "init_states": ("split", "official", "sampled"),
    "fixtures": ("per_state", "loop", "numbered"),
}


@dataclass
class LiberoConfig:
    """One LIBERO suite: which tasks, what the cameras show, how the arm is controlled, where
    episodes start.

    ``tasks``: ids, numbers or BDDL names; empty takes the whole suite. ``horizon`` 0 keeps the
    suite's own. ``look``: "exact" draws the benchmark's pixels, "light" a cheaper picture of the
    same scene. ``controller``: "exact" equals the benchmark's physics bit by bit, "fast" up to
    rounding, which contacts amplify. ``control_mode``: motions, or poses of the hand.
    ``init_states``: "split" takes official states for held-out episodes and sampled ones for
    training, "official" and "sampled" take those for both. ``arm_noise``: standard deviation (rad)
    of each arm joint in sampled states; the official ones have 0.02, LIBERO's own reset has none.
    ``assets`` names an existing copy of LIBERO's assets. ``files`` names a folder of one's own with
    ``bddl_files/SUITE`` and ``init_files/SUITE``. ``scene_seed`` places the fixtures of
    official states, and ``fixtures`` says how: "per_state" seeds before each of them, so that all
    share one placement; "loop" seeds once and resets for each in turn, as most published loops do,
    so that the k-th state has the placement of the k-th reset; "numbered" seeds with ``scene_seed``
    + the state's number. ``opening_draws``: LIBERO draws the openings of drawers, doors and knobs
    once more with every reset that an environment has done, before it places fixtures; 2 is a fresh
    environment's first reset, 3 the first episode of lerobot's `LiberoEnv`; in a loop each further
    reset draws once more by itself. At most ``built_scenes`` compiled scenes are kept.
    """

    # libero_spatial | libero_object | libero_goal | libero_10 | libero_90
    suite: str = "libero_object"
    tasks: list[str] = field(default_factory=list)
    # robosuite's names of the cameras to render
    cameras: list[str] = field(default_factory=lambda: ["agentview", "robot0_eye_in_hand"])
    # pixels per side
    camera_size: int = 128
    # turn images by 180 degrees, as policies of LIBERO expect
    rotate_images: bool = True
    # exact | light
    look: str = "exact"
    # exact | fast
    controller: str = "exact"
    # relative | absolute: motions, or poses of the hand
    control_mode: str = "relative"
    horizon: int = 0
    # control steps without a motion before an episode starts
    settle_steps: int = 10
    # split | official | sampled: where episodes start
    init_states: str = "split"
    arm_noise: float = 0.02
    scene_seed: int = 0
    # per_state | loop | numbered: one placement of fixtures for all official states, or one each
    fixtures: str = "per_state"
    opening_draws: int = 2
    assets: str = ""
    files: str = ""
    built_scenes: int = 16

    def __post_init__(self) -> None:
        if not self.files:
            _check_choice("suite", self.suite, tuple(HORIZONS))
        elif self.suite not in HORIZONS and not self.horizon:
            raise ConfigError(
                f"env.suite={self.suite} of env.files={self.files} has no time limit of its own: set "
                "env.horizon, in control steps"
            )
        for key, choices in _CHOICES.items():
            _check_choice(key, getattr(self, key), choices)
        for camera in self.cameras:
            _check_choice("cameras", camera, CAMERAS)
        if not self.cameras or len(set(self.cameras)) < len(self.cameras):
            raise ConfigError(
                f"env.cameras={self.cameras}: name at least one camera, and each once"
            )
        if not 16 <= self.camera_size <= 2048:
            raise ConfigError(f"env.camera_size={self.camera_size}: use 16 to 2048 pixels")
        if min(self.horizon, self.settle_steps, self.scene_seed) < 0 or self.built_scenes < 1:
            raise ConfigError(
                "env needs horizon >= 0, settle_steps >= 0, scene_seed >= 0 and built_scenes >= 1, "
                f"got {self.horizon}, {self.settle_steps}, {self.scene_seed} and "
                f"{self.built_scenes}"
            )
        if not 0.0 <= self.arm_noise <= 0.5 or self.opening_draws < 1:
            raise ConfigError(
                "env needs arm_noise between 0 and 0.5 (rad) and opening_draws >= 1, got "
                f"{self.arm_noise} and {self.opening_draws}"
            )
        self.tasks = [str(task) for task in self.tasks]

    def check_machine(self) -> None:
        """Raise `MissingPackage` or `MissingDependency` where this env cannot run here; imports
        no simulator."""
        require_packages("mujoco", "robosuite", extra="libero", purpose="The LIBERO suites")
        package.root()
        if self.suite in pro.SUITES and not self.files:
            pro.root()
        ensure_backend()

    def is_official(self, split: str) -> bool:
        """Whether episodes of ``split`` start from the benchmark's own initial states."""
        splits.check_split(split)
        return self.init_states == "official" or (
            self.init_states == "split" and split == "held_out"
        )

    def initial_states(self, split: str) -> str:
        """Which initial states episodes of ``split`` start from, for reports."""
        if self.is_official(split):
            return f"the 50 initial states that {self.suite} comes with, per task"
        arm = f"arm noise {self.arm_noise:g} rad" if self.arm_noise else "no arm noise"
        return (
            f"initial states sampled in the placement regions of {self.suite}'s tasks ({split} "
            f"seeds, {arm})"
        )

    def benchmark(self, split: str, python: str = "") -> dict[str, Any]:
        """See `sim.libero.fidelity.benchmark`."""
        # it looks into interpreters, which a config that is only read has no need of
        from sim.libero import fidelity

        return fidelity.benchmark(self, split, python)

    def describe(self) -> str:
        """What a figure measured here depends on besides the policy, in a line for reports."""
        own = HORIZONS.get(self.suite, self.horizon)
        limit = self.horizon or own
        official = "" if limit == own else f" (the suite's own: {own})"
        fixtures = (
            ""
            if self.fixtures == "per_state"
            else f", fixtures {self.fixtures} from seed {self.scene_seed}"
        )
        return (
            f"{self.look} look at {self.camera_size} px, {self.controller} control "
            f"({self.control_mode}), at most {limit} control steps{official} after "
            f"{self.settle_steps} settling ones, {self.opening_draws} draws of openings{fixtures}"
        )


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"env.{key}={value!r} is unknown: use one of {', '.join(choices)}.")
