"""Values that are kept low where there is no data: CQL and Cal-QL before the first episode, as
WSRL's release has them.

CQL (Kumar et al. 2020, arXiv 2006.04779, eq. 4 with ℛ = entropy, appendix F) and Cal-QL (Nakamoto
et al. 2023, arXiv 2303.05479, eq. 5.1): of each frame as many actions at random, of the actor
there, and of the actor at the next frame; all are valued at this frame, each weighed by the density
that it was drawn from, and Cal-QL spares the actor's alone. The target takes the best of as many
actions of the actor at the next frame. A deterministic actor has no density: its values and the
random ones then weigh alike, and the target is that of its one action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms import critics

RETURN = "return"  # the frame that holds what an episode went on to earn
# encoded [b f], and the frames that a policy reads beside it
Seen = tuple[Tensor, Mapping[str, Tensor]]


def gap(learner: Any, here: Seen, following: Seen, data: Tensor) -> Tensor:
    """The regulariser, scalar (`critics.calibrated_gap`), for an `ActorCritic`; ``data`` [critics
    b] are the values of what was done ``here``."""
    policy, (encoded, frames), n = learner.policy, here, learner.config.conservative_samples
    b, size = len(encoded), policy.latent_dim
    with torch.no_grad():
        random = 2.0 * torch.rand(b, n, size, generator=learner.generator).to(encoded) - 1.0
        own = [_drawn(learner, seen, n) for seen in (here, following)]
        latents = torch.cat([random, *(latent for latent, _ in own)], 1)  # [b 3n l]
        repeated = _repeated(frames, 3 * n)
        actions = policy.realize(latents.flatten(0, 1), repeated)
        uniform = random.new_full((b, n), -size * math.log(2.0))
        log_density = (
            torch.cat([uniform, *(density for _, density in own)], 1) if policy.stochastic else None
        )
    outputs = learner.critics(encoded.repeat_interleave(3 * n, 0), actions)
    proposed = learner.head.value(outputs).view(learner.critics.count, b, 3 * n)
    return critics.calibrated_gap(
        proposed, data, frames.get(RETURN), torch.arange(3 * n) >= n, log_density
    )


def _drawn(learner: Any, seen: Seen, n: int) -> tuple[Tensor, Tensor]:
    """``n`` of the actor's latent actions of each row [b n l], and their log densities [b n]."""
    encoded, frames = seen
    noise = torch.randn(
        len(encoded) * n, learner.policy.latent_dim, generator=learner.generator
    ).to(encoded)
    latent, log_prob = learner.policy.propose(
        encoded.repeat_interleave(n, 0), _repeated(frames, n), noise
    )
    return latent.view(len(encoded), n, -1), log_prob.view(len(encoded), n)


def best_following(
    learner: Any, frames: Mapping[str, Tensor], kept: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | float]:
    """Outputs [s b …] of a random subset of the target critics at the best of the actor's actions,
    and what is added there.

    ``kept``: those of ``frames`` that a policy reads beside what is encoded of them."""
    n, policy = learner.config.conservative_samples, learner.policy
    repeated = _repeated(kept, n)
    latent, bonus = learner._next_latent(policy.encode(frames).repeat_interleave(n, 0), repeated)
    encoder, target = learner._target[0], learner._target[1]
    outputs = target(encoder(frames).repeat_interleave(n, 0), policy.realize(latent, repeated))
    outputs = outputs[
        critics.random_subset(
            learner.critics.count, learner.config.critics.subset, learner.generator
        )
    ]
    best = learner.head.value(outputs).amin(0).view(-1, n).argmax(1)
    rows = torch.arange(len(best), device=best.device) * n + best
    return outputs[:, rows], bonus[rows] if isinstance(bonus, Tensor) else bonus


def _repeated(frames: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    return {name: frame.repeat_interleave(n, 0) for name, frame in frames.items()}
