"""How fast denoising heads are on this machine: teacher, student and token head side by side, in
one run.

Every figure is the latency of a whole decision (`act`, host to host) and of its head alone (what
follows the prefix). The plain form of the same model re-runs trunk and prompt at every denoising
step; its actions must be the same.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import milliseconds, table, take_turns
from benchmarks.policy.inputs import bench_observation
from policies.denoising.policy import DenoisingVLA, DenoisingVLAConfig
from policies.nano_vla import NanoVLA, preset
from policies.trunk.noise import counter_normals
from vla_rl.interfaces import Policy
from vla_rl.types import EmbodimentSpec, Observation

_BURST = 4  # counted calls in a row
Decision = Callable[[], Tensor]


def plain_act(policy: DenoisingVLA, observation: Observation, first_noise: Tensor) -> Tensor:
    """The deterministic decision [b h a] (physical units) with the prefix computed anew at every
    denoising step."""
    x = first_noise[:, None]
    for i in range(len(policy.chain_time)):
        cache, _ = policy.encode(observation)
        modulation = policy.expert.modulate(policy.chain_time[i : i + 1])[0]
        x = policy._step(x, i, modulation, cache)[2]
    return policy.denormalize(x[:, 0])


def measure(
    embodiment: EmbodimentSpec,
    preset_name: str = "nano",
    *,
    batch_sizes: Sequence[int] = (1, 8, 64),
    repeats: int = 20,
    steps: int = 10,
    device: str = "cpu",
    compiled: bool = False,
) -> dict[str, Any]:
    """Measure the token head, a flow teacher with ``steps`` steps, its one-step student and the
    plain teacher.

    Variants take turns in short bursts within each repeat, whose first call, with cold caches, does
    not count. ``compiled`` adds all three with ``policy.compile=true``; outputs must be equal to
    those without. Milliseconds are percentiles, ``control_hz`` is the control steps per second that
    decisions at the median latency can serve.
    """
    base = preset(preset_name)
    shared = {
        name: getattr(base, name)
        for name in DenoisingVLAConfig.__dataclass_fields__
        if hasattr(base, name)
    }
    config = DenoisingVLAConfig(
        **{**shared, "value_head": False, "precision": "float32", "denoising_steps": steps}
    )
    teacher = DenoisingVLA(config, embodiment).to(device).eval()
    student = teacher.make_student(1).to(device).eval()
    tokens = NanoVLA(dataclasses.replace(base, precision="float32"), embodiment).to(device).eval()
    plain: dict[str, Policy] = {"token head": tokens, "teacher": teacher, "student": student}
    fast = {name: _compiled(policy) for name, policy in plain.items()} if compiled else {}
    h, a = teacher.chunk_length, embodiment.action_dim
    size = sum(p.numel() for p in teacher.expert.parameters())
    result: dict[str, Any] = {"steps": steps, "expert_parameters": size, "batches": {}}
    for batch in batch_sizes:
        observation, seeds = bench_observation(embodiment, batch), list(range(batch))
        noise = counter_normals(seeds, h * a).view(batch, 1, h, a).to(device)
        with torch.inference_mode():
            cache, _ = teacher.encode(observation)

        def teacher_head(cache: Any = cache, noise: Tensor = noise) -> Tensor:
            own = teacher.as_expert(cache)
            return teacher.denormalize(teacher._denoise(noise, [own] * steps)[0][:, -1])

        def student_head(cache: Any = cache, noise: Tensor = noise) -> Tensor:
            return student.denormalize(student.solve(cache, noise))

        calls: dict[str, Decision] = {
            **{
                name: _whole(policy, observation, seeds, name == "teacher")
                for name, policy in plain.items()
            },
            "plain teacher": partial(plain_act, teacher, observation, noise[:, 0]),
            "teacher, head alone": teacher_head,
            "student, head alone": student_head,
        }
        for name, policy in fast.items():
            calls[f"{name}, compiled"] = _whole(policy, observation, seeds, name == "teacher")
        with torch.inference_mode():
            for one, other in [
                ("plain teacher", "teacher"),
                *((f"{name}, compiled", name) for name in fast),
            ]:
                _check_same(one, calls[one](), calls[other]())
            took = take_turns(calls, repeats, _BURST, cold=1)
        rows = {name: milliseconds(each.wall for each in found) for name, found in took.items()}
        rows = {
            name: {**levels, "control_hz": h * 1e3 / levels["p50"]} for name, levels in rows.items()
        }
        result["batches"][str(batch)] = {
            "latency_ms": rows,
            "teacher_over_student": _ratio(rows, "teacher", "student"),
            "teacher_head_over_student_head": _ratio(
                rows, "teacher, head alone", "student, head alone"
            ),
            "plain_over_teacher": _ratio(rows, "plain teacher", "teacher"),
            "over_compiled": {name: _ratio(rows, name, f"{name}, compiled") for name in fast},
        }
    return result


def _whole(
    policy: Policy, observation: Observation, seeds: Sequence[int], deterministic: bool
) -> Decision:
    return lambda: policy.act(observation, deterministic=deterministic, seeds=seeds).chunk.actions


def _compiled(policy: Any) -> Any:
    """A copy of the policy that acts through ``torch.compile``."""
    fast = copy.deepcopy(policy)
    fast.config = dataclasses.replace(policy.config, compile=True)
    return fast


def _check_same(name: str, actions: Tensor, expected: Tensor) -> None:
    """Raises AssertionError where actions differ; of tokens one in a thousand may, sampled at
    the very edge of a bin."""
    same = torch.isclose(actions, expected, rtol=1e-3, atol=1e-4).double().mean()
    if same < (0.999 if name.startswith("token") else 1.0):
        raise AssertionError(
            f"{name}: only {same:.2%} of the actions equal those of its other form"
        )


def _ratio(rows: dict[str, dict[str, float]], slow: str, fast: str) -> float:
    return rows[slow]["p50"] / rows[fast]["p50"]


def text(result: Mapping[str, Any]) -> str:
    lines = [
        f"denoising heads: {result['steps']} steps, {result['expert_parameters'] / 1e6:.2f} M "
        "parameters in the expert"
    ]
    rows = [("batch", "head", "p50 ms", "p95 ms", "p99 ms", "control Hz")]
    for batch, measured in result["batches"].items():
        for name, row in measured["latency_ms"].items():
            rows.append(
                (
                    batch,
                    name,
                    *(f"{row[p]:.2f}" for p in ("p50", "p95", "p99")),
                    f"{row['control_hz']:.0f}",
                )
            )
        lines.append(
            f"batch {batch}: student against teacher: {measured['teacher_over_student']:.1f} times "
            f"less per decision, {measured['teacher_head_over_student_head']:.1f} times less in "
            f"the head; prefix once instead of at every step: {measured['plain_over_teacher']:.1f} "
            "times less"
        )
        if gains := measured["over_compiled"]:
            lines[-1] += "; compiled: " + ", ".join(
                f"{name} {gain:.2f} times less" for name, gain in gains.items()
            )
    return "\n".join([lines[0], table(rows), *lines[1:]])
