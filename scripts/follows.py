"""Does a policy of the embedded suite go where its instruction says? Its first decision, under both
instructions of a scene.

    python scripts/follows.py CHECKPOINT [CHECKPOINT …] --layouts 100

In each held-out layout of two objects the policy is asked once for either of them. What counts is
which of the two its first chunk, most likely actions, points to more nearly. "Both": to the right
one each time. "One": to the same object whatever was asked, so the layout decided and not the
instruction. One that never listens has 0 % and 100 %; success alone cannot show it, as such a
policy is still right half of the time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sim.tabletop.simulator import TabletopConfig, TabletopSimulator
from sim.tabletop.tasks import TASKS, place_objects
from vla_rl import build
from vla_rl.checkpoint import load_policy
from vla_rl.types import EpisodeSpec, Observation

PAIRS = (("lift_red", "lift_green"), ("place_can", "place_bread"), ("place_milk", "place_cereal"))


def asked_for_both(
    policy: Any, pair: tuple[str, str], layouts: int, **options: Any
) -> dict[str, float]:
    """Shares {both, one, neither} of the first ``layouts`` held-out layouts of the pair's scene."""
    simulator = TabletopSimulator(TabletopConfig(tasks=[pair[0]], **options))
    seen = [simulator.start(0, EpisodeSpec(pair[0], i, "held_out")) for i in range(layouts)]
    simulator.close()
    names = [TASKS[task].target for task in pair]
    # [layouts 2 2]
    ways = np.stack([_ways(pair[0], i, names, o.privileged[:2]) for i, o in enumerate(seen)])
    observation = Observation.from_slots(seen).without_privileged()
    asked = [TASKS[task].spec.held_out_instructions[0] for task in pair]
    right = [
        _went(policy, observation, instruction, ways) == at for at, instruction in enumerate(asked)
    ]
    both, neither = (right[0] & right[1]).mean(), (~right[0] & ~right[1]).mean()
    return {"both": float(both), "one": float(1.0 - both - neither), "neither": float(neither)}


def _ways(task: str, layout: int, names: Sequence[str], hand: np.ndarray) -> np.ndarray:
    """Unit vectors [2 2] over the table from the hand to the things named."""
    places = place_objects(TASKS[task], layout, "held_out")
    ways = np.stack([places[name][:2] - hand for name in names])
    return ways / np.linalg.norm(ways, axis=1, keepdims=True)


def _went(policy: Any, observation: Observation, instruction: str, ways: np.ndarray) -> np.ndarray:
    """Which of the two things the first chunk points to more nearly, [layouts]."""
    asked = Observation(observation.images, observation.proprio, (instruction,) * len(observation))
    with torch.no_grad():
        moved = policy.act(asked, deterministic=True).chunk.actions[:, :, :2].sum(1).numpy()
    return np.einsum("la,lta->lt", moved, ways).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--layouts", type=int, default=100)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    found = {}
    for checkpoint in arguments.checkpoints:
        policy = load_policy(checkpoint, build.policy_class)
        found[checkpoint] = {
            " / ".join(pair): asked_for_both(policy, pair, arguments.layouts) for pair in PAIRS
        }
        print(checkpoint)
        for pair, shares in found[checkpoint].items():
            print(
                f"  {pair:26}"
                + "".join(f"{name} {share:4.0%}   " for name, share in shares.items())
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"layouts": arguments.layouts, "found": found}, file, indent=1)


if __name__ == "__main__":
    main()
