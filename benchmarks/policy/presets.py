"""`vla-rl bench policy`: which module measures a preset; with ``--dry-run`` the memory that an
OpenVLA needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.policy import flows, memory, nano, openvla
from benchmarks.policy.inputs import bench_embodiment
from policies.openvla import OpenVLAConfig
from vla_rl.config import compose
from vla_rl.devices import check_device, pick_device
from vla_rl.errors import ConfigError
from vla_rl.options import AlgorithmOptions, PolicyOptions, view
from vla_rl.types import CameraSpec

OPENVLA_PRESETS = {"openvla-nano": "nano", "openvla-7b": "7b"}


def measure(
    overrides: Sequence[str], preset: str, device: str, compile: bool, dry_run: bool
) -> dict[str, Any]:
    """Presets "openvla-nano" and "openvla-7b" are OpenVLA with random weights, "pi05-nano" and
    "pi05-mid" lerobot's π0.5, others a NanoVLA."""
    if dry_run:
        return estimated(overrides, preset)
    if overrides:
        raise ConfigError(
            f"{overrides[0]}: config overrides describe a run, which goes with --dry-run"
        )
    check_device(device, "--device")
    pick_device(device, "--device")
    if preset in OPENVLA_PRESETS:
        return openvla.measure(OPENVLA_PRESETS[preset], device=device)
    if preset in flows.PRESETS:
        return flows.measure(preset, device=device)
    return nano.measure(preset, device=device, compiled=compile)


def text(document: Mapping[str, Any]) -> str:
    for module, key in ((memory, "optimizer"), (nano, "act_ms"), (flows, "flow")):
        if key in document:
            return module.text(document)
    return openvla.text(document)


def estimated(overrides: Sequence[str], preset: str) -> dict[str, Any]:
    """Memory that an OpenVLA needs, of a preset or of the run that ``overrides`` describe, and
    what the GPU here has."""
    options: dict[str, Any] = {}
    if overrides:
        config = compose(overrides)
        if view(config.policy, PolicyOptions).lora_rank is None:
            raise ConfigError(
                "--dry-run estimates OpenVLA policies, this run has "
                f"policy.type={config.policy_type}"
            )
        policy, algorithm = config.policy, view(config.algorithm, AlgorithmOptions)
        options = {
            "policy_type": config.policy_type,
            "offload_optimizer": algorithm.offload_optimizer,
            "micro_batch": algorithm.micro_batch_size or 8,
            "acting_batch": max(1, config.slots.workers) * config.slots.slots_per_worker,
        }
    elif preset in OPENVLA_PRESETS:
        policy = OpenVLAConfig(
            architecture=OPENVLA_PRESETS[preset], weights="bfloat16", gradient_checkpointing=True
        )
    else:
        raise ConfigError(
            "--dry-run estimates OpenVLA: use --preset "
            f"{' or '.join(OPENVLA_PRESETS)}, got {preset}"
        )
    embodiment = bench_embodiment(256, cameras=max(1, len(policy.cameras)))
    if policy.cameras:
        cameras = tuple(CameraSpec(name, 256, 256) for name in policy.cameras)
        embodiment = dataclasses.replace(embodiment, cameras=cameras)
    found = vars(memory.estimate(policy, embodiment, **options))
    cuda = torch.cuda.is_available()
    return found | (
        {"device_memory": torch.cuda.get_device_properties(0).total_memory} if cuda else {}
    )
