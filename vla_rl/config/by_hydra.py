"""Hydra's part of `vla_rl.config.compose`. What it makes of a choice of files is kept while the
files stay as they are: that takes a tenth of a second, and a comparison, a study and the tests
compose a choice with other values again and again."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

# Hydra's tree by the words that choose files, interpolations unresolved
_KEPT: dict[tuple[str, ...], Any] = {}
_FILES: list[Any] = [None]  # what `_KEPT` was made of


def composed(
    words: Sequence[str], folders: Sequence[Path], groups: Collection[str], keep: bool = True
) -> Any:
    """The tree with its interpolations resolved. ``words`` are Hydra's: ``group=choice``,
    ``++key=value`` and others.

    ``folders``: the one with ``config.yaml``, then those that the words search. ``keep=False``
    where more than their files takes part. Raises what Hydra raises.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    choices = tuple(word for word in words if _chooses(word, groups))
    values = (
        _values([word for word in words if not _chooses(word, groups)], groups) if keep else None
    )
    if values is not None:
        files = [
            (f, s.st_mtime_ns, s.st_size)
            for d in folders
            for f in d.rglob("*.yaml")
            for s in [f.stat()]
        ]
        if files != _FILES[0]:
            _KEPT.clear()
            _FILES[0] = files
        if choices not in _KEPT:
            _KEPT[choices] = _by_hydra(choices, folders[0])
        tree = copy.deepcopy(_KEPT[choices])
        try:
            for key, value in values:
                OmegaConf.update(tree, key, value, merge=True, force_add=True)
        except OmegaConfBaseException:
            tree = _by_hydra(words, folders[0])  # which says it in its words
    else:
        tree = _by_hydra(words, folders[0])
    return OmegaConf.to_container(tree, resolve=True)


def _by_hydra(words: Sequence[str], directory: Path) -> Any:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(directory), version_base="1.3"):
            return hydra.compose("config", list(words))
    finally:
        GlobalHydra.instance().clear()


def _chooses(word: str, groups: Collection[str]) -> bool:
    """Whether the word says which files are read: ``env=toy``, ``~run``."""
    key, equals, value = word.partition("=")
    plain = bool(re.fullmatch(r"[\w.-]+", value)) if equals else key.startswith("~")
    return key == "hydra.searchpath" or (plain and key.removeprefix("~") in groups)


def _values(words: Sequence[str], groups: Collection[str]) -> list[tuple[str, Any]] | None:
    """(key, value) of every ``++key=value``; None where a word is another, whose order among
    them may matter."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    keys = [word.partition("=")[0] for word in words]
    if not all(
        re.fullmatch(r"\+\+[^@/:~+]+", key) and key[2:] not in groups and key[2:7] != "hydra"
        for key in keys
    ):
        return None
    parsed = OverridesParser.create().parse_overrides(list(words))
    return (
        None
        if any(one.is_sweep_override() for one in parsed)
        else [(one.key_or_group, one.value()) for one in parsed]
    )
