"""States as one flat array of bytes, for a store that shares arrays without copying: no pickles,
whatever the dtype.

A packed state is what `vla_rl.storage.save_state` would write into its two files, one behind the
other: the length of the structure (8 bytes, little-endian), the structure as JSON, the tensors in
the safetensors format.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.errors import TrainingDiverged, UserError
from vla_rl.shards import TensorLayout, bytes_of, header_of, places_in
from vla_rl.storage import join_state, split_state

_LENGTH = 8


def packed(state: Mapping[str, Any]) -> np.ndarray:
    """Nested dicts (string keys) and lists of tensors, numbers, strings and None as bytes uint8
    [n]. Nothing is in memory twice."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(split_state(state, tensors)).encode()
    structure += b" " * (-len(structure) % _LENGTH)  # so that tensors lie as their types want
    table = {name: TensorLayout(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    header, names = header_of(table)
    begin = len(structure).to_bytes(_LENGTH, "little") + structure + header
    data = np.empty(len(begin) + sum(layout.nbytes for layout in table.values()), dtype=np.uint8)
    data[: len(begin)] = np.frombuffer(begin, dtype=np.uint8)
    at = len(begin)
    for name in names:
        part = data[at : at + table[name].nbytes]
        part[:] = np.frombuffer(bytes_of(tensors[name].cpu().contiguous()), dtype=np.uint8)
        at += len(part)
    return data


def unpacked(data: np.ndarray, held: bool = False) -> dict[str, Any]:
    """Inverse of `packed`. The tensors are new ones: nothing of ``data`` is held; or with ``held``
    those bytes themselves, which nobody may write to."""
    end = _LENGTH + int.from_bytes(data[:_LENGTH].tobytes(), "little")
    structure = json.loads(data[_LENGTH:end].tobytes())
    length = int.from_bytes(data[end : end + _LENGTH].tobytes(), "little")
    found, _ = places_in(data[end : end + _LENGTH + length].tobytes())
    tensors = {
        name: _tensor(data[end + at : end + at + layout.nbytes], layout, held)
        for name, (layout, at) in found.items()
    }
    return join_state(structure, tensors, Path("a packed state"))


def together(states: Sequence[Any]) -> Any:
    """States of one kind as one that costs little to pack: a tensor that each has some rows of is
    there once, with the rows of all; `apart` inverts it."""
    first = states[0]
    if isinstance(first, dict) and first:
        if all(isinstance(x, dict) and x.keys() == first.keys() for x in states):
            return {"each": {key: together([x[key] for x in states]) for key in first}}
    elif isinstance(first, Tensor) and first.ndim:
        kind = first.dtype, first.shape[1:]
        if all(isinstance(x, Tensor) and x.ndim and (x.dtype, x.shape[1:]) == kind for x in states):
            return {"rows": [len(x) for x in states], "of": torch.cat(list(states))}
    return list(states)


def apart(state: Any) -> list[Any]:
    """Inverse of `together`: the states, whose tensors are new ones where they were put
    together."""
    if isinstance(state, list):
        return state
    if "rows" in state:
        return [x.clone() for x in state["of"].split(state["rows"])]
    columns = [apart(x) for x in state["each"].values()]
    return [dict(zip(state["each"], row)) for row in zip(*columns, strict=True)]


def _tensor(data: np.ndarray, layout: TensorLayout, held: bool) -> Tensor:
    if not layout.nbytes:
        return torch.empty(layout.shape, dtype=layout.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (an array that Ray shares may not be written to)
        x = torch.frombuffer(data if held else data.copy(), dtype=layout.dtype)
    return x.view(layout.shape)


def _finite(x: Tensor) -> bool:
    """(A sum that is finite tells at a tenth of the cost; another may have grown too large.)"""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def packed_weights(
    version: int, weights: Mapping[str, Tensor], half: bool = False
) -> tuple[np.ndarray, int]:
    """Weights and their version, and the checksum of that; ``half``: float32 ones rounded to
    bfloat16. Raises `TrainingDiverged` for numbers that are not finite, which no actor may ever act
    with."""
    for name, x in weights.items():
        if x.is_floating_point() and not _finite(x):
            raise TrainingDiverged(
                f"the weights of version {version} are not finite (the first: {name}), so no "
                "rollout gets them. The last checkpoint is good: lower the learning rate"
            )
    sent = {
        name: x.bfloat16() if half and x.dtype == torch.float32 else x
        for name, x in weights.items()
    }
    data = packed({"version": version, "weights": sent})
    return data, zlib.crc32(data.data)


def unpacked_weights(data: np.ndarray, checksum: int) -> tuple[int, dict[str, Tensor]]:
    """Inverse of `packed_weights`; the tensors are views of ``data``. Raises `UserError` where they
    changed on the way."""
    if (found := zlib.crc32(data.data)) != checksum:
        raise UserError(
            f"the weights changed on their way to a rollout actor (checksum {found:08x}, sent "
            f"{checksum:08x}): the memory or the network of its node is broken. Take that node out "
            "of the cluster"
        )
    state = unpacked(data, held=True)
    return int(state["version"]), state["weights"]
