"""What do the critics of a DSRL run (algorithm=dsrl) know of noises, and what would the best of
several noises solve?

    python scripts/steered_values.py outputs/steer_na --noises 8 32

Printed: how far values of actions differ among noises of one state and among states (standard
deviations, 256 decisions of the run's own episodes), how well the critic of noises follows the
critic of actions within a state (correlation), and success on the run's held-out episodes, by its
actor and by the best of so many standard normal noises by the critic of actions. The run is read,
and nothing is written there.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vla_rl import config as configs
from vla_rl.algorithms.dsrl import DSRL
from vla_rl.assembly.context import Run, evaluate_held_out
from vla_rl.assembly.env_and_policy import checked_env
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.checkpoint import load_training_state, load_weights
from vla_rl.data.replay import ONLINE
from vla_rl.learning.learners import ReplayLearner
from vla_rl.monitoring.progress import Progress

NOISES = 16  # of each state, for the spread of values


def latents(policy: Any, rows: int, generator: torch.Generator) -> Tensor:
    """Standard normal noise [rows l] in the actor's units."""
    return (torch.randn(rows, policy.latent_dim, generator=generator) / policy.config.bound).clamp(
        -1.0, 1.0
    )


def values(
    algorithm: DSRL, encoded: Tensor, latent: Tensor, seen: Any, frames: Any
) -> tuple[Tensor, Tensor]:
    """Mean value [rows] of what noises turn into, and the actions [rows h·a]."""
    actions = algorithm.policy.decoded(algorithm.policy.noise(latent), seen, frames)
    return algorithm.head.value(algorithm.critics(encoded, actions)).mean(0), actions


@torch.no_grad()
def spread(learner: ReplayLearner, algorithm: DSRL) -> tuple[float, float, float]:
    """(Standard deviation over noises of a state, over states, correlation of both critics
    within a state.)"""
    generator = torch.Generator().manual_seed(1)
    batch = learner.replay.draw(256, generator, shares={ONLINE: 1.0})
    frames = {name: frame.to(algorithm.device) for name, frame in batch.extra.items()}
    encoded, of_actions, of_noises = algorithm.policy.encode(frames), [], []
    for _ in range(NOISES):
        latent = latents(algorithm.policy, len(encoded), generator)
        of_actions.append(values(algorithm, encoded, latent, batch.observations, frames)[0])
        of_noises.append(algorithm.noise_critics(encoded, latent).squeeze(-1).mean(0))
    q, w = torch.stack(of_actions), torch.stack(of_noises)
    both = torch.stack([(q - q.mean(0)).flatten(), (w - w.mean(0)).flatten()])
    return float(q.std(0).mean()), float(q.mean(0).std()), float(torch.corrcoef(both)[0, 1])


def best_of(algorithm: DSRL, count: int) -> Any:
    """An ``act`` that takes the best of ``count`` noises by the critic of actions."""
    policy: Any = algorithm.policy

    @torch.no_grad()
    def act(observation: Any, *, deterministic: bool = False, seeds: Any = None) -> Any:
        generator = torch.Generator().manual_seed(sum(seeds or [0]) % 2**31)
        frames = policy.base.frame_features(observation)
        encoded, tried = (
            policy.encode(frames),
            [latents(policy, len(observation), generator) for _ in range(count)],
        )
        found = [values(algorithm, encoded, latent, observation, frames) for latent in tried]
        pick, rows = (
            torch.stack([value for value, _ in found]).argmax(0),
            torch.arange(len(observation)),
        )
        latent, actions = (
            torch.stack(tried)[pick, rows],
            torch.stack([a for _, a in found])[pick, rows],
        )
        return policy.decided(latent, actions, {**frames, "latent": latent})

    return act


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--noises", type=int, nargs="*", default=[8])
    options = parser.parse_args()
    config = configs.load(options.run / "config.yaml")
    if config.algorithm_type != "dsrl":
        parser.error(
            f"{options.run} was trained by algorithm.type={config.algorithm_type}: name a "
            "run of algorithm=dsrl"
        )
    with contextlib.ExitStack() as resources, tempfile.TemporaryDirectory() as copy:
        run = Run(config, cast(Any, None), Progress(), {}, resources)
        run.env = checked_env(config, resources)
        policy = trained_policy(run)
        learner = cast(ReplayLearner, learner_of(run, policy))
        learner._folder = Path(shutil.copytree(options.run / "replay", Path(copy) / "replay"))
        checkpoint = options.run / "checkpoints" / "rl"
        load_weights(checkpoint, policy)
        learner.load_state_dict(load_training_state(checkpoint)["algorithm"])
        algorithm = cast(DSRL, learner.algorithm)
        noises, states, together = spread(learner, algorithm)
        print(
            f"values differ by {noises:.4f} among noises, {states:.4f} among states; correlation "
            f"{together:.2f}"
        )
        print(
            f"the actor: {evaluate_held_out(run, policy, 'actor', video_episodes=0).success_rate:.0%}"
        )
        for count in options.noises:
            policy.act = best_of(algorithm, count)
            name = f"best of {count}"
            print(
                f"{name}: {evaluate_held_out(run, policy, name, video_episodes=0).success_rate:.0%}"
            )


if __name__ == "__main__":
    main()
