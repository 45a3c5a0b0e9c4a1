"""An arm of six hinges and a gripper, commanded in degrees, that goes where it is told at once;
and its model in MJCF."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from real.limits import Limits
from real.robots.protocol import Capabilities, Measured, Reference
from vla_rl.specs import EmbodimentSpec

NAMES = (*(f"j{i}.pos" for i in range(1, 7)), "gripper.pos")
JOINTS = {f"j{i}.pos": f"joint{i}" for i in range(1, 7)}
ZEROS = {"j2.pos": 10.0}
REST = np.array([0.0, -30.0 + 10.0, 70.0, 0.0, 50.0, 0.0, 100.0])


def model(folder: Path, degrees: int = 150) -> str:
    axes = ("0 0 1", "0 1 0", "0 1 0", "1 0 0", "0 1 0", "0 0 1")
    lengths = (0.0, 0.15, 0.25, 0.12, 0.1, 0.05)
    body = '<site name="tip" pos="0 0 0.05"/>'
    for i in range(5, -1, -1):
        geom = '<geom type="capsule" fromto="0 0 0 0 0 0.05" size="0.02"/>'
        joint = f'<joint name="joint{i + 1}" type="hinge" axis="{axes[i]}" range="-{degrees} {degrees}"/>'
        body = f'<body name="link{i + 1}" pos="0 0 {lengths[i]}">{joint}{geom}{body}</body>'
    path = folder / f"arm{degrees}.xml"
    path.write_text(f"<mujoco><worldbody>{body}</worldbody></mujoco>", encoding="utf-8")
    return str(path)


class JointArm:
    name = "paper"
    capabilities = Capabilities(kind="joints", max_hz=100.0)

    def __init__(self, start: list[float] | None = None) -> None:
        ends = np.array([180.0] * 6 + [100.0])
        lows = np.array([-180.0] * 6 + [0.0])
        self.limits = Limits(joint_low=tuple(lows), joint_high=tuple(ends))
        self.embodiment = EmbodimentSpec(
            name="paper",
            action_names=NAMES,
            action_units=("deg",) * 7,
            action_low=tuple(lows),
            action_high=tuple(ends),
            frame="joints",
            rotation="none",
            gripper="none",
            control_hz=20.0,
            cameras=(),
            proprio_names=NAMES,
        )
        self.place = np.array(REST if start is None else start, dtype=float)
        self.told: list[np.ndarray] = []
        self.now = 0.0

    def connect(self) -> None: ...

    def observe(self) -> Measured:
        none = np.empty(0)
        return Measured(
            self.now,
            none,
            none,
            self.place.copy(),
            np.zeros(7),
            self.place[6] / 100.0,
            none,
            self.place.copy(),
        )

    def command(self, reference: Reference) -> None:
        self.place = reference.joints.copy()
        self.told.append(self.place)

    def hold(self) -> None: ...

    def stop(self) -> None: ...

    def clear(self) -> None: ...

    def pictures(self) -> list:
        return []

    def close(self) -> None: ...
