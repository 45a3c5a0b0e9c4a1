"""``vla-rl hub push``: a checkpoint's policy and its card on a hub, in one commit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError
from vla_rl.files import (
    CONFIG,
    EMBODIMENT,
    WEIGHTS_INDEX,
    WEIGHTS_STEM,
    check_checkpoint,
    existing_checkpoint,
    is_spread,
    read_json,
    weight_files,
)
from vla_rl.hub import why
from vla_rl.reporting.card import card, measured

CARD = "README.md"
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True)
class _Package:
    """What is pushed: files of the checkpoint, and the card."""

    name: str
    folder: Path
    files: tuple[str, ...]
    card: str


def package(checkpoint: Path, name: str, results: Sequence[Path], licence: str) -> _Package:
    """``results`` are files of ``vla-rl eval --json``; without them, those of the checkpoint's run.
    What training goes on from is left out. Raises `UserError` before anything is sent."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name} is no name of a hub: give user/name")
    if not _LICENCE.fullmatch(licence):
        raise UserError(
            f"--license {licence!r}: give a hub's word for it, such as apache-2.0, mit, gemma or "
            "other"
        )
    robot = check_checkpoint(checkpoint)
    folder = existing_checkpoint(checkpoint)
    if is_spread(folder, WEIGHTS_STEM):
        raise UserError(
            f"{checkpoint} is in the parts of several ranks, which other projects do not read: make "
            f"an ordinary one of it first (vla-rl checkpoint merge {checkpoint} --out FOLDER)"
        )
    config = read_json(folder / CONFIG, "use another checkpoint")
    if base := config.get("frozen_base"):
        where = base.get("path") if isinstance(base, dict) else base
        raise UserError(
            f"{checkpoint} builds on frozen weights elsewhere ({where}), which whoever fetches it "
            "would lack: push that policy by itself, or save this one whole "
            "(policy.save_trained_only=false)"
        )
    texts = [
        p.name for p in folder.iterdir() if p.is_file() and p.suffix in (".json", ".txt", ".model")
    ]
    files = {CONFIG, EMBODIMENT, *weight_files(folder), *texts} - {CARD}
    if (folder / WEIGHTS_INDEX).is_file():
        files.add(WEIGHTS_INDEX)
    found = [m for path in results or _of_run(checkpoint) for m in measured(path)]
    return _Package(name, folder, tuple(sorted(files)), card(config, robot, name, found, licence))


def _of_run(checkpoint: Path) -> list[Path]:
    """What the checkpoint's run measured of it."""
    file = checkpoint.resolve().parent.parent / f"eval_{checkpoint.name}.json"
    return [file] if file.is_file() else []


def push(parcel: _Package, private: bool, api: Any = None) -> str:
    """The address of the commit. ``api``: an ``HfApi``; None: the library's own. Raises `UserError`
    where it fails."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = api or HfApi()
    try:
        api.create_repo(parcel.name, repo_type="model", private=private, exist_ok=True)
        made = api.create_commit(
            parcel.name,
            [
                CommitOperationAdd(CARD, parcel.card.encode()),
                *(CommitOperationAdd(name, str(parcel.folder / name)) for name in parcel.files),
            ],
            commit_message="A policy of vla-rl",
            repo_type="model",
        )
    except Exception as error:  # of the library, or of the one beneath it that speaks HTTP
        raise UserError(f"{parcel.name} was not pushed: {why(error)}") from error
    return str(made.commit_url)
