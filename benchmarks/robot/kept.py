"""What a session's journals held when something struck, and whether all of it is there when the
session is over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from real.journal import OPEN, SUFFIX, journals, read, recover, scan


class Kept:
    """The whole records of the journals under ``folder``, now. A record counts as acknowledged once
    it is whole in the file, as all that the recorder says of one is its write."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = {path.name.removesuffix(OPEN): _whole(path) for path in _found(folder)}

    def lost(self) -> int:
        """Of those, how many are not there any more, or are others: after the session's end,
        which closes what is open."""
        for path in self.folder.glob(f"*{SUFFIX}{OPEN}"):
            recover(path)
        lost = 0
        for name, (data, places) in self._files.items():
            path = self.folder / name
            now = path.read_bytes() if path.is_file() else b""
            same = next(
                (i for i, (a, b) in enumerate(zip(data, now)) if a != b), min(len(data), len(now))
            )
            lost += sum(place > same for place in places)
        return lost


def unrecorded(folder: Path, ticks: Iterable[int]) -> tuple[int, int]:
    """Of the ``ticks`` that the supervisor announced in the session's first episode, those that its
    journal lacks: in front of one that it has (a hole), and behind the last (what a recorder that
    was killed had not written yet)."""
    found = journals(folder) if any(_found(folder)) else []
    recorded = {tick["tick"] for tick in read(found[0], pictures=False).ticks} if found else set()
    if not recorded:
        return 0, 0
    missing = {tick for tick in ticks if tick > min(recorded)} - recorded
    holes = sum(tick < max(recorded) for tick in missing)
    return holes, len(missing) - holes


def _found(folder: Path) -> list[Path]:
    return sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{SUFFIX}{OPEN}")])


def _whole(path: Path) -> tuple[bytes, list[int]]:
    """The whole records of a journal and where each ends. A session may close the file, which renames
    it, at any moment since it was listed."""
    try:
        data, places = path.read_bytes(), [place for place, _ in scan(path)]
    except FileNotFoundError:
        if not path.name.endswith(OPEN):
            raise
        return _whole(path.with_name(path.name.removesuffix(OPEN)))
    places = [place for place in places if place <= len(data)]  # it grew between the two
    return data[: places[-1] if places else 0], places
