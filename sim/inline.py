"""An `Env` that steps its simulator in this process, and the checks it shares with the process
pool (numpy only)."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import (
    FAILURE_KINDS,
    EmbodimentSpec,
    EpisodeSpec,
    SlotEvent,
    SlotObservation,
    SlotStep,
)

if TYPE_CHECKING:
    from vla_rl.interfaces import Simulator  # at run time it would pull torch into every worker


class InlineEnv:
    """Steps ``num_slots`` slots of one simulator in the calling process, in the order of the
    requests.

    `start` and `step` only queue; `poll` runs everything queued and returns one event per request,
    so a policy sees all slots in one batch and results are the same in every run. Errors are those
    of `sim.pool.ProcessPool`: actions that are not finite and a simulator's own `UserError` are
    raised, anything else it raises costs that slot its episode.
    """

    num_workers = 1
    repeatable = True  # the same episode and actions give the same images again

    def __init__(self, simulator: Simulator, num_slots: int = 1) -> None:
        if num_slots < 1:
            raise ConfigError(f"InlineEnv needs num_slots >= 1, got {num_slots}.")
        self.embodiment, self.tasks = simulator.embodiment, simulator.tasks
        self.privileged_dim = simulator.privileged_dim
        self.num_slots = num_slots
        self.busy_seconds = 0.0
        self._simulator = simulator
        self._requests: deque[tuple[int, np.ndarray | None]] = deque()
        self._events: list[SlotEvent] = []
        self._guard = SlotGuard(num_slots, self.embodiment)

    def start(self, slot: int, episode: EpisodeSpec) -> None:
        self._guard.start(slot, episode)
        self._requests.append((slot, None))

    def step(self, slot: int, actions: np.ndarray) -> None:
        """Queue a chunk float32 [h a]. Raises `UserError` for a wrong shape or values that are
        not finite."""
        self._requests.append((slot, self._guard.step(slot, actions)))

    def poll(self, timeout: float | None = None) -> list[SlotEvent]:
        """Run all queued requests (whatever ``timeout``); an empty list where there are none."""
        while self._requests:
            slot, actions = self._requests.popleft()
            self._run(slot, actions)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._requests.clear()
        self._simulator.close()

    def __enter__(self) -> InlineEnv:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, slot: int, actions: np.ndarray | None) -> None:
        started, executed, observation, step, failure = time.perf_counter(), 0, None, None, None
        try:
            result = run_request(self._simulator, slot, self._guard.episode(slot), actions)
            if isinstance(result, SlotStep):
                observation, step, executed = result.observation, result, result.executed
            else:
                observation = result
        except UserError:
            self._guard.answered(slot)
            raise
        except Exception as error:  # a plug-in may raise anything; the episode runs again
            failure = f"the simulator raised {type(error).__name__}: {error}"
        finally:
            seconds = time.perf_counter() - started
            self.busy_seconds += seconds
        answered = self._guard.answered(slot, executed)
        self._events.append(SlotEvent(slot, answered, observation, step, failure, seconds=seconds))


class SlotGuard:
    """Knows which episode each slot runs and how far it is, to check requests and to word their
    errors."""

    def __init__(self, num_slots: int, embodiment: EmbodimentSpec) -> None:
        self._action_dim = embodiment.action_dim
        self._episodes: list[EpisodeSpec | None] = [None] * num_slots
        self._control_steps = [0] * num_slots
        self._busy = [False] * num_slots

    def start(self, slot: int, episode: EpisodeSpec) -> None:
        """A start is requested. Raises `UserError` for a slot that does not exist or has a
        request open."""
        self._request(slot)
        self._episodes[slot] = episode
        self._control_steps[slot] = 0

    def step(self, slot: int, actions: np.ndarray) -> np.ndarray:
        """A chunk is requested: ``actions`` as contiguous float32 [h a]; `UserError` where they
        are no such thing."""
        episode = self.episode(slot)
        actions = np.ascontiguousarray(actions, dtype=np.float32)
        if actions.ndim != 2 or len(actions) == 0 or actions.shape[1] != self._action_dim:
            raise UserError(
                f"Slot {slot} (task {episode.task_id!r}) got actions of shape "
                f"{list(actions.shape)}: expected [h, {self._action_dim}] with h >= 1."
            )
        finite = np.isfinite(actions).all(axis=1)
        if not finite.all():
            row = int(np.argmin(finite))
            raise UserError(
                f"Slot {slot}, task {episode.task_id!r}, initial state {episode.init_state_id} "
                f"({episode.split}): the action at control step {self._control_steps[slot] + row} "
                f"(row {row} of its chunk) is not finite: {actions[row].tolist()}. The policy has "
                "diverged: check its weights, action normalisation and learning rate."
            )
        self._request(slot)
        return actions

    def answered(self, slot: int, control_steps: int = 0) -> EpisodeSpec:
        """The slot's request has its event; returns the episode it belongs to."""
        self._busy[slot] = False
        self._control_steps[slot] += control_steps
        return self.episode(slot)

    def episode(self, slot: int) -> EpisodeSpec:
        """What the slot runs, or ran last. Raises `UserError` where nothing was started yet."""
        episode = self._episodes[slot] if 0 <= slot < len(self._episodes) else None
        if episode is None:
            raise UserError(
                f"Slot {slot} was stepped before an episode was started in it: call start() first."
            )
        return episode

    def _request(self, slot: int) -> None:
        if not 0 <= slot < len(self._episodes):
            raise UserError(
                f"There is no slot {slot}: this env has slots 0 to {len(self._episodes) - 1}."
            )
        if self._busy[slot]:
            raise UserError(
                f"Slot {slot} has a request open: poll() its event before the next "
                "start() or step()."
            )
        self._busy[slot] = True


