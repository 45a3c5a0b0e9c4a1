"""One compiled MuJoCo world of LIBERO: its physics, what is drawn of it, and snapshots of its
state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sim.gl import ensure_backend
from vla_rl.specs import CameraSpec

ensure_backend()
import mujoco  # noqa: E402  isort: skip  (MUJOCO_GL must be set before mujoco is imported)

STATE = mujoco.mjtState.mjSTATE_INTEGRATION
POSES = ("body_pos", "body_quat")  # what LIBERO changes in a model to place fixtures
_MAX_GEOMS = 1000  # that robosuite draws

Edits = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Changes of a model: {field of `mujoco.MjModel`: (rows, values)}, for instance {"body_pos": ([7],
[[0, 0, 1]])}. Those of "tex_data" are whole textures."""


@dataclass
class Snapshot:
    """What an episode starts from: physics, controller, clock, what was seen last, and the
    model's edits."""

    physics: np.ndarray
    control: Any
    clock: Any
    seen: Any
    lit: tuple[bool, ...]
    success: bool
    edits: Edits = field(default_factory=dict)

    def copy_working_state(self) -> tuple[Any, Any, Any]:
        """Copies of controller state, clock and what was seen, for a slot to work on."""
        return self.control.copy(), self.clock.copy(), self.seen.copy()


class World:
    """A compiled model, its edits in force, and its renderer. One GL context serves all worlds
    of a process."""

    def __init__(
        self, model: mujoco.MjModel, look: Any, cameras: Sequence[CameraSpec], gl: Any
    ) -> None:
        self.model, self.look, self._cameras, self._gl = model, look, tuple(cameras), gl
        self._edits: Edits = {}
        self._pristine = {name: getattr(model, name).copy() for name in POSES}
        self._scratch = mujoco.MjData(model)
        self._context: Any = None
        self._stale: set[int] = set()  # textures that have changed since they were uploaded

    def apply(self, edits: Edits) -> None:
        """Put ``edits`` in force and take back the ones in force until now."""
        if edits is self._edits:
            return
        for name, (rows, _) in self._edits.items():
            getattr(self.model, name)[rows] = self._pristine[name][rows]
        for name, (rows, values) in edits.items():
            array = getattr(self.model, name)
            if name not in self._pristine:
                self._pristine[name] = array.copy()
            array[rows] = values
        self._stale |= self._textures(self._edits) | self._textures(edits)
        self._edits = edits

    def _textures(self, edits: Edits) -> set[int]:
        """The textures that ``edits`` change: whole ones, so the first number of each is among
        the rows."""
        if "tex_data" not in edits:
            return set()
        return set(np.flatnonzero(np.isin(self.model.tex_adr, edits["tex_data"][0])).tolist())

    def reset_poses(self) -> None:
        """Put bodies that LIBERO itself has moved in the model back to where the XML has them."""
        for name in POSES:
            getattr(self.model, name)[:] = self._pristine[name]

    def render(self, qpos: np.ndarray, edits: Edits, rotate: bool) -> dict[str, np.ndarray]:
        """Pictures uint8 [H W 3] per camera of joint positions ``qpos`` (LIBERO's, or turned by
        180 degrees)."""
        self._open_renderer()
        self.apply(edits)
        model, data = self.model, self._scratch
        data.qpos[:] = qpos
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        self._gl.make_current()
        # worlds share the GL context
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        for texture in self._stale:
            mujoco.mjr_uploadTexture(model, self._context, texture)
        self._stale.clear()
        images = {}
        for camera in self._cameras:
            self._camera.fixedcamid = self._camera_id[camera.name]
            mujoco.mjv_updateScene(
                model,
                data,
                self._option,
                self._perturb,
                self._camera,
                mujoco.mjtCatBit.mjCAT_ALL,
                self._drawing,
            )
            viewport = mujoco.MjrRect(0, 0, camera.width, camera.height)
            mujoco.mjr_render(viewport, self._drawing, self._context)
            pixels = np.empty((camera.height, camera.width, 3), dtype=np.uint8)
            mujoco.mjr_readPixels(pixels, None, viewport, self._context)
            images[camera.name] = np.ascontiguousarray(pixels[::-1, ::-1]) if rotate else pixels
        return images

    def _open_renderer(self) -> None:
        """At the first picture: uploading meshes and textures takes its time, and stepping needs
        neither."""
        if self._context is not None:
            return
        model = self.model
        model.vis.global_.offwidth = max(camera.width for camera in self._cameras)
        model.vis.global_.offheight = max(camera.height for camera in self._cameras)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._drawing = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        self.look.edit_drawing(self._drawing)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0
        self._option.geomgroup[1] = 1
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera_id = {model.camera(i).name: i for i in range(model.ncam)}
        self._perturb = mujoco.MjvPerturb()

    def close(self) -> None:
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._context = None
