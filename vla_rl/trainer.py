"""The two training loops: supervised (`train_sft`) and online RL (`train_rl`). Each is one function to read.

Both resume: their state (optimisers, counters, random generators, curriculum) is part of the checkpoint, and training N
steps equals training k, resuming, and training N − k.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import described, input_use, verdict
from vla_rl.checkpoint import keep_numbered, load_training_state, load_weights, restoring, save_checkpoint
from vla_rl.config import RLConfig
from vla_rl.guard import Finding, Guard
from vla_rl.interfaces import Algorithm, RewardModel
from vla_rl.learning.groups import GroupBuffer
from vla_rl.metrics import MetricsLogger, Progress
from vla_rl.rewards import RewardScorer
from vla_rl.rollout import RolloutEngine, pooled_stats
from vla_rl.specs import FAILURE_KINDS
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec, Observation, RolloutBatch, TaskSpec, Trajectory

UNLIMITED = -1  # the curriculum item that stands for fresh initial states of a task
UNLIMITED_INIT_STATES = 1_000_000


@dataclass
class Counters:
    """Totals of a phase over all its sessions."""

    iteration: int = 0
    episodes: int = 0
    control_steps: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def postponed_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM do not break into the block, which asks whether one came; a second one does break in.

    Where Python does not handle these signals, and outside the main thread, nothing changes.
    """
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    main = threading.current_thread() is threading.main_thread()
    handled = [s for s in (signal.SIGINT, signal.SIGTERM) if main and callable(signal.getsignal(s))]
    before = {s: signal.signal(s, note) for s in handled}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_sft(
    imitation: Imitation,
    *,
    folder: Path,
    logger: MetricsLogger,
    progress: Progress,
    validation: tuple[Observation, Tensor, Tensor] | None = None,
) -> Counters:
    """Supervised fine-tuning (behaviour cloning) up to ``imitation.config.updates`` updates.

    ``validation`` are decisions that are not trained on: with each checkpoint they show the loss and whether the policy
    looks at its images (`algorithms.validation.input_use`), and at the end a policy that does not is warned about.
    The checkpoint with its training state (the sampler's included) is written to ``folder`` at intervals, at the end, and
    on Ctrl-C after the present update; an existing one there is resumed.
    """
    counters = Counters()
    if (folder / "training_state").exists():
        load_weights(folder, imitation.policy)
        state = load_training_state(folder)
        with restoring(folder):
            imitation.load_state_dict(state["algorithm"])
            imitation.sampler.load_state_dict(state["sampler"])
            counters = Counters(**state["counters"])
    total, every = imitation.config.updates, imitation.config.checkpoint_every
    started = time.perf_counter() - counters.seconds
    with progress.task("SFT", total, start=counters.iteration) as bar, postponed_interrupts() as interrupted:
        while counters.iteration < total:
            metrics = imitation.update()
            counters.iteration += 1
            counters.seconds = time.perf_counter() - started
            last, stop = counters.iteration == total, interrupted()
            if counters.iteration % 10 == 0 or last:
                logger.log("sft", counters.iteration, metrics)
                bar.update(counters.iteration, loss=metrics["sft/loss"])
            if validation is not None and (counters.iteration % every == 0 or last):
                use = input_use(imitation.policy, *validation)
                logger.log("sft", counters.iteration, {f"validation/{name}": x for name, x in use.items()})
                if last:
                    progress.say(described(use))
                if last and (warning := verdict(use)):
                    progress.say(f"warning: {warning}")
            if counters.iteration % every == 0 or last or stop:
                state = {
                    "algorithm": imitation.state_dict(),
                    "sampler": imitation.sampler.state_dict(),
                    "counters": dict(vars(counters)),
                }
                save_checkpoint(folder, imitation.policy, state)
            if stop:
                progress.say(f"SFT is saved at update {counters.iteration} of {total}")
                break
        if interrupted():
            raise KeyboardInterrupt
    return counters


