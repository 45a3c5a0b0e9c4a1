"""A training from Python: what `vla-rl train run=toy` does, and its success before and after.

python examples/train_from_python.py seed=3 rl.iterations=40
"""

import json
import sys
from pathlib import Path

from vla_rl.config import compose
from vla_rl.run.pipeline import run_pipeline


def train(overrides: list[str]) -> tuple[float, float]:
    """Success on held-out initial states after imitation and after RL."""
    # a mistake is a ConfigError that names key and remedy
    config = compose(["run=toy", "name=from_python", *overrides])
    # goes on where an earlier run of that name stopped; fresh=True starts over
    folder: Path = run_pipeline(config)
    found = json.loads((folder / "summary.json").read_text())["evaluations"]
    return found["sft"]["rate"], found["rl"]["rate"]


if __name__ == "__main__":  # worker processes import this file again
    before, after = train(sys.argv[1:])
    print(f"success {before:.0%} after imitation, {after:.0%} after RL")
