"""Where an arm's hand is, and how its joints bring it elsewhere: mink (differential inverse
kinematics as a quadratic program) on MuJoCo's model of the arm, a URDF or MJCF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.errors import ConfigError, MissingPackage, first_line

# costs: of the hand's place, of a turn that is asked for, of one that is kept
_PLACE, _TURN, _BESIDE = 1.0, 0.1, 0.01


class Kinematics:
    """``hand`` is a body or site of ``model``, ``joints`` [n] its hinges in order, all with a
    range; poses are in its base frame, joints in radians. ``turns``: the hand's turn is commanded,
    else kept where that costs nothing of its place. ``speed`` (rad/s) bounds each joint."""

    def __init__(self, model: str, hand: str, joints: Sequence[str], turns: bool, speed: float):
        """Raises `ConfigError` for a file that is no model, or has no such hand or joints;
        `MissingPackage`."""
        self._mink, self._mujoco = _libraries()
        self.model = _read(self._mujoco, model)
        self._hand, self._kind = hand, self._kind_of(hand)
        ids = [self._hinge(name) for name in joints]
        self._q, self._v = self.model.jnt_qposadr[ids], self.model.jnt_dofadr[ids]
        self.low, self.high = self.model.jnt_range[ids].T
        mink, turn = self._mink, _TURN if turns else _BESIDE
        self._task = mink.FrameTask(
            hand, self._kind, position_cost=_PLACE, orientation_cost=turn, lm_damping=1e-3
        )
        self._rest = mink.DampingTask(self.model, cost=1e-3)
        self._bounds = [
            mink.ConfigurationLimit(self.model),
            mink.VelocityLimit(self.model, dict.fromkeys(joints, speed)),
        ]
        self._speed = speed

    def pose(self, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position [3] (m), quaternion [4] (w x y z) and Jacobian [6 n] (linear before angular)
        of the hand."""
        here = self._mink.Configuration(self.model, self._all(joints))
        found = here.get_transform_frame_to_world(self._hand, self._kind)
        linear, angular = np.zeros((3, self.model.nv)), np.zeros((3, self.model.nv))
        site = self._kind == "site"
        number = (self.model.site if site else self.model.body)(self._hand).id
        (self._mujoco.mj_jacSite if site else self._mujoco.mj_jacBody)(
            self.model, here.data, linear, angular, number
        )
        return (
            found.translation().copy(),
            found.rotation().wxyz.copy(),
            np.concatenate([linear, angular])[:, self._v],
        )

    def towards(
        self, joints: np.ndarray, position: np.ndarray, quaternion: np.ndarray, seconds: float
    ) -> np.ndarray:
        """The joints [n] after ``seconds`` of going from ``joints`` towards a pose of the hand,
        as near as it can be had."""
        here = self._mink.Configuration(self.model, self._all(np.clip(joints, self.low, self.high)))
        self._task.set_target(
            self._mink.SE3.from_rotation_and_translation(self._mink.SO3(quaternion), position)
        )
        tasks = [self._task, self._rest]
        speed = self._mink.solve_ik(
            here, tasks, seconds, "daqp", damping=1e-6, limits=self._bounds
        )[self._v]
        return here.q[self._q] + np.clip(speed, -self._speed, self._speed) * seconds

    def _all(self, joints: np.ndarray) -> np.ndarray:
        """The model's coordinates; what is none of the joints stays at its own zero."""
        q = self.model.qpos0.copy()
        q[self._q] = joints
        return q

    def _kind_of(self, hand: str) -> str:
        types = self._mujoco.mjtObj
        for kind, number in (("site", types.mjOBJ_SITE), ("body", types.mjOBJ_BODY)):
            if self._mujoco.mj_name2id(self.model, number, hand) >= 0:
                return kind
        bodies = ", ".join(self.model.body(i).name for i in range(1, self.model.nbody))
        raise ConfigError(
            f"robot.options.hand={hand!r} is no body or site of the model; its bodies are {bodies}"
        )

    def _hinge(self, name: str) -> int:
        found = int(self._mujoco.mj_name2id(self.model, self._mujoco.mjtObj.mjOBJ_JOINT, name))
        hinge = found >= 0 and self.model.jnt_type[found] == self._mujoco.mjtJoint.mjJNT_HINGE
        if not hinge or not self.model.jnt_limited[found]:
            known = ", ".join(self.model.joint(i).name for i in range(self.model.njnt))
            raise ConfigError(
                f"robot.options.joints names {name!r}, which is no hinge with a range in the "
                f"model; its joints are {known}"
            )
        return found


def _libraries() -> tuple[Any, Any]:
    try:
        import mink
        import mujoco
    except ModuleNotFoundError as error:
        raise MissingPackage(
            error.name or "mink", "real", "An arm that is driven by poses of its hand"
        ) from error
    return mink, mujoco


def _read(mujoco: Any, path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(
            f"robot.options.model={path}: there is no such file; give the arm's URDF or MJCF"
        )
    try:
        return mujoco.MjModel.from_xml_path(path)
    except ValueError as error:
        raise ConfigError(
            f"robot.options.model={path} cannot be read: {first_line(error)}"
        ) from None
