"""Demonstrations: episodes, chunks to imitate, and how they are drawn."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.checks import DataCheck, Rows, as_success
from vla_rl.data.drawing import Drawing
from vla_rl.data.frames import Frames, JoinedFrames, on_disk
from vla_rl.data.lerobot_format import ACTION_KEY, STATE_KEY, DatasetError
from vla_rl.data.lerobot_writer import feature_statistics
from vla_rl.errors import ConfigError
from vla_rl.ranks import Ranks
from vla_rl.types import EmbodimentSpec, Observation

_AHEAD = 4  # batches that are decoded while one is learned from
_MOVES = 20_000  # chunks that statistics of moves are taken from
DRAWN_FROM = 3  # episodes of a task from which one is kept out, however small the share


@dataclass(frozen=True)
class DemonstrationEpisode:
    """What is known of one episode. ``success``, ``task_id`` and ``init_state_id`` are None in
    foreign datasets. ``source``: which of several datasets it is from. ``kept_out``: the run that
    collected it trains on none of it."""

    start: int
    length: int
    instruction: str
    success: bool | None = None
    task_id: str | None = None
    init_state_id: int | None = None
    source: int = 0
    kept_out: bool = False


class DemonstrationDataset:
    """Demonstrations: a decision at every control step, with the chunk of actions that followed.

    ``images`` {camera: uint8 [n H W 3]}, in memory or on the disk (`vla_rl.data.frames`),
    ``proprio`` float32 [n p], ``actions`` float32 [n a] (physical units) hold all n control steps
    of all episodes; ``statistics`` {"action" | "observation.state": {"min", "max", "mean", "std",
    "q01", "q99", …: float32 [d]}} are computed from them. ``by_base`` bool [n]: which of hybrid
    rollouts' steps the frozen policy chose; ``sent`` float32 [n a]: what the robot was told where
    the label stayed clean; None where that is not known. ``worth`` bool [n]: at which steps the
    decision is worth imitating, the only ones that are drawn; None: at all. ``by_person`` bool [n]:
    which steps of a session a person chose, who helped the policy that chose the others; where
    there are any, those alone are drawn (HG-DAgger); None: all are a person's. ``notes``: what a
    reader found doubtful in them, or left out, a line each.

    Of several datasets (`joined`) ``sources`` are the names, and ``weights`` how often each is
    drawn from (of those that have steps to draw), all its steps alike; empty: all steps of all
    alike. Statistics are of what is drawn so: its mean, deviation and quantiles, and the least and
    greatest of all.
    """

    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    by_base: Tensor | None = None
    by_person: Tensor | None = None
    sent: Tensor | None = None
    _worth: Tensor | None = None

    def __init__(
        self,
        embodiment: EmbodimentSpec,
        images: Mapping[str, Frames],
        proprio: Tensor,
        actions: Tensor,
        instruction_index: Tensor,
        instructions: Sequence[str],
        episodes: Sequence[DemonstrationEpisode],
        chunk_length: int,
    ):
        if chunk_length < 1:
            raise ConfigError(f"chunk_length={chunk_length} must be at least 1")
        self.embodiment, self.chunk_length = embodiment, chunk_length
        self.images, self.proprio, self.actions = images, proprio, actions
        self.instructions, self.episodes = tuple(instructions), tuple(episodes)
        self._instruction_index = instruction_index
        self._end = torch.empty(len(actions), dtype=torch.long)
        # control steps since the episode began
        self._age = torch.empty(len(actions), dtype=torch.long)
        for e in episodes:
            self._end[e.start : e.start + e.length] = e.start + e.length
            self._age[e.start : e.start + e.length] = torch.arange(e.length)

    @functools.cached_property
    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """Of state and action, counted where somebody asks."""
        mass = self.drawing.mass()
        return {
            key: _statistics(values, mass)
            for key, values in ((STATE_KEY, self.proprio), (ACTION_KEY, self.actions))
        }

    def from_sources(self, names: Sequence[str], weights: Sequence[float]) -> DemonstrationDataset:
        """This, whose episodes are of several datasets, and as often drawn."""
        self.sources, self.weights = tuple(names), tuple(weights)
        return self

    @property
    def worth(self) -> Tensor | None:
        return self._worth

    @worth.setter
    def worth(self, worth: Tensor | None) -> None:
        self._worth = worth
        self.__dict__.pop("drawing", None)

    @functools.cached_property
    def drawing(self) -> Drawing:
        """How its control steps are drawn, by ``by_person``, ``worth`` and ``weights``."""
        drawn, theirs = self.worth, self.by_person
        if theirs is not None and bool(theirs.any()):
            drawn = theirs if drawn is None else drawn & theirs
        of = self.episodes if self.weights else ()
        lengths = torch.tensor([e.length for e in of], dtype=torch.long)
        source = torch.tensor([e.source for e in of], dtype=torch.long).repeat_interleave(lengths)
        return Drawing(len(self), drawn, source, self.weights)

    def __len__(self) -> int:
        """Control steps."""
        return len(self.actions)

    @property
    def action_stats(self) -> dict[str, list[float]]:
        """``low, high, mean, std, q01, q99`` per action dimension, in physical units: what
        normalisation needs."""
        return short_statistics(self.statistics[ACTION_KEY])

    @property
    def proprio_stats(self) -> dict[str, list[float]]:
        """``low, high, mean, std, q01, q99`` per proprio dimension, in physical units."""
        return short_statistics(self.statistics[STATE_KEY])

    def at(self, index: Tensor) -> tuple[Observation, Tensor, Tensor]:
        """Rows ``index`` int64 [b] → (Observation [b], actions float32 [b h a], valid bool [b h]).

        Chunk t is the actions of control steps t … t+h−1; past the episode's end the last action
        repeats and ``valid`` is False.
        """
        index = torch.as_tensor(index, dtype=torch.long)
        steps, valid = self._chunks(index)
        observation = Observation(
            images={name: frames[index] for name, frames in self.images.items()},
            proprio=self.proprio[index],
            instruction=tuple(
                self.instructions[i] for i in self._instruction_index[index].tolist()
            ),
        )
        return observation, self.actions[steps], valid

    def _chunks(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """(control steps int64 [b h] of the chunks that begin at ``index``, which of them are there
        [b h])."""
        steps = index[:, None] + torch.arange(self.chunk_length)
        last = self._end[index][:, None] - 1
        return torch.minimum(steps, last), steps <= last

    def moves(self, names: Sequence[str]) -> dict[str, list[float]]:
        """As `action_stats`, where ``names`` count from the state as their chunk begins: over all
        steps of at most `_MOVES` chunks that lie evenly."""
        mine = [self.embodiment.action_names.index(name) for name in names]
        its = [self.embodiment.proprio_names.index(name) for name in names]
        index = torch.linspace(0, len(self) - 1, min(_MOVES, len(self))).round().long()
        steps, valid = self._chunks(index)
        actions = self.actions[steps]
        actions[..., mine] -= self.proprio[index][:, None, its]
        mass = self.drawing.mass()
        if mass is not None:
            mass = np.repeat(mass[index.numpy()], valid.sum(1).numpy())
        return short_statistics(_statistics(actions[valid], mass))

    def subset(self, keep: Sequence[Tensor | None]) -> DemonstrationDataset:
        """Only the control steps that ``keep`` marks: bool [length] per episode, or None to leave
        the episode out.

        Raises `DatasetError` where nothing remains.
        """
        rows, episodes, start = [], [], 0
        for episode, mask in zip(self.episodes, keep, strict=True):
            if mask is None or not mask.any():
                continue
            rows.append(episode.start + torch.nonzero(mask).flatten())
            episodes.append(dataclasses.replace(episode, start=start, length=len(rows[-1])))
            start += len(rows[-1])
        if not rows:
            raise DatasetError(
                "No demonstration remains after filtering; ask for other tasks, or "
                "keep more of the data."
            )
        index = torch.cat(rows)
        out = DemonstrationDataset(
            self.embodiment,
            {k: _some(v, index) for k, v in self.images.items()},
            self.proprio[index],
            self.actions[index],
            self._instruction_index[index],
            self.instructions,
            episodes,
            self.chunk_length,
        )
        out.by_base = None if self.by_base is None else self.by_base[index]
        out.sent = None if self.sent is None else self.sent[index]
        out.by_person = None if self.by_person is None else self.by_person[index]
        out.worth = None if self.worth is None else self.worth[index]
        out.notes = self.notes
        return out.from_sources(self.sources, self.weights)

    def without_base(self) -> DemonstrationDataset:
        """Hybrid rollouts from where the frozen policy handed over. `DatasetError` where it is
        not known who acted."""
        if self.by_base is None:
            raise DatasetError(
                "sft.base_part=false leaves out what the frozen policy did, and these "
                "demonstrations do not say who acted: use some that were collected with "
                "collect.base_share, or leave it at true"
            )
        return self.subset([~self.by_base[e.start : e.start + e.length] for e in self.episodes])

    def as_sent(self) -> DemonstrationDataset:
        """With what was done as the label, within the embodiment's bounds. `DatasetError` where
        that is not known."""
        if self.sent is None:
            raise DatasetError(
                "sft.labels=sent imitates what was sent to the robot, and these demonstrations do "
                "not hold it (the column 'sent' of what 'vla-rl collect' writes): collect them "
                "anew, or leave it at clean"
            )
        out = copy.copy(self)
        low, high = (
            torch.tensor(self.embodiment.action_low),
            torch.tensor(self.embodiment.action_high),
        )
        out.actions = torch.clamp(self.sent, low, high)
        out.__dict__.pop("statistics", None)
        return out

    def split(
        self, validation_episodes: int, largest_share: float = 0.2, seed: int | None = None
    ) -> tuple[DemonstrationDataset, DemonstrationDataset | None]:
        """What to train on, and the last ``validation_episodes`` of each task, which are kept out
        (at most ``largest_share`` of the task's; None where that leaves none). Tasks are told apart
        by ``task_id``, else by instruction, and by dataset. Where the dataset says which of a task's
        the run that collected it kept out, it is those; raises `DatasetError` where no other one of
        the task is there.

        With a ``seed`` they are drawn, and a task of `DRAWN_FROM` episodes or more gives one
        whatever its share.
        """
        by_task: dict[tuple[int, str], list[int]] = {}
        for i, e in enumerate(self.episodes):
            by_task.setdefault((e.source, e.task_id or e.instruction), []).append(i)
        kept_out: set[int] = set()
        for number, ((_, task), rows) in enumerate(by_task.items()):
            if marked := {i for i in rows if self.episodes[i].kept_out}:
                if len(marked) == len(rows):
                    raise DatasetError(
                        f"all {len(rows)} demonstrations of {task!r} that are read are among those "
                        "which the run that collected them keeps out of training "
                        "(meta/kept_out.json of their dataset): use others, or leave the task out"
                    )
                kept_out |= marked
                continue
            share = int(largest_share * len(rows))
            if seed is not None:
                share = max(share, int(len(rows) >= DRAWN_FROM))
                rows = np.random.default_rng([seed, number]).permutation(rows).tolist()
            kept_out |= set(rows[len(rows) - min(validation_episodes, share) :])
        if not kept_out:
            return self, None
        whole = [torch.ones(e.length, dtype=torch.bool) for e in self.episodes]
        train = self.subset([None if i in kept_out else mask for i, mask in enumerate(whole)])
        return train, self.subset([mask if i in kept_out else None for i, mask in enumerate(whole)])

    def evenly(self, rows: int) -> tuple[Observation, Tensor, Tensor]:
        """At most ``rows`` control steps spread evenly over all episodes; returns what `at`
        returns."""
        count = self.drawing.count
        places = torch.linspace(0, count - 1, min(rows, count)).round().long()
        return self.at(self.drawing.rows(places))

    def first(self, rows: int) -> tuple[Observation, Tensor, Tensor]:
        """The first control steps of at most ``rows`` episodes; returns what `at` returns."""
        return self.at(torch.tensor([episode.start for episode in self.episodes[:rows]]))

    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, first_share: float = 0.0
    ) -> tuple[Observation, Tensor, Tensor]:
        """`at` of what `draw` draws."""
        return self.at(self.draw(batch_size, generator, first_share))

    def draw(
        self, batch_size: int, generator: torch.Generator | None = None, first_share: float = 0.0
    ) -> Tensor:
        """``batch_size`` control steps int64, drawn with replacement, uniformly or by ``weights``,
        about ``first_share`` of them from those that an episode's first decision covers."""
        rows = self.drawing.draw(batch_size, generator)
        if first_share:
            first = self.drawing.all_rows()
            first = first[self._age[first] < self.chunk_length]
            chosen = torch.rand(batch_size, generator=generator) < (
                first_share if len(first) else 0.0
            )
            if chosen.any():
                rows[chosen] = self.drawing.among(first, int(chosen.sum()), generator)
        return rows

    def batches(
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Observation, Tensor, Tensor]]:
        """One epoch in random order; the last batch may be smaller."""
        for places in torch.randperm(self.drawing.count, generator=generator).split(batch_size):
            yield self.at(self.drawing.rows(places))

    @property
    def stays_on_disk(self) -> bool:
        """Whether pictures are decoded as they are drawn."""
        return any(on_disk(frames) for frames in self.images.values())


