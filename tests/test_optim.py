"""Optimiser state that goes through JSON and safetensors continues exactly, whatever the
parameters' memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vla_rl.algorithms.optim import GuardedStep, load_optimizer_state, make_adamw, optimizer_state
from vla_rl.errors import NoGradient
from vla_rl.storage import load_state, save_state


def network(layout: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, (2, 3))).to(
        memory_format=layout
    )


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for i in steps:
        x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(i))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"]
)
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


@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
def test_bfloat16_parameters_are_trained_through_float32_copies(offload, tmp_path):
    """Steps far below bfloat16's resolution add up; the same as plain AdamW on float32 weights
    with those gradients."""
    p = nn.Parameter(torch.linspace(1.0, 2.0, 64, dtype=torch.bfloat16))
    reference = nn.Parameter(p.detach().float())
    make = lambda q: make_adamw([([q], 1e-4)], [0.9, 0.99], 0.01, offload=offload)  # noqa: E731
    optimizer, plain = (
        make(p),
        torch.optim.AdamW([reference], lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01),
    )
    for i in range(40):
        gradient = torch.randn(64, generator=torch.Generator().manual_seed(i)) + 2.0
        p.grad, reference.grad = gradient.bfloat16(), gradient.bfloat16().float()
        optimizer.step()
        plain.step()
        if i == 20:
            save_state(tmp_path / str(i), optimizer_state(optimizer))
            optimizer = make(p)
            load_optimizer_state(optimizer, load_state(tmp_path / str(i)))
    assert optimizer.state[p]["master"].dtype == torch.float32 and p.dtype == torch.bfloat16
    torch.testing.assert_close(optimizer.state[p]["master"], reference.detach())
    assert (p.detach() != torch.linspace(1.0, 2.0, 64, dtype=torch.bfloat16)).any()
    torch.testing.assert_close(p.detach(), reference.detach().bfloat16())


def test_a_loss_that_reaches_no_parameter_is_an_error():
    net = network(torch.contiguous_format)
    guard, before = GuardedStep(3, 1.0), [p.detach().clone() for p in net.parameters()]
    with pytest.raises(NoGradient, match="none of the 4 parameters"):
        guard.step(make_adamw([(net.parameters(), 1e-2)], [0.9, 0.95], 0.01), torch.zeros(()))
    assert guard.updates == 0 and all(
        torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)
    )


def test_updates_with_a_gradient_of_zero_are_counted():
    net = network(torch.contiguous_format)
    guard, optimizer = (
        GuardedStep(3, 1.0),
        make_adamw([(net.parameters(), 1e-2)], [0.9, 0.95], 0.01),
    )
    for scale in (0.0, 1.0, 0.0):
        loss = scale * net(torch.ones(2, 3, 8, 8)).square().mean()
        loss.backward()
        assert (guard.step(optimizer, loss.detach()) == 0.0) == (scale == 0.0)
    assert guard.state_dict() == {
        "skipped": 0,
        "bad_in_a_row": 0,
        "updates": 3,
        "zero_gradients": 2,
    }
    again = GuardedStep(3, 1.0)
    again.load_state_dict(guard.state_dict())
    assert again.zero_gradients == 2
    # of a run made before they were counted
    again.load_state_dict({"skipped": 1, "bad_in_a_row": 0, "updates": 7})
    assert (again.skipped, again.zero_gradients) == (1, 0)


def test_offloading_changes_no_step_of_float32_parameters():
    whole, offloaded = network(torch.channels_last), network(torch.channels_last)
    for net, offload in ((whole, False), (offloaded, True)):
        train(
            net,
            make_adamw([(net.parameters(), 1e-2)], [0.9, 0.95], 0.01, offload=offload),
            range(4),
        )
    for a, b in zip(whole.parameters(), offloaded.parameters(), strict=True):
        torch.testing.assert_close(a, b)
