"""An env of one's own: `examples/my_run.yaml` trains on it, `docs/how_to/adding_your_own.md`
says what it must keep."""

from dataclasses import dataclass

import numpy as np

from vla_rl import splits
from vla_rl.errors import ConfigError
from vla_rl.specs import CameraSpec, EmbodimentSpec, SlotObservation, SlotStep, TaskSpec

SIZE = 16  # pixels


@dataclass
class CenterConfig:
    horizon: int = 20
    radius: float = 0.012  # metres


class Center:
    """Move the dot to the middle of the picture."""

    Config = CenterConfig
    privileged_dim = 2  # what a critic may see besides; 0: nothing

    def __init__(self, config):
        self.config = config
        self.embodiment = EmbodimentSpec(
            name="dot",
            action_names=("dx", "dy"),
            action_units=("m", "m"),
            action_low=(-0.02, -0.02),
            action_high=(0.02, 0.02),
            frame="world",
            rotation="none",
            gripper="none",
            control_hz=10.0,
            cameras=(CameraSpec("top", SIZE, SIZE),),
            proprio_names=("share_of_time_left",),
        )
        self.tasks = (
            TaskSpec("center", ("go to the middle",), ("move to the centre",), config.horizon),
        )
        self._slots = {}  # slot -> [episode, position, control steps so far]

    def start(self, slot, episode):
        if episode.task_id != "center":
            raise ConfigError(f"unknown task {episode.task_id!r}: use center")
        rng = splits.rng(episode.task_id, episode.init_state_id, episode.split)
        # held-out cells stay held out
        position = splits.sample_xy(rng, (-0.1, -0.1), (0.1, 0.1), episode.split)
        self._slots[slot] = [episode, position, 0]
        return self._observe(slot)

    def step(self, slot, actions):
        if not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite, got {actions.tolist()}")
        state, rewards, success = self._slots[slot], np.zeros(len(actions), np.float32), False
        for executed, action in enumerate(np.clip(actions, -0.02, 0.02), start=1):
            state[1] = np.clip(state[1] + action, -0.1, 0.1)
            state[2] += 1
            success = bool(np.linalg.norm(state[1]) < self.config.radius)
            rewards[executed - 1] = success
            if success or state[2] == self.config.horizon:
                break
        truncated = not success and state[2] == self.config.horizon
        return SlotStep(
            self._observe(slot),
            rewards,
            executed,
            terminated=success,
            truncated=truncated,
            success=success,
        )

    def close(self):
        self._slots.clear()

    def _observe(self, slot):
        episode, position, elapsed = self._slots[slot]
        grid = np.linspace(-0.12, 0.12, SIZE)
        x, y = (np.exp(-0.5 * ((grid - c) / 0.015) ** 2) for c in position)
        image = np.repeat((255 * np.outer(y, x)).astype(np.uint8)[..., None], 3, axis=2)
        texts = (
            self.tasks[0].instructions
            if episode.split == "train"
            else self.tasks[0].held_out_instructions
        )
        left = np.array([1 - elapsed / self.config.horizon], np.float32)
        instruction = texts[episode.instruction_index % len(texts)]
        return SlotObservation({"top": image}, left, instruction, position.astype(np.float32))

    def collect_episode(self, episode, *, noise_std, rng):
        """Optional: a demonstration. Noise goes into what is executed, the recorded label stays
        clean."""
        observation, rows, actions, step = self.start(0, episode), [], [], None
        while step is None or not (step.terminated or step.truncated):
            label = np.clip(-self._slots[0][1], -0.02, 0.02)
            rows.append(observation)
            actions.append(label)
            step = self.step(0, (label + noise_std * 0.02 * rng.standard_normal(2))[None])
            observation = step.observation
        return {
            "images": {"top": np.stack([row.images["top"] for row in rows])},
            "proprio": np.stack([row.proprio for row in rows]),
            "actions": np.stack(actions).astype(np.float32),
            "instruction": rows[0].instruction,
            "success": step.success,
            "task_id": episode.task_id,
            "init_state_id": episode.init_state_id,
        }
