"""The data that crosses module borders (torch and numpy only).

Letters in shapes: b batch of observations, n decisions, m trajectories, t decisions of one
trajectory, h control steps in a chunk, a action dimensions, p proprio dimensions, s privileged
dimensions, ``*k`` log-prob axes that the policy declares. A `decision` is one policy call, which
yields one chunk; a `control_step` is one tick at ``control_hz``. The types without tensors (robots,
tasks, one slot) live in `vla_rl.specs` and are re-exported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from vla_rl.shapes import Bool, Float, Float32, Int64, UInt8
from vla_rl.specs import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    Instead,
    SlotEvent,
    SlotObservation,
    SlotStep,
    TaskSpec,
)

FRESH = "fresh"
"""In a `Trajectory`'s ``replay``, bool [t]: decisions that do not go on with the chunk before, as
after a person's. Where a policy follows its chunks over several decisions and this is missing, it
did so from the first decision on."""

__all__ = [
    "FRESH",
    "ActionChunk",
    "CameraSpec",
    "EmbodimentSpec",
    "EpisodeSpec",
    "Observation",
    "PolicyEvaluation",
    "PolicyOutput",
    "RolloutBatch",
    "RolloutResult",
    "SlotEvent",
    "SlotObservation",
    "SlotStep",
    "TaskSpec",
    "Trajectory",
    "Transitions",
]


# ------------------------------------------------------------------------------------------ batches
@dataclass(frozen=True)
class Observation:
    """A batch of observations, never normalised here. ``privileged`` is for critics alone."""

    images: dict[str, UInt8[Tensor, "b _ _ 3"]]
    proprio: Float32[Tensor, "b p"]
    instruction: tuple[str, ...]
    privileged: Float32[Tensor, "b s"] | None = None

    def __post_init__(self) -> None:
        b = self.proprio.shape[0]
        sizes = {"proprio": b, "instruction": len(self.instruction)}
        sizes |= {f"images[{k}]": v.shape[0] for k, v in self.images.items()}
        if self.privileged is not None:
            sizes["privileged"] = self.privileged.shape[0]
        if len(set(sizes.values())) != 1:
            raise ValueError(f"an Observation needs one batch size, got {sizes}")

    def __len__(self) -> int:
        return self.proprio.shape[0]

    def __getitem__(self, index: Tensor | slice | Sequence[int]) -> Observation:
        """Rows ``index`` (a slice, or a 1-d tensor or list of integers)."""
        if isinstance(index, slice):
            rows = list(range(len(self))[index])
        else:
            index = torch.as_tensor(index, dtype=torch.long, device=self.proprio.device)
            rows = index.tolist()
        return Observation(
            images={k: v[index] for k, v in self.images.items()},
            proprio=self.proprio[index],
            instruction=tuple(self.instruction[i] for i in rows),
            privileged=None if self.privileged is None else self.privileged[index],
        )

    def without_privileged(self) -> Observation:
        """The same observation as a policy may see it."""
        return self if self.privileged is None else dataclasses.replace(self, privileged=None)

    def to(self, device: torch.device | str) -> Observation:
        return Observation(
            images={k: v.to(device, non_blocking=True) for k, v in self.images.items()},
            proprio=self.proprio.to(device),
            instruction=self.instruction,
            privileged=None if self.privileged is None else self.privileged.to(device),
        )

    @staticmethod
    def cat(parts: Sequence[Observation]) -> Observation:
        """Concatenate along the batch; all parts need the same cameras."""
        return Observation(
            images={k: torch.cat([p.images[k] for p in parts]) for k in parts[0].images},
            proprio=torch.cat([p.proprio for p in parts]),
            instruction=tuple(text for p in parts for text in p.instruction),
            privileged=None if parts[0].privileged is None else _cat(p.privileged for p in parts),
        )

    @staticmethod
    def blank(spec: EmbodimentSpec, rows: int = 1) -> Observation:
        """Zeros as that robot would see them, to ask for sizes."""
        images = {
            c.name: torch.zeros(rows, c.height, c.width, 3, dtype=torch.uint8) for c in spec.cameras
        }
        return Observation(images, torch.zeros(rows, spec.proprio_dim), ("",) * rows)

    @staticmethod
    def from_slots(slots: Sequence[SlotObservation]) -> Observation:
        """Stack the observations of several slots (copies the arrays)."""
        return Observation(
            images={
                k: torch.from_numpy(np.stack([s.images[k] for s in slots])) for k in slots[0].images
            },
            proprio=torch.from_numpy(
                np.stack([s.proprio for s in slots]).astype(np.float32, copy=False)
            ),
            instruction=tuple(s.instruction for s in slots),
            privileged=_stacked([s.privileged for s in slots]),
        )


@dataclass(frozen=True)
class ActionChunk:
    """Actions in physical units; ``valid`` marks the control steps that carry an action."""

    actions: Float32[Tensor, "b h a"]
    valid: Bool[Tensor, "b h"]

    @classmethod
    def whole(cls, actions: Tensor) -> ActionChunk:
        """Every control step carries one."""
        valid = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
        return cls(actions, valid)


@dataclass(frozen=True)
class PolicyOutput:
    """What acting yields. ``replay`` holds tensors [b ...] that re-evaluate the same decision
    later.

    ``memory`` is, per row, what a policy that remembers wants to be handed at the episode's next
    decision.
    """

    chunk: ActionChunk
    behavior_log_prob: Float[Tensor, "b *k"]
    replay: dict[str, Tensor]
    value: Float[Tensor, "b"] | None = None
    memory: Sequence[Any] | None = None


@dataclass(frozen=True)
class PolicyEvaluation:
    """A stored decision under the present weights, with gradient. ``value`` is None without a value
    head.

    A policy may weigh its entries: ``advantage_weight`` multiplies the advantage of each (a
    discount along an axis), ``clip_scale`` PPO's clip range. ``auxiliary_loss`` is a loss of the
    policy's own, to be minimised beside, per row.
    """

    log_prob: Float[Tensor, "b *k"]
    entropy: Float[Tensor, "b *k"]
    value: Float[Tensor, "b"] | None = None
    advantage_weight: Float[Tensor, "b *k"] | None = None
    clip_scale: Float[Tensor, "b *k"] | None = None
    auxiliary_loss: Float[Tensor, "b"] | None = None


# FSDP2 hangs its backward on the tensors that it finds in a module's output, and looks into none
# but registered dataclasses: without this no weight that is spread over ranks would ever get a
# gradient.
for _output in (ActionChunk, PolicyOutput, PolicyEvaluation):
    _pytree.register_dataclass(_output)


@dataclass(frozen=True)
class Trajectory:
    """One episode: its decisions in order, and how it ended.

    Exactly one of ``terminated`` (the task's own end: success or failure) and ``truncated`` (time
    ran out, or the session was cut) is set; only termination stops the bootstrap. ``failure`` and
    ``label_source`` are as in `SlotStep`.

    ``policy_version`` is that of the weights that acted, the oldest one where they were swapped on
    the way; then ``decision_version`` says it of each decision.

    ``actions`` went to the robot, ``proposed`` is what the policy, or in steps of a person that
    one, asked for (None: not kept); the two differ where noise was put on a demonstration, a gate
    stepped in, or the bounds clipped. What was never executed repeats the proposal.

    ``instead`` is the first other task that it solved (None: none, or nobody can tell).
    """

    episode: EpisodeSpec
    observations: Observation  # [t]
    final_observation: Observation  # [1]
    actions: Float32[Tensor, "t h a"]  # sent
    valid: Bool[Tensor, "t h"]  # executed control steps
    rewards: Float32[Tensor, "t h"]
    behavior_log_prob: Float[Tensor, "t *k"]
    replay: dict[str, Tensor]  # [t ...]
    terminated: bool
    truncated: bool
    success: bool
    policy_version: int = 0
    value: Float[Tensor, "t"] | None = None
    is_human: Bool[Tensor, "t h"] | None = None
    failure: str = ""
    proposed: Float32[Tensor, "t h a"] | None = None
    label_source: str = "env"
    decision_version: Int64[Tensor, "t"] | None = None
    instead: Instead | None = None
    # what fetches images and replay where they lie elsewhere, and are missing here: it has
    # ``fetch() -> Trajectory``
    payload: Any = None

    def __post_init__(self) -> None:
        if self.terminated == self.truncated:
            raise ValueError(
                f"a Trajectory is either terminated or truncated, got terminated={self.terminated} "
                f"truncated={self.truncated} (rollout {self.rollout_id})"
            )
        t = len(self.observations)
        if t == 0 or not t == self.actions.shape[0] == self.rewards.shape[0] == self.valid.shape[0]:
            raise ValueError(
                "a Trajectory needs the same positive number of observations, actions, rewards and "
                f"valid rows, got {t}, {self.actions.shape[0]}, {self.rewards.shape[0]}, "
                f"{self.valid.shape[0]}"
            )

    def __len__(self) -> int:
        """Number of decisions."""
        return self.actions.shape[0]

    def without_privileged(self) -> Trajectory:
        """The same episode as a policy may see it."""
        seen, last = (
            self.observations.without_privileged(),
            self.final_observation.without_privileged(),
        )
        return dataclasses.replace(self, observations=seen, final_observation=last)

    def light(self) -> Trajectory:
        """The same episode without images and replay, and without where they lie."""
        bare = dataclasses.replace
        if self.payload is not None:  # (they are not here)
            return bare(self, payload=None)
        return bare(
            self,
            observations=bare(self.observations, images={}),
            final_observation=bare(self.final_observation, images={}),
            replay={},
            payload=None,
        )

    def whole(self) -> Trajectory:
        """The same episode with its images and replay, fetched where they are not here."""
        return self if self.payload is None else self.having(self.payload.fetch())

    def having(self, there: Trajectory) -> Trajectory:
        """The same episode with the images and the replay of ``there``."""
        return dataclasses.replace(
            self,
            observations=there.observations,
            final_observation=there.final_observation,
            replay=there.replay,
            payload=None,
        )

    def in_last_steps(self, rewards: Tensor) -> Tensor:
        """Rewards of decisions [t], each in the last control step that its decision executed:
        float32 [t h]."""
        last = (self.valid.sum(1) - 1).clamp(min=0)[:, None]
        return torch.zeros(self.valid.shape).scatter_(1, last, rewards.float()[:, None])

    @property
    def rollout_id(self) -> str:
        return self.episode.rollout_id

    @property
    def num_control_steps(self) -> int:
        return int(self.valid.sum())


@dataclass(frozen=True)
class RolloutResult:
    """``trajectories`` in the order of the episodes; ``stats`` as `RolloutEngine.collect`
    describes them."""

    trajectories: list[Trajectory]
    stats: dict[str, float | int]


@dataclass(frozen=True)
class Held:
    """What one of several ranks holds of a batch's images and replay: the rows of some episodes.

    ``owner`` [n] is the rank that has a decision's, ``at`` [n] its row there, ``owner_of`` [m] that
    of a trajectory's final observation, and ``final_at`` [m] its row. k decisions and j
    trajectories are here.
    """

    observations: Observation  # [k]
    final_observations: Observation  # [j]
    replay: dict[str, Tensor]  # [k ...]
    owner: Int64[Tensor, "n"]
    at: Int64[Tensor, "n"]
    owner_of: Int64[Tensor, "m"]
    final_at: Int64[Tensor, "m"]

    @staticmethod
    def of(owner_of: Tensor, lengths: Tensor, rank: int, episodes: Iterable[Trajectory]) -> Held:
        """Of the whole ``episodes`` that ``rank`` owns, in order, each of which is dropped as soon
        as it was copied; of all, ``owner_of`` [m] and ``lengths`` [m] in decisions."""
        mine = owner_of == rank
        rows, last = _Rows(int(lengths[mine].sum())), _Rows(int(mine.sum()))
        for episode in episodes:
            replay = {f"replay:{name}": x for name, x in episode.replay.items()}
            rows.add(_seen(episode.observations) | replay, episode.observations.instruction)
            last.add(_seen(episode.final_observation), episode.final_observation.instruction)
        ranks, owner = int(owner_of.max()) + 1, torch.repeat_interleave(owner_of, lengths)
        return Held(
            observations=rows.observation(),
            final_observations=last.observation(),
            replay=rows.replay(),
            owner=owner,
            at=_number_within(owner, ranks),
            owner_of=owner_of,
            final_at=_number_within(owner_of, ranks),
        )


@dataclass(frozen=True)
class RolloutBatch:
    """Many trajectories flattened over decisions, with their boundaries; nothing is padded.

    ``trajectory_index`` [n] names the trajectory of each decision (0 … m−1, non-decreasing);
    decisions of a trajectory are consecutive and in order. ``group_index`` [m] numbers the distinct
    ``group_id`` values from 0.

    Where several ranks share a batch, each ``held`` images and replay of its own part alone:
    ``observations`` then have no images, and ``replay`` is empty.
    """

    observations: Observation  # [n]
    final_observations: Observation  # [m]
    actions: Float32[Tensor, "n h a"]
    valid: Bool[Tensor, "n h"]
    rewards: Float32[Tensor, "n h"]
    behavior_log_prob: Float[Tensor, "n *k"]
    replay: dict[str, Tensor]
    value: Float[Tensor, "n"] | None
    trajectory_index: Int64[Tensor, "n"]
    lengths: Int64[Tensor, "m"]
    terminated: Bool[Tensor, "m"]
    truncated: Bool[Tensor, "m"]
    success: Bool[Tensor, "m"]
    group_index: Int64[Tensor, "m"]
    policy_version: Int64[Tensor, "m"]
    episodes: tuple[EpisodeSpec, ...]
    is_human: Bool[Tensor, "n h"]
    instead: tuple[Instead | None, ...]
    held: Held | None = None

    @property
    def num_decisions(self) -> int:
        return self.actions.shape[0]

    @property
    def num_trajectories(self) -> int:
        return self.lengths.shape[0]

    @property
    def starts(self) -> Tensor:
        """Index [m] of each trajectory's first decision."""
        return torch.cumsum(self.lengths, 0) - self.lengths

    @property
    def last(self) -> Tensor:
        """Index [m] of each trajectory's last decision."""
        return torch.cumsum(self.lengths, 0) - 1

    @staticmethod
    def from_trajectories(trajectories: Sequence[Trajectory]) -> RolloutBatch:
        if not trajectories:
            raise ValueError("a RolloutBatch needs at least one trajectory")
        ts = list(trajectories)
        lengths = torch.tensor([len(t) for t in ts])
        groups: dict[int, int] = {}
        group_index = torch.tensor([groups.setdefault(t.episode.group_id, len(groups)) for t in ts])
        has_value = all(t.value is not None for t in ts)
        return RolloutBatch(
            observations=Observation.cat([t.observations for t in ts]),
            final_observations=Observation.cat([t.final_observation for t in ts]),
            actions=torch.cat([t.actions for t in ts]),
            valid=torch.cat([t.valid for t in ts]),
            rewards=torch.cat([t.rewards for t in ts]),
            behavior_log_prob=torch.cat([t.behavior_log_prob for t in ts]),
            replay={k: torch.cat([t.replay[k] for t in ts]) for k in ts[0].replay},
            value=_cat(t.value for t in ts) if has_value else None,
            trajectory_index=torch.repeat_interleave(torch.arange(len(ts)), lengths),
            lengths=lengths,
            terminated=torch.tensor([t.terminated for t in ts]),
            truncated=torch.tensor([t.truncated for t in ts]),
            success=torch.tensor([t.success for t in ts]),
            group_index=group_index,
            policy_version=torch.tensor([t.policy_version for t in ts]),
            episodes=tuple(t.episode for t in ts),
            is_human=torch.cat(
                [torch.zeros_like(t.valid) if t.is_human is None else t.is_human for t in ts]
            ),
            instead=tuple(t.instead for t in ts),
        )


