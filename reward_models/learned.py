"""What the reward models that are trained here share: config, training loop, scoring, saving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from reward_models.network import FrameNetwork, FrameTable, NetworkConfig
from reward_models.settings import LearnedConfig
from reward_models.shaping import ShapedProgress
from vla_rl.devices import pick_device
from vla_rl.errors import ConfigError, UserError
from vla_rl.types import Trajectory


class LearnedReward(ShapedProgress):
    """Base of the learned rewards. A subclass gives the head, the loss on a `FrameTable`, and
    progress per frame."""

    learned: ClassVar[bool] = True
    judge_first: ClassVar[bool] = True  # its quality is checked before RL trains on it
    kind: ClassVar[str] = ""
    head: nn.Module  # made beside the network

    def __init__(self, config: LearnedConfig):
        super().__init__()
        self.config = config
        self.device = pick_device(config.device, "reward.device")
        self.network: FrameNetwork | None = None
        self.generator = torch.Generator().manual_seed(config.seed)

    # --------------------------------------------------------------------------- for the subclasses
    def make_head(self, width: int) -> nn.Module:
        raise TypeError(f"{type(self).__name__} has no head: a learned reward defines make_head")

    def loss(self, table: FrameTable, batch: int) -> Tensor:
        """Scalar loss of one random batch."""
        raise TypeError(f"{type(self).__name__} has no loss: a learned reward defines loss")

    def curve(self, features: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Progress [t+1] of each trajectory from features [n width] of all its frames."""
        raise TypeError(f"{type(self).__name__} has no curve: a learned reward defines curve")

    def before_fit(self, table: FrameTable) -> dict[str, float]:
        """Prepare labels; raises where the data cannot train this model. Returns figures to
        report."""
        return {}

    def draw(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator)

    # ------------------------------------------------------------------------------------- training
    def fit(
        self,
        trajectories: Sequence[Trajectory],
        progress: Callable[[int, float], None] | None = None,
    ) -> dict[str, float]:
        """Train on trajectories (demonstrations count as successes); a trained model goes on from
        where it is.

        ``progress`` is called with (updates so far, loss). Returns the last loss (averaged) and
        counts. Raises `UserError` where labels cannot be made from these trajectories, or where the
        loss is not finite.
        """
        c = self.config
        network = self.network
        cameras = c.network.cameras if network is None else network.cameras
        table = FrameTable.of(trajectories, cameras)
        figures = self.before_fit(table)
        updates = c.updates if network is None else c.refit_updates
        if network is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(c.seed)
                network = self._build(sorted(table.images), table.proprio.shape[1])
            network.set_statistics(table.proprio)
        parameters = [
            p for p in [*network.parameters(), *self.head.parameters()] if p.requires_grad
        ]
        optimizer = torch.optim.AdamW(parameters, lr=c.learning_rate, weight_decay=c.weight_decay)
        steps, rising = max(updates, 2), min(max(0.1, 2 / updates), 0.75)  # no phase of no length
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, c.learning_rate, total_steps=steps, pct_start=rising
        )
        network.train()
        average = float("nan")
        for update in range(updates):
            loss = self.loss(table, c.batch_size)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            value = float(loss.detach())
            if value != value:
                raise UserError(
                    f"the loss of the {self.kind} reward became NaN at update {update + 1}: lower "
                    f"reward.learning_rate ({c.learning_rate})"
                )
            average = value if average != average else 0.95 * average + 0.05 * value
            if progress is not None:
                progress(update + 1, average)
        network.eval()
        self._prepared.clear()
        successes = float(table.success.sum())
        return {
            "loss": average,
            "trajectories": float(len(trajectories)),
            "successes": successes,
            **figures,
        }

    def _build(self, cameras: Sequence[str], proprio_dim: int) -> FrameNetwork:
        self.network = network = FrameNetwork(self.config.network, cameras, proprio_dim).to(
            self.device
        )
        network.generator = self.generator
        self.head = self.make_head(self.config.network.width).to(self.device)
        return network.eval()

    # -------------------------------------------------------------------------------------- scoring
    @property
    def fitted_network(self) -> FrameNetwork:
        """The network; raises `UserError` where there is none yet."""
        if self.network is None:
            raise UserError(
                f"the {self.kind} reward is not trained yet: run 'vla-rl reward fit "
                f"reward={self.kind} data=FOLDER' and give reward.checkpoint=<its folder>, or let "
                "'vla-rl train' do it in its phase 'reward'"
            )
        return self.network

    @torch.no_grad()
    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Progress float32 [t+1] per trajectory, before each decision and at the end."""
        if not trajectories:
            return []
        network = self.fitted_network
        table = FrameTable.of(trajectories, network.cameras)
        if table.proprio.shape[1] != len(network.proprio_mean):
            raise UserError(
                f"the {self.kind} reward was trained with {len(network.proprio_mean)} proprio "
                f"dimensions, rollout {trajectories[0].rollout_id} has {table.proprio.shape[1]}: "
                "train it on data of this robot"
            )
        return [
            c.float().cpu()
            for c in self.curve(self.fitted_network.of_all(table), table.lengths.tolist())
        ]

    def score_figures(
        self, trajectories: Sequence[Trajectory], curves: Sequence[Tensor]
    ) -> dict[str, float]:
        ends = torch.stack([c[-1] for c in curves])
        won = torch.tensor([t.success for t in trajectories])
        return super().score_figures(trajectories, curves) | {
            "reward/progress_end_failures": float(ends[~won].nanmean())
            if (~won).any()
            else float("nan"),
            "reward/progress_end_successes": float(ends[won].nanmean())
            if won.any()
            else float("nan"),
        }

    # --------------------------------------------------------------------------------------- saving
    def extra_state(self) -> dict[str, Any]:
        """Numbers of the subclass that belong to the trained model."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of `extra_state`."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts of tensors, numbers and strings."""
        if self.network is None:
            return {"fitted": False}
        return {
            "fitted": True,
            "kind": self.kind,
            "network_config": dataclasses.asdict(self.config.network),
            "cameras": list(self.network.cameras),
            "proprio_dim": len(self.network.proprio_mean),
            "network": {k: v.clone() for k, v in self.network.state_dict().items()},
            "head": {k: v.clone() for k, v in self.head.state_dict().items()},
            "generator": self.generator.get_state(),
            "extra": self.extra_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `ConfigError` where the state is of another kind of reward."""
        if not state.get("fitted"):
            return
        if state["kind"] != self.kind:
            raise ConfigError(
                f"reward.checkpoint holds a reward of type {state['kind']!r}, the config asks for "
                f"{self.kind!r}: use reward={state['kind']}, or another checkpoint"
            )
        # The stored sizes win: what was trained can only be built as it was.
        self.config = dataclasses.replace(
            self.config, network=NetworkConfig(**state["network_config"])
        )
        network = self._build(list(state["cameras"]), int(state["proprio_dim"]))
        network.load_state_dict(state["network"])
        self.head.load_state_dict(state["head"])
        self.generator.set_state(state["generator"].cpu())
        self.load_extra_state(state["extra"])
        self._prepared.clear()
