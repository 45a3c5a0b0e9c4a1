"""Limits beside the fields that they are of: what they allow, what an error says, and where."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import pytest

from vla_rl.bounds import Bound, Bounded, bound, bounds_of, several, told_by
from vla_rl.config.schema import checked
from vla_rl.errors import ConfigError


def _of_two(text: str, key: str) -> None:
    if text not in ("a", "b"):
        raise ConfigError(f"{key}={text} is neither a nor b")


@dataclass
class Inner(Bounded, place="usual.inner"):
    share: float = bound(0.5, ge=0, le=1)
    low: int = 1
    high: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(
                f"usual.inner.low={self.low} must be at most usual.inner.high={self.high}"
            )


@dataclass
class Outer(Bounded, place="usual"):
    count: int = bound(3, ge=1)
    limit: float | None = bound(None, gt=0, hint="metres")
    kind: str = bound("one", choices=("one", "two", ""))
    widths: list[int] = several([8], ge=1, least=1)
    pair: list[float] = several([0.9, 0.99], ge=0, lt=1, least=2, most=2)
    names: list[str] = several([], choices=("x", "y"), once=True)
    scales: dict[str, float] = bound({}, gt=0, le=2)
    gamma: float = bound(-1.0, ge=0, le=1, also=[-1.0])
    word: str = told_by("a", _of_two)
    inner: Inner = field(default_factory=lambda: Inner(share=0.25))


@dataclass
class Other(Outer):
    count: int = 7  # another default


VALUES = [
    ({"count": 0}, "count=0 is out of range: it must be 1 or more"),
    ({"count": math.nan}, "count=nan is out of range: it must be 1 or more"),
    ({"limit": 0.0}, "limit=0.0 is out of range: it must be above 0, or null (metres)"),
    ({"kind": "three"}, "kind='three' is not a choice: it must be one of one, two, \"\""),
    ({"widths": []}, "widths=[] is empty: it must have 1 or more entries"),
    ({"widths": [4, 0]}, "widths=[4, 0] has 0, which is out of range: each must be 1 or more"),
    ({"pair": [0.5]}, "pair=[0.5] has one entry: it must have 2 entries"),
    ({"pair": [0.5, 1]}, "pair=[0.5, 1] has 1, which is out of range: each must be 0 or more and"),
    ({"names": ["z"]}, "names=['z'] has 'z', which is not a choice: each must be one of x, y"),
    ({"names": ["x", "x"]}, "names=['x', 'x'] has 'x' more than once: name each once"),
    ({"scales": {"z": 3}}, "scales.z=3 is out of range: it must be above 0 and at most 2"),
    ({"gamma": -0.5}, "gamma=-0.5 is out of range: it must be -1.0, or 0 to 1"),
    ({"word": "c"}, "word=c is neither a nor b"),
    ({"inner": {"share": 2}}, "inner.share=2 is out of range: it must be 0 to 1"),
    ({"inner": {"low": 5}}, "inner.low=5 must be at most here.inner.high=2"),
]


@pytest.mark.parametrize("schema", [Outer, Other])
@pytest.mark.parametrize(("values", "said"), VALUES)
def test_an_error_names_the_key_where_it_was_typed(schema, values, said):
    with pytest.raises(ConfigError) as error:
        checked(schema, values, "here")
    assert str(error.value).startswith(f"here.{said}")


@pytest.mark.parametrize(("values", "said"), [row for row in VALUES if "inner" not in row[0]])
def test_an_instance_made_in_python_is_held_to_the_same(values, said):
    with pytest.raises(ConfigError) as error:
        Other(**values)
    assert str(error.value).startswith(f"usual.{said}")


@pytest.mark.parametrize(
    "values",
    [
        {"count": 1},
        {"limit": None, "gamma": -1.0},
        {"limit": 1e-9, "gamma": 1},
        {"kind": "", "widths": [1], "pair": [0, 0.5]},
        {"names": ["y", "x"], "scales": {"a": 2}, "word": "b"},
    ],
)
def test_what_is_within_the_limits_is_kept(values):
    found = checked(Outer, values, "here")
    assert {name: getattr(found, name) for name in values} == values
    assert Outer(**values) == found and found.inner.share == 0.25


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": "many"}, r"here\.count = 'many'.*Integer"),
        ({"kind": ["one"]}, r"here\.kind = \['one'\].*one text"),
        ({"widths": 3}, r"here\.widths = 3"),
        ({"inner": 3}, r"here\.inner is 3, it must be a mapping"),
        ({"count": None}, r"here\.count = None"),
    ],
)
def test_what_is_of_another_type_is_told_so(values, said):
    with pytest.raises(ConfigError, match=said):
        checked(Outer, values, "here")


def test_what_only_becomes_a_number_is_held_to_its_limits_too():
    """A quoted number, which OmegaConf reads as one."""
    with pytest.raises(ConfigError, match=r"^here\.count=0 is out of range"):
        checked(Outer, {"count": "0"}, "here")
    assert checked(Outer, {"count": "2"}, "here").count == 2


def test_every_instance_has_a_list_of_its_own():
    Outer().widths.append(0)
    assert Outer().widths == [8]


def test_limits_in_words():
    words = {name: limits.words for name, limits in bounds_of(Outer).items()}
    assert words == {
        "count": "1 or more",
        "limit": "above 0, or null",
        "kind": 'one, two, ""',
        "widths": "1 or more entries, each 1 or more",
        "pair": "2 entries, each 0 or more and below 1",
        "names": "none twice, each one of x, y",
        "scales": "each above 0 and at most 2",
        "gamma": "-1.0, or 0 to 1",
        "word": "",
    }
    assert Bound(ge=0, lt=2**63).words == "0 or more and below 2**63"
    assert Bound(many=True, most=3).words == "at most 3 entries"
    assert Bound(many=True, least=1, most=3).words == "1 to 3 entries"


def test_a_default_of_a_subclass_keeps_the_limits_of_its_base():
    assert Other().count == 7 and bounds_of(Other)["count"] == bounds_of(Outer)["count"]

    @dataclass
    class Wider(Other):
        count: int = bound(0, ge=0)

    assert Wider().count == 0 and Other(count=1).count == 1
    with pytest.raises(ConfigError, match="count=-1"):
        Wider(count=-1)


def test_a_users_own_check_is_told_with_its_place():
    @dataclass
    class Own:
        scale: float = 1.0

        def __post_init__(self) -> None:
            if self.scale < 0:
                raise ConfigError(f"scale {self.scale} is negative")

    with pytest.raises(ConfigError, match=r"^reward: scale -1\.0 is negative"):
        checked(Own, {"scale": -1}, "reward")


def test_frozen_dataclasses_are_held_to_theirs():
    @dataclass(frozen=True)
    class Still(Bounded):
        size: int = bound(1, ge=1)

    assert dataclasses.replace(Still(), size=2).size == 2
    with pytest.raises(ConfigError, match=r"^size=0 is out of range"):
        dataclasses.replace(Still(), size=0)
