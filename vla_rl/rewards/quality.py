"""Is a reward worth training on? Figures of its progress curves against time and against task
success, and a verdict.

The curves are judged, not the rewards: a reward that adds the simulator's own success would look
perfect otherwise.

Definitions. VOC: Spearman correlation of progress with time on successes (VLAC §5.1; SC in SRPO's
benchmark is the same); VROC: the same judged from reversed input; VOC-F1: their harmonic mean; NR:
share of steps judged as going back, on successes; Mono: share of strictly rising steps on
successes; AUC: chance that a success is higher than a failure of its task at equal times; AUC ends:
chance that it ends higher, whenever that is, for which a clock is enough where successes end early
(`vla_rl.rewards.equal_times`, also for what clock and proprioception alone reach). The verdict
rests on the first. MMD (biased, RBF kernel, median distance as width), JS (base 2, 10 bins over 0 …
1) and SMD (difference of means over the pooled standard deviation) compare the ends of successes
and of failures. Calibration error: mean over 10 bins of |mean end − success rate|, weighted.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.config.episodes import RewardCheckConfig
from vla_rl.display.charts import Series, line_chart, percent
from vla_rl.errors import UserError
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.files import write_whole
from vla_rl.interfaces import RewardModel
from vla_rl.monitoring.metrics import write_json
from vla_rl.rewards.equal_times import Compared
from vla_rl.types import Observation, Trajectory

BINS = 10


# ----------------------------------------------------------------------------------- pure functions
def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks 1 … n; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2.0)[inverse]


def spearman(values: Sequence[float] | np.ndarray) -> float:
    """Spearman's correlation with time; NaN where they are constant."""
    a = ranks(np.asarray(values, np.float64))
    b = ranks(np.arange(len(a)))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else float("nan")


def voc_f1(voc: float, vroc: float) -> float:
    """2·VOC·VROC/(VOC + VROC); 0 where their sum is not positive."""
    return 2 * voc * vroc / (voc + vroc) if voc + vroc > 0 else 0.0


def negative_rate(critics: Sequence[float] | np.ndarray) -> float:
    """Share of critic values below 0."""
    values = np.asarray(critics, np.float64)
    values = values[np.isfinite(values)]
    return float((values < 0).mean()) if len(values) else float("nan")


def auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Chance that a positive scores higher than a negative, ties half (Mann and Whitney 1947);
    NaN without both."""
    if not len(positive) or not len(negative):
        return float("nan")
    both = ranks(
        np.concatenate([np.asarray(positive, np.float64), np.asarray(negative, np.float64)])
    )
    n, m = len(positive), len(negative)
    return float((both[:n].sum() - n * (n + 1) / 2) / (n * m))


def auc_interval(value: float, positives: int, negatives: int) -> tuple[float, float]:
    """95 % interval of an AUC (Hanley and McNeil 1982, Radiology 143); widened by one case each
    at 0 and 1."""
    if not positives or not negatives or math.isnan(value):
        return 0.0, 1.0
    v = min(max(value, 0.5 / (positives * negatives)), 1 - 0.5 / (positives * negatives))
    q1, q2 = v / (2 - v), 2 * v * v / (1 + v)
    variance = (v * (1 - v) + (positives - 1) * (q1 - v * v) + (negatives - 1) * (q2 - v * v)) / (
        positives * negatives
    )
    half = 1.96 * math.sqrt(max(variance, 0.0))
    return max(0.0, value - half), min(1.0, value + half)


def mmd(a: Sequence[float], b: Sequence[float]) -> float:
    """Maximum mean discrepancy of two samples: RBF kernel, width = median distance between all
    points; biased estimate."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not len(x) or not len(y):
        return float("nan")
    both = np.concatenate([x, y])
    distances = np.abs(both[:, None] - both[None])
    width = float(np.median(distances[np.triu_indices(len(both), 1)])) or 1.0
    kernel = np.exp(-0.5 * (distances / width) ** 2)
    n = len(x)
    return float(
        math.sqrt(
            max(0.0, kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean())
        )
    )


