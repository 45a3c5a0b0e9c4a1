"""The embedded dual-arm suite as a `vla_rl.interfaces.Simulator`: whole chunks in one call, one
rendering per decision.

Two six-joint arms with parallel grippers on one table, eight tasks, of which three cannot be done
with one arm. An episode is a new PhysX scene, built the same way each time (`sim.dualarm.physics`);
what draws it is built once per process and shared by all slots (`sim.dualarm.pictures`). Pictures
are RGB, upright.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.dualarm import kinematics
from sim.dualarm.demonstrator import Demonstrator, make_demonstrator
from sim.dualarm.kinematics import ARMS, JOINTS
from sim.dualarm.settings import DualArmConfig
from sim.dualarm.shapes import THINGS
from sim.dualarm.tasks import MAX_THINGS, PRIVILEGED_DIM, TASKS, Task, place_things
from sim.slots import checked_actions, chunk_result, instruction, lasting, running, task_named
from sim.vulkan import ensure_driver, quiet_import
from vla_rl.specs import CameraSpec, EmbodimentSpec, EpisodeSpec, Mirror, SlotObservation, SlotStep

if TYPE_CHECKING:
    from sim.dualarm.judge import Judge, View
    from sim.dualarm.physics import World
    from sim.dualarm.pictures import Pictures

CONTROL_HZ = 20.0
MAX_STEP = 0.08  # rad that a joint's target may move in a control step
GRIP_STEP = 0.2  # of the gripper's way
_AHEAD = 0.25  # rad that a target may run ahead of its joint, as where something blocks the arm


class DualArmSimulator:
    """See the module's text. The renderer is made when the first picture is wanted."""

    def __init__(self, config: DualArmConfig) -> None:
        quiet_import("The dual-arm suite")
        self.config = config
        self._task = {name: TASKS[name] for name in config.tasks}
        self.tasks = lasting((task.spec for task in self._task.values()), config.horizon)
        self._horizon = {t.task_id: t.horizon for t in self.tasks}
        self.embodiment = _embodiment(config)
        self.privileged_dim = PRIVILEGED_DIM
        # As float32, which is what policies send: their largest number is then the bound itself.
        bounds = (self.embodiment.action_low, self.embodiment.action_high)
        self._low, self._high = (
            np.array(bound, dtype=np.float32).astype(np.float64) for bound in bounds
        )
        self._home = np.stack([kinematics.home(arm) for arm in ARMS])
        self._slots: dict[int, _Slot] = {}
        self._pictures: Pictures | None = None

    # ---------------------------------------------------------------------- the Simulator interface
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """Build ``slot``'s world for the episode. `ConfigError` for a task that is not
        configured."""
        from sim.dualarm.judge import Judge
        from sim.dualarm.physics import World

        task = task_named(self._task, episode.task_id)
        world = World(place_things(task, episode.init_state_id, episode.split), self._home)
        self._slots[slot] = _Slot(task, episode, world, Judge(task, world))
        return self.observe(slot)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Run ``actions`` [h 14] until they are over or the episode ends; observe once."""
        s = running(self._slots, slot)
        actions = checked_actions(slot, actions, len(self._low))
        rewards = np.zeros(len(actions), dtype=np.float32)
        executed, horizon = 0, self._horizon[s.task.task_id]
        for row in np.clip(actions, self._low, self._high):
            command = self._command(s.world, row.reshape(2, JOINTS + 1))
            s.world.control_step(command)
            s.elapsed += 1
            executed += 1
            s.judge.look()
            s.tracker.update(opening=s.judge.opening(command))
            s.success = s.judge.success()
            if s.success:
                rewards[executed - 1] = 1.0
            if s.success or s.elapsed >= horizon:
                break
        truncated = not s.success and s.elapsed >= horizon
        s.over = s.success or truncated
        failure = s.tracker.verdict() if truncated else ""
        return chunk_result(self.observe(slot), rewards, executed, s.success, truncated, failure)

    def close(self) -> None:
        """Free worlds and renderer. May be called again."""
        self._slots.clear()
        self._pictures = None

    # ------------------------------------------------------------------------------------ beyond it
    def observe(self, slot: int) -> SlotObservation:
        """What the slot shows now; draws every configured camera."""
        s = running(self._slots, slot, over=True)
        return SlotObservation(
            images=self._draw(s.world),
            proprio=self._proprio(s),
            instruction=instruction(s.task.spec, s.episode),
            privileged=s.judge.privileged(1.0 - s.elapsed / self._horizon[s.task.task_id]),
        )

    def demonstrator(self, slot: int, speed: float = 1.0) -> Demonstrator:
        """A fresh scripted expert for the episode that just started in ``slot``; feed it `state`
        at each control step."""
        s = running(self._slots, slot)
        return make_demonstrator(s.task.task_id, s.judge.view, speed)

    def state(self, slot: int) -> View:
        """What the scripted experts read."""
        return running(self._slots, slot, over=True).judge.view

    def world(self, slot: int) -> World:
        """The slot's physics."""
        return running(self._slots, slot, over=True).world

    def action(self, slot: int, command: np.ndarray) -> np.ndarray:
        """The action [14] (physical units, within its bounds) that asks for ``command`` [2, 7],
        as experts give it."""
        asked = command.copy()
        if self.config.control == "joint_delta":
            asked[:, :JOINTS] -= self.world(slot).command[:, :JOINTS]
        return np.clip(asked.ravel(), self._low, self._high)

    def _command(self, world: World, asked: np.ndarray) -> np.ndarray:
        """Where the drives go in this control step [2, 7]: no faster than `MAX_STEP`, nor far
        ahead of the joints."""
        before, wanted = world.command, asked.copy()
        if self.config.control == "joint_delta":
            wanted[:, :JOINTS] += before[:, :JOINTS]
        measured = np.stack([world.qpos(arm)[:JOINTS] for arm in (0, 1)]).astype(np.float64)
        joints = before[:, :JOINTS] + np.clip(
            wanted[:, :JOINTS] - before[:, :JOINTS], -MAX_STEP, MAX_STEP
        )
        joints = np.clip(
            np.clip(joints, measured - _AHEAD, measured + _AHEAD), kinematics.LOW, kinematics.HIGH
        )
        grip = before[:, JOINTS:] + np.clip(
            wanted[:, JOINTS:] - before[:, JOINTS:], -GRIP_STEP, GRIP_STEP
        )
        return np.hstack([joints, grip])

    def _proprio(self, s: _Slot) -> np.ndarray:
        """float32: measured joints (rad) and gripper openings (0 ... 1); with ``observe=state``
        the things as well."""
        view = s.judge.view
        parts = [part for arm in (0, 1) for part in (view.joints(arm), [view.opening(arm)])]
        if self.config.observe == "state":
            names = list(s.task.zones)
            for name in names:
                down = s.world.pressed(name) if THINGS[name].kind == "button" else 0.0
                parts += [
                    view.position(name),
                    [np.cos(view.yaw(name)), np.sin(view.yaw(name)), s.judge.tilt(name), down],
                ]
            parts.append(np.zeros(7 * (MAX_THINGS - len(names))))
        return np.concatenate(parts).astype(np.float32)

    def _draw(self, world: World) -> dict[str, np.ndarray]:
        if not self.config.pictured:
            return {}
        if self._pictures is None:
            ensure_driver()
            from sim.dualarm.pictures import Pictures

            c = self.config
            self._pictures = Pictures(
                c.pictured, c.camera_size, c.camera_width or c.camera_size, c.look
            )
        return self._pictures.take(world)