class DatasetSampler:
    """Draws batches of ``batch_size`` decisions from a `DemonstrationDataset` for ever (a `Sampler`
    for `Imitation`).

    Where pictures are on the disk, the batches to come are decoded by threads while this one is
    learned from; the same rows come in the same order either way.
    """

    def __init__(
        self,
        dataset: DemonstrationDataset,
        batch_size: int,
        seed: int = 0,
        first_share: float = 0.0,
    ):
        self.dataset, self.batch_size, self.first_share = dataset, batch_size, first_share
        self.generator = torch.Generator().manual_seed(seed)
        # each with the generator's state before it was drawn, and what was drawn
        self._coming: deque[tuple[Tensor, Tensor, Future[Any]]] = deque()
        self._pool = ThreadPoolExecutor(_AHEAD, "batches") if dataset.stays_on_disk else None

    def next_batch(self) -> tuple[Observation, Tensor, Tensor]:
        """Observation [b], actions float32 [b h a] in physical units, valid bool [b h]."""
        return self.next_part(Ranks())[1]

    def next_part(self, ranks: Ranks) -> tuple[Tensor, tuple[Observation, Tensor, Tensor]]:
        """The control steps int64 [b] of the next batch, and `next_batch` of this rank's share of
        them: its images alone are read."""
        if self._pool is None:
            drawn = self._draw()
            return drawn, self.dataset.at(ranks.part(len(drawn)).of(drawn))
        while len(self._coming) <= _AHEAD:
            before, drawn = self.generator.get_state(), self._draw()
            rows = ranks.part(len(drawn)).of(drawn)
            self._coming.append((before, drawn, self._pool.submit(self.dataset.at, rows)))
        _, drawn, batch = self._coming.popleft()
        return drawn, batch.result()

    def _draw(self) -> Tensor:
        return self.dataset.draw(self.batch_size, self.generator, self.first_share)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._coming[0][0] if self._coming else self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for _, _, batch in self._coming:
            batch.cancel()
        self._coming.clear()
        self.generator.set_state(state["generator"].cpu())


