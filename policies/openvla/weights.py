"""Weights of an OpenVLA policy: given memory, read from what was published, frozen, adapted by
LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from policies.lora import adapt
from policies.openvla.checkpoint import PARTS, check_weights, read_weights
from policies.openvla.images import jpeg_decoder
from policies.openvla.model import initialise
from vla_rl.errors import UserError

if TYPE_CHECKING:
    from policies.openvla.policy import OpenVLABase

P = TypeVar("P", bound="OpenVLABase")


def materialise(
    policy: OpenVLABase, device: str, *, random: bool = True, only: Sequence[str] | None = None
) -> None:
    """Give memory to modules that have none yet, with random weights or with whatever lies
    there."""
    if policy.config.chosen_image_path == "jpeg_lanczos":
        jpeg_decoder()  # whatever has weights is going to act: say now what is missing
    for name, module in policy.named_children():
        if any(True for _ in module.parameters()) and (only is None or name in only):
            module.to_empty(device=device)
            if random:
                initialise(module)
    # transformers' own table of angles is no weight; made on "meta" it would stay empty
    llama = policy.language_model.model
    llama.rotary_emb = type(llama.rotary_emb)(llama.config)
    for name, buffer in list(policy.named_buffers()):
        if device != "meta" and not name.startswith(("language_model.", "vision_backbone.")):
            owner = policy.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], buffer.to(device))


def load_published(policy: OpenVLABase, new_parts: Sequence[str] = PARTS) -> None:
    """The weights of ``policy.checkpoint``; those of ``new_parts`` that it has not start at
    random."""
    folder = Path(policy.config.checkpoint)
    stored = read_weights(folder, policy.weights_dtype)
    stored |= {
        name: tensor.float() for name, tensor in stored.items() if name.startswith("value_head.")
    }
    children = dict(policy.named_children())
    _check_parts(policy, {name.partition(".")[0] for name in stored}, children)
    own = nn.Module.state_dict(policy)
    absent = [
        p
        for p in new_parts
        if p in children and not any(name.startswith(f"{p}.") for name in stored)
    ]
    never_computed = {id(p) for p in policy.vision_backbone.unused_parameters()}
    unused = {name for name, p in policy.named_parameters() if id(p) in never_computed}
    optional = unused | {name for name in own if name.partition(".")[0] in absent}
    check_weights(stored, own, optional, folder)
    stored |= {
        name: torch.zeros(own[name].shape, dtype=policy.weights_dtype)
        for name in unused - stored.keys()
    }
    nn.Module.load_state_dict(policy, stored, strict=False, assign=True)
    materialise(policy, "cpu", only=absent)


def _check_parts(policy: OpenVLABase, stored: set[str], children: Mapping[str, nn.Module]) -> None:
    """Parts that the checkpoint has and this policy would leave out change what the model
    computes."""
    folder = policy.config.checkpoint
    if "proprio_projector" in stored and not policy.config.use_proprio:
        raise UserError(
            f"{folder} was trained with proprioception (it has a proprio_projector): set "
            "policy.use_proprio=true"
        )
    if "action_head" in stored and "action_head" not in children:
        raise UserError(
            f"{folder} has an L1 action head, policy.type={policy.policy_type} reads tokens: set "
            "policy.type=openvla_l1"
        )


def prepare(policy: P) -> P:
    """Freeze, add LoRA, switch checkpointing on."""
    config = policy.config
    policy.vision_backbone.requires_grad_(not config.freeze_vision)
    policy.language_model.requires_grad_(not config.freeze_language)
    for p in policy.vision_backbone.unused_parameters():
        p.requires_grad_(False)
    if config.lora_rank:
        _add_lora(policy)
    policy.vision_backbone.checkpointing = config.gradient_checkpointing
    return policy


def _add_lora(policy: OpenVLABase) -> None:
    config, rank = policy.config, policy.config.lora_rank
    parts = (policy.vision_backbone, policy.projector, policy.language_model)
    # alpha as upstream's
    alpha = config.lora_alpha or min(rank, 16)
    adapt(policy, lora_targets(policy), parts, rank, alpha, config.lora_dropout)


def lora_targets(policy: OpenVLABase) -> list[str]:
    """Linear layers that LoRA adapts: upstream takes them all but the language model's head."""
    config = policy.config
    frozen = (["vision_backbone"] if config.freeze_vision else []) + (
        ["language_model"] if config.freeze_language else []
    )
    parts = [p for p in ("vision_backbone", "projector", "language_model") if p not in frozen]
    unused = {id(p) for p in policy.vision_backbone.unused_parameters()}
    wanted = set(config.lora_targets)
    return [
        f"{part}.{name}"
        for part in parts
        for name, module in policy.get_submodule(part).named_modules()
        if isinstance(module, nn.Linear)
        and name != "lm_head"
        and id(module.weight) not in unused
        and (not wanted or name.rpartition(".")[2] in wanted)
    ]
