"""``vla-rl bench gpu``: the published policies with random weights on a GPU: ms of a decision and
of updates, share of the GPU's peak, peak memory; with ``--dry-run`` the same table from
`benchmarks.policy.gpu_sizes`, so that the two can be compared.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import say, table, take_turns
from benchmarks.policy.gpu_sizes import MODELS, Cost, cost
from benchmarks.policy.inputs import bench_embodiment, bench_observation
from benchmarks.policy.openvla import peak_flops, random_policy
from vla_rl.algorithms.optim import make_adamw
from vla_rl.devices import check_device, pick_device
from vla_rl.errors import ConfigError, UserError, first_line
from vla_rl.types import EmbodimentSpec

ACTING = (1, 8, 32)  # rows of a decision
_STEPS = {"openvla_oft": 8, "pi05": 50, "smolvla": 50}  # of a chunk
# of the small ones, which try the same code on two cores
_PI_NANO = {
    "width": 32, "mlp": 48, "depth": 2, "head_dim": 4, "expert_width": 16, "expert_mlp": 24,
    "vision_width": 16, "vision_mlp": 24, "vision_depth": 1, "vision_heads": 2, "vocabulary": 300,
}  # fmt: skip


def measure(
    models: Sequence[str],
    modes: Sequence[str],
    micro_batch: int,
    updates: int,
    device: str,
    nano: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """``estimated`` [row] for every model and mode; ``measured`` {model: {mode: figures or
    error}}."""
    costs = [
        (name, c) for name in models for m in modes if (c := cost(MODELS[name](), m, micro_batch))
    ]
    document: dict[str, Any] = {
        "micro_batch": micro_batch,
        "nano": nano,
        "estimated": [{"key": name, **dataclasses.asdict(c)} for name, c in costs],
    }
    if dry_run:
        return document
    check_device(device, "--device")
    place = pick_device(device, "--device")
    if place.type != "cuda" and not nano:
        raise ConfigError(
            f"--device {device}: the published sizes need a GPU. Use --nano for small ones, or "
            "--dry-run for the arithmetic"
        )
    found: dict[str, dict[str, Any]] = {}
    for name, c in costs:
        say(f"{name}, {c.mode} …")
        of_model = found.setdefault(name, {})
        try:
            of_model[c.mode] = measured(name, c, micro_batch, updates, place, nano)
        except (UserError, torch.cuda.OutOfMemoryError) as error:
            of_model[c.mode] = {"error": first_line(error)}
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    return document | {"device": gpu, "measured": found}


def measured(
    name: str, estimate: Cost, micro_batch: int, updates: int, place: torch.device, nano: bool
) -> dict[str, Any]:
    """Of one model in one mode. Peaks and shares of the peak are known on a GPU alone, and of the
    published sizes."""
    cuda = place.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(place)
    robot = bench_embodiment(32 if nano and name != "openvla_oft" else 84 if nano else 224)
    policy = _policy(name, estimate.mode, robot, place, nano)
    peak = peak_flops(place)

    def figures(call: Callable[[], Any], rows: int, operations: int) -> dict[str, Any]:
        def whole() -> None:
            call()
            if cuda:
                torch.cuda.synchronize(place)

        seconds = statistics.median(took.wall for took in take_turns({"": whole}, updates)[""])
        share = None if peak is None or nano else operations * rows / seconds / peak
        return {"ms": 1e3 * seconds, "rows_per_second": rows / seconds, "share_of_peak": share}

    document: dict[str, Any] = {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "act": {},
    }
    for batch in ACTING[: 2 if nano else None]:
        seen = bench_observation(robot, batch).to(place)

        def act(seen: Any = seen) -> None:
            with torch.inference_mode():
                policy.act(seen, seeds=range(len(seen)))

        document["act"][str(batch)] = figures(act, batch, estimate.act_operations)
    document |= _updates(policy, robot, estimate, micro_batch, figures)
    if cuda:
        document["peak_memory"] = torch.cuda.max_memory_allocated(place)
    return document


def _updates(
    policy: Any,
    robot: EmbodimentSpec,
    estimate: Cost,
    rows: int,
    figures: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """An SFT and a PPO update of ``rows``: forward, backward, optimiser."""
    place = next(iter(policy.parameters())).device
    seen = bench_observation(robot, rows).to(place)
    with torch.inference_mode():
        out = policy.act(seen, seeds=range(rows))
    replay = {key: tensor.clone() for key, tensor in out.replay.items()}
    actions, valid = out.chunk.actions.clone().clamp(-1, 1), torch.ones_like(out.chunk.valid)
    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = make_adamw([(learning, 1e-6)], [0.9, 0.95], 0.0)

    def update(loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    sft = figures(
        lambda: update(lambda: policy.imitation_loss(seen, actions, valid)[0]),
        rows,
        estimate.sft_operations,
    )
    ppo = figures(
        lambda: update(lambda: -policy.evaluate(seen, replay).log_prob.mean()),
        rows,
        estimate.ppo_operations,
    )
    return {"trained": sum(p.numel() for p in learning), "sft": sft, "ppo": ppo}


def _policy(name: str, mode: str, robot: EmbodimentSpec, place: torch.device, nano: bool) -> Any:
    """With random weights, on the device. Raises `ConfigError` for a mode that this project's class
    does not have."""
    if name == "openvla_oft":
        adapters: dict[str, Any] = {"lora_rank": 32} if mode == "lora" else {}
        size = "nano" if nano else "7b"
        return random_policy(
            robot,
            size,
            str(place),
            chunk_length=_STEPS[name],
            gradient_checkpointing=True,
            **adapters,
        )
    from policies.lerobot.new import new_policy
    from policies.lerobot.package import require_lerobot
    from policies.lerobot.policy import LeRobotPolicy
    from policies.lerobot.weights import add_lora
    from policies.settings import LeRobotConfig

    require_lerobot()
    chunk = 4 if nano else _STEPS[name]
    options = [f"train_expert_only:{str(mode == 'expert').lower()}", "freeze_vision_encoder:false"]
    if name == "pi05" and not nano:
        options += ["dtype:bfloat16", "gradient_checkpointing:true"]
    if name == "smolvla" and nano:
        options += ["resize_imgs_with_padding:[32, 32]"]
    with tempfile.TemporaryDirectory() as folder:
        _write_language(name, Path(folder), nano)
        sizes = _PI_NANO if name == "pi05" and nano else {}
        config = LeRobotConfig(
            family=name, chunk_length=chunk, vlm=folder, options=options, sizes=sizes,
            denoising_steps=2 if nano else 0, trained_steps=0 if nano or name != "pi05" else 5,
        )  # fmt: skip
        ones = {"low": -1.0, "high": 1.0, "mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}
        action, proprio = (
            {key: [value] * n for key, value in ones.items()}
            for n in (robot.action_dim, robot.proprio_dim)
        )
        stored = new_policy(config, robot, action, proprio)
        policy = LeRobotPolicy.from_stored(config, robot, stored)
        if mode == "lora":
            add_lora(policy.model, 2 if nano else 32)
        return policy.to(place).eval()


def _write_language(name: str, folder: Path, nano: bool) -> None:
    """A tokenizer with a token a letter, and for SmolVLA the sizes of its backbone: neither is
    fetched."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {
        "fake_image_token": "<fake>", "image_token": "<image>", "global_image_token": "<global>",
        "end_of_utterance_token": "<end>",
    }  # fmt: skip
    words = ["<pad>", "<unk>", "<s>", "</s>", *special.values(), "\n", *map(chr, range(32, 127))]
    letters = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", unk_token="<unk>", extra_special_tokens=special
    )
    tokenizer.save_pretrained(folder)
    if name != "smolvla":
        return
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    vision = {
        "hidden_size": 16 if nano else 768, "intermediate_size": 32 if nano else 3072,
        "num_hidden_layers": 1 if nano else 12, "num_attention_heads": 2 if nano else 12,
        "image_size": 32 if nano else 512, "patch_size": 8 if nano else 16,
    }  # fmt: skip
    text = {
        "model_type": "llama", "vocab_size": len(words) if nano else 49280, "hidden_size": 32 if nano else 960,
        "intermediate_size": 32 if nano else 2560, "num_hidden_layers": 2 if nano else 32,
        "num_attention_heads": 2 if nano else 15, "num_key_value_heads": 1 if nano else 5,
        "head_dim": 16 if nano else 64,
    }  # fmt: skip
    SmolVLMConfig(
        vision_config=vision, text_config=text, scale_factor=2 if nano else 4,
        image_token_id=words.index("<image>"), pad_token_id=0,
    ).save_pretrained(folder)  # fmt: skip
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(
        folder
    )


