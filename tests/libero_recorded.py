"""What LIBERO's own environments did is recorded, so that it need not be done anew every time.

``python tests/libero_recorded.py [WORD ...]`` goes beside them for every case whose name has one of
the words (all, where none is given), compares bit by bit, and writes hashes of what both did into
``libero_recorded.json``. A test whose hash is the recorded one has shown the same as beside them; a
test whose hash is another, or which runs under other versions, goes beside them itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sim.interpreter import version_of

FILE = Path(__file__).with_suffix(".json")
PACKAGES = ("mujoco", "robosuite", "hf-libero", "lerobot")  # who steps and draws in the references


def versions() -> dict[str, str]:
    return {package: version_of(package) for package in PACKAGES}


@functools.cache
def _kept() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.is_file() else {"versions": {}, "hashes": {}}


def is_recorded(case: str, alone: Callable[[], str]) -> bool:
    """Whether a reference of these versions did what ``alone()`` hashes to, which is not called where
    none is recorded."""
    same = all(
        version == version_of(package)
        for package, version in _kept()["versions"].items()
        if package != "lerobot" or case.startswith(package)
    )
    return same and case in _kept()["hashes"] and _kept()["hashes"][case] == alone()


class Trace:
    """A hash of all that was looked at."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *arrays: Any) -> None:
        for array in arrays:
            self._hash.update(np.ascontiguousarray(array).tobytes())

    def look(self, data: Any, observation: Any) -> None:
        """MuJoCo's state, and what a policy sees."""
        self.add(data.qpos, data.qvel, observation.proprio)
        self.add(*(observation.images[name] for name in sorted(observation.images)))

    @property
    def text(self) -> str:
        return self._hash.hexdigest()[:32]


def record(hashes: dict[str, str]) -> None:
    """Keep them beside those that are there of the same versions."""
    before = _kept()["hashes"] if _kept()["versions"] == versions() else {}
    both = {"versions": versions(), "hashes": dict(sorted({**before, **hashes}.items()))}
    FILE.write_text(json.dumps(both, indent=1) + "\n")
    _kept.cache_clear()


def main(words: list[str]) -> None:
    import test_libero_pro
    import test_libero_published
    import test_libero_sim
    from libero_reference import libero_problem

    if problem := libero_problem():
        raise SystemExit(f"needs LIBERO: {problem}")
    for module in (test_libero_sim, test_libero_published, test_libero_pro):
        for case, beside in module.BESIDE_THEM.items():
            if not words or any(word in case for word in words):
                record({case: beside()})
                print(case, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
