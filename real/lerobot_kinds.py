"""What is registered with lerobot, found by name and made from plain options: robots, leader
arms, cameras."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
from collections.abc import Iterable, Mapping
from typing import Any

from real.robots.servos import in_step
from vla_rl.errors import ConfigError, MissingDependency, MissingPackage, first_line

_EXTRAS = {"scservo_sdk": "feetech", "dynamixel_sdk": "dynamixel"}  # of lerobot, by what it imports
# whose configs may stand in a robot's
_CAMERAS = ("lerobot.cameras.opencv", "lerobot.cameras.realsense")


def make(
    what: str,
    kind: str,
    options: Mapping[str, Any],
    registry: str,
    maker: str,
    plugins: Iterable[str] = (),
) -> Any:
    """lerobot's object of ``kind``, which ``what`` ("robot") names in errors. ``registry``
    "module:Class" holds the known kinds, ``maker`` "module:function" takes a config. ``plugins``
    are modules that register further ones.

    Raises `ConfigError` for a kind that nobody registered and for options that it does not take,
    `MissingPackage` without lerobot, `MissingDependency` without what a vendor's device needs.
    """
    try:
        choices, made = _named(registry), _named(maker)
        from lerobot.utils.import_utils import register_third_party_plugins
    except ModuleNotFoundError as error:
        raise MissingPackage("lerobot", "lerobot", f"A {what} of lerobot") from error
    for module in plugins:
        importlib.import_module(module)
    _register(_CAMERAS if "cameras" in options or what == "camera" else ())
    if kind not in choices.get_known_choices():
        _register(_below(registry.partition(":")[0].rpartition(".")[0]))
    if kind not in choices.get_known_choices():
        register_third_party_plugins()  # installed packages whose names begin as lerobot wants it
    known = choices.get_known_choices()
    if kind not in known:
        raise ConfigError(
            f"lerobot knows no {what} {kind!r}: it knows {', '.join(sorted(known))}; name a "
            "third-party package in plugins"
        )
    try:
        device = made(_decoded(known[kind], what, kind, options))
    except ImportError as error:
        package, extra = _missing(error)
        way = (
            f"pip install 'lerobot[{extra}]'"
            if extra
            else "see lerobot's page of that device for its extra"
        )
        raise MissingDependency(
            f"lerobot's {what} {kind} needs the package {package}: {way}"
        ) from None
    in_step(device)
    return device


def _missing(error: ImportError) -> tuple[str, str]:
    """The package that is not there and the extra of lerobot that brings it: since 0.6 lerobot
    says both in its words."""
    said = re.search(r"'([\w.-]+)' is required .*?lerobot\[([\w-]+)\]", str(error))
    if said:
        return said[1], said[2]
    return error.name or first_line(error), _EXTRAS.get(error.name or "", "")


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return vars(importlib.import_module(module))[attribute]


def _below(package: str) -> list[str]:
    """The packages of lerobot that register kinds on import."""
    folders = importlib.import_module(package).__path__
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules(folders) if module.ispkg]


def _register(modules: Iterable[str]) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):  # that of a vendor whose SDK is not installed
            importlib.import_module(module)


def _decoded(config: Any, what: str, kind: str, options: Mapping[str, Any]) -> Any:
    """The config, as lerobot's own command line reads it: cameras by their ``type``, folders as
    text."""
    import draccus

    plain = {
        key: str(value) if isinstance(value, os.PathLike) else value
        for key, value in options.items()
    }
    try:
        return draccus.decode(config, plain)
    except Exception as error:  # draccus raises its own kinds, and those of the config's checks
        raise ConfigError(
            f"the options of lerobot's {what} {kind} are wrong: {first_line(error)}"
        ) from None
