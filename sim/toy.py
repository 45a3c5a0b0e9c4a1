"""A toy task for tests that learn in seconds: reach the goal of the named colour, seen as a blob in
a tiny image.

Pure numpy. Both goals are visible in every image, so the instruction matters; the goals appear in
the image alone, so vision matters; a random policy hardly ever succeeds, the oracle always does.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sim.simple import Running, SimpleSimulator, spot
from vla_rl import splits
from vla_rl.bounds import Bounded, bound
from vla_rl.errors import UserError
from vla_rl.specs import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    TaskSpec,
)

FAULTS = ("none", "exit", "segfault", "hang", "raise", "user_error", "nan")
COLORS = ("red", "blue")  # image channels 0 and 2; the agent itself is channel 1
HALF_WIDTH = 0.1  # metres: the workspace is [-0.1, 0.1]^2
CAMERA = "top"

_MIN_DISTANCE = 0.05  # metres, between the agent's start and both goals, and between the goals
_VIEW = 0.12  # metres: half the width the camera sees


@dataclass
class ToyConfig(Bounded, place="env"):
    """``max_step`` metres is what an action of 1 moves in one control step; ``success_radius`` is
    in metres too.

    ``step_seconds`` slows every control step down, to imitate a costly simulator. With
    ``step_tail`` (0: not) they are the mean over episodes, each of which has a factor of its own
    from a Pareto distribution with this shape, above 1: some take far longer than most. ``fault``
    (one of `FAULTS`) strikes episodes with ``fault_init_state_id`` (-1: all) once they have run
    ``fault_control_step`` control steps (-1: already at their start); with ``fault_marker``, a file
    name, only while that file does not exist, which it then creates.
    """

    # pixels per side
    image_size: int = bound(16, ge=4, le=2048)
    # control steps that end an episode
    horizon: int = bound(20, ge=1)
    # metres that an action of 1 moves in a control step
    max_step: float = bound(0.02, gt=0)
    # metres from the goal that count as success
    success_radius: float = bound(0.012, gt=0)
    step_seconds: float = bound(0.0, ge=0)
    step_tail: float = bound(
        0.0, gt=1, lt=np.inf, also=[0], hint="above 1 there is a mean; 0: no tail"
    )
    # what goes wrong: one of `FAULTS`; none: nothing
    fault: str = bound("none", choices=FAULTS)
    # initial state whose episodes are struck; -1: all
    fault_init_state_id: int = -1
    # control steps before it strikes; -1: at the start
    fault_control_step: int = 0
    # a file: strike only while it is not there, and make it
    fault_marker: str = ""

    def describe(self) -> str:
        """What a figure measured here depends on besides the policy, in a line for reports."""
        return f"picture of {self.image_size} px, at most {self.horizon} control steps"


@dataclass
class _Scene:
    target: int  # index into COLORS
    agent: np.ndarray  # [2] metres
    goals: np.ndarray  # [2 colours, 2] metres
    step_seconds: float
    went_to_other: bool = False
    broken: bool = False  # a fault's: what is seen of the agent is no number


class ToyReach(SimpleSimulator[_Scene]):
    """Tasks ``reach_red`` and ``reach_blue``. A failure is "wrong_object" once the other goal was
    reached, else "never_reached".

    Actions [2] are velocities as a fraction of ``max_step`` per control step. Proprio [2] is the
    agent's position (m); privileged [9]: agent, red and blue goal (m, x y each), one-hot target,
    share of time left.
    """

    privileged_dim = 9
    tells_instead = True

    def __init__(self, config: ToyConfig | None = None) -> None:
        super().__init__(config or ToyConfig())
        size = self.config.image_size
        self.embodiment = EmbodimentSpec(
            name="toy_reach",
            action_names=("dx", "dy"),
            action_units=("max_step", "max_step"),
            action_low=(-1.0, -1.0),
            action_high=(1.0, 1.0),
            frame="world",
            rotation="none",
            gripper="none",
            control_hz=10.0,
            cameras=(CameraSpec(CAMERA, size, size),),
            proprio_names=("x", "y"),
        )
        self.tasks = tuple(
            TaskSpec(
                task_id=f"reach_{color}",
                instructions=(
                    f"reach the {color} goal",
                    f"go to the {color} spot",
                    f"touch {color}",
                ),
                held_out_instructions=(f"move onto the {color} goal", f"the {color} spot please"),
                horizon=self.config.horizon,
            )
            for color in COLORS
        )

    def begin(self, episode: EpisodeSpec, rng: np.random.Generator) -> _Scene:
        """Agent and goals, placed by the episode's initial state and split."""
        target = [task.task_id for task in self.tasks].index(episode.task_id)
        agent, *goals = _placement(episode)
        scene = _Scene(target, agent, np.stack(goals), self._pace(episode))
        if self.config.fault_control_step < 0:
            self._fault(episode)
        return scene

    def move(self, s: Running[_Scene], action: np.ndarray) -> bool:
        """Whether the named goal is reached."""
        scene, radius = s.state, self.config.success_radius
        if s.elapsed == self.config.fault_control_step:
            scene.broken = self._fault(s.episode)
        if scene.step_seconds:
            time.sleep(scene.step_seconds)
        scene.agent = np.clip(scene.agent + self.config.max_step * action, -HALF_WIDTH, HALF_WIDTH)
        scene.went_to_other |= self.instead(s) is not None
        return bool(np.linalg.norm(scene.agent - scene.goals[scene.target]) <= radius)

    def instead(self, s: Running[_Scene]) -> str | None:
        """The other goal's task, in whose spot the agent is."""
        other = 1 - s.state.target
        distance = np.linalg.norm(s.state.agent - s.state.goals[other])
        return self.tasks[other].task_id if distance <= self.config.success_radius else None

    def failure(self, s: Running[_Scene]) -> str:
        return "wrong_object" if s.state.went_to_other else "never_reached"

    def look(self, s: Running[_Scene]) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        goals, target = s.state.goals, s.state.target
        agent = s.state.agent * np.nan if s.state.broken else s.state.agent
        spots = [spot(c, _VIEW, self.config.image_size) for c in (goals[0], agent, goals[1])]
        privileged = np.concatenate([agent, *goals, np.eye(len(COLORS))[target], [s.time_left]])
        return {CAMERA: np.stack(spots, axis=-1)}, agent, privileged

    def expert(self, s: Running[_Scene]) -> np.ndarray:
        return self._way(s.state, 1)[0]

    def oracle(self, slot: int, chunk_length: int) -> np.ndarray:
        """Actions float32 [h 2] that take the slot's agent straight to its goal, and then keep
        it there."""
        return self._way(self._slots[slot].state, chunk_length)

    def _way(self, scene: _Scene, chunk_length: int) -> np.ndarray:
        agent, actions = scene.agent, np.zeros((chunk_length, 2), dtype=np.float32)
        for action in actions:
            action[:] = np.clip(
                (scene.goals[scene.target] - agent) / self.config.max_step, -1.0, 1.0
            )
            agent = agent + self.config.max_step * action
        return actions

    def _pace(self, episode: EpisodeSpec) -> float:
        """Seconds of a control step of this episode."""
        shape = self.config.step_tail
        if not shape:
            return self.config.step_seconds
        return (
            self.config.step_seconds
            * (shape - 1)
            / shape
            * (1 + np.random.default_rng(episode.seed).pareto(shape))
        )

    def _fault(self, episode: EpisodeSpec) -> bool:
        """Do what ``config.fault`` says where it applies; True means: corrupt the state."""
        c = self.config
        if c.fault == "none" or c.fault_init_state_id not in (-1, episode.init_state_id):
            return False
        if c.fault_marker:
            if Path(c.fault_marker).exists():
                return False
            Path(c.fault_marker).touch()
        if c.fault == "exit":
            os._exit(17)
        elif c.fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif c.fault == "hang":
            time.sleep(3600)
        elif c.fault == "raise":
            raise RuntimeError("a fault was asked for")
        elif c.fault == "user_error":
            raise UserError("a user error was asked for")
        return c.fault == "nan"


def _placement(episode: EpisodeSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Agent, red and blue goal, each float64 [2], in cells of the episode's split and apart from
    each other.

    Both tasks share their placements, so that only the instruction tells which goal is meant.
    """
    rng = splits.rng("toy_reach", episode.init_state_id, episode.split)
    edge = HALF_WIDTH
    while True:
        points = [
            splits.sample_xy(rng, (-edge, -edge), (edge, edge), episode.split) for _ in range(3)
        ]
        if all(
            np.linalg.norm(points[i] - points[j]) >= _MIN_DISTANCE
            for i, j in ((0, 1), (0, 2), (1, 2))
        ):
            return points[0], points[1], points[2]
