"""scripts/follows.py: a policy that listens is told from one that goes by the layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sim.tabletop.tasks import TASKS, place_objects

PAIR = ("lift_red", "lift_green")


@pytest.fixture(scope="module")
def follows(script):
    return script("follows")


class Goer:
    """Goes to the thing that ``choose(instruction)`` names."""

    def __init__(self, choose):
        self.choose = choose

    def act(self, observation, *, deterministic):
        assert deterministic and observation.privileged is None
        actions = torch.zeros(len(observation), 8, 4)
        for i, text in enumerate(observation.instruction):
            hand = observation.proprio[i, :2]
            actions[i, :, :2] = (
                torch.from_numpy(
                    place_objects(TASKS[PAIR[0]], i, "held_out")[self.choose(text)][:2]
                )
                - hand
            )
        return SimpleNamespace(chunk=SimpleNamespace(actions=actions))


@pytest.mark.parametrize(
    ("choose", "kind"),
    [
        (lambda text: "green_cube" if "green" in text else "red_cube", "both"),
        (lambda text: "red_cube", "one"),
        (lambda text: "red_cube" if "green" in text else "green_cube", "neither"),
    ],
    ids=["listens", "layout", "contrary"],
)
def test_who_listens_is_told_apart(follows, choose, kind):
    found = follows.asked_for_both(Goer(choose), PAIR, 6, camera_size=16)
    assert found == {"both": 0.0, "one": 0.0, "neither": 0.0} | {kind: pytest.approx(1.0)}
