"""Pictures between processes: a ring of slots in anonymous shared memory, which leaves nothing
behind when its writer dies.

The writer's descriptor is reached as /proc/PID/fd/N by processes of the same user, so a `Frame`
message can name it. The mark of a slot is odd while it is being written; a reader copies, and looks
at the mark again.
"""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np

from real.messages import Frame

SLOTS = 8
_RINGS = 16  # a camera's process that starts again has another ring
_HEAD = struct.Struct("<qq")  # odd while writing, the picture's number


class RingWriter:
    """``shape`` [H W C] uint8 of one camera."""

    def __init__(self, name: str, shape: tuple[int, int, int], slots: int = SLOTS):
        self.shape, self.slots = shape, slots
        self._size = _HEAD.size + int(np.prod(shape))
        self._fd = os.memfd_create(f"ring-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self._size * slots)
        self._map = mmap.mmap(self._fd, self._size * slots)
        self._turn = -1
        self.address = f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, image: np.ndarray, number: int) -> int:
        """Put the picture into the next slot, and return that."""
        self._turn += 1
        slot = self._turn % self.slots
        start, mark = slot * self._size, 2 * self._turn
        _HEAD.pack_into(self._map, start, mark + 1, number)
        self._map[start + _HEAD.size : start + self._size] = np.ascontiguousarray(
            image, dtype=np.uint8
        ).tobytes()
        _HEAD.pack_into(self._map, start, mark + 2, number)
        return slot

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


class RingReader:
    """Opens the ring of a `Frame`; raises OSError where its writer is gone."""

    def __init__(self, address: str, shape: tuple[int, int, int]):
        self.address, self.shape = address, shape
        self._size = _HEAD.size + int(np.prod(shape))
        fd = os.open(address, os.O_RDONLY)
        try:
            self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def read(self, slot: int, number: int) -> np.ndarray | None:
        """A copy uint8 [H W C] of picture ``number``; None where it has been overwritten."""
        start = slot * self._size
        before = _HEAD.unpack_from(self._map, start)
        data = bytes(self._map[start + _HEAD.size : start + self._size])
        if before[0] % 2 or before[1] != number or _HEAD.unpack_from(self._map, start) != before:
            return None
        return np.frombuffer(data, np.uint8).reshape(self.shape)

    def close(self) -> None:
        self._map.close()


class Rings:
    """The picture of a `Frame`, copied out of its camera's ring; None where it is overwritten or
    its writer gone."""

    def __init__(self) -> None:
        self._open: dict[str, RingReader] = {}

    def __call__(self, frame: Frame) -> np.ndarray | None:
        shape = (frame.height, frame.width, frame.channels)
        try:
            if frame.ring not in self._open or self._open[frame.ring].shape != shape:
                self._forget(frame.ring)
                self._open[frame.ring] = RingReader(frame.ring, shape)
            return self._open[frame.ring].read(frame.slot, frame.number)
        except (OSError, ValueError):
            self._forget(frame.ring)
            return None

    def _forget(self, ring: str) -> None:
        while ring in self._open or len(self._open) >= _RINGS:
            name = ring if ring in self._open else next(iter(self._open))
            self._open.pop(name).close()
