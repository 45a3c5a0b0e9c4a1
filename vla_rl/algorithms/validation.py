"""What SFT has learned, on demonstrations it was not trained on: the loss, and whether the policy
looks at its images.

Most action tokens of a demonstration follow from proprioception, so a policy that ignores its
cameras has an ordinary loss and token accuracy and acts blindly. What tells it apart is a
permutation test (Breiman 2001, "Random forests", section 10, there of one input variable): give
every row the images of another row and see how much the loss rises.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_rl.interfaces import Policy
from vla_rl.types import Observation

# of the loss that is lost with the images of other rows: below these SFT warns
BLIND, WEAK = 0.05, 0.15
# spread of the image features: collapsed ones had 0.003 to 0.006, others about 0.2 to 0.3
FLAT = 0.05
DEAF = 0.05  # the same of other rows' instructions, where there are several tasks
ROWS = 512  # decisions that a figure is measured on, at most
_SEE = (
    "Try sft.augment.proprio=0.5 (it cannot go by its arm then), policy.feature_norm=position (if "
    "it is another), more demonstrations, more sft.updates, or a lower sft.learning_rate."
)


@contextlib.contextmanager
def evaluating(policy: Any) -> Iterator[None]:
    """Within the block the policy is in evaluation mode, without gradients."""
    trained = policy if Policy.of(policy).training else None
    if trained is not None:
        trained.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if trained is not None:
            trained.train()


def derangement(n: int, generator: torch.Generator) -> Tensor:
    """A random cyclic order int64 [n]: nobody keeps their own (for n ≥ 2)."""
    order = torch.randperm(n, generator=generator)
    out = torch.empty_like(order)
    out[order] = order.roll(1)
    return out


def input_use(
    policy: Policy,
    observation: Observation,
    actions: Tensor,
    valid: Tensor,
    *,
    seed: int = 0,
    slice_size: int = 64,
) -> dict[str, float]:
    """How much worse a policy imitates rows [n] when an input comes from another row.

    Returns ``loss`` with everything in place, and what it rises by: ``image_use`` with all cameras
    of another row (if any), ``image_use/CAMERA`` with that camera alone, ``instruction_use`` with
    another row's instruction (only where instructions differ), ``proprio_use`` with another row's
    proprioception. In the policy's own unit of loss: nats per token, or squared error. Needs two
    rows or more.
    """
    other = derangement(len(observation), torch.Generator().manual_seed(seed))

    def loss(seen: Observation) -> float:
        total = count = 0.0
        for start in range(0, len(seen), slice_size):
            part = slice(start, start + slice_size)
            weight = float(valid[part].sum())
            total += weight * float(
                policy.imitation_loss(seen[part], actions[part], valid[part])[0]
            )
            count += weight
        return total / max(count, 1.0)

    seen = observation.without_privileged()
    actions = Policy.of(policy).targets(seen, actions)
    with evaluating(policy):
        true = loss(seen)
        figures = {"loss": true}
        shuffled = {name: images[other] for name, images in seen.images.items()}
        if shuffled:
            figures["image_use"] = loss(dataclasses.replace(seen, images=shuffled)) - true
        for name in seen.images if len(seen.images) > 1 else ():
            alone = {**seen.images, name: shuffled[name]}
            figures[f"image_use/{name}"] = loss(dataclasses.replace(seen, images=alone)) - true
        if len(set(seen.instruction)) > 1:
            texts = tuple(seen.instruction[i] for i in other.tolist())
            figures["instruction_use"] = loss(dataclasses.replace(seen, instruction=texts)) - true
        if seen.proprio.shape[1]:
            figures["proprio_use"] = (
                loss(dataclasses.replace(seen, proprio=seen.proprio[other])) - true
            )
        if (spread := policy.image_token_spread(seen[:slice_size])) is not None:
            figures["image_spread"] = spread
    return figures


def first_loss(policy: Policy, observation: Observation, actions: Tensor, valid: Tensor) -> float:
    """The imitation loss of the first decisions of episodes [n], where the arm has not yet gone
    anywhere."""
    seen = observation.without_privileged()
    with evaluating(policy):
        return float(
            policy.imitation_loss(seen, Policy.of(policy).targets(seen, actions), valid)[0]
        )


def described(figures: Mapping[str, float]) -> str:
    """The figures of `input_use`, and of `first_loss` where there is one, as one line."""
    first = f"; {figures['first_loss']:.2f} on first decisions" if "first_loss" in figures else ""
    if "image_use" not in figures:
        return f"on held-out demonstrations: loss {figures['loss']:.2f}{first}"
    cameras = [
        f"{name.partition('/')[2]} {x:+.2f}"
        for name, x in figures.items()
        if name.startswith("image_use/")
    ]
    alone = f" ({', '.join(cameras)} alone)" if cameras else ""
    told = (
        f", {figures['instruction_use']:+.2f} with their instructions"
        if _told_apart(figures)
        else ""
    )
    return (
        f"on held-out demonstrations: loss {figures['loss']:.2f}, {figures['image_use']:+.2f} with "
        f"the images of other rows{alone}{told}{first}"
    )


def _told_apart(figures: Mapping[str, float]) -> bool:
    """Whether instructions say which of several ``tasks`` is meant, and not the same in other
    words."""
    return "instruction_use" in figures and figures.get("tasks", 1) > 1


def verdict(figures: Mapping[str, float]) -> str:
    """A warning with numbers and remedies where the policy hardly uses its images, where their
    features hardly differ, or where it does not read its instruction (of several ``tasks``); empty
    otherwise."""
    return " Also, ".join(
        text for text in (_blind(figures) or _flat(figures), _deaf(figures)) if text
    )


def _deaf(figures: Mapping[str, float]) -> str:
    true = figures["loss"]
    if not _told_apart(figures) or figures["instruction_use"] >= DEAF * abs(true):
        return ""
    return (
        "the policy does not read its instruction: on held-out demonstrations its loss is "
        f"{true + figures['instruction_use']:.3f} with the instructions of other rows and "
        f"{true:.3f} with the true ones. It goes by what it sees, so where two tasks share a scene "
        "it will take either object. Try demonstrations of those tasks in the same layouts, more "
        "of them, or a higher sft.first_share; nothing is amiss where each task has a scene of its "
        "own."
    )


def _blind(figures: Mapping[str, float]) -> str:
    if "image_use" not in figures:
        return ""
    true, use = figures["loss"], figures["image_use"]
    share = use / max(abs(true), 1e-9)
    if share >= WEAK:
        return ""
    word = "does not look at its images" if share < BLIND else "hardly looks at its images"
    spread = (
        f", the spread of its image features is {figures['image_spread']:.2f}"
        if "image_spread" in figures
        else ""
    )
    return (
        f"the policy {word}: on held-out demonstrations its loss is {true + use:.3f} with the "
        f"images of other rows and {true:.3f} with the true ones{spread}. It will act much alike "
        f"wherever things lie. {_SEE}"
    )


def _flat(figures: Mapping[str, float]) -> str:
    if figures.get("image_spread", 1.0) >= FLAT:
        return ""
    return (
        "the policy's image features are nearly the same for every picture: on held-out "
        f"demonstrations their spread is {figures['image_spread']:.3f}, where features that tell "
        f"pictures apart have about 0.2 to 0.3. {_SEE}"
    )
