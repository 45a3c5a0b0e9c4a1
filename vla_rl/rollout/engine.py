"""Runs a queue of episodes on a vectorised env and keeps every slot busy.

The policy serves whatever slots wait, in one batch, as soon as ``serve_fraction`` of the live slots
do: the others simulate meanwhile. A finished slot takes the next episode at once. Rows of a batch
are ordered by episode, and each row's sampling seed depends on its episode's seed and decision
alone: results do not depend on slots or workers, but for the rounding of differently sized batches.
With ``serve_fraction`` 1 the batches themselves are always the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from vla_rl.config.episodes import EPISODE_SECONDS, RolloutConfig
from vla_rl.errors import ConfigError, PolicyLost, UserError
from vla_rl.interfaces import Collector, Env, EpisodesDone, Policy
from vla_rl.specs import EmbodimentSpec, EpisodeSpec, SlotEvent, SlotObservation, SlotStep
from vla_rl.splits import check_split, stable_seed
from vla_rl.types import ActionChunk, Observation, PolicyOutput, RolloutResult, Trajectory

_RECENT = 4096  # episodes whose seconds are known


@dataclass
class _Tally:
    """Counts and seconds since the engine was made."""

    decisions: int = 0
    policy_calls: int = 0
    control_steps: int = 0
    episodes: int = 0  # that ended
    successes: int = 0
    retries: int = 0
    policy_seconds: float = 0.0
    wait_seconds: float = 0.0
    slot_seconds: float = 0.0  # summed over slots: time between a request and its event


@dataclass
class _Episode:
    """An episode under way in a slot: what was decided (a batch and the row in it) and what came
    of it."""

    index: int
    spec: EpisodeSpec
    failures: int = 0  # of earlier attempts
    observations: list[SlotObservation] = field(default_factory=list)
    decisions: list[tuple[PolicyOutput, int]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the policy, per decision
    steps: list[SlotStep] = field(default_factory=list)
    seconds: float = 0.0  # that the simulator worked

    @property
    def memory(self) -> Any:
        """What the policy left with the last decision; None before the first."""
        if not self.decisions:
            return None
        output, row = self.decisions[-1]
        return None if output.memory is None else output.memory[row]


@dataclass(frozen=True)
class Mark:
    """A moment of an engine: what it has done so far, when that was, and how long its simulators
    had worked (seconds)."""

    tally: _Tally
    seconds: float
    busy: float


class RolloutEngine(Collector):
    """Runs episodes of ``env`` under ``policy``; both must describe the same embodiment."""

    def __init__(self, env: Env, policy: Policy, config: RolloutConfig | None = None) -> None:
        env.embodiment.require(policy.embodiment, "the env", "the policy")
        self.env, self.policy = Env.of(env), Policy.of(policy)
        self.config = config or RolloutConfig()
        if self.config.replan_steps > policy.chunk_length:
            raise ConfigError(
                f"rollout.replan_steps={self.config.replan_steps} is more than the policy's "
                f"chunk_length {policy.chunk_length}: use at most that, or 0 for the whole chunk."
            )
        # called before the policy is, such as to swap its weights
        self.before_decision: Callable[[], None] | None = None
        self._busy: dict[int, float] = {}  # slot → when its open request was made
        self._version = 0
        self._tally = _Tally()
        self._seconds: deque[float] = deque(maxlen=_RECENT)  # of the last episodes that ended

    def publish(self, version: int) -> None:
        """Decisions from here on are of policy ``version``; the weights are the caller's own, so
        nothing is copied."""
        self._version = version

    def collect(
        self,
        plan: Sequence[EpisodeSpec],
        *,
        deterministic: bool = False,
        progress: EpisodesDone | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        more: Callable[[], Sequence[EpisodeSpec]] | None = None,
    ) -> RolloutResult:
        """Run every episode of ``plan`` to its end.

        ``progress`` and ``on_trajectory`` are called as each episode ends, while the others go on
        simulating. ``more`` is asked for further ones whenever a slot has none; their trajectories
        go to ``on_trajectory`` alone, as all then do.

        Stats: ``episodes``, ``successes``, ``decisions``, ``control_steps``, ``retries`` (counts);
        ``seconds`` and its parts ``policy_seconds`` and ``wait_seconds`` (nothing to do but wait
        for the env); ``env_utilisation``, the share of time the workers spent in the simulator (for
        an env without ``busy_seconds`` and ``num_workers``: the share of time the slots had a
        request open); ``decisions_per_second``; ``control_steps_per_second``; ``policy_batch``, the
        mean number of rows; `EPISODE_SECONDS` (0: the env does not tell).

        An episode whose slot is lost, or whose policy (`PolicyLost`), runs again from its start.
        Raises `UserError` for an unknown task or split, actions that are not finite, or an episode
        that failed more than ``max_retries`` times.
        """
        self._check(plan)
        self._settle()
        begun = self.mark()
        results: dict[int, Trajectory] = {}

        def ended(index: int, trajectory: Trajectory) -> None:
            if more is None:
                results[index] = trajectory
            if on_trajectory is not None:
                on_trajectory(trajectory)
            if progress is not None:
                done = self._tally.episodes - begun.tally.episodes
                progress(done, len(plan), self._tally.successes - begun.tally.successes)

        with _spare_threads(self.env.num_workers):
            self._run(plan, deterministic, ended, more or (lambda: ()))
        stats = self.figures(begun, self.mark())
        stats["env_utilisation"] = min(1.0, stats["env_utilisation"])
        return RolloutResult([results[i] for i in sorted(results)], stats)

    def mark(self) -> Mark:
        """Now; may be asked from another thread while episodes run."""
        busy = self.env.busy_seconds
        return Mark(dataclasses.replace(self._tally), time.perf_counter(), busy or 0.0)

    def figures(self, since: Mark, until: Mark) -> dict[str, float]:
        """The ``stats`` of `collect` for what lies between two marks. ``env_utilisation`` may be
        above 1: a request counts where it ends."""
        before = dataclasses.asdict(since.tally)
        tally = _Tally(
            **{
                name: value - before[name]
                for name, value in dataclasses.asdict(until.tally).items()
            }
        )
        stats = self._stats(tally, until.seconds - since.seconds, until.busy - since.busy)
        return stats | quantiles(self.ended(since, until))

    def ended(self, since: Mark, until: Mark) -> list[float]:
        """The seconds that the simulator worked for each episode that ended between two marks, of
        which the later is the last."""
        count = until.tally.episodes - since.tally.episodes
        return list(self._seconds)[-count:] if count else []

    def _run(
        self,
        episodes: Sequence[EpisodeSpec],
        deterministic: bool,
        ended: Callable[[int, Trajectory], None],
        more: Callable[[], Sequence[EpisodeSpec]],
    ) -> None:
        tally = self._tally
        queue: deque[_Episode] = deque()
        live: dict[int, _Episode] = {}
        idle: deque[int] = deque()
        waiting: set[int] = set()
        numbers = itertools.count()

        def take_in(specs: Sequence[EpisodeSpec]) -> None:
            queue.extend(_Episode(next(numbers), spec) for spec in specs)

        def take_next(slot: int) -> None:
            if not queue:
                take_in(more())
            if queue:
                live[slot] = queue.popleft()
                self.env.start(slot, live[slot].spec)
                self._busy[slot] = time.perf_counter()
            else:
                idle.append(slot)

        def begin_again(slot: int, error: str, blamed: bool) -> None:
            episode = live[slot]
            failures = episode.failures + blamed
            tally.retries += 1
            self._give_up_on(episode.spec, failures, error)
            queue.appendleft(_Episode(episode.index, episode.spec, failures))
            take_next(slot)

        take_in(episodes)
        for slot in range(self.env.num_slots):
            take_next(slot)
        while live:
            for _ in range(len(idle)):
                take_next(idle.popleft())
            serve = len(waiting) >= max(1, self.config.serve_fraction * len(live)) or not self._busy
            # serving: take along what is ready anyway
            for event in self._poll(0.0 if serve else None, tally):
                episode = live[event.slot]
                if event.error is not None:
                    begin_again(event.slot, event.error, not event.blameless)
                    continue
                assert event.observation is not None  # only a loss has none
                episode.seconds += event.seconds
                episode.observations.append(event.observation)
                if event.step is not None:
                    episode.steps.append(event.step)
                if event.step is None or not (event.step.terminated or event.step.truncated):
                    waiting.add(event.slot)
                    continue
                del live[event.slot]
                take_next(event.slot)  # before anything else, so that the slot simulates meanwhile
                ended(episode.index, self._counted(episode, tally))
            if serve and waiting:
                served, waiting = waiting, set()
                for slot, error in self._serve(served, live, deterministic, tally):
                    begin_again(slot, error, True)

    def _counted(self, episode: _Episode, tally: _Tally) -> Trajectory:
        trajectory = _trajectory(episode, self.env.embodiment)
        tally.episodes += 1
        tally.successes += trajectory.success
        tally.control_steps += trajectory.num_control_steps
        self._seconds.append(episode.seconds)
        return trajectory

    # ------------------------------------------------------------------------------------ one round
    def _poll(self, timeout: float | None, tally: _Tally) -> Sequence[SlotEvent]:
        if not self._busy:
            return []
        started = time.perf_counter()
        events = self.env.poll(timeout)
        now = time.perf_counter()
        tally.wait_seconds += now - started
        for event in events:
            tally.slot_seconds += now - self._busy.pop(event.slot)
        return events

    def _serve(
        self, slots: set[int], live: dict[int, _Episode], deterministic: bool, tally: _Tally
    ) -> list[tuple[int, str]]:
        """One batched decision for ``slots``, sent to the env. Returns those that got none, since
        the policy was lost, and why."""
        if self.before_decision is not None:
            self.before_decision()
        started = time.perf_counter()
        order = sorted(slots, key=lambda slot: live[slot].index)
        rows = [live[slot] for slot in order]
        seen = [dataclasses.replace(row.observations[-1], privileged=None) for row in rows]
        seeds = [stable_seed("decision", row.spec.seed, len(row.decisions)) for row in rows]
        with torch.inference_mode():
            options: dict[str, Any] = {"deterministic": deterministic, "seeds": seeds}
            if "memory" in self.policy.can:
                options["memory"] = [
                    r.memory if r.decisions else self.policy.initial_memory() for r in rows
                ]
            try:
                output = _to_cpu(self.policy.act(Observation.from_slots(seen), **options))
            except PolicyLost as error:
                return [(slot, str(error)) for slot in reversed(order)]
        lengths = self._executed_lengths(output, len(rows))
        actions = output.chunk.actions.float().numpy()
        now = time.perf_counter()
        tally.policy_seconds += now - started
        tally.policy_calls += 1
        tally.decisions += len(rows)
        for i, (slot, row) in enumerate(zip(order, rows)):
            row.decisions.append((output, i))
            row.versions.append(self._version)
            self.env.step(slot, actions[i, : lengths[i]])
            self._busy[slot] = now
        return []

    def _executed_lengths(self, output: PolicyOutput, batch: int) -> list[int]:
        """Control steps to execute per row: up to the first that carries no action, at most
        ``replan_steps``."""
        shape = (batch, self.policy.chunk_length, self.env.embodiment.action_dim)
        valid = output.chunk.valid
        if tuple(output.chunk.actions.shape) != shape or tuple(valid.shape) != shape[:2]:
            raise UserError(
                f"The policy returned actions of shape {tuple(output.chunk.actions.shape)} and "
                f"valid of shape {tuple(valid.shape)}, expected {shape} and {shape[:2]} (batch, "
                "chunk_length, action dimensions)."
            )
        lengths = valid.long().cumprod(1).sum(1)
        if not bool((lengths > 0).all()):
            raise UserError(
                "The policy returned a chunk whose first control step is marked as not valid."
            )
        return lengths.clamp(max=self.config.replan_steps or self.policy.chunk_length).tolist()

    # -------------------------------------------------------------------------------- before, after
    def _check(self, episodes: Sequence[EpisodeSpec]) -> None:
        known = {task.task_id for task in self.env.tasks}
        for episode in episodes:
            check_split(episode.split)
            if episode.task_id not in known:
                raise UserError(
                    f"Unknown task {episode.task_id!r}: this env has {', '.join(sorted(known))}."
                )

    def _settle(self) -> None:
        """Wait for requests that an interrupted run left open, so that their events are not
        taken for this run's."""
        while self._busy:
            events = self.env.poll()
            if not events:  # the env forgot them
                self._busy.clear()
            for event in events:
                self._busy.pop(event.slot, None)

    def _give_up_on(self, spec: EpisodeSpec, failures: int, error: str) -> None:
        if failures > self.config.max_retries:
            raise UserError(
                f"Episode {spec.rollout_id} (task {spec.task_id!r}, initial state "
                f"{spec.init_state_id}, {spec.split}, seed {spec.seed}) failed {failures} times "
                f"(rollout.max_retries={self.config.max_retries}). Last error: {error}"
            )

    def _stats(self, tally: _Tally, seconds: float, worked: float) -> dict[str, float]:
        seconds = max(seconds, 1e-9)
        busy, servers = tally.slot_seconds, self.env.num_slots
        if self.env.busy_seconds is not None:
            busy, servers = worked, self.env.num_workers
        return {
            "episodes": tally.episodes,
            "successes": tally.successes,
            "decisions": tally.decisions,
            "control_steps": tally.control_steps,
            "retries": tally.retries,
            "seconds": seconds,
            "policy_seconds": tally.policy_seconds,
            "wait_seconds": tally.wait_seconds,
            "env_utilisation": busy / (seconds * servers),
            "decisions_per_second": tally.decisions / seconds,
            "control_steps_per_second": tally.control_steps / seconds,
            "policy_batch": tally.decisions / max(1, tally.policy_calls),
        }


