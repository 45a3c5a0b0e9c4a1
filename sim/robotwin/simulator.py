"""A user's own RoboTwin 2.0 checkout as a `vla_rl.interfaces.Simulator`.

RoboTwin's code runs as it is: its scenes, its robots, its time-parameterised paths, its check of
success at every physics step. On branch RLinf_support a chunk is one path from rest to rest, as
SimpleVLA-RL and RLinf run it; main, and with it the official evaluation, lets every action be a
path of its own, as poses of the hands are on both: figures of the two do not compare. An episode is
a fresh task object in a scene of its own; engine, shaders and the process stay. RoboTwin draws its
random numbers from numpy's global generator, so every slot keeps a state of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import math
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sim.robotwin import branches
from sim.robotwin.checkout import Checkout
from sim.robotwin.seeds import SeedFile, raw_seed
from sim.robotwin.settings import RoboTwinConfig
from sim.robotwin.tasks import step_limit
from sim.slots import checked_actions, chunk_result, running, task_named
from sim.vulkan import ensure_driver
from vla_rl import splits
from vla_rl.errors import UserError
from vla_rl.specs import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    SlotObservation,
    SlotStep,
    TaskSpec,
)

# physics steps between the frames of RoboTwin's own demonstrations, which sets the nominal rate
SAVE_EVERY = 15
PHYSICS_HZ = 250
# m: where hands may be sent; the table's top is at 0.74
_NEAREST, _FARTHEST = (-1.0, -1.0, 0.5), (1.0, 1.0, 2.0)
_QUATERNION = ("qw", "qx", "qy", "qz")
_NO_TURN = 1e-6  # length of a quaternion that says nothing


class RoboTwinSimulator:
    """See the module's text. It changes the working directory of its process."""

    privileged_dim = 0

    def __init__(self, config: RoboTwinConfig) -> None:
        ensure_driver()
        self.config, self.checkout = config, Checkout(config)
        self.options = self.checkout.load()
        official = self.checkout.official_limits()
        self._limit = {
            name: config.horizon or step_limit(name, config.limit, official)
            for name in config.tasks
        }
        self._seeds = SeedFile.read(Path(config.seeds)) if config.seeds else None
        if self._seeds is not None:
            for name in config.tasks:
                self._seeds.require(name, self.checkout.fingerprint(name), config.seed_list)
        self.tasks = tuple(
            TaskSpec(name, *_templates(self.checkout.root, name), self._limit[name])
            for name in config.tasks
        )
        self.embodiment = _embodiment(config, self.options, self.checkout.camera_size)
        self._low, self._high = (
            np.array(self.embodiment.action_low),
            np.array(self.embodiment.action_high),
        )
        self.one_path = config.control == "qpos" and self.checkout.path == "chunk"
        self._slots: dict[int, _Slot] = {}

    # ---------------------------------------------------------------------- the Simulator interface
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Set the episode's scene up; `UserError` for a seed whose scene does not come to rest."""
        task_named(self._limit, episode.task_id)
        old = self._slots.pop(slot, None)
        if old is not None:
            branches.close(old.task)
        seed = self.seed_of(episode)
        task, numbers = self.set_up(episode.task_id, seed, episode.split)
        s = self._slots[slot] = _Slot(
            task, episode, numbers, self._instruction(task, episode, seed)
        )
        return self._observe(s)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Run ``actions`` [h a], joint targets as one path, until they are over or the task is
        done; observe once."""
        s = running(self._slots, slot)
        actions = checked_actions(slot, actions, len(self._low))
        limit = self._limit[s.episode.task_id]
        asked = np.clip(actions[: limit - s.elapsed], self._low, self._high)
        success, executed = (self._follow if self.one_path else self._singly)(s, asked)
        s.elapsed += executed
        rewards = np.zeros(len(actions), dtype=np.float32)
        rewards[executed - 1] = float(success)
        truncated = not success and s.elapsed >= limit
        s.over = success or truncated
        return chunk_result(self._observe(s), rewards, executed, success, truncated)

    def close(self) -> None:
        """Free scenes and the process's workplace. May be called again."""
        for s in self._slots.values():
            branches.close(s.task)
        self._slots.clear()
        self.checkout.close()

    # ------------------------------------------------------------------------------------ beyond it
    def seed_of(self, episode: EpisodeSpec) -> int:
        """RoboTwin's seed of an initial state."""
        if self._seeds is None:
            return raw_seed(self.config.seed_list, episode.split, episode.init_state_id)
        return self._seeds.seed(episode.task_id, episode.split, episode.init_state_id)

    def scene_options(self, split: str) -> dict[str, Any]:
        """What ``setup_demo`` takes besides task and seed for a scene of ``split``."""
        return {**self.options, "eval_mode": self.config.unseen_textures(split)}

    def set_up(self, name: str, seed: int, split: str = "train") -> tuple[Any, dict]:
        """A fresh task object in its settled scene, and the state of numpy's generator
        afterwards."""
        task = self.checkout.task_class(name)()
        with _numpy_state() as kept:
            try:
                task.setup_demo(
                    now_ep_num=seed, seed=seed, task_name=name, **self.scene_options(split)
                )
            except Exception as error:
                branches.close(task)
                if type(error).__name__ == "UnStableError":
                    raise UserError(
                        f"The scene of {name} does not come to rest under seed {seed} ({error}). "
                        "Find seeds that the expert solves with: vla-rl robotwin seeds --task "
                        f"{name}, and name their file with env.seeds=FILE."
                    ) from error
                raise
            kept["after"] = np.random.get_state()
        task.step_lim = 10**9  # limits are this class's business
        return task, kept

    def task(self, slot: int) -> Any:
        """The slot's RoboTwin task."""
        return self._slots[slot].task

    def _follow(self, s: _Slot, actions: np.ndarray) -> tuple[bool, int]:
        """A chunk as one path; whether the task is done, and how many actions the path had
        covered until then."""
        task, scene_step, update, steps = s.task, s.task.scene.step, s.task._update_render, 0

        def counted() -> None:
            nonlocal steps
            steps += 1
            scene_step()

        task.scene.step = counted
        # which draws numbers each time; else poses go to the renderer once, when it draws
        if not task.crazy_random_light:
            task._update_render = lambda: None
        try:
            with _numpy_state(s.random), contextlib.redirect_stdout(io.StringIO()):
                success, length = self.checkout.branch.follow(task, actions)
                s.random["after"] = np.random.get_state()
        finally:
            task.scene.step, task._update_render = scene_step, update
        return success, max(
            1, math.ceil(len(actions) * min(1.0, steps / length))
        ) if success else len(actions)

    def _singly(self, s: _Slot, actions: np.ndarray) -> tuple[bool, int]:
        """RoboTwin's own `take_action` with each of ``actions`` [h a]; whether the task is done,
        and how many were run.

        Its planner, which finds the way to a pose, samples, so the generators of mplib begin anew
        at each action. An arm that no path leads to its pose stays for a while, as upstream; so
        does one that is there already, at which upstream ends with an error.
        """
        import mplib

        task, update, number, control = s.task, s.task._update_render, 0, self.config.control
        plans = {name: getattr(task.robot, name) for name in ("left_plan_path", "right_plan_path")}
        if not task.crazy_random_light:
            task._update_render = lambda: None
        for name, plan in plans.items():
            setattr(task.robot, name, functools.partial(_planned, plan))
        try:
            logging.disable(logging.WARNING)  # toppra complains of every path that it cannot time
            with _numpy_state(s.random), contextlib.redirect_stdout(io.StringIO()):
                for number, action in enumerate(actions, 1):
                    seed = splits.stable_seed(
                        "robotwin", s.episode.task_id, self.seed_of(s.episode), s.elapsed + number
                    )
                    mplib.set_global_seed(seed % 2**31)
                    task.take_action(
                        action if control == "qpos" else _upright(task, action), control
                    )
                    if task.eval_success:
                        break
                s.random["after"] = np.random.get_state()
        finally:
            logging.disable(logging.NOTSET)
            task._update_render = update
            for name, plan in plans.items():
                setattr(task.robot, name, plan)
        return bool(task.eval_success), number

    def _observe(self, s: _Slot) -> SlotObservation:
        with _numpy_state(s.random):
            seen = s.task.get_obs()
            s.random["after"] = np.random.get_state()
        images = {
            name: np.ascontiguousarray(seen["observation"][name]["rgb"])
            for name in self.config.cameras
        }
        return SlotObservation(images, self.proprio(s.task), s.instruction)

    def proprio(self, task: Any) -> np.ndarray:
        """float32: both arms' joints (rad) and gripper openings (0 ... 1), commanded or
        measured."""
        robot = task.robot
        commanded = np.array(robot.get_left_arm_jointState() + robot.get_right_arm_jointState())
        if self.config.state == "commanded":
            return commanded.astype(np.float32)
        parts = []
        for side in ("left", "right"):
            entity, arm = getattr(robot, f"{side}_entity"), getattr(robot, f"{side}_arm_joints")
            finger, scale = (
                getattr(robot, f"{side}_gripper")[0][0],
                getattr(robot, f"{side}_gripper_scale"),
            )
            qpos = dict(
                zip((joint.get_name() for joint in entity.get_active_joints()), entity.get_qpos())
            )
            parts += [qpos[joint.get_name()] for joint in arm]
            parts.append((qpos[finger.get_name()] - scale[0]) / (scale[1] - scale[0]))
        return np.array(parts, dtype=np.float32)

    def _instruction(self, task: Any, episode: EpisodeSpec, seed: int) -> str:
        """RoboTwin's phrase for this scene, the same for a seed; see ``env.instructions``."""
        describe = importlib.import_module("description.utils.generate_episode_instructions")
        before = random.getstate()
        random.seed(splits.stable_seed("robotwin", seed, episode.instruction_index) % 2**32)
        try:
            with _numpy_state():
                about = self.checkout.branch.about(task)
            found = describe.generate_episode_descriptions(episode.task_id, [about], 1)
        finally:
            random.setstate(before)
        if not found:
            raise UserError(
                f"the checkout has no instruction for {episode.task_id} that fits what {about} says"
            )
        return (
            found[0]["unseen" if self.config.unseen_instructions(episode.split) else "seen"]
            or found[0]["seen"]
        )[0]


