"""The pages of docs/reference/api: signatures and docstrings of what a user imports, read from
the syntax trees."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from reference_text import page, table

ROOT = Path(__file__).resolve().parent.parent
# What a user imports from Python: page → (title, what it is for, {module: names; none: every public
# one}).
API = {
    "run": (
        "Python API: runs and checkpoints",
        "compose a config, run it, load what came out",
        {
            "vla_rl.config": ("compose", "override", "load", "save", "to_yaml", "RunConfig"),
            "vla_rl.run.pipeline": ("run_pipeline",),
            "vla_rl.build": ("implementation", "config_class", "names"),
            "vla_rl.bounds": ("Bounded", "bound", "several", "told_by"),
            "vla_rl.checkpoint": (
                "save_checkpoint",
                "load_policy",
                "load_weights",
                "load_training_state",
                "keep_numbered",
            ),
            "vla_rl.errors": (),
        },
    ),
    "data": (
        "Python API: data types",
        "what travels between env, policy, reward and algorithm",
        {"vla_rl.specs": (), "vla_rl.types": (), "vla_rl.splits": ()},
    ),
    "interfaces": (
        "Python API: interfaces",
        "what a policy, env, reward, critic, collector or algorithm must have, and may offer",
        {
            f"vla_rl.interfaces.{kind}": ()
            for kind in ("policy", "actor", "reward", "worlds", "algorithm", "offering")
        },
    ),
}


def _prose(node: ast.AST) -> list[str]:
    """A docstring as Markdown."""
    text = re.sub(r"``(.+?)``", r"`\1`", ast.get_docstring(node) or "")
    return [line if "`" in line else line.replace("<", r"\<") for line in text.splitlines()]


def _signature(node: ast.FunctionDef) -> str:
    """As it is called: without ``self``."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({re.sub(r'^(self|cls)(, |$)', '', ast.unparse(node.args))}){returns}"


def _method(node: ast.FunctionDef) -> str:
    kinds = [
        k
        for k in ("property", "classmethod", "staticmethod")
        if k in {ast.unparse(d) for d in node.decorator_list}
    ]
    name = (
        f"{node.name}: {ast.unparse(node.returns)}"
        if "property" in kinds and node.returns
        else _signature(node)
    )
    text = " ".join(" ".join(_prose(node)).split())
    return f"- `{name}`{' (' + kinds[0] + ')' if kinds else ''}{': ' + text if text else ''}"


def _entry(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """A function; or a class with its fields, then its public methods."""
    if isinstance(node, ast.FunctionDef):
        return [f"### {node.name}", "", "```python", _signature(node), "```", "", *_prose(node), ""]
    bases = f"({', '.join(ast.unparse(b) for b in node.bases)})" if node.bases else ""
    fields = [f"    {ast.unparse(n)}" for n in node.body if isinstance(n, ast.AnnAssign)]
    code = [f"class {node.name}{bases}" + (":" if fields else ""), *fields]
    methods = [
        _method(n)
        for n in node.body
        if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")
    ]
    return [
        f"### {node.name}",
        "",
        "```python",
        *code,
        "```",
        "",
        *_prose(node),
        "",
        *methods,
        *([""] if methods else []),
    ]


def _defined(module: str) -> tuple[ast.Module, dict[str, ast.ClassDef | ast.FunctionDef]]:
    """The syntax tree of a module, and what it defines; of a package, what it hands on from its
    own modules too."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    for node in tree.body if path.is_dir() else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            others = _defined(node.module)[1]
            found |= {a.name: others[a.name] for a in node.names if a.name in others}
    return tree, found


def _api_page(name: str) -> str:
    title, purpose, modules = API[name]
    lines: list[str] = []
    for module, names in modules.items():
        tree, found = _defined(module)
        chosen = names or [n for n in found if not n.startswith("_")]
        lines += [
            f"## {module}",
            "",
            *_prose(tree),
            "",
            *(line for n in chosen for line in _entry(found[n])),
        ]
    return page(title, purpose, lines)


def _api_index() -> str:
    rows = []
    for name, (title, purpose, modules) in API.items():
        rows.append(
            (
                f"[{title.partition(': ')[2]}](api/{name}.md)",
                purpose,
                ", ".join(f"`{m}`" for m in modules),
            )
        )
    call = 'folder = run_pipeline(compose(["run=toy", "output_dir=outputs", "name=mine"]))  # report.html is in it'
    imports = ["from vla_rl.config import compose", "from vla_rl.run.pipeline import run_pipeline"]
    lines = [
        "A run from Python, as `vla-rl train run=toy name=mine` makes it:",
        "",
        "```python",
        *imports,
        "",
        call,
        "```",
    ]
    return page(
        "Python API",
        "what to import, and where it is described",
        [*lines, "", *table(("page", "for", "modules"), rows)],
    )


def api_pages() -> dict[str, str]:
    """{path below docs/reference: text}."""
    return {"api.md": _api_index(), **{f"api/{name}.md": _api_page(name) for name in API}}
