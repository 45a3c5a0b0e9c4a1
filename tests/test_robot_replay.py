"""A recorded episode done again: the same decisions, the same places, one chunk after the other
and only once."""

from __future__ import annotations

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
from vla_rl.robot.replay import Recorded, _sent, strayed
from vla_rl.types import Observation

SPEC = PointWorld().embodiment


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    save_checkpoint(folder / "mover", Mover(SPEC))
    given = overrides(folder, folder / "mover", "robot.horizon=20")
    assert main(["robot", "run", "--lockstep", "--episodes", "2", *given]) == 0
    return folder / "s"


def sent(folder):
    (episode,) = [read(path) for path in journals(folder)]
    return [tick for tick in episode.steps if tick["sent"]]


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
    before = [tick for tick in read(journals(session)[0]).steps if tick["sent"]]
    after = sent(tmp_path / f"again{i}")
    assert f"replaying episode 1 of {session}: {len(before)} control steps" in said
    assert after[-1]["policy_version"].startswith("recorded@")
    found = strayed(before, after)
    assert found.unit == "m" and str(found) in said
    if way == "--lockstep":
        assert found.distance.max() < 1e-6 and "paused:" not in said
        np.testing.assert_allclose(
            [t["sent"] for t in before], [t["sent"] for t in after[: len(before)]], atol=1e-6
        )
    elif "paused:" not in said:  # (where it was, the rest is stillness)
        assert found.distance.max() < 0.03


def test_a_corrected_episode_is_done_again_with_the_steps_that_takeovers_cut_short(
    tmp_path, capsys
):
    """A takeover after three of five ticks of a control step once left them out: 4.5 and 6.3 mm
    here, 37 on another arm."""
    save_checkpoint(tmp_path / "mover", Mover(SPEC, (0.03, 0.02, 0.0, -1.0)))
    helps = [
        "operator.patience_s=0.37",
        "operator.help_gain=2",
        "operator.longest_s=20",
        "operator.reaction_median_s=0.05",
    ]
    given = overrides(tmp_path, tmp_path / "mover", "robot.horizon=200", *helps)
    assert main(["robot", "run", "--lockstep", "--episodes", "2", *given]) == 0
    for number in ("1", "2"):
        episode = read(journals(tmp_path / "s")[int(number) - 1], pictures=False)
        rows, whole = _sent(episode), [tick for tick in episode.steps if tick["sent"]]
        cut = [row for row in rows if not row["step_done"]]
        assert (
            len(rows) == len(whole) + len(cut) and cut and any(tick["is_human"] for tick in whole)
        )
        share = sum(tick["step"] == cut[0]["step"] for tick in episode.ticks) / 5
        assert share == {"1": 0.6, "2": 0.8}[number]
        np.testing.assert_allclose(
            cut[0]["sent"], [share * 0.03, share * 0.02, 0.0, -1.0], rtol=1e-6
        )
        again = [f"output_dir={tmp_path}", f"name=r{number}", "robot=fake", *given[4:6]]
        assert (
            main(
                ["robot", "replay", str(tmp_path / "s"), "--lockstep", "--episode", number, *again]
            )
            == 0
        )
        found = strayed(rows, _sent(read(journals(tmp_path / f"r{number}")[0], pictures=False)))
        assert found.distance[-1] < 1.5e-3 and found.distance.max() < 3e-3
    capsys.readouterr()


def test_it_plays_once_and_then_holds_still():
    rows = torch.arange(12.0).view(3, 4)
    policy = Recorded(SPEC, rows, [2, 1])

    def decide(memory, instruction="raise the point"):
        out = policy.act(Observation({}, torch.zeros(1, 4), (instruction,)), memory=memory)
        return out.chunk.actions[0].tolist(), out.memory

    first = [policy.initial_memory()]
    assert decide(first, "")[0] == rows[:2].tolist(), "a blank question begins nothing"
    chunk, memory = decide(first)
    assert chunk == rows[:2].tolist()
    chunk, memory = decide(memory)
    assert chunk == rows[2:].tolist()
    assert decide(memory)[0] == [[0.0, 0.0, 0.0, 11.0]], "over"
    assert decide(first)[0] == [[0.0, 0.0, 0.0, 11.0]], "interrupted: not from the beginning again"


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
        strayed([{"pose": [0.0] * 7}], [])
