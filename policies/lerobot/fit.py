"""Does a policy of lerobot fit a robot: which camera is which of its pictures, and are state and
actions its own."""

from __future__ import annotations

from policies.lerobot.families import FAMILIES
from policies.lerobot.heads import ACTION, STATE
from policies.lerobot.stored import IMAGES, NO_CAMERA, Stored
from policies.settings import LeRobotConfig
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.types import EmbodimentSpec

# settings with which pictures of any size fit
RESIZED = ("resize_shape", "resize_imgs_with_padding", "image_resize_shape")


def match_cameras(
    config: LeRobotConfig, embodiment: EmbodimentSpec, stored: Stored
) -> dict[str, str]:
    """{image feature: camera of the robot}; never guessed from the order."""
    names = {key: key.removeprefix(IMAGES) for key in stored.image_keys}
    given = dict(text.split(":", 1) for text in config.cameras)
    unknown = [n for n in given if n not in names and n not in names.values()]
    matched = {key: given.get(key, given.get(name, name)) for key, name in names.items()}
    wrong = sorted({c for c in matched.values() if c not in (*embodiment.camera_names, NO_CAMERA)})
    if unknown or wrong:
        raise EmbodimentMismatch(
            f"the {stored.family} checkpoint reads the image features {list(names.values())}, the "
            f"robot {embodiment.name} has the cameras {list(embodiment.camera_names)}; no match "
            f"for {unknown or wrong}. Say which is which, for example "
            f"policy.cameras=[{next(iter(names.values()), 'image')}:{embodiment.camera_names[0]}]"
        )
    kept = {key: camera for key, camera in matched.items() if camera != NO_CAMERA}
    if len(kept) < len(matched) and (not FAMILIES[stored.family].spares or not kept):
        raise EmbodimentMismatch(
            f"policy.cameras leaves out {sorted(set(matched) - set(kept))}, and a {stored.family} "
            "policy needs "
            f"{'at least one image' if FAMILIES[stored.family].spares else 'every image it was trained with'}"
        )
    return kept


def require_fit(config: LeRobotConfig, embodiment: EmbodimentSpec, stored: Stored) -> None:
    lines = []
    for key, size in ((STATE, embodiment.proprio_dim), (ACTION, embodiment.action_dim)):
        if stored.shape(key) != (size,):
            lines.append(
                f"{key}: the checkpoint has shape {stored.shape(key)}, the robot {(size,)}"
            )
    if not FAMILIES[stored.family].resizes and not any(stored.settings.get(key) for key in RESIZED):
        sizes = {c.name: (3, c.height, c.width) for c in embodiment.cameras}
        for key, camera in match_cameras(config, embodiment, stored).items():
            if stored.shape(key) != sizes[camera]:
                lines.append(
                    f"{key}: the checkpoint has shape {stored.shape(key)}, camera {camera} "
                    f"gives {sizes[camera]}"
                )
    if lines:
        detail = "\n  ".join(lines)
        raise EmbodimentMismatch(
            f"the {stored.family} checkpoint does not fit the robot {embodiment.name}:\n  "
            f"{detail}\nUse an env with the cameras, state and actions the checkpoint was trained "
            "on."
        )
    frames = stored.settings.get("n_obs_steps", 1)
    if frames > 1 and not config.repeat_observation:
        raise ConfigError(
            f"this {stored.family} checkpoint reads {frames} frames of consecutive control steps, "
            "and a policy here sees the frame at each decision only. Set "
            f"policy.repeat_observation=true to show it the present frame {frames} times (as "
            "lerobot does at the start of an episode), and expect other behaviour until it is "
            "fine-tuned so"
        )
