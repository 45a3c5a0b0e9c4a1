"""Demonstrations in the form that a benchmark published them in."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.checks import ERROR, DataCheck, Rows, as_success
from vla_rl.data.demonstrations import (
    DemonstrationDataset,
    DemonstrationEpisode,
    dataset_of_episodes,
)
from vla_rl.data.frames import OnDisk
from vla_rl.data.lerobot_format import ACTION_KEY, STATE_KEY, DatasetError
from vla_rl.data.lerobot_reader import load_demonstrations, read_embodiment, read_info, successes
from vla_rl.errors import MANGLED, MissingPackage, UserError, first_line
from vla_rl.files import require_content
from vla_rl.types import EmbodimentSpec


@dataclass(frozen=True)
class Wanted:
    """What is read of published demonstrations; see `load_published`."""

    instructions: Sequence[str]
    episodes_per_task: int
    keep_noops: bool = False
    failures: bool = False


def load_published(
    form: Any,
    path: str | Path,
    embodiment: EmbodimentSpec,
    chunk_length: int,
    wanted: Wanted,
    disk: OnDisk | None = None,
) -> DemonstrationDataset:
    """Demonstrations that a benchmark published, in a form that ``form`` knows (``build.py``, group
    "demonstrations").

    As ``wanted`` says, only tasks with one of ``instructions`` are read, at most
    ``episodes_per_task`` demonstrations each (in the files' order). Control steps that do nothing
    are dropped unless ``keep_noops``, demonstrations that failed unless ``failures``. Of a folder
    that this project wrote `load_demonstrations` reads the rest as it is; ``disk`` as there. Raises
    `DatasetError` where no demonstration of these tasks is found, or what is found is none
    (`vla_rl.data.checks`).
    """
    path, instructions, failures = Path(path), wanted.instructions, wanted.failures
    texts = {" ".join(text.lower().split()) for text in instructions}
    files = form.files(path)
    if files:
        chosen = [
            file for file in files if " ".join(form.instruction(file).lower().split()) in texts
        ]
        if not chosen:
            raise DatasetError(
                f"{path} has demonstrations of {sorted(form.instruction(f) for f in files)[:3]} … "
                f"({len(files)} files), none of the tasks asked for: {sorted(instructions)[:3]} …. "
                "Name the folder of the same suite, or other tasks."
            )
        check = DataCheck(str(path), "demonstrations", embodiment)
        for file in chosen:
            check_contents(check, file, form.contents, wanted.episodes_per_task, failures)
        check.report().require()
        episodes = (
            e
            for file in chosen
            for e in itertools.islice(
                (e for e in form.episodes(file, embodiment) if failures or not _failed(e)),
                wanted.episodes_per_task or None,
            )
        )
        return dataset_of_episodes(
            episodes
            if wanted.keep_noops
            else map(functools.partial(_without_noops, form), episodes),
            embodiment,
            chunk_length,
            path,
        )
    if read_embodiment(path) is not None:
        own = None if failures else successes
        return load_demonstrations(
            path, embodiment, chunk_length, choose=own, texts=instructions, disk=disk
        )

    features = form.features(read_info(path)["features"], embodiment)
    moving = None if wanted.keep_noops else form.moving_steps
    choose = functools.partial(_of_tasks, path, texts, wanted.episodes_per_task, moving, failures)
    return load_demonstrations(
        path, embodiment, chunk_length, features=features, choose=choose, disk=disk
    )


def _of_tasks(
    path: Path,
    wanted: Collection[str],
    limit: int,
    moving: Callable[[np.ndarray], np.ndarray] | None,
    failures: bool,
    episodes: Sequence[DemonstrationEpisode],
    actions: Tensor,
) -> list[Tensor | None]:
    """The first ``limit`` episodes of each instruction that is ``wanted``, as a reader of
    datasets chooses."""
    counts: Counter[str] = Counter()
    keep: list[Tensor | None] = []
    for e in episodes:
        text = " ".join(e.instruction.lower().split())
        if text not in wanted or (e.success is False and not failures) or counts[text] == limit:
            keep.append(None)
            continue
        counts[text] += 1
        whole = torch.ones(e.length, dtype=torch.bool)
        steps = actions[e.start : e.start + e.length].numpy()
        keep.append(whole if moving is None else torch.from_numpy(moving(steps)))
    if not counts:
        texts = sorted({e.instruction for e in episodes})
        raise DatasetError(
            f"{path} has demonstrations of {texts[:3]} … ({len(texts)} tasks), none of the tasks "
            f"asked for (failures are left out): {sorted(wanted)[:3]} …. Name the dataset of the "
            "same suite, or other tasks."
        )
    return keep


def check_contents(
    check: DataCheck,
    file: Path,
    contents: Callable[[Path], Iterator[dict[str, Any]]],
    limit: int = 0,
    failures: bool = True,
) -> None:
    """Look at the first ``limit`` (0: all) demonstrations of a file, as ``contents`` of a form
    tells them; rows are counted as the file has them. Those that failed are passed over unless
    ``failures``."""
    try:
        require_content(file)
        told = (found for found in contents(file) if failures or not _failed(found))
        for found in itertools.islice(told, limit or None):
            vectors = {STATE_KEY: found["proprio"], ACTION_KEY: found["actions"]}
            check.add(
                Rows(found["name"], str(file), vectors, found["instruction"], found["success"])
            )
            for name, (kind, count) in found["pictures"].items():
                if kind != "uint8" or count != len(found["actions"]):
                    check.note(
                        ERROR,
                        "picture",
                        f"it holds {count} pictures of {kind} for {len(found['actions'])} actions",
                        "Colours of 8 bits, one for each action, are needed: leave the camera out, "
                        "or the episode",
                        file=str(file),
                        episode=found["name"],
                        key=name,
                    )
    except MissingPackage:
        raise
    except (UserError, *MANGLED) as error:
        check.note(
            ERROR,
            "unreadable",
            first_line(error),
            "Fetch the file again, or leave it out",
            file=str(file),
        )


def _failed(episode: Mapping[str, Any]) -> bool:
    try:
        return as_success(episode["success"]) is False
    except ValueError:  # which the check of its contents reports
        return False


def _without_noops(form: Any, episode: Mapping[str, Any]) -> Mapping[str, Any]:
    if np.ndim(episode["actions"]) != 2:  # (as well)
        return episode
    keep = form.moving_steps(episode["actions"])
    images = {name: frames[keep] for name, frames in episode["images"].items()}
    return {
        **episode,
        "images": images,
        "proprio": episode["proprio"][keep],
        "actions": episode["actions"][keep],
    }
