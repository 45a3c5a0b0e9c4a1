"""Instructions as ids, each encoded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.tokenizer import WordTokenizer


class Instructions:
    """Ids of ``length`` words by ``tokenizer``."""

    def __init__(self, tokenizer: WordTokenizer, length: int):
        self.tokenizer, self.length = tokenizer, length
        self._encoded: dict[str, list[int]] = {}

    def ids(self, instructions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids int64 [u T] of the distinct ones, and which of them each row has [b]."""
        distinct = {text: i for i, text in enumerate(dict.fromkeys(instructions))}
        for text in distinct:
            if text not in self._encoded:
                self._encoded[text] = self.tokenizer.encode(text, self.length)
        ids = torch.tensor([self._encoded[text] for text in distinct])
        rows = torch.tensor([distinct[text] for text in instructions])
        return ids.to(device), rows.to(device)
