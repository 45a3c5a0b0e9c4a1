"""Reading LIBERO's official initial states: torch-saved pickles, from which numpy arrays alone
are let through."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sim.libero import plus
from vla_rl.errors import UserError

_LARGEST = 64 * 2**20  # bytes of a file; the official ones are below 100 kB
_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    MemoryError,
    ImportError,
    OverflowError,
    UnicodeError,
    RecursionError,
    NotImplementedError,
)


def read_init_states(path: str | Path) -> np.ndarray:
    """Float64 [n, 1 + nq + nv]: time, joint positions and velocities of each state in a
    ``.pruned_init`` file, or in LIBERO-PRO's arrays (``.npz``).

    Raises `UserError` for a file that is missing, no such archive, or that holds anything but plain
    numbers.
    """
    path = Path(path)
    try:
        states = _arrays(path) if path.suffix == ".npz" else _pickled(path)
        if plus.LAYOUTS in path.parts and isinstance(states, np.ndarray):
            states = np.atleast_2d(states)  # each has one state
        if (
            not isinstance(states, np.ndarray)
            or states.ndim != 2
            or states.dtype != np.float64
            or not len(states)
        ):
            what = (
                f"{states.dtype} {list(states.shape)}"
                if isinstance(states, np.ndarray)
                else type(states).__name__
            )
            raise ValueError(f"it holds {what}, not an array float64 [n, d]")
        if not np.isfinite(states).all():
            raise ValueError("it holds numbers that are not finite")
    except _ERRORS as error:
        raise UserError(
            f"The initial states in {path} cannot be read: {error or type(error).__name__}. Put "
            "back the file of the LIBERO package (reinstall hf-libero), or use "
            "env.init_states=sampled."
        ) from error
    return states


def _arrays(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist()) > _LARGEST:
            raise ValueError(f"its arrays are larger than {_LARGEST >> 20} MiB")
    with np.load(path, allow_pickle=False) as found:
        return found["states"]


def _pickled(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith("data.pkl")]
        if len(names) != 1:
            raise ValueError(f"it holds {len(names)} pickles, not one")
        if archive.getinfo(names[0]).file_size > _LARGEST:
            raise ValueError(f"its pickle is larger than {_LARGEST >> 20} MiB")
        found = _ArrayUnpickler(io.BytesIO(archive.read(names[0]))).load()
    return found.values if isinstance(found, _Array) else found


class _Kind:
    """Stands in for a numpy dtype of plain numbers; the real one would take memory layouts from
    the file."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = str(code), "<"
        if self.code not in ("f8", "f4", "i8", "i4"):
            raise pickle.UnpicklingError(f"it holds an array of {code!r}, not of numbers")

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]
        if self.order not in ("<", ">", "="):
            raise pickle.UnpicklingError(f"it has numbers in the byte order {state[1]!r}")


class _Array:
    """Stands in for a numpy array until its bytes are known."""

    def __init__(self, *_: Any) -> None:
        self.values: np.ndarray | None = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, kind, columns_first, raw = state
        if not isinstance(kind, _Kind) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of numbers")
        values = np.frombuffer(raw, dtype=np.dtype(kind.order + kind.code))
        self.values = values.reshape(shape, order="F" if columns_first else "C").astype(
            values.dtype.newbyteorder("=")
        )


class _ArrayUnpickler(pickle.Unpickler):
    """Loads numpy arrays of numbers; every other name in the pickle is refused before anything
    of it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _Array
        if (module, name) == ("numpy", "ndarray"):
            return _Array
        if (module, name) == ("numpy", "dtype"):
            return _Kind
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 writes bytes
            return _encode
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, and nothing but numpy arrays may be in it"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to storage outside of its pickle")


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes text as {encoding!r}")
    return str(text).encode("latin1")
