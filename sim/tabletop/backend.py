"""A compiled scene: the shared MjModel with its controller and states.

This module imports robosuite and mujoco; import it only where a simulator is really built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.gl import ensure_backend

ensure_backend()
from sim.tabletop import scene as scenes  # noqa: E402  (MUJOCO_GL must be set before mujoco is imported)

import mujoco  # noqa: E402  isort: skip

from sim.pictures import Pictures  # noqa: E402
from sim.tabletop.controller import OSC, ControlState  # noqa: E402
from sim.tabletop.judge import Fingers, Judge  # noqa: E402
from sim.tabletop.tasks import (  # noqa: E402
    OBJECTS,
    TABLE_HEIGHT,
    SceneSpec,
)

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_SETTLE_STEPS = 4
_HOME_STEPS = 40
_GRIPPER_TRAVEL = 0.08  # metres between the fingers when open


@dataclass
class Snapshot:
    """A physics state to start from, with the controller's own state."""

    physics: np.ndarray
    control: ControlState


class SceneView:
    """What a scripted expert looks at in one slot, live; positions in metres, world frame;
    ``gripper_open`` 0 ... 1."""

    def __init__(self, scene: CompiledScene, data: mujoco.MjData) -> None:
        self._scene, self._data = scene, data

    @property
    def eef_position(self) -> np.ndarray:
        return self._data.site_xpos[self._scene.controller.site].copy()

    @property
    def gripper_open(self) -> float:
        return self._scene.gripper_open(self._data)

    def position(self, name: str) -> np.ndarray:
        return self._data.xpos[self._scene.body[name]].copy()


