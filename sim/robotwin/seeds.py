"""Which of RoboTwin's seeds the scripted expert solves: found once, kept with a hash, never shared
by train and held-out.

A seed is worth something only with the code, setting, robot and distance that it was found with
(`Checkout.fingerprint`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.splits import check_split

# RoboTwin collects data with seeds from 0 on and evaluates from 100000 (1 + seed) on;
# SimpleVLA-RL's lists, which RLinf has too, train on those.
SEED_LISTS = {
    "official": {"train": range(100_000), "held_out": range(100_000, 2**31)},
    "simplevla": {"train": range(100_000, 100_100_000), "held_out": range(100_100_000, 2**31)},
}
FORMAT = 1
_TRIES = 50  # seeds tried for each that is wanted


def raw_seed(seed_list: str, split: str, index: int) -> int:
    """The seed of an initial state where no expert was asked. `UserError` for more than the list
    has."""
    seeds = SEED_LISTS[seed_list][check_split(split)]
    if index >= len(seeds):
        raise UserError(
            f"initial state {index} is beyond the {len(seeds)} {split} seeds of "
            f"env.seed_list={seed_list}: the next ones are held out. Use initial states below it"
        )
    return seeds[index]


@dataclass
class SeedFile:
    """``tasks`` {task: {"fingerprint": text, "solved": {split: [seed]}, "failed": {split: {seed:
    why}}}}."""

    path: Path
    tasks: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> SeedFile:
        """Raises `UserError` for a file that is missing or no such file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']}")
            return cls(path, dict(content["tasks"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"env.seeds={path} is no file of 'vla-rl robotwin seeds' ({error}): write one"
            ) from error

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "tasks": self.tasks}, indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")

    def require(self, task: str, fingerprint: str, seed_list: str) -> None:
        """Raise `UserError` where the file does not know the task, or knows it under another
        configuration or seed list."""
        if task not in self.tasks:
            raise UserError(
                f"env.seeds={self.path} has no seeds of {task}: vla-rl robotwin seeds --task {task}"
            )
        if self.tasks[task]["fingerprint"] != fingerprint:
            raise UserError(
                f"env.seeds={self.path}: the seeds of {task} were found with other code, another "
                f"setting, robot or distance ({self.tasks[task]['fingerprint']}, now "
                f"{fingerprint}). Find them again: vla-rl robotwin seeds --task {task}"
            )
        for split, seeds in SEED_LISTS[seed_list].items():
            outside = [
                seed for seed in self.tasks[task]["solved"].get(split, []) if seed not in seeds
            ]
            if outside:
                raise UserError(
                    f"env.seeds={self.path}: {split} seed {outside[0]} of {task} is not of "
                    f"env.seed_list={seed_list}, whose {split} seeds begin at {seeds.start}. Use "
                    "the list that the file was made with, or find other seeds"
                )

    def seed(self, task: str, split: str, index: int) -> int:
        """The solved seed of an initial state; they repeat once all were used."""
        solved = self.tasks[task]["solved"].get(check_split(split), [])
        if not solved:
            raise UserError(
                f"env.seeds={self.path} has no {split} seed of {task} that the expert "
                "solves: find more"
            )
        return int(solved[index % len(solved)])


def candidates(seed_list: str, split: str, wanted: int) -> range:
    """The seeds to try for ``wanted`` that are solved."""
    return SEED_LISTS[seed_list][split][: _TRIES * wanted]


def take(
    name: str, split: str, wanted: int, tried: Iterator[tuple[int, str]]
) -> tuple[list[int], dict[str, str]]:
    """The first ``wanted`` solved seeds of ``tried`` (seed, why not), and why those between were
    not solved.

    Raises `UserError` where all are tried and fewer were solved.
    """
    solved: list[int] = []
    failed: dict[str, str] = {}
    for seed, problem in tried:
        if problem:
            failed[str(seed)] = problem
        else:
            solved.append(seed)
        if len(solved) == wanted:
            return solved, failed
    examples = "; ".join(sorted(set(failed.values()))[:3])
    raise UserError(
        f"{name}: the expert solved {len(solved)} of the first {len(solved) + len(failed)} {split} "
        f"seeds, and {wanted} are wanted ({examples}). Ask for fewer, or check embodiment and "
        "distance"
    )
