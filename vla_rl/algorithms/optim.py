"""Optimiser steps that survive a loss that is not finite, optimiser state without pickles; for PPO and SFT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from vla_rl.errors import ConfigError, TrainingDiverged


def require_choice(owner: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `ConfigError` that lists the choices unless ``value`` is one of them."""
    if value not in choices:
        raise ConfigError(f"{owner}.{name}={value!r} is not a choice; use one of: {', '.join(choices)}")


def require_range(
    owner: str, name: str, value: float | int | None, low: float | int, high: float | int = float("inf")
) -> None:
    """Raise `ConfigError` unless ``value`` is None or lies in [low, high]."""
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{owner}.{name}={value!r} is out of range; use a value in [{low}, {high}]")


def make_adamw(
    groups: Sequence[tuple[Iterable[Parameter], float]], betas: Sequence[float], weight_decay: float, eps: float = 1e-8
) -> torch.optim.AdamW:
    """AdamW over (parameters, learning rate) groups; empty groups and frozen parameters are left out.

    Raises `ConfigError` where no parameter is left to train.
    """
    trained = [([p for p in params if p.requires_grad], lr) for params, lr in groups]
    param_groups = [{"params": params, "lr": lr} for params, lr in trained if params]
    if not param_groups:
        raise ConfigError("there is nothing to train: no parameter has requires_grad set; unfreeze some of the policy")
    plain = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for ps, _ in trained for p in ps)
    return torch.optim.AdamW(param_groups, betas=(betas[0], betas[1]), weight_decay=weight_decay, eps=eps, fused=plain)


def even_split(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A random permutation of ``count`` indices in parts of at most ``size``, as even as can be."""
    return torch.randperm(count, generator=generator).tensor_split(max(1, -(-count // size)))


class GuardedStep:
    """Clips gradients and steps, unless something is not finite: then the update is skipped and counted.

    After ``max_bad_updates`` skipped updates in a row it raises `TrainingDiverged`. ``skipped`` counts all of them.
    """

    def __init__(self, max_bad_updates: int, grad_clip: float | None):
        self.max_bad_updates, self.grad_clip = max_bad_updates, grad_clip
        self.skipped = self.bad_in_a_row = self.updates = 0

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> float | None:
        """One update from the gradients that lie ready; returns their norm before clipping, or None when skipped.

        ``loss`` is the (detached) scalar the gradients came from. Gradients are cleared either way.
        """
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        finite = bool(torch.isfinite(norm) & torch.isfinite(loss).to(norm.device))  # the update's one synchronisation
        if finite:
            if self.grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(params, self.grad_clip, norm)
            optimizer.step()
            self.updates += 1
            self.bad_in_a_row = 0
        optimizer.zero_grad(set_to_none=True)
        if finite:
            return float(norm)
        self.skipped += 1
        self.bad_in_a_row += 1
        if self.bad_in_a_row >= self.max_bad_updates:
            raise TrainingDiverged(
                f"{self.bad_in_a_row} updates in a row had a loss or gradient that was not finite (last loss "
                f"{float(loss):g}, gradient norm {float(norm):g}). Resume from the last checkpoint with a lower "
                f"learning rate, or look for bad values in observations and rewards."
            )
        return None

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "bad_in_a_row": self.bad_in_a_row, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.bad_in_a_row = int(state["skipped"]), int(state["bad_in_a_row"])
        self.updates = int(state["updates"])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimiser's state as nested dicts with string keys, lists, tensors, numbers: fit for JSON and safetensors."""
    state = optimizer.state_dict()
    return {
        "state": {str(k): dict(v) for k, v in state["state"].items()},
        "param_groups": [
            {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()} for group in state["param_groups"]
        ],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Inverse of `optimizer_state`. Raises ConfigError where the parameters are not those the state was saved for."""
    groups = [dict(g, betas=tuple(g["betas"])) if "betas" in g else dict(g) for g in state["param_groups"]]
    mine = [len(g["params"]) for g in optimizer.param_groups]
    if mine != [len(g["params"]) for g in groups]:
        raise ConfigError(
            f"the optimiser state was saved for groups of {[len(g['params']) for g in groups]} parameters, this run "
            f"trains {mine}; resume with the policy and the freezing it was saved with"
        )
    optimizer.load_state_dict({"state": {int(k): dict(v) for k, v in state["state"].items()}, "param_groups": groups})
    # Saved tensors come back contiguous. The fused AdamW walks memory, not indices: its moments must lie as the
    # parameter does (a convolution's weights may be channels-last), or they belong to other weights after a resume.
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
