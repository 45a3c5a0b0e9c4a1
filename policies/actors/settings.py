"""Options of the actors (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from vla_rl.errors import ConfigError

FEATURES, PICTURES = "features", "pictures"


@dataclass
class ActorConfig:
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
    hidden: list[int] = field(default_factory=lambda: [256, 256])
    # width of what it makes of a frame
    encoder: int = 128
    # gaussian (squashed by tanh; SAC needs it) | deterministic
    distribution: str = "gaussian"
    # std that a deterministic one explores with, in latent units (-1 to 1)
    noise: float = 0.2
    copy_base: bool | None = None
    eyes: str = FEATURES
    # width of the RL token that pictures are compressed to; 0: critics train what reads them
    token: int = 0

    def __post_init__(self) -> None:
        if self.token < 0 or (self.token and self.eyes == PICTURES):
            raise ConfigError(
                f"actor.token={self.token} is the width of what the frozen policy's features are "
                f"compressed to: 0 (none) or more, and with actor.eyes={FEATURES}"
            )
        if not self.hidden or min(self.hidden) < 1 or self.encoder < 1:
            raise ConfigError(
                f"actor.hidden={list(self.hidden)!r} and actor.encoder={self.encoder} must name "
                "widths of at least 1"
            )
        if self.distribution not in ("gaussian", "deterministic"):
            raise ConfigError(
                f"actor.distribution is {self.distribution!r}, choose one of "
                "gaussian, deterministic"
            )
        if self.noise < 0:
            raise ConfigError(f"actor.noise is {self.noise}, it must be 0 or more")
        if self.eyes not in (FEATURES, PICTURES):
            raise ConfigError(f"actor.eyes is {self.eyes!r}, choose one of features, pictures")
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

    # continuous | discrete: an action as the others, or one of three choices by values of its own
    gripper: str = "continuous"
    # share of exploring decisions whose choice is random
    gripper_noise: float = 0.0
    average: float = 0.0
    # of each convolution, with eyes=pictures
    channels: list[int] = field(default_factory=lambda: [16, 32, 32])
    # by which the first makes the picture smaller
    stride: int = 4
    shift: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gripper not in ("continuous", "discrete"):
            raise ConfigError(
                f"actor.gripper is {self.gripper!r}, choose one of continuous, discrete"
            )
        if not 0.0 <= self.gripper_noise <= 1.0:
            raise ConfigError(
                f"actor.gripper_noise is {self.gripper_noise}, it must lie in [0, 1]: "
                "a share of decisions"
            )
        if not 0.0 <= self.average < 1.0:
            raise ConfigError(
                f"actor.average is {self.average}, it must lie in [0, 1): 0 for none, such as 0.999"
            )
        if not self.channels or min(self.channels) < 1:
            raise ConfigError(
                f"actor.channels={list(self.channels)!r} needs at least one width, each 1 or more"
            )
        if self.stride < 1:
            raise ConfigError(f"actor.stride is {self.stride}, it must be at least 1 pixel")
        if self.shift < 0:
            raise ConfigError(f"actor.shift is {self.shift}, it must be 0 (none) or more pixels")


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
    scale: float = 0.2
    scales: dict[str, float] = field(default_factory=dict)
    hold: int = 1
    ramp: int = 0
    # control steps after which the frozen policy decides anew; 0: its chunk
    base_steps: int = 0
    dimensions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, scale in {
            "scale": self.scale,
            **{f"scales.{name}": value for name, value in self.scales.items()},
        }.items():
            if not 0.0 < scale <= 2.0:
                raise ConfigError(
                    f"actor.{key} is {scale}, it must lie in (0, 2]: half-ranges of an action"
                )
        if self.base_steps < 0:
            raise ConfigError(
                f"actor.base_steps is {self.base_steps}, it must be 0 (the whole chunk) or more"
            )
        if self.hold < 1:
            raise ConfigError(f"actor.hold is {self.hold}, it must be at least 1 control step")
        if self.ramp < 0:
            raise ConfigError(
                f"actor.ramp is {self.ramp}, it must be 0 (none) or more updates of the actor"
            )
        if self.ramp and self.distribution != "deterministic":
            raise ConfigError(
                f"actor.ramp={self.ramp} bounds a deterministic actor, and "
                f"actor.distribution={self.distribution} would not heed it: set actor.ramp=0, or "
                "actor.distribution=deterministic with algorithm=td3"
            )


@dataclass
class DirectConfig(GripperConfig):
    """Actions of its own, ``chunk_length`` control steps a decision; of the frozen policy it
    only takes what that sees."""

    chunk_length: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_length < 1:
            raise ConfigError(f"actor.chunk_length is {self.chunk_length}, it must be at least 1")


@dataclass
class SteeredConfig(ActorConfig):
    """The first noise of a frozen policy that denoises, at most ``bound`` standard deviations in
    each dimension.

    ``repeat`` chooses one noise for all control steps of the chunk, which is fewer numbers to
    learn.
    """

    bound: float = 1.5
    repeat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bound > 0:
            raise ConfigError(
                f"actor.bound is {self.bound}, it must be above 0: standard deviations of the noise"
            )


@dataclass
class OwnConfig(ActorConfig):
    """The policy beneath itself. Of each batch its loss sees ``rows`` decisions, drawn in
    proportion to their weights; ``hidden``, ``distribution`` and ``noise`` belong to actors of
    their own."""

    # of actors of their own; not used here
    distribution: str = "deterministic"
    # decisions of a batch that its loss sees, drawn by their weights
    rows: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 1:
            raise ConfigError(f"actor.rows is {self.rows}, it must be at least 1")


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
    samples: int = 16
    # best ones that are improved
    keep: int = 4
    # gradient steps up the critic's values
    steps: int = 5
    # of one of them, in half-ranges
    step_size: float = 0.01
    temperature: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.keep <= self.samples or self.steps < 0:
            raise ConfigError(
                f"actor.samples={self.samples}, actor.keep={self.keep} and "
                f"actor.steps={self.steps} must fulfil 1 <= keep <= samples and steps >= 0"
            )
        if self.step_size < 0 or self.temperature < 0:
            raise ConfigError(
                f"actor.step_size={self.step_size} and "
                f"actor.temperature={self.temperature} must be 0 or more"
            )
