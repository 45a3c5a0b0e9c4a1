"""How far can its first noise move a flow or diffusion policy of the embedded suite? What steering
(DSRL) has to work with.

    python scripts/steerable.py CHECKPOINT --task lift_cube --states 200 --noises 8

In each held-out initial state the policy decides from several first noises. Printed for each
action: the standard deviation of a control step over noises (drawn for each control step, and one
for the whole chunk), and that of its mean over states. Where the first two are small beside the
third, the policy decides by what it sees alone, and no noise will make it do otherwise.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from sim.tabletop.simulator import TabletopConfig, TabletopSimulator
from vla_rl import build
from vla_rl.checkpoint import load_policy
from vla_rl.types import EpisodeSpec, Observation


@torch.no_grad()
def spreads(policy: Any, seen: Observation, noises: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Standard deviations [action dimensions], physical units: {each step, whole chunk, states}."""
    generator = torch.Generator().manual_seed(seed)
    h, a = policy.chunk_length, policy.embodiment.action_dim
    found = {}
    for name, steps in (("each step", h), ("whole chunk", 1)):
        drawn = torch.randn(noises, len(seen), steps, a, generator=generator).expand(-1, -1, h, -1)
        # [noises states h a]
        actions = torch.stack([policy.decode(seen, noise) for noise in drawn])
        found[name] = actions.std(0).mean((0, 1))
    return found | {"states": actions.mean(0).std(0).mean(0)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--task", default="lift_cube")
    parser.add_argument("--states", type=int, default=200)
    parser.add_argument("--noises", type=int, default=8)
    options = parser.parse_args()
    if min(options.states, options.noises) < 2:
        parser.error(
            f"--states {options.states} --noises {options.noises}: a standard deviation "
            "needs two of each"
        )
    policy = load_policy(options.checkpoint, build.policy_class)
    if "noise" not in policy.can:
        kind = type(policy).__name__
        parser.error(
            f"{options.checkpoint} holds a {kind}, which turns no noise into actions: name "
            "a flow policy"
        )
    simulator = TabletopSimulator(TabletopConfig(tasks=[options.task]))
    seen = [
        simulator.start(0, EpisodeSpec(options.task, i, "held_out")) for i in range(options.states)
    ]
    simulator.close()
    found = spreads(policy, Observation.from_slots(seen).without_privileged(), options.noises)
    print(
        f"{'standard deviation over':<28}"
        + "".join(f"{name:>10}" for name in policy.embodiment.action_names)
    )
    for name, values in found.items():
        label = "states" if name == "states" else f"noises, one for {name}"
        print(f"{label:<28}" + "".join(f"{float(x):>10.4f}" for x in values))


if __name__ == "__main__":
    main()
