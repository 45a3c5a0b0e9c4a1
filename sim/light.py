"""What every light look leaves out of a picture (software rendering pays for it most)."""

from __future__ import annotations

import mujoco


def drop_costly_effects(model: mujoco.MjModel) -> None:
    """No reflections, multisampling and shadows. Call it before the model's `MjrContext` is
    made."""
    model.mat_reflectance[:] = 0.0
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_castshadow[:] = 0


def skip_costly_passes(drawing: mujoco.MjvScene) -> None:
    """No sky, shadow and reflection passes."""
    for flag in (
        mujoco.mjtRndFlag.mjRND_SKYBOX,
        mujoco.mjtRndFlag.mjRND_SHADOW,
        mujoco.mjtRndFlag.mjRND_REFLECTION,
    ):
        drawing.flags[flag] = 0
