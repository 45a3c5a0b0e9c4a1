"""Low-rank adapters (LoRA, Hu et al. 2021) through peft: the layers they are added to stay as they
are, and what is written for others has them merged in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from vla_rl.errors import ConfigError, MissingPackage


def adapt(
    model: nn.Module,
    layers: Sequence[str],
    parts: Collection[nn.Module],
    rank: int,
    alpha: int,
    dropout: float = 0.0,
) -> None:
    """Add adapters of ``rank`` (scaled by ``alpha`` / ``rank``, in float32; their change is zero at
    first) to ``layers``, names of linear layers of ``model``. Of ``parts`` nothing else is trained
    from here on. Raises `MissingPackage` and `ConfigError`."""
    try:
        import peft
    except ImportError:
        raise MissingPackage("peft", "peft", "LoRA (policy.lora_rank > 0)") from None
    if not layers:
        raise ConfigError(
            "policy.lora_targets names no linear layer that is not frozen; use last parts of "
            "module names such as q_proj, v_proj, qkv, fc1"
        )
    for part in parts:
        part.requires_grad_(False)
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(layers),
        init_lora_weights="gaussian",
        bias="none",
    )
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    peft.inject_adapter_in_model(settings, model)
    for name, p in model.named_parameters():  # peft freezes all it did not add
        p.requires_grad_(id(p) in trained or ".lora_" in name)
        if ".lora_" in name:
            p.data = p.data.float()


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights of ``model`` under the names that they have without adapters, with the adapters'
    change added."""
    adapted = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, tensor in nn.Module.state_dict(model).items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        plain = owner.removesuffix(".base_layer")
        if leaf == "weight" and plain != owner and plain in adapted:
            change = adapted[plain].get_delta_weight("default")
            tensor = (tensor.float() + change.float()).to(tensor.dtype)
        yield f"{plain}.{leaf}" if plain else leaf, tensor
