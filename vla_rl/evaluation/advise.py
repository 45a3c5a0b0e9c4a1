"""``vla-rl advise RUN``: is the start of a run one that RL can learn from, and what to change if not?

`read_figures` gathers what the run left (its evaluation after SFT, metrics, demonstrations), `roll_out_groups` measures what
only episodes tell, and `checks` judges: each figure with a number, the bounds it is held against, a verdict (`GOOD`, `WATCH`
or `BAD`) and a remedy. `checks` reads no file and runs nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.algorithms.settings import advantage_of
from vla_rl.algorithms.validation import BLIND, WEAK
from vla_rl.asked import AlgorithmFigures, EnvOptions, PolicyOptions, asked
from vla_rl.config import RunConfig
from vla_rl.data.lerobot_reader import episode_lengths
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation.outcome import EvaluationResult
from vla_rl.evaluation.statistics import difference_interval, wilson_interval
from vla_rl.learning.guard import (
    Guard,
    advice,
    better_start,
    first_successes,
    image_figures,
    more_exploration,
)
from vla_rl.reporting.metrics import METRICS_FILE, read_metrics
from vla_rl.run.preflight import check_run, is_sparse
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec, TaskSpec

GOOD, WATCH, BAD = "good", "watch", "bad"
LOW, HIGH, DONE = 0.05, 0.65, 0.90  # success: RL learns from between the first two; from the last on nothing is left
SPARE = 1.5  # time limit over the length of a demonstration: below it RL mostly learns to be faster
MIXED = (0.1, 0.3)  # share of groups in which some succeed and some fail: bad below, good from
SAMPLED = (0.25, 0.5)  # success with sampled actions over that with the most likely ones: bad below, good from
FIRST = 1.2  # loss of the decisions with which episodes begin over that of all
OVERFIT = 1.1  # loss on held-out demonstrations at the end of SFT over its least
GROUP = 4  # members of a group where rl.group_size is 1


@dataclass(frozen=True)
class Rate:
    """``successes`` of ``episodes``."""

    successes: int
    episodes: int

    @property
    def share(self) -> float:
        return self.successes / self.episodes if self.episodes else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.successes, self.episodes)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.successes} of {self.episodes} = {self.share:.0%} (95 % interval {low:.0%} to {high:.0%})"


@dataclass
class Figures:
    """What is known of a start; None or empty where it is not.

    ``tasks`` {task: held-out success}, of the tasks that RL trains on. ``failures`` {kind: episodes}. ``sampled`` is success
    with sampled actions, measured as ``sampled_by`` says. ``mixed`` counts groups of ``group_size`` episodes in which some
    succeed and some fail. ``image`` are SFT's figures (`algorithms.validation.input_use`), ``losses`` those on held-out
    demonstrations in order. ``limits`` and ``demonstrations`` {task: control steps}; the latter as lists, "" for any task.
    ``guard`` is what RL's guard says of the first iterations ("": nothing is wrong).
    """

    tasks: dict[str, Rate] = field(default_factory=dict)
    deterministic: bool = True
    failures: dict[str, int] = field(default_factory=dict)
    sampled: Rate | None = None
    sampled_by: str = ""
    mixed: Rate | None = None
    group_size: int = 1
    image: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    demonstrations: dict[str, list[int]] = field(default_factory=dict)
    guard: str | None = None

    @property
    def success(self) -> Rate | None:
        if not self.tasks:
            return None
        return Rate(sum(r.successes for r in self.tasks.values()), sum(r.episodes for r in self.tasks.values()))


@dataclass(frozen=True)
class Check:
    """One figure judged. ``text`` says it in words, ``bounds`` what it is held against."""

    name: str
    value: float
    text: str
    bounds: str
    verdict: str
    remedy: str = ""


# -------------------------------------------------------------------------------------------------------------- the rules
def checks(figures: Figures, config: RunConfig, folder: Path) -> list[Check]:
    """Judge what is known. ``config`` and ``folder`` of the run serve the remedies' wording (and what RL compares)."""
    found = [
        *_success(figures, config, folder),
        *_tasks(figures),
        *_failures(figures, config),
        *_image_use(figures, config),
        *_first_loss(figures, config),
        *_losses(figures, config),
        *_time_limit(figures),
        *_sampled(figures, config, folder),
        *_groups(figures, config),
    ]
    if figures.guard is not None:
        text = figures.guard or "success comes and the policy moves"
        found.append(Check("first iterations of RL", float(bool(figures.guard)), text, "nothing that the guard finds",
                           BAD if figures.guard else GOOD))  # fmt: skip
    try:
        check_run(config)
    except ConfigError as error:
        found.append(Check("settings of RL", 1.0, str(error), "none that stop it from learning", BAD))
    return found


