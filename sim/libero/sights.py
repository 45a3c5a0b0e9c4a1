"""What the cameras of a scene can see: nothing else is drawn, and every byte of a picture stays.

Software rendering pays per vertex, in view or not. A geom is left out where boxes around its faces
are wholly outside of the camera's field of view. MuJoCo lets one geom reflect, the first flat one
that does, and draws the whole scene once more for it, mirrored. That pass is left out where the
mirror is out of view; else a second drawing has what is seen in the mirror or in its place alone, and
only the pixels around the mirror are kept of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

HIDDEN = 5  # a group of geoms that no picture shows
_SLACK = (
    1e-3  # metres: a box that far outside is drawn still, since OpenGL rounds to single precision
)
_FAR = 1e3  # metres
_AROUND = 2  # pixels that are kept around the mirror
_PRIMITIVE = 100  # faces of a geom that is no mesh, about
_LARGE, _CELLS = 1000, 5  # faces of a mesh that has several boxes; of its grid, on the longest side

Window = tuple[float, float, float, float]  # left, right, bottom, top in a picture, from -1 to 1
_WHOLE: Window = (-1.0, 1.0, -1.0, 1.0)
_EVERYWHERE = (slice(None), slice(None))


@dataclass(frozen=True)
class Shot:
    """One drawing: the geoms that it leaves out, whether it has the mirrored pass, and the part
    (rows from below, columns) of its pixels that is kept."""

    hidden: np.ndarray
    mirrors: bool
    kept: tuple[slice, slice] = _EVERYWHERE


@dataclass(frozen=True)
class _Planes:
    """What bounds a space, as unit ``normals`` [k 3] into it and ``offsets`` [k] (m)."""

    normals: np.ndarray
    offsets: np.ndarray

    def distances(
        self, centers: np.ndarray, turns: np.ndarray, half: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of boxes (centres [n 3], axes [n 3 3] as columns, half sizes [n 3]): how far each plane is
        from the centre, inside, and how far the box reaches towards it; both [n k]."""
        reach = np.abs(self.normals @ turns * half[:, None, :]).sum(axis=2)
        return centers @ self.normals.T + self.offsets, reach

    def mirrored(self, normal: np.ndarray, point: np.ndarray) -> _Planes:
        """The space whose mirror image is in this one, of what is before the mirror."""
        normals = self.normals - 2 * np.outer(self.normals @ normal, normal)
        offsets = self.offsets + 2 * (self.normals @ normal) * (normal @ point)
        return _Planes(np.vstack([normals, normal]), np.append(offsets, -(normal @ point)))


class Sights:
    """Of a compiled scene, whose cameras are given by a ``fovy``, as LIBERO's are. ``groups``: which
    groups of geoms its pictures show."""

    def __init__(self, model: mujoco.MjModel, groups: np.ndarray) -> None:
        self._model = model
        geoms = self._geoms = np.flatnonzero(groups[model.geom_group])
        kinds = model.geom_type[geoms]
        self._endless = kinds == mujoco.mjtGeom.mjGEOM_PLANE  # follows the camera, as the haze does
        self._flat = self._endless | (kinds == mujoco.mjtGeom.mjGEOM_BOX)
        meshes = kinds == mujoco.mjtGeom.mjGEOM_MESH
        faces = model.mesh_facenum[np.where(meshes, model.geom_dataid[geoms], 0)]
        self._faces = np.where(meshes, faces, _PRIMITIVE)
        boxes = model.geom_aabb[geoms]
        self._center, self._half = boxes[:, :3].copy(), boxes[:, 3:].copy()
        large = meshes & (faces >= _LARGE)
        self._parts = {
            int(i): _parts(model, model.geom_dataid[geoms[i]]) for i in np.flatnonzero(large)
        }

    def shots(self, data: mujoco.MjData, camera: int, width: int, height: int) -> list[Shot]:
        """What to draw, in this order, for a picture of ``width`` x ``height`` pixels from the
        kinematics of ``data``."""
        model, geoms = self._model, self._geoms
        mirror, sure = self._mirror()
        if not sure or (model.light_castshadow & model.light_active).any():
            return [Shot(geoms[:0], mirrors=True)]  # what is out of view casts shadows, too
        view = _View(data, model, camera, width / height)
        seen = self._within(view.planes(_WHOLE), data)
        if mirror is None:
            return [Shot(geoms[~seen], mirrors=False)]
        seen[mirror] = True  # else another one would reflect
        corners, normal = self._face(data, mirror)
        window = view.window(corners, normal, width, height)
        if window is None:
            return [Shot(geoms[~seen], mirrors=False)]
        planes = view.planes(window)
        images = self._within(planes.mirrored(normal, corners[0]), data)
        near = images | self._within(planes, data)
        near[mirror] = True
        if 2 * self._cost(seen | images) <= self._cost(seen) + 2 * self._cost(near):
            return [Shot(geoms[~(seen | images)], mirrors=True)]
        kept = _pixels(window, width, height)
        return [Shot(geoms[~seen], mirrors=False), Shot(geoms[~near], mirrors=True, kept=kept)]

    def _within(self, planes: _Planes, data: mujoco.MjData) -> np.ndarray:
        """Which of the drawn geoms may be in a space."""
        turns = data.geom_xmat[self._geoms].reshape(-1, 3, 3)
        places = data.geom_xpos[self._geoms]
        centers = places + np.einsum("nij,nj->ni", turns, self._center)
        depth, reach = planes.distances(centers, turns, self._half)
        maybe, wholly = (depth + reach >= -_SLACK).all(axis=1), (depth >= reach).all(axis=1)
        for i in np.flatnonzero(maybe & ~wholly):
            if (parts := self._parts.get(int(i))) is None:
                continue
            centers, turn = parts[0] @ turns[i].T + places[i], turns[i][None]
            depth, reach = planes.distances(centers, turn, parts[1])
            maybe[i] = (depth + reach >= -_SLACK).all(axis=1).any()
        return maybe | self._endless

    def _cost(self, drawn: np.ndarray) -> int:
        return int(self._faces[drawn].sum())

    def _mirror(self) -> tuple[int | None, bool]:
        """Which of the drawn geoms reflects, and whether that is sure: see-through ones do not."""
        model, materials = self._model, self._model.geom_matid[self._geoms]
        reflects = self._flat & (materials >= 0) & (model.mat_reflectance[materials] > 0)
        if not reflects.any():
            return None, True
        first = int(np.argmax(reflects))
        alphas = model.geom_rgba[self._geoms[first], 3], model.mat_rgba[materials[first], 3]
        return first, alphas == (1.0, 1.0)

    def _face(self, data: mujoco.MjData, mirror: int) -> tuple[np.ndarray, np.ndarray]:
        """Corners [4 3] and normal [3] of the side that reflects: upwards in the geom's own frame."""
        geom = self._geoms[mirror]
        axes, size = data.geom_xmat[geom].reshape(3, 3).T, self._model.geom_size[geom]
        if self._endless[mirror]:
            size = np.array([*np.where(size[:2] > 0, size[:2], _FAR), 0.0])  # 0: without end
        signs = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])
        corners = data.geom_xpos[geom] + size[2] * axes[2] + (signs * size[:2]) @ axes[:2]
        return corners, axes[2]


