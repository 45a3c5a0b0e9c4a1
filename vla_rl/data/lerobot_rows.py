"""The numbers of a LeRobotDataset v3 folder, in the order of its episodes, and what is wrong
with them; no pictures."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from vla_rl.data.checks import (
    ERROR,
    WARNING,
    DataCheck,
    Report,
    Rows,
    as_success,
    bad_instruction,
    shortened,
)
from vla_rl.data.demonstrations import DemonstrationEpisode
from vla_rl.data.lerobot_format import (
    ACTION_KEY,
    AGAIN,
    BY_BASE,
    BY_PERSON,
    CONTROL,
    KEPT_OUT,
    LAST,
    SENT_KEY,
    STATE_KEY,
    DatasetError,
    pyarrow_package,
)
from vla_rl.files import read_json, require_content
from vla_rl.types import EmbodimentSpec

_STATS = "meta/stats.json"
_AGAIN = "Write or fetch the dataset again"
_ROW_SUCCESS = "next.success"  # lerobot's own recordings of simulators say it of each row


@dataclass
class LeRobotRows:
    """All n control steps, sorted by episode and frame whatever the files' order.

    ``places`` int64 [n]: where each lies, counted through ``files``. ``vectors`` {key: [n d]} as
    stored, ``stamps`` [n] (s since the episode began), ``task_index`` [n] into ``instructions``.
    ``numbers``: each episode's ``episode_index``; ``meta``: its row of metadata. Episodes without a
    row are not there. ``by_base`` and ``by_person`` bool [n]: whether a frozen policy, or a person,
    chose it (None: not said). ``stride``: rows of the files for each of these.
    """

    path: Path
    files: list[Path]
    places: np.ndarray
    vectors: dict[str, np.ndarray]
    stamps: np.ndarray
    task_index: np.ndarray
    instructions: list[str]
    episodes: list[DemonstrationEpisode]
    numbers: list[int]
    meta: list[dict[str, Any]]
    by_base: np.ndarray | None = None
    by_person: np.ndarray | None = None
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    empty: tuple[int, ...] = ()
    stride: int = 1

    @property
    def imitated(self) -> np.ndarray | None:
        """bool [n]: of a policy's session that a person helped in, the person's rows, as HG-DAgger
        has it; None: all rows."""
        mine = self.by_person
        return mine if mine is not None and mine.any() and not mine.all() else None

    def where(self, row: int) -> str:
        """Which row of the files this is, in words."""
        i = int(np.searchsorted([e.start for e in self.episodes], row, "right")) - 1
        return f"episode {self.numbers[i]}, row {(row - self.episodes[i].start) * self.stride}"

    def every(self, stride: int) -> LeRobotRows:
        """One row for each ``stride`` of an episode: what was seen as they began, and the last
        of their actions."""
        begins = [np.arange(e.start, e.start + e.length, stride) for e in self.episodes]
        ends = [
            np.minimum(b + stride - 1, e.start + e.length - 1)
            for b, e in zip(begins, self.episodes, strict=True)
        ]
        first, last = np.concatenate(begins), np.concatenate(ends)
        starts = np.cumsum([0, *map(len, begins)]).tolist()
        return dataclasses.replace(
            self,
            places=self.places[first],
            stamps=self.stamps[first],
            task_index=self.task_index[first],
            vectors={
                k: v[last if k in (ACTION_KEY, SENT_KEY) else first]
                for k, v in self.vectors.items()
            },
            episodes=[
                dataclasses.replace(e, start=start, length=len(b))
                for e, start, b in zip(self.episodes, starts, begins)
            ],
            by_base=None if self.by_base is None else self.by_base[first],
            by_person=None if self.by_person is None else self.by_person[first],
            stride=stride * self.stride,
        )

    def rows(self) -> Iterator[Rows]:
        for e, number in zip(self.episodes, self.numbers, strict=True):
            part = slice(e.start, e.start + e.length)
            vectors = {key: values[part] for key, values in self.vectors.items()}
            yield Rows(
                f"episode {number}",
                str(self.path),
                vectors,
                e.instruction,
                e.success,
                self.stamps[part],
            )

    def report(
        self, info: Mapping[str, Any], spec: EmbodimentSpec | None, texts: Collection[str] = ()
    ) -> Report:
        """What is wrong with the numbers, for a robot (None: whatever it is) and a run's
        instructions (none: any)."""
        check = DataCheck(
            str(self.path),
            "LeRobotDataset v3",
            spec,
            texts,
            float(info["fps"]),
            declared(self.path),
            names=self.names,
        )
        for rows in self.rows():
            check.add(rows)
        for number in self.empty:
            check.add(Rows(f"episode {number}", str(self.path), {}))
        self._check_texts(check)
        self._check_counts(check, info)
        widths = {key: values.shape[1] for key, values in self.vectors.items()}
        for text in bad_statistics(self.path, widths):
            check.note(
                WARNING,
                "statistics",
                text,
                "Write the statistics again",
                file=str(self.path / "meta" / "stats.json"),
            )
        return check.report()

    def _check_texts(self, check: DataCheck) -> None:
        """An episode that changes its task; the check of its rows looks at the first text alone."""
        for e, number in zip(self.episodes, self.numbers, strict=True):
            tasks = self.task_index[e.start : e.start + e.length]
            changes = (np.flatnonzero(np.diff(tasks)) + 1).tolist()
            at = {"file": str(self.path), "episode": f"episode {number}", "key": "task_index"}
            for row in changes:
                if why := bad_instruction(self.instructions[int(tasks[row])]):
                    text = f"the instruction from here on {why}"
                    check.note(
                        ERROR, "instruction", text, "Write what was asked for", row=row, **at
                    )
                    break
            if changes:
                then = self.instructions[int(tasks[changes[0]])]
                text = f"the instruction changes to {shortened(then)} within the episode"
                remedy = (
                    "Where that is not meant, write the dataset again; each row is learned with "
                    "its own"
                )
                check.note(WARNING, "task_changes", text, remedy, row=changes[0], **at)

    def _lies(self, pattern: Any) -> bool:
        """Whether the first episode's data are where ``pattern`` says."""
        first = self.meta[0] if self.meta else {}
        numbers = {
            f"{name}_index": first.get(f"data/{name}_index") or 0 for name in ("chunk", "file")
        }
        try:
            return (self.path / pattern.format(**numbers)).is_file()
        except (LookupError, TypeError, ValueError, AttributeError, OSError):
            return False

    def _check_counts(self, check: DataCheck, info: Mapping[str, Any]) -> None:
        """What the metadata say of the data's order and number: it is not needed here, other
        tools go by it."""
        if "data_path" in info and not self._lies(info["data_path"]):
            check.note(
                WARNING,
                "data_path",
                f"it says {shortened(str(info['data_path']))}, and no data lie there",
                "Correct it: other tools would find none",
                file=str(self.path / "meta" / "info.json"),
                key="data_path",
            )
        said = {
            "total_episodes": len(self.numbers) + len(self.empty),
            "total_frames": len(self.places),
        }
        for name, count in said.items():
            if info.get(name, count) != count:
                check.note(
                    WARNING,
                    "totals",
                    f"it says {info[name]!r}, and there are {count}",
                    "Correct it",
                    file=str(self.path / "meta" / "info.json"),
                    key=name,
                )
        spans = [
            (r["dataset_from_index"], r["dataset_to_index"], r["length"], r["episode_index"])
            for r in self.meta
            if {"dataset_from_index", "dataset_to_index"} <= r.keys()
        ]
        end = 0
        for start, stop, length, number in spans:
            if None in (start, stop) or start != end or stop != end + length:
                text = (
                    f"is {start}, and dataset_to_index {stop}: its {length} rows are {end} to "
                    f"{end + length}"
                )
                check.note(
                    WARNING,
                    "span",
                    text,
                    f"{_AGAIN}: other tools would take other rows for this episode's",
                    file=str(self.path),
                    episode=f"episode {number}",
                    key="dataset_from_index",
                )
            end += length


