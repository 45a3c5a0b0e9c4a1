"""The vision-language trunk that the small VLA policies share: cameras, instruction and
proprioception become a prefix.

Parts and order are those of OpenVLA (arXiv 2406.09246): ViT → projector → Llama. A policy puts its
own head on top: action tokens (`policies.nano_vla`) or an action expert that reads the prefix's
keys and values (`policies.denoising`).

Prefix: image tokens of each camera | instruction tokens | proprio token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from policies.cameras import named_cameras
from policies.normalization import VectorStats
from policies.tokenizer import PAD_ID, WordTokenizer
from policies.trunk.llama import MASKED, LlamaTrunk, mlp, native_bfloat16, parameter
from policies.trunk.modules import Modules
from policies.trunk.vision import FeatureNorm, VisionTower, conditioned, merge_tokens
from vla_rl.errors import ConfigError, EmbodimentMismatch
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
        self._encoded: dict[str, list[int]] = {}
        self.keeps_image_tokens = False
        self.rank, self.ranks = 0, 1  # of those that learn together

        d = config.llm_width
        self.cameras = self._chosen_cameras()
        self._build_vision(d)
        text = config.instruction_tokens or config.instruction_length
        self.prefix_length = sum(self.camera_tokens) + text + int(config.use_proprio)
        self.sequence_length = self.prefix_length + positions

        self.trunk = LlamaTrunk(config, self.tokenizer.vocab_size, self.sequence_length)
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

    def _chosen_cameras(self) -> tuple[Any, ...]:
        return named_cameras(self.config.cameras, self.embodiment) or self.embodiment.cameras

    def _build_vision(self, d: int) -> None:
        config = self.config
        sizes = [(camera.height, camera.width) for camera in self.cameras]
        self.shared_vision = config.share_vision and len(set(sizes)) == 1
        self.vision = Modules(
            VisionTower(config, *size) for size in (sizes[:1] if self.shared_vision else sizes)
        )
        self.grids = [config.grid(*size) for size in sizes]
        for camera in self.cameras:
            config.check_camera(camera.name, camera.height, camera.width)
        if config.film:  # from 0, so that words which no demonstration had say nothing
            self.film_words = nn.Embedding(self.tokenizer.vocab_size, d, padding_idx=PAD_ID)
            nn.init.zeros_(self.film_words.weight)
        self.camera_tokens = [g[0] * g[1] // config.merge**2 for g in self.grids]
        features = config.vit_width * config.merge**2
        self.projector = nn.ModuleList(mlp(features, d, d) for _ in self.vision)
        self.image_positions = parameter(sum(self.camera_tokens), d, std=0.1)
        self.feature_norms = Modules()
        if config.feature_norm != "none":
            self.feature_norms.extend(
                FeatureNorm(n, d, config.feature_norm) for n in self.camera_tokens
            )

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

    def _images(self, observation: Observation) -> list[Tensor]:
        """The chosen cameras' images uint8 [b 3 H W] (channels-last in memory) on the policy's
        device."""
        images = []
        for camera in self.cameras:
            image = observation.images.get(camera.name)
            if image is None or tuple(image.shape[1:]) != (camera.height, camera.width, 3):
                got = {name: tuple(value.shape[1:]) for name, value in observation.images.items()}
                raise EmbodimentMismatch(
                    f"the policy reads camera {camera.name} at {camera.height}x{camera.width}x3, "
                    f"but the observation has {got}: use an env with the cameras of embodiment "
                    f"{self.embodiment.name}, or make the policy for the cameras of this env"
                )
            images.append(image.to(self.device, non_blocking=True).permute(0, 3, 1, 2))
        return images

    def _text_ids(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Ids int64 [u T] of the distinct instructions, and which of them each row has [b]."""
        distinct = {text: i for i, text in enumerate(dict.fromkeys(instructions))}
        for text in distinct:
            if text not in self._encoded:
                self._encoded[text] = self.tokenizer.encode(text, self.config.instruction_length)
        ids = torch.tensor([self._encoded[text] for text in distinct])
        rows = torch.tensor([distinct[text] for text in instructions])
        return ids.to(self.device), rows.to(self.device)

    @contextlib.contextmanager
    def learning_features(self, valid: Tensor) -> Iterator[None]:
        """Within the block a policy in training mode standardises image tokens by the batch and
        keeps the statistics.

        ``valid`` bool [b h]: where several ranks learn together, a row without any control step
        only fills up a share.
        """
        for norm in self.feature_norms:
            norm.learning, norm.counted = self.training, valid.any(1)
        try:
            yield
        finally:
            for norm in self.feature_norms:
                norm.learning, norm.counted = False, None

    def _projected(self, observation: Observation) -> list[Tensor]:
        """Each camera's image tokens [b N d] as the projector gives them."""
        images = self._images(observation)
        groups = [torch.cat(images)] if self.shared_vision else images
        said = None
        if self.config.film:
            ids, rows = self._text_ids(observation.instruction)
            said = (
                self.film_words(ids)
                .sum(1)[rows]
                .repeat(len(images) if self.shared_vision else 1, 1)
            )
        outputs = []
        for tower, projector, pixels, grid in zip(
            self.vision, self.projector, groups, self.grids, strict=False
        ):
            with conditioned(tower, said):
                x = tower(self._normalized_pixels(pixels))
            outputs.append(projector(merge_tokens(x, grid, self.config.merge)))
        return list(outputs[0].chunk(len(images))) if self.shared_vision else outputs

    def image_tokens(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Standardised image tokens float32 [b N d] of all cameras: those that ``replay`` kept,
        where it did."""
        if replay is not None and IMAGE_TOKENS in replay:
            return replay[IMAGE_TOKENS].to(self.device)
        with self._autocast():
            outputs = self._projected(observation)
        if self.feature_norms:
            outputs = [norm(x) for norm, x in zip(self.feature_norms, outputs, strict=True)]
        return torch.cat(outputs, dim=1).float()

    @torch.no_grad()
    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: all image tokens (half precision, flat),
        standardised proprio, and the mean embedding of the instruction's words."""
        visual = self.image_tokens(observation).flatten(1).half()
        return {"visual": visual, **self.blind_features(observation)}

    @torch.no_grad()
    def blind_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`."""
        ids, rows = self._text_ids(observation.instruction)
        self._require_proprio(observation)
        said = (ids != PAD_ID).float()[..., None]
        text = (self.trunk.llama.embed_tokens(ids) * said).sum(1) / said.sum(1).clamp(min=1.0)
        return {"state": self._standardized(observation.proprio), "text": text.float()[rows]}

    def _tokens_of(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Image tokens out of `frame_features`, as a decision's replay holds them."""
        return {
            IMAGE_TOKENS: features["visual"].float().unflatten(1, (sum(self.camera_tokens), -1))
        }

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
        for norm in self.feature_norms:
            norm.total = total

    def prepare_for_rl(self) -> None:
        """Called before RL: with ``freeze_vision_in_rl`` the vision tower and the projector stay as
        SFT left them.

        Their output then belongs to the decision: `act` keeps it in the replay, and no update
        encodes an image again.
        """
        self.keeps_image_tokens = self.config.freeze_vision_in_rl
        if self.keeps_image_tokens:
            self._freeze_vision()

    def _freeze_vision(self) -> None:
        for part in (self.vision, self.projector, *([self.film_words] if self.config.film else [])):
            part.requires_grad_(False)

    def hold_features(self) -> None:
        """See `vla_rl.interfaces.Policy`: vision, projector and the words' embedding stay as
        they are."""
        self._freeze_vision()
        self.trunk.llama.embed_tokens.requires_grad_(False)

    def _kept(self, image_tokens: Tensor) -> dict[str, Tensor]:
        """What a decision's replay holds of its images."""
        return {IMAGE_TOKENS: image_tokens} if self.keeps_image_tokens else {}

    @torch.no_grad()
    def image_token_spread(self, observation: Observation) -> float:
        """What differs between the rows' projected images as a share of all there is: near 0 the
        images are constants.

        The root of (variance over the rows / mean square), over tokens and channels, before any
        standardising.
        """
        with self._autocast():
            x = torch.cat([part.float() for part in self._projected(observation)], dim=1)
        return float((x.var(0, unbiased=False).mean() / x.square().mean().clamp(min=1e-12)).sqrt())

    @torch.inference_mode()
    def image_features(self, frames: Tensor) -> Tensor:
        """The vision tower's mean token float32 [n vit_width] for frames uint8 [n H W 3] of the
        first camera."""
        camera = self.cameras[0]
        if tuple(frames.shape[1:]) != (camera.height, camera.width, 3):
            raise EmbodimentMismatch(
                f"the policy reads images of {camera.height}x{camera.width}x3, got "
                f"{tuple(frames.shape[1:])}: encode frames of camera {camera.name}"
            )
        with self._autocast():
            pixels = self._normalized_pixels(frames.to(self.device).permute(0, 3, 1, 2))
            return self.vision[0](pixels).float().mean(1)

    def _normalized_pixels(self, pixels: Tensor) -> Tensor:
        """uint8 → [-1, 1]. Integers up to 255 and their distance to 127.5 are exact in bfloat16."""
        dtype = torch.bfloat16 if self.uses_bfloat16() else torch.float32
        return pixels.to(dtype).sub_(127.5).mul_(1 / 127.5)

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
        ids, rows = self._text_ids(observation.instruction)
        self._require_proprio(observation)
        return (
            self.image_tokens(observation, replay),
            ids,
            rows,
            observation.proprio.to(self.device),
        )

    def _require_proprio(self, observation: Observation) -> None:
        if observation.proprio.shape[1] != self.embodiment.proprio_dim:
            raise EmbodimentMismatch(
                f"the policy reads {self.embodiment.proprio_dim} proprio dimensions "
                f"({', '.join(self.embodiment.proprio_names)}), the observation has "
                f"{observation.proprio.shape[1]}"
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
        with contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
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
        known = {f.name for f in dataclasses.fields(cls.config_class)}
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
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"the checkpoint's policy config has unknown keys {unknown}: it needs "
                "a newer vla_rl"
            )
        return cls(
            cls.config_class(**values),
            embodiment,
            VectorStats.from_dict(data["action_stats"]),
            VectorStats.from_dict(data["proprio_stats"]),
            WordTokenizer.from_json(files["tokenizer.json"]),
        )

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
