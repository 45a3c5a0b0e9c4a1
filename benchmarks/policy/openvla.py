"""Decoding and training speed of OpenVLA with random weights, against the plain form of the same
model in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.measuring import table, take_turns
from benchmarks.policy.inputs import bench_embodiment, bench_observation
from policies.normalization import VectorStats
from policies.openvla.config import OpenVLAConfig
from policies.openvla.model import stock_llama
from policies.openvla.policy import OpenVLA
from policies.openvla.tokens import STOP_ID
from vla_rl.errors import ConfigError
from vla_rl.types import EmbodimentSpec, Observation

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

# Dense bfloat16 multiplications and additions a second, from the vendor's data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def peak_flops(device: str | torch.device) -> float | None:
    """Of the GPU that ``device`` is; None where it is none, or not in `PEAK_FLOPS`."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def random_policy(
    embodiment: EmbodimentSpec, architecture: str, device: str, **options: Any
) -> OpenVLA:
    """A policy with random weights on ``device``, in bfloat16 at the 7B size."""
    large = {"weights": "bfloat16"} if architecture == "7b" else {"precision": "float32"}
    config = OpenVLAConfig(
        **{"architecture": architecture, "image_path": "bicubic", **large, **options}
    )
    stats = VectorStats.from_bounds(embodiment.action_low, embodiment.action_high).to_dict()
    proprio = VectorStats.identity(embodiment.proprio_dim).to_dict()
    policy = OpenVLA.from_statistics(config, embodiment, stats, proprio, seed=0, device=device)
    return policy.to(device).eval()


class OnlyActions:
    """A `LogitsProcessor` that leaves transformers' ``generate`` nothing but the action tokens."""

    def __init__(self, policy: OpenVLA):
        self.first = policy.architecture.first_action_id
        self.end = self.first + policy.architecture.action_bins

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[:, self.first : self.end] = scores[:, self.first : self.end]
        return kept


@torch.no_grad()
def generate_tokens(policy: OpenVLA, llama: Any, observation: Observation) -> torch.Tensor:
    """Greedy action tokens int64 [b n] by transformers' ``generate``: the plain form of
    autoregressive `OpenVLA.act`.

    ``llama`` is the policy's `stock_llama`. The prompts of the batch need one length.
    """
    from transformers.generation.logits_process import LogitsProcessorList

    with policy._autocast():
        prefix = policy.prefix(observation)
        if prefix.padded:
            raise ValueError("generate_tokens needs prompts of one length")
        ids = llama.generate(
            inputs_embeds=prefix.x,
            attention_mask=prefix.valid.long(),
            max_new_tokens=policy.action_tokens,
            min_new_tokens=policy.action_tokens,
            do_sample=False,
            pad_token_id=STOP_ID,
            logits_processor=LogitsProcessorList([OnlyActions(policy)]),
        )
    assert isinstance(ids, torch.Tensor)  # else it was asked for more than the tokens
    return ids - policy.architecture.first_action_id


@torch.no_grad()
def tokens_without_reuse(
    policy: OpenVLA, llama: LlamaForCausalLM, observation: Observation
) -> torch.Tensor:
    """Greedy action tokens int64 [b n] by transformers' forward over the whole sequence for every
    token.

    ``llama`` is the policy's `stock_llama`. The prompts of the batch need one length. Images pass
    the vision towers once.
    """
    first, bins = policy.architecture.first_action_id, policy.architecture.action_bins
    tokens = []
    with policy._autocast():
        x = policy.prefix(observation).x
        for _ in range(policy.action_tokens):
            logits = llama(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits[:, -1]
            tokens.append(logits[:, first : first + bins].argmax(-1))
            x = torch.cat([x, policy.sequences.embed_actions(tokens[-1][:, None])], dim=1)
    return torch.stack(tokens, dim=1)


def measure(architecture: str, *, device: str = "cpu") -> dict[str, Any]:
    """OpenVLA with random weights: decoding, and, on a GPU, training. The 7B size needs one."""
    cuda = device.startswith("cuda")
    if architecture == "7b" and not cuda:
        raise ConfigError(
            f"--preset openvla-7b on device {device}: 7.5 billion weights need a GPU. Use --device "
            "cuda, or --dry-run for its memory"
        )
    embodiment = bench_embodiment(256 if architecture == "7b" else 84)
    document: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "cpu"}
    document["decoding"] = decoding(embodiment, architecture, device=device)
    return document | (
        {"training": training(embodiment, architecture, device=device)} if cuda else {}
    )


