"""Hybrid rollouts (PLD, arXiv 2511.00091): the frozen policy acts first, then what was trained on
top of it takes over.

So demonstrations begin where the frozen policy itself gets to, and show what to do from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from vla_rl.data.lerobot_format import BY_BASE
from vla_rl.interfaces import Policy, RememberingPolicy
from vla_rl.rollout.stepwise import Stepwise
from vla_rl.splits import stable_seed
from vla_rl.types import ActionChunk, Observation, PolicyOutput


@dataclasses.dataclass(frozen=True)
class _Turn:
    """How many control steps the frozen policy still has, and what whoever acts remembers."""

    left: int
    memory: Any


class Handover(RememberingPolicy):
    """It decides one control step at a time: ``base`` acts for the first 0
    … ``longest`` of them (drawn by the episode's seed), ``policy`` for the rest, which begins there
    as at an episode's start."""

    chunk_length = 1

    def __init__(self, base: Policy, policy: Policy, longest: int) -> None:
        self.base, self.policy, self.longest = Stepwise(base), Stepwise(policy), longest
        self.embodiment = policy.embodiment

    def initial_memory(self) -> Any:
        return None

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
        memory: Sequence[Any] | None = None,
    ) -> PolicyOutput:
        """The next action of each row [b 1 a]; its ``replay`` tells who chose it."""
        b = len(observation)
        seeds = torch.randint(2**62, (b,)).tolist() if seeds is None else list(seeds)
        turns = [
            self._first(seeds[i]) if memory is None or memory[i] is None else memory[i]
            for i in range(b)
        ]
        actions = torch.empty(b, 1, self.embodiment.action_dim)
        after: list[Any] = [None] * b
        for acting, rows in (
            (self.base, [i for i in range(b) if turns[i].left]),
            (self.policy, [i for i in range(b) if not turns[i].left]),
        ):
            if not rows:
                continue
            options = {"seeds": [seeds[i] for i in rows], "memory": [turns[i].memory for i in rows]}
            out = acting.act(observation[rows], deterministic=deterministic, **options)
            actions[rows] = out.chunk.actions.cpu()
            for row, i in enumerate(rows):
                left = max(0, turns[i].left - 1)
                ends = turns[i].left == 1
                remembered = (
                    self.policy.initial_memory() if ends or out.memory is None else out.memory[row]
                )
                after[i] = _Turn(left, remembered)
        by_base = torch.tensor([turn.left > 0 for turn in turns])
        chunk = ActionChunk.whole(actions)
        return PolicyOutput(chunk, torch.zeros(b), replay={BY_BASE: by_base}, memory=after)

    def _first(self, seed: int) -> _Turn:
        left = stable_seed("handover", seed) % (self.longest + 1)
        return _Turn(left, (self.base if left else self.policy).initial_memory())
