"""What a reader of one RL iteration has to read: the functions that a traced iteration of the toy
run enters.

    python scripts/trace_iteration.py [OVERRIDE …]

Trains ``run=toy`` in a temporary folder and traces the main thread through the second iteration
(the first fills caches). Prints functions, files and lines entered, by room, as the code is today;
nothing is bounded by it. A line counts once, however often it is entered, and with all lines of its
function. What a worker process or another thread does is not seen.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from vla_rl.config import compose
from vla_rl.learning.online import OnlineRL
from vla_rl.run.pipeline import run_pipeline

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vla_rl", "sim", "real", "policies", "reward_models")


def traced(act: Callable[[], Any]) -> set[CodeType]:
    """The code objects of this project that ``act`` enters in this thread."""
    entered: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    roots = tuple(str(ROOT / package) for package in PACKAGES)
    return {
        code
        for code in entered
        if code.co_filename.startswith(roots) and code.co_name != "<module>"
    }


def lines(codes: set[CodeType]) -> dict[str, set[int]]:
    """File, relative to the checkout → numbers of the lines that the functions cover."""
    found: dict[str, set[int]] = defaultdict(set)
    for code in codes:
        last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
        found[str(Path(code.co_filename).relative_to(ROOT))] |= set(
            range(code.co_firstlineno, last + 1)
        )
    return dict(found)


def room(file: str) -> str:
    """``vla_rl/learning`` for a file of a room of the core, else the package."""
    parts = Path(file).parts
    return "/".join(parts[:2]) if parts[0] == "vla_rl" and len(parts) > 2 else parts[0]


def second_iteration(overrides: list[str]) -> set[CodeType]:
    """The functions that iteration 2 enters, from its rollouts to its checkpoint."""
    entered: list[set[CodeType]] = []
    steps = ("_evaluated", "_gather", "_learn", "_save")
    plain = {name: getattr(OnlineRL, name) for name in steps}

    def wrapped(name: str) -> Callable[..., Any]:
        def step(self: OnlineRL, *arguments: Any) -> Any:
            seen = self.counters.iteration == (1 if name in steps[:3] else 2)
            if not seen:
                return plain[name](self, *arguments)
            result: list[Any] = []
            entered.append(traced(lambda: result.append(plain[name](self, *arguments))))
            return result[0]

        return step

    for name in steps:
        setattr(OnlineRL, name, wrapped(name))
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_pipeline(
                compose(["run=toy", *overrides, "rl.iterations=2", f"output_dir={folder}"])
            )
    finally:
        for name in steps:
            setattr(OnlineRL, name, plain[name])
    return set().union(*entered)


def main(overrides: list[str]) -> None:
    codes = second_iteration(overrides)
    by_room: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file, numbers in lines(codes).items():
        by_room[room(file)][0] += 1
        by_room[room(file)][1] += len(numbers)
    # not comprehensions and lambdas
    functions = [code for code in codes if not code.co_name.startswith("<")]
    print(
        f"one iteration enters {len(functions)} functions in "
        f"{sum(f for f, _ in by_room.values())} files, {sum(n for _, n in by_room.values())} "
        "lines"
    )
    for name, (files, count) in sorted(by_room.items(), key=lambda row: -row[1][1]):
        print(f"  {name:24} {files:3} files {count:5} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
