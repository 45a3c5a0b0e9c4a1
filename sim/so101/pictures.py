"""Draws the table. This module needs OpenGL: import it where a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from sim.gl import free_context, make_context
from sim.light import skip_costly_passes
from sim.so101.world import DRAWN


class Pictures:
    """Draws a model with one GL context of its own."""

    def __init__(self, model: Any, size: int) -> None:
        self._model, self._gl = model, make_context(size)
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        self._drawing = mujoco.MjvScene(model, maxgeom=200)
        skip_costly_passes(self._drawing)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[DRAWN] = 1
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._perturb = mujoco.MjvPerturb()
        self._viewport = mujoco.MjrRect(0, 0, size, size)

    def take(self, data: Any, cameras: Sequence[str]) -> dict[str, np.ndarray]:
        images, size = {}, self._viewport.width
        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        for name in cameras:
            self._camera.fixedcamid = self._model.camera(name).id
            mujoco.mjv_updateScene(
                self._model, data, self._option, self._perturb, self._camera,
                mujoco.mjtCatBit.mjCAT_ALL, self._drawing,
            )  # fmt: skip
            mujoco.mjr_render(self._viewport, self._drawing, self._context)
            pixels = np.empty((size, size, 3), dtype=np.uint8)
            mujoco.mjr_readPixels(pixels, None, self._viewport, self._context)
            images[name] = np.ascontiguousarray(pixels[::-1])
        return images

    def close(self) -> None:
        self._gl.make_current()
        self._context.free()
        free_context(self._gl)
