"""OpenVLA and OpenVLA-OFT behind the protocols of `vla_rl.interfaces`: acting, likelihoods,
imitation, checkpoints.

Sequence (openvla-oft `modeling_prismatic.py`): BOS | patches of every camera | proprio token | rest of the prompt | action
positions. Parallel decoding (OFT, arXiv 2502.19645) puts a zero embedding at each action position (and, in the official
dialect, the embedding of the stop token behind them) and reads all tokens from one forward. A position predicts the token
after it, so the last prompt token yields the first action token. Autoregressive decoding (OpenVLA, arXiv 2406.09246) feeds
each token back, over a KV cache. Prompts of different lengths share a batch: shorter ones are padded between prompt and
action positions, the padding is masked out, and positions count only what is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.cameras import named_cameras
from policies.normalization import VectorStats
from policies.openvla import images as image_path
from policies.openvla.checkpoint import (
    PREPROCESSOR,
    STATISTICS,
    TOKENIZER,
    Source,
    check_weights,
    parse_json,
    read_source,
    read_weights,
    write_checkpoint,
)
from policies.openvla.config import Architecture, OpenVLAConfig, random_config, random_preprocessor
from policies.openvla.model import (
    KVCache,
    L1Head,
    Projector,
    ProprioProjector,
    Rope,
    ValueHead,
    VisionBackbone,
    initialise,
    make_llama,
    run_llama,
)
from policies.openvla.published import check_published
from policies.openvla.tokens import (
    STOP_ID,
    ActionCodec,
    PromptTokenizer,
    gripper_dims,
    normalize_proprio,
    read_range,
    stand_in_tokenizer,
)
from policies.trunk.features import coarse, mean_word
from policies.trunk.llama import native_bfloat16
from policies.trunk.noise import chunk_uniforms, sample_inverse_cdf
from vla_rl.errors import ConfigError, EmbodimentMismatch, MissingPackage, UserError
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput

_OWN = "vla_rl_policy"  # the key of a config.json that holds this platform's options
OWN_STATISTICS = "vla_rl"  # their name where a run computed the statistics itself


@dataclass(frozen=True)
class _Prefix:
    """All that precedes the action positions: embeddings [b P d], which columns are there [b P],
    the last of them [b]."""

    x: Tensor
    valid: Tensor
    last: Tensor
    padded: bool


class OpenVLABase(nn.Module, Policy):
    """What both kinds of head share. ``statistics`` is one entry of upstream's ``norm_stats``:
    "action" and "proprio"."""

    policy_type: str
    config_path = (_OWN, "config")
    base_key = "checkpoint"
    action_values: Tensor
    proprio_low: Tensor  # these where the policy uses proprioception
    proprio_high: Tensor
    proprio_mask: Tensor

    def __init__(
        self,
        config: OpenVLAConfig,
        embodiment: EmbodimentSpec,
        source: Source,
        statistics: tuple[str, Mapping[str, Any]],
    ):
        """The modules without weights (on the device "meta"); the class methods below fill them."""
        super().__init__()
        self.config, self.embodiment, self.source = config, embodiment, source
        self.chunk_length = config.chunk_length
        self.temperature = config.temperature
        self.unnorm_key, self.statistics = statistics[0], dict(statistics[1])
        self.architecture = Architecture.from_config(source.config, source.where)
        self.cameras = _chosen_cameras(config, embodiment)
        self._check_recorded()
        self.tokenizer = PromptTokenizer(
            source.tokenizer_json, prompt=config.prompt, dialect=config.dialect
        )
        self.codec = ActionCodec.from_statistics(
            self.statistics["action"],
            embodiment,
            self.architecture.action_bins,
            config.normalization,
            config.gripper,
            config.action_space == "unit",
            self._statistics_of("action"),
        )
        with torch.device("meta"):
            self.vision_backbone = VisionBackbone(self.architecture)
            width = self.architecture.width
            self.projector = Projector(self.vision_backbone.width, width, self.architecture.fused)
            self.language_model = make_llama(self.architecture)
            if config.use_proprio:
                self.proprio_projector = ProprioProjector(embodiment.proprio_dim, width)
            self._make_head(width)
            self.to(self.weights_dtype)
            if config.value_head:
                self.value_head = ValueHead(width)
        self.rope = Rope(self.architecture)
        self.register_buffer("action_values", self.codec.table(), persistent=False)
        constants = image_path.normalization(
            source.preprocessor, len(self.architecture.towers), source.beside(PREPROCESSOR)
        )
        for i, (mean, std) in enumerate(constants):
            self.register_buffer(f"pixel_mean_{i}", mean, persistent=False)
            self.register_buffer(f"pixel_std_{i}", std, persistent=False)
        if config.use_proprio:
            for name, values in zip(("low", "high", "mask"), self._proprio_range(), strict=True):
                self.register_buffer(f"proprio_{name}", values, persistent=False)

    def _make_head(self, width: int) -> None:
        """Modules of the head besides the language model's own."""

    # --------------------------------------------------------------------------------- construction
    @classmethod
    def from_published(cls, config: OpenVLAConfig, embodiment: EmbodimentSpec) -> Any:
        """The policy of ``config.checkpoint`` as it was published, for acting or as the start of
        RL."""
        if not config.checkpoint:
            raise ConfigError(
                "policy.checkpoint is empty: give the folder of an OpenVLA checkpoint, or train "
                "one first (phases=[sft,...])"
            )
        source = read_source(config.checkpoint, config.dialect)
        policy = cls(config, embodiment, source, source.choose_statistics(config.unnorm_key))
        check_published(
            config,
            source,
            policy.unnorm_key,
            embodiment,
            l1="action_head" in dict(policy.named_children()),
        )
        policy._load_published(new_parts=("value_head",))
        return policy._finish()

    @classmethod
    def from_pretrained(cls, folder: Path | str, embodiment: EmbodimentSpec, **options: Any) -> Any:
        """`from_published` with the options of `OpenVLAConfig` as keywords."""
        return cls.from_published(
            OpenVLAConfig(**{**options, "checkpoint": str(folder)}), embodiment
        )

    @classmethod
    def from_statistics(
        cls,
        config: OpenVLAConfig,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
        *,
        seed: int | None = None,
        device: str = "cpu",
    ) -> Any:
        """A policy to be trained on a dataset, from ``config.checkpoint`` or with random weights.

        With ``config.unnorm_key`` the checkpoint's own statistics stay in use; else they are the
        dataset's. Parts that the checkpoint does not have start from random weights.
        """
        source = (
            read_source(config.checkpoint, config.dialect)
            if config.checkpoint
            else random_source(config)
        )
        if config.checkpoint and config.unnorm_key:
            statistics = source.choose_statistics(config.unnorm_key)
        else:
            of_data = (VectorStats.from_dict(action_stats), VectorStats.from_dict(proprio_stats))
            statistics = (OWN_STATISTICS, statistics_of(config, embodiment, *of_data))
            source = dataclasses.replace(source, statistics_from="the dataset")
        policy = cls(config, embodiment, source, statistics)
        with contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            if config.checkpoint:
                policy._load_published(new_parts=("value_head", "proprio_projector", "action_head"))
            else:
                policy._materialise(device)
            return policy._finish()

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> Any:
        """Inverse of `config_dict` and `extra_files`; weights are loaded afterwards, by
        `load_state_dict`."""
        own = data[_OWN]
        if not isinstance(own, Mapping) or not isinstance(own["config"], Mapping):
            raise ConfigError(
                f"the checkpoint's config.json has no object {_OWN}.config: it is "
                "damaged, use an earlier one"
            )
        known = {f.name for f in dataclasses.fields(OpenVLAConfig)}
        unknown = sorted(set(own["config"]) - known)
        if unknown:
            raise ConfigError(
                f"the checkpoint's policy config has unknown keys {unknown}: it needs "
                "a newer vla_rl"
            )
        try:
            config = OpenVLAConfig(**own["config"])
        except TypeError as error:
            raise ConfigError(
                f"the checkpoint's config.json has {_OWN}.config of wrong types: {error}"
            ) from error
        upstream = {
            k: v
            for k, v in data.items()
            if k not in (_OWN, "policy_type", "format", "vla_rl_version")
        }
        statistics = parse_json(files[STATISTICS], f"the checkpoint's {STATISTICS}")
        preprocessor = parse_json(files[PREPROCESSOR], f"the checkpoint's {PREPROCESSOR}")
        companions = {
            k: v for k, v in files.items() if k not in (STATISTICS, PREPROCESSOR, TOKENIZER)
        }
        folder = Path(config.checkpoint) if config.checkpoint else None
        source = Source(
            upstream,
            preprocessor,
            statistics,
            files[TOKENIZER],
            companions,
            folder,
            f"the checkpoint's {STATISTICS}",
        )
        policy = cls(config, embodiment, source, source.choose_statistics(own["unnorm_key"]))
        if config.save_trained_only:
            policy._load_published(new_parts=("value_head", "proprio_projector", "action_head"))
        else:
            policy._materialise("cpu", random=False)
        return policy._finish()

    def _modules_with_weights(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, child) for name, child in self.named_children() if name != "rope")

    def _materialise(
        self, device: str, *, random: bool = True, only: Sequence[str] | None = None
    ) -> None:
        """Give memory to modules that have none yet, with random weights or with whatever lies
        there."""
        if self.config.chosen_image_path == "jpeg_lanczos":
            # whatever has weights is going to act: say now what is missing
            image_path.jpeg_decoder()
        for name, module in self._modules_with_weights():
            if only is None or name in only:
                module.to_empty(device=device)
                if random:
                    initialise(module)
        self._remake_rotary()
        for name, buffer in list(self.named_buffers()):
            if device != "meta" and not name.startswith(("language_model.", "vision_backbone.")):
                owner = self.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], buffer.to(device))

    def _remake_rotary(self) -> None:
        """transformers' own table of angles is no weight; made on "meta" it would stay empty."""
        llama = self.language_model.model
        llama.rotary_emb = type(llama.rotary_emb)(llama.config)

    def _load_published(self, new_parts: Sequence[str]) -> None:
        folder = Path(self.config.checkpoint)
        stored = read_weights(folder, self.weights_dtype)
        stored |= {
            name: tensor.float()
            for name, tensor in stored.items()
            if name.startswith("value_head.")
        }
        self._check_parts(stored, folder)
        own = self.state_dict()
        absent = [
            p
            for p in new_parts
            if hasattr(self, p) and not any(name.startswith(f"{p}.") for name in stored)
        ]
        never_computed = {id(p) for p in self.vision_backbone.unused_parameters()}
        unused = {name for name, p in self.named_parameters() if id(p) in never_computed}
        optional = unused | {name for name in own if name.partition(".")[0] in absent}
        check_weights(stored, own, optional, folder)
        stored |= {
            name: torch.zeros(own[name].shape, dtype=self.weights_dtype)
            for name in unused - stored.keys()
        }
        super().load_state_dict(stored, strict=False, assign=True)
        self._materialise("cpu", only=absent)

    def _check_parts(self, stored: Mapping[str, Tensor], folder: Path) -> None:
        """Parts that the checkpoint has and this policy would leave out change what the model
        computes."""
        has_proprio = any(name.startswith("proprio_projector.") for name in stored)
        if has_proprio and not self.config.use_proprio:
            raise UserError(
                f"{folder} was trained with proprioception (it has a proprio_projector): set "
                "policy.use_proprio=true"
            )
        if any(name.startswith("action_head.") for name in stored) and "action_head" not in dict(
            self.named_children()
        ):
            raise UserError(
                f"{folder} has an L1 action head, policy.type={self.policy_type} reads tokens: set "
                "policy.type=openvla_l1"
            )

    def _check_recorded(self) -> None:
        """What some checkpoints record about themselves must agree with the options."""
        recorded = self.source.config
        for key, option in (
            ("chunk_length", "chunk_length"),
            ("num_actions_chunk", "chunk_length"),
            ("use_proprio", "use_proprio"),
        ):
            mine = getattr(self.config, option)
            if recorded.get(key) is not None and recorded[key] != mine:
                raise ConfigError(
                    f"policy.{option} is {mine}, but {self.source.where} records {key} = "
                    f"{recorded[key]}: set policy.{option}={str(recorded[key]).lower()}"
                )
        pictures = recorded.get("num_images_in_input")
        if pictures is not None and pictures != len(self.cameras):
            raise ConfigError(
                f"policy.cameras has {len(self.cameras)} of the env's cameras, but "
                f"{self.source.where} records num_images_in_input = {pictures}: name as many, in "
                "the order that the checkpoint was trained with"
            )

    def _finish(self) -> Any:
        """Freeze, add LoRA, switch checkpointing on."""
        config = self.config
        for part, frozen in (
            ("vision_backbone", config.freeze_vision),
            ("language_model", config.freeze_language),
        ):
            getattr(self, part).requires_grad_(not frozen)
        for p in self.vision_backbone.unused_parameters():
            p.requires_grad_(False)
        if config.lora_rank:
            self._add_lora()
        self.vision_backbone.checkpointing = config.gradient_checkpointing
        return self

    def _add_lora(self) -> None:
        try:
            import peft
        except ImportError:
            raise MissingPackage("peft", "peft", "LoRA (policy.lora_rank > 0)") from None
        targets = self.lora_target_names()
        if not targets:
            raise ConfigError(
                f"policy.lora_targets={self.config.lora_targets} names no linear layer that is not "
                "frozen; use last parts of module names such as q_proj, v_proj, qkv, fc1"
            )
        for part in ("vision_backbone", "projector", "language_model"):
            getattr(self, part).requires_grad_(False)
        rank = self.config.lora_rank
        settings = peft.LoraConfig(
            r=rank,
            lora_alpha=self.config.lora_alpha or min(rank, 16),
            lora_dropout=self.config.lora_dropout,
            target_modules=targets,
            init_lora_weights="gaussian",
            bias="none",
        )
        trained = {id(p) for p in self.parameters() if p.requires_grad}
        peft.inject_adapter_in_model(settings, self)
        for name, p in self.named_parameters():  # peft freezes all it did not add
            p.requires_grad_(id(p) in trained or ".lora_" in name)
            if ".lora_" in name:
                p.data = p.data.float()

    def lora_target_names(self) -> list[str]:
        """Linear layers that LoRA adapts: upstream takes them all but the language model's head."""
        frozen = (["vision_backbone"] if self.config.freeze_vision else []) + (
            ["language_model"] if self.config.freeze_language else []
        )
        parts = [p for p in ("vision_backbone", "projector", "language_model") if p not in frozen]
        unused = {id(p) for p in self.vision_backbone.unused_parameters()}
        wanted = set(self.config.lora_targets)
        return [
            f"{part}.{name}"
            for part in parts
            for name, module in getattr(self, part).named_modules()
            if isinstance(module, nn.Linear)
            and name != "lm_head"
            and id(module.weight) not in unused
            and (not wanted or name.rpartition(".")[2] in wanted)
        ]

    # --------------------------------------------------------------------------------------- inputs
    @property
    def device(self) -> torch.device:
        return self.action_values.device

    @property
    def weights_dtype(self) -> torch.dtype:
        return getattr(torch, self.config.weights)

    def uses_bfloat16(self) -> bool:
        """Whether forwards multiply in bfloat16 on the present device."""
        if self.config.weights == "bfloat16" or self.config.precision == "bfloat16":
            return True
        return self.config.precision == "auto" and native_bfloat16(self.device.type)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.uses_bfloat16())

    def _statistics_of(self, part: str) -> str:
        """The statistics of ``part`` in words, with the file that they were read from."""
        return f"the {part} statistics {self.unnorm_key!r} of {self.source.statistics_from}"

    def _proprio_range(self) -> tuple[Tensor, Tensor, Tensor]:
        statistics = self.statistics.get("proprio")
        keys = ("q01", "q99") if self.config.normalization == "q99" else ("min", "max")
        if not isinstance(statistics, Mapping) or any(key not in statistics for key in keys):
            raise UserError(
                "policy.use_proprio=true needs statistics of the proprioception, "
                f"{self.source.statistics_from} has none with {' and '.join(keys)} under "
                f"{self.unnorm_key!r}: use another policy.unnorm_key, or use_proprio=false"
            )
        low, high, mask = read_range(statistics, keys, self._statistics_of("proprio"))
        if len(low) != self.embodiment.proprio_dim:
            raise EmbodimentMismatch(
                f"{self._statistics_of('proprio')} have {len(low)} dimensions, embodiment "
                f"{self.embodiment.name} has {self.embodiment.proprio_dim} "
                f"({', '.join(self.embodiment.proprio_names)}): use an env of its robot"
            )
        return torch.from_numpy(low).float(), torch.from_numpy(high).float(), torch.from_numpy(mask)

    def pixels(self, observation: Observation) -> Tensor:
        """The cameras' images as the checkpoint's processor gets them: uint8 [b cameras 3 S S],
        on the policy's device."""
        size, prepared = self.architecture.image_size, []
        for camera in self.cameras:
            image = observation.images.get(camera.name)
            if (
                image is None
                or tuple(image.shape[1:]) != (camera.height, camera.width, 3)
                or image.dtype != torch.uint8
            ):
                got = {
                    name: (tuple(value.shape[1:]), str(value.dtype))
                    for name, value in observation.images.items()
                }
                raise EmbodimentMismatch(
                    f"the policy reads camera {camera.name} as uint8 "
                    f"{camera.height}x{camera.width}x3, but the observation has {got}: use an env "
                    f"with the cameras of embodiment {self.embodiment.name}, or set policy.cameras"
                )
            prepared.append(
                image_path.prepare(
                    image,
                    size,
                    path=self.config.chosen_image_path,
                    crop=self.config.center_crop,
                    rotate=self.config.rotate_images,
                    device=self.device,
                )
            )
        return torch.stack(prepared, dim=1)

    def _vision_tokens(self, pixels: Tensor) -> Tensor:
        """uint8 [b cameras 3 S S] → [b cameras·patches d]."""
        b, cameras = pixels.shape[:2]
        flat = pixels.flatten(0, 1).float() / 255
        towers = [
            ((flat - getattr(self, f"pixel_mean_{i}")) / getattr(self, f"pixel_std_{i}")).to(
                self.weights_dtype
            )
            for i in range(len(self.architecture.towers))
        ]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.freeze_vision):
            features = self.vision_backbone(towers)
        return self.projector(features).view(b, cameras * self.vision_backbone.patches, -1)

    def _prefix(self, observation: Observation, pixels: Tensor | None = None) -> _Prefix:
        if observation.proprio.shape[1] != self.embodiment.proprio_dim:
            raise EmbodimentMismatch(
                f"the policy reads {self.embodiment.proprio_dim} proprio dimensions "
                f"({', '.join(self.embodiment.proprio_names)}), the observation has "
                f"{observation.proprio.shape[1]}"
            )
        ids, lengths = self.tokenizer.batch(observation.instruction)
        self._check_length(int(lengths.max()), observation.instruction)
        padded = int(lengths.min()) < ids.shape[1]
        ids, lengths = ids.to(self.device), lengths.to(self.device)
        text = self.language_model.model.embed_tokens(ids)
        parts = [
            text[:, :1],
            self._vision_tokens(self.pixels(observation) if pixels is None else pixels),
        ]
        if self.config.use_proprio:
            proprio = normalize_proprio(
                observation.proprio.to(self.device),
                self.proprio_low,
                self.proprio_high,
                self.proprio_mask,
            )
            parts.append(self.proprio_projector(proprio.to(self.weights_dtype))[:, None])
        inserted = sum(part.shape[1] for part in parts) - 1
        x = torch.cat([part.to(text.dtype) for part in (*parts, text[:, 1:])], dim=1)
        column = torch.arange(x.shape[1], device=self.device)
        return _Prefix(x, column < (inserted + lengths)[:, None], inserted + lengths - 1, padded)

    @torch.no_grad()
    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: each camera's projected patches on a coarse grid,
        proprio (scaled as the statistics say, where they are of this robot), and the mean embedding
        of the prompt's tokens."""
        with self._autocast():
            tokens = self._vision_tokens(self.pixels(observation))
        images = tokens.view(len(tokens) * len(self.cameras), self.vision_backbone.patches, -1)
        return {"visual": coarse(images).view(len(tokens), -1), **self.blind_features(observation)}

    @torch.no_grad()
    def blind_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`."""
        # (blank: for sizes)
        ids, lengths = self.tokenizer.batch([text or "?" for text in observation.instruction])
        said = torch.arange(ids.shape[1]) < lengths[:, None]
        with self._autocast():
            text = self.language_model.model.embed_tokens(ids.to(self.device))
        proprio = observation.proprio.to(self.device)
        statistics = self.statistics.get("proprio")
        if (
            isinstance(statistics, Mapping)
            and len(statistics.get("q01", ())) == self.embodiment.proprio_dim
        ):
            low, high, mask = (x.to(self.device) for x in self._proprio_range())
            proprio = normalize_proprio(proprio, low, high, mask)
        return {"state": proprio.float(), "text": mean_word(text, said)}

    def _check_length(self, prompt: int, instructions: Sequence[str]) -> None:
        image_tokens = len(self.cameras) * self.vision_backbone.patches
        total = prompt + image_tokens + int(self.config.use_proprio) + self.action_tokens + 1
        if total > self.architecture.max_length:
            longest = max(instructions, key=len)
            raise UserError(
                f"the instruction {longest[:60]!r}… makes a sequence of {total} tokens ({prompt} "
                f"prompt, {image_tokens} image, {self.action_tokens} action), the model reads "
                f"{self.architecture.max_length}: shorten it"
            )

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, and the value head for its float32, for `vla_rl.ranks.shard`."""
        towers = (block for tower in self.vision_backbone.towers for block in tower.blocks)
        head = [self.value_head] if self.config.value_head else []
        return [*towers, *self.language_model.model.layers, *head]

    def learn_together(self, index: int, size: int, total: Callable[[Tensor], Tensor]) -> None:
        """See `vla_rl.interfaces.Policy`: nothing here depends on the rows of other
        ranks."""

    @property
    def action_tokens(self) -> int:
        return self.chunk_length * self.embodiment.action_dim

    # -------------------------------------------------------------------------------------- forward
    def _mask(self, valid: Tensor, padded: bool) -> Tensor | None:
        """Keys that each query sees; None where the attention kernel needs none."""
        if not padded:
            return None
        mask = valid[:, None, None, :]
        if self.config.causal:
            length = valid.shape[1]
            mask = mask & torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
        return mask

    def _read(self, prefix: _Prefix, behind: Tensor) -> Tensor:
        """Hidden states [b n d] that predict the n action tokens, with embeddings ``behind`` [b
        m d] after the prefix."""
        x = torch.cat([prefix.x, behind.to(prefix.x.dtype)], dim=1)
        valid = F.pad(prefix.valid, (0, behind.shape[1]), value=True)
        hidden = run_llama(
            self.language_model.model,
            self.rope,
            x,
            (valid.cumsum(1) - 1).clamp_(min=0),
            self._mask(valid, prefix.padded),
            self.config.causal,
            checkpointing=self.config.gradient_checkpointing,
        )
        first = hidden[torch.arange(len(hidden), device=hidden.device), prefix.last]
        start = prefix.x.shape[1]
        return torch.cat([first[:, None], hidden[:, start : start + self.action_tokens - 1]], dim=1)

    def _parallel(self, prefix: _Prefix) -> Tensor:
        """One forward with a zero embedding at every action position."""
        behind = prefix.x.new_zeros(len(prefix.x), self.action_tokens, prefix.x.shape[2])
        if self.config.dialect == "official":
            stop = self.language_model.model.embed_tokens(
                torch.full((len(behind), 1), STOP_ID, device=self.device)
            )
            behind = torch.cat([behind, stop.to(behind.dtype)], dim=1)
        return self._read(prefix, behind)

    def _value(self, first: Tensor) -> Tensor | None:
        """Value [b] from the hidden state [b d] that predicts the first action token."""
        return self.value_head(first.float()).float() if self.config.value_head else None

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value head's own parameters, for a learning rate of their own."""
        return self.value_head.parameters() if self.config.value_head else iter(())

    def _chunk(self, actions: Tensor) -> ActionChunk:
        return ActionChunk(
            actions, torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device)
        )

    def _check_chunk(self, actions: Tensor) -> None:
        if tuple(actions.shape[1:]) != (self.chunk_length, self.embodiment.action_dim):
            raise EmbodimentMismatch(
                f"imitation_loss got actions {tuple(actions.shape)}, this policy predicts chunks "
                f"of {self.chunk_length} x {self.embodiment.action_dim}: set policy.chunk_length "
                "to the data's"
            )

    # ---------------------------------------------------------------------------------- checkpoints
    def config_dict(self) -> dict[str, Any]:
        """Upstream's ``config.json`` with this platform's options under one key: the folder
        stays in upstream's format."""
        config = {
            k: v for k, v in self.source.config.items() if k not in ("auto_map", "norm_stats")
        }
        own = {"config": dataclasses.asdict(self.config), "unnorm_key": self.unnorm_key}
        return {
            **config,
            **self._recorded(),
            "norm_stats": {self.unnorm_key: self.statistics},
            _OWN: own,
        }

    def _recorded(self) -> dict[str, Any]:
        own = {"chunk_length": self.chunk_length, "use_proprio": self.config.use_proprio}
        return {**own, "num_images_in_input": len(self.cameras)}

    def extra_files(self) -> dict[str, str]:
        """The text files of the checkpoint: tokenizer, preprocessor, statistics."""
        return {
            **self.source.companions,
            TOKENIZER: self.source.tokenizer_json,
            PREPROCESSOR: json.dumps(self.source.preprocessor, indent=2) + "\n",
            STATISTICS: json.dumps({self.unnorm_key: self.statistics}, indent=2) + "\n",
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; with ``save_trained_only`` without what training does not change."""
        state = super().state_dict(*args, **kwargs)
        if not self.config.save_trained_only:
            return state
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def base_folder(self) -> Path | None:
        """See `vla_rl.interfaces.Policy`."""
        return Path(self.config.checkpoint) if self.config.save_trained_only else None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Inverse of `state_dict`."""
        return super().load_state_dict(
            state_dict, strict=strict and not self.config.save_trained_only, assign=assign
        )

    def save_pretrained(
        self, folder: Path | str, *, dtype: str = "bfloat16", step: int = 0
    ) -> None:
        """Write the policy in upstream's format, LoRA merged into the weights (the policy itself
        stays as it is)."""
        source = dataclasses.replace(self.source, config={**self.source.config, **self._recorded()})
        statistics = {self.unnorm_key: self.statistics}
        write_checkpoint(
            folder, source, statistics, self.merged_weights(), getattr(torch, dtype), step
        )

    @torch.no_grad()
    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under upstream's names, with LoRA's change added."""
        adapted = {
            name: module
            for name, module in self.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        for name, tensor in nn.Module.state_dict(self).items():
            if ".lora_" in name:
                continue
            owner, _, leaf = name.rpartition(".")
            plain = owner.removesuffix(".base_layer")
            if leaf == "weight" and plain != owner and plain in adapted:
                tensor = (tensor.float() + adapted[plain].get_delta_weight("default").float()).to(
                    tensor.dtype
                )
            yield f"{plain}.{leaf}", tensor

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class OpenVLA(OpenVLABase):
    """Discrete action tokens; a `LikelihoodPolicy` and an `ImitationPolicy` of `vla_rl.interfaces`.

    Sampling and every reported log-prob are on the 256 action tokens alone, at ``temperature`` (as
    SimpleVLA-RL does). `replay` holds ``action_tokens`` int16 [b h a]: indices into that slice.
    """

    log_prob_axes: tuple[str, ...] = ("control_step", "action_dim")
    policy_type = "openvla"

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return self.config.correlated_axes

    def _action_logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [b n 256] of the action tokens."""
        first = self.architecture.first_action_id
        return F.linear(
            hidden,
            self.language_model.lm_head.weight[first : first + self.architecture.action_bins],
        ).float()

    def _embed_actions(self, tokens: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(
            tokens.long() + self.architecture.first_action_id
        )

    def hidden_states(
        self, observation: Observation, tokens: Tensor | None = None, pixels: Tensor | None = None
    ) -> Tensor:
        """Hidden states [b n d] that predict the n = h·a action tokens; ``tokens`` [b h a] feed
        autoregressive decoding."""
        prefix = self._prefix(observation, pixels)
        if self.config.decoding == "parallel":
            return self._parallel(prefix)
        if tokens is None:
            raise ValueError(
                "autoregressive decoding needs the action tokens to compute hidden states"
            )
        return self._read(prefix, self._embed_actions(tokens.to(self.device).flatten(1)[:, :-1]))

    def action_logits(
        self, observation: Observation, tokens: Tensor | None = None, pixels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [b h a 256] at temperature 1 and value [b] or None, with gradient."""
        with self._autocast():
            hidden = self.hidden_states(observation, tokens, pixels)
            logits = self._action_logits(hidden)
        return logits.view(len(observation), self.chunk_length, -1, logits.shape[-1]), self._value(
            hidden[:, 0]
        )

    def value(self, observation: Observation) -> Tensor | None:
        """See `vla_rl.interfaces.Policy`: one forward, and of autoregressive decoding no
        token."""
        if not self.config.value_head:
            return None
        with self._autocast():
            prefix = self._prefix(observation)
            if self.config.decoding == "autoregressive":
                mask, deep = (
                    self._mask(prefix.valid, prefix.padded),
                    self.config.gradient_checkpointing,
                )
                positions = (prefix.valid.cumsum(1) - 1).clamp_(min=0)
                llama = self.language_model.model
                hidden = run_llama(
                    llama, self.rope, prefix.x, positions, mask, True, checkpointing=deep
                )
                return self._value(
                    hidden[torch.arange(len(hidden), device=self.device), prefix.last]
                )
            first = self._parallel(prefix)[:, 0]
        return self._value(first)

    def _choose(self, log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
        return log_probs.argmax(-1) if uniforms is None else sample_inverse_cdf(log_probs, uniforms)

    def _decode(
        self, observation: Observation, pixels: Tensor, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Autoregressive decoding over a KV cache: tokens [b n], their log-probs [b n], value
        [b]."""
        chosen, log_prob = [], []
        with self._autocast():
            prefix = self._prefix(observation, pixels)
            b, length, _ = prefix.x.shape
            text = self.architecture.text
            head = text["hidden_size"] // text["num_attention_heads"]
            shape = (b, text["num_key_value_heads"], length + self.action_tokens - 1, head)
            dtype = torch.bfloat16 if self.uses_bfloat16() else prefix.x.dtype
            cache = KVCache.empty(text["num_hidden_layers"], shape, prefix.x, dtype)
            valid = F.pad(prefix.valid, (0, self.action_tokens - 1), value=True)
            positions = (valid.cumsum(1) - 1).clamp_(min=0)
            llama = self.language_model.model
            mask = self._mask(prefix.valid, prefix.padded)
            hidden = run_llama(llama, self.rope, prefix.x, positions[:, :length], mask, True, cache)
            last = hidden[torch.arange(b, device=self.device), prefix.last]
            value = self._value(last)
            for s in range(self.action_tokens):
                log_probs = F.log_softmax(self._action_logits(last) / self.temperature, dim=-1)
                tokens = self._choose(log_probs, None if uniforms is None else uniforms[:, s])
                chosen.append(tokens)
                log_prob.append(log_probs.gather(-1, tokens[:, None]).squeeze(-1))
                if s + 1 < self.action_tokens:
                    at = length + s
                    mask = valid[:, None, None, : at + 1] if prefix.padded else None
                    x = self._embed_actions(tokens[:, None])
                    last = run_llama(
                        llama, self.rope, x, positions[:, at : at + 1], mask, True, cache
                    )[:, 0]
        return torch.stack(chosen, 1), torch.stack(log_prob, 1), value

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row, in physical units; see `vla_rl.interfaces.Policy`.

        ``seeds`` [b] need to differ between decisions as well as between rows. Without them torch's
        global generator draws them. Deterministic: the most likely of the 256 action tokens.
        """
        b, h, a = len(observation), self.chunk_length, self.embodiment.action_dim
        uniforms = None
        if not deterministic:
            seeds = torch.randint(2**62, (b,)).tolist() if seeds is None else seeds
            if len(seeds) != b:
                raise ValueError(f"act got {len(seeds)} seeds for {b} observations")
            uniforms = (
                chunk_uniforms(seeds, h, a, self.config.noise_correlation)
                .flatten(1)
                .to(self.device)
            )
        pixels = self.pixels(observation)
        if self.config.decoding == "autoregressive":
            tokens, log_prob, value = self._decode(observation, pixels, uniforms)
        else:
            logits, value = self.action_logits(observation, pixels=pixels)
            log_probs = F.log_softmax(logits.flatten(1, 2) / self.temperature, dim=-1)
            tokens = self._choose(log_probs, uniforms)
            log_prob = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        tokens = tokens.view(b, h, a)
        return PolicyOutput(
            chunk=self._chunk(self.decode_actions(tokens)),
            behavior_log_prob=log_prob.view(b, h, a),
            replay={
                "action_tokens": tokens.to(torch.int16),
                **({"pixels": pixels} if self.config.replay_pixels else {}),
            },
            value=value,
        )

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-prob and entropy [b h a] of stored ``action_tokens`` at the sampling temperature,
        with gradient."""
        tokens = replay["action_tokens"].to(self.device).long()
        pixels = replay["pixels"].to(self.device) if "pixels" in replay else None
        logits, value = self.action_logits(observation, tokens, pixels)
        log_probs = F.log_softmax(logits / self.temperature, dim=-1)
        return PolicyEvaluation(
            log_prob=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            value=value,
        )

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Action tokens int64 [b h a] of physical actions."""
        return self.codec.encode(actions).to(self.device)

    def decode_actions(self, tokens: Tensor) -> Tensor:
        """Physical actions float32 [b h a] of action tokens."""
        dims = torch.arange(self.embodiment.action_dim, device=tokens.device)
        return self.action_values[dims, tokens.long()]

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Cross entropy per action token over the whole vocabulary, as upstream trains (temperature
        1), over valid steps.

        Metrics: ``nll`` (nats per token), ``accuracy`` (the most likely action token equals the
        label), ``mae`` (its action against the true one, physical units), ``entropy`` (nats per
        token, on the action tokens).
        """
        self._check_chunk(actions)
        actions = actions.to(self.device)
        tokens = self.encode_actions(actions)
        weight = valid.to(self.device, torch.float32)[..., None].expand_as(actions)
        weight = weight / weight.sum().clamp(min=1.0)
        with self._autocast():
            hidden = self.hidden_states(observation, tokens)
            logits = self.language_model.lm_head(hidden).float().view(*tokens.shape, -1)
        first = self.architecture.first_action_id
        nll = F.cross_entropy(
            logits.flatten(0, 2), (tokens + first).flatten(), reduction="none"
        ).view_as(weight)
        loss = (nll * weight).sum()
        with torch.no_grad():
            log_probs = F.log_softmax(
                logits[..., first : first + self.architecture.action_bins], dim=-1
            )
            best = log_probs.argmax(-1)
            metrics = torch.stack(
                [
                    loss,
                    ((best == tokens) * weight).sum(),
                    ((self.decode_actions(best) - actions).abs() * weight).sum(),
                    (-(log_probs.exp() * log_probs).sum(-1) * weight).sum(),
                ]
            ).tolist()
        return loss, dict(zip(("nll", "accuracy", "mae", "entropy"), metrics, strict=True))


class OpenVLAL1(OpenVLABase):
    """OpenVLA-OFT with its L1 regression head: acting and imitation. It has no likelihood, so RL
    needs `OpenVLA`."""

    policy_type = "openvla_l1"

    def _make_head(self, width: int) -> None:
        if self.config.decoding != "parallel":
            raise ConfigError(
                "policy.type=openvla_l1 reads all actions from one forward: set "
                "policy.decoding=parallel"
            )
        self.action_head = L1Head(width, self.embodiment.action_dim)

    def normalized_actions(self, observation: Observation) -> Tensor:
        """The head's output float32 [b h a], with gradient."""
        with self._autocast():
            hidden = self._parallel(self._prefix(observation))
            return self.action_head(hidden.to(self.weights_dtype), self.chunk_length).float()

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row, in physical units. There is nothing to sample; the reported
        log-prob is 0."""
        actions = self._physical(self.normalized_actions(observation))
        return PolicyOutput(
            self._chunk(actions), behavior_log_prob=actions.new_zeros(len(observation)), replay={}
        )

    def _physical(self, normalized: Tensor) -> Tensor:
        values = self.codec.to_physical(normalized.detach().cpu().double().numpy())
        return torch.from_numpy(values).to(self.device, torch.float32)

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Mean absolute error of normalised actions over valid steps; metric ``mae`` is that in
        physical units."""
        self._check_chunk(actions)
        labels = torch.from_numpy(self.codec.to_normalized(actions.cpu().numpy())).to(
            self.device, torch.float32
        )
        weight = valid.to(self.device, torch.float32)[..., None].expand_as(labels)
        weight = weight / weight.sum().clamp(min=1.0)
        predicted = self.normalized_actions(observation)
        loss = ((predicted - labels).abs() * weight).sum()
        mae = ((self._physical(predicted) - actions.to(self.device)).abs() * weight).sum()
        return loss, {"l1": float(loss.detach()), "mae": float(mae)}


def _chosen_cameras(config: OpenVLAConfig, embodiment: EmbodimentSpec) -> tuple[Any, ...]:
    return named_cameras(config.cameras, embodiment) or embodiment.cameras[:1]


def random_source(config: OpenVLAConfig) -> Source:
    """What stands in for a checkpoint's files where ``config.architecture`` asks for random
    weights."""
    if not config.architecture:
        raise ConfigError(
            "policy.checkpoint is empty: give the folder of an OpenVLA checkpoint, or "
            "policy.architecture=nano (or 7b) for random weights"
        )
    upstream = random_config(config.architecture)
    return Source(upstream, random_preprocessor(upstream), {}, stand_in_tokenizer())


def statistics_of(
    config: OpenVLAConfig, embodiment: EmbodimentSpec, actions: VectorStats, proprio: VectorStats
) -> dict[str, Any]:
    """An entry of ``norm_stats`` from a dataset's statistics (physical units), in the model's
    convention of actions."""
    rows = {
        name: np.asarray(getattr(actions, name), dtype=np.float64)
        for name in ("low", "high", "mean", "std", "q01", "q99")
    }
    if config.action_space == "unit":
        low, high = np.asarray(embodiment.action_low), np.asarray(embodiment.action_high)
        rows = {
            n: 2 * v / (high - low) if n == "std" else 2 * (v - low) / (high - low) - 1
            for n, v in rows.items()
        }
    mask = np.ones(embodiment.action_dim, dtype=bool)
    if config.gripper == "libero":
        dims = gripper_dims(embodiment)
        mask[dims] = False
        turned = {n: v[dims] / 2 if n == "std" else (1 - v[dims]) / 2 for n, v in rows.items()}
        for name, other in (
            ("low", "high"),
            ("high", "low"),
            ("q01", "q99"),
            ("q99", "q01"),
            ("mean", "mean"),
            ("std", "std"),
        ):
            rows[name][dims] = turned[other]
    return {
        "action": {**_upstream_names(rows), "mask": mask.tolist()},
        "proprio": _upstream_names(vars(proprio)),
    }


def _upstream_names(rows: Mapping[str, Any]) -> dict[str, list[float]]:
    names = {"low": "min", "high": "max"}
    return {names.get(name, name): [float(x) for x in values] for name, values in rows.items()}