def jensen_shannon(a: Sequence[float], b: Sequence[float], bins: int = BINS) -> float:
    """Jensen–Shannon divergence (base 2, 0 … 1) of two samples in 0 … 1, over ``bins`` equal
    bins."""
    if not len(a) or not len(b):
        return float("nan")
    p, q = (np.histogram(np.clip(s, 0, 1), bins=bins, range=(0, 1))[0] / len(s) for s in (a, b))
    m = (p + q) / 2

    def kl(x: np.ndarray) -> float:
        there = x > 0
        return float((x[there] * np.log2(x[there] / m[there])).sum())

    return (kl(p) + kl(q)) / 2


def standardised_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """(mean a − mean b) / pooled standard deviation; infinite where neither varies and they
    differ."""
    if len(a) < 2 or len(b) < 2:
        return float("nan")
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    pooled = math.sqrt(
        (x.var(ddof=1) * (len(x) - 1) + y.var(ddof=1) * (len(y) - 1)) / (len(x) + len(y) - 2)
    )
    difference = float(x.mean() - y.mean())
    return (
        difference / pooled
        if pooled > 0
        else math.copysign(math.inf, difference)
        if difference
        else 0.0
    )


def calibration(
    ends: Sequence[float], success: Sequence[bool], bins: int = BINS
) -> tuple[float, float, list[dict[str, float]]]:
    """(expected calibration error, Brier score, rows) of the end of progress as a probability of
    success.

    A row: ``low`` of the bin, ``mean`` end in it, ``rate`` of success, ``count``.
    """
    p, y = np.asarray(ends, np.float64), np.asarray(success, np.float64)
    if not len(p):
        return float("nan"), float("nan"), []
    which = np.clip((p * bins).astype(int), 0, bins - 1)
    rows = [
        {
            "low": k / bins,
            "mean": float(p[which == k].mean()),
            "rate": float(y[which == k].mean()),
            "count": int(n),
        }
        for k in range(bins)
        if (n := (which == k).sum())
    ]
    error = sum(r["count"] * abs(r["mean"] - r["rate"]) for r in rows) / len(p)
    return float(error), float(((p - y) ** 2).mean()), rows


# ------------------------------------------------------------------------------------------ judging
@dataclass(frozen=True)
class Figures:
    """Figures over some trajectories (see the module). NaN: cannot be told from these
    trajectories."""

    trajectories: int
    successes: int
    voc: float
    vroc: float
    voc_f1: float
    negative_rate: float
    monotonic: float
    voc_failures: float
    auc: float
    auc_low: float
    auc_high: float
    auc_ends: float
    auc_clock: float
    auc_proprio: float
    mmd: float
    js: float
    smd: float
    calibration_error: float
    brier: float
    invalid_share: float


@dataclass(frozen=True)
class Quality:
    """The judgement: ``figures`` over all, per task, calibration rows, the verdict ("good",
    "bad" or "unknown") and why."""

    reward: str
    figures: Figures
    tasks: dict[str, Figures]
    calibration: list[dict[str, float]]
    verdict: str
    reasons: list[str]
    curves: list[tuple[list[float], bool]] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data.pop("curves")
        return data

    def text(self) -> str:
        """Table and verdict as plain text."""
        names = (
            "voc",
            "vroc",
            "negative_rate",
            "monotonic",
            "auc",
            "auc_proprio",
            "auc_ends",
            "auc_clock",
            "mmd",
            "js",
            "smd",
            "calibration_error",
            "invalid_share",
        )
        heads = (
            "VOC",
            "VROC",
            "NR",
            "Mono",
            "AUC",
            "proprio",
            "ends",
            "clock",
            "MMD",
            "JS",
            "SMD",
            "ECE",
            "invalid",
        )
        width = max([len("all tasks"), *(len(t) for t in self.tasks)])
        lines = [f"{'':<{width}} {'n':>5} {'wins':>5} " + " ".join(f"{h:>7}" for h in heads)]
        for task, f in [*self.tasks.items(), ("all tasks", self.figures)]:
            row = " ".join(f"{getattr(f, n):>7.3f}" for n in names)
            lines.append(f"{task:<{width}} {f.trajectories:>5} {f.successes:>5} {row}")
        lines.append(
            "AUC: success against failure at equal times, where a clock has 0.5; proprio: that of "
            "proprioception alone. ends: at their ends, whenever these are; clock: the same from "
            "how long they lasted alone."
        )
        return "\n".join([*lines, f"verdict: {self.verdict} ({'; '.join(self.reasons)})"])


