"""The guard of RL: do its first iterations bring almost no success, or does the policy not move?
Then the run says so.

`judge` decides from a few logged figures alone; `Guard` gathers them while RL runs, and is part of
RL's checkpoint. What is refused before a run begins is in `preflight`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vla_rl.config.run import RLConfig
from vla_rl.diagnostics import Movement
from vla_rl.errors import UserError
from vla_rl.evaluation.statistics import wilson_interval

NO_SUCCESS, STILL = "no_success", "still"
# per entry: an update of any use moves the policy by more, and float32 noise by less
STILL_KL = 1e-6
_LEARNED_SHARE = "rollout/learned_share"  # of any algorithm


# ------------------------------------------------------------------------------------- the decision
@dataclass(frozen=True)
class Finding:
    """What is wrong (``kind`` one of `NO_SUCCESS`, `STILL`) and what it is read from."""

    kind: str
    text: str


def judge(
    rows: Sequence[Mapping[str, float]], *, threshold: float, sparse: bool = True
) -> Finding | None:
    """What is wrong in a window of iterations, None for nothing.

    A row holds ``iteration``, ``episodes``, ``successes`` and, where the algorithm logs them
    (`Movement`), ``updates`` and ``skipped`` of this iteration, ``approx_kl``, ``zero_advantages``
    and ``learned_share``. Almost no success: the upper end of the pooled 95 % Wilson interval lies
    below ``threshold``; only where success is all that is paid for (``sparse``).
    """
    successes, episodes = (int(sum(r[name] for r in rows)) for name in ("successes", "episodes"))
    low, high = wilson_interval(successes, episodes)
    first, last = int(rows[0]["iteration"]), int(rows[-1]["iteration"])
    where = f"in iteration {first}" if first == last else f"in iterations {first} to {last}"
    still = _why_still(rows)
    if sparse and high < threshold:
        moves = f" Nor does the policy move: {still}." if still else ""
        return Finding(
            NO_SUCCESS,
            f"Almost no episode succeeds: {successes} of {episodes} {where} (95 % interval "
            f"{low:.1%} to {high:.1%}, the guard speaks where it ends below {threshold:.1%}). "
            f"Success is all that this run learns from, and there is next to none.{moves}",
        )
    if still:
        share = f"{successes} of {episodes} episodes succeeded"
        return Finding(STILL, f"The policy does not move: {where} {still}, while {share}.")
    return None


def _why_still(rows: Sequence[Mapping[str, float]]) -> str:
    """Why the policy stays as it is in all of these iterations; empty where it moves, or where
    nothing tells."""

    def throughout(name: str) -> list[float]:
        return [r[name] for r in rows] if all(name in r for r in rows) else []

    share, zero, kl = (
        throughout(name) for name in ("learned_share", "zero_advantages", "approx_kl")
    )
    updates, skipped = throughout("updates"), sum(r.get("skipped", 0.0) for r in rows)
    if share and max(share) == 0:
        return f"no group of episodes differed enough to be learned from ({_LEARNED_SHARE} 0)"
    if zero and min(zero) > 0.999:
        return "every advantage was 0, as the episodes of each group were rewarded alike"
    if updates and max(updates) == 0:
        return (
            f"all {skipped:.0f} updates were skipped, as they were not finite"
            if skipped
            else "no update was made"
        )
    # The KL is measured before each step: of one update an iteration it is 0 whatever the update
    # does.
    if kl and updates and min(updates) >= 2 and max(kl) < STILL_KL:
        return f"the KL between the policy before and after an iteration was at most {max(kl):.1e}"
    return ""


# ------------------------------------------------------------------------------------ while RL runs
@dataclass
class Guard:
    """Watches ``rl.guard_iterations`` iterations after the critic's warm-up, and speaks once, at
    their end.

    ``advice`` {kind: remedies} ends what it says. ``sparse``: success is all that the algorithm
    learns from. ``movement`` names what it logs of the policy's movement.
    """

    rl: RLConfig
    movement: Movement
    sparse: bool = True
    advice: Mapping[str, str] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)  # the algorithm's running counts so far
    finding: Finding | None = None

    def look(
        self, iteration: int, episodes: int, metrics: Mapping[str, float]
    ) -> tuple[Finding | None, dict[str, float]]:
        """Take in iteration ``iteration`` (from 1) of so many ``episodes``: (what is wrong, in the
        one iteration in which the guard speaks; the metrics ``guard/…``, in the one in which it
        decides)."""
        seen = {name: metrics[key] for name, key in asdict(self.movement).items() if key in metrics}
        counts = {
            name: seen[f"{name}_total"]
            for name in ("updates", "skipped")
            if f"{name}_total" in seen
        }
        made = {name: value - self.totals.get(name, 0.0) for name, value in counts.items()}
        self.totals |= counts
        if len(self.rows) >= self.rl.guard_iterations or seen.get("critic_alone"):
            return None, {}
        row: dict[str, float] = {"iteration": iteration, "episodes": episodes}
        led = metrics.get("rollout/led", 0.0)  # that began in the middle: their successes teach too
        whole = metrics["rollout/success"] * (episodes - led)
        row["successes"] = round(whole + (metrics["rollout/led_success"] * led if led else 0.0))
        seen["learned_share"] = metrics.get(_LEARNED_SHARE, math.nan)
        seen |= made
        shown = ("learned_share", "zero_advantages", "approx_kl", "updates", "skipped")
        row |= {name: seen[name] for name in shown if math.isfinite(seen.get(name, math.nan))}
        self.rows.append(row)
        if len(self.rows) < self.rl.guard_iterations:
            return None, {}
        found = judge(self.rows, threshold=self.rl.guard_success, sparse=self.sparse)
        if found is not None:
            found = self.finding = Finding(
                found.kind, f"{found.text} {self.advice.get(found.kind, '')}".rstrip()
            )
        successes, total = (
            int(sum(r[name] for r in self.rows)) for name in ("successes", "episodes")
        )
        kind = None if found is None else found.kind
        figures = {"guard/success_high": wilson_interval(successes, total)[1]}
        return found, figures | {
            f"guard/{name}": float(kind == name) for name in (NO_SUCCESS, STILL)
        }

    @property
    def falls_back(self) -> bool:
        """Whether what was found has the run go on with the fallback reward."""
        return (
            self.finding is not None
            and self.finding.kind == NO_SUCCESS
            and self.rl.fallback != "none"
        )

    def enforce(self, folder: Path) -> None:
        """Raise `UserError` where ``rl.guard=stop`` and something was found that no fallback mends;
        the checkpoint in ``folder`` holds the run as it is."""
        if self.rl.guard == "stop" and self.finding is not None and not self.falls_back:
            raise UserError(
                f"rl.guard=stop ends this run. {self.finding.text} The policy and the state of RL "
                f"are in {folder}; the same command with rl.guard=warn goes on from there."
            )

    def state_dict(self) -> dict[str, Any]:
        finding = None if self.finding is None else asdict(self.finding)
        return {
            "rows": [dict(r) for r in self.rows],
            "totals": dict(self.totals),
            "finding": finding,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows, self.totals = [dict(r) for r in state["rows"]], dict(state["totals"])
        self.finding = None if state["finding"] is None else Finding(**state["finding"])
