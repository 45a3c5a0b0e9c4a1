"""How published evaluations run LIBERO's episodes, by name: fixtures, seeds, waits, limits,
cameras.

Read in the code of each at the commit that stands with it. What they share: LIBERO's 50 initial
states of a task in their order, `OffScreenRenderEnv`, 10 control steps at rest with the gripper
opening, images turned by 180 degrees. What differs is here, and in docs/how_to/libero_protocols.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sim.libero.tasks import HORIZONS
from vla_rl.errors import ConfigError

if TYPE_CHECKING:
    from sim.libero.settings import LiberoConfig

_BOTH = ("agentview", "robot0_eye_in_hand")


@dataclass(frozen=True)
class Protocol:
    """``source``: repository, file and commit that it was read in. ``limits`` are control steps
    after the waits."""

    source: str
    fixtures: str = "loop"
    scene_seed: int = 0
    opening_draws: int = 2
    limits: Mapping[str, int] = field(default_factory=lambda: HORIZONS)
    cameras: tuple[str, ...] = _BOTH
    camera_size: int = 256
    settle_steps: int = 10

    def scene(self, suite: str) -> dict[str, Any]:
        """{key of `LiberoConfig`: value} of what decides over an episode's scene and length,
        whatever is seen of it."""
        return {
            "fixtures": self.fixtures,
            "scene_seed": self.scene_seed,
            "opening_draws": self.opening_draws,
            "settle_steps": self.settle_steps,
            "horizon": self.limits[suite],
            "rotate_images": True,
            "init_states": "official",
        }

    def view(self) -> dict[str, Any]:
        """{key of `LiberoConfig`: value} of what is drawn for the policy."""
        return {"cameras": list(self.cameras), "camera_size": self.camera_size}


PROTOCOLS = {
    "openvla": Protocol(
        "openvla/openvla experiments/robot/libero/run_libero_eval.py 7ea2742, libero_utils.py",
        cameras=("agentview",),
    ),
    "openvla-oft": Protocol(
        "moojink/openvla-oft experiments/robot/libero/run_libero_eval.py, libero_utils.py 213c5ff"
    ),
    "simplevla-rl": Protocol(
        "PRIME-RL/SimpleVLA-RL verl/workers/rollout/rob_rollout.py d1622a9 (a new environment for "
        "every episode)",
        fixtures="per_state",
        limits=dict.fromkeys(HORIZONS, 512),
        cameras=("agentview",),
    ),
    "openpi": Protocol(
        "Physical-Intelligence/openpi examples/libero/main.py 04a8d0c", scene_seed=7
    ),
    "lerobot": Protocol(
        "huggingface/lerobot 0.4.4 envs/libero.py, scripts/lerobot_eval.py (as many envs as "
        "episodes, its default)",
        fixtures="numbered",
        scene_seed=1000,
        opening_draws=3,
        limits={**HORIZONS, "libero_spatial": 280},
        camera_size=360,
    ),
    "vla-eval": Protocol(
        "allenai/vla-evaluation-harness src/vla_eval/benchmarks/libero/benchmark.py 0038c68 (one "
        "shard)",
        scene_seed=7,
        cameras=("agentview",),
    ),
}


def overrides(name: str, config: LiberoConfig, *, view: bool) -> list[str]:
    """Config overrides that make an evaluation that of ``name`` on the suite of ``config``;
    ``view``: the cameras too, which a policy that was trained on others cannot do with.
    `ConfigError` for an unknown name."""
    if name not in PROTOCOLS:
        raise ConfigError(f"--protocol {name!r} is unknown: use one of {', '.join(PROTOCOLS)}")
    if config.files:
        raise ConfigError(
            f"--protocol {name} is of published suites, and env.files={config.files} of one's own: "
            "leave one of them out"
        )
    protocol = PROTOCOLS[name]
    values = (
        protocol.scene(config.suite)
        | (protocol.view() if view else {})
        | {"look": "exact", "controller": "exact"}
    )
    return [f"env.{key}={_written(value)}" for key, value in values.items()]


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def matching(config: LiberoConfig) -> list[str]:
    """The protocols whose scenes and limits ``config`` has; where it shows the policy other
    pictures, that is said with the name ("openvla (at 128 px)")."""
    found: list[str] = []
    for name, protocol in PROTOCOLS.items() if not config.files else ():
        scene = protocol.scene(config.suite)
        mine = {key: getattr(config, key) for key in scene} | {
            "horizon": config.horizon or HORIZONS[config.suite]
        }
        if config.init_states == "split":  # held-out episodes start from official states too
            mine["init_states"] = "official"
        if mine == scene:
            found.append(name + _other_view(config, protocol))
    return found


def _other_view(config: LiberoConfig, protocol: Protocol) -> str:
    other = [f"at {config.camera_size} px"] if config.camera_size != protocol.camera_size else []
    if list(config.cameras) != list(protocol.cameras):
        other.append(f"with {' and '.join(config.cameras)}")
    return f" ({', '.join(other)})" if other else ""
