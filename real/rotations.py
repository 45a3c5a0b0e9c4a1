"""Unit quaternions w x y z and rotation vectors (radians), in numpy."""

from __future__ import annotations

import math

import numpy as np


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The rotation ``b``, then ``a``."""
    aw, ax, ay, az = a
    bw, bx, by, bz = b
    return np.array(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ]
    )


def conjugate(q: np.ndarray) -> np.ndarray:
    return q * np.array([1.0, -1.0, -1.0, -1.0])


def from_vector(v: np.ndarray) -> np.ndarray:
    """The quaternion [4] of a rotation vector [3]."""
    angle = math.sqrt(float(v @ v))
    if angle < 1e-12:
        return np.array([1.0, *(0.5 * v)])
    return np.array([math.cos(angle / 2.0), *(v * (math.sin(angle / 2.0) / angle))])


def to_vector(q: np.ndarray) -> np.ndarray:
    """The rotation vector [3] of a unit quaternion, its angle at most pi."""
    w, v = (float(q[0]), q[1:]) if q[0] >= 0.0 else (-float(q[0]), -q[1:])
    sine = math.sqrt(float(v @ v))
    return 2.0 * v if sine < 1e-12 else v * (2.0 * math.atan2(sine, w) / sine)


def difference(to: np.ndarray, of: np.ndarray) -> np.ndarray:
    """The rotation vector that, applied in the base frame, turns ``of`` into ``to``."""
    return to_vector(multiply(to, conjugate(of)))


def normalised(q: np.ndarray) -> np.ndarray:
    return q / np.linalg.norm(q)


def matrix(q: np.ndarray) -> np.ndarray:
    """The rotation matrix [3 3] of a unit quaternion."""
    w, x, y, z = q
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def from_matrix(m: np.ndarray) -> np.ndarray:
    """The unit quaternion [4] of a rotation matrix [3 3], its largest part above 0."""
    squares = np.array([1.0 + m[0, 0] + m[1, 1] + m[2, 2], *(1.0 + 2.0 * np.diag(m) - np.trace(m))])
    largest = int(np.argmax(squares))
    # 4 q q^T, of which the row of the largest part tells all others
    skew = np.array([m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]])
    products = np.empty((4, 4))
    products[0, 0], products[0, 1:], products[1:, 0] = squares[0], skew, skew
    products[1:, 1:] = m + m.T
    products[[1, 2, 3], [1, 2, 3]] = squares[1:]
    return normalised(products[largest])