class _Slot:
    def __init__(self, task: Any, episode: EpisodeSpec, random: dict, instruction: str) -> None:
        self.task, self.episode, self.random, self.instruction = task, episode, random, instruction
        self.elapsed, self.over = 0, False


def _planned(plan: Any, *arguments: Any, **options: Any) -> Any:
    """What a planner of RoboTwin finds; no path where the one that it finds is too short to have
    points, or to be timed."""
    try:
        found = plan(*arguments, **options)
    except RuntimeError as error:  # of mplib's TOPP
        return {"status": str(error)}
    return (
        {"status": "there already"}
        if found["status"] == "Success" and not len(found["position"])
        else found
    )


def _upright(task: Any, pose: np.ndarray) -> np.ndarray:
    """``pose`` [16] with quaternions of length 1; one of zeros becomes the hand's present one."""
    pose = pose.copy()
    for first, side in ((3, "left"), (11, "right")):
        length = np.linalg.norm(pose[first : first + 4])
        turn = (
            pose[first : first + 4] / length if length > _NO_TURN else task.get_arm_pose(side)[3:]
        )
        pose[first : first + 4] = turn
    return pose


@contextlib.contextmanager
def _numpy_state(kept: dict | None = None) -> Iterator[dict]:
    """numpy's global generator in the state ``kept["after"]``, for a while; afterwards as it
    was."""
    before, kept = np.random.get_state(), {} if kept is None else kept
    if "after" in kept:
        np.random.set_state(kept["after"])
    try:
        yield kept
    finally:
        np.random.set_state(before)