def text(document: Mapping[str, Any]) -> str:
    """The estimate, in GB (1e9 bytes) and 1e12 operations, and what was measured."""
    head = (
        "model",
        "trained",
        "of",
        "weights",
        "grads",
        "Adam",
        "SFT",
        "PPO",
        "act/row",
        "SFT/row",
        "PPO/row",
        "passes",
    )
    lines = [head]
    for row in document["estimated"]:
        sizes = [f"{row[key] / 1e6:,.0f} M" for key in ("trained", "parameters")]
        fixed = [f"{row[key] / 1e9:.2f}" for key in ("weights", "gradients", "optimizer")]
        whole = [f"{row[key] / 1e9:.1f} GB" for key in ("sft_memory", "ppo_memory")]
        work = [
            f"{row[key] / 1e12:.2f} T"
            for key in ("act_operations", "sft_operations", "ppo_operations")
        ]
        lines.append(
            (f"{row['model']} {row['mode']}", *sizes, *fixed, *whole, *work, row["passes"]["ppo"])
        )
    said = [
        f"by arithmetic, micro batches of {document['micro_batch']} rows; leave a tenth of the "
        "memory free",
        table(lines),
    ]
    if "measured" in document:
        said += [f"measured on {document['device']}", table(_measured_rows(document))]
    return "\n".join(said)


def _measured_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("model", "act 1", "act most", "rows/s", "SFT", "PPO", "of peak", "memory")
    ]
    for name, modes in document["measured"].items():
        for mode, found in modes.items():
            if "error" in found:
                rows.append((f"{name} {mode}", found["error"]))
                continue
            acts = list(found["act"].values())
            share, memory = found["ppo"]["share_of_peak"], found.get("peak_memory")
            rows.append((
                f"{name} {mode}", f"{acts[0]['ms']:.1f} ms", f"{acts[-1]['ms']:.1f} ms",
                f"{acts[-1]['rows_per_second']:.0f}", f"{found['sft']['ms']:.0f} ms", f"{found['ppo']['ms']:.0f} ms",
                "" if share is None else f"{share:.0%}", "" if memory is None else f"{memory / 1e9:.1f} GB",
            ))  # fmt: skip
    return rows
