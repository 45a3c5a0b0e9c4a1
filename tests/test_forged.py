"""Files that somebody else wrote: a forged or damaged replay, journal or checkpoint is one error
that names file and record. Nothing is cut, no link is followed, no other file is touched."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch
from test_checkpoint import SPEC as JOINT
from test_checkpoint import Plain, factory
from test_real_journal import recorded as recorded_session
from test_replay_store import SPEC, filled, put

from real import journal as journals
from real.records import EVENT_FIELDS, TICK_FIELDS
from real.verify import verify
from vla_rl.checkpoint import load_policy, load_training_state, save_checkpoint
from vla_rl.cli import main
from vla_rl.data.recorded import recorded
from vla_rl.data.replay import Replay
from vla_rl.data.replay_folder import read_folder
from vla_rl.errors import UserError

Forge = Callable[[Path], object]
DEEP = "[" * 100_000 + "]" * 100_000


def contents(folder: Path) -> dict[str, object]:
    """Of every entry what it is: a file's bytes, a link's goal."""
    return {
        path.name: os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else "folder or pipe"
        for path in sorted(folder.rglob("*"))
    }


# ------------------------------------------------------------------------------------------ replays
def line(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return b"%08x %s\n" % (zlib.crc32(data), data)


def record(number: int = 1, **changes: Any) -> Forge:
    """A record with other values and a right checksum; ``...`` leaves a key out."""

    def forge(folder: Path) -> None:
        lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
        found = json.loads(lines[number][9:]) | changes
        lines[number] = line(
            json.dumps({key: value for key, value in found.items() if value is not ...})
        )
        (folder / "journal.jsonl").write_bytes(b"".join(lines))

    return forge


def raw(number: int, data: bytes) -> Forge:
    def forge(folder: Path) -> None:
        lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
        lines[number] = data
        (folder / "journal.jsonl").write_bytes(b"".join(lines))

    return forge


def header(**changes: Any) -> Forge:
    def forge(folder: Path) -> None:
        found = json.loads((folder / "header.json").read_text()) | changes
        (folder / "header.json").write_text(
            json.dumps({key: value for key, value in found.items() if value is not ...})
        )

    return forge


def column(name: str, *forged: Any) -> Forge:
    """The header says ``forged`` (name, dtype, shape) of a column; nothing: it has it not."""

    def forge(folder: Path) -> None:
        found = json.loads((folder / "header.json").read_text())
        for fields in found["tables"].values():
            fields[:] = [
                list(forged) if field[0] == name else field
                for field in fields
                if forged or field[0] != name
            ]
        (folder / "header.json").write_text(json.dumps(found))

    return forge


def table(name: str, *fields: Any) -> Forge:
    """The header names a further table, whose file is there."""

    def forge(folder: Path) -> None:
        found = json.loads((folder / "header.json").read_text())
        found["tables"][name] = list(fields)
        (folder / "header.json").write_text(json.dumps(found))
        (folder / "x.rows").touch()

    return forge


def valid(steps: list[list[int]]) -> Forge:
    """Every decision with these valid steps, and right checksums."""

    def forge(folder: Path) -> None:
        tables, records = read_folder(folder, SPEC)
        decisions, row = tables["decisions"], 0
        rows = np.fromfile(folder / "decisions.rows", np.uint8).view(decisions._dtype)
        rows["valid"] = steps
        rows.tofile(folder / "decisions.rows")
        for number, found in enumerate(records):
            t, checksum = found["decisions"], 0
            for each in tables.values():
                stored = (
                    each.stored(row, t) if each is decisions else each.stored(row + number, t + 1)
                )
                checksum = zlib.crc32(stored, checksum)
            record(number, checksum=checksum)(folder)
            row += t

    return forge


def instead(name: str, kind: str) -> Forge:
    """A link to a foreign file, a folder, a pipe in the place of a file."""

    def forge(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "link":
            path.symlink_to(folder.parent / "foreign")
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)

    return forge


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


REPLAYS: dict[str, tuple[Forge, str]] = {
    "decisions below zero": (record(decisions=-3), "line 2 of journal.jsonl has decisions -3"),
    "no decision": (record(decisions=0), "line 2 of journal.jsonl has decisions 0"),
    "decisions a text": (record(decisions="x"), "line 2 .* has decisions x"),
    "decisions true": (record(decisions=True), "line 2 .* has decisions True"),
    "decisions a fraction": (record(decisions=3.5), "line 2 .* has decisions 3.5"),
    "decisions beyond any disk": (record(decisions=10**30), "line 2 .* has decisions 1000000"),
    "one decision more": (record(decisions=5), "rows of number 2 are not what was written"),
    "no source": (record(source=...), "line 2 .* has no 'source'"),
    "source a list": (record(source=["online"]), "line 2 .* has source "),
    "no texts": (record(texts=...), "line 2 .* has no 'texts'"),
    "texts a number": (record(0, texts=5), "line 1 .* has texts 5"),
    "texts of numbers": (record(0, texts=[1, 2]), "line 1 .* has texts "),
    "terminated a text": (record(2, terminated="false"), "line 3 .* has terminated false"),
    "success one": (record(2, success=1), "line 3 .* has success 1"),
    "version beyond 64 bits": (record(version=2**70), "line 2 .* has version 118"),
    "checksum a text": (record(checksum="1f"), "line 2 .* has checksum 1f"),
    "interventions before the episode": (
        record(interventions=[[-50, 3]]),
        r"line 2 .* has interventions \[-50, 3\]",
    ),
    "interventions behind it": (
        record(interventions=[[3, 2]]),
        r"interventions \[3, 2\] in an episode of 4 decisions",
    ),
    "interventions that overlap": (
        record(interventions=[[0, 2], [1, 1]]),
        r"interventions \[1, 1\] in an episode",
    ),
    "interventions no pairs": (record(interventions=[3]), "line 2 .* has interventions 3"),
    "a ticket twice": (
        lambda f: (record(1, ticket=4)(f), record(2, ticket=4)(f)),
        "line 3 .* has ticket 4 after 4",
    ),
    "a ticket NaN": (record(ticket=float("nan")), "line 2 .* has ticket nan after 0"),
    "deep JSON": (
        raw(1, line('{"a":' + DEEP + "}")),
        "line 2 of journal.jsonl is no record, though its checksum is right",
    ),
    "no JSON": (raw(1, line("hello")), "line 2 .* is no record, though its checksum is right"),
    "a list": (raw(1, line("[1, 2]")), "line 2 .* is no record"),
    "no UTF-8": (raw(1, line(b'{"a": "\xff"}')), "line 2 .* is no record"),
    "a bit of the last record": (
        raw(2, b"00000000 {}\n"),
        "line 3 of journal.jsonl is not what was written",
    ),
    "header a list": (lambda f: (f / "header.json").write_text("[]"), "header.json is damaged"),
    "header deep": (
        lambda f: (f / "header.json").write_text('{"a":' + DEEP + "}"),
        "header.json is damaged",
    ),
    "no tables": (header(tables=...), "header.json is damaged .*tables"),
    "tables a list": (header(tables=[]), "header.json is damaged"),
    "a further table without columns": (table("x"), "it has no byte in a row of 'x'"),
    "a table of rows without a byte": (
        table("x", ["q", "uint8", [0]]),
        "it has no byte in a row of 'x'",
    ),
    "a table named by half a character": (
        table("\ud800", ["q", "uint8", [1]]),
        "header.json is damaged .*surrogates",
    ),
    "no valid step": (
        valid([[0, 0]]),
        r"episode \d in .*rows has a decision whose valid control steps are not",
    ),
    "a hole in the valid steps": (
        valid([[0, 1]]),
        r"episode \d in .*rows has a decision whose valid",
    ),
    "a table without columns": (
        header(tables={"decisions": [], "frames": []}),
        "header.json .*it has no decisions",
    ),
    "another robot's word": (header(embodiment={"name": 3}), "header.json is damaged"),
    "no actions": (column("actions"), "header.json is damaged .*it has no actions"),
    "actions flat": (column("actions", "actions", "float32", [4]), "header.json is damaged"),
    "actions of another width": (
        column("actions", "actions", "float32", [2, 3]),
        "no replay has the column",
    ),
    "rewards below zero": (
        column("rewards", "rewards", "float32", [-1]),
        r"header.json is damaged .*\[-1\]",
    ),
    "rewards huge": (
        column("rewards", "rewards", "float32", [2**30, 2**30]),
        "header.json is damaged .*bytes",
    ),
    "a shape of truths": (
        column("rewards", "rewards", "float32", [True]),
        "header.json is damaged",
    ),
    "valid as floats": (
        column("valid", "valid", "float32", [2]),
        "no replay has the column valid float32",
    ),
    "proprio of bytes": (column("proprio", "proprio", "uint8", [8]), "no replay has the column"),
    "a camera that its robot lacks": (
        column("image:hand", "image:foot", "uint8", [8, 8, 3]),
        "its images are",
    ),
    "a column twice": (column("human", "valid", "bool", [2]), "two columns have one name"),
    "a dtype that is a list": (column("human", "human", ["bool"], [2]), "header.json is damaged"),
    "link for rows": (instead("frames.rows", "link"), "frames.rows is a symbolic link"),
    "link for the journal": (instead("journal.jsonl", "link"), "journal.jsonl is a symbolic link"),
    "link for the header": (instead("header.json", "link"), "header.json is a symbolic link"),
    "link for what a header is written to": (
        instead("header.json.part", "link"),
        "header.json.part is a symbolic link",
    ),
    "link for the lock": (instead(".lock", "link"), "lock is a symbolic link"),
    "folder for rows": (instead("decisions.rows", "folder"), "decisions.rows is a folder"),
    "folder for the journal": (instead("journal.jsonl", "folder"), "journal.jsonl is a folder"),
    "pipe for the header": (instead("header.json", "pipe"), "header.json is a pipe"),
    "pipe for rows": (instead("frames.rows", "pipe"), "frames.rows is a pipe"),
    "a bit of the first rows": (
        lambda f: flip(f / "frames.rows", 3),
        "the rows of episode 1 are not what was written",
    ),
    "rows without journal and header": (
        lambda f: [(f / name).unlink() for name in ("journal.jsonl", "header.json")],
        "has .*rows and no header.json",
    ),
    "rows without journal": (
        lambda f: (f / "journal.jsonl").unlink(),
        "rows of 3 episodes, and 0 are in journal.jsonl",
    ),
}


# What one who reads an acted episode of somebody else's folder does not touch.
ACTED = (
    *(
        "link for what a header is written to",
        "link for the lock",
        "rows without journal",
        "a bit of the first rows",
    ),
)


@pytest.mark.parametrize("name", REPLAYS)
def test_a_forged_replay_is_one_error_and_stays_as_it_is(tmp_path, name):
    folder, foreign = tmp_path / "r", tmp_path / "foreign"
    foreign.write_text("of somebody else")
    filled(3, folder)
    forge, said = REPLAYS[name]
    forge(folder)
    before = contents(folder)
    with pytest.raises(UserError, match=said):
        Replay(folder, episodes=None, embodiment=SPEC)
    assert contents(folder) == before
    with pytest.raises(UserError):
        Replay(folder, episodes=3, embodiment=SPEC)
    if name not in ACTED:
        with pytest.raises(UserError):
            list(recorded(folder, SPEC, 2, {}))
    assert contents(folder) == before and foreign.read_text() == "of somebody else"


def test_rows_that_number_an_instruction_that_is_not_there_are_refused_when_they_are_drawn(
    tmp_path,
):
    replay = filled(2, tmp_path / "r")
    for number in (-1, 2**40):
        replay._texts[:] = replay._texts[:0] if number < 0 else replay._texts
        table = replay._tables["frames"]
        rows = table._rows().view(table._dtype)
        rows["text"][:] = number
        with pytest.raises(UserError, match=f"instruction number {number}, and"):
            replay.draw(4, torch.Generator().manual_seed(0))


def test_a_decision_without_a_valid_step_is_refused_when_it_is_added_or_drawn(tmp_path):
    with pytest.raises(
        UserError,
        match="rollout r0 has a decision whose valid control steps are not its first ones",
    ):
        put(Replay(embodiment=SPEC), 0, valid=torch.tensor([[False, True]] * 3))
    replay = filled(2)
    table = replay._tables["decisions"]
    table._rows().view(table._dtype)["valid"][:] = False
    with pytest.raises(UserError, match="a decision was drawn whose valid control steps"):
        replay.draw(4, torch.Generator().manual_seed(0))


def test_a_first_header_is_not_written_through_a_link(tmp_path):
    (tmp_path / "foreign").write_text("of somebody else")
    replay = Replay(tmp_path / "r")
    (tmp_path / "r" / "header.json.part").symlink_to(tmp_path / "foreign")
    put(replay, 0)
    assert (tmp_path / "foreign").read_text() == "of somebody else" and len(
        Replay(tmp_path / "r", episodes=None)
    ) == 3


# ----------------------------------------------------------------------------------------- journals
@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[list[Any]]:
    """Of an episode: a header, ticks, pictures, chunks, a label, notices, an end."""
    _, folder = recorded_session(tmp_path_factory.mktemp("session"))
    return [record for _, record in journals.scan(journals.journals(folder)[0])]


def field(
    kind: str, place: int | str, value: Any, which: int = 2
) -> Callable[[list[list[Any]]], None]:
    """Another value in the record number ``which`` of a kind: an entry's, a tick's field's, a
    header's or an end's key's."""

    def forge(found: list[list[Any]]) -> None:
        record = [r for r in found if r[0] == kind][which]
        if kind in ("header", "end"):
            record[1] = {k: v for k, v in {**record[1], place: value}.items() if v is not ...}
        else:
            names = {"tick": TICK_FIELDS, "event": EVENT_FIELDS}.get(kind, ())
            record[1 + names.index(place) if isinstance(place, str) else place] = value

    return forge


