"""What every light look leaves out of a picture (software rendering pays for it most)."""

from __future__ import annotations

import mujoco
import numpy as np


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


def reduce_to_hull(model: mujoco.MjModel, mesh: int) -> None:
    """Let a mesh be drawn by the faces of its convex hull (MuJoCo's "mesh_graph" holds them after
    its edge lists).

    Collisions use the hull graph, not the faces, and are the same afterwards.
    """
    start = int(model.mesh_graphadr[mesh])
    if start < 0:
        return
    vertices, faces = (int(v) for v in model.mesh_graph[start : start + 2])
    first = start + 2 + 3 * vertices + 3 * faces
    hull = model.mesh_graph[first : first + 3 * faces].reshape(faces, 3)
    address, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
    if faces >= count:
        return
    old = model.mesh_face[address : address + count].copy()
    normals = model.mesh_facenormal[address : address + count].copy()
    normal_of = np.zeros(int(model.mesh_vertnum[mesh]), dtype=normals.dtype)
    normal_of[old.reshape(-1)] = normals.reshape(-1)
    model.mesh_face[address : address + faces] = hull
    model.mesh_facenormal[address : address + faces] = normal_of[hull]
    model.mesh_facenum[mesh] = faces
