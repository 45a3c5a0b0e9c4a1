"""How fast lerobot's π0.5 decides on this machine at small sizes: with its prefix encoded once, as
here and in lerobot, against a prefix encoded anew at every step; in one step, as a student; and
what a decision is made of. However few steps a student takes, the prefix stays.

Weights are random: what is compared is arithmetic. Both ways make the same actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.measuring import milliseconds, table, take_turns
from benchmarks.policy.inputs import bench_embodiment, bench_observation
from policies.lerobot.policy import LeRobotChainPolicy, LeRobotPolicy
from policies.settings import LeRobotConfig
from vla_rl.config import compose
from vla_rl.types import EmbodimentSpec, Observation

# {preset: (pixels of a picture, sizes that differ from `policy=pi05_nano`)}
PRESETS: dict[str, tuple[int, dict[str, int]]] = {
    "pi05-nano": (70, {}),
    "pi05-mid": (
        112,
        {
            "width": 256,
            "mlp": 1024,
            "depth": 6,
            "head_dim": 32,
            "expert_width": 192,
            "expert_mlp": 768,
            "vision_width": 256,
            "vision_mlp": 1024,
            "vision_depth": 4,
        },
    ),
}
STEPS = 10  # of openpi's and lerobot's samplers


def make(preset: str) -> LeRobotChainPolicy:
    """A random policy for the benches' arm."""
    pixels, sizes = PRESETS[preset]
    base: LeRobotConfig = compose(["run=toy", "policy=pi05_nano"]).policy
    spec = bench_embodiment(camera_size=pixels)
    options = [
        f"max_action_dim:{spec.action_dim}",
        f"max_state_dim:{spec.proprio_dim}",
        "tokenizer_max_length:48",
        f"image_resolution:[{pixels}, {pixels}]",
    ]
    config = dataclasses.replace(
        base,
        options=options,
        sizes={**base.sizes, **sizes},
        denoising_steps=STEPS,
        trained_steps=0,
        freeze_prefix=False,
    )
    torch.manual_seed(0)
    policy = LeRobotPolicy.from_statistics(config, spec, *_statistics(spec))
    for parameter in policy.parameters():  # lerobot's zeros would make every step alike
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    assert isinstance(policy, LeRobotChainPolicy)
    return policy.eval()


def _statistics(spec: EmbodimentSpec) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    def of(size: int) -> dict[str, list[float]]:
        low, high, half = ([value] * size for value in (-1.0, 1.0, 0.5))
        return {"low": low, "high": high, "q01": low, "q99": high, "mean": half, "std": half}

    return of(spec.action_dim), of(spec.proprio_dim)


@torch.no_grad()
def plain_act(policy: LeRobotChainPolicy, observation: Observation, first: Tensor) -> Tensor:
    """The decision [b h a] from ``first`` with the prefix encoded anew at every step."""
    x = first
    for k in range(len(policy.chain)):
        condition = policy.head.condition(policy._batch(observation))
        x = policy._step(condition, x, k, None, first)[2]
    return policy._decided(x).actions


def _parts(
    policy: LeRobotChainPolicy, seen: Observation, first: Tensor
) -> dict[str, Callable[[], Any]]:
    """What a decision is made of: inputs made ready, the prefix (pictures, then all of it through
    the language model), one step."""
    batch, head = policy._batch(seen), cast(Any, policy.head)
    condition, pictures = head.condition(batch), head._inputs(batch)[0]
    return {
        "of it: inputs": torch.no_grad()(partial(policy._batch, seen)),
        "of it: prefix": torch.no_grad()(partial(head.condition, batch)),
        "of the prefix: pictures": torch.no_grad()(
            lambda: [head.trunk.embed_image(x) for x in pictures]
        ),
        "of it: one step": torch.no_grad()(partial(policy._step, condition, first, 0)),
    }


def measure(
    preset: str, *, batch_sizes: Sequence[int] = (1, 8), repeats: int = 5, device: str = "cpu"
) -> dict[str, Any]:
    """Milliseconds of a whole decision (host to host) by the clock and of work (CPU seconds of this
    process), of which ``ratios`` compare medians of work: what else runs on the machine falls
    out of them. Raises AssertionError where actions differ."""
    teacher = make(preset).to(device)
    student = teacher.make_student(1, "same_noise").eval()
    result: dict[str, Any] = {
        "preset": preset,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
        "parameters": teacher.num_parameters(),
        "steps": STEPS,
        "flow": {},
    }
    for batch in batch_sizes:
        seen, seeds = bench_observation(teacher.embodiment, batch), list(range(batch))
        once = teacher.act(seen, deterministic=True, seeds=seeds)
        first = once.replay["chain"][:, 0]
        torch.testing.assert_close(
            plain_act(teacher, seen, first), once.chunk.actions, rtol=0, atol=1e-5
        )

        def decide(policy: Any, seen: Observation = seen, seeds: list[int] = seeds) -> Tensor:
            return policy.act(seen, deterministic=True, seeds=seeds).chunk.actions.cpu()

        calls: dict[str, Callable[[], Tensor]] = {
            "prefix once": partial(decide, teacher),
            "prefix anew": partial(plain_act, teacher, seen, first),
            "one step": partial(decide, student),
            **_parts(teacher, seen, first),
        }
        took = take_turns(calls, repeats)
        rows = {
            name: {
                **milliseconds(each.wall for each in found),
                "cpu_p50": milliseconds(each.cpu for each in found)["p50"],
            }
            for name, found in took.items()
        }
        work = {name: row["cpu_p50" if device == "cpu" else "p50"] for name, row in rows.items()}
        result["flow"][str(batch)] = {
            "latency_ms": rows,
            "ratios": {
                "prefix anew over once": work["prefix anew"] / work["prefix once"],
                "ten steps over one": work["prefix once"] / work["one step"],
                "prefix anew over one step": work["prefix anew"] / work["one step"],
                "ten steps over one that is free": work["prefix once"]
                / (work["of it: inputs"] + work["of it: prefix"]),
            },
        }
    return result


def text(document: Mapping[str, Any]) -> str:
    head = (
        f"{document['preset']}: {document['parameters'] / 1e6:.1f} M weights, {document['steps']} "
        f"steps, {document['threads']} threads on {document['device']}"
    )
    rows = [("batch", "decision", "p50 ms", "p95 ms", "CPU ms")]
    lines = []
    for batch, measured in document["flow"].items():
        for name, row in measured["latency_ms"].items():
            figures = (f"{row[level]:.1f}" for level in ("p50", "p95", "cpu_p50"))
            rows.append((batch, name, *figures))
        said = ", ".join(f"{name} {ratio:.1f}" for name, ratio in measured["ratios"].items())
        lines.append(f"batch {batch}: {said}")
    return "\n".join([head, table(rows), *lines])
