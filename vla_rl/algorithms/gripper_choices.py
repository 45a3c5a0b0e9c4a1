"""A gripper's three choices by double DQN beside TD3 or SAC, as HIL-SERL learns it (Luo et al.
2024, arXiv 2410.21845)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.algorithms.conservative import RETURN
from vla_rl.algorithms.critics import calibrated_gap
from vla_rl.interfaces import ActorPolicy
from vla_rl.types import Transitions

# the frame that holds the discounted changes of an episode from there on
CHANGES = "gripper_changes"


def network(policy: ActorPolicy) -> nn.Module | None:
    """What values the choices of a policy that decides its gripper apart; None for others."""
    return policy.choices if "gripper" in policy.can else None


def choice_target(
    rewards: Tensor, discounts: Tensor, online: Tensor, target: Tensor, there: Tensor
) -> Tensor:
    """[b]: the target network's value [b 3] of what the online one [b 3] finds best among the
    choices that are ``there`` (double DQN, van Hasselt et al. 2016, eq. 4)."""
    best = online.masked_fill(~there, -torch.inf).argmax(1, keepdim=True)
    return rewards + discounts * target.gather(1, best)[:, 0]


def choice_loss(values: Tensor, taken: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of the values [b 3] of what was ``taken`` [b]; rows that were none of
    the choices count nothing."""
    known = taken >= 0
    error = (values.gather(1, taken.clamp(min=0)[:, None])[:, 0] - target).square()
    return (error * known).sum() / known.sum().clamp(min=1)


def penalised(
    batch: Transitions, frames: Mapping[str, Tensor], after: Mapping[str, Tensor], penalty: float
) -> Tensor:
    """Rewards [b] less ``penalty`` for each change in the decisions that they are of, discounted as
    rewards are.

    ``batch.discounts`` is 0 where an episode terminated, and nothing changes beyond its last frame,
    so the difference of what is to come is what was between.
    """
    discounts = batch.discounts.to(frames[CHANGES])
    return batch.rewards.to(discounts) - penalty * (frames[CHANGES] - discounts * after[CHANGES])


def learned(
    policy: Any,
    target: nn.ModuleList,
    batch: Transitions,
    encoded: Tensor,
    frames: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    penalty: float,
    conservative_weight: float,
) -> Tensor:
    """Loss of a draw's choices; ``frames`` are those of its observations and of the next ones,
    ``target`` the target encoder, critics and choices. ``conservative_weight`` above 0 keeps values
    low where there is no data."""
    now, after = frames
    values = policy.choice_values(encoded, now)
    taken = policy.chosen(batch.actions, batch.valid, now)
    with torch.no_grad():
        online = policy.choice_values(policy.encode(after), after)
        following = policy.choice_values(target[0](after), after, target[2])
        rewards = penalised(batch, now, after, penalty)
        there = policy.choosable(after)
        wanted = choice_target(rewards, batch.discounts.to(rewards), online, following, there)
    loss = choice_loss(values, taken, wanted)
    known = taken >= 0
    if conservative_weight and bool(known.any()):
        data = values[known].gather(1, taken[known][:, None])[None, :, 0]
        returns = now[RETURN][known] if RETURN in now else None
        loss = loss + conservative_weight * calibrated_gap(values[known][None], data, returns)
    return loss
