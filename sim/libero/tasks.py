"""The suites and their tasks: names, texts, files and goals, read without importing the LIBERO
package (numpy-free).

A task id is ``suite/number`` with the number of the suite's published order: ``libero_object/3``.
Where tasks are asked for, the bare number and the name of the BDDL file are understood too.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sim.libero import package, plus, pro
from vla_rl.errors import ConfigError, UserError

# Control steps an episode may last, after settling: those of the OpenVLA-OFT evaluation
# (run_libero_eval.py).
HORIZONS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
SUITES = tuple(HORIZONS)
HORIZONS |= {
    name: HORIZONS[base] for name, (base, _) in [*pro.SUITES.items(), *plus.SUITES.items()]
}
# name -> arguments
PREDICATES = {"in": 2, "on": 2, "open": 1, "close": 1, "turnon": 1, "turnoff": 1, "up": 1}
_LAYOUT = (":objects", ":fixtures", ":regions", ":init")
MAX_OBJECTS, MAX_GOALS = 8, 3  # the most that a published task has
# numbers of the privileged state for the hand, each object, each goal part
HAND_DIM, OBJECT_DIM, GOAL_DIM = 15, 17, 9

Goal = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Problem:
    """What a BDDL file says. ``objects`` and ``fixtures`` {name: category}; ``goal``:
    predicates, all of which must hold; ``layout``: its things, regions and where they begin."""

    name: str
    language: str
    objects: dict[str, str]
    fixtures: dict[str, str]
    of_interest: tuple[str, ...]
    goal: Goal
    layout: str


@dataclass(frozen=True)
class Task:
    """One task of a suite. ``instruction`` is made of the file's name, as the published
    evaluations do; of one's own files and where LIBERO-PRO changes the words, it is the file's.
    ``horizon`` 0: it has none of its own."""

    task_id: str
    suite: str
    name: str
    instruction: str
    bddl_file: Path
    init_file: Path
    horizon: int
    package: Path | None = None  # the folder of another LIBERO that simulates it
    change: plus.Change | None = None  # of the scene, by LIBERO-plus

    @functools.cached_property
    def problem(self) -> Problem:
        return read_problem(self.bddl_file)


@functools.cache
def suite_tasks(suite: str, files: str = "") -> tuple[Task, ...]:
    """All tasks of ``suite`` in its published order, or of ``files/bddl_files/suite`` in that of
    their names. `ConfigError` for an unknown suite, `MissingDependency` without LIBERO-PRO's."""
    if suite in plus.SUITES and not files:
        return tuple(_varied(suite))
    folder, name, said = _place(suite, files)
    there = folder / "bddl_files" / name
    names = sorted(p.stem for p in there.glob("*.bddl")) if files else _names(folder)[name]
    if not names:
        raise ConfigError(
            f"env.files={files} and env.suite={suite}: there are no task files {there}/*.bddl, "
            f"with their initial states in {folder}/init_files/{name}"
        )
    own = folder.parents[1] if suite in pro.SUITES and not files else None
    paths = [there / f"{task}.bddl" for task in names]
    return tuple(
        Task(
            task_id=f"{suite}/{index}",
            suite=suite,
            name=path.stem,
            instruction=words_of(read_problem(path)) if said else instruction_of(path.stem),
            bddl_file=path,
            init_file=_states(folder / "init_files" / name, path.stem),
            horizon=HORIZONS.get(suite, 0),
            package=own,
        )
        for index, path in enumerate(paths)
    )


def _varied(suite: str) -> Iterator[Task]:
    """LIBERO-plus' tasks; their words are the files' where those were changed."""
    for index, variant in enumerate(plus.variants(suite)):
        file = variant.bddl_file
        yield Task(
            task_id=f"{suite}/{index}",
            suite=suite,
            name=variant.name,
            instruction=words_of(read_problem(file))
            if variant.said
            else instruction_of(variant.base),
            bddl_file=file,
            init_file=variant.init_file,
            horizon=HORIZONS[suite],
            change=variant.change,
        )


def _place(suite: str, files: str) -> tuple[Path, str, bool]:
    """(folder of a suite's files, its name there, whether the files have the words)."""
    if files:
        return Path(files).expanduser(), suite, True
    if suite in pro.SUITES:
        name = pro.SUITES[suite][1]
        return pro.root(), name, name.endswith(pro.SAID)
    if suite not in SUITES:
        raise ConfigError(
            f"libero suite={suite!r} is unknown: use one of {', '.join(HORIZONS)}, or name a "
            "folder of your own with env.files."
        )
    return package.root(), suite, False


def _states(folder: Path, name: str) -> Path:
    """LIBERO's torch-saved file, or the arrays that LIBERO-PRO's package has."""
    arrays = folder / f"{name}.pruned_init.npz"
    return arrays if arrays.is_file() else folder / f"{name}.pruned_init"


def find_tasks(suite: str, wanted: Sequence[str], files: str = "") -> tuple[Task, ...]:
    """The tasks that ``wanted`` names (ids, numbers or BDDL names), or all. `ConfigError` for
    one that does not exist."""
    tasks = suite_tasks(suite, files)
    if not wanted:
        return tasks
    known = {key: task for i, task in enumerate(tasks) for key in (task.task_id, str(i), task.name)}
    missing = [name for name in wanted if str(name) not in known]
    if missing:
        raise ConfigError(
            f"libero tasks={missing[0]!r} is unknown: use {suite}/0 to {suite}/{len(tasks) - 1}, "
            f"or the name of a BDDL file of that suite, such as {tasks[0].name}."
        )
    return tuple(dict.fromkeys(known[str(name)] for name in wanted))


