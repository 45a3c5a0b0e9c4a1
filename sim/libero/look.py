"""How a LIBERO scene is drawn: the benchmark's own pixels ("exact", the default), or the same scene
drawn cheaply ("light").

The light look changes what only rendering reads, so the physics is the same bit by bit: no
reflections, multi-sampling, shadows or sky, smaller textures, and visual meshes with fewer faces. A
mesh is thinned by vertex clustering (Rossignac and Borrel 1993): vertices that share a cell of a
grid become one, and faces that collapse are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from sim.libero import textures
from sim.light import drop_costly_effects, skip_costly_passes

CELLS = 24  # of the grid along a mesh's longest side
FEWEST = 300  # faces; smaller meshes stay as they are


@dataclass
class Look:
    """The look of a world, applied before (`edit_xml`) and after (`edit_model`) its model is
    compiled."""

    name: str

    def edit_xml(self, xml: str) -> str:
        """The XML as it is compiled: of the light look with smaller textures."""
        return xml if self.name == "exact" else textures.smaller(xml)

    def edit_model(self, model: mujoco.MjModel) -> None:
        """Set what rendering reads off the compiled ``model``; call it before the model's
        `MjrContext` is made."""
        if self.name == "exact":
            return
        drop_costly_effects(model)
        for mesh in range(model.nmesh):
            if model.mesh_facenum[mesh] > FEWEST:
                thin(model, mesh)

    def edit_drawing(self, drawing: mujoco.MjvScene) -> None:
        """Switch off what the light look does not draw."""
        if self.name == "light":
            skip_costly_passes(drawing)


def thin(model: mujoco.MjModel, mesh: int, cells: int = CELLS) -> None:
    """Let a mesh be drawn with fewer faces. Collisions read its vertices and hull, not its
    faces, and stay the same."""
    first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
    start, vertices = int(model.mesh_vertadr[mesh]), int(model.mesh_vertnum[mesh])
    points = model.mesh_vert[start : start + vertices]
    faces = model.mesh_face[first : first + count]
    low = points.min(axis=0)
    size = float((points.max(axis=0) - low).max()) / cells
    if size <= 0.0:
        return
    _, cluster = np.unique(
        np.floor((points - low) / size).astype(np.int64), axis=0, return_inverse=True
    )
    cluster = cluster.reshape(-1)
    # The vertex nearest to its cluster's mean stands for the cluster.
    number = np.bincount(cluster)
    mean = np.stack([np.bincount(cluster, points[:, axis]) / number for axis in range(3)], axis=1)
    distance = np.linalg.norm(points - mean[cluster], axis=1)
    order = np.lexsort((distance, cluster))
    chosen = order[np.searchsorted(cluster[order], np.arange(len(number)))]
    corners = cluster[faces]
    keep = (
        (corners[:, 0] != corners[:, 1])
        & (corners[:, 1] != corners[:, 2])
        & (corners[:, 0] != corners[:, 2])
    )
    # Of faces with the same three clusters one is enough.
    _, unique = np.unique(np.sort(corners[keep], axis=1), axis=0, return_index=True)
    kept = np.flatnonzero(keep)[np.sort(unique)]
    if not 0 < len(kept) < count:
        return
    # A vertex that stands for a cluster brings its own normal and texture coordinate, from any face
    # that uses it.
    replaced = chosen[corners[kept]]
    for name in ("mesh_facenormal", "mesh_facetexcoord"):
        table = getattr(model, name)
        if name == "mesh_facetexcoord" and model.mesh_texcoordadr[mesh] < 0:
            continue
        index = table[first : first + count].copy()
        of_vertex = np.zeros(vertices, dtype=index.dtype)
        of_vertex[faces.reshape(-1)] = index.reshape(-1)
        table[first : first + len(kept)] = of_vertex[replaced]
    model.mesh_face[first : first + len(kept)] = replaced
    model.mesh_facenum[mesh] = len(kept)