def _kept_out(path: Path, episodes: Sequence[DemonstrationEpisode]) -> list[DemonstrationEpisode]:
    """Those of a dataset whose own run keeps the last ones of each task out of training, marked."""
    file = path / "meta" / f"{KEPT_OUT}.json"
    if not os.path.lexists(file):
        return list(episodes)
    count = read_json(file, AGAIN, DatasetError).get(LAST)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise DatasetError(f"{file} is damaged (its {LAST} is {count!r}): {AGAIN}")
    of_task: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        of_task.setdefault(episode.task_id or episode.instruction, []).append(i)
    marked = {i for rows in of_task.values() for i in rows[max(0, len(rows) - count) :]}
    return [dataclasses.replace(e, kept_out=i in marked) for i, e in enumerate(episodes)]


def read_rows(
    path: Path,
    info: Mapping[str, Any],
    keys: Sequence[str] = (STATE_KEY, ACTION_KEY),
    stored_as: Mapping[str, str] = MappingProxyType({}),
) -> LeRobotRows:
    """Read the numbers under ``keys``, and what is beside them; ``stored_as`` {key: what the files
    call it}, where that is another name. Raises `DatasetError` where the folder contradicts itself:
    rows that its metadata do not count, a task that has no text, rows of other lengths than their
    feature."""
    pa = pyarrow_package()
    files = sorted((path / "data").glob("*/*.parquet"))
    if not files:
        raise FileNotFoundError(f"no parquet file under {path / 'data'}")
    features = info["features"]
    wanted = [
        *keys,
        "episode_index",
        "task_index",
        "frame_index",
        "timestamp",
        BY_BASE,
        CONTROL,
        SENT_KEY,
        _ROW_SUCCESS,
    ]
    for file in files:
        require_content(file, DatasetError)
    stored = set(pa.parquet.read_schema(files[0]).names)
    columns = [
        k
        for k in wanted
        if k in keys or k in ("episode_index", "task_index") or (k in stored and k in features)
    ]
    names = {stored_as.get(key, key): key for key in columns}
    table = pa.concat_tables(pa.parquet.read_table(f, columns=list(names)) for f in files)
    table = table.rename_columns([names[name] for name in table.column_names])
    episode = _integers(table, "episode_index", path)
    frame = (
        _integers(table, "frame_index", path) if "frame_index" in columns else np.arange(len(table))
    )
    places = np.lexsort((frame, episode))
    meta = _episode_rows(path, pa)
    counts = _counts(path, episode[places], meta)
    vectors = {
        key: _vectors(table, key, path, pa)[places]
        for key in columns
        if key in keys
        or (key == SENT_KEY and features[key].get("shape") == features[ACTION_KEY]["shape"])
    }
    for key in keys:
        width, said = vectors[key].shape[1], features[key].get("shape")
        if sizes(said) and math.prod(sizes(said)) != width:
            raise DatasetError(
                f"{path}: {key} has {width} numbers a row, and meta/info.json says {said}. {_AGAIN}."
            )
    task_index, instructions = _tasks(
        path, pa, _integers(table, "task_index", path)[places], episode[places]
    )
    flags = table[_ROW_SUCCESS].combine_chunks() if _ROW_SUCCESS in columns else None
    flags = None if flags is None else np.asarray(_flat(flags, pa).fill_null(False), bool)[places]
    episodes, kept, start = [], [], 0
    for row in meta:
        n = counts[row["episode_index"]]
        if n:
            _check_frames(
                path,
                row["episode_index"],
                frame[places][start : start + n],
                "frame_index" in columns,
            )
            success = _success(row, None if flags is None else flags[start : start + n], path)
            known = (row.get("task_id"), row.get("init_state_id"))
            text = instructions[int(task_index[start])]
            episodes.append(DemonstrationEpisode(start, n, text, success, *known))
            kept.append(row)
        start += n
    if not episodes:
        raise DatasetError(
            f"{path} holds no demonstration. Collect some with 'vla-rl collect', or "
            "name another folder."
        )
    episodes = _kept_out(path, episodes)
    stamps = np.concatenate([np.arange(e.length) for e in episodes]) / float(info["fps"])
    if "timestamp" in columns:
        stamps = _vectors(table, "timestamp", path, pa)[places][:, 0]
    return LeRobotRows(
        path,
        files,
        places,
        vectors,
        stamps,
        task_index,
        instructions,
        episodes,
        [r["episode_index"] for r in kept],
        kept,
        by_base=_vectors(table, BY_BASE, path, pa)[places][:, 0].astype(bool)
        if BY_BASE in columns
        else None,
        by_person=_by_person(_vectors(table, CONTROL, path, pa)[places], features[CONTROL])
        if CONTROL in columns
        else None,
        empty=tuple(r["episode_index"] for r in meta if not counts[r["episode_index"]]),
    )


