"""What may be wrong with recorded episodes: one check, whatever holds them.

Each source (LeRobot folders, HDF5 files, journals, replays) hands its episodes over as `Rows`;
`DataCheck` looks at their numbers, time stamps, instructions and success flags, and `Report` tells
what it found. What would teach a policy nonsense is an error, and refused before training; what
somebody may have meant is a warning.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.lerobot_format import ACTION_KEY, SENT_KEY, STATE_KEY, DatasetError
from vla_rl.specs import EmbodimentSpec

ERROR, WARNING = "error", "warning"
LARGEST = 1e6  # no state or action of a robot is larger, in any unit that embodiments use
SUMMED = 1e12  # nor anything else that learners add up and square: a reward
LONGEST_TEXT = 1000  # letters of an instruction
# what ordinary texts have: ends of lines, and Unicode's joiner and non-joiner of letters
_INVISIBLE = "\n\r\t\u200c\u200d"
ROUNDING = 1e-5  # share of a number's range by which float32 arithmetic may leave it
# Share of a number's range by which it may lie beyond its bounds before it is refused: actions were
# clipped by whoever executed them; labels with noise on top, and measured states, go further.
LEEWAY = {ACTION_KEY: 0.1, SENT_KEY: 1.0, STATE_KEY: 0.5}
# Of two recordings of one arm's joints, one that reaches so many times as far in most of them is in
# another unit: degrees and radians differ by 57.
OTHER_UNIT = 20.0
_OFF, _WRONG = 0.1, 0.5  # shares of a control period by which a time stamp is doubtful, or refused


@dataclass(frozen=True)
class Rows:
    """One episode: ``vectors`` {key: [T d]} in physical units, ``stamps`` [T] (s since it began;
    None: none are kept).

    ``name`` is what its source calls it, ``file`` where it lies. ``success`` is None where nobody
    said; ``instruction`` None where such a source has none. ``aligned``: all vectors have a row per
    control step (a replay's states do not).
    """

    name: str
    file: str
    vectors: Mapping[str, np.ndarray]
    instruction: Any = None
    success: Any = None
    stamps: np.ndarray | None = None
    aligned: bool = True

    def __len__(self) -> int:
        return max((len(v) for v in self.vectors.values()), default=0)


@dataclass(frozen=True)
class Finding:
    """One kind of mistake at its first place, and in how many ``episodes`` it was found. ``row``
    counts control steps from 0 within the episode; None: the episode or the file as a whole."""

    level: str
    kind: str
    text: str
    remedy: str
    file: str = ""
    episode: str = ""
    row: int | None = None
    key: str = ""
    episodes: int = 1

    @property
    def place(self) -> str:
        row = "" if self.row is None else f"row {self.row}"
        return ", ".join(part for part in (self.file, self.episode, row, self.key) if part)

    def line(self) -> str:
        more = f" (in {self.episodes} episodes)" if self.episodes > 1 else ""
        return f"{self.place}: {self.text}{more}. {self.remedy}"


@dataclass(frozen=True)
class Report:
    """What was found in ``source``. ``failed``: episodes that are marked as failures;
    ``unmarked``: that say neither."""

    source: str
    kind: str
    episodes: int = 0
    rows: int = 0
    failed: int = 0
    unmarked: int = 0
    findings: tuple[Finding, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == WARNING)

    def require(self) -> None:
        """Raise `DatasetError` with the first error, if there is one."""
        if self.errors:
            more = len(self.errors) - 1
            rest = (
                f" There {'is 1 more mistake' if more == 1 else f'are {more} more mistakes'}."
                if more
                else ""
            )
            tell = (
                f" 'vla-rl data check {self.source}' lists them."
                if more and Path(self.source).exists()
                else ""
            )
            raise DatasetError(f"{self.errors[0].line()}.{rest}{tell}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``sound`` says whether there is no error."""
        counts = {
            name: getattr(self, name)
            for name in ("source", "kind", "episodes", "rows", "failed", "unmarked")
        }
        return {
            **counts,
            "sound": not self.errors,
            "findings": [dataclasses.asdict(f) for f in self.findings],
        }

    def text(self) -> str:
        """The findings as a table: level, place, what is wrong, and the remedy below."""
        marked = f", {self.failed} failed" if self.failed else ""
        marked += f", {self.unmarked} without a success flag" if self.unmarked else ""
        lines = [f"{self.source}: {self.kind}, {self.episodes} episodes, {self.rows} rows{marked}"]
        for f in self.findings:
            more = f" (in {f.episodes} episodes)" if f.episodes > 1 else ""
            lines += [
                f"  {f.level:<7}  {f.place or '-'}",
                f"           {f.text}{more}",
                f"           → {f.remedy}",
            ]
        said = [
            f"{n} {word}{'' if n == 1 else 's'}"
            for n, word in ((len(self.errors), ERROR), (len(self.warnings), WARNING))
            if n
        ]
        return "\n".join([*lines, f"  {' and '.join(said) or 'nothing found'}"])


@dataclass
class DataCheck:
    """Looks at one episode after another; `report` tells.

    ``embodiment`` gives names and bounds of state and action, ``bounds`` {key: {who says so: (low
    [d], high [d])}} further ones; ``leeway`` {key: share of the range by which they may be left}.
    ``texts``: the instructions of the run that would learn from them (empty: any). ``hz``: rows per
    second. ``names`` {key: names of its numbers} where no robot gives them.
    """

    source: str
    kind: str
    embodiment: EmbodimentSpec | None = None
    texts: Collection[str] = ()
    hz: float | None = None
    bounds: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    leeway: Mapping[str, float] = field(default_factory=lambda: LEEWAY)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    _found: dict[tuple[str, str, str], Finding] = field(default_factory=dict)
    _counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("episodes", "rows", "failed", "unmarked"), 0)
    )
    _spread: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _strangers: list[Rows] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts = {normalised(text) for text in self.texts}

    def note(self, level: str, kind: str, text: str, remedy: str, **place: Any) -> None:
        """Keep a finding; the same kind at the same key is kept once, and counted."""
        at = (level, kind, place.get("key", ""))
        known = self._found.get(at)
        if known is None:
            self._found[at] = Finding(level, kind, text, remedy, **place)
        else:
            self._found[at] = dataclasses.replace(known, episodes=known.episodes + 1)

    def add(self, rows: Rows) -> None:
        self._counts["episodes"] += 1
        self._counts["rows"] += len(rows)
        at = {"file": rows.file, "episode": rows.name}
        self._check_success(rows, at)
        if len(rows) < 2:
            kind, what = (
                ("one_row", "it has a single row") if len(rows) else ("empty", "it has no row")
            )
            self.note(
                WARNING,
                kind,
                what,
                "Leave the episode out" if len(rows) else "It is left out",
                **at,
            )
        lengths = {key: len(values) for key, values in rows.vectors.items()}
        if rows.aligned and len(set(lengths.values())) > 1:
            said = ", ".join(f"{n} rows of {key}" for key, n in lengths.items())
            self.note(ERROR, "lengths", said, "Leave the episode out, or write it again", **at)
        for key, values in rows.vectors.items():
            self._check_values(key, np.asarray(values), at)
        if rows.instruction is not None and len(rows):
            self._check_text(rows, at)
        if rows.stamps is not None and len(rows):
            self._check_stamps(np.asarray(rows.stamps), at)

    def report(self) -> Report:
        known, strangers = self._counts["episodes"], self._strangers
        if strangers:
            every = len(strangers) == known
            first = strangers[0]
            self.note(
                ERROR if every else WARNING,
                "other_task",
                f"{known - len(strangers)} of {known} episodes have an instruction of the run's "
                f"tasks; this one is {shortened(first.instruction)}, and the run asks for "
                f"{shortened(min(self.texts, key=len))}",
                "Name the dataset of these tasks, or give tasks and dataset the same words"
                if every
                else "Leave the others out unless they are meant to be learned too",
                file=first.file,
                episode=first.name,
            )
        if self._counts["failed"]:
            self.note(
                WARNING,
                "failed",
                f"{self._counts['failed']} of {known} episodes are marked as failures",
                "They are not imitated unless sft.failures=true asks for them",
                file=self.source,
            )
        if self._counts["rows"] > 1:
            self._check_spread()
        if not known:
            self.note(
                ERROR,
                "nothing",
                "it holds no episode",
                "Name another folder, or collect some with 'vla-rl collect'",
                file=self.source,
            )
        order = sorted(self._found.values(), key=lambda f: f.level != ERROR)
        return Report(self.source, self.kind, **self._counts, findings=tuple(order))

    # ---- inner parts
    def _check_success(self, rows: Rows, at: dict[str, str]) -> None:
        try:
            success = as_success(rows.success)
        except ValueError as error:
            self.note(ERROR, "success_flag", str(error), "Write true, false or nothing there", **at)
            return
        self._counts["failed"] += success is False
        self._counts["unmarked"] += success is None

    def _check_values(self, key: str, values: np.ndarray, at: dict[str, str]) -> None:
        names = self._names(key)
        if values.ndim != 2 or (names and values.shape[1] != len(names)):
            wanted = f"[{len(values)}, {len(names) if names else 'd'}]"
            self.note(
                ERROR,
                "width",
                f"it has the shape {list(values.shape)}, and {wanted} is needed",
                "Name the robot it was recorded with, or write it again",
                key=key,
                **at,
            )
            return
        if values.dtype.kind not in "fiub":
            self.note(
                ERROR,
                "no_numbers",
                f"it holds {values.dtype}",
                "Write it as numbers",
                key=key,
                **at,
            )
            return
        if not values.size:
            return
        values = values.astype(np.float64)
        for kind, text, bad, remedy in (
            (
                "not_finite",
                "is {value}",
                ~np.isfinite(values),
                "Leave the episode out, or mend what recorded it",
            ),
            (
                "too_large",
                f"is {{value:g}}, which {'no robot' if key in LEEWAY else 'nobody'}'s number is",
                np.abs(values) > (LARGEST if key in LEEWAY else SUMMED),
                "Leave the episode out, or mend its units",
            ),
        ):
            if bad.any():
                t, d = np.argwhere(bad)[0]
                self._note_value(
                    ERROR, kind, text.format(value=values[t, d]), remedy, key, (int(t), int(d)), at
                )
                return
        self._check_bounds(key, values, at)
        low, high = values.min(0), values.max(0)
        if key in self._spread and self._spread[key][0].shape == low.shape:
            low, high = (
                np.minimum(low, self._spread[key][0]),
                np.maximum(high, self._spread[key][1]),
            )
        self._spread[key] = (low, high)

    def _check_bounds(self, key: str, values: np.ndarray, at: dict[str, str]) -> None:
        """Beyond the robot's bounds, or beyond those that the data declare."""
        leeway = self.leeway.get(key, 0.0)
        for whose, (low, high) in self._bounds(key).items():
            if low.shape != values.shape[1:]:
                continue
            span = np.maximum(high - low, ROUNDING)
            with np.errstate(invalid="ignore"):  # (no bound is an infinite one)
                share = np.nan_to_num(np.maximum(low - values, values - high) / span, nan=-1.0)
            t, d = map(int, np.unravel_index(int(np.argmax(share)), share.shape))
            if share[t, d] <= ROUNDING:
                continue
            ours = whose == "the robot"
            text = f"is {values[t, d]:g}, beyond the {low[d]:g} … {high[d]:g} of {whose}"
            remedy = (
                "Look at units, frame and control (degrees for radians, absolute for relative), or "
                "correct the bounds"
                if ours
                else "Write or fetch the data again, or remove statistics that are out of date"
            )
            level = ERROR if share[t, d] > leeway else WARNING
            # noise on top of a label, clipped before anything learns from it
            if level == WARNING and key == SENT_KEY:
                continue
            kind = "out_of_bounds" if ours else "not_as_declared"
            self._note_value(level, kind, text, remedy, key, (int(t), int(d)), at)

    def _note_value(
        self,
        level: str,
        kind: str,
        text: str,
        remedy: str,
        key: str,
        cell: tuple[int, int],
        at: dict[str, str],
    ) -> None:
        """``cell``: row and number in it."""
        names = self._names(key)
        self.note(
            level,
            kind,
            text,
            remedy,
            row=cell[0],
            key=f"{key}[{names[cell[1]] if names else cell[1]}]",
            **at,
        )

    def _check_text(self, rows: Rows, at: dict[str, str]) -> None:
        text = rows.instruction
        why = bad_instruction(text)
        if why:
            self.note(
                ERROR,
                "instruction",
                f"its instruction {why}",
                "Write what was asked for, or leave the episode out",
                **at,
            )
        elif self.texts and normalised(text) not in self.texts:
            self._strangers.append(rows)

    def _check_stamps(self, stamps: np.ndarray, at: dict[str, str]) -> None:
        kept, stamps = stamps.dtype, stamps.astype(np.float64)
        remedy = "Write the time stamps anew, or leave the episode out"
        at = {**at, "key": "timestamp"}
        if not np.isfinite(stamps).all():
            row = int(np.argmin(np.isfinite(stamps)))
            self.note(ERROR, "time", f"is {stamps[row]}", remedy, row=row, **at)
            return
        steps = np.diff(stamps)
        if (steps <= 0).any():
            row = int(np.argmax(steps <= 0)) + 1
            self.note(
                ERROR,
                "time",
                f"is {stamps[row]:g} s after {stamps[row - 1]:g} s",
                remedy,
                row=row,
                **at,
            )
            return
        if self.hz is None or not len(steps):
            return
        rounding = (
            2 * float(np.spacing(np.abs(stamps).max().astype(kept))) if kept.kind == "f" else 0.0
        )
        if rounding * self.hz > _OFF:
            text = (
                f"is stored as {kept} to within {rounding:g} s, too coarse to tell {self.hz:g} Hz"
            )
            self.note(
                WARNING,
                "coarse_time",
                text,
                "Write the time stamps from each episode's beginning",
                **at,
            )
        off = np.maximum(np.abs(steps - 1 / self.hz) - rounding, 0) * self.hz
        if off.max() > _OFF:
            row = int(off.argmax()) + 1
            text = (
                f"this row comes {steps[row - 1]:g} s after the one before, and {self.hz:g} Hz are "
                f"{1 / self.hz:g} s"
            )
            self.note(
                ERROR if off.max() > _WRONG else WARNING,
                "rate",
                text,
                "Record at one rate; where rows are missing, make two episodes of it",
                row=row,
                **at,
            )

    def _check_spread(self) -> None:
        for key, (low, high) in self._spread.items():
            names = self._names(key)
            still = [str(names[d] if names else d) for d in np.flatnonzero(low == high).tolist()]
            if still and key in (ACTION_KEY, STATE_KEY):
                what = f"{', '.join(still)} never {'changes' if len(still) == 1 else 'change'}"
                self.note(WARNING, "constant", what, "Look whether it was recorded", key=key)
        self._check_units()

    def _check_units(self) -> None:
        """Whether goals reach as far as the numbers of the state that have their names."""
        asked, felt = self._names(ACTION_KEY), self._names(STATE_KEY)
        both = [(asked.index(name), felt.index(name)) for name in asked if name in felt]
        if not both or not {ACTION_KEY, STATE_KEY} <= self._spread.keys():
            return
        mine, its = np.array(both).T
        reach = {key: high - low for key, (low, high) in self._spread.items()}
        ratio = reaches(reach[ACTION_KEY][mine], reach[STATE_KEY][its])
        if not 1 / OTHER_UNIT < ratio < OTHER_UNIT:
            less = "further" if ratio > 1 else "less far"
            self.note(
                WARNING,
                "units",
                f"it reaches {max(ratio, 1 / ratio):.3g} times {less} than the state of the same names",
                "Look whether it is in another unit (degrees, radians), or moves, not goals",
                key=ACTION_KEY,
            )

    def _names(self, key: str) -> Sequence[str]:
        if self.embodiment is not None:
            own = {ACTION_KEY: self.embodiment.action_names, SENT_KEY: self.embodiment.action_names}
            own[STATE_KEY] = self.embodiment.proprio_names
            if key in own:
                return own[key]
        return self.names.get(key, ())

    def _bounds(self, key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        spec = self.embodiment
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if spec is not None and key in (ACTION_KEY, SENT_KEY):
            found["the robot"] = (np.array(spec.action_low), np.array(spec.action_high))
        elif (
            spec is not None and key == STATE_KEY and spec.frame == "joints"
        ):  # a joint has one range, asked and measured
            known = dict(zip(spec.action_names, zip(spec.action_low, spec.action_high)))
            ranges = np.array(
                [known.get(name, (-np.inf, np.inf)) for name in spec.proprio_names]
            ).reshape(-1, 2)
            found["the robot"] = (ranges[:, 0], ranges[:, 1])
        return found | dict(self.bounds.get(key, {}))


def reaches(one: np.ndarray, two: np.ndarray) -> float:
    """How many times as far ``one`` [d] reaches as ``two`` [d]: the median of what moves in both."""
    moves = (one > 0) & (two > 0)
    return float(np.median(one[moves] / two[moves])) if moves.any() else 1.0


def as_success(value: Any) -> bool | None:
    """A success flag as files hold it: true, false, 1, 0; None or NaN where nobody said. Else
    raises ``ValueError``."""
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        return None
    if isinstance(value, bool | np.bool_) or (
        isinstance(value, int | float | np.number) and value in (0, 1)
    ):
        return bool(value)
    raise ValueError(f"its success is {value!r}, which is neither true nor false")


def bad_instruction(text: Any) -> str:
    """Why ``text`` can be no instruction; "" where it can."""
    if not isinstance(text, str):
        return f"is {text!r}, and a text is needed"
    if all(c.isspace() or c in _INVISIBLE for c in text):
        return "is empty"
    if len(text) > LONGEST_TEXT:
        return f"has {len(text)} letters (at most {LONGEST_TEXT})"
    strange = next(
        (
            c
            for c in text
            if not c.isprintable() and c not in _INVISIBLE and unicodedata.category(c) != "Zs"
        ),
        None,
    )
    return "" if strange is None else f"has the character {strange!r}"


def normalised(text: str) -> str:
    """Instructions are the same where they differ in case, spaces or a full stop alone."""
    return " ".join(text.lower().split()).rstrip(" .")


def shortened(text: str, letters: int = 60) -> str:
    return repr(text if len(text) <= letters else text[: letters - 1] + "…")