def judge(
    reward: Any,
    trajectories: Sequence[Trajectory],
    name: str = "reward",
    check: RewardCheckConfig | None = None,
) -> Quality:
    """Judge ``reward.progress`` on trajectories whose success is known.

    Raises `UserError` for a reward without progress, or no trajectories.
    """
    if "progress" not in RewardModel.of(reward).can:
        raise UserError(
            f"reward {name!r} has no progress(trajectories), so there is nothing to judge: it "
            "scores whole trajectories from the task's own success"
        )
    if not trajectories:
        raise UserError(f"the quality of reward {name!r} needs trajectories, got none")
    curves = [c.double().numpy() for c in reward.progress(trajectories)]
    reverse = [c.double().numpy() for c in _reverse(reward, trajectories)]
    steps = (
        [c.double().numpy() for c in reward.critics(trajectories)]
        if "critics" in reward.can
        else None
    )
    steps = steps or [np.diff(c) for c in curves]
    rows = list(zip(trajectories, curves, reverse, steps, strict=True))
    compared = Compared.of(reward, trajectories)
    tasks = {
        task: _figures([r for r in rows if r[0].episode.task_id == task], compared.of_task(task))
        for task in dict.fromkeys(t.episode.task_id for t in trajectories)
    }
    figures = _figures(rows, compared)
    fine = [(float(c[-1]), t.success) for t, c, _, _ in rows if np.isfinite(c).all()]
    table = calibration([e for e, _ in fine], [s for _, s in fine])[2]
    verdict, reasons = decide(figures, check or RewardCheckConfig())
    plotted = [([float(v) for v in c], t.success) for t, c, _, _ in rows if np.isfinite(c).all()]
    return Quality(name, figures, tasks, table, verdict, reasons, plotted)


def _reverse(reward: Any, trajectories: Sequence[Trajectory]) -> list[Tensor]:
    """Progress judged from reversed input, put back into the order of time.

    A pairwise critic shows its pairs the other way round; any other model sees the episode played
    backwards.
    """
    if "reversal" in reward.can:
        return reward.reverse_progress(trajectories)
    return [c.flip(0) for c in reward.progress([backwards(t) for t in trajectories])]


def backwards(trajectory: Trajectory) -> Trajectory:
    """The same observations in reverse order, under another rollout id (for judging only;
    actions are not reversed)."""
    both = Observation.cat([trajectory.observations, trajectory.final_observation])
    order = torch.arange(len(both) - 1, -1, -1)
    return dataclasses.replace(
        trajectory,
        observations=both[order[:-1]],
        final_observation=both[order[-1:]],
        episode=dataclasses.replace(
            trajectory.episode, rollout_id=f"{trajectory.rollout_id}~backwards"
        ),
    )


