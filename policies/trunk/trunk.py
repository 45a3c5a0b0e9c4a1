"""The vision-language trunk that the small VLA policies share: cameras, instruction and
proprioception become a prefix.

Parts and order are those of OpenVLA (arXiv 2406.09246): ViT → projector → Llama. A policy puts its
own head on top: action tokens (`policies.nano_vla`) or an action expert that reads the prefix's
keys and values (`policies.denoising`).

Prefix: image tokens of each camera | instruction tokens | proprio token.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from policies.inputs import chosen_cameras, require_known, require_proprio
from policies.normalization import VectorStats
from policies.tokenizer import PAD_ID, WordTokenizer
from policies.trunk.features import spread
from policies.trunk.instructions import Instructions
from policies.trunk.llama import MASKED, LlamaTrunk, mlp, native_bfloat16, parameter
from policies.trunk.modules import Modules
from policies.trunk.noise import seeded
from policies.trunk.pictures import PictureEncoder
from policies.trunk.vision import FeatureNorm, VisionTower
from vla_rl.errors import EmbodimentMismatch
from vla_rl.interfaces import Policy
from vla_rl.types import EmbodimentSpec, Observation

IMAGE_TOKENS = "image_tokens"  # in a decision's replay
# image tokens, distinct instructions, which of them each row has, proprio
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class VisionLanguageTrunk(nn.Module, Policy):
    """Everything of a policy up to its head: inputs, prefix, Llama, value head, statistics,
    checkpoints.

    ``action_stats`` and ``proprio_stats`` come from the training data
    (`policies.normalization.VectorStats`); without them the embodiment's bounds and the identity
    are used. ``positions`` is how many sequence positions the head takes after the prefix. A
    subclass sets ``policy_type`` and ``config_class``.
    """

    policy_type: ClassVar[str]
    config_class: ClassVar[type]
    vision: Modules[VisionTower]
    feature_norms: Modules[FeatureNorm]
    proprio_mean: Tensor
    proprio_std: Tensor

    def __init__(
        self,
        config: Any,
        embodiment: EmbodimentSpec,
        action_stats: VectorStats | None = None,
        proprio_stats: VectorStats | None = None,
        tokenizer: WordTokenizer | None = None,
        *,
        positions: int = 0,
    ):
        super().__init__()
        self.config = config
        self.embodiment = embodiment
        self.chunk_length = config.chunk_length
        self.action_stats = action_stats or VectorStats.from_bounds(
            embodiment.action_low, embodiment.action_high
        )
        self.proprio_stats = proprio_stats or VectorStats.identity(embodiment.proprio_dim)
        if len(self.proprio_stats) != embodiment.proprio_dim:
            raise EmbodimentMismatch(
                f"the proprio statistics have {len(self.proprio_stats)} dimensions but embodiment "
                f"{embodiment.name} has {embodiment.proprio_dim} "
                f"({', '.join(embodiment.proprio_names)}): compute them on data of this embodiment"
            )
        self.tokenizer = tokenizer or WordTokenizer(hash_buckets=config.hash_buckets)
        self.instructions = Instructions(self.tokenizer, config.instruction_length)
        self.keeps_image_tokens = False
        self.rank, self.ranks = 0, 1  # of those that learn together

        d = config.llm_width
        self.cameras = chosen_cameras(config.cameras, embodiment) or embodiment.cameras
        words = self.tokenizer.vocab_size
        self.pictures = PictureEncoder(config, embodiment, self.cameras, self.instructions, words)
        for name, module in self.pictures.named_modules().items():
            self.add_module(name, module)
        self.camera_tokens = self.pictures.tokens
        self.image_positions = parameter(sum(self.camera_tokens), d, std=0.1)
        text = config.instruction_tokens or config.instruction_length
        self.prefix_length = sum(self.camera_tokens) + text + int(config.use_proprio)
        self.sequence_length = self.prefix_length + positions

        self.trunk = LlamaTrunk(config, words, self.sequence_length)
        nn.init.trunc_normal_(self.trunk.llama.embed_tokens.weight, std=0.5)
        self.text_positions = parameter(config.instruction_length, d)
        if config.instruction_tokens:
            self.text_queries = parameter(config.instruction_tokens, d, std=1.0)
            self.text_mlp = mlp(d, d, d)
        if config.use_proprio:
            self.proprio_mlp = mlp(embodiment.proprio_dim, d, d)
        mean, std = self.proprio_stats.mean_std()
        self.register_buffer("proprio_mean", mean, persistent=False)
        self.register_buffer("proprio_std", std, persistent=False)
        if config.stem_channels:
            self.vision.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads lack it

    def _build_value_head(self) -> None:
        if self.config.value_head:
            self.value_mlp = mlp(self.config.llm_width, self.config.llm_width, 1, out_std=0.01)

    # --------------------------------------------------------------------------------------- inputs
    @property
    def device(self) -> torch.device:
        return self.proprio_mean.device

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.uses_bfloat16())

    def uses_bfloat16(self) -> bool:
        """Whether forwards run in bfloat16 autocast on the present device (parameters and losses
        stay float32)."""
        if self.config.precision != "auto":
            return self.config.precision == "bfloat16"
        return native_bfloat16(self.device.type)

    def image_tokens(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Standardised image tokens float32 [b N d] of all cameras: those that ``replay`` kept,
        where it did."""
        if replay is not None and IMAGE_TOKENS in replay:
            return replay[IMAGE_TOKENS].to(self.device)
        return self.pictures.standardized(self._projected(observation))

    def _projected(self, observation: Observation) -> list[Tensor]:
        """Each camera's image tokens [b N d] as the projector gives them."""
        with self._autocast():
            return self.pictures.projected(observation, self._pixel_dtype)

    @property
    def _pixel_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.uses_bfloat16() else torch.float32

    @torch.no_grad()
    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: all image tokens (half precision, flat),
        standardised proprio, and the mean embedding of the instruction's words."""
        visual = self.image_tokens(observation).flatten(1).half()
        return {"visual": visual, **self.blind_features(observation)}

    @torch.no_grad()
    def blind_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`."""
        ids, rows = self.instructions.ids(observation.instruction, self.device)
        require_proprio(observation, self.embodiment)
        said = (ids != PAD_ID).float()[..., None]
        text = (self.trunk.llama.embed_tokens(ids) * said).sum(1) / said.sum(1).clamp(min=1.0)
        return {"state": self._standardized(observation.proprio), "text": text.float()[rows]}

    def _tokens_of(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Image tokens out of `frame_features`, as a decision's replay holds them."""
        return {IMAGE_TOKENS: features["visual"].float().unflatten(1, (-1, self.config.llm_width))}

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, for `vla_rl.ranks.shard`."""
        return [
            *(block for tower in self.vision for block in tower.blocks),
            *self.trunk.llama.layers,
        ]

    def learn_together(self, index: int, size: int, total: Callable[[Tensor], Tensor]) -> None:
        """See `vla_rl.interfaces.Policy`: image tokens are standardised over the rows
        of all ranks."""
        self.rank, self.ranks = index, size
        self.pictures.learn_together(total)

    def prepare_for_rl(self) -> None:
        """Called before RL: with ``freeze_vision_in_rl`` the vision tower and the projector stay as
        SFT left them.

        Their output then belongs to the decision: `act` keeps it in the replay, and no update
        encodes an image again.
        """
        self.keeps_image_tokens = self.config.freeze_vision_in_rl
        if self.keeps_image_tokens:
            self.pictures.freeze()

    def hold_features(self) -> None:
        """See `vla_rl.interfaces.Policy`: vision, projector and the words' embedding stay as
        they are."""
        self.pictures.freeze()
        self.trunk.llama.embed_tokens.requires_grad_(False)

    def _kept(self, image_tokens: Tensor) -> dict[str, Tensor]:
        """What a decision's replay holds of its images."""
        return {IMAGE_TOKENS: image_tokens} if self.keeps_image_tokens else {}

    @torch.no_grad()
    def image_token_spread(self, observation: Observation) -> float:
        """What differs between the rows' projected images as a share of all there is: near 0 the
        images are constants (`policies.trunk.features.spread`, over tokens and channels, before
        any standardising)."""
        x = torch.cat([part.float() for part in self._projected(observation)], dim=1)
        return spread(x)

    @torch.inference_mode()
    def image_features(self, frames: Tensor) -> Tensor:
        """The vision tower's mean token float32 [n vit_width] for frames uint8 [n H W 3] of the
        first camera."""
        with self._autocast():
            return self.pictures.mean_token(frames, self._pixel_dtype)

    def _text_tokens(self, ids: Tensor) -> Tensor:
        """Instruction tokens [u T d], or pooled by learned queries into [u
        ``instruction_tokens`` d]."""
        x = self.trunk.llama.embed_tokens(ids) + self.text_positions
        if not self.config.instruction_tokens:
            return x
        scores = (self.text_queries @ x.transpose(1, 2)) * x.shape[-1] ** -0.5
        scores = scores.masked_fill((ids == PAD_ID)[:, None], MASKED)
        pooled = scores.softmax(-1) @ x
        return pooled + self.text_mlp(pooled)

    def _prefix(
        self, image_tokens: Tensor, text_ids: Tensor, text_rows: Tensor, proprio: Tensor
    ) -> Tensor:
        parts = [image_tokens + self.image_positions, self._text_tokens(text_ids)[text_rows]]
        if self.config.use_proprio:
            parts.append(self.proprio_mlp(self._standardized(proprio))[:, None])
        return torch.cat([part.float() for part in parts], dim=1)

    def _standardized(self, proprio: Tensor) -> Tensor:
        return ((proprio.to(self.device) - self.proprio_mean) / self.proprio_std).clamp(-5.0, 5.0)

    def _inputs(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> Inputs:
        """What `_prefix` takes."""
        ids, rows = self.instructions.ids(observation.instruction, self.device)
        require_proprio(observation, self.embodiment)
        return (
            self.image_tokens(observation, replay),
            ids,
            rows,
            observation.proprio.to(self.device),
        )

    def _value(self, prefix: Tensor) -> Tensor | None:
        """Value from the last hidden state of the prefix: it sees all inputs and no action, in
        either decoding."""
        if not self.config.value_head:
            return None
        pooled = prefix[:, -1].float()
        return self.value_mlp(pooled if self.config.value_gradient else pooled.detach()).squeeze(-1)

    # ---------------------------------------------------------------------------------- checkpoints
    def config_dict(self) -> dict[str, Any]:
        """What `config.json` holds: enough, with the embodiment and the tokenizer, to build this
        policy again."""
        return {
            "config": dataclasses.asdict(self.config),
            "action_stats": self.action_stats.to_dict(),
            "proprio_stats": self.proprio_stats.to_dict(),
        }

    def extra_files(self) -> dict[str, str]:
        """Text files of a checkpoint beside the weights."""
        return {"tokenizer.json": self.tokenizer.to_json()}

    @classmethod
    def from_statistics(
        cls,
        config: Any,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
        *,
        seed: int | None = None,
    ) -> Self:
        """A new policy for a dataset's statistics (dicts as of `VectorStats.to_dict`).

        ``seed`` fixes its weights; without one they are drawn from torch's generator as it stands
        (a run seeds it).
        """
        with seeded(seed):
            return cls(
                config,
                embodiment,
                VectorStats.from_dict(action_stats),
                VectorStats.from_dict(proprio_stats),
            )

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> Self:
        """Inverse of `config_dict` and `extra_files` (weights are loaded afterwards)."""
        values = dict(data["config"])
        # made before there was one: it acts, and learns, as it did
        if "feature_norm" not in values:
            values |= {"feature_norm": "none", "freeze_vision_in_rl": False}
            warnings.warn(
                "this checkpoint's policy has no feature_norm: it was trained before image "
                "features were standardised, and may hardly look at its images. It acts as before; "
                "SFT anew gives one that sees.",
                stacklevel=2,
            )
        if values.get("decoding") == "autoregressive" and values.get("noise_correlation"):
            # older ones say 0.8 there, which is refused now: it biased RL
            values["noise_correlation"] = None
        require_known(values, cls.config_class)
        return cls(
            cls.config_class(**values),
            embodiment,
            VectorStats.from_dict(data["action_stats"]),
            VectorStats.from_dict(data["proprio_stats"]),
            WordTokenizer.from_json(files["tokenizer.json"]),
        )

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
