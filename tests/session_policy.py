"""A policy for sessions of the point robot, which a checkpoint names: it always moves by
``move`` (m)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_rl.types import ActionChunk, Observation, PolicyOutput


class Mover(nn.Module):
    policy_type = "session_policy:Mover"
    chunk_length = 6

    def __init__(self, embodiment: Any, move: tuple[float, ...] = (0.0, 0.0, 0.04, -1.0)):
        super().__init__()
        self.embodiment = embodiment
        self.move = nn.Parameter(torch.tensor(move))

    def act(
        self, observation: Observation, *, deterministic: bool = False, seeds: Any = None
    ) -> PolicyOutput:
        b, h = len(observation), self.chunk_length
        assert (
            observation.instruction == ("raise the point",) * b
            or observation.instruction == ("",) * b
        )
        actions = self.move.detach().repeat(b, h, 1)
        return PolicyOutput(
            ActionChunk(actions, torch.ones(b, h, dtype=torch.bool)), torch.zeros(b), {}
        )

    def config_dict(self) -> dict[str, Any]:
        return {"config": {}}

    @classmethod
    def from_config_dict(
        cls, data: dict[str, Any], embodiment: Any, files: dict[str, str]
    ) -> Mover:
        return cls(embodiment)


class Stubborn(Mover):
    """Told to end, it makes the file that STUBBORN names and goes on."""

    policy_type = "session_policy:Stubborn"

    def act(self, observation: Observation, **options: Any) -> PolicyOutput:
        signal.signal(signal.SIGTERM, lambda *_: Path(os.environ["STUBBORN"]).touch())
        return super().act(observation, **options)
