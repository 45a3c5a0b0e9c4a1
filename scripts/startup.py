"""CPU seconds until something happens: what a command costs before it works.

    python scripts/startup.py --rounds 3 --json out.json

Of each piece the least of the rounds counts (the others met a busy machine or a cold disk),
children included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

CLI = (
    sys.executable,
    "-c",
    "import sys; from vla_rl.cli import main; sys.exit(main(sys.argv[1:]))",
)
PIECES = {
    "vla-rl --help": (*CLI, "--help"),
    "a config error": (*CLI, "train", "run=toy", "seed=minus"),
    "import torch": (sys.executable, "-c", "import torch"),
    "import policies.nano_vla": (sys.executable, "-c", "import policies.nano_vla"),
    "vla-rl doctor": (*CLI, "doctor"),
}


def cpu_seconds(command: tuple[str, ...], cwd: Path) -> float:
    """User and system time of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = os.pathsep.join(p for p in (str(cwd), os.environ.get("PYTHONPATH", "")) if p)
    subprocess.run(
        command, cwd=cwd, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="the checkout to measure",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found = {}
    for name, command in PIECES.items():
        found[name] = min(
            cpu_seconds(command, arguments.tree.resolve()) for _ in range(max(arguments.rounds, 1))
        )
        print(f"{name:26} {found[name]:6.2f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"python": sys.version.split()[0], "cpu_seconds": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
