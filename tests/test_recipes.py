"""Presets that name a published recipe, held to worked numbers: from a checkpoint's statistics to
what the env is sent.

Upstream: openvla-oft `constants.py`, `run_libero_eval.py`; SimpleVLA-RL `rob_rollout.py`,
`run_openvla_oft_rl_twin2.sh`. The middle token (index 128 of 256) is 0 between -1 and 1, the lowest
index 253/255 + 1/255 = 254/255 of the way up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from openvla_checkpoints import libero_like

from policies.openvla.tokens import ActionCodec
from vla_rl.config import compose
from vla_rl.errors import EmbodimentMismatch
from vla_rl.types import CameraSpec, EmbodimentSpec

HIGHEST = 254 / 255  # the centre of the last bin

LIBERO = {
    "q01": [-0.5, -0.2, -0.8, -0.1, -0.1, -0.1, 0.0],
    "q99": [0.9, 0.4, 0.8, 0.1, 0.1, 0.3, 1.0],
    "min": [-2.0] * 7,
    "max": [2.0] * 7,
    "mask": [True] * 6 + [False],
}
PAIR = ("left_joint_1", "left_gripper", "right_joint_1", "right_gripper")
ALOHA = {
    "q01": [-0.9, 0.1, -2.0, 0.1],
    "q99": [0.9, 0.9, 1.0, 0.9],
    "min": [-1.0, 0.0, -2.6, 0.0],
    "max": [2.0, 1.0, 1.4, 1.0],
    "mask": [True] * 4,
}


def pair_of_arms() -> EmbodimentSpec:
    """Two arms of one joint each, with RoboTwin's words: radians, and openings from 0 to 1."""
    return EmbodimentSpec(
        name="pair",
        action_names=PAIR,
        action_units=("rad", "share") * 2,
        action_low=(-2.6, 0.0) * 2,
        action_high=(2.6, 1.0) * 2,
        frame="joints",
        rotation="none",
        gripper="0 close, 1 open",
        control_hz=15.0,
        cameras=(CameraSpec("head_camera", 24, 32),),
        proprio_names=PAIR,
    )


def preset(name: str) -> Any:
    return compose(["run=toy", f"policy={name}"]).policy


def sent(
    name: str, statistics: dict[str, list], embodiment: EmbodimentSpec, index: int
) -> np.ndarray:
    """What the env gets where every token of an action is ``index``."""
    config = preset(name)
    codec = ActionCodec.from_statistics(
        statistics,
        embodiment,
        256,
        config.normalization,
        config.gripper,
        config.action_space == "unit",
    )
    return codec.table()[:, index].double().numpy()


@pytest.mark.parametrize(
    ("name", "chunk", "cameras", "proprio"),
    [
        # arXiv 2406.09246: a token a dimension, one control step
        ("openvla", 1, ["agentview"], False),
        # SimpleVLA-RL on LIBERO: one third-person picture
        ("openvla_oft", 8, ["agentview"], False),
        ("openvla_oft_libero", 8, ["agentview"], False),
        ("openvla_oft_rlinf", 8, ["agentview"], False),
        # arXiv 2502.19645, both pictures and 8 numbers
        ("openvla_oft_l1", 8, ["agentview", "robot0_eye_in_hand"], True),
        # 25 × 14, the head's picture and 14 numbers
        ("openvla_oft_robotwin", 25, ["head_camera"], True),
    ],
)
def test_what_a_recipe_sees_and_how_far_it_plans(name, chunk, cameras, proprio):
    config = preset(name)
    assert (config.chunk_length, list(config.cameras), config.use_proprio) == (
        chunk,
        cameras,
        proprio,
    )


@pytest.mark.parametrize(
    "name", ["openvla", "openvla_oft", "openvla_oft_libero", "openvla_oft_rlinf", "openvla_oft_l1"]
)
def test_libero_actions_lie_between_the_quantiles_and_the_grippers_sign_is_turned(name):
    """0 is half-way between q01 and q99; 1 means open to the model, -1 to the env."""
    middle = sent(name, LIBERO, libero_like(), 128)
    np.testing.assert_allclose(middle[:6], [0.2, 0.1, 0.0, 0.0, 0.0, 0.1], atol=1e-7)
    highest = sent(name, LIBERO, libero_like(), 1)
    np.testing.assert_allclose(highest[0], 0.5 * (HIGHEST + 1) * 1.4 - 0.5, atol=1e-7)
    assert highest[6] == -1.0  # 2 · 254/255 - 1 > 0: open
    assert middle[6] == 1.0  # 2 · 0 - 1 < 0: closed
    metres = dataclasses.replace(libero_like(), action_low=(-0.05,) * 7, action_high=(0.05,) * 7)
    # a share of the robot's range
    np.testing.assert_allclose(sent(name, LIBERO, metres, 128)[:2], [0.01, 0.005], atol=1e-8)


def test_robotwin_actions_lie_between_the_extremes_and_go_to_the_env_as_they_are():
    """SimpleVLA-RL hands `take_action` the un-normalised numbers: 0 is half-way between minimum
    and maximum, in radians."""
    middle = sent("openvla_oft_robotwin", ALOHA, pair_of_arms(), 128)
    np.testing.assert_allclose(middle, [0.5, 0.5, -0.6, 0.5], atol=1e-7)
    highest = sent("openvla_oft_robotwin", ALOHA, pair_of_arms(), 1)
    low, width = np.array([-1.0, 0.0, -2.6, 0.0]), np.array([3.0, 1.0, 4.0, 1.0])
    np.testing.assert_allclose(highest, low + (HIGHEST + 1) / 2 * width, atol=1e-6)


def test_liberos_gripper_on_another_arm_is_refused():
    with pytest.raises(
        EmbodimentMismatch,
        match=r"policy\.gripper=libero .* '0 close, 1 open': set policy\.gripper=none",
    ):
        sent("openvla_oft", {**ALOHA}, pair_of_arms(), 128)
