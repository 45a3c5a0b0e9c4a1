"""Episodes that begin in the middle: in a state along a demonstration, or along an episode of the
policy's own.

From a start that fails early nothing is learned about what comes later; from states on the way
success is near (reverse curriculum, Florensa et al. 2017, arXiv 1707.05300; states along a
demonstration: Salimans & Chen 2018, arXiv 1812.03381). Those papers set the simulator's state. Here
what was sent until then is sent again (`EpisodeSpec.lead`), which any simulator can do whose
episodes depend on the initial state and the actions alone.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vla_rl.config.run import DEMONSTRATIONS, FAILURES, SUCCESSES, RestartsConfig
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.errors import ConfigError
from vla_rl.splits import stable_seed
from vla_rl.types import EpisodeSpec, TaskSpec, Trajectory

Led = tuple[int, Tensor]  # a training initial state, and what was sent from there: float32 [n a]
_FAILED_SHARE = 0.5  # of a failure: what comes later is hardly to be mended


class Restarts:
    """The newest ``config.episodes`` paths of each source and task; where on them an episode begins
    is drawn uniformly.

    Paths are of whole episodes: what a simulator with noise made of a lead is not known exactly.
    """

    def __init__(
        self,
        config: RestartsConfig | None = None,
        tasks: Sequence[TaskSpec] = (),
        demonstrations: DemonstrationDataset | None = None,
    ) -> None:
        """Raises `ConfigError` where demonstrations are asked for and do not say what was sent."""
        self.config = config = config or RestartsConfig()
        self._latest = {task.task_id: int(config.latest * task.horizon) for task in tasks}
        self._kept: dict[tuple[str, str], deque[Led]] = defaultdict(
            lambda: deque(maxlen=config.episodes)
        )
        if DEMONSTRATIONS in config.used:
            self._show(demonstrations)

    def _show(self, demonstrations: DemonstrationDataset | None) -> None:
        if demonstrations is None or demonstrations.sent is None:
            raise ConfigError(
                f"rl.restarts.sources has {DEMONSTRATIONS}, and the run's dataset does not hold "
                "what was sent to the robot (column 'sent'; scripted experts write it, an env's "
                f"own collect_episode has to return it): use [{SUCCESSES}, {FAILURES}], or other "
                "demonstrations"
            )
        for e in demonstrations.episodes:
            if e.task_id is not None and e.init_state_id is not None and e.success is not False:
                self._add(
                    DEMONSTRATIONS,
                    e.task_id,
                    e.init_state_id,
                    demonstrations.sent[e.start : e.start + e.length],
                )
        if not self._kept:
            raise ConfigError(
                f"rl.restarts.sources has {DEMONSTRATIONS}, and none of the dataset's has a task "
                f"of this run ({', '.join(self._latest)}) and a state to begin in within "
                f"rl.restarts.latest={self.config.latest:g} of its time limit: use others, or "
                f"[{SUCCESSES}, {FAILURES}]"
            )

    def keep(self, trajectories: Sequence[Trajectory]) -> None:
        """Take in whole episodes of the policy's own, of sources that are used."""
        for t in trajectories:
            source = SUCCESSES if t.success else FAILURES
            if source in self.config.used and not t.episode.lead:
                self._add(source, t.episode.task_id, t.episode.init_state_id, t.actions[t.valid])

    def of(self, plan: Sequence[EpisodeSpec]) -> list[EpisodeSpec]:
        """``plan`` with a share of its groups, drawn at random, begun in the middle, and at least
        one left whole; the same for the same plan and the same kept paths."""
        if not self.config.used:
            return list(plan)
        groups = list(dict.fromkeys(spec.group_id for spec in plan))
        count = min(len(groups) - 1, round(self.config.share * len(groups)))
        generator = torch.Generator().manual_seed(stable_seed("restarts", plan[0].seed))
        chosen = torch.randperm(len(groups), generator=generator)[:count].tolist()
        first = {spec.group_id: spec for spec in reversed(plan)}
        led = {groups[i]: self.draw(first[groups[i]].task_id, generator) for i in chosen}
        return [
            spec
            if (found := led.get(spec.group_id)) is None
            else dataclasses.replace(
                spec, init_state_id=found[0], lead=tuple(map(tuple, found[1].tolist()))
            )
            for spec in plan
        ]

    def draw(self, task_id: str, generator: torch.Generator) -> Led | None:
        """An initial state and what to send from there; None while nothing is known of the task."""
        sources = [name for name in self.config.used if self._kept.get((name, task_id))]
        if not sources:
            return None

        def below(count: int) -> int:
            return int(torch.randint(count, (1,), generator=generator))

        paths = self._kept[sources[below(len(sources))], task_id]
        state, sent = paths[below(len(paths))]
        return state, sent[: 1 + below(len(sent))]

    def _add(self, source: str, task_id: str, init_state_id: int, sent: Tensor) -> None:
        length = len(sent) - 1 if source != FAILURES else int(_FAILED_SHARE * len(sent))
        if (length := min(length, self._latest.get(task_id, 0))) > 0:
            self._kept[source, task_id].append((init_state_id, sent[:length].clone().float()))

    # --------------------------------------------------------------------------------------- resume
    def state_dict(self) -> dict[str, Any]:
        """What is kept of the policy's own episodes. Needs no pickle."""
        own = {key: paths for key, paths in self._kept.items() if key[0] != DEMONSTRATIONS}
        return {
            "paths": [
                {
                    "source": source,
                    "task": task,
                    "states": [s for s, _ in paths],
                    "sent": [sent for _, sent in paths],
                }
                for (source, task), paths in own.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        for row in state["paths"]:
            kept = self._kept[row["source"], row["task"]]
            kept.clear()
            kept.extend((int(s), sent) for s, sent in zip(row["states"], row["sent"], strict=True))


def whole(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Those that began in their initial state; all where none did."""
    return [t for t in trajectories if not t.episode.lead] or trajectories


def restart_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How many began in the middle, and which share of them succeeded; empty where none did."""
    led = [t.success for t in trajectories if t.episode.lead]
    return (
        {"rollout/led": float(len(led)), "rollout/led_success": sum(led) / len(led)} if led else {}
    )
