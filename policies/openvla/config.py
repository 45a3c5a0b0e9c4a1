"""Options of the OpenVLA policies, and what is read from a checkpoint's own ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policies.settings import correlated_axes, require_correlation
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError, UserError, require_packages

DIALECTS = ("official", "rlinf")
ACTION_BINS, LLAMA_VOCABULARY = 256, 32000
_UNSUPPORTED = {
    "use_film": "FiLM (vision features that depend on the instruction) is",
    "use_diffusion": "OFT's diffusion head is",
    "quantization_config": "quantised weights are",
}
ARCHITECTURES = ("", "nano", "7b")


@dataclass
class OpenVLAConfig(Bounded, place="policy"):
    """How an OpenVLA or OpenVLA-OFT checkpoint is read, acts and is trained.

    ``checkpoint`` is a folder in the upstream format. Without one, ``architecture`` names a layout
    with random weights. ``dialect`` "official" is that of openvla-oft and SimpleVLA-RL, "rlinf"
    that of RLinf's own OFT checkpoints; they differ in the sequence, the image path and whose
    statistics count, and a wrong one makes a checkpoint useless without any error.
    """

    # a folder in the upstream format; empty: random weights of architecture
    checkpoint: str = ""
    # random weights where no checkpoint is given
    architecture: str = bound("", choices=ARCHITECTURES)
    # parallel: OFT; autoregressive: OpenVLA
    decoding: str = bound("parallel", choices=("parallel", "autoregressive"))
    dialect: str = bound("official", choices=DIALECTS)  # whose conventions the checkpoint follows
    # of parallel decoding; auto: bidirectional, in either dialect
    attention: str = bound("auto", choices=("auto", "bidirectional", "causal"))
    chunk_length: int = bound(8, ge=1)  # control steps; 1 for OpenVLA itself
    # 1 to 3 of the embodiment's, in the checkpoint's order; empty: the first
    cameras: list[str] = several([], most=3, hint="OpenVLA-OFT reads 1 to 3")
    # read proprioception (OFT)
    use_proprio: bool = False
    # the checkpoint's conventions
    unnorm_key: str = ""  # which of its statistics; empty: the only one
    normalization: str = bound("q99", choices=("q99", "minmax"))  # minmax: ALOHA
    # libero: the model says 1 open, 0 closed, the env -1 open, +1 closed; none: as it is
    gripper: str = bound("libero", choices=("libero", "none"))
    # un-normalised actions are shares of the embodiment's bounds (unit), or in its units
    action_space: str = bound("unit", choices=("unit", "embodiment"))
    prompt: str = bound("pure", choices=("pure", "vicuna"))  # vicuna for v01 checkpoints
    # auto: jpeg_lanczos (official) or bicubic (rlinf); pil_bicubic: RLinf's way with official ones
    image_path: str = bound("auto", choices=("auto", "jpeg_lanczos", "bicubic", "pil_bicubic"))
    # 90 % of the area, for models trained with random crops (the path bicubic never crops)
    center_crop: bool = True
    # by 180 degrees, for an env that shows LIBERO's cameras as MuJoCo renders them
    rotate_images: bool = False
    # acting and learning
    # of sampling and of every reported log-prob
    temperature: float = bound(1.0, gt=0, hint="for no sampling act with deterministic=True")
    # of sampling, between the control steps of a chunk; see `chunk_uniforms`
    noise_correlation: float = bound(0.0, ge=0, lt=1)
    value_head: bool = False  # on the hidden state that predicts the first action token
    # dtype the parameters are kept in
    weights: str = bound("float32", choices=("float32", "bfloat16"))
    # of the computation; auto: bfloat16 autocast where the hardware multiplies it natively
    precision: str = bound("auto", choices=("auto", "float32", "bfloat16"))
    # compute activations again in the backward: less memory, slower
    gradient_checkpointing: bool = False
    # leave the vision towers and the projector as they are
    freeze_vision: bool = False
    # leave the language model as it is
    freeze_language: bool = False
    lora_rank: int = bound(0, ge=0)  # 0: no LoRA, the weights themselves are trained
    lora_alpha: int = bound(0, ge=0)  # 0: min(lora_rank, 16), as upstream
    # share of LoRA's inputs that training drops
    lora_dropout: float = bound(0.0, ge=0, lt=1)
    lora_targets: list[str] = field(
        default_factory=list
    )  # last parts of module names; empty: every linear layer but the head
    # checkpoints of a run leave the frozen weights to policy.checkpoint
    save_trained_only: bool = False
    # keep the preprocessed images with a decision: faster updates, more memory
    replay_pixels: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_correlation(self.noise_correlation, self.decoding)
        if self.decoding == "autoregressive" and self.attention == "bidirectional":
            raise ConfigError(
                "policy.attention=bidirectional does not go with "
                "policy.decoding=autoregressive: leave it at auto"
            )
        if self.save_trained_only and not self.checkpoint:
            raise ConfigError(
                "policy.save_trained_only=true needs policy.checkpoint: the frozen weights "
                "are read from there"
            )

    def check_machine(self) -> None:
        """Raise `MissingPackage` for an optional package that these options need."""
        if self.lora_rank:
            require_packages(
                "peft", extra="peft", purpose=f"LoRA (policy.lora_rank={self.lora_rank})"
            )
        if self.chosen_image_path == "jpeg_lanczos":
            require_packages(
                "simplejpeg",
                extra="openvla",
                purpose="the JPEG step of policy.image_path=jpeg_lanczos",
            )

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return correlated_axes(self)

    @property
    def causal(self) -> bool:
        """Whether a position sees only those before it.

        Never in parallel decoding, unless asked for: openvla-oft, SimpleVLA-RL and RLinf all run
        the SDPA layer of the transformers fork, which lets every position see all others. (RLinf's
        YAML names flash attention, which would be causal there, but its loader of either
        ``implement_version`` does not pass that on.)
        """
        return self.decoding == "autoregressive" or self.attention == "causal"

    @property
    def chosen_image_path(self) -> str:
        """``image_path`` with auto resolved."""
        if self.image_path != "auto":
            return self.image_path
        return "jpeg_lanczos" if self.dialect == "official" else "bicubic"


# --------------------------------------------------------------------------------- the checkpoint's
@dataclass(frozen=True)
class TowerSpec:
    """A vision transformer by its timm name; ``arguments`` override timm's sizes (tiny models;
    upstream knows none)."""

    timm_name: str
    image_size: int
    act_layer: str | None
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """Sizes of the model, from upstream's ``config.json`` (openvla
    ``configuration_prismatic.py``)."""

    towers: tuple[TowerSpec, ...]
    text: dict[str, Any]  # keyword arguments of transformers' LlamaConfig
    action_bins: int
    # ids below it are real; the last `action_bins` of them are the action tokens
    text_vocabulary: int
    max_length: int
    where: str = "config.json"  # the file that says so, for messages

    @property
    def fused(self) -> bool:
        return len(self.towers) == 2

    @property
    def image_size(self) -> int:
        return self.towers[0].image_size

    @property
    def width(self) -> int:
        return self.text["hidden_size"]

    @property
    def first_action_id(self) -> int:
        return self.text_vocabulary - self.action_bins

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Architecture:
        """Raises `UserError` that names what ``config`` lacks or what this policy cannot do;
        ``where`` is shown in it."""
        if config.get("model_type") != "openvla":
            raise UserError(
                f"{where} has model_type {config.get('model_type')!r}, this policy reads "
                "'openvla': give the folder of an OpenVLA or OpenVLA-OFT checkpoint"
            )
        needed = ("timm_model_ids", "image_sizes", "use_fused_vision_backbone", "text_config")
        missing = [key for key in needed if key not in config]
        if missing:
            raise UserError(
                f"{where} lacks {', '.join(missing)}: use the config.json that the checkpoint was "
                "published with"
            )
        _refuse_unknown(config, where)
        text = _text(config["text_config"], where)
        bins = _count(config, "n_action_bins", 256, where)
        padding = _count(config, "pad_to_multiple_of", 64, where)
        if bins != ACTION_BINS:
            raise UserError(
                f"{where} has n_action_bins {bins}; openvla's and OFT's action tokenisers make "
                f"{ACTION_BINS} whatever this says: set it to {ACTION_BINS} if the checkpoint was "
                "trained with these, no other is supported"
            )
        if text["vocab_size"] - padding != LLAMA_VOCABULARY:
            raise UserError(
                f"{where} has text_config.vocab_size {text['vocab_size']} and pad_to_multiple_of "
                f"{padding}, which puts the action tokens before id "
                f"{text['vocab_size'] - padding}; Llama-2's end at {LLAMA_VOCABULARY} (published: "
                "32064 and 64). Use the config.json that the checkpoint was published with"
            )
        length = min(_count(config, "llm_max_length", 2048, where), text["max_position_embeddings"])
        return cls(_towers(config, where), text, bins, LLAMA_VOCABULARY, length, where)


def _refuse_unknown(config: Mapping[str, Any], where: str) -> None:
    """Keys that change what the model computes in a way that is not implemented here."""
    strategy = config.get("image_resize_strategy") or "resize-naive"
    if strategy != "resize-naive":
        raise UserError(
            f"{where} has image_resize_strategy {strategy!r}; only 'resize-naive' is supported, "
            "that of every published OpenVLA checkpoint"
        )
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise UserError(
                f"{where} has {key} {str(config[key])[:60]!r}: {what} not supported, "
                "use another checkpoint"
            )


def _towers(config: Mapping[str, Any], where: str) -> tuple[TowerSpec, ...]:
    for key in ("timm_model_ids", "image_sizes", "timm_override_act_layers", "timm_model_args"):
        if not isinstance(config.get(key) or [], list):
            raise UserError(
                f"{where} has {key} {config[key]!r}, it should be a list with an entry "
                "for each vision tower"
            )
    names, sizes = config["timm_model_ids"] or [], config["image_sizes"] or []
    expected = 2 if config["use_fused_vision_backbone"] else 1
    acts = config.get("timm_override_act_layers") or [None] * len(names)
    arguments = config.get("timm_model_args") or [{}] * len(names)
    if (
        not len(names) == len(sizes) == len(acts) == len(arguments) == expected
        or sizes[0] != sizes[-1]
    ):
        raise UserError(
            f"{where} names the vision towers {names} with image sizes {sizes}; "
            f"use_fused_vision_backbone={config['use_fused_vision_backbone']} needs {expected} of "
            "one size"
        )
    _count({"image_sizes": sizes[0]}, "image_sizes", None, where)
    for key, values, kind in (
        ("timm_model_ids", names, str),
        ("timm_override_act_layers", [act for act in acts if act is not None], str),
        ("timm_model_args", arguments, dict),
    ):
        if not all(isinstance(value, kind) for value in values):
            raise UserError(
                f"{where} has {key} {values!r}: use the config.json that the checkpoint "
                "was published with"
            )
    return tuple(TowerSpec(*row) for row in zip(names, sizes, acts, arguments, strict=True))


def _text(given: Any, where: str) -> dict[str, Any]:
    """Sizes of the Llama, those that ``text_config`` leaves out by the library's defaults."""
    if not isinstance(given, Mapping):
        raise UserError(
            f"{where} has text_config {given!r}, it should be an object: use the config.json that "
            "the checkpoint was published with"
        )
    for key, only in (("model_type", "llama"), ("hidden_act", "silu")):
        if given.get(key) not in (None, only):
            raise UserError(
                f"{where} has text_config.{key} {given[key]!r}: only {only!r} is "
                "supported, that of Llama-2"
            )
    # the second: transformers 5
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if (
        not isinstance(rope, Mapping)
        or rope.get("rope_type", rope.get("type", "default")) != "default"
    ):
        raise UserError(
            f"{where} asks for rope_scaling {rope}, which OpenVLA's Llama-2 does not have"
        )
    text = {**_LLAMA_DEFAULTS, **{k: rope[k] for k in ("rope_theta",) if k in rope}}
    text |= {key: value for key, value in given.items() if key in text and value is not None}
    for key, default in _LLAMA_DEFAULTS.items():
        if isinstance(default, int):
            _count(text, key, None, where, "text_config.")
        elif (
            isinstance(text[key], bool)
            or not isinstance(text[key], int | float)
            or not 0 < text[key] < float("inf")
        ):
            raise UserError(
                f"{where} has text_config.{key} {text[key]!r}, it should be a number above 0"
            )
    heads, pairs = text["num_attention_heads"], text["num_key_value_heads"]
    if text["hidden_size"] % (2 * heads) or heads % pairs:
        raise UserError(
            f"{where} has text_config.hidden_size {text['hidden_size']} for {heads} heads and "
            f"{pairs} key-value heads, which does not divide: use the config.json that the "
            "checkpoint was published with"
        )
    return text


