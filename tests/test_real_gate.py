"""The gate: what each stage does to one request, and that nothing gets through it against a
simulated arm."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_helpers import DT, LIMITS, Clock, point_limits, point_robot

from benchmarks.robot.gate import Judge
from real import limits as limit_files
from real.gate import (
    AGE,
    FINITE,
    FORCE,
    GRIPPER,
    IK,
    JOINTS,
    RATE,
    STAGES,
    STEP,
    WORKSPACE,
    Gate,
    Request,
)
from real.limits import Box, Limits
from real.robots import remote
from real.robots.protocol import Capabilities, Measured
from real.rotations import difference, from_vector, multiply, to_vector
from vla_rl.errors import ConfigError, UserError

LOOSE = Limits(
    speed=1.0, acceleration=1e6, jerk=1e9, step=0.1, rotation_speed=1.0, rotation_step=0.5
)
DOWN = np.array([0.0, 1.0, 0.0, 0.0])


def at(
    position=(0.0, 0.0, 0.3), wrench=(0.0,) * 6, jacobian=None, joints=(0.0, 0.0, 0.3)
) -> Measured:
    p = np.array(position, dtype=float)
    return Measured(
        0.0, p, DOWN, np.array(joints, dtype=float), np.zeros(3), 1.0, np.array(wrench), p, jacobian
    )


def gate(
    limits: Limits = LOOSE,
    gain: float = 0.0,
    turns: bool = False,
    kind: str = "cartesian",
    **changes,
) -> Gate:
    return Gate(
        dataclasses.replace(limits, **changes), Capabilities(kind=kind, gain=gain), turns, DT
    )


def to(*position: float, **more) -> Request:
    return Request(0.0, np.array(position, dtype=float), **more)


def only(stage: int) -> int:
    return 1 << stage


def test_a_goal_that_no_limit_touches_goes_through_unchanged():
    passed = gate(gain=6.0)(to(0.02, 0.0, 0.3), at(), 0.0)
    assert passed.mask == 0 and passed.trip == ""
    np.testing.assert_allclose(passed.reference.position, [0.02, 0.0, 0.3])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_not_finite_is_refused(bad):
    for request in (
        to(bad, 0.0, 0.0),
        Request(bad if bad != 1e300 else math.nan, np.zeros(3)),
        to(0.0, 0.0),
    ):
        passed = gate()(request, at(), 0.0)
        assert passed.reference is None and passed.mask == only(FINITE)


def test_an_old_observation_is_refused_and_a_persons_request_has_none():
    old = gate()(to(0.0, 0.0, 0.3, obs_stamp=9.0), at(), 9.5)
    assert (
        old.reference is None and old.mask == only(AGE) and old.amounts[AGE] == pytest.approx(0.3)
    )
    assert gate()(to(0.0, 0.0, 0.3, obs_stamp=9.4), at(), 9.5).reference is not None
    assert gate()(to(0.0, 0.0, 0.3), at(), 1e6).reference is not None


def test_step_is_kept_around_the_measured_pose():
    passed = gate(gain=1.0)(to(0.3, 0.0, 0.7), at(), 0.0)  # 0.5 m away along (3, 0, 4) / 5
    np.testing.assert_allclose(passed.reference.position, [0.06, 0.0, 0.38])
    assert passed.mask == only(STEP) and passed.amounts[STEP] == pytest.approx(0.4)


def test_rotations_are_clipped_by_their_angle():
    goal = multiply(from_vector(np.array([0.0, 0.0, 2.0])), DOWN)
    passed = gate(gain=1.0, turns=True)(Request(0.0, at().position, goal), at(), 0.0)
    np.testing.assert_allclose(
        difference(passed.reference.quaternion, DOWN), [0.0, 0.0, 0.5], atol=1e-9
    )
    assert passed.mask == only(STEP)


def test_speed_acceleration_and_jerk_by_hand():
    """From rest with 4 m/s² and 200 m/s³ at 100 Hz: the acceleration grows by 2 per tick, 0.02
    m/s of speed each."""
    slow = gate(speed=0.5, acceleration=4.0, jerk=200.0)
    speeds = [slow(to(0.09, 0.0, 0.3), at(), 0.0) and slow.velocity[0] for _ in range(4)]
    np.testing.assert_allclose(speeds, [0.02, 0.06, 0.10, 0.14])


def test_after_a_fault_it_is_slow():
    for share in (1.0, 0.3):
        g = gate(gain=6.0, speed=0.2, slow=0.3)
        for _ in range(50):
            g(to(0.09, 0.0, 0.3), at(), 0.0, share < 1.0)
        assert np.linalg.norm(g.velocity) == pytest.approx(0.95 * 0.2 * share)


def test_a_wall_takes_the_normal_part_alone():
    g = gate(gain=6.0, box=Box((-1.0, -1.0, 0.0), (0.0, 1.0, 1.0)))
    # the hand is at the wall x = 0, which begins 1.5 / (2 · 1e6) m earlier
    passed = g(to(0.05, 0.05, 0.3), at(), 0.0)
    np.testing.assert_allclose(passed.reference.position, [-4 * 7.5e-7, 0.05, 0.3], atol=1e-9)
    assert passed.mask == only(WORKSPACE)


def test_an_arm_that_drifts_through_a_wall_is_pulled_back_gently():
    box = Box((-1.0, -1.0, 0.0), (0.0, 1.0, 1.0))
    for beyond, wanted in (
        (0.001, 4 * 6.0 * 0.001),
        (0.02, 0.3 * 1.0),
        (0.09, 0.3 * 1.0),
        (0.11, 0.0),
    ):
        g = gate(gain=6.0, box=box, slow=0.3)
        g(to(beyond + 0.05, 0.05, 0.3), at((beyond, 0.0, 0.3)), 0.0)
        assert g.velocity[0] == pytest.approx(-wanted, abs=2e-5), (
            "at most at the share that is left after a fault"
        )
        assert g.velocity[1] == pytest.approx(6.0 * 0.05), "it still slides along"
    keep_out = (Box((0.0, -1.0, 0.0), (1.0, 1.0, 1.0)),)
    g = gate(gain=6.0, keep_out=keep_out)
    g(to(0.05, 0.0, 0.3), at((0.001, 0.0, 0.3)), 0.0)
    assert g.velocity[0] == pytest.approx(-4 * 6.0 * 0.001, abs=2e-5)
    weak = gate(gain=6.0, box=box, acceleration=4.0, speed=0.1)  # gains 0.04 m/s in a tick
    weak(to(0.05, 0.0, 0.3), at((0.05, 0.0, 0.3)), 0.0)
    assert weak.velocity[0] == pytest.approx(-0.03), "0.3 · 0.1 m/s"


def test_a_wall_counts_from_where_an_arm_would_come_to_rest():
    """At 0.24 m/s towards the wall, a critically damped arm of gain 6 still goes 0.24 / 24 m:
    four fifths of the way."""
    box = Box((-1.0, -1.0, 0.0), (0.0125, 1.0, 1.0))
    jacobian = np.vstack([np.eye(3), np.zeros((3, 3))])
    for speed, wanted in ((0.0, 6.0 * 0.0125), (0.24, 6.0 * 0.0025)):
        moving = dataclasses.replace(
            at(jacobian=jacobian), joint_velocity=np.array([speed, 0.0, 0.0])
        )
        g = gate(gain=6.0, box=box)
        g(to(0.05, 0.0, 0.3), moving, 0.0)
        assert g.velocity[0] == pytest.approx(wanted, abs=2e-5)


def test_an_arm_that_is_faster_than_its_target_is_held_back():
    """What its joints do to each other can push it on: the target gives way by 8 times the
    excess over 0.95 · 0.3 m/s."""
    jacobian = np.vstack([np.eye(3), np.zeros((3, 3))])
    for speed, wanted in ((0.28, 0.285), (0.295, 0.285 - 8 * 0.01), (0.3, 0.285 - 8 * 0.015)):
        moving = dataclasses.replace(
            at(jacobian=jacobian), joint_velocity=np.array([speed, 0.0, 0.0])
        )
        g = gate(gain=6.0, speed=0.3)
        g(to(0.09, 0.0, 0.3), moving, 0.0)
        np.testing.assert_allclose(g.velocity[:3], [wanted, 0.0, 0.0], atol=1e-9)


def test_a_target_that_gives_way_stays_within_the_step():
    """6 · 0.05 m/s back, and 8 · 0.019 more: but 0.06 m away at most."""
    jacobian = np.vstack([np.eye(3), np.zeros((3, 3))])
    pushed = dataclasses.replace(at(jacobian=jacobian), joint_velocity=np.array([0.0, 0.399, 0.0]))
    passed = gate(gain=6.0, speed=0.4, step=0.06)(to(0.0, -0.05, 0.3), pushed, 0.0)
    np.testing.assert_allclose(passed.reference.position, [0.0, -0.06, 0.3])


# six joints
WHOLE = np.vstack(
    [np.hstack([np.eye(3), np.zeros((3, 3))]), np.hstack([np.zeros((3, 3)), np.eye(3)])]
)


def moving(speeds, stamp: float = 0.0) -> Measured:
    """Three joints move the hand by 1 m each rad, three turn it."""
    return dataclasses.replace(
        at(jacobian=WHOLE, joints=(0.0,) * 6),
        joint_velocity=np.array(speeds, dtype=float),
        stamp=stamp,
    )


@pytest.mark.parametrize(
    ("before", "now", "stage"),
    [
        (None, (0.31, 0, 0, 0, 0, 0), RATE),  # the hand: 0.3 m/s are allowed
        (None, (0.2, 0.2, 0.2, 0, 0, 0), RATE),  # 0.35 together
        (None, (0.29, 0, 0, 0, 0, 0), None),
        ((0.2, 0, 0, 0, 0, 0), (0.26, 0, 0, 0, 0, 0), RATE),  # 0.32 in a tick
        ((0.2, 0, 0, 0, 0, 0), (0.24, 0, 0, 0, 0, 0), None),
        ((0.29, 0, 0, 0, 0, 0), (0.24, 0, 0, 0, 0, 0), None),
        (None, (0, 0, 0, 0, 2.1, 0), IK),  # a joint: 2 rad/s
        ((0, 0, 0, 0, 0, -1.5), (0, 0, 0, 0, 0, -1.8), IK),
        # it slows down, and is not slow yet (0.8 of the limit)
        ((0, 0, 0, 0, 0, -2.5), (0, 0, 0, 0, 0, -1.8), IK),
        ((0, 0, 0, 0, 0, -2.5), (0, 0, 0, 0, 0, -1.5), None),
        (None, (0, 0, 0, 1.9, 1.9, 1.9), RATE),  # 3.29 rad/s of 3
        (None, (0, 0, 0, 1.6, 1.6, 1.6), None),
    ],
)
def test_an_arm_that_will_be_too_fast_brakes_whatever_was_asked(before, now, stage):
    """The same change as in the tick before, once more."""
    g = gate(gain=6.0, turns=True, speed=0.3, rotation_speed=3.0, joint_speed=2.0)
    ask = Request(0.0, at().position, DOWN)
    if before is not None:
        g(ask, moving(before), 0.0)
    passed = g(ask, moving(now, DT), DT)
    assert (passed.reference is None) == (stage is not None) and not passed.trip
    assert stage is None or passed.mask == only(stage)


def test_a_sudden_turn_leaves_hand_and_joints_their_limits():
    """A turn at 3 rad/s from rest accelerates by 4 · 6 · 3 a second: in a tick 0.72 rad/s. Of the
    joint's 0.6 half as much again is counted, 1.08: five ninths are left. Of the hand's 0.95 · 0.3
    a half (m) is, 0.36. What a new target asks of the hand itself, in a tick 4 · 6 · 0.01 of its
    change, is not left for the turn."""
    goal = multiply(from_vector(np.array([0.0, 0.0, 0.5])), DOWN)
    for joint_speed, wanted in ((2.0, 3.0 * 0.285 / 0.36), (0.6, 3.0 * 0.6 / 1.08)):
        g = gate(
            gain=6.0, turns=True, speed=0.3, rotation_speed=4.0, rotation_step=0.5, joint_speed=9.0
        )
        g.ahead.limits = dataclasses.replace(g.limits, joint_speed=joint_speed)
        g.joints.share = lambda *_: (1.0, 0.0, 0.0)  # (which limits what is commanded)
        assert g(Request(0.0, at().position, goal), moving((0.0,) * 6), 0.0).reference is not None
        np.testing.assert_allclose(g.velocity, [0, 0, 0, 0, 0, wanted], atol=1e-3)
    fast = gate(gain=6.0, turns=True, speed=0.3, rotation_speed=4.0, rotation_step=0.5)
    fast(Request(0.0, at().position, goal), moving((0.26, 0, 0, 0, 0, 0)), 0.0)
    assert fast.velocity[5] == pytest.approx(3.0 * 0.025 / 0.36, abs=1e-3), "0.025 m/s are left"
    low = gate(
        gain=6.0,
        turns=True,
        speed=0.3,
        rotation_speed=4.0,
        rotation_step=0.5,
        box=Box((-1, -1, 0.0), (1, 1, 1)),
    )
    there = np.array([0.0, 0.0, 0.02])
    low(Request(0.0, there, goal), dataclasses.replace(moving((0.0,) * 6), position=there), 0.0)
    assert low.velocity[5] == pytest.approx(3.0 * 0.24 / 0.36, abs=1e-3), (
        "12/s of the 2 cm to the wall"
    )
    both = gate(
        gain=6.0,
        turns=True,
        speed=0.3,
        rotation_speed=4.0,
        rotation_step=0.5,
        step=0.1,
        acceleration=1e3,
        jerk=1e9,
    )
    both(
        Request(0.0, at().position + np.array([0.03, 0.0, 0.0]), goal),
        moving((0.2, 0, 0, 0, 0, 0)),
        0.0,
    )
    assert both.velocity[0] == pytest.approx(0.18, abs=1e-3), "6/s of 3 cm"
    assert both.velocity[5] == pytest.approx(3.0 * (0.085 - 0.24 * 0.18) / 0.36, abs=2e-3), (
        "0.085 m/s, less its own share"
    )


def test_a_new_target_of_the_hand_leaves_the_joints_their_limits_too():
    """0.3 m/s along y, from rest: in a tick 4 · 6 · 0.01 of it, for which the second joint (0.3 m
    for a radian) turns by 0.24 rad/s, of which half as much again is counted. 0.1 are left of its
    2: it gets 0.1 / 0.36 of what was asked, and the rest later."""
    seen = dataclasses.replace(
        at(jacobian=np.vstack([np.diag([1.0, 0.3, 1.0]), np.zeros((3, 3))])),
        joint_velocity=np.array([0.0, 1.9, 0.0]),
    )
    ahead = gate(gain=6.0, turns=True, speed=9.0, joint_speed=2.0).ahead
    asked = np.array([[0.0, 0.3, 0.0], [0.0, 0.0, 0.0]])
    ahead.see(seen)
    found = ahead.eased(asked, seen, 9.0)[0]
    np.testing.assert_allclose(found, [0.0, 0.3 * 0.1 / 0.36, 0.0], rtol=1e-6)
    ahead.see(dataclasses.replace(seen, joint_velocity=np.zeros(3), stamp=1.0))
    assert ahead.eased(asked, dataclasses.replace(seen, joint_velocity=np.zeros(3)), 9.0) is asked


@pytest.mark.parametrize(
    "speeds, over",
    [
        ((1.2, -0.95, 0.0), 0.0325),  # 0.2125 of 0.25 m/s, and 0.18
        ((0.9, -0.65, 0.0), 0.0),  # 0.2125 and 0.135
        ((0.34, 0.0, 0.0), 0.0),
    ],
)
def test_what_a_brake_takes_unevenly_counts(speeds, over):
    """Two joints move the hand along x against each other. A brake that takes 0.15 of all speeds
    but one leaves 0.85 of the hand's and 0.15 of what that joint makes."""
    jacobian = np.zeros((6, 3))
    jacobian[0, :2], jacobian[1, 2] = 1.0, 1.0
    seen = dataclasses.replace(at(jacobian=jacobian), joint_velocity=np.array(speeds))
    ahead = gate(gain=6.0, turns=True, speed=0.36, joint_speed=2.0).ahead
    ahead.see(seen)
    assert ahead.hand == pytest.approx(speeds[0] + speeds[1]) and ahead.hand < 0.36
    assert ahead.excess()[0] == pytest.approx(over, abs=1e-12)


