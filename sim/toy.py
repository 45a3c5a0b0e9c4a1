"""A toy task for tests that learn in seconds: reach the goal of the named colour, seen as a blob in
a tiny image.

Pure numpy. Both goals are visible in every image, so the instruction matters; the goals appear in
the image alone, so vision matters; a random policy hardly ever succeeds, the oracle always does.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.recording import record_demonstration
from sim.slots import instruction
from vla_rl import splits
from vla_rl.bounds import Bounded, bound
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    SlotObservation,
    SlotStep,
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
class _Slot:
    episode: EpisodeSpec
    target: int  # index into COLORS
    instruction: str
    agent: np.ndarray  # [2] metres
    goals: np.ndarray  # [2 colours, 2] metres
    step_seconds: float
    control_step: int = 0
    went_to_other: bool = False


class ToyReach:
    """`vla_rl.interfaces.Simulator`; tasks ``reach_red`` and ``reach_blue``. A failure is
    "wrong_object" once the other goal was reached, else "never_reached".

    Actions [2] are velocities as a fraction of ``max_step`` per control step. Proprio [2] is the
    agent's position (m); privileged [9]: agent, red and blue goal (m, x y each), one-hot target,
    share of time left.
    """

    privileged_dim = 9

    def __init__(self, config: ToyConfig | None = None) -> None:
        self.config = config or ToyConfig()
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
        self._slots: dict[int, _Slot] = {}
        # of the pixels of a row, metres
        self._centres = (np.arange(size) + 0.5) / size * 2 * _VIEW - _VIEW
        self._blob_width = 2 * _VIEW / size  # one pixel

    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Place agent and goals by the episode's task, initial state and split; `ConfigError`
        for an unknown task."""
        names = [task.task_id for task in self.tasks]
        if episode.task_id not in names:
            raise ConfigError(
                f"toy task {episode.task_id!r} is unknown: use one of {', '.join(names)}."
            )
        target = names.index(episode.task_id)
        task = self.tasks[target]
        agent, *goals = _placement(episode)
        self._slots[slot] = _Slot(
            episode, target, instruction(task, episode), agent, np.stack(goals), self._pace(episode)
        )
        if self.config.fault_control_step < 0:
            self._fault(episode)
        return self._observe(slot)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Move by ``actions`` [h 2] until the named goal is reached or time is up."""
        s = self._slots[slot]
        if not np.isfinite(actions).all():
            raise ValueError(f"toy actions must be finite, got {np.asarray(actions).tolist()}")
        rewards = np.zeros(len(actions), dtype=np.float32)
        success, executed, broken = False, 0, False
        for action in np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0):
            if s.control_step == self.config.fault_control_step:
                broken = self._fault(s.episode)
            if s.step_seconds:
                time.sleep(s.step_seconds)
            s.agent = np.clip(s.agent + self.config.max_step * action, -HALF_WIDTH, HALF_WIDTH)
            s.control_step += 1
            executed += 1
            success = bool(
                np.linalg.norm(s.agent - s.goals[s.target]) <= self.config.success_radius
            )
            s.went_to_other |= bool(
                np.linalg.norm(s.agent - s.goals[1 - s.target]) <= self.config.success_radius
            )
            rewards[executed - 1] = float(success)
            if success or s.control_step >= self.config.horizon:
                break
        if broken:
            s.agent = s.agent * np.nan
        truncated = not success and s.control_step >= self.config.horizon
        failure = ("wrong_object" if s.went_to_other else "never_reached") if truncated else ""
        return SlotStep(
            self._observe(slot), rewards, executed, success, truncated, success, failure
        )

    def close(self) -> None:
        self._slots.clear()

    def oracle(self, slot: int, chunk_length: int) -> np.ndarray:
        """Actions float32 [h 2] that take the slot's agent straight to its goal, and then keep
        it there."""
        s = self._slots[slot]
        agent, actions = s.agent, np.zeros((chunk_length, 2), dtype=np.float32)
        for action in actions:
            action[:] = np.clip((s.goals[s.target] - agent) / self.config.max_step, -1.0, 1.0)
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

    def _observe(self, slot: int) -> SlotObservation:
        s = self._slots[slot]
        left = 1.0 - s.control_step / self.config.horizon
        privileged = np.concatenate([s.agent, *s.goals, np.eye(len(COLORS))[s.target], [left]])
        image = np.stack(
            [self._blob(s.goals[0]), self._blob(s.agent), self._blob(s.goals[1])], axis=-1
        )
        return SlotObservation(
            {CAMERA: image},
            s.agent.astype(np.float32),
            s.instruction,
            privileged.astype(np.float32),
        )

    def _blob(self, centre: np.ndarray) -> np.ndarray:
        """A Gaussian spot uint8 [H W], so that its position can be read to a fraction of a
        pixel."""
        x, y = np.nan_to_num(centre, nan=1e3)  # a fault's NaN is out of sight
        row, column = (
            np.exp(-0.5 * ((self._centres - c) / self._blob_width) ** 2) for c in (x, -y)
        )
        return (255 * np.outer(column, row)).round().astype(np.uint8)  # the first row is the top

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


def collect_episode(
    simulator: ToyReach,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with the oracle: noise goes into the executed action, the label stays clean
    (DART).

    ``noise_std`` is the std of the Gaussian, as a share of the action's half-range; ``rng`` draws
    it (default: from the episode's seed). Returns ``images`` {camera: uint8 [T H W 3]}, ``proprio``
    float32 [T p], ``actions`` float32 [T a], ``instruction``, ``success``, ``task_id``,
    ``init_state_id``; row t is what was seen at control step t.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    observation = simulator.start(slot, episode)
    return record_demonstration(
        episode,
        observation,
        act=lambda: simulator.oracle(slot, 1)[0],
        disturb=lambda label: label + noise_std * rng.standard_normal(label.shape),
        execute=functools.partial(simulator.step, slot),
    )


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
