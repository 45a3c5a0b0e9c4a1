"""The best of several proposals of a policy, by a critic's judgement, moved a little further up
(PA-RL, arXiv 2412.06685).

What is saved is the policy beneath alone (`OwnPolicy`): it is trained to propose what was chosen,
and acts without any critic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from policies.actors.own import OwnPolicy
from policies.actors.settings import ImprovedConfig
from policies.trunk.noise import row_seeds
from vla_rl.types import Observation, PolicyOutput, Trajectory

# the frame that holds the proposals, half precision [b n h·a] in half-ranges
CANDIDATES = "candidates"
_SEED_STEP = 0x9E3779B97F4A7C15  # between the seeds of a row's proposals
_PROPOSALS = 0x51ED27  # the seed of proposals for frames that nobody acted on


class ImprovedPolicy(OwnPolicy):
    """An `ActorPolicy` with candidates. Its deterministic decision is that of the policy beneath;
    without a ``judge`` every one is."""

    config_class = ImprovedConfig
    config: ImprovedConfig
    candidates, named = CANDIDATES, "improved"
    can = frozenset({"ranked_candidates", "guidance"})

    def __init__(self, config: ImprovedConfig, base: Any) -> None:
        """As of `OwnPolicy`."""
        super().__init__(config, base)
        self.judge: Callable[[Tensor, Tensor], Tensor] | None = None

    # ------------------------------------------------------------------------------------- learning
    def improve(self, encoded: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """See `ActorPolicy`: of ``actions`` [b n d] the ``keep`` best, each at the best point
        of its way up."""
        c, judge = self.config, self._judge()
        with torch.no_grad():
            best = judge(encoded, actions).topk(min(c.keep, actions.shape[1]), dim=1).indices
        at = actions.gather(1, best[..., None].expand(-1, -1, actions.shape[2]))
        chosen, value = at, torch.full(at.shape[:2], -torch.inf, device=at.device)
        for step in range(c.steps + 1):
            at = at.detach().requires_grad_(step < c.steps)
            with torch.enable_grad():
                found = judge(encoded, at)
                slope = torch.autograd.grad(found.sum(), at)[0] if step < c.steps else None
            better = found.detach() > value
            chosen, value = (
                torch.where(better[..., None], at.detach(), chosen),
                torch.where(better, found.detach(), value),
            )
            if slope is not None:
                slope = slope / slope.norm(dim=-1, keepdim=True).clamp(min=1e-8)
                at = (at.detach() + c.step_size * slope).clamp(-1.0, 1.0)
        return chosen, value

    def propose(
        self, encoded: Tensor, frames: Mapping[str, Tensor], noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The best of the frames' proposals [b l], improved; no density."""
        chosen, value = self.improve(encoded.detach(), frames[CANDIDATES].to(encoded))
        return _rows(chosen, value.argmax(1)), encoded.new_zeros(len(encoded))

    @torch.no_grad()
    def annotate(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Besides what it sees, proposals for each frame: those of acting, and new ones where
        nobody acted."""
        frames = super().annotate(trajectory)
        kept = trajectory.replay.get(CANDIDATES)
        seen = trajectory.final_observation
        if kept is None:
            seen = Observation.cat([trajectory.observations, seen])
        new = self._proposals(seen, [_PROPOSALS + i for i in range(len(seen))]).cpu()
        return {**frames, CANDIDATES: new if kept is None else torch.cat([kept, new])}

    def _judge(self) -> Callable[[Tensor, Tensor], Tensor]:
        if self.judge is None:
            raise RuntimeError(
                "an improved policy was asked to choose before an algorithm gave it a judge"
            )
        return self.judge

    # --------------------------------------------------------------------------------------- acting
    def _proposals(self, observation: Observation, seeds: Sequence[int]) -> Tensor:
        """[b samples h·a] half precision, in half-ranges."""
        n, b = self.config.samples, len(observation)
        rows = [i for i in range(b) for _ in range(n)]
        drawn = [(seeds[i] + k * _SEED_STEP) % 2**62 for i in range(b) for k in range(n)]
        actions = self.base.act(observation[rows], seeds=drawn).chunk.actions
        return self.to_unit(actions).reshape(b, n, -1).half()

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row; sampled ones are chosen among proposals."""
        if deterministic or self.judge is None:
            return super().act(observation, deterministic=deterministic, seeds=seeds)
        seeds = row_seeds(seeds, len(observation))
        frames = {
            **self.base.frame_features(observation),
            CANDIDATES: self._proposals(observation, seeds),
        }
        encoded = self.encode(frames)
        with torch.inference_mode(False):
            chosen, value = self.improve(encoded.clone(), frames[CANDIDATES].to(encoded).clone())
        pick = value.argmax(1)
        if self.config.temperature:
            draws = [torch.Generator().manual_seed(seed % 2**62) for seed in seeds]
            shares = (value / self.config.temperature).softmax(1)
            pick = torch.stack(
                [torch.multinomial(row, 1, generator=g)[0] for row, g in zip(shares.cpu(), draws)]
            ).to(pick)
        action = _rows(chosen, pick)
        return self.decided(action, action, frames)


def _rows(actions: Tensor, pick: Tensor) -> Tensor:
    """[b n d], [b] → [b d]."""
    return actions[torch.arange(len(actions), device=actions.device), pick]