@pytest.mark.parametrize("turned", [0.0, 0.7])
@pytest.mark.parametrize("ratio, beyond", [(0.02, 0.02 * 0.1), (0.1, 0.1 * 0.5), (0.4, 0.4)])
def test_a_stretched_arm_is_not_thrown_out_or_in(ratio, beyond, turned):
    """The second joint gives ``ratio`` m for a radian, whichever way it leads. Beyond what the hand
    does there a target may ask for a fifth of the joint's 2 rad/s in a tick of 4 · 6 · 0.01, and
    below 0.2 m for a radian for less in proportion; in other directions for all that it wants."""
    way = np.array([[math.cos(turned), -math.sin(turned)], [math.sin(turned), math.cos(turned)]])
    jacobian = np.zeros((6, 3))
    jacobian[:2, :2], jacobian[2, 2] = way @ np.diag([1.0, ratio]), 1.0
    seen = dataclasses.replace(at(jacobian=jacobian), joint_velocity=np.array([0.0, 0.3, 0.0]))
    ahead = gate(gain=6.0, turns=True, speed=99.0, joint_speed=2.0).ahead
    asked = np.zeros((2, 3))
    asked[0, :2] = way @ [0.05, 1.0]
    ahead.limits = dataclasses.replace(ahead.limits, joint_speed=(1e9, 1e9, 2.0))
    ahead.see(seen)
    most = min(0.3 * ratio + 0.4 / 0.24 * beyond, 1.0)
    found = ahead.eased(asked, seen, 99.0)[0]
    np.testing.assert_allclose(way.T @ found[:2], [0.05, most], atol=1e-9)
    ahead.limits = dataclasses.replace(ahead.limits, joint_speed=math.inf)
    ahead.rest()
    assert ahead.eased(asked, seen, 99.0) is asked, "no limit, no room that would be lacking"