def _templates(root: Path, task: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The checkout's instructions of a task, seen and unseen, with their placeholders."""
    import json

    texts = json.loads(
        (root / "description" / "task_instruction" / f"{task}.json").read_text(encoding="utf-8")
    )
    return tuple(texts["seen"]), tuple(texts["unseen"])


def _end(limit: ElementTree.Element | None, bound: str, place: str) -> float:
    """``bound`` "lower" or "upper" of a URDF's joint (rad); `UserError` that names ``place``
    where it has none."""
    text = None if limit is None else limit.get(bound)
    if text is None:
        raise UserError(
            f"{place} has no {bound} limit, which actions need: add it, or choose "
            "another env.embodiment"
        )
    return float(text)


def _embodiment(
    config: RoboTwinConfig, options: dict[str, Any], size: tuple[int, int]
) -> EmbodimentSpec:
    described = options["left_embodiment_config"]
    names: list[str] = []
    low: list[float] = []
    high: list[float] = []
    file = Path(options["left_robot_file"]) / described["urdf_path"]
    limits = {
        joint.get("name"): joint.find("limit")
        for joint in ElementTree.parse(file).getroot().iter("joint")
    }
    for side, joints in zip(("left", "right"), described["arm_joints_name"]):
        names += [f"{side}_joint_{i}" for i in range(1, len(joints) + 1)] + [f"{side}_gripper"]
        for bound, values, end in (("lower", low, 0.0), ("upper", high, 1.0)):
            values += [
                _end(limits.get(joint), bound, f"joint {joint} of {file}") for joint in joints
            ] + [end]
    units = ["share" if name.endswith("gripper") else "rad" for name in names]
    actions, poses = names, config.control == "ee"
    if poses:
        actions = [
            f"{side}_{name}"
            for side in ("left", "right")
            for name in ("x", "y", "z", *_QUATERNION, "gripper")
        ]
        units = (["m"] * 3 + ["quaternion"] * 4 + ["share"]) * 2
        low, high = [*_NEAREST, *[-1.0] * 4, 0.0] * 2, [*_FARTHEST, *[1.0] * 4, 1.0] * 2
    return EmbodimentSpec(
        name=f"robotwin_{config.embodiment}_{config.state}{'_ee' if poses else ''}",
        action_names=tuple(actions),
        action_units=tuple(units),
        action_low=tuple(low),
        action_high=tuple(high),
        frame="world" if poses else "joints",
        rotation="quaternion_wxyz" if poses else "none",
        gripper="0 close, 1 open",
        control_hz=PHYSICS_HZ / SAVE_EVERY,
        cameras=tuple(CameraSpec(name, *size) for name in config.cameras),
        proprio_names=tuple(names),
    )
