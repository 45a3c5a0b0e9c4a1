"""One slot's physics: both arms, the table and a task's objects in a PhysX scene of its own,
without a renderer.

Nothing here is drawn (see `sim.dualarm.pictures`), so no Vulkan driver is needed. A world is built
anew for every episode, in the same order each time, which takes a few milliseconds and leaves
nothing of the episode before; PhysX's engine stays. This module imports sapien; import it only
where a simulator is really built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import sapien
from sapien import physx

from sim.dualarm import kinematics
from sim.dualarm.kinematics import ARMS, JOINTS, QUARTER
from sim.dualarm.shapes import BASE, FINGER_TRAVEL, LINKS, THINGS, Link, Part, Thing

CONTROL_HZ, PHYSICS_HZ = 20, 240
_BLOCKS = 4  # drive targets move in so many parts within a control step ...
_STEPS = PHYSICS_HZ // CONTROL_HZ // _BLOCKS  # ... of so many physics steps each,
_RAMP = _BLOCKS - 1  # and stand still in the last one
_STIFFNESS, _DAMPING, _FORCE = 3600.0, 120.0, 60.0  # per inertia: 60 rad/s, critically damped; N m
_GRIP_STIFFNESS, _GRIP_DAMPING, _GRIP_FORCE = 1500.0, 30.0, 15.0  # N/m, N s/m, N per finger
_CAP_STIFFNESS, _CAP_DAMPING = 150.0, 2.0  # of a bell's spring
_FRICTION = 1.0
_SETTLE = 25  # physics steps before an episode begins
_TABLE = Part("box", (0.60, 0.45, 0.02), (0.0, 0.0, 0.0), (0.0, 0.15, -0.02))

# From the x axis, which SAPIEN's joints turn about or slide along, to the joint's own axis.
_TO_AXIS = {
    "x": (1.0, 0.0, 0.0, 0.0),
    "y": (np.cos(QUARTER / 2), 0.0, 0.0, np.sin(QUARTER / 2)),
    "-y": (np.cos(QUARTER / 2), 0.0, 0.0, -np.sin(QUARTER / 2)),
    "z": (np.cos(QUARTER / 2), 0.0, -np.sin(QUARTER / 2), 0.0),
}


def about_z(yaw: float) -> list[float]:
    """Quaternion (w, x, y, z) of a turn about z."""
    return [float(np.cos(yaw / 2)), 0.0, 0.0, float(np.sin(yaw / 2))]


def part_pose(part: Part) -> sapien.Pose:
    """Where a part is in its body's frame; SAPIEN's cylinders lie along x."""
    return sapien.Pose(
        part.at, _TO_AXIS[part.axis] if part.kind == "cylinder" else about_z(part.yaw)
    )


class _Builder:
    """Puts arms and things into a scene; whatever lives in it needs this alive."""

    def __init__(self, scene: sapien.Scene) -> None:
        self.scene = scene
        self._material = physx.PhysxMaterial(_FRICTION, _FRICTION, 0.0)
        self._entities: list[Any] = []  # bodies know theirs only weakly

    def _shapes(self, body: Any, parts: tuple[Part, ...], own: int = 0) -> None:
        """Attach the solid parts; bodies that share a bit of ``own`` do not touch each other."""
        for part in parts:
            if part.solid:
                shape = physx.PhysxCollisionShapeBox(part.size, self._material)
                shape.local_pose = part_pose(part)
                if own:
                    shape.set_collision_groups([1, 1, own, 0])
                body.attach(shape)

    def _add(self, name: str, body: Any, pose: sapien.Pose | None = None) -> Any:
        entity = sapien.Entity()
        entity.name = name
        entity.add_component(body)
        if pose is not None:
            entity.set_pose(pose)
        self.scene.add_entity(entity)
        return body

    def fixed(self, name: str, parts: tuple[Part, ...], pose: sapien.Pose) -> Any:
        body = physx.PhysxRigidStaticComponent()
        self._shapes(body, parts)
        return self._add(name, body, pose)

    def arm(self, arm: str) -> Any:
        """Its articulation."""
        own = 1 << (4 + ARMS.index(arm))
        links = {"base": self._link(f"{arm}_base", None, BASE, 1.0, own)}
        for link in LINKS:
            body = links[link.name] = self._link(
                f"{arm}_{link.name}", links[link.parent], link.parts, link.mass, own
            )
            body.disable_gravity = True  # a real arm's controller holds its own weight
            self._connect(body, link)
        articulation = links["base"].articulation
        links["base"].joint.type = "fixed"
        links["base"].entity.set_pose(sapien.Pose(kinematics.base(arm), about_z(QUARTER)))
        for body in links.values():
            self.scene.add_entity(body.entity)
        articulation.set_solver_position_iterations(16)
        return articulation

    def _link(self, name: str, parent: Any, parts: tuple[Part, ...], mass: float, own: int) -> Any:
        body = physx.PhysxArticulationLinkComponent(parent)
        body.name = name
        entity = sapien.Entity()
        entity.name = name
        self._shapes(body, parts, own)
        body.set_mass(mass)
        body.set_inertia(np.full(3, 1.5e-3 * mass, dtype=np.float32))
        entity.add_component(body)
        self._entities.append(entity)
        return body

    def _connect(self, body: Any, link: Link) -> None:
        joint = body.joint
        joint.name = body.name
        joint.type = "prismatic" if link.slides else "revolute"
        joint.pose_in_parent = sapien.Pose(link.at, _TO_AXIS[link.axis])
        joint.pose_in_child = sapien.Pose(q=_TO_AXIS[link.axis])
        joint.limit = np.array([link.low, link.high], dtype=np.float32)
        if link.slides:
            joint.set_drive_properties(_GRIP_STIFFNESS, _GRIP_DAMPING, _GRIP_FORCE, "force")
        else:
            joint.set_drive_properties(_STIFFNESS, _DAMPING, _FORCE, "acceleration")

    def thing(self, thing: Thing, pose: np.ndarray) -> Any:
        """What moves of it; of a bell its foot."""
        where = sapien.Pose(pose[:3], about_z(float(pose[3])))
        if thing.kind == "button":
            return self._button(thing, where)
        if thing.kind == "fixed":
            return self.fixed(thing.name, thing.parts, where)
        body = physx.PhysxRigidDynamicComponent()
        self._shapes(body, thing.parts)
        body.set_mass(thing.mass)
        body.set_linear_damping(0.05)
        body.set_angular_damping(0.5)
        body.solver_position_iterations = 16
        return self._add(thing.name, body, where)

    def _button(self, thing: Thing, where: sapien.Pose) -> Any:
        foot = self._link(thing.name, None, thing.parts, 1.0, 1 << 8)
        cap = self._link(f"{thing.name}_cap", foot, thing.cap, 0.02, 1 << 8)
        cap.disable_gravity = True
        cap.joint.type = "prismatic"
        cap.joint.pose_in_parent = cap.joint.pose_in_child = sapien.Pose(q=_TO_AXIS["z"])
        cap.joint.limit = np.array([-thing.travel, 0.0], dtype=np.float32)
        cap.joint.set_drive_properties(_CAP_STIFFNESS, _CAP_DAMPING, 100.0, "force")
        foot.joint.type = "fixed"
        foot.entity.set_pose(where)
        for body in (foot, cap):
            self.scene.add_entity(body.entity)
        return foot


class World:
    """The physics of one episode. ``poses``: {thing: [x, y, z, yaw]} (m, rad) where each starts."""

    def __init__(self, poses: Mapping[str, np.ndarray], home: np.ndarray) -> None:
        self.system = physx.PhysxCpuSystem()
        self.system.timestep = 1.0 / PHYSICS_HZ
        self.scene = sapien.Scene([self.system])
        self._builder = builder = _Builder(self.scene)
        builder.fixed("table", (_TABLE,), sapien.Pose())
        self.arms = [builder.arm(arm) for arm in ARMS]
        self._joints = [joint for arm in self.arms for joint in arm.get_active_joints()]
        # {name: the component that moves}
        self.bodies = {name: builder.thing(THINGS[name], pose) for name, pose in poses.items()}
        self._buttons = {
            name: body.articulation
            for name, body in self.bodies.items()
            if THINGS[name].kind == "button"
        }
        # joint targets (rad) and how far each gripper is to open, 0 ... 1
        self.command = np.zeros((2, JOINTS + 1))
        self.command[:, :JOINTS], self.command[:, JOINTS] = home, 1.0
        for arm, row in zip(self.arms, self.command):
            arm.set_qpos(np.array([*row[:JOINTS], FINGER_TRAVEL, FINGER_TRAVEL], dtype=np.float32))
        self._drive(self.command)
        self._run(_SETTLE)

    # ------------------------------------------------------------------------------------- stepping
    def control_step(self, command: np.ndarray) -> None:
        """Move the drive targets to ``command`` [2, 7] and run for 1 / `CONTROL_HZ` seconds."""
        before = self.command
        for block in range(1, _BLOCKS + 1):
            if block <= _RAMP:
                self._drive(before + (command - before) * (block / _RAMP))
            self._run(_STEPS)
        self.command = command

    def _drive(self, command: np.ndarray) -> None:
        fingers = command[:, JOINTS:] * FINGER_TRAVEL
        for joint, target in zip(
            self._joints, np.hstack([command[:, :JOINTS], fingers, fingers]).ravel().tolist()
        ):
            joint.set_drive_target(target)

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self.system.step()

    # -------------------------------------------------------------------------------------- queries
    def qpos(self, arm: int) -> np.ndarray:
        """float32 [8]: the joints (rad), then both fingers (m)."""
        return self.arms[arm].get_qpos()

    def qvel(self, arm: int) -> np.ndarray:
        return self.arms[arm].get_qvel()

    def pose(self, name: str) -> sapien.Pose:
        return self.bodies[name].entity.get_pose()

    def velocity(self, name: str) -> np.ndarray:
        """Linear velocity [3] (m/s) of a thing; zeros for one that is fixed."""
        thing = THINGS[name]
        return (
            self.bodies[name].get_linear_velocity()
            if thing.kind == "free"
            else np.zeros(3, dtype=np.float32)
        )

    def pressed(self, name: str) -> float:
        """How far a bell's cap is down, 0 ... 1."""
        return float(-self._buttons[name].get_qpos()[0] / THINGS[name].travel)

    def touching(self) -> dict[tuple[str, str], bool]:
        """Pairs of names of bodies that press against each other, in both orders."""
        found = {}
        for contact in self.system.get_contacts():
            if any(np.any(point.impulse) for point in contact.points):
                a, b = (body.entity.name for body in contact.bodies)
                found[a, b] = found[b, a] = True
        return found

    def state(self) -> np.ndarray:
        """All joint positions, and positions and rotations of all things, as one float32 vector;
        for comparing."""
        joints = [arm.get_qpos() for arm in (*self.arms, *self._buttons.values())]
        poses = [np.concatenate([pose.p, pose.q]) for pose in map(self.pose, self.bodies)]
        return np.concatenate([*joints, *poses])
