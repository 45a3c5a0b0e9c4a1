"""Runs `vla-rl quickstart` for several seeds and writes what came out to benchmarks/results/learning.json.

Beside each run's own summary.json it records what only an outside observer sees: the wall-clock time of the command
and the peak memory of its processes. A run that was made before is repeated, not resumed, so that times are whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).with_name("vla-rl")


def resident_bytes(group: int) -> int:
    """Proportional resident memory (bytes) of all processes of a process group, so that shared pages count once."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getpgid(int(entry.name)) != group:
                continue
            for line in (entry / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return total


def run_seed(seed: int, overrides: list[str]) -> dict:
    """One quickstart run from nothing; raises SystemExit when it fails."""
    name = f"learning-seed-{seed}"
    folder = ROOT / "outputs" / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(COMMAND), "quickstart", f"seed={seed}", f"name={name}", *overrides]
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    peak = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(2.0):
            peak = max(peak, resident_bytes(process.pid))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, 2)
        process.wait()
        raise SystemExit(130) from None
    finally:
        ended.set()
        watcher.join()
    if code != 0:
        raise SystemExit(f"seed {seed}: '{' '.join(command)}' ended with status {code}; see {folder}")
    return {
        "seed": seed,
        "wall_seconds": round(time.monotonic() - start, 1),
        "peak_memory_gib": round(peak / 2**30, 2),
        "summary": json.loads((folder / "summary.json").read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "learning.json")
    parser.add_argument("overrides", nargs="*", help="passed on to vla-rl quickstart")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    figures = {
        "command": "make test-learning",
        "commit": commit,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "overrides": arguments.overrides,
        "runs": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        run = run_seed(seed, arguments.overrides)
        figures["runs"].append(run)
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")  # after each: a late failure keeps them
        print(f"seed {seed}: {run['wall_seconds']:.0f} s, peak {run['peak_memory_gib']:.2f} GiB", flush=True)
    print(f"figures: {arguments.output}")


if __name__ == "__main__":
    main()
