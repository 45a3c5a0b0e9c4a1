"""An arm made of boxes that RoboTwin's code accepts as an embodiment, for checkouts whose robot
assets were not downloaded.

Two files: a URDF and the ``config.yml`` that RoboTwin reads beside it. RoboTwin's conventions: the
gripper's x axis is the direction of approach, grasp poses lie 0.12 m beyond the last joint, and a
pair of arms stands some distance apart. Success rates with it say nothing about the real robots.
"""

from __future__ import annotations

from pathlib import Path

NAME = "primitive"
DISTANCE = 0.56  # m between the bases of a pair
# m: so long that it reaches wherever RoboTwin puts boxes; the last is from the last joint to the
# fingertips
_UPPER, _FORE, _WRIST, _FINGER = 0.40, 0.38, 0.07, 0.130
_SHOULDER = 0.13  # m above the base, which stands on the table
_HOME = (0.0, -1.35, -2.2, -0.72, 0.0, 0.0)  # rad: the hand points down in front of the base
_GAP = 0.003  # half the distance of the closed fingers, so that a planner sees no collision
_AXES = ("0 0 1", "0 1 0", "0 -1 0", "0 -1 0", "0 0 1", "1 0 0")


def write(folder: Path) -> Path:
    """Write the embodiment into ``folder``, which is made; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arm.urdf").write_text(urdf(), encoding="utf-8")
    (folder / "config.yml").write_text(config(), encoding="utf-8")
    return folder


def _link(
    name: str, *boxes: tuple[tuple[float, float, float], tuple[float, float, float], str]
) -> str:
    """A link of boxes (full sizes, centre, colour)."""
    shapes = ""
    for size, at, color in boxes:
        shape = (
            f'<origin xyz="{at[0]} {at[1]} {at[2]}"/><geometry><box size="{size[0]} {size[1]} '
            f'{size[2]}"/></geometry>'
        )
        shapes += (
            f'<visual>{shape}<material name="{name}"><color rgba="{color} 1"/></material></visual>'
        )
        shapes += f"<collision>{shape}</collision>"
    inertia = '<inertia ixx="0.003" iyy="0.003" izz="0.003" ixy="0" ixz="0" iyz="0"/>'
    return f'<link name="{name}"><inertial><mass value="1"/>{inertia}</inertial>{shapes}</link>\n'


def _joint(
    name: str,
    kind: str,
    parent: str,
    child: str,
    at: tuple[float, float, float],
    axis: str,
    limits: str,
) -> str:
    bounds = f'<limit {limits} effort="200" velocity="10"/>' if kind != "fixed" else ""
    return (
        f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>'
        f'<origin xyz="{at[0]} {at[1]} {at[2]}"/><axis xyz="{axis}"/>{bounds}</joint>\n'
    )


def urdf() -> str:
    """The arm: yaw, shoulder, elbow, wrist, hand yaw, hand roll; two fingers that slide along y."""
    light, dark = "0.85 0.85 0.87", "0.15 0.15 0.17"
    lengths = (0.0, _UPPER, _FORE, 0.0, _WRIST, 0.0)  # along x, from each joint to the next
    text = '<robot name="primitive">\n' + _link("base", ((0.1, 0.1, 0.06), (0.0, 0.0, 0.03), dark))
    parent, at = "base", (0.0, 0.0, _SHOULDER)
    for i, (axis, length) in enumerate(zip(_AXES, lengths), start=1):
        boxes = (
            [((length - 0.08, 0.05, 0.05), (length / 2, 0.0, 0.0), light)] if length > 0.1 else []
        )
        if i == len(_AXES):
            boxes = [((0.03, 0.10, 0.035), (0.03, 0.0, 0.0), dark)]
        text += _link(f"link{i}", *boxes)
        text += _joint(
            f"joint{i}", "revolute", parent, f"link{i}", at, axis, 'lower="-2.9" upper="2.9"'
        )
        parent, at = f"link{i}", (length, 0.0, 0.0)
    reach = _FINGER - 0.05
    for name, side in (("finger_a", 1), ("finger_b", -1)):
        text += _link(
            name, ((reach, 0.01, 0.024), (0.05 + reach / 2, side * (_GAP + 0.005), 0.0), dark)
        )
        text += _joint(
            name,
            "prismatic",
            parent,
            name,
            (0.0, 0.0, 0.0),
            f"0 {side} 0",
            'lower="0" upper="0.045"',
        )
    text += _link("camera")
    text += _joint("camera", "fixed", parent, "camera", (-0.02, 0.0, 0.06), "1 0 0", "")
    return text + "</robot>\n"


def config() -> str:
    """RoboTwin's description of the embodiment; what it has for both arms is said once for each."""
    joints = ", ".join(f"joint{i}" for i in range(1, 7))
    return f"""urdf_path: arm.urdf
move_group: [link6, link6]
ee_joints: [joint6, joint6]
arm_joints_name: [[{joints}], [{joints}]]
gripper_name:
  - {{base: finger_a, mimic: [[finger_b, 1.0, 0.0]]}}
  - {{base: finger_a, mimic: [[finger_b, 1.0, 0.0]]}}
gripper_bias: 0.12
gripper_scale: [0.0, 0.045]
homestate: [{list(_HOME)}, {list(_HOME)}]
joint_stiffness: 1000
joint_damping: 200
gripper_stiffness: 1000
gripper_damping: 200
delta_matrix: [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
global_trans_matrix: [[1, 0, 0], [0, -1, 0], [0, 0, -1]]
robot_pose: [[0, -0.65, 0.74, 0.70710678, 0, 0, 0.70710678]]
planner: mplib_RRT
dual_arm: false
rotate_lim: [0, 0]
grasp_perfect_direction: [front_right, front_left]
static_camera_list:
  - {{name: head_camera, type: D435, position: [0.0, -0.45, 1.35], forward: [0.0, 0.6, -0.8], left: [-1.0, 0.0, 0.0]}}
"""
