"""A run: its folder, its phases, and how it picks up where it stopped.

``outputs/<name>/`` holds ``config.yaml``, ``versions.json``, ``phases.json``, ``metrics.jsonl``, ``dataset/``,
``reward/``, ``checkpoints/{sft,rl}``, ``eval_*.json``, ``videos/``, ``report.html`` and ``summary.json``. Each phase
leaves its result there and is skipped once that is complete; an interrupted phase goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vla_rl import build, preflight
from vla_rl import config as configs
from vla_rl.algorithms.curriculum import Curriculum
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import ROWS
from vla_rl.checkpoint import EMBODIMENT, RunLock, load_policy, save_checkpoint
from vla_rl.collect import collect_demonstrations
from vla_rl.config import MACHINE_KEYS, RunConfig
from vla_rl.dataset import DatasetSampler, DemonstrationDataset, check_dataset, load_demonstrations, load_published
from vla_rl.devices import pick_device
from vla_rl.errors import ConfigError, TrainingDiverged, UserError
from vla_rl.evaluate import EvaluationResult, compare, comparison_text, evaluate, write_failure_videos, write_videos
from vla_rl.files import check_checkpoint, read_json
from vla_rl.guard import NO_SUCCESS, Finding, Guard, advice
from vla_rl.interfaces import AlgorithmContext, Env
from vla_rl.learning.learners import learner_for
from vla_rl.learning.online import OnlineRL
from vla_rl.learning.plan import UNLIMITED
from vla_rl.learning.sft import train_sft
from vla_rl.metrics import BEST_FILE, METRICS_FILE, MemoryWatch, MetricsLogger, Progress, versions, write_json
from vla_rl.preflight import fallback_config, is_sparse
from vla_rl.reporting import words
from vla_rl.reporting.page import write_report
from vla_rl.reward_data import ROLLOUTS, demonstration_trajectories, load_rollouts, roll_out, save_rollouts
from vla_rl.reward_quality import Quality, write_quality
from vla_rl.reward_tools import co_evolving, enforce, fit_and_judge, needs_judging
from vla_rl.rewards import (
    RewardContext,
    SwitchingReward,
    build_reward,
    fit_updates,
    is_learned,
    load_reward,
    reads_policy,
    save_reward,
)
from vla_rl.robustness import choose, compare_robustness, run_robustness
from vla_rl.rollout import RolloutEngine
from vla_rl.sinks import sinks
from vla_rl.types import EmbodimentSpec, TaskSpec, Trajectory

REWARD_FOLDER = "reward"


@dataclass
class Run:
    """What the phases share. ``env`` is opened at first use and closed with the run."""

    config: RunConfig
    logger: MetricsLogger
    progress: Progress
    phases: dict[str, Any]
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

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
    def eval_tasks(self) -> list[TaskSpec]:
        return self.train_tasks + self.held_out_tasks

    @property
    def held_out_tasks(self) -> list[TaskSpec]:
        return select_tasks(self.env.tasks, self.config.held_out_tasks or None)

    @property
    def device(self) -> torch.device:
        return pick_device(self.config.device)

    def engine(self, policy: Any) -> RolloutEngine:
        return RolloutEngine(self.env, policy, self.config.rollout)


def run_pipeline(config: RunConfig, *, fresh: bool = False) -> Path:
    """Run every phase of ``config.phases`` that is not complete yet; returns the run folder."""
    preflight.check(config, fresh=fresh)
    folder, resources = config.run_dir, contextlib.ExitStack()
    with resources:
        env = _checked_env(config, resources) if preflight.pending(config, fresh) else None
        return _run_phases(config, folder, fresh, resources, env)


def _run_phases(
    config: RunConfig, folder: Path, fresh: bool, resources: contextlib.ExitStack, env: Env | None
) -> Path:
    """The phases of `run_pipeline`, with what its checks have opened."""
    folder.mkdir(parents=True, exist_ok=True)
    with RunLock(folder), contextlib.ExitStack() as stack:
        if fresh:
            _set_aside(folder)
        stack.push(functools.partial(_leave_no_name, folder))
        _same_config(config, folder)
        torch.set_num_threads(preflight.threads(config))
        torch.manual_seed(config.seed)
        phases = preflight.read_phases(folder)
        write_json(folder / "versions.json", versions())
        progress = stack.enter_context(Progress())
        tree = configs.to_tree(config)
        wanted = sinks(folder, config.name, config.wandb, config.tensorboard, tree, progress.say)
        logger = stack.enter_context(MetricsLogger(folder, wanted))
        memory = stack.enter_context(MemoryWatch(phases.get("peak_memory_bytes", 0)))
        run = Run(config, logger, progress, phases, resources)
        if env is not None:
            run.env = env
        for name in config.phases:
            record = phases.setdefault(name, {"seconds": 0.0, "complete": False})
            if record["complete"] and name != "report":
                progress.say(f"{name}: complete ({record['seconds']:.0f} s), skipped")
                continue
            started, before = time.perf_counter(), record["seconds"]
            progress.say(f"{name}: {DESCRIPTIONS[name]}")
            counted = 0.0
            try:
                result = PHASE_FUNCTIONS[name](run) or {}
                counted = result.pop("seconds", 0.0)  # by the phase itself; a killed process has not written them here
                record |= result | {"complete": True}
            except TrainingDiverged as error:
                raise TrainingDiverged(f"{error}{_last_good(folder, name)}") from error
            finally:
                record["seconds"] = max(counted, before + time.perf_counter() - started)
                phases["peak_memory_bytes"] = memory.peak
                write_json(folder / "phases.json", phases)
        # The report's own seconds and the last peak are known only now.
        write_report(folder)
        progress.say(f"report: {folder / 'report.html'}")
    return folder


def plan(config: RunConfig, *, fresh: bool = False) -> str:
    """The config and what `run_pipeline` would do with it, without doing or writing anything; raises as it would."""
    preflight.check(config, fresh=fresh)
    folder = config.run_dir
    kept = _produced(folder) and not fresh
    if kept:
        _changes(config, folder)
    phases = preflight.read_phases(folder) if kept else {}
    state = "go on in" if kept else "start over in, with what is there kept aside:" if _produced(folder) else "write to"
    lines = [f"would {state} {folder}:"]
    for name in config.phases:
        record = phases.get(name, {})
        done = record.get("complete") and name != "report"
        lines.append(f"  {name:<9} {'complete, skipped' if done else DESCRIPTIONS[name]}")
    return "\n".join([configs.to_yaml(config), *lines])


# ---------------------------------------------------------------------------------------------------------------- phases
def phase_collect(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint or c.dataset:
        return {"skipped": "a checkpoint or dataset was given"}
    tasks = [t.task_id for t in run.train_tasks]
    # those that SFT keeps out of training come on top
    collect = dataclasses.replace(c.collect, episodes_per_task=c.collect.episodes_per_task + c.sft.validation_episodes)
    with run.progress.task("collect", len(tasks) * collect.episodes_per_task) as bar:
        return collect_demonstrations(
            c.env_type, c.env, tasks, collect, seed=c.seed, folder=run.dir / "dataset", progress=bar.update
        )


def phase_sft(run: Run) -> dict[str, Any]:
    c = run.config
    if c.checkpoint:
        return {"skipped": "a checkpoint was given"}
    dataset, validation = _split_demonstrations(run)
    torch.manual_seed(c.seed)
    policy = build.implementation("policy", c.policy_type).from_statistics(
        c.policy, run.env.embodiment, dataset.action_stats, dataset.proprio_stats
    )
    policy.to(run.device).train()
    sampler = DatasetSampler(dataset, c.sft.batch_size, seed=c.seed)
    counters = train_sft(
        Imitation(_seeded(c.sft, c.seed), policy, sampler),
        folder=run.dir / "checkpoints" / "sft",
        logger=run.logger,
        progress=run.progress,
        validation=None if validation is None else validation.evenly(ROWS),
    )
    return {"updates": counters.iteration, "seconds": counters.seconds}


def phase_eval(run: Run, name: str, checkpoint: Path) -> dict[str, Any]:
    c = run.config
    policy = acting_policy(c, checkpoint, run.env.embodiment).to(run.device)
    result = _evaluate(run, policy, name)
    result.save(run.dir / f"eval_{name}.json")
    video = run.dir / "videos" / f"{name}.mp4"
    write_videos(result, video, control_hz=run.env.embodiment.control_hz)
    write_failure_videos(result, video)
    iteration = 0 if name == "sft" else c.rl.iterations
    run.logger.log("eval", iteration, {f"eval_{name}/success": result.success_rate})
    for path in sorted(video.parent.glob(f"{name}*.mp4")):
        run.logger.video("eval", iteration, path)
    run.progress.say(result.table())
    best = keep_best(run, policy, iteration, result)
    if best and name == "rl":
        run.progress.say(f"best: {words.best(best)}; kept as {run.dir / 'checkpoints' / 'best'}")
    record: dict[str, Any] = {"episodes": result.episodes, "control_steps": result.control_steps}
    if hasattr(c.env, "initial_states"):  # a benchmark says whether they are its own
        record["initial_states"] = c.env.initial_states(result.split)
    if hasattr(c.env, "describe"):
        record["conditions"] = c.env.describe()
        run.progress.say(f"conditions: {record['conditions']}")
    if name == "sft" and c.evaluate.deterministic and _samples_too(c, policy):
        sampled = _evaluate(run, policy, f"{name} (sampled)", deterministic=False, video_episodes=0)
        sampled.save(run.dir / f"sampled_{name}.json")
        run.logger.log("eval", 0, {f"eval_{name}_sampled/success": sampled.success_rate})
        low, high = sampled.interval
        run.progress.say(
            f"the same episodes with sampled actions, from which RL starts: {sampled.success_rate:.1%} "
            f"(95 % interval {low:.1%} to {high:.1%}), deterministic: {result.success_rate:.1%}"
        )
        record["success"], record["sampled_success"] = result.success_rate, sampled.success_rate
    return record


def keep_best(run: Run, policy: Any, iteration: int, result: EvaluationResult) -> dict[str, Any]:
    """Keep the policy as ``checkpoints/best`` if more of the held-out episodes succeed than with any before; beside it,
    ``best.json`` says which it is. All evaluations of a run meet the same episodes. Returns the note (empty: none)."""
    c, note = run.config, run.dir / BEST_FILE
    if "rl" not in c.phases or not c.rl.keep_best:
        return {}
    best = read_json(note, "remove it, and the next evaluation is the best") if note.exists() else {}
    if not best or result.success_rate > best["success"]:
        save_checkpoint(run.dir / "checkpoints" / "best", policy, keep_last_good=False)
        best = {"iteration": iteration, "success": result.success_rate, "episodes": result.episodes}
        write_json(note, best)
    return best


def _samples_too(config: RunConfig, policy: Any) -> bool:
    if config.evaluate.sampled_too is None:
        return "denoising_step" in getattr(policy, "log_prob_axes", ())
    return config.evaluate.sampled_too


def phase_eval_sft(run: Run) -> dict[str, Any]:
    return phase_eval(run, "sft", start_checkpoint(run))


def phase_reward(run: Run) -> dict[str, Any]:
    """Train a learned reward on demonstrations and rollouts of the starting policy, judge it on rollouts it has not
    seen, and stop where it is not good enough. Other rewards need nothing of the kind."""
    c = run.config
    if not needs_judging(c.reward_type, c.reward):
        return {"skipped": f"reward {c.reward_type} is not learned"}
    policy = acting_policy(c, start_checkpoint(run), run.env.embodiment).to(run.device)
    quality, episodes, steps = _train_reward(run, policy, start_reward(run, policy), c.reward_type, c.reward, "start")
    return {"episodes": episodes, "control_steps": steps, "verdict": quality.verdict}


def _train_reward(
    run: Run, policy: Any, reward: Any, kind: str, config: Any, rollouts_name: str
) -> tuple[Quality, int, int]:
    """Train and judge a reward on demonstrations and new rollouts of the policy as it is: (judgement, episodes, control
    steps). Raises `UserError` where it is not good enough (``reward_check.on_bad``)."""
    check, seed = run.config.reward_check, run.config.seed
    with run.progress.task("rollouts", check.episodes) as bar:
        rollouts, steps = roll_out(run.engine(policy), run.train_tasks, check.episodes, seed, bar.update)
    save_rollouts(run.dir / ROLLOUTS / rollouts_name, rollouts)
    updates = fit_updates(config)
    with run.progress.task("fit", updates) as bar:
        quality, figures = fit_and_judge(
            reward, reward_demonstrations(run), rollouts, check, kind, seed,
            lambda done, loss: bar.update(min(done, updates), loss=loss),
        )  # fmt: skip
    page = write_quality(quality, run.dir)
    if is_learned(reward):
        save_reward(run.dir / REWARD_FOLDER, kind, config, reward, figures)
    run.progress.say(quality.text())
    enforce(quality, check, page)
    return quality, len(rollouts), steps


def start_reward(run: Run, policy: Any) -> Any:
    """The configured reward, with the run's demonstrations where it wants some."""
    c = run.config
    reward = build_reward(c.reward_type, _seeded(c.reward, c.seed), _reward_context(run, policy))
    if getattr(reward, "wants_demonstrations", False):
        reward.set_demonstrations(reward_demonstrations(run))
    return reward


