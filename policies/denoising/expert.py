"""The action expert: a small transformer over the chunk's control steps that also attends to the
trunk's cached prefix.

As in π0 (arXiv 2410.24164, §IV) each layer's keys and values are those of a layer of the trunk
followed by its own, so the images and the prompt are encoded once per decision however many
denoising steps follow. Where the expert is deeper than the trunk, neighbouring layers read the same
one. Time enters through scale, shift and gate of every block (Peebles & Xie 2023, arXiv 2212.09748,
"adaLN-Zero"; π0.5 does the same with RMSNorm).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.trunk.llama import init_linear, parameter

Cache = list[tuple[Tensor, Tensor]]  # keys and values [b heads L head] of each trunk layer
SHORTEST_PERIOD, LONGEST_PERIOD = 4e-3, 4.0  # of the time embedding, as in openpi


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Sines and cosines [... width] of ``time`` in [0, 1] at geometrically spaced periods."""
    fraction = torch.linspace(0.0, 1.0, width // 2, device=time.device)
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** fraction
    angle = time[..., None] * (2.0 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class _ExpertLayer(nn.Module):
    """Attention over the prefix and the chunk, then a gated MLP, both modulated by time."""

    def __init__(self, width: int, heads: int, head: int, hidden: int):
        super().__init__()
        self.heads, self.head = heads, head
        self.qkv = init_linear(nn.Linear(width, 3 * heads * head, bias=False))
        self.out = init_linear(nn.Linear(heads * head, width, bias=False))
        self.gate_up = init_linear(nn.Linear(width, 2 * hidden, bias=False))
        self.down = init_linear(nn.Linear(hidden, width, bias=False))

    def forward(
        self, x: Tensor, modulation: tuple[Tensor, ...], past: tuple[Tensor, Tensor]
    ) -> Tensor:
        """``x`` [b s h w]: s chunks of a row share the row's prefix ``past`` and do not see each
        other."""
        b, s, h, w = x.shape
        shift, scale = modulation[:2]
        y = self.qkv(F.rms_norm(x, (w,)) * (1.0 + scale) + shift)
        # each [b heads s h head]
        q, k, v = y.view(b, s, h, 3, self.heads, self.head).permute(3, 0, 4, 1, 2, 5)
        if s == 1 and not torch.is_grad_enabled():  # acting: one fused attention
            keys, values = (
                torch.cat([old, new[:, :, 0]], dim=2) for old, new in zip(past, (k, v), strict=True)
            )
            y = F.scaled_dot_product_attention(q[:, :, 0], keys, values)
            return self._rest(
                x, y.transpose(1, 2).reshape(b, 1, h, self.heads * self.head), modulation
            )
        q = q * self.head**-0.5
        to_prefix = q.reshape(b, self.heads, s * h, self.head) @ past[0].transpose(-1, -2)
        length = past[0].shape[2]
        scores = torch.cat(
            [to_prefix.view(b, self.heads, s, h, length), q @ k.transpose(-1, -2)], dim=-1
        )
        share = scores.softmax(-1)
        seen = share[..., :length].reshape(b, self.heads, s * h, length) @ past[1]
        y = seen.view(b, self.heads, s, h, self.head) + share[..., length:] @ v
        return self._rest(
            x, y.permute(0, 2, 3, 1, 4).reshape(b, s, h, self.heads * self.head), modulation
        )

    def _rest(self, x: Tensor, seen: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        """The layer after its attention: output projection and gated MLP."""
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = modulation
        x = x + gate * self.out(seen)
        g, u = self.gate_up(F.rms_norm(x, x.shape[-1:]) * (1.0 + scale_mlp) + shift_mlp).chunk(
            2, dim=-1
        )
        return x + gate_mlp * self.down(F.silu(g) * u)


class ActionExpert(nn.Module):
    """From noisy chunks and a prefix cache to an output of the chunks' shape (velocity, noise or
    action)."""

    def __init__(
        self,
        action_dim: int,
        chunk_length: int,
        width: int,
        hidden: int,
        depth: int,
        heads: int,
        head: int,
    ):
        super().__init__()
        self.action_in = init_linear(nn.Linear(action_dim, width))
        self.positions = parameter(chunk_length, width, std=0.5)
        self.time_mlp = nn.Sequential(init_linear(nn.Linear(width, width)), nn.SiLU())
        self.modulation = nn.Linear(width, (6 * depth + 2) * width)
        self.layers = nn.ModuleList(_ExpertLayer(width, heads, head, hidden) for _ in range(depth))
        self.action_out = nn.Linear(width, action_dim)
        self.width = width
        # Scales, shifts and the output start near 0: each block then changes nothing much, and
        # training is stable.
        nn.init.trunc_normal_(self.modulation.weight, std=0.02)
        nn.init.zeros_(self.modulation.bias)
        with torch.no_grad():
            # gates: a little of every block from the start
            self.modulation.bias.view(-1, width)[2 : 6 * depth : 3] = 0.1
        nn.init.zeros_(self.action_out.weight)
        nn.init.zeros_(self.action_out.bias)

    def modulate(self, time: Tensor) -> Tensor:
        """What depends on time [...] alone: [... (6·depth + 2)·width]."""
        return self.modulation(self.time_mlp(time_embedding(time, self.width)))

    def forward(self, x: Tensor, modulation: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Output [b s h a] and features [b s h w] for chunks ``x`` [b s h a]; ``modulation`` [D]
        or [b s D]."""
        # each [1 w] or [b s 1 w]
        parts = modulation.unsqueeze(-2).chunk(6 * len(self.layers) + 2, dim=-1)
        y = self.action_in(x) + self.positions
        for i, layer in enumerate(self.layers):
            y = layer(y, parts[6 * i : 6 * i + 6], cache[i * len(cache) // len(self.layers)])
        shift, scale = parts[-2:]
        features = F.rms_norm(y, (self.width,)) * (1.0 + scale) + shift
        return self.action_out(features), features
