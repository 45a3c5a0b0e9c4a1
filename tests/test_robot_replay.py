"""A recorded episode done again: the same decisions, the same places, one chunk after the other
and only once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from session_policy import Mover
from test_robot_session import overrides, unhurried

from real.journal import journals, read
from real.robots.world import PointWorld
from vla_rl.checkpoint import save_checkpoint
from vla_rl.cli import main
from vla_rl.errors import UserError
from vla_rl.robot.replay import Recorded, Step, _lengths, done, recorded, strayed
from vla_rl.types import Observation

SPEC = PointWorld().embodiment


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    save_checkpoint(folder / "mover", Mover(SPEC))
    given = overrides(folder, folder / "mover", "robot.horizon=20")
    assert main(["robot", "run", "--lockstep", "--episodes", "2", *given]) == 0
    return folder / "s"


def compared(before, folder):
    """(the steps of an episode, the ticks of its replay that did them again, how far apart)"""
    steps = recorded(before)
    (again,) = [read(path, pictures=False) for path in journals(folder)]
    ticks = done(again, _lengths(steps))
    return steps, ticks, strayed(steps, ticks)


@pytest.mark.parametrize("way", ["--lockstep", pytest.param("--headless", marks=pytest.mark.slow)])
def test_an_episode_is_done_again_and_compared(session, tmp_path, capsys, way):
    given = [
        "robot=fake",
        "robot.supervisor.silence_s=0.3",
        "robot.supervisor.frame_age_s=2.0",
        f"output_dir={tmp_path}",
    ]
    asked = ["robot", "replay", str(session), way, "--episode", "1", *given]
    i, said = unhurried(capsys, lambda i: [*asked, f"name=again{i}"])
    steps, after, found = compared(read(journals(session)[0]), tmp_path / f"again{i}")
    assert f"replaying episode 1 of {session}: {len(steps)} control steps" in said
    assert after[0]["policy_version"].startswith("recorded@")
    assert found.unit == "m" and str(found) in said
    if way == "--lockstep":
        assert found.distance.max() < 1e-6 and "paused:" not in said
        assert len(after) == len(steps) and all(step.lasts == 1.0 for step in steps[:-1])
        np.testing.assert_allclose(
            [step.tick["sent"] for step in steps],
            [after[i]["sent"] for i in range(len(steps))],
            atol=1e-6,
        )
    elif "paused:" not in said:  # (where it was, the rest is stillness)
        assert found.distance.max() < 0.03


def test_a_corrected_episode_is_done_again_with_the_steps_that_takeovers_cut_short(
    tmp_path, capsys
):
    """After a takeover in the middle of a control step the person's follow as soon as they did:
    until the person hands back, nothing is apart. (Then the arm brakes for a tick or two, which no
    action asks for.)"""
    save_checkpoint(tmp_path / "mover", Mover(SPEC, (0.03, 0.02, 0.0, -1.0)))
    helps = [
        "operator.patience_s=0.37",
        "operator.help_gain=2",
        "operator.longest_s=20",
        "operator.reaction_median_s=0.05",
    ]
    given = overrides(tmp_path, tmp_path / "mover", "robot.horizon=200", *helps)
    assert main(["robot", "run", "--lockstep", "--episodes", "2", *given]) == 0
    for number, share in (("1", 0.6), ("2", 0.8)):
        episode = read(journals(tmp_path / "s")[int(number) - 1], pictures=False)
        again = [f"output_dir={tmp_path}", f"name=r{number}", "robot=fake", *given[4:6]]
        asked = ["robot", "replay", str(tmp_path / "s"), "--lockstep", "--episode", number]
        assert main([*asked, *again]) == 0
        steps, _, found = compared(episode, tmp_path / f"r{number}")
        cut = next(i for i, step in enumerate(steps) if step.lasts < 1.0)
        assert steps[cut].lasts == share and steps[cut + 1].follows
        assert steps[cut].action == pytest.approx([0.03, 0.02, 0.0, -1.0])
        person = [i for i, step in enumerate(steps) if step.tick["is_human"]]
        assert person == list(range(cut + 1, cut + 1 + len(person))) and len(person) > 10
        assert found.distance[: person[-1] + 1].max() < 1e-6
        assert found.distance.max() < 2e-3
    capsys.readouterr()


def tick(number, step, asked=None, sent=None, **fields):
    """One of five of a control step; ``sent`` None: the gate refused, and the arm braked."""
    row = tuple(asked or ())
    return {
        "tick": number,
        "step": step,
        "step_done": False,
        "policy": row,
        "human": (),
        "is_human": False,
        "sent": tuple(sent or ()),
        "reference": tuple(sent or ()),
        "slow": False,
        "proprio": (0.0, 0.0, 0.3, 1.0),
        "pose": (0.1 * number,) * 7,
        **fields,
    }


ASKED, LESS = (0.03, 0.0, 0.0, -1.0), (0.01, 0.0, 0.0, -1.0)


def test_what_was_asked_is_done_again_for_as_long_as_it_lasted():
    whole = [tick(n, 0, ASKED, LESS, step_done=n == 4) for n in range(5)]  # the gate gave less
    braked = [tick(5 + n, 1, ASKED, None if n == 4 else LESS, step_done=n == 4) for n in range(5)]
    thought = [tick(10, -1, reference=(1.0,) * 8)]  # with the last target
    slow = [tick(11 + n, 2, ASKED, LESS, slow=True) for n in range(3)]  # cut short
    person = [
        tick(14 + n, 3, sent=LESS, human=ASKED, is_human=True, step_done=n == 4) for n in range(5)
    ]
    rest = [tick(19 + n, -1) for n in range(4)]  # handed back: it brakes
    refused = [tick(23 + n, 4, ASKED, step_done=n == 4) for n in range(5)]
    last = [tick(28, 5, ASKED, ASKED)]
    rows = [*whole, *braked, *thought, *slow, *person, *rest, *refused, *last, tick(29, -1)]
    steps = recorded(SimpleNamespace(ticks=rows, embodiment=SPEC))
    still = [0.0, 0.0, 0.0, -1.0]
    assert [step.action for step in steps] == [
        [*ASKED], [*ASKED], [*LESS], [*ASKED], still, still, [*ASKED]
    ]  # fmt: skip
    assert [step.lasts for step in steps] == [1.0, 1.0, 0.6, 1.0, 0.6, 1.0, 0.2]
    assert _lengths(steps) == [2, 3, 2]
    assert recorded(SimpleNamespace(ticks=refused, embodiment=SPEC)) == []


def test_places_are_compared_step_by_step_whatever_was_left_out():
    """The third of four steps was not followed: the fourth is compared with the fourth."""
    steps = [Step([0.0] * 4, 1.0, {"pose": (0.1 * i,) * 7}, i not in (0, 2)) for i in range(4)]
    again = [
        {"decision": d, "index": i, "pose": (0.1 * n + 0.01,) * 7}
        for n, (d, i) in enumerate([(7, 0), (7, 1), (8, 0), (8, 1)])
        if n != 2
    ]
    again += [{"decision": -1, "index": -1}, {"decision": 9, "index": 0, "pose": (9.0,) * 7}]
    ticks = done(SimpleNamespace(ticks=again), _lengths(steps))
    assert sorted(ticks) == [0, 1, 3]
    np.testing.assert_allclose(strayed(steps, ticks).distance, [0.01 * 3**0.5] * 3)


def test_a_long_episode_of_a_person_goes_in_chunks_that_a_message_has_room_for():
    steps = [Step([0.0] * 4, 1.0, {}, i > 0) for i in range(450)]
    assert _lengths(steps) == [200, 200, 50]


def test_it_plays_once_and_then_holds_still():
    rows = torch.arange(12.0).view(3, 4)
    policy = Recorded(SPEC, rows, torch.tensor([1.0, 0.6, 1.0]), [2, 1])

    def decide(memory, instruction="raise the point"):
        out = policy.act(Observation({}, torch.zeros(1, 4), (instruction,)), memory=memory)
        lasts.append(policy.lasts(out).tolist())
        return out.chunk.actions[0].tolist(), out.memory

    lasts = []
    first = [policy.initial_memory()]
    assert decide(first, "")[0] == rows[:2].tolist(), "a blank question begins nothing"
    chunk, memory = decide(first)
    assert chunk == rows[:2].tolist()
    chunk, memory = decide(memory)
    assert chunk == rows[2:].tolist()
    assert decide(memory)[0] == [[0.0, 0.0, 0.0, 11.0]], "over"
    assert decide(first)[0] == [[0.0, 0.0, 0.0, 11.0]], "interrupted: not from the beginning again"
    assert lasts[1:] == [[1.0, pytest.approx(0.6)], [1.0], [1.0], [1.0]]


def test_what_cannot_be_replayed_is_one_clear_error(session, tmp_path, capsys):
    given = [f"output_dir={tmp_path}", "robot=fake"]
    assert (
        main(["robot", "replay", str(session), "--lockstep", "--episode", "9", "name=a", *given])
        == 2
    )
    assert "--episode 9:" in (said := capsys.readouterr().err) and "holds the episodes 1, 2" in said
    assert main(["robot", "replay", str(tmp_path), "--lockstep", "name=b", *given]) == 2
    assert "holds no journal" in capsys.readouterr().err
    other = ["robot.options.image_size=8", "name=c"]
    assert main(["robot", "replay", str(session), "--lockstep", *given, *other]) == 2
    assert "CameraSpec(name='front', height=8, width=8)" in capsys.readouterr().err
    assert not list((tmp_path / "c").glob("journal/*"))
    with pytest.raises(UserError, match="nothing was sent"):
        strayed([Step([0.0] * 4, 1.0, {"pose": [0.0] * 7}, False)], {})
