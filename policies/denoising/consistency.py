"""One-step and few-step students of a denoising policy, and what they learn by.

A student maps a noisy chunk at any time of its grid straight to an action. It keeps the teacher's
trunk and learns a head, the same kind of expert. With the velocity parametrisation f(x, t) = x −
t·v; else f = c_skip·x + c_out·output with c_skip = σ²/(s² + σ²), c_out = s/√(s² + σ²), σ = 0.5, s =
10·t (LCM, Luo et al. 2023, arXiv 2310.04378, §4.1). Both are the identity at t = 0.

- "same_noise" (RL-100, arXiv 2510.14830, its code's default): from one first noise ε, f is to give
  the action A that the teacher's deterministic path ends at; with several steps also from the
  points (1 − t)·A + t·ε between.
- "lcm" (consistency distillation, Song et al. 2023, arXiv 2303.01469, eq. 7): f at a point of the
  teacher's path is to equal what an averaged copy of the student gives at the path's next point.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from policies.denoising.base import DenoisingBase
from policies.denoising.expert import ActionExpert, Cache
from policies.denoising.settings import ConsistencyConfig
from policies.normalization import VectorStats
from policies.tokenizer import WordTokenizer
from policies.trunk.noise import counter_normals, row_seeds
from vla_rl.errors import ConfigError
from vla_rl.types import EmbodimentSpec, Observation, PolicyOutput

if TYPE_CHECKING:
    from policies.denoising.policy import DenoisingVLA

_SIGMA_DATA, _TIME_SCALE = 0.5, 10.0


class Grid(NamedTuple):
    """Where a student's steps start, float32 [n] each, noisiest first: x = signal · action +
    noise · ε at ``time``."""

    time: Tensor
    signal: Tensor
    noise: Tensor

    @classmethod
    def straight(cls, steps: int, device: torch.device | str = "cpu") -> Grid:
        """Times 1, 1 − 1/n, … on the straight line between action and noise."""
        time = 1.0 - torch.arange(steps, dtype=torch.float32, device=device) / steps
        return cls(time, 1.0 - time, time)

    @classmethod
    def of_chain(cls, teacher: DenoisingVLA, steps: int) -> Grid:
        """Every K/n-th step of the teacher's own chain."""
        total = len(teacher.chain_time)
        if steps < 1 or total % steps:
            raise ConfigError(
                f"a student that learns by method 'lcm' takes some of its teacher's {total} steps, "
                f"and {steps} does not divide that: use steps that do, or method 'same_noise'"
            )
        pick = torch.arange(0, total, total // steps, device=teacher.device)
        return cls(teacher.chain_time[pick], teacher.chain_signal[pick], teacher.chain_noise[pick])

    def lists(self) -> dict[str, list[float]]:
        return {
            f"step_{name}s": [float(x) for x in column] for name, column in self._asdict().items()
        }


def predict_action(
    expert: ActionExpert,
    prediction: str,
    x: Tensor,
    time: Tensor,
    noise: Tensor,
    modulation: Tensor,
    cache: Cache,
) -> Tensor:
    """f(x, t): the action [b s h a] for noisy chunks ``x`` [b s h a]; ``time`` and ``noise``
    broadcast against x."""
    output, _ = expert(x, modulation, cache)
    if prediction == "velocity":
        return x - noise * output
    scaled = _TIME_SCALE * time
    total = scaled.square() + _SIGMA_DATA**2
    return _SIGMA_DATA**2 / total * x + scaled / total.sqrt() * output


def same_noise_loss(
    expert: ActionExpert,
    prediction: str,
    grid: Grid,
    cache: Cache,
    first_noise: Tensor,
    target: Tensor,
) -> Tensor:
    """Squared error [b], mean over the grid's points, chunks and dimensions; ``first_noise`` and
    ``target`` [b s h a]."""
    b, s = first_noise.shape[:2]
    # [n·s 1 1]
    time, signal, noise = (column.repeat_interleave(s)[:, None, None] for column in grid)
    actions, noises = (x.repeat(1, len(grid.time), 1, 1) for x in (target, first_noise))
    modulation = expert.modulate(grid.time).repeat_interleave(s, 0).expand(b, -1, -1)
    guess = predict_action(
        expert, prediction, signal * actions + noise * noises, time, noise, modulation, cache
    )
    return (guess - actions).square().mean((1, 2, 3))


class ConsistencyVLA(DenoisingBase):
    """A student policy. Its decisions have no tractable likelihood: it acts, and learns from a
    `DenoisingVLA` alone.

    `replay` holds ``first_noise`` [b h a]. A deterministic decision with seeds is the same as a
    sampled one, since the first noise is all that is random.
    """

    policy_type = "consistency_vla"
    config_class = ConsistencyConfig
    config: ConsistencyConfig
    grid_time: Tensor
    grid_signal: Tensor
    grid_noise: Tensor

    def __init__(
        self,
        config: ConsistencyConfig,
        embodiment: EmbodimentSpec,
        action_stats: VectorStats | None = None,
        proprio_stats: VectorStats | None = None,
        tokenizer: WordTokenizer | None = None,
    ):
        super().__init__(config, embodiment, action_stats, proprio_stats, tokenizer)
        for name in ("time", "signal", "noise"):
            values = torch.tensor(getattr(config, f"step_{name}s"), dtype=torch.float32)
            self.register_buffer(f"grid_{name}", values, persistent=False)
        # The averaged copy that method "lcm" learns from. In a list, since it is no part of the
        # policy and its state dict.
        self._target: list[ActionExpert] = []
        self._kept_modulation: tuple[tuple[torch.device, int], Tensor] | None = None

    def train(self, mode: bool = True) -> ConsistencyVLA:
        self._kept_modulation = None
        return super().train(mode)

    def _modulation(self) -> Tensor:
        """The expert's modulation at the grid's times; kept while the policy only acts, since
        its weights then stay."""
        weight = self.expert.modulation.weight
        # (tensors made in inference mode count no versions)
        if self.training or weight.is_inference():
            return self.expert.modulate(self.grid_time)
        key = (self.device, weight._version)  # another one after loading weights
        if self._kept_modulation is None or self._kept_modulation[0] != key:
            self._kept_modulation = (key, self.expert.modulate(self.grid_time))
        return self._kept_modulation[1]

    @property
    def grid(self) -> Grid:
        return Grid(self.grid_time, self.grid_signal, self.grid_noise)

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row, in physical units; see `vla_rl.interfaces.Policy`.
        ``behavior_log_prob`` is 0 [b]."""
        b, h, a = len(observation), self.chunk_length, self.embodiment.action_dim
        if deterministic:
            noise = self._first_noise(seeds, b)
        else:
            noise = counter_normals(row_seeds(seeds, b), h * a).view(b, h, a).to(self.device)
        cache, value = self.encode(observation)
        return PolicyOutput(
            chunk=self._chunk(self.solve(cache, noise[:, None])[:, 0]),
            behavior_log_prob=torch.zeros(b, device=self.device),
            replay={"first_noise": noise},
            value=value,
        )

    def _from_noise(
        self, observation: Observation, noise: Tensor, replay: Mapping[str, Tensor] | None
    ) -> Tensor:
        cache, _ = self.encode(observation, replay)
        return self.solve(cache, noise[:, None])[:, 0]

    def solve(self, cache: Cache, first_noise: Tensor) -> Tensor:
        """Actions (normalised) [b s h a] from ``first_noise`` [b s h a], in ``denoising_steps``
        steps."""
        modulation, x = self._modulation(), first_noise
        action = x
        for i, (time, signal, noise) in enumerate(zip(*self.grid, strict=True)):
            if i:  # to the next point between the action found and the noise that explains x
                epsilon = (x - self.grid_signal[i - 1] * action) / self.grid_noise[i - 1]
                x = signal * action + noise * epsilon
            action = predict_action(
                self.expert, self.config.prediction, x, time, noise, modulation[i], cache
            )
        return action

    # ------------------------------------------------------------------------------------- learning
    def distillation_loss(
        self,
        observation: Observation,
        teacher: DenoisingVLA,
        generator: torch.Generator,
        noises: int = 8,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss on ``noises`` first noises per row, drawn from ``generator`` (on the CPU).

        Metrics: ``loss``; ``action_error``, mean distance per dimension to the teacher's actions
        (physical units).
        """
        b, h, a = len(observation), self.chunk_length, self.embodiment.action_dim
        first_noise = torch.randn(b, noises, h, a, generator=generator).to(self.device)
        path = teacher.teach(observation, first_noise)
        with torch.no_grad():
            cache, _ = self.encode(observation)
        prediction = self.config.prediction
        if self.config.method == "same_noise":
            loss = same_noise_loss(
                self.expert, prediction, self.grid, cache, first_noise, path[:, -1]
            ).mean()
        else:
            index = torch.randint(len(teacher.chain_time), (b, noises), generator=generator).to(
                self.device
            )
            loss = self._lcm_loss(teacher, path, index, cache)
        with torch.no_grad():
            gap = self.denormalize(self.solve(cache, first_noise)) - self.denormalize(path[:, -1])
        return loss, {"loss": float(loss.detach()), "action_error": float(gap.abs().mean())}

    def _lcm_loss(self, teacher: DenoisingVLA, path: Tensor, index: Tensor, cache: Cache) -> Tensor:
        """Squared distance between f at step ``index`` [b s] of the path and the averaged f at
        the step after it."""
        target_expert = self._averaged_expert()
        b, s = index.shape
        rows, columns = (
            torch.arange(b, device=self.device)[:, None],
            torch.arange(s, device=self.device),
        )
        # after the last step time and noise are 0, and f is the identity
        ended = torch.zeros(1, device=self.device)
        times, noises = (
            torch.cat([teacher.chain_time, ended]),
            torch.cat([teacher.chain_noise, ended]),
        )

        def guess(expert: ActionExpert, at: Tensor) -> Tensor:
            time, noise = times[at][..., None, None], noises[at][..., None, None]
            x = path[rows, at, columns]
            return predict_action(
                expert, self.config.prediction, x, time, noise, expert.modulate(times)[at], cache
            )

        with torch.no_grad():
            target = guess(target_expert, index + 1)
        return (guess(self.expert, index) - target).square().mean()

    def _averaged_expert(self) -> ActionExpert:
        if not self._target:
            self._target.append(copy.deepcopy(self.expert).requires_grad_(False))
        return self._target[0]

    def distillation_state(self) -> dict[str, Any]:
        """What distillation needs to go on, besides the weights: fit for
        `vla_rl.storage.save_state`."""
        return {"target": [dict(target.state_dict()) for target in self._target]}

    def load_distillation_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `distillation_state`, after the weights are loaded."""
        for weights in state["target"]:
            self._averaged_expert().load_state_dict(weights)

    @torch.no_grad()
    def after_update(self, decay: float = 0.95) -> None:
        """Moves the averaged copy of method "lcm"; to be called after each optimiser step."""
        for target in self._target:
            for average, now in zip(target.parameters(), self.expert.parameters(), strict=True):
                average.lerp_(now, 1.0 - decay)
