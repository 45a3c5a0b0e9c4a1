"""Reaching the LIBERO package: its files, its config file and its assets, without prompts (standard
library only).

The package asks on standard input where its data sets are unless ``~/.libero/config.yaml`` (or the
folder that ``LIBERO_CONFIG_PATH`` names) exists when it is imported; `load` writes that file first.
Assets come separately: in packages of their own (`sim.libero.assets`), by the LIBERO package's
download, or as a copy that is named.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from sim.libero import assets as copies
from vla_rl.errors import MissingDependency, MissingPackage, UserError

ASSET_FOLDERS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "textures",
    "turbosquid_objects",
)
_LOADED: dict[str, Path | None] = {}  # the folder that this process imported LIBERO from
_DEFAULT_ASSETS = Path("~/.cache/libero/assets")  # where the package puts what it downloads
_REMEDY = (
    f"Install LIBERO's own from packages ({copies.COMMAND}), name an existing copy with "
    "env.assets=FOLDER, or let LIBERO's package download it: run once with network access and "
    "HF_HUB_OFFLINE=0 in the environment"
)


def root() -> Path:
    """The folder of the installed ``libero.libero`` package, found without importing it.
    `MissingPackage` without it."""
    try:
        spec = importlib.util.find_spec("libero")
    except (ImportError, ValueError):
        spec = None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "libero" / "bddl_files").is_dir():
            return Path(place) / "libero"
    raise MissingPackage("hf-libero", "libero", "The LIBERO suites")


def config_file() -> Path:
    """Where the package reads its paths from."""
    return (
        Path(os.environ.get("LIBERO_CONFIG_PATH") or Path("~/.libero").expanduser()) / "config.yaml"
    )


def ensure_config() -> Path:
    """Let the package find a config file whose folders exist, written where there is none. Returns
    its path.

    A user's own file is never touched. Where it names folders that are gone (an environment that
    was deleted, say), one under ``~/.cache/vla_rl`` serves this process and its children instead,
    through ``LIBERO_CONFIG_PATH``. Safe with several processes at once: the file appears complete
    or not at all. Raises `UserError` where it cannot be written.
    """
    path = config_file()
    if path.exists() and not all(
        folder.is_dir() for folder in (_configured("bddl_files"), _configured("init_states"))
    ):
        installation = hashlib.sha256(str(root()).encode()).hexdigest()[:16]
        path = Path("~/.cache/vla_rl/libero").expanduser() / installation / "config.yaml"
        os.environ["LIBERO_CONFIG_PATH"] = str(path.parent)
    if not path.exists():
        _write_config(path)
    imported: Any = sys.modules.get("libero.libero")
    if imported is not None:
        imported.config_file = str(path)  # it looked only when it was imported
    return path


def _write_config(path: Path) -> None:
    package = root()
    folders = {
        "benchmark_root": package,
        "bddl_files": package / "bddl_files",
        "init_states": package / "init_files",
        "datasets": package.parent / "datasets",
        "assets": package / "assets",
    }
    text = "".join(f'{name}: "{folder}"\n' for name, folder in folders.items())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".config.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.link(temporary, path)  # fails where another process was first: its file stays
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise UserError(
            f"The LIBERO package needs its config file {path}, which cannot be written "
            f"({error.strerror or error}). Set LIBERO_CONFIG_PATH to a folder you can write to."
        ) from error


def find_assets(folder: str = "") -> Path:
    """The asset folder: ``folder`` where given, else the first of `_asset_places` that exists.

    Downloads them the package's way where there are none. Raises `MissingDependency`, with the
    remedy, where that is impossible (no network, or ``HF_HUB_OFFLINE`` is set) or the folder is not
    complete.
    """
    if folder:
        return _complete(Path(folder).expanduser(), f"env.assets={folder}")
    place = present()
    if place is None:
        return _download(_DEFAULT_ASSETS.expanduser())
    if place == copies.packaged():
        copies.require_whole(place)
    return _complete(place, "the LIBERO assets")


def present() -> Path | None:
    """The first place that exists of those where assets may lie without being named."""
    return next((place for place in _asset_places() if place.exists()), None)


def _complete(place: Path, what: str) -> Path:
    if not place.is_dir():
        raise MissingDependency(f"{what}: there is no folder {place}. {_REMEDY}.")
    missing = [name for name in ASSET_FOLDERS if not (place / name).is_dir()]
    if missing:
        raise MissingDependency(
            f"{what}: {place} is not complete, it lacks {', '.join(missing)}. Delete the folder "
            f"and get it again. {_REMEDY}."
        )
    return place.resolve()


def _download(place: Path) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
        raise MissingDependency(
            f"The LIBERO assets are not at {place}, and HF_HUB_OFFLINE forbids downloading them. "
            f"{_REMEDY}."
        )
    ensure_config()
    existed = place.exists()
    try:
        with quiet():
            download = importlib.import_module("libero.libero.utils.download_utils")
            download.download_assets_from_huggingface(str(place))
    except Exception as error:  # the hub client's errors have no common base
        if not existed and place.is_dir() and not any(place.iterdir()):
            place.rmdir()  # an empty folder would look like a copy that is not complete
        raise MissingDependency(
            f"The LIBERO assets could not be downloaded to {place} ({error}). {_REMEDY}."
        ) from error
    return _complete(place, "the LIBERO assets")


def load(assets: str = "", folder: Path | None = None) -> ModuleType:
    """Import ``libero.libero.envs`` with its assets at ``assets`` (see `find_assets`); returns the
    module. ``folder``: holds another ``libero`` package than the one that is installed
    (`sim.libero.pro`).

    Call `sim.gl.ensure_backend` first: the import fixes the GL backend. Raises `MissingPackage`
    where LIBERO or robosuite is not installed, `UserError` where this process holds the other one.
    """
    if folder is None:
        ensure_config()
    place = find_assets(assets or (str(copies.packaged() or "") if folder else ""))
    try:
        with quiet(), _first_on_path(folder):
            package: Any = importlib.import_module("libero.libero")
            _check_loaded(Path(package.__file__).parents[2], folder)
            package._assets_path_cache = str(place)  # LIBERO's; LIBERO-PRO's asks for its paths
            if folder is not None:
                package.get_libero_path = {"assets": str(place)}.__getitem__
            return importlib.import_module("libero.libero.envs")
    except ImportError as error:
        raise MissingPackage(error.name or "hf-libero", "libero", "The LIBERO suites") from error


@contextmanager
def _first_on_path(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _check_loaded(loaded: Path, wanted: Path | None) -> None:
    """Raise `UserError` where one process is to simulate LIBERO and LIBERO-PRO."""
    first = _LOADED.setdefault("first", wanted)
    if first != wanted or (wanted is not None and loaded.resolve() != wanted.resolve()):
        raise UserError(
            f"This process has loaded the LIBERO package of {loaded}, and LIBERO-PRO's has the "
            "same name: simulate one of them per process (slots.workers=1 or more gives an env "
            "processes of its own)."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No deprecation warnings and no log lines of the packages that are imported within."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # robosuite warns about a private macro file that nobody needs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _asset_places() -> list[Path]:
    """Where assets may lie: what LIBERO's own config file says, the packages of assets, LIBERO's
    package, and where it downloads them to."""
    packaged = copies.packaged()
    return [
        _configured("assets"),
        *([packaged] if packaged else []),
        root() / "assets",
        _DEFAULT_ASSETS.expanduser(),
    ]


def _configured(key: str) -> Path:
    """The folder that LIBERO's own config file gives for ``key``; one that does not exist where
    it gives none."""
    try:
        lines = config_file().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    values = [line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")]
    return Path(values[-1].strip("'\"")) if values else Path("/nonexistent")
