"""The record: nothing of a closed episode is lost, at most one record of an open one, every gap
is named, exports load."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from real_helpers import Rig, rig

from real import journal as journals
from real.journal import JournalWriter, picture, read, recover
from real.messages import Event, Frame, Notice, State
from real.recorder import Recorder
from real.ring import RingReader, RingWriter
from real.verify import verify
from vla_rl.cli import main
from vla_rl.data.lerobot_reader import load_demonstrations
from vla_rl.data.session_trajectory import session_trajectory
from vla_rl.errors import DiskFull

EAST, NORTH = (0.03, 0.0, 0.0, -1.0), (0.0, 0.03, 0.0, -1.0)


def about(session: Rig) -> dict:
    return {"session": "s", "embodiment": session.robot.embodiment.to_dict()}


def recorded(folder: Path) -> tuple[Rig, Path]:
    """An episode: the policy, a takeover in mid-chunk, a label; and one that is discarded."""
    session = rig()
    recorder = Recorder(folder / "journal", about(session))
    ring = RingWriter("front", (16, 16, 3))
    taken = number = 0

    def record(states: list[State]) -> None:
        nonlocal taken, number
        messages = [m for to, m in session.said[taken:] if to is None]
        taken = len(session.said)
        for message in messages:
            recorder.take(message)
        for i, state in enumerate(states):
            if i % 5 == 0:
                number += 1
                slot = ring.write(np.full((16, 16, 3), number % 256, np.uint8), number)
                place = Frame(
                    number,
                    "arm",
                    state.stamp,
                    state.stamp,
                    "front",
                    ring.address,
                    slot,
                    number,
                    number,
                    state.stamp,
                    0.0,
                    16,
                    16,
                    3,
                )
                recorder.take(place)
            recorder.take(state)

    session.auto()
    session.event("task", value="lift the cube")
    for attempt in range(2):
        session.chunk([EAST] * 20)
        record(session.run(0.32))
        session.dead_man, session.axes = True, (0.0, 0.6, 0.0, 0.0, 0.0, 0.0)
        record(session.run(0.4))
        session.event("label", value="success")
        session.event("redo" if attempt else "end")
        session.dead_man = False
        record(session.run(0.05))
        session.dead_man = None
        if not attempt:
            session.event("start")
    recorder.close()
    ring.close()
    return session, folder


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("session"))


def test_a_journal_holds_what_the_arm_did(session):
    ran, folder = session
    episode = read(journals.journals(folder)[0])
    assert episode.end == {
        "reason": "operator",
        "discarded": False,
        "ticks": 72,
        "frames": 15,
        "recovered": False,
    }
    told = [tuple(t["reference"]) for t in episode.ticks if t["reference"]]
    first = [v for t, v in ran.robot.log.targets if t <= episode.ticks[-1]["stamp"]]
    assert told == first and len(told) > 60, (
        "executed, recorded and the simulator's own log are the same"
    )
    steps = episode.steps
    assert {t["mode"] for t in steps} == {"AUTO", "HUMAN"}
    assert all(t["human"] == [] for t in steps if not t["is_human"]) and all(
        t["policy"] == [] for t in steps if t["is_human"]
    )
    np.testing.assert_allclose(
        [t["sent"] for t in steps if t["is_human"]][-1][:2], (0.0, 0.03), atol=1e-9
    )
    label = next(e for e in episode.events if e["name"] == "label")
    assert (label["value"], label["source"]) == ("success", "operator") and label["at"] <= label[
        "stamp"
    ]
    numbers = [row[0] for row in episode.frames["front"]]
    assert picture(episode.frames["front"][3][5])[0, 0].tolist() == [numbers[3] % 256] * 3
    assert episode.notices[0]["name"] == "begin"


def test_verify_and_export_from_the_command_line(session, tmp_path, capsys):
    _, folder = session
    assert main(["robot", "verify", str(folder)]) == 0
    out = capsys.readouterr().out
    assert (
        "72 ticks, 13 control steps (7 by a person), front 15; success" in out
        and "0 problems" in out
    )
    target = tmp_path / "dataset"
    assert main(["robot", "export", str(folder), str(target)]) == 0
    assert (
        "1 episodes, 13 control steps" in (out := capsys.readouterr().out)
        and "discarded by the operator" in out
    )
    assert main(["robot", "export", str(folder), str(target)]) == 2
    steps = read(journals.journals(folder)[0]).steps
    loaded = load_demonstrations(target)
    np.testing.assert_allclose(loaded.actions, np.array([t["sent"] for t in steps], np.float32))


def test_an_episode_that_contradicts_itself_is_exported_with_a_word(session, tmp_path, capsys):
    """What is wrong with it is said where it is exported, too, and steers no terminal."""
    kept = [list(record) for _, record in journals.scan(journals.journals(session[1])[0])]
    ticks = [r for r in kept if r[0] == "tick"]
    ticks[20][1 + journals.TICK_FIELDS.index("stamp")] -= 3600.0
    label = next(i for i, r in enumerate(kept) if r[0] == "event")
    kept.insert(label, ["event", "label", "perhaps\x1b[2J\u202e", "console", 0.0, 0.0])
    (tmp_path / "s").mkdir()
    fd = os.open(tmp_path / "s" / "episode_000001.vrj", os.O_WRONLY | os.O_CREAT)
    for record in kept:
        journals._append(fd, record)
    os.close(fd)
    assert main(["robot", "export", str(tmp_path / "s"), str(tmp_path / "dataset")]) == 0
    out = capsys.readouterr().out
    assert "exported, and doubtful: " in out and "the clock went back at tick 20" in out
    assert main(["robot", "verify", str(tmp_path / "s")]) == 1
    out = capsys.readouterr().out
    assert r"perhaps\x1b[2J\u202e" in out and not {"\x1b", "\u202e"} & set(out)


def test_steps_that_nobody_asked_for_teach_no_policy(session):
    episode = read(journals.journals(session[1])[0])
    for tick in episode.ticks:
        tick["policy"] = ()
    found, why = session_trajectory(episode, 4)
    assert found is None and why == "control steps of the policy without what it asked for"


def test_sittings_become_one_dataset_and_a_moved_mark_is_read(session, tmp_path, capsys):
    """Two sessions at once, a third appended; a label that was amended since counts as it is by
    now."""
    places = [tmp_path / name for name in "abc"]
    for place in places:
        shutil.copytree(session[1], place)
    data = tmp_path / "data"
    assert main(["robot", "export", str(places[0]), str(places[1]), str(data)]) == 0
    assert "2 episodes, 26 control steps" in capsys.readouterr().out
    first = journals.journals(places[0])[0]
    steps = read(first).steps
    # of 13 control steps the last tick of the fifth; the sixth begins after it
    at = steps[4]["stamp"]
    journals.amend(first, first.stat().st_size, label("failure", at, at + 9.0))
    assert main(["robot", "export", str(places[2]), str(data), "--append"]) == 0
    assert "3 episodes, 39 control steps" in capsys.readouterr().out
    assert len(load_demonstrations(data).actions) == 39
    about, table = (
        pyarrow.parquet.read_table(next((data / name).rglob("file*.parquet")))
        for name in ("meta", "data")
    )
    assert about["success"].to_pylist() == [False, True, True]
    after = np.array([row[-1] for row in table["control"].to_pylist()])
    assert after.reshape(3, 13).sum(1).tolist() == [8.0, 0.0, 0.0]
    trajectory, _ = session_trajectory(read(first), 4)
    assert trajectory.num_control_steps == 5 and trajectory.terminated and not trajectory.success
    journals.amend(first, first.stat().st_size, label("success", at, at + 9.0))
    trajectory, _ = session_trajectory(read(first), 4)
    assert trajectory.rewards[trajectory.valid].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]
    before = sorted((path.name, path.stat().st_size) for path in data.rglob("*"))
    assert main(["robot", "export", str(places[1]), str(data), "--append"]) == 2
    assert "b is in the dataset already" in capsys.readouterr().err
    shutil.rmtree(places[0])
    shutil.copytree(session[1], tmp_path / "d")
    assert main(["robot", "export", str(tmp_path / "d"), str(data), "--append"]) == 2
    assert "was made of" in (said := capsys.readouterr().err) and "is not there any more" in said
    assert main(["robot", "export", str(tmp_path / "d"), str(tmp_path / "none"), "--append"]) == 2
    assert "sessions.json is missing" in capsys.readouterr().err
    assert before == sorted((path.name, path.stat().st_size) for path in data.rglob("*"))
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"


def test_lerobot_loads_the_export_with_all_its_columns(session, tmp_path):
    pytest.importorskip("lerobot")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    target = tmp_path / "dataset"
    assert main(["robot", "export", str(session[1]), str(target)]) == 0
    loaded = LeRobotDataset("local/session", root=target)
    steps = read(journals.journals(session[1])[0]).steps
    assert len(loaded) == len(steps)
    for row, step in zip(loaded, steps):
        np.testing.assert_allclose(row["action"], step["sent"], rtol=1e-6)
        np.testing.assert_allclose(row["policy_action"], step["policy"] or [0.0] * 4, rtol=1e-6)
        np.testing.assert_allclose(row["human_action"], step["human"] or [0.0] * 4, rtol=1e-6)
        assert bool(row["control"][0]) == step["is_human"]


def test_every_gap_is_named(session, tmp_path):
    whole = journals.journals(session[1])[0]
    records = [record for _, record in journals.scan(whole)]

    def problems(kept: list, name: str = "episode_000001.vrj") -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        for record in kept:
            journals._append(fd, record)
        os.close(fd)
        return "\n".join(verify(folder)[0])

    ticks = [i for i, r in enumerate(records) if r[0] == "tick"]
    frames = [i for i, r in enumerate(records) if r[0] == "frame"]
    assert problems(records) == ""
    assert "2 ticks between" in problems([r for i, r in enumerate(records) if i not in ticks[5:7]])
    assert "1 were not recorded" in problems([r for i, r in enumerate(records) if i != frames[4]])
    assert "its end counts 15 frames, and 14 are there" in problems(
        [r for i, r in enumerate(records) if i != frames[4]]
    )
    frozen = [list(r) for r in records]
    frozen[frames[4]][3] = frozen[frames[3]][3]
    assert "again (frozen?)" in problems(frozen)
    swapped = list(records)
    swapped[ticks[3]], swapped[ticks[4]] = swapped[ticks[4]], swapped[ticks[3]]
    assert "comes after" in problems(swapped)
    assert "it was not closed" in problems(records[:-1], "episode_000001.vrj.open")
    wrong = [list(r) for r in records]
    column = 1 + journals.TICK_FIELDS.index("mode")
    wrong[ticks[1]][column] = "PAUSED"
    assert "a policy's action in PAUSED" in problems(wrong)

    def forged(name: str, value: Callable[[int, Any], Any]) -> str:
        kept = [list(r) for r in records]
        place = 1 + journals.TICK_FIELDS.index(name)
        for n, i in enumerate(ticks):
            kept[i][place] = value(n, kept[i][place])
        return problems(kept)

    assert "tick 20: control step 1 comes after" in forged("step", lambda n, v: 1 if n == 20 else v)
    assert "control step 7 goes on after its end" in forged("step", lambda n, v: 7)
    assert "tick 20: something was sent outside of a control step" in forged(
        "step", lambda n, v: -1 if n == 20 else v
    )
    assert "goes on after its end" in forged("step_done", lambda n, v: True)
    assert "tick 21: joints has 3 numbers after 2" in forged(
        "joints", lambda n, v: v[:2] if n == 20 else v
    )
    assert main(["robot", "verify", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_a_cut_or_damaged_tail_costs_the_last_record_alone(session, tmp_path, cut):
    whole = journals.journals(session[1])[0].read_bytes()
    places = [place for place, _ in journals.scan(journals.journals(session[1])[0])]
    open_file = tmp_path / "episode_000001.vrj.open"
    for damage in (whole[:-cut], whole[: -cut - 1] + b"?" + whole[len(whole) - cut :]):
        open_file.write_bytes(damage)
        changed = len(damage) == len(whole)
        kept = sum(place <= len(whole) - cut - changed for place in places)
        if changed and kept < len(places) - 1:  # whole records follow, which no kill leaves
            with pytest.raises(
                journals.JournalError,
                match=rf"record {kept + 1}, which begins at byte {places[kept - 1]}",
            ):
                recover(open_file)
            assert open_file.read_bytes() == damage
            continue
        closed = recover(open_file)
        again = [record for _, record in journals.scan(closed)]
        assert len(again) == kept + 1 and again[-1][0] == "end" and again[-1][1]["recovered"]
        assert "recovered after a kill" in "\n".join(verify(tmp_path)[0])
        closed.unlink()
    assert recover(journals.journals(session[1])[0]).exists(), "a closed one is left as it is"
    open_file.write_bytes(whole[:20])
    assert recover(open_file) is None and not open_file.exists(), (
        "killed before its first record was whole"
    )


def label(value: str, at: float, stamp: float) -> Event:
    return Event(0, "console", stamp, stamp + 1.0, "label", value, at, "")


def notice(name: str, stamp: float, episode: int, value: str = "") -> Notice:
    return Notice(0, "supervisor", stamp, stamp, name, value, "operator", "AUTO", 1, 1, episode)


def labels(folder: Path) -> list[list[tuple[str, float]]]:
    found = [read(path) for path in journals.journals(folder)]
    return [
        [(e["value"], e["at"]) for e in episode.events if e["name"] == "label"] for episode in found
    ]


def test_a_label_goes_to_the_episode_that_its_moment_lies_in(tmp_path):
    """A mark that is moved after Enter once labelled the next episode, and reversed what was
    said of it."""
    recorder = Recorder(tmp_path / "journal", {"session": "s"})
    recorder.take(label("success", 9.0, 9.0))  # before any episode: of none
    recorder.take(notice("begin", 10.0, 1))
    recorder.take(label("success", 20.0, 20.0))
    recorder.take(notice("end_episode", 20.1, 1))
    recorder.take(label("success", 18.5, 22.0))  # moved, between episodes
    recorder.take(label("success", 21.0, 22.0))  # a moment that is in no episode
    recorder.take(notice("begin", 25.0, 2))
    # moved, while the next one runs, and the verdict is another
    recorder.take(label("failure", 17.25, 26.0))
    recorder.take(label("failure", 27.0, 27.0))
    recorder.take(notice("discard", 28.0, 2))
    recorder.take(label("failure", 28.2, 28.3))  # given as it ended
    recorder.take(notice("begin", 30.0, 3))
    recorder.take(label("success", 16.0, 30.5))  # two episodes back
    recorder.close()
    first = [("success", 20.0), ("success", 18.5), ("failure", 17.25), ("success", 16.0)]
    assert labels(tmp_path) == [first, [("failure", 27.0), ("failure", 28.2)], []]
    episodes = [read(path) for path in journals.journals(tmp_path)]
    assert [episode.lost_bytes for episode in episodes] == [0, 0, 0] and verify(tmp_path)[0] == []
    assert episodes[0].verdict["at"] == 16.0 and episodes[0].end["reason"] == "end_episode"
    assert {path.stat().st_mode & 0o777 for path in journals.journals(tmp_path)} == {0o600}
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700


def test_an_amendment_that_is_cut_short_costs_nothing_but_itself(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "journal", {"session": "s"})
    recorder.take(notice("begin", 10.0, 1))
    recorder.take(label("success", 20.0, 20.0))
    recorder.take(notice("end_episode", 20.1, 1))
    (path,) = journals.journals(tmp_path)
    before = path.read_bytes()
    writev = os.writev
    with monkeypatch.context() as patch:
        patch.setattr(journals.os, "writev", lambda fd, parts: writev(fd, [b"".join(parts)[:5]]))
        with pytest.raises(DiskFull, match="cannot be amended: only 5 of"):
            recorder.take(label("failure", 15.0, 21.0))
    assert path.read_bytes() == before
    path.write_bytes(before + b"VRJ1\x09")  # as a kill leaves it
    episode = read(path)
    assert (
        episode.succeeded
        and episode.damage == ""
        and "5 bytes behind the last good" in verify(tmp_path)[0][0]
    )
    recorder.take(label("failure", 15.0, 21.0))
    assert read(path).verdict["at"] == 15.0 and verify(tmp_path)[0] == []


WRITER = """
import sys
from real.journal import JournalWriter
from real.messages import Frame
import time
journal = JournalWriter(sys.argv[1], 1, {"session": "s"})
for i in range(10**9):
    journal.frame(Frame(i, "arm", 0.0, 0.0, "front", "", 0, i, i, 0.0, 0.0, 16, 16, 3), b"x" * (i % 7000))
    print(i, flush=True)