def rl_reward(run: Run, policy: Any) -> Any:
    """The reward of the phase rl: as phase reward trained it, refitted on the way where the config says so."""
    c = run.config
    reward = start_reward(run, policy)
    if is_learned(reward) and (run.dir / REWARD_FOLDER).is_dir():
        load_reward(run.dir / REWARD_FOLDER, c.reward_type, reward)
    seeds = []
    if c.reward_check.refit_every:
        kept = run.dir / ROLLOUTS / "start"
        seeds = [*reward_demonstrations(run), *(load_rollouts(kept) if kept.is_dir() else [])]
    reward = co_evolving(reward, c.reward_check, seeds)
    return reward if c.rl.fallback == "none" else SwitchingReward(reward, lambda: fallback_reward(run, policy))


def fallback_reward(run: Run, policy: Any) -> Any:
    """The progress reward of ``rl.fallback``, not trained yet."""
    config = _seeded(fallback_config(run.config), run.config.seed)
    return build_reward("process", config, _reward_context(run, policy))


def rl_guard(run: Run, policy: Any, reward: Any) -> tuple[Guard | None, Callable[[Finding], tuple[int, int]]]:
    """The guard of RL (None: off), and what the run does with what it finds."""
    c = run.config

    def on_finding(found: Finding) -> tuple[int, int]:
        run.phases.setdefault("rl", {})["guard"] = found.text
        write_json(run.dir / "phases.json", run.phases)  # at once: the report of a run that is killed shows it too
        run.progress.say(f"warning: {found.text}")
        if found.kind != NO_SUCCESS or not isinstance(reward, SwitchingReward):
            return 0, 0
        progress = fallback_reward(run, policy)
        _, episodes, steps = _train_reward(run, policy, progress, "process", fallback_config(c), "fallback")
        reward.switch(progress)
        return episodes, steps

    if c.rl.guard == "off" or not c.rl.guard_iterations:
        return None, on_finding
    return Guard(c.rl, is_sparse(c), advice(c, run.dir)), on_finding


