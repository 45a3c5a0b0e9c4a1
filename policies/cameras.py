"""Which of a robot's cameras a policy looks at."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.errors import EmbodimentMismatch
from vla_rl.types import CameraSpec, EmbodimentSpec


def named_cameras(wanted: Sequence[str], embodiment: EmbodimentSpec) -> tuple[CameraSpec, ...]:
    """Those that ``policy.cameras`` names. Raises `EmbodimentMismatch` for one that the robot does
    not have, or where it has none at all."""
    known = {camera.name: camera for camera in embodiment.cameras}
    if not known:
        raise EmbodimentMismatch(
            f"{embodiment.name} has no camera, and this policy looks at pictures: use policy=small, "
            "or data and a robot with a camera that shows colours"
        )
    if missing := [name for name in wanted if name not in known]:
        raise EmbodimentMismatch(
            f"policy.cameras asks for {missing} but embodiment {embodiment.name} has {list(known)}: "
            "name cameras of this embodiment"
        )
    return tuple(known[name] for name in wanted)
