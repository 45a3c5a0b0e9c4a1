"""MCAP with JSON messages (Foxglove's schemas): topics at rates of their own, brought to one.

At each tick a row has what each topic said last, from when all have spoken until the first ends.
"""

from __future__ import annotations

import base64
import io
import json
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.foreign.takes import Options, Take, colours, matrix, numbered
from vla_rl.data.lerobot_format import DatasetError
from vla_rl.errors import ConfigError, MissingPackage, first_line

_NUMBERS = ("position", "data", "values")  # of a message, where its vector may be


class Mcap:
    """See `Source`; each file is an episode. ``--rename TOPIC=observation.state``,
    ``TOPIC=action`` and ``TOPIC=CAMERA`` say which is what."""

    robot = ""

    def __init__(self, path: Path, options: Options):
        self.path, self.options, self.fps = path, options, options.fps
        try:
            import mcap.reader
        except ImportError:
            raise MissingPackage("mcap", "mcap", "Reading MCAP recordings") from None
        self._reader = mcap.reader.make_reader
        self._files = [path] if path.is_file() else sorted(path.rglob("*.mcap"))
        if not options.fps:
            raise ConfigError(
                f"{path}: topics have rates of their own, so give rows a second: --fps HZ"
            )
        ours = {word: topic for topic, word in options.rename.items()}
        if missing := [word for word in ("observation.state", "action") if word not in ours]:
            topics = ", ".join(self._topics(self._files[0]))
            raise ConfigError(
                f"{path} has the topics {topics}: say which is {missing[0]} with --rename "
                f"TOPIC={missing[0]}"
            )
        self._state, self._action = ours.pop("observation.state"), ours.pop("action")
        self._cameras = {name: topic for name, topic in ours.items() if options.keeps(name)}
        first = next(self.takes(pictures=False))
        self.state_names = self._names or numbered("state", first.state)
        self.action_names = numbered("action", first.actions)

    _names: tuple[str, ...] = ()

    def _topics(self, file: Path) -> dict[str, str]:
        """{topic: how its messages are encoded}"""
        with open(file, "rb") as opened:
            summary = self._reader(opened).get_summary()
            channels = summary.channels.values() if summary else ()
            return {c.topic: c.message_encoding for c in channels}

    def takes(self, pictures: bool = True) -> Iterator[Take]:
        for file in self._files:
            yield self._take(file, pictures)

    def _take(self, file: Path, pictures: bool) -> Take:
        shown = self._cameras if pictures else {}
        wanted = [self._state, self._action, *shown.values()]
        try:
            there = self._topics(file)
            if missing := [topic for topic in wanted if topic not in there]:
                raise DatasetError(f"{file} has no {missing[0]}, it has {', '.join(there)}")
            if other := [topic for topic in wanted if there[topic] != "json"]:
                raise DatasetError(
                    f"{file}: {other[0]} is encoded as {there[other[0]]!r}, and only JSON messages "
                    "are read: write it again with a JSON encoder, or convert it with its own tools"
                )
            said = self._messages(file, wanted)
        except DatasetError:
            raise
        except Exception as error:  # of mcap, of many kinds
            raise DatasetError(f"{file} cannot be read: {first_line(error)}") from None
        ticks = self._ticks(file, said)
        rows = {
            topic: [messages[bisect_right(stamps, tick) - 1] for tick in ticks]
            for topic, (stamps, messages) in said.items()
        }
        names = rows[self._state][0].get("name")
        if isinstance(names, list) and not self._names:
            self._names = tuple(map(str, names))
        state, actions = (
            matrix([_vector(row, topic, file) for row in rows[topic]], f"{file}: {topic}")
            for topic in (self._state, self._action)
        )
        images = {
            camera: colours(_shown(rows[topic], topic, file), f"{file}: {topic}")
            for camera, topic in shown.items()
        }
        return Take(file.name, images, state, actions, self.options.instruction)

    def _messages(self, file: Path, topics: list[str]) -> dict[str, tuple[list[int], list[Any]]]:
        said: dict[str, tuple[list[int], list[Any]]] = {topic: ([], []) for topic in topics}
        with open(file, "rb") as opened:
            for _, channel, message in self._reader(opened).iter_messages(topics=topics):
                stamps, messages = said[channel.topic]
                stamps.append(message.log_time)
                messages.append(json.loads(message.data))
        return said

    def _ticks(self, file: Path, said: dict[str, tuple[list[int], list[Any]]]) -> list[int]:
        """In nanoseconds."""
        if silent := [topic for topic, (stamps, _) in said.items() if not stamps]:
            raise DatasetError(f"{file}: {silent[0]} never speaks")
        begin = max(stamps[0] for stamps, _ in said.values())
        end = min(stamps[-1] for stamps, _ in said.values())
        count = int((end - begin) * self.fps / 1e9 + 1e-6) + 1
        if end < begin:
            raise DatasetError(f"{file}: its topics do not overlap in time")
        return [begin + round(i * 1e9 / self.fps) for i in range(count)]


def _vector(row: dict[str, Any], topic: str, file: Path) -> list[float]:
    for key in _NUMBERS:
        if isinstance(row.get(key), list):
            return [float(x) for x in row[key]]
    raise DatasetError(
        f"{file}: a message of {topic} has {', '.join(row)}, and a list named "
        f"{', '.join(_NUMBERS)} is meant"
    )


def _shown(rows: list[dict[str, Any]], topic: str, file: Path) -> np.ndarray:
    """Foxglove's CompressedImage."""
    from PIL import Image

    try:
        decoded = [base64.b64decode(row["data"]) for row in rows]
        return np.stack([np.asarray(Image.open(io.BytesIO(x)).convert("RGB")) for x in decoded])
    except Exception as error:
        raise DatasetError(f"{file}: {topic} is no CompressedImage: {first_line(error)}") from None