@pytest.mark.parametrize("gain", [0.0, 6.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e308])
@pytest.mark.parametrize("place", ["one", "row", "all", "velocity"])
def test_an_arm_whose_speed_is_no_number_is_too_fast(place, bad, gain):
    """In the room and at a wall, where what is told of it is a number."""
    jacobian, velocity = np.vstack([np.eye(3), np.zeros((3, 3))]), np.full(3, 10.0)
    where = {"one": (0, 0), "row": (0, slice(None)), "all": (slice(None), slice(None))}
    if place == "velocity":
        velocity[0] = bad
    else:
        jacobian[where[place]] = bad
    for position in ((0.0, 0.0, 0.3), (0.999, 0.0, 0.3)):
        g = gate(
            gain=gain, box=Box((-1.0, -1.0, 0.0), (1.0, 1.0, 1.0)), speed=0.3, acceleration=1.0
        )
        seen = dataclasses.replace(at(position, jacobian=jacobian), joint_velocity=velocity)
        with np.errstate(all="ignore"):
            passed = g(to(1.05, 0.0, 0.3), seen, 0.0)
        assert passed.reference is None and passed.mask and np.isfinite(passed.amounts).all()


def test_an_arm_that_tells_no_joint_velocities_is_led_too():
    jacobian = np.vstack([np.eye(3), np.zeros((3, 3))])
    silent = dataclasses.replace(at(jacobian=jacobian), joint_velocity=np.empty(0))
    passed = gate(gain=6.0, box=Box((-1.0, -1.0, 0.0), (1.0, 1.0, 1.0)))(
        to(0.02, 0.0, 0.3), silent, 0.0
    )
    np.testing.assert_allclose(passed.reference.position, [0.02, 0.0, 0.3])


