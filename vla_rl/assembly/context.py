"""What the phases of a run share: config, logs, the open env, the start, the demonstrations, the
held-out check."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vla_rl import build
from vla_rl.assembly.env_and_policy import acting_policy, open_env, open_policy, select_tasks
from vla_rl.assembly.folder import made_start
from vla_rl.assembly.recorded_env import RecordedEnv
from vla_rl.checkpoint import save_checkpoint
from vla_rl.config import RunConfig
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.data.frames import OnDisk
from vla_rl.data.lerobot_reader import load_demonstrations, successes
from vla_rl.data.published import Wanted, load_published
from vla_rl.devices import pick_device
from vla_rl.evaluation.evaluate import evaluate, evaluation_episodes
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.files import read_json
from vla_rl.interfaces import Collector, Env
from vla_rl.monitoring.metrics import BEST_FILE, MetricsLogger, write_json
from vla_rl.monitoring.progress import Progress
from vla_rl.options import PolicyOptions, view
from vla_rl.paths import is_address
from vla_rl.rewards.tools import leave_out
from vla_rl.rollout.engine import RolloutEngine
from vla_rl.types import TaskSpec

REWARD_FOLDER, LEARNER_FOLDER = "reward", "learner"


@dataclass
class Run:
    """What the phases share. ``env`` is opened at first use and closed with the run."""

    config: RunConfig
    logger: MetricsLogger
    progress: Progress
    phases: dict[str, Any]
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    told: set[str] = field(default_factory=set)  # of its data
    # where a cluster's actors are, once the collector has asked for them
    # (`vla_rl.cluster.allocation`)
    seats: Any = None

    @property
    def dir(self) -> Path:
        return self.config.run_dir

    @functools.cached_property
    def env(self) -> Env:
        return self.resources.enter_context(contextlib.closing(open_env(self.config)))

    @property
    def train_tasks(self) -> list[TaskSpec]:
        return select_tasks(self.env.tasks, self.config.tasks, exclude=self.config.held_out_tasks)

    @property
    def instructions(self) -> list[str]:
        """The instructions of the tasks to train on."""
        return [text for task in self.train_tasks for text in task.instructions]

    @property
    def eval_tasks(self) -> list[TaskSpec]:
        return self.train_tasks + self.held_out_tasks

    @property
    def held_out_tasks(self) -> list[TaskSpec]:
        return select_tasks(self.env.tasks, self.config.held_out_tasks or None)

    @property
    def device(self) -> torch.device:
        return pick_device(self.config.device)

    def tell(self, notes: Iterable[str]) -> None:
        """Say what is doubtful in the run's data, each thing once."""
        for note in notes:
            if note not in self.told:
                self.told.add(note)
                self.progress.say(f"warning: {note}")

    @property
    def has_dataset(self) -> bool:
        """Whether there are demonstrations: given ones, or those of phase collect."""
        return bool(self.config.dataset) or (self.dir / "dataset").is_dir()

    def acting(self, checkpoint: Path | str) -> Any:
        """The policy of a checkpoint, on the run's device; or that of who serves one."""
        embodiment = self.env.embodiment
        if is_address(checkpoint):
            return open_policy(self.config, checkpoint, embodiment)
        return acting_policy(self.config, Path(checkpoint), embodiment).to(self.device)

    def engine(self, policy: Any) -> RolloutEngine:
        return RolloutEngine(self.env, policy, self.config.rollout)

    def collector(self, policy: Any) -> Collector:
        """Where the episodes of RL come from: this process, or a cluster."""
        if self.config.cluster_type != "local":
            return build.implementation("cluster", self.config.cluster_type)(self, policy)
        return build.implementation("collector", self.config.collector_type)(
            self.config.collector, self.engine(policy)
        )


def keep_best(run: Run, policy: Any, iteration: int, result: EvaluationResult) -> dict[str, Any]:
    """Keep the policy as ``checkpoints/best`` if more of the held-out episodes succeed than with
    any before; beside it, ``best.json`` says which it is. All evaluations of a run meet the same
    episodes. Returns the note (empty: none)."""
    c, note = run.config, run.dir / BEST_FILE
    if "rl" not in c.phases or not c.rl.keep_best:
        return {}
    best = (
        read_json(note, "remove it, and the next evaluation is the best") if note.exists() else {}
    )
    if not best or result.success_rate > best["success"]:
        save_checkpoint(run.dir / "checkpoints" / "best", policy, keep_last_good=False)
        best = {"iteration": iteration, "success": result.success_rate, "episodes": result.episodes}
        write_json(note, best)
    return best