def decoding(
    embodiment: EmbodimentSpec,
    architecture: str = "nano",
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    repeats: int = 5,
    device: str = "cpu",
) -> dict[str, Any]:
    """Seconds a decision of autoregressive (7 tokens, one control step) and parallel decoding (56
    tokens, eight steps).

    Two plain forms of the autoregressive one: "no_reuse" runs the whole sequence through the
    language model for every token; "one_row" is transformers' ``generate``, which reuses the
    prefix, but row by row, as upstream runs its models. Variants take turns within each repeat.
    ``equal`` says whether all forms chose the same tokens.
    """
    one_step = random_policy(
        embodiment, architecture, device, decoding="autoregressive", chunk_length=1
    )
    parallel = random_policy(embodiment, architecture, device, chunk_length=8)
    llama = stock_llama(one_step.language_model)
    result: dict[str, Any] = {
        "architecture": architecture,
        "parameters": one_step.num_parameters(),
        "batches": {},
    }
    for batch in batch_sizes:
        observation = bench_observation(embodiment, batch)
        tokens: dict[str, torch.Tensor] = {}

        def cached(o: Observation = observation, kept: dict = tokens) -> None:
            kept["cached"] = (
                one_step.act(o, deterministic=True).replay["action_tokens"].flatten(1).long().cpu()
            )

        def rows(o: Observation = observation, kept: dict = tokens) -> None:
            kept["one_row"] = torch.cat(
                [generate_tokens(one_step, llama, o[i : i + 1]) for i in range(len(o))]
            ).cpu()

        def again(o: Observation = observation, kept: dict = tokens) -> None:
            kept["no_reuse"] = tokens_without_reuse(one_step, llama, o).cpu()

        def at_once(o: Observation = observation) -> None:
            parallel.act(o, deterministic=True).chunk.actions.cpu()

        calls: dict[str, Callable[[], None]] = {
            "cached": cached,
            "no_reuse": again,
            "one_row": rows,
            "parallel": at_once,
        }
        with torch.inference_mode():
            took = take_turns(calls, repeats)
        row: dict[str, Any] = {
            f"{name}_ms": 1e3 * statistics.median(t.wall for t in found)
            for name, found in took.items()
        }
        row["equal"] = all(
            torch.equal(tokens["cached"], tokens[name]) for name in ("no_reuse", "one_row")
        )
        row |= {
            f"ratio_{name}": row[f"{name}_ms"] / row["cached_ms"]
            for name in ("no_reuse", "one_row")
        }
        row["decisions_per_second"] = {
            n: batch / row[f"{n}_ms"] * 1e3 for n in ("cached", "parallel")
        }
        result["batches"][str(batch)] = row
    return result


def training(
    embodiment: EmbodimentSpec,
    architecture: str = "7b",
    *,
    batch: int = 8,
    updates: int = 5,
    device: str = "cuda",
) -> dict[str, Any]:
    """Tokens/s and model FLOPs utilisation of one RL update (evaluate, backward, AdamW), full and
    with LoRA of rank 32.

    FLOPs a token: 2 N forward for N weights of matrices, and backward 4 N where weights are
    trained, 2 N where they are not (LoRA); attention's own products and checkpointed recomputation
    are not counted. Utilisation is against `PEAK_FLOPS`.
    """
    result: dict[str, Any] = {}
    for kind, options in (("lora", {"lora_rank": 32}), ("full", {})):
        policy = random_policy(
            embodiment, architecture, device, chunk_length=8, gradient_checkpointing=True, **options
        )
        observation = bench_observation(embodiment, batch)
        with torch.inference_mode():
            stored = policy.act(observation, seeds=range(batch)).replay
        replay = {name: tensor.clone() for name, tensor in stored.items()}
        optimizer = torch.optim.AdamW(
            [p for p in policy.parameters() if p.requires_grad], lr=1e-6, fused=True
        )

        def update(
            observation: Observation = observation,
            replay: dict = replay,
            policy: OpenVLA = policy,
            optimizer: Any = optimizer,
        ) -> None:
            loss = -policy.evaluate(observation, replay).log_prob.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            float(loss.detach())  # waits for a GPU

        seconds = statistics.median(took.wall for took in take_turns({"": update}, updates)[""])
        prefix = policy.prefix(observation).x.shape[1]
        tokens = batch * (prefix + policy.action_tokens + 1)
        vision_tokens = batch * len(policy.cameras) * policy.vision_backbone.patches
        language = sum(
            p.numel()
            for n, p in policy.language_model.model.layers.named_parameters()
            if p.ndim > 1
        )
        vision = sum(p.numel() for n, p in policy.vision_backbone.named_parameters() if p.ndim > 1)
        flops = (6 if kind == "full" else 4) * (language * tokens + vision * vision_tokens)
        row = {
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
            "flops_per_second": flops / seconds,
        }
        peak = peak_flops(device)
        row["utilisation"] = None if peak is None else flops / seconds / peak
        result[kind] = row
        del policy, optimizer, update
    return result


def text(document: Mapping[str, Any]) -> str:
    result = document["decoding"]
    rows = [("batch", "cached", "no reuse", "ratio", "one row", "ratio", "parallel", "same tokens")]
    for batch, row in result["batches"].items():
        cells = [
            f"{row[f'{name}_ms']:.1f}" for name in ("cached", "no_reuse", "one_row", "parallel")
        ]
        ratios = [f"{row[f'ratio_{name}']:.2f}" for name in ("no_reuse", "one_row")]
        rows.append(
            (batch, *cells[:2], ratios[0], cells[2], ratios[1], cells[3], str(row["equal"]))
        )
    head = (
        f"OpenVLA {result['architecture']}, {result['parameters'] / 1e6:.1f} M random weights: ms "
        "a decision"
    )
    lines = [head, table(rows)]
    for kind, row in document.get("training", {}).items():
        share = (
            "" if row["utilisation"] is None else f", {row['utilisation']:.0%} of the GPU's peak"
        )
        lines.append(
            f"{kind} update: {row['seconds'] * 1e3:.0f} ms, {row['tokens_per_second']:.0f} "
            f"tokens/s{share}"
        )
    return "\n".join(lines)