def test_a_box_without_room_to_stop_in_is_refused():
    """Both walls would ask the hand to come back at once. Braking takes 0.3² / 2 = 0.045 m."""
    box = Box((-1.0, -1.0, 0.0), (1.0, 1.0, 0.13))
    with pytest.raises(
        ConfigError, match=r"limits\.box is 0\.13 m wide .* wider than 0\.135 m, lower the speed"
    ):
        gate(gain=6.0, box=box, speed=0.3, acceleration=1.0)
    gate(gain=6.0, box=Box((-1.0, -1.0, 0.0), (1.0, 1.0, 0.14)), speed=0.3, acceleration=1.0)
    gate(box=box, speed=0.3, acceleration=1.0)  # one that follows closely needs none


def test_an_arm_at_a_wall_may_be_less_fast_in_all_directions():
    """All of it a braking distance (0.3² / 2 m) before the wall, none half of one beyond:
    braking bends the hand's way."""
    box, jacobian = (
        Box((-1.0, -1.0, 0.0), (0.0, 1.0, 1.0)),
        np.vstack([np.eye(3), np.zeros((3, 3))]),
    )
    for beyond, share in ((-0.05, 0.95), (-0.0225, 2 / 3), (0.0, 1 / 3), (0.0225, 0.0)):
        g = gate(gain=6.0, box=box, speed=0.3, acceleration=1.0, jerk=1e9)
        for _ in range(60):
            g(to(beyond, 0.09, 0.3), at((beyond, 0.0, 0.3), jacobian=jacobian), 0.0)
        assert g.velocity[1] == pytest.approx(share * 0.3, abs=1e-3), beyond


