"""What the cameras see: one scene of things to draw per process, moved to where a slot's physics
has them.

It knows no physics, is built once with everything that any task shows, and keeps SAPIEN's cameras
and their compiled shaders as long as the process lives; what a task does not use waits out of
sight. This module imports sapien and needs a Vulkan driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sapien
from sapien import render

from sim import shaders
from sim.dualarm.kinematics import ARMS
from sim.dualarm.physics import World, part_pose
from sim.dualarm.shapes import BASE, FLOOR, LINKS, TABLE, THINGS, Part

SHADERS = {"fast": "minimal", "default": "default", "paper": "rt"}  # by look
# rad, across
_HEAD_AT, _HEAD_LOOKS_AT, _HEAD_FOV = (
    np.array([0.0, -0.24, 0.70]),
    np.array([0.0, 0.175, 0.0]),
    1.10,
)
# tilted to the fingers
_WRIST_IN_HAND, _WRIST_FOV = sapien.Pose([-0.01, 0.0, 0.065], [0.9763, 0.0, 0.2164, 0.0]), 1.25
_AWAY = sapien.Pose([0.0, 0.0, -9.0])
_GROUND = (
    Part("box", (0.60, 0.45, 0.02), TABLE, (0.0, 0.15, -0.02)),
    Part("box", (4.0, 4.0, 0.02), FLOOR, (0.0, 0.0, -0.72)),
)


class Pictures:
    """Pictures uint8 [height, width, 3] of ``cameras`` in a ``look`` of `SHADERS`."""

    def __init__(self, cameras: Sequence[str], height: int, width: int, look: str) -> None:
        render.set_camera_shader_dir(shaders.pack(SHADERS[look]))
        if look == "paper":
            render.set_ray_tracing_samples_per_pixel(32)
            render.set_ray_tracing_path_depth(8)
        self._scene = sapien.Scene([render.RenderSystem()])
        self._light(shadow=look != "fast")
        self._materials: dict[tuple[float, ...], Any] = {}
        self._body("ground", _GROUND)
        self._links = [
            [
                self._body(f"{arm}_{name}", parts)
                for name, parts in (("base", BASE), *((k.name, k.parts) for k in LINKS))
            ]
            for arm in ARMS
        ]
        self._things = {
            name: (
                self._body(name, thing.parts),
                self._body(f"{name}_cap", thing.cap) if thing.cap else None,
            )
            for name, thing in THINGS.items()
        }
        self._shown: tuple[str, ...] = ()
        self._cameras = {name: self._camera(name, height, width) for name in cameras}

    def _light(self, shadow: bool) -> None:
        self._scene.render_system.ambient_light = [0.45, 0.45, 0.45]
        for direction, strength, casts in (
            ((0.3, 0.6, -1.0), 1.6, shadow),
            ((-0.5, -0.4, -1.0), 0.7, False),
        ):
            light = render.RenderDirectionalLightComponent()
            light.color = [strength] * 3
            light.shadow = casts
            light.shadow_half_size = 1.0
            light.local_pose = sapien.Pose(q=_facing(np.array(direction)))
            self._entity("light", light)

    def _entity(self, name: str, component: Any) -> Any:
        entity = sapien.Entity()
        entity.name = name
        entity.add_component(component)
        self._scene.add_entity(entity)
        return entity

    def _body(self, name: str, parts: Sequence[Part]) -> Any:
        body = render.RenderBodyComponent()
        for part in parts:
            if part.drawn:
                make = render.RenderShapeBox if part.kind == "box" else render.RenderShapeCylinder
                size = (part.size,) if part.kind == "box" else part.size
                shape = make(*size, self._material(part.color))
                shape.local_pose = part_pose(part)
                body.attach(shape)
        entity = self._entity(name, body)
        if name in THINGS or name.endswith("_cap"):
            entity.set_pose(_AWAY)
        return entity

    def _material(self, color: tuple[float, float, float]) -> Any:
        if color not in self._materials:
            self._materials[color] = render.RenderMaterial(
                base_color=[*color, 1.0], roughness=0.8, specular=0.1
            )
        return self._materials[color]

    def _camera(self, name: str, height: int, width: int) -> Any:
        camera = render.RenderCameraComponent(width, height)
        camera.set_fovx(_HEAD_FOV if name == "head" else _WRIST_FOV, compute_y=True)
        camera.near, camera.far = 0.01, 10.0
        entity = self._entity(name, camera)
        if name == "head":
            entity.set_pose(sapien.Pose(_HEAD_AT, _facing(_HEAD_LOOKS_AT - _HEAD_AT)))
        return camera

    def take(self, world: World) -> dict[str, np.ndarray]:
        """The pictures {camera: uint8 [height, width, 3]} of a slot as it is now."""
        for arm, links in zip(world.arms, self._links):
            for link, drawn in zip(arm.get_links(), links):
                drawn.set_pose(link.entity_pose)
        for name in self._shown:
            if name not in world.bodies:
                for drawn in filter(None, self._things[name]):
                    drawn.set_pose(_AWAY)
        self._shown = tuple(world.bodies)
        for name in self._shown:
            drawn, cap = self._things[name]
            pose = world.pose(name)
            drawn.set_pose(pose)
            if cap is not None:
                down = world.pressed(name) * THINGS[name].travel
                cap.set_pose(pose * sapien.Pose([0.0, 0.0, -down]))
        for arm, name in enumerate(ARMS):
            if f"{name}_wrist" in self._cameras:
                hand = (
                    world.arms[arm]
                    .get_links()[[k.name for k in LINKS].index("hand") + 1]
                    .entity_pose
                )
                self._cameras[f"{name}_wrist"].entity.set_pose(hand * _WRIST_IN_HAND)
        self._scene.render_system.step()
        images = {}
        for name, camera in self._cameras.items():
            camera.take_picture()
            images[name] = (
                (camera.get_picture("Color")[..., :3] * 255.0).clip(0.0, 255.0).astype(np.uint8)
            )
        return images


def _facing(direction: np.ndarray) -> np.ndarray:
    """Quaternion (w, x, y, z) of a camera or light that looks along ``direction``, upright."""
    x = direction / np.linalg.norm(direction)
    y = np.cross([0.0, 0.0, 1.0], x)
    y = y / np.linalg.norm(y)
    matrix = np.eye(4)
    matrix[:3, :3] = np.stack([x, y, np.cross(x, y)], axis=1)
    return sapien.Pose(matrix).q
