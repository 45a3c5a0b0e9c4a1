"""Pictures of a compiled MuJoCo scene.

This module imports mujoco: call `sim.gl.ensure_backend` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np


class Pictures:
    """Square ones of ``size`` pixels, of the geoms of group 1, by the OpenGL context that ``gl``
    makes current. ``drawing`` is what they are drawn from, for flags of its own."""

    def __init__(self, model: mujoco.MjModel, size: int, gl: Any) -> None:
        self.model, self.size = model, size
        self._gl = gl
        gl.make_current()
        self._context = mujoco.MjrContext(self.model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self.drawing = mujoco.MjvScene(self.model, maxgeom=1000)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[1] = 1
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera_id = {self.model.camera(i).name: i for i in range(self.model.ncam)}
        self._perturb = mujoco.MjvPerturb()
        self._viewport = mujoco.MjrRect(0, 0, size, size)

    def render(self, data: mujoco.MjData, cameras: Sequence[str]) -> dict[str, np.ndarray]:
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
                self.drawing,
            )
            mujoco.mjr_render(self._viewport, self.drawing, self._context)
            pixels = np.empty((self.size, self.size, 3), dtype=np.uint8)
            mujoco.mjr_readPixels(pixels, None, self._viewport, self._context)
            images[name] = np.ascontiguousarray(pixels[::-1])
        return images

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()
