"""States as one flat array of bytes, for a store that shares arrays without copying: no pickles,
whatever the dtype.

A packed state is what `vla_rl.storage.save_state` would write into its two files, one behind the
other: the length of the structure (8 bytes, little-endian), the structure as JSON, the tensors in
the safetensors format.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.errors import TrainingDiverged, UserError
from vla_rl.storage import join_state, savable, split_state

_LENGTH = 8


def packed(state: Mapping[str, Any]) -> np.ndarray:
    """Nested dicts (string keys) and lists of tensors, numbers, strings and None as bytes uint8
    [n]."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    structure = json.dumps(split_state(state, tensors)).encode()
    parts = [len(structure).to_bytes(_LENGTH, "little"), structure, save(savable(tensors))]
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def unpacked(data: np.ndarray) -> dict[str, Any]:
    """Inverse of `packed`. The tensors are new ones: nothing of ``data`` is held."""
    from safetensors.torch import load

    end = _LENGTH + int.from_bytes(data[:_LENGTH].tobytes(), "little")
    structure = json.loads(data[_LENGTH:end].tobytes())
    return join_state(structure, load(data[end:].tobytes()), Path("a packed state"))


def packed_weights(
    version: int, weights: Mapping[str, Tensor], half: bool = False
) -> tuple[np.ndarray, int]:
    """Weights and their version, and the checksum of that; ``half``: float32 ones rounded to
    bfloat16. Raises `TrainingDiverged` for numbers that are not finite, which no actor may ever act
    with."""
    for name, x in weights.items():
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
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
    """Inverse of `packed_weights`. Raises `UserError` where they changed on the way."""
    if (found := zlib.crc32(data.data)) != checksum:
        raise UserError(
            f"the weights changed on their way to a rollout actor (checksum {found:08x}, sent "
            f"{checksum:08x}): the memory or the network of its node is broken. Take that node out "
            "of the cluster"
        )
    state = unpacked(data)
    return int(state["version"]), state["weights"]
