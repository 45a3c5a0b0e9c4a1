"""The pages of docs/reference/config: every key, its type, its default, what it means.

What a key means stands beside its field: a comment at the end of its line or above it, else the
sentence of the class's docstring that names it. What it may be are the limits of the field
(`vla_rl.bounds`).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import html
import importlib
import inspect
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from reference_text import cell, page, table

from vla_rl import build
from vla_rl.bounds import Bound, bounds_of
from vla_rl.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
# The options of `vla-rl robot`, which are no part of a run's config: key → class.
ROBOT = {
    "": "vla_rl.config.robot:SessionSettings",
    "robot.supervisor": "real.supervisor.settings:SupervisorConfig",
    "console": "real.console.settings:ConsoleConfig",
    "operator": "vla_rl.config.robot:OperatorSettings",
}
_SHOWN_CHOICES = 8
GROUPS = {  # what each component group chooses
    "policy": "the policy: its network, and how it acts and is trained",
    "env": "the simulator, its tasks and cameras",
    "reward": "what an episode is paid for",
    "algorithm": "how RL learns from episodes",
    "critic": "a critic beside the policy, which sees the simulator's state",
    "actor": "a small actor on top of a frozen policy",
    "collector": "where the episodes of RL come from",
    "cluster": "on which machines they do",
}


class Key(NamedTuple):
    """One row of a table: the key below its table's place, its type, its default, its limits, what
    it means."""

    name: str
    type: str
    default: str
    limits: str
    meaning: str


@functools.cache
def _comments(module: str, name: str) -> dict[str, str]:
    """{field: comment} of a class: what ends the field's own lines, else the comment lines right
    above it."""
    source = inspect.getsource(importlib.import_module(module))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {}
    for t in tokens:
        if t.type == tokenize.COMMENT and not t.string.startswith(("# fmt:", "# type:")):
            found[t.start[0]] = (t.string.lstrip("# "), not t.line[: t.start[1]].strip())
    node = next(
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == name
    )
    result = {}
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        own = [
            found[i][0]
            for i in range(field.lineno, (field.end_lineno or field.lineno) + 1)
            if i in found
        ]
        line, above = field.lineno - 1, []
        while line in found and found[line][1]:
            above.insert(0, found[line][0])
            line -= 1
        result[field.target.id] = " ".join(own or above)
    return result


def _sentences(owner: type) -> list[str]:
    """The sentences of a dataclass's own docstring."""
    text = owner.__doc__ or ""
    if text.startswith(f"{owner.__name__}("):  # made by dataclass
        return []
    parts = (" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))
    return [s for part in parts for s in re.split(r"(?<=\.)\s+(?=[A-Z`(])", part)]


def _owner(cls: type, name: str) -> type:
    return next(c for c in cls.__mro__ if name in inspect.get_annotations(c))


def meaning(cls: type, name: str) -> str:
    """What the field is for; "" where nothing says it."""
    owner = _owner(cls, name)
    if text := _comments(owner.__module__, owner.__name__).get(name):
        return text
    return next(
        (
            s
            for c in cls.__mro__
            if dataclasses.is_dataclass(c)
            for s in _sentences(c)
            if f"``{name}``" in s
        ),
        "",
    )


def _type(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(i) for i in inner)
    if origin is typing.Literal:
        return ", ".join(f"`{i}`" for i in inner)
    if hint is type(None):
        return "null"
    if origin:
        return f"`{origin.__name__}[{', '.join(_bare(i) for i in inner)}]`"
    return "`any`" if hint is Any else f"`{hint.__name__}`"


def _bare(hint: Any) -> str:
    return "..." if hint is ... else _type(hint).replace("`", "")


def shown(value: Any) -> str:
    """A default as YAML says it, shortened."""
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool) or value is None:
        return f"`{str(value).lower() if value is not None else 'null'}`"
    if isinstance(value, list | tuple):
        value = f"[{', '.join(str(v) for v in value)}]"
    text = '""' if value == "" else " ".join(str(value).split())
    text = text if len(text) <= 48 else text[:45] + "..."
    return (
        f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"
    )


def _limits(limits: Bound | None) -> str:
    """What a field may be; of many choices the first ones."""
    if limits is None:
        return ""
    limits = dataclasses.replace(limits, null=False)  # which the type says
    if (more := len(limits.choices) - _SHOWN_CHOICES) > 1:
        first = dataclasses.replace(limits, choices=limits.choices[:_SHOWN_CHOICES])
        return f"{first.words} and {more} more"
    return limits.words


def _default(field: dataclasses.Field[Any]) -> Any:
    return (
        field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else field.default
    )


