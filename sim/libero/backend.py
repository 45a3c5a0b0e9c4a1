"""Compiled scenes of LIBERO tasks: shared models, the reset procedure, success, state queries and
rendering.

This module imports LIBERO, robosuite and mujoco; import it only where a simulator is really built.

Two levels: a `World` is a compiled model with its renderer, shared by all tasks whose XML is equal
(all of libero_goal, for one); a `TaskScene` is LIBERO's own environment of one task on top of it,
which places objects and judges success. Fixtures are placed by changing the model, not the state.
So each episode carries its changes of the model as `Edits`, and the world applies those of the slot
it is about to step or draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sim.failures import AT_REST, FALL, RIM_FALL, FailureTracker
from sim.gl import ensure_backend
from sim.libero import package
from sim.libero.placements import Placements, numpy_state, seeded
from sim.libero.tasks import GOAL_DIM, MAX_GOALS, MAX_OBJECTS, OBJECT_DIM, Goal, Task
from vla_rl.errors import MissingDependency, UserError
from vla_rl.specs import CameraSpec

ensure_backend()
import mujoco  # noqa: E402  isort: skip  (MUJOCO_GL must be set before mujoco is imported)

from sim.libero.world import POSES, STATE, Edits, Snapshot, World  # noqa: E402

REST = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # the action while things settle
_FINGER_TRAVEL = 0.08  # metres between the fingers when open
_PLACEMENTS = 100  # attempts to place everything without overlap
_REACHED = 0.02  # metres from the point between the fingers to the object
_FALL = {"on": FALL, "in": RIM_FALL}  # goals of pick-and-place


class _TaskFacts:
    """What `sim.failures.FailureTracker` asks about one slot's episode of a task; made while the
    kinematics are fresh."""

    def __init__(self, scene: TaskScene, wrapped: Any) -> None:
        self._scene, self._wrapped, self._data = scene, wrapped, wrapped._data
        data = self._data
        # views, live
        self._position = {name: data.xpos[scene.bodies[name]] for name in scene.problem.objects}
        self._hand = data.site_xpos[scene.controller.site]
        self._boxes = {part[1]: scene.box(data, part[1]) for part in scene.problem.goal}
        self._velocity = np.empty(6)

    def height(self, name: str) -> float:
        return float(self._position[name][2])

    def near(self, name: str) -> bool:
        """The point between the fingers is within `_REACHED` of the box around the object's
        collision shapes."""
        low, high = self._boxes[name]
        at = (self._hand - self._position[name]) @ self._data.xmat[
            self._scene.bodies[name]
        ].reshape(3, 3)
        outside = np.maximum(np.maximum(low - at, at - high), 0.0)
        return float(outside @ outside) < _REACHED**2

    def fingers(self, name: str) -> int:
        return sum(self._scene.touches(self._data, name))

    def settled(self, name: str) -> bool:
        kind, body = mujoco.mjtObj.mjOBJ_BODY, self._scene.bodies[name]
        mujoco.mj_objectVelocity(self._scene.model, self._data, kind, body, self._velocity, 0)
        return float(np.abs(self._velocity[3:]).max()) < AT_REST

    def at_goal(self, name: str) -> bool:
        holds = self._scene.holds(self._wrapped)
        return all(true for part, true in zip(self._scene.problem.goal, holds) if part[1] == name)


class TaskScene:
    """One task on its world. Methods take the MjData (robosuite's wrapper where it says
    ``wrapped``) of a slot."""

    def __init__(
        self,
        task: Task,
        worlds: dict[str, World],
        *,
        look: Any,
        cameras: Sequence[CameraSpec],
        gl: Any,
        exact: bool,
        absolute: bool,
        assets: str,
        opening_draws: int,
    ) -> None:
        self.task, self.problem = task, task.problem
        self.env, self.key = _build(task, self.problem, worlds, look, cameras, gl, assets)
        self.world = worlds[self.key]
        self.world.reset_poses()
        # hides sites, as each reset does
        self.env.visualize(vis_settings=dict.fromkeys(self.env._visualizations, False))
        self.model = self.world.model

        # it imports robosuite, which LIBERO's import has made ready
        from sim.libero.controller import ArmController

        robot = self.env.robots[0]
        self.controller = ArmController(self.model, robot, exact, absolute)
        self._contact_masks: dict[int, np.ndarray] = {}
        self.env.check_contact = self._check_contact
        self._placed: Placements | None = None  # of the latest seed: official states share them
        self._own = self.env.sim.data  # the one that LIBERO's environment resets itself in
        self._openings, self._opening_draws = (
            list(self.env.object_property_initializers),
            opening_draws,
        )
        fixtures = [
            self.env.sim.model.body_name2id(f.root_body) for f in self.env.fixtures_dict.values()
        ]
        self._fixtures = np.array(sorted(fixtures), dtype=np.int64)
        self._stoves = [
            s for s in self.env.tracking_object_states_change if s.has_turnon_affordance
        ]
        self._burners = [
            (self.env.sim.model.site_name2id(site), on)
            for on, state in enumerate(self._stoves)
            for site, _ in self.env.get_object(state.object_name)
            .object_properties["vis_site_names"]
            .values()
        ]
        self._dark = {site: float(self.model.site_rgba[site, 3]) for site, _ in self._burners}
        self.bodies = {name: int(body) for name, body in self.env.obj_body_id.items()}
        self._sites = {self.model.site(i).name: i for i in range(self.model.nsite)}
        ordered = [n for n in self.problem.of_interest if n in self.problem.objects]
        self._objects = [*ordered, *(n for n in self.problem.objects if n not in ordered)][
            :MAX_OBJECTS
        ]
        self.pads = self._finger_pads(robot)

    # ---------------------------------------------------------------------------- states and resets
    def new_data(self) -> Any:
        """robosuite's wrapper around a new MjData; its ``_data`` is MuJoCo's own."""
        return type(self.env.sim.data)(self.env.sim.model)

    def settled(
        self,
        *,
        seed: int,
        state: np.ndarray | None,
        steps: int,
        arm_noise: float = 0.0,
        resets: int = 1,
    ) -> Snapshot:
        """The snapshot after ``steps`` resting control steps from an official ``state`` [1 + nq +
        nv], or a sampled one.

        ``seed`` fixes the fixtures and, without a state, the objects, as LIBERO's own ``seed`` and
        ``resets`` times its ``reset`` do. A sampled state with ``arm_noise`` (rad per joint,
        Gaussian) starts as the official ones do: by LIBERO's ``set_init_state`` after its reset, so
        that the controller still remembers the arm at home.
        """
        from sim.libero.controller import ObservationClock, Seen

        wanted = (seed, tuple(self.env.robots[0].init_qpos))
        if self._placed is None or self._placed.wanted != wanted:
            self._placed = Placements(wanted, self._opening_draws, seeded(seed))
        while len(self._placed.of_resets) < resets:
            self._place(self._placed)
        edits, qpos, start, control = self._placed.of_resets[resets - 1]
        control = control.copy()
        if state is None and arm_noise > 0.0:
            state = np.concatenate([[0.0], qpos, np.zeros(self.model.nv)])
            state[1 + self.controller.qpos_index] += np.random.default_rng(seed).normal(
                0.0, arm_noise, 7
            )
        wrapped, data = self._own, self._own._data
        mujoco.mj_resetData(self.model, data)
        self.world.apply(edits)
        data.qpos[:], data.qacc_warmstart[:] = qpos, start
        mujoco.mj_forward(self.model, data)
        if state is not None:
            nq, nv = self.model.nq, self.model.nv
            if len(state) != 1 + nq + nv:
                raise UserError(
                    f"{self.task.init_file}: its states have {len(state)} numbers, the scene of "
                    f"{self.task.task_id} has {1 + nq + nv}. Reinstall the LIBERO package "
                    "(hf-libero), or use env.init_states=sampled."
                )
            data.time, data.qpos[:], data.qvel[:] = state[0], state[1 : 1 + nq], state[1 + nq :]
            mujoco.mj_forward(self.model, data)
        clock, seen = ObservationClock(), Seen(self.model.nq)
        clock.force()
        lit = tuple(False for _ in self._stoves)
        if state is not None:
            clock.force()
            lit = self.lit(wrapped)
        seen.qpos[:] = data.qpos
        self.controller.look(data, seen)
        seen.lit = lit
        for _ in range(steps):
            seen.lit = lit
            self.controller.advance(data, control, REST, clock, seen, moves=True)
            lit = self.lit(wrapped)
        physics = np.empty(mujoco.mj_stateSize(self.model, STATE))
        mujoco.mj_getState(self.model, data, physics, STATE)
        return Snapshot(physics, control, clock, seen, lit, self.success(wrapped), edits)

    def _place(self, placed: Placements) -> None:
        """Run LIBERO's own reset once more, and keep what it leaves."""
        from robosuite.utils.errors import RandomizationError

        env = self.env
        self.world.apply({})
        self._use(self._own)
        with numpy_state(placed.generator):
            for _ in range(_PLACEMENTS):
                # one set of them per reset that LIBERO's would have done, those among them that
                # found no placement
                env.object_property_initializers = self._openings * placed.draws
                placed.draws += 1
                self.world.reset_poses()
                env.sim.reset()
                env.sim.forward()
                env.sim.forward()  # the renderer's, which LIBERO's makes anew at each reset
                try:
                    env._reset_internal()
                    break
                except RandomizationError:
                    continue
            else:
                raise UserError(
                    f"{self.task.bddl_file}: no placement without overlap was found in "
                    f"{_PLACEMENTS} attempts (seed {placed.wanted[0]}). Widen its regions."
                )
            placed.generator = np.random.get_state()
        edits = {
            name: (self._fixtures, getattr(self.model, name)[self._fixtures].copy())
            for name in POSES
        }
        qpos, start = np.array(env.sim.data.qpos), np.array(self._own._data.qacc_warmstart)
        self.world.reset_poses()
        placed.of_resets.append((edits, qpos, start, self.controller.fresh_state(env.robots[0])))

    @contextmanager
    def posture(self, arm: np.ndarray | None) -> Iterator[None]:
        """Joint positions [7] where resets put the arm, and which its controller prefers, for a
        while; None: as usual."""
        robot, controller = self.env.robots[0], self.controller
        usual = robot.init_qpos, controller.rest
        if arm is not None:
            robot.init_qpos, controller.rest = arm, arm
        try:
            yield
        finally:
            robot.init_qpos, controller.rest = usual

    def restore(self, wrapped: Any, snapshot: Snapshot) -> None:
        """Put a slot's physics into ``snapshot``; derived quantities follow with the next
        control step."""
        data = wrapped._data
        mujoco.mj_resetData(self.model, data)
        mujoco.mj_setState(self.model, data, snapshot.physics, STATE)
        start = data.qacc_warmstart.copy()
        self.world.apply(snapshot.edits)
        mujoco.mj_forward(self.model, data)
        data.qacc_warmstart[:] = start

    # -------------------------------------------------------------------------------------- queries
    def success(self, wrapped: Any) -> bool:
        """LIBERO's own judgement of the goal, all of whose parts must hold."""
        self._use(wrapped)
        return bool(self.env._check_success())

    def holds(self, wrapped: Any) -> list[bool]:
        """Which parts of the goal hold, in the order of ``problem.goal``."""
        return [self._holds(wrapped, part) for part in self.problem.goal]

    def achieves(self, wrapped: Any, goal: Goal) -> bool:
        """Whether the goal of another task, all of whose things are here, holds."""
        return all(self._holds(wrapped, part) for part in goal)

    def _holds(self, wrapped: Any, part: tuple[str, ...]) -> bool:
        self._use(wrapped)
        return bool(self.env._eval_predicate(list(part)))

    def tracker(self, wrapped: Any) -> FailureTracker | None:
        """For the episode that starts in a slot, which it goes on watching; None for a goal that
        is not pick-and-place."""
        goal, objects = self.problem.goal, self.problem.objects
        if not all(part[0] in _FALL and part[1] in objects for part in goal):
            return None
        return FailureTracker(
            _TaskFacts(self, wrapped), {part[1]: _FALL[part[0]] for part in goal}, objects
        )

    def box(self, data: mujoco.MjData, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper corner [3] (m, in the object's own frame) of a box around its
        collision shapes."""
        geoms = np.flatnonzero(self._contact_mask(self.env.get_object(name)))
        rotation = data.geom_xmat[geoms].reshape(-1, 3, 3)
        signs = np.stack(np.meshgrid(*[(-1.0, 1.0)] * 3), axis=-1).reshape(8, 3)
        corners = (
            self.model.geom_aabb[geoms, None, :3] + signs * self.model.geom_aabb[geoms, None, 3:]
        )
        world = np.einsum("nij,nkj->nki", rotation, corners) + data.geom_xpos[geoms, None]
        body = self.bodies[name]
        own = (world.reshape(-1, 3) - data.xpos[body]) @ data.xmat[body].reshape(3, 3)
        return own.min(axis=0), own.max(axis=0)

    def lit(self, wrapped: Any) -> tuple[bool, ...]:
        """Which stoves show their burner, as LIBERO decides it after each control step."""
        if not self._stoves:
            return ()
        self._use(wrapped)
        return tuple(bool(state.turn_on()) for state in self._stoves)

    def picture_edits(self, snapshot: Snapshot, lit: tuple[bool, ...]) -> Edits:
        """The model's edits for a picture: those of the episode, and the burners' visibility."""
        if not any(lit):
            return snapshot.edits
        rows = np.array([site for site, _ in self._burners], dtype=np.int64)
        colors = self.model.site_rgba[rows].copy()
        for row, (site, on) in enumerate(self._burners):
            off = self._dark[site]
            colors[row, 3] = 1.0 - off if lit[on] else off
        return {**snapshot.edits, "site_rgba": (rows, colors)}

    def blew_up(self, data: mujoco.MjData) -> bool:
        """Whether MuJoCo had to put the state back to its default because numbers grew out of
        bounds."""
        kinds = (
            mujoco.mjtWarning.mjWARN_BADQPOS,
            mujoco.mjtWarning.mjWARN_BADQVEL,
            mujoco.mjtWarning.mjWARN_BADQACC,
        )
        return any(data.warning[kind].number for kind in kinds)

    def position(self, data: mujoco.MjData, name: str) -> np.ndarray:
        """World position (m) of an object, a fixture or a region."""
        return (
            data.xpos[self.bodies[name]]
            if name in self.bodies
            else data.site_xpos[self._site(name)]
        ).copy()

    def rotation(self, data: mujoco.MjData, name: str) -> np.ndarray:
        """Rotation matrix [3, 3] of an object, a fixture or a region."""
        flat = (
            data.xmat[self.bodies[name]]
            if name in self.bodies
            else data.site_xmat[self._site(name)]
        )
        return flat.reshape(3, 3).copy()

    def joint(self, data: mujoco.MjData, name: str) -> float:
        """Position (rad or m) of the first joint of an articulated object or region; 0 for one
        without."""
        found = self.env.object_sites_dict.get(name) or self.env.get_object(name)
        joints = [j for j in (getattr(found, "joints", None) or []) if j]
        if not joints or self.model.joint(joints[0]).type[0] == mujoco.mjtJoint.mjJNT_FREE:
            return 0.0
        return float(data.qpos[self.model.joint(joints[0]).qposadr[0]])

    def gripper_open(self, data: mujoco.MjData) -> float:
        a, b = data.qpos[self.controller.fingers]
        return float(min(max((a - b) / _FINGER_TRAVEL, 0.0), 1.0))

    def touches(self, data: mujoco.MjData, name: str) -> tuple[bool, bool]:
        """Whether the left and the right finger touch the object."""
        mask = self._contact_mask(self.env.get_object(name))
        pairs = data.contact.geom
        if not len(pairs):
            return False, False
        a, b = pairs[:, 0], pairs[:, 1]
        left, right = (
            bool(((mask[a] & side[b]) | (mask[b] & side[a])).any()) for side in self.pads
        )
        return left, right

    def proprio(self, seen: Any) -> np.ndarray:
        """float32 [8]: hand position (m), its rotation vector (rad), both fingers' joints (m),
        as evaluations read them."""
        return np.array(
            [*seen.eef_position, *rotation_vector(seen.eef_quaternion), *seen.gripper_qpos],
            dtype=np.float32,
        )

    def privileged(self, wrapped: Any, time_left: float) -> np.ndarray:
        """float32: state for critics. m, m/s, rad; world frame unless it says otherwise.

        Hand [15]: position, velocity, rotation (two columns), fingers, time left. Then
        `MAX_OBJECTS` times [17]: present, of interest, position, position from the hand, velocity,
        rotation (two columns); objects of interest come first. Then `MAX_GOALS` times [9]: present,
        holds, first argument from the hand, second from the first, joint position.
        """
        data = wrapped._data
        eef = data.site_xpos[self.controller.site].copy()
        velocity = np.empty(6)
        mujoco.mj_objectVelocity(
            self.model, data, mujoco.mjtObj.mjOBJ_SITE, self.controller.site, velocity, 0
        )
        rotation = data.site_xmat[self.controller.site].reshape(3, 3)
        parts = [
            eef,
            velocity[3:].copy(),
            rotation[:, :2].T.ravel(),
            data.qpos[self.controller.fingers],
            [time_left],
        ]
        for name in self._objects:
            body = self.bodies[name]
            place = data.xpos[body]
            mujoco.mj_objectVelocity(self.model, data, mujoco.mjtObj.mjOBJ_BODY, body, velocity, 0)
            rotation = data.xmat[body].reshape(3, 3)
            parts.append([1.0, float(name in self.problem.of_interest)])
            parts += [place, place - eef, velocity[3:].copy(), rotation[:, :2].T.ravel()]
        parts.append(np.zeros(OBJECT_DIM * (MAX_OBJECTS - len(self._objects))))
        holds = self.holds(wrapped)
        for (_, first, *rest), true in zip(self.problem.goal, holds):
            a = self.position(data, first)
            b = self.position(data, rest[0]) if rest else a
            parts += [[1.0, float(true)], a - eef, b - a, [self.joint(data, first)]]
        parts.append(np.zeros(GOAL_DIM * (MAX_GOALS - len(holds))))
        return np.concatenate(parts).astype(np.float32)

    def _site(self, name: str) -> int:
        try:
            return self._sites[name]
        except KeyError:
            raise UserError(
                f"{self.task.task_id} has no object or region {name!r}: see {self.task.bddl_file}."
            ) from None

    # ------------------------------------------------------------------------------------- plumbing
    def _use(self, wrapped: Any) -> None:
        """Let LIBERO's environment look at a slot's state."""
        self.env.sim.data = wrapped

    def _check_contact(self, first: Any, second: Any) -> bool:
        """robosuite's contact test, over arrays instead of names."""
        pairs = self.env.sim.data._data.contact.geom
        if not len(pairs):
            return False
        a, b = self._contact_mask(first), self._contact_mask(second)
        left, right = pairs[:, 0], pairs[:, 1]
        return bool(((a[left] & b[right]) | (a[right] & b[left])).any())

    def _contact_mask(self, thing: Any) -> np.ndarray:
        """Bool [ngeom]: the geoms that count as parts of ``thing``."""
        if id(thing) not in self._contact_masks:
            names = thing.contact_geoms
            model = self.env.sim.model
            self._contact_masks[id(thing)] = np.array(
                [model.geom_id2name(g) in names for g in range(self.model.ngeom)]
            )
        return self._contact_masks[id(thing)]

    def _finger_pads(self, robot: Any) -> tuple[np.ndarray, np.ndarray]:
        geoms = robot.gripper.important_geoms
        model = self.env.sim.model
        masks = []
        for side in ("left_finger", "right_finger"):
            names = set(geoms[side])
            masks.append(
                np.array([model.geom_id2name(g) in names for g in range(self.model.ngeom)])
            )
        return masks[0], masks[1]


def rotation_vector(wxyz: np.ndarray) -> np.ndarray:
    """Axis times angle (rad, up to 2 pi) of a unit quaternion, as robosuite's `quat2axisangle`
    defines it."""
    w = min(max(float(wxyz[0]), -1.0), 1.0)
    length = np.sqrt(1.0 - w * w)
    if np.isclose(length, 0.0):
        return np.zeros(3)
    return np.asarray(wxyz[1:]) * (2.0 * np.arccos(w) / length)


def _build(
    task: Task,
    problem: Any,
    worlds: dict[str, World],
    look: Any,
    cameras: Sequence[CameraSpec],
    gl: Any,
    assets: str,
) -> tuple[Any, str]:
    """LIBERO's environment of ``task`` without renderer on a shared world, and the world's key."""
    envs = package.load(assets, task.package)
    import robosuite
    from robosuite.utils.binding_utils import MjSim
    from robosuite.utils.errors import RandomizationError

    kinds = envs.TASK_MAPPING
    if problem.name not in kinds:
        raise UserError(
            f"{task.bddl_file}: the problem {problem.name!r} is unknown to LIBERO, use "
            f"one of {sorted(kinds)}."
        )
    used: list[str] = []

    def initialize_sim(env: Any, xml_string: str | None = None) -> None:
        xml = look.edit_xml(xml_string or env.model.get_xml())
        key = hashlib.blake2b(xml.encode(), digest_size=16).hexdigest()
        if key not in worlds:
            model = mujoco.MjModel.from_xml_string(xml)
            look.edit_model(model)
            worlds[key] = World(model, look, cameras, gl)
        worlds[key].apply({})
        used.append(key)
        env.sim = MjSim(worlds[key].model)
        env.sim.forward()
        env.initialize_time(env.control_freq)

    base = kinds[problem.name]
    # LIBERO compares the name to the problem's
    cls = type(base.__name__, (base,), {"_initialize_sim": initialize_sim})
    try:
        with package.quiet():
            for attempt in range(_PLACEMENTS):
                try:
                    with numpy_state(seeded(attempt)):
                        env = cls(
                            str(task.bddl_file),
                            robots=["Panda"],
                            gripper_types="default",
                            initialization_noise=None,
                            controller_configs=robosuite.load_controller_config(
                                default_controller="OSC_POSE"
                            ),
                            use_camera_obs=False,
                            has_renderer=False,
                            has_offscreen_renderer=False,
                            control_freq=20,
                            horizon=10**9,
                            ignore_done=True,
                            hard_reset=False,
                        )
                    break
                except RandomizationError:
                    if attempt == _PLACEMENTS - 1:
                        raise
    except FileNotFoundError as error:
        raise MissingDependency(
            f"The scene of {task.task_id} needs {error.filename or error}, which is not among the "
            "LIBERO assets. Get the assets again, or name a complete copy with env.assets=FOLDER."
        ) from error
    except (KeyError, AssertionError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"The scene of {task.task_id} cannot be built from {task.bddl_file}: "
            f"{type(error).__name__}: {error}. Check the file and the assets against those of the "
            "LIBERO package (hf-libero)."
        ) from error
    return env, used[-1]
