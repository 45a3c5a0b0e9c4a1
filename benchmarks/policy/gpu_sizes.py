"""What the published policies cost by arithmetic: parameters, bytes of a training step,
multiplications of a decision and of an update. Nothing is built; `benchmarks.policy.gpu` measures
the same.

Rules, those of `benchmarks.policy.memory` where both speak: weights are bfloat16; a trained one
costs two bytes of gradient and twelve of optimiser (float32 copy and two moments); an adapter of
LoRA is float32. A layer of width d, key-value width k and MLP width m keeps 7 d + 3 k + 4 m values
a token for the backward pass (a block of vision 8 d + 2 m); with checkpointing d, and one whole
layer. Attention that is not fused keeps its scores, 6 bytes each. What passes without gradient
holds one layer at a time, and its keys and values. A matrix costs 2 operations a weight and token
forward, as much again for each of the two gradients that are wanted; attention 4 a head width,
query and key.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VALUE, SCORE = 2, 6  # bytes of a kept value, and of a kept attention score
PROMPT = 32  # tokens of a usual instruction
MODES = ("expert", "lora", "all")


@dataclass(frozen=True)
class Stack:
    """Layers alike. ``tokens`` of a row pass them, and see ``seen`` more; ``images``: for each of a
    row's pictures anew. ``more`` weights besides; ``norms``: of each layer, such as adaptive
    ones."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tokens: int
    gated: bool = True
    seen: int = 0
    images: int = 1
    more: int = 0
    norms: int = 0
    fused: bool = True

    @property
    def matrices(self) -> int:
        """Weights of the layers that tokens are multiplied with."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + (3 if self.gated else 2) * self.width * self.mlp)

    @property
    def parameters(self) -> int:
        return self.matrices + self.layers * self.norms + self.more

    def adapters(self, rank: int) -> int:
        """Weights of LoRA on every matrix of the layers: rank times inputs and outputs."""
        inner, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = 2 * (self.width + inner) + 2 * (self.width + keys)
        return self.layers * rank * (sides + (3 if self.gated else 2) * (self.width + self.mlp))

    def kept(self, checkpointed: bool) -> int:
        """Bytes of a row for the backward pass."""
        keys = self.kv_heads * self.head_dim
        layer = (
            7 * self.width + 3 * keys + 4 * self.mlp
            if self.gated
            else 8 * self.width + 2 * self.mlp
        )
        one = layer * self.tokens * VALUE + self._scores
        whole = (
            one + self.width * self.tokens * VALUE * self.layers
            if checkpointed
            else one * self.layers
        )
        return self.images * whole

    @property
    def passing(self) -> int:
        """Bytes of a row that passes without gradient: one layer."""
        return self.kept(True) - self.images * self.width * self.tokens * VALUE * self.layers

    @property
    def cache(self) -> int:
        """Bytes of a row's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.tokens * VALUE

    @property
    def _scores(self) -> int:
        return 0 if self.fused else self.heads * self.tokens * (self.tokens + self.seen) * SCORE

    @property
    def forward(self) -> int:
        """Operations of a row."""
        attention = (
            4 * self.layers * self.heads * self.head_dim * self.tokens * (self.tokens + self.seen)
        )
        return self.images * (2 * self.matrices * self.tokens + attention)


@dataclass(frozen=True)
class Model:
    """``prefix`` passes once a decision, ``expert`` once for each of ``steps`` denoising steps
    (none: the prefix decides); ``ppo_steps`` of them are learned from. ``more``: weights of
    neither."""

    name: str
    prefix: tuple[Stack, ...]
    expert: Stack | None = None
    steps: int = 1
    ppo_steps: int = 1
    more: int = 0
    checkpointed: bool = True
    rank: int = 32
    projections: int = 0  # of states, times and actions, which LoRA leaves trained

    @property
    def adapted(self) -> tuple[Stack, ...]:
        """What of ``prefix`` LoRA adapts: with an expert, all but what reads pictures."""
        return self.prefix[1:] if self.expert else self.prefix

    @property
    def parts(self) -> tuple[Stack, ...]:
        return (*self.prefix, *([self.expert] if self.expert else []))

    @property
    def parameters(self) -> int:
        return self.more + sum(part.parameters for part in self.parts)


@dataclass(frozen=True)
class Cost:
    """Of a model that is trained in one mode. Bytes by purpose; ``passes`` are of the largest part
    of a decision, of an SFT and of a PPO row; operations are of one row, of which a device's peak
    is the limit."""

    model: str
    mode: str
    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    sft_activations: int
    ppo_activations: int
    acting: int
    sft_memory: int
    ppo_memory: int
    act_operations: int
    sft_operations: int
    ppo_operations: int
    passes: dict[str, str] = field(default_factory=dict)


