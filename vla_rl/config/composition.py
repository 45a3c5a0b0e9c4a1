"""A run's config, composed by Hydra from the YAML files here, a user's own files and overrides."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

from vla_rl.config.by_hydra import composed
from vla_rl.config.overrides import EXAMPLE, require_key_value, spoken
from vla_rl.config.own_files import own_configs
from vla_rl.config.tree import RunConfig, from_tree, with_policy_changes, written_out
from vla_rl.errors import ConfigError
from vla_rl.paths import config_dir


def compose(
    overrides: Sequence[str] = (), directory: Path | None = None, folders: Sequence[Path] = ()
) -> RunConfig:
    """Compose ``configs/config.yaml`` with Hydra overrides (``run=quickstart seed=1
    algorithm.learning_rate=3e-4``).

    ``run=./mine.yaml`` names a file of one's own; ``folders`` hold groups besides those here, as
    ``--config-dir`` names them (`vla_rl.config.own_files`). Raises `ConfigError` naming the key,
    the value and what would fit.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    directory = (directory or config_dir()).resolve()
    own, words = own_configs(overrides, directory, folders)
    groups = {d.name for d in directory.iterdir() if d.is_dir()} | {"hydra.searchpath"}
    try:
        with own.known():
            tree = composed(
                _forced(words, groups), (directory, *own.folders), groups, keep=not own.stored
            )
        config = from_tree(cast(dict[str, Any], tree))
    except (
        HydraException,
        OmegaConfBaseException,
        YAMLError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        raise ConfigError(own.located(_explain(error, (directory, *own.folders)))) from error
    except ConfigError as error:
        raise ConfigError(own.located(str(error))) from error
    return with_policy_changes(config, overrides) if config.given else config


def with_run(overrides: Sequence[str], otherwise: Sequence[str]) -> list[str]:
    """``overrides``, after ``otherwise`` where they choose no ``run`` themselves."""
    named = any(o.partition("=")[0].lstrip("~+") == "run" for o in overrides)
    return [*(() if named else otherwise), *overrides]


def _forced(overrides: Sequence[str], groups: Collection[str]) -> list[str]:
    """Let value overrides set keys that no YAML lists: the schemas know the keys and refuse the
    others with a hint."""
    require_key_value(overrides)
    texts = [f.name for f in dataclasses.fields(RunConfig) if f.type == "str"]
    words = [spoken(word, texts) for word in written_out(overrides)]
    return [o if o[:1] in "+~" or o.partition("=")[0] in groups else f"++{o}" for o in words]


def _explain(error: Exception, folders: Sequence[Path]) -> str:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, RecursionError):
        return (
            "the defaults of the config files lead in a circle: let none of them name one that "
            "names it"
        )
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return (
            f"a file in {' or '.join(map(str, folders[1:]))} cannot be read: "
            f"{' '.join(text.split())}"
        )
    groups = {
        d.name: sorted(p.stem for f in folders for p in (f / d.name).glob("*.yaml"))
        for d in sorted(folders[0].iterdir())
        if d.is_dir()
    }
    missing = re.search(r"[Cc]ould not (?:find|load) '(\w+)/([^']+)'", first)
    if missing and missing[1] in groups:
        group, name = missing.groups()
        close = difflib.get_close_matches(name, groups[group], n=1)
        hint = f" Did you mean {group}={close[0]}?" if close else ""
        return f"{group}={name} does not exist.{hint} Available: {', '.join(groups[group])}"
    if "Could not find" in text or "In 'config'" in text:
        listing = "; ".join(f"{g}: {', '.join(v)}" for g, v in groups.items() if v)
        return f"{first}. Available: {listing}"
    return f"{first}. {EXAMPLE}"