def _nested(hint: Any) -> type | None:
    """The dataclass that a field holds, or may hold."""
    return next(
        (
            h
            for h in (hint, *typing.get_args(hint))
            if isinstance(h, type) and dataclasses.is_dataclass(h)
        ),
        None,
    )


def keys(
    cls: type, prefix: str = "", instance: Any = None, only: Sequence[str] | None = None
) -> Iterator[Key]:
    """Every key of a dataclass, those of nested ones with their path; ``instance`` has defaults
    of its own."""
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        hint = typing.get_type_hints(_owner(cls, field.name))[field.name]
        value = getattr(instance, field.name) if instance is not None else _default(field)
        if inner := _nested(hint):
            yield from keys(
                inner, f"{prefix}{field.name}.", value if isinstance(value, inner) else None
            )
        else:
            text = meaning(cls, field.name).removeprefix(f"``{field.name}``: ")
            limits = _limits(bounds_of(cls).get(field.name))
            yield Key(prefix + field.name, _type(hint), shown(value), limits, text)


def _key_table(rows: Sequence[Key]) -> list[str]:
    """A sentence that tells of several keys stands beside the first of them."""
    first: dict[str, str] = {}
    told = [
        k.meaning
        if first.setdefault(k.meaning, k.name) == k.name or "``" not in k.meaning
        else f"see ``{first[k.meaning]}``"
        for k in rows
    ]
    cells = [
        (f"`{k.name}`", k.type, k.default, cell(k.limits), cell(text))
        for k, text in zip(rows, told)
    ]
    return table(("key", "type", "default", "may be", "meaning"), cells)


def _introduction(cls: type) -> list[str]:
    """What the docstring says beyond the meanings of single keys."""
    used = {meaning(cls, f.name) for f in dataclasses.fields(cls)}
    text = " ".join(s for s in _sentences(cls) if s not in used)
    return [cell(text), ""] if text else []


def _header(path: Path) -> str:
    """The comment at the head of a YAML file, without Hydra's own line."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            lines.append(line.lstrip("#"))
    text = [line.strip() for line in lines if not line.startswith("   ")]  # deeper: an example
    return " ".join(text)


def _type_of(group: str, path: Path) -> str:
    """The component that a preset chooses, itself or through the preset that it starts from."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    own = tree.get("type") or (tree.get(group) or {}).get("type")
    if own:
        return str(own)
    for base in tree.get("defaults", []):
        base = (
            base
            if isinstance(base, str)
            else next((v for k, v in base.items() if k.split("@")[0].endswith(group)), "")
        )
        if (path.parent / f"{base}.yaml").exists():
            return _type_of(group, path.parent / f"{base}.yaml")
    return "?"


def _presets(group: str) -> list[str]:
    files = sorted((ROOT / "configs" / group).glob("*.yaml"))
    rows = [
        (f"`{group}={f.stem}`", f"`{_type_of(group, f)}`", cell(_sentence(_header(f))))
        for f in files
    ]
    return [
        f"Presets, files of `configs/{group}/`:",
        "",
        *table(("preset", "type", "what it is"), rows),
        "",
    ]


def _sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text)[0].rstrip(":")


def _config_section(classes: dict[type, list[str]], cls: type) -> list[str]:
    """A component's own keys; those of a base that has a section as well are named by it."""
    bases = [b for b in cls.__mro__[1:] if b in classes]
    inherited = {f.name for b in bases for f in dataclasses.fields(b)}
    declared = inspect.get_annotations(cls)
    fields = [f.name for f in dataclasses.fields(cls)]
    rows = list(keys(cls, only=[n for n in fields if n not in inherited or n in declared]))
    lines = [f"## {_named(classes, cls)}", "", *_introduction(cls)]
    if bases:
        links = ", ".join(f"[{_named(classes, b)}](#{_anchor(_named(classes, b))})" for b in bases)
        lines += [f"It has the keys of {links}{', and these' if rows else ''}.", ""]
    return [*lines, *(_key_table(rows) if rows else ["No keys."] if not bases else []), ""]


def _named(classes: dict[type, list[str]], cls: type) -> str:
    return ", ".join(classes[cls]) or f"Shared: {cls.__name__}"