class _Slot:
    """One slot's episode: its world, who watches it and how far it is."""

    def __init__(self, task: Task, episode: EpisodeSpec, world: World, judge: Judge) -> None:
        self.task, self.episode, self.world, self.judge = task, episode, world, judge
        self.tracker = judge.tracker()
        self.elapsed = 0
        self.success = self.over = False


def _embodiment(config: DualArmConfig) -> EmbodimentSpec:
    delta = config.control == "joint_delta"
    low, high = (np.append(v, e) for v, e in ((kinematics.LOW, 0.0), (kinematics.HIGH, 1.0)))
    if delta:
        low[:JOINTS], high[:JOINTS] = -MAX_STEP, MAX_STEP
    joints = [
        f"{arm}_{name}"
        for arm in ARMS
        for name in (*(f"joint_{i}" for i in range(1, JOINTS + 1)), "gripper")
    ]
    things = [
        f"thing_{i}_{key}"
        for i in range(MAX_THINGS)
        for key in ("x", "y", "z", "cos", "sin", "tilt", "down")
    ]
    height, width = config.camera_size, config.camera_width or config.camera_size
    return EmbodimentSpec(
        name=f"dualarm_{config.control}",
        action_names=tuple(
            name.replace("joint_", "d_joint_") if delta else name for name in joints
        ),
        action_units=(("rad",) * JOINTS + ("share",)) * 2,
        action_low=(*low.tolist(), *low.tolist()),
        action_high=(*high.tolist(), *high.tolist()),
        frame="joints",
        rotation="none",
        gripper="0 close, 1 open",
        control_hz=CONTROL_HZ,
        cameras=tuple(CameraSpec(name, height, width) for name in config.pictured),
        proprio_names=(*joints, *(things if config.observe == "state" else ())),
        mirror=_mirror(config, things),
    )


def _mirror(config: DualArmConfig, things: list[str]) -> Mirror | None:
    """At the plane x = 0, where all tasks are symmetric: arms and wrist cameras change places."""
    wrists = ("left_wrist", "right_wrist")
    seen = [name in config.pictured for name in wrists]
    if not all(TASKS[name].symmetric for name in config.tasks) or seen[0] != seen[1]:
        return None
    kinds = dict.fromkeys(("joint", "d_joint" if config.control == "joint_delta" else "joint"))
    joints = [f"{kind}_{i}" for kind in kinds for i in range(1, JOINTS + 1)]
    turned = [f"{arm}_{kind}_{i + 1}" for arm in ARMS for kind in kinds for i in kinematics.TURNED]
    moved = (
        [name for name in things if name.endswith(("_x", "_sin"))]
        if config.observe == "state"
        else []
    )
    pairs = [(f"left_{name}", f"right_{name}") for name in (*joints, "gripper")]
    return Mirror((*turned, *moved), (*pairs, ("left", "right"), *([wrists] if all(seen) else [])))
