"""Config files of a user's own, for `vla_rl.config.compose`: ``run=./mine.yaml``, and folders
(``--config-dir``).

Both are Hydra's own ways: a folder joins its search path, and a file is stored in its `ConfigStore`
while it composes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from vla_rl.errors import ConfigError

COMPONENTS = ("policy", "env", "reward", "algorithm", "critic", "actor", "collector", "cluster")
_SUFFIXES = (".yaml", ".yml")
_SEARCHED: ContextVar[tuple[Path, ...]] = ContextVar("config folders of this command", default=())


@contextlib.contextmanager
def searching(folders: Sequence[Path]) -> Iterator[None]:
    """Config folders that every `vla_rl.config.compose` in the block searches: what
    ``--config-dir`` sets."""
    token = _SEARCHED.set(tuple(folders))
    try:
        yield
    finally:
        _SEARCHED.reset(token)


@dataclass(frozen=True)
class _OwnFile:
    """A file as a user wrote it, and the line of each key and choice (``rl.iterations``: 4,
    ``env=toy``: 1)."""

    path: Path
    tree: dict[str, Any]
    lines: Mapping[str, int]

    def located(self, text: str, overridden: Collection[str]) -> str:
        """``text`` after the file and line of the key that it speaks of, where this file set
        that."""
        said = text.partition(" Did you mean")[0]
        words = [
            word
            for pair in re.findall(r"(([A-Za-z_][\w.]*)(?:=\w+|'| is | has | ?= ?| ?\[))", said)
            for word in pair
        ]
        line = next(
            (self.lines[word] for word in words if word in self.lines and word not in overridden),
            None,
        )
        return text if line is None else f"{self.path}, line {line}: {text}"


@dataclass
class _OwnConfigs:
    """What an `vla_rl.config.compose` reads besides this project's own files. ``stored``: by the
    name that Hydra knows."""

    folders: tuple[Path, ...] = ()
    stored: dict[str, _OwnFile] = field(default_factory=dict)
    overridden: Collection[str] = ()  # keys of the overrides

    def located(self, text: str) -> str:
        """A message of Hydra's or of a schema's, with the user's files by their own names."""
        for name, file in self.stored.items():
            text = text.replace(f"run/{name}", str(file.path))
        found = (file.located(text, self.overridden) for file in self.stored.values())
        return next((new for new in found if new != text), text)

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Hydra finds the stored files in the block."""
        from hydra.core.config_store import ConfigStore

        store = ConfigStore.instance()
        for name, file in self.stored.items():
            store.store(group="run", name=name, node=file.tree, package="_global_")
        try:
            yield
        finally:
            for name in self.stored:
                del store.repo["run"][f"{name}.yaml"]


def own_configs(
    overrides: Sequence[str], directory: Path, folders: Sequence[Path] = ()
) -> tuple[_OwnConfigs, list[str]]:
    """What the overrides and config folders bring along, and the overrides as Hydra then takes
    them.

    Raises `ConfigError` for a folder that holds no configs, and for a file that is none.
    """
    own, words = _OwnConfigs((*searched(), *folders)), list(overrides)
    own.overridden = {word.lstrip("+~").partition("=")[0] for word in words}
    groups = sorted(d.name for d in directory.iterdir() if d.is_dir())
    for folder in own.folders:
        _check_folder(folder, directory, groups)
    for i, word in enumerate(words):
        key, _, value = word.partition("=")
        path = _named(key.lstrip("+"), value.strip("'\""), own.folders)
        if path is not None:
            name = f"own_{len(own.stored)}"
            own.stored[name] = _read(path, groups)
            _refuse_choices(own.stored[name], words)
            words[i] = f"{key}={name}"
    return own, [*words, *_searchpath(own.folders)]


def _searchpath(folders: Sequence[Path]) -> list[str]:
    from hydra.core.override_parser.types import Quote, QuotedString

    places = [
        QuotedString(f"file://{folder.resolve()}", Quote.double).with_quotes() for folder in folders
    ]
    return [f"hydra.searchpath=[{','.join(places)}]"] if places else []


def _refuse_choices(file: _OwnFile, overrides: Sequence[str]) -> None:
    for word in overrides:
        if _is_record(file.tree) and word.lstrip("+").partition("=")[0] in COMPONENTS:
            raise ConfigError(
                f"{file.path} is the record of a whole run, so that {word} would change nothing: "
                "set single values (algorithm.learning_rate=1e-4), or write a file that says only "
                "what is to differ"
            )


def searched() -> tuple[Path, ...]:
    """The folders of `searching`."""
    return _SEARCHED.get()


def _named(group: str, value: str, folders: Sequence[Path]) -> Path | None:
    """The file that ``run=VALUE`` names: a path, or a name in one of the folders."""
    if group != "run" or not value:
        return None
    found = next(
        (file for folder in folders if (file := folder / "run" / f"{value}.yaml").is_file()), None
    )
    return (
        Path(value).expanduser()
        if found is None and (value.endswith(_SUFFIXES) or "/" in value)
        else found
    )


def _check_folder(folder: Path, directory: Path, groups: Sequence[str]) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"--config-dir {folder} is no folder: give one that holds run/NAME.yaml, "
            "algorithm/NAME.yaml ..."
        )
    files = [file for group in groups for file in sorted((folder / group).glob("*.yaml"))]
    if not files:
        raise ConfigError(
            f"--config-dir {folder} holds no configs: they stand in folders of it that are called "
            f"{', '.join(groups)}, such as {folder}/run/mine.yaml. A single file is named as "
            f"run={folder}/FILE.yaml"
        )
    for file in files:
        if (ours := directory / file.relative_to(folder)).exists():
            raise ConfigError(f"{file} has the name of a config of vla-rl ({ours}): rename it")


def _read(path: Path, groups: Sequence[str]) -> _OwnFile:
    """A run's file: it sets what it says, as the files in ``configs/run`` do with their header
    and ``override /``."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from vla_rl.files import reason  # (and numpy, which `vla-rl --help` does without)

    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = (
            OmegaConf.to_container(OmegaConf.create(text))
            if isinstance(root, yaml.MappingNode)
            else None
        )
    except OSError as error:
        raise ConfigError(f"run={path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no text in UTF-8 (byte {error.start}): save it as UTF-8"
        ) from error
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{place} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        said = "is empty" if root is None else f"holds a {root.id}, not a mapping"
        raise ConfigError(
            f"{path} {said}: write keys such as 'seed: 1' or 'rl: {{iterations: 10}}'"
        )
    lines = dict(_lines(root))
    values = cast(dict[str, Any], tree)
    if _is_record(values):  # (it lists no defaults: all of them are in it)
        defaults: list[Any] = [
            "_self_",
            *({f"override /{group}": None} for group in values if group in COMPONENTS),
        ]
    else:
        defaults = _defaults(values, path, groups, lines)
    return _OwnFile(path, {"name": path.stem, **values, "defaults": defaults}, lines)


