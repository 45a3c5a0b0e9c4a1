"""A replay of decisions that keeps episodes whole: every frame once, transitions are views of it.

A source ("online", "demonstrations", …) is a share of what is drawn, so that few demonstrations are
not drowned by many rollouts (RLPD, Ball et al. 2023 §4.1, draws half of each batch from them). With
a folder every episode is on the disk when `Replay.add` returns (`replay_folder.py`), so that a run
which was killed goes on with what it had: checkpoints keep the count of episodes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.direct import cacheable_bytes, can_read_directly
from vla_rl.data.replay_checks import NO_PREFIX, begins_each_decision, check_episode, check_fields
from vla_rl.data.replay_folder import DECISIONS, FRAMES, ReplayFolder
from vla_rl.data.tables import LARGE, Field, Growing, Table
from vla_rl.errors import UserError
from vla_rl.types import EmbodimentSpec, Observation, Trajectory, Transitions

# sources; offline: episodes of other runs
ONLINE, DEMONSTRATIONS, OFFLINE = "online", "demonstrations", "offline"
# what is drawn apart, too, of the sources but demonstrations
INTERVENTIONS, SOLVED = "interventions", "solved"
_IMAGE, _EXTRA = "image:", "extra:"
_EPISODE = [
    ("end", "i8"),
    ("version", "i8"),
    ("source", "i4"),
    ("terminated", "?"),
    ("proposed", "?"),
]
_SEGMENT = [("before", "i8"), ("row", "i8")]


class _DecisionsBySource:
    """Which decisions each source has, as runs of rows."""

    def __init__(self) -> None:
        # source → runs of decisions: how many come before, the first one's row
        self._segments: dict[str, Growing] = {}
        self._counts: dict[str, int] = {}  # source → decisions

    def count(self, source: str) -> int:
        return self._counts.get(source, 0)

    def add(self, source: str, row: int, length: int) -> None:
        """``length`` decisions from ``row`` on."""
        self._segments.setdefault(source, Growing(_SEGMENT)).put([(self.count(source), row)])
        self._counts[source] = self.count(source) + length

    def rows(self, sources: Sequence[str], picks: np.ndarray) -> np.ndarray:
        """The rows that ``picks`` number among the decisions of ``sources``, one source after
        the other."""
        rows, before = np.empty_like(picks), 0
        for source in sources:
            size = self.count(source)
            inside = (picks >= before) & (picks < before + size)
            if inside.any():
                segments, own = self._segments[source].rows, picks[inside] - before
                at = np.searchsorted(segments["before"], own, side="right") - 1
                rows[inside] = segments["row"][at] + own - segments["before"][at]
            before += size
        return rows


class Replay:
    """Episodes of one robot, in memory or (with ``folder``) on disk.

    A decision is drawn uniformly among those of its source. Frames: the observation of each
    decision and the one after the last, so an episode of t decisions has t + 1. Decisions in which
    a person chose an executed step are drawn under "interventions" too, those of successful
    episodes under "solved", unless their episode is of the source "demonstrations". Those are a
    person's where they do not say who chose.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        episodes: int | None = 0,
        embodiment: EmbodimentSpec | None = None,
        ram_bytes: int = 2 << 30,
        cache_bytes: float | None = None,
    ) -> None:
        """``episodes``: how many of those in ``folder`` belong to the run as its checkpoint left
        it; later ones are removed. None: every one that was closed. ``embodiment``: the robot,
        without which its cameras and bounds go unchecked.

        ``ram_bytes``: what is kept in RAM beside a ``folder``, small columns first; the rest is
        read from the disk: mapped where the system's cache can hold it (``cache_bytes``; None: half
        of the memory that is free), else past that cache. Raises `UserError` where the folder holds
        fewer episodes, is of another robot, is damaged (rows that stay on the disk are compared
        with their checksums for the last episode alone), or is no replay.
        """
        self.episodes = 0
        self.last_ticket = 0  # the highest of its episodes; 0: none has one
        self.embodiment = embodiment
        self._ram_bytes, self._cache_bytes = ram_bytes, cache_bytes
        self._tables: dict[str, Table] = {}
        self._episodes = Growing(_EPISODE)  # "end" is the last decision + 1
        self._texts: list[str] = []
        self._sources: list[str] = []
        self._decisions = _DecisionsBySource()
        self._files = None if folder is None else ReplayFolder(folder)
        if self._files is not None:
            self._tables, records, self.embodiment = self._files.open(episodes, embodiment)
            for record in records:
                self._count(record)
            self._fit(self._tables, {})
            for table in self._tables.values():
                if not table.on_disk_alone:
                    table.load()
            if not any(table.on_disk_alone for table in self._tables.values()):
                self._files.check(self._tables, records)

    @property
    def folder(self) -> Path | None:
        return None if self._files is None else self._files.path

    def __len__(self) -> int:
        """Decisions."""
        return int(self._episodes.rows["end"][-1]) if self.episodes else 0

    @property
    def reads_directly(self) -> bool:
        """Whether what is not in RAM is read past the system's cache, which could not hold it."""
        return any(table.on_disk_alone and table.direct for table in self._tables.values())

    @property
    def bytes(self) -> int:
        """Of all rows, wherever they lie."""
        return sum(table.count * table.row_bytes for table in self._tables.values())

    def count(self, source: str) -> int:
        """Decisions of one source."""
        return self._decisions.count(source)

    def lengths(self, first: int) -> list[int]:
        """Decisions of each episode from number ``first`` on."""
        return np.diff(self._episodes.rows["end"], prepend=0)[first:].tolist()

    # --------------------------------------------------------------------------------------- adding
    def add(
        self,
        trajectory: Trajectory,
        rewards: Tensor,
        source: str = ONLINE,
        extra: Mapping[str, Tensor] | None = None,
        ticket: int | None = None,
    ) -> None:
        """Keep an episode. ``rewards`` float32 [t] per decision; ``extra`` {name: [t + 1 …]} per
        frame.

        ``ticket`` (from 1, rising) is kept with it, so that who was killed knows by `last_ticket`
        what is there already.

        Raises `UserError` for an episode with a mistake (`check_episode`) or with other columns
        than those before, `DiskFull` where the disk is; the replay is then as it was.
        """
        extra = dict(extra or {})
        check_episode(trajectory, rewards, extra, self.embodiment)
        seen = Observation.cat([trajectory.observations, trajectory.final_observation])
        new = [text for text in dict.fromkeys(seen.instruction) if text not in self._texts]
        number = {text: i for i, text in enumerate([*self._texts, *new])}
        frames = {f"{_IMAGE}{name}": images for name, images in seen.images.items()}
        frames |= {
            "proprio": seen.proprio,
            "text": torch.tensor([number[text] for text in seen.instruction]),
        }
        if seen.privileged is not None:
            frames["privileged"] = seen.privileged
        frames |= {f"{_EXTRA}{name}": values for name, values in extra.items()}
        human = trajectory.is_human
        if human is None:  # a demonstration is a person's, unless it says otherwise
            human = torch.full_like(trajectory.valid, source == DEMONSTRATIONS)
        decisions = {
            "actions": trajectory.actions,
            "proposed": trajectory.actions if trajectory.proposed is None else trajectory.proposed,
            "valid": trajectory.valid,
            "human": human,
            "rewards": rewards.float(),
        }
        tables = self._tables_for(trajectory.rollout_id, frames, decisions)
        record = {
            "rollout_id": trajectory.rollout_id,
            "source": source,
            "decisions": len(trajectory),
            "terminated": trajectory.terminated,
            "success": trajectory.success,
            "version": trajectory.policy_version,
            "proposed": trajectory.proposed is not None,
            "interventions": _runs((human & trajectory.valid).any(1)),
            "texts": new,
        }
        if ticket is not None:
            record["ticket"] = ticket
        rows = {name: table.pack(frames | decisions) for name, table in tables.items()}
        self._fit(tables, {name: len(packed) for name, packed in rows.items()})
        if self._files is None:
            for name, table in tables.items():
                table.write(rows[name])
        else:
            self._files.append(tables, rows, record, self.episodes, self.embodiment)
        self._tables = tables
        self._count(record)

    def _tables_for(
        self, name: str, frames: Mapping[str, Tensor], decisions: Mapping[str, Tensor]
    ) -> dict[str, Table]:
        """Those that there are, or new ones for a first episode. Raises `UserError` for other
        columns."""
        layout: dict[str, list[Field]] = {
            DECISIONS: [Field.of(*item) for item in decisions.items()],
            FRAMES: [],
        }
        for field in sorted(Field.of(*item) for item in frames.items()):
            large = field.storable and field.bytes >= LARGE
            layout.setdefault(field.name if large else FRAMES, []).append(field)
        fields = [field for table in layout.values() for field in table]
        if unknown := [field for field in fields if not field.storable]:
            raise UserError(
                f"replay: rollout {name} has {unknown[0]}: give numbers or truth values "
                "that a file can hold"
            )
        if self._tables:
            check_fields(
                name, fields, [field for table in self._tables.values() for field in table.fields]
            )
            return self._tables
        if self._files is not None:
            return self._files.tables(layout)
        return {name: Table(fields) for name, fields in layout.items()}

    def _count(self, record: Mapping[str, Any]) -> None:
        """Make an episode whose rows are written part of the replay."""
        start, t, source = len(self), int(record["decisions"]), str(record["source"])
        if source not in self._sources:
            self._sources.append(source)
        self._texts += record["texts"]
        self._decisions.add(source, start, t)
        if source not in (INTERVENTIONS, DEMONSTRATIONS):
            for first, length in record["interventions"]:
                self._decisions.add(INTERVENTIONS, start + first, length)
            if record["success"]:
                self._decisions.add(SOLVED, start, t)
        self._episodes.put(
            [
                (
                    start + t,
                    record["version"],
                    self._sources.index(source),
                    record["terminated"],
                    record["proposed"],
                )
            ]
        )
        self.episodes += 1
        self.last_ticket = max(self.last_ticket, record.get("ticket", 0))
        for name, table in self._tables.items():
            table.count = start + t + (0 if name == DECISIONS else self.episodes)

    def _fit(self, tables: Mapping[str, Table], added: Mapping[str, int]) -> None:
        """Keep a copy of no more than ``ram_bytes`` in RAM, once ``added`` rows are there;
        choose how the rest is read."""
        if self._files is None:
            return
        used = beyond = 0
        for name, table in sorted(tables.items(), key=lambda item: item[1].row_bytes):
            size = (table.count + added.get(name, 0)) * table.row_bytes
            used += size
            if used > self._ram_bytes:
                table.leave_ram()
            if table.on_disk_alone:
                beyond += size
        trusted = (
            0
            if not beyond
            else cacheable_bytes()
            if self._cache_bytes is None
            else self._cache_bytes
        )
        direct = beyond > trusted and can_read_directly(self._files.path)
        for table in tables.values():
            table.direct = direct

    # -------------------------------------------------------------------------------------- drawing
    def draw(
        self,
        count: int,
        generator: torch.Generator,
        *,
        gamma: float = 0.99,
        n_step: int = 1,
        shares: Mapping[str | tuple[str, ...], float] | None = None,
        images: bool = True,
    ) -> Transitions:
        """``count`` transitions, with replacement; ``gamma`` discounts per control step inside
        ``discounts``.

        ``shares`` {source: share of the rows} (default: uniform over all decisions); sources that
        are empty leave their rows to the others. Several sources in a tuple are drawn as one: each
        of their decisions is as likely. ``images`` False: observations without any, for who learns
        from extras. The rows depend on the generator's state and on what was added, on nothing
        else. Raises `UserError` for an empty replay.
        """
        if not len(self):
            raise UserError("replay: nothing was added yet, so nothing can be drawn")
        groups = {
            (key,) if isinstance(key, str) else key: share for key, share in (shares or {}).items()
        }
        present = {
            names: share
            for names, share in groups.items()
            if share > 0 and any(map(self.count, names))
        }
        if not present:
            rows = torch.randint(len(self), (count,), generator=generator)
            return self.take(rows, gamma=gamma, n_step=n_step, images=images)
        total, parts, left = sum(present.values()), [], count
        for i, (names, share) in enumerate(present.items()):
            n = left if i == len(present) - 1 else round(count * share / total)
            picks = torch.randint(sum(map(self.count, names)), (n,), generator=generator).numpy()
            parts.append(self._decisions.rows(names, picks))
            left -= n
        return self.take(
            torch.from_numpy(np.concatenate(parts)), gamma=gamma, n_step=n_step, images=images
        )

    def first_decisions(self) -> Tensor:
        """The row of each episode's first decision, int64 [episodes]."""
        ends = torch.from_numpy(self._episodes.rows["end"].copy())
        return torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])

    def take(
        self, decisions: Tensor, *, gamma: float = 0.99, n_step: int = 1, images: bool = True
    ) -> Transitions:
        """The transitions of ``decisions`` int64 [b], counted as they were added; options as of
        `draw`."""
        rows, b, table = decisions.numpy(), len(decisions), self._episodes.rows
        at = np.searchsorted(table["end"], rows, side="right")
        episode = table[at]
        left = episode["end"] - rows
        frames = rows + at  # every earlier episode has one frame more than decisions
        ahead = np.minimum(left, n_step)
        # s and s' in one pass over memory
        seen = self._take_frames(np.concatenate([frames, frames + ahead]), images)
        before, after = (
            {k: v[part] for k, v in seen.items()} for part in (slice(0, b), slice(b, None))
        )
        window = rows[:, None] + np.minimum(np.arange(n_step), left[:, None] - 1)  # [b n]
        inside = torch.from_numpy(np.arange(n_step) < left[:, None])
        chunks = _take([self._tables[DECISIONS]], window.ravel())
        d = {k: v.unflatten(0, (b, n_step)) for k, v in chunks.items()}
        if not begins_each_decision(d["valid"]):
            raise UserError(
                f"replay: a decision was drawn {NO_PREFIX}, so its rows were written by something "
                "else: leave it out, or start over with --fresh"
            )
        factors = torch.where(inside, gamma ** d["valid"].sum(-1).float(), 1.0).cumprod(1)
        weights = torch.cat([torch.ones(b, 1), factors[:, :-1]], dim=1)
        over, terminated = (
            torch.from_numpy(ahead == left),
            torch.from_numpy(episode["terminated"].copy()),
        )
        return Transitions(
            observations=observation_of(before, self._texts),
            actions=d["actions"][:, 0],
            valid=d["valid"][:, 0],
            is_human=d["human"][:, 0],
            rewards=torch.where(inside, weights * d["rewards"], 0.0).sum(1),
            discounts=torch.where(over & terminated, 0.0, factors[:, -1]),
            next_observations=observation_of(after, self._texts),
            extra=_named(before, _EXTRA),
            next_extra=_named(after, _EXTRA),
            source=tuple(map(self._sources.__getitem__, episode["source"].tolist())),
            proposed=d["proposed"][:, 0],
            proposed_known=torch.from_numpy(episode["proposed"].copy()),
            truncated=over & ~terminated,
            version=torch.from_numpy(episode["version"].copy()),
        )

    def _take_frames(self, frames: np.ndarray, images: bool) -> dict[str, Tensor]:
        """Columns of ``frames``."""
        wanted = [
            t
            for name, t in self._tables.items()
            if name != DECISIONS and (images or not name.startswith(_IMAGE))
        ]
        columns = _take(wanted, frames)
        return columns if images else {k: v for k, v in columns.items() if not k.startswith(_IMAGE)}


