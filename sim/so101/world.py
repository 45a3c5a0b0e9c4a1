"""The arm at its table in MuJoCo: a cube, a bin and a marked square, two cameras (see
`sim.so101.tasks`).

This module imports mujoco, and needs no OpenGL until a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from sim.failures import AT_REST, FALL, FailureTracker
from sim.gl import free_context, make_context
from sim.light import drop_costly_effects, reduce_to_hull, skip_costly_passes
from sim.pictures import Pictures
from sim.so101 import tasks
from sim.so101.joints import Units
from sim.so101.model import PADS, Arm, Joints, scene
from sim.so101.tasks import BIN, BIN_HALF, BIN_WALL, HALF, MARK, MARK_HALF, Task

CUBE = "cube"
HOME = (0.0, -45.0, 45.0, 90.0, 0.0, 60.0)  # lerobot's numbers: above the table, hand down, open
INNER = 0.0064  # from the gripper's frame to the fixed jaw's inner face
DRAWN, _SOLID = 1, 8  # the group of what `Pictures` draws; a bit that no other geom has
_HULL = 60  # vertices of a drawn part
_BLUE, _RED, _GREY = (0.15, 0.3, 0.9, 1.0), (0.85, 0.1, 0.1, 1.0), (0.55, 0.6, 0.65, 1.0)


def table() -> Any:
    """The compiled model: `sim.so101.model.scene` with what lies on the table, drawn by convex
    hulls."""
    spec = scene()
    for mesh in spec.meshes:
        mesh.maxhullvert = _HULL
    for geom in spec.geoms:  # (MuJoCo computes hulls of what collides alone)
        if geom.type == mujoco.mjtGeom.mjGEOM_MESH and geom.group == 2:
            geom.contype, geom.group = _SOLID, DRAWN
    box, world = mujoco.mjtGeom.mjGEOM_BOX, spec.worldbody
    world.add_geom(
        name="table", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0.6, 0.6, 0.05], group=DRAWN,
        rgba=[0.72, 0.68, 0.6, 1.0], friction=[0.8, 0.01, 0.0005],
    )  # fmt: skip
    world.add_geom(
        name="mark", type=box, size=[MARK_HALF, MARK_HALF, 0.0005], pos=[*MARK, 0.0], group=DRAWN,
        rgba=_BLUE, contype=0, conaffinity=0,
    )  # fmt: skip
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        across = [0.002 if x else BIN_HALF, 0.002 if y else BIN_HALF, BIN_WALL / 2]
        place = [BIN[0] + x * BIN_HALF, BIN[1] + y * BIN_HALF, BIN_WALL / 2]
        world.add_geom(type=box, size=across, pos=place, group=DRAWN, rgba=_GREY)
    cube = world.add_body(name=CUBE, pos=[0.2, 0.0, HALF])
    cube.add_freejoint(name=CUBE)
    cube.add_geom(
        name=CUBE, type=box, size=[HALF] * 3, group=DRAWN, rgba=_RED, mass=0.03,
        friction=[1.0, 0.02, 0.0005], condim=4,
    )  # fmt: skip
    _add_cameras(spec)
    model = spec.compile()
    for owner in (model.geom_contype, model.body_contype):
        owner[:] &= ~_SOLID
    drop_costly_effects(model)
    for mesh in range(model.nmesh):
        reduce_to_hull(model, mesh)
    return model


def _add_cameras(spec: Any) -> None:
    """``front`` looks at table and arm from ahead of it, ``wrist`` along the jaws from their side."""
    front = spec.worldbody.add_camera(name="front", pos=[0.48, 0.0, 0.36], fovy=54.0)
    front.quat = _looking(np.array([-0.30, 0.0, -0.36]))
    wrist = spec.body("gripper").add_camera(name="wrist", pos=[0.01, 0.08, -0.02], fovy=75.0)
    wrist.quat = _looking(np.array([0.0, -0.08, -0.08]), up=(1.0, 0.0, 0.0))


def _looking(ahead: np.ndarray, up: Sequence[float] = (0.0, 0.0, 1.0)) -> np.ndarray:
    """Quaternion (wxyz) of a camera, which looks along its own -z."""
    z = -ahead / np.linalg.norm(ahead)
    x = np.cross(up, z)
    x /= np.linalg.norm(x)
    quaternion = np.empty(4)
    mujoco.mju_mat2Quat(quaternion, np.stack([x, np.cross(z, x), z], axis=1).ravel())
    return quaternion


class Scene:
    """The compiled table, once per process, and what draws it; methods take the `MjData` they
    work on."""

    def __init__(self) -> None:
        self.model = table()
        data = mujoco.MjData(self.model)
        self._servos = Joints(self.model, data)
        self.units = Units(self._servos.ranges)
        self.site = self.model.site("gripperframe").id
        self.cube = self.model.body(CUBE).id
        joint = self.model.joint(CUBE)
        self.cube_at, self.cube_speed_at = int(joint.qposadr[0]), int(joint.dofadr[0])
        self._pads = [self.model.geom(name).id for name in PADS]
        self._cube_geom = self.model.geom(CUBE).id
        self._pictures: Pictures | None = None

    def power(self) -> None:
        """Its servos pull again, whatever somebody has made of them."""
        self._servos.power(np.ones(len(HOME)), np.ones(len(HOME)))

    def render(self, data: Any, cameras: Sequence[str], size: int) -> dict[str, np.ndarray]:
        """Upright RGB pictures uint8 [size, size, 3]."""
        if self._pictures is None:
            self.model.vis.global_.offwidth = self.model.vis.global_.offheight = size
            self._gl = make_context(size)
            self._pictures = Pictures(self.model, size, self._gl)
            skip_costly_passes(self._pictures.drawing)
        return self._pictures.render(data, cameras)

    def touches(self, data: Any) -> tuple[bool, bool]:
        """Whether the fixed and the moving jaw touch the cube."""
        found = {
            a + b - self._cube_geom
            for a, b in data.contact.geom.tolist()
            if self._cube_geom in (a, b)
        }
        return self._pads[0] in found, self._pads[1] in found

    def close(self) -> None:
        if self._pictures is not None:
            self._pictures.close()
            self._pictures = None
            free_context(self._gl)


class World:
    """One table with an arm, whose goals are lerobot's numbers."""

    def __init__(self, compiled: Scene) -> None:
        self.scene = compiled
        compiled.power()
        self.arm = Arm(compiled.model)
        self.data, self.joints = self.arm.data, self.arm.joints
        self.goal = np.array(HOME)

    def begin(self, cube: np.ndarray) -> None:
        """Arm at `HOME`, the cube at [x, y, yaw], all at rest."""
        mujoco.mj_resetData(self.scene.model, self.data)
        self.goal = np.array(HOME)
        self.joints.put(self.scene.units.radians(self.goal))
        self.put(cube)

    def put(self, cube: np.ndarray) -> None:
        """The cube at rest at [x, y, yaw] (m, rad)."""
        s, (x, y, yaw) = self.scene, cube
        place = x, y, HALF, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)
        self.data.qpos[s.cube_at : s.cube_at + 7] = place
        self.data.qvel[s.cube_speed_at : s.cube_speed_at + 6] = 0.0
        mujoco.mj_forward(s.model, self.data)

    def control_step(self, action: np.ndarray, most: float, seconds: float) -> None:
        """The goal goes towards ``action`` [6] by at most ``most`` (degrees, percent)."""
        self.goal = self.goal + np.clip(action - self.goal, -most, most)
        self.joints.aim(self.scene.units.radians(self.goal))
        self.arm.advance(seconds)

    # ---------------------------------------------------------------------------------- what is seen
    def told(self) -> np.ndarray:
        """The joints [6] as lerobot tells them."""
        return self.scene.units.told(self.joints.angles)

    @property
    def frame(self) -> np.ndarray:
        """The gripper's frame [3, 3] (columns): out of the hand, across the jaws' width, to the
        moving jaw."""
        return self.data.site_xmat[self.scene.site].reshape(3, 3)

    @property
    def hand(self) -> np.ndarray:
        """Where the middle of a held cube is [3]."""
        return self.data.site_xpos[self.scene.site] + (INNER + HALF) * self.frame[:, 2]

    @property
    def cube(self) -> np.ndarray:
        return self.data.xpos[self.scene.cube].copy()

    @property
    def yaw(self) -> float:
        """The cube's, of its four the one nearest to 0 (rad)."""
        turned = self.data.xmat[self.scene.cube].reshape(3, 3)
        angle = float(np.arctan2(turned[1, 0], turned[0, 0]))
        return (angle + np.pi / 4) % (np.pi / 2) - np.pi / 4

    @property
    def velocity(self) -> np.ndarray:
        """The cube's (m/s) [3]."""
        at = self.scene.cube_speed_at
        return self.data.qvel[at : at + 3].copy()

    def touches(self) -> tuple[bool, bool]:
        return self.scene.touches(self.data)


