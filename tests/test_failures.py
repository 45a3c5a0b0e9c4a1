"""The tracker that tells how an episode failed, on sequences made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sim.failures import FALL, RIM_FALL, SET_DOWN_STEPS, FailureTracker
from vla_rl.specs import FAILURE_KINDS


@dataclass
class Scene:
    """Objects "cup", "bowl" and "can" as the test moves them; every one starts on a table 0.8 m
    high, untouched."""

    z: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("cup", "bowl", "can"), 0.8))
    touching: dict[str, int] = field(default_factory=dict)
    reached: str = ""
    moving: str = ""
    placed: tuple[str, ...] = ()
    contacts_asked_for: int = 0

    def height(self, name: str) -> float:
        return self.z[name]

    def near(self, name: str) -> bool:
        return name == self.reached

    def fingers(self, name: str) -> int:
        self.contacts_asked_for += 1
        return self.touching.get(name, 0)

    def settled(self, name: str) -> bool:
        return name != self.moving

    def at_goal(self, name: str) -> bool:
        return name in self.placed


OPEN, CLOSE = True, False


class Story:
    """Feeds a tracker: `to` is a control step after which "cup" (or another object) is ``rise``
    above the table."""

    def __init__(self, fall: float | None = FALL, targets: tuple[str, ...] = ("cup",)) -> None:
        self.scene = Scene()
        self.tracker = FailureTracker(self.scene, dict.fromkeys(targets, fall), self.scene.z)

    def to(
        self, rise: float, fingers: int, gripper: bool, name: str = "cup", steps: int = 1
    ) -> Story:
        self.scene.z[name], self.scene.touching[name] = 0.8 + rise, fingers
        for _ in range(steps):
            self.tracker.update(gripper)
        return self

    def reach(self, name: str = "cup") -> Story:
        self.scene.reached = name
        self.tracker.update(OPEN)
        self.scene.reached = ""
        return self

    def grasp(self, rise: float = 0.05, name: str = "cup") -> Story:
        self.reach(name).to(0.0, 2, CLOSE, name)
        return self.to(rise, 2, CLOSE, name)

    @property
    def verdict(self) -> str:
        kind = self.tracker.verdict()
        assert kind in FAILURE_KINDS
        return kind


def test_what_was_never_lifted():
    assert Story().to(0.0, 0, OPEN, steps=5).verdict == "never_reached"
    assert Story().reach().verdict == "missed_grasp"
    # squeezed, not lifted
    assert Story().reach().to(0.0, 2, CLOSE, steps=5).verdict == "missed_grasp"
    # less than a centimetre
    assert Story().reach().to(0.009, 2, CLOSE).to(0.0, 2, CLOSE).verdict == "missed_grasp"
    # tipped up by one finger
    assert Story().reach().to(0.05, 1, CLOSE).to(0.0, 0, CLOSE).verdict == "missed_grasp"


def test_another_object_in_the_hand():
    assert Story().grasp(name="bowl").verdict == "wrong_object"
    assert Story().reach().grasp(name="bowl").to(0.0, 0, OPEN, "bowl").verdict == "wrong_object"
    # mended, then too late
    assert Story().grasp(name="bowl").to(0.0, 0, OPEN, "bowl").grasp().verdict == "out_of_time"
    # pushed onto something, never held
    assert Story().to(0.05, 0, OPEN, "bowl").verdict == "never_reached"


def test_dropped():
    slip = Story().grasp(0.06).to(0.06, 0, CLOSE).to(0.0, 0, CLOSE, steps=3)
    assert slip.verdict == "dropped"
    # opening afterwards does not make it a placement
    assert slip.to(0.0, 0, OPEN, steps=20).verdict == "dropped"
    # slid out
    assert Story().grasp(0.02).to(0.002, 0, CLOSE).to(0.0, 0, CLOSE, steps=30).verdict == "dropped"
    # a finger leans against it
    assert Story().grasp(0.06).to(0.06, 0, CLOSE).to(0.0, 1, CLOSE).verdict == "dropped"
    high = FALL + 0.02
    # opened, but high up
    assert Story().grasp(high).to(high, 0, OPEN).to(0.0, 0, OPEN).verdict == "dropped"
    # as over a rim
    assert Story(RIM_FALL).grasp(high).to(high, 0, OPEN).to(0.0, 0, OPEN).verdict == "wrong_place"
    # nothing is to be put down
    assert Story(None).grasp(0.02).to(0.02, 0, OPEN).to(0.0, 0, OPEN).verdict == "dropped"


def test_put_down_elsewhere():
    put = Story().grasp(0.03).to(0.0, 2, CLOSE).to(0.0, 1, OPEN).to(0.0, 0, OPEN)
    assert put.verdict == "wrong_place"
    put.scene.moving = "cup"
    assert put.verdict == "out_of_time"
    put.scene.moving, put.scene.placed = "", ("cup",)
    assert put.verdict == "out_of_time"  # in place, but not yet let stand
    leaning = Story().grasp(0.03).to(0.0, 1, OPEN)
    assert leaning.verdict == "wrong_place"
    # set down, whereby the closed fingers lose it; then they open, soon or late
    assert Story().grasp(0.03).to(0.001, 0, CLOSE).to(0.0, 0, OPEN).verdict == "wrong_place"
    late = (
        Story()
        .grasp(0.03)
        .to(0.001, 0, CLOSE)
        .to(0.0, 0, CLOSE, steps=SET_DOWN_STEPS)
        .to(0.0, 0, OPEN)
    )
    assert late.verdict == "dropped"


def test_carried_until_time_ran_out():
    assert Story().grasp().verdict == "out_of_time"
    flicker = Story().grasp(0.05).to(0.05, 0, CLOSE).to(0.05, 2, CLOSE)
    assert flicker.verdict == "out_of_time"
    assert Story().grasp(0.05).to(0.05, 1, CLOSE).verdict == "out_of_time"  # hangs on one finger
    again = Story().grasp(0.06).to(0.06, 0, CLOSE).to(0.0, 0, CLOSE).to(0.03, 2, CLOSE)
    assert again.verdict == "out_of_time"  # dropped and picked up again


def test_height_counts_from_the_lowest_place():
    """An object that falls off a shelf lies lower than at its start, and is lifted from there."""
    fallen = Story().grasp(0.03).to(0.03, 0, CLOSE).to(-0.4, 0, OPEN)
    assert fallen.verdict == "dropped"
    assert fallen.to(-0.38, 2, CLOSE).verdict == "out_of_time"


def test_several_targets():
    both = ("cup", "bowl")
    assert Story(targets=both).reach("bowl").verdict == "missed_grasp"
    assert Story(targets=both).grasp(name="can").verdict == "wrong_object"
    first = Story(targets=both).grasp().to(0.0, 0, OPEN)
    assert first.verdict == "wrong_place"
    first.scene.placed = ("cup",)  # one is where it belongs: the other decides
    assert first.verdict == "never_reached"
    assert (
        first.grasp(name="bowl").to(0.05, 0, CLOSE, "bowl").to(0.0, 0, CLOSE, "bowl").verdict
        == "dropped"
    )
    then = Story(targets=both).grasp().to(0.0, 0, OPEN).grasp(name="bowl")
    assert then.verdict == "wrong_place"  # what went wrong, not what is still under way


def test_contacts_are_asked_for_only_where_they_matter():
    story = Story().reach().to(0.0, 2, CLOSE, steps=50)
    assert story.scene.contacts_asked_for == 0
    story.to(0.05, 2, CLOSE, steps=3)
    assert story.scene.contacts_asked_for == 3


@pytest.mark.parametrize(("kind", "text"), FAILURE_KINDS.items())
def test_every_kind_is_explained(kind, text):
    assert kind == kind.lower() and " " not in kind and len(text) > 20
