"""One control step of LIBERO's arm, and when robosuite looks at the scene while it runs.

"exact" calls robosuite's own compiled formulas with the same operands in the same order, and is
equal to its OSC_POSE bit by bit. It drops what does not change a result: sensors, name look-ups,
buffers, and two of three forward passes a sub-step, or where they move the constraint solver's
start (`forward_moves_start`) all of them but the solver. "fast" is `sim.tabletop.controller`: the
same control law in one compiled function, equal up to rounding.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import mujoco
import numpy as np
from robosuite.utils import control_utils
from robosuite.utils import transform_utils as transforms

from sim.tabletop.controller import (
    GRIPPER_SPEED,
    KP,
    OSC,
    POSITION_RANGE,
    ROTATION_RANGE,
    SUBSTEPS,
    ControlState,
    _torques,
    actuate,
)

TIMESTEP = 0.002  # seconds per sub-step
PERIOD = 1.0 / 20  # seconds per control step


@functools.cache
def forward_moves_start() -> bool:
    """Whether `mj_forward` changes where the constraint solver starts next time, as MuJoCo's does
    at 3.3.2 and not at 3.8.1. The solver stops at a tolerance, so that what precedes a step then
    shows in its last digits."""
    box = "<body pos='0 0 .09'><freejoint/><geom type='box' size='.1 .1 .1'/></body>"
    model = mujoco.MjModel.from_xml_string(
        f"<mujoco><worldbody><geom type='plane' size='1 1 .1'/>{box}</worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    data.qvel[:] = 0.3
    mujoco.mj_step(model, data)
    before = data.qacc_warmstart.copy()
    mujoco.mj_forward(model, data)
    return not np.array_equal(before, data.qacc_warmstart)


class ObservationClock:
    """When robosuite samples its observations: once a control step, but some sub-steps before its
    end.

    Its sensors (cameras included) count time in floating point from the last reset, forced looks
    included, and the kinematics they see are those before that sub-step's integration. So pictures
    are a few milliseconds old, by an amount that rounding may shift in long episodes. This counts
    in the same way.
    """

    def __init__(self, since: float = 0.0, sampled: bool = False) -> None:
        self.since, self.sampled = since, sampled

    def copy(self) -> ObservationClock:
        return ObservationClock(self.since, self.sampled)

    def force(self) -> None:
        """A look that robosuite forces, at a reset or after setting a state."""
        self.since += TIMESTEP
        self.sampled = True

    def tick(self) -> bool:
        """Advance one sub-step; whether robosuite looks at its end."""
        self.since += TIMESTEP
        look = not self.sampled and self.since <= PERIOD
        self.sampled |= look
        if self.since >= PERIOD:
            look |= not self.sampled
            self.since %= PERIOD
            self.sampled = False
        return look


class Seen:
    """What robosuite's sensors saw last: joint positions before that sub-step's integration, and
    the hand's state.

    ``lit`` is whether the scene's stoves showed their burner then.
    """

    def __init__(self, nq: int) -> None:
        self.qpos = np.zeros(nq)
        self.eef_position = np.zeros(3)
        self.eef_quaternion = np.zeros(4)  # wxyz, of the hand's body
        self.gripper_qpos = np.zeros(2)  # after the integration
        self.lit: tuple[bool, ...] = ()

    def copy(self) -> Seen:
        return copy.deepcopy(self)


class _ArmOperands(NamedTuple):
    """What robosuite's controller computes torques from: the hand's pose, velocities and
    Jacobians, and the arm's joints."""

    position: np.ndarray
    rotation: np.ndarray
    velocity: np.ndarray
    spin: np.ndarray
    linear: np.ndarray
    angular: np.ndarray
    full: np.ndarray
    mass: np.ndarray
    joint_pos: np.ndarray
    joint_vel: np.ndarray


