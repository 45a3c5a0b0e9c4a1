"""Turns "package.module:name" of a config into what it names, at run time.

`real` imports no simulator and no vendor's driver: what a session uses is named, and imported in
the process that uses it.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from vla_rl.errors import ConfigError

# short names of what this repository brings
WORLDS = {
    "fake": "real.robots.world:PointWorld",
    "tabletop": "sim.tabletop.arm:TabletopArm",
    "so101": "sim.so101.table:SO101Table",
}
WORLD_CONFIGS = {
    "fake": "real.robots.world:PointConfig",
    "tabletop": "sim.tabletop.arm:ArmConfig",
    "so101": "sim.so101.table:TableConfig",
}


def named(path: str) -> Any:
    """Import "module:attribute". Raises `ConfigError` that names it."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{path!r} is no 'package.module:name'")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{path!r} cannot be imported: there is no module {error.name!r}"
            ) from None
        raise
    except AttributeError:
        raise ConfigError(f"{path!r} cannot be imported: {module} has no {name!r}") from None


def keeps_starts_apart(name: str) -> bool:
    """Whether a simulated robot of ours has starts of its own for being judged: its options say of
    which ``split`` they are."""
    config = WORLD_CONFIGS.get(name)
    return config is not None and "split" in {f.name for f in dataclasses.fields(named(config))}


def make_world(name: str, options: dict[str, Any]) -> Any:
    """A `World` by a short name of `WORLDS` or a "module:Class" (which then takes the options as
    keywords)."""
    if name in WORLDS:
        try:
            config = named(WORLD_CONFIGS[name])(**options)
        except TypeError as error:
            raise ConfigError(
                f"the options of the simulated robot {name!r} are wrong: {error}"
            ) from None
        return named(WORLDS[name])(config)
    if ":" not in name:
        raise ConfigError(
            f"there is no simulated robot {name!r}: use one of {', '.join(WORLDS)}, "
            "or package.module:Class"
        )
    return named(name)(**options)