def _is_record(tree: Mapping[str, Any]) -> bool:
    """Whether it is the ``config.yaml`` that a run keeps, which says all."""
    return "phases" in tree and all(
        isinstance(tree.get(g), dict) and "type" in tree[g] for g in COMPONENTS[:5]
    )


def _lines(node: Any, where: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line) of every key of a YAML tree; anchors may make it a circle, so that
    depth has an end."""
    import yaml

    if isinstance(node, yaml.MappingNode) and where.count(".") < 20:
        for key, value in node.value:
            name = f"{where}.{key.value}" if where else str(key.value)
            yield name, key.start_mark.line + 1
            yield from _lines(value, name)
            if name == "defaults" and isinstance(value, yaml.SequenceNode):
                for entry in value.value:
                    for group, choice in (
                        entry.value if isinstance(entry, yaml.MappingNode) else [(None, entry)]
                    ):
                        word = group.value.rpartition("/")[2] if group else "run"
                        yield f"{word}={choice.value}", choice.start_mark.line + 1


def _defaults(
    tree: Mapping[str, Any], path: Path, groups: Sequence[str], lines: Mapping[str, int]
) -> list[Any]:
    """``defaults`` as Hydra wants them in a group: ``env: toy`` chooses (``override /env: toy``),
    ``run: toy`` or ``toy`` is a run that this one starts from. What the file sets itself goes
    before."""
    listed, place = tree.get("defaults") or [], f"{path}, line {lines.get('defaults', 1)}"
    if not isinstance(listed, list):
        raise ConfigError(
            f"{place}: defaults must be a list, such as '- env: toy', and is {listed!r}"
        )
    found: list[Any] = []
    for entry in listed:
        group, name = (
            next(iter(entry.items()))
            if isinstance(entry, dict) and len(entry) == 1
            else ("run", entry)
        )
        if not isinstance(group, str) or not isinstance(name, str):
            raise ConfigError(
                f"{place}: defaults has {entry!r}: write '- GROUP: NAME', such as '- env: toy'"
            )
        if name.endswith(_SUFFIXES):
            raise ConfigError(
                f"{place}: defaults has {name}: put that file into DIR/run and name "
                "it with --config-dir DIR"
            )
        if group == "run":
            found.append(name)
        else:
            found.append({f"override /{group}" if group in groups else group: name})
    chosen = [
        entry
        for entry in found
        if isinstance(entry, dict) and next(iter(entry)).startswith("override ")
    ]
    return [
        *(entry for entry in found if entry not in chosen and entry != "_self_"),
        "_self_",
        *chosen,
    ]
