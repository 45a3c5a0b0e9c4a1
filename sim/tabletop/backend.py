"""A compiled scene: the shared MjModel with its controller, renderer and state queries.

This module imports robosuite and mujoco; import it only where a simulator is really built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.failures import AT_REST, FALL, FailureTracker
from sim.gl import ensure_backend

ensure_backend()
from sim.tabletop import scene as scenes  # noqa: E402  (MUJOCO_GL must be set before mujoco is imported)

import mujoco  # noqa: E402  isort: skip

from sim.tabletop.controller import OSC, ControlState  # noqa: E402
from sim.tabletop.tasks import (  # noqa: E402
    LIFT_HEIGHT,
    MAX_OBJECTS,
    OBJECTS,
    REACHED,
    TABLE_HEIGHT,
    TASKS,
    SceneSpec,
    Task,
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


class _SceneView:
    """Live positions of one slot; see `sim.tabletop.demonstrator.SceneState`."""

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


class TaskFacts:
    """What `sim.failures.FailureTracker` asks about one slot's episode of a task."""

    def __init__(self, scene: CompiledScene, task: Task, data: mujoco.MjData) -> None:
        self._scene, self._task, self._data = scene, task, data
        # views, live
        self._position = {name: data.xpos[scene.body[name]] for name in (task.target, *task.others)}
        self._hand = data.site_xpos[scene.controller.site]

    def height(self, name: str) -> float:
        return float(self._position[name][2])

    def near(self, name: str) -> bool:
        """Within `REACHED` of the point where the fingers close on it."""
        (x, y, z), (a, b, c) = self._position[name].tolist(), self._hand.tolist()
        return (x - a) ** 2 + (y - b) ** 2 + (z + OBJECTS[name].grasp_height - c) ** 2 < REACHED**2

    def fingers(self, name: str) -> int:
        left, right, any_finger = self._scene.touches(self._data, name)
        return 2 if left and right else int(any_finger)

    def settled(self, name: str) -> bool:
        return self._scene.at_rest(self._data, name)

    def at_goal(self, name: str) -> bool:
        return self._scene.at_goal(self._task, self._data)


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
        self._qvel = {name: int(self.model.jnt_dofadr[j]) for name, j in joints.items()}
        self._finger = np.array(
            [env.sim.model.get_joint_qpos_addr(j) for j in robot.gripper_joints]
        )
        pads = robot.gripper.important_geoms
        self._pads = [
            {env.sim.model.geom_name2id(g) for g in pads[side]}
            for side in ("left_fingerpad", "right_fingerpad")
        ]
        self._fingers = {
            env.sim.model.geom_name2id(g)
            for side in ("left_finger", "right_finger")
            for g in pads[side]
        }
        self._geoms = {
            name: set(np.flatnonzero(self.model.geom_bodyid == body).tolist())
            for name, body in self.body.items()
        }
        self._rest_qpos = np.array(robot.init_qpos)
        self._gripper_rest = np.array(robot.gripper.init_qpos)
        self._gl = gl
        gl.make_current()
        self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._drawing = mujoco.MjvScene(self.model, maxgeom=1000)
        env.look.edit_drawing(self._drawing)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[1] = 1
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera_id = {self.model.camera(i).name: i for i in range(self.model.ncam)}
        self._perturb = mujoco.MjvPerturb()
        self._viewport = mujoco.MjrRect(0, 0, size, size)
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
        q, v = self._qpos[name], self._qvel[name]
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
    def view(self, data: mujoco.MjData) -> _SceneView:
        return _SceneView(self, data)

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

    def touches(self, data: mujoco.MjData, name: str) -> tuple[bool, bool, bool]:
        """Whether the left pad, the right pad, and any part of a finger touch the object."""
        geoms, left, right, any_finger = self._geoms[name], False, False, False
        for a, b in data.contact.geom.tolist():
            if a in geoms or b in geoms:
                other = b if a in geoms else a
                left |= other in self._pads[0]
                right |= other in self._pads[1]
                any_finger |= other in self._fingers
        return left, right, any_finger

    def height(self, data: mujoco.MjData, name: str) -> float:
        """How far (m) the object's origin is above its place when it stands on the table."""
        return float(data.xpos[self.body[name], 2]) - TABLE_HEIGHT - OBJECTS[name].rest_height

    @property
    def zone(self) -> tuple[float, float, float]:
        """x, y and half-width (m) of the square that things are placed in."""
        if self.spec.zone is None:
            raise ValueError(f"scene {self.spec.name} has no zone: nothing can be placed there")
        return self.spec.zone

    def goal(self, task: Task, data: mujoco.MjData) -> np.ndarray | None:
        """Where the target's origin should come to rest (m), or None for lifting tasks."""
        rest = OBJECTS[task.target].rest_height
        if task.goal is not None:
            return data.xpos[self.body[task.goal]] + np.array(
                [0.0, 0.0, OBJECTS[task.goal].top + rest]
            )
        if task.kind == "place":
            x, y, _ = self.zone
            return np.array([x, y, TABLE_HEIGHT + rest])
        return None

    def success(self, task: Task, data: mujoco.MjData) -> bool:
        """Lifted high enough; or at rest within reach of its goal and let go of."""
        if not self.at_goal(task, data):
            return False
        return task.kind == "lift" or (
            self.at_rest(data, task.target) and not self.touches(data, task.target)[2]
        )

    def at_goal(self, task: Task, data: mujoco.MjData) -> bool:
        """Whether the target is high enough, or within reach of its goal."""
        goal = self.goal(task, data)
        if goal is None:
            return self.height(data, task.target) >= LIFT_HEIGHT
        offset = np.abs(goal - data.xpos[self.body[task.target]])
        reach = self.zone[2] if task.kind == "place" else 0.025
        return bool(max(offset[0], offset[1]) <= reach and offset[2] <= 0.008)

    def at_rest(self, data: mujoco.MjData, name: str) -> bool:
        v = self._qvel[name]
        return bool(np.max(np.abs(data.qvel[v : v + 3])) < AT_REST)

    def tracker(self, task: Task, data: mujoco.MjData) -> FailureTracker:
        """For the episode that starts in ``data``, which it goes on watching."""
        fall = None if task.kind == "lift" else FALL
        return FailureTracker(TaskFacts(self, task, data), {task.target: fall}, task.others)

    def privileged(self, task: Task, data: mujoco.MjData, time_left: float) -> np.ndarray:
        """float32 [`PRIVILEGED_DIM`]: see `sim.tabletop.tasks`; lengths in m, heights above the
        table, target first."""
        table = np.array([0.0, 0.0, TABLE_HEIGHT])
        eef = data.site_xpos[self.controller.site].copy()
        velocity = np.empty(6)
        mujoco.mj_objectVelocity(
            self.model, data, mujoco.mjtObj.mjOBJ_SITE, self.controller.site, velocity, 0
        )
        parts = [eef - table, velocity[3:], [self.gripper_open(data), time_left]]
        for name in (task.target, *task.others):
            body, v = self.body[name], self._qvel[name]
            position, rotation = data.xpos[body], data.xmat[body]
            yaw = np.arctan2(rotation[3], rotation[0])
            parts += [position - table, position - eef, data.qvel[v : v + 3]]
            parts.append([self.height(data, name), np.cos(yaw), np.sin(yaw)])
        parts.append(np.zeros(12 * (MAX_OBJECTS - 1 - len(task.others))))
        target, goal = data.xpos[self.body[task.target]], self.goal(task, data)
        parts += [np.zeros(4)] if goal is None else [goal - target, [1.0]]
        grasp = target + np.array([0.0, 0.0, OBJECTS[task.target].grasp_height])
        left, right, _ = self.touches(data, task.target)
        reached, lifted = (
            np.linalg.norm(grasp - eef) < REACHED,
            self.height(data, task.target) > 0.01,
        )
        parts.append([float(name == task.task_id) for name in TASKS])
        parts.append(
            [float(f) for f in (reached, left and right, lifted, self.success(task, data))]
        )
        return np.concatenate(parts).astype(np.float32)

    # ------------------------------------------------------------------------------------ rendering
    def render(self, data: mujoco.MjData, cameras: list[str]) -> dict[str, np.ndarray]:
        """Upright RGB pictures uint8 [H W 3] per camera."""
        images = {}
        self._gl.make_current()
        # scenes share the GL context
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        for name in cameras:
            self._camera.fixedcamid = self._camera_id[name]
            mujoco.mjv_updateScene(
                self.model,
                data,
                self._option,
                self._perturb,
                self._camera,
                mujoco.mjtCatBit.mjCAT_ALL,
                self._drawing,
            )
            mujoco.mjr_render(self._viewport, self._drawing, self._context)
            pixels = np.empty((self.size, self.size, 3), dtype=np.uint8)
            mujoco.mjr_readPixels(pixels, None, self._viewport, self._context)
            images[name] = np.ascontiguousarray(pixels[::-1])
        return images

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()