def propose_episodes(
    config: RLConfig, curriculum: Curriculum, tasks: Sequence[TaskSpec], iteration: int, sampling_round: int, seed: int
) -> list[EpisodeSpec]:
    """One round of episodes: ``group_size`` rollouts of each (task, initial state) the curriculum picks."""
    generator = torch.Generator().manual_seed(stable_seed("episodes", seed, iteration, sampling_round))
    by_id = {task.task_id: task for task in tasks}
    episodes = []
    items = curriculum.propose(config.episodes_per_iteration // config.group_size, generator)
    for group, (task_id, init_state_id) in enumerate(items):
        if init_state_id == UNLIMITED:
            init_state_id = int(torch.randint(UNLIMITED_INIT_STATES, (1,), generator=generator))
        instruction = int(torch.randint(len(by_id[task_id].instructions), (1,), generator=generator))
        for member in range(config.group_size):
            episodes.append(
                EpisodeSpec(
                    task_id=task_id,
                    init_state_id=init_state_id,
                    split="train",
                    seed=stable_seed("rollout", seed, iteration, sampling_round, group, member),
                    group_id=group,
                    instruction_index=instruction,
                    rollout_id=f"{seed}-{iteration}-{sampling_round}-{group}-{member}",
                )
            )
    return episodes


def train_rl(
    config: RLConfig,
    engine: RolloutEngine,
    algorithm: Algorithm,
    reward: RewardModel,
    curriculum: Curriculum,
    tasks: Sequence[TaskSpec],
    *,
    seed: int,
    folder: Path,
    logger: MetricsLogger,
    progress: Progress,
    evaluate: Callable[[int], dict[str, float]] | None = None,
    guard: Guard | None = None,
    on_finding: Callable[[Finding], tuple[int, int]] | None = None,
) -> Counters:
    """Online RL: roll out, score, update, ``config.iterations`` times. Resumes from ``folder`` where it holds a state.

    What the ``guard`` finds goes to ``on_finding``, which returns how many (episodes, control steps) it spent on that.
    """
    counters = Counters()
    buffer = GroupBuffer(config.success_low, config.success_high, config.max_staleness) if config.dynamic_sampling else None
    if (folder / "training_state").exists():
        load_weights(folder, engine.policy)
        state = load_training_state(folder)
        if state.get("critic") is not None:  # of before algorithms owned their critics
            state["algorithm"]["critic"]["weights"] = state["critic"]
        with restoring(folder):
            algorithm.load_state_dict(state["algorithm"])
            curriculum.load_state_dict(state["curriculum"])
            if buffer is not None:
                buffer.load_state_dict(state["buffer"])
            if state.get("reward") is not None:
                reward.load_state_dict(state["reward"])
            if guard is not None and state.get("guard") is not None:
                guard.load_state_dict(state["guard"])
                guard.enforce(folder)
            counters = Counters(**state["counters"])
    groups = config.episodes_per_iteration // config.group_size
    started = time.perf_counter() - counters.seconds
    several = getattr(getattr(algorithm, "config", None), "reward_names", ())
    scored: dict[str, Tensor] = {}  # rollout id → rewards, where groups are chosen by them
    begun = time.perf_counter()
    with progress.task("RL", config.iterations, start=counters.iteration) as bar, RewardScorer(reward) as scorer:
        while counters.iteration < config.iterations:
            metrics: dict[str, float] = {}
            evaluating = time.perf_counter()
            if evaluate is not None and config.eval_every and counters.iteration % config.eval_every == 0:
                metrics |= evaluate(counters.iteration)
            metrics |= {"time/evaluate": time.perf_counter() - evaluating}
            engine.publish(counters.iteration)
            rolled_out: list[Trajectory] = []
            stats: list[dict[str, float]] = []
            for sampling_round in range(config.max_sampling_rounds if buffer is not None else 1):
                episodes = propose_episodes(config, curriculum, tasks, counters.iteration, sampling_round, seed)
                result = engine.collect(episodes, progress=bar.inner, on_trajectory=scorer.begin)
                rolled_out += result.trajectories
                stats.append(result.stats)
                record_outcomes(curriculum, result.trajectories)
                if buffer is None:
                    break
                if config.dynamic_sampling_by == "reward":  # groups in which rewards differ, whatever their success
                    rewards, _, figures = scorer.score(result.trajectories)
                    add_figures(metrics, figures)
                    scored |= {t.rollout_id: r for t, r in zip(result.trajectories, rewards)}
                    buffer.add(
                        result.trajectories, {t.rollout_id: float(r.sum()) for t, r in zip(result.trajectories, rewards)}
                    )
                else:
                    buffer.add(result.trajectories)
                if len(buffer) >= groups:
                    break
            chosen = rolled_out if buffer is None else buffer.take(groups, counters.iteration)
            if chosen and all(t.rollout_id in scored for t in chosen):
                rewards = [scored.pop(t.rollout_id) for t in chosen]
                learn = torch.cat(rewards)
            else:  # (also the groups that a resumed run kept)
                rewards, learn, figures = scorer.score(chosen, several)
                add_figures(metrics, figures)
            updated = time.perf_counter()
            if chosen:
                metrics |= algorithm.update(RolloutBatch.from_trajectories(chosen), learn)
            metrics |= rollout_metrics(rolled_out, pooled_stats(stats))
            metrics |= {"rollout/reward": sum(float(r.sum()) for r in rewards) / max(1, len(rewards))}
            metrics |= {"rollout/learned_share": len(chosen) / len(rolled_out), "rollout/rounds": sampling_round + 1}
            metrics |= {"time/update": time.perf_counter() - updated}
            metrics |= curriculum.metrics()
            curriculum.tick()
            counters.iteration += 1
            counters.episodes += len(rolled_out)
            counters.control_steps += sum(t.num_control_steps for t in rolled_out)
            counters.seconds = time.perf_counter() - started
            metrics |= {"episodes": counters.episodes, "control_steps": counters.control_steps}
            now = time.perf_counter()  # writing this iteration's line and checkpoint belongs to the next one
            begun, metrics["time/iteration"] = now, now - begun
            found, figures = (None, {}) if guard is None else guard.look(counters.iteration, len(rolled_out), metrics)
            logger.log("rl", counters.iteration, metrics | figures)
            bar.update(counters.iteration, success=metrics["rollout/success"])
            if found is not None and on_finding is not None:
                spent = on_finding(found)
                counters.episodes, counters.control_steps = counters.episodes + spent[0], counters.control_steps + spent[1]
                scored.clear()  # the reward may be another now
            if found or counters.iteration % config.checkpoint_every == 0 or counters.iteration == config.iterations:
                state = {
                    "algorithm": algorithm.state_dict(),
                    "curriculum": curriculum.state_dict(),
                    "buffer": None if buffer is None else buffer.state_dict(),
                    "reward": reward.state_dict() if hasattr(reward, "state_dict") else None,
                    "guard": None if guard is None else guard.state_dict(),
                    "counters": dict(vars(counters)),
                }
                save_checkpoint(folder, engine.policy, state)
                if config.keep_checkpoints:
                    keep_numbered(folder, counters.iteration, config.keep_checkpoints)
            if found is not None and guard is not None:
                guard.enforce(folder)
    return counters


def add_figures(metrics: dict[str, float], figures: Mapping[str, float]) -> None:
    """Take the figures of a scoring into an iteration's: seconds add up, of others the last ones count."""
    for name, value in figures.items():
        metrics[name] = value + (metrics.get(name, 0.0) if name.startswith("time/") else 0.0)


def rollout_metrics(trajectories: Sequence[Trajectory], stats: Mapping[str, float]) -> dict[str, float]:
    """Success, length and failures of this iteration's episodes, and the engine's figures (of all rounds).

    ``rollout/failure/KIND`` are shares of all episodes; they are left out where the env does not tell how episodes fail.
    """
    steps = [t.num_control_steps for t in trajectories]
    wins = [t.num_control_steps for t in trajectories if t.success]
    metrics = {
        "rollout/success": sum(t.success for t in trajectories) / len(trajectories),
        "rollout/control_steps": sum(steps) / len(steps),
        "rollout/control_steps_to_success": sum(wins) / len(wins) if wins else float("nan"),
    }
    failures = [t.failure for t in trajectories if not t.success]
    if any(failures) or not failures:
        metrics |= {f"rollout/failure/{kind}": failures.count(kind) / len(trajectories) for kind in FAILURE_KINDS}
    return metrics | {f"engine/{k}": float(v) for k, v in stats.items()}


def record_outcomes(curriculum: Curriculum, trajectories: Sequence[Trajectory]) -> None:
    """Tell the curriculum each group's successes."""
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.episode.group_id, []).append(trajectory)
    for members in groups.values():
        episode = members[0].episode
        item = (episode.task_id, episode.init_state_id)
        if item not in curriculum:  # unlimited initial states: one item per task
            item = (episode.task_id, UNLIMITED)
        curriculum.record(item, sum(t.success for t in members), len(members))