def test_a_joint_that_runs_into_its_end_is_braked_whatever_the_hand_was_asked_to_do():
    ends = {"joint_low": (-1.0,) * 3, "joint_high": (1.0,) * 3, "joint_margin": 0.05}
    near = at(joints=(0.94, 0.0, 0.0))  # 0.01 before the margin: 12 / s of that is 0.12 rad/s
    for speed, braked in ((0.1, False), (0.13, False), (0.15, True), (-3.0, False)):
        moving = dataclasses.replace(near, joint_velocity=np.array([speed, 0.0, 0.0]))
        passed = gate(gain=6.0, **ends)(to(0.0, 0.0, 0.3), moving, 0.0)
        assert (passed.reference is None) == braked and passed.mask == (
            only(JOINTS) if braked else 0
        ), speed
        assert not passed.trip


def test_what_does_not_come_back_pauses_the_session():
    """Half a braking distance is 1² / (4 · 100) m; drifting at 0.1 m/s it is there 0.025 s later.
    Looked at is where it is 0.05 s later."""
    jacobian = np.vstack([np.eye(3), np.zeros((3, 3))])
    box, ends = (
        Box((-1.0, -1.0, 0.0), (0.0, 1.0, 1.0)),
        {"joint_low": (-1.0,) * 3, "joint_high": (1.0,) * 3},
    )

    def trip(x: float, speed: float, joint: float = 0.0, **walls) -> str:
        moving = dataclasses.replace(
            at((x, 0.0, 0.3), jacobian=jacobian, joints=(joint, 0.0, 0.0)),
            joint_velocity=np.array([speed, 0.0, 0.0]),
        )
        passed = gate(gain=6.0, acceleration=100.0, **walls)(to(-0.05, 0.0, 0.3), moving, 0.0)
        return "braked" if passed.reference is None and not passed.trip else passed.trip

    assert "drifts through a wall" in trip(0.003, 0.1, box=box) and "drifts" in trip(
        0.0001, 0.1, box=box
    )
    assert not trip(0.003, 0.0, box=box) and not trip(0.003, -0.1, box=box), (
        "at rest, and on its way back"
    )
    assert not trip(-0.006, 0.1, box=box) and trip(-0.004, 0.1, box=box) == "braked", (
        "before the wall"
    )
    assert trip(0.0001, 0.04, box=box) == "braked", "slow enough to be stopped"
    assert trip(-0.001, 0.2, box=box) == "braked", "inside, and too fast for that"
    assert "drifts" in trip(0.003, 0.1, keep_out=(Box((0.0, -1.0, 0.0), (1.0, 1.0, 1.0)),))
    assert trip(-0.5, 0.1, joint=0.98, joint_margin=0.05, **ends) == "joint 1 runs into its end"
    assert trip(-0.5, 0.1, joint=0.97, joint_margin=0.05, **ends) == "braked"
    assert not trip(-0.5, -0.1, joint=0.98, joint_margin=0.05, **ends), "on its way back"


def test_a_keep_out_is_slid_along():
    g = gate(gain=6.0, keep_out=(Box((0.0, -1.0, 0.0), (1.0, 1.0, 1.0)),))
    passed = g(to(0.05, 0.05, 0.3), at(), 0.0)
    np.testing.assert_allclose(passed.reference.position, [-4 * 7.5e-7, 0.05, 0.3], atol=1e-9)
    inside = gate(gain=6.0, keep_out=(Box((-0.1, -1.0, 0.0), (1.0, 1.0, 1.0)),))
    np.testing.assert_allclose(
        inside(to(-0.05, 0.0, 0.3), at(), 0.0).reference.position, [-0.05, 0.0, 0.3], atol=1e-9
    )
    np.testing.assert_allclose(
        inside(to(0.05, 0.0, 0.3), at(), 0.0).reference.position, [0.0, 0.0, 0.3], atol=1e-9
    )


def test_joints_at_their_ends_and_joints_that_would_have_to_race():
    # the third joint must turn ten times as fast
    jacobian = np.vstack([np.diag([1.0, 1.0, 0.1]), np.zeros((3, 3))])
    ends = {"joint_low": (-1.0,) * 3, "joint_high": (1.0,) * 3, "joint_margin": 0.1}
    g = gate(gain=6.0, **ends)
    passed = g(to(0.02, 0.0, 0.3), at(jacobian=jacobian, joints=(0.9, 0.0, 0.0)), 0.0)
    assert passed.mask == only(JOINTS)
    np.testing.assert_allclose(passed.reference.position, [0.0, 0.0, 0.3], atol=1e-9)
    fast = gate(gain=6.0, joint_speed=0.6)
    # 0.12 m/s: 1.2 rad/s, twice too much
    passed = fast(to(0.0, 0.0, 0.32), at(jacobian=jacobian), 0.0)
    assert passed.mask == only(IK) and passed.amounts[IK] == pytest.approx(0.5, abs=0.02)
    assert passed.reference.position[2] == pytest.approx(0.31, abs=5e-4)


