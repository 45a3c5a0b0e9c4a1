"""How a scene is drawn: robosuite's own pixels ("full"), or the same scene drawn cheaply ("light",
the default).

The light look is made of things that only rendering reads, so the physics is the same. Reflections,
multi-sampling, shadows and the sky are off; floor, walls and table have their textures' mean
colour; the robot is drawn by its low-polygon collision meshes in the colours of its visual meshes,
which are left out of the model (robosuite derives inertias from collision geoms alone). Objects
keep their own look. That also saves compile time and memory.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

import cv2
import mujoco
import numpy as np

from sim.light import drop_costly_effects, reduce_to_hull, skip_costly_passes

VISIBLE_GROUP = 1  # robosuite draws its visual geoms in group 1, and collides by those of group 0
ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
FLAT_PREFIXES = ("floor", "wall_", "table_")
DARK = np.array([0.25, 0.25, 0.25, 1.0])  # of robot parts that have no visual mesh
# Without a texture lighting adds up to more than 1, so replaced colours are dimmed; the table more
# than the white hand.
DIM = np.array([0.88, 0.88, 0.88, 1.0])
DIM_FLAT = np.array([0.75, 0.75, 0.75, 1.0])
# a collision mesh with more faces is drawn by its convex hull, which is what it collides by anyway
MAX_FACES = 400


@dataclass
class Look:
    """The look of one environment, applied before (`edit_xml`) and after (`edit_model`) its model
    is compiled.

    ``size``: pictures are ``size`` x ``size`` pixels; 0 keeps robosuite's off-screen buffer.
    """

    name: str
    size: int = 0
    colors: dict[str, np.ndarray] = field(default_factory=dict)  # [4] of each robot body

    def edit_xml(self, xml: str) -> str:
        """Leave out what the light look does not draw."""
        if self.name == "full":
            return xml
        root = ElementTree.fromstring(xml)
        assets = root.find("asset")
        if assets is None:
            raise ValueError("a scene's model has no assets: it cannot be drawn light")
        meshes = {mesh.get("name"): mesh for mesh in assets.findall("mesh")}
        materials = {material.get("name"): material for material in assets.findall("material")}
        textures = {texture.get("name"): texture for texture in assets.findall("texture")}
        for body in root.iter("body"):
            if body.get("name", "").startswith(ROBOT_PREFIXES):
                self._leave_out_visuals(body, meshes, materials)
        for geom in root.iter("geom"):
            material = materials.get(geom.get("material"))
            if (
                geom.get("name", "").startswith(FLAT_PREFIXES)
                and material is not None
                and material.get("texture")
            ):
                color = (
                    _mean_color(textures[material.attrib.pop("texture")].attrib["file"]) * DIM_FLAT
                )
                material.set("rgba", " ".join(f"{value:.4f}" for value in color))
        for kind, attribute, holders in (
            ("mesh", "mesh", "geom"),
            ("material", "material", "geom"),
            ("texture", "texture", "material"),
        ):
            used = {element.get(attribute) for element in root.iter(holders)}
            for asset in assets.findall(kind):
                if (
                    asset.get("name")
                    and asset.get("name") not in used
                    and asset.get("type") != "skybox"
                ):
                    assets.remove(asset)
        return ElementTree.tostring(root, encoding="unicode")

    def _leave_out_visuals(self, body: ElementTree.Element, meshes: dict, materials: dict) -> None:
        """Remove a robot body's visual geoms; remember their mean colour, weighted by the size
        of their mesh files."""
        total = np.zeros(5)
        for geom in body.findall("geom"):
            if geom.get("group") != str(VISIBLE_GROUP):
                continue
            source = materials.get(geom.get("material"), geom)
            rgba = [float(value) for value in source.get("rgba", "0.5 0.5 0.5 1").split()]
            mesh = meshes.get(geom.get("mesh"))
            weight = 1.0 if mesh is None else float(os.path.getsize(mesh.get("file")))
            total += weight * np.array([*rgba, 1.0])
            body.remove(geom)
        if total[4]:
            self.colors[body.attrib["name"]] = total[:4] / total[4]

    def edit_model(self, model: mujoco.MjModel) -> None:
        """Set what rendering reads off the compiled ``model``; call it before the model's
        `MjrContext` is made."""
        if self.size:
            model.vis.global_.offwidth = self.size
            model.vis.global_.offheight = self.size
        if self.name == "full":
            return
        drop_costly_effects(model)
        for geom in range(model.ngeom):
            body = model.body(int(model.geom_bodyid[geom])).name
            if body.startswith(ROBOT_PREFIXES):
                model.geom_group[geom] = VISIBLE_GROUP
                model.geom_matid[geom] = -1
                model.geom_rgba[geom] = self.colors.get(body, DARK) * DIM
                mesh = int(model.geom_dataid[geom])
                if mesh >= 0 and model.mesh_facenum[mesh] > MAX_FACES:
                    reduce_to_hull(model, mesh)

    def edit_drawing(self, drawing: mujoco.MjvScene) -> None:
        """Switch off what the light look does not draw."""
        if self.name == "light":
            skip_costly_passes(drawing)


def _mean_color(file: str) -> np.ndarray:
    """Mean RGBA [4] in 0 ... 1 of a picture."""
    picture = cv2.imread(file, cv2.IMREAD_COLOR)
    return np.array([*(picture.reshape(-1, 3).mean(axis=0)[::-1] / 255.0), 1.0])
