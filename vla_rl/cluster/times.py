"""Service times for `model.py`, from a run's own folder or a file, and the table of `vla-rl
cluster plan`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import config as configs
from vla_rl.cluster.model import Outcome, Setup, Times, best_split, simulate, useful_share
from vla_rl.cluster.status import STATUS_FILE
from vla_rl.config import RunConfig, checked
from vla_rl.config.episodes import EPISODE_SECONDS
from vla_rl.errors import UserError
from vla_rl.files import read_json
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics

# share of the iterations that does not count: caches, and a critic that is trained alone at first
_WARM_UP = 0.25
_FEWEST = 4  # iterations that are left
_VARIED = 0.1  # spread of the batches (of their mean) from which a call's fixed part can be told
_TRUSTED = 0.15  # of the measured time that the model may be off
_LENGTHS = 20  # that stand for the episodes of a run
_BYTES = "_bytes"  # ends the name of a size
_AT_WORK = "at_work"  # seconds in which actors had episodes
_MOST_OF_ONE = 100  # episodes that stand for those of one iteration


@dataclass
class _TimesFile:
    """The keys of a file of service times, as of `Times`, in seconds; and of `memory.Sizes`, in
    bytes, for ``--memory`` (0: not said)."""

    chunk: list[float] = dataclasses.field(default_factory=list)
    decisions: list[float] = dataclasses.field(default_factory=list)
    act_fixed: float = 0.0
    act_row: float = 0.0
    update: float = 0.0
    reset: float = 0.0
    publish: float = 0.0
    reach: float = 0.0
    pause: float = 0.0
    take: float = 0.0
    pace: list[float] = dataclasses.field(default_factory=list)
    weights_bytes: float = 0.0
    sent_bytes: float = 0.0
    state_bytes: float = 0.0
    episode_bytes: float = 0.0
    light_bytes: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Service times, the setup in which they were measured, and what an iteration took there
    (None: not known); ``sizes``: what a file says of them."""

    times: Times
    setup: Setup
    seconds: float | None
    sizes: Mapping[str, float] = dataclasses.field(default_factory=dict)


def measured(source: Path, config: RunConfig | None = None) -> Measured:
    """Of a run folder; or of a JSON file of `_TimesFile`, for the setup that ``config``
    describes. Raises `UserError`."""
    if source.is_dir():
        return _of_run(source)
    keys = read_json(
        source,
        "give a run folder, or a JSON file with chunk, decisions, act_fixed, act_row and update",
    )
    found: _TimesFile = checked(_TimesFile, keys, str(source))
    if (
        not found.chunk
        or not found.decisions
        or min(*found.chunk, *found.decisions, *found.pace) <= 0
    ):
        raise UserError(
            f"{source}: chunk (seconds of a decision) and decisions (of an episode) "
            "need samples above 0"
        )
    if found.pace and len(found.pace) != len(found.decisions):
        raise UserError(
            f"{source}: pace has {len(found.pace)} samples, decisions "
            f"{len(found.decisions)}: give one for each"
        )
    if min(v for v in dataclasses.asdict(found).values() if isinstance(v, float)) < 0:
        raise UserError(f"{source}: seconds and bytes cannot be below 0")
    asked = dataclasses.asdict(found)
    sizes = {key: asked.pop(key) for key in [*asked] if key.endswith(_BYTES)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in asked.items()
    }
    assert config is not None
    said = {key.removesuffix(_BYTES): value for key, value in sizes.items()}
    return Measured(Times(**values), setup_of(config), None, said)


def setup_of(config: RunConfig) -> Setup:
    """What a run's config makes of a cluster (of ``cluster.placement=auto`` once there are
    numbers)."""
    rollouts = 1 if config.cluster_type == "local" else config.cluster.rollouts
    workers, each = config.slots.workers, config.slots.slots_per_worker
    return Setup(
        rollouts,
        max(1, workers) * each,
        max(1, workers),
        config.rl.episodes_per_iteration,
        config.cluster.ahead,
        serve_fraction=config.rollout.serve_fraction,
        inline=workers == 0,
        learners=1 if config.cluster_type == "local" else max(1, config.cluster.learners),
    )