def reward_demonstrations(run: Run) -> list[Trajectory]:
    """The run's demonstrations as trajectories; none where it starts from a checkpoint without a dataset."""
    c = run.config
    if not c.reward_check.demonstrations or not (c.dataset or (run.dir / "dataset").is_dir()):
        return []
    dataset, _ = _split_demonstrations(run)
    check = c.reward_check
    return demonstration_trajectories(dataset, stride=check.stride, limit=check.demonstrations, seed=c.seed)


def _shown(run: Run, policy: Any) -> list[Trajectory]:
    """The demonstrations in the policy's own chunks, for a replay; none where the run has no dataset."""
    if not (run.config.dataset or (run.dir / "dataset").is_dir()):
        return []
    return demonstration_trajectories(_split_demonstrations(run)[0], stride=policy.chunk_length)


def _reward_context(run: Run, policy: Any) -> RewardContext:
    """A copy of the policy serves image features: those of the policy itself would drift while it learns."""
    frozen = copy.deepcopy(policy) if reads_policy(run.config.reward) else None
    return RewardContext(run.config.algorithm, run.env.embodiment, frozen, run.config.reward_check.stride)


def _start_policy(run: Run) -> Any:
    return acting_policy(run.config, start_checkpoint(run), run.env.embodiment).to(run.device)


