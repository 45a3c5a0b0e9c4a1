"""How fast policies are on this machine: latency of `act` by batch size, samples/s of updates, plain forms beside ours."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.policy.denoising import bench_heads
from benchmarks.policy.openvla import bench_decoding, bench_training
from policies.nano_vla import NanoVLA, preset
from policies.openvla import OpenVLAConfig
from vla_rl.errors import ConfigError
from vla_rl.types import CameraSpec, EmbodimentSpec, Observation

OPENVLA_PRESETS = {"openvla-nano": "nano", "openvla-7b": "7b"}


def bench_embodiment(camera_size: int = 84, cameras: int = 2, action_dim: int = 7, proprio_dim: int = 8) -> EmbodimentSpec:
    """An arm of common shape to measure with: ``cameras`` square views, position and rotation deltas, a gripper."""
    names = (*(f"delta_{i}" for i in range(action_dim - 1)), "gripper")
    return EmbodimentSpec(
        name="bench_arm",
        action_names=names,
        action_units=("m",) * action_dim,
        action_low=(-1.0,) * action_dim,
        action_high=(1.0,) * action_dim,
        frame="base",
        rotation="axis_angle_delta",
        gripper="-1 open, +1 close",
        control_hz=20.0,
        cameras=tuple(CameraSpec(f"camera_{i}", camera_size, camera_size) for i in range(cameras)),
        proprio_names=tuple(f"joint_{i}" for i in range(proprio_dim)),
    )


def bench_observation(embodiment: EmbodimentSpec, batch: int, seed: int = 0) -> Observation:
    """Random pixels and proprioception for ``batch`` rows."""
    rng = np.random.default_rng(seed)
    return Observation(
        images={
            c.name: torch.from_numpy(rng.integers(0, 256, (batch, c.height, c.width, 3), dtype=np.uint8))
            for c in embodiment.cameras
        },
        proprio=torch.from_numpy(rng.normal(size=(batch, embodiment.proprio_dim)).astype(np.float32)),
        instruction=("pick up the red cube and put it into the bowl",) * batch,
    )


def bench_policy(
    preset_name: str = "nano",
    *,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 30,
    train_batch: int = 64,
    train_updates: int = 12,
    camera_size: int = 84,
    device: str = "cpu",
    compiled: bool = False,
    verbose: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    """Measure the preset with config ``changes`` applied; returns a JSON-ready dict and prints a table.

    Presets "openvla-nano" and "openvla-7b" are OpenVLA with random weights (`benchmarks.policy.openvla`), others a NanoVLA.

    Latencies are milliseconds per call of `act` (sampled, seeded, host to host), given as 50th, 95th and 99th
    percentile over ``repeats`` calls. An update is imitation loss, backward and AdamW. ``camera_size`` is in pixels.
    ``compiled`` measures the heads with `torch.compile` too.
    """
    if preset_name in OPENVLA_PRESETS:
        return bench_openvla(OPENVLA_PRESETS[preset_name], device=device, verbose=verbose)
    config = preset(preset_name, **changes)
    embodiment = bench_embodiment(camera_size)
    policy = NanoVLA(config, embodiment).to(device).eval()
    result: dict[str, Any] = {
        "preset": preset_name,
        "changes": changes,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
        "bfloat16": policy.uses_bfloat16(),
        "parameters": policy.num_parameters(),
        "tokens": {
            "image": sum(policy.camera_tokens),
            "sequence": policy.sequence_length,
            "actions": policy.slots,
        },
        "act_ms": {},
    }

    def act(observation: Observation) -> torch.Tensor:
        return policy.act(observation, seeds=range(len(observation))).chunk.actions.cpu()

    for batch in batch_sizes:
        times = _time(functools.partial(act, bench_observation(embodiment, batch)), repeats)
        p50, p95, p99 = np.percentile(times, (50, 95, 99)) * 1e3
        result["act_ms"][str(batch)] = {"p50": p50, "p95": p95, "p99": p99, "rows_per_second": batch / p50 * 1e3}
    if train_updates:
        result["train"] = _bench_training(policy, train_batch, train_updates)
    if verbose:
        _print(result)
    result["heads"] = bench_heads(
        embodiment, bench_observation, preset_name, device=device, compiled=compiled, verbose=verbose
    )
    if preset_name == "nano":  # autoregressive decoding of the big models' layout, at the same small scale
        result["decoding"] = bench_decoding(embodiment, bench_observation, "nano", device=device, verbose=verbose)
    return result


def bench_openvla(architecture: str, *, device: str = "cpu", verbose: bool = True) -> dict[str, Any]:
    """OpenVLA with random weights: decoding, and, on a GPU, training. The 7B size needs one."""
    if architecture == "7b" and not device.startswith("cuda"):
        raise ConfigError(
            f"--preset openvla-7b on device {device}: 7.5 billion weights need a GPU. Use --device cuda, or --dry-run for "
            "its memory"
        )
    embodiment = bench_embodiment(256 if architecture == "7b" else 84)
    options: dict[str, Any] = {"device": device, "verbose": verbose}
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"}
    result["decoding"] = bench_decoding(embodiment, bench_observation, architecture, **options)
    if device.startswith("cuda"):
        result["training"] = bench_training(embodiment, bench_observation, architecture, **options)
    return result


def dry_run(preset_name: str = "openvla-7b", policy: Any = None, **options: Any) -> dict[str, Any]:
    """Memory that an OpenVLA needs: of a preset, or of a run's policy config; see `policies.openvla.memory.estimate`."""
    from policies.openvla.memory import dry_run as estimate

    if policy is None:
        if preset_name not in OPENVLA_PRESETS:
            raise ConfigError(f"--dry-run estimates OpenVLA: use --preset {' or '.join(OPENVLA_PRESETS)}, got {preset_name}")
        policy = OpenVLAConfig(architecture=OPENVLA_PRESETS[preset_name], weights="bfloat16", gradient_checkpointing=True)
    embodiment = bench_embodiment(256, cameras=max(1, len(policy.cameras)))
    if policy.cameras:
        cameras = tuple(CameraSpec(name, 256, 256) for name in policy.cameras)
        embodiment = dataclasses.replace(embodiment, cameras=cameras)
    return estimate(policy, embodiment, **options)