def joined(
    parts: Sequence[DemonstrationDataset], names: Sequence[str], weights: Sequence[float] = ()
) -> DemonstrationDataset:
    """Datasets of one robot, of these names, as one; pictures stay where they are. ``weights`` as
    of `DemonstrationDataset`."""
    texts = list(dict.fromkeys(text for part in parts for text in part.instructions))
    episodes, indices, start = [], [], 0
    for number, part in enumerate(parts):
        episodes += [
            dataclasses.replace(e, start=start + e.start, source=number) for e in part.episodes
        ]
        own = torch.tensor([texts.index(text) for text in part.instructions])
        indices.append(own[part._instruction_index])
        start += len(part)
    first = parts[0]
    out = DemonstrationDataset(
        first.embodiment,
        {name: JoinedFrames.of([part.images[name] for part in parts]) for name in first.images},
        torch.cat([part.proprio for part in parts]),
        torch.cat([part.actions for part in parts]),
        torch.cat(indices),
        texts,
        episodes,
        first.chunk_length,
    )
    out.by_base = _of_all([part.by_base for part in parts])
    out.sent = _of_all([part.sent for part in parts])
    if any(part.by_person is not None for part in parts):
        theirs = (torch.ones(len(part), dtype=torch.bool) for part in parts)
        out.by_person = torch.cat(
            [all_ if p.by_person is None else p.by_person for all_, p in zip(theirs, parts)]
        )
    out.notes = tuple(note for part in parts for note in part.notes)
    return out.from_sources(names, weights)


