"""π0 and π0.5 of other sizes than the published ones, by lerobot's own classes: for tests, and to
learn on two cores.

lerobot has the sizes of two Gemmas and one picture encoder written into its modules. A policy of
another size says so under the key `SIZES` of its ``config.json``, which lerobot itself refuses:
better than weights that it would pass over.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from vla_rl.errors import ConfigError

SIZES = "sizes"
_HEADS = 8  # as lerobot's joint attention has it
# of Gemma 2B, the expert of 300 million, and SigLIP So400m
PUBLISHED = {
    "width": 2048,
    "mlp": 16384,
    "depth": 18,
    "head_dim": 256,
    "expert_width": 1024,
    "expert_mlp": 4096,
    "vision_width": 1152,
    "vision_mlp": 4304,
    "vision_depth": 27,
    "vision_heads": 16,
    "vocabulary": 257152,
}


def require_sizes(family: str, sizes: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where ``policy.sizes`` cannot be those of a policy of ``family``."""
    if sizes and family not in ("pi0", "pi05"):
        raise ConfigError(
            f"policy.sizes is for pi0 and pi05; a {family} policy takes its own in policy.options"
        )
    if unknown := [name for name in sizes if name not in PUBLISHED]:
        raise ConfigError(f"policy.sizes has {unknown[0]!r}, choose of {', '.join(PUBLISHED)}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"policy.sizes.{name} is {size!r}, it must be a whole number of at least 1"
            )
    whole = {**PUBLISHED, **sizes}
    if (
        whole["head_dim"] % 2
        or whole["expert_width"] % 2
        or whole["vision_width"] % whole["vision_heads"]
    ):
        raise ConfigError(
            "policy.sizes: head_dim and expert_width must be even, and vision_width a multiple of "
            "vision_heads; they are "
            f"{', '.join(f'{name} {whole[name]}' for name in ('head_dim', 'expert_width', 'vision_width', 'vision_heads'))}"
        )


@contextlib.contextmanager
def sized(family: str, sizes: Mapping[str, int] | None) -> Iterator[None]:
    """In the block lerobot builds π0 or π0.5 with these ``sizes``; those that are not given are
    the published ones."""
    if not sizes:
        yield
        return
    require_sizes(family, sizes)
    s = SimpleNamespace(**{**PUBLISHED, **sizes})
    module: Any = importlib.import_module(f"lerobot.policies.{family}.modeling_{family}")
    names = (
        "get_gemma_config",
        "PaliGemmaForConditionalGenerationWithPiGemma",
        "PiGemmaForCausalLM",
    )
    theirs = {name: vars(module)[name] for name in names}

    def gemma(variant: str) -> Any:
        width, mlp = (s.width, s.mlp) if variant == "gemma_2b" else (s.expert_width, s.expert_mlp)
        return module.GemmaConfig(width, s.depth, mlp, _HEADS, 1, s.head_dim)

    def trunk(config: Any) -> Any:
        config.text_config.vocab_size = config.image_token_id = s.vocabulary
        vision = config.vision_config
        vision.hidden_size, vision.intermediate_size, vision.projection_dim = (
            s.vision_width,
            s.vision_mlp,
            s.width,
        )
        vision.num_hidden_layers, vision.num_attention_heads = s.vision_depth, s.vision_heads
        return theirs["PaliGemmaForConditionalGenerationWithPiGemma"](config=config)

    def expert(config: Any) -> Any:
        config.vocab_size = s.vocabulary
        return theirs["PiGemmaForCausalLM"](config=config)

    try:
        for name, own in zip(names, (gemma, trunk, expert)):
            setattr(module, name, own)
        yield
    finally:
        for name, own in theirs.items():
            setattr(module, name, own)