def _critic(run: Run) -> Any:
    c = run.config
    critic = build.implementation("critic", c.critic_type)(run.env.privileged_dim, _seeded(c.critic, c.seed))
    return None if critic is None else critic.to(run.device)


def phase_rl(run: Run) -> dict[str, Any]:
    c = run.config
    policy = _start_policy(run)
    algorithm = build.implementation("algorithm", c.algorithm_type).from_context(
        _seeded(c.algorithm, c.seed), policy, AlgorithmContext(lambda: _critic(run), lambda: _start_policy(run))
    )
    init_states = range(c.rl.init_states) if c.rl.init_states else [UNLIMITED]
    items = [(task.task_id, init) for task in run.train_tasks for init in init_states]

    def held_out_check(iteration: int) -> dict[str, float]:
        result = _evaluate(run, policy, f"iteration {iteration}", video_episodes=0)
        keep_best(run, policy, iteration, result)
        return {"eval/success": result.success_rate}

    reward = rl_reward(run, policy)
    guard, on_finding = rl_guard(run, policy, reward)
    loop = OnlineRL(
        c.rl,
        run.engine(policy),
        learner_for(algorithm, run.dir / "replay", c.seed, lambda: _shown(run, policy)),
        reward,
        Curriculum(c.curriculum, items),
        run.train_tasks,
        c.seed,
        evaluate=held_out_check,
        guard=guard,
        on_finding=on_finding,
    )
    counters = loop.run(run.dir / "checkpoints" / "rl", run.logger, run.progress)
    return {
        "episodes": counters.episodes, "control_steps": counters.control_steps, "iterations": counters.iteration,
        "seconds": counters.seconds,
    }  # fmt: skip


