"""The branches of RoboTwin 2.0 that can be run, found by what is in a checkout, and whatever is
done for one alone."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.errors import UserError

BASE = Path("envs") / "_base_task.py"
MAIN = "main"
# what may be one path from rest to rest
PATHS = {"chunk": "chunks as one path", "action": "a path an action"}
_NO_CUROBO = (
    "curobo.types.math",
    "curobo.types.robot",
    "curobo.wrap.reacher.motion_gen",
    "curobo.util",
)
_STILL = 50  # physics steps of an arm whose path could not be timed, as RoboTwin has it
# of a chunk's path on RLinf_support: physics steps; rad, see `Way.timed`
_LONGEST, _SAME, _APART = 500, 1e-5, 2e-4
_HELD = ("cameras", "robot", "scene", "renderer", "engine")  # of a task


@dataclass(frozen=True)
class Branch:
    """``settings``: the folder of its setting files; ``steps``: the method of its tasks that is
    stepped with; ``path``: what that makes a path of, see `PATHS`."""

    name: str
    settings: str
    steps: str
    path: str

    def lacks(self, root: Path) -> list[str]:
        """What of this branch a checkout has not."""
        robots = f"{self.settings}/_embodiment_config.yml"
        found = {
            f"{self.steps} in {BASE}": f"def {self.steps}("
            in (root / BASE).read_text(encoding="utf-8"),
            robots: (root / robots).is_file(),
        }
        return [name for name, there in found.items() if not there]

    def prepare(self) -> None:
        """Before the checkout is imported, which can be then."""

    def fix(self) -> None:
        """After its tasks' base was imported."""

    def about(self, task: Any) -> dict[str, str]:
        """What the placeholders of the instructions stand for in a task's scene."""
        return task.get_info()

    def follow(self, task: Any, actions: np.ndarray) -> tuple[bool, int]:
        """Run joint targets [h a] as one path; whether the task is done, and the physics steps
        of the whole path."""
        lengths, downsample = [], task.downsample_trajectory

        def noted(positions: Any, velocities: Any, *rest: Any) -> Any:
            thinned = downsample(positions, velocities, *rest)
            lengths.append(len(thinned[0]))
            return thinned

        task.downsample_trajectory = noted
        try:
            _, _, _, info = task.gen_sparse_reward_data(actions)
        finally:
            task.downsample_trajectory = downsample
        return bool(info["success"]), max(lengths, default=_STILL)


class _Main(Branch):
    """Its planner is curobo alone, which needs a GPU and a build; and only the expert says what
    placeholders stand for."""

    def prepare(self) -> None:
        for name in _NO_CUROBO:
            sys.modules[name] = _Nothing(name)

    def fix(self) -> None:
        module: Any = importlib.import_module("envs.robot.robot")
        module.CuroboPlanner, set_planner = _Planner, module.Robot.set_planner

        def with_mplib(robot: Any, scene: Any = None) -> None:
            set_planner(robot, scene)
            robot.left_planner.mplib, robot.right_planner.mplib = (
                robot.left_mplib_planner,
                robot.right_mplib_planner,
            )

        module.Robot.set_planner = with_mplib

    def about(self, task: Any) -> dict[str, str]:
        """Let the expert go through its plan in words only: nothing is planned and nothing moves.
        The official evaluation runs it whole beforehand, with the same task object: what it alone
        sets and the check of success reads, stays."""
        pretended = copy.copy(task)
        pretended.need_plan, pretended.info = False, dict(task.info)
        pretended.move = pretended.delay = lambda *_, **__: True
        found = pretended.play_once()["info"]
        for name, value in vars(pretended).items():
            if name not in ("move", "delay"):
                vars(task).setdefault(name, value)
        return found

    def follow(self, task: Any, actions: np.ndarray) -> tuple[bool, int]:
        """Its `take_action` of the last target, whose arms' paths are led through all targets as
        on RLinf_support."""
        robot, set_gripper, ways = task.robot, task.robot.set_gripper, {}
        left = len(robot.get_left_arm_jointState())
        for side, targets in (("left", actions[:, :left]), ("right", actions[:, left:])):
            planner = getattr(robot, f"{side}_mplib_planner")
            ways[side] = Way(planner, getattr(robot, f"get_{side}_gripper_val")(), targets)
            planner.TOPP = ways[side].timed
        robot.set_gripper = lambda _, side, *rest, **options: set_gripper(
            ways[side].opening(), side, *rest, **options
        )
        try:
            task.take_action(actions[-1])
        finally:
            robot.set_gripper = set_gripper
            for way in ways.values():
                way.planner.TOPP = way.plain
        return bool(task.eval_success), max(way.length for way in ways.values())