def _figures(
    rows: Sequence[tuple[Trajectory, np.ndarray, np.ndarray, np.ndarray]], compared: Compared
) -> Figures:
    fine = [r for r in rows if np.isfinite(r[1]).all()]
    won, lost = [r for r in fine if r[0].success], [r for r in fine if not r[0].success]
    high, low = [float(r[1][-1]) for r in won], [float(r[1][-1]) for r in lost]

    def mean(values: Sequence[float] | np.ndarray) -> float:
        return float(np.mean(values)) if len(values) else float("nan")

    def order(curves: Sequence[np.ndarray]) -> float:  # a flat curve says nothing of order: 0
        return mean(
            [0.0 if math.isnan(s := spearman(c)) else s for c in curves if np.isfinite(c).all()]
        )

    voc, vroc = order([r[1] for r in won]), order([r[2] for r in won])
    separation = compared.reward
    interval = auc_interval(separation, *compared.counts)
    error, brier, _ = calibration([*high, *low], [True] * len(high) + [False] * len(low))
    return Figures(
        trajectories=len(rows),
        successes=sum(r[0].success for r in rows),
        voc=voc,
        vroc=vroc,
        voc_f1=voc_f1(voc, vroc) if won else float("nan"),
        negative_rate=negative_rate(np.concatenate([r[3] for r in won])) if won else float("nan"),
        monotonic=mean(np.concatenate([np.diff(r[1]) for r in won]) > 0) if won else float("nan"),
        voc_failures=order([r[1] for r in lost]),
        auc=separation,
        auc_low=interval[0],
        auc_high=interval[1],
        auc_ends=auc(high, low),
        auc_clock=compared.clock,
        auc_proprio=compared.proprio,
        mmd=mmd(high, low),
        js=jensen_shannon(high, low),
        smd=standardised_difference(high, low),
        calibration_error=error,
        brier=brier,
        invalid_share=1.0 - len(fine) / len(rows),
    )


def decide(f: Figures, check: RewardCheckConfig) -> tuple[str, list[str]]:
    """("good" | "bad" | "unknown", reasons). Unknown: no success, or no failure, to compare with;
    or not clearly better or worse than what a clock or proprioception alone say of success.

    A clock has an AUC of 1/2 at equal times, which the reward's interval has to leave below; it has
    to be above that of proprioception. Where that is perfect, the episodes cannot show that a
    reward looks at more than the arm.
    """
    bad = []
    if f.invalid_share > check.max_invalid:
        bad.append(
            f"{f.invalid_share:.0%} of the curves are invalid, more than {check.max_invalid:.0%}"
        )
    if f.auc < check.min_auc:
        bad.append(
            f"AUC {f.auc:.2f} (95 % {f.auc_low:.2f} to {f.auc_high:.2f}) at equal times is below "
            f"{check.min_auc:.2f}: what it sees says too little about success"
            + (
                f" (at their ends it has {f.auc_ends:.2f}, and a clock {f.auc_clock:.2f})"
                if f.auc_ends > f.auc
                else ""
            )
        )
    if f.voc < check.min_voc:
        bad.append(
            f"VOC {f.voc:.2f} is below {check.min_voc:.2f}: progress hardly rises over "
            "successful episodes"
        )
    if f.auc_high < f.auc_proprio:
        bad.append(
            f"AUC {f.auc:.2f} (95 % to {f.auc_high:.2f}) is below the {f.auc_proprio:.2f} that "
            "proprioception alone has: where the arm is says more about success"
        )
    if bad:
        return "bad", bad
    missing = [
        w
        for w, n in (("successful", f.successes), ("failed", f.trajectories - f.successes))
        if n == 0
    ]
    if missing:
        return "unknown", [
            f"there is no {missing[0]} episode among the {f.trajectories}, so success and failure "
            "cannot be told apart"
        ]
    if math.isnan(f.auc):
        return "unknown", ["no success and failure of one task can be compared at an equal time"]
    found = f"AUC {f.auc:.2f} (95 % {f.auc_low:.2f} to {f.auc_high:.2f}) at equal times"
    if f.auc_low <= 0.5:
        return "unknown", [
            f"{found} may be that of a clock, which has 0.50: judge it on more episodes"
        ]
    if f.auc <= f.auc_proprio:
        return "unknown", [
            f"{found} is no more than the {f.auc_proprio:.2f} of proprioception alone: judge it on "
            "more episodes, or on failures that reach where successes end"
        ]
    return "good", [f"{found}, proprioception alone {_cell(f.auc_proprio)}, VOC {f.voc:.2f}"]


