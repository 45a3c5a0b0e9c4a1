"""The texts that released VLAC weights were trained on, read at run time from the user's own copy
of the release.

None of them is part of this repository. `release_texts` takes either the folder of VLAC's code, whose sources are parsed and
never run, or a YAML (or JSON) file that a user wrote::

    licence: MIT                  # under which the strings may be used
    system: ...
    pair_template: ...            # two <image>, {task}
    done_template: ...            # one <image>, {task}
    reference_template: ...       # {task}, and {frames} where the example's frames go
    reference_frame_template: ... # one <image>, {percent}
    reference_pair_template: ...  # the pair question after an example; its first <image> is the episode's start

What is read from the code (``evo_vlac/utils``; names as its authors spell them): the entries "v3",
"v3_think" and "task_done" of ``prompt_templete``, where ``model_utils.py`` overrides
``data_processing_vlm.py``; the text assigned to ``system_prompt``; and, of the function
``trojectory_example_prompt``, what it writes before, in and after its loop.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

from vla_rl.errors import ConfigError, MissingDependency

IMAGE = "<image>"
# In the order in which the release runs them: what comes later overrides.
SOURCES = ("data_processing_vlm.py", "model_utils.py")
_ENTRIES = {
    "pair_template": "v3",
    "reference_pair_template": "v3_think",
    "done_template": "task_done",
}
_SLOTS = {
    "system": (),
    "pair_template": ("{task}",),
    "done_template": ("{task}",),
    "reference_template": ("{task}", "{frames}"),
    "reference_frame_template": ("{percent}",),
    "reference_pair_template": ("{task}",),
}
_REMEDY = (
    "Write the texts into a YAML file and give that as reward.release (see docs/how_to/rewards.md)"
)


def release_texts(path: str) -> dict[str, str]:
    """The templates of ``path`` (a folder with VLAC's code, or a file) by their names in
    `VLACConfig`.

    Raises `MissingDependency` where there is nothing to read, `ConfigError` that names what a
    source lacks.
    """
    place = Path(path)
    if not path or not place.exists():
        raise MissingDependency(
            f"reward.release={path!r} does not exist: the texts of the VLAC release are not part "
            "of vla_rl. Give the folder of its code (the one that holds evo_vlac), or a file with "
            "the texts (docs/how_to/rewards.md)"
        )
    texts = _from_code(place) if place.is_dir() else _from_file(place)
    missing = sorted(set(_SLOTS) - {name for name, text in texts.items() if text})
    if missing:
        raise ConfigError(f"reward.release={path} lacks {', '.join(missing)}. {_REMEDY}")
    for name, slots in _SLOTS.items():
        for slot in slots:
            if slot not in texts[name]:
                raise ConfigError(
                    f"reward.release={path}: {name} lacks the slot {slot}: "
                    f"{texts[name]!r}. {_REMEDY}"
                )
    return texts


def _from_file(path: Path) -> dict[str, str]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"reward.release={path} cannot be read: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(data, dict) or not all(
        isinstance(x, str) for pair in data.items() for x in pair
    ):
        raise ConfigError(
            f"reward.release={path} must be a mapping of names to texts: "
            f"{', '.join(_SLOTS)} and licence"
        )
    if not data.pop("licence", data.pop("license", "")).strip():
        raise ConfigError(
            f"reward.release={path} names no licence: say under which the texts may "
            "be used ('licence: MIT')"
        )
    unknown = sorted(set(data) - set(_SLOTS))
    if unknown:
        known = ", ".join([*_SLOTS, "licence"])
        raise ConfigError(
            f"reward.release={path} has unknown names {', '.join(unknown)}; known: {known}"
        )
    return data


# --------------------------------------------------------------------------------- from the sources
def _from_code(folder: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    entries: dict[str, str] = {}
    for name in SOURCES:
        found = sorted(folder.rglob(name))
        if not found:
            raise MissingDependency(
                f"reward.release={folder} holds no {name}: it is not the folder of VLAC's code "
                "(the one that holds evo_vlac)"
            )
        try:
            tree = ast.parse(found[0].read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{found[0]} cannot be parsed ({error}). {_REMEDY}") from error
        for node in _in_order(tree):
            if isinstance(node, ast.Assign):
                _take(node, entries, texts)
            elif isinstance(node, ast.FunctionDef) and node.name == "trojectory_example_prompt":
                texts |= _example(node)
    texts |= {name: entries[key] for name, key in _ENTRIES.items() if key in entries}
    if IMAGE not in texts.get("done_template", IMAGE):
        # ms-swift puts an image without a place in front
        texts["done_template"] = IMAGE + texts["done_template"]
    return texts


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes as they stand in the source, so that the last assignment wins."""
    for node in ast.iter_child_nodes(tree):
        yield node
        yield from _in_order(node)


def _take(node: ast.Assign, entries: dict[str, str], texts: dict[str, str]) -> None:
    """Note what an assignment says of the templates or the system text."""
    target, value = node.targets[0], node.value
    if (
        isinstance(target, ast.Attribute)
        and target.attr == "system_prompt"
        and isinstance(value, ast.Constant)
    ):
        if isinstance(value.value, str):
            texts["system"] = value.value
    elif (
        isinstance(target, ast.Attribute)
        and target.attr == "prompt_templete"
        and isinstance(value, ast.Dict)
    ):
        for key, text in zip(value.keys, value.values):
            _note(entries, key, text)
    elif (
        isinstance(target, ast.Subscript)
        and isinstance(target.value, ast.Attribute)
        and target.value.attr == "prompt_templete"
    ):
        _note(entries, target.slice, value)


def _note(entries: dict[str, str], key: ast.expr | None, text: ast.expr) -> None:
    if (
        not isinstance(key, ast.Constant)
        or not isinstance(text, ast.Constant)
        or not isinstance(text.value, str)
    ):
        return
    try:  # a str.format template, whose only slots are the task's
        pieces = list(string.Formatter().parse(text.value))
    except ValueError:
        return
    entries[str(key.value)] = "".join(
        t + ("" if slot is None else "{task}") for t, slot, _, _ in pieces
    )


def _example(function: ast.FunctionDef) -> dict[str, str]:
    """The frame text that the function's loop writes, and what stands around it."""
    around, frame = ["", ""], ""
    for statement in function.body:
        if isinstance(statement, ast.For):
            frame = "".join(_written(node, "{percent}") for node in statement.body)
        else:
            around[bool(frame)] += _written(statement, "{task}")
    return (
        {"reference_template": "{frames}".join(around), "reference_frame_template": frame}
        if frame
        else {}
    )


def _written(statement: ast.AST, slot: str) -> str:
    """The strings that a statement ``prompt = prompt + "…"`` adds; a value inside an f-string
    becomes ``slot``."""
    if not isinstance(statement, ast.Assign | ast.AugAssign):
        return ""
    return _pieces(statement.value, slot)


def _pieces(value: ast.expr, slot: str) -> str:
    if isinstance(value, ast.BinOp):
        return _pieces(value.left, slot) + _pieces(value.right, slot)
    if isinstance(value, ast.JoinedStr):
        return "".join(
            slot if isinstance(part, ast.FormattedValue) else _pieces(part, slot)
            for part in value.values
        )
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
