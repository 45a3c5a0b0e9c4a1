"""The suite's scenes as regular robosuite environments, and what is read off their compiled models.

`_TabletopEnv` is an ordinary `SingleArmEnv`: it can be stepped with robosuite's own `step`, and the
benchmark does so. The fast simulator takes its compiled model from the same class, so that both run
the same scene by construction. This module imports robosuite; import it only where a simulator is
really built.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from sim.gl import draw_in_own_contexts, ensure_backend
from sim.tabletop.tasks import OBJECTS, SCENES, TABLE_HEIGHT, ObjectSpec, SceneSpec
from vla_rl.errors import MissingPackage

ensure_backend()
try:
    from sim.tabletop.look import Look

    _level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # robosuite warns about a private macro file that nobody needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import robosuite
        from robosuite.environments.manipulation.single_arm_env import SingleArmEnv
        from robosuite.models.arenas import TableArena
        from robosuite.models.objects import (
            BoxObject,
            BreadObject,
            CanObject,
            CerealObject,
            MilkObject,
        )
        from robosuite.models.tasks import ManipulationTask
        from robosuite.utils.mjcf_utils import CustomMaterial, new_body, new_geom
    logging.disable(_level)
except ImportError as error:
    logging.disable(_level)
    raise MissingPackage(error.name or "robosuite", "sim", "The tabletop suite") from error

CONTROLLERS = {"osc_position": "OSC_POSITION", "osc_pose": "OSC_POSE"}
_XML_OBJECTS = {"can": CanObject, "milk": MilkObject, "bread": BreadObject, "cereal": CerealObject}


class _TabletopEnv(SingleArmEnv):
    """A Panda at a table with the objects of one `SceneSpec`, and a marked zone where the scene has
    one.

    Keyword arguments are those of robosuite's `SingleArmEnv`. Objects are placed by the caller (or
    stand at their parking places); the reward is 0: tasks live in `sim.tabletop.tasks`. ``look``
    and ``look_size`` (pixels; 0 keeps robosuite's off-screen buffer) change what is drawn, not the
    physics: see `sim.tabletop.look`.
    """

    def __init__(
        self,
        scene: str = "cube",
        robots: str = "Panda",
        initialization_noise: Any = None,
        look: str = "full",
        look_size: int = 0,
        **kwargs: Any,
    ) -> None:
        self.look = Look(look, look_size)
        self.scene_spec: SceneSpec = SCENES[scene]
        self.table_full_size = (0.8, 0.8, 0.05)
        self.table_offset = (0.0, 0.0, TABLE_HEIGHT)
        super().__init__(robots=robots, initialization_noise=initialization_noise, **kwargs)

    def _load_model(self) -> None:
        super()._load_model()
        robot = self.robots[0].robot_model
        robot.set_base_xpos(robot.base_xpos_offset["table"](self.table_full_size[0]))
        arena = TableArena(
            table_full_size=self.table_full_size,
            table_friction=(1.0, 5e-3, 1e-4),
            table_offset=self.table_offset,
        )
        arena.set_origin([0, 0, 0])
        _add_zone(arena, self.scene_spec)
        self.objects = {name: _build_object(OBJECTS[name]) for name in self.scene_spec.objects}
        self.model = ManipulationTask(
            mujoco_arena=arena, mujoco_robots=[robot], mujoco_objects=list(self.objects.values())
        )
        # names of visual geoms, which the model lacks, for segmentation images
        if self.look.name != "full":
            self.model.generate_id_mappings = lambda sim: None

    def _initialize_sim(self, xml_string: str | None = None) -> None:
        super()._initialize_sim(self.look.edit_xml(xml_string or self.model.get_xml()))
        self.look.edit_model(self.sim.model._model)

    def _reset_internal(self) -> None:
        super()._reset_internal()
        if self.has_offscreen_renderer:
            self.look.edit_drawing(self.sim._render_context_offscreen.scn)
            draw_in_own_contexts()
        for index, name in enumerate(self.scene_spec.objects):
            x, y, z = -0.1 + 0.12 * index, 0.2, TABLE_HEIGHT + OBJECTS[name].rest_height
            self.sim.data.set_joint_qpos(
                self.objects[name].joints[0], [x, y, z, 1.0, 0.0, 0.0, 0.0]
            )

    def reward(self, action: Any = None) -> float:
        return 0.0

    def _check_success(self) -> bool:
        return False


def make_env(scene: str, controller: str, **kwargs: Any) -> _TabletopEnv:
    """A plain robosuite environment of ``scene``; without cameras unless ``kwargs`` ask for
    them."""
    options: dict[str, Any] = {
        "has_renderer": False,
        "has_offscreen_renderer": False,
        "use_camera_obs": False,
        "control_freq": 20,
        "hard_reset": False,
        "ignore_done": True,
    }
    config = robosuite.load_controller_config(default_controller=CONTROLLERS[controller])
    return _TabletopEnv(scene=scene, controller_configs=config, **(options | kwargs))


def _build_object(spec: ObjectSpec) -> Any:
    if spec.kind == "cube":
        material = CustomMaterial(
            texture=spec.texture,
            tex_name=f"{spec.name}_tex",
            mat_name=f"{spec.name}_mat",
            tex_attrib={"type": "cube"},
            mat_attrib={"texrepeat": "1 1", "specular": "0.4", "shininess": "0.1"},
        )
        half = [spec.rest_height] * 3
        return BoxObject(name=spec.name, size=half, rgba=[*spec.color, 1.0], material=material)
    return _XML_OBJECTS[spec.kind](name=spec.name)


def _add_zone(arena: TableArena, scene: SceneSpec) -> None:
    """A flat coloured square on the table, visual only."""
    if scene.zone is None:
        return
    x, y, half = scene.zone
    body = new_body(name="zone", pos=(x, y, TABLE_HEIGHT))
    visual = {"group": 1, "contype": "0", "conaffinity": "0", "rgba": (0.15, 0.35, 0.85, 1.0)}
    body.append(
        new_geom(name="zone_visual", type="box", size=(half, half, 0.001), pos=(0, 0, 0), **visual)
    )
    arena.worldbody.append(body)