def _anchor(heading: str) -> str:
    """As GitHub and the site's generator make it of a heading in letters."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _group_page(group: str) -> str:
    classes: dict[type, list[str]] = {}
    for name in build.names(group):
        classes.setdefault(build.config_class(group, name), []).append(name)
    bases = [b for cls in classes for b in cls.__mro__[1:] if dataclasses.is_dataclass(b)]
    shared = {b: classes.get(b, []) for b in bases if b in classes or bases.count(b) > 1}
    classes = {**{b: names for b, names in shared.items() if not names}, **classes}
    lines = [
        f"`{group}.type` names one of these, or a class of your own as `package.module:Class`; "
        f"`{group}=PRESET` chooses",
        f"a preset, and `{group}.KEY=VALUE` sets a key that stands below.",
        "",
        *_presets(group),
    ]
    for cls in classes:
        lines += _config_section(classes, cls)
    return page(f"Config: `{group}`", f"the keys and presets of `{group}`, {GROUPS[group]}", lines)


def _run_page() -> str:
    by_part: dict[str, list[Key]] = {"": []}
    for key in keys(RunConfig):
        group = key.name.removesuffix("_type")
        if group in build.REGISTRY:
            continue
        part = key.name.partition(".")[0] if "." in key.name else ""
        by_part.setdefault(part, []).append(key)
    lines: list[str] = []
    hints = typing.get_type_hints(RunConfig)
    for part, rows in by_part.items():
        lines += [
            f"## {part or 'The run'}",
            "",
            *(_introduction(hints[part]) if part else []),
            *_key_table(rows),
            "",
        ]
    return page("Config: the run", "every key that belongs to no component", lines)


def _robot_page() -> str:
    lines = [
        "Keys of `vla-rl robot run`, `teach`, `learn` and `doctor`. `robot=NAME` takes a file of "
        "`configs/robot/`.",
        "",
    ]
    files = sorted((ROOT / "configs" / "robot").glob("*.yaml"))
    lines += [
        *table(
            ("preset", "what it is"),
            [(f"`robot={f.stem}`", cell(_sentence(_header(f)))) for f in files],
        ),
        "",
    ]
    for place, path in ROBOT.items():
        cls = build.attribute(path)
        prefix = f"{place}." if place else ""
        rows = [k for k in keys(cls, prefix) if place or not k.name.startswith("operator.")]
        lines += [f"## {place or 'The session'}", "", *_introduction(cls), *_key_table(rows), ""]
    return page("Config: a robot session", "the keys of a session with an arm", lines)


def _runs_page() -> str:
    files = sorted((ROOT / "configs" / "run").glob("*.yaml"))
    lines = [
        "`vla-rl train run=NAME` starts one; every key can be changed behind it. Files of "
        "`configs/run/`.",
        "",
    ]
    lines += table(("run", "what it is"), [(f"`run={f.stem}`", cell(_header(f))) for f in files])
    return page("Named runs", "the runs that are ready to start", lines)


def _config_index() -> str:
    rows = [
        (
            "[the run](config/run.md)",
            "phases, budgets, slots, replay, evaluation: all that belongs to no component",
        )
    ]
    rows += [(f"[`{group}`](config/{group}.md)", what) for group, what in GROUPS.items()]
    rows += [("[named runs](config/named_runs.md)", "the files of `configs/run/`")]
    rows += [("[a robot session](config/robot.md)", "the keys of `vla-rl robot`")]
    lines = [
        "A run's config is composed of YAML by Hydra and checked by a dataclass per component. "
        "`vla-rl train` takes",
        "overrides: `run=NAME` chooses a named run, `GROUP=PRESET` a component's preset, "
        "`KEY=VALUE` sets one value, as in",
        "`vla-rl train run=quickstart seed=1 algorithm.learning_rate=3e-4`. An unknown key is "
        "refused with a hint.",
        "",
        *table(("page", "keys of"), rows),
    ]
    return page("Config keys", "where each key of a config is described", lines)


def config_pages() -> dict[str, str]:
    """{path below docs/reference: text}."""
    return {
        "config.md": _config_index(),
        "config/run.md": _run_page(),
        "config/named_runs.md": _runs_page(),
        "config/robot.md": _robot_page(),
        **{f"config/{group}.md": _group_page(group) for group in GROUPS},
    }


def _schemas() -> Iterator[type]:
    yield RunConfig
    yield from (build.config_class(group, name) for group in GROUPS for name in build.names(group))
    yield from (build.attribute(path) for path in ROBOT.values())


def untitled() -> list[str]:
    """Presets and named runs without a comment at their head."""
    files = sorted(
        f for group in (*GROUPS, "robot", "run") for f in (ROOT / "configs" / group).glob("*.yaml")
    )
    return [str(f.relative_to(ROOT)) for f in files if not _header(f)]


def unexplained(schemas: Sequence[type] | None = None) -> list[str]:
    """Fields of the configs that neither a comment nor a docstring explains, as Class.field."""
    found = {}
    for cls in schemas or list(_schemas()):
        for key in keys(cls):
            if not key.meaning and key.name.removesuffix("_type") not in build.REGISTRY:
                found[f"{cls.__name__}.{key.name}"] = None
    return list(found)