def _bench_training(policy: NanoVLA, batch: int, updates: int) -> dict[str, float]:
    policy.train()
    observation = bench_observation(policy.embodiment, batch)
    actions = torch.rand(batch, policy.chunk_length, policy.embodiment.action_dim) * 2 - 1
    valid = torch.ones(batch, policy.chunk_length, dtype=torch.bool)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, fused=True)

    def update() -> float:
        loss, metrics = policy.imitation_loss(observation, actions, valid)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return metrics["nll"]

    seconds = float(np.median(_time(update, updates)))
    return {"batch": batch, "ms_per_update": seconds * 1e3, "samples_per_second": batch / seconds}


def _time(call: Callable[[], Any], repeats: int, warmup: int = 3) -> np.ndarray:
    """Seconds per call, after ``warmup`` calls. The calls end with a transfer to the host, so GPUs are waited for."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return np.array(times)


def _print(result: dict[str, Any]) -> None:
    tokens = result["tokens"]
    print(
        f"{result['preset']}: {result['parameters'] / 1e6:.2f} M parameters, {tokens['sequence']} tokens "
        f"({tokens['image']} image, {tokens['actions']} action positions), {result['device']}, "
        f"{result['threads']} threads, {'bfloat16' if result['bfloat16'] else 'float32'}"
    )
    print(f"{'batch':>7} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9} {'rows/s':>9}")
    for batch, row in result["act_ms"].items():
        print(f"{batch:>7} {row['p50']:>9.2f} {row['p95']:>9.2f} {row['p99']:>9.2f} {row['rows_per_second']:>9.0f}")
    if "train" in result:
        train = result["train"]
        print(
            f"supervised update: {train['ms_per_update']:.0f} ms for {train['batch']:.0f} samples, "
            f"{train['samples_per_second']:.0f} samples/s"
        )
