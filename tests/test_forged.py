"""Files that somebody else wrote: a forged or damaged replay, journal or checkpoint is one error that names file and record.
Nothing is cut, no link is followed, no other file is touched."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_replay_store import SPEC, filled, put

from vla_rl.data.recorded import recorded
from vla_rl.data.replay import Replay
from vla_rl.errors import UserError

Forge = Callable[[Path], object]
DEEP = "[" * 100_000 + "]" * 100_000


def contents(folder: Path) -> dict[str, object]:
    """Of every entry what it is: a file's bytes, a link's goal."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder or pipe"
        for path in sorted(folder.rglob("*"))
    }


# ------------------------------------------------------------------------------------------------------------- replays
def line(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return b"%08x %s\n" % (zlib.crc32(data), data)


def record(number: int = 1, **changes: Any) -> Forge:
    """A record with other values and a right checksum; ``...`` leaves a key out."""

    def forge(folder: Path) -> None:
        lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
        found = json.loads(lines[number][9:]) | changes
        lines[number] = line(json.dumps({key: value for key, value in found.items() if value is not ...}))
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
        (folder / "header.json").write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))

    return forge


def column(name: str, *forged: Any) -> Forge:
    """The header says ``forged`` (name, dtype, shape) of a column; nothing: it has it not."""

    def forge(folder: Path) -> None:
        found = json.loads((folder / "header.json").read_text())
        for fields in found["tables"].values():
            fields[:] = [list(forged) if field[0] == name else field for field in fields if forged or field[0] != name]
        (folder / "header.json").write_text(json.dumps(found))

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
    "interventions before the episode": (record(interventions=[[-50, 3]]), r"line 2 .* has interventions \[-50, 3\]"),
    "interventions behind it": (record(interventions=[[3, 2]]), r"interventions \[3, 2\] in an episode of 4 decisions"),
    "interventions that overlap": (record(interventions=[[0, 2], [1, 1]]), r"interventions \[1, 1\] in an episode"),
    "interventions no pairs": (record(interventions=[3]), "line 2 .* has interventions 3"),
    "a ticket twice": (lambda f: (record(1, ticket=4)(f), record(2, ticket=4)(f)), "line 3 .* has ticket 4 after 4"),
    "a ticket NaN": (record(ticket=float("nan")), "line 2 .* has ticket nan after 0"),
    "deep JSON": (raw(1, line('{"a":' + DEEP + "}")), "line 2 of journal.jsonl is no record, though its checksum is right"),
    "no JSON": (raw(1, line("hello")), "line 2 .* is no record, though its checksum is right"),
    "a list": (raw(1, line("[1, 2]")), "line 2 .* is no record"),
    "no UTF-8": (raw(1, line(b'{"a": "\xff"}')), "line 2 .* is no record"),
    "a bit of the last record": (raw(2, b"00000000 {}\n"), "line 3 of journal.jsonl is not what was written"),
    "header a list": (lambda f: (f / "header.json").write_text("[]"), "header.json is damaged"),
    "header deep": (lambda f: (f / "header.json").write_text('{"a":' + DEEP + "}"), "header.json is damaged"),
    "no tables": (header(tables=...), "header.json is damaged .*tables"),
    "tables a list": (header(tables=[]), "header.json is damaged"),
    "a table without columns": (header(tables={"decisions": [], "frames": []}), "header.json .*it has no decisions"),
    "another robot's word": (header(embodiment={"name": 3}), "header.json is damaged"),
    "no actions": (column("actions"), "header.json is damaged .*it has no actions"),
    "actions flat": (column("actions", "actions", "float32", [4]), "header.json is damaged"),
    "actions of another width": (column("actions", "actions", "float32", [2, 3]), "no replay has the column"),
    "rewards below zero": (column("rewards", "rewards", "float32", [-1]), r"header.json is damaged .*\[-1\]"),
    "rewards huge": (column("rewards", "rewards", "float32", [2**30, 2**30]), "header.json is damaged .*bytes"),
    "a shape of truths": (column("rewards", "rewards", "float32", [True]), "header.json is damaged"),
    "valid as floats": (column("valid", "valid", "float32", [2]), "no replay has the column valid float32"),
    "proprio of bytes": (column("proprio", "proprio", "uint8", [8]), "no replay has the column"),
    "a camera that its robot lacks": (column("image:hand", "image:foot", "uint8", [8, 8, 3]), "its images are"),
    "a column twice": (column("human", "valid", "bool", [2]), "two columns have one name"),
    "a dtype that is a list": (column("human", "human", ["bool"], [2]), "header.json is damaged"),
    "link for rows": (instead("frames.rows", "link"), "frames.rows is a symbolic link"),
    "link for the journal": (instead("journal.jsonl", "link"), "journal.jsonl is a symbolic link"),
    "link for the header": (instead("header.json", "link"), "header.json is a symbolic link"),
    "link for what a header is written to": (instead("header.json.part", "link"), "header.json.part is a symbolic link"),
    "link for the lock": (instead(".lock", "link"), "lock is a symbolic link"),
    "folder for rows": (instead("decisions.rows", "folder"), "decisions.rows is a folder"),
    "folder for the journal": (instead("journal.jsonl", "folder"), "journal.jsonl is a folder"),
    "pipe for the header": (instead("header.json", "pipe"), "header.json is a pipe"),
    "pipe for rows": (instead("frames.rows", "pipe"), "frames.rows is a pipe"),
    "a bit of the first rows": (lambda f: flip(f / "frames.rows", 3), "the rows of episode 1 are not what was written"),
    "rows without journal and header": (
        lambda f: [(f / name).unlink() for name in ("journal.jsonl", "header.json")], "has .*rows and no header.json"
    ),
    "rows without journal": (lambda f: (f / "journal.jsonl").unlink(), "rows of 3 episodes, and 0 are in journal.jsonl"),
}  # fmt: skip


# What one who reads an acted episode of somebody else's folder does not touch.
ACTED = (*("link for what a header is written to", "link for the lock", "rows without journal", "a bit of the first rows"),)


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


def test_rows_that_number_an_instruction_that_is_not_there_are_refused_when_they_are_drawn(tmp_path):
    replay = filled(2, tmp_path / "r")
    for number in (-1, 2**40):
        replay._texts[:] = replay._texts[:0] if number < 0 else replay._texts
        table = replay._tables["frames"]
        rows = table._rows().view(table._dtype)
        rows["text"][:] = number
        with pytest.raises(UserError, match=f"instruction number {number}, and"):
            replay.draw(4, torch.Generator().manual_seed(0))


def test_a_first_header_is_not_written_through_a_link(tmp_path):
    (tmp_path / "foreign").write_text("of somebody else")
    replay = Replay(tmp_path / "r")
    (tmp_path / "r" / "header.json.part").symlink_to(tmp_path / "foreign")
    put(replay, 0)
    assert (tmp_path / "foreign").read_text() == "of somebody else" and len(Replay(tmp_path / "r", episodes=None)) == 3
