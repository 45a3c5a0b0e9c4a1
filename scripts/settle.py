"""What is the policy of a run with a memory of successes worth once it has settled?

    python scripts/settle.py outputs/libero_object_nano settled --updates 200
    vla-rl eval outputs/libero_object_nano/checkpoints/rl --compare settled --episodes-per-task 20

The policy of `checkpoints/rl` imitates what the run's memory holds, and the run's demonstrations,
in so many updates more, with a learning rate that falls by a cosine to a fiftieth. The result is a
checkpoint of its own; the run is only read.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any, cast

from vla_rl import config as configs
from vla_rl.assembly.context import Run
from vla_rl.assembly.env_and_policy import checked_env
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.checkpoint import load_training_state, load_weights, save_checkpoint
from vla_rl.monitoring.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, help="where the checkpoint goes")
    parser.add_argument("--updates", type=int, default=200)
    options = parser.parse_args()
    config = configs.load(options.run / "config.yaml")
    memory = getattr(config.algorithm, "memory", None)
    if memory is None or not memory.episodes:
        parser.error(
            f"{options.run} keeps no successes: name a run whose algorithm.memory.episodes "
            "is above 0"
        )
    memory.updates, memory.min_learning_rate_fraction = options.updates, 0.02
    config.output_dir, config.name = str(options.run.resolve().parent), options.run.resolve().name
    with contextlib.ExitStack() as resources:
        run = Run(config, cast(Any, None), Progress(), {}, resources)
        run.env = checked_env(config, resources)
        policy, checkpoint = trained_policy(run), options.run / "checkpoints" / "rl"
        successes = cast(Any, learner_of(run, policy)).algorithm.memory
        load_weights(checkpoint, policy)
        successes.load_state_dict(load_training_state(checkpoint)["algorithm"]["memory"])
        print(successes.learn())
        save_checkpoint(options.out, policy)


if __name__ == "__main__":
    main()
