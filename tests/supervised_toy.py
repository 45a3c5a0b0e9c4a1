"""The toy task with a person beside it, in a module of its own: workers of the process pool
import it."""

from __future__ import annotations

import dataclasses

import numpy as np

from sim.toy import ToyReach


class SupervisedToy(ToyReach):
    """A person halves every action of the third control step of each chunk but the first, and then
    takes the robot back from the policy: the chunk ends there."""

    def start(self, slot, episode):
        self.chunks = getattr(self, "chunks", {}) | {slot: 0}
        return super().start(slot, episode)

    def step(self, slot, actions):
        self.chunks[slot] += 1
        if self.chunks[slot] == 1:
            return super().step(slot, actions)
        sent = np.clip(actions, -1, 1)
        sent[2:] *= 0.5
        step = super().step(slot, sent[:3])
        rewards, human = np.zeros(len(actions), np.float32), np.zeros(len(actions), bool)
        rewards[:3], human[2] = step.rewards, step.executed == 3
        return dataclasses.replace(
            step, rewards=rewards, sent=sent, human=human, label_source="operator"
        )
