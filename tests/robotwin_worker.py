"""What tests run in a process with RoboTwin's packages, where there is no pytest (see
`test_robotwin.py`)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sim.robotwin.simulator import RoboTwinSimulator
from vla_rl.specs import EpisodeSpec

TASK = "stack_blocks_two"


def chunks(simulator: RoboTwinSimulator, start: np.ndarray) -> list[np.ndarray]:
    """Two chunks [25 a] that move both arms about, from the state [a] that an episode starts in."""
    rng, walk = np.random.default_rng(0), np.zeros(len(start))
    arms = np.array([not name.endswith("gripper") for name in simulator.embodiment.action_names])
    plan = []
    for _ in range(50):
        walk = walk + arms * rng.normal(0.0, 0.02, len(start))
        plan.append(start + walk)
    return [np.clip(part, simulator._low, simulator._high) for part in np.split(np.array(plan), 2)]


def state(task: Any) -> np.ndarray:
    joints = [entity.get_qpos() for entity in (task.robot.left_entity, task.robot.right_entity)]
    return np.concatenate(
        [
            *joints,
            *(np.concatenate([b.get_pose().p, b.get_pose().q]) for b in (task.block1, task.block2)),
        ]
    )


def outcomes(simulator: RoboTwinSimulator, slots: tuple[int, ...]) -> list[tuple]:
    """For each of ``slots`` in turn, with another episode between: states, pictures and
    proprioception after each chunk."""
    found = []
    for slot in slots:
        first = simulator.start(slot, EpisodeSpec(TASK, 1))
        other = simulator.start(slot + 10, EpisodeSpec(TASK, 2))
        seen = []
        for chunk in chunks(simulator, first.proprio.astype(np.float64)):
            step = simulator.step(slot, chunk)
            simulator.step(slot + 10, chunks(simulator, other.proprio.astype(np.float64))[0])
            seen.append(
                (
                    state(simulator.task(slot)),
                    step.observation.images["head_camera"],
                    step.observation.proprio,
                )
            )
        found.append((first.instruction, step.executed, step.truncated, seen))
    return found


def upstream(simulator: RoboTwinSimulator, _: None) -> np.ndarray:
    """The state after RoboTwin's own loop on the same chunks, as the branch has it: a chunk at
    once or action by action."""
    first = simulator.start(0, EpisodeSpec(TASK, 1))
    task = simulator.task(0)
    for chunk in chunks(simulator, first.proprio.astype(np.float64)):
        if hasattr(task, "gen_sparse_reward_data"):
            task.gen_sparse_reward_data(chunk)
        else:
            for action in chunk:
                task.take_action(action, action_type="qpos")
    return state(task)


def reached(simulator: RoboTwinSimulator, slots: tuple[int, ...]) -> list[tuple]:
    """With poses as actions, for each of ``slots`` in turn and another episode between:
    instruction, actions, executed and truncated of both chunks, the state after each, and how far
    (m) each hand was then from where it was sent."""
    found = []
    for slot in slots:
        simulator.start(slot, EpisodeSpec(TASK, 1))
        simulator.start(slot + 10, EpisodeSpec(TASK, 2))
        task, ends = simulator.task(slot), []
        left, right = (np.array(task.get_arm_pose(side)) for side in ("left", "right"))
        for ahead in ((0.0, 0.02, 0.0), (0.0, 0.03, 0.0)):
            plan = []
            for _ in range(2):
                left[:3] += ahead  # while the right hand stays where it is
                turned = right * [1, 1, 1, 0, 0, 0, 0] if len(ends) else right
                plan.append([*left, 1.0, *turned, 1.0])
            step = simulator.step(slot, np.array(plan))
            simulator.step(slot + 10, np.array(plan)[:1])
            now = [np.array(task.get_arm_pose(side)) for side in ("left", "right")]
            off = [
                float(np.linalg.norm((there - sent)[:3])) for there, sent in zip(now, (left, right))
            ]
            ends.append((step.executed, step.truncated, state(task), off))
        found.append(ends)
    return found


def published(simulator: RoboTwinSimulator, file: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Write ``file`` with RoboTwin's own code, a frame after each part of a chunk; the frames'
    states and pictures."""
    import h5py
    from envs.utils import pkl2hdf5

    first, frames = simulator.start(0, EpisodeSpec(TASK, 1)), []
    for part in np.split(chunks(simulator, first.proprio.astype(np.float64))[0][:24], 3):
        simulator.step(0, part)
        frames.append(simulator.task(0).get_obs())
    content = pkl2hdf5.parse_dict_structure(frames[0])
    for frame in frames:
        pkl2hdf5.append_data_to_structure(content, frame)
    with h5py.File(file, "w") as opened:
        pkl2hdf5.create_hdf5_from_dict(opened, content)
    return [
        (frame["joint_action"]["vector"], frame["observation"]["head_camera"]["rgb"])
        for frame in frames
    ]


def collected(simulator: RoboTwinSimulator, folder: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Let main's own scripts/collect_data.py collect an episode into ``folder``, but for its video,
    which wants ffmpeg; the frames' states and pictures."""
    sys.path.append(str(simulator.checkout.root / "scripts"))
    import collect_data
    from envs.utils import pkl2hdf5

    pkl2hdf5.images_to_video = lambda *_, **__: None
    task, frames = simulator.checkout.task_class(TASK)(), []
    get_obs = task.get_obs

    def noted() -> dict[str, Any]:
        frames.append(get_obs())
        return frames[-1]

    task.get_obs = noted
    collect_data.run(
        task,
        simulator.scene_options("train")
        | {"task_name": TASK, "save_path": folder, "episode_num": 1},
    )
    return [
        (frame["joint_action"]["vector"], frame["observation"]["head_camera"]["rgb"])
        for frame in frames
    ]


def demonstration(
    simulator: RoboTwinSimulator, _: None
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """A demonstration; what the instruction's placeholders stood for in its scene; what the
    expert said after it."""
    from sim.robotwin.collect import collect_episode

    simulator.start(1, EpisodeSpec(TASK, 1))
    about = simulator.checkout.branch.about(simulator.task(1))
    episode = collect_episode(simulator, EpisodeSpec(TASK, 1))
    return episode, about, simulator.task(0).info["info"]