def phase_eval_rl(run: Run) -> dict[str, Any]:
    return phase_eval(run, "rl", run.dir / "checkpoints" / "rl")


def phase_report(run: Run) -> dict[str, Any]:
    """The report is written once all figures are in, by `run_pipeline`."""
    return {}


PHASE_FUNCTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "collect": phase_collect,
    "sft": phase_sft,
    "eval_sft": phase_eval_sft,
    "reward": phase_reward,
    "rl": phase_rl,
    "eval_rl": phase_eval_rl,
    "report": phase_report,
}
DESCRIPTIONS = {
    "collect": "scripted demonstrations into a LeRobotDataset",
    "sft": "supervised fine-tuning on the demonstrations",
    "eval_sft": "success of the starting policy on held-out initial states",
    "reward": "training and judging the reward, where it is a learned one",
    "rl": "online RL",
    "eval_rl": "success of the tuned policy on the same held-out initial states",
    "report": "writing report.html and summary.json",
}


# --------------------------------------------------------------------------------------------------------------- helpers
def open_env(config: RunConfig) -> Env:
    """The configured simulator in worker processes, or in this process for ``slots.workers`` = 0."""
    simulator = build.implementation("env", config.env_type)
    slots = config.slots
    if slots.workers == 0:
        inline = build.attribute("sim.inline:InlineEnv")
        return inline(simulator(config.env), num_slots=slots.slots_per_worker)
    pool = build.attribute("sim.pool:ProcessPool")
    return pool(
        functools.partial(simulator, config.env),
        num_workers=slots.workers,
        slots_per_worker=slots.slots_per_worker,
        max_chunk_length=max(128, getattr(config.policy, "chunk_length", 0)),
        hang_timeout=slots.hang_timeout,
        max_restarts=slots.max_restarts,
    )