def robot(**changes: Any) -> Callable[[list[list[Any]]], None]:
    def forge(found: list[list[Any]]) -> None:
        found[0][1]["embodiment"] = {
            k: v for k, v in {**found[0][1]["embodiment"], **changes}.items() if v is not ...
        }

    return forge


def put_in(place: int, *new: list[Any]) -> Callable[[list[list[Any]]], None]:
    return lambda found: found.__setitem__(slice(place, place), new)


JOURNALS: dict[str, tuple[Callable[[list[list[Any]]], object], str]] = {
    "a tick that is short": (
        lambda r: next(x for x in r if x[0] == "tick").pop(),
        "a tick has 33 fields",
    ),
    "a tick's number as text": (field("tick", "tick", "7"), "tick of a tick is '7'"),
    "a tick's number true": (field("tick", "tick", True), "tick of a tick is True"),
    "a stamp NaN": (field("tick", "stamp", float("nan")), "stamp of a tick is nan"),
    "sent as a number": (field("tick", "sent", 0.3), "sent of a tick is 0.3"),
    "sent of texts": (field("tick", "sent", ["0.1"] * 4), "sent of a tick is"),
    "sent with infinity": (
        field("tick", "sent", [float("inf"), 0.0, 0.0, 0.0]),
        "sent of a tick is",
    ),
    "sent of another robot": (
        field("tick", "sent", [0.1] * 6),
        "sent of a tick has 6 numbers, and 4 belong to the robot",
    ),
    "proprio of another robot": (
        field("tick", "proprio", [0.1]),
        "proprio of a tick has 1 numbers",
    ),
    "a mode of bytes": (field("tick", "mode", b"AUTO"), "mode of a tick is b'AUTO'"),
    "faults a text": (field("tick", "faults", "none"), "faults of a tick is 'none'"),
    "nothing for whether a person acts": (
        field("tick", "is_human", None),
        "is_human of a tick is None",
    ),
    "a picture's size of texts": (field("frame", 6, ["16", 16, 3]), "size of a frame is"),
    "a picture of no size": (field("frame", 6, [0, 16, 3]), "size of a frame is"),
    "a picture as text": (field("frame", 7, "jpeg"), "jpeg of a frame is 'jpeg'"),
    "a camera that is a list": (field("frame", 1, ["front"]), "camera of a frame is"),
    "a capture before time": (field("frame", 4, -1e308), "capture of a frame is"),
    "a label that is a number": (field("event", "value", 1, 0), "value of an event is 1"),
    "a label at no time": (field("event", "at", None, 0), "at of an event is None"),
    "a chunk whose rows differ": (
        field("chunk", 10, [[0.1] * 4, [0.1] * 3], 0),
        "rows of a chunk is",
    ),
    "a chunk of another robot": (
        field("chunk", 10, [[0.1] * 7], 0),
        "rows of a chunk have 7 numbers",
    ),
    "a notice without an epoch": (field("notice", 5, None, 0), "epoch of a notice is None"),
    "an unknown kind": (put_in(3, ["shell", "rm -rf /"]), "record 4, .*its kind is 'shell'"),
    "a record that is a mapping": (
        put_in(3, {"tick": 1}),
        "record 4, .*no list that begins with its kind",
    ),
    "an empty record": (put_in(3, []), "record 4, .*no list that begins with its kind"),
    "another header": (lambda r: r.insert(4, r[0]), "record 5, .*another header"),
    "a picture behind the end": (lambda r: r.append(r[5]), "a frame behind the end"),
    "no header": (lambda r: r.pop(0), "begins with a notice and no header"),
    "a header without an episode": (
        field("header", "episode", ..., 0),
        "the header has no episode",
    ),
    "an episode as text": (field("header", "episode", "1", 0), "episode of the header is '1'"),
    "a wall clock of infinity": (
        field("header", "wall", float("inf"), 0),
        "wall of the header is inf",
    ),
    "a task that is a list": (field("header", "task", ["lift"], 0), "task of the header is"),
    "a schema as text": (field("header", "schema", "1", 0), "schema of the header is '1'"),
    "a robot that is a text": (
        field("header", "embodiment", "arm", 0),
        "embodiment of the header is 'arm'",
    ),
    "a robot without cameras": (robot(cameras=...), "describes no robot .*cameras"),
    "a robot of unknown words": (robot(wheels=4), "describes no robot"),
    "a robot with bounds NaN": (robot(action_low=[float("nan")] * 4), "describes no robot"),
    "a pose of five numbers": (
        field("tick", "pose", [0.0] * 5),
        "pose of a tick has 5 numbers, and 3 or 7 belong to it",
    ),
    "an end without its counts": (field("end", "ticks", ..., 0), "the end has no ticks"),
    "an end that is a list": (lambda r: r[-1].__setitem__(1, [1]), "end of an end is"),
    "an end that was recovered of nothing": (
        field("end", "recovered", True, 0),
        "lost_bytes of the end is None",
    ),
}
PAYLOADS = {
    "no msgpack": b"\xc1\xc1",
    "more behind it": b"\x90\x90",
    "cut off": b"\xdc\x10\x00\x01",
    "no UTF-8": b"\x92\xa2\xff\xfe\x01",
    "a huge list": b"\xdd\x7f\xff\xff\xff" + b"\xc0" * 64,
    "deep": b"\x91" * 5000 + b"\x01",
    "a list as a key": b"\x81\x91\x01\x01",
    "an extension": b"\x92\xa4tick\xd4\x05\x01",
    "nothing": b"",
    "a time": b"\xd6\xff\x00\x00\x00\x01",
}