"""


@pytest.mark.parametrize("trial", range(4))
def test_a_killed_writer_loses_at_most_one_record(tmp_path, trial):
    """Killed at a random moment; what it had said to have written is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(np.random.default_rng(trial).uniform(0.01, 0.1))
    process.send_signal(signal.SIGKILL)
    said = int(process.stdout.read().split()[-1])
    process.wait()
    process.stdout.close()
    (path,) = tmp_path.iterdir()
    episode = read(recover(path))
    numbers = [row[0] for row in episode.frames["front"]]
    assert numbers == list(range(len(numbers))) and len(numbers) >= said + 1
    assert episode.end["recovered"]


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    journal = JournalWriter(tmp_path, 1, {})
    real_writev = os.writev
    monkeypatch.setattr(
        journals.os, "writev", lambda fd, parts: real_writev(fd, [b"".join(parts)[:5]])
    )
    with pytest.raises(DiskFull, match="cannot be written: only 5 of"):
        journal.notice(Notice(0, "supervisor", 0.0, 0.0, "pause", "", "", "PAUSED", 1, 1, 1))


def test_names_do_not_collide_and_other_files_are_refused(tmp_path):
    first, second = (JournalWriter(tmp_path, 1, {}) for _ in range(2))
    assert first.path != second.path
    first.event(Event(0, "operator", 5.0, 9.0, "label", "success", 4.2, ""))
    assert read(first.close("done")).events == [
        {"name": "label", "value": "success", "source": "operator", "at": 4.2, "stamp": 5.0}
    ]
    (tmp_path / "x.vrj").write_text("hello")
    with pytest.raises(journals.JournalError, match="no journal"):
        read(tmp_path / "x.vrj")
    fd = os.open(tmp_path / "y.vrj", os.O_WRONLY | os.O_CREAT)
    journals._append(fd, ["header", {"schema": 9}])
    os.close(fd)
    with pytest.raises(journals.JournalError, match="schema 9"):
        read(tmp_path / "y.vrj")


def test_rings():
    ring = RingWriter("front", (2, 3, 3), slots=2)
    reader = RingReader(ring.address, (2, 3, 3))
    images = [np.full((2, 3, 3), i, np.uint8) for i in range(3)]
    slots = [ring.write(image, number) for number, image in enumerate(images)]
    assert slots == [0, 1, 0]
    assert reader.read(0, 0) is None, "overwritten"
    np.testing.assert_array_equal(reader.read(1, 1), images[1])
    np.testing.assert_array_equal(reader.read(0, 2), images[2])
    ring.close()
    reader.close()
    with pytest.raises(OSError):
        RingReader(ring.address, (2, 3, 3))
