"""Changes of a loaded LIBERO scene for robustness evaluations: camera, light, background, robot
start and layout.

Each function draws from ``rng`` and returns fields of the MuJoCo model (`sim.libero.backend.Edits`)
or a changed `sim.libero.backend.Snapshot`; nothing is rebuilt. Ranges follow LIBERO-Plus where its
code gives them (camera: the ranges of its variant names; robot: 0.1 to 0.5 rad; layout: 3 to 15 cm)
and are ours where its values lie in asset files (light, background). docs/how_to/robustness.md
lists both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mujoco
import numpy as np

from sim.libero.backend import REST, STATE, Edits, Snapshot, TaskScene

# By level, 1 to 5.
# of the camera, about the vertical, either way
AZIMUTH = np.radians([5.0, 15.0, 30.0, 60.0, 180.0])
ELEVATION = np.radians([5.0, 5.0, 10.0, 15.0, 15.0])
DISTANCE = (1.1, 1.25, 1.5, 2.0, 2.0)  # times the camera's own
# of the view alone, about the vertical and the lateral axis
TILT = np.radians([2.0, 4.0, 6.0, 8.0, 10.0])
PIVOT = np.array([0.0, 0.0, 0.8])  # metres: what LIBERO-Plus turns its camera about
# times the lights' own intensity
DIM, BRIGHT = (0.85, 0.7, 0.5, 0.35, 0.25), (1.15, 1.3, 1.5, 1.75, 2.0)
DARKEST_CHANNEL = (0.9, 0.75, 0.6, 0.4, 0.2)  # of coloured light
LIGHT_TILT = np.radians([5.0, 10.0, 20.0, 40.0, 60.0])
SHADOWS_FROM = 3
TINT = (0.3, 0.6)  # share of the new colour in a material's, at levels 1 and 2
JOINT_OFFSET = 0.1  # rad per level: the length of the arm's displacement in joint space
DISPLACEMENT = 0.03  # metres per level that an object may move

_TRIES = 30
_LAYOUTS = 5
_SETTLE_STEPS = 10
_LANDING_STEPS = 40  # control steps that things in the air get to come down
_SLIPPED = 0.01  # metres
_SLOW = 0.02  # m/s
_RGB_ROLE = 1  # of a material's textures in newer MuJoCo, where there is more than one


# ------------------------------------------------------------------------------------------- camera
def camera_edits(
    model: mujoco.MjModel, camera: str, level: int, rng: np.random.Generator, targets: np.ndarray
) -> Edits | None:
    """Another pose of ``camera``: on a sphere about `PIVOT`, farther away, and tilted; up to the
    level's bounds.

    The turns of LIBERO-Plus: about y by the elevation, then about z by the azimuth, both of
    position and view; distance from the pivot; then the view alone about z and y. A view that loses
    one of the ``targets`` [n 3] (m, world) which the usual one has is drawn again; None where
    `_TRIES` of them do.
    """
    number = model.camera(camera).id
    wanted = targets[in_view(model, number, model.cam_pos[number], model.cam_quat[number], targets)]
    at = level - 1
    for _ in range(_TRIES):
        azimuth, elevation, turn, nod = rng.uniform(-1.0, 1.0, 4)
        farther = rng.uniform()
        orbit = _product(
            _quaternion("z", azimuth * AZIMUTH[at]), _quaternion("y", elevation * ELEVATION[at])
        )
        offset = np.empty(3)
        mujoco.mju_rotVecQuat(offset, model.cam_pos[number] - PIVOT, orbit)
        position = PIVOT + offset * (1.0 + farther * (DISTANCE[at] - 1.0))
        view = _product(
            _quaternion("z", turn * TILT[at]),
            _quaternion("y", nod * TILT[at]),
            orbit,
            model.cam_quat[number],
        )
        if in_view(model, number, position, view, wanted).all():
            return {"cam_pos": _row(number, position), "cam_quat": _row(number, view)}
    return None


def plus_view(model: mujoco.MjModel, camera: str, view: Sequence[int]) -> Edits:
    """The pose that LIBERO-plus gives ``camera`` for a ``view`` (`sim.libero.plus.Change`), rounded
    after each turn as it is there."""
    number = model.camera(camera).id
    about, up, percent, turn, nod = view
    position, quaternion = model.cam_pos[number], model.cam_quat[number]
    for axis, degrees in (*((("y", -up),) if up else ()), ("z", about)):
        offset = np.empty(3)
        orbit = _quaternion(axis, np.radians(degrees))
        mujoco.mju_rotVecQuat(offset, position - PIVOT, orbit)
        position, quaternion = (PIVOT + offset).round(4), _turned(quaternion, axis, degrees)
    if percent != 100:
        position = (PIVOT + (position - PIVOT) * (percent / 100)).round(4)
    for axis, degrees in (("z", turn), ("y", -nod)):
        if degrees:
            quaternion = _turned(quaternion, axis, degrees)
    unit = quaternion / np.linalg.norm(quaternion)  # as MuJoCo's compiler does
    return {"cam_pos": _row(number, position), "cam_quat": _row(number, unit)}


def _turned(quaternion: np.ndarray, axis: str, degrees: float) -> np.ndarray:
    unit = quaternion / np.linalg.norm(quaternion)
    return _product(_quaternion(axis, np.radians(degrees)), unit).round(4)


def in_view(
    model: mujoco.MjModel,
    number: int,
    position: np.ndarray,
    quaternion: np.ndarray,
    points: np.ndarray,
) -> np.ndarray:
    """Bool [n]: which ``points`` [n 3] lie inside the square picture of camera ``number`` at a
    pose, hidden or not."""
    turn = np.empty(9)
    mujoco.mju_quat2Mat(turn, np.asarray(quaternion))
    # it looks along its own -z
    x, y, z = ((np.reshape(points, (-1, 3)) - position) @ turn.reshape(3, 3)).T
    reach = -z * np.tan(np.radians(model.cam_fovy[number]) / 2)
    return (np.abs(x) < reach) & (np.abs(y) < reach)


def target_positions(scene: TaskScene, snapshot: Snapshot) -> np.ndarray:
    """Where all that the goal names is at the start [n 3] (m, world)."""
    data, _ = _working_copy(scene, snapshot)
    return np.array(
        [scene.position(data, name) for _, *names in scene.problem.goal for name in names]
    )


def _quaternion(axis: str, angle: float) -> np.ndarray:
    result = np.empty(4)
    mujoco.mju_axisAngle2Quat(result, np.eye(3)["xyz".index(axis)], angle)
    return result


def _product(*quaternions: np.ndarray) -> np.ndarray:
    result = np.array([1.0, 0.0, 0.0, 0.0])
    for quaternion in quaternions:
        out = np.empty(4)
        mujoco.mju_mulQuat(out, result, np.asarray(quaternion))
        result = out
    return result


def _row(number: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.array([number]), np.asarray(values)[None]


# -------------------------------------------------------------------------------------------- light
def light_edits(model: mujoco.MjModel, level: int, rng: np.random.Generator) -> Edits:
    """All lights of the scene dimmer or brighter, coloured and turned; with shadows from level
    `SHADOWS_FROM` on."""
    at = level - 1
    strength = (DIM if rng.uniform() < 0.5 else BRIGHT)[at]
    colour = rng.uniform(DARKEST_CHANNEL[at], 1.0, 3)
    heading, share = rng.uniform(0.0, 2 * np.pi), rng.uniform(0.5, 1.0)
    lights = np.arange(model.nlight)
    turn, directions = np.empty(4), np.array(model.light_dir)
    mujoco.mju_axisAngle2Quat(
        turn, np.array([np.cos(heading), np.sin(heading), 0.0]), share * LIGHT_TILT[at]
    )
    for direction in directions:
        mujoco.mju_rotVecQuat(direction, direction.copy(), turn)
    edits = {
        "light_diffuse": (lights, np.clip(model.light_diffuse * strength * colour, 0.0, 1.0)),
        "light_specular": (lights, np.clip(model.light_specular * strength * colour, 0.0, 1.0)),
        "light_dir": (lights, directions),
    }
    if level >= SHADOWS_FROM:
        edits["light_castshadow"] = (
            lights,
            np.ones(len(lights), dtype=model.light_castshadow.dtype),
        )
    return edits


# --------------------------------------------------------------------------------------- background
@dataclass(frozen=True)
class _Surroundings:
    """Materials of what belongs to no object, fixture or robot: of the surface things stand on,
    and of the rest."""

    surface: tuple[int, ...]
    rest: tuple[int, ...]


def surroundings(scene: TaskScene) -> _Surroundings:
    """What of the scene is background: table or floor where the objects stand, and floor, walls
    and decoration."""
    model, arena = scene.model, _Roots(scene).arena
    shown = [g for g in range(model.ngeom) if model.geom_matid[g] >= 0 and _root(model, g) in arena]
    # Objects stand on a body of its own (table, floor of a room without one), decoration belongs to
    # the world.
    surface = {int(model.geom_matid[g]) for g in shown if _root(model, g) != 0}
    rest = {int(model.geom_matid[g]) for g in shown} - surface
    return _Surroundings(tuple(sorted(surface)), tuple(sorted(rest)))


def background_edits(scene: TaskScene, level: int, rng: np.random.Generator) -> Edits:
    """Other colours (levels 1 and 2) or textures (3: table or floor; 4: walls too; 5: the same,
    with strong contrast)."""
    found, model = surroundings(scene), scene.model
    colours = rng.uniform(0.1, 1.0, (2, 3))
    if level <= 2:
        groups = [(found.surface, colours[0]), (found.rest, colours[1])][:level]
        materials = np.array([m for group, _ in groups for m in group], dtype=np.int64)
        values = model.mat_rgba[materials].copy()
        values[:, :3] *= 1.0 - TINT[level - 1]
        values[:, :3] += TINT[level - 1] * np.concatenate(
            [np.tile(c, (len(group), 1)) for group, c in groups]
        )
        return {"mat_rgba": (materials, values)}
    textures = dict.fromkeys(
        _textures(model, found.surface if level == 3 else found.surface + found.rest)
    )
    rows, values = [], []
    for texture in textures:
        start, height, width = (
            int(model.tex_adr[texture]),
            int(model.tex_height[texture]),
            int(model.tex_width[texture]),
        )
        picture = np.full((height, width, _channels(model, texture)), 255, dtype=np.uint8)
        # The faces of a cube lie below each other; each shows the whole pattern.
        picture[..., :3] = np.resize(
            _pattern(min(height, width), 1.0 if level == 5 else 0.5, rng), (height, width, 3)
        )
        rows.append(np.arange(start, start + picture.size, dtype=np.int32))
        values.append(picture.ravel())
    return {"tex_data": (np.concatenate(rows), np.concatenate(values))} if rows else {}


def _textures(model: mujoco.MjModel, materials: Sequence[int]) -> Iterator[int]:
    ids = np.reshape(model.mat_texid, (model.nmat, -1))
    for material in materials:
        texture = int(ids[material, min(_RGB_ROLE, ids.shape[1] - 1)])
        if texture >= 0:
            yield texture


def _channels(model: mujoco.MjModel, texture: int) -> int:
    """3 before MuJoCo 3.2, which has them by texture."""
    return int(model.tex_nchannel[texture]) if hasattr(model, "tex_nchannel") else 3


def _pattern(size: int, contrast: float, rng: np.random.Generator) -> np.ndarray:
    """Uint8 [size size 3]: checks, stripes, a gradient or grain in two random colours
    ``contrast`` apart."""
    kind, cells = rng.integers(4), int(rng.integers(4, 17))
    first, second = rng.uniform(0.0, 1.0, (2, 3))
    second = first + contrast * (second - first)
    y, x = np.mgrid[0:size, 0:size] / size
    if kind == 0:
        mix = (np.floor(x * cells) + np.floor(y * cells)) % 2
    elif kind == 1:
        mix = np.floor((x + y) * cells) % 2
    elif kind == 2:
        mix = x
    else:
        grain = rng.random((cells * 8, cells * 8))
        mix = grain[(y * cells * 8).astype(int), (x * cells * 8).astype(int)]
    return (255.0 * (first + mix[..., None] * (second - first)) + 0.5).astype(np.uint8)


# -------------------------------------------------------------------------------------------- robot
def arm_offset(level: int, rng: np.random.Generator) -> np.ndarray:
    """A displacement of the seven joints: a random direction, `JOINT_OFFSET` rad long per level
    (LIBERO-Plus's rule)."""
    direction = rng.normal(size=7)
    return JOINT_OFFSET * level * direction / np.linalg.norm(direction)


def displaced_arm(
    scene: TaskScene, snapshot: Snapshot, level: int, rng: np.random.Generator
) -> Snapshot:
    """``snapshot`` with the arm elsewhere and at rest there; nothing touches it that did not
    before.

    The controller's goal is where the hand is now. Directions that push a joint over its limit or
    the arm into something are drawn again; after `_TRIES` of them the last one that keeps the
    limits is shortened until it fits.
    """
    model, controller = scene.model, scene.controller
    data, (control, clock, seen) = _working_copy(scene, snapshot)
    home = data.qpos[controller.qpos_index].copy()
    joints = [int(np.flatnonzero(model.jnt_qposadr == index)[0]) for index in controller.qpos_index]
    low, high = model.jnt_range[joints].T
    roots = _Roots(scene)
    before = _touching(model, data, roots.robot)
    for attempt in range(2 * _TRIES):
        offset = arm_offset(level, rng) * min(1.0, (2 * _TRIES - attempt) / (_TRIES + 1))
        target = home + offset
        data.qpos[controller.qpos_index] = target
        data.qvel[controller.dofs] = 0.0
        mujoco.mj_forward(model, data)
        if ((target > low) & (target < high)).all() and _touching(
            model, data, roots.robot
        ) <= before:
            break
    control.stale = None
    control.goal_position[:] = data.site_xpos[controller.site]
    control.goal_rotation[:] = data.site_xmat[controller.site].reshape(3, 3)
    seen.qpos[:] = data.qpos
    controller.look(data, seen)
    return replace(snapshot, physics=_physics(model, data), control=control, clock=clock, seen=seen)


# ------------------------------------------------------------------------------------------- layout
def displaced_objects(
    scene: TaskScene, snapshot: Snapshot, level: int, rng: np.random.Generator
) -> Snapshot | None:
    """``snapshot`` with the movable objects elsewhere on their table or floor, up to `DISPLACEMENT`
    metres per level away.

    Objects that touch each other move together, so that a bowl stays on its plate; those that stand
    on or in a fixture stay. What is in the air comes down first (official living-room states begin
    inside the table, which throws some objects up), and what does not come to rest is neither moved
    nor judged. A place must be free, and all that rested must still stand there after
    `_SETTLE_STEPS` control steps, with the goal not fulfilled; else it is drawn again, and an
    object for which nothing is found stays where it is. None where that is so for all of them.
    """
    model, roots = scene.model, _Roots(scene)
    snapshot = _come_to_rest(scene, snapshot, roots.objects)
    for _ in range(_LAYOUTS):
        wrapped = scene.new_data()
        data, (control, clock, seen) = _working_copy(scene, snapshot, wrapped)
        resting = {body for body in roots.objects if _rests(model, data, body)}
        groups = [
            group for group in _movable_groups(model, data, roots) if resting.issuperset(group)
        ]
        moved = [_move(model, data, group, roots, DISPLACEMENT * level, rng) for group in groups]
        placed = {body: data.xpos[body].copy() for body in resting}
        lit = snapshot.lit
        for _ in range(_SETTLE_STEPS):
            seen.lit = lit
            scene.controller.advance(data, control, REST, clock, seen, moves=True)
            lit = scene.lit(wrapped)
        slipped = max(
            (float(np.abs(data.xpos[body] - place).max()) for body, place in placed.items()),
            default=0.0,
        )
        if (
            any(moved)
            and slipped < _SLIPPED
            and not scene.success(wrapped)
            and not scene.blew_up(data)
        ):
            return Snapshot(_physics(model, data), control, clock, seen, lit, False, snapshot.edits)
    return None


def _come_to_rest(scene: TaskScene, snapshot: Snapshot, bodies: Sequence[int]) -> Snapshot:
    """``snapshot`` once all ``bodies`` rest, or after `_LANDING_STEPS` control steps; itself
    where they rest already."""
    wrapped = scene.new_data()
    data, (control, clock, seen) = _working_copy(scene, snapshot, wrapped)
    lit = snapshot.lit
    for step in range(_LANDING_STEPS + 1):
        if step == _LANDING_STEPS or all(_rests(scene.model, data, body) for body in bodies):
            break
        seen.lit = lit
        scene.controller.advance(data, control, REST, clock, seen, moves=True)
        lit = scene.lit(wrapped)
    if step == 0:
        return snapshot
    return Snapshot(
        _physics(scene.model, data),
        control,
        clock,
        seen,
        lit,
        scene.success(wrapped),
        snapshot.edits,
    )


def _rests(model: mujoco.MjModel, data: mujoco.MjData, body: int) -> bool:
    """Whether a movable object touches something and does not travel."""
    start = int(model.body_dofadr[body])
    return bool(
        np.abs(data.qvel[start : start + 3]).max() < _SLOW and _touching(model, data, [body])
    )


def _movable_groups(model: mujoco.MjModel, data: mujoco.MjData, roots: _Roots) -> list[list[int]]:
    """Objects (bodies) that touch each other, and touch nothing else but table or floor."""
    group = {body: {body} for body in roots.objects}
    held = set()
    for a, b in _root_pairs(model, data):
        for one, other in ((a, b), (b, a)):
            if one in group and other in group:
                merged = group[one] | group[other]
                group |= dict.fromkeys(merged, merged)
            elif one in group and other not in roots.arena:
                held.add(one)
    distinct = {min(members): members for members in group.values()}
    return [sorted(members) for _, members in sorted(distinct.items()) if not members & held]


def _move(
    model: mujoco.MjModel,
    data: mujoco.MjData,
    group: list[int],
    roots: _Roots,
    farthest: float,
    rng: np.random.Generator,
) -> bool:
    """Shift a group to a free place, uniformly in a disc of ``farthest`` metres; whether one was
    found."""
    addresses = [int(model.jnt_qposadr[model.body_jntadr[body]]) for body in group]
    start = [data.qpos[a : a + 2].copy() for a in addresses]
    standing = _touching(model, data, group) & roots.arena
    for _ in range(_TRIES):
        angle, distance = rng.uniform(0.0, 2 * np.pi), farthest * np.sqrt(rng.uniform())
        shift = distance * np.array([np.cos(angle), np.sin(angle)])
        for address, place in zip(addresses, start):
            data.qpos[address : address + 2] = place + shift
        mujoco.mj_forward(model, data)
        if _touching(model, data, group) == standing:
            return True
    for address, place in zip(addresses, start):
        data.qpos[address : address + 2] = place
    mujoco.mj_forward(model, data)
    return False


# ----------------------------------------------------------------------------------------- contacts
class _Roots:
    """Which top-level bodies are movable objects, fixtures, the robot, and (``arena``) none of
    them."""

    def __init__(self, scene: TaskScene) -> None:
        env, model = scene.env, scene.model

        def of(body: str) -> int:
            return int(model.body_rootid[model.body(body).id])

        self.objects = sorted(of(thing.root_body) for thing in env.objects_dict.values())
        fixtures = {of(thing.root_body) for thing in env.fixtures_dict.values()}
        self.robot = {of(env.robots[0].robot_model.root_body)}
        others = {*self.objects, *fixtures, *self.robot}
        self.arena = {int(root) for root in set(model.body_rootid.tolist())} - others


def _root(model: mujoco.MjModel, geom: int) -> int:
    return int(model.body_rootid[model.geom_bodyid[geom]])


def _root_pairs(model: mujoco.MjModel, data: mujoco.MjData) -> set[tuple[int, int]]:
    """Top-level bodies that touch; the first is the lower number, and equal ones are parts of
    one thing."""
    roots = np.sort(model.body_rootid[model.geom_bodyid[data.contact.geom]].reshape(-1, 2), axis=1)
    return {(int(a), int(b)) for a, b in roots}


def _touching(model: mujoco.MjModel, data: mujoco.MjData, bodies: Iterable[int]) -> set[int]:
    """What, apart from themselves, touches any of the top-level ``bodies``."""
    own = set(bodies)
    pairs = _root_pairs(model, data)
    return {
        other
        for a, b in pairs
        for one, other in ((a, b), (b, a))
        if one in own and other not in own
    }


# ------------------------------------------------------------------------------------------- states
def _working_copy(
    scene: TaskScene, snapshot: Snapshot, wrapped: Any = None
) -> tuple[mujoco.MjData, tuple[Any, Any, Any]]:
    wrapped = scene.new_data() if wrapped is None else wrapped
    scene.restore(wrapped, snapshot)
    return wrapped._data, snapshot.copy_working_state()


def _physics(model: mujoco.MjModel, data: mujoco.MjData) -> np.ndarray:
    physics = np.empty(mujoco.mj_stateSize(model, STATE))
    mujoco.mj_getState(model, data, physics, STATE)
    return physics