def _checked_env(config: RunConfig, resources: contextlib.ExitStack) -> Env:
    """The open env, once the tasks, the robot of checkpoint and dataset, the cameras and the critic are known to fit it."""
    pick_device(config.device)
    env = resources.enter_context(contextlib.closing(open_env(config)))
    tasks = select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
    if not tasks and {"collect", "sft", "reward", "rl"} & set(config.phases):
        raise ConfigError(
            f"held_out_tasks={list(config.held_out_tasks)} leaves no task to train on. This env has: "
            f"{', '.join(t.task_id for t in env.tasks)}"
        )
    if config.dataset and not build.env_entry(config.env_type).demonstrations:
        check_dataset(config.dataset, env.embodiment)
    if config.checkpoint:
        own = check_checkpoint(Path(config.checkpoint))
        env.embodiment.require(own, "the env in use", f"the checkpoint {config.checkpoint}")
    else:
        _require_cameras(config.policy, env.embodiment)
    if "rl" in config.phases and config.critic_type == "privileged" and env.privileged_dim < 1:
        raise ConfigError(f"critic=privileged reads simulator state, and env.type={config.env_type} shows none: critic=none")
    return env


def _require_cameras(policy: Any, embodiment: EmbodimentSpec) -> None:
    """Raise `ConfigError` where a new policy's config asks for cameras that the env does not show, or cannot cut up."""
    wanted, known = getattr(policy, "cameras", []), embodiment.camera_names
    missing = [name for name in wanted if ":" not in name and name not in known]  # (feature:camera is another form)
    if missing:
        raise ConfigError(f"policy.cameras has {missing[0]!r}, and the env shows only {', '.join(known)}: name those")
    for camera in embodiment.cameras:
        if hasattr(policy, "check_camera") and camera.name in (wanted or known):
            policy.check_camera(camera.name, camera.height, camera.width)


def policy_factory(name: str) -> Any:
    """The policy class a checkpoint names."""
    return build.implementation("policy", name)


def acting_policy(config: RunConfig, path: Path, embodiment: EmbodimentSpec) -> Any:
    """The policy of a checkpoint of this project, with the changes to its own config that the run asks for."""
    return load_policy(path, policy_factory, expected_embodiment=embodiment, changes=config.policy_changes)


def open_policy(config: RunConfig, path: Path, embodiment: EmbodimentSpec) -> Any:
    """The policy of a checkpoint of this project, or of a published one that ``config.policy`` says how to read."""
    if (path / EMBODIMENT).exists() or not hasattr(config.policy, "checkpoint"):
        return acting_policy(config, path, embodiment)
    published = dataclasses.replace(config.policy, checkpoint=str(path))
    return build.implementation("policy", config.policy_type).from_published(published, embodiment)


