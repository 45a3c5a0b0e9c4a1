"""How a scene is drawn: robosuite's own pixels ("full"), or the same scene drawn cheaply ("light", the suite's default).

The light look only touches fields that rendering reads, so the physics is the same: reflections, multi-sampling and shadows
are off, and the robot is drawn by its low-polygon collision meshes in the colours of its visual meshes.
"""

from __future__ import annotations

import mujoco
import numpy as np

LOOKS = ("light", "full")
HIDDEN_GROUP = 5  # MuJoCo's last geom group; never drawn here
VISIBLE_GROUP = 1  # robosuite draws its visual geoms in group 1
ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")


def apply_look(model: mujoco.MjModel, look: str, size: int) -> None:
    """Prepare a compiled ``model`` for rendering ``size`` x ``size`` pictures with ``look``; call before `MjrContext`."""
    if look == "full":
        return
    model.vis.global_.offwidth = size
    model.vis.global_.offheight = size
    model.mat_reflectance[:] = 0.0
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_castshadow[:] = 0
    _draw_robot_by_collision_geoms(model)


def _draw_robot_by_collision_geoms(model: mujoco.MjModel) -> None:
    color = _body_colors(model)
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        if not model.body(body).name.startswith(ROBOT_PREFIXES):
            continue
        if model.geom_group[geom] == 0:
            model.geom_group[geom] = VISIBLE_GROUP
            model.geom_matid[geom] = -1
            model.geom_rgba[geom] = color.get(body, (0.25, 0.25, 0.25, 1.0))
        elif body in color and np.any((model.geom_bodyid == body) & (model.geom_group == 0)):
            model.geom_group[geom] = HIDDEN_GROUP
        elif body in color:
            model.geom_group[geom] = HIDDEN_GROUP


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
