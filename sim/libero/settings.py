"""The options of the LIBERO simulator, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim.gl import ensure_backend
from sim.libero import package, plus, pro
from sim.libero.tasks import HORIZONS
from vla_rl import splits
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError, require_packages

OFFICIAL_STATES = 50  # of each task
CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview", "galleryview", "sideview", "birdview")


@dataclass
class LiberoConfig(Bounded, place="env"):
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
    reset draws once more by itself. At most ``built_scenes`` compiled scenes are kept,
    fewer where memory is short.
    """

    # libero_spatial | libero_object | libero_goal | libero_10 | libero_90 | libero_pro_... | libero_plus_...
    suite: str = "libero_object"
    tasks: list[str] = field(default_factory=list)
    # robosuite's names of the cameras to render
    cameras: list[str] = several(
        ["agentview", "robot0_eye_in_hand"], choices=CAMERAS, least=1, once=True
    )
    # pixels per side
    camera_size: int = bound(128, ge=16, le=2048)
    # turn images by 180 degrees, as policies of LIBERO expect
    rotate_images: bool = True
    # the benchmark's own pixels, or a cheaper picture
    look: str = bound("exact", choices=("exact", "light"))
    # the benchmark's own physics, or that up to rounding
    controller: str = bound("exact", choices=("exact", "fast"))
    # motions, or poses of the hand
    control_mode: str = bound("relative", choices=("relative", "absolute"))
    horizon: int = bound(0, ge=0)
    # control steps without a motion before an episode starts
    settle_steps: int = bound(10, ge=0)
    # where episodes start
    init_states: str = bound("split", choices=("split", "official", "sampled"))
    arm_noise: float = bound(0.02, ge=0, le=0.5, hint="rad")
    scene_seed: int = bound(0, ge=0)
    # one placement of fixtures for all official states, or one each
    fixtures: str = bound("per_state", choices=("per_state", "loop", "numbered"))
    opening_draws: int = bound(2, ge=1)
    assets: str = ""
    files: str = ""
    built_scenes: int = bound(16, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files and self.suite not in HORIZONS:
            raise ConfigError(
                f"env.suite={self.suite!r}: it must be one of {', '.join(HORIZONS)}, unless "
                "env.files names a folder that has it"
            )
        if self.suite not in HORIZONS and not self.horizon:
            raise ConfigError(
                f"env.suite={self.suite} of env.files={self.files} has no time limit of its own: "
                "set env.horizon, in control steps"
            )
        self.tasks = [str(task) for task in self.tasks]

    def check_machine(self) -> None:
        """Raise `MissingPackage` or `MissingDependency` where this env cannot run here; imports
        no simulator."""
        require_packages("mujoco", "robosuite", extra="libero", purpose="The LIBERO suites")
        package.root()
        if self.suite in pro.SUITES and not self.files:
            pro.root()
        if self.suite in plus.SUITES and not self.files:
            plus.root()
        ensure_backend()

    def is_official(self, split: str) -> bool:
        """Whether episodes of ``split`` start from the benchmark's own initial states."""
        splits.check_split(split)
        return self.init_states == "official" or (
            self.init_states == "split" and split == "held_out"
        )

    def state_count(self, split: str) -> int | None:
        """How many initial states ``split`` has of each task (None: no end)."""
        if not self.is_official(split):
            return None
        return 1 if not self.files and plus.has_one_state(self.suite) else OFFICIAL_STATES

    def initial_states(self, split: str) -> str:
        """Which initial states episodes of ``split`` start from, for reports."""
        if self.is_official(split):
            if self.suite in plus.SUITES:
                return f"the initial states that {self.suite} comes with, per variant"
            return f"the {OFFICIAL_STATES} initial states that {self.suite} comes with, per task"
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