# ------------------------------------------------------------------------------------------- output
def write_quality(quality: Quality, folder: Path) -> Path:
    """Write ``reward_quality.json`` and ``reward_quality.html`` (figures, plots, verdict) into
    ``folder``; returns the page's path."""
    write_json(folder / "reward_quality.json", quality.to_dict())
    page = folder / "reward_quality.html"
    template = (
        importlib.resources.files("vla_rl")
        .joinpath("report_template.html")
        .read_text(encoding="utf-8")
    )
    parts = {
        "title": escape(f"Quality of reward {quality.reward}"),
        "body": render_quality(quality),
    }
    write_whole(page, re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], template))
    return page


def render_quality(quality: Quality) -> str:
    """The page's body."""
    curves = []
    for values, won in sorted(quality.curves, key=lambda c: c[1])[:200]:
        time = [i / (len(values) - 1) for i in range(len(values))]
        curves.append(
            Series(
                "success" if won else "failure", time, values, "after" if won else "before", "faint"
            )
        )
    for won, style in ((False, "before"), (True, "after")):
        chosen = [c for c, w in quality.curves if w == won]
        if chosen:
            grid = np.linspace(0, 1, 21)
            mean = np.mean([np.interp(grid, np.linspace(0, 1, len(c)), c) for c in chosen], axis=0)
            curves.append(Series("mean", grid.tolist(), mean.tolist(), style))
    progress = line_chart(
        curves,
        width=1040,
        height=300,
        y_range=(0.0, 1.0),
        x_label="share of the episode",
        label="progress",
    )
    rows = quality.calibration
    dots = Series(
        "bins",
        [r["mean"] for r in rows],
        [r["rate"] for r in rows],
        "s1",
        "dots",
        [wilson_interval(round(r["rate"] * r["count"]), int(r["count"])) for r in rows],
        [
            f"{r['count']:.0f} episodes that end at {r['mean']:.2f}: {percent(r['rate'])} succeed"
            for r in rows
        ],
    )
    diagonal = Series("perfect", [0.0, 1.0], [0.0, 1.0], "s5", "faint")
    reliability = line_chart(
        [diagonal, dots],
        width=500,
        height=260,
        y_range=(0.0, 1.0),
        x_label="progress at the end",
        label="calibration",
    )
    names = [n for n in Figures.__dataclass_fields__ if n not in ("auc_low", "auc_high")]
    head = "".join(f"<th>{escape(n.replace('_', ' '))}</th>" for n in ("task", *names))
    body = "".join(
        "<tr>"
        + f"<td>{escape(task)}</td>"
        + "".join(f"<td>{_cell(getattr(f, n))}</td>" for n in names)
        + "</tr>"
        for task, f in [*quality.tasks.items(), ("all tasks", quality.figures)]
    )
    return (
        f'<header><p class="run">reward {escape(quality.reward)} · {quality.figures.trajectories} episodes, '
        f"{quality.figures.successes} successful</p><h1>Verdict: {quality.verdict}</h1>"
        f'<p class="sub">{escape("; ".join(quality.reasons))}</p></header>'
        f'<section><h2>Progress</h2><p class="lead">Each line is an episode; the strong ones are the means of successes '
        f"(coloured) and failures (grey).</p>{progress}</section>"
        f'<section><h2>Calibration</h2><p class="lead">Share of episodes that succeed against progress at their end, with '
        f"95 % intervals.</p>{reliability}</section>"
        f'<section><h2>Figures</h2><div style="overflow-x:auto"><table><tr>{head}</tr>{body}</table></div></section>'
    )


def _cell(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else "–" if math.isnan(value) else f"{value:.3f}"
