"""``vla-rl bench soak``, short; and that what it looks for would be found."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from real_helpers import LIMITS

from benchmarks.robot import people, soak
from benchmarks.robot.gate import Judge
from real.journal import JournalWriter, read
from real.limits import Box
from vla_rl.cli import main

FAKE = LIMITS / "fake_point.yaml"


def short(tmp_path, kinds: list[str], monkeypatch, minutes: float = 0.3):
    """(the document, what was said) of a soak whose faults are ``kinds`` in turn."""
    told: list[str] = []
    monkeypatch.setattr(
        soak.Soak, "fill", lambda self: self.bag.extend(kinds[::-1]) if not self.bag else None
    )
    monkeypatch.setattr(soak, "say", told.append)
    return soak.measure("fake", FAKE, minutes, math.inf, 3.0, 0, tmp_path), told


@pytest.mark.slow
def test_the_command_strikes_looks_and_leaves_nothing_behind(tmp_path, capsys):
    out = tmp_path / "a.json"
    given = [
        "--minutes",
        "0.6",
        "--every",
        "3",
        "--seed",
        "1",
        "--keep",
        str(tmp_path / "kept"),
        "--json",
        str(out),
    ]
    assert main(["bench", "soak", *given]) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    struck = sum(row["count"] for row in document["faults"])
    assert document["problems"] == [] and struck == len(document["struck"]) >= 5
    assert document["virtual_minutes"] >= 0.6 and document["counts"]["episodes"] >= 5
    assert document["counts"]["lost"] == 0 < document["counts"]["records"]
    assert sum(document["limits"]["own"]["violations"].values()) == 0
    assert document["limits"]["own"]["nearest_m_or_rad"]["box"] is not None, "the log was looked at"
    assert list((tmp_path / "kept").glob("*/journal/*")) == []
    assert "until motion went on" in capsys.readouterr().out


def test_a_fault_is_timed_until_the_arm_is_followed_again(tmp_path, monkeypatch):
    kinds = ["reflex", "stop", "policy says NaN", "recorder killed", "policy killed"]
    document, _ = short(tmp_path, kinds, monkeypatch, minutes=0.4)
    found = {s["kind"]: s for s in document["struck"]}
    assert set(found) == set(kinds) and document["problems"] == []
    # a person acknowledges, which takes 0.2 s and more
    for latched in ("reflex", "stop", "policy says NaN"):
        assert found[latched]["stopped"] and found[latched]["moved_on_s"] > 0.2
    for ending in ("policy killed", "recorder killed"):
        assert found[ending]["stopped"] and found[ending]["moved_on_s"] is None
    assert document["counts"]["recovered"] >= 1 and document["sessions"] >= 2


@pytest.mark.slow
def test_a_record_that_is_lost_a_wall_that_is_passed_and_an_arm_that_stays_are_found(
    tmp_path, monkeypatch
):
    plain = JournalWriter.tick

    def loses(self, state):
        if state.step != 7:
            plain(self, state)

    with monkeypatch.context() as patched:
        patched.setattr(JournalWriter, "tick", loses)
        document, told = short(tmp_path / "a", ["gripper"], patched, 0.1)
    assert document["counts"]["lost"] > 0 and any(
        "states were told" in text for text in document["problems"]
    )
    assert any(text.startswith("problem: ") for text in told)
    (kept,) = {path.parent.parent.name for path in (tmp_path / "a").glob("*/journal/*.vrj")}
    assert kept == "0001" and read(next((tmp_path / "a" / kept / "journal").glob("*.vrj"))).ticks

    class Strict(Judge):
        def __init__(self, limits):
            super().__init__(
                dataclasses.replace(limits, box=Box((-0.3, -0.3, 0.05), (0.3, 0.3, 0.35)))
            )

    with monkeypatch.context() as patched:
        patched.setattr(soak, "Judge", Strict)
        document, _ = short(tmp_path / "b", ["gripper"], patched, 0.1)
    assert (
        "limits were exceeded" in document["problems"][0]
        and document["limits"]["own"]["violations"]["box"] > 0
    )

    with monkeypatch.context() as patched:
        patched.setattr(soak, "HANG_S", 3.0)
        patched.setattr(people.Person, "_look", lambda self, state, now: None)
        document, _ = short(tmp_path / "c", ["stop"], patched, 0.2)
    assert "nothing has moved for 3 s: STOPPED" in document["problems"][0]


@pytest.mark.parametrize("more", [["--minutes", "0"], ["--every", "-1"], ["--world", "moon"]])
def test_what_cannot_be_soaked_is_refused(more, capsys):
    assert main(["bench", "soak", *more]) == 2
    assert more[0] in capsys.readouterr().err