class _ArmState(ControlState):
    """What the controller of one slot remembers.

    ``stale``: robosuite's controller reads the arm when it is made, at a reset, and takes those
    readings for current in the first sub-step after it, although an initial state has been set
    since; None once that sub-step is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stale: _ArmOperands | None = None

    def copy(self) -> _ArmState:
        result = _ArmState()
        result.copy_from(self)
        result.stale = self.stale
        return result


class ArmController(OSC):
    """Drives one compiled scene's arm and gripper; the state of a slot is an `_ArmState`.

    ``absolute``: actions are a pose of the hand (m; rotation vector) in the world frame instead of
    a motion.
    """

    def __init__(self, model: mujoco.MjModel, robot: Any, exact: bool, absolute: bool) -> None:
        site = robot.gripper.important_sites["grip_site"]
        super().__init__(
            model,
            robot.robot_joints,
            robot.robot_model.actuators,
            robot.gripper.actuators,
            site,
            robot.init_qpos,
            pose=True,
        )
        self.exact, self.absolute = exact, absolute
        self.hand = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, robot.robot_model.eef_name)
        self.fingers = np.array([model.joint(name).qposadr[0] for name in robot.gripper.joints])
        # a list, for the same memory layout as robosuite's look-up
        self._columns = [int(dof) for dof in self.dofs]
        self._torque_low, self._torque_high = self._limits[:, 0].copy(), self._limits[:, 1].copy()
        self._kp, self._kd = np.ones(3) * KP, 2 * np.sqrt(np.ones(3) * KP)
        self._scale = np.array([POSITION_RANGE] * 3 + [ROTATION_RANGE] * 3)
        self._mass = np.zeros((model.nv, model.nv))
        self.torques = self._exact_torques if exact else self._fast_torques
        # that robosuite makes before a sub-step
        self._passes = 2 if exact and forward_moves_start() else 0

    def fresh_state(self, robot: Any) -> _ArmState:
        """The state after a reset, from robosuite's own controller of ``robot``."""
        c, state = robot.controller, _ArmState()
        state.goal_rotation[:] = c.goal_ori
        state.stale = _ArmOperands(
            c.ee_pos,
            c.ee_ori_mat,
            c.ee_pos_vel,
            c.ee_ori_vel,
            c.J_pos,
            c.J_ori,
            c.J_full,
            c.mass_matrix,
            c.joint_pos,
            c.joint_vel,
        )
        return state

    def advance(
        self,
        data: mujoco.MjData,
        state: _ArmState,
        action: np.ndarray,
        clock: ObservationClock,
        seen: Seen,
        moves: bool = False,
    ) -> None:
        """One control step under ``action`` [7]; ``seen`` takes what robosuite's sensors would hold
        afterwards.

        ``moves``: the action is a motion, whatever actions are otherwise. Leaves the kinematics as
        `mj_step` does: of the state before the last integration.
        """
        model, ctrl, command = self.model, data.ctrl, state.gripper
        step1, step2, torques, tick = self.step1, self.step2, self.torques, clock.tick
        arm, gripper, weight, offset = (
            self.actuators,
            self.gripper,
            self._gripper_weight,
            self._gripper_bias,
        )
        speed = np.array([-1.0, 1.0]) * GRIPPER_SPEED * np.sign(action[6])
        for substep in range(SUBSTEPS):
            step1(model, data)
            if self._passes:  # robosuite's controller makes none before it has read the arm anew
                self._solve(data, self._passes if state.stale is None else self._passes - 1)
            if substep == 0:
                aim = self._aim if moves or not self.absolute else self._aim_at
                stale, state.stale = state.stale, None
                if stale is not None:
                    aim(state, action[:6], stale.position, stale.rotation)
                    out = self._torques_from(stale, data, state)
                else:
                    aim(
                        state,
                        action[:6],
                        data.site_xpos[self.site],
                        data.site_xmat[self.site].reshape(3, 3),
                    )
                    out = torques(data, state)
            else:
                out = torques(data, state)
            actuate(command, speed, offset, weight, out, arm, gripper, ctrl)
            if tick():
                seen.qpos[:] = data.qpos
                step2(model, data)
                self.look(data, seen)
            else:
                step2(model, data)

    def _solve(self, data: mujoco.MjData, times: int) -> None:
        """What `mj_forward` does under the last sub-step's command after `mj_step1`, for the
        solver's start alone."""
        model = self.model
        mujoco.mj_fwdActuation(model, data)
        mujoco.mj_fwdAcceleration(model, data)
        for _ in range(times):
            mujoco.mj_fwdConstraint(model, data)

    def look(self, data: mujoco.MjData, seen: Seen) -> None:
        """What robosuite's proprioceptive sensors read off ``data``."""
        seen.eef_position[:] = data.site_xpos[self.site]
        seen.eef_quaternion[:] = data.xquat[self.hand]
        seen.gripper_qpos[:] = data.qpos[self.fingers]

    def _aim(
        self, state: _ArmState, action: np.ndarray, position: np.ndarray, rotation: np.ndarray
    ) -> None:
        delta = np.clip(action, -1.0, 1.0) * self._scale
        state.goal_position[:] = position + delta[:3]
        if np.any(delta[3:] != 0.0):
            turn = transforms.quat2mat(transforms.axisangle2quat(delta[3:].copy()))
            state.goal_rotation[:] = np.dot(turn, np.array(rotation))

    def _aim_at(self, state: _ArmState, action: np.ndarray, *_: np.ndarray) -> None:
        state.goal_position[:] = action[:3]
        state.goal_rotation[:] = transforms.quat2mat(transforms.axisangle2quat(action[3:].copy()))

    def _exact_torques(self, data: mujoco.MjData, state: _ArmState) -> np.ndarray:
        """Torques [7] by robosuite's compiled functions; operands have its memory layouts, which
        fix their rounding."""
        columns = self._columns
        jac_p, jac_r = self._jac_p, self._jac_r
        mujoco.mj_jacSite(self.model, data, jac_p, jac_r, self.site)
        linear, angular = np.array(jac_p[:, columns]), np.array(jac_r[:, columns])
        mujoco.mj_fullM(self.model, self._mass, data.qM)
        arm = _ArmOperands(
            position=data.site_xpos[self.site],
            rotation=np.array(data.site_xmat[self.site].reshape(3, 3)),
            velocity=np.dot(jac_p, data.qvel),
            spin=np.dot(jac_r, data.qvel),
            linear=linear,
            angular=angular,
            full=np.vstack([linear, angular]),
            mass=self._mass[columns, :][:, columns],
            joint_pos=np.array(data.qpos[self.qpos_index]),
            joint_vel=np.array(data.qvel[columns]),
        )
        return self._torques_from(arm, data, state)

    def _torques_from(self, arm: _ArmOperands, data: mujoco.MjData, state: _ArmState) -> np.ndarray:
        turn = control_utils.orientation_error(state.goal_rotation, arm.rotation)
        offset = state.goal_position - arm.position
        force = np.multiply(offset, self._kp) + np.multiply(-arm.velocity, self._kd)
        torque = np.multiply(turn, self._kp) + np.multiply(-arm.spin, self._kd)
        _, inertia, inertia_angular, nullspace = control_utils.opspace_matrices(
            arm.mass, arm.full, arm.linear, arm.angular
        )
        wrench = np.concatenate([np.dot(inertia, force), np.dot(inertia_angular, torque)])
        torques = np.dot(arm.full.T, wrench) + data.qfrc_bias[self._columns]
        torques += control_utils.nullspace_torques(
            arm.mass, nullspace, self.rest, arm.joint_pos, arm.joint_vel
        )
        return np.minimum(np.maximum(torques, self._torque_low), self._torque_high)

    def _fast_torques(self, data: mujoco.MjData, state: _ArmState) -> np.ndarray:
        site, out = self.site, self._out
        mujoco.mj_jacSite(self.model, data, self._jac_p, self._jac_r, site)
        _torques(
            data.qM,
            self._row_address,
            self._parent,
            self.dofs,
            self.qpos_index,
            data.qpos,
            data.qvel,
            data.qfrc_bias,
            self._jac_p,
            self._jac_r,
            data.site_xpos[site],
            data.site_xmat[site],
            state.goal_position,
            state.goal_rotation,
            self.rest,
            self._limits,
            out,
        )
        return out