def test_a_jump_of_joints_is_refused():
    g = gate(kind="joints", joint_step=0.1, joint_speed=1.0)
    jump = g(Request(0.0, joints=np.array([0.5, 0.0, 0.3])), at(), 0.0)
    assert jump.reference is None and "jump" in jump.trip and jump.mask & only(IK)
    assert g(Request(0.0, joints=np.array([0.05, 0.0, 0.3])), at(), 0.0).reference is not None


def test_nothing_pushes_on_against_a_force():
    g = gate(gain=6.0, force=20.0)
    passed = g(to(0.05, 0.05, 0.3), at(wrench=(-30.0, 0, 0, 0, 0, 0)), 0.0)
    np.testing.assert_allclose(passed.reference.position, [0.0, 0.05, 0.3], atol=1e-9)
    assert passed.mask == only(FORCE) and not passed.trip
    assert "50 N" in g(to(0.05, 0.0, 0.3), at(wrench=(-50.0, 0, 0, 0, 0, 0)), 0.0).trip
    away = gate(gain=6.0, force=20.0)(to(-0.05, 0.0, 0.3), at(wrench=(-30.0, 0, 0, 0, 0, 0)), 0.0)
    assert away.mask == 0
    assert "no number" in g(to(0.05, 0.0, 0.3), at(wrench=(math.nan, 0, 0, 0, 0, 0)), 0.0).trip


def test_the_gripper_has_a_threshold_and_a_lock_out():
    g = gate(gain=6.0, gripper_threshold=0.5, gripper_lockout=0.6)
    asked = [(0.0, 0.4), (0.1, 0.9), (0.2, -0.9), (0.65, -0.9), (0.75, -0.9), (0.8, 0.0)]
    found = [(p := g(Request(grip, at().position), at(), t)).reference.gripper for t, grip in asked]
    assert found == [0.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    assert p.mask == 0 and g(Request(1.0, at().position), at(), 0.9).mask == only(GRIPPER)


def test_an_arm_that_cannot_hold_is_ramped_down_and_stays():
    g = gate(speed=0.5, acceleration=4.0, jerk=1e6)
    for _ in range(20):
        g(to(0.09, 0.0, 0.3), at(), 0.0)
    before = np.linalg.norm(g.velocity)
    speeds, places = [], []
    for _ in range(30):
        places.append(g.ramp(at(), 0.0).reference.position[0])
        speeds.append(np.linalg.norm(g.velocity))
    assert speeds[0] == pytest.approx(before - 0.04) and speeds[-1] == pytest.approx(0.0, abs=1e-9)
    assert all(a >= b for a, b in itertools.pairwise(speeds)) and places[-1] == places[-2]
    # by hand, or it sank: not back in one jump
    moved = g.ramp(at((0.5, 0.0, 0.3)), 0.0).reference.position
    np.testing.assert_allclose(moved, [0.5, 0.0, 0.3])
    turned = gate(turns=True)
    turned(Request(0.0, at().position, DOWN), at(), 0.0)
    other = multiply(from_vector(np.array([0.0, 0.0, 0.7])), DOWN)
    reference = turned.ramp(dataclasses.replace(at(), quaternion=other), 0.0).reference
    np.testing.assert_allclose(difference(reference.quaternion, other), np.zeros(3), atol=1e-9)


def requests(rng: np.random.Generator, measured: Measured, kind: int) -> np.ndarray:
    """Random, steady, alternating, towards a keep-out, and absurd goals."""
    corner = np.array([0.2, 0.0, 0.2])
    return (
        measured.position
        + (
            rng.standard_normal(3) * 0.05,
            rng.choice([-1.0, 1.0], 3),
            rng.choice([-0.05, 0.05], 3),
            corner - measured.position,
            rng.standard_normal(3) * 10.0 ** rng.integers(-6, 9),
        )[kind % 5]
    )


@pytest.mark.parametrize("gain", [6.0, 0.0])
@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1))
def test_whatever_is_asked_the_arm_keeps_its_limits(gain, seed):
    """Two hundred ticks each; `vla-rl bench robot` runs 10⁵. Judged by the arm's own log and not
    by the gate's figures."""
    clock, rng = Clock(), np.random.default_rng(seed)
    robot = point_robot(clock, gain=gain)
    limits = point_limits(robot)
    g = Gate(limits, robot.capabilities, False, DT)
    kind, velocities = int(rng.integers(5)), [np.zeros(6)]
    for tick in range(200):
        measured = robot.observe()
        if tick % 5 == 0:
            goal = requests(rng, measured, kind)
        passed = g(Request(float(rng.standard_normal()), goal), measured, clock())
        if passed.reference is not None:
            robot.command(passed.reference)
        else:
            robot.hold()
            g.reset()
        velocities.append(g.velocity if g.velocity.size else np.zeros(6))
        clock.now += DT
        robot.advance_to(clock.now)
    path = np.array([p for _, p in robot.log.path])
    times = np.array([t for t, _ in robot.log.path])
    braking = limits.speed**2 / (2 * limits.acceleration)
    assert (path >= np.array(limits.box.low) - braking).all() and (
        path <= np.array(limits.box.high) + braking
    ).all()
    low, high = np.array(limits.keep_out[0].low), np.array(limits.keep_out[0].high)
    assert (np.minimum(path - low, high - path).min(1) <= braking).all()
    speed = np.linalg.norm(np.diff(path, axis=0), axis=1) / np.diff(times)
    assert speed.max() <= limits.speed * 1.01
    assert max(np.linalg.norm(v) for v in velocities) <= limits.speed + 1e-9


