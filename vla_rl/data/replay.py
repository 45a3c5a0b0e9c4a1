"""A replay of decisions that keeps episodes whole: every frame once, transitions are views of it.

A source ("online", "demonstrations", …) is a share of what is drawn, so that few demonstrations are not drowned by many
rollouts (RLPD, Ball et al. 2023 §4.1, draws half of each batch from them). With a folder every episode is written as it is
added, so that a run which was killed goes on with what it had: checkpoints keep the count of episodes alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vla_rl.data.codec import trajectory_from_state, trajectory_state
from vla_rl.errors import UserError
from vla_rl.storage import load_state, replacing, save_state
from vla_rl.types import Observation, Trajectory, Transitions


class _Column:
    """Rows of one kind, appended; the memory doubles when it is full."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, rows: Tensor) -> None:
        needed = self._count + len(rows)
        if self._rows is None:
            self._rows = rows.new_empty((max(needed, 256), *rows.shape[1:]))
        if needed > len(self._rows):
            grown = self._rows.new_empty((max(needed, 2 * len(self._rows)), *self._rows.shape[1:]))
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : needed] = rows
        self._count = needed

    def __getitem__(self, index: Tensor) -> Tensor:
        assert self._rows is not None
        return self._rows[index]


class Replay:
    """Episodes of one embodiment, in memory and (with ``folder``) on disk.

    A decision is drawn uniformly among those of its source. Frames: the observation of each decision and the one after the
    last, so an episode of t decisions has t + 1.
    """

    def __init__(self, folder: Path | None = None, *, episodes: int = 0) -> None:
        """``episodes``: how many of those in ``folder`` belong to the run as its checkpoint left it; later ones are removed.

        Raises `UserError` where the folder holds fewer.
        """
        self.folder = folder
        self.episodes = 0
        self._frames: dict[str, _Column] = {}
        self._decisions: dict[str, _Column] = {}
        self._texts: list[str] = []
        self._rows: dict[str, _Column] = {}  # source → its decisions
        if folder is not None:
            self._reopen(folder, episodes)

    def __len__(self) -> int:
        """Decisions."""
        return len(self._decisions["frame"]) if self._decisions else 0

    def count(self, source: str) -> int:
        """Decisions of one source."""
        return len(self._rows[source]) if source in self._rows else 0

    def add(
        self,
        trajectory: Trajectory,
        rewards: Tensor,
        source: str = "online",
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep an episode. ``rewards`` float32 [t] per decision; ``extra`` {name: [t + 1 …]} per frame.

        Raises `UserError` for rewards that are not finite or of another length, `DiskFull` where the disk is.
        """
        extra = dict(extra or {})
        if rewards.shape != (len(trajectory),) or not bool(torch.isfinite(rewards).all()):
            raise UserError(
                f"replay: rewards of rollout {trajectory.rollout_id} must be {len(trajectory)} finite numbers, one per "
                f"decision, got shape {list(rewards.shape)}: {rewards.tolist()}"
            )
        if self.folder is not None:
            state = {"trajectory": trajectory_state(trajectory), "rewards": rewards, "source": source, "extra": extra}
            with replacing(self.folder / f"{self.episodes:07d}", keep_last_good=False) as part:
                save_state(part, state)
        self._keep(trajectory, rewards, source, extra)

    def draw(
        self,
        count: int,
        generator: torch.Generator,
        *,
        gamma: float = 0.99,
        n_step: int = 1,
        shares: Mapping[str, float] | None = None,
        images: bool = True,
    ) -> Transitions:
        """``count`` transitions, with replacement; ``gamma`` discounts per control step inside ``discounts``.

        ``shares`` {source: share of the rows} (default: uniform over all decisions); sources that are empty leave their rows
        to the others. Raises `UserError` for an empty replay.
        """
        if not len(self):
            raise UserError("replay: nothing was added yet, so nothing can be drawn")
        present = {s: share for s, share in (shares or {}).items() if self.count(s) and share > 0}
        if present:
            total, parts, left = sum(present.values()), [], count
            for i, (source, share) in enumerate(present.items()):
                n = left if i == len(present) - 1 else round(count * share / total)
                picks = torch.randint(self.count(source), (n,), generator=generator)
                parts.append(self._rows[source][picks])
                left -= n
            rows = torch.cat(parts)
        else:
            rows = torch.randint(len(self), (count,), generator=generator)
        return self._transitions(rows, gamma, n_step, images)

    # ------------------------------------------------------------------------------------------------------------ inside
    def _reopen(self, folder: Path, episodes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or int(path.name) >= episodes:
                shutil.rmtree(path)
                continue
            state = load_state(path)
            self._keep(trajectory_from_state(state["trajectory"]), state["rewards"], state["source"], state["extra"])
        if self.episodes != episodes:
            raise UserError(
                f"replay: {folder} holds {self.episodes} episodes and the checkpoint needs {episodes}: start over with "
                f"--fresh, or restore the folder"
            )

    def _keep(self, trajectory: Trajectory, rewards: Tensor, source: str, extra: Mapping[str, Tensor]) -> None:
        t, decision = len(trajectory), len(self)
        frame = len(self._frames["proprio"]) if self._frames else 0
        seen = Observation.cat([trajectory.observations, trajectory.final_observation])
        frames = {f"image:{name}": images for name, images in seen.images.items()}
        frames |= {"proprio": seen.proprio, "text": torch.tensor([self._text(text) for text in seen.instruction])}
        if seen.privileged is not None:
            frames["privileged"] = seen.privileged
        frames |= {f"extra:{name}": values for name, values in extra.items()}
        self._append(self._frames, frames, "frames")
        human = torch.zeros_like(trajectory.valid) if trajectory.is_human is None else trajectory.is_human
        decisions = {"actions": trajectory.actions, "valid": trajectory.valid, "human": human, "rewards": rewards.float()}
        decisions |= {"frame": torch.arange(frame, frame + t), "steps": trajectory.valid.sum(1)}
        decisions |= {"left": torch.arange(t, 0, -1), "terminated": torch.full((t,), trajectory.terminated)}
        decisions["source"] = torch.full((t,), self._text(source))
        self._append(self._decisions, decisions, "decisions")
        self._rows.setdefault(source, _Column()).append(torch.arange(decision, decision + t))
        self.episodes += 1

    @staticmethod
    def _append(columns: dict[str, _Column], rows: Mapping[str, Tensor], what: str) -> None:
        if columns and columns.keys() != rows.keys():
            raise UserError(
                f"replay: an episode's {what} have {', '.join(sorted(rows))}, those before have "
                f"{', '.join(sorted(columns))}: use one env, camera set and learner per replay"
            )
        for name, values in rows.items():
            columns.setdefault(name, _Column()).append(values)

    def _text(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text)

    def _transitions(self, rows: Tensor, gamma: float, n_step: int, images: bool) -> Transitions:
        d = self._decisions
        rewards, discounts = torch.zeros(len(rows)), torch.ones(len(rows))
        left, ahead = d["left"][rows], torch.zeros_like(rows)
        for k in range(n_step):
            inside = k < left
            at = torch.where(inside, rows + k, rows)
            rewards += torch.where(inside, discounts * d["rewards"][at], 0.0)
            discounts = torch.where(inside, discounts * gamma ** d["steps"][at].float(), discounts)
            ahead += inside
        over = (ahead == left) & d["terminated"][rows]
        frames = d["frame"][rows]
        return Transitions(
            observations=self._observation(frames, images),
            actions=d["actions"][rows],
            valid=d["valid"][rows],
            is_human=d["human"][rows],
            rewards=rewards,
            discounts=torch.where(over, 0.0, discounts),
            next_observations=self._observation(frames + ahead, images),
            extra=self._extra(frames),
            next_extra=self._extra(frames + ahead),
            source=tuple(self._texts[i] for i in d["source"][rows].tolist()),
        )

    def _observation(self, frames: Tensor, images: bool) -> Observation:
        f = self._frames
        return Observation(
            images={name.removeprefix("image:"): f[name][frames] for name in f if images and name.startswith("image:")},
            proprio=f["proprio"][frames],
            instruction=tuple(self._texts[i] for i in f["text"][frames].tolist()),
            privileged=f["privileged"][frames] if "privileged" in f else None,
        )

    def _extra(self, frames: Tensor) -> dict[str, Tensor]:
        return {
            name.removeprefix("extra:"): column[frames] for name, column in self._frames.items() if name.startswith("extra:")
        }