def start_checkpoint(run: Run) -> Path:
    """Where evaluation and RL start: a checkpoint of this project, the result of SFT, random
    weights, or, where neither is among the phases or there, the published checkpoint that the
    policy's own config names (kept in this project's form for the run)."""
    c = run.config
    if c.checkpoint:
        return Path(c.checkpoint)
    if (made := made_start(c, c.run_dir)) is not None:
        return made
    if not view(c.policy, PolicyOptions).checkpoint:
        return run.dir / "checkpoints" / "sft"
    published = run.dir / "checkpoints" / "published"
    if not published.exists():
        policy = build.implementation("policy", c.policy_type).from_published(
            c.policy, run.env.embodiment
        )
        save_checkpoint(published, policy, keep_last_good=False)
    return published


def rl_start(run: Run) -> Path:
    """Where RL starts: what the offline rounds left, where there were any."""
    offline = run.dir / "checkpoints" / "offline"
    return offline if offline.exists() else start_checkpoint(run)


def imitated(
    run: Run, policy: Any = None
) -> tuple[DemonstrationDataset, DemonstrationDataset | None, dict[str, Any]]:
    """What SFT trains on, what it is checked on, and figures of what was left out; in ``policy``'s
    chunks (None: those that are configured)."""
    dataset, validation = split_demonstrations(run, run.config.sft.base_part, policy)
    if run.config.sft.labels == "sent":
        dataset, validation = (
            dataset.as_sent(),
            None if validation is None else validation.as_sent(),
        )
    return dataset, validation, leave_out(dataset, run.config.sft.filter, run.progress.say)


def split_demonstrations(
    run: Run, base_part: bool = True, policy: Any = None, failures: bool = False
) -> tuple[DemonstrationDataset, DemonstrationDataset | None]:
    """What SFT trains on and what it is checked on; of hybrid rollouts what the frozen policy did
    too, or not; with ``failures`` also what failed, whatever ``sft.failures`` says."""
    collected, shown = (
        not run.config.dataset,
        demonstrations(run, failures or run.config.sft.failures),
    )
    run.tell(shown.notes)
    if policy is not None:
        shown.chunk_length = policy.chunk_length
    kept = shown if base_part else shown.without_base()
    if isinstance(run.env, RecordedEnv):  # the last ones of a sitting are not like the others
        return kept.split(run.config.sft.validation_episodes, 0.2, run.config.seed)
    return kept.split(run.config.sft.validation_episodes, 1.0 if collected else 0.2)


def demonstrations(run: Run, failures: bool = False) -> DemonstrationDataset:
    """What was collected, or ``dataset``, which may be in a form its benchmark published; what
    failed only if asked for."""
    c, embodiment = run.config, run.env.embodiment
    disk = OnDisk(run.dir, c.sft.ram_bytes)
    if isinstance(run.env, RecordedEnv):
        tasks = [task.task_id for task in run.train_tasks]
        return run.env.recording.demonstrations(c.policy.chunk_length, tasks, failures, disk)
    form = build.env_entry(c.env_type).demonstrations
    if not c.dataset or not form:
        folder = Path(c.one_dataset) if c.dataset else run.dir / "dataset"
        choose, texts = None if failures else successes, run.instructions if c.dataset else ()
        return load_demonstrations(
            folder, embodiment, c.policy.chunk_length, choose=choose, texts=texts, disk=disk
        )
    return load_published(
        build.attribute(form),
        c.one_dataset,
        embodiment,
        c.policy.chunk_length,
        Wanted(run.instructions, c.collect.episodes_per_task, c.collect.keep_noops, failures),
        disk,
    )


@contextlib.contextmanager
def evaluating(run: Run, policy: Any) -> Iterator[Collector | None]:
    """Where the held-out episodes of a phase run: in the rollout actors of a cluster that starts
    here, or in this process (None). Actors can stand in for the policy that they act with in RL
    alone, so not for the start of a run whose actor goes on top of it."""
    config, cluster = run.config, run.config.cluster
    acts = config.actor_type == "none" or policy.beneath() is not None
    if config.cluster_type != "ray" or cluster.evaluate != "rollouts" or not acts:
        yield None
        return
    with contextlib.closing(run.collector(policy)) as collector:
        collector.publish(0)
        yield collector


def evaluate_held_out(
    run: Run,
    policy: Any,
    label: str,
    collector: Collector | None = None,
    test: bool = False,
    **changes: Any,
) -> EvaluationResult:
    """On the states that choose, or on the ``test`` set; ``collector`` as of `evaluate`."""
    if test:
        changes |= {"split": "held_out", "video_episodes": 0}
    settings = dataclasses.replace(run.config.evaluate, **changes)
    states = settings.test_states(run.config.env) if test else None
    episodes = evaluation_episodes(run.eval_tasks, settings, states)
    with run.progress.task(f"evaluate {label}", len(episodes)) as bar:
        result = evaluate(
            run.engine(policy),
            run.eval_tasks,
            settings,
            progress=bar.update,
            episodes=episodes,
            collector=collector,
        )
    result.test = test
    result.held_out_tasks = [task.task_id for task in run.held_out_tasks]
    return result
