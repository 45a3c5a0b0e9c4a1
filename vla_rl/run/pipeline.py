"""A run: its folder, its phases, and how it picks up where it stopped.

``outputs/<name>/`` holds ``config.yaml``, ``versions.json``, ``phases.json``, ``metrics.jsonl``,
``dataset/``, ``reward/``, ``checkpoints/{sft,rl}``, ``eval_*.json``, ``videos/``, ``report.html``
and ``summary.json``. Each phase leaves its result there and is skipped once that is complete; an
interrupted phase goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vla_rl import config as configs
from vla_rl.assembly.context import Run
from vla_rl.assembly.env_and_policy import checked_env
from vla_rl.assembly.folder import (
    changes,
    last_good_text,
    leave_no_name,
    pending,
    produced,
    read_phases,
    set_aside,
    take_folder,
)
from vla_rl.checks import preflight
from vla_rl.config import RunConfig
from vla_rl.config.phases import PHASES
from vla_rl.errors import TrainingDiverged
from vla_rl.lock import RunLock
from vla_rl.monitoring.machine import MemoryWatch, versions
from vla_rl.monitoring.metrics import MetricsLogger, write_json
from vla_rl.monitoring.progress import Progress
from vla_rl.monitoring.sinks import sinks
from vla_rl.reporting.page import write_report
from vla_rl.run.action_phase import eval_actions
from vla_rl.run.eval_phase import (
    eval_offline,
    eval_rl,
    eval_sft,
    eval_student,
    eval_test,
    report,
)
from vla_rl.run.offline_phase import phase_offline
from vla_rl.run.random_phase import phase_random
from vla_rl.run.reward_phases import phase_reward
from vla_rl.run.rl_phase import phase_rl
from vla_rl.run.sft_phase import phase_collect, phase_sft

# What each phase does; it returns what belongs into the phase's record.
FUNCTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "collect": phase_collect,
    "sft": phase_sft,
    "random": phase_random,
    "eval_sft": eval_sft,
    "reward": phase_reward,
    "offline": phase_offline,
    "eval_offline": eval_offline,
    "rl": phase_rl,
    "eval_rl": eval_rl,
    "eval_student": eval_student,
    "eval_test": eval_test,
    "eval_actions": eval_actions,
    "report": report,
}


def run_pipeline(config: RunConfig, *, fresh: bool = False) -> Path:
    """Run every phase of ``config.phases`` that is not complete yet; returns the run folder."""
    preflight.check(config, fresh=fresh)
    folder = config.run_dir
    with contextlib.ExitStack() as resources:
        env = checked_env(config, resources, fresh) if pending(config, fresh) else None
        folder.mkdir(parents=True, exist_ok=True)
        with RunLock(folder), contextlib.ExitStack() as stack:
            if fresh:
                set_aside(folder)
            stack.push(functools.partial(leave_no_name, folder))
            take_folder(config, folder)
            torch.set_num_threads(preflight.threads(config))
            torch.manual_seed(config.seed)
            phases = read_phases(folder)
            write_json(folder / "versions.json", versions())
            progress = stack.enter_context(Progress())
            tree = configs.to_tree(config)
            wanted = sinks(
                folder, config.name, config.wandb, config.tensorboard, tree, progress.say
            )
            logger = stack.enter_context(MetricsLogger(folder, wanted))
            memory = stack.enter_context(MemoryWatch(phases.get("peak_memory_bytes", 0)))
            run = Run(config, logger, progress, phases, resources)
            if env is not None:
                run.env = env
            for name in config.phases:
                if not _skipped(run, name):
                    with _recorded(run, name, memory) as record:
                        found = FUNCTIONS[name](run)
                        record |= found
                    if "skipped" in found:
                        progress.say(f"{name}: skipped, {found['skipped']}")
            # The report's own seconds and the last peak are known only now.
            write_report(folder)
            progress.say(f"report: {folder / 'report.html'}")
    return folder


def _skipped(run: Run, name: str) -> bool:
    """Whether a phase is complete, which is then said."""
    record = run.phases.get(name, {"complete": False})
    if skipped := record["complete"] and name != "report":
        run.progress.say(f"{name}: complete ({record['seconds']:.0f} s), skipped")
    return skipped


@contextlib.contextmanager
def _recorded(run: Run, name: str, memory: MemoryWatch) -> Iterator[dict[str, Any]]:
    """A phase runs in the block and puts into the record what came of it: that stands in
    phases.json, however the phase ends."""
    record = run.phases.setdefault(name, {"seconds": 0.0, "complete": False})
    started, before = time.perf_counter(), record["seconds"]
    run.progress.say(f"{name}: {PHASES[name].says}")
    try:
        yield record
        record["complete"] = True
    except TrainingDiverged as error:
        raise TrainingDiverged(f"{error}{last_good_text(run.dir, name)}") from error
    finally:
        # (a phase may count what a killed process has not written here)
        record["seconds"] = max(record["seconds"], before + time.perf_counter() - started)
        run.phases["peak_memory_bytes"] = memory.sample()
        write_json(run.dir / "phases.json", run.phases)


def plan(config: RunConfig, *, fresh: bool = False) -> str:
    """The config and what `run_pipeline` would do with it, without doing or writing anything;
    raises as it would."""
    preflight.check(config, fresh=fresh)
    folder = config.run_dir
    kept = produced(folder) and not fresh
    if kept:
        changes(config, folder)
    phases = read_phases(folder) if kept else {}
    state = (
        "go on in"
        if kept
        else "start over in, with what is there kept aside:"
        if produced(folder)
        else "write to"
    )
    lines = [f"would {state} {folder}:"]
    for name in config.phases:
        record = phases.get(name, {})
        done = record.get("complete") and name != "report"
        lines.append(f"  {name:<9} {'complete, skipped' if done else PHASES[name].says}")
    return "\n".join([configs.to_yaml(config), *lines])
