"""A policy of which only the network has to be written: what it samples, how likely that was and
how it imitates are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributions import Normal

from policies.inputs import squared_error
from policies.trunk.noise import counter_normals, row_seeds
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput


class Gaussian(nn.Module, Policy):
    """A subclass has `actions`. Each number of a chunk is drawn by itself."""

    log_prob_axes = ("control_step", "action_dim")

    def __init__(self, config: Any, embodiment: EmbodimentSpec) -> None:
        super().__init__()
        self.config, self.embodiment, self.chunk_length = config, embodiment, config.chunk_length

    def actions(self, observation: Observation) -> Normal:
        """How the chunk [b h a] is distributed, in physical units. Observations hold raw pixels and
        physical units: scaling them is the policy's business."""
        raise NotImplementedError

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """The mean, or a draw of it."""
        normal = self.actions(observation)
        sample = mean = normal.mean
        if not deterministic:
            noise = counter_normals(row_seeds(seeds, len(mean)), mean[0].numel())
            sample = mean + normal.stddev * noise.view(mean.shape).to(mean.device)
        return PolicyOutput(
            ActionChunk.whole(sample), normal.log_prob(sample), replay={"sample": sample}
        )

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        normal = self.actions(observation)
        return PolicyEvaluation(normal.log_prob(replay["sample"]), normal.entropy())

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error of the mean over the control steps that count."""
        return squared_error(self.actions(observation).mean, actions, valid)
