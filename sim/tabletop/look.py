"""How a scene is drawn: robosuite's own pixels ("full"), or the same scene drawn cheaply ("light", the default).

The light look only touches fields that rendering reads, so the physics is the same. Reflections, multi-sampling,
shadows and the sky are off; floor, walls and table have their textures' mean colour; the robot is drawn by its
low-polygon collision meshes in the colours of its visual meshes. Objects keep their own look.
"""

from __future__ import annotations

import mujoco
import numpy as np

HIDDEN_GROUP = 5  # MuJoCo's last geom group; never drawn here
VISIBLE_GROUP = 1  # robosuite draws its visual geoms in group 1
ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
FLAT_PREFIXES = ("floor", "wall_", "table_")
DIM = 0.88  # of the colours that replace textures and visual meshes: lighting adds up to more than 1 without a texture
MAX_FACES = 400  # a collision mesh with more faces is drawn by its convex hull, which is what it collides by anyway


def apply_look(model: mujoco.MjModel, look: str, size: int) -> None:
    """Prepare a compiled ``model`` for pictures of ``size`` x ``size`` pixels (0: keep its off-screen buffer).

    Call it before the model's `MjrContext` is made.
    """
    if size:
        model.vis.global_.offwidth = size
        model.vis.global_.offheight = size
    if look == "full":
        return
    model.mat_reflectance[:] = 0.0
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_castshadow[:] = 0
    for geom in range(model.ngeom):
        material = int(model.geom_matid[geom])
        if model.geom(geom).name.startswith(FLAT_PREFIXES) and material >= 0:
            model.mat_rgba[material] = mean_color(model, material) * (DIM, DIM, DIM, 1.0)
            model.mat_texid[material] = -1
    _draw_robot_by_collision_geoms(model)


def scene_flags(drawing: mujoco.MjvScene, look: str) -> None:
    """Switch off what the light look does not draw."""
    if look == "light":
        flags = mujoco.mjtRndFlag
        for flag in (flags.mjRND_SKYBOX, flags.mjRND_SHADOW, flags.mjRND_REFLECTION):
            drawing.flags[flag] = 0


def mean_color(model: mujoco.MjModel, material: int) -> np.ndarray:
    """Mean colour [4] in 0 ... 1 of a material: its rgba times the mean of its RGB texture, where it has one."""
    color = np.array(model.mat_rgba[material], dtype=np.float64)
    texture = int(model.mat_texid[material][mujoco.mjtTextureRole.mjTEXROLE_RGB])
    if texture >= 0:
        channels = int(model.tex_nchannel[texture])
        count = int(model.tex_height[texture]) * int(model.tex_width[texture]) * channels
        start = int(model.tex_adr[texture])
        color[:3] *= model.tex_data[start : start + count].reshape(-1, channels)[:, :3].mean(axis=0) / 255.0
    return color


def _draw_robot_by_collision_geoms(model: mujoco.MjModel) -> None:
    color = _body_colors(model)
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        if not model.body(body).name.startswith(ROBOT_PREFIXES):
            continue
        if model.geom_group[geom] != 0:
            model.geom_group[geom] = HIDDEN_GROUP
            continue
        model.geom_group[geom] = VISIBLE_GROUP
        model.geom_matid[geom] = -1
        model.geom_rgba[geom] = color.get(body, np.array([0.25, 0.25, 0.25, 1.0])) * (DIM, DIM, DIM, 1.0)
        mesh = int(model.geom_dataid[geom])
        if mesh >= 0 and model.mesh_facenum[mesh] > MAX_FACES:
            _reduce_to_hull(model, mesh)


def _body_colors(model: mujoco.MjModel) -> dict[int, np.ndarray]:
    """Mean colour [4] of each robot body's visual geoms, weighted by their number of mesh faces."""
    total: dict[int, np.ndarray] = {}
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        if model.geom_group[geom] != VISIBLE_GROUP or not model.body(body).name.startswith(ROBOT_PREFIXES):
            continue
        mesh, material = int(model.geom_dataid[geom]), int(model.geom_matid[geom])
        faces = float(model.mesh_facenum[mesh]) if mesh >= 0 else 12.0
        rgba = model.mat_rgba[material] if material >= 0 else model.geom_rgba[geom]
        total[body] = total.get(body, np.zeros(5)) + faces * np.array([*rgba, 1.0])
    return {body: value[:4] / value[4] for body, value in total.items()}


def _reduce_to_hull(model: mujoco.MjModel, mesh: int) -> None:
    """Let a mesh be drawn by the faces of its convex hull (MuJoCo's "mesh_graph" holds them after its edge lists).

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