def _parts(model: mujoco.MjModel, mesh: int) -> tuple[np.ndarray, np.ndarray]:
    """Centres and half sizes [n 3], in the geom's frame, of boxes around a mesh's faces: one for each
    cell of a grid that faces have their centres in."""
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    corners = vertices[model.mesh_face[model.mesh_faceadr[mesh] :][: model.mesh_facenum[mesh]]]
    size = np.ptp(vertices, axis=0).max() / _CELLS
    cells = ((corners.mean(axis=1) - vertices.min(axis=0)) / size).astype(np.int64) @ (
        1,
        100,
        10_000,
    )
    order = np.argsort(cells)
    _, first = np.unique(cells[order], return_index=True)
    low = np.minimum.reduceat(corners.min(axis=1)[order], first).astype(float)
    high = np.maximum.reduceat(corners.max(axis=1)[order], first)
    return (low + high) / 2, (high - low) / 2


class _View:
    """A camera's field of view."""

    def __init__(
        self, data: mujoco.MjData, model: mujoco.MjModel, camera: int, aspect: float
    ) -> None:
        self._eye, self._turn = data.cam_xpos[camera], data.cam_xmat[camera].reshape(3, 3)
        tangent = np.tan(np.deg2rad(model.cam_fovy[camera]) / 2)
        self._tangents = np.array([tangent * aspect, tangent])

    def planes(self, window: Window) -> _Planes:
        """Around what shows in a window of the picture."""
        left, right, bottom, top = np.array(window) * np.repeat(self._tangents, 2)
        sides = [[1, 0, left], [-1, 0, -right], [0, 1, bottom], [0, -1, -top], [0, 0, -1.0]]
        normals = np.array(sides) / np.linalg.norm(sides, axis=1, keepdims=True) @ self._turn.T
        return _Planes(normals, -normals @ self._eye)

    def window(
        self, corners: np.ndarray, normal: np.ndarray, width: int, height: int
    ) -> Window | None:
        """Where in the picture a mirror with ``corners`` [4 3] may be; None: it shows nothing."""
        if (self._eye - corners[0]) @ normal < 0:
            return None
        seen = (corners - self._eye) @ self._turn
        if (seen[:, 2] > -_SLACK).any():
            return _WHOLE
        at = seen[:, :2] / (-seen[:, 2:] * self._tangents)
        around = 2 * _AROUND / np.array([width, height])
        low, high = np.maximum(at.min(axis=0) - around, -1), np.minimum(at.max(axis=0) + around, 1)
        return (low[0], high[0], low[1], high[1]) if (low < high).all() else None


def _pixels(window: Window, width: int, height: int) -> tuple[slice, slice]:
    """The rows from below and the columns that a window touches."""
    left, right, bottom, top = ((edge + 1) / 2 for edge in window)
    rows = slice(int(bottom * height), int(np.ceil(top * height)))
    return rows, slice(int(left * width), int(np.ceil(right * width)))
