"""Videos of episodes, drawn by running their actions again."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from vla_rl.evaluation.outcome import EvaluationResult, executed_actions
from vla_rl.evaluation.video import Clip, grid, have_video, write_mp4
from vla_rl.interfaces import Env
from vla_rl.specs import FAILURE_KINDS
from vla_rl.types import Trajectory

_log = logging.getLogger(__name__)


def make_clips(env: Env, trajectories: Sequence[Trajectory]) -> list[Clip]:
    """A clip per episode from its first camera.

    A rollout keeps images only at decisions. In a simulator an episode is determined by its initial
    state and actions, so an env whose attribute ``repeatable`` is True steps it again, one control
    step at a time, for the images in between; where that does not end the same way, and on a real
    robot, the images at decisions have to do.
    """
    hz, camera = env.embodiment.control_hz, env.embodiment.camera_names[0]
    again = _replay(env, trajectories, camera) if Env.of(env).repeatable else {}
    clips = []
    for i, t in enumerate(trajectories):
        decisions = (
            torch.cat([t.observations.images[camera], t.final_observation.images[camera]])
            .cpu()
            .numpy()
        )
        frames = again.get(i)
        if (
            frames is not None
            and len(frames) == t.num_control_steps + 1
            and np.array_equal(frames[-1], decisions[-1])
        ):
            clips.append(Clip(np.stack(frames), hz, t.success, _label(t)))
        else:
            clips.append(Clip(decisions, hz * len(t) / t.num_control_steps, t.success, _label(t)))
    return clips


def _label(t: Trajectory) -> str:
    how = f" · {t.failure.replace('_', ' ')}" if t.failure else ""
    return f"{t.episode.task_id} #{t.episode.init_state_id} · {t.num_control_steps} steps{how}"


def _replay(
    env: Env, trajectories: Sequence[Trajectory], camera: str
) -> dict[int, list[np.ndarray]]:
    """Images uint8 [H W 3] at every control step of the episodes (by index), in all slots at once.

    An episode that fails is missing. Always waits for every request it made, so that no event is
    left for others.
    """
    todo = list(range(len(trajectories)))[::-1]
    live: dict[int, tuple[int, Iterator[np.ndarray]]] = {}  # slot → episode, actions still to do
    frames: dict[int, list[np.ndarray]] = {}

    def take_next(slot: int) -> None:
        if todo:
            index = todo.pop()
            live[slot], frames[index] = (index, iter(executed_actions(trajectories[index]))), []
            env.start(slot, trajectories[index].episode)

    for slot in range(env.num_slots):
        take_next(slot)
    while live:
        for event in env.poll(None):
            index, actions = live.pop(event.slot)
            if event.error is not None or event.observation is None:
                del frames[index]
                take_next(event.slot)
                continue
            # a pool reuses its memory
            frames[index].append(event.observation.images[camera].copy())
            ended = event.step is not None and (event.step.terminated or event.step.truncated)
            action = None if ended else next(actions, None)
            if action is None:
                take_next(event.slot)
            else:
                live[event.slot] = (index, actions)
                env.step(event.slot, action[None])
    return frames


def write_videos(
    result: EvaluationResult, path: str | Path, *, control_hz: float | None = None
) -> Path | None:
    """Write the result's clips as one grid video in real time; None (with a warning) where none
    were recorded.

    ``control_hz`` caps the frame rate at 30; it defaults to the result's own.
    """
    if not result.clips:
        _log.warning(
            "no video %s: %s",
            path,
            "PyAV is not installed" if not have_video() else "no episode was recorded",
        )
        return None
    return _write_grid(path, result.clips, control_hz or result.control_hz)


def write_failure_videos(result: EvaluationResult, path: str | Path) -> dict[str, Path]:
    """Write one video per kind of failure that occurred, beside the grid ``path``: ``<its
    stem>_failure_<kind>.mp4``.

    Returns {kind: file}. What an earlier evaluation of that name has left of other kinds is
    removed.
    """
    path, written = Path(path), {}
    for kind in FAILURE_KINDS:
        target = path.with_name(f"{path.stem}_failure_{kind}{path.suffix}")
        if kind in result.failure_clips:
            written[kind] = _write_grid(target, [result.failure_clips[kind]], result.control_hz)
        else:
            target.unlink(missing_ok=True)
    return written


def _write_grid(path: str | Path, clips: Sequence[Clip], most_hz: float) -> Path:
    frames, hz = grid(clips)
    if hz > 30:
        skip = math.ceil(hz / 30)
        frames, hz = (f for i, f in enumerate(frames) if i % skip == 0), hz / skip
    return write_mp4(path, frames, min(hz, most_hz))
