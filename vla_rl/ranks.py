"""The processes that learn together: shared rows, global sums, and a policy whose weights are
spread over them.

Every rank is given the same batch, or of its images and replay its own part (`Ranks.share_of`).
What is cheap (advantages, whitening, the sums that a loss is divided by) each rank works out for
all rows, so it is global without a message; the network runs on the rank's `share` of each
minibatch alone, and gradients, losses and statistics are added up. One process is the case of one
rank: everything here is the identity.

`shard` spreads the weights (FSDP: Zhao et al. 2023, arXiv 2304.11277, in torch's per-parameter
form), or leaves every rank all of them (data parallel). What it must know of a policy's structure
stands in `interfaces.Policy.blocks`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vla_rl.errors import ConfigError, UserError
from vla_rl.interfaces import Policy

MODES = ("sharded", "replicated")
# Methods that run the network; FSDP2 gathers weights for `forward` and for what it is told of.
ENTRIES = (
    "act",
    "evaluate",
    "value",
    "imitation_loss",
    "distillation_loss",
    "teach",
    "image_token_spread",
    "image_features",
)


class Ranks:
    """The processes of ``group``; without one, this process alone. Collective methods: every
    rank must call them alike."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.index, self.size = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )

    @staticmethod
    def present() -> Ranks:
        """Those of the process group that this process has joined
        (`torch.distributed.init_process_group`)."""
        joined = dist.is_available() and dist.is_initialized()
        return Ranks(dist.group.WORLD if joined else None)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files."""
        return self.index == 0

    # ----------------------------------------------------------------------------------------- rows
    def share(self, count: int) -> tuple[Tensor, Tensor]:
        """This rank's part of ``count`` rows: their indices int64 [k], and bool [k], False where a
        row only fills up.

        All ranks get the same k = ⌈count / size⌉, since each must run as many forwards and
        backwards as the others. Rows that fill up repeat the last one and must weigh nothing.
        """
        each = -(-count // self.size)
        rows = torch.arange(self.index * each, (self.index + 1) * each)
        return rows.clamp(max=count - 1), rows < count

    def part(self, count: int) -> Part:
        """`share` of a batch of ``count`` rows, for who has no others of them."""
        return Part(self, count, *self.share(count))

    def share_of(self, owner: Tensor) -> tuple[Tensor, Tensor]:
        """As `share`, of rows of which each belongs to the rank ``owner`` int64 [count]: as many on
        all ranks as the one with most has. Where a rank has none or fewer, rows fill up (the last
        of its own; −1 where it has none)."""
        counts = torch.bincount(owner, minlength=self.size)
        mine = torch.nonzero(owner == self.index).flatten()
        fill = mine[-1:] if len(mine) else torch.tensor([-1])
        rows = torch.cat([mine, fill.expand(int(counts.max()) - len(mine))])
        return rows, torch.arange(len(rows)) < len(mine)

    def scatter(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        """[count …] of all ranks' own ``rows`` [k] of it, ``x`` [k …]; each row belongs to one
        rank."""
        whole = x.new_zeros((count, *x.shape[1:]))
        whole[rows.to(x.device)] = x
        return self.sum(whole)

    def gather(self, x: Tensor, count: int | None = None) -> Tensor:
        """The rows of all ranks' ``x`` in order (of one shape on all), without what filled up
        the last of ``count``."""
        if self.size == 1:
            return x
        mine = x.detach().to(self._device()).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts)[:count].to(x.device)

    # ----------------------------------------------------------------------------------------- sums
    def sum(self, x: Tensor) -> Tensor:
        """Σ over the ranks, without gradient."""
        if self.size == 1:
            return x
        out = x.detach().to(self._device(), copy=True).contiguous()
        dist.all_reduce(out, group=self.group)
        return out.to(x.device)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks, without gradient."""
        return x if self.size == 1 else self.sum(x) / self.size

    def total(self, x: Tensor) -> Tensor:
        """Σ over the ranks with gradient: that of the sum of all ranks' losses."""
        return x if self.size == 1 else _Total.apply(x, self)

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` holds on every rank."""
        return flag if self.size == 1 else int(self.sum(torch.tensor(int(flag)))) == self.size

    def main(self, x: Tensor) -> Tensor:
        """The main rank's ``x`` (of one shape on all), without gradient."""
        if self.group is None or self.size == 1:
            return x
        out = x.detach().to(self._device(), copy=True).contiguous()
        dist.broadcast(out, src=dist.get_global_rank(self.group, 0), group=self.group)
        return out.to(x.device)

    def require_same(self, what: str, *figures: float) -> None:
        """Raise `UserError` on every rank unless all of them pass the same numbers."""
        if self.size == 1:
            return
        table = self.gather(torch.tensor([figures], dtype=torch.float64))
        if not torch.equal(table.nan_to_num(), table[:1].nan_to_num().expand_as(table)):
            raise UserError(
                f"the {self.size} ranks were given different {what} ({table.tolist()}), and each "
                "takes its share of the same one: give all ranks the same data and seeds"
            )

    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")


@dataclass(frozen=True)
class Part:
    """The ``rows`` int64 [k] of a batch of ``count`` that are on this rank; ``real`` bool [k] is
    False where one only fills up (`Ranks.share`)."""

    ranks: Ranks
    count: int
    rows: Tensor
    real: Tensor

    def of(self, drawn: Tensor) -> Tensor:
        """Of what was drawn for all rows of the batch [count …], what is this rank's [k …]."""
        return drawn if self.ranks.size == 1 else drawn[self.rows]

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all rows of the batch of what ranks have of it, ``x`` [k …].
        Collective."""
        if self.ranks.size == 1:
            return x.mean(0)
        return self.ranks.sum(x[self.real.to(x.device)].sum(0)) / self.count


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradient), None


# ----------------------------------------------------------------------------------- spread weights
def shard(policy: Any, ranks: Ranks | None = None, mode: str = "sharded") -> Any:
    """Let ``ranks`` train ``policy`` together, from the main rank's weights; returns the policy.
    Collective.

    "sharded": each rank keeps 1/size of every parameter, gradient and optimiser state, and gathers
    the weights of one of the policy's `blocks` at a time. "replicated": each rank keeps all of
    them. Build the algorithm afterwards: the parameters are new objects. Make copies of the policy
    (a reference, a reward's context) before: it cannot be copied afterwards.
    """
    ranks = ranks or Ranks.present()
    if mode not in MODES:
        raise ConfigError(
            f"the sharding mode {mode!r} is not a choice; use one of: {', '.join(MODES)}"
        )
    if ranks.group is None or ranks.size == 1:
        return policy
    with torch.no_grad():
        for x in (*policy.parameters(), *policy.buffers()):
            x.copy_(ranks.main(x))
    shardable = "ranks" in Policy.of(policy).can
    if shardable:
        policy.learn_together(ranks.index, ranks.size, ranks.total)
    if mode == "replicated":
        return policy
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for p in policy.parameters():  # FSDP2 takes no channels-last weights; activations may stay so
        p.data = p.data.contiguous()
    mesh = DeviceMesh.from_group(ranks.group, next(iter(policy.parameters())).device.type)
    for block in policy.blocks() if shardable else ():
        fully_shard(block, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    for name in ENTRIES:
        if hasattr(policy, name):
            register_fsdp_forward_method(policy, name)
    return policy


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Make every gradient the sum over the ranks of those that lie ready; one that lies ready
    on some is 0 on others. Collective.

    Gradients of spread weights (`shard`) are already the mean over the ranks.
    """
    if ranks.size == 1:
        return
    whole: list[nn.Parameter] = []
    for p in parameters:
        if not is_sharded(p):
            whole.append(p)
        elif p.grad is not None:
            p.grad.mul_(ranks.size)
    ready = (
        ranks.sum(torch.tensor([p.grad is not None for p in whole], dtype=torch.int32)).tolist()
        if whole
        else []
    )
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p, count in zip(whole, ready, strict=True):
        if count:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            buckets.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad)
    for gradients in buckets.values():
        summed = ranks.sum(torch.cat([g.reshape(-1) for g in gradients])).split(
            [g.numel() for g in gradients]
        )
        for gradient, part in zip(gradients, summed, strict=True):
            gradient.copy_(part.view(gradient.shape))


def is_sharded(x: Any) -> bool:
    """Whether a tensor is spread over ranks."""
    # seconds to import; until someone has, no tensor is spread
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def gathered(x: Tensor) -> Tensor:
    """The whole of a tensor that may be spread over ranks, on the CPU of the main rank; empty on
    the others. Collective."""
    if not is_sharded(x):
        return x
    whole = x.detach().full_tensor()  # type: ignore[attr-defined]
    ranks = x.device_mesh.mesh  # type: ignore[attr-defined]
    return whole.cpu() if dist.get_rank() == int(ranks[0]) else whole.new_empty(0)


def spread_like(x: Tensor, other: Tensor) -> Tensor:
    """This rank's part of ``x`` (of one shape with ``other``) where ``other`` is spread, else
    ``x``. Sends no message."""
    if not is_sharded(other) or is_sharded(x):
        return x
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = other.device_mesh, other.placements  # type: ignore[attr-defined]
    return distribute_tensor(x.to(other.device), mesh, placements, src_data_rank=None)


def gathered_state(value: Any) -> Any:
    """A nested state whose spread tensors are `gathered`. Collective."""
    if isinstance(value, Tensor):
        return gathered(value)
    if isinstance(value, Mapping):
        return {key: gathered_state(item) for key, item in value.items()}
    return [gathered_state(x) for x in value] if isinstance(value, list | tuple) else value


def mesh_of(policy: Any) -> Any:
    """The device mesh that the policy's weights are spread over; None where they are whole."""
    return next((x.device_mesh for x in policy.parameters() if is_sharded(x)), None)


def own_part(x: Tensor) -> Tensor:
    """This rank's rows of a tensor that may be spread over ranks."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def spread_part(part: Tensor, mesh: Any, shape: Sequence[int]) -> Tensor:
    """The spread tensor of this whole shape, of which ``part`` are this rank's rows. Sends no
    message."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(tuple(shape), device="meta").stride()
    local = part.to(mesh.device_type)
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def full_state(policy: Any, ranks: Ranks | None = None) -> dict[str, Tensor]:
    """The policy's weights whole, on the main rank; {} on the others. Collective, one tensor at
    a time."""
    ranks = ranks or Ranks.present()
    state: Mapping[str, Tensor] = policy.state_dict()
    whole = {name: gathered(x.detach()) for name, x in state.items()}
    return whole if ranks.is_main else {}


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of those that hold numbers which are not finite; of what is spread this rank's part
    is looked at."""
    return sorted(
        name
        for name, x in tensors.items()
        if x.is_floating_point() and not bool(torch.isfinite(own_part(x.detach())).all())
    )


def load_full_state(policy: Any, state: Mapping[str, Tensor]) -> None:
    """Copy whole weights, the same on every rank, into a policy that may be spread over ranks."""
    own = policy.state_dict()
    policy.load_state_dict(
        {name: spread_like(x, own[name]) if name in own else x for name, x in state.items()}
    )


def plain(x: Tensor) -> Tensor:
    """What was worked out from spread tensors (a norm), as an ordinary tensor on every rank.
    Collective."""
    return x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]