def pooled_stats(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The ``stats`` of several runs as if they had been one: counts and seconds add up, rates
    follow from the sums."""
    total = {name: sum(stats[name] for stats in rounds) for name in rounds[0]}
    calls = sum(
        stats["decisions"] / stats["policy_batch"] for stats in rounds if stats["policy_batch"]
    )
    busy = sum(stats["env_utilisation"] * stats["seconds"] for stats in rounds)
    return (
        total
        | {
            "env_utilisation": busy / total["seconds"],
            "decisions_per_second": total["decisions"] / total["seconds"],
            "control_steps_per_second": total["control_steps"] / total["seconds"],
            "policy_batch": total["decisions"] / max(1.0, calls),
        }
        | pooled_seconds(rounds)
    )


def quantiles(ended: Sequence[float]) -> dict[str, float]:
    """`EPISODE_SECONDS` of episodes that took so long each; 0 of none."""
    return {
        name: float(np.quantile(ended, q)) if len(ended) else 0.0
        for name, q in EPISODE_SECONDS.items()
    }


def pooled_seconds(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`EPISODE_SECONDS` of several runs as if they were one: the largest of all, of other
    quantiles the episodes' mean."""
    most = max(EPISODE_SECONDS, key=lambda name: EPISODE_SECONDS[name])
    ended = [stats for stats in rounds if stats.get("episodes") and most in stats]
    count = sum(stats["episodes"] for stats in ended)
    means = {
        name: sum(s[name] * s["episodes"] for s in ended) / count if ended else 0.0
        for name in EPISODE_SECONDS
    }
    return means | {most: max((stats[most] for stats in ended), default=0.0)}


@contextlib.contextmanager
def _spare_threads(workers: int) -> Iterator[None]:
    """Leaves a core to each simulator process: torch's threads spin while they wait for one that
    has none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _to_cpu(output: PolicyOutput) -> PolicyOutput:
    return PolicyOutput(
        chunk=ActionChunk(output.chunk.actions.cpu(), output.chunk.valid.cpu()),
        behavior_log_prob=output.behavior_log_prob.cpu(),
        replay={name: tensor.cpu() for name, tensor in output.replay.items()},
        value=None if output.value is None else output.value.cpu(),
        memory=output.memory,
    )


def _trajectory(episode: _Episode, spec: EmbodimentSpec) -> Trajectory:
    """Stack an ended episode. Stacking also turns the policy's inference tensors into normal
    ones, fit for autograd."""

    def rows(pick: Callable[[PolicyOutput], Tensor]) -> Tensor:
        return torch.stack([pick(output)[row] for output, row in episode.decisions])

    first, _ = episode.decisions[0]
    last = episode.steps[-1]
    proposed = rows(lambda output: output.chunk.actions).float()
    valid = torch.arange(proposed.shape[1]) < torch.tensor(
        [[step.executed] for step in episode.steps]
    )
    clipped = torch.clamp(proposed, torch.tensor(spec.action_low), torch.tensor(spec.action_high))
    sent = torch.where(valid[:, :, None], clipped, proposed)
    rewards, human = torch.zeros(valid.shape), torch.zeros_like(valid)
    # views: row by row numpy is several times faster
    filled = rewards.numpy(), sent.numpy(), human.numpy()
    for step, reward, action, person in zip(episode.steps, *filled):
        n = step.executed
        reward[:n] = step.rewards[:n]
        if step.sent is not None:
            action[:n] = step.sent[:n]
        if step.human is not None:
            person[:n] = step.human[:n]
    return Trajectory(
        episode=episode.spec,
        observations=Observation.from_slots(episode.observations[:-1]),
        final_observation=Observation.from_slots(episode.observations[-1:]),
        actions=sent,
        valid=valid,
        rewards=rewards,
        behavior_log_prob=rows(lambda output: output.behavior_log_prob),
        replay={
            name: torch.stack([x.replay[name][row] for x, row in episode.decisions])
            for name in first.replay
        },
        terminated=last.terminated,
        truncated=last.truncated and not last.terminated,
        success=last.success,
        policy_version=min(episode.versions),
        decision_version=torch.tensor(episode.versions) if len({*episode.versions}) > 1 else None,
        value=None if first.value is None else rows(lambda output: cast(Tensor, output.value)),
        is_human=human if bool(human.any()) else None,
        failure=last.failure,
        proposed=proposed,
        label_source=last.label_source,
        instead=next(
            (
                dataclasses.replace(step.instead, decisions=decision)
                for decision, step in enumerate(episode.steps, 1)
                if step.instead is not None
            ),
            None,
        ),
    )
