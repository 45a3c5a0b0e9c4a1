"""Weights of lerobot's policies on disk, under the names of lerobot and, for π0 and π0.5, of
openpi.

openpi's names are lerobot's without "model." in front. Its files, and those of lerobot 0.4, hold
one table for the trunk's words and its outputs; lerobot 0.6 has two. A policy that was read from
one keeps them in one, and is written so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.lerobot.stored import CONFIG
from policies.lora import adapt, merged
from vla_rl.errors import UserError

_PI = "model.paligemma_with_expert."
_WORDS, _OUTPUTS = f"{_PI}paligemma.model.language_model.embed_tokens", f"{_PI}paligemma.lm_head"
_UNUSED = f"{_PI}gemma_expert.lm_head.weight"  # the expert makes no words
_OLD = (  # names of lerobot's first files of π0, before transformers 4.52
    (
        r"^(model\.paligemma_with_expert\.paligemma)\.language_model\.model\.",
        r"\1.model.language_model.",
    ),
    (r"^(model\.paligemma_with_expert\.paligemma)\.language_model\.lm_head\.", r"\1.lm_head."),
    (
        r"^(model\.paligemma_with_expert\.paligemma)\.(vision_tower|multi_modal_projector)\.",
        r"\1.model.\2.",
    ),
)


def load_weights(model: nn.Module, file: Path) -> None:
    """Copy a safetensors file into ``model``; each parameter takes the half precision it has there,
    if any.

    Raises `UserError` that names what is missing, unexpected, misshapen or not finite.
    """
    stored, own = _read(file), dict(model.named_parameters()) | dict(model.named_buffers())
    if f"{_OUTPUTS}.weight" in own:
        stored = _pi_named(stored)
        if (f"{_OUTPUTS}.weight" in stored) != (f"{_WORDS}.weight" in stored):
            tie(model)
    wrong = []
    for name, tensor in stored.items():
        if name in own and tensor.shape != own[name].shape:
            wrong.append(
                f"misshapen: {name} is {list(tensor.shape)} there, {list(own[name].shape)} "
                f"by its {CONFIG}"
            )
        elif name in own and tensor.dtype in (torch.bfloat16, torch.float16):
            own[name].data = own[name].data.to(tensor.dtype)
    broken = [
        name for name, x in stored.items() if x.is_floating_point() and not torch.isfinite(x).all()
    ]
    if not wrong:
        missing, unexpected = model.load_state_dict(stored, strict=False)
        everything = model.state_dict()
        # shared tensors are stored once
        filled = {everything[name].data_ptr() for name in stored if name in everything}
        wrong = [
            f"missing: {n}"
            for n in missing
            if everything[n].data_ptr() not in filled and n != _UNUSED
        ]
        wrong += [f"unexpected: {name}" for name in unexpected]
    if wrong:
        shown = "\n  ".join(sorted(wrong)[:20]) + (
            f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        )
        raise UserError(
            f"the weights in {file} do not fit the policy that its {CONFIG} describes:\n  "
            f"{shown}\nFetch the checkpoint again, or undo the policy.options that change the "
            "model's size."
        )
    if broken:
        raise UserError(
            f"{file} has values that are not finite, first in {broken[0]}: the training that wrote "
            "it diverged, use an earlier checkpoint"
        )


_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(model: nn.Module, rank: int, alpha: int = 0, targets: Collection[str] = ()) -> None:
    """Adapters in the layers of ``model``, a policy of lerobot, that ``targets`` name: without
    names all linear layers of its transformers' attention and MLP, as openpi's LoRA variants of
    π0, but of those that lerobot freezes none, nor of what reads pictures. The parts that hold
    adapted layers are trained by them alone; what projects states, times and actions stays
    trained. Raises `ConfigError` and `MissingPackage`."""
    wanted = targets or _ADAPTED
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and name.rpartition(".")[2] in wanted
        and "vision" not in name
    ]
    parts = {".".join(name.split(".")[:2]) for name in layers}  # "model.paligemma_with_expert"
    adapt(model, layers, [model.get_submodule(x) for x in parts], rank, alpha or rank)


def tie(model: nn.Module) -> None:
    """π0's words and outputs share one table from here on, as in files that hold one."""
    model.get_submodule(_OUTPUTS).weight = model.get_submodule(_WORDS).weight


def is_tied(model: nn.Module) -> bool:
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return (
        f"{_OUTPUTS}.weight" in names
        and model.get_submodule(_OUTPUTS).weight is model.get_submodule(_WORDS).weight
    )


def save_weights(model: nn.Module, file: Path) -> None:
    """As lerobot writes them, with what LoRA changed: of tensors that share memory one name, of
    π0's one table its outputs'."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, tensor in sorted(merged(model), key=lambda item: item[0] == f"{_WORDS}.weight"):
        if not any(
            tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape
            for other in tensors.values()
        ):
            tensors[name] = tensor.detach().contiguous()
    save_file(tensors, file, {"format": "pt"})


def save_openpi_weights(model: nn.Module, file: Path) -> None:
    """π0 or π0.5 as openpi writes it: by its names, and with one table, that of the words, under
    the outputs' name. Where the two differ, the outputs' own is left out: π0 makes no words."""
    from safetensors.torch import save_file

    named = {n.removeprefix("model."): x for n, x in merged(model)}
    words, outputs = (f"{n.removeprefix('model.')}.weight" for n in (_WORDS, _OUTPUTS))
    named[outputs] = named.pop(words)
    save_file({n: x.detach().contiguous() for n, x in named.items()}, file)


def tensor_names(file: Path) -> set[str]:
    """What ``file`` holds; its tensors are not read. Raises `UserError` for one that is missing
    or damaged."""
    from safetensors import safe_open

    with _damage(file), safe_open(file, "pt") as opened:
        return set(opened.keys())


def _read(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with _damage(file):
        return load_file(file)


@contextlib.contextmanager
def _damage(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} is missing or damaged ({error}): fetch the checkpoint again"
        ) from error


def _pi_named(stored: dict[str, Any]) -> dict[str, Any]:
    """The same under lerobot's names of π0 and π0.5."""
    out = {}
    for name, tensor in stored.items():
        full = name if name.startswith("model.") else f"model.{name}"
        for old, new in _OLD:
            full = re.sub(old, new, full)
        out[full] = tensor
    return out
