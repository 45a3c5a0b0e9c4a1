"""Settings of SFT, of filtered cloning and of a memory of successes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from vla_rl.bounds import Bounded, bound, several
from vla_rl.diagnostics import Diagnostic, Movement


@dataclass
class AugmentConfig(Bounded, place="sft.augment"):
    """Random changes during SFT, drawn per row; 0 turns each off.

    ``shift`` pixels (edges repeat); ``crop`` the largest share of each side that is cut off before
    resizing back; ``brightness`` and ``contrast`` the largest relative change of each. ``mirror``
    is the share of rows that are shown with left and right exchanged, actions too, for robots that
    declare a `vla_rl.specs.Mirror`. ``proprio`` is the share of rows that get the batch's mean
    proprioception in place of their own.
    """

    # pixels, with edges repeated
    shift: int = bound(4, ge=0)
    # largest share of each side that is cut off before resizing back
    crop: float = bound(0.0, ge=0, le=0.9)
    # largest relative change
    brightness: float = bound(0.2, ge=0, le=1)
    # largest relative change
    contrast: float = bound(0.2, ge=0, le=1)
    mirror: float = bound(0.0, ge=0, le=1)
    proprio: float = bound(0.0, ge=0, le=1)


@dataclass
class ImitationConfig(Bounded, place="sft"):
    """Settings of `Imitation`. ``updates`` of ``batch_size`` chunks are the length of the schedule;
    ``min_learning_rate_fraction`` is its floor.

    ``validation_episodes`` of each task are kept out of training, for the validation loss and the
    use of images (collection collects so many more; of a given dataset at most a fifth is kept out,
    or, whatever is set here, what the run that collected it keeps out). ``micro_batch_size`` (None:
    at once) accumulates gradients. ``offload_optimizer`` keeps the optimiser's state in host
    memory. ``max_bad_updates`` non-finite updates in a row raise `TrainingDiverged`.
    ``checkpoint_every`` updates a checkpoint is written and checked on the validation episodes.
    ``base_part``: of hybrid demonstrations (``collect.base_share``) also what the frozen policy did
    before it handed over. ``filter``: the folder of a trained reward which says what of the
    demonstrations is worth imitating (``value_progress``: GR-RL's drop filter); "": all is.
    ``first_share``: about so many more of a batch's rows are an episode's first decision, where
    only images and instruction tell what to do (keyframes: Wen et al. 2021, arXiv 2106.06452).
    ``labels``: "clean", what the demonstrator meant, or "sent", what was done, with the noise of
    ``collect.action_noise``: a policy that denoises then has samples that differ, which is what
    steering it needs. ``failures``: also learn from demonstrations that are marked as failed (in a
    replay too; rewards are always shown them, as failures). ``ram_bytes``: datasets whose decoded
    pictures are more stay on the disk; they are decoded as they are drawn, ahead of use, and so
    many bytes of them are kept.
    """

    # optimiser steps
    updates: int = bound(1000, ge=1)
    checkpoint_every: int = bound(200, ge=1)
    validation_episodes: int = bound(5, ge=0)
    # chunks of one update
    batch_size: int = bound(64, ge=1)
    # of AdamW, after the warm-up; then it falls by a cosine
    learning_rate: float = bound(1e-3, ge=0)
    # share of the learning rate that it ends at
    min_learning_rate_fraction: float = bound(0.1, ge=0, le=1)
    # updates in which the learning rate rises linearly
    warmup_updates: int = bound(50, ge=0)
    # of AdamW
    betas: list[float] = several([0.9, 0.95], ge=0, lt=1, least=2, most=2)
    # of AdamW
    weight_decay: float = bound(0.01, ge=0)
    offload_optimizer: bool = False
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = bound(1.0, gt=0)
    # chunks that go through at once, to save memory; null: the whole batch
    micro_batch_size: int | None = bound(None, ge=1)
    # bfloat16 on CUDA
    autocast: bool = True
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = bound(10, ge=1)
    # of batches and augmentation; 0: the run's seed
    seed: int = 0
    # a checkpoint of this project that SFT goes on from, whose policy is normalised as it was; "": a new policy
    start: str = ""
    base_part: bool = True
    filter: str = ""
    first_share: float = bound(0.0, ge=0, le=1)
    labels: str = bound("clean", choices=("clean", "sent"))
    failures: bool = False
    # decoded pictures of demonstrations that are held in memory
    ram_bytes: int = bound(2 << 30, ge=0)
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass
class MemoryConfig(Bounded, place="algorithm.memory"):
    """Settings of `SuccessMemory`: the newest ``episodes`` successes of each task are kept (0: no
    memory), and imitated in ``updates`` updates after each iteration of RL, ``batch_size``
    decisions at a time. ``demonstration_share`` of those are the run's demonstrations, where it has
    some; ``first_share`` more of them are an episode's first decision. In each iteration the
    learning rate falls by a cosine to ``min_learning_rate_fraction`` of itself (1: it stays), so
    that the policy that acts next has settled (`docs/explanation/ppo.md`).

    With ``hindsight`` a failure that solved another task is kept as that one's success, where its
    first such task is one of the batch's, up to there and with its instruction (hindsight
    experience replay, Andrychowicz et al. 2017, arXiv 1707.01495, with instructions as goals); for
    envs that can tell.
    """

    # newest successes of each task that are kept; 0: no memory
    episodes: int = bound(0, ge=0)
    # updates on them after each iteration of RL
    updates: int = bound(40, ge=0)
    # decisions of one update
    batch_size: int = bound(64, ge=1)
    # at the start of each iteration's updates
    learning_rate: float = bound(4e-4, ge=0)
    min_learning_rate_fraction: float = bound(1.0, ge=0, le=1)
    # share of a batch that are the run's demonstrations
    demonstration_share: float = bound(0.5, ge=0, le=1)
    # share of a batch that is added as first decisions of episodes
    first_share: float = bound(0.25, ge=0, le=1)
    # keep what was done instead, under the instruction that asks for it
    hindsight: bool = False
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass
class FilteredBCConfig(Bounded, place="algorithm"):
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
    learning_rate: float = bound(1e-4, ge=0)
    # passes over the decisions that are kept of a batch
    epochs: int = bound(2, ge=1)
    # decisions of one update
    minibatch_size: int = bound(64, ge=1)
    # decisions that go through at once, to save memory; null: the whole minibatch
    micro_batch_size: int | None = bound(None, ge=1)
    max_control_steps: int | None = bound(None, ge=1)
    # of AdamW
    betas: list[float] = several([0.9, 0.95], ge=0, lt=1, least=2, most=2)
    # of AdamW
    weight_decay: float = bound(0.0, ge=0)
    # largest norm of the gradient; null: no limit
    grad_clip: float | None = bound(1.0, gt=0)
    # bfloat16 on CUDA
    autocast: bool = True
    # updates in a row that are not finite before the run ends
    max_bad_updates: int = bound(10, ge=1)
    # of the minibatches; 0: the run's seed
    seed: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    @property
    def mirrors(self) -> bool:
        """Whether some rows are shown in the robot's mirror."""
        return self.augment.mirror > 0
