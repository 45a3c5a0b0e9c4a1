"""Optimiser steps that survive a loss that is not finite, optimiser state without pickles; for PPO and SFT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from vla_rl.errors import ConfigError, TrainingDiverged


class MasterAdamW(torch.optim.Optimizer):
    """AdamW that keeps a float32 copy of every parameter, for parameters in bfloat16 or float16.

    Steps of a learning rate around 1e-6 are smaller than bfloat16 resolves; they add up in the copy. With ``offload`` the
    copies and both moments lie in host memory and the step runs there: 12 bytes a parameter less on the GPU.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        weight_decay: float,
        eps: float,
        offload: bool = False,
    ):
        super().__init__(params, {"lr": 1e-3, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self.offload = offload

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients that lie ready."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] if self.state[p] else self._begin(p)
                    adamw(
                        [state["master"]],
                        [p.grad.to(state["master"].device, torch.float32)],
                        [state["exp_avg"]],
                        [state["exp_avg_sq"]],
                        [],
                        [state["step"]],
                        fused=True,
                        amsgrad=False,
                        beta1=group["betas"][0],
                        beta2=group["betas"][1],
                        lr=group["lr"],
                        weight_decay=group["weight_decay"],
                        eps=group["eps"],
                        maximize=False,
                    )
                    p.copy_(state["master"])

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        device = torch.device("cpu") if self.offload else p.device
        master = p.detach().to(device, torch.float32, copy=True)
        self.state[p] = {
            "step": torch.zeros((), device=device),
            "master": master,
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
        return self.state[p]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """As of any optimiser, but the state stays float32: torch would cast it to the parameters' type."""
        super().load_state_dict(dict(state_dict))
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, saved in state_dict["state"].items():
            p = parameters[int(i)]
            device = torch.device("cpu") if self.offload else p.device
            self.state[p] = {k: v.to(device, torch.float32, copy=True) for k, v in saved.items()}


def make_adamw(
    groups: Sequence[tuple[Iterable[Parameter], float]],
    betas: Sequence[float],
    weight_decay: float,
    eps: float = 1e-8,
    offload: bool = False,
) -> torch.optim.Optimizer:
    """AdamW over (parameters, learning rate) groups; empty groups and frozen parameters are left out.

    Parameters in bfloat16 or float16 are trained through float32 copies; ``offload`` keeps copies and moments in host memory
    (`MasterAdamW`). Raises `ConfigError` where no parameter is left to train.
    """
    trained = [([p for p in params if p.requires_grad], lr) for params, lr in groups]
    param_groups = [{"params": params, "lr": lr} for params, lr in trained if params]
    if not param_groups:
        raise ConfigError("there is nothing to train: no parameter has requires_grad set; unfreeze some of the policy")
    if offload or any(p.dtype in (torch.bfloat16, torch.float16) for ps, _ in trained for p in ps):
        return MasterAdamW(param_groups, (betas[0], betas[1]), weight_decay, eps, offload)
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
                moments[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