def observation_of(columns: Mapping[str, Tensor], texts: Sequence[str]) -> Observation:
    """What the columns of frames show; ``texts``: the instructions that they number, or a
    `UserError`."""
    numbers = columns["text"].tolist()
    if wrong := [number for number in numbers if not 0 <= number < len(texts)]:
        raise UserError(
            f"replay: a frame has the instruction number {wrong[0]}, and {len(texts)} are in its "
            "journal, so its rows were written by something else: leave it out, or start over with "
            "--fresh"
        )
    return Observation(
        images=_named(columns, _IMAGE),
        proprio=columns["proprio"],
        instruction=tuple(map(texts.__getitem__, numbers)),
        privileged=columns.get("privileged"),
    )


def _take(tables: list[Table], rows: np.ndarray) -> dict[str, Tensor]:
    """Columns of ``rows``; the disk is asked for all of them before the first is waited for."""
    if any(table.on_disk_alone for table in tables):
        ascending = np.unique(rows)
        for table in tables:
            table.prefetch(ascending)
    return {name: values for table in tables for name, values in table.take(rows).items()}


def _named(columns: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those of a prefix, without it."""
    return {
        name.removeprefix(prefix): values
        for name, values in columns.items()
        if name.startswith(prefix)
    }


def _runs(marked: Tensor) -> list[list[int]]:
    """[first, length] of each run of True in [t]."""
    edges = np.diff(np.concatenate([[0], marked.numpy().astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [[int(a), int(b - a)] for a, b in zip(starts, ends)]