def _of_run(folder: Path) -> Measured:
    config = configs.load(folder / "config.yaml")
    if config.cluster_type == "ray" and config.cluster.placement == "auto":
        note = read_json(folder / STATUS_FILE, "the run wrote there what it had chosen")[
            "placement"
        ]
        config.cluster = dataclasses.replace(config.cluster, times="", **note["numbers"])
    rows = [row for row in read_metrics(folder / METRICS_FILE) if row["phase"] == "rl"]
    first = max(1, int(len(rows) * _WARM_UP))
    if len(rows) - first < _FEWEST:
        raise UserError(
            f"{folder} has {len(rows)} iterations of RL, too few to read service times from: give "
            "a run with more of them"
        )
    episodes = [
        after["episodes"] - before["episodes"]
        for before, after in zip(rows[first - 1 :], rows[first:])
    ]
    rows, setup = rows[first:], setup_of(config)

    def total(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows)

    r, cores = setup.rollouts, setup.rollouts * setup.cores
    rows = [_at_work(row, always=setup.ahead > 0) for row in rows]
    # (inline, the simulator runs while the engine waits)
    worked = [
        row["engine/wait_seconds"] * r
        if setup.inline
        else row["engine/env_utilisation"] * row[_AT_WORK] * cores
        for row in rows
    ]
    decisions = total("engine/decisions")
    learned = sum(n * row.get("rollout/learned_share", 1.0) for n, row in zip(episodes, rows))
    gathered = "cluster/learner_wait_seconds" if setup.ahead else "engine/seconds"
    publish = total("cluster/publish_seconds") / len(rows)
    seconds = total("time/iteration") - total("time/evaluate")
    # then the driver only waits for scores
    apart = config.cluster_type == "ray" and config.cluster.reward_workers > 0
    score = 0.0 if apart else total("time/reward")
    fixed, row = _call(rows, r)
    lengths, paces = _episodes(rows, episodes, worked)
    times = Times(
        chunk=(sum(worked) / decisions,),
        decisions=lengths,
        act_fixed=fixed,
        act_row=row,
        # of one device
        update=total("time/update") / learned * setup.learner_speed,
        publish=publish,
        reach=total("cluster/weights_seconds") / len(rows),
        pause=max(
            0.0, (seconds - total("time/update") - total(gathered) - score) / len(rows) - publish
        ),
        take=(total("cluster/take_seconds") + score) / sum(episodes),
        pace=paces,
    )
    return Measured(times, setup, seconds / len(rows))


def _at_work(row: Mapping[str, float], always: bool) -> dict[str, float]:
    """``row`` with the seconds in which actors had episodes, of which the engine's shares are: by
    turns they have none while weights are on their way."""
    whole = row["engine/seconds"]
    had = whole if always else row.get("cluster/rollout_busy_seconds") or whole
    parts = ("engine/policy_seconds", "engine/wait_seconds")
    return {**row, **{name: row[name] * had / whole for name in parts}, _AT_WORK: had}


def _call(rows: Sequence[Mapping[str, float]], rollouts: int) -> tuple[float, float]:
    """(fixed part, part per row) of a policy call in seconds; where batches are all alike, none
    of it is fixed."""
    rows = [row for row in rows if row["engine/policy_batch"]]
    batches = [row["engine/policy_batch"] for row in rows]
    calls = [
        row["engine/policy_seconds"]
        * rollouts
        * row["engine/policy_batch"]
        / row["engine/decisions"]
        for row in rows
    ]
    mean_batch, mean_call = statistics.mean(batches), statistics.mean(calls)
    if statistics.pstdev(batches) > _VARIED * mean_batch:
        line = statistics.linear_regression(batches, calls)
        if line.slope >= 0.0 and line.intercept >= 0.0:
            return line.intercept, line.slope
    return 0.0, mean_call / mean_batch