def write_journal(path: Path, payloads: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = journals._HEAD
    path.write_bytes(
        b"".join(head.pack(journals.MAGIC, len(p), zlib.crc32(p)) + p for p in payloads)
    )


def refused(folder: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Read, verified, exported, closed: one error that names file and record, and the file stays
    as it is."""
    (path,) = folder.iterdir()
    before = path.read_bytes()
    with pytest.raises(journals.JournalError, match=f"(?s){path.name}.*{said}"):
        journals.read(path)
    (problem,), lines = verify(folder)
    assert path.name in problem and not lines
    targets = [["export", str(folder), str(folder.parent / name)] for name in ("out", "o.rrd")]
    for command in (*targets, ["replay", str(folder), "robot=fake"], ["verify", str(folder)]):
        assert main(["robot", *command]) in (1, 2)
        told = capsys.readouterr()
        assert path.name in told.err + told.out and "Traceback" not in told.err
    left = path.rename(path.with_name(path.name + journals.OPEN))
    with pytest.raises(journals.JournalError):
        journals.recover(left)
    assert left.read_bytes() == before and not (folder.parent / "out").exists()


@pytest.mark.parametrize("name", JOURNALS)
def test_a_forged_journal_is_one_error_and_stays_as_it_is(records, tmp_path, capsys, name):
    forge, said = JOURNALS[name]
    found = msgpack.unpackb(msgpack.packb(records))
    forge(found)
    write_journal(
        tmp_path / "s" / "episode_000001.vrj", [msgpack.packb(record) for record in found]
    )
    refused(tmp_path / "s", said, capsys)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_record_of_other_bytes_is_one_error(records, tmp_path, capsys, name):
    whole = [msgpack.packb(record) for record in records]
    write_journal(tmp_path / "s" / "episode_000001.vrj", [*whole[:3], PAYLOADS[name], *whole[3:]])
    refused(tmp_path / "s", "record 4, which ends at byte", capsys)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_journal_is_a_plain_file(tmp_path, kind):
    (tmp_path / "foreign").write_text("of somebody else")
    (tmp_path / "s").mkdir()
    instead("episode_000001.vrj.open", kind)(tmp_path / "s")
    path = tmp_path / "s" / "episode_000001.vrj.open"
    for call in (journals.read, journals.recover):
        with pytest.raises(
            journals.JournalError, match=r"open is a (symbolic link|folder|pipe), and a plain file"
        ):
            call(path)
    assert "a plain file is needed" in verify(tmp_path / "s")[0][0]
    assert (tmp_path / "foreign").read_text() == "of somebody else"


@pytest.mark.parametrize("data", [b"hello", b"VRJ1" + bytes(12), b"VRJ2", bytes(100)])
def test_what_is_no_journal_is_not_removed(tmp_path, data):
    path = tmp_path / "episode_000001.vrj.open"
    path.write_bytes(data)
    with pytest.raises(journals.JournalError, match=r"is no (journal|msgpack)"):
        journals.recover(path)
    assert path.read_bytes() == data


def test_a_closed_journal_that_lost_records_is_nobodys_episode(records, tmp_path, capsys):
    """A bit of a record in its middle: what follows, the label and the end, cannot be read."""
    path = tmp_path / "s" / "episode_000001.vrj"
    write_journal(path, [msgpack.packb(record) for record in records])
    flip(path, path.stat().st_size // 2)
    assert main(["robot", "export", str(tmp_path / "s"), str(tmp_path / "out")]) == 2
    assert "bytes of it are damaged or cut off, and no kill does that" in capsys.readouterr().err
    assert "no kill does that to a closed journal" in verify(tmp_path / "s")[0][0]
    assert main(["robot", "replay", str(tmp_path / "s"), "robot=fake"]) == 2
    assert "bytes of it are damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("jpeg", [b"", b"no picture", None])
def test_a_picture_that_is_none_or_of_another_size_is_named(records, tmp_path, capsys, jpeg):
    found = msgpack.unpackb(msgpack.packb(records))
    for record in found:
        if record[0] == "frame":
            record[6:] = [[16, 16, 3], jpeg] if jpeg is not None else [[32, 8, 3], record[7]]
    write_journal(
        tmp_path / "s" / "episode_000001.vrj", [msgpack.packb(record) for record in found]
    )
    assert main(["robot", "export", str(tmp_path / "s"), str(tmp_path / "out")]) == 2
    assert (
        "episode_000001.vrj: picture 1 of front is damaged" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


# -------------------------------------------------------------------------------------- checkpoints
def config(**changes: Any) -> Forge:
    def forge(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in found.items() if value is not ...})
        )

    return forge


def text(name: str, data: str | bytes) -> Forge:
    return lambda folder: (folder / name).write_bytes(
        data.encode() if isinstance(data, str) else data
    )


def state(data: Any) -> Forge:
    return text("training_state/state.json", data if isinstance(data, str) else json.dumps(data))


def tensors(head: Any, data: bytes = bytes(64)) -> Forge:
    """A safetensors file with a header of one's own."""
    encoded = json.dumps(head).encode()
    return text("model.safetensors", len(encoded).to_bytes(8, "little") + encoded + data)


def not_finite(folder: Path) -> None:
    found = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(
        found | {"weight": found["weight"] * float("nan")}, folder / "model.safetensors"
    )


CHECKPOINTS: dict[str, tuple[Forge, str]] = {
    "format a text": (config(format="1"), "config.json"),
    "format below zero": (config(format=-1), "config.json"),
    "no policy_type": (config(policy_type=...), "config.json"),
    "policy_type a list": (config(policy_type=["plain"]), "config.json"),
    "no options": (config(config=...), "config"),
    "options a text": (config(config="width"), "config"),
    "a width that is a text": (config(config={"width": "five"}), "config"),
    "a width that no memory holds": (config(config={"width": 2**60}), "config"),
    "a width below zero": (config(config={"width": -5}), "config"),
    "config deep": (text("config.json", '{"a":' + DEEP + "}"), "config.json is damaged"),
    "config no UTF-8": (text("config.json", b"\xff\xfe{}"), "config.json is damaged"),
    "config with a long number": (
        text("config.json", '{"format": ' + "9" * 5000 + "}"),
        "config.json",
    ),
    "robot a list": (text("embodiment.json", "[1]"), "embodiment.json"),
    "robot without bounds": (
        text("embodiment.json", '{"name": "a", "cameras": []}'),
        "embodiment.json describes no robot",
    ),
    "weights of pickles": (
        text("model.safetensors", b"\x80\x04cos\nsystem\n"),
        "model.safetensors is damaged",
    ),
    "weights beyond the file": (
        tensors({"weight": {"dtype": "F32", "shape": [2, 5], "data_offsets": [0, 2**40]}}),
        "model.safetensors is damaged",
    ),
    "weights that overlap": (
        tensors(
            {n: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for n in ("bias", "weight")}
        ),
        "is damaged",
    ),
    "weights of an unknown dtype": (
        tensors({"weight": {"dtype": "F99", "shape": [2, 5], "data_offsets": [0, 64]}}),
        "model.safetensors is damaged",
    ),
    "weights that are not finite": (not_finite, "not finite"),
    "an index that leads elsewhere": (
        text("model.safetensors.index.json", '{"weight_map": {"weight": "../foreign"}}'),
        "index.json",
    ),
    "an index of numbers": (
        text("model.safetensors.index.json", '{"weight_map": {"weight": 3}}'),
        "index.json",
    ),
    "words a folder": (
        lambda f: ((f / "words.txt").unlink(), (f / "words.txt").mkdir()),
        "words.txt",
    ),
    "words no UTF-8": (text("words.txt", b"\xff\xfe\xff"), "words.txt"),
    "state a list": (state([1]), "state.json is damaged"),
    "state deep": (state('{"a":' + DEEP + "}"), "state.json is damaged"),
    "state whose tensor is a number": (
        state({"a": {"__tensor__": 7}}),
        "training_state is damaged",
    ),
    "state whose tensor is a list": (
        state({"a": {"__tensor__": ["/a"]}}),
        "training_state is damaged",
    ),
    "state whose tensor is not there": (
        state({"a": {"__tensor__": "/b"}}),
        "training_state is damaged",
    ),
    "state's tensors cut": (
        lambda f: os.truncate(f / "training_state" / "state.safetensors", 20),
        "state.safetensors is damaged",
    ),
    "state's tensors a folder": (
        lambda f: (
            (f / "training_state/state.safetensors").unlink(),
            (f / "training_state/state.safetensors").mkdir(),
        ),
        "state.safetensors",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_forged_checkpoint_is_one_error(tmp_path, name):
    path = tmp_path / "a"
    save_checkpoint(path, Plain(5, JOINT), {"a": torch.zeros(3), "step": 4})
    forge, said = CHECKPOINTS[name]
    forge(path)
    before = contents(path)
    with pytest.raises(UserError, match=said) as found:
        load_training_state(path)
        load_policy(path, factory, expected_embodiment=JOINT)
    assert str(path) in str(found.value) and contents(path) == before