def _by_person(control: np.ndarray, feature: Mapping[str, Any]) -> np.ndarray | None:
    """Which rows of a session a person chose; None where the column is something else."""
    names = feature.get("names")
    if not isinstance(names, list) or len(names) != control.shape[1] or BY_PERSON not in names:
        return None
    return np.asarray(control[:, names.index(BY_PERSON)] > 0.5)


def sizes(shape: Any) -> list[int]:
    """A feature's shape; empty where it is none."""
    known = isinstance(shape, list | tuple) and all(type(n) is int and n > 0 for n in shape)
    return list(shape) if known else []


def declared(path: Path) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """{key: {the file: (smallest [d], largest [d])}} of state and action as ``meta/stats.json``
    says; none without it."""
    return {
        key: {_STATS: (low, high)}
        for key, (low, high) in _extremes(path).items()
        if _are_ends(low, high)
    }


def bad_statistics(path: Path, widths: Mapping[str, int]) -> list[str]:
    """Which smallest and largest numbers in ``meta/stats.json`` are none, or not one for each of
    the ``widths`` {key: numbers} of the data."""
    told = _extremes(path)
    return [
        f"min and max of {key} are no two vectors of {width} finite numbers"
        for key, width in widths.items()
        if key in told and not (_are_ends(*told[key]) and len(told[key][0]) == width)
    ]


