"""How fast a `NanoVLA` is on this machine: latency of `act` by batch size, samples/s of updates;
other heads beside it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.measuring import milliseconds, table, take_turns
from benchmarks.policy import denoising, openvla
from benchmarks.policy.inputs import bench_embodiment, bench_observation
from policies.nano_vla import NanoVLA, preset
from vla_rl.types import Observation


def measure(
    preset_name: str = "nano",
    *,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    repeats: int = 30,
    train_batch: int = 64,
    train_updates: int = 12,
    device: str = "cpu",
    compiled: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """The preset with config ``changes`` applied.

    Latencies are milliseconds per call of `act` (sampled, seeded, host to host), given as 50th,
    95th and 99th percentile over ``repeats`` calls. An update is imitation loss, backward and
    AdamW. ``compiled`` measures the heads with `torch.compile` too.
    """
    config = preset(preset_name, **changes)
    embodiment = bench_embodiment()
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
        found = _seconds(functools.partial(act, bench_observation(embodiment, batch)), repeats)
        levels = milliseconds(found)
        result["act_ms"][str(batch)] = {**levels, "rows_per_second": batch / levels["p50"] * 1e3}
    if train_updates:
        result["train"] = _training(policy, train_batch, train_updates)
    result["heads"] = denoising.measure(embodiment, preset_name, device=device, compiled=compiled)
    # autoregressive decoding of the big models' layout, at the same small scale
    if preset_name == "nano":
        result["decoding"] = openvla.decoding(embodiment, "nano", device=device)
    return result


def _training(policy: NanoVLA, batch: int, updates: int) -> dict[str, float]:
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

    seconds = statistics.median(_seconds(update, updates))
    return {"batch": batch, "ms_per_update": seconds * 1e3, "samples_per_second": batch / seconds}


def _seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Of each call. They end with a transfer to the host, so GPUs are waited for."""
    return [took.wall for took in take_turns({"": call}, repeats, warm=3)[""]]


def text(result: Mapping[str, Any]) -> str:
    tokens, train = result["tokens"], result.get("train")
    lines = [
        f"{result['preset']}: {result['parameters'] / 1e6:.2f} M parameters, {tokens['sequence']} "
        f"tokens ({tokens['image']} image, {tokens['actions']} action positions), "
        f"{result['device']}, {result['threads']} threads, "
        f"{'bfloat16' if result['bfloat16'] else 'float32'}",
        table(
            [
                ("batch", "p50 ms", "p95 ms", "p99 ms", "rows/s"),
                *(
                    (
                        batch,
                        *(f"{row[level]:.2f}" for level in ("p50", "p95", "p99")),
                        f"{row['rows_per_second']:.0f}",
                    )
                    for batch, row in result["act_ms"].items()
                ),
            ]
        ),
    ]
    if train:
        lines.append(
            f"supervised update: {train['ms_per_update']:.0f} ms for {train['batch']:.0f} "
            f"samples, {train['samples_per_second']:.0f} samples/s"
        )
    lines.append(denoising.text(result["heads"]))
    return "\n".join([*lines, *([openvla.text(result)] if "decoding" in result else [])])
