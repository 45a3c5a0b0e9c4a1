"""A method that comes to a frozen study: one file of a user's own, on the same seeds and starts.

Nothing of the study changes. What is added is a plan of its own, which names the hash of the
study's plan and of the file; a copy of the file beside it is what runs. Only the new method's runs
are made, and it is compared with each of the study's.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vla_rl.errors import ConfigError
from vla_rl.files import read_json, write_whole
from vla_rl.monitoring.machine import git_commit
from vla_rl.monitoring.metrics import write_json
from vla_rl.options import ComponentClass, view
from vla_rl.run.study import FROZEN, START, Method, Plan, digest, plain_name

FOLDER = "added"
# what a class of each kind cannot do without, and the overrides that choose it
KINDS = {
    "algorithm": ("update", "state_dict", "load_state_dict"),
    "reward": ("score",),
    "policy": ("act",),
}
_PLAIN = {"algorithm": ["algorithm=ppo"], "reward": ["reward=success"], "policy": ["policy=nano"]}


def add(
    file: Path,
    frozen: Mapping[str, Any],
    folder: Path,
    overrides: Sequence[str] = (),
    name: str = "",
    tuning: str = "",
) -> dict[str, Any]:
    """The addition of ``file`` to the study in ``folder``, written the first time. Raises
    `ConfigError` for a file without one such class, another addition of the name, and overrides
    that do not compose."""
    name = plain_name(name or file.stem, str(file))
    if name in (START, FOLDER, *frozen["plan"]["methods"]):
        raise ConfigError(f"{file}: the study has a {name!r} already: give --name another")
    try:
        code = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): name a Python file") from None
    content = {
        "of": frozen["sha256"],
        "method": name,
        "file": file.name,
        "file_sha256": hashlib.sha256(code.encode()).hexdigest(),
        "extra": list(overrides),
        "tuning": tuning,
    }
    place = folder / FOLDER / name
    if (place / FROZEN).exists():
        kept = read_json(place / FROZEN, "give --name another")
        if kept["sha256"] != digest(content):
            raise ConfigError(
                f"{place} holds another addition of this name (another file, study, overrides or "
                "tuning): what was added does not change; give this one another with --name"
            )
        return kept
    kind, target = component(file)
    chosen = [*_PLAIN[kind], f"{kind}.type={target}", *overrides]
    with importable(file):
        Plan(**(frozen["plan"] | {"methods": frozen["plan"]["methods"] | {name: chosen}})).check(
            str(file)
        )
    added = content | {
        "sha256": digest(content),
        "commit": git_commit(),
        "kind": kind,
        "class": target,
        "overrides": chosen,
    }
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / file.name, code)
    write_json(place / FROZEN, added)
    return added


def all_of(frozen: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What was added to the study so far, in the order of names."""
    found = [read_json(path, "remove it") for path in sorted(folder.glob(f"{FOLDER}/*/{FROZEN}"))]
    return [added for added in found if added["of"] == frozen["sha256"]]


def copy_of(added: Mapping[str, Any], folder: Path) -> Path:
    """Its file as it was added."""
    return folder / FOLDER / added["method"] / added["file"]


def method_of(added: Mapping[str, Any], folder: Path) -> Method:
    """Its column of the study, with the copy of its file. A policy imitates for itself."""
    own_start = added["kind"] == "policy"
    return Method(added["method"], added["overrides"], copy_of(added, folder).parent, own_start)


def component(file: Path) -> tuple[str, str]:
    """(algorithm, reward or policy, ``module:Class``) of the one class in ``file`` that is one.
    Raises `ConfigError` where there is none, or more."""
    if not file.stem.isidentifier() or file.suffix != ".py":
        raise ConfigError(f"{file}: name a Python file whose name is a module's, as my_reward.py")
    with importable(file) as module:
        classes = [
            (kind, own.__name__)
            for _, own in inspect.getmembers(module, inspect.isclass)
            if own.__module__ == module.__name__ and view(own, ComponentClass).Config is not None
            for kind, needed in KINDS.items()
            if all(part in dir(own) for part in needed)
        ]
    if len(classes) != 1:
        told = ", ".join(f"{name} ({kind})" for kind, name in classes) or "none"
        raise ConfigError(
            f"{file}: one class is to be an algorithm, a reward or a policy, with its dataclass as "
            f"the attribute Config (docs/how_to/adding_your_own.md), and there are: {told}"
        )
    ((kind, name),) = classes
    return kind, f"{file.stem}:{name}"


@contextlib.contextmanager
def importable(file: Path) -> Iterator[ModuleType]:
    """The module of ``file``, which others find by its name within the block, and not after it.
    Raises `ConfigError` for a name that is another module's, and for one that does not import."""
    name, folder = file.stem, str(file.parent.absolute())
    found = importlib.util.find_spec(name)
    if name in sys.stdlib_module_names or (found and _differ(found.origin, file)):
        raise ConfigError(f"{file}: there is another module called {name}: rename the file")
    before = sys.modules.pop(name, None)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        try:
            module = importlib.import_module(name)
        except (SyntaxError, ImportError) as error:
            raise ConfigError(f"{file} cannot be imported: {error}") from error
        yield module
    finally:
        sys.path.remove(folder)
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


def _differ(origin: str | None, file: Path) -> bool:
    other = Path(origin or "")
    return not other.is_file() or other.read_bytes() != file.read_bytes()