def _episodes(
    rows: Sequence[Mapping[str, float]], counts: Sequence[float], worked: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`Times.decisions` and `Times.pace` of each iteration's episodes (at most some of them): the
    longest took longest. All decisions together have the pace 1. A run that did not note its
    episodes' seconds has only the lengths of `_lengths`."""
    lengths: list[float] = []
    seconds: list[float] = []
    for row, count, total in zip(rows, counts, worked):
        if min(known := [row.get(f"engine/{name}") or 0.0 for name in EPISODE_SECONDS]) <= 0.0:
            return _lengths(rows, _LENGTHS), ()
        size = max(1, min(int(count), _MOST_OF_ONE))
        seconds += _spread(known, size, total / count).tolist()
        lengths += sorted((_lengths([row], size) * size)[:size])
    whole = sum(lengths) / sum(seconds)
    return tuple(lengths), tuple(took / length * whole for length, took in zip(lengths, seconds))


def _spread(known: Sequence[float], size: int, mean: float) -> np.ndarray:
    """``size`` numbers, rising, of which the quantiles of `EPISODE_SECONDS` are ``known``: those
    between its last two are alike, and what brings all to the ``mean``."""
    *_, high, most = EPISODE_SECONDS.values()
    places = (np.arange(size) + 0.5) / size
    found = np.exp(np.interp(places, list(EPISODE_SECONDS.values()), np.log(known)))
    found[-1] = known[-1]  # what everybody waits for
    between = np.flatnonzero((high < places[:-1]) & (places[:-1] < most))
    if len(between):
        rest = mean * size - np.delete(found, between).sum()
        found[between] = np.clip(rest / len(between), known[-2], known[-1])
    return found


def _lengths(rows: Sequence[Mapping[str, float]], size: int) -> tuple[float, ...]:
    """Decisions of ``size`` episodes (or of one, that stands for all): successes and failures
    apart, each at its mean, in the proportion of ``rows``."""
    per_decision = sum(row["engine/control_steps"] for row in rows) / sum(
        row["engine/decisions"] for row in rows
    )
    success = statistics.mean(row["rollout/success"] for row in rows)
    every = statistics.mean(row["rollout/control_steps"] for row in rows) / per_decision
    wins = [
        row["rollout/control_steps_to_success"]
        for row in rows
        if row["rollout/control_steps_to_success"] is not None
    ]
    if not wins or success in (0.0, 1.0):
        return (every,)
    won = statistics.mean(wins) / per_decision
    lost = (every - success * won) / (1.0 - success)
    count = round(success * size)
    return (won,) * count + (max(1.0, lost),) * (size - count)


# ----------------------------------------------------------------------------------------- the plan
def cluster_plan(
    found: Measured,
    gpus: Sequence[int],
    *,
    staleness: int = 1,
    mtbf_hours: float = 0.0,
    restart: float = 60.0,
    asked: Setup | None = None,
) -> dict[str, Any]:
    """JSON-ready: what is predicted for the setup that was measured, for the one that is ``asked``
    (None: the same), and for every number of GPUs. Each acting GPU has the slots and cores of an
    actor of the setup that is asked; episodes of an iteration grow with the GPUs."""
    own, asked = simulate(found.times, found.setup), asked or found.setup
    rows = []
    for n in gpus:
        base = dataclasses.replace(asked, batch=asked.batch * n, inline=False)
        # all act, then all learn
        alternate = dataclasses.replace(base, ahead=0, rollouts=n, learners=n)
        setup, ahead = best_split(
            found.times, dataclasses.replace(base, ahead=staleness), max(n, 2)
        )
        share, interval = useful_share(n, mtbf_hours, found.times.publish + 1.0, restart)
        rows.append(
            {
                "gpus": n,
                "alternate": dataclasses.asdict(simulate(found.times, alternate)),
                "act": setup.rollouts,
                "learn": setup.learners,
                "ahead": dataclasses.asdict(ahead),
                "useful_share": share,
                "checkpoint_seconds": interval,
                "slowest": slowest(ahead),
            }
        )
    return {
        "times": dataclasses.asdict(found.times),
        "setup": dataclasses.asdict(found.setup),
        "measured": found.seconds,
        "predicted": dataclasses.asdict(own),
        "asked": dataclasses.asdict(asked),
        "asked_predicted": dataclasses.asdict(simulate(found.times, asked)),
        "staleness": staleness,
        "mtbf_hours": mtbf_hours,
        "rows": rows,
    }


def slowest(outcome: Outcome) -> str:
    """The role that has most to do. The driver waits while ranks learn: these two are one, whose
    larger part tells."""
    rest = "learning" if outcome.learner >= outcome.driver else "the driver"
    shares = {
        "simulators": outcome.cores,
        "acting": outcome.policies,
        rest: outcome.learner + outcome.driver,
    }
    return max(shares, key=lambda name: shares[name])


def _asked_text(plan: Mapping[str, Any]) -> list[str]:
    """What differs in the setup that was asked for, and how far the model was off where it could
    be compared."""
    changed = {name: value for name, value in plan["asked"].items() if value != plan["setup"][name]}
    lines = []
    if changed:
        said = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        lines.append(
            f"the one asked for ({said}): {plan['asked_predicted']['seconds']:.2f} s an "
            "iteration predicted"
        )
    off = (plan["predicted"]["seconds"] / plan["measured"] - 1.0) if plan["measured"] else 0.0
    if abs(off) > _TRUSTED:
        lines.append(
            f"warning: that is {off:+.0%} of what was measured, so what follows is no better. "
            + (
                "Slow episodes are counted in as they were measured: more iterations tell more of "
                "them"
                if plan["times"]["pace"]
                else "The run did not note how long its slowest episodes took (heavy tails), for "
                "which everything waits by turns: measure with a new run"
            )
        )
    return lines


def plan_text(plan: Mapping[str, Any]) -> str:
    """The table of `cluster_plan`."""
    own, t = plan["predicted"], plan["times"]
    mean = statistics.mean
    lines = [
        f"service times: {mean(t['chunk']) * 1e3:.1f} ms simulation of a decision, "
        f"{mean(t['decisions']):.1f} decisions an episode, {t['act_fixed'] * 1e3:.1f} + "
        f"{t['act_row'] * 1e3:.2f} ms a row for a policy call, {t['update'] * 1e3:.0f} ms learning "
        f"an episode, {t['take'] * 1e3:.1f} ms of the driver for it",
        f"the setup they are of: {own['seconds']:.2f} s an iteration predicted"
        + ("" if plan["measured"] is None else f", {plan['measured']:.2f} s measured"),
        *_asked_text(plan),
        "",
        f"{'GPUs':>5}  {'by turns':>9}  {'act+learn':>10} {'ahead':>9}  {'gain':>5}  {'cores':>5} "
        f"{'act':>5} {'learn':>5} {'driver':>6}  {'age':>4}  busiest",
        f"{'':>5}  {'episodes/s':>9}  {'':>10} {'episodes/s':>9}",
    ]
    for row in plan["rows"]:
        a, b = row["alternate"], row["ahead"]
        shares = (
            f"{b['cores']:>5.0%} {b['policies']:>5.0%} {b['learner']:>5.0%} {b['driver']:>6.0%}"
        )
        lines.append(
            f"{row['gpus']:>5}  {a['episodes_per_second']:>9.2f}  {row['act']:>4} + "
            f"{row['learn']:<3} {b['episodes_per_second']:>9.2f}  "
            f"{b['episodes_per_second'] / a['episodes_per_second']:>4.2f}×  {shares}  "
            f"{b['staleness_mean']:>4.1f}  {row['slowest']}"
        )
    if plan["mtbf_hours"]:
        lines += [
            "",
            f"failures every {plan['mtbf_hours']:g} hours of a GPU leave, with "
            "checkpoints as often as is best:",
        ]
        lines += [
            f"{row['gpus']:>5}  {row['useful_share']:.1%}, a checkpoint every "
            f"{row['checkpoint_seconds']:.0f} s"
            for row in plan["rows"]
        ]
    return "\n".join(lines)
