"""Observations as a message holds them, by the names that openpi's LIBERO clients use, and by
vla-eval's.

A camera is ``observation/<its name>``; the first is ``observation/image`` as well, the second
``observation/wrist_image``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.serving.packing import WireError
from vla_rl.specs import EmbodimentSpec, SlotObservation

STATE, PROMPT = "observation/state", "prompt"
_ALIASES = ("observation/image", "observation/wrist_image")  # of the first cameras
_TEXT = 4096  # characters of an instruction, at most
# Of this project's own ends; other clients may send them too.
SEED, SAMPLE, LOG_PROB, ROWS = "vla_rl/seed", "vla_rl/sample", "vla_rl/log_prob", "vla_rl/rows"
ABOUT = "vla_rl"  # the key of the metadata
PROTOCOL = 1


def camera_keys(embodiment: EmbodimentSpec) -> dict[str, str]:
    """{camera: its name on the wire} as openpi's own servers for one or two cameras want it."""
    names = embodiment.camera_names
    return {
        name: _ALIASES[i] if i < len(_ALIASES) else f"observation/{name}"
        for i, name in enumerate(names)
    }


def read_row(row: Any, embodiment: EmbodimentSpec) -> SlotObservation:
    """The observation in a message. Raises `WireError` that names what is missing or of another
    shape."""
    if not isinstance(row, Mapping):
        raise WireError(f"an observation is a {type(row).__name__}, and a mapping is needed")
    named = row.get("images")
    pictures = named if isinstance(named, Mapping) else {}
    images = {}
    for index, camera in enumerate(embodiment.cameras):
        picture = next(_pictures(row, pictures, index, camera.name), None)
        keys = " or ".join(
            dict.fromkeys([f"observation/{camera.name}", *_ALIASES[index : index + 1]])
        )
        if picture is None:
            raise WireError(
                f"the observation lacks the picture of camera {camera.name}: send it as {keys}"
            )
        images[camera.name] = _checked(picture, (camera.height, camera.width, 3), keys)
    state = next((row[key] for key in (STATE, "states", "state") if key in row), None)
    if state is None and embodiment.proprio_dim:
        raise WireError(
            f"the observation lacks the state: send {STATE} as {embodiment.proprio_dim} numbers"
        )
    text = next((row[key] for key in (PROMPT, "task_description") if key in row), None)
    if not isinstance(text, str) or len(text) > _TEXT:
        raise WireError(
            f"the observation's instruction is {str(text)[:40]!r}: send {PROMPT} as a text"
        )
    return SlotObservation(images, _numbers(state, embodiment), text)


def _pictures(
    row: Mapping[str, Any], pictures: Mapping[Any, Any], index: int, name: str
) -> Iterator[Any]:
    """What may be meant by the ``index``-th camera, best first. vla-eval's have names of its own,
    in order."""
    for key in (f"observation/{name}", *_ALIASES[index : index + 1]):
        if key in row:
            yield row[key]
    if name in pictures:
        yield pictures[name]
    yield from list(pictures.values())[index : index + 1]


def _checked(picture: Any, shape: tuple[int, int, int], key: str) -> np.ndarray:
    found = picture if isinstance(picture, np.ndarray) else np.zeros(0)
    if found.dtype != np.uint8 or found.shape != shape:
        raise WireError(
            f"{key} is {found.dtype} {list(found.shape)}; this policy was made for uint8 "
            f"{list(shape)}: send pictures of that size (openpi_client.image_tools.resize_with_pad)"
        )
    return found


def _numbers(state: Any, embodiment: EmbodimentSpec) -> np.ndarray:
    try:
        numbers = np.asarray([] if state is None else state, dtype=np.float32).reshape(-1)
    except (TypeError, ValueError):
        numbers = np.full(1, np.nan, np.float32)
    if len(numbers) != embodiment.proprio_dim or not np.isfinite(numbers).all():
        names = ", ".join(embodiment.proprio_names)
        raise WireError(f"{STATE} has {len(numbers)} numbers; finite ones are needed of: {names}")
    return numbers


def written_row(
    seen: SlotObservation, images: Mapping[str, str], state: str, prompt: str, resize: int = 0
) -> dict[str, Any]:
    """The message of an observation; ``images`` {camera: key}. ``resize``: to that many pixels,
    padded with black as openpi's clients do (0: as they are)."""
    row: dict[str, Any] = {
        key: padded(seen.images[camera], resize) for camera, key in images.items()
    }
    return row | {state: seen.proprio, prompt: seen.instruction}


def padded(picture: np.ndarray, size: int) -> np.ndarray:
    """uint8 [H W 3] as large as fits into [size size 3], bilinear, in the middle of black; 0: as it
    is."""
    height, width = picture.shape[:2]
    if not size or (height, width) == (size, size):
        return picture
    from PIL import Image

    ratio = max(height, width) / size
    inner = max(1, int(height / ratio)), max(1, int(width / ratio))
    small = Image.fromarray(picture).resize(inner[::-1], Image.Resampling.BILINEAR)
    top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    out = np.zeros((size, size, 3), np.uint8)
    out[top : top + inner[0], left : left + inner[1]] = np.asarray(small)
    return out


def seeds_of(rows: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """What fixes each row's sampling noise, where the client says so. Raises `WireError`."""
    seeds = [row.get(SEED) for row in rows]
    if wrong := [s for s in seeds if s is not None and not (type(s) is int and 0 <= s < 2**63)]:
        raise WireError(
            f"{SEED} is {wrong[0]!r}: send a number from 0 to 2**63 - 1, or leave it out"
        )
    return seeds
