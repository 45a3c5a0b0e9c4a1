"""Writes the journal: ``python -m real.recorder SOCKET FOLDER [ABOUT.json]``. Ordinary priority, a
process of its own.

It records from an episode's begin to its end. Where the disk is full it says so once, as a fault,
which stops the arm.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from real.journal import JournalError, JournalWriter, amend
from real.labels import Span, meant
from real.link import Client, LinkError
from real.messages import Chunk, Event, Frame, Message, Notice, Progress, State
from real.ring import RingReader
from real.scheduling import die_with_parent
from vla_rl.errors import DiskFull, MissingPackage, UserError

QUALITY = 90


def jpeg(image: np.ndarray) -> bytes:
    """uint8 RGB [H W 3] as JPEG."""
    try:
        import simplejpeg
    except ModuleNotFoundError as error:
        raise MissingPackage("simplejpeg", "real", "Recording pictures") from error
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(image), quality=QUALITY, colorspace="RGB", colorsubsampling="420"
    )


@dataclass
class _Closed:
    """An episode that has ended, and its journal."""

    span: Span
    path: Path
    size: int


class Recorder:
    """Takes the supervisor's messages one by one. A label goes to the episode in which the moment
    lies that it means, also when that has ended and another runs (`real.labels`)."""

    def __init__(self, folder: str | Path, about: dict[str, Any]):
        self.folder, self.about = Path(folder), about
        self.journal: JournalWriter | None = None
        self._episode = -1
        self._begun = 0.0
        self._closed: deque[_Closed] = deque(maxlen=8)
        self._rings: dict[str, RingReader] = {}

    def take(self, message: Message) -> None:
        """Raises `DiskFull`."""
        if isinstance(message, Notice) and message.name == "begin":
            self._close("another episode began", message.stamp)
            about = {**self.about, "task": message.value}
            self.journal, self._episode = (
                JournalWriter(self.folder, message.episode, about),
                message.episode,
            )
            self._begun = message.stamp
        if isinstance(message, Event) and message.name == "label":
            self._label(message)
        elif self.journal is not None:
            self._record(self.journal, message)

    def _label(self, event: Event) -> None:
        """Write it where it belongs; one that means no moment of an episode belongs nowhere."""
        spans = [closed.span for closed in self._closed]
        running = Span(self._episode, self._begun) if self.journal is not None else None
        found = meant(event.at, spans if running is None else [*spans, running])
        if found is None:
            return
        if self.journal is not None and found is running:
            self.journal.event(event)
            return
        closed = next(closed for closed in self._closed if closed.span is found)
        try:
            closed.size = amend(closed.path, closed.size, event)
        except (JournalError, FileNotFoundError) as error:  # somebody has taken it away
            print(f"a label was not kept: {error}", flush=True)

    def _record(self, journal: JournalWriter, message: Message) -> None:
        if isinstance(message, State):
            journal.tick(message)
        elif isinstance(message, Chunk):
            journal.chunk(message)
        elif isinstance(message, Frame):
            image = self._read(message)
            if image is not None:
                journal.frame(message, jpeg(image))
        elif isinstance(message, Event):
            journal.event(message)
        elif isinstance(message, Progress):
            if message.episode == self._episode:  # a slow model may speak of the one before
                journal.progress(message)
        elif isinstance(message, Notice):
            journal.notice(message)
            if message.name in ("end_episode", "discard"):
                self._close(message.value or message.name, message.stamp, message.name == "discard")

    def _read(self, frame: Frame) -> np.ndarray | None:
        ring = self._rings.get(frame.camera)
        try:
            if ring is None or ring.address != frame.ring:
                ring = self._rings[frame.camera] = RingReader(
                    frame.ring, (frame.height, frame.width, frame.channels)
                )
            return ring.read(frame.slot, frame.number)
        except (OSError, ValueError):
            return None  # overwritten meanwhile: `verify` finds the gap by its numbers

    def _close(self, reason: str, now: float, discarded: bool = False) -> None:
        if self.journal is not None:
            journal, self.journal = self.journal, None
            path = journal.close(reason, discarded)
            self._closed.append(_Closed(Span(self._episode, self._begun, now), path, journal.size))

    def close(self) -> None:
        self._close("the session ended", math.inf)


def main() -> None:
    path, folder, *more = sys.argv[1:]
    about = json.loads(Path(more[0]).read_text(encoding="utf-8")) if more else {}
    die_with_parent(signal.SIGTERM)
    ended = False

    def end(*_: Any) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)
    recorder, client = Recorder(folder, about), Client(path, "recorder")
    print("ready", flush=True)
    try:
        while not ended:
            with contextlib.suppress(LinkError):
                message = client.receive(0.2)
                if message is not None:
                    recorder.take(message)
                continue
            break  # the session is over
    except (DiskFull, OSError) as error:
        print(f"error: {error}", flush=True)
        text = f"recorder: {error}"[:200]
        client.send(Event, name="fault", value="recording failed", at=time.monotonic(), lease="")
        client.send(Event, name="note", value=text, at=time.monotonic(), lease="")
        raise SystemExit(2) from None
    finally:
        with contextlib.suppress(UserError, OSError):
            recorder.close()


if __name__ == "__main__":
    main()
