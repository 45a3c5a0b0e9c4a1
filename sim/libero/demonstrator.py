"""Scripted experts for LIBERO's pick-and-place goals, ``(in object container)`` and ``(on object
support)``.

An expert reads the task's goal and the live state, never a recording, and knows no object by name:
it derives where to grasp from the collision shapes. What fits between the fingers is grasped across
its narrow side, what does not (bowls, mugs) by its rim; the hand turns only where that helps. A
missed, slipped or badly dropped object is approached again. Goals of several parts are worked off
one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sim.tabletop.demonstrator import CLOSE, FINGERTIP, GAIN, OPEN, REACH, toward
from vla_rl.errors import ConfigError

if TYPE_CHECKING:
    import mujoco

    from sim.libero.simulator import LiberoView

ROTATION_UNIT = 0.5  # rad per control step at command 1
WIDEST = 0.070  # metres that fit between the open fingers, with a margin
FINGER_AT = 0.050  # metres from the middle to each open finger's centre
PALM_HEIGHT = 0.045  # of the hand's body above the point between the pads
GRIP_DEPTH = 0.030  # below an object's top, where it is tall enough
RIM_DEPTH = 0.012  # below the rim
RIM_INSET = 0.004  # from the rim's outer edge to the middle of its wall
SIDE = 0.085  # metres: half-width of the corridor that hand and load need
ANGLES = np.deg2rad(np.arange(-90, 90, 15))  # of the hand's turn about the vertical
SUPPORTED = ("in", "on")
UP = np.array([0.0, 0.0, 1.0])


@dataclass(frozen=True)
class _Grasp:
    """In the frame of the object: where the point between the pads goes [3], and the axis [3] along
    which fingers close.

    ``turned``: the hand must turn for it.
    """

    place: np.ndarray
    axis: np.ndarray
    turned: bool


class Shapes:
    """Collision shapes of a scene: an object's points, and boxes around everything that is not
    the robot."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData) -> None:
        import mujoco

        self.model, self.data = model, data
        bodies = [model.body(int(b)).name for b in model.geom_bodyid]
        robot = np.array([name.startswith(("robot0", "gripper0", "mount0")) for name in bodies])
        plane = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        solid = ((model.geom_contype != 0) | (model.geom_conaffinity != 0)) & ~robot & ~plane
        self._mesh = model.geom_type == mujoco.mjtGeom.mjGEOM_MESH
        self.geoms = np.flatnonzero(solid)
        self.root = model.body_rootid[model.geom_bodyid[self.geoms]]

    def root_of(self, body: int) -> int:
        """The body that carries ``body`` and moves as one with it, or contains its moving parts."""
        return int(self.model.body_rootid[body])

    def points(self, body: int) -> np.ndarray:
        """Corners of the shapes of the object rooted at ``body`` [n, 3]: m, in that body's
        frame."""
        found = []
        for geom in self.geoms[self.root == body]:
            corners = self._vertices(geom)
            found.append(
                corners @ self.data.geom_xmat[geom].reshape(3, 3).T + self.data.geom_xpos[geom]
            )
        return (np.concatenate(found) - self.data.xpos[body]) @ self.data.xmat[body].reshape(3, 3)

    def _vertices(self, geom: int) -> np.ndarray:
        model = self.model
        if self._mesh[geom]:
            mesh = model.geom_dataid[geom]
            start = model.mesh_vertadr[mesh]
            return model.mesh_vert[start : start + model.mesh_vertnum[mesh]].astype(np.float64)
        centre, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
        signs = np.stack(np.meshgrid(*[(-1.0, 1.0)] * 3), axis=-1).reshape(8, 3)
        return centre + signs * half

    def clearance(self, points: np.ndarray, without: int) -> np.ndarray:
        """Distance (m) [k] of ``points`` [k, 3] from the nearest shape that does not belong to
        the root ``without``."""
        geoms = self.geoms[self.root != without]
        rotation = self.data.geom_xmat[geoms].reshape(-1, 3, 3)
        centre = self.data.geom_xpos[geoms] + np.einsum(
            "nij,nj->ni", rotation, self.model.geom_aabb[geoms, :3]
        )
        local = np.einsum("nij,kni->knj", rotation, points[:, None] - centre)
        outside = np.maximum(np.abs(local) - self.model.geom_aabb[geoms, 3:], 0.0)
        return np.linalg.norm(outside, axis=-1).min(axis=1, initial=np.inf)

    def boxes(self, without: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper corners [n, 3] (m, world) of boxes around every shape but those of the
        roots ``without``."""
        geoms = self.geoms[~np.isin(self.root, without)]
        rotation = self.data.geom_xmat[geoms].reshape(-1, 3, 3)
        centre = self.data.geom_xpos[geoms] + np.einsum(
            "nij,nj->ni", rotation, self.model.geom_aabb[geoms, :3]
        )
        half = np.einsum("nij,nj->ni", np.abs(rotation), self.model.geom_aabb[geoms, 3:])
        return centre - half, centre + half

    def top_on_way(self, start: np.ndarray, end: np.ndarray, without: tuple[int, ...]) -> float:
        """Height of the tallest thing near the straight way from ``start`` to ``end``."""
        low, high = self.boxes(without)
        steps = max(2, int(np.linalg.norm(end[:2] - start[:2]) / 0.02) + 1)
        way = np.linspace(start[:2], end[:2], steps)
        near = (distance_to_boxes(way, low, high) < SIDE).any(axis=0)
        return float(high[near, 2].max()) if near.any() else -np.inf


def distance_to_boxes(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Horizontal distance (m) [k, n] of ``points`` [k, 2] from boxes."""
    outside = np.maximum(
        np.maximum(low[:, :2] - points[:, None], points[:, None] - high[:, :2]), 0.0
    )
    return np.linalg.norm(outside, axis=-1)


def plan_grasp(shapes: Shapes, body: int, points: np.ndarray, rest_axis: np.ndarray) -> _Grasp:
    """The grasp from above that fits the object as it lies now, is free of its neighbours and turns
    the hand least.

    ``points`` as `Shapes.points` gives them; ``rest_axis`` [2]: the fingers' horizontal axis while
    the hand is unturned.
    """
    position, rotation = shapes.data.xpos[body], shapes.data.xmat[body].reshape(3, 3)
    world = points @ rotation.T + position
    bottom, top = float(world[:, 2].min()), float(world[:, 2].max())
    best: tuple[float, np.ndarray, np.ndarray, bool] | None = None
    spans = [float(np.ptp(world[:, :2] @ direction)) for direction in _directions(rest_axis)]
    hollow = min(spans) > WIDEST
    for angle, direction, span in zip(ANGLES, _directions(rest_axis), spans):
        if hollow:
            height = top - RIM_DEPTH
            places = [_rim(world, top, side * direction) for side in (1.0, -1.0)]
        else:
            height = max(bottom + FINGERTIP + 0.002, top - GRIP_DEPTH)
            places = [_middle(world, direction)]
        for place in places:
            fit = max(0.0, span - WIDEST) * 100.0 if not hollow else 0.0
            point, axis = np.array([*place, height]), np.array([*direction, 0.0])
            cost = fit + 0.6 * abs(float(angle)) + 3.0 * _blocked(shapes, body, point, axis)
            if best is None or cost < best[0] - 1e-9:
                best = cost, point, axis, bool(abs(angle) > 1e-6)
    assert best is not None, "every direction has a place"
    _, place, axis, turned = best
    return _Grasp((place - position) @ rotation, axis @ rotation, turned)


def _directions(rest_axis: np.ndarray) -> list[np.ndarray]:
    c, s = np.cos(ANGLES), np.sin(ANGLES)
    x, y = rest_axis
    return [np.array([a * x - b * y, b * x + a * y]) for a, b in zip(c, s)]


def _middle(world: np.ndarray, direction: np.ndarray) -> np.ndarray:
    across = np.array([-direction[1], direction[0]])
    along, aside = world[:, :2] @ direction, world[:, :2] @ across
    return (
        0.5 * (along.min() + along.max()) * direction + 0.5 * (aside.min() + aside.max()) * across
    )


def _rim(world: np.ndarray, top: float, direction: np.ndarray) -> np.ndarray:
    """Where the wall is [2] in ``direction`` from the middle of an open vessel."""
    upper = world[world[:, 2] > top - 0.015][:, :2]
    middle = 0.5 * (upper.min(axis=0) + upper.max(axis=0))
    near = np.abs((upper - middle) @ np.array([-direction[1], direction[0]])) < 0.012
    reach = ((upper - middle) @ direction)[near] if near.any() else (upper - middle) @ direction
    return middle + (float(reach.max()) - RIM_INSET) * direction


def _blocked(shapes: Shapes, body: int, place: np.ndarray, direction: np.ndarray) -> float:
    """How many of the open fingers (1 each) and parts of the palm (0.5 each) would be inside
    something but the object."""
    sides = np.repeat([-1.0, 1.0], 6)
    along = sides * FINGER_AT + np.tile([-0.004, 0.004], 6)
    fingers = (
        place
        + np.outer(along, direction)
        + np.outer(np.tile([0.006, 0.006, 0.022, 0.022, 0.045, 0.045], 2), UP)
    )
    palm = place + np.outer(np.tile([-0.09, -0.06, -0.03, 0.0, 0.03, 0.06, 0.09], 2), direction)
    palm += np.outer(np.repeat([PALM_HEIGHT + 0.03, PALM_HEIGHT + 0.06], 7), UP)
    hits = (shapes.clearance(fingers, without=body) < 0.011).reshape(2, 6).any(axis=1)
    touching = (shapes.clearance(palm, without=body) < 0.03).reshape(2, 7).any(axis=0)
    return float(hits.sum()) + 0.5 * float(touching.sum())


class _Destination:
    """Where one part of the goal wants its object, as the scene is now."""

    def __init__(self, state: LiberoView, shapes: Shapes, part: tuple[str, ...]) -> None:
        self._state, self._shapes, self._part = state, shapes, part

    def body(self) -> int:
        target = self._part[2]
        bodies = self._state.scene.env.obj_body_id
        if target in bodies:
            return int(bodies[target])
        model = self._state.scene.model
        return int(model.site_bodyid[model.site(target).id])

    def goal(self) -> tuple[np.ndarray, float]:
        """Where the load's origin should end [2], and the height of what must be cleared on the
        way there."""
        place = self._state.position(self._part[2])[:2]
        low, high = self._boxes()
        near = distance_to_boxes(place[None], low, high)[0] < 0.08
        return place, float(high[near, 2].max()) if near.any() else self.floor()

    def floor(self) -> float:
        """Height on which the load should come to rest."""
        place = self._state.position(self._part[2])
        low, high = self._boxes()
        below = distance_to_boxes(place[None, :2], low, high)[0] < 0.005
        if self._part[0] == "in" or not below.any():
            return float(low[below, 2].min()) if below.any() else float(place[2])
        return float(np.min(high[below, 2]))

    def _boxes(self) -> tuple[np.ndarray, np.ndarray]:
        root = self._shapes.root_of(self.body())
        others = tuple(int(r) for r in np.unique(self._shapes.root) if r != root)
        return self._shapes.boxes(without=others)


class PickAndPlace:
    """An expert for one episode: phases approach, close, carry, release; then the next part of
    the goal."""

    def __init__(self, state: LiberoView) -> None:
        """``state``: of the slot, which stays live. `ConfigError` for a goal that is not
        pick-and-place."""
        self._state, self._shapes = state, Shapes(state.scene.model, state.data)
        self._parts = [
            part
            for part in state.problem.goal
            if part[0] in SUPPORTED and part[1] in state.problem.objects
        ]
        if len(self._parts) < len(state.problem.goal):
            raise ConfigError(
                f"{state.scene.task.task_id} has the goal {state.problem.goal}: the scripted "
                "expert only puts objects in or on something. Choose other tasks, or use "
                "published demonstrations with dataset=FOLDER."
            )
        axis = self._finger_axis()[:2]
        self._rest_axis = axis / np.linalg.norm(axis)
        self._points = {part[1]: self._shapes.points(self._body(part[1])) for part in self._parts}
        self._begin()

    def _begin(self) -> None:
        """Approach the object of the present part, with a grasp for how it lies now."""
        holds = self._state.holds()
        pending = [part for part, true in zip(self._state.problem.goal, holds) if not true]
        self._part = (pending or self._parts)[0]
        self._there = _Destination(self._state, self._shapes, self._part)
        self._phase, self._steps, self._lost = "approach", 0, 0
        self._last_bottom, self._still = np.inf, 0  # of the load, while it is lowered
        self._opening = self._state.gripper_open
        self._grasp = plan_grasp(
            self._shapes, self._body(self._name), self._points[self._name], self._rest_axis
        )
        self._planned_at = self._state.rotation(self._name)

    def act(self, state: LiberoView) -> np.ndarray:
        """The clean label for the next control step [7], within [-1, 1]: LIBERO's relative
        commands."""
        step = {
            "approach": self._approach,
            "close": self._close,
            "carry": self._carry,
            "release": self._release,
        }
        self._steps += 1
        phase = self._phase
        motion, gripper = step[phase](state.eef_position)
        if self._phase != phase:
            self._steps = 0
        self._opening = state.gripper_open
        return np.array([*motion / REACH, *self._turn(), gripper])

    # --------------------------------------------------------------------------------------- phases
    def _approach(self, hand: np.ndarray) -> tuple[np.ndarray, float]:
        state = self._state
        tilted = float(
            np.trace(self._planned_at.T @ state.rotation(self._name))
        ) < 1.0 + 2.0 * np.cos(0.3)
        if tilted:
            self._begin()
        place = self._grasp_place()
        offset = place - hand
        across = float(np.hypot(offset[0], offset[1]))
        aligned = not self._grasp.turned or abs(self._turn_left()) < 0.1
        if across < 0.009 and abs(offset[2]) < 0.010 and aligned:
            self._phase = "close"
            return toward(hand, place), CLOSE
        top = self._top(self._name)
        clear = max(0.0, top - place[2]) + FINGERTIP + 0.02
        near = across < 0.022 and aligned
        height = place[2] + min(clear, 5.0 * max(0.0, across - 0.005)) if near else place[2] + clear
        if across > 0.05:
            body = self._body(self._name)
            height = max(height, self._shapes.top_on_way(hand, place, (body,)) + FINGERTIP + 0.02)
        command = toward(hand, np.array([place[0], place[1], height]))
        if across > 0.02 and height - hand[2] > 0.01:  # up first, then across
            command[:2] *= max(0.0, 1.0 - (height - hand[2] - 0.01) / 0.03)
            command[2] = min(GAIN * (height - hand[2]), REACH)
        return command, OPEN

    def _close(self, hand: np.ndarray) -> tuple[np.ndarray, float]:
        state = self._state
        place = self._grasp_place()
        if np.linalg.norm(place - hand) > 0.03 or (
            state.gripper_open < 0.02 and not any(state.touches(self._name))
        ):
            self._begin()
            return np.zeros(3), OPEN
        if (
            self._steps >= 4
            and abs(self._opening - state.gripper_open) < 0.012
            and state.gripper_open < 0.93
        ):
            self._phase, self._lost = "carry", 0
        return toward(hand, place), CLOSE

    def _carry(self, hand: np.ndarray) -> tuple[np.ndarray, float]:
        state, name = self._state, self._name
        slipped = np.linalg.norm(self._grasp_place() - hand) > 0.035
        self._lost = self._lost + 1 if slipped or not any(state.touches(name)) else 0
        if self._lost >= 4:
            self._begin()
            return np.zeros(3), OPEN
        goal, rim = self._there.goal()
        load = state.position(name)
        gap = goal - load[:2]
        across = float(np.hypot(gap[0], gap[1]))
        bottom = float((self._points[name] @ state.rotation(name).T)[:, 2].min() + load[2])
        if self._part[0] == "in":
            # The open fingers do not fit into a basket: they stay above its rim.
            lowest = max(self._there.floor() + 0.02, bottom + rim + FINGERTIP + 0.004 - hand[2])
        else:
            lowest = self._there.floor()
        sinks = across > 0.02 or abs(bottom - self._last_bottom) > 0.0008
        self._still, self._last_bottom = 0 if sinks else self._still + 1, bottom
        # there, or come down onto something
        if across < 0.02 and (bottom < lowest + 0.006 or self._still >= 4):
            self._phase, self._at = "release", hand.copy()
            return np.zeros(3), OPEN
        if across > 0.03:
            destination = self._shapes.root_of(self._there.body())
            obstacle = self._shapes.top_on_way(
                load, np.array([*goal, 0.0]), (self._body(name), destination)
            )
            safe = max(obstacle, rim) + 0.025
        else:
            safe = lowest
        up = safe - bottom
        command = toward(hand, hand + np.array([*gap, 0.0]))
        command[2] = min(max(GAIN * up, -0.6 * REACH), REACH)
        if across > 0.03:  # up first, then across
            command[:2] *= min(max(1.0 - (up - 0.012) / 0.03, 0.0), 1.0)
        return command, CLOSE

    def _release(self, hand: np.ndarray) -> tuple[np.ndarray, float]:
        if self._state.gripper_open < 0.92 and self._steps < 12:
            return toward(hand, self._at), OPEN
        if hand[2] > self._at[2] + 0.07 or self._steps > 30:
            self._begin()
        return toward(hand, hand + np.array([0.0, 0.0, 0.05])), OPEN

    # -------------------------------------------------------------------------------------- queries
    @property
    def _name(self) -> str:
        return self._part[1]

    def _body(self, name: str) -> int:
        return int(self._state.scene.env.obj_body_id[name])

    def _grasp_place(self) -> np.ndarray:
        return (
            self._state.position(self._name) + self._state.rotation(self._name) @ self._grasp.place
        )

    def _top(self, name: str) -> float:
        points = self._points[name] @ self._state.rotation(name).T
        return float(points[:, 2].max() + self._state.position(name)[2])

    # ---------------------------------------------------------------------------------- orientation
    def _finger_axis(self) -> np.ndarray:
        return self._state.eef_rotation[:, 0]

    def _wanted_axis(self) -> np.ndarray:
        """The horizontal axis [2] for the fingers, the nearer of the two opposite ones."""
        axis = (
            (self._state.rotation(self._name) @ self._grasp.axis)[:2]
            if self._grasp.turned
            else self._rest_axis
        )
        axis = axis / max(float(np.linalg.norm(axis)), 1e-9)
        return axis if float(axis @ self._finger_axis()[:2]) >= 0.0 else -axis

    def _turn_left(self) -> float:
        """Angle (rad) about the vertical by which the hand still has to turn."""
        now, wanted = self._finger_axis()[:2], self._wanted_axis()
        return float(np.arctan2(now[0] * wanted[1] - now[1] * wanted[0], now @ wanted))

    def _turn(self) -> np.ndarray:
        """Commands [3] towards the wanted orientation, fingers pointing down; zero while it is
        nearly reached."""
        if self._phase in ("carry", "close", "release") or abs(self._turn_left()) < 0.04:
            return np.zeros(3)
        x = np.array([*self._wanted_axis(), 0.0])
        z = np.array([0.0, 0.0, -1.0])
        offset = np.column_stack([x, np.cross(z, x), z]) @ self._state.eef_rotation.T
        return np.clip(0.8 * _rotation_vector(offset) / ROTATION_UNIT, -0.5, 0.5)


def _rotation_vector(matrix: np.ndarray) -> np.ndarray:
    """Axis times angle (rad) of a rotation matrix that turns by less than pi."""
    axis = np.array(
        [matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]]
    )
    length = float(np.linalg.norm(axis))
    angle = float(np.arctan2(length, np.trace(matrix) - 1.0))
    return axis * (angle / length) if length > 1e-9 else np.zeros(3)


def make_demonstrator(state: LiberoView) -> PickAndPlace:
    """A fresh expert for the episode that runs in the slot of ``state``."""
    return PickAndPlace(state)
