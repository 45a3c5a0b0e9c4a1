"""Operational-space control of one arm, equal to robosuite 1.4's OSC_POSITION and OSC_POSE with
their default configs.

robosuite runs three `mj_forward` and a page of numpy per 2 ms sub-step; here one position/velocity
pass (`mj_step1`), one compiled function and `mj_step2` do the same. The formulas are those of
Khatib, "A unified approach for motion and force control of robot manipulators: the operational
space formulation" (1987), position and orientation uncoupled:

    tau = J^T [Lambda_p F ; Lambda_o T] + bias + N^T M (k (q0 - q) - 2 sqrt(k) dq)
    F = kp (x* - x) - kd v,   T = kp e(R*, R) - kd w,   kd = 2 sqrt(kp)
    Lambda = (J M^-1 J^T)^-1,   N = I - M^-1 J^T Lambda J

Since N^T M y = M y - J^T Lambda J y, neither N nor M^-1 is ever formed; one Cholesky factor of M
serves everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
from numba import njit

POSITION_RANGE = 0.05  # metres per control step at full input
ROTATION_RANGE = 0.5  # radians per control step at full input
GRIPPER_SPEED = 0.01  # of the [-1, 1] gripper command, per sub-step
SUBSTEPS = 25  # of 2 ms: control at 20 Hz
KP = 150.0
NULLSPACE_KP = 10.0
# orientation that OSC_POSITION holds
DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])


@njit(cache=True, fastmath=False)
def _cholesky(a, n):
    """Lower Cholesky factor of the leading n x n block of ``a``, in place (lower triangle)."""
    for j in range(n):
        s = a[j, j]
        for k in range(j):
            s -= a[j, k] * a[j, k]
        d = np.sqrt(s)
        a[j, j] = d
        for i in range(j + 1, n):
            s = a[i, j]
            for k in range(j):
                s -= a[i, k] * a[j, k]
            a[i, j] = s / d


@njit(cache=True, fastmath=False)
def _solve(factor, b, n):
    """Solve L L^T x = b in place, for the factor that `_cholesky` left."""
    for i in range(n):
        s = b[i]
        for k in range(i):
            s -= factor[i, k] * b[k]
        b[i] = s / factor[i, i]
    for i in range(n - 1, -1, -1):
        s = b[i]
        for k in range(i + 1, n):
            s -= factor[k, i] * b[k]
        b[i] = s / factor[i, i]


@njit(cache=True, fastmath=False)
def _torques(
    mass,
    row_address,
    parent,
    dofs,
    qpos_index,
    qpos,
    qvel,
    bias,
    jac_p,
    jac_r,
    position,
    rotation,
    goal_position,
    goal_rotation,
    rest,
    limits,
    out,
):
    """Clipped joint torques [n] into ``out``; ``mass`` is MuJoCo's packed qM, row_address/parent
    its dof layout."""
    n = dofs.shape[0]
    inertia = np.zeros((n, n))
    for i in range(n):
        address, dof = row_address[dofs[i]], dofs[i]
        while dof >= 0:
            for j in range(n):
                if dofs[j] == dof:
                    inertia[i, j] = mass[address]
                    inertia[j, i] = mass[address]
            address += 1
            dof = parent[dof]
    jac = np.empty((6, n))
    for j in range(n):
        for i in range(3):
            jac[i, j] = jac_p[i, dofs[j]]
            jac[3 + i, j] = jac_r[i, dofs[j]]

    # end-effector velocity over all dofs, as robosuite computes it
    force = np.empty(6)
    for i in range(3):
        v = 0.0
        w = 0.0
        for d in range(qvel.shape[0]):
            v += jac_p[i, d] * qvel[d]
            w += jac_r[i, d] * qvel[d]
        force[i] = -v
        force[3 + i] = -w
    kd = 2.0 * np.sqrt(KP)
    for i in range(3):
        a, b = (i + 1) % 3, (i + 2) % 3
        error = 0.0
        for c in range(3):
            error += (
                rotation[3 * a + c] * goal_rotation[b, c]
                - rotation[3 * b + c] * goal_rotation[a, c]
            )
        force[i] = KP * (goal_position[i] - position[i]) + kd * force[i]
        force[3 + i] = KP * 0.5 * error + kd * force[3 + i]

    factor = inertia.copy()
    _cholesky(factor, n)
    # W = L^-1 J^T, so that J M^-1 J^T = W^T W
    w = np.empty((n, 6))
    for c in range(6):
        for i in range(n):
            s = jac[c, i]
            for k in range(i):
                s -= factor[i, k] * w[k, c]
            w[i, c] = s / factor[i, i]
    full = np.zeros((6, 6))
    for a in range(6):
        for b in range(a + 1):
            s = 0.0
            for i in range(n):
                s += w[i, a] * w[i, b]
            full[a, b] = s
            full[b, a] = s
    linear = full[:3, :3].copy()
    angular = full[3:, 3:].copy()
    _cholesky(linear, 3)
    _cholesky(angular, 3)
    _solve(linear, force[:3], 3)
    _solve(angular, force[3:], 3)

    # nullspace: pull towards the rest posture without moving the hand
    pull = np.empty(n)
    joint_kd = 2.0 * np.sqrt(NULLSPACE_KP)
    for i in range(n):
        pull[i] = NULLSPACE_KP * (rest[i] - qpos[qpos_index[i]]) - joint_kd * qvel[dofs[i]]
    hand = np.empty(6)
    for a in range(6):
        s = 0.0
        for i in range(n):
            s += jac[a, i] * pull[i]
        hand[a] = s
    _cholesky(full, 6)
    _solve(full, hand, 6)
    for i in range(n):
        s = bias[dofs[i]]
        for a in range(6):
            s += jac[a, i] * (force[a] - hand[a])
        for j in range(n):
            s += inertia[i, j] * pull[j]
        out[i] = min(max(s, limits[i, 0]), limits[i, 1])


@njit(cache=True, fastmath=False)
def actuate(command, speed, offset, weight, torques, arm, gripper, ctrl):
    """Move the gripper's ``command`` [2] by ``speed`` within [-1, 1]; write it and the torques
    [n] into ``ctrl``."""
    for i in range(command.shape[0]):
        command[i] = min(max(command[i] + speed[i], -1.0), 1.0)
        ctrl[gripper[i]] = offset[i] + weight[i] * command[i]
    for i in range(torques.shape[0]):
        ctrl[arm[i]] = torques[i]


class OSC:
    """Controller of one arm and its two-finger gripper on a compiled model; state lives in a
    `ControlState` per slot.

    ``pose``: False controls dx, dy, dz (the hand stays pointing down), True also a rotation vector
    in the world frame. Inputs are robosuite's: every dimension in [-1, 1], gripper last (-1 opens,
    +1 closes).
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        joints: Sequence[str],
        actuators: Sequence[str],
        gripper_actuators: Sequence[str],
        site: str,
        rest: np.ndarray,
        pose: bool,
    ):
        self.model = model
        self.pose = pose
        self.arm_dim = 6 if pose else 3
        self.site = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, site)
        joint_ids = [mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_JOINT, name) for name in joints]
        self.qpos_index = np.array([model.jnt_qposadr[j] for j in joint_ids], dtype=np.int64)
        self.dofs = np.array([model.jnt_dofadr[j] for j in joint_ids], dtype=np.int64)
        self.actuators = np.array(
            [mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_ACTUATOR, a) for a in actuators]
        )
        self.gripper = np.array(
            [mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_ACTUATOR, a) for a in gripper_actuators]
        )
        ranges = model.actuator_ctrlrange[self.gripper]
        self._gripper_bias = 0.5 * (ranges[:, 1] + ranges[:, 0])
        self._gripper_weight = 0.5 * (ranges[:, 1] - ranges[:, 0])
        self.rest = np.array(rest, dtype=np.float64)
        self._limits = np.ascontiguousarray(
            model.actuator_ctrlrange[self.actuators], dtype=np.float64
        )
        self._row_address = np.asarray(model.dof_Madr, dtype=np.int64)
        self._parent = np.asarray(model.dof_parentid, dtype=np.int64)
        self._jac_p = np.zeros((3, model.nv))
        self._jac_r = np.zeros((3, model.nv))
        self._out = np.zeros(len(self.dofs))
        self.untimed()

    def untimed(self) -> None:
        """Use MuJoCo's own stepping functions (a benchmark may have put timed ones in their
        place)."""
        self.step1, self.step2 = mujoco.mj_step1, mujoco.mj_step2

    def control_step(self, data: mujoco.MjData, state: ControlState, action: np.ndarray) -> None:
        """Advance ``data`` by one control step (`SUBSTEPS` sub-steps) under ``action`` [arm_dim +
        1] in [-1, 1].

        Leaves the kinematics as `mj_step` does: of the state before the last integration.
        """
        model, site, out = self.model, self.site, self._out
        step1, step2, jac_site = self.step1, self.step2, mujoco.mj_jacSite
        position, rotation = data.site_xpos[site], data.site_xmat[site]
        mass, qpos, qvel, bias, ctrl = data.qM, data.qpos, data.qvel, data.qfrc_bias, data.ctrl
        arm, gripper, command = self.actuators, self.gripper, state.gripper
        weight, offset = self._gripper_weight, self._gripper_bias
        delta = np.clip(action[: self.arm_dim], -1.0, 1.0)
        speed = np.array([-GRIPPER_SPEED, GRIPPER_SPEED]) * np.sign(action[self.arm_dim])
        for substep in range(SUBSTEPS):
            step1(model, data)
            if substep == 0:
                self._set_goal(state, delta, position, rotation)
            jac_site(model, data, self._jac_p, self._jac_r, site)
            _torques(
                mass,
                self._row_address,
                self._parent,
                self.dofs,
                self.qpos_index,
                qpos,
                qvel,
                bias,
                self._jac_p,
                self._jac_r,
                position,
                rotation,
                state.goal_position,
                state.goal_rotation,
                self.rest,
                self._limits,
                out,
            )
            actuate(command, speed, offset, weight, out, arm, gripper, ctrl)
            step2(model, data)

    def _set_goal(
        self, state: ControlState, delta: np.ndarray, position: np.ndarray, rotation: np.ndarray
    ) -> None:
        state.goal_position[:] = position + POSITION_RANGE * delta[:3]
        if not self.pose:
            state.goal_rotation[:] = DOWN
            return
        turn = ROTATION_RANGE * delta[3:]
        if np.any(np.abs(turn) > 0.0):
            state.goal_rotation[:] = rotation_matrix(turn) @ rotation.reshape(3, 3)


