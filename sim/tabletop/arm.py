"""The suite's Panda as a free-running arm: targets come at any time, and time goes on whether or
not they do.

A session names this class (`real.named.WORLDS`); it provides what `real.robots.world.World` asks
for. The controller is the one that policies were trained with (`sim.tabletop.controller.OSC`, an
impedance of 150 per second squared, critically damped), tracking a given pose instead of one that
is renewed 20 times a second. A session that sets measured pose + action every 50 ms does what the
simulator's own control steps do, but that the pose is measured 2 ms earlier. Forces at the hand are
those that a test pushes with; contacts are not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.tabletop.controller import GRIPPER_SPEED, KP, _torques, actuate
from sim.tabletop.demonstrator import Demonstrator
from sim.tabletop.simulator import TabletopConfig, TabletopSimulator
from sim.tabletop.tasks import LIFT_HEIGHT
from vla_rl import splits
from vla_rl.bounds import Bounded, bound
from vla_rl.specs import EpisodeSpec

BRAKE = 40.0  # 1/s: the rate at which its brake takes speed away
SUBSTEP = 0.002


@dataclass
class ArmConfig(Bounded, place="robot.options"):
    """As `TabletopConfig`: the first of ``tasks`` is what a session begins with. ``split`` is that
    of its initial states and instructions."""

    tasks: list[str] = field(default_factory=lambda: ["lift_cube"])
    controller: str = "osc_position"
    cameras: list[str] = field(default_factory=lambda: ["agentview", "robot0_eye_in_hand"])
    camera_size: int = 84
    look: str = "light"
    split: str = bound("train", choices=splits.SPLITS)


class TabletopArm:
    """One arm and its table. Not thread-safe; `pictures` renders."""

    kind, holds = "cartesian", True
    # stiffness over damping: metres per second for each metre ahead
    gain = float(np.sqrt(KP) / 2.0)

    def __init__(self, config: ArmConfig | None = None) -> None:
        import mujoco

        self.config = config or ArmConfig()
        x = self.config
        self._mujoco = mujoco
        self._simulator = TabletopSimulator(
            TabletopConfig(x.tasks, x.controller, x.cameras, x.camera_size, x.look)
        )
        self.embodiment = self._simulator.embodiment
        held_out = x.split == "held_out"
        self.tasks: dict[str, dict[str, Any]] = {
            t.task_id: {
                "instruction": (t.held_out_instructions if held_out else t.instructions)[0],
                "horizon": t.horizon,
                "scene": self._simulator._task[t.task_id].scene,
            }
            for t in self._simulator.tasks
        }
        self._count = 0
        self._expert: Demonstrator | None = None
        self.reset({})
        low, high = self._osc.model.jnt_range[self._osc.model.dof_jntid[self._osc.dofs]].T
        self.own: dict[str, Any] = {
            "speed": 0.5,
            "acceleration": 30.0,
            "jerk": 6000.0,
            "step": 0.06,
            "rotation_speed": 4.0,
            "rotation_acceleration": 300.0,
            "rotation_jerk": 60000.0,
            "rotation_step": 0.6,
            "box": ((-0.4, -0.45, 0.79), (0.35, 0.45, 1.4)),
            "joint_low": tuple(low),
            "joint_high": tuple(high),
            "joint_speed": 2.6,
            "force": 80.0,
            "torque": 25.0,
        }

    # ------------------------------------------------------------------------------------ the world
    def reset(self, episode: dict[str, Any]) -> None:
        """``task`` is "TASK" or "TASK/NUMBER", and may go on with ": INSTRUCTION". The number is
        the initial state's, without one they are counted up; another task than those of `tasks`
        stands for the first. With ``stay`` only the task changes, to one of the same scene."""
        place = str(episode.get("task", "")).partition(":")[0]
        name, _, number = place.partition("/")
        chosen = name if name in self.tasks else next(iter(self.tasks))
        if episode.get("stay"):
            self._task, self._held, self._expert = self._simulator._task[chosen], 0, None
            return
        if number.isdigit():
            self._count = int(number)
        spec = EpisodeSpec(chosen, self._count, split=str(episode.get("split", self.config.split)))
        self._simulator.start(0, spec)
        self._count += 1
        self._task = self._simulator._task[chosen]
        self._scene = self._simulator._scene(self._task.scene)
        self._osc, self._data = self._scene.controller, self._simulator.physics(0)
        self._control = self._simulator._slots[0].control
        self._held, self._expert = 0, None
        self._limp = False
        self._grip = 0.0
        self._braking = True
        self._hold: np.ndarray | None = None
        self._jac = np.zeros((2, 3, self._osc.model.nv))
        self._out = np.zeros(len(self._osc.dofs))
        self._force: np.ndarray = np.zeros(3)

    def aim(
        self, position: np.ndarray, quaternion: np.ndarray, joints: np.ndarray, gripper: float
    ) -> None:
        self._braking, self._hold = False, None
        self._control.goal_position[:] = position
        if self._osc.pose and len(quaternion) == 4:
            turned = np.empty(9)
            self._mujoco.mju_quat2Mat(turned, np.asarray(quaternion, dtype=np.float64))
            self._control.goal_rotation[:] = turned.reshape(3, 3)
        self._grip = gripper

    def brake(self) -> None:
        self._braking, self._grip = True, 0.0

    def limp(self, on: bool) -> None:
        self._limp = on

    def push(self, force: np.ndarray) -> None:
        self._force = np.asarray(force, dtype=float)

    def advance(self, seconds: float) -> None:
        for _ in range(max(1, round(seconds / SUBSTEP))):
            self._substep()
        self._held = self._held + 1 if self._scene.judge.success(self._task, self._data) else 0

    def _substep(self) -> None:
        osc, data, model = self._osc, self._data, self._osc.model
        osc.step1(model, data)
        if self._limp:
            self._out[:] = data.qfrc_bias[osc.dofs]
        elif self._braking:
            self._brake_torques()
        else:
            self._mujoco.mj_jacSite(model, data, self._jac[0], self._jac[1], osc.site)
            _torques(
                data.qM,
                osc._row_address,
                osc._parent,
                osc.dofs,
                osc.qpos_index,
                data.qpos,
                data.qvel,
                data.qfrc_bias,
                self._jac[0],
                self._jac[1],
                data.site_xpos[osc.site],
                data.site_xmat[osc.site],
                self._control.goal_position,
                self._control.goal_rotation,
                osc.rest,
                osc._limits,
                self._out,
            )
        speed = np.array([-GRIPPER_SPEED, GRIPPER_SPEED]) * np.sign(self._grip)
        actuate(
            self._control.gripper,
            speed,
            osc._gripper_bias,
            osc._gripper_weight,
            self._out,
            osc.actuators,
            osc.gripper,
            data.ctrl,
        )
        if self._force.any():
            body = model.site_bodyid[osc.site]
            data.xfrc_applied[body, :3] = self._force
        osc.step2(model, data)
        data.xfrc_applied[:] = 0.0

    def _brake_torques(self) -> None:
        """Every joint's speed decays at the rate `BRAKE`; then it keeps the angles that it came
        to rest at."""
        osc, data = self._osc, self._data
        inertia = np.zeros((osc.model.nv, osc.model.nv))
        self._mujoco.mj_fullM(osc.model, inertia, data.qM)
        speed = data.qvel[osc.dofs]
        wanted = -BRAKE * speed
        if self._hold is None and float(np.max(np.abs(speed))) < 0.01:
            self._hold = data.qpos[osc.qpos_index].copy()
        if self._hold is not None:
            wanted += (BRAKE / 2.0) ** 2 * (self._hold - data.qpos[osc.qpos_index])
        torque = inertia[np.ix_(osc.dofs, osc.dofs)] @ wanted + data.qfrc_bias[osc.dofs]
        self._out[:] = np.clip(torque, osc._limits[:, 0], osc._limits[:, 1])

    def read(self) -> dict[str, Any]:
        osc, data = self._osc, self._data
        quaternion = np.empty(4)
        self._mujoco.mju_mat2Quat(quaternion, data.site_xmat[osc.site])
        jacobian = np.zeros((2, 3, osc.model.nv))
        self._mujoco.mj_jacSite(osc.model, data, jacobian[0], jacobian[1], osc.site)
        return {
            "position": data.site_xpos[osc.site].copy(),
            "quaternion": quaternion,
            "joints": data.qpos[osc.qpos_index].copy(),
            "joint_velocity": data.qvel[osc.dofs].copy(),
            "gripper": self._scene.gripper_open(data),
            "wrench": np.concatenate([self._force, np.zeros(3)]),
            "proprio": self._scene.proprio(data),
            "jacobian": jacobian.reshape(6, -1)[:, osc.dofs],
        }

    def success(self) -> bool:
        return self._held > 0

    def demonstrate(self, anew: bool) -> np.ndarray:
        """As `real.robots.world.Coach`: what the suite's scripted expert does in this control
        step."""
        if anew or self._expert is None:
            self._expert = self._simulator.demonstrator(self._task.task_id)
        return self._expert.act(self._simulator.state(0))

    def progress(self) -> float:
        """Half of it is to come near the object, half to lift it by `LIFT_HEIGHT`; to stack or
        place it 0.3 and 0.2, and the rest to bring it near its goal, where it counts as lifted (it
        is to come down there)."""
        state = self._simulator.state(0)
        target = state.position(self._task.target)
        near = 1.0 - min(float(np.linalg.norm(target - state.eef_position)) / 0.3, 1.0)
        lifted = min(
            max(self._scene.judge.height(self._data, self._task.target) / LIFT_HEIGHT, 0.0), 1.0
        )
        goal = self._scene.judge.goal(self._task, self._data)
        if goal is None:
            return 0.5 * near + 0.5 * lifted
        across = float(np.linalg.norm((goal - target)[:2]))
        away = float(np.linalg.norm(goal - target))
        lifted = max(lifted, 1.0 - min(across / 0.1, 1.0))
        return 0.3 * near + 0.2 * lifted + 0.5 * (1.0 - min(away / 0.4, 1.0))

    def pictures(self) -> dict[str, np.ndarray]:
        return self._scene.render(self._data, self.config.cameras)

    def close(self) -> None:
        self._simulator.close()