def overall(found: Sequence[Check]) -> str:
    """The worst verdict."""
    return max((c.verdict for c in found), key=(GOOD, WATCH, BAD).index, default=GOOD)


def _success(figures: Figures, config: RunConfig, folder: Path) -> Iterator[Check]:
    rate = figures.success
    if rate is None:
        return
    share, (low, high) = rate.share, rate.interval
    verdict, remedy = GOOD, ""
    if share < LOW:
        verdict = BAD if share < 0.02 and high < 0.15 else WATCH
        remedy = "; ".join(first_successes(config, folder))
    elif share > DONE:
        verdict = BAD if low > 0.8 else WATCH
        remedy = (
            "hardly anything is left to learn: make it harder (wider initial states, other tasks, perturbations), or start "
            "from fewer demonstrations"
        )
    elif share > HIGH:
        verdict, remedy = WATCH, "little is left to learn: fewer demonstrations, or a harder task, show more"
    yield Check("success of the start", share, str(rate), f"{LOW:.0%} to {HIGH:.0%}", verdict, remedy)


def _tasks(figures: Figures) -> Iterator[Check]:
    if len(figures.tasks) < 2:
        return
    told = {name: r.share for name, r in figures.tasks.items() if r.episodes >= 10}  # fewer say little of one task
    never = [name for name, share in told.items() if share < LOW]
    always = [name for name, share in told.items() if share > DONE]
    shares = ", ".join(f"{name} {r.share:.0%}" for name, r in figures.tasks.items())
    remedy = "curriculum.strategy=frontier curriculum.temperature=0.2: more episodes for the tasks in between"
    if never:
        remedy += f"; more demonstrations of {', '.join(never)}"
    count = len(never) + len(always)
    bounds = f"no task below {LOW:.0%} or above {DONE:.0%}"
    yield Check("tasks apart", float(count), shares, bounds, WATCH if count else GOOD, remedy if count else "")


def _failures(figures: Figures, config: RunConfig) -> Iterator[Check]:
    total = sum(figures.failures.values())
    if not total:
        return
    counts = sorted(figures.failures.items(), key=lambda item: -item[1])
    kind, share = counts[0][0].replace("_", " "), counts[0][1] / total
    remedy = ""
    if share > 0.5 and "reach" in kind:
        remedy = f"it does not find the object: look at the image use; {better_start(config)}"
    elif share > 0.5 and "object" in kind:
        remedy = "it takes the wrong thing: more demonstrations of each instruction"
    elif share > 0.5 and "time" in kind:
        remedy = "it is on its way when time is up: raise env.horizon"
    text = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts if count)
    bounds = "no more than half never reached, of the wrong object or out of time"
    yield Check("failures by kind", share, text, bounds, WATCH if remedy else GOOD, remedy)