def instead_of(task: Task, tasks: Iterable[Task]) -> dict[Goal, str]:
    """What else might be done in the scene of ``task``: {goal of another of ``tasks``: its id}.

    Those of the same layout, where words mean the same, and those that ask for the same with
    another kind of object, which is there (libero_object's). A goal that has another's parts and
    more stands before that one; of several tasks with one goal it is the first. None of LIBERO-plus,
    whose suites have thousands of tasks and are there to evaluate.
    """
    found: dict[frozenset[tuple[str, ...]], tuple[Goal, str]] = {}
    for other in tasks if task.change is None else ():
        if other.problem.layout == task.problem.layout or _of_another_kind(task, other):
            found.setdefault(frozenset(other.problem.goal), (other.problem.goal, other.task_id))
    found.pop(frozenset(task.problem.goal), None)
    return dict(sorted(found.values(), key=lambda told: -len(told[0])))


def _of_another_kind(task: Task, other: Task) -> bool:
    """Whether ``other`` asks for what ``task`` does with another object, the only one of its kind in
    the scene of ``task``: "pick up the butter and place it in the basket"."""
    here, there = task.problem, other.problem
    (verb, thing, *place), (own_verb, own, *own_place) = there.goal[0], here.goal[0]
    kinds = list(here.objects.values())
    kind, own_kind = there.objects.get(thing, ""), here.objects.get(own, "")
    words, own_words = kind.replace("_", " "), own_kind.replace("_", " ")
    return (
        len(here.goal) == len(there.goal) == 1
        and (verb, place) == (own_verb, own_place)
        and bool(kind)
        and bool(own_kind)
        and kinds.count(kind) == 1
        and all(here.objects.get(name) == there.objects.get(name) for name in there.of_interest)
        and own_words in task.instruction
        and task.instruction.replace(own_words, words) == other.instruction
    )


def _names(folder: Path) -> dict[str, list[str]]:
    path = folder / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("libero_suite_task_map", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.libero_task_map


def instruction_of(name: str) -> str:
    """The text of a BDDL name; those of LIBERO-100 carry their scene in front:
    KITCHEN_SCENE3_turn_on_the_stove."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " ")


def words_of(problem: Problem) -> str:
    """What a task file says to do, as instructions are written here."""
    return problem.language.lower().strip().rstrip(".")


# --------------------------------------------------------------------------------------------- BDDL
def read_problem(path: str | Path) -> Problem:
    """Parse a BDDL file. Raises `UserError` that names file and place where it is missing or no
    such problem."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"The task file {path} cannot be read ({error}). Reinstall the LIBERO package "
            "(hf-libero)."
        ) from error
    try:
        return _problem(_parse(text))
    except ValueError as error:
        raise UserError(
            f"{path} is no BDDL problem: {error}. Put back the file of the LIBERO package "
            "(reinstall hf-libero)."
        ) from error


def _parse(text: str) -> list:
    """Nested lists of the words between parentheses. ``ValueError`` names the line where they do
    not match."""
    stack: list[tuple[list, int]] = [([], 0)]
    for number, line in enumerate(text.splitlines(), start=1):
        for word in re.findall(r"[()]|[^\s()]+", line.split(";")[0]):
            if word == "(":
                stack.append(([], number))
            elif word == ")":
                group, _ = stack.pop()
                if not stack:
                    raise ValueError(f"line {number} closes a parenthesis that was never opened")
                stack[-1][0].append(group)
            else:
                stack[-1][0].append(word)
    if len(stack) > 1:
        raise ValueError(f"the parenthesis opened in line {stack[-1][1]} is never closed")
    return stack[0][0]


def _problem(tree: list) -> Problem:
    if len(tree) != 1 or not isinstance(tree[0], list) or tree[0][:1] != ["define"]:
        raise ValueError("it does not consist of one (define ...)")
    groups = {group[0]: group[1:] for group in tree[0][1:] if isinstance(group, list) and group}
    for name in ("problem", ":language", ":objects", ":fixtures", ":goal"):
        if not groups.get(name) and name not in (":objects", ":fixtures"):
            raise ValueError(f"({name} ...) is missing")
    goal = groups[":goal"][0]
    clauses = (
        goal[1:] if isinstance(goal, list) and goal and str(goal[0]).lower() == "and" else [goal]
    )
    predicates = tuple(_predicate(clause) for clause in clauses)
    if not predicates:
        raise ValueError("its goal is empty")
    return Problem(
        name=str(groups["problem"][0]).lower(),
        language=" ".join(str(word) for word in groups[":language"]),
        objects=_typed(groups.get(":objects", [])),
        fixtures=_typed(groups.get(":fixtures", [])),
        of_interest=tuple(groups.get(":obj_of_interest", [])),
        goal=predicates,
        layout=repr([groups.get(name) for name in _LAYOUT]),
    )


def _predicate(clause: object) -> tuple[str, ...]:
    words = tuple(str(word) for word in clause) if isinstance(clause, list) else ()
    name = words[0].lower() if words else ""
    if PREDICATES.get(name) != len(words) - 1:
        raise ValueError(
            f"its goal has the part {clause!r}, expected one of "
            f"{', '.join(PREDICATES)} with its arguments"
        )
    return (name, *words[1:])


def _typed(words: list) -> dict[str, str]:
    """``a b - kind`` lists as {a: kind, b: kind}."""
    result: dict[str, str] = {}
    pending: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "-":
            kind = next(rest, None)
            if not isinstance(kind, str):
                raise ValueError(f"a list of objects ends without the kind of {', '.join(pending)}")
            result |= dict.fromkeys(pending, kind)
            pending = []
        elif isinstance(word, str):
            pending.append(word)
        else:
            raise ValueError(f"a list of objects holds {word!r}")
    if pending:
        raise ValueError(f"the kind of {', '.join(pending)} is missing")
    return result
