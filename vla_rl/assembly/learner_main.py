"""The learner's process of the concurrent rhythm: ``python -m vla_rl.assembly.learner_main
FOLDER``, told what to do on stdin.

``FOLDER/job.json`` says what it learns with: the run's config, the robot, the tasks. It opens no
env. It ends when stdin does, as the actor is gone then.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from vla_rl import config as configs
from vla_rl.assembly.context import LEARNER_FOLDER, Run
from vla_rl.assembly.learner import learner_of, trained_policy
from vla_rl.config import RunConfig
from vla_rl.errors import ConfigError, UserError
from vla_rl.files import explained, read_json
from vla_rl.interfaces import Env
from vla_rl.learning.episode_queue import FAILURE, JOB
from vla_rl.learning.learner_process import LearnerProcess
from vla_rl.learning.learner_server import LearnerServer
from vla_rl.learning.learners import ReplayLearner
from vla_rl.monitoring.metrics import write_json
from vla_rl.monitoring.progress import Progress
from vla_rl.types import EmbodimentSpec, TaskSpec

_GAVE_UP = 3  # exit status


@dataclass(frozen=True)
class Described:
    """What a learner needs to know of an env."""

    embodiment: EmbodimentSpec
    tasks: tuple[TaskSpec, ...]
    privileged_dim: int = 0


def serve(folder: Path, commands: queue.Queue[str]) -> None:
    """Learn until told to stop. Raises `UserError` for what the actor's user can mend."""
    job = read_json(folder / JOB, "the actor writes it: start the run again")
    config = configs.from_tree(job["config"])
    own = config.rl.concurrent
    os.nice(own.nice)
    torch.set_num_threads(own.threads)
    run = run_of(config, job)
    policy = trained_policy(run)
    learner = learner_of(run, policy)
    if not isinstance(learner, ReplayLearner):
        raise ConfigError(
            "rl.rhythm=concurrent needs an algorithm that learns from a replay, and "
            f"algorithm.type={config.algorithm_type} learns from the present policy's own episodes "
            "alone: use rl.rhythm=alternate"
        )
    LearnerServer(folder, policy, learner, own.publish_every, commands).run()


def run_of(config: RunConfig, job: dict[str, Any]) -> Run:
    """A `Run` without an env of its own, and without a log: the actor has both. ``job`` as of
    `job_of`."""
    run = Run(config, cast(Any, None), Progress(), {})
    tasks = tuple(
        TaskSpec(**{**task, "instructions": tuple(task["instructions"])}) for task in job["tasks"]
    )
    run.env = cast(Env, Described(EmbodimentSpec.from_dict(job["embodiment"]), tasks))
    return run


def job_of(
    config: RunConfig, embodiment: EmbodimentSpec, tasks: Sequence[TaskSpec]
) -> dict[str, Any]:
    """What a learner's process is told, JSON-ready."""
    return {
        "config": configs.to_tree(config),
        "embodiment": embodiment.to_dict(),
        "tasks": [dataclasses.asdict(task) for task in tasks],
    }


def learner_process(
    config: RunConfig, job: Mapping[str, Any], say: Callable[[str], None]
) -> LearnerProcess:
    """This module as the process beside an actor's, not started yet. ``job`` as of `job_of`."""
    own, pace = config.rl.concurrent, config.algorithm.updates_per_decision
    return LearnerProcess(
        config.run_dir / LEARNER_FOLDER, __name__, job, pace, own.restarts, say, own.hang_seconds
    )


def _listen(commands: queue.Queue[str]) -> None:
    for line in sys.stdin:
        commands.put(line.strip())
    os._exit(1)  # the actor is gone


def main(folder: Path) -> int:
    commands: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    try:
        serve(folder, commands)
    except (UserError, OSError) as error:
        text = str(error) if isinstance(error, UserError) else explained(error)
        if text is None:
            raise
        write_json(folder / FAILURE, {"error": type(error).__name__, "text": text})
        return _GAVE_UP
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