class ControlState:
    """What the controller of one slot remembers: its goal and the integrated gripper command."""

    def __init__(self) -> None:
        self.goal_position = np.zeros(3)
        self.goal_rotation = DOWN.copy()
        self.gripper = np.zeros(2)

    def copy_from(self, other: ControlState) -> None:
        self.goal_position[:] = other.goal_position
        self.goal_rotation[:] = other.goal_rotation
        self.gripper[:] = other.gripper


def rotation_matrix(vector: np.ndarray) -> np.ndarray:
    """Rotation matrix float32 [3, 3] of a rotation vector (radians), through a quaternion.

    robosuite turns its quaternions into matrices in single precision; so does this, to set the very
    same goals.
    """
    angle = float(np.linalg.norm(vector))
    if angle == 0.0:
        return np.eye(3, dtype=np.float32)
    q = np.array([np.cos(angle / 2.0), *(vector / angle * np.sin(angle / 2.0))]).astype(np.float32)
    q *= np.sqrt(2.0 / np.dot(q, q))
    ww = np.outer(q, q)
    (wx, wy, wz), (xx, xy, xz), (yy, yz, zz) = ww[0, 1:], ww[1, 1:], (ww[2, 2], ww[2, 3], ww[3, 3])
    return np.array(
        [
            [1.0 - yy - zz, xy - wz, xz + wy],
            [xy + wz, 1.0 - xx - zz, yz - wx],
            [xz - wy, yz + wx, 1.0 - xx - yy],
        ],
        dtype=np.float32,
    )