def _image_use(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if "image_use" not in figures.image:
        return
    loss = max(abs(figures.image["loss"]), 1e-9)
    share = figures.image["image_use"] / loss
    cameras = {k.removeprefix("image_use/"): v / loss for k, v in figures.image.items() if k.startswith("image_use/")}
    apart = "".join(f", {name} alone {value:+.0%}" for name, value in cameras.items())
    text = f"with the images of other rows the loss of {loss:.3f} changes by {share:+.0%}{apart}"
    remedy = ""
    if share < WEAK:
        word = "blind" if share < BLIND else "nearly blind"
        remedy = (
            f"the policy is {word}: policy.feature_norm=position where it is another, a lower sft.learning_rate "
            f"(now {config.sft.learning_rate:g}), {better_start(config)}"
        )
    yield Check("image use", share, text, f"at least {WEAK:.0%} of the loss", BAD if remedy else GOOD, remedy)


def _first_loss(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if "first_loss" not in figures.image or figures.image["loss"] <= 0:
        return
    first, loss = figures.image["first_loss"], figures.image["loss"]
    remedy = ""
    if first > FIRST * loss:
        hidden = config.sft.augment.proprio
        remedy = (
            "where to go is read from where the arm already is, and little known as an episode begins: "
            + (f"sft.augment.proprio above {hidden:g}" if hidden else "sft.augment.proprio=0.5")
            + ", demonstrations from more initial states, or more disturbed ones (collect.action_noise)"
        )
    text = f"{first:.3f}, over all decisions {loss:.3f}"
    yield Check("loss as episodes begin", first / loss, text, f"at most {FIRST:g} times", WATCH if remedy else GOOD, remedy)


def _losses(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if len(figures.losses) < 2 or min(figures.losses) <= 0:
        return
    ratio = figures.losses[-1] / min(figures.losses)
    remedy = f"more demonstrations, or fewer updates (sft.updates below {config.sft.updates})" if ratio > OVERFIT else ""
    text = f"{figures.losses[-1]:.3f} at the end, {min(figures.losses):.3f} at its least"
    bounds = f"at most {OVERFIT:g} times its least"
    yield Check("loss on held-out demonstrations", ratio, text, bounds, WATCH if remedy else GOOD, remedy)


def _time_limit(figures: Figures) -> Iterator[Check]:
    rows = []
    for task, limit in figures.limits.items():
        lengths = figures.demonstrations.get(task) or figures.demonstrations.get("")
        if lengths:
            mean = sum(lengths) / len(lengths)
            rows.append((limit / mean, task, limit, mean))
    if not rows:
        return
    ratio, task, limit, mean = min(rows)
    need = max(math.ceil(SPARE * mean) for _, _, _, mean in rows)
    remedy = ""
    if ratio < SPARE:
        remedy = f"RL would mostly buy speed: env.horizon={need}"
    text = f"{limit} control steps, demonstrations of {task} take {mean:.0f} on average: {ratio:.2f} times"
    verdict = BAD if ratio < 1.0 else WATCH if remedy else GOOD
    yield Check("time limit", ratio, text, f"at least {SPARE:g} times", verdict, remedy)


def _sampled(figures: Figures, config: RunConfig, folder: Path) -> Iterator[Check]:
    sampled, start = figures.sampled, figures.success
    if sampled is None:
        return
    text = f"{sampled} in {figures.sampled_by}"
    if sampled.interval[1] < config.rl.guard_success:
        bounds = f"a 95 % interval that ends above {config.rl.guard_success:.0%}"
        remedy = f"RL would hardly ever see a success: {'; '.join(first_successes(config, folder))}"
        yield Check("success with sampled actions", sampled.share, text, bounds, BAD, remedy)
        return
    verdict, remedy, bounds = GOOD, "", f"at least {SAMPLED[1]:.0%} of that with the most likely actions"
    if start is not None and figures.deterministic and start.successes:
        ratio = sampled.share / start.share
        apart = difference_interval(start.successes, start.episodes, sampled.successes, sampled.episodes)[0] > 0
        if apart and ratio < SAMPLED[1]:
            verdict = BAD if ratio < SAMPLED[0] else WATCH
            remedy = f"sampling costs most of the success: {_less_noise(config)}"
        text += f", {ratio:.0%} of that with the most likely ones"
    yield Check("success with sampled actions", sampled.share, text, bounds, verdict, remedy)


def _less_noise(config: RunConfig) -> str:
    temperature = asked(config.policy, PolicyOptions).temperature
    return f"policy.temperature={0.7 * temperature:.2g}" if isinstance(temperature, int | float) else "less sampling noise"


def _groups(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if figures.mixed is None:
        return
    share = figures.mixed.share
    text = f"{figures.mixed.successes} of {figures.mixed.episodes} groups of {figures.group_size}"
    verdict = GOOD if share >= MIXED[1] else WATCH
    if share < MIXED[0] and advantage_of(config.algorithm).grouped:
        verdict = BAD  # where groups are all that is compared
    size = 2 * max(config.rl.group_size, GROUP)
    remedy = "" if verdict == GOOD else f"{more_exploration(config)}; for GRPO rl.group_size={size} rl.dynamic_sampling=true"
    yield Check("groups with both outcomes", share, text, f"at least {MIXED[1]:.0%}", verdict, remedy)


# ---------------------------------------------------------------------------------------------------- what a run has left
def read_figures(config: RunConfig, folder: Path) -> Figures:
    """What the run left in its folder."""
    figures = Figures(group_size=config.rl.group_size, image=image_figures(config, folder))
    result = _result(folder / "eval_sft.json")
    trained = {k: v for k, v in result.get("tasks", {}).items() if k not in result.get("held_out_tasks", [])}
    figures.tasks = {name: Rate(s["successes"], s["episodes"]) for name, s in trained.items()}
    figures.deterministic = bool(result.get("deterministic", True))
    for task in trained.values():
        for kind, count in (task.get("failures") or {}).items():
            figures.failures[kind] = figures.failures.get(kind, 0) + int(count)
    if not figures.failures:
        figures.failures = {k: int(v) for k, v in (result.get("total", {}).get("failures") or {}).items()}
    figures.demonstrations = _demonstrations(config, folder)
    figures.limits = _limits(config, result, list(trained or figures.demonstrations))
    records = read_metrics(folder / METRICS_FILE)
    figures.losses = [r["validation/loss"] for r in records if r["phase"] == "sft" and r.get("validation/loss") is not None]
    sampled = _result(folder / "sampled_sft.json").get("total")
    if sampled:
        figures.sampled = Rate(sampled["successes"], sampled["episodes"])
        figures.sampled_by = "the same episodes"
    _read_rl(figures, config, folder, [r for r in records if r["phase"] == "rl" and "rollout/success" in r])
    return figures


def _read_rl(figures: Figures, config: RunConfig, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Success of the start in RL's own episodes (until the policy's first update), and what the guard says."""
    movement = asked(config.algorithm, AlgorithmFigures).movement
    guard = Guard(config.rl, movement, is_sparse(config), advice(config, folder))
    before, start, changed = 0, Rate(0, 0), False
    for row in rows:
        episodes, before = int(row["episodes"]) - before, int(row["episodes"])
        if not changed:
            start = Rate(start.successes + round(row["rollout/success"] * episodes), start.episodes + episodes)
            changed = not row.get(movement.critic_alone)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        guard.look(int(row["step"]), episodes, numbers)
    if start.episodes and figures.sampled is None:
        figures.sampled, figures.sampled_by = start, "RL's first episodes"
    if config.rl.guard_iterations and len(guard.rows) >= config.rl.guard_iterations:
        figures.guard = guard.finding.text if guard.finding else ""


def _limits(config: RunConfig, result: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, int]:
    """The time limit of each task; without ``env.horizon`` that of its episodes that failed, which is when time was up."""
    horizon = asked(config.env, EnvOptions).horizon
    if horizon:
        return dict.fromkeys(tasks, int(horizon))
    limits: dict[str, int] = {}
    for o in result.get("outcomes", []):
        if o["task_id"] in tasks and not o["success"]:
            limits[o["task_id"]] = max(limits.get(o["task_id"], 0), int(o["control_steps"]))
    return limits


def _demonstrations(config: RunConfig, folder: Path) -> dict[str, list[int]]:
    """Lengths of the successful demonstrations that the start was trained on, as far as they are at hand."""
    places = [folder / "dataset", *([Path(config.dataset)] if config.dataset else [])]
    if config.checkpoint:
        places.append(Path(config.checkpoint).parent.parent / "dataset")
    return next((found for place in places if (found := episode_lengths(place))), {})


def _result(path: Path) -> dict[str, Any]:
    """An evaluation's figures, counted from its episodes; empty where there is none. `UserError` for a damaged file."""
    return EvaluationResult.load(path).to_dict() if path.exists() else {}


# --------------------------------------------------------------------------------------------------------------- rollouts
def group_episodes(tasks: Sequence[TaskSpec], episodes: int, size: int, seed: int) -> list[EpisodeSpec]:
    """Groups of ``size`` episodes from one initial state of the train split each, tasks in turn; at least ``episodes``."""
    out = []
    for group in range(-(-episodes // size)):
        task, state = tasks[group % len(tasks)], stable_seed("advise", seed, group) % 1_000_000
        text = group // len(tasks) % max(1, len(task.instructions))
        for member in range(size):
            name = f"advise-{seed}-{group}-{member}"
            out.append(EpisodeSpec(task.task_id, state, "train", stable_seed(name), group, text, name))
    return out


def roll_out_groups(figures: Figures, config: RunConfig, checkpoint: Path, episodes: int) -> None:
    """Roll out the start with sampled actions; fills ``sampled``, ``mixed`` and ``group_size``."""
    from vla_rl.devices import pick_device
    from vla_rl.reporting.progress import Progress
    from vla_rl.rollout.engine import RolloutEngine
    from vla_rl.run import opening

    size = config.rl.group_size if config.rl.group_size > 1 else GROUP
    with contextlib.closing(opening.open_env(config)) as env, Progress() as progress:
        policy = opening.acting_policy(config, checkpoint, env.embodiment).to(pick_device(config.device))
        tasks = opening.select_tasks(env.tasks, config.tasks, exclude=config.held_out_tasks)
        specs = group_episodes(tasks, episodes, size, config.seed)
        with progress.task("rollouts", len(specs)) as bar:
            engine = RolloutEngine(env, policy, config.rollout)
            wins = [t.success for t in engine.collect(specs, progress=bar.update).trajectories]
    groups = [wins[i : i + size] for i in range(0, len(wins), size)]
    figures.sampled, figures.sampled_by = Rate(sum(wins), len(wins)), "the rollouts just made"
    figures.mixed = Rate(sum(any(g) and not all(g) for g in groups), len(groups))
    figures.group_size = size


def start_of(config: RunConfig, folder: Path) -> Path | None:
    """The checkpoint that RL starts from, if it is there."""
    places = [Path(config.checkpoint)] if config.checkpoint else [folder / "checkpoints" / n for n in ("sft", "published")]
    return next((place for place in places if place.is_dir()), None)


# -------------------------------------------------------------------------------------------------------------- the command
def advise(folder: Path, *, rollouts: int = 0, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Judge the start of a run; prints the checks, returns them JSON-ready.

    ``overrides`` change the run's config first (``env.horizon=90``: what if). Raises `UserError` for a folder that holds no
    start.
    """
    from vla_rl import config as configs

    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no run: it has no config.yaml. Name a folder that 'vla-rl train' wrote")
    config = configs.override(configs.load(folder / "config.yaml"), list(overrides))
    checkpoint = start_of(config, folder)
    figures = read_figures(config, folder)
    if checkpoint is None and not figures.tasks:
        raise UserError(
            f"{folder} holds no start to judge, neither checkpoints/sft nor eval_sft.json: finish its phases sft and "
            f"eval_sft"
        )
    if rollouts < 0 or (rollouts and checkpoint is None):
        raise UserError(f"--rollouts {rollouts} needs a number above 0 and the checkpoint that RL starts from in {folder}")
    if rollouts and checkpoint is not None:
        roll_out_groups(figures, config, checkpoint, rollouts)
    found = checks(figures, config, folder)
    missing = list(_missing(figures))
    print(render(found, missing))
    return {"run": str(folder), "verdict": overall(found), "checks": [asdict(c) for c in found], "not_measured": missing}


def _missing(figures: Figures) -> Iterator[str]:
    if figures.success is None:
        yield "held-out success: run the phase eval_sft"
    if not figures.image:
        yield "image use: sft.validation_episodes keeps demonstrations out to measure it on"
    if not figures.demonstrations or not figures.limits:
        yield "time limit against demonstrations: needs the run's dataset, and env.horizon or an episode that failed"
    if figures.mixed is None:
        yield "groups with both outcomes" + ("" if figures.sampled else ", success with sampled actions") + ": --rollouts 64"


SUMMARY = {
    GOOD: "RL can learn from this start.",
    WATCH: "RL can learn from this start; what is marked “watch” slows it down, or bends what it learns.",
    BAD: "RL would learn little from this start: mend what is marked “bad” first.",
}


def render(found: Sequence[Check], missing: Sequence[str] = ()) -> str:
    """The checks as text: a line each, its remedy below."""
    lines = []
    for c in found:
        lines.append(f"{c.verdict:<6} {c.name}: {c.text} [good: {c.bounds}]")
        if c.remedy:
            lines.append(f"       → {c.remedy}")
    lines += [f"–      not measured: {text}" for text in missing]
    return "\n".join([*lines, SUMMARY[overall(found)]])
