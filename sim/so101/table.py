"""The SO-101 at its table as a free-running arm: a joint's goal comes at any time, and time goes on
whether or not it does.

A session names this class (`real.named.WORLDS`); it provides what `real.robots.world.World` and
`Coach` ask for. There is no serial bus: `sim.so101.bus` has one, for which time is the wall clock's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.so101.joints import CONTROL_HZ
from sim.so101.simulator import SO101Config, SO101Simulator
from sim.so101.tasks import HALF, LIFT_HEIGHT
from vla_rl import splits
from vla_rl.bounds import bound
from vla_rl.specs import EpisodeSpec

if TYPE_CHECKING:
    from sim.so101.demonstrator import Expert

_FAR = 0.2  # m from the cube, where nothing of a task is done


@dataclass
class TableConfig(SO101Config):
    """As `SO101Config`: the first of ``tasks`` is what a session begins with, ``joint_speed`` the
    expert's. ``split`` is that of the initial states and instructions."""

    split: str = bound("train", choices=splits.SPLITS)


class SO101Table:
    """One arm and its table. Not thread-safe; `pictures` renders."""

    kind, gain, holds = "joints", 0.0, False

    def __init__(self, config: TableConfig | None = None) -> None:
        self.config = config or TableConfig()
        self._simulator = SO101Simulator(self.config)
        self.embodiment = self._simulator.embodiment
        held_out = self.config.split == "held_out"
        self.tasks: dict[str, dict[str, Any]] = {
            t.task_id: {
                "instruction": (t.held_out_instructions if held_out else t.instructions)[0],
                "horizon": t.horizon,
                "scene": "table",
            }
            for t in self._simulator.tasks
        }
        self._count = 0
        self.reset({})
        units, ranges = self._world.scene.units, self._world.joints.ranges
        self.own: dict[str, Any] = {
            "joint_low": tuple(units.told(ranges[:, 0])),
            "joint_high": tuple(units.told(ranges[:, 1])),
            "joint_speed": 200.0,
            "joint_acceleration": 2000.0,
            "joint_jerk": 100_000.0,
            "joint_step": 20.0,
            "force": 20.0,
            "torque": 5.0,
        }

    def reset(self, episode: dict[str, Any]) -> None:
        """``task`` is "TASK" or "TASK/NUMBER", and may go on with ": INSTRUCTION". The number is
        the initial state's, without one they are counted up; another task than those of `tasks`
        stands for the first. With ``stay`` only the task changes."""
        name, _, number = str(episode.get("task", "")).partition(":")[0].partition("/")
        chosen = name if name in self.tasks else next(iter(self.tasks))
        if not episode.get("stay"):
            self._count = int(number) if number.isdigit() else self._count
            split = str(episode.get("split", self.config.split))
            self._simulator.start(0, EpisodeSpec(chosen, self._count, split=split))
            self._count += 1
            self._world = self._simulator.world(0)
            self._world.scene.power()
        self._judge = self._simulator.judge(0, chosen)
        self._expert: Expert | None = None
        self._force: np.ndarray = np.zeros(3)

    def aim(
        self, position: np.ndarray, quaternion: np.ndarray, joints: np.ndarray, gripper: float
    ) -> None:
        self._world.goal = np.array(joints, dtype=float)

    def brake(self) -> None:
        """Its servos keep their last goal, which is near."""

    def limp(self, on: bool) -> None:
        pulls = np.full(len(self._world.goal), 0.0 if on else 1.0)
        self._world.joints.power(pulls, np.ones(len(pulls)))

    def push(self, force: np.ndarray) -> None:
        self._force = np.asarray(force, dtype=float)

    def advance(self, seconds: float) -> None:
        w = self._world
        body = w.scene.model.site_bodyid[w.scene.site]
        w.data.xfrc_applied[body, :3] = self._force
        w.joints.aim(w.scene.units.radians(w.goal))
        w.arm.advance(seconds)

    def read(self) -> dict[str, Any]:
        w = self._world
        told = w.told()
        none: np.ndarray = np.empty(0)
        return {
            "position": none,
            "quaternion": none,
            "joints": told,
            "joint_velocity": w.joints.speeds / w.scene.units.scale,
            "gripper": float(np.clip(told[5] / 100.0, 0.0, 1.0)),
            "wrench": np.concatenate([self._force, np.zeros(3)]),
            "proprio": told,
            "jacobian": None,
        }

    def success(self) -> bool:
        return self._judge.success()

    def demonstrate(self, anew: bool) -> np.ndarray:
        """As `real.robots.world.Coach`: where the task's expert would have the joints in this
        control step."""
        if anew or self._expert is None:
            from sim.so101.demonstrator import Expert

            most = self.config.joint_speed / CONTROL_HZ
            self._expert = Expert(self._judge.task, self._world, most)
        return self._expert.act()

    def progress(self) -> float:
        """Half of it is to come near the cube, half to lift it; to bring it somewhere, that is the
        half."""
        cube = self._world.cube
        away = float(np.linalg.norm(cube - self._world.hand))
        near = 1.0 - min(away / _FAR, 1.0)
        if self._judge.goal is None:
            done = (float(cube[2]) - HALF) / LIFT_HEIGHT
        else:
            done = 1.0 - float(np.linalg.norm(cube - self._judge.goal)) / (2 * _FAR)
        return 0.5 * near + 0.5 * float(np.clip(done, 0.0, 1.0))

    def pictures(self) -> dict[str, np.ndarray]:
        config = self.config
        return self._world.scene.render(self._world.data, config.cameras, config.camera_size)

    def close(self) -> None:
        self._simulator.close()
