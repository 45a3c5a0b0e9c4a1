"""Plans for iterations that the learner has not reached, for a collector whose episodes run ahead
of it.

A batch is exactly one plan, whenever its episodes end: so nothing favours short episodes, which are
the successful ones. The plan of iteration k is handed out once version k − ahead is published. So
at version v never more than (ahead + v + 1) plans were started, and no decision is more than
``ahead`` versions old when its batch is learned from.

Where episodes may be ``late``, a batch is cut off once as many are done as a plan has, whatever
their plans; what is under way goes on, and comes into a later batch, at most ``late`` iterations
after its own. To throw it away would favour short episodes for ever. Here each episode that began
is learned from once: what comes early now is missing later, so that over the run short ones are
favoured by no more than the episodes that are open at one time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vla_rl.interfaces import Collector
from vla_rl.types import EpisodeSpec


class Plans:
    """What ``propose(iteration, sampling_round)`` says, asked early where the collector works
    ahead. ``last`` is the number of iterations: nothing is planned beyond."""

    def __init__(
        self, collector: Collector, propose: Callable[[int, int], list[EpisodeSpec]], last: int
    ) -> None:
        self._collector, self._propose, self._last = collector, propose, last
        self._works_ahead = "ahead" in Collector.of(collector).can
        self._plans: dict[int, list[EpisodeSpec]] = {}  # issued; of each, what was not taken

    def take(self, iteration: int, sampling_round: int) -> list[EpisodeSpec]:
        """The episodes of this round; those of iterations to come are under way when it returns."""
        if not self._works_ahead:
            return self._propose(iteration, sampling_round)
        for number in range(iteration, min(iteration + self._collector.ahead + 1, self._last)):
            if number not in self._plans:
                self._plans[number] = self._propose(number, 0)
                self._collector.issue(self._plans[number])
        return self._first_done(iteration) if self._collector.late else self._plans.pop(iteration)

    def _first_done(self, iteration: int) -> list[EpisodeSpec]:
        """Waits for as many episodes as a plan has: all that are due, and of the others those that
        end first. The members of a group stay together. In the order of the plans."""
        collector = self._collector
        group_of = {
            spec.rollout_id: spec.group_id for plan in self._plans.values() for spec in plan
        }
        sizes = Counter(group_of.values())
        # (each iteration before took one plan's worth)
        count = len(sizes) // (max(self._plans) + 1 - iteration)
        due = {
            s.group_id
            for number, plan in self._plans.items()
            if number <= iteration - collector.late
            for s in plan
        }

        def ended(done: Sequence[str]) -> list[int]:
            seen: Counter[int] = Counter()
            seen.update(group_of[name] for name in done if name in group_of)
            # by their last member
            order = dict.fromkeys(group_of[name] for name in reversed(done) if name in group_of)
            return [group for group in reversed(order) if seen[group] == sizes[group]]

        def enough(done: Sequence[str]) -> bool:
            return due <= {*(groups := ended(done))} and len(groups) >= count

        groups = ended(collector.await_done(enough))
        first = [group for group in groups if group not in due]
        taken = due | {*first[: count - len(due)]}
        batch = [
            spec
            for _, plan in sorted(self._plans.items())
            for spec in plan
            if spec.group_id in taken
        ]
        rest = {
            number: [s for s in plan if s.group_id not in taken]
            for number, plan in self._plans.items()
        }
        self._plans = {number: plan for number, plan in rest.items() if plan or number > iteration}
        return batch

    def state_dict(self) -> dict[str, Any] | None:
        """What is under way: episodes that are open, and those that are done."""
        if not self._works_ahead:
            return None
        plans = {
            str(number): [dataclasses.asdict(spec) for spec in plan]
            for number, plan in self._plans.items()
        }
        return {"plans": plans, "collector": self._collector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._works_ahead:
            return
        self._plans = {
            int(number): [EpisodeSpec(**spec) for spec in plan]
            for number, plan in state["plans"].items()
        }
        self._collector.load_state_dict(state["collector"])
        for plan in self._plans.values():
            self._collector.issue(plan)
