"""Which control steps of demonstrations are drawn, and how often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Drawing:
    """Of ``steps`` control steps those that ``worth`` bool [n] marks (None: all), alike; or, with
    ``weights``, each of several datasets as often as they say (of those that have steps to draw),
    all its steps alike. ``source`` int64 [n]: which dataset each is of."""

    def __init__(
        self, steps: int, worth: Tensor | None, source: Tensor, weights: Sequence[float]
    ) -> None:
        self._drawn = None if worth is None else torch.nonzero(worth).flatten()
        self.count = steps if self._drawn is None else len(self._drawn)
        self._source, self._weights = source, torch.tensor(weights, dtype=torch.float64)
        self._pools = self._by_source(self.all_rows()) if len(weights) else []

    def rows(self, places: Tensor) -> Tensor:
        """The control steps at these places among those that are drawn."""
        return places if self._drawn is None else self._drawn[places]

    def all_rows(self) -> Tensor:
        return self.rows(torch.arange(self.count))

    def mass(self) -> np.ndarray | None:
        """How often each control step is drawn [n], up to a factor; None: all alike."""
        if not len(self._weights):
            return None
        each = self._weights / self._source.bincount(minlength=len(self._weights)).clamp(min=1)
        return np.asarray(each[self._source])

    def draw(self, count: int, generator: torch.Generator | None) -> Tensor:
        """``count`` of all, with replacement."""
        if not len(self._weights):
            return self.rows(torch.randint(self.count, (count,), generator=generator))
        return self._pick(self._pools, count, generator)

    def among(self, rows: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """``count`` of these alone, as often as of all."""
        pools = self._by_source(rows) if len(self._weights) else [rows]
        return self._pick(pools, count, generator)

    def _by_source(self, rows: Tensor) -> list[Tensor]:
        source = self._source[rows]
        return [rows[source == i] for i in range(len(self._weights))]

    def _pick(
        self, pools: Sequence[Tensor], count: int, generator: torch.Generator | None
    ) -> Tensor:
        """Which pool by its weight, and in it all alike."""
        if len(pools) == 1:
            return pools[0][torch.randint(len(pools[0]), (count,), generator=generator)]
        weights = self._weights * torch.tensor([float(len(pool) > 0) for pool in pools])
        which = torch.multinomial(weights, count, replacement=True, generator=generator)
        rows = torch.empty(count, dtype=torch.long)
        for i, pool in enumerate(pools):
            mine = which == i
            if len(pool):
                places = torch.randint(len(pool), (int(mine.sum()),), generator=generator)
                rows[mine] = pool[places]
        return rows
