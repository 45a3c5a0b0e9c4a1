"""Settings of SFT, of filtered cloning and of a memory of successes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from vla_rl.config.ranges import require_above_zero, require_betas, require_choice, require_range
from vla_rl.diagnostics import Diagnostic, Movement


@dataclass
class AugmentConfig:
    """Random changes during SFT, drawn per row; 0 turns each off.

    ``shift`` pixels (edges repeat); ``crop`` the largest share of each side that is cut off before
    resizing back; ``brightness`` and ``contrast`` the largest relative change of each. ``mirror``
    is the share of rows that are shown with left and right exchanged, actions too, for robots that
    declare a `vla_rl.specs.Mirror`. ``proprio`` is the share of rows that get the batch's mean
    proprioception in place of their own.
    """

    # pixels, with edges repeated
    shift: int = 4
    # largest share of each side that is cut off before resizing back
    crop: float = 0.0
    # largest relative change
    brightness: float = 0.2
    # largest relative change
    contrast: float = 0.2
    mirror: float = 0.0
    proprio: float = 0.0

    def __post_init__(self) -> None:
        require_range("sft.augment", "shift", self.shift, 0)
        require_range("sft.augment", "crop", self.crop, 0.0, 0.9)
        require_range("sft.augment", "brightness", self.brightness, 0.0, 1.0)
        require_range("sft.augment", "contrast", self.contrast, 0.0, 1.0)
        require_range("sft.augment", "mirror", self.mirror, 0.0, 1.0)
        require_range("sft.augment", "proprio", self.proprio, 0.0, 1.0)


@dataclass
class ImitationConfig:
    """Settings of `Imitation`. ``updates`` of ``batch_size`` chunks are the length of the schedule;
    ``min_learning_rate_fraction`` is its floor.

    ``validation_episodes`` of each task are kept out of training, for the validation loss and the
    use of images (scripted collection collects so many more; of a given dataset at most a fifth is
    kept out). ``micro_batch_size`` (None: at once) accumulates gradients. ``offload_optimizer``
    keeps the optimiser's state in host memory. ``max_bad_updates`` non-finite updates in a row
    raise `TrainingDiverged`. ``checkpoint_every`` updates a checkpoint is written and checked on
    the validation episodes. ``base_part``: of hybrid demonstrations (``collect.base_share``) also
    what the frozen policy did before it handed over. ``filter``: the folder of a trained reward
    which says what of the demonstrations is worth imitating (``value_progress``: GR-RL's drop
    filter); "": all is. ``first_share``: about so many more of a batch's rows are an episode's
    first decision, where only images and instruction tell what to do (keyframes: Wen et al. 2021,
    arXiv 2106.06452). ``labels``: "clean", what the demonstrator meant, or "sent", what was done,
    with the noise of ``collect.action_noise``: a policy that denoises then has samples that differ,
    which is what steering it needs. ``failures``: also learn from demonstrations that are marked as
    failed (in a replay too; rewards are always shown them, as failures). ``ram_bytes``: datasets
    whose decoded pictures are more stay on the disk; they are decoded as they are drawn, ahead of
    use, and so many bytes of them are kept.
    """

    # optimiser steps
    updates: int = 1000
    checkpoint_every: int = 200
    validation_episodes: int = 5
    # chunks of one update
    batch_size: int = 64
    # of AdamW, after the warm-up; then it falls by a cosine
    learning_rate: float = 1e-3
    # share of the learning rate that it ends at
    min_learning_rate_fraction: float = 0.1
    # updates in which the learning rate rises linearly
    warmup_updates: int = 50
    # of AdamW
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    # of AdamW
    weight_decay: float = 0.01
    offload_optimizer: bool = False
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = 1.0
    # chunks that go through at once, to save memory; null: the whole batch
    micro_batch_size: int | None = None
    # bfloat16 on CUDA
    autocast: bool = True
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = 10
    # of batches and augmentation; 0: the run's seed
    seed: int = 0
    base_part: bool = True
    filter: str = ""
    first_share: float = 0.0
    labels: str = "clean"
    failures: bool = False
    # decoded pictures of demonstrations that are held in memory
    ram_bytes: int = 2 << 30
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        require_choice("sft", "labels", self.labels, ("clean", "sent"))
        for name in (
            "updates",
            "checkpoint_every",
            "batch_size",
            "micro_batch_size",
            "max_bad_updates",
        ):
            require_range("sft", name, getattr(self, name), 1)
        for name in (
            "learning_rate",
            "warmup_updates",
            "weight_decay",
            "grad_clip",
            "validation_episodes",
            "ram_bytes",
        ):
            require_range("sft", name, getattr(self, name), 0)
        require_range("sft", "min_learning_rate_fraction", self.min_learning_rate_fraction, 0, 1)
        require_range("sft", "first_share", self.first_share, 0, 1)
        require_above_zero("sft", "grad_clip", self.grad_clip)
        require_betas("sft", self.betas)


@dataclass
class MemoryConfig:
    """Settings of `SuccessMemory`: the newest ``episodes`` successes of each task are kept (0: no
    memory), and imitated in ``updates`` updates after each iteration of RL, ``batch_size``
    decisions at a time. ``demonstration_share`` of those are the run's demonstrations, where it has
    some; ``first_share`` more of them are an episode's first decision. In each iteration the
    learning rate falls by a cosine to ``min_learning_rate_fraction`` of itself (1: it stays), so
    that the policy that acts next has settled (`docs/explanation/ppo.md`).
    """

    # newest successes of each task that are kept; 0: no memory
    episodes: int = 0
    # updates on them after each iteration of RL
    updates: int = 40
    # decisions of one update
    batch_size: int = 64
    # at the start of each iteration's updates
    learning_rate: float = 4e-4
    min_learning_rate_fraction: float = 1.0
    # share of a batch that are the run's demonstrations
    demonstration_share: float = 0.5
    # share of a batch that is added as first decisions of episodes
    first_share: float = 0.25
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        for name in ("episodes", "updates", "learning_rate"):
            require_range("algorithm.memory", name, getattr(self, name), 0)
        require_range("algorithm.memory", "batch_size", self.batch_size, 1)
        for name in ("demonstration_share", "first_share", "min_learning_rate_fraction"):
            require_range("algorithm.memory", name, getattr(self, name), 0, 1)


@dataclass
class FilteredBCConfig:
    """Settings of `FilteredBC`. ``epochs`` passes over the kept decisions of a batch,
    ``minibatch_size`` at a time.

    ``max_control_steps`` (None: off) also drops successes that took longer, leads included.
    ``micro_batch_size`` (None: at once) accumulates gradients. ``max_bad_updates`` non-finite
    updates in a row raise `TrainingDiverged`.
    """

    diagnostics: ClassVar = (
        Diagnostic(
            "filtered_bc/loss", "Loss on successes", "How well the policy repeats what succeeded."
        ),
        Diagnostic(
            "filtered_bc/entropy",
            "Entropy",
            "Randomness of the actions. A collapse to 0 ends exploration.",
        ),
    )
    movement: ClassVar = Movement(
        updates="filtered_bc/updates", skipped_total="filtered_bc/skipped_updates"
    )
    gamma: ClassVar[float] = 1.0  # it adds no rewards up

    # of AdamW
    learning_rate: float = 1e-4
    # passes over the decisions that are kept of a batch
    epochs: int = 2
    # decisions of one update
    minibatch_size: int = 64
    # decisions that go through at once, to save memory; null: the whole minibatch
    micro_batch_size: int | None = None
    max_control_steps: int | None = None
    # of AdamW
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    # of AdamW
    weight_decay: float = 0.0
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = 1.0
    # bfloat16 on CUDA
    autocast: bool = True
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = 10
    # of the minibatches; 0: the run's seed
    seed: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    @property
    def mirrors(self) -> bool:
        """Whether some rows are shown in the robot's mirror."""
        return self.augment.mirror > 0

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "minibatch_size",
            "micro_batch_size",
            "max_control_steps",
            "max_bad_updates",
        ):
            require_range("algorithm", name, getattr(self, name), 1)
        for name in ("learning_rate", "weight_decay", "grad_clip"):
            require_range("algorithm", name, getattr(self, name), 0)
        require_above_zero("algorithm", "grad_clip", self.grad_clip)
        require_betas("algorithm", self.betas)
