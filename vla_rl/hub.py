"""Names of a hub, ``user/name[@revision]``, where a folder of a checkpoint or dataset is asked for.

What was fetched lies in the cache of ``huggingface_hub`` and is read from there; nothing is fetched
by itself. A folder of that name goes first.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vla_rl.errors import MissingPackage, UserError, first_line

MODEL, DATASET = "model", "dataset"
_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?/?")


def hub_name(text: str) -> tuple[str, str | None] | None:
    """(``user/name``, its revision if one is named); None for what is no name, or is a folder
    here."""
    found = _NAME.fullmatch(text)
    if found is None or os.path.lexists(text) or Path(text).parent.is_dir():
        return None
    return found["name"], found["revision"]


def located(text: str, kind: str = MODEL) -> str:
    """The folder in the cache of what is named as a hub does; ``text`` itself where it is no such
    name, or was not fetched.

    Raises `UserError` for what was fetched in part.
    """
    named = hub_name(text)
    if named is None:
        return text
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError:  # (a bare wheel; then nothing was fetched either)
        return text
    name, revision = named
    try:
        folder = snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return text
    _require_whole(Path(folder), text, kind)
    return folder


def _require_whole(folder: Path, text: str, kind: str) -> None:
    missing = [p for p in sorted(folder.rglob("*")) if p.is_symlink() and not p.exists()]
    parts = sorted((folder.parent.parent / "blobs").glob("*.incomplete"))
    if missing or parts:
        what = f"{missing[0].relative_to(folder)} is missing" if missing else "a file is incomplete"
        raise UserError(
            f"{text} was fetched in part ({what} in {folder}): go on with '{_command(text, kind)}'"
        )


def is_cached(folder: Path) -> bool:
    """Whether it lies in such a cache, where nothing else belongs."""
    return folder.parent.name == "snapshots" and (folder.parent.parent / "refs").is_dir()


def cached_name(folder: Path) -> str:
    """The name by which a hub has what lies in a folder of its cache; "" for another folder."""
    return "/".join(folder.parent.parent.name.split("--")[1:]) if is_cached(folder) else ""


def _command(text: str, kind: str) -> str:
    return f"vla-rl hub fetch {text}{' --dataset' if kind == DATASET else ''}"


def fetch_hint(path: str, kind: str = MODEL) -> str:
    """How to get what is named as a hub does, by an id or an address; "" for an ordinary path."""
    text = re.sub(r"^(\w+://[^/]*)?/*(datasets/)?", "", path) if "://" in path else path
    text = re.sub(r"/tree/.*", "", text)
    if hub_name(text) is None:
        return ""
    text = text.rstrip("/")
    return f". To get it from the hub: '{_command(text, kind)}'; then {text} names it"


def fetch(text: str, kind: str) -> Path:
    """Fetch it into the cache; what is there already is not fetched again. Raises `UserError` where
    the hub is not reached, or does not have it."""
    named = hub_name(text)
    if named is None:
        raise UserError(f"{text} is no name of a hub: give user/name, or user/name@revision")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingPackage("huggingface_hub", "openvla", "Fetching from the hub") from error
    try:
        return Path(snapshot_download(named[0], repo_type=kind, revision=named[1]))
    except Exception as error:  # of the library, or of the one beneath it that speaks HTTP
        raise UserError(f"{text} could not be fetched: {why(error)}") from error


def why(error: BaseException) -> str:
    """What a call to the hub failed of, and what helps."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    said = f"{type(error).__name__}: {first_line(error)}"
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError"}:
        return (
            f"the hub does not have it, or not for you ({said}). Look for a mistake, or log in "
            "with 'hf auth login'"
        )
    if kinds & {"LocalTokenNotFoundError"} or "401" in said or "403" in said:
        return f"you are not logged in, or may not ({said}). Log in with 'hf auth login'"
    if kinds & {"HTTPError", "RequestException", "OSError", "LocalEntryNotFoundError"}:
        return f"the hub was not reached ({said}). Is there a network, and is HF_ENDPOINT right?"
    return said
