"""Demonstrations in the form that a benchmark published them in."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_rl.data.demonstrations import DemonstrationDataset, dataset_of_episodes
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.data.lerobot_reader import load_demonstrations, read_embodiment, read_info
from vla_rl.types import EmbodimentSpec


def load_published(
    form: Any,
    path: str | Path,
    embodiment: EmbodimentSpec,
    chunk_length: int,
    *,
    instructions: Sequence[str],
    episodes_per_task: int,
    keep_noops: bool = False,
) -> DemonstrationDataset:
    """Demonstrations that a benchmark published, in a form that ``form`` knows (``build.py``, group "demonstrations").

    Only tasks with one of ``instructions`` are read, at most ``episodes_per_task`` demonstrations each (in the files'
    order). Control steps that do nothing are dropped unless ``keep_noops``. A folder that this project wrote is read by
    `load_demonstrations` as it is. Raises `DatasetError` where no demonstration of these tasks is found.
    """
    path = Path(path)
    wanted = {" ".join(text.lower().split()) for text in instructions}
    files = form.files(path)
    if files:
        chosen = [file for file in files if " ".join(form.instruction(file).lower().split()) in wanted]
        if not chosen:
            raise DatasetError(
                f"{path} has demonstrations of {sorted(form.instruction(f) for f in files)[:3]} … ({len(files)} files), "
                f"none of the tasks asked for: {sorted(instructions)[:3]} …. Name the folder of the same suite, or other "
                f"tasks."
            )
        episodes = (e for file in chosen for e in form.episodes(file, embodiment, episodes_per_task))
        return dataset_of_episodes(
            episodes if keep_noops else map(functools.partial(_without_noops, form), episodes), embodiment, chunk_length
        )
    if read_embodiment(path) is not None:
        return load_demonstrations(path, embodiment, chunk_length)
    dataset = load_demonstrations(
        path, embodiment, chunk_length, features=form.features(read_info(path)["features"], embodiment)
    )
    counts: Counter[str] = Counter()
    keep: list[Tensor | None] = []
    for e in dataset.episodes:
        text = " ".join(e.instruction.lower().split())
        counts[text] += text in wanted
        if text not in wanted or counts[text] > episodes_per_task:
            keep.append(None)
            continue
        actions = dataset.actions[e.start : e.start + e.length].numpy()
        keep.append(torch.ones(e.length, dtype=torch.bool) if keep_noops else torch.from_numpy(form.moving_steps(actions)))
    if not any(counts.values()):
        raise DatasetError(
            f"{path} has demonstrations of {sorted(dataset.instructions)[:3]} … ({len(dataset.instructions)} tasks), none "
            f"of the tasks asked for: {sorted(instructions)[:3]} …. Name the dataset of the same suite, or other tasks."
        )
    return dataset.subset(keep)


def _without_noops(form: Any, episode: Mapping[str, Any]) -> dict[str, Any]:
    keep = form.moving_steps(episode["actions"])
    images = {name: frames[keep] for name, frames in episode["images"].items()}
    return {**episode, "images": images, "proprio": episode["proprio"][keep], "actions": episode["actions"][keep]}
