"""Reward models: made from the config, linked to the algorithm, saved and loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_rl import build
from vla_rl.checkpoint import CheckpointError, restoring
from vla_rl.config import checked
from vla_rl.config.algorithms import advantage_of
from vla_rl.config.episodes import refuse_potential
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy, RewardModel
from vla_rl.monitoring.metrics import write_json
from vla_rl.options import AlgorithmOptions, EncoderOptions, RewardOptions, ShapingOptions, view
from vla_rl.storage import load_state, save_state
from vla_rl.types import EmbodimentSpec

REWARD_FILE, STATE_FOLDER = "reward.json", "state"


# ----------------------------------------------------------------------------------------- building
@dataclass(frozen=True)
class RewardContext:
    """What surrounds a reward model: the algorithm's config, the robot, the policy RL starts from,
    and how far apart (control steps) the frames of demonstrations are."""

    algorithm: Any = None
    embodiment: EmbodimentSpec | None = None
    policy: Any = None
    stride: int = 4


def build_reward(kind: str, config: Any, context: RewardContext | None = None) -> Any:
    """The reward model ``kind`` of the config, its trained state loaded where ``config.checkpoint``
    names one.

    Raises `ConfigError` where the reward cannot work with this algorithm or policy,
    `CheckpointError` for a bad folder.
    """
    context = context or RewardContext()
    config = linked_to_algorithm(config, context.algorithm)
    target = build.implementation("reward", kind)
    if kind == "combined":
        model = target(config, lambda part, part_config: build_reward(part, part_config, context))
    elif reads_policy(config):
        model = target(config, image_features(context.policy))
    else:
        model = target(config)
    model = RewardModel.of(model)
    if context.embodiment is not None:
        model.set_embodiment(context.embodiment, context.stride)
    options = view(config, RewardOptions)
    if model.learned and options.checkpoint:
        load_reward(options.checkpoint, kind, model)
    if options.reference and "references" in model.can:
        from vla_rl.data.trajectories import trajectories_of_dataset

        model.set_references(
            trajectories_of_dataset(options.reference, context.embodiment, stride=context.stride)
        )
    return model


def reads_policy(config: Any) -> bool:
    """Whether a reward's config (or one of its parts) asks for the policy's own image features."""
    options = view(config, RewardOptions)
    return view(options.encoder, EncoderOptions).type == "policy" or any(
        (part.get("encoder") or {}).get("type") == "policy"
        for part in (options.parts or {}).values()
    )


def image_features(policy: Any) -> Callable[[Tensor], Tensor]:
    """The policy's own image features. Raises `ConfigError` where there is no policy, or it has
    none."""
    if "image_features" not in Policy.can_of(policy):
        who = "no policy is at hand" if policy is None else f"{type(policy).__name__} has none"
        raise ConfigError(
            f"reward.encoder.type=policy needs a policy with image_features(frames), and {who}: "
            "use the reward inside a run with such a policy, or choose "
            "reward.encoder.type=pooled, timm or vjepa2"
        )
    return policy.image_features


def linked_to_algorithm(config: Any, algorithm: Any) -> Any:
    """The reward's config with discount and end of episodes taken from the algorithm, where it
    leaves them open.

    Raises `ConfigError` for a potential under group-relative advantages.
    """
    shaping = view(config, RewardOptions).shaping
    if shaping is None or algorithm is None or view(shaping, ShapingOptions).truncated_end is None:
        return config
    options = view(algorithm, AlgorithmOptions)
    refuse_potential(shaping, algorithm)
    changes: dict[str, Any] = {}
    # one unit of time
    changes["gamma_per_control_step"] = (
        shaping.gamma_per_control_step or options.gamma_per_control_step
    )
    if shaping.gamma < 0:
        changes["gamma"] = options.gamma
    if shaping.truncated_end == "auto":
        # What needs no value (group-relative advantages, reinforce++) sums rewards to the end and
        # never bootstraps there.
        bootstraps = advantage_of(algorithm).needs_value and options.bootstrap_truncated
        changes["truncated_end"] = "keep" if bootstraps else "zero"
    return dataclasses.replace(config, shaping=dataclasses.replace(shaping, **changes))


def fit_updates(config: Any) -> int:
    """How many updates `fit` makes (of several parts: the longest), for a progress bar."""
    parts = [
        config.part(name, part)[1]
        for name, part in (view(config, RewardOptions).parts or {}).items()
    ]
    return max([1, *[view(c, RewardOptions).updates or 1 for c in (config, *parts)]])


# ------------------------------------------------------------------------------------------- saving
def save_reward(
    folder: Path | str,
    kind: str,
    config: Any,
    reward: Any,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Write a trained reward: ``reward.json`` (type, config, figures of the fit) and ``state/``
    (no pickles)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_state(folder / STATE_FOLDER, reward.state_dict())
    write_json(
        folder / REWARD_FILE,
        {"type": kind, "config": dataclasses.asdict(config), "figures": dict(figures or {})},
    )


def load_reward(folder: Path | str, kind: str, reward: Any) -> None:
    """Load what `save_reward` wrote into ``reward``. Raises `CheckpointError` that names the
    folder."""
    folder = Path(folder)
    stored, _ = _stored(folder, "reward.checkpoint")
    if stored != kind:
        raise CheckpointError(
            f"reward.checkpoint={folder} holds a reward of type {stored!r}, the config asks for "
            f"{kind!r}: use reward={stored}"
        )
    state = load_state(folder / STATE_FOLDER)
    with restoring(folder, f"a trained reward of type {kind!r}"):
        reward.load_state_dict(state)


def demonstration_filter(folder: str) -> RewardModel:
    """``sft.filter``: the reward that `save_reward` wrote, as it was configured. Raises
    `CheckpointError` for a folder without one, `ConfigError` for one that cannot tell."""
    kind, values = _stored(Path(folder), "sft.filter")
    where = f"sft.filter={folder}: {REWARD_FILE}: config"
    reward = build_reward(
        kind, checked(build.config_class("reward", kind), {**values, "checkpoint": folder}, where)
    )
    if "filtering" not in reward.can:
        raise ConfigError(
            f"sft.filter={folder} holds a {type(reward).__name__}, which does not say what is "
            "worth imitating: give one of 'vla-rl reward fit reward=value_progress data=FOLDER'"
        )
    return reward


def _stored(folder: Path, key: str) -> tuple[str, Mapping[str, Any]]:
    """Its type and config, of a folder that ``key`` names."""
    try:
        stored = json.loads((folder / REWARD_FILE).read_text(encoding="utf-8"))
        return str(stored["type"]), stored.get("config", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{key}={folder} is no trained reward ({error}). Give a folder that 'vla-rl reward "
            "fit' wrote"
        ) from error
