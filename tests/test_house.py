"""House rules over the syntax trees: what is too large to read at once, imports that run in a
circle, attributes that are asked for by name though nothing declares them.

The lists of exceptions only shrink: an entry that is no longer needed fails too.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from importlinter.api import read_configuration

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vla_rl", "sim", "real", "policies", "reward_models", "benchmarks")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
PARAMETERS = 8

# what has more parameters, and why it stays so
MANY_PARAMETERS = {
    "sim/tabletop/controller.py:_torques": "one compiled kernel: arrays cannot travel in an object",
    "sim/libero/backend.py:TaskScene.__init__": (
        "a scene is what its simulator's options make of a task"
    ),
    "vla_rl/algorithms/advantages.py:grpo_advantages": (
        "keyword options of one formula, each with a default"
    ),
}

# Attributes of other people's objects that are asked for by name. What this project asks of its own
# components is declared in `vla_rl/options.py` and `vla_rl/interfaces`.
SYSTEM = "not every operating system has it"
VERSIONS = "not every version of that library has it"
KINDS = "that library's classes tell themselves apart by it"
PROBES = {
    "benchmarks/measuring.py:getloadavg": SYSTEM,
    "vla_rl/monitoring/machine.py:sched_getaffinity": SYSTEM,
    "vla_rl/storage.py:renameat2": SYSTEM,
    "sim/pool.py:memfd_create": SYSTEM,
    "benchmarks/learning/replay.py:posix_fadvise": SYSTEM,
    "vla_rl/data/tables.py:posix_fadvise": SYSTEM,
    "vla_rl/storage.py:errno": "errors of other libraries carry the system's number without being "
    "OSError",
    "sim/libero/perturb_scene.py:tex_nchannel": VERSIONS,
    "policies/trunk/llama.py:_is_avx512_bf16_supported": VERSIONS,
    "sim/libero/backend.py:joints": KINDS,  # robosuite
    "policies/denoising/chain.py:final_alpha_cumprod": KINDS,  # diffusers
    "policies/lerobot/policy.py:tensor_device": KINDS,
    "policies/lerobot/policy.py:input_tokenizer": KINDS,
    "policies/openvla/model.py:gamma": KINDS,  # timm
    "policies/openvla/model.py:attn_pool": KINDS,
    "policies/openvla/model.py:fc_norm": KINDS,
    "policies/lora.py:get_delta_weight": KINDS,  # peft
}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(path: Path, *names: str) -> str:
    return ":".join([str(path.relative_to(ROOT)), *names])


def walk(parent: ast.AST, prefix: tuple[str, ...] = ()):
    """Every function and class with its qualified name."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield ".".join([*prefix, node.name]), node
            yield from walk(node, (*prefix, node.name))
        else:
            yield from walk(node, prefix)


def parameters(node: ast.FunctionDef) -> int:
    """Without self and cls."""
    a = node.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([n for n in names if n not in ("self", "cls")])


def probes_of(path: Path) -> set[str]:
    """The attributes that a file asks for with ``hasattr`` or ``getattr`` and a name that stands
    in the code."""
    calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    asking = [
        c for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("hasattr", "getattr")
    ]
    return {named(path, c.args[1].value) for c in asking if isinstance(c.args[1], ast.Constant)}


def test_attributes_that_are_asked_for_are_declared():
    found = set().union(*map(probes_of, FILES))
    new = sorted(found - set(PROBES))
    assert not new, (
        f"{new}: declare what is asked in vla_rl/options.py (configs, classes) or "
        "vla_rl/interfaces (objects)"
    )
    stale = sorted(set(PROBES) - found)
    assert not stale, f"{stale} are not asked for any more: take them off the list"


def test_what_is_optional_is_offered_by_someone():
    """A misspelt method of a base would never be found in any plug-in."""
    bases = sorted((ROOT / "vla_rl" / "interfaces").glob("*.py"))
    declaring = [*bases, ROOT / "vla_rl" / "options.py"]
    offered = {"train", "eval"}  # by torch.nn.Module
    for path in {*FILES} - {*declaring}:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                offered.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                offered.add(node.id if isinstance(node, ast.Name) else node.attr)
    asked = set()
    for path in declaring:
        for name, node in walk(tree(path)):
            parent = name.rpartition(".")[0]
            if isinstance(node, ast.FunctionDef) and parent and not node.name.startswith("_"):
                asked.add(node.name)
    asked -= {"pixels", "of", "can_of", "class_of"}  # of `EnvOptions` and `Offering`, for the core
    assert len(asked) > 60
    assert not asked - offered


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Modules of this project that importing ``path`` imports (what a function imports later
    does not count)."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.update(
                    m if (m := f"{child.module}.{a.name}") in modules else child.module
                    for a in child.names
                )
            visit(child)

    visit(tree(path))
    return found & modules


def test_no_imports_run_in_a_circle():
    names = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in FILES
    }
    graph = {name: imports_of(path, set(names)) - {name} for name, path in names.items()}
    done: set[str] = set()

    def walk_from(name: str, path: list[str]) -> None:
        assert name not in path, (
            f"a circle of imports: {' -> '.join([*path[path.index(name) :], name])}"
        )
        if name not in done:
            for other in sorted(graph[name]):
                walk_from(other, [*path, name])
            done.add(name)

    for name in sorted(graph):
        walk_from(name, [])
    assert len(done) == len(names) > 150


def test_the_floors_are_drawn_as_the_contract_has_them():
    """Floor by floor, from left to right: what docs/architecture.md shows is what import-linter
    enforces, all of it."""
    contracts = read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    floors = next(c for c in contracts if c["name"].startswith("The floors of vla_rl"))
    assert floors["exhaustive"] == "True" and not {"ignore_imports", "exhaustive_ignores"} & set(
        floors
    )
    rows = (
        (ROOT / "docs" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("```\n 7 ")[2]
        .partition("```")[0]
    )
    cells = [re.split(r"  +", line.strip()) for line in f"7 {rows}".splitlines()]
    drawn = [room for row in cells for room in row[2 if row[0].isdigit() else 0 :]]
    assert drawn == floors["layers"]


def test_functions_have_few_parameters():
    functions = [
        (named(path, name), node)
        for path in FILES
        for name, node in walk(tree(path))
        if not isinstance(node, ast.ClassDef)
    ]
    over = {name: n for name, node in functions if (n := parameters(node)) > PARAMETERS}
    new = {name: n for name, n in over.items() if name not in MANY_PARAMETERS}
    assert not new, f"more than {PARAMETERS} parameters: {new}. Group what belongs together."
    stale = sorted(set(MANY_PARAMETERS) - set(over))
    assert not stale, f"{stale} are within the limit now: take them off the list"


@pytest.mark.slow
def test_a_traced_iteration_goes_from_the_loop_to_the_backward_pass(script):
    """What `scripts/trace_iteration.py` prints is not bounded, but it must have seen an
    iteration."""
    small = [
        "collect.episodes_per_task=2",
        "sft.updates=2",
        "rl.episodes_per_iteration=8",
        "evaluate.episodes_per_task=2",
        "algorithm.critic_warmup_iterations=0",
        "wandb=false",
    ]
    trace = script("trace_iteration")
    entered = trace.second_iteration(small)
    assert {code.co_name for code in entered} >= {
        "_gather",
        "collect",
        "score",
        "_backward",
        "step",
        "_save",
    }
    assert {trace.room(file) for file in trace.lines(entered)} >= {
        "vla_rl/algorithms",
        "vla_rl/rollout",
        "policies",
        "sim",
    }
