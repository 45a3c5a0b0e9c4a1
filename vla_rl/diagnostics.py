"""What a reader should look at while something learns, and when it is alarming: declared by who
logs it, for the report.

Phases declare theirs in their row (`vla_rl.config.phases`), algorithms in the class of their
options (`vla_rl.options.AlgorithmFigures`), and with them what tells whether they move the policy.
Nothing here needs torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Alarm:
    """What a reader is told where the mean over the last ten lines of the metric lies ``above`` or
    ``below`` a limit.

    ``{value}`` in ``text`` stands for that mean. It says what may be done about it.
    """

    text: str
    above: float = math.inf
    below: float = -math.inf


@dataclass(frozen=True)
class Diagnostic:
    """A chart of the metric ``key``: its title, how to read it, and when it is alarming.

    ``share``: written in percent. ``smooth``: a running mean over the faint line. ``beside`` is a
    second metric in the same chart: (its key, the words for the first, those for the second).
    """

    key: str
    title: str
    note: str
    share: bool = False
    smooth: bool = False
    beside: tuple[str, str, str] | None = None
    alarm: Alarm | None = None


@dataclass(frozen=True)
class Movement:
    """The metrics that tell the guard of RL whether an algorithm moves the policy ("" for those
    that it does not log).

    ``updates``: optimiser steps of this iteration; ``updates_total`` and ``skipped_total``: of the
    run so far, and those that were left out as not finite. ``approx_kl``: per entry, between the
    policy before and within the iteration. ``zero_advantages``: the share of decisions whose
    advantage is 0. ``critic_alone``: 1 while only the critic learns.
    """

    updates: str = ""
    updates_total: str = ""
    skipped_total: str = ""
    approx_kl: str = ""
    zero_advantages: str = ""
    critic_alone: str = ""