def run_request(
    simulator: Simulator, slot: int, episode: EpisodeSpec, actions: np.ndarray | None
) -> SlotObservation | SlotStep:
    """Start ``episode`` (``actions`` None) or run a chunk, and check what the simulator returns.

    Raises ``FloatingPointError`` where proprio, privileged state or rewards are not finite (the
    physics blew up), and `UserError` where shapes differ from the simulator's own embodiment, or a
    failure is none of `FAILURE_KINDS`.
    """
    if actions is None:
        begun = _begun(simulator, slot, episode)
        _check_observation(begun, simulator.embodiment, simulator.privileged_dim)
        return begun
    step = simulator.step(slot, actions)
    _check_observation(step.observation, simulator.embodiment, simulator.privileged_dim)
    if step.rewards.shape != (len(actions),):
        raise _broken(f"rewards {step.rewards.shape}, expected ({len(actions)},)")
    for name, array, shape in (
        ("sent", step.sent, actions.shape),
        ("human", step.human, actions.shape[:1]),
    ):
        if array is not None and array.shape != shape:
            raise _broken(f"{name} {array.shape}, expected {shape}")
    if not np.isfinite(step.rewards).all():
        raise FloatingPointError(f"rewards are not finite: {step.rewards.tolist()}")
    if step.failure and (step.success or step.failure not in FAILURE_KINDS):
        raise UserError(
            f"The simulator ends an episode of {episode.task_id!r} with success={step.success} and "
            f"failure={step.failure!r}: leave it empty on success, else use one of "
            f"{', '.join(FAILURE_KINDS)}."
        )
    if step.instead is not None:
        others = [t.task_id for t in simulator.tasks if t.task_id != episode.task_id]
        if step.instead.task_id not in others:
            raise UserError(
                f"The simulator says that an episode of {episode.task_id!r} solved "
                f"{step.instead.task_id!r} instead: SlotStep.instead is for another of its tasks "
                f"({', '.join(others)}), and success for its own."
            )
    return step


def _begun(simulator: Simulator, slot: int, episode: EpisodeSpec) -> SlotObservation:
    """Where the policy takes over: after the episode's lead. One that ends the episode (a simulator
    that adds noise may come elsewhere) is done by half, as often as it takes."""
    lead = np.array(episode.lead, dtype=np.float32)
    while True:
        seen = simulator.start(slot, episode)
        if not len(lead):
            return seen
        step = simulator.step(slot, lead)
        if not (step.terminated or step.truncated):
            return step.observation
        lead = lead[: len(lead) // 2]


def _check_observation(
    observation: SlotObservation, embodiment: EmbodimentSpec, privileged_dim: int
) -> None:
    if observation.images.keys() != set(embodiment.camera_names):
        raise _broken(
            f"cameras {sorted(observation.images)}, expected {sorted(embodiment.camera_names)}"
        )
    for camera in embodiment.cameras:
        image, shape = observation.images[camera.name], (camera.height, camera.width, 3)
        if image.shape != shape or image.dtype != np.uint8:
            raise _broken(
                f"camera {camera.name!r} {image.dtype} {image.shape}, expected uint8 {shape}"
            )
    states: dict[str, tuple[np.ndarray | None, int]] = {
        "proprio": (observation.proprio, embodiment.proprio_dim)
    }
    if privileged_dim:
        states["privileged"] = (observation.privileged, privileged_dim)
    for name, (values, size) in states.items():
        if values is None or values.shape != (size,):
            raise _broken(
                f"{name} of shape {None if values is None else values.shape}, expected ({size},)"
            )
        if not np.isfinite(values).all():
            raise FloatingPointError(f"{name} is not finite: {values.tolist()}")


def _broken(what: str) -> UserError:
    return UserError(
        f"The simulator breaks its own embodiment: it yields {what}. Correct its "
        "start/step or embodiment."
    )
