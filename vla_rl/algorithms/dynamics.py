"""A model of what follows a decision, learned from a replay: an ensemble of networks over
compressed frames.

A state is all that policy and critics read: the frames of an `ActorPolicy`, wide ones as principal
components, and proprio. The ensemble predicts the change of the state, the decision's reward, and
whether the episode ends in it; each imagined row follows one member throughout (PETS' TS∞, Chua et
al. 2018, §5). Members differ by their first weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from vla_rl.algorithms.critics import Critics
from vla_rl.algorithms.optim import GuardedStep, make_adamw
from vla_rl.config.offline import DynamicsConfig
from vla_rl.types import Transitions

PROPRIO = "proprio"  # beside the frames
_FITTED = 1024  # rows that principal components are found from
_SMALL = 1e-6


class StateCodec:
    """Frames {name: [b d]} and proprio [b p] ↔ states [b z] of about unit scale. Tensors only,
    fit for `save_state`."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        self.parts = parts

    @classmethod
    def fit(cls, frames: Mapping[str, Tensor], proprio: Tensor, components: int) -> StateCodec:
        """From rows of data. What is wider than ``components`` keeps so many of its principal
        ones, on one scale."""
        parts: list[dict[str, Any]] = []
        for name, values in [*sorted(frames.items()), (PROPRIO, proprio)]:
            x = values.float()
            mean = x.mean(0)
            if x.shape[1] <= components:
                parts.append(
                    {"name": name, "mean": mean, "scale": _scale(x.std(0, unbiased=False))}
                )
                continue
            x = (x - mean)[torch.linspace(0, len(x) - 1, min(len(x), _FITTED)).long()]
            # of the rows: there are fewer than columns
            power, rows = torch.linalg.eigh((x @ x.T).double())
            kept = min(components, len(x))
            basis = torch.nn.functional.normalize(x.T @ rows[:, -kept:].float(), dim=0)
            # the rest is rounding, and not orthogonal
            basis = basis * (power[-kept:] > _SMALL * power[-1])
            explained = (power[-kept:].sum() / power.sum().clamp(min=_SMALL)).float()
            scale = _scale((x @ basis).square().mean().sqrt())
            parts.append(
                {"name": name, "mean": mean, "scale": scale, "basis": basis, "explained": explained}
            )
        return cls(parts)

    def encode(self, frames: Mapping[str, Tensor], proprio: Tensor) -> Tensor:
        out = []
        for part in self.parts:
            x = (proprio if part["name"] == PROPRIO else frames[part["name"]]).to(
                part["mean"]
            ) - part["mean"]
            out.append((x @ part["basis"] if "basis" in part else x) / part["scale"])
        return torch.cat(out, 1)

    def decode(self, state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Frames and proprio."""
        found, at = {}, 0
        for part in self.parts:
            width = part["basis"].shape[1] if "basis" in part else len(part["mean"])
            x = state[:, at : at + width] * part["scale"]
            found[part["name"]] = (x @ part["basis"].T if "basis" in part else x) + part["mean"]
            at += width
        return found, found.pop(PROPRIO)

    @property
    def explained(self) -> float:
        """The least share of a frame's variance that its components keep."""
        return min(
            [float(part["explained"]) for part in self.parts if "basis" in part], default=1.0
        )

    def to(self, device: torch.device) -> StateCodec:
        return StateCodec(
            [
                {k: v.to(device) if isinstance(v, Tensor) else v for k, v in p.items()}
                for p in self.parts
            ]
        )


class Dynamics:
    """The ensemble and its codec. ``elites`` are the members that imagine."""

    def __init__(
        self,
        config: DynamicsConfig,
        codec: StateCodec,
        actions: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.config, self.codec, self.device = config, codec.to(device), device
        means = {part["name"]: part["mean"][None] for part in self.codec.parts}
        self.size = self.codec.encode(means, means[PROPRIO]).shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = Critics(self.size, actions, config.hidden, config.count, self.size + 2).to(
                device
            )
        self.step_scale = torch.ones(self.size, device=device)  # of a state's change
        self.elites = torch.arange(config.elites)

    def fit(self, data: Transitions, taken: Tensor, generator: torch.Generator) -> dict[str, float]:
        """Train on decisions [n], of which critics read ``taken`` [n d]; returns errors of the
        elites on held-out ones."""
        c = self.config
        before = self.codec.encode(data.extra, data.observations.proprio)
        change = self.codec.encode(data.next_extra, data.next_observations.proprio) - before
        ends = (data.discounts == 0).to(before)
        target = torch.cat([change, data.rewards.to(before)[:, None], ends[:, None]], 1)
        order = torch.randperm(len(before), generator=generator)
        held = max(1, int(c.held_out * len(order)))
        held_out, rows = order[:held], order[held:] if held < len(order) else order
        self.step_scale = change[rows].std(0, unbiased=False)
        optimizer = make_adamw([(self.net.parameters(), c.learning_rate)], (0.9, 0.999), 0.0)
        guard = GuardedStep(10, 10.0)
        for _ in range(c.updates):
            pick = rows[torch.randint(len(rows), (c.batch_size,), generator=generator)]
            loss = self._errors(self.net(before[pick], taken[pick]), target[pick]).mean()
            loss.backward()
            guard.step(optimizer, loss.detach())
        with torch.no_grad():
            errors = self._errors(
                self.net(before[held_out], taken[held_out]), target[held_out]
            ).cpu()
            self.elites = errors.argsort()[: c.elites]
            ahead, _, _ = self._parts(
                self.net(before[held_out], taken[held_out])[self.elites.to(self.device)]
            )
            unexplained = (ahead - change[held_out]).square().mean() / change[
                held_out
            ].square().mean().clamp(min=_SMALL)
        return {
            "dynamics/error": float(errors[self.elites].mean()),
            "dynamics/unexplained_change": float(unexplained),
            "dynamics/explained_frames": self.codec.explained,
        }

    def _parts(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Change [… z], reward […] and logit of the end […]; what never changed in the data does
        not."""
        scale = torch.where(self.step_scale > _SMALL, self.step_scale, 0.0)
        return outputs[..., :-2] * scale, outputs[..., -2], outputs[..., -1]

    def _errors(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Per member [e]."""
        change, reward, logit = self._parts(outputs)
        state = (change - target[:, :-2]).square().mean((1, 2))
        paid = (reward - target[:, -2]).square().mean(1)
        over = binary_cross_entropy_with_logits(
            logit, target[:, -1].expand_as(logit), reduction="none"
        ).mean(1)
        return state + paid + over

    @torch.no_grad()
    def step(
        self, state: Tensor, actions: Tensor, members: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next states [b z], rewards [b] and whether the episode ended (bool [b]), each row
        by its member [b]."""
        outputs = self.net(state, actions)[members, torch.arange(len(state), device=state.device)]
        change, reward, logit = self._parts(outputs)
        return state + change, reward, logit > 0

    def members(self, rows: int, generator: torch.Generator) -> Tensor:
        """An elite for each row [b]."""
        return self.elites[torch.randint(len(self.elites), (rows,), generator=generator)].to(
            self.device
        )

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        return {
            "codec": self.codec.parts,
            "net": dict(self.net.state_dict()),
            "step_scale": self.step_scale,
            "elites": self.elites,
            "actions": self.net.inputs - self.size,
        }

    @classmethod
    def from_state(
        cls, config: DynamicsConfig, state: Mapping[str, Any], device: torch.device
    ) -> Dynamics:
        """Inverse of `state_dict`."""
        model = cls(
            config,
            StateCodec([dict(part) for part in state["codec"]]),
            int(state["actions"]),
            device,
            0,
        )
        model.net.load_state_dict(state["net"])
        model.step_scale, model.elites = state["step_scale"].to(device), state["elites"].cpu()
        return model


def _scale(std: Tensor) -> Tensor:
    return torch.where(std > _SMALL, std, 1.0)
