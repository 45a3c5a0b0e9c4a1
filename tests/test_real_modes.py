"""The modes: every pair of mode and event, who may ask, what latches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.messages import MODE_EVENTS
from real.modes import HARMLESS, IN_EPISODE, MOVING, RANK, TABLE, By, Mode, Modes

# The contract once more, by hand: mode: {event: (to, who)}. h = the holder, a = anyone, s = the
# supervisor alone.
CONTRACT = {
    "IDLE": {"arm": "READY h", "stop": "STOPPED a", "estop": "FAULT a", "fault": "FAULT a"},
    "READY": {
        "disarm": "IDLE a",
        "start": "AUTO h",
        "takeover": "HUMAN h",
        "reset": "RESETTING h",
        "stop": "STOPPED a",
        "estop": "FAULT a",
        "fault": "FAULT a",
    },
    "AUTO": {
        "takeover": "HUMAN h",
        "pause": "PAUSED a",
        "end": "READY a",
        "redo": "READY a",
        "stop": "STOPPED a",
        "estop": "FAULT a",
        "fault": "FAULT a",
    },
    "HUMAN": {
        "hand_back": "AUTO h",
        "release": "PAUSED a",
        "pause": "PAUSED a",
        "end": "READY a",
        "redo": "READY a",
        "stop": "STOPPED a",
        "estop": "FAULT a",
        "fault": "FAULT a",
    },
    "PAUSED": {
        "start": "AUTO h",
        "hand_back": "AUTO h",
        "takeover": "HUMAN h",
        "end": "READY h",
        "redo": "READY h",
        "disarm": "IDLE a",
        "stop": "STOPPED a",
        "estop": "FAULT a",
        "fault": "FAULT a",
    },
    "RESETTING": {
        "reset_done": "READY s",
        "pause": "READY a",
        "takeover": "HUMAN h",
        "stop": "STOPPED a",
        "estop": "FAULT a",
        "fault": "FAULT a",
    },
    "STOPPED": {"ack": "IDLE h", "estop": "FAULT a", "fault": "FAULT a"},
    "FAULT": {"ack": "IDLE h"},
}
WHO = {"a": By.ANYONE, "h": By.HOLDER, "s": By.SUPERVISOR}
EVENTS = [e for e in MODE_EVENTS if e not in ("estop_clear", "full_speed")]


def at(mode: Mode) -> Modes:
    modes = Modes()
    modes.mode = mode
    return modes


@pytest.mark.parametrize("mode, event", list(itertools.product(Mode, EVENTS)))
def test_every_pair_of_mode_and_event(mode, event):
    for by in By:
        modes = at(mode)
        outcome = modes.ask(event, by)
        expected = CONTRACT[mode.value].get(event)
        to, who = expected.split() if expected else (mode.value, "a")
        if expected and by >= WHO[who]:
            assert outcome.accepted and outcome.changed and modes.mode.value == to
            assert modes.epoch == 1, "what was inferred before is void"
        else:
            assert modes.mode is mode and not outcome.changed and modes.epoch == 0
            assert outcome.accepted == ((mode, event) in HARMLESS)
            assert outcome.accepted or outcome.reason


def test_the_table_has_no_row_beside_the_contract():
    assert {(m.value, e) for m, e in TABLE} == {(m, e) for m, row in CONTRACT.items() for e in row}
    assert {e for _, e in TABLE} == set(EVENTS)


def test_only_the_holder_may_ask_for_more():
    for (mode, event), rule in TABLE.items():
        if rule.by is By.ANYONE:
            assert RANK[rule.to] < RANK[mode] or (mode, event) == (Mode.FAULT, "fault")
        assert (rule.ends, rule.begins) == (
            mode in IN_EPISODE and rule.to not in IN_EPISODE,
            mode not in IN_EPISODE and rule.to in IN_EPISODE,
        )


@given(
    st.lists(
        st.tuples(st.sampled_from(MODE_EVENTS), st.sampled_from([By.ANYONE, By.SUPERVISOR])),
        max_size=40,
    )
)
def test_without_a_holder_nothing_ever_allows_more(requests):
    """The supervisor alone goes from a reset to READY; nobody but a person leaves a latch."""
    for mode in Mode:
        modes = at(mode)
        for event, by in requests:
            if by is By.SUPERVISOR and event != "reset_done":
                by = By.ANYONE
            before = modes.mode
            modes.ask(event, by)
            assert RANK[modes.mode] <= RANK[before]
            if before in (Mode.FAULT, Mode.STOPPED):
                assert modes.mode in (before, Mode.FAULT)


def test_a_fault_is_left_by_a_person_once_its_cause_is_gone_and_then_slowly():
    modes = at(Mode.AUTO)
    modes.condition("reflex", True)
    assert modes.ask("fault", By.SUPERVISOR, "reflex").after is Mode.FAULT
    assert modes.faults == ("reflex",)
    assert "reflex" in modes.ask("ack", By.HOLDER).reason
    modes.condition("reflex", False)
    assert modes.mode is Mode.FAULT, "the cause has gone; the latch has not"
    assert modes.ask("ack", By.HOLDER).after is Mode.IDLE
    assert modes.slow and modes.faults == ()
    assert not modes.ask("full_speed", By.HOLDER).accepted
    assert modes.ask("arm", By.HOLDER).after is Mode.READY
    assert modes.slow, "it re-arms at low speed"
    assert not modes.ask("full_speed", By.ANYONE).accepted
    assert modes.ask("full_speed", By.HOLDER).accepted and not modes.slow


def test_an_emergency_stop_stays_pressed_until_it_is_cleared():
    modes = at(Mode.HUMAN)
    assert modes.ask("estop", By.ANYONE).after is Mode.FAULT
    assert "e-stop" in modes.ask("ack", By.HOLDER).reason
    assert not modes.ask("estop_clear", By.ANYONE).accepted
    assert modes.ask("estop_clear", By.HOLDER).accepted
    assert modes.mode is Mode.FAULT
    assert modes.ask("ack", By.HOLDER).after is Mode.IDLE
    assert modes.ask("arm", By.HOLDER).accepted


def test_pressed_again_during_a_fault_it_still_counts():
    modes = at(Mode.FAULT)
    modes.ask("estop", By.ANYONE)
    assert modes.estop and "e-stop" in modes.ask("ack", By.HOLDER).reason


def test_letting_go_holds_and_only_an_explicit_key_hands_back():
    modes = at(Mode.AUTO)
    modes.ask("takeover", By.HOLDER)
    assert modes.ask("release", By.ANYONE).after is Mode.PAUSED
    assert not modes.ask("hand_back", By.ANYONE).accepted
    assert modes.ask("hand_back", By.HOLDER).after is Mode.AUTO


def test_episodes_and_epochs_are_counted():
    modes = at(Mode.READY)
    assert modes.ask("start", By.HOLDER).rule.begins
    for event in ("pause", "start", "takeover", "hand_back"):
        modes.ask(event, By.HOLDER)
    assert (modes.episode, modes.epoch) == (1, 5)
    modes.invalidate()
    assert modes.epoch == 6
    assert modes.ask("redo", By.ANYONE).rule.discards
    modes.ask("takeover", By.HOLDER)  # a demonstration begins by hand
    assert modes.episode == 2 and modes.mode in MOVING
