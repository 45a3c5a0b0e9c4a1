"""What may be two things: long functions, files and classes, and classes of many methods.

    python scripts/sizes.py

A reader's question, not a limit: nothing fails by it. (What fails is a function of more than 15
branches or 50 statements, which ruff counts.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vla_rl", "sim", "real", "policies", "reward_models", "benchmarks")
FUNCTION_LINES, FILE_LINES, CLASS_LINES, METHODS = 70, 500, 330, 15


def nodes(parent: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function and class of a file with its qualified name."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from nodes(node, f"{prefix}{node.name}.")
        else:
            yield from nodes(node, prefix)


def lines(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Lines without docstring and decorators."""
    first = node.body[0]
    text = ast.get_docstring(node, clean=False) is not None
    return node.end_lineno - node.lineno + 1 - (text and first.end_lineno - first.lineno + 1)


def questions() -> list[tuple[str, str]]:
    """(place, what is much there), the files in order."""
    asked = []
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        place, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if (n := text.count("\n")) > FILE_LINES:
            asked.append((place, f"{n} lines"))
        for name, node in nodes(ast.parse(text)):
            if not isinstance(node, ast.ClassDef):
                if (n := lines(node)) > FUNCTION_LINES:
                    asked.append((f"{place}:{name}", f"{n} lines"))
                continue
            if (n := lines(node)) > CLASS_LINES:
                asked.append((f"{place}:{name}", f"{n} lines"))
            if (n := sum(isinstance(child, ast.FunctionDef) for child in node.body)) > METHODS:
                asked.append((f"{place}:{name}", f"{n} methods"))
    return asked


def main() -> None:
    asked = questions()
    for place, much in asked:
        print(f"{place:<72} {much}")
    print(f"{len(asked)} places: is each one thing?")


if __name__ == "__main__":
    main()