@settings(max_examples=20)
@given(st.lists(st.integers(-3, 3), min_size=5, max_size=40))
def test_without_a_wall_acceleration_and_jerk_are_kept_at_every_seam(goals):
    """A change of mind at any tick (a takeover is one): along one axis, where speed never needs
    the last word."""
    g = gate(speed=0.4, acceleration=10.0, jerk=500.0, step=0.06, gain=6.0)
    speeds = [0.0, 0.0]
    for goal in goals:
        for _ in range(3):
            g(to(0.02 * goal, 0.0, 0.3), at(), 0.0)
            speeds.append(g.velocity[0])
    acceleration = np.diff(speeds) / DT
    assert np.abs(acceleration).max() <= 10.0 + 1e-6
    assert np.abs(np.diff(acceleration)).max() <= 500.0 * DT + 1e-6
    assert np.abs(speeds).max() <= 0.4


def test_rotation_vectors_and_quaternions():
    v = np.array([0.3, -0.2, 0.5])
    np.testing.assert_allclose(to_vector(from_vector(v)), v)
    np.testing.assert_allclose(
        to_vector(from_vector(np.array([0.0, 0.0, np.pi + 0.1]))), [0, 0, 0.1 - np.pi], atol=1e-9
    )
    np.testing.assert_allclose(difference(multiply(from_vector(v), DOWN), DOWN), v)


def test_limits_files(tmp_path):
    robot = point_robot(Clock())
    keys = limit_files.needed("cartesian", False, True)
    good = (LIMITS / "fake_point.yaml").read_text()
    own = limit_files.load(LIMITS / "fake_point.yaml", robot.limits, keys)
    assert own.speed == 0.4 and own.joint_high == robot.limits.joint_high, (
        "what it does not say is the robot's own"
    )
    file = tmp_path / "limits.yaml"
    for text, said in [
        (None, "no robot moves without one"),
        ("speed: [", "no YAML"),
        ("- 1", "holds no keys"),
        (good.replace("speed:", "speeed:"), "unknown keys speeed"),
        (good.replace("\nspeed: 0.4", ""), "lacks speed"),
        (good.replace("speed: 0.4", "speed: 0.6"), "speed 0.6, robot 0.5"),
        (good.replace("speed: 0.4", "speed: .nan"), "finite"),
        (good.replace("speed: 0.4", "speed: 0"), "above 0"),
        (good.replace("speed: 0.4", "speed: fast"), "finite numbers"),
        (good.replace("high: [0.3,", "high: [-0.4,"), "'low' below 'high'"),
        (good + "\njoint_high: [0.6, 0.5, 0.6]\n", "joint_high"),
        (good.replace("slow: 0.3", "slow: 1.5"), "slow is 1.5"),
        (
            good.replace("observation_age: 0.3", "observation_age: 1.0e+9"),
            "observation_age is 1e.09, .* at most 5",
        ),
        (
            good.replace("gripper_lockout: 0.6", "gripper_lockout: 1.0e+9"),
            "gripper_lockout is 1e.09, .* at most 60",
        ),
        (
            good.replace("joint_margin: 0.02", "joint_margin: 0.4"),
            "joint_margin 0.4 leaves nothing of a range of 0.6",
        ),
    ]:
        if text is not None:
            file.write_text(text)
        with pytest.raises(UserError, match=said):
            limit_files.load(
                file if text is not None else tmp_path / "none.yaml", robot.limits, keys
            )


def test_stages_are_in_the_order_of_the_contract():
    assert STAGES == (
        "finite",
        "age",
        "step",
        "rate",
        "workspace",
        "joints",
        "ik",
        "force",
        "gripper",
    )
    assert list(range(9)) == [FINITE, AGE, STEP, RATE, WORKSPACE, JOINTS, IK, FORCE, GRIPPER]


# ------------------------------------------------------------------------------------ absurd states
@pytest.mark.parametrize(
    "field, value",
    [
        ("position", [math.nan, 0.0, 0.3]),
        ("position", [1e9, 0.0, 0.3]),
        ("position", [0.0, 100.0, 0.3]),
        ("position", [0.0, 0.3]),
        ("position", []),
        ("quaternion", [0.0, 0.0, 0.0, 0.0]),
        ("quaternion", []),
        ("quaternion", [0.0, 1.0, math.inf, 0.0]),
        ("quaternion", [0.0, 2.0, 0.0, 0.0]),
        ("joints", [0.0, math.nan, 0.3]),
        ("joints", [1e7, 0.0, 0.3]),
        ("joints", [0.0, 0.3]),
    ],
)
def test_a_pose_that_no_arm_has_is_led_nowhere(field, value):
    """Of a robot that nothing stands in front of: `real.robots.guarded` lets none of these
    through."""
    ends = {"joint_low": (-1.0,) * 3, "joint_high": (1.0,) * 3, "joint_margin": 0.1}
    seen = dataclasses.replace(at(), **{field: np.array(value, dtype=float)})
    g = gate(turns=True, **ends)
    passed = g(Request(0.0, at().position, DOWN), seen, 0.0)
    assert passed.reference is None and passed.mask == only(FINITE) and "no arm has" in passed.trip
    assert g.ramp(seen, 0.0).reference is None
    assert g(Request(0.0, at().position, DOWN), at(), 0.0).reference is not None, (
        "what comes after it is led again"
    )
    if field == "joints":
        led = gate(kind="joints", joint_step=0.1, joint_speed=1.0, **ends)
        assert (
            led(Request(0.0, joints=np.zeros(3)), seen, 0.0).reference is None
            and led.ramp(seen, 0.0).reference is None
        )