class Way:
    """One arm's path through ``targets`` [h a], the last of which is its gripper's, and what
    that does meanwhile."""

    def __init__(self, planner: Any, gripper: float, targets: np.ndarray) -> None:
        self.planner, self.plain, self.length = planner, planner.TOPP, _STILL
        self._arm, self._gripper = targets[:, :-1], [gripper, *targets[:, -1]]
        self._openings: Iterator[float] | None = None

    def timed(self, path: np.ndarray, step: float, **options: Any) -> tuple:
        """mplib's ``TOPP`` of a path that starts where ``path`` does and leads through all targets
        but those that repeat.

        As on RLinf_support an arm that should stay moves a little, as there is no timing a path of
        one point, and of a path with more than 500 steps so many are run.
        """
        points = [path[0]]
        for target in self._arm:
            if np.abs(target - points[-1]).max() > _SAME:
                points.append(target)
        if len(points) == 1:
            points.append(path[0] + np.random.normal(0.0, _APART, len(path[0])))
        times, positions, velocities, *rest = self.plain(np.array(points), step, **options)
        kept = np.arange(len(positions))
        if len(kept) > _LONGEST:
            kept = np.unique(np.linspace(0, len(kept) - 1, _LONGEST).astype(int))
        self.length = len(kept) or _STILL
        return times, positions[kept], velocities[kept], *rest

    def opening(self) -> float:
        """The gripper's next one: straight from target to target, for each of which an equal
        share of the steps is."""
        if self._openings is None:
            shares = [len(part) for part in np.array_split(np.arange(self.length), len(self._arm))]
            stretches = zip(self._gripper[:-1], self._gripper[1:], shares)
            self._openings = iter(
                np.concatenate([np.linspace(a, b, n + 1)[1:] for a, b, n in stretches])
            )
        return next(self._openings)


KNOWN = (
    Branch("RLinf_support", "task_config", "gen_sparse_reward_data", "chunk"),
    _Main(MAIN, "env_cfg/task_config", "take_action", "action"),
)


def detect(root: str) -> Branch:
    """The branch of the checkout ``root``; `UserError` where there is none, or one that is not
    known."""
    if not root:
        raise UserError(
            "RoboTwin needs env.root=FOLDER, your own checkout of "
            "github.com/RoboTwin-Platform/RoboTwin: its branch "
            f"{' or '.join(branch.name for branch in KNOWN)}"
        )
    folder = Path(root).expanduser().resolve()
    if not (folder / BASE).is_file():
        raise UserError(f"env.root={root} is no checkout of RoboTwin: there is no {BASE} in it")
    lacks = {branch: branch.lacks(folder) for branch in KNOWN}
    for branch, missing in lacks.items():
        if not missing:
            return branch
    raise UserError(
        f"env.root={root} is laid out like no branch of RoboTwin that can be run here: "
        + "; ".join(
            f"{branch.name} has {' and '.join(missing)}" for branch, missing in lacks.items()
        )
        + f", and this has not. Check one of them out: git -C {root} checkout {KNOWN[0].name}"
    )


def close(task: Any) -> None:
    """Close a task and drop what it holds, which main keeps."""
    task.close_env()
    for name in _HELD:
        vars(task).pop(name, None)


class _Planner:
    """What main asks of curobo's planner, done by its own planner of mplib. Made with arguments
    of curobo's."""

    mplib: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def plan_path(
        self, qpos: Any, pose: Any, constraint_pose: Any = None, arms_tag: Any = None
    ) -> dict[str, Any]:
        from mplib import Pose

        return self.mplib.plan_path(qpos, Pose(pose.p, pose.q), arms_tag=arms_tag, log=False)

    def plan_batch(
        self, qpos: Any, poses: Any, constraint_pose: Any = None, arms_tag: Any = None
    ) -> dict[str, list]:
        found = [self.plan_path(qpos, pose, arms_tag=arms_tag) for pose in poses]
        return {
            key: [one.get(key, ()) for one in found] for key in ("status", "position", "velocity")
        }

    def plan_grippers(self, now: float, target: float) -> dict[str, Any]:
        return self.mplib.plan_grippers(now, target)


class _Nothing(types.ModuleType):
    """Stands in for a module of curobo: it has whatever is asked of it, which does nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):  # what Python asks of modules
            raise AttributeError(name)
        return _Nothing(name)

    def __call__(self, *_: Any, **__: Any) -> None:
        pass