@dataclass(frozen=True)
class Transitions:
    """Decisions drawn from a replay, each with what came of it. Row for row, in no particular
    order.

    ``rewards`` and ``discounts`` span ``n_step`` decisions: value target = rewards + discounts ·
    value(next_observations). A discount is 0 only where the episode terminated; where time ran out
    it is not. ``extra`` and ``next_extra`` hold what the learner had annotated, at ``observations``
    and at ``next_observations``.

    ``proposed`` is what the policy, or in steps of a person that one, asked for, in rows where that
    is ``proposed_known``, else what was sent; see `labels`. ``truncated`` marks rows whose
    ``next_observations`` are the last of an episode that ran out of time; ``version`` is the
    policy's that acted.
    """

    observations: Observation  # [b]
    actions: Float32[Tensor, "b h a"]  # sent
    valid: Bool[Tensor, "b h"]
    is_human: Bool[Tensor, "b h"]
    rewards: Float32[Tensor, "b"]
    discounts: Float32[Tensor, "b"]
    next_observations: Observation  # [b]
    extra: dict[str, Tensor]
    next_extra: dict[str, Tensor]
    source: tuple[str, ...]
    proposed: Float32[Tensor, "b h a"] | None = None
    proposed_known: Bool[Tensor, "b"] | None = None
    truncated: Bool[Tensor, "b"] | None = None
    version: Int64[Tensor, "b"] | None = None

    def __len__(self) -> int:
        return self.actions.shape[0]

    @property
    def labels(self) -> Tensor:
        """What imitation copies [b h a]: what a person asked for, where that is known, without the
        noise that was put on it; of everybody else what was sent."""
        return (
            self.actions
            if self.proposed is None
            else torch.where(self.is_human[..., None], self.proposed, self.actions)
        )


