"""The rules of ``vla-rl advise``: is a start one that RL can learn from, and what to change if not?

`checks` judges `Figures`: each with a number, the bounds it is held against, a verdict (`GOOD`,
`WATCH` or `BAD`) and a remedy. It reads no file and runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vla_rl.advice.suggestions import (
    better_start,
    explores_by,
    first_successes,
    larger_groups,
    less_exploration,
    more_exploration,
    sees_more,
)
from vla_rl.algorithms.validation import BLIND, DEAF, FLAT, WEAK
from vla_rl.checks.options import check_run
from vla_rl.config import RunConfig
from vla_rl.config.algorithms import advantage_of
from vla_rl.errors import ConfigError
from vla_rl.evaluation.outcome import moving_dims
from vla_rl.evaluation.statistics import difference_interval, wilson_interval
from vla_rl.options import EnvOptions, PolicyOptions, view
from vla_rl.types import EmbodimentSpec, Trajectory

GOOD, WATCH, BAD = "good", "watch", "bad"
# success: RL learns from between the first two; from the last on nothing is left
LOW, HIGH, DONE = 0.05, 0.65, 0.90
SPARE = 1.5  # time limit over the length of a demonstration: below it RL mostly learns to be faster
MIXED = (0.1, 0.3)  # share of groups in which some succeed and some fail: bad below, good from
# success with sampled actions over that with the most likely ones: bad below, good from
SAMPLED = (0.25, 0.5)
FIRST = 1.2  # loss of the decisions with which episodes begin over that of all
OVERFIT = 1.1  # loss on held-out demonstrations at the end of SFT over its least
# half-ranges that sampling moves a chunk by: below 0.05 RL found nothing new
# (docs/explanation/diffusion_flow.md)
SPREAD = 0.06
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
        return (
            f"{self.successes} of {self.episodes} = {self.share:.0%} (95 % interval {low:.0%} to "
            f"{high:.0%})"
        )


@dataclass
class Figures:
    """What is known of a start; None or empty where it is not.

    ``tasks`` {task: held-out success}, of the tasks that RL trains on. ``failures`` {kind:
    episodes}. ``sampled`` is success with sampled actions, measured as ``sampled_by`` says.
    ``mixed`` counts groups of ``group_size`` episodes in which some succeed and some fail;
    ``spread`` is how far sampling moves a chunk (`chunk_spread`), in half-ranges. ``image`` are
    SFT's figures (`algorithms.validation.input_use`), ``losses`` those on held-out demonstrations
    in order. ``limits`` and ``demonstrations`` {task: control steps}; the latter as lists, "" for
    any task. ``guard`` is what RL's guard says of the first iterations ("": nothing is wrong).
    """

    tasks: dict[str, Rate] = field(default_factory=dict)
    deterministic: bool = True
    failures: dict[str, int] = field(default_factory=dict)
    sampled: Rate | None = None
    sampled_by: str = ""
    mixed: Rate | None = None
    spread: float | None = None
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
        return Rate(
            sum(r.successes for r in self.tasks.values()),
            sum(r.episodes for r in self.tasks.values()),
        )


@dataclass(frozen=True)
class Check:
    """One figure judged. ``text`` says it in words, ``bounds`` what it is held against."""

    name: str
    value: float
    text: str
    bounds: str
    verdict: str
    remedy: str = ""


# ---------------------------------------------------------------------------------------- the rules
def checks(figures: Figures, config: RunConfig, folder: Path) -> list[Check]:
    """Judge what is known. ``config`` and ``folder`` of the run serve the remedies' wording (and
    what RL compares)."""
    found = [
        *_success(figures, config, folder),
        *_tasks(figures),
        *_failures(figures, config),
        *_image_use(figures, config),
        *_image_features(figures, config),
        *_instruction_use(figures, config),
        *_first_loss(figures, config),
        *_losses(figures, config),
        *_time_limit(figures),
        *_sampled(figures, config, folder),
        *_groups(figures, config),
        *_spread(figures, config),
    ]
    if figures.guard is not None:
        text = figures.guard or "success comes and the policy moves"
        found.append(
            Check(
                "first iterations of RL",
                float(bool(figures.guard)),
                text,
                "nothing that the guard finds",
                BAD if figures.guard else GOOD,
            )
        )
    try:
        check_run(config)
    except ConfigError as error:
        found.append(
            Check("settings of RL", 1.0, str(error), "none that stop it from learning", BAD)
        )
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
        exact = view(config.env, EnvOptions).action_noise == 0
        noise = ", noise in what is executed (env.action_noise=0.1)" if exact else ""
        remedy = (
            "hardly anything is left to learn: make it harder (other tasks, a start from fewer "
            f"demonstrations{noise})"
        )
    elif share > HIGH:
        verdict, remedy = (
            WATCH,
            "little is left to learn: fewer demonstrations, or a harder task, show more",
        )
    yield Check(
        "success of the start", share, str(rate), f"{LOW:.0%} to {HIGH:.0%}", verdict, remedy
    )


def _tasks(figures: Figures) -> Iterator[Check]:
    if len(figures.tasks) < 2:
        return
    # fewer say little of one task
    told = {name: r.share for name, r in figures.tasks.items() if r.episodes >= 10}
    never = [name for name, share in told.items() if share < LOW]
    always = [name for name, share in told.items() if share > DONE]
    shares = ", ".join(f"{name} {r.share:.0%}" for name, r in figures.tasks.items())
    remedy = (
        "curriculum.strategy=frontier curriculum.temperature=0.2: more episodes for the tasks in "
        "between"
    )
    if never:
        remedy += f"; more demonstrations of {', '.join(never)}"
    count = len(never) + len(always)
    bounds = f"no task below {LOW:.0%} or above {DONE:.0%}"
    yield Check(
        "tasks apart",
        float(count),
        shares,
        bounds,
        WATCH if count else GOOD,
        remedy if count else "",
    )


def _failures(figures: Figures, config: RunConfig) -> Iterator[Check]:
    total = sum(figures.failures.values())
    if not total:
        return
    counts = sorted(figures.failures.items(), key=lambda item: -item[1])
    kind, share = counts[0][0].replace("_", " "), counts[0][1] / total
    remedy = ""
    if share > 0.5 and "reach" in kind:
        remedy = f"it does not find the object: look at the image use; {better_start(config)}"
    elif figures.failures.get("wrong_object", 0) > total / 3:
        remedy = (
            "it goes by where things lie, not by the instruction: demonstrations of each "
            "instruction in the same layouts, and in more of them; sft.first_share above "
            f"{config.sft.first_share:g}; in RL with PPO a memory of successes "
            "(algorithm.memory.episodes=256)"
        )
    elif share > 0.5 and "time" in kind:
        remedy = "it is on its way when time is up: raise env.horizon"
    text = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts if count)
    bounds = "no more than half never reached or out of time, a third of the wrong object"
    yield Check("failures by kind", share, text, bounds, WATCH if remedy else GOOD, remedy)


def _image_use(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if "image_use" not in figures.image:
        return
    loss = max(abs(figures.image["loss"]), 1e-9)
    share = figures.image["image_use"] / loss
    cameras = {
        k.removeprefix("image_use/"): v / loss
        for k, v in figures.image.items()
        if k.startswith("image_use/")
    }
    apart = "".join(f", {name} alone {value:+.0%}" for name, value in cameras.items())
    text = f"with the images of other rows the loss of {loss:.3f} changes by {share:+.0%}{apart}"
    remedy = ""
    if share < WEAK:
        word = "blind" if share < BLIND else "nearly blind"
        remedy = (
            f"the policy is {word}: {sees_more(config)}a lower sft.learning_rate (now "
            f"{config.sft.learning_rate:g}), {better_start(config)}"
        )
    yield Check(
        "image use",
        share,
        text,
        f"at least {WEAK:.0%} of the loss",
        BAD if remedy else GOOD,
        remedy,
    )


def _image_features(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if "image_spread" not in figures.image:
        return
    spread, remedy = figures.image["image_spread"], ""
    if spread < FLAT:
        remedy = (
            f"every picture looks nearly the same to it: {sees_more(config)}{better_start(config)}"
        )
    text = f"the image features of different moments differ by {spread:.3f}"
    yield Check(
        "image features", spread, text, f"at least {FLAT:g}", WATCH if remedy else GOOD, remedy
    )


def _instruction_use(figures: Figures, config: RunConfig) -> Iterator[Check]:
    """Only of several tasks: one may be told in other words, which change nothing."""
    if len(figures.tasks) < 2 or "instruction_use" not in figures.image:
        return
    loss = max(abs(figures.image["loss"]), 1e-9)
    share = figures.image["instruction_use"] / loss
    remedy = ""
    if share < DEAF:
        remedy = (
            "it goes by what it sees, and takes either object where two tasks share a scene "
            "(elsewhere nothing is amiss): demonstrations of those tasks in the same layouts, more "
            f"of them, sft.first_share above {config.sft.first_share:g}"
        )
    text = f"with the instructions of other rows the loss of {loss:.3f} changes by {share:+.0%}"
    yield Check(
        "instruction use",
        share,
        text,
        f"at least {DEAF:.0%} of the loss",
        WATCH if remedy else GOOD,
        remedy,
    )


def _first_loss(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if "first_loss" not in figures.image or figures.image["loss"] <= 0:
        return
    first, loss = figures.image["first_loss"], figures.image["loss"]
    remedy = ""
    if first > FIRST * loss:
        hidden = config.sft.augment.proprio
        remedy = (
            "where to go is read from where the arm already is, and little known as an episode "
            "begins: "
            + (f"sft.augment.proprio above {hidden:g}" if hidden else "sft.augment.proprio=0.5")
            + f", sft.first_share above {config.sft.first_share:g}, demonstrations from more "
            "initial states, or more disturbed ones (collect.action_noise)"
        )
    text = f"{first:.3f}, over all decisions {loss:.3f}"
    yield Check(
        "loss as episodes begin",
        first / loss,
        text,
        f"at most {FIRST:g} times",
        WATCH if remedy else GOOD,
        remedy,
    )


def _losses(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if len(figures.losses) < 2 or min(figures.losses) <= 0:
        return
    ratio = figures.losses[-1] / min(figures.losses)
    remedy = (
        f"more demonstrations, or fewer updates (sft.updates below {config.sft.updates})"
        if ratio > OVERFIT
        else ""
    )
    text = f"{figures.losses[-1]:.3f} at the end, {min(figures.losses):.3f} at its least"
    bounds = f"at most {OVERFIT:g} times its least"
    yield Check(
        "loss on held-out demonstrations", ratio, text, bounds, WATCH if remedy else GOOD, remedy
    )


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
    text = (
        f"{limit} control steps, demonstrations of {task} take {mean:.0f} on average: {ratio:.2f} "
        "times"
    )
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
    verdict, remedy, bounds = (
        GOOD,
        "",
        f"at least {SAMPLED[1]:.0%} of that with the most likely actions",
    )
    if start is not None and figures.deterministic and start.successes:
        ratio = sampled.share / start.share
        apart = (
            difference_interval(
                start.successes, start.episodes, sampled.successes, sampled.episodes
            )[0]
            > 0
        )
        if apart and ratio < SAMPLED[1]:
            verdict = BAD if ratio < SAMPLED[0] else WATCH
            remedy = f"sampling costs most of the success: {less_exploration(config)}"
        text += f", {ratio:.0%} of that with the most likely ones"
    yield Check("success with sampled actions", sampled.share, text, bounds, verdict, remedy)


def _groups(figures: Figures, config: RunConfig) -> Iterator[Check]:
    if figures.mixed is None:
        return
    share = figures.mixed.share
    text = f"{figures.mixed.successes} of {figures.mixed.episodes} groups of {figures.group_size}"
    verdict = GOOD if share >= MIXED[1] else WATCH
    if share < MIXED[0] and advantage_of(config.algorithm).grouped:
        verdict = BAD  # where groups are all that is compared
    remedy = (
        ""
        if verdict == GOOD
        else f"{more_exploration(config)}; for GRPO {larger_groups(config, GROUP)}"
    )
    yield Check(
        "groups with both outcomes", share, text, f"at least {MIXED[1]:.0%}", verdict, remedy
    )


def chunk_spread(groups: Sequence[Sequence[Trajectory]], embodiment: EmbodimentSpec) -> float:
    """How far sampled actions differ from the same state: the standard deviation over a group of
    what its first chunks ask for in the mean of their control steps, averaged over groups, in
    half-ranges; the largest of all but the grippers.

    Noise that each control step draws anew averages out within a chunk, and shows little here as in
    what the robot does.
    """
    low, high = torch.tensor(embodiment.action_low), torch.tensor(embodiment.action_high)
    moved = torch.stack(
        [torch.stack([t.actions[0][t.valid[0]].mean(0) for t in group]).std(0) for group in groups]
    )
    return float((moved.mean(0) / (high - low) * 2)[moving_dims(embodiment)].max())


def _spread(figures: Figures, config: RunConfig) -> Iterator[Check]:
    # noise of the actor's own
    if figures.spread is None or not explores_by(config)[0].startswith("policy"):
        return
    text = f"from one state sampled chunks differ by {figures.spread:.1%} of an action's half-range"
    remedy = ""
    if figures.spread < SPREAD:
        remedy = f"RL finds only what sampling tries: {', '.join(_wider(config))}"
    yield Check(
        "exploration",
        figures.spread,
        text,
        f"at least {SPREAD:.0%}",
        WATCH if remedy else GOOD,
        remedy,
    )


def _wider(config: RunConfig) -> Iterator[str]:
    """What makes the policy's samples differ more, of what it has not yet."""
    policy = view(config.policy, PolicyOptions)
    if policy.noise_correlation == 0 and policy.decoding != "autoregressive":
        yield "noise that a chunk's control steps share (policy.noise_correlation=0.8)"
    if policy.action_range and policy.action_range != "bounds":
        yield (
            "actions in units of the bounds before SFT and fewer denoising steps (as "
            "policy=nano_flow_wide has them)"
        )
    yield more_exploration(config)
