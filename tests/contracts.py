"""What every Simulator, Env and Policy must keep, as functions that any plug-in's tests can
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from vla_rl.errors import UserError
from vla_rl.interfaces import Env, Policy, Simulator
from vla_rl.specs import FAILURE_KINDS
from vla_rl.types import (
    EmbodimentSpec,
    EpisodeSpec,
    Observation,
    SlotEvent,
    SlotObservation,
    SlotStep,
)


def check_embodiment(spec: EmbodimentSpec) -> None:
    """Its lists agree in length, its bounds are ordered, and it survives JSON."""
    assert (
        len(spec.action_units)
        == len(spec.action_low)
        == len(spec.action_high)
        == spec.action_dim
        > 0
    )
    assert all(low < high for low, high in zip(spec.action_low, spec.action_high))
    assert spec.control_hz > 0 and spec.cameras and spec.proprio_dim > 0
    assert EmbodimentSpec.from_dict(spec.to_dict()) == spec


def check_observation(
    observation: SlotObservation, spec: EmbodimentSpec, privileged_dim: int
) -> None:
    """Shapes and dtypes are those that the embodiment declares."""
    assert set(observation.images) == set(spec.camera_names)
    for camera in spec.cameras:
        image = observation.images[camera.name]
        assert image.shape == (camera.height, camera.width, 3) and image.dtype == np.uint8
    assert (
        observation.proprio.shape == (spec.proprio_dim,) and observation.proprio.dtype == np.float32
    )
    assert np.isfinite(observation.proprio).all() and observation.instruction
    if privileged_dim:
        assert (
            observation.privileged.shape == (privileged_dim,)
            and observation.privileged.dtype == np.float32
        )


def check_step(
    step: SlotStep,
    spec: EmbodimentSpec,
    privileged_dim: int,
    chunk_length: int,
    *,
    may_cut: bool = False,
) -> None:
    """A chunk's result: rewards per control step, none past the end, at most one way to end, and to
    fail.

    Where a person may take over (``may_cut``) a chunk may end before its last control step while
    the episode goes on.
    """
    check_observation(step.observation, spec, privileged_dim)
    assert step.rewards.shape == (chunk_length,) and step.rewards.dtype == np.float32
    assert 1 <= step.executed <= chunk_length and not step.rewards[step.executed :].any()
    assert not (step.terminated and step.truncated)
    ended = step.terminated or step.truncated
    assert step.executed == chunk_length or ended or may_cut
    for array, shape in (
        (step.sent, (chunk_length, spec.action_dim)),
        (step.human, (chunk_length,)),
    ):
        assert array is None or (array.shape == shape and np.isfinite(array).all())
    assert step.label_source and (step.human is None or step.human.dtype == np.bool_)
    assert step.failure == "" or (step.failure in FAILURE_KINDS and ended and not step.success)


def assert_same_observation(a: SlotObservation, b: SlotObservation) -> None:
    assert a.instruction == b.instruction
    np.testing.assert_array_equal(a.proprio, b.proprio)
    for name in a.images:
        np.testing.assert_array_equal(a.images[name], b.images[name])
    if a.privileged is not None:
        np.testing.assert_array_equal(a.privileged, b.privileged)


def assert_same_step(a: SlotStep, b: SlotStep) -> None:
    assert_same_observation(a.observation, b.observation)
    np.testing.assert_array_equal(a.rewards, b.rewards)
    assert (a.executed, a.terminated, a.truncated, a.success) == (
        b.executed,
        b.terminated,
        b.truncated,
        b.success,
    )
    assert (a.failure, a.label_source) == (b.failure, b.label_source)
    for mine, theirs in ((a.sent, b.sent), (a.human, b.human)):
        np.testing.assert_array_equal(mine, theirs)


def random_actions(spec: EmbodimentSpec, chunk_length: int, seed: int) -> np.ndarray:
    """A chunk float32 [h a], uniform within the physical bounds."""
    rng = np.random.default_rng(seed)
    return rng.uniform(spec.action_low, spec.action_high, (chunk_length, spec.action_dim)).astype(
        np.float32
    )


def check_simulator(
    make: Callable[[], Simulator], *, chunk_length: int = 4, chunks: int = 3
) -> None:
    """Determinism per episode whatever slot and history, clipping, splits, errors, and the end
    of an episode."""
    simulator, other = make(), make()
    spec, task = simulator.embodiment, simulator.tasks[0]
    check_embodiment(spec)
    assert len({t.task_id for t in simulator.tasks}) == len(simulator.tasks)
    episode = EpisodeSpec(task.task_id, 3, seed=11)
    plan = [random_actions(spec, chunk_length, seed) for seed in range(chunks)]

    first = simulator.start(0, episode)
    check_observation(first, spec, simulator.privileged_dim)
    assert first.instruction in task.instructions
    steps = [simulator.step(0, actions) for actions in plan]
    for step in steps:
        check_step(step, spec, simulator.privileged_dim, chunk_length)
        assert not step.terminated, (
            "random actions ended the episode: choose another initial state for this check"
        )

    # Another process's simulator, another slot, other episodes before it and in between: the same
    # outcome.
    other.start(1, EpisodeSpec(simulator.tasks[-1].task_id, 8, seed=5))
    other.step(1, random_actions(spec, chunk_length, 99))
    assert_same_observation(first, other.start(1, episode))
    other.start(0, EpisodeSpec(task.task_id, 4))
    for actions, expected in zip(plan, steps):
        other.step(0, random_actions(spec, chunk_length, 98))
        assert_same_step(expected, other.step(1, actions))

    # Out of range is clipped; not finite is an error.
    high = np.tile(np.float32(spec.action_high), (chunk_length, 1))
    simulator.start(0, episode)
    other.start(0, episode)
    margin = np.float32(spec.action_high) - np.float32(spec.action_low)
    assert_same_step(simulator.step(0, high), other.step(0, high + margin))
    with pytest.raises(ValueError, match="finite"):
        simulator.step(0, high * np.nan)

    # The splits differ in their states and instructions.
    held_out = simulator.start(0, EpisodeSpec(task.task_id, 3, split="held_out"))
    assert held_out.instruction in (task.held_out_instructions or task.instructions)
    assert not np.array_equal(
        held_out.images[spec.camera_names[0]], first.images[spec.camera_names[0]]
    )
    with pytest.raises(UserError, match="no_such_task"):
        simulator.start(0, EpisodeSpec("no_such_task", 0))

    # Time runs out exactly at the horizon.
    simulator.start(0, episode)
    still = np.tile(
        np.clip(0.0, spec.action_low, spec.action_high).astype(np.float32), (chunk_length, 1)
    )
    executed = 0
    while True:
        step = simulator.step(0, still)
        executed += step.executed
        if step.terminated or step.truncated:
            break
    assert step.truncated and not step.success and executed == task.horizon
    check_step(step, spec, simulator.privileged_dim, chunk_length)
    simulator.close()
    other.close()


def ask(env: Env, slots: Sequence[int], send: Callable[[int], None]) -> dict[int, SlotEvent]:
    """Send one request to each of ``slots`` and collect their events."""
    for slot in slots:
        send(slot)
    events: dict[int, SlotEvent] = {}
    while len(events) < len(slots):
        for event in env.poll(timeout=60.0):
            assert event.slot in slots and event.slot not in events, "one event per request"
            events[event.slot] = event
    return events


def check_env(
    env: Env, make: Callable[[], Simulator], *, chunk_length: int = 4, chunks: int = 3
) -> None:
    """Each slot does what the simulator alone does; requests that make no sense are refused by
    name."""
    simulator = make()
    spec, slots = env.embodiment, range(env.num_slots)
    assert spec == simulator.embodiment and env.tasks == simulator.tasks
    assert env.privileged_dim == simulator.privileged_dim
    assert env.poll(timeout=0.0) == []
    episodes = [EpisodeSpec(env.tasks[s % len(env.tasks)].task_id, s, seed=s) for s in slots]
    started = ask(env, slots, lambda slot: env.start(slot, episodes[slot]))
    for slot in slots:
        assert (
            started[slot].step is None
            and started[slot].error is None
            and started[slot].episode == episodes[slot]
        )
        assert_same_observation(started[slot].observation, simulator.start(slot, episodes[slot]))
    live = list(slots)
    for chunk in range(chunks):
        plan = {slot: random_actions(spec, chunk_length, 100 * slot + chunk) for slot in live}
        stepped = ask(env, live, lambda slot, plan=plan: env.step(slot, plan[slot]))
        for slot in list(live):
            step = stepped[slot].step
            assert_same_step(step, simulator.step(slot, plan[slot]))
            assert_same_observation(step.observation, stepped[slot].observation)
            if step.terminated or step.truncated:
                live.remove(slot)
    slot = live[0]
    with pytest.raises(
        UserError, match=f"Slot {slot}.*control step {chunks * chunk_length + 1} .*not finite"
    ):
        env.step(
            slot, np.array([[0.0] * spec.action_dim, [np.nan] * spec.action_dim], dtype=np.float32)
        )
    with pytest.raises(UserError, match="shape"):
        env.step(slot, np.zeros((chunk_length, spec.action_dim + 1), dtype=np.float32))
    with pytest.raises(UserError, match="no slot"):
        env.start(env.num_slots, episodes[0])
    env.start(slot, episodes[slot])
    with pytest.raises(UserError, match="request open"):
        env.start(slot, episodes[slot])
    assert ask(env, [slot], lambda _: None)[slot].error is None
    simulator.close()


def random_observation(
    spec: EmbodimentSpec, batch: int, seed: int = 0, instruction: str = "do it"
) -> Observation:
    """Random pixels and proprio for ``batch`` rows."""
    rng = np.random.default_rng(seed)
    return Observation(
        images={
            c.name: torch.from_numpy(
                rng.integers(0, 256, (batch, c.height, c.width, 3), dtype=np.uint8)
            )
            for c in spec.cameras
        },
        proprio=torch.from_numpy(rng.normal(size=(batch, spec.proprio_dim)).astype(np.float32)),
        instruction=(instruction,) * batch,
    )


def check_policy(
    policy: Policy, observation: Observation | None = None, *, tolerance: float = 1e-4
) -> None:
    """Shapes, sampling fixed by the seeds whatever the batch, and an evaluation that agrees with
    what was recorded."""
    spec = policy.embodiment
    check_embodiment(spec)
    assert Policy.of(policy) is policy and isinstance(policy.can, frozenset)
    observation = random_observation(spec, 4) if observation is None else observation
    b = len(observation)
    seeds = [1000 + i for i in range(b)]
    with torch.inference_mode():
        output = policy.act(observation, seeds=seeds)
        shuffled = policy.act(observation[list(reversed(range(b)))], seeds=seeds[::-1])
        alone = policy.act(observation[0:1], seeds=seeds[:1])
        unseeded = policy.act(observation)
        fixed = [policy.act(observation, deterministic=True) for _ in range(2)]
    for out in (output, unseeded, *fixed):
        assert out.chunk.actions.shape == (b, policy.chunk_length, spec.action_dim)
        assert (
            out.chunk.valid.shape == (b, policy.chunk_length)
            and out.chunk.valid.dtype == torch.bool
        )
        assert (
            torch.isfinite(out.chunk.actions).all() and torch.isfinite(out.behavior_log_prob).all()
        )
        assert out.behavior_log_prob.shape[0] == b and all(
            r.shape[0] == b for r in out.replay.values()
        )
        assert out.value is None or out.value.shape == (b,)
    torch.testing.assert_close(
        shuffled.chunk.actions.flip(0), output.chunk.actions, rtol=0, atol=tolerance
    )
    torch.testing.assert_close(
        alone.chunk.actions, output.chunk.actions[:1], rtol=0, atol=tolerance
    )
    torch.testing.assert_close(
        fixed[0].chunk.actions, fixed[1].chunk.actions, rtol=0, atol=tolerance
    )
    if "value" in policy.can:
        with torch.no_grad():
            value = policy.value(observation)
        assert (value is None) == (output.value is None)
        assert value is None or (
            torch.equal(value, output.value) and torch.equal(value, fixed[0].value)
        )
    if "likelihood" in policy.can:
        replay = {name: tensor.clone() for name, tensor in output.replay.items()}
        evaluation = policy.evaluate(observation, replay)
        assert (
            evaluation.log_prob.shape == output.behavior_log_prob.shape == evaluation.entropy.shape
        )
        assert evaluation.log_prob.ndim == 1 + len(policy.log_prob_axes)
        torch.testing.assert_close(
            evaluation.log_prob.detach().float(),
            output.behavior_log_prob.float(),
            rtol=0,
            atol=tolerance,
        )
        evaluation.log_prob.sum().backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        assert gradients and all(torch.isfinite(g).all() for g in gradients)
        assert any(bool((g != 0).any()) for g in gradients)
        for p in policy.parameters():
            p.grad = None