def _number_within(owner: Tensor, ranks: int) -> Tensor:
    """Int64: the how many-th row of its owner each row is."""
    at = torch.zeros_like(owner)
    for rank in range(ranks):
        mine = owner == rank
        at[mine] = torch.arange(int(mine.sum()))
    return at


class _Rows:
    """Tensors of known length that are filled from the front."""

    def __init__(self, count: int) -> None:
        self.count, self.done, self.tensors = count, 0, dict[str, Tensor]()
        self.texts: list[str] = []

    def add(self, parts: Mapping[str, Tensor], texts: Sequence[str]) -> None:
        rows = len(texts)
        for name, part in parts.items():
            if name not in self.tensors:
                self.tensors[name] = part.new_empty((self.count, *part.shape[1:]))
            self.tensors[name][self.done : self.done + rows] = part
        self.texts += texts
        self.done += rows

    def observation(self) -> Observation:
        images = {
            name.partition(":")[2]: x for name, x in self.tensors.items() if name[:5] == "image"
        }
        return Observation(images, self.tensors["proprio"], tuple(self.texts))

    def replay(self) -> dict[str, Tensor]:
        return {
            name.partition(":")[2]: x for name, x in self.tensors.items() if name[:6] == "replay"
        }


def _seen(observation: Observation) -> dict[str, Tensor]:
    images = {f"image:{name}": x for name, x in observation.images.items()}
    return images | {"proprio": observation.proprio}


def _cat(parts: Iterable[Tensor | None]) -> Tensor:
    """Of rows that all have what the first has."""
    return torch.cat([part for part in parts if part is not None])


def _stacked(rows: Sequence[np.ndarray | None]) -> Tensor | None:
    """Float32 [b …], or None where there is none."""
    if rows[0] is None:
        return None
    return torch.from_numpy(
        np.stack([row for row in rows if row is not None]).astype(np.float32, copy=False)
    )