def export_policy(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint's policy in the form that its own project publishes (``save_pretrained``)."""
    if folder.exists():
        raise UserError(f"{folder} exists already: give the name of a folder that does not")
    policy = load_policy(checkpoint, policy_factory)
    if not hasattr(policy, "save_pretrained"):
        raise UserError(
            f"{checkpoint} holds a {policy.policy_type} policy, which has no form but this project's own: use the checkpoint"
        )
    policy.save_pretrained(folder)


def select_tasks(tasks: Sequence[TaskSpec], wanted: Sequence[str] | None, exclude: Sequence[str] = ()) -> list[TaskSpec]:
    """The named tasks in the suite's order; all of them for an empty list, none for None.

    Of an id like ``suite/3`` the last part is enough.
    """
    known = {name: task.task_id for task in tasks for name in (task.task_id.rpartition("/")[2], task.task_id)}
    missing = [name for name in [*(wanted or []), *exclude] if name not in known]
    if missing:
        raise ConfigError(f"unknown task {missing[0]!r}. This env has: {', '.join(sorted(t.task_id for t in tasks))}")
    if wanted is None:
        return []
    chosen, left_out = {known[name] for name in wanted}, {known[name] for name in exclude}
    return [t for t in tasks if (not wanted or t.task_id in chosen) and t.task_id not in left_out]


def evaluate_checkpoints(
    config: RunConfig,
    paths: Sequence[Path],
    *,
    episodes: int | None = None,
    per_task: int | None = None,
    video: Path | None = None,
    perturb: Sequence[str] = (),
    levels: Sequence[int] = (),
    held_out_tasks: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate one checkpoint, or two on the same episodes with a paired comparison; prints tables, returns JSON.

    ``episodes`` are spread over the tasks, unless ``per_task`` says how many each gets; without both, as the config says.
    ``perturb`` names perturbations under which they run again (see `vla_rl.robustness.choose`). ``held_out_tasks`` are
    those that training left out.
    """
    declared = getattr(build.implementation("env", config.env_type), "perturbations", {})
    chosen = choose(declared, perturb, levels, config.env_type) if perturb else {}
    with contextlib.closing(open_env(config)) as env, Progress() as progress:
        tasks = select_tasks(env.tasks, config.tasks)
        settings = dataclasses.replace(
            config.evaluate,
            episodes_per_task=per_task
            or (config.evaluate.episodes_per_task if episodes is None else max(1, -(-episodes // len(tasks)))),
            video_episodes=config.evaluate.video_episodes if video is not None else 0,
        )
        episodes_in_all = len(tasks) * settings.episodes_per_task
        results, robust = [], []
        for path in paths:
            policy = open_policy(config, path, env.embodiment).to(pick_device(config.device))
            with progress.task("evaluate", episodes_in_all) as bar:
                engine = RolloutEngine(env, policy, config.rollout)
                results.append(evaluate(engine, tasks, settings, progress=bar.update))
            results[-1].held_out_tasks = [
                t.task_id for t in tasks if {t.task_id, t.task_id.rpartition("/")[2]} & set(held_out_tasks)
            ]
            progress.say(f"{path}\n{results[-1].table()}")
            if chosen:

                def bars(name: str) -> Any:
                    return progress.task(f"evaluate {name}", episodes_in_all)

                robust.append(run_robustness(engine, tasks, settings, declared, chosen, results[-1], bars))
                progress.say(f"{path}\n{robust[-1].table()}")
        if video is not None:
            write_videos(results[0], video)
            write_failure_videos(results[0], video)
            for name, result in robust[0].factors.items() if robust else ():
                write_videos(result, video.with_name(f"{video.stem}_{name}{video.suffix}"))
        perturbed = [r.to_dict() for r in robust]
        if len(results) == 1:
            return results[0].to_dict() | ({"robustness": perturbed[0]} if perturbed else {})
        comparison = compare(*results)
        progress.say(comparison_text(comparison, str(paths[0]), str(paths[1])))
        document = {"results": [r.to_dict() for r in results], "comparison": comparison.to_dict()}
        if robust:
            table, figures = compare_robustness(*robust)
            progress.say(table)
            document |= {"robustness": perturbed, "robustness_comparison": figures}
        return document


def _seeded(config: Any, seed: int) -> Any:
    """The run's seed in a component's config, where it has one and leaves it at 0."""
    if any(f.name == "seed" for f in dataclasses.fields(config)) and config.seed == 0:
        return dataclasses.replace(config, seed=seed)
    return config


def start_checkpoint(run: Run) -> Path:
    """Where evaluation and RL start: a checkpoint of this project, the result of SFT, or, where SFT is not among the phases,
    the published checkpoint that the policy's own config names (kept in this project's form for the run)."""
    c = run.config
    trained, published = run.dir / "checkpoints" / "sft", run.dir / "checkpoints" / "published"
    if c.checkpoint:
        return Path(c.checkpoint)
    if "sft" in c.phases or trained.exists() or not getattr(c.policy, "checkpoint", ""):
        return trained
    if not published.exists():
        policy = build.implementation("policy", c.policy_type).from_published(c.policy, run.env.embodiment)
        save_checkpoint(published, policy, keep_last_good=False)
    return published


def _split_demonstrations(run: Run) -> tuple[DemonstrationDataset, DemonstrationDataset | None]:
    """What SFT trains on and what it is checked on."""
    collected = not run.config.dataset
    return _demonstrations(run).split(run.config.sft.validation_episodes, 1.0 if collected else 0.2)


def _demonstrations(run: Run) -> DemonstrationDataset:
    """The data to imitate: what was collected, or ``dataset``, which may be in a form its benchmark published."""
    c, embodiment = run.config, run.env.embodiment
    form = build.env_entry(c.env_type).demonstrations
    if not c.dataset or not form:
        folder = Path(c.dataset) if c.dataset else run.dir / "dataset"
        return load_demonstrations(folder, embodiment, chunk_length=c.policy.chunk_length)
    return load_published(
        build.attribute(form),
        c.dataset,
        embodiment,
        c.policy.chunk_length,
        instructions=[text for task in run.train_tasks for text in task.instructions],
        episodes_per_task=c.collect.episodes_per_task,
        keep_noops=c.collect.keep_noops,
    )


def _evaluate(run: Run, policy: Any, label: str, **changes: Any) -> EvaluationResult:
    settings = dataclasses.replace(run.config.evaluate, **changes)
    with run.progress.task(f"evaluate {label}", len(run.eval_tasks) * settings.episodes_per_task) as bar:
        result = evaluate(run.engine(policy), run.eval_tasks, settings, progress=bar.update)
    result.held_out_tasks = [task.task_id for task in run.held_out_tasks]
    return result


def _last_good(folder: Path, phase: str) -> str:
    """Where to go on from after ``phase`` diverged: another learning rate is another run, so it needs another name."""
    path = folder / "checkpoints" / phase
    return f" (In a new run: name=NEW_NAME checkpoint={path} and the changed settings.)" if path.exists() else ""


def _same_config(config: RunConfig, folder: Path) -> None:
    """Take the folder for this config: another one in it would mix results. Where ``rl.iterations`` has grown, the phases
    that hang on it are open again. Raises as `_changes`."""
    if not _produced(folder):  # by a run that failed or was killed before it came to anything
        _forget(folder)
    longer, phases = _changes(config, folder), preflight.read_phases(folder)
    if longer and phases:
        for name in {"rl", "eval_rl"} & phases.keys():
            phases[name]["complete"] = False
        write_json(folder / "phases.json", phases)  # before the config: a kill in between leaves the run as it was
    configs.save(config, folder / "config.yaml")


def _changes(config: RunConfig, folder: Path) -> bool:
    """Whether the config differs from the folder's in more RL iterations. `MACHINE_KEYS` may change too, and the name with
    that of the folder; anything else raises `UserError`."""
    path = folder / "config.yaml"
    if not path.exists():
        return False
    old, new = configs.to_tree(configs.load(path)), configs.to_tree(config)
    longer = new["rl"]["iterations"] > old["rl"]["iterations"]
    may_change = (*MACHINE_KEYS, "name:", *(["rl.iterations:"] if longer else []))
    changed = sorted(line for line in _differences(old, new) if not line.startswith(may_change))
    if changed:
        lines = "\n  ".join(changed)
        raise UserError(
            f"{folder} holds a run with another config:\n  {lines}\nGive this run its own name (name=...), or start over "
            f"with --fresh (the old folder is kept under another name)."
        )
    return longer


def _produced(folder: Path) -> bool:
    """Whether the folder holds anything that a run made, besides the notes that it begins with."""
    made = [folder / name for name in ("dataset", "checkpoints", "videos", ROLLOUTS, REWARD_FOLDER)]
    metrics = folder / METRICS_FILE
    logged = metrics.exists() and metrics.stat().st_size > 0
    return logged or any(p.exists() for p in made) or any(folder.glob("eval_*.json"))


def _forget(folder: Path) -> None:
    for name in ("config.yaml", "versions.json", "phases.json", METRICS_FILE):
        (folder / name).unlink(missing_ok=True)


def _leave_no_name(folder: Path, kind: type[BaseException] | None, *_: Any) -> None:
    """A run that failed before it made anything does not take its name: the lock then removes the empty folder."""
    if kind is not None and not _produced(folder):
        _forget(folder)


def _differences(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield f"{prefix}: {old!r} there, {new!r} now"


def _set_aside(folder: Path) -> None:
    kept = [p for p in folder.iterdir() if p.name != RunLock.FILE]
    if kept:
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        aside.mkdir()
        for path in kept:
            path.rename(aside / path.name)