def _are_ends(low: np.ndarray, high: np.ndarray) -> bool:
    return low.shape == high.shape and bool(np.isfinite([low, high]).all())


def _extremes(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{key: (min, max)} as the file has them; NaN for what is no vector of numbers."""
    file = path / "meta" / "stats.json"
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if not os.path.lexists(file):
        return {}
    stats = read_json(file, _AGAIN, DatasetError)
    for key in (STATE_KEY, ACTION_KEY):
        if key in stats:
            try:
                low, high = (
                    np.array(stats[key][name], np.float64).reshape(-1) for name in ("min", "max")
                )
                found[key] = low, high
            except (LookupError, TypeError, ValueError):
                found[key] = (np.array([np.nan]), np.array([np.nan]))
    return found


def _episode_rows(path: Path, pa: Any) -> list[dict[str, Any]]:
    """The rows of metadata by ``episode_index``."""
    files = sorted((path / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise FileNotFoundError(f"no parquet file under {path / 'meta/episodes'}")
    rows = []
    for file in files:
        require_content(file, DatasetError)
        names = pa.parquet.read_schema(file).names
        part = pa.parquet.read_table(file, columns=[n for n in names if not n.startswith("stats/")])
        for key in ("episode_index", "length"):
            _integers(part, key, file, "")
        rows += part.to_pylist()
    rows.sort(key=lambda r: r["episode_index"])
    numbers = [r["episode_index"] for r in rows]
    twice = next((a for a, b in itertools.pairwise(numbers) if a == b), None)
    if twice is not None:
        raise DatasetError(f"{path} has metadata of episode {twice} twice. {_AGAIN}.")
    return rows


def _counts(path: Path, episode: np.ndarray, meta: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """{episode_index: its rows}; they have to be as many as the metadata say."""
    numbers, counts = np.unique(episode, return_counts=True)
    found = dict(zip(numbers.tolist(), counts.tolist()))
    promised = {r["episode_index"]: int(r["length"]) for r in meta}
    for number in sorted({*found, *promised}):
        if found.get(number, 0) != promised.get(number, 0):
            says = f"say {promised[number]}" if number in promised else "know no such episode"
            raise DatasetError(
                f"{path} is incomplete: its data files hold {found.get(number, 0)} rows of episode "
                f"{number}, and its metadata {says}. {_AGAIN}."
            )
    return {number: found.get(number, 0) for number in promised}


def _check_frames(path: Path, number: int, frame: np.ndarray, known: bool) -> None:
    if known and not np.array_equal(frame, np.arange(len(frame))):
        row = int(np.argmax(frame != np.arange(len(frame))))
        raise DatasetError(
            f"{path}: episode {number} has the frame_index {frame[row]} in place of "
            f"{row}. {_AGAIN}."
        )


def _success(row: Mapping[str, Any], flags: np.ndarray | None, path: Path) -> bool | None:
    if row.get("success") is None and flags is not None:
        return bool(flags.any())
    try:
        return as_success(row.get("success"))
    except ValueError as error:
        raise DatasetError(
            f"{path}: episode {row['episode_index']}: {error}. Write true, false or nothing there."
        ) from None


def _tasks(
    path: Path, pa: Any, index: np.ndarray, episode: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Each row's place in the list of texts, and that list; the text is the frame's index,
    whatever pandas named it."""
    file = path / "meta" / "tasks.parquet"
    require_content(file, DatasetError)
    table = pa.parquet.read_table(file)
    named = next((name for name in table.column_names if name != "task_index"), None)
    if named is None or "task_index" not in table.column_names:
        raise DatasetError(
            f"{file} has the columns {table.column_names}: a task_index and a text "
            f"are needed. {_AGAIN}."
        )
    numbers, texts = table["task_index"].to_pylist(), table[named].to_pylist()
    if len(set(numbers)) < len(numbers):
        raise DatasetError(f"{file} gives a task_index more than one text. {_AGAIN}.")
    place = {number: i for i, number in enumerate(numbers)}
    found, inverse = np.unique(index, return_inverse=True)
    for number in found.tolist():
        if number not in place:
            row = int(np.argmax(index == number))
            at = row - int(np.argmax(episode == episode[row]))
            raise DatasetError(
                f"{file} has no text for the task_index {number}, which episode {episode[row]}, "
                f"row {at} has. {_AGAIN}."
            )
        if not isinstance(texts[place[number]], str):
            raise DatasetError(
                f"{file} has {texts[place[number]]!r} in place of the text of "
                f"task_index {number}. {_AGAIN}."
            )
    return np.array([place[n] for n in found.tolist()], np.int64)[inverse], texts


# ------------------------------------------------------------------------------------------ columns
def _integers(table: Any, key: str, path: Path, of: str = " of its data files") -> np.ndarray:
    column = table[key].combine_chunks()
    if column.null_count:
        raise DatasetError(f"{path}: {key} is empty in row {_first_null(column)}{of}. {_AGAIN}.")
    values = np.asarray(_flat(column).to_numpy(zero_copy_only=False))
    if values.dtype.kind not in "iuf":
        raise DatasetError(
            f"{path}: {key} is of {column.type}, and whole numbers are needed. {_AGAIN}."
        )
    whole = np.abs(values.astype(np.float64)) < 2**53
    whole &= np.floor(values) == values
    if not whole.all():
        row = int(np.argmin(whole))
        raise DatasetError(
            f"{path}: {key} is {values[row]} in row {row}{of}, no whole number. {_AGAIN}."
        )
    return values.astype(np.int64)


def _vectors(table: Any, key: str, path: Path, pa: Any) -> np.ndarray:
    """[n d] as stored. Raises `DatasetError` for rows of unlike lengths, or without a number."""
    column = table[key].combine_chunks()
    flat, n = _flat(column, pa), len(table)
    if pa.types.is_nested(flat.type):
        raise DatasetError(f"{path}: {key} is of {column.type}, and numbers are needed. {_AGAIN}.")
    if column.null_count or flat.null_count:
        row = (
            _first_null(column)
            if column.null_count
            else _first_null(flat) // max(len(flat) // max(n, 1), 1)
        )
        raise DatasetError(f"{path}: {key} is empty in row {row} of its data files. {_AGAIN}.")
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = np.asarray(column.value_lengths())
        if len(lengths) and (lengths != lengths[0]).any():
            row = int(np.argmax(lengths != lengths[0]))
            raise DatasetError(
                f"{path}: {key} has {lengths[row]} numbers in row {row} of its data files, and "
                f"{lengths[0]} in the first. {_AGAIN}."
            )
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(n, -1)


def _flat(column: Any, pa: Any = None) -> Any:
    pa = pa or pyarrow_package()
    of = pa.types
    while of.is_nested(column.type) and not (of.is_struct(column.type) or of.is_map(column.type)):
        column = column.flatten()
    return column


def _first_null(column: Any) -> int:
    return int(np.argmax(np.asarray(column.is_null())))
