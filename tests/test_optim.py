"""Optimiser state that goes through JSON and safetensors continues exactly, whatever the parameters' memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vla_rl.algorithms.optim import load_optimizer_state, make_adamw, optimizer_state
from vla_rl.checkpoint import load_state, save_state


def network(layout: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, (2, 3))).to(memory_format=layout)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(i))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_resuming_equals_going_on(layout, tmp_path):
    whole, first, second = network(layout), network(layout), network(layout)
    settings = {"betas": [0.9, 0.95], "weight_decay": 0.01}
    train(whole, make_adamw([(whole.parameters(), 1e-2)], **settings), range(6))
    optimizer = make_adamw([(first.parameters(), 1e-2)], **settings)
    train(first, optimizer, range(3))
    save_state(tmp_path, optimizer_state(optimizer))
    second.load_state_dict({k: v.contiguous() for k, v in first.state_dict().items()})
    resumed = make_adamw([(second.parameters(), 1e-2)], **settings)
    load_optimizer_state(resumed, load_state(tmp_path))
    for p in second.parameters():
        assert resumed.state[p]["exp_avg"].stride() == p.stride()
    train(second, resumed, range(3, 6))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
