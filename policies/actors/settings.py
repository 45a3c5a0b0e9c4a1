"""Options of the actors (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from vla_rl import bounds
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError

FEATURES, PICTURES = "features", "pictures"


@dataclass
class ActorConfig(Bounded, place="actor"):
    """What actors share. ``hidden`` widths of the actor, ``encoder`` width of what it makes of a
    frame.

    ``distribution``: gaussian (squashed by tanh; SAC needs it) or deterministic, which explores
    with Gaussian ``noise``, in units of the latent action (−1 … 1). ``copy_base``: whether
    checkpoints hold a copy of the frozen policy's weights, or name the checkpoint that has them
    (None: a copy of at most 500 MB). ``eyes``: features, what the frozen policy makes of images,
    kept in the replay; or pictures, by convolutions of the actor's own (residual and direct).
    """

    can_see: ClassVar[tuple[str, ...]] = (FEATURES,)

    # widths of the layers
    hidden: list[int] = several([256, 256], ge=1, least=1)
    # width of what it makes of a frame
    encoder: int = bound(128, ge=1)
    # gaussian: squashed by tanh; SAC needs it
    distribution: str = bound("gaussian", choices=("gaussian", "deterministic"))
    # std that a deterministic one explores with, in latent units (-1 to 1)
    noise: float = bound(0.2, ge=0)
    copy_base: bool | None = None
    eyes: str = bound(FEATURES, choices=(FEATURES, PICTURES))
    # width of the RL token that pictures are compressed to; 0: critics train what reads them
    token: int = bound(0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token and self.eyes == PICTURES:
            raise ConfigError(
                f"actor.token={self.token} is the width of what the frozen policy's features are "
                f"compressed to, and actor.eyes={PICTURES} reads none: set actor.eyes={FEATURES}"
            )
        if self.eyes not in self.can_see:
            raise ConfigError(
                f"actor.eyes={self.eyes}: this actor needs what the frozen policy makes of images, "
                "which the replay keeps. Set actor.eyes=features, or actor=direct or "
                "actor=residual, which may have eyes of their own"
            )


@dataclass
class GripperConfig(ActorConfig):
    """``average``: deterministic decisions are those of a running average of the actor's weights
    over its updates, which keeps this share of itself at each (0: of the present weights); it
    learns and explores with the present ones.

    ``gripper`` continuous: an action as the others. discrete: one of three choices (keep, either
    end) by values of its own, which an algorithm learns beside the rest (HIL-SERL); of exploring
    decisions a share ``gripper_noise`` chooses at random (HIL-SERL: 0, people's corrections
    explore).

    With ``eyes=pictures`` each camera has convolutions of ``channels``: the first makes its picture
    smaller by ``stride``, each further one halves it. While it learns, pictures are shifted by at
    most ``shift`` pixels, drawn apart for each row and camera, and for s and s' (DrQ-v2)."""

    can_see = (FEATURES, PICTURES)

    # an action as the others, or one of three choices by values of its own
    gripper: str = bound("continuous", choices=("continuous", "discrete"))
    # share of exploring decisions whose choice is random
    gripper_noise: float = bound(0.0, ge=0, le=1, hint="a share of decisions")
    average: float = bound(0.0, ge=0, lt=1, hint="0 for none, such as 0.999")
    # of each convolution, with eyes=pictures
    channels: list[int] = several([16, 32, 32], ge=1, least=1)
    # by which the first makes the picture smaller
    stride: int = bound(4, ge=1)
    shift: int = bound(4, ge=0)


@dataclass
class ResidualConfig(GripperConfig):
    """A correction of at most ``scale`` half-ranges on each action of the frozen policy, which
    decides anew every ``base_steps`` control steps (0: at the end of its chunk).

    One correction holds for ``hold`` control steps: 1 reacts to each (ResFiT); with more,
    exploration moves further one way and fewer decisions share the credit. The actor's own share of
    the bound grows over its first ``ramp`` updates, while the critics learn what actions do
    (ResFiT's progressive clipping); exploration has all of it from the start. ``dimensions`` names
    what is corrected (empty: all). ``scales`` gives some of them a bound of their own, such as
    {gripper: 2.0}: a gripper that is open or closed only turns when a correction reaches beyond the
    middle.
    """

    # largest correction, in half-ranges
    scale: float = bound(0.2, gt=0, le=2, hint="half-ranges of an action")
    scales: dict[str, float] = bound({}, gt=0, le=2, hint="half-ranges of an action")
    hold: int = bound(1, ge=1)
    ramp: int = bound(0, ge=0)
    # control steps after which the frozen policy decides anew; 0: its chunk
    base_steps: int = bound(0, ge=0, hint="0: the whole chunk")
    dimensions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ramp and self.distribution != "deterministic":
            raise ConfigError(
                f"actor.ramp={self.ramp} bounds a deterministic actor, and "
                f"actor.distribution={self.distribution} would not heed it: set actor.ramp=0, or "
                "actor.distribution=deterministic with algorithm=td3"
            )


@dataclass
class DirectConfig(GripperConfig):
    """Actions of its own, ``chunk_length`` control steps a decision; of the frozen policy it
    only takes what that sees.

    ``within`` above 0, for actions that say where each joint is to go: they lie within so many
    half-ranges of where the joint is as the decision begins, and are learned as the way from there
    (a joint's range is wide, and what is done next is near)."""

    chunk_length: int = bound(1, ge=1)
    # half-ranges from where each joint is; 0: anywhere
    within: float = bound(0.0, ge=0, le=2, hint="half-ranges of an action, or 0 for anywhere")


@dataclass
class SteeredConfig(ActorConfig):
    """The first noise of a frozen policy that denoises, at most ``bound`` standard deviations in
    each dimension.

    ``repeat`` chooses one noise for all control steps of the chunk, which is fewer numbers to
    learn.
    """

    bound: float = bounds.bound(1.5, gt=0, hint="standard deviations of the noise")
    repeat: bool = False


@dataclass
class OwnConfig(ActorConfig):
    """The policy beneath itself. Of each batch its loss sees ``rows`` decisions, drawn in
    proportion to their weights; ``hidden``, ``distribution`` and ``noise`` belong to actors of
    their own."""

    # of actors of their own; not used here
    distribution: str = "deterministic"
    # decisions of a batch that its loss sees, drawn by their weights
    rows: int = bound(64, ge=1)


@dataclass
class ImprovedConfig(ActorConfig):
    """Actions that the policy beneath proposes, and of which a critic takes the best (PA-RL); it
    learns to propose those.

    ``samples`` proposals a decision; of these the ``keep`` best are moved up the critic's values by
    ``steps`` gradient steps of ``step_size`` (in half-ranges), each action keeping the best point
    it met. Exploring decisions draw among them by the softmax of their values over ``temperature``
    (0: the best).
    """

    distribution: str = "deterministic"
    # proposals of a decision
    samples: int = bound(16, ge=1)
    # best ones that are improved
    keep: int = bound(4, ge=1)
    # gradient steps up the critic's values
    steps: int = bound(5, ge=0)
    # of one of them, in half-ranges
    step_size: float = bound(0.01, ge=0)
    temperature: float = bound(0.0, ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep > self.samples:
            raise ConfigError(
                f"actor.keep={self.keep} is out of range: it must be 1 to "
                f"actor.samples={self.samples}"
            )