def _count(
    config: Mapping[str, Any], key: str, default: int | None, where: str, prefix: str = ""
) -> int:
    value = config.get(key, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < (key != "pad_to_multiple_of")
    ):
        raise UserError(
            f"{where} has {prefix}{key} {value!r}, it should be a whole number of at least 1"
        )
    return value


# The converter of the published checkpoints wrote text_config from the library's bare Llama
# defaults, not from Meta's file: rms_norm_eps is 1e-6 there. A value that config.json leaves out
# has to be that of these defaults.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def random_config(architecture: str) -> dict[str, Any]:
    """A ``config.json`` in upstream's layout: "7b" is openvla-7b's, "nano" the same shape in
    about nine million weights."""
    config: dict[str, Any] = {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "llm_backbone_id": "llama2-7b-pure",
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "use_fused_vision_backbone": True,
        "timm_model_ids": [
            "vit_large_patch14_reg4_dinov2.lvd142m",
            "vit_so400m_patch14_siglip_224",
        ],
        "timm_override_act_layers": [None, None],
        "image_sizes": [224, 224],
        "image_resize_strategy": "resize-naive",
        "llm_max_length": 2048,
        "pad_token_id": 32000,
        "pad_to_multiple_of": 64,
        "output_projector_states": False,
        "n_action_bins": 256,
        "norm_stats": {},
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "pad_token_id": 32000,
            "torch_dtype": "bfloat16",
        },
    }
    if architecture == "nano":
        config["image_sizes"] = [56, 56]
        config["timm_model_args"] = [
            {"embed_dim": 64, "depth": 3, "num_heads": 4},
            {"embed_dim": 64, "depth": 3, "num_heads": 4},
        ]
        config["text_config"] |= {
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "torch_dtype": "float32",
        }
    return config


def random_preprocessor(config: Mapping[str, Any]) -> dict[str, Any]:
    """A ``preprocessor_config.json`` with the constants of the published one, which are rounded
    to bfloat16."""
    dino = {
        "mean": [0.484375, 0.455078125, 0.40625],
        "std": [0.228515625, 0.2236328125, 0.224609375],
    }
    siglip = {"mean": [0.5] * 3, "std": [0.5] * 3}
    towers = [dino, siglip][: len(config["timm_model_ids"])]
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": config["image_resize_strategy"],
        "use_fused_vision_backbone": config["use_fused_vision_backbone"],
        "input_sizes": [[3, size, size] for size in config["image_sizes"]],
        "interpolations": ["bicubic"] * len(towers),
        "means": [tower["mean"] for tower in towers],
        "stds": [tower["std"] for tower in towers],
        "tvf_normalize_params": [{"inplace": False, **tower} for tower in towers],
    }
