"""Optimiser steps that survive a loss that is not finite, optimiser state without pickles; for
PPO and SFT."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from vla_rl.errors import ConfigError, NoGradient, TrainingDiverged
from vla_rl.interfaces import Algorithm, Policy
from vla_rl.interfaces.offering import has_own
from vla_rl.ranks import Ranks, is_sharded, plain, spread_like, sum_gradients


class _MasterAdamW(torch.optim.Optimizer):
    """AdamW that keeps a float32 copy of every parameter, for parameters in bfloat16 or float16.

    Steps of a learning rate around 1e-6 are smaller than bfloat16 resolves; they add up in the
    copy. What another has written into a parameter meanwhile (a second optimiser's steps) is taken
    over. With ``offload`` the copies and both moments lie in host memory and the step runs there:
    12 bytes a parameter less on the GPU.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        weight_decay: float,
        eps: float,
        offload: bool = False,
    ):
        super().__init__(
            params, {"lr": 1e-3, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        )
        self.offload = offload
        # torch's count of a parameter's changes, after the last of this optimiser's
        self._written: dict[Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients that lie ready."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p] if self.state[p] else self._begin(p)
                    if self._written.get(p) != p._version:
                        now, master = p.to(state["master"].device), state["master"]
                        master.copy_(
                            torch.where(now == master.to(p.dtype), master, now.to(torch.float32))
                        )
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
                    self._written[p] = p._version

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        device = torch.device("cpu") if self.offload else p.device
        master = p.detach().to(device, torch.float32, copy=True)
        self._written[p] = p._version
        self.state[p] = {
            "step": torch.zeros((), device=device),
            "master": master,
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
        return self.state[p]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """As of any optimiser, but the state stays float32: torch would cast it to the
        parameters' type."""
        super().load_state_dict(dict(state_dict))
        self._written.clear()
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
    """AdamW over (parameters, learning rate) groups; empty groups and frozen parameters are left
    out.

    Parameters in bfloat16 or float16 are trained through float32 copies; ``offload`` keeps copies
    and moments in host memory (`_MasterAdamW`). Raises `ConfigError` where no parameter is left to
    train.
    """
    trained = [([p for p in params if p.requires_grad], lr) for params, lr in groups]
    param_groups = [{"params": params, "lr": lr} for params, lr in trained if params]
    if not param_groups:
        raise ConfigError(
            "there is nothing to train: no parameter has requires_grad set; unfreeze "
            "some of the policy"
        )
    if offload and any(is_sharded(p) for ps, _ in trained for p in ps):
        raise ConfigError(
            "offload_optimizer=true does not go with weights that are spread over "
            "ranks; set it to false"
        )
    if offload or any(p.dtype in (torch.bfloat16, torch.float16) for ps, _ in trained for p in ps):
        return _MasterAdamW(param_groups, (betas[0], betas[1]), weight_decay, eps, offload)
    plain = all(
        p.is_floating_point() and p.device.type in ("cpu", "cuda") for ps, _ in trained for p in ps
    )
    return torch.optim.AdamW(
        param_groups, betas=(betas[0], betas[1]), weight_decay=weight_decay, eps=eps, fused=plain
    )


def even_split(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A random permutation of ``count`` indices in parts of at most ``size``, as even as can be."""
    return torch.randperm(count, generator=generator).tensor_split(max(1, -(-count // size)))


class GuardedStep:
    """Clips gradients and steps, unless something is not finite: then the update is skipped and
    counted.

    After ``max_bad_updates`` skipped updates in a row it raises `TrainingDiverged`. ``skipped``
    counts all of them, ``zero_gradients`` the updates whose gradient was exactly 0 everywhere. With
    several ``ranks`` the gradients are first added up over them; norm, clipping and whether to skip
    are then the same on all.
    """

    def __init__(self, max_bad_updates: int, grad_clip: float | None, ranks: Ranks | None = None):
        self.max_bad_updates, self.grad_clip, self.ranks = (
            max_bad_updates,
            grad_clip,
            ranks or Ranks(),
        )
        self.skipped = self.bad_in_a_row = self.updates = self.zero_gradients = 0

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> float | None:
        """One update from the gradients that lie ready; returns their norm before clipping, or None
        when skipped.

        ``loss`` is the (detached) scalar the gradients came from. Gradients are cleared either way.
        Raises `NoGradient` where not one parameter has any: a step would then change nothing, and
        training seem to run.
        """
        trained = [p for g in optimizer.param_groups for p in g["params"]]
        sum_gradients(trained, self.ranks)
        params = [p for p in trained if p.grad is not None]
        if not params:
            raise NoGradient(
                f"the loss gave none of the {len(trained)} parameters of this optimiser a "
                "gradient. Either what the policy returns is detached from its weights, or it is "
                "a dataclass that is no registered pytree (`vla_rl.interfaces.Policy.blocks`), "
                "or the policy was sharded after the algorithm was built: shard it first"
            )
        spread = torch.nn.utils.get_total_norm([p.grad for p in params])
        norm = plain(spread)
        # the update's one synchronisation
        finite = bool(torch.isfinite(norm) & torch.isfinite(loss).to(norm.device))
        finite = self.ranks.all(finite)
        if finite:
            if self.grad_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(params, self.grad_clip, spread)
            optimizer.step()
            self.updates += 1
            self.bad_in_a_row = 0
        optimizer.zero_grad(set_to_none=True)
        if finite:
            self.zero_gradients += float(norm) == 0.0
            return float(norm)
        self.skipped += 1
        self.bad_in_a_row += 1
        if self.bad_in_a_row >= self.max_bad_updates:
            raise TrainingDiverged(
                f"{self.bad_in_a_row} updates in a row had a loss or gradient that was not finite "
                f"(last loss {float(loss):g}, gradient norm {float(norm):g}). Lower the learning "
                "rate, or look for bad values in observations and rewards."
            )
        return None

    def state_dict(self) -> dict[str, int]:
        names = ("skipped", "bad_in_a_row", "updates", "zero_gradients")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.bad_in_a_row = int(state["skipped"]), int(state["bad_in_a_row"])
        self.updates, self.zero_gradients = (
            int(state["updates"]),
            int(state.get("zero_gradients", 0)),
        )


def state_of(algorithm: Algorithm) -> dict[str, Any]:
    """What a resumed run needs of ``algorithm`` besides the policy's weights: its own `state_dict`,
    or, of one without, the state of every optimiser, `GuardedStep` and module (no policy) among its
    attributes."""
    if has_own(type(algorithm), "state_dict"):
        return algorithm.state_dict()
    return {
        name: optimizer_state(part)
        if isinstance(part, torch.optim.Optimizer)
        else dict(part.state_dict())
        for name, part in _parts(algorithm)
    }


def load_state(algorithm: Algorithm, state: Mapping[str, Any]) -> None:
    """Inverse of `state_of`. Raises ConfigError as `load_optimizer_state` does."""
    if has_own(type(algorithm), "state_dict"):
        algorithm.load_state_dict(state)
        return
    for name, part in _parts(algorithm):
        if name not in state:  # kept before it had that part
            continue
        if isinstance(part, torch.optim.Optimizer):
            load_optimizer_state(part, state[name])
        else:
            part.load_state_dict(state[name])


def _parts(algorithm: Algorithm) -> list[tuple[str, Any]]:
    kinds = (torch.optim.Optimizer, GuardedStep, torch.nn.Module)
    return [
        (name, part)
        for name, part in vars(algorithm).items()
        if isinstance(part, kinds) and not isinstance(part, Policy)
    ]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimiser's state as nested dicts with string keys, lists, tensors, numbers: fit for JSON
    and safetensors.

    What is spread over ranks stays so.
    """
    state = optimizer.state_dict()
    return {
        "state": {str(k): dict(v) for k, v in state["state"].items()},
        "param_groups": [
            {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
            for group in state["param_groups"]
        ],
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Inverse of `optimizer_state`. Raises ConfigError where the parameters are not those the
    state was saved for."""
    groups = [
        dict(g, betas=tuple(g["betas"])) if "betas" in g else dict(g) for g in state["param_groups"]
    ]
    mine = [len(g["params"]) for g in optimizer.param_groups]
    if mine != [len(g["params"]) for g in groups]:
        raise ConfigError(
            f"the optimiser state was saved for groups of {[len(g['params']) for g in groups]} "
            f"parameters, this run trains {mine}; resume with the policy and the freezing it was "
            "saved with"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        int(k): {n: _placed(x, parameters[int(k)]) for n, x in v.items()}
        for k, v in state["state"].items()
    }
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    # Saved tensors come back contiguous. The fused AdamW walks memory, not indices: its moments
    # must lie as the parameter does (a convolution's weights may be channels-last), or they belong
    # to other weights after a resume.
    for parameter, own in optimizer.state.items():
        for name, value in own.items():
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                own[name] = torch.empty_like(
                    parameter, dtype=value.dtype, device=value.device
                ).copy_(value)


def _placed(value: Any, parameter: Tensor) -> Any:
    """A moment spread over ranks as its parameter is; anything else as it is."""
    return (
        spread_like(value, parameter)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
    )


def rate_factor(config: Any, iteration: int) -> float:
    """The share of ``config.learning_rate`` that an iteration uses: linear up after the critic's
    warm-up, linear down."""
    factor = 1.0
    if config.decay_iterations:
        factor = max(config.min_learning_rate_fraction, 1.0 - iteration / config.decay_iterations)
    if config.warmup_iterations:
        learned = iteration - config.critic_warmup_iterations
        factor *= min(1.0, max(0, learned + 1) / config.warmup_iterations)
    return factor


def adapted_rate(config: Any, rate: float, kl: float, share: float) -> float:
    """The rate at which all updates of an iteration would move the policy by ``config.target_kl``,
    where ``share`` of them moved it by ``kl`` at ``rate``: a KL grows with the square of the rate,
    and with the number of updates where each goes its own way. It falls at once and rises by at
    most 1.5, and stays within [÷10, ×10] of ``config.learning_rate``."""
    if share == 0:
        return rate
    wanted = rate * min(1.5, math.sqrt(config.target_kl * share / max(kl, 1e-12)))
    return min(max(wanted, config.learning_rate / 10.0), config.learning_rate * 10.0)
