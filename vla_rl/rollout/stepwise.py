"""A policy one control step at a time, so that every control step is observed: what a dataset of
demonstrations holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vla_rl.interfaces import Policy, RememberingPolicy
from vla_rl.splits import stable_seed
from vla_rl.types import ActionChunk, Observation, PolicyOutput


@dataclasses.dataclass(frozen=True)
class _Queue:
    """What is left of a row's chunk [h a], and what the policy wants to remember at its next
    decision."""

    actions: Tensor
    memory: Any


class Stepwise(RememberingPolicy):
    """It follows another's chunks to their end, deciding anew only then;
    it does the same."""

    chunk_length = 1

    def __init__(self, policy: Policy) -> None:
        self.policy, self.embodiment = Policy.of(policy), policy.embodiment

    def initial_memory(self) -> Any:
        first = self.policy.initial_memory() if "memory" in self.policy.can else None
        return _Queue(torch.zeros(0, self.embodiment.action_dim), first)

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
        memory: Sequence[Any] | None = None,
    ) -> PolicyOutput:
        """The next action of each row's chunk [b 1 a]."""
        queues = (
            [self.initial_memory() for _ in range(len(observation))]
            if memory is None
            else list(memory)
        )
        ended = [i for i, queue in enumerate(queues) if not len(queue.actions)]
        if ended:
            options: dict[str, Any] = {
                "seeds": None if seeds is None else [seeds[i] for i in ended]
            }
            if "memory" in self.policy.can:
                options["memory"] = [queues[i].memory for i in ended]
            out = self.policy.act(observation[ended], deterministic=deterministic, **options)
            for row, i in enumerate(ended):
                steps = int(out.chunk.valid[row].long().cumprod(0).sum())
                left = None if out.memory is None else out.memory[row]
                queues[i] = _Queue(out.chunk.actions[row, :steps], left)
        actions = torch.stack([queue.actions[:1] for queue in queues])
        left = [dataclasses.replace(queue, actions=queue.actions[1:]) for queue in queues]
        chunk, log_prob = ActionChunk.whole(actions), actions.new_zeros(len(actions))
        return PolicyOutput(chunk, log_prob, replay={}, memory=left)


ASKED = "asked"
"""In a replay, [b 1 a]: what a policy asked for, where `Disturbed` had something else executed."""


class Disturbed(RememberingPolicy):
    """Control steps of another (`Stepwise`) with Gaussian noise of ``noise`` half-ranges on what is
    executed, grippers left alone: it then shows how it finds back (DART, Laskey et al. 2017, arXiv
    1703.09327)."""

    chunk_length = 1

    def __init__(self, policy: RememberingPolicy, noise: float) -> None:
        self.policy, self.embodiment = policy, policy.embodiment
        low, high = (
            torch.tensor(x) for x in (self.embodiment.action_low, self.embodiment.action_high)
        )
        self._spread = noise * (high - low) / 2.0
        self._spread[list(self.embodiment.gripper_dims)] = 0.0

    def initial_memory(self) -> Any:
        return self.policy.initial_memory()

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
        memory: Sequence[Any] | None = None,
    ) -> PolicyOutput:
        """The other's control step [b 1 a], disturbed; ``replay`` has it as it was `ASKED`."""
        out = self.policy.act(observation, deterministic=deterministic, seeds=seeds, memory=memory)
        asked = out.chunk.actions
        if seeds is None:
            drawn = torch.randn(asked.shape)
        else:  # not what the policy samples by
            own = [torch.Generator().manual_seed(stable_seed("policy_noise", s)) for s in seeds]
            drawn = torch.stack([torch.randn(asked.shape[1:], generator=g) for g in own])
        noisy = asked + (drawn * self._spread).to(asked)
        chunk = ActionChunk(noisy, out.chunk.valid)
        return dataclasses.replace(out, chunk=chunk, replay=out.replay | {ASKED: asked})
