"""The wire schema: what is sent comes back, and nothing else is taken for a message."""

from __future__ import annotations

import dataclasses
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from real import messages as m
from vla_rl.errors import UserError

NUMBER = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=m.MAX_TEXT)


def value_of(kind: str, name: str, of: object) -> st.SearchStrategy:
    if (kind, name) in m._CHOICES:
        return st.sampled_from(m._CHOICES[kind, name])
    if (kind, name) in m._LENGTHS:
        unit = (kind, name) in m._UNIT
        number = st.floats(-1, 1) if unit else NUMBER
        return st.sampled_from(m._LENGTHS[kind, name]).flatmap(lambda n: st.tuples(*[number] * n))
    if (kind, name) in m._UNIT:
        return st.floats(-1, 1)
    if name == "source":
        return st.from_regex(r"[a-z0-9][a-z0-9_.:-]{0,31}", fullmatch=True)
    if of is float:
        return st.floats(1e-3, 1e6) if (kind, name) in m._POSITIVE else NUMBER
    if of is int:
        return st.integers(-1 if name in m._SIGNED else 0, 2**53 - 1)
    if of is bool:
        return st.booleans()
    if of is str:
        return TEXT
    if of == m.Vector:
        return st.lists(NUMBER, max_size=8).map(tuple)
    if of == m.Rows:
        return st.integers(1, 8).flatmap(
            lambda a: st.lists(st.tuples(*[NUMBER] * a), min_size=1, max_size=9).map(tuple)
        )
    if of == tuple[int, ...]:
        return st.lists(st.integers(0, 2**40), max_size=9).map(tuple)
    assert of == m.Texts
    return st.lists(TEXT.filter(lambda t: len(t) < 40), max_size=5).map(tuple)


@st.composite
def messages(draw) -> m.Message:
    kind = draw(st.sampled_from(sorted(m.KINDS)))
    fields = {name: draw(value_of(kind, name, of)) for name, of in m._FIELDS[kind]}
    fields["expiry"] = fields["stamp"] + abs(fields["expiry"])
    return m.KINDS[kind](**fields)


@given(messages())
def test_what_is_sent_comes_back(message):
    assert m.decode(m.encode(message)) == message


@given(st.binary(max_size=200))
def test_noise_is_one_clear_error(packet):
    with pytest.raises(m.MessageError):
        m.decode(packet)


@given(messages(), st.data())
def test_one_changed_byte_is_a_message_or_one_clear_error(message, data):
    packet = bytearray(m.encode(message))
    packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = m.decode(bytes(packet))
    except m.MessageError:
        return
    assert found.kind in m.KINDS


def writer() -> m.Writer:
    return m.Writer("policy", lambda: 10.0)


def chunk(**changes) -> m.Chunk:
    fields = {
        "epoch": 1,
        "start": 0,
        "hz": 20.0,
        "decision": 0,
        "policy_version": "v",
        "obs_stamp": 9.9,
        "prefix": 0,
        "delay": 0,
        "actions": ((0.0, 1.0),) * 3,
    }
    return writer().make(m.Chunk, 0.15, **fields | changes)


def packet(message: m.Message, **changes) -> bytes:
    """Bypasses the checks of `encode`."""
    values = dataclasses.asdict(message) | changes
    return msgpack.packb([m.SCHEMA, message.kind, *values.values()])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"seq": -1}, "no whole number"),
        ({"seq": True}, "no whole number"),
        ({"seq": 1.0}, "no whole number"),
        ({"source": "Bad Name"}, "source"),
        ({"stamp": math.nan}, "stamp is not a number"),
        ({"stamp": math.inf, "expiry": math.inf}, "stamp is inf"),
        ({"expiry": 9.0}, "expires before"),
        ({"hz": 0.0}, "hz is 0"),
        ({"hz": -1.0}, "hz is -1"),
        ({"epoch": "1"}, "no whole number"),
        ({"policy_version": "x" * 600}, "no text"),
        ({"policy_version": b"x"}, "limits"),
        ({"actions": ()}, "rows"),
        ({"actions": ((),)}, "rows of actions differ"),
        ({"actions": ((0.0,), (0.0, 1.0))}, "rows of actions differ"),
        ({"actions": ((0.0,),) * 257}, "limits"),
        ({"actions": ((0.0,) * 65,)}, "at most 64"),
        ({"actions": (("0",),)}, "no number"),
        ({"obs_stamp": {"a": 1}}, "limits"),
    ],
)
def test_every_wrong_field_is_named(changes, said):
    with pytest.raises(m.MessageError, match=said):
        m.decode(packet(chunk(), **changes))


def test_other_schema_kind_size_and_number_of_fields():
    good = msgpack.unpackb(m.encode(chunk()))
    for items, said in [
        ([2, *good[1:]], "schema 2"),
        ([1, "chunky", *good[2:]], "of kind 'chunky'"),
        (good[:-1], "fields"),
        ([*good, 1], "fields"),
        ({"a": 1}, "limits"),
        (7, "no array"),
    ]:
        with pytest.raises(m.MessageError, match=said):
            m.decode(msgpack.packb(items))
    with pytest.raises(m.MessageError, match="bytes"):
        m.decode(b"\0" * (m.MAX_BYTES + 1))
    assert issubclass(m.MessageError, UserError)


def test_the_gate_judges_numbers_that_are_commands_and_nobody_else():
    sent = chunk(actions=((math.nan, math.inf),))
    assert math.isnan(m.decode(m.encode(sent)).actions[0][0])
    still = {
        "lease": "t",
        "device_stamp": 0.0,
        "dead_man": False,
        "axes": (0.0,) * 6,
        "gripper": 0.0,
        "keys": (),
        "target": (),
    }
    for wrong in (
        {"axes": (math.nan,) * 6},
        {"axes": (2.0,) * 6},
        {"axes": (0.0,) * 5},
        {"gripper": math.nan},
    ):
        with pytest.raises(m.MessageError):
            m.encode(writer().make(m.Input, 0.15, **still | wrong))


def test_what_is_not_newer_is_dropped():
    seen = m.Sequence()
    make = writer()
    first, second = (make.make(m.Beat, tick=i) for i in range(2))
    assert [seen.newer(x) for x in (first, second, second, first)] == [True, True, False, False]
    assert seen.newer(dataclasses.replace(first, source="other"))
    assert (first.seq, second.seq, first.stamp, first.expiry) == (0, 1, 10.0, math.inf)
