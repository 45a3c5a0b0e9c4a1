"""The fast controller against its formulas and against robosuite's own stepping."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.specs import EpisodeSpec

pytestmark = pytest.mark.real_sim


def open_simulator(**options):
    from sim.tabletop.simulator import TabletopConfig, TabletopSimulator

    return TabletopSimulator(TabletopConfig(**options))


def test_torques_follow_the_operational_space_formulas() -> None:
    from sim.tabletop import controller as c

    rng = np.random.default_rng(0)
    n, nv = 7, 9
    a = rng.normal(size=(nv, nv))
    full_mass = a @ a.T + nv * np.eye(nv)
    # MuJoCo's packed layout for a chain: row i holds M[i, i], M[i, i-1], ..., M[i, 0]
    address = np.cumsum(np.arange(nv))
    packed = np.concatenate([full_mass[i, i::-1] for i in range(nv)])
    parent = np.arange(nv) - 1
    dofs = np.arange(n)
    jac_p, jac_r = rng.normal(size=(2, 3, nv))
    qpos, qvel, bias = rng.normal(size=(3, nv))
    position, goal_position = rng.normal(size=(2, 3))
    rotation, goal_rotation = (np.linalg.qr(rng.normal(size=(3, 3)))[0] for _ in range(2))
    rest = rng.normal(size=n)
    out, limits = np.zeros(n), np.tile([-1e9, 1e9], (n, 1))
    arguments = (
        packed,
        address,
        parent,
        dofs,
        dofs,
        qpos,
        qvel,
        bias,
        jac_p,
        jac_r,
        position,
        rotation.reshape(9),
    )
    c._torques(*arguments, goal_position, goal_rotation, rest, limits, out)

    mass, jp, jr = full_mass[:n, :n], jac_p[:, :n], jac_r[:, :n]
    jac, inverse = np.vstack([jp, jr]), np.linalg.inv(mass)
    kd = 2 * np.sqrt(c.KP)
    force = c.KP * (goal_position - position) - kd * jac_p @ qvel
    error = 0.5 * sum(np.cross(rotation[:, i], goal_rotation[:, i]) for i in range(3))
    torque = c.KP * error - kd * jac_r @ qvel
    wrench = np.concatenate(
        [
            np.linalg.inv(jp @ inverse @ jp.T) @ force,
            np.linalg.inv(jr @ inverse @ jr.T) @ torque,
        ]
    )
    null = np.eye(n) - inverse @ jac.T @ np.linalg.inv(jac @ inverse @ jac.T) @ jac
    k = c.NULLSPACE_KP
    pull = mass @ (k * (rest - qpos[:n]) - 2 * np.sqrt(k) * qvel[:n])
    expected = jac.T @ wrench + bias[:n] + null.T @ pull
    np.testing.assert_allclose(out, expected, rtol=1e-8, atol=1e-8)

    limits = np.tile([-0.5, 0.25], (n, 1))
    c._torques(*arguments, goal_position, goal_rotation, rest, limits, out)
    np.testing.assert_allclose(out, np.clip(expected, -0.5, 0.25), atol=1e-8)


def test_rotation_matrix_turns_about_its_axis() -> None:
    from sim.tabletop.controller import rotation_matrix

    np.testing.assert_array_equal(rotation_matrix(np.zeros(3)), np.eye(3))
    turn = rotation_matrix(np.array([0.0, 0.0, np.pi / 2]))
    np.testing.assert_allclose(turn @ [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], atol=1e-6)
    axis = np.array([0.3, -0.4, 0.2])
    np.testing.assert_allclose(rotation_matrix(axis) @ axis, axis, atol=1e-6)
    np.testing.assert_allclose(rotation_matrix(axis) @ rotation_matrix(-axis), np.eye(3), atol=1e-6)


@pytest.mark.parametrize("controller", ["osc_position", "osc_pose"])
@pytest.mark.slow
def test_same_states_and_pixels_as_robosuite(controller: str) -> None:
    """A whole grasp and lift under noise (with rotations for osc_pose), robosuite's `env.step`
    beside ours."""
    from benchmarks.simulator.tabletop import same_start
    from sim.tabletop.scene import make_env

    cameras = ["agentview", "robot0_eye_in_hand"]
    simulator = open_simulator(controller=controller, camera_size=32)
    env = make_env(
        "cube",
        controller,
        look="light",
        look_size=32,
        has_offscreen_renderer=True,
        use_camera_obs=True,
        camera_names=cameras,
        camera_heights=32,
        camera_widths=32,
    )
    env.reset()
    episode = EpisodeSpec("lift_cube", 3)
    same_start(simulator, env, episode)
    expert, rng = simulator.demonstrator("lift_cube"), np.random.default_rng(0)
    half_range = np.array(simulator.embodiment.action_high)
    terminated, steps, differences = False, 0, []
    while not terminated:
        action = expert.act(simulator.state(0))
        action[:-1] += 0.2 * half_range[:-1] * rng.standard_normal(len(action) - 1)
        scaled = np.clip(action / half_range, -1.0, 1.0)
        result = simulator.step(0, action[None])
        env.step(scaled)
        steps += 1
        terminated = result.terminated
        assert not result.truncated, "the grasp must succeed, or the comparison shows little"
        ours, theirs = simulator.physics(0), env.sim.data._data
        np.testing.assert_allclose(ours.qpos, theirs.qpos, atol=1e-6, rtol=0)
        np.testing.assert_allclose(ours.ctrl, theirs.ctrl, atol=1e-3, rtol=0)
        if steps % 8 == 0 or terminated:
            for camera in cameras:
                picture = env.sim.render(32, 32, camera_name=camera)[::-1]
                differences.append(
                    np.abs(picture.astype(int) - result.observation.images[camera]).max()
                )
    assert steps > 15
    assert max(differences) <= (0 if controller == "osc_position" else 2)
    env.close()
    simulator.close()
