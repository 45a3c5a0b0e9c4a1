"""What an episode must be before a replay keeps it; each mistake one `UserError` that names the
rollout and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from vla_rl.data.checks import ROUNDING, DataCheck, Rows
from vla_rl.data.lerobot_format import ACTION_KEY, STATE_KEY
from vla_rl.data.tables import Field
from vla_rl.errors import EmbodimentMismatch, UserError
from vla_rl.types import EmbodimentSpec, Observation, Trajectory

# what was sent lies within the bounds, what was measured anywhere
SENT = {ACTION_KEY: ROUNDING, STATE_KEY: math.inf}

NO_PREFIX = "whose valid control steps are not its first ones, one at least"


def begins_each_decision(valid: Tensor) -> bool:
    """Whether the control steps that were executed (bool [… h]) are the first ones of each
    decision, one at least."""
    return bool(valid[..., 0].all()) and bool((valid[..., 1:] <= valid[..., :-1]).all())


def check_episode(
    trajectory: Trajectory,
    rewards: Tensor,
    extra: Mapping[str, Tensor],
    embodiment: EmbodimentSpec | None,
) -> None:
    """Raise `UserError` for numbers that are not finite, wrong lengths, or what no such robot
    sees or does."""
    t, name = len(trajectory), trajectory.rollout_id
    if rewards.shape != (t,) or not _finite(rewards.float()):
        raise UserError(
            f"replay: rewards of rollout {name} must be {t} finite numbers, one per decision, got "
            f"shape {list(rewards.shape)}: {rewards.tolist()}"
        )
    for key, values in extra.items():
        if values.shape[:1] != (t + 1,) or not _finite(values):
            what = (
                "some are not finite"
                if values.shape[:1] == (t + 1,)
                else f"got shape {list(values.shape)}"
            )
            raise UserError(
                f"replay: extra '{key}' of rollout {name} must hold finite numbers for {t + 1} "
                f"frames, one more than decisions; {what}: look at what the algorithm's annotate "
                "computes"
            )
    _check_lengths(trajectory)
    if not begins_each_decision(trajectory.valid):
        raise UserError(
            f"replay: rollout {name} has a decision {NO_PREFIX}: mend what made this "
            "episode, or leave it out"
        )
    if embodiment is not None:
        _check_robot(trajectory, embodiment)
    proposed = trajectory.actions if trajectory.proposed is None else trajectory.proposed
    seen = torch.cat([trajectory.observations.proprio, trajectory.final_observation.proprio])
    vectors = {
        ACTION_KEY: trajectory.actions[trajectory.valid].numpy(),
        "proposed": proposed.flatten(0, 1).numpy(),
        STATE_KEY: seen.numpy(),
    }
    check = DataCheck("replay", "replay", embodiment, leeway=SENT)
    check.add(Rows(f"rollout {name}", "replay", vectors, aligned=False))
    check.report().require()


def check_fields(name: str, fields: list[Field], known: list[Field]) -> None:
    """Raise `UserError` unless an episode's columns are those of the episodes before it."""
    if fields == known:
        return
    ours, theirs = ({f.name for f in each} for each in (fields, known))
    unlike = [f"{f} here, {g} before" for f in fields for g in known if f.name == g.name and f != g]
    missing = [f"no {n} here" for n in sorted(theirs - ours)] + [
        f"no {n} before" for n in sorted(ours - theirs)
    ]
    raise UserError(
        f"replay: rollout {name} does not go with the episodes before it "
        f"({'; '.join(unlike + missing)}): use one env, camera set and learner per replay"
    )


def _check_lengths(trajectory: Trajectory) -> None:
    shape, name = tuple(trajectory.actions.shape), trajectory.rollout_id
    sizes = {"valid": (trajectory.valid, shape[:2]), "is_human": (trajectory.is_human, shape[:2])}
    sizes["proposed"] = (trajectory.proposed, shape)
    wrong = [
        f"{key} is {list(values.shape)}, not {list(wanted)}"
        for key, (values, wanted) in sizes.items()
        if values is not None and tuple(values.shape) != wanted
    ]
    if len(trajectory.final_observation) != 1:
        wrong.append(f"{len(trajectory.final_observation)} final observations, not 1")
    first, last = (_sizes(seen) for seen in (trajectory.observations, trajectory.final_observation))
    wrong += [
        f"{key} is {last.get(key)} in the final observation, not {first.get(key)}"
        for key in sorted({*first, *last})
        if first.get(key) != last.get(key)
    ]
    if wrong:
        raise UserError(
            f"replay: rollout {name} has actions {list(shape)}, but {'; '.join(wrong)}: mend what "
            "made this episode, or leave it out"
        )


def _sizes(seen: Observation) -> dict[str, list[int]]:
    """Shapes of what one row of an observation holds."""
    held = {f"image {name}": images for name, images in seen.images.items()} | {
        "proprio": seen.proprio
    }
    if seen.privileged is not None:
        held["privileged"] = seen.privileged
    return {name: list(values.shape[1:]) for name, values in held.items()}


def _check_robot(trajectory: Trajectory, embodiment: EmbodimentSpec) -> None:
    seen: Observation = trajectory.observations
    cameras = {key: f"{images.shape[2]}x{images.shape[1]}" for key, images in seen.images.items()}
    ours = {
        "cameras": cameras,
        "proprio dimensions": seen.proprio.shape[1],
        "action dimensions": trajectory.actions.shape[2],
    }
    theirs = {
        "cameras": {c.name: f"{c.width}x{c.height}" for c in embodiment.cameras},
        "proprio dimensions": embodiment.proprio_dim,
        "action dimensions": embodiment.action_dim,
    }
    unlike = [f"{key} {ours[key]}, not {theirs[key]}" for key in ours if ours[key] != theirs[key]]
    if unlike:
        raise EmbodimentMismatch(
            f"replay: rollout {trajectory.rollout_id} is not of the robot {embodiment.name} "
            f"({'; '.join(unlike)}): use one robot and camera set per replay"
        )


def _finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())
