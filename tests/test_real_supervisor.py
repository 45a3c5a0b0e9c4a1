"""The supervisor in virtual time: who moves the arm, what is void, what makes it stop. The arm's
own log is the truth."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_helpers import DT, Clock, Rig, point_robot, rig

from real.messages import Beat, Chunk, Event, Frame, Hello, Lease, Notice, Progress, Refused
from real.robots.faults import Fault
from real.supervisor.settings import SupervisorConfig, from_options
from real.supervisor.watch import Cameras, DeviceClock, Share
from vla_rl.errors import ConfigError

EAST = (0.03, 0.0, 0.0, -1.0)
FAST = (-0.048, 0.0, 0.0, -1.0)  # 0.25 m/s for an arm with a gain of 6
STEADY = (-0.0125, 0.0, 0.0, -1.0)  # and for one that follows its target


def targets_since(session: Rig, time: float) -> list[tuple[float, ...]]:
    """What the arm was told to do after ``time``: its own log."""
    return [vector for t, vector in session.robot.log.targets if t > time + 1e-9]


def test_a_chunk_is_executed_row_by_row_and_recorded_as_it_was_executed():
    session = rig().auto()
    rows = [(0.02, 0.0, 0.0, -1.0), (0.0, 0.02, 0.0, -1.0), (0.0, 0.0, 0.02, -1.0)]
    session.chunk(rows)
    states = session.run(0.2)
    done = [s for s in states if s.step_done]
    assert [s.step for s in done] == [0, 1, 2]
    assert [(s.decision, s.index, s.policy_version) for s in done] == [
        (0, i, "v0") for i in range(3)
    ]
    for state, row in zip(done, rows):
        assert state.policy == row and state.human == () and not state.is_human
        np.testing.assert_allclose(state.sent, row, atol=1e-12)
    session.robot.advance_to(session.clock() + DT)
    told = [s.reference for s in states if s.reference]
    assert told == [vector for _, vector in session.robot.log.targets]
    assert [s.holding for s in states[:15]] == [False] * 15 and all(s.holding for s in states[15:])


def test_a_start_tick_is_kept_and_late_rows_are_skipped_never_hurried():
    session = rig().auto()
    session.run(0.1)
    # rows were due at -7, -2, 3 and 8 ticks from now
    session.chunk([EAST] * 4, start=session.tick - 7)
    states = session.run(0.2)
    followed = [i for i, s in enumerate(states) if not s.holding]
    assert followed == list(range(2, 12)) and {s.index for s in states if not s.holding} == {2, 3}
    session.chunk([EAST], start=session.tick - 100)
    assert "late" in next(m.reason for _, m in reversed(session.said) if isinstance(m, Refused))


def test_a_newer_chunk_replaces_what_follows_its_start():
    session = rig().auto()
    session.chunk([EAST] * 6)
    session.run(0.1)
    session.chunk([(0.0, 0.02, 0.0, -1.0)] * 2, start=session.tick + 6)
    done = [s for s in session.run(0.4) if s.step_done]
    assert [(s.decision, s.index) for s in done] == [(0, 2), (1, 0), (1, 1)]


def test_a_takeover_in_mid_chunk_leaves_nothing_of_the_policy():
    session = rig().auto()
    session.chunk([EAST] * 20)
    session.run(0.3)
    session.dead_man, session.axes = True, (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    session.tick += (2 - session.tick) % 3  # the device speaks in the next tick
    pressed, epoch = session.clock(), session.supervisor.session.modes.epoch
    states = session.run(0.3)
    assert session.mode == "HUMAN" and all(s.mode == "HUMAN" and s.policy == () for s in states)
    assert next(s.tick for s in states if s.is_human) == states[0].tick, (
        "followed in the tick after it came"
    )
    north = np.array([v[:3] for v in targets_since(session, pressed)])
    assert len(north) == 29 and (np.diff(north[:, 1])[4:] > -1e-9).all()
    session.chunk([EAST], epoch=epoch)  # what the policy infers meanwhile
    assert session.supervisor.session.refused["chunk in HUMAN"] == 1
    done = [s for s in states if s.step_done]
    assert len(done) == 6 and all(s.is_human and s.human == (0.0, 0.05, 0.0, -1.0) for s in done)
    np.testing.assert_allclose(done[-1].sent[:3], (0.0, 0.05, 0.0), atol=1e-9)


def test_the_seam_of_a_takeover_keeps_acceleration_and_jerk():
    session = rig().auto()
    session.chunk([FAST] * 20)
    velocities = []

    def watch(seconds: float) -> None:
        for _ in range(round(seconds / DT)):
            session.run(DT)
            velocities.append(session.supervisor.session.gate.velocity[:3])

    watch(0.5)
    session.dead_man, session.axes = True, (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    watch(0.3)
    limits = session.supervisor.session.limits
    acceleration = np.diff(velocities, axis=0) / DT
    assert np.linalg.norm(acceleration, axis=1).max() <= limits.acceleration + 1e-6
    assert np.linalg.norm(np.diff(acceleration, axis=0), axis=1).max() <= limits.jerk * DT * 1.001


def test_letting_go_holds_and_only_a_key_hands_back():
    session = rig().auto()
    session.dead_man, session.axes = True, (1.0,) + (0.0,) * 5
    session.run(0.3)
    assert session.mode == "HUMAN"
    session.dead_man = False
    session.run(0.1)
    assert session.mode == "PAUSED" and session.supervisor.session.modes.episode == 1
    still = session.clock()
    session.chunk([EAST] * 10)
    session.run(1.0)
    assert not targets_since(session, still) and session.speed() < 1e-3
    session.event("hand_back")
    assert session.mode == "AUTO"
    session.chunk([EAST])
    assert any(s.policy for s in session.run(0.1))


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.parametrize("gain", [6.0, 0.0])
def test_a_dead_policy_makes_the_arm_hold_and_then_latches(how, gain):
    session = rig(gain=gain).auto()
    session.chunk([FAST if gain else STEADY] * 20)
    session.run(0.7)
    moving, start, since = session.speed(), session.robot.world.position.copy(), session.clock()
    assert moving == pytest.approx(0.25, abs=0.03)
    session.alive.discard("policy")
    if how == "killed":
        session.supervisor.reception.left("policy")
    session.run(0.3)
    limit = 0.02 if how == "killed" else 0.17
    last_target = max(t for t, _ in session.robot.log.targets)
    assert last_target - since <= limit
    path = [(t, p) for t, p in session.robot.log.path if t > since]
    rest = next(
        t for (t, p), (u, q) in itertools.pairwise(path) if np.linalg.norm(q - p) / (u - t) < 0.01
    )
    assert rest - since <= (0.15 if how == "killed" else 0.3)
    assert np.linalg.norm(path[-1][1] - start) <= (0.02 if how == "killed" else 0.055)
    assert session.mode == "AUTO", "a policy that comes back within a second goes on"
    session.run(1.0)
    assert session.mode == "FAULT" and session.supervisor.session.modes.faults == ("policy silent",)
    session.alive.add("policy")
    session.send("policy", Hello, role="policy", pid=2)
    session.run(0.5)
    assert session.mode == "FAULT", "and is not cleared by itself"


def test_a_policy_that_thinks_holds_and_at_last_pauses():
    session = rig(config={"thinking_s": 2.0}).auto()
    session.chunk([EAST])
    session.run(1.5)
    assert session.mode == "AUTO" and session.speed() < 1e-3
    session.run(1.0)
    assert session.mode == "PAUSED" and "has sent nothing" in session.notices("pause")[-1]


BAD = {
    "duplicate": lambda s, good: good,
    "reordered": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 2, decision=good.decision
    ),
    "expired": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 1, stamp=s.clock() - 1, expiry=s.clock() - 0.5
    ),
    "not finite": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 1, actions=((math.nan,) * 4,)
    ),
    "infinite": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 1, actions=(EAST, (math.inf,) * 4)
    ),
    "of a dead epoch": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 1, epoch=max(good.epoch - 1, 0)
    ),
    "of a coming epoch": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 1, epoch=good.epoch + 1
    ),
    "late": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 1, start=max(1, s.tick - 40), decision=10**6
    ),
    "blind": lambda s, good: dataclasses.replace(good, seq=good.seq + 1, obs_stamp=s.clock() - 0.4),
    "narrow": lambda s, good: dataclasses.replace(good, seq=good.seq + 1, actions=((0.01, 0.0),)),
    "of no time": lambda s, good: dataclasses.replace(
        good, seq=good.seq + 1, lasts=((1.0,), (0.0,), (1.0,))
    ),
}


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(BAD)), st.integers(0, 12)), min_size=1, max_size=12)
)
def test_of_late_duplicated_reordered_expired_and_nan_chunks_none_runs(bad):
    """Marked by an action that no good chunk has: it must never reach the arm, whatever is sent
    in between and when."""
    session = rig().auto()
    session.run(0.6)
    marked = (-0.05, 0.0, 0.0, -1.0)
    for kind, wait in bad:
        good = session.chunk([EAST] * 2)
        session.run(wait * DT)
        wrong = BAD[kind](session, good)
        if (
            kind != "duplicate"
            and all(math.isfinite(x) for row in wrong.actions for x in row)
            and kind != "narrow"
        ):
            wrong = dataclasses.replace(wrong, actions=(marked,) * 3)
        session.supervisor.receive("policy", wrong, session.clock())
        session.writers["policy"].seq = max(session.writers["policy"].seq, wrong.seq)
        session._collect()
        session.run(4 * DT)
    session.run(0.3)
    assert all(state.policy in ((), EAST) for state in session.states)
    assert all(math.isfinite(x) for _, vector in session.robot.log.targets for x in vector)
    runs = [(s.decision, s.index) for s in session.states if s.step_done]
    assert len(runs) == len(set(runs)), "and none twice"


def test_rows_may_last_less_than_a_control_step():
    """Of five ticks: 0.6 are three, 0.1 no less than one; in between none is left out."""
    session = rig().auto()
    session.chunk([EAST] * 4, lasts=((1.0,), (0.6,), (0.1,), (1.0,)))
    session.run(0.3)
    found = [s.index for s in session.states if s.decision == session.decision]
    assert found == [0] * 5 + [1] * 3 + [2] + [3] * 5
    assert [s.index for s in session.states if s.decision >= 0 and s.step_done] == [0, 1, 2, 3]
    for wrong in (((1.0,),), ((1.0,), (1.5,)), ((1.0,), (math.nan,))):
        session.chunk([EAST] * 2, lasts=wrong)
        said = [m.reason for _, m in session.said if isinstance(m, Refused)]
        assert "do not last 0 to 1 control steps" in said[-1]


def test_a_chunk_that_came_before_a_pause_never_resumes():
    session = rig().auto()
    session.chunk([EAST] * 10)
    session.run(0.1)
    session.event("pause", lease="")
    session.run(0.1)
    session.event("start")
    paused = session.clock()
    session.run(0.3)
    assert session.mode == "AUTO" and not targets_since(session, paused)


def test_a_reflex_in_auto_latches_until_a_person_acknowledges_and_arms_again():
    session = rig(Fault("reflex", at=0.5)).auto()
    session.chunk([EAST] * 20)
    session.run(0.7)
    assert session.mode == "FAULT" and session.supervisor.session.modes.faults == ("reflex",)
    still = session.clock()
    for _ in range(5):
        session.chunk([EAST] * 3)
        for event in ("start", "arm", "hand_back", "reset"):
            session.event(event)
        session.event("ack", name="policy", lease="")
        session.run(0.5)
    assert session.mode == "FAULT" and not targets_since(session, still)
    assert "clear" not in [name for _, name in session.robot.log.events], "no automatic clearing"
    session.event("ack")
    session.run(0.1)
    assert session.mode == "IDLE" and session.supervisor.session.modes.slow
    session.event("arm")
    session.event("start")
    session.chunk([FAST] * 16)
    session.run(0.8)
    assert 0.05 < session.speed() <= 0.3 * session.supervisor.session.limits.speed


def test_an_acknowledgement_is_refused_while_the_cause_holds():
    session = rig(Fault("power", at=0.3, seconds=2.0)).auto()
    session.run(0.5)
    assert session.mode == "FAULT"
    session.event("ack")
    session.run(0.3)
    assert session.mode == "FAULT" and any("no power" in text for text in session.notices("ack"))
    session.run(2.0)
    session.event("ack")
    session.run(0.1)
    assert session.mode == "IDLE"


def test_an_emergency_stop_from_anyone():
    session = rig().auto()
    session.chunk([FAST] * 20)
    session.run(0.5)
    session.send("other", Hello, role="viewer", pid=3)
    session.event("estop", name="other", lease="")
    session.run(0.2)
    assert session.mode == "FAULT" and session.speed() < 0.01
    assert "stop" in [name for _, name in session.robot.log.events]
    session.event("ack")
    assert session.mode == "FAULT"
    session.event("estop_clear")
    session.event("ack")
    session.run(0.1)
    assert session.mode == "IDLE"


@pytest.mark.parametrize("why", ["stopped", "silent"])
def test_an_arm_that_was_moved_in_a_fault_stays_where_it_is(why):
    """One that cannot hold by itself, as lerobot's: servos without power sink, or are moved by
    hand."""
    lost = (Fault("silent", at=0.4, seconds=0.5),) if why == "silent" else ()
    session = rig(*lost, gain=0.0)
    session.robot.capabilities = dataclasses.replace(session.robot.capabilities, holds=False)
    session.auto()
    session.chunk([STEADY] * 20)
    session.run(0.5)
    if why == "stopped":
        session.event("estop")
    session.run(1.0)
    assert session.mode == "FAULT"
    since, moved = session.clock(), np.array([0.2, 0.1, 0.4])
    session.robot.world.brake()  # (which a silent arm would not have: it tracked its last target)
    session.robot.world.position, session.robot.world.velocity = moved.copy(), np.zeros(3)
    session.run(0.2)
    assert not targets_since(session, since)
    if why == "stopped":
        session.event("estop_clear")
    session.event("ack")
    session.run(0.3)
    told = targets_since(session, since)
    assert session.mode == "IDLE" and told
    np.testing.assert_allclose(np.array(told)[:, :3], np.tile(moved, (len(told), 1)), atol=1e-6)


def test_one_holder_at_a_time():
    session = rig().auto()
    session.chunk([EAST] * 20)
    session.run(0.1)
    session.send("other", Hello, role="console", pid=3)
    assert not session.lease("other")
    session.event("takeover", name="other", lease="a wrong token")
    assert session.mode == "AUTO" and any(
        "holder of control" in m.reason for _, m in session.said if isinstance(m, Refused)
    )
    session.event("pause", name="other", lease="")
    assert session.mode == "PAUSED", "anybody may ask for less"
    session.event("start")
    session.chunk([EAST] * 20)
    session.run(0.1)
    assert session.lease("other", force=True) and session.mode == "PAUSED", (
        "forcing it pauses first"
    )
    assert "takes control" in session.notices("pause")[-1]
    session.event("stop", name="operator", lease="")
    assert session.mode == "STOPPED"


def test_a_lapsed_lease_pauses():
    session = rig().auto()
    session.chunk([(0.001, 0.0, 0.0, -1.0)] * 200)
    session.renews = False
    session.run(1.9)
    assert session.mode == "AUTO"
    session.run(0.2)
    assert session.mode == "PAUSED" and "lease" in session.notices("pause")[-1]


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_who_has_control_and_is_gone_is_not_waited_for(how):
    """Whatever is required: a console that hangs is silent after 0.15 s, and one that ended is
    known at once."""
    session = rig().auto()
    session.chunk([(0.001, 0.0, 0.0, -1.0)] * 200)
    session.run(0.1)
    session.alive.discard("operator")
    if how == "killed":
        session.supervisor.reception.left("operator")
        assert session.mode == "PAUSED" and session.supervisor.session.leases.holder == ""
        said = [m.value for _, m in session.supervisor.session.outbox if isinstance(m, Notice)]
        assert "connection of who had control" in said[-1]
        return
    session.run(0.13)
    assert session.mode == "AUTO"
    session.run(0.05)
    assert (
        session.mode == "PAUSED"
        and "operator, who has control, is silent" in session.notices("pause")[-1]
    )


def test_a_lease_that_lapsed_between_two_ticks_pauses_whoever_asks_next():
    session = rig()
    session.send("other", Hello, role="console", pid=3)
    session.auto()
    session.chunk([(0.001, 0.0, 0.0, -1.0)] * 200)
    session.renews = False
    until = session.supervisor.session.leases.until
    session.run(until - session.clock() - 1.5 * DT)
    assert session.mode == "AUTO"
    session.clock.now = until + 0.001
    assert (
        session.lease("other")
        and session.mode == "PAUSED"
        and "lapsed" in session.notices("pause")[-1]
    )


def test_a_silent_device_holds():
    session = rig().auto()
    session.dead_man, session.axes = True, (0.8,) + (0.0,) * 5
    session.run(0.5)
    assert session.mode == "HUMAN" and session.speed() > 0.2
    since, start = session.clock(), session.robot.world.position.copy()
    session.alive.discard("operator")
    session.run(0.4)
    assert session.mode == "PAUSED" and max(t for t, _ in session.robot.log.targets) - since <= 0.17
    assert np.linalg.norm(session.robot.world.position - start) <= 0.055


def test_required_roles_and_cameras():
    session = rig(config={"required": ("console",), "cameras": ("front",)})
    session.send("console", Hello, role="console", pid=3)
    session.alive |= {"console"}
    number = 0

    def watch(seconds: float, fresh: bool = True) -> None:
        nonlocal number
        for _ in range(round(seconds / 0.05)):
            number += fresh
            picture = {
                "camera": "front",
                "ring": "",
                "slot": 0,
                "number": number,
                "device_no": number,
            }
            size = {"height": 4, "width": 4, "channels": 3, "device_stamp": 0.0}
            session.send("console", Frame, math.inf, capture=session.clock(), **picture, **size)
            session.run(0.05)

    watch(0.1)
    session.auto()
    session.chunk([EAST] * 30)
    watch(0.5)
    assert session.mode == "AUTO"
    watch(0.5, fresh=False)
    assert session.mode == "PAUSED" and "camera front" in session.notices("pause")[-1]
    watch(0.2)
    session.event("start")
    session.alive.discard("console")
    session.supervisor.session.cameras.limit_s = 9.0
    session.run(0.3)
    assert session.mode == "PAUSED" and "the console is silent" in session.notices("pause")[-1]


@pytest.mark.parametrize(
    "fault, said",
    [
        (Fault("silent", 0.5, 9.0), "robot lost"),
        (Fault("clock", 0.5, 9.0, 2.0), "clock jumped"),
    ],
)
def test_a_lost_robot_and_a_clock_that_jumps_are_faults(fault, said):
    session = rig(fault).auto()
    session.chunk([EAST] * 30)
    session.run(0.7)
    assert session.mode == "FAULT" and session.supervisor.session.modes.faults == (said,)


def test_after_a_clock_has_jumped_there_and_back_the_session_goes_on():
    """As one that somebody sets, or a controller that starts again: found by `vla-rl bench
    soak`."""
    session = rig(Fault("clock", 0.5, 0.5, 2.0)).auto()
    session.run(1.2)
    assert session.notices("fault") == ["the robot's clock jumped by 2.00 s"]
    session.event("ack")
    session.run(0.1)
    for name in ("arm", "start"):
        session.event(name)
    session.chunk([EAST] * 30)
    session.run(0.5)
    assert session.mode == "AUTO" and session.speed() > 0.1


def test_what_is_counted_does_not_grow_with_the_numbers_in_it():
    session = rig().auto()
    for _ in range(3):
        session.chunk([EAST], epoch=session.supervisor.session.modes.epoch - 1 - session.tick)
        session.run(0.1)
    assert [text for text in session.supervisor.session.refused if "epoch" in text] == [
        "chunk: it was made for epoch #"
    ]


def test_a_clock_that_drifts_is_followed_and_a_late_state_pauses():
    session = rig(drift=0.001).auto()
    for _ in range(20):
        session.chunk([EAST, (-0.03, 0.0, 0.0, -1.0)] * 5)
        session.run(0.5)
    assert session.mode == "AUTO"
    stale = rig(observation_latency=0.05).auto()
    stale.run(0.2)
    stale.robot.defects = dataclasses.replace(stale.robot.defects, observation_latency=0.4)
    stale.run(0.3)
    assert stale.mode == "PAUSED" and "state is" in stale.notices("pause")[-1]


def test_steady_clipping_pauses():
    session = rig().auto()
    for _ in range(8):
        session.chunk([(0.0, 0.0, -0.05, -1.0)] * 10)  # into the floor of the box
        session.run(0.5)
    assert session.mode == "PAUSED" and "workspace" in session.notices("pause")[-1]
    assert session.robot.world.position[2] >= 0.05 - 1e-3


def test_a_push_stops_what_pushes_back():
    session = rig(Fault("force", 0.5, 1.0, 80.0)).auto()
    session.chunk([FAST] * 20)
    session.run(0.7)
    assert session.mode == "PAUSED" and "80 N" in session.notices("pause")[-1]


def test_an_absolute_leader_never_makes_the_follower_jump():
    session = rig(gain=0.0, joints=True)
    assert session.lease()
    session.event("arm")
    session.event("takeover")
    start = session.robot.world.position.copy()
    session.dead_man, session.target = True, (0.4, 0.4, 0.1)  # far from where the arm is
    session.run(0.5)
    assert session.mode == "HUMAN"
    np.testing.assert_allclose(session.robot.world.position, start, atol=1e-6)
    session.target = (0.42, 0.4, 0.1)  # the leader moves by 2 cm, and so does the arm
    session.run(0.6)
    np.testing.assert_allclose(
        session.robot.world.position, np.add(start, [0.02, 0.0, 0.0]), atol=2e-3
    )


def test_resets():
    by_itself = rig()
    assert by_itself.lease()
    by_itself.event("arm")
    by_itself.robot.world.position += 0.1
    by_itself.event("reset")
    by_itself.run(0.05)
    assert by_itself.mode == "READY"
    np.testing.assert_allclose(by_itself.robot.world.position, (0.0, 0.0, 0.3))
    scripted = rig(config={"home": (0.1, 0.1, 0.2)})
    assert scripted.lease()
    scripted.event("arm")
    scripted.event("reset")
    scripted.run(0.2)
    assert scripted.mode == "RESETTING"
    scripted.run(2.0)
    assert scripted.mode == "READY"
    np.testing.assert_allclose(scripted.robot.world.position, (0.1, 0.1, 0.2), atol=0.011)


def test_who_has_not_said_hello_and_who_speaks_for_another():
    session = rig().auto()
    session.send("other", Beat, tick=0)
    assert "hello" in next(m.reason for to, m in session.said if to == "other")
    stranger = session.writers["operator"].make(Event, name="stop", value="", at=0.0, lease="")
    session.supervisor.receive("policy", stranger, session.clock())
    assert session.mode == "AUTO"
    session.send("other", Hello, role="viewer", pid=3)
    session.send(
        "other",
        Chunk,
        epoch=1,
        start=0,
        hz=20.0,
        decision=0,
        policy_version="",
        obs_stamp=session.clock(),
        prefix=0,
        delay=0,
        actions=(EAST,),
    )
    assert any("viewer may not" in m.reason for _, m in session.said if isinstance(m, Refused))
    session.send("other", Lease, ask="renew", token="x", force=False)
    assert session.supervisor.session.leases.holder == "operator"


def test_what_a_reward_model_says_reaches_all_while_it_is_fresh():
    session = rig().auto()
    session.send("other", Hello, role="viewer", pid=3)
    session.send("other", Progress, model="pairwise", episode=1, step=4, value=0.25)
    # expired as it is sent
    session.send("other", Progress, -0.01, model="pairwise", episode=1, step=5, value=0.5)
    assert [(to, m.step, m.value) for to, m in session.said if isinstance(m, Progress)] == [
        (None, 4, 0.25)
    ]


def test_watches_by_hand():
    clock = DeviceClock()
    assert clock.age(5.0, 100.0) == 0.0  # an offset of -95 is taken for granted at first
    assert clock.age(5.1, 100.2) == pytest.approx(0.1, abs=1e-3)
    assert clock.age(5.3, 100.3) == pytest.approx(0.0, abs=1e-3)
    assert clock.age(7.3, 100.4) < 0 and clock.age(7.4, 100.6) == pytest.approx(0.1, abs=1e-3), (
        "measured anew"
    )
    back = DeviceClock()
    assert back.age(5.0, 100.0) == 0.0 and back.age(4.6, 100.1) == pytest.approx(-0.4), "it jumped"
    assert back.age(4.7, 100.2) == pytest.approx(0.0, abs=1e-3), "and is measured anew"
    assert back.age(4.7, 100.5) == pytest.approx(0.3, abs=1e-3) and back.age(4.69, 100.6) > 0.3, (
        "late is no jump"
    )
    # whose first picture was under way for 0.09 s, the others for 0.01; in the end for a second
    late = DeviceClock()
    for i in range(30 * 620):
        age = late.age(
            500.0 + i / 30,
            i / 30 + (0.09 if i == 0 else 1.01 if i in (1800, 9000, 18000) else 0.01),
        )
        if i in (1800, 9000, 18000):
            assert age == pytest.approx(1.0, abs=0.01), i
    share = Share(4)
    assert [share.add(x) for x in (True, False, True, False, True, True)] == [False] * 5 + [True]
    assert [share.add(x) for x in (4, 0, 4, 1, 0)] == [0, 0, 0, 5, 0]
    share = Share(4)
    assert [share.add(x) for x in (2, 2, 2, 0)] == [0, 0, 0, 2], (
        "what was bad in them, though nothing is now"
    )
    cameras = Cameras(("front",), 0.3)
    frame = Frame(0, "cam", 0.0, 1.0, "front", "", 0, 7, 7, 10.0, 0.0, 4, 4, 3)
    assert "no picture" in cameras.stale(10.0) and cameras.see(frame, 10.0) == ""
    assert (
        "twice" in cameras.see(frame, 10.1)
        and cameras.stale(10.2) == ""
        and "0.40 s ago" in cameras.stale(10.4)
    )
    assert cameras.see(
        dataclasses.replace(frame, device_no=10, capture=10.4), 10.4
    ) == "" and cameras.gaps == {"front": 2}
    assert "after" in cameras.see(dataclasses.replace(frame, device_no=3, capture=10.5), 10.5)
    cameras.left("somebody else")
    assert cameras.stale(10.5) == ""
    cameras.left(frame.source)
    assert "camera front is gone" in cameras.stale(10.5), "its process ended: at once"
    assert (
        cameras.see(dataclasses.replace(frame, device_no=11, capture=10.6), 10.6)
        == ""
        == cameras.stale(10.6)
    ), "again"
    assert "future" in cameras.see(dataclasses.replace(frame, device_no=11, capture=12.0), 10.5)


def test_settings_that_cannot_be():
    for wrong in (
        {"hz": 5},
        {"silence_s": 0.5},
        {"fault_s": 0.0},
        {"home_tolerance": math.inf},
        {"home_tolerance": 0.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SupervisorConfig(**wrong)
    ages = ("frame_age_s", "state_age_s", "silence_s")
    for name in (*ages, "fault_s", "thinking_s", "lease_s", "sustained_s", "home_timeout_s"):
        for value in (1e9, math.inf, math.nan, 0.0, -1.0):
            with pytest.raises(ConfigError, match=f"supervisor.{name}=.* at most"):
                SupervisorConfig(**{name: value})


@pytest.mark.parametrize("value", [1e30, 1e308, -1e5, 3.0, math.nan, math.inf])
def test_an_action_that_means_nothing_is_a_fault_at_once(value):
    """More than ten ranges (0.1 m) beyond its bounds: none of its row, nor of those before it,
    runs."""
    session = rig().auto()
    before = session.robot.world.position.copy()
    session.chunk([(0.05, 0.0, 0.0, -1.0), (0.0, value, 0.0, -1.0)])
    assert session.mode == "FAULT" and session.supervisor.session.modes.faults == ("policy error",)
    said = session.notices("fault")[-1]
    assert "step 1 of its actions has dy" in said and "-0.05 to 0.05 are meant" in said
    session.run(0.2)
    assert np.abs(session.robot.world.position - before).max() < 1e-6
    assert session.supervisor.session.refused["absurd actions"] == 1


@pytest.mark.parametrize("value", [0.06, -1.0, 1.04])
def test_an_action_a_little_beyond_its_bounds_is_clipped(value):
    session = rig().auto()
    session.chunk([(0.0, value, 0.0, -1.0)] * 4)
    session.run(0.1)
    assert session.mode == "AUTO"
    with pytest.raises(ConfigError, match="whole multiple"):
        Rig(point_robot(clock := Clock()), clock, hz=70.0)


@pytest.mark.parametrize(
    "joints, home, said",
    [
        (False, (0.1, 0.1), "needs x y z in metres"),
        (False, (0.1,) * 4, "needs x y z"),
        (False, (0.1,) * 8, "needs x y z"),
        (False, (0.1, 0.1, 0.2, 2.0, 0.0, 0.0, 0.0), "w x y z of a quaternion"),
        (False, (0.1, 0.1, 0.2, 0.0, 0.0, 0.0, 0.0), "w x y z of a quaternion"),
        (False, (0.1, 0.1, math.nan), "finite numbers"),
        (False, (0.1, "x", 0.2), "finite numbers"),
        (True, (0.1, 0.1), "needs the 3 joints"),
        (True, (0.1,) * 7, "needs the 3 joints"),
    ],
)
def test_a_home_that_the_robot_cannot_be_sent_to_is_refused(joints, home, said):
    with pytest.raises(ConfigError, match=rf"supervisor\.home=.*{said}"):
        rig(joints=joints, config={"home": home})


def test_a_home_is_a_place_a_pose_or_joints():
    for joints, home in (
        (False, (0.1, 0.1, 0.2)),
        (False, (0.1, 0.1, 0.2, 0.0, 1.0, 0.0, 0.0)),
        (True, (0.1, 0.1, 0.2)),
    ):
        rig(joints=joints, config={"home": home})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "silence_s",
            "inf",
            "robot.supervisor.silence_s='inf' is not what it takes: give a number",
        ),
        ("silence_s", True, "give a number"),
        ("silence_s", None, "give a number"),
        ("silence_s", math.nan, "silence_s=nan is out of range: it must be above 0"),
        ("hz", [100], "give a number"),
        ("required", "guard", "required='guard' is not what it takes: give a list of texts"),
        ("cameras", [1], "give a list of texts"),
        ("home", ["x"], "give a list of numbers"),
        ("safe_low", 0.1, "give a list of numbers"),
        ("silense_s", 0.1, "no key robot.supervisor.silense_s. Did you mean silence_s"),
    ],
)
def test_options_of_another_type_are_one_clear_error(key, value, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_options({key: value})
