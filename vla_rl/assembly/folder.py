"""A run's folder: whose it is, what it holds, which of its phases are complete, and how it is
set aside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_rl import config as configs
from vla_rl.config import MACHINE_KEYS, RunConfig
from vla_rl.config.phases import PHASES, with_followers
from vla_rl.errors import UserError
from vla_rl.files import read_json
from vla_rl.lock import RunLock
from vla_rl.monitoring.metrics import METRICS_FILE, write_json


def read_phases(folder: Path) -> dict[str, Any]:
    """The phase records of a run folder; empty where there are none. `UserError` for a damaged
    file."""
    path = folder / "phases.json"
    if not path.exists() and not path.is_symlink():
        return {}
    remedy = (
        "put a whole copy in its place, or start over with --fresh (the old folder is kept under "
        "another name)"
    )
    phases = read_json(path, remedy)
    for name in PHASES:
        record = phases.get(name, {})
        if not isinstance(record, dict) or not _is_record(record):
            raise UserError(
                f"{path} is damaged (its record of phase {name} is {str(record)[:80]}): {remedy}"
            )
    if not _is_number(phases.get("peak_memory_bytes", 0)):
        raise UserError(
            f"{path} is damaged (peak_memory_bytes is {phases['peak_memory_bytes']!r}): {remedy}"
        )
    return phases


def pending(config: RunConfig, fresh: bool = False) -> list[str]:
    """The phases that are still to run, report aside. More ``rl.iterations`` than were run open
    RL again."""
    records = {} if fresh else read_phases(config.run_dir)
    done = {name for name in config.phases if records.get(name, {}).get("complete")}
    if records.get("rl", {}).get("iterations", config.rl.iterations) < config.rl.iterations:
        done -= with_followers("rl")
    return [name for name in config.phases if name not in done and name != "report"]


def _is_record(record: Mapping[str, Any]) -> bool:
    counts = (
        record.get(name, 0) for name in ("seconds", "episodes", "control_steps", "iterations")
    )
    complete = isinstance(record.get("complete", False), bool) and ("seconds" in record) == (
        "complete" in record
    )
    return complete and all(_is_number(value) for value in counts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def last_good_text(folder: Path, phase: str) -> str:
    """Where to go on from after ``phase`` diverged: another learning rate is another run, so it
    needs another name."""
    path = folder / "checkpoints" / phase
    start = f" checkpoint={path}" if path.exists() else ""
    return (
        f" (Another learning rate is another run: name=NEW_NAME{start} and the changed settings. "
        "The same command goes on here with the old ones.)"
    )


def take_folder(config: RunConfig, folder: Path) -> None:
    """Take the folder for this config: another one in it would mix results. Where ``rl.iterations``
    has grown, the phases that hang on it are open again. Raises as `changes`."""
    if not produced(folder):  # by a run that failed or was killed before it came to anything
        _forget(folder)
    longer, phases = changes(config, folder), read_phases(folder)
    if longer and phases:
        for name in with_followers("rl") & phases.keys():
            phases[name]["complete"] = False
        # before the config: a kill in between leaves the run as it was
        write_json(folder / "phases.json", phases)
    configs.save(config, folder / "config.yaml")


def changes(config: RunConfig, folder: Path) -> bool:
    """Whether the config differs from the folder's in more RL iterations. `MACHINE_KEYS` may change
    too, and the name with that of the folder; anything else raises `UserError`."""
    path = folder / "config.yaml"
    if not path.exists():
        return False
    # (older runs wrote what `as_learned` finds)
    trees = (configs.to_tree(c) for c in (configs.load(path), config))
    old, new = map(configs.as_learned, trees)
    longer = new["rl"]["iterations"] > old["rl"]["iterations"]
    may_change = (*MACHINE_KEYS, "name:", *(["rl.iterations:"] if longer else []))
    changed = sorted(line for line in _differences(old, new) if not line.startswith(may_change))
    if changed:
        lines = "\n  ".join(changed)
        raise UserError(
            f"{folder} holds a run with another config:\n  {lines}\nGive this run its own name "
            "(name=...), or start over with --fresh (the old folder is kept under another name)."
        )
    return longer


def produced(folder: Path) -> bool:
    """Whether the folder holds anything that a run made, besides the notes that it begins with."""
    made = [
        folder / name
        for name in ("checkpoints", "videos", *(n for row in PHASES.values() for n in row.writes))
    ]
    metrics = folder / METRICS_FILE
    logged = metrics.exists() and metrics.stat().st_size > 0
    return logged or any(p.exists() for p in made) or any(folder.glob("eval_*.json"))


def _forget(folder: Path) -> None:
    for name in ("config.yaml", "versions.json", "phases.json", METRICS_FILE):
        (folder / name).unlink(missing_ok=True)


def leave_no_name(folder: Path, kind: type[BaseException] | None, *_: Any) -> None:
    """A run that failed before it made anything does not take its name: the lock then removes
    the empty folder."""
    if kind is not None and not produced(folder):
        _forget(folder)


def _differences(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _differences(
                old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key
            )
    elif old != new:
        yield f"{prefix}: {old!r} there, {new!r} now"


def set_aside(folder: Path) -> None:
    kept = [p for p in folder.iterdir() if p.name != RunLock.FILE]
    if kept:
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        aside.mkdir()
        for path in kept:
            path.rename(aside / path.name)


def made_start(config: RunConfig, folder: Path) -> Path | None:
    """The start that the phases of the run in ``folder`` make, or that they made before; None:
    neither."""
    made = folder / "checkpoints"
    asked = [name for name in ("random", "sft") if name in config.phases]
    there = [name for name in ("sft", "random") if (made / name).exists()]
    return made / (asked + there)[0] if asked or there else None
