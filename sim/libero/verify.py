"""``vla-rl libero verify``: is LIBERO here the published benchmark, to the bit and the pixel?

``published.npz`` beside this file was made by LIBERO's own `OffScreenRenderEnv` in the loop of
published evaluations (seed 0 once, then per episode reset, initial state, ten resting control
steps), with the published assets, under a verified MuJoCo: for each task its first states as hashes
of joint positions and velocities and of both pictures at 256 px, with positions in single precision
and means over blocks of the pictures for machines that round or draw otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.libero import assets, fidelity, package
from sim.libero.settings import LiberoConfig
from vla_rl.errors import ConfigError, UserError
from vla_rl.specs import EpisodeSpec

TABLE = Path(__file__).with_name("published.npz")
CAMERAS = ("agentview", "robot0_eye_in_hand")
SIZE = 256  # pixels
BLOCKS = 8  # per side, of which means are kept
# Another processor or numpy rounds otherwise, and contacts amplify that; MuJoCo 3.8.1 moves objects
# by 1.6 to 540 mm.
CLOSE = 1e-4  # m or rad of any joint position
# Another OpenGL driver filters textures and edges otherwise; MuJoCo 3.8.1 darkens floors by 55 of
# 255 levels.
ALIKE = 4.0  # levels of any block's mean


@dataclass(frozen=True)
class Row:
    """One initial state of a task after its waits. ``pictures`` as LIBERO gives them (not
    turned), by `CAMERAS`."""

    task: str
    number: int
    state: str
    pictures: tuple[str, ...]
    qpos: np.ndarray
    blocks: np.ndarray

    @classmethod
    def of(cls, task: str, number: int, data: Any, pictures: Mapping[str, np.ndarray]) -> Row:
        """``data``: MuJoCo's; ``pictures`` {camera: uint8 [SIZE SIZE 3]}."""
        side = SIZE // BLOCKS
        seen = [np.ascontiguousarray(pictures[name]) for name in CAMERAS]
        means = [
            p.reshape(BLOCKS, side, BLOCKS, side, 3).mean(axis=(1, 3)).round().astype(np.uint8)
            for p in seen
        ]
        state = np.concatenate([data.qpos, data.qvel])
        return cls(
            task,
            number,
            _hash(state),
            tuple(map(_hash, seen)),
            data.qpos.astype(np.float32),
            np.stack(means),
        )


def _hash(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def write_table(path: Path, rows: Iterable[Row], about: Mapping[str, Any]) -> None:
    """``about``: versions, driver, assets: with what the rows were made."""
    rows = list(rows)
    with open(path.with_suffix(".tmp"), "wb") as file:
        np.savez_compressed(
            file,
            about=np.frombuffer(json.dumps(dict(about)).encode(), np.uint8),
            task=np.array([row.task for row in rows]),
            number=np.array([row.number for row in rows]),
            state=np.array([row.state for row in rows]),
            pictures=np.array([row.pictures for row in rows]),
            length=np.array([len(row.qpos) for row in rows]),
            qpos=np.concatenate([row.qpos for row in rows]),
            blocks=np.stack([row.blocks for row in rows]),
        )
    path.with_suffix(".tmp").replace(path)


def read_table(path: Path = TABLE) -> tuple[list[Row], dict[str, Any]]:
    """The rows, and with what they were made."""
    with np.load(path, allow_pickle=False) as found:
        table = {name: found[name] for name in found.files}
    ends = np.cumsum(table["length"])
    rows = [
        Row(
            str(table["task"][i]),
            int(table["number"][i]),
            str(table["state"][i]),
            tuple(map(str, table["pictures"][i])),
            table["qpos"][ends[i] - table["length"][i] : ends[i]],
            table["blocks"][i],
        )
        for i in range(len(ends))
    ]
    return rows, json.loads(table["about"].tobytes())


def compared(wanted: Row, found: Row, same_driver: bool) -> tuple[str, bool]:
    """(how they compare, whether that passes): states bit by bit, else within `CLOSE`; pictures
    byte by byte under the driver that the table was made with, else by the means over their
    blocks."""
    if wanted.state == found.state:
        said, good = "state equal", True
    else:
        gap = (
            float(np.abs(wanted.qpos - found.qpos).max())
            if wanted.qpos.shape == found.qpos.shape
            else np.inf
        )
        good = gap <= CLOSE
        said = (
            f"state within {gap:.1e}, not bit for bit" if good else f"state off by up to {gap:.1e}"
        )
    if wanted.pictures == found.pictures:
        return f"{said}, pictures equal", good
    gap = float(np.abs(wanted.blocks.astype(float) - found.blocks).max())
    alike = gap <= ALIKE and not (same_driver and wanted.state == found.state)
    return f"{said}, pictures off by up to {gap:.0f} levels in a block's mean", good and alike


def verify(tasks: Iterable[str] = (), folder: str = "") -> Iterator[str]:
    """A line for each of ``tasks`` (ids; none: all that the table has), and one for all.
    ``folder``: see ``env.assets``.

    Raises `ConfigError` for a task that the table does not have, `UserError` where LIBERO here is
    another benchmark, before anything is simulated where versions or assets tell, else after the
    last line.
    """
    rows, about = read_table()
    known = dict.fromkeys(row.task for row in rows)
    wanted = list(tasks) or list(known)
    if missing := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"--task {missing[0]} is not in the table of published states, which has "
            f"{', '.join(known)}"
        )
    copy = assets.judged(package.find_assets(folder))
    if problems := [
        *fidelity.package_problems(fidelity.versions()),
        *fidelity.asset_problems(copy),
    ]:
        raise UserError(f"LIBERO here is not the published benchmark: {'; '.join(problems)}")
    yield (
        f"table: {about['mujoco']} of MuJoCo, {about['driver']}; here "
        f"{fidelity.versions()['mujoco']}, {copy}"
    )
    bad: list[str] = []
    for task in wanted:
        said, good = _verified(
            task, [row for row in rows if row.task == task], about["driver"], folder
        )
        bad += [] if good else [task]
        yield f"{task}: {said}"
    if bad:
        raise UserError(f"{len(bad)} of {len(wanted)} tasks are not as published: {', '.join(bad)}")
    yield f"all {len(wanted)} tasks as published"


def _verified(task: str, rows: list[Row], driver: str, folder: str) -> tuple[str, bool]:
    from sim.libero.simulator import LiberoSimulator

    suite, number = task.split("/")
    config = LiberoConfig(
        suite=suite,
        tasks=[number],
        cameras=list(CAMERAS),
        camera_size=SIZE,
        rotate_images=False,
        init_states="official",
        fixtures="loop",
        assets=folder,
    )
    simulator, said = LiberoSimulator(config), []
    try:
        for row in rows:
            seen = simulator.start(0, EpisodeSpec(task, row.number, split="held_out"))
            found = Row.of(task, row.number, simulator.slot(0).data, seen.images)
            said.append(compared(row, found, gl_driver() == driver))
    finally:
        simulator.close()
    words = list(dict.fromkeys(text for text, _ in said))
    return f"{len(rows)} states: {'; '.join(words)}", all(good for _, good in said)


def gl_driver() -> str:
    """What draws in the OpenGL context that is current."""
    from OpenGL import GL

    return " ".join(GL.glGetString(name).decode() for name in (GL.GL_RENDERER, GL.GL_VERSION))
