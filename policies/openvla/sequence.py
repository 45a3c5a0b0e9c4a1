"""The sequence that the language model reads, and how actions are read off it.

Sequence (openvla-oft `modeling_prismatic.py`): BOS | patches of every camera | proprio token | rest
of the prompt | action positions. Parallel decoding (OFT, arXiv 2502.19645) puts a zero embedding at
each action position (and, in the official dialect, the embedding of the stop token behind them) and
reads all tokens from one forward. A position predicts the token after it, so the last prompt token
yields the first action token. Autoregressive decoding (OpenVLA, arXiv 2406.09246) feeds each token
back, over a KV cache. Prompts of different lengths share a batch: shorter ones are padded between
prompt and action positions, the padding is masked out, and positions count only what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.openvla.config import Architecture, OpenVLAConfig
from policies.openvla.model import KVCache, Rope, run_llama
from policies.openvla.tokens import STOP_ID
from vla_rl.errors import UserError

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM


@dataclass(frozen=True)
class Prefix:
    """All that precedes the action positions: embeddings [b P d], which columns are there [b P],
    the last of them [b]."""

    x: Tensor
    valid: Tensor
    last: Tensor
    padded: bool


class Sequences:
    """Sequences of ``llama`` with ``actions`` action positions. Works on the policy's own modules,
    and holds nothing besides."""

    def __init__(
        self,
        config: OpenVLAConfig,
        architecture: Architecture,
        llama: LlamaForCausalLM,
        rope: Rope,
        actions: int,
    ):
        self.config, self.architecture = config, architecture
        self.llama, self.rope, self.actions = llama, rope, actions

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [b T d] of token ids [b T]."""
        return self.llama.model.embed_tokens(ids)

    def embed_actions(self, tokens: Tensor) -> Tensor:
        """Of action tokens, which are indices into the slice of action ids."""
        return self.embed(tokens.long() + self.architecture.first_action_id)

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [b n 256] of the action tokens."""
        first = self.architecture.first_action_id
        rows = self.llama.lm_head.weight[first : first + self.architecture.action_bins]
        return F.linear(hidden, rows).float()

    def check_length(self, prompt: int, images: int, instructions: Sequence[str]) -> None:
        """`UserError` where ``prompt`` tokens of text and ``images`` patches make too long a
        sequence."""
        total = prompt + images + int(self.config.use_proprio) + self.actions + 1
        if total > self.architecture.max_length:
            longest = max(instructions, key=len)
            raise UserError(
                f"the instruction {longest[:60]!r}… makes a sequence of {total} tokens ({prompt} "
                f"prompt, {images} image, {self.actions} action), the model reads "
                f"{self.architecture.max_length}: shorten it"
            )

    def prefix(self, ids: Tensor, lengths: Tensor, inserted: Sequence[Tensor]) -> Prefix:
        """Prompts ``ids`` [b T] of ``lengths`` [b], with the embeddings ``inserted`` [b n d] behind
        BOS."""
        padded = int(lengths.min()) < ids.shape[1]
        device = inserted[0].device
        lengths = lengths.to(device)
        text = self.embed(ids.to(device))
        behind_bos = sum(part.shape[1] for part in inserted)
        parts = (text[:, :1], *inserted, text[:, 1:])
        x = torch.cat([part.to(text.dtype) for part in parts], dim=1)
        column = torch.arange(x.shape[1], device=device)
        valid = column < (behind_bos + lengths)[:, None]
        return Prefix(x, valid, behind_bos + lengths - 1, padded)

    def parallel(self, prefix: Prefix) -> Tensor:
        """Hidden states [b n d] that predict the n action tokens, of one forward with a zero
        embedding at every action position."""
        behind = prefix.x.new_zeros(len(prefix.x), self.actions, prefix.x.shape[2])
        if self.config.dialect == "official":
            stop = self.embed(torch.full((len(behind), 1), STOP_ID, device=behind.device))
            behind = torch.cat([behind, stop.to(behind.dtype)], dim=1)
        return self._read(prefix, behind)

    def with_tokens(self, prefix: Prefix, tokens: Tensor) -> Tensor:
        """As `parallel`, of autoregressive decoding: each position reads the ``tokens`` [b n]
        before it."""
        return self._read(prefix, self.embed_actions(tokens.to(prefix.x.device)[:, :-1]))

    def first(self, prefix: Prefix, cache: KVCache | None = None) -> Tensor:
        """Hidden state [b d] that predicts the first token of autoregressive decoding: the prefix
        alone tells it."""
        positions = (prefix.valid.cumsum(1) - 1).clamp_(min=0)
        hidden = self._run(
            prefix.x, positions, self._mask(prefix.valid, prefix.padded), True, cache
        )
        return hidden[torch.arange(len(hidden), device=hidden.device), prefix.last]

    def decode(
        self, prefix: Prefix, dtype: torch.dtype, choose: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """Autoregressive decoding over a KV cache of ``dtype``, without gradient: ``choose(hidden
        [b d], s)`` gives token s [b]. Returns what predicted the first token [b d]."""
        b, length, _ = prefix.x.shape
        text = self.architecture.text
        head = text["hidden_size"] // text["num_attention_heads"]
        shape = (b, text["num_key_value_heads"], length + self.actions - 1, head)
        cache = KVCache.empty(text["num_hidden_layers"], shape, prefix.x, dtype)
        valid = F.pad(prefix.valid, (0, self.actions - 1), value=True)
        positions = (valid.cumsum(1) - 1).clamp_(min=0)
        first = last = self.first(prefix, cache)
        for s in range(self.actions):
            tokens = choose(last, s)
            if s + 1 < self.actions:
                at = length + s
                mask = valid[:, None, None, : at + 1] if prefix.padded else None
                x = self.embed_actions(tokens[:, None])
                last = self._run(x, positions[:, at : at + 1], mask, True, cache)[:, 0]
        return first

    def _read(self, prefix: Prefix, behind: Tensor) -> Tensor:
        """Hidden states [b n d] that predict the n action tokens, with embeddings ``behind`` [b
        m d] after the prefix."""
        x = torch.cat([prefix.x, behind.to(prefix.x.dtype)], dim=1)
        valid = F.pad(prefix.valid, (0, behind.shape[1]), value=True)
        positions = (valid.cumsum(1) - 1).clamp_(min=0)
        hidden = self._run(x, positions, self._mask(valid, prefix.padded), self.config.causal)
        first = hidden[torch.arange(len(hidden), device=hidden.device), prefix.last]
        start = prefix.x.shape[1]
        return torch.cat([first[:, None], hidden[:, start : start + self.actions - 1]], dim=1)

    def _run(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        causal: bool,
        cache: KVCache | None = None,
    ) -> Tensor:
        """`run_llama`; what fills a cache keeps no activations, so there is nothing to
        checkpoint."""
        deep = self.config.gradient_checkpointing and cache is None
        model = self.llama.model
        return run_llama(model, self.rope, x, positions, mask, causal, cache, checkpointing=deep)

    def _mask(self, valid: Tensor, padded: bool) -> Tensor | None:
        """Keys that each query sees; None where the attention kernel needs none."""
        if not padded:
            return None
        mask = valid[:, None, None, :]
        if self.config.causal:
            length = valid.shape[1]
            mask = mask & torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
        return mask