def cost(model: Model, mode: str, micro_batch: int = 8, acting_batch: int = 32) -> Cost | None:
    """None: the model has no expert to train alone."""
    expert, parts = model.expert, model.parts
    if mode == "expert" and expert is None:
        return None
    adapters = sum(x.adapters(model.rank) for x in (*model.adapted, *([expert] if expert else [])))
    trained = {
        "expert": expert.parameters if expert else 0,
        "lora": adapters + model.projections,
        "all": model.parameters,
    }[mode]
    frozen = 0 if mode == "all" else model.parameters - (trained if mode == "expert" else 0)
    size = 4 if mode == "lora" else VALUE  # of a trained weight and its gradient
    weights = frozen * VALUE + trained * size
    gradients, optimizer = trained * size, trained * (8 if mode == "lora" else 12)
    cached = sum(part.cache for part in model.prefix[-1:]) if expert else 0
    learning = {"expert": (), "lora": model.adapted, "all": model.prefix}[mode]
    frozen_parts = [part for part in model.prefix if part not in learning]
    held = max((part.passing for part in frozen_parts), default=0)
    held += sum(part.kept(model.checkpointed) for part in learning)
    held += cached if mode == "expert" else 0
    own = expert.kept(model.checkpointed and mode != "expert") if expert else 0
    sft, ppo = (micro_batch * (held + steps * own) for steps in (1, model.ppo_steps))
    acting = acting_batch * (max(part.passing for part in parts) + cached)
    fixed = weights + gradients + optimizer
    once = sum(part.forward for part in model.prefix)
    again = expert.forward if expert else 0
    share = {"expert": 3, "lora": 2, "all": 3}[mode]  # of what a part costs forward
    there = once + (share - 1) * sum(part.forward for part in learning)  # and back
    return Cost(
        model.name, mode, model.parameters, trained, weights, gradients, optimizer, sft, ppo, acting,
        sft_memory=fixed + max(sft, acting), ppo_memory=fixed + max(ppo, acting),
        act_operations=once + model.steps * again,
        sft_operations=there + share * again,
        ppo_operations=there + share * model.ppo_steps * again,
        passes={
            "act": f"1 + {model.steps}" if expert else "1",
            "sft": "1 + 1" if expert else "1",
            "ppo": f"1 + {model.ppo_steps}" if expert else "1",
        },
    )  # fmt: skip


def _siglip(
    layers: int, width: int, heads: int, mlp: int, tokens: int, images: int, patch: int = 14
) -> Stack:
    embedding = 3 * patch * patch * width + tokens * width
    return Stack(
        "vision",
        layers,
        width,
        heads,
        heads,
        width // heads,
        mlp,
        tokens,
        gated=False,
        images=images,
        more=embedding,
    )


def openvla_oft(cameras: int = 2, steps: int = 8, dimensions: int = 7) -> Model:
    """Llama-2 7B under SigLIP So400m and DINOv2 L/14, whose last blocks are left out; a token a
    number."""
    siglip = _siglip(27, 1152, 16, 4304, 256, cameras)
    dino = Stack(
        "dino",
        24,
        1024,
        16,
        16,
        64,
        4096,
        261,
        gated=False,
        images=cameras,
        more=(3 * 196 + 261) * 1024,
    )
    projector = 2176 * 8704 + 8704 * 4096 + 4096 * 4096
    tokens = cameras * 256 + PROMPT + steps * dimensions + 1
    llama = Stack("llama", 32, 4096, 32, 32, 128, 11008, tokens, more=2 * 32064 * 4096)
    return Model("OpenVLA-OFT 7B", (siglip, dino, llama), more=projector)


def pi05(cameras: int = 3, horizon: int = 50, prompt: int = 200) -> Model:
    """Gemma 2B under SigLIP So400m, and an expert of 300 million with adaptive norms (scale, shift
    and gate of each of two)."""
    prefix = cameras * 256 + prompt
    trunk = Stack("trunk", 18, 2048, 8, 1, 256, 16384, prefix, more=257152 * 2048, fused=False)
    adaptive = 2 * (1024 * 3072 + 3072)
    expert = Stack(
        "expert", 18, 1024, 8, 1, 256, 4096, horizon, seen=prefix, norms=adaptive, fused=False,
        more=257152 * 1024 + 1024 * 3072 + 2 * 32 * 1024 + 2 * 1024 * 1024,
    )  # fmt: skip
    vision = _siglip(27, 1152, 16, 4304, 256, cameras)
    return Model(
        "pi0.5", (vision, trunk), expert, steps=10, ppo_steps=5, more=1152 * 2048,
        projections=2 * 32 * 1024 + 2 * 1024 * 1024,
    )  # fmt: skip


def smolvla(cameras: int = 2, horizon: int = 50, prompt: int = 48) -> Model:
    """The lower 16 layers of SmolLM2 360M under SigLIP B/16 at 512 px (64 tokens a picture), and an
    expert of 3/4 its width."""
    prefix = cameras * 64 + prompt + 1
    trunk = Stack("trunk", 16, 960, 15, 5, 64, 2560, prefix, more=2 * 49280 * 960, fused=False)
    expert = Stack(
        "expert", 16, 720, 15, 5, 64, 2048, horizon, seen=prefix, fused=False,
        more=2 * 32 * 720 + 32 * 960 + 3 * 720 * 720,
    )  # fmt: skip
    vision = _siglip(12, 768, 12, 3072, 1024, cameras, 16)
    return Model(
        "SmolVLA", (vision, trunk), expert, steps=10, ppo_steps=10, more=12288 * 960,
        projections=2 * 32 * 720 + 32 * 960 + 3 * 720 * 720,
    )  # fmt: skip


MODELS = {"openvla_oft": openvla_oft, "pi05": pi05, "smolvla": smolvla}
