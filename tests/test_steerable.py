"""scripts/steerable.py: what noise does to a decision is told from what the state does."""

from __future__ import annotations

import torch
from test_replay import SPEC, seen


class Echo:
    """Every control step is the state's number plus a tenth of its noise."""

    chunk_length, embodiment = 4, SPEC

    def decode(self, observation, noise):
        return observation.proprio[:, :1, None] + 0.1 * noise


def test_spreads_over_noises_and_states(script):
    observation = seen(0, 50)
    found = script("steerable").spreads(Echo(), observation, noises=400)
    for name in ("each step", "whole chunk"):
        torch.testing.assert_close(
            found[name], torch.full((SPEC.action_dim,), 0.1), rtol=0.05, atol=0
        )
    truth = observation.proprio[:, 0].std()
    torch.testing.assert_close(found["states"], truth.expand(SPEC.action_dim), rtol=0.01, atol=0)