class Judge:
    """Says of one episode whether it is done, and how it failed: the `Facts` of `FailureTracker`,
    whose only object is the cube."""

    def __init__(self, task: Task, world: World) -> None:
        self.task, self.world, self.goal = task, world, tasks.goal(task.kind)
        fall = None if task.kind == "lift" else FALL
        self.tracker = FailureTracker(self, {CUBE: fall}, ())

    def success(self) -> bool:
        """Lifted high enough; in the bin, at rest and let go of; or at rest on the mark."""
        if not self.at_goal(CUBE):
            return False
        free = self.task.kind == "push" or not any(self.world.touches())
        return self.task.kind == "lift" or (self.settled(CUBE) and free)

    def height(self, name: str) -> float:
        return float(self.world.cube[2]) - HALF

    def near(self, name: str) -> bool:
        return float(np.linalg.norm(self.world.cube - self.world.hand)) < tasks.REACHED

    def fingers(self, name: str) -> int:
        return sum(self.world.touches())

    def settled(self, name: str) -> bool:
        return float(np.abs(self.world.velocity).max()) < AT_REST

    def at_goal(self, name: str) -> bool:
        if self.goal is None:
            return self.height(name) >= tasks.LIFT_HEIGHT
        away = np.abs(self.world.cube - self.goal)
        most = BIN_HALF - HALF / 2 if self.task.kind == "bin" else MARK_HALF
        return bool(away[:2].max() <= most and away[2] <= HALF)

    def privileged(self, time_left: float) -> np.ndarray:
        """float32 [`tasks.PRIVILEGED_DIM`]."""
        w = self.world
        speed = np.empty(6)
        mujoco.mj_objectVelocity(
            w.scene.model, w.data, mujoco.mjtObj.mjOBJ_SITE, w.scene.site, speed, 0
        )
        way = np.zeros(4) if self.goal is None else np.append(self.goal - w.cube, 1.0)
        stages = self.near(CUBE), all(w.touches()), self.height(CUBE) > 0.01, self.success()
        parts = [
            w.hand, speed[3:], [w.told()[5] / 100.0, time_left], w.cube, w.cube - w.hand, w.velocity,
            [np.cos(w.yaw), np.sin(w.yaw)], way,
            [float(name == self.task.spec.task_id) for name in tasks.TASKS],
            [float(flag) for flag in stages],
        ]  # fmt: skip
        return np.concatenate(parts).astype(np.float32)