def _of_all(known: Sequence[Tensor | None]) -> Tensor | None:
    there = [values for values in known if values is not None]
    return torch.cat(there) if len(there) == len(known) else None


def _some(frames: Frames, index: Tensor) -> Frames:
    return frames[index] if isinstance(frames, Tensor) else frames.subset(index)


def _statistics(values: Tensor, mass: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return {
        k: v.astype(np.float32)
        for k, v in feature_statistics(values.numpy(), mass).items()
        if k != "count"
    }


def short_statistics(stats: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """What a policy is made for (``from_statistics``), of a feature's statistics."""
    names = {"low": "min", "high": "max", "mean": "mean", "std": "std", "q01": "q01", "q99": "q99"}
    return {short: stats[name].tolist() for short, name in names.items()}


def dataset_of_episodes(
    episodes: Iterable[Mapping[str, Any]],
    embodiment: EmbodimentSpec,
    chunk_length: int = 1,
    source: object = "the data",
) -> DemonstrationDataset:
    """A dataset of episodes as a collector returns them (see `DemonstrationWriter.add_episode`);
    takes their images away, so that they are in memory once. Those without a control step are left
    out. Raises `DatasetError` where no episode is left, and for what `vla_rl.data.checks` calls an
    error; ``source`` says where they come from.
    """
    kept, known, start = [], [], 0
    check = DataCheck(str(source), "demonstrations", embodiment)
    for episode in episodes:
        check.add(rows_of_episode(episode, str(source)))
        if len(episode["actions"]):
            kept.append(episode)
    report = check.report()
    report.require()
    if not kept:
        raise DatasetError(
            f"{source} has no demonstration to read; ask for other tasks or another folder."
        )
    instructions = list(dict.fromkeys(e["instruction"] for e in kept))
    for e in kept:
        fields = {name: e[name] for name in ("instruction", "task_id", "init_state_id")}
        known.append(
            DemonstrationEpisode(
                start, len(e["actions"]), success=as_success(e["success"]), **fields
            )
        )
        start += len(e["actions"])
    proprio, actions = (
        torch.from_numpy(np.concatenate([e[name] for e in kept]).astype(np.float32))
        for name in ("proprio", "actions")
    )
    images = {}
    for camera in embodiment.camera_names:
        kinds = {str(e["images"][camera].dtype) for e in kept} - {"uint8"}
        if kinds:
            raise DatasetError(
                f"{source} has pictures of camera {camera} as {kinds.pop()}: colours "
                "of 8 bits are needed."
            )
        frames = np.empty((start, *kept[0]["images"][camera].shape[1:]), np.uint8)
        for e, info in zip(kept, known, strict=True):
            frames[info.start : info.start + info.length] = e["images"].pop(camera)
        images[camera] = torch.from_numpy(frames)
    index = torch.tensor(
        [instructions.index(e.instruction) for e in known for _ in range(e.length)]
    )
    dataset = DemonstrationDataset(
        embodiment, images, proprio, actions, index, instructions, known, chunk_length
    )
    dataset.notes = tuple(finding.line() for finding in report.warnings)
    return dataset


def rows_of_episode(episode: Mapping[str, Any], source: str) -> Rows:
    """What is checked of an episode as a collector returns it; ``name`` and ``file`` in it, if
    any, say where it lies."""
    vectors = {STATE_KEY: episode["proprio"], ACTION_KEY: episode["actions"]}
    name = episode.get("name") or f"episode {episode.get('init_state_id')}"
    return Rows(
        name,
        str(episode.get("file") or source),
        vectors,
        episode["instruction"],
        episode["success"],
    )