class CompiledScene:
    """One scene, compiled once per process. Methods take the MjData of the slot they work on."""

    def __init__(self, spec: SceneSpec, controller: str, look: str, size: int, gl: Any) -> None:
        env = scenes.make_env(spec.name, controller, look=look, look_size=size)
        env.reset()
        robot = env.robots[0]
        self.spec, self.name, self.size = spec, spec.name, size
        self.model: mujoco.MjModel = env.sim.model._model
        self.controller = OSC(
            self.model,
            robot.robot_joints,
            robot.robot_model.actuators,
            robot.gripper.actuators,
            robot.gripper.important_sites["grip_site"],
            robot.init_qpos,
            pose=controller == "osc_pose",
        )
        self.body = {
            name: env.sim.model.body_name2id(env.objects[name].root_body) for name in spec.objects
        }
        joints = {
            name: env.sim.model.joint_name2id(env.objects[name].joints[0]) for name in spec.objects
        }
        self._qpos = {name: int(self.model.jnt_qposadr[j]) for name, j in joints.items()}
        self.qvel = {name: int(self.model.jnt_dofadr[j]) for name, j in joints.items()}
        self._finger = np.array(
            [env.sim.model.get_joint_qpos_addr(j) for j in robot.gripper_joints]
        )
        self.judge = Judge(self, _fingers_of(env))
        self._rest_qpos = np.array(robot.init_qpos)
        self._gripper_rest = np.array(robot.gripper.init_qpos)
        self._pictures = Pictures(self.model, size, gl)
        env.look.edit_drawing(self._pictures.drawing)
        self._home = self._settle_home()

    # ---------------------------------------------------------------------------- states and resets
    def new_data(self) -> mujoco.MjData:
        return mujoco.MjData(self.model)

    def new_control_state(self) -> ControlState:
        return ControlState()

    def _settle_home(self) -> Snapshot:
        """The robot's rest posture with the hand pointing down and the gripper open; objects
        parked."""
        data = self.new_data()
        mujoco.mj_resetData(self.model, data)
        data.qpos[self.controller.qpos_index] = self._rest_qpos
        data.qpos[self._finger] = self._gripper_rest
        for index, name in enumerate(self.spec.objects):
            self._place(
                data,
                name,
                np.array([-0.1 + 0.15 * index, 0.3, TABLE_HEIGHT + OBJECTS[name].rest_height, 0.0]),
            )
        mujoco.mj_forward(self.model, data)
        control = ControlState()
        start = data.site_xpos[self.controller.site].copy()
        hold = np.zeros(self.controller.arm_dim + 1)
        hold[-1] = -1.0
        for _ in range(_HOME_STEPS):
            hold[:3] = np.clip((start - data.site_xpos[self.controller.site]) / 0.05, -1.0, 1.0)
            self.controller.control_step(data, control, hold)
        data.qvel[:] = 0.0
        return self._snapshot(data, control)

    def settle(self, poses: dict[str, np.ndarray]) -> Snapshot:
        """A settled state with objects at ``poses`` {name: [x, y, z, yaw]} and the robot at
        home."""
        data, control = self.new_data(), ControlState()
        self.restore(data, control, self._home)
        for name, pose in poses.items():
            self._place(data, name, pose)
        data.qacc_warmstart[:] = 0.0
        hold = np.zeros(self.controller.arm_dim + 1)
        hold[-1] = -1.0
        for _ in range(_SETTLE_STEPS):
            self.controller.control_step(data, control, hold)
        data.time = 0.0
        return self._snapshot(data, control)

    def _place(self, data: mujoco.MjData, name: str, pose: np.ndarray) -> None:
        q, v = self._qpos[name], self.qvel[name]
        data.qpos[q : q + 3] = pose[:3]
        data.qpos[q + 3 : q + 7] = np.cos(pose[3] / 2), 0.0, 0.0, np.sin(pose[3] / 2)
        data.qvel[v : v + 6] = 0.0

    def _snapshot(self, data: mujoco.MjData, control: ControlState) -> Snapshot:
        physics = np.empty(mujoco.mj_stateSize(self.model, _STATE))
        mujoco.mj_getState(self.model, data, physics, _STATE)
        kept = ControlState()
        kept.copy_from(control)
        return Snapshot(physics, kept)

    def restore(self, data: mujoco.MjData, control: ControlState, snapshot: Snapshot) -> None:
        mujoco.mj_resetData(self.model, data)
        mujoco.mj_setState(self.model, data, snapshot.physics, _STATE)
        mujoco.mj_forward(self.model, data)
        control.copy_from(snapshot.control)

    # -------------------------------------------------------------------------------------- queries
    def view(self, data: mujoco.MjData) -> SceneView:
        return SceneView(self, data)

    def gripper_open(self, data: mujoco.MjData) -> float:
        a, b = data.qpos[self._finger]
        return float(min(max((a - b) / _GRIPPER_TRAVEL, 0.0), 1.0))

    def proprio(self, data: mujoco.MjData) -> np.ndarray:
        """float32 [4] or [8]: hand position (m), gripper opening (0 ... 1), with osc_pose the
        quaternion (xyzw)."""
        parts = [*data.site_xpos[self.controller.site], self.gripper_open(data)]
        if self.controller.pose:
            quaternion = np.empty(4)
            mujoco.mju_mat2Quat(quaternion, data.site_xmat[self.controller.site])
            parts += [*quaternion[1:], quaternion[0]]
        return np.array(parts, dtype=np.float32)

    # ------------------------------------------------------------------------------------ rendering
    def render(self, data: mujoco.MjData, cameras: list[str]) -> dict[str, np.ndarray]:
        """Upright RGB pictures uint8 [H W 3] per camera."""
        return self._pictures.render(data, cameras)

    def close(self) -> None:
        self._pictures.close()


def _fingers_of(env: Any) -> Fingers:
    """The geoms of the gripper of ``env``."""
    geoms, number = env.robots[0].gripper.important_geoms, env.sim.model.geom_name2id
    left, right = ({number(g) for g in geoms[f"{side}_fingerpad"]} for side in ("left", "right"))
    whole = {number(g) for side in ("left_finger", "right_finger") for g in geoms[side]}
    return Fingers(left, right, whole)
