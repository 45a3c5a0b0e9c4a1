"""What a folder of recorded episodes is, and what is wrong with it: `vla-rl data check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl import build
from vla_rl.data.checks import ERROR, WARNING, DataCheck, Finding, Report, Rows
from vla_rl.data.lerobot_format import ACTION_KEY, IMAGE_PREFIX, STATE_KEY, DatasetError, is_depth
from vla_rl.data.lerobot_reader import (
    damage,
    first_pictures,
    flat_names,
    read_embodiment,
    read_info,
    require_fit,
)
from vla_rl.data.lerobot_rows import LeRobotRows, read_rows
from vla_rl.data.published import check_contents
from vla_rl.data.recording import camera_of
from vla_rl.errors import MANGLED, UserError, first_line
from vla_rl.files import REPLAY_FILES
from vla_rl.specs import CameraSpec, EmbodimentSpec

_LOOKED_AT = 200  # episodes of which the first picture is decoded


def check_folder(
    path: str | Path, embodiment: EmbodimentSpec | None = None, texts: Collection[str] = ()
) -> list[Report]:
    """A report for each kind of recording in ``path``: a LeRobotDataset v3, HDF5 demonstrations of
    LIBERO or RoboTwin, a session's journals, a replay, rollouts, or a run that holds some of them.
    ``embodiment`` and ``texts`` are those of the run that would learn from it (None: as the data
    say themselves; none: any). Raises `UserError` where nothing is known.
    """
    path = Path(path)
    found = list(_sources(path))
    if not found:
        raise UserError(
            f"{path} holds no recorded episodes: name a LeRobotDataset v3 (with meta/info.json), "
            "LIBERO's or RoboTwin's HDF5 files, a session of 'vla-rl robot', a replay, or a run "
            "that has one of them"
        )
    return [_guarded(kind, folder, check, embodiment, texts) for kind, folder, check in found]


_Check = Callable[[Path, EmbodimentSpec | None, Collection[str]], Report]


def _sources(path: Path) -> Iterator[tuple[str, Path, _Check]]:
    if (path / "meta").is_dir():
        yield "LeRobotDataset v3", path, _lerobot
        return
    if path.suffix in (".hdf5", ".h5") and path.is_file():
        yield "LIBERO's HDF5", path, _libero
    elif any((path / "data").glob("episode*.hdf5")):
        yield "RoboTwin's HDF5", path, _robotwin
    elif any(path.rglob("*.hdf5")):
        yield "LIBERO's HDF5", path, _libero
    if any(
        any(folder.glob(f"*.vrj{end}"))
        for folder in (path, path / "journal")
        for end in ("", ".open")
    ):
        yield "journals", path, _journals
    if (path / "dataset" / "meta").is_dir():
        yield "LeRobotDataset v3", path / "dataset", _lerobot
    for folder in (path, path / "replay"):
        if all((folder / name).exists() for name in REPLAY_FILES):
            yield "replay", folder, _replay
    if (path / "state.json").is_file():
        yield "rollouts", path, _rollouts


def _guarded(
    kind: str, path: Path, check: _Check, embodiment: EmbodimentSpec | None, texts: Collection[str]
) -> Report:
    try:
        return check(path, embodiment, texts)
    except UserError as error:
        said = str(error)
    except MANGLED as error:
        said = f"{path} is incomplete or damaged ({first_line(error)})"
    return Report(
        str(path),
        kind,
        findings=(Finding(ERROR, "unreadable", said, "Mend that, then look again"),),
    )


# ------------------------------------------------------------------------------------------ lerobot
def _lerobot(path: Path, embodiment: EmbodimentSpec | None, texts: Collection[str]) -> Report:
    info, stored = read_info(path), read_embodiment(path)
    with damage(path):
        cameras = {c.name: (k, c) for k, c in _cameras(info["features"])}
        spec = embodiment or stored
        if spec is not None:
            require_fit(
                path,
                info,
                stored,
                spec,
                {c: f"{IMAGE_PREFIX}{c}" for c in spec.camera_names},
                compare_names=True,
            )
        keys = [k for k in (STATE_KEY, ACTION_KEY) if k in info["features"]]
        if ACTION_KEY not in keys:
            raise DatasetError(f"{path} has no actions, only {sorted(info['features'])}")
        rows = read_rows(path, info, keys)
        rows.names = {
            k: names for k in keys if (names := flat_names(info["features"][k].get("names")))
        }
        report = rows.report(info, spec, texts)
        return dataclasses.replace(
            report, findings=(*report.findings, *_look(path, info, rows, cameras))
        )


def _cameras(features: Any) -> Iterator[tuple[str, CameraSpec]]:
    """(feature, camera) of each feature that holds colours."""
    for key, feature in features.items():
        if feature.get("dtype") in ("image", "video") and not is_depth(feature):
            yield key, camera_of(key.removeprefix(IMAGE_PREFIX), feature)


def _look(
    path: Path, info: Any, rows: LeRobotRows, cameras: dict[str, tuple[str, CameraSpec]]
) -> Iterator[Finding]:
    """What is wrong with the first pictures of episodes."""
    for name, (key, camera) in cameras.items():
        try:
            with damage(path):
                shown = first_pictures(path, info, (camera,), {name: key}, rows, _LOOKED_AT)[name]
        except UserError as error:
            yield Finding(
                ERROR,
                "picture",
                str(error),
                "Leave the camera out, or fetch the dataset again",
                key=key,
            )
            continue
        if (shown == shown.reshape(-1, 3)[0]).all():
            yield Finding(
                WARNING,
                "one_colour",
                f"its first pictures in {len(shown)} episodes show nothing but one colour",
                "Look whether the camera was covered",
                str(path),
                key=key,
            )


# --------------------------------------------------------------------------------------------- HDF5
def _libero(path: Path, embodiment: EmbodimentSpec | None, texts: Collection[str]) -> Report:
    form = build.attribute("sim.libero_demos:LiberoDemonstrations")
    names, ones = ("dx", "dy", "dz", "drx", "dry", "drz", "gripper"), np.ones(7)
    bounds = {ACTION_KEY: {"LIBERO's actions": (-ones, ones)}}
    check = DataCheck(
        str(path), "LIBERO's HDF5", embodiment, texts, bounds=bounds, names={ACTION_KEY: names}
    )
    for file in form.files(path):
        check_contents(check, file, form.contents)
    return check.report()


def _robotwin(path: Path, embodiment: EmbodimentSpec | None, texts: Collection[str]) -> Report:
    check = DataCheck(str(path), "RoboTwin's HDF5", embodiment, texts)
    contents = build.attribute("sim.robotwin.published:contents")
    for file in build.attribute("sim.robotwin.published:files")(path).values():
        check_contents(check, file, contents)
    return check.report()


# ----------------------------------------------------------------------- what this project recorded
def _replay(path: Path, embodiment: EmbodimentSpec | None, texts: Collection[str]) -> Report:
    from vla_rl.data.recorded import recorded_rows
    from vla_rl.data.replay_checks import SENT
    from vla_rl.data.replay_folder import robot_of

    check = DataCheck(str(path), "replay", embodiment or robot_of(path), texts, leeway=SENT)
    for rows in recorded_rows(path, embodiment):
        check.add(rows)
    return check.report()


def _rollouts(path: Path, embodiment: EmbodimentSpec | None, texts: Collection[str]) -> Report:
    from vla_rl.data.trajectories import load_rollouts

    check = DataCheck(str(path), "rollouts", embodiment, texts)
    for t in load_rollouts(path):
        vectors = {
            ACTION_KEY: t.actions[t.valid].numpy(),
            STATE_KEY: t.observations.proprio.numpy(),
        }
        said = t.observations.instruction[0] if len(t) else ""
        check.add(
            Rows(f"rollout {t.rollout_id}", str(path), vectors, said, t.success, aligned=False)
        )
    return check.report()


def _journals(path: Path, embodiment: EmbodimentSpec | None, texts: Collection[str]) -> Report:
    from vla_rl.data.session_export import control_rows

    read, find, parse = (
        build.attribute(f"real.{n}") for n in ("journal:read", "journal:journals", "tasks:parse")
    )
    check: DataCheck | None = None
    first: EmbodimentSpec | None = None
    for file in find(path):
        at = {"file": str(file), "episode": file.name}
        try:
            episode = read(file, pictures=False)
            own = EmbodimentSpec.from_dict(episode.header["embodiment"])
            if check is None:
                first = own
                check = DataCheck(str(path), "journals", embodiment or own, texts)
            if first is not None and first != own:
                check.note(
                    ERROR,
                    "other_robot",
                    f"it is of {own.name}, and those before of {first.name}",
                    "Keep one robot's episodes in a folder",
                    **at,
                )
            steps, why = control_rows(episode, discarded=False)
            if why:
                check.note(
                    WARNING, "left_out", f"it is not exported: {why}", "It is left out", **at
                )
                continue
            start = episode.ticks[0]["stamp"]
            vectors = {
                STATE_KEY: np.array([begun["proprio"] for begun, _ in steps], np.float64),
                ACTION_KEY: np.array([end["sent"] for _, end in steps], np.float64),
            }
            said = parse(str(episode.header.get("task") or "teleoperated")).instruction
            success = None if episode.verdict is None else episode.succeeded
            stamps = np.array([begun["stamp"] - start for begun, _ in steps])
            check.add(Rows(file.name, str(file), vectors, said, success, stamps))
        except (UserError, *MANGLED) as error:
            check = check or DataCheck(str(path), "journals", embodiment, texts)
            check.note(
                ERROR,
                "unreadable",
                first_line(error),
                "'vla-rl robot verify' says more; leave the episode out",
                **at,
            )
    assert check is not None
    return check.report()