# ------------------------------------------------------------------------------ one speed per joint
EACH = (0.6, 2.0, 0.3)


def test_each_joint_has_a_speed_of_its_own():
    """The hand moves by its joints one to one, the third ten times as fast. 6 /s from 1, 2 and 0.2
    cm away: 0.06, 0.12 and 0.12 rad/s; of the third's 0.03 that is four times too much, of one
    limit for all no more than twice."""
    jacobian = np.vstack([np.diag([1.0, 1.0, 0.1]), np.zeros((3, 3))])
    for joint_speed, share in (
        ((1.0, 1.0, 0.03), 0.25),
        ((0.03, 1.0, 1.0), 0.5),
        ((1.0, 0.12, 1.0), 1.0),
        (0.06, 0.5),
    ):
        passed = gate(gain=6.0, joint_speed=joint_speed)(
            to(0.01, 0.02, 0.302), at(jacobian=jacobian), 0.0
        )
        np.testing.assert_allclose(
            passed.reference.position, [0.01 * share, 0.02 * share, 0.3 + 0.002 * share], atol=2e-4
        )
        assert passed.mask == (only(IK) if share < 1.0 else 0), joint_speed


def test_joints_that_are_commanded_have_speeds_of_their_own():
    loose = {"joint_acceleration": 1e6, "joint_jerk": 1e9, "joint_step": 10.0}
    led = gate(kind="joints", joint_speed=EACH, **loose)
    passed = led(Request(0.0, joints=np.array([1.0, 1.0, 1.3])), at(), 0.0)
    # (0.95 of its limit, for a target)
    np.testing.assert_allclose(led.velocity, 0.95 * np.array(EACH))
    np.testing.assert_allclose(
        passed.reference.joints, [0.0, 0.0, 0.3] + 0.95 * np.array(EACH) * DT
    )


@pytest.mark.parametrize(
    "speeds, over", [((0.5, 1.9, 0.2), None), ((0.0, 0.0, 0.31), 2), ((0.61, 0.0, 0.0), 0)]
)
def test_the_joint_that_is_nearest_to_its_own_limit_is_looked_at(speeds, over):
    """By the foresight, of an arm that goes on as it does, and by the bench's judge (which
    allows a twentieth more)."""
    ahead = gate(gain=6.0, speed=9.0, joint_speed=EACH).ahead
    seen = dataclasses.replace(
        at(jacobian=np.vstack([np.eye(3), np.zeros((3, 3))])), joint_velocity=np.array(speeds)
    )
    ahead.see(seen)
    assert ahead.excess()[1] == pytest.approx(0.0 if over is None else 0.01, abs=1e-9)
    judge = Judge(Limits(joint_speed=EACH, joint_low=(-1.0,) * 3, joint_high=(1.0,) * 3))
    judge._joints(np.zeros(3), 1.06 / 1.02 * np.array(speeds))
    assert (
        judge.kinds["joint_speed"] == (0 if over is None else 1)
        and judge.fastest()["joint_speed"]["limit"] == EACH
    )


def test_limits_files_may_name_a_speed_for_each_joint():
    own = Limits(joint_speed=2.0, joint_low=(-1.0,) * 3, joint_high=(1.0,) * 3)

    def parsed(value, own=own):
        return limit_files.parse({"joint_speed": value}, own, (), "mine.yaml").joint_speed

    assert parsed(1.5) == 1.5 and parsed([0.6, 2.0, 0.3]) == EACH
    each = dataclasses.replace(own, joint_speed=(1.0, 2.0, 3.0))
    assert parsed([1.0, 2.0, 3.0], each) == (1.0, 2.0, 3.0) and parsed(1.0, each) == 1.0
    for value, robot, said in (
        (
            [1.0, 1.0],
            own,
            r"joint_speed has 2 numbers, and the robot has 3 joints: give one for each",
        ),
        ([], own, r"joint_speed has 0 numbers, and the robot has 3"),
        ([1.0], Limits(), r"the robot does not say how many joints it has: .* or one for all"),
        (
            [1.0, 2.5, 1.0],
            own,
            r"wider than the robot's own limits: joint_speed of joint 2 2\.5, robot 2",
        ),
        (2.0, each, r"joint_speed of joint 1 2, robot 1"),
        ([1.0, 0.0, 1.0], own, r"joint_speed\[1\] is 0, which must be above 0"),
        ([1.0, "x", 1.0], own, r"joint_speed\[1\] is \['x'\], and finite numbers are meant"),
        ([1.0, math.nan, 1.0], own, r"joint_speed\[1\] is \[nan\], and finite numbers"),
        ([1.0, [2.0], 1.0], own, r"joint_speed\[1\] is"),
        ({"a": 1.0}, own, r"joint_speed is \[\{'a'"),
    ):
        with pytest.raises(UserError, match=said):
            parsed(value, robot)
    assert remote._limits(json.loads(json.dumps(dataclasses.asdict(each)))) == each, (
        "as it comes over the socket"
    )
