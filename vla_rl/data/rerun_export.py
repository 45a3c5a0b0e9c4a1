"""Demonstrations and rollouts for the Rerun viewer (https://rerun.io), as one ``.rrd`` file.

Episodes follow one another on the timeline ``step`` (control steps of all episodes); the timeline ``episode`` counts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl.data.lerobot_writer import encode_png
from vla_rl.errors import MissingPackage, UserError
from vla_rl.rewards.sources import Source
from vla_rl.types import Observation, Trajectory


def export_rerun(source: Source, file: Path) -> Path:
    """Write the source's episodes: ``camera/<name>``, ``proprio``, ``action``, ``reward`` and the text ``episode``.

    Demonstrations have an image for every control step, rollouts one for every decision. Returns ``file``. Raises
    `MissingPackage` without rerun-sdk, and `UserError` where there is nothing to write or the name is not ``.rrd``.
    """
    try:
        import rerun
    except ImportError:
        raise MissingPackage("rerun-sdk", "rerun", "Exporting for Rerun") from None
    if file.suffix != ".rrd":
        raise UserError(f"{file} is no name for a Rerun recording: let it end in .rrd")
    if not source.trajectories:
        raise UserError(f"there is nothing to write: {source.what}")
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    stream = rerun.RecordingStream("vla-rl", send_properties=False)
    stream.save(part)
    step = 0
    for number, trajectory in enumerate(source.trajectories):
        stream.set_time("episode", sequence=number)
        step = _log_episode(rerun, stream, trajectory, number, step)
    stream.flush()
    stream.disconnect()
    return part.replace(file)


def _log_episode(rerun: Any, stream: Any, trajectory: Trajectory, number: int, step: int) -> int:
    """Log one episode from ``step`` on; returns the first step of the next."""
    spec, seen = trajectory.episode, trajectory.observations
    outcome = "success" if trajectory.success else f"failure {trajectory.failure.replace('_', ' ')}".strip()
    state = f"initial state {spec.init_state_id}, " if spec.init_state_id >= 0 else ""
    stream.set_time("step", sequence=step)
    text = f"**{number}: {spec.task_id}**\n\n{seen.instruction[0]}\n\n{state}{spec.split}: {outcome}"
    stream.log("episode", rerun.TextDocument(text, media_type="text/markdown"))
    for t in range(len(trajectory)):
        stream.set_time("step", sequence=step)
        _log_observation(rerun, stream, seen, t)
        for h in trajectory.valid[t].nonzero().flatten().tolist():
            stream.set_time("step", sequence=step)
            stream.log("action", rerun.Scalars(trajectory.actions[t, h].numpy()))
            stream.log("reward", rerun.Scalars(float(trajectory.rewards[t, h])))
            step += 1
    stream.set_time("step", sequence=step)
    _log_observation(rerun, stream, trajectory.final_observation, 0)
    return step + 1


def _log_observation(rerun: Any, stream: Any, observation: Observation, row: int) -> None:
    for name, images in observation.images.items():
        image = rerun.EncodedImage(contents=encode_png(images[row].numpy()), media_type="image/png")
        stream.log(f"camera/{name}", image)
    stream.log("proprio", rerun.Scalars(observation.proprio[row].numpy()))
