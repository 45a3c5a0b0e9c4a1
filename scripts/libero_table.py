"""Makes sim/libero/published.npz with LIBERO's own environment in the loop of published evaluations
(sim/libero/verify.py).

    python scripts/libero_table.py [--states 3] [--suites libero_spatial ...]

A task takes some 14 CPU seconds for three states. Tasks that the table has with as many states are
left as they are, so it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sim.libero import assets, fidelity, package
from sim.libero.plain import WatchedEnv, bind_context
from sim.libero.tasks import SUITES, Task, suite_tasks
from sim.libero.verify import CAMERAS, SIZE, TABLE, Row, gl_driver, read_table, write_table
from vla_rl.errors import UserError


def rows_of(task: Task, states: int) -> tuple[list[Row], str]:
    """The first ``states`` of a task, and the OpenGL driver."""
    env = WatchedEnv(task, SIZE)
    rows = []
    for number in range(states):
        seen = env.reset(0 if number == 0 else None, official=number)
        pictures = {name: seen[f"{name}_image"] for name in CAMERAS}
        rows.append(Row.of(task.task_id, number, env.data, pictures))
    bind_context(env.env)
    driver = gl_driver()
    env.close()
    return rows, driver


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=3, help="of each task")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=SUITES)
    options = parser.parse_args()
    copy, versions = assets.judged(package.find_assets()), fidelity.versions()
    if problems := [*fidelity.package_problems(versions), *fidelity.asset_problems(copy)]:
        raise UserError(f"the table is one of the published benchmark: {'; '.join(problems)}")
    rows, about = read_table() if TABLE.is_file() else ([], {})
    for task in (task for suite in options.suites for task in suite_tasks(suite)):
        if sum(row.task == task.task_id for row in rows) >= options.states:
            continue
        found, driver = rows_of(task, options.states)
        if about.get("driver", driver) != driver:
            raise UserError(
                f"the table was made under {about['driver']}, and this is {driver}: make it anew"
            )
        about = {
            **versions,
            "driver": driver,
            "assets": copy.digest,
            "libc": " ".join(platform.libc_ver()),
        }
        rows = [row for row in rows if row.task != task.task_id] + found
        write_table(TABLE, rows, about)
        print(task.task_id, flush=True)


if __name__ == "__main__":
    main()
